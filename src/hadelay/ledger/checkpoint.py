"""Encodes and decodes the whole ledger: for checkpoints, snapshots and comparisons of replicas.

One blob holds everything that is small, and one blob per hour its HourState. `dump` returns only the hours that changed
since the last dump. Equal ledgers give equal bytes: maps are written in a fixed order, bitmaps in their one canonical
form. Derived values (leased bitmaps, generations) are not written.
"""

from dataclasses import astuple
from typing import Any

import msgpack
import numpy as np
from pyroaring import BitMap

from hadelay.codec.jobcommands import pack_spec, unpack_spec
from hadelay.errors import WAY_OUT, FatalError, HadelayError
from hadelay.ledger import access
from hadelay.ledger.bulkjob import JOB_COUNTS, BulkJob
from hadelay.ledger.grants import HELD, HeldGrant
from hadelay.ledger.hourstate import HourState, bitmap, groups
from hadelay.ledger.state import Ledger, ScheduleCounts
from hadelay.ledger.topics import PurgeMark, RedriveJob, TopicBook, TopicState
from hadelay.members import Member
from hadelay.model import Event
from hadelay.settings.cluster import Settings
from hadelay.version import FEATURE_LEVEL

VERSION = 1
#: Attributes of the ledger that are numbers, and their keys in a checkpoint's main blob: never rename them.
_NUMBERS = (
    "now_ms", "applied", "term", "chain", "level", "key_epoch", "key_epoch_ends_ms", "key_count", "key_count_before",
    "keys_dropped_early",
)  # fmt: skip
#: Attributes of a topic in the order in which they are written. This order never changes; new attributes go to the end.
_TOPIC = (
    "number", "name", "exists", "generation", "config", "open", "leased", "tombstoned", "published", "bytes",
    "spent_ns", "dead", "settled", "lives", "floor", "dead_mark_ms", "alerted",
)  # fmt: skip
#: Attributes of a topic that are written after _TOPIC if the topic has messages in groups, or one of _LATER. Of _LATER,
#: those up to the last that is not 0 are written.
_GROUPS = ("group_rows", "grouped", "blocked")
_LATER = ("used_ms", "dropped", "born")
_REDRIVE_JOB = ("upto_ms", "rate", "start_ms", "count", "after")
_MARK = ("generation", "at_ms", "ready")
_JOB = (
    "number", "node", "by", "request", "began_ms", "cursor", "ended_ms", "stopped", *JOB_COUNTS,
)  # fmt: skip
_GRANT = ("term", "seq", "consumer", "consumer_number", "request_id", "granted_at_ms")


def dump(ledger: Ledger, *, everything: bool = False) -> tuple[bytes, dict[int, bytes]]:
    """Encode a ledger: (main blob, hour → blob of each hour changed since the last dump, b"" if deleted).

    everything: all hours, and equal bytes for equal ledgers, for comparing replicas.
    """
    touched = set(ledger.hours) if everything else ledger.touched
    hours = {h: dump_hour(ledger.hours[h], canonical=everything) if h in ledger.hours else b"" for h in sorted(touched)}
    if not everything:
        ledger.touched = set()
    return dump_main(ledger), hours


def dump_main(ledger: Ledger) -> bytes:
    return _packed(
        {
            "version": VERSION,
            **{name: getattr(ledger, name) for name in _NUMBERS},
            "group": ledger.group,
            "cursor": ledger.cursor,
            "sweep": ledger.sweep,
            "named": sorted(ledger.named.items()),
            "settings": ledger.settings.to_map(),
            "topics": [_dump_topic(topic) for topic in ledger.topics.all],
            "grants": [_dump_grant(grant) for grant in ledger.grants.values()],
            "requests": [[consumer, list(map(list, r.items()))] for consumer, r in ledger.requests.items()],
            "incarnations": sorted(ledger.incarnations.items()),
            "retired": _dump_bits(ledger.retired, True),
            **access.dump(ledger),
            **({"jobs": [ledger.jobs_begun, *map(_dump_job, ledger.jobs.values())]} if ledger.jobs else {}),
            **({"schedules": list(astuple(ledger.schedules))} if ledger.schedules != ScheduleCounts() else {}),
            **({"grouped_dead": ledger.grouped_dead} if ledger.grouped_dead else {}),
            **({"unique_count": ledger.unique_count} if ledger.unique_count else {}),
            **({"filled_copies": ledger.filled_copies} if ledger.filled_copies else {}),
            **({"members": [ledger.members_index, *ledger.members]} if ledger.members else {}),
        }
    )


