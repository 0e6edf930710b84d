"""Import from Redis: one function per job system yields the system's delayed jobs.

Each one reads with SCAN commands, which find all that is there for the whole time, and changes nothing.
"""

import contextlib
import hashlib
import zlib
from collections.abc import Iterator
from typing import Any

import msgspec

from hadelay.client.putoptions import Put
from hadelay.client.queues import topic_of
from hadelay.importers.engine import Entry, Skipped
from hadelay.importers.pickles import PICKLE, TooMuch, Unknown, call_of, read

JSON = "application/json"
Found = Iterator[Entry | Skipped]
#: Number of elements that one SCAN command looks at (its COUNT).
_SCAN = 1_000
#: Scores from here on are Unix ms; smaller scores are Unix seconds. As seconds, the number is in the year 5138; as ms,
#: in 1973.
_SECONDS = 100_000_000_000
#: Latest due time that is imported, in Unix ms: the end of the year 9999.
_LAST_MS = 253_402_300_799_999
#: Number of low bits, with a counter, in a score of BullMQ; the bits above them are the time in ms.
_BULLMQ_BITS = 12
#: Limit, in bytes, of the uncompressed call of an RQ job; the payload of a larger call is its compressed pickle.
_MOST_INFLATED = 16 << 20
_REPEATS = "it repeats: make a schedule of it"
_NO_DATA = "its data is gone"
_NO_META = "its meta cannot be read"


def zset(redis: Any, key: str, topic: str, bodies: str | None = None) -> Found:
    """Read a sorted set that a program made itself: the score is the due time in Unix seconds or ms, the member is the
    job's id. bodies: key of a hash with the payload of each member; None: the member is also the payload."""
    for member, score in redis.zscan_iter(key, count=_SCAN):
        try:
            id = member.decode()
        except UnicodeDecodeError:
            id = hashlib.sha256(member).hexdigest()
        body = member if bodies is None else redis.hget(bodies, member)
        yield Skipped(id, _NO_DATA) if body is None else _due(id, Put(topic=topic, body=body), score)