def dump_hour(hour_state: HourState, *, canonical: bool = False) -> bytes:
    """Encode the state of an hour. canonical: equal states give equal bytes, which is slower for large hours."""
    seconds = hour_state.open_seconds
    unfilled = [[number, _dump_bits(bits, canonical)] for number, bits in sorted(hour_state.unfilled.items())]
    fills = [_dump_bits(hour_state.filled, canonical), unfilled] if hour_state.filled or unfilled else []
    return _packed(
        [
            _dump_bits(hour_state.settled, canonical),
            _dump_bits(hour_state.late, canonical),
            [[event, _dump_bits(hour_state.others[event], canonical)] for event in sorted(hour_state.others)],
            None if seconds is None else seconds.astype("<u4").tobytes(),
            hour_state.returned,
            hour_state.carried,
            hour_state.retire_at,
            hour_state.keyed,
            hour_state.settled_at_ms,
            _dump_bits(hour_state.topics, canonical),
            *([_dump_bits(hour_state.blocked, canonical)] if hour_state.blocked or hour_state.results or fills else []),
            *([hour_state.results] if hour_state.results or fills else []),
            *fills,
        ]
    )


def _packed(value: Any) -> bytes:
    blob: bytes = msgpack.packb(value)
    return blob


def _dump_bits(bits: BitMap, canonical: bool) -> bytes:
    # Equal sets must give equal bytes: build the bitmap anew, as its inner form may depend on earlier changes.
    packed = BitMap(bits.to_array()) if canonical else bits.copy()
    packed.run_optimize()
    return bytes(packed.serialize())


def _dump_topic(topic: TopicState) -> list[Any]:
    job = None if topic.redrive is None else _values(topic.redrive, _REDRIVE_JOB)
    later = _values(topic, _LATER)
    while later and not later[-1]:
        later.pop()
    groups = [_values(topic, _GROUPS)] if topic.group_rows or later else []
    return [*_values(topic, _TOPIC), job, [_values(mark, _MARK) for mark in topic.marks], *groups, *later]


def _dump_grant(grant: HeldGrant) -> list[Any]:
    more = [sorted(grant.progress.items())] if grant.progress else []
    return [*_values(grant, _GRANT), grant.rows.tobytes(), *more]


def _dump_job(job: BulkJob) -> list[Any]:
    return [pack_spec(job.spec), sorted(job.topics.items()), *_values(job, _JOB)]


def _load_job(values: list[Any]) -> BulkJob:
    spec, topics, *plain = values
    job = BulkJob(spec=unpack_spec(spec), topics=dict(topics), **dict(zip(_JOB, plain, strict=True)))
    hour, index = job.cursor
    job.cursor = (hour, index)
    return job


def _values(of: Any, names: tuple[str, ...]) -> list[Any]:
    return [getattr(of, name) for name in names]


def _load_topic(values: list[Any]) -> TopicState:
    plain, (job, marks, *more) = values[: len(_TOPIC)], values[len(_TOPIC) :]
    topic = TopicState(**dict(zip(_TOPIC, plain, strict=True)))
    if more:
        topic.group_rows, topic.grouped, topic.blocked = more[0]
        for name, value in zip(_LATER, more[1:], strict=False):
            setattr(topic, name, value)
    if job is not None:
        topic.redrive = RedriveJob(*job)
        died_ms, first_id = topic.redrive.after
        topic.redrive.after = (died_ms, first_id)
    topic.marks = [PurgeMark(*mark) for mark in marks]
    return topic


def load(ledger: Ledger, main: bytes, hours: dict[int, bytes]) -> None:
    """Fill a new ledger, whose store, tables and names have the checkpoint's applied index. Raises FatalError for blobs
    of another version, and OSError for disk errors; checksums were verified before."""
    try:
        _fill(ledger, _whole(main), hours)
        ledger.touched = set()
    except (HadelayError, OSError):
        raise
    except Exception as error:  # decoders of numbers, bitmaps and arrays raise errors of many types
        raise _unreadable(f"{type(error).__name__}: {error}") from error