def bullmq(redis: Any, prefix: str = "bull", topic: str | None = None) -> Found:
    """Read the delayed jobs of all queues of BullMQ. The topic is the job's queue, the payload is the job's data; the
    job's name goes into `meta`. topic: one topic for all queues; then the queue's name is put before the id, because
    each queue numbers its own jobs."""
    for key in redis.scan_iter(f"{prefix}:*:delayed", count=_SCAN):
        base = _text(key).removesuffix(":delayed")
        queue = base[len(prefix) + 1 :]
        for member, score in redis.zscan_iter(key, count=_SCAN):
            id = _text(member)
            job = redis.hgetall(f"{base}:{id}")
            if "data" not in (fields := {_text(name): value for name, value in job.items()}):
                yield Skipped(id, _NO_DATA)
            elif fields.keys() & {"rjk", "repeatJobKey"}:
                yield Skipped(id, _REPEATS)
            elif fields.keys() & {"parent", "parentKey"}:
                yield Skipped(id, "it is part of a flow")
            else:
                meta = {"name": _text(fields.get("name", b""))}
                put = Put(topic=topic or topic_of("", queue), body=fields["data"], content_type=JSON, meta=meta)
                yield _timed(id if topic is None else f"{queue}:{id}", put, score // (1 << _BULLMQ_BITS))


def sidekiq(redis: Any, prefix: str = "", topic: str | None = None) -> Found:
    """Read Sidekiq's scheduled jobs, and the jobs that wait for a retry. The topic is the job's queue, the payload is
    the job as JSON."""
    for key in ("schedule", "retry"):
        for member, score in redis.zscan_iter(f"{prefix}{key}", count=_SCAN):
            try:
                job = msgspec.json.decode(member, type=dict[str, Any])
                id, name, queue = str(job["jid"]), str(job["class"]), str(job.get("queue", "default"))
            except (msgspec.MsgspecError, KeyError):
                yield Skipped(member[:100].decode(errors="backslashreplace"), "it is no job of Sidekiq")
                continue
            put = Put(
                topic=topic or topic_of("", queue),
                body=member,
                content_type=JSON,
                meta={"class": name},
            )
            yield _due(id, put, score)


def celery(redis: Any, prefix: str = "", topic: str | None = None) -> Found:
    """Read Celery's tasks with an ETA, from queues and from workers (unacked). Topic and payload are those of hadelay's
    Celery broker, so workers with the broker `hadelay://…/PREFIX` run the tasks."""
    from hadelay.celery.messages import draft_of, keys_of

    for raw, queue in _celery_messages(redis):
        try:
            message = msgspec.json.decode(raw, type=dict[str, Any])
            id = str(message["headers"]["id"])
            draft = draft_of(message, topic or topic_of(prefix, queue), queue, None)
        except (msgspec.MsgspecError, KeyError, TypeError, ValueError, RecursionError):
            yield Skipped(raw[:100].decode(errors="backslashreplace"), "it is no task of Celery")
            continue
        if draft.at is None:
            yield Skipped(id, "it has no ETA: let a worker of Redis run it")
            continue
        draft.key = keys_of(message)[0]
        if hasattr(draft.at, "timestamp"):
            draft.at = -int(-draft.at.timestamp() * 1000 // 1)
        yield Entry(id, draft)


def _celery_messages(redis: Any) -> Iterator[tuple[bytes, str]]:
    """Messages of kombu in Redis, each with its queue: first the unacked ones, then those in queues."""
    for _, value in redis.hscan_iter("unacked", count=_SCAN):
        try:
            message, _, routing_key = msgspec.json.decode(value, type=tuple[msgspec.Raw, str, str])
        except (msgspec.MsgspecError, RecursionError):
            yield value, ""  # not a message of kombu: the caller reports that it is skipped
        else:
            yield bytes(message), routing_key
    for bound in redis.scan_iter("_kombu.binding.*", count=_SCAN):
        for binding in redis.smembers(bound):
            queue = _text(binding.split(b"\x06\x16")[-1])
            for key in (queue, *(f"{queue}\x06\x16{step}" for step in (3, 6, 9))):
                if redis.type(key) == b"list":
                    for at in range(0, redis.llen(key), _SCAN):
                        for raw in redis.lrange(key, at, at + _SCAN - 1):
                            yield raw, queue


def rq(redis: Any, topic: str | None = None) -> Found:
    """Read the jobs of rq-scheduler, and the scheduled jobs of RQ itself. The topic is the job's queue, the payload is
    its call."""
    keys = [b"rq:scheduler:scheduled_jobs", *redis.scan_iter("rq:scheduled:*", count=_SCAN)]
    for member, score in (found for key in keys for found in redis.zscan_iter(key, count=_SCAN)):
        id = _text(member)
        job = {_text(name): value for name, value in redis.hgetall(f"rq:job:{id}").items()}
        if "data" not in job:
            yield Skipped(id, _NO_DATA)
            continue
        try:
            repeats = _rq_repeats(job.get("meta", b""))
        except ValueError:
            yield Skipped(id, _NO_META)
            continue
        if repeats:
            yield Skipped(id, _REPEATS)
            continue
        body, kind = _rq_call(job["data"])
        queue = _text(job.get("origin", b"default"))
        put = Put(topic=topic or topic_of("", queue), body=body, content_type=kind)
        yield _due(id, put, score)


def _rq_repeats(meta: bytes) -> bool:
    """Whether rq-scheduler enqueues the job again and again, by the job's meta, which is a pickle or JSON. Raises
    ValueError for other bytes."""
    if not meta:
        return False
    try:
        found = msgspec.json.decode(meta) if meta[:1] == b"{" else read(meta)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    if not isinstance(found, dict):
        raise ValueError("the meta of the job is not a dict")
    return any(found.get(name) is not None for name in ("cron_string", "interval"))


def _text(name: bytes) -> str:
    """Decode a name in Redis, which may have any bytes."""
    return name.decode(errors="backslashreplace")


def _rq_call(data: bytes) -> tuple[bytes, str]:
    with contextlib.suppress(zlib.error):  # old versions of RQ do not compress the data
        inflating = zlib.decompressobj()
        inflated = inflating.decompress(data, _MOST_INFLATED)
        data = data if inflating.unconsumed_tail else inflated
    if data[:1] == b"[":
        return data, JSON
    try:
        func, instance, args, kwargs = read(data)
    except (ValueError, TypeError):
        return data, PICKLE
    return (data, PICKLE) if instance is not None else call_of(func, args, kwargs, data)


def apscheduler(redis: Any, topic: str, jobs: str = "apscheduler.jobs", times: str = "apscheduler.run_times") -> Found:
    """Read jobs with a date trigger from a Redis job store of APScheduler 3. The payload is the job's call."""
    for member, score in redis.zscan_iter(times, count=_SCAN):
        id = _text(member)
        if (data := redis.hget(jobs, member)) is None:
            yield Skipped(id, _NO_DATA)
            continue
        try:
            state = read(data)
            trigger, call = state["trigger"], (state["func"], state["args"], state["kwargs"])
        except TooMuch as error:
            yield Skipped(id, str(error))
            continue
        except (ValueError, TypeError, KeyError):
            yield Skipped(id, "it is no job of APScheduler 3")
            continue
        if not isinstance(trigger, Unknown) or type(trigger).__name__ != "DateTrigger":
            yield Skipped(id, _REPEATS)
            continue
        body, kind = call_of(*call, data)
        yield _due(id, Put(topic=topic, body=body, content_type=kind), score)


def _due(id: str, put: Put, score: float) -> Entry | Skipped:
    """Entry of a job whose score is its due time, in Unix seconds or ms."""
    return _timed(id, put, score if score >= _SECONDS else score * 1000)


def _timed(id: str, put: Put, ms: float) -> Entry | Skipped:
    """The entry of a job that is due at this Unix time in ms, which is rounded up: a message is never early."""
    if not 0 <= ms <= _LAST_MS:  # also true if the time is NaN
        return Skipped(id, "its score is no time")
    put.at = -int(-ms // 1)
    return Entry(id, put)