def _whole(main: bytes) -> dict[str, Any]:
    try:
        whole = msgpack.unpackb(main, strict_map_key=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise _unreadable(str(error)) from error
    if not isinstance(whole, dict):
        raise FatalError(f"the checkpoint's state is not a MessagePack map; {WAY_OUT}")
    return whole


def _unreadable(why: str) -> FatalError:
    return FatalError(f"the checkpoint's state can't be read ({why}); {WAY_OUT}")


def _fill(ledger: Ledger, whole: dict[str, Any], hours: dict[int, bytes]) -> None:
    if whole["version"] != VERSION or whole["level"] > FEATURE_LEVEL or whole["group"] != ledger.group:
        raise FatalError(
            f"the checkpoint has version {whole['version']}, level {whole['level']} and group {whole['group']}; "
            f"this program reads version {VERSION} and level {FEATURE_LEVEL} at most, and the node is of group "
            f"{ledger.group}: use a newer hadelay, or the data directory of this node"
        )
    for name in _NUMBERS:
        setattr(ledger, name, whole[name])
    ledger.cursor, ledger.sweep = tuple(whole["cursor"]), tuple(whole["sweep"])
    ledger.named = dict(whole["named"])
    ledger.settings = Settings.from_map(whole["settings"])
    ledger.topics = TopicBook()
    for values in whole["topics"]:
        ledger.topics.add(_load_topic(values))
    ledger.incarnations = dict(whole["incarnations"])
    ledger.members_index, *members = whole.get("members", [0])
    ledger.members = tuple(Member(*member) for member in members)
    ledger.jobs_begun, *jobs = whole.get("jobs", [0])
    ledger.jobs = {job.number: job for job in map(_load_job, jobs)}
    ledger.fills = {
        number: job
        for job in ledger.jobs.values()
        if job.spec.action == "fill" and not job.ended_ms
        for number in job.topics
    }
    ledger.filled_copies = whole.get("filled_copies", 0)
    access.load(ledger, whole)
    ledger.schedules = ScheduleCounts(*whole.get("schedules", ()))
    ledger.grouped_dead, ledger.unique_count = whole.get("grouped_dead", 0), whole.get("unique_count", 0)
    ledger.retired = BitMap.deserialize(whole["retired"])
    ledger.ttl_from = ledger.unique_from = b""
    ledger.hours = {hour: _load_hour(blob) for hour, blob in sorted(hours.items()) if blob}
    grants = [
        HeldGrant(
            **dict(zip(_GRANT, values, strict=False)),
            rows=np.frombuffer(values[len(_GRANT)], HELD).copy(),
            progress=dict(*values[len(_GRANT) + 1 :]),
        )
        for values in whole["grants"]
    ]
    ledger.grants = {grant.key: grant for grant in grants}
    ledger.requests = {consumer: {rid: tuple(key) for rid, key in items} for consumer, items in whole["requests"]}
    for grant in grants:
        held = grant.rows[grant.rows["open"] == 1]
        for hour, where in groups(held["hour"]):
            ledger.hours.setdefault(hour, HourState()).leased |= bitmap(held["index"][where])
    ledger.store.set_clock(ledger.now_hour)


def for_new_cluster(main: bytes, group: int) -> bytes:
    """Adapt a checkpoint to a cluster restored from a backup: new group number, no added members, no incarnations."""
    whole = _whole(main)
    whole.pop("members", None)
    return _packed(whole | {"group": group, "incarnations": []})


def _load_hour(blob: bytes) -> HourState:
    settled, late, others, seconds, returned, carried, retire_at, keyed, at_ms, topics, *more = msgpack.unpackb(blob)
    hour_state = HourState()
    hour_state.settled, hour_state.late, hour_state.topics = map(BitMap.deserialize, (settled, late, topics))
    hour_state.others = {Event(event): BitMap.deserialize(bits) for event, bits in others}
    if seconds is not None:
        hour_state.open_seconds = np.frombuffer(seconds, "<u4").astype(np.uint32)
    hour_state.returned, hour_state.carried, hour_state.retire_at = returned, carried, retire_at
    hour_state.keyed, hour_state.settled_at_ms = keyed, at_ms
    if more:
        hour_state.blocked = BitMap.deserialize(more[0])
        hour_state.results = more[1] if len(more) > 1 else 0
        if len(more) > 2:
            hour_state.filled = BitMap.deserialize(more[2])
            hour_state.unfilled = {number: BitMap.deserialize(bits) for number, bits in more[3]}
    return hour_state
