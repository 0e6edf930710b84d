"""JOB_BEGIN, JOB_STEP and JOB_STOP: bulk jobs in apply (design: ledger/jobs/bulkjob.py).

The leader computes, the log carries the result and the expected cursor, and apply compares: a step that was proposed
twice, or by a leader of the past, finds another cursor and changes nothing.
"""

from functools import partial
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.commandtypes import SubscriptionPut
from hadelay.codec.formats import NODE, Mask, Rows
from hadelay.codec.jobcommands import (
    LAST,
    MAX_IDS,
    ON_DEAD,
    FillBegin,
    JobBegin,
    JobSpec,
    JobStep,
    JobStop,
    pack_spec,
)
from hadelay.codec.results import Done, JobBegun, Refused
from hadelay.ledger.changedrows import JOBS
from hadelay.ledger.hours.hourstate import rows_by_value
from hadelay.ledger.hours.lookup import find_entries
from hadelay.ledger.hours.transitions import Leaving, settle
from hadelay.ledger.jobs.bulkjob import BulkJob
from hadelay.ledger.jobs.bulkscan import new_due_ms
from hadelay.ledger.leases import dead
from hadelay.ledger.leases.transfers import transfer
from hadelay.ledger.limits import shares
from hadelay.ledger.messages import fills, idempotency
from hadelay.ledger.messages.changes import MAX_MOVED_BYTES, refile
from hadelay.ledger.state import Ledger
from hadelay.ledger.topics.topicchanges import MAX_GENERATION, apply_subscription_put
from hadelay.ledger.topics.topics import TopicState, by_topic
from hadelay.ledger.views.listing import states_of
from hadelay.model import MAX_RATE, NEVER_MS, SEPARATOR, Event, State
from hadelay.settings.kinds import TOPIC_NAME

#: Limit of the jobs that are kept, running and ended ones; at the limit, a new job replaces the oldest ended one.
MAX_JOBS = 100
#: Minimum rate of a job, in messages per second: a slower job would never end.
MIN_RATE = 0.01
#: Limit of the tags in a job's filter; a job with more is refused.
MAX_TAGS = 16
#: Limit of the client key prefix in a job's filter, in bytes; a job with a longer one is refused.
MAX_PREFIX = 1_024
#: Limit of a job's encoded specification, in bytes; a job with a larger one is refused.
MAX_SPEC = 8_192
_CHANGES = ("shift_ms", "at_ms", "delay_ms")
_OTHER_JOB = Refused("job_conflict", "this Idempotency-Key was used for another job: take a new key")


def _codes(*states: State) -> Mask:
    """Mask by state code (see `states_of`): True for the given states."""
    return np.array([state in states for state in (*State, None)])


_WAITING = _codes(State.SCHEDULED, State.READY, State.BLOCKED)
_LEASED, _DEAD = _codes(State.LEASED), _codes(State.DEAD)


def problem(spec: JobSpec, now_ms: int, max_delay_ms: int) -> Refused | None:
    """Refusal of an invalid specification of a job; None for a valid one."""
    if spec.action == "fill" or spec.subscription:
        return Refused("bad_job", "action: only a new subscription begins a fill")
    if spec.into and (spec.action != "transfer" or spec.into == spec.topic or not TOPIC_NAME.fullmatch(spec.into)):
        return Refused("bad_job", "into: the name of another topic, for a transfer alone")
    given = [name for name in _CHANGES if getattr(spec, name) is not None]
    if len(given) != (spec.action == "reschedule"):
        names = "shift, delay and deliver_at"
        wanted = f"takes one of {names}" if spec.action == "reschedule" else f"takes none of {names}"
        return Refused("bad_job", f"action: {spec.action} {wanted}")
    if not 0 < len(spec.topic.encode()) <= 255:
        return Refused("bad_job", "topic: the name of a topic, or a pattern such as orders-*")
    if len(spec.tags) > MAX_TAGS or len(spec.key_prefix.encode()) > MAX_PREFIX or len(pack_spec(spec)) > MAX_SPEC:
        return Refused("bad_job", f"filter: at most {MAX_TAGS} tags, and {MAX_PREFIX} bytes of a key")
    if len(spec.ids) > MAX_IDS:
        return Refused("bad_job", f"ids: {len(spec.ids)} given; at most {MAX_IDS} are allowed")
    if spec.retrying and spec.action in ON_DEAD:
        return Refused("bad_job", f"retrying: {spec.action} is for dead letters, which wait for no retry")
    if any(not 0 <= at < NEVER_MS for at in (spec.from_ms, spec.to_ms, spec.at_ms) if at is not None):
        return Refused("bad_job", "from, to: times in Unix ms")
    if spec.from_ms is not None and spec.to_ms is not None and spec.from_ms >= spec.to_ms:
        return Refused("bad_job", "filter: to must be after from")
    if spec.rate is not None and not 0 < spec.rate <= MAX_RATE:
        return Refused("bad_job", f"rate: messages per second, more than 0 and at most {MAX_RATE}")
    if spec.shift_ms == 0 or (spec.delay_ms or 0) < 0:
        return Refused("bad_job", "shift: not 0; delay: 0 or more")
    far_ms = abs(spec.shift_ms or 0) or spec.delay_ms or (spec.at_ms or 0) - now_ms
    if far_ms > max_delay_ms:
        return Refused("too_far", "that is further ahead than this cluster allows (limits.max_delay)")
    return None


def apply_begin(ledger: Ledger, command: JobBegin) -> JobBegun | Refused:
    """Begin a bulk job. The job, or a refusal that no retry could change, is remembered under the request's
    Idempotency-Key."""
    spec = command.spec
    if not command.request:
        return _judged(ledger, command)
    for job in ledger.jobs.values():
        if job.request == command.request:
            return JobBegun(job.number, True) if job.spec == spec else _OTHER_JOB
    idempotency.turn(ledger)
    key = command.request, int.from_bytes(blake2b(pack_spec(spec), digest_size=8).digest(), "little")
    earlier = idempotency.answered_before(ledger, *key, _OTHER_JOB)
    if isinstance(earlier, Refused):
        return earlier
    result = _judged(ledger, command)
    return idempotency.remember_refusal(ledger, *key, result) if isinstance(result, Refused) else result


def _judged(ledger: Ledger, command: JobBegin) -> JobBegun | Refused:
    """Begin a job whose request is no repetition, or refuse it."""
    spec = command.spec
    if (refused := problem(spec, ledger.now_ms, ledger.settings.max_delay_ms)) is not None:
        return refused
    found = (ledger.topic(name) for name in dict.fromkeys(command.topics))
    topics = [topic for topic in found if topic is not None]
    if not topics:
        return Refused("no_topic", f"there is no topic {spec.topic!r}")
    if spec.into and ledger.topic(spec.into) is None:
        return Refused("no_topic", f"into: there is no topic {spec.into!r}: create it first")
    if spec.rate is not None and spec.rate < MIN_RATE:
        return Refused("bad_job", f"rate: {spec.rate:g}; at least {MIN_RATE} messages per second")
    if (refused := _no_job(ledger, topics, command.by)) is not None:
        return refused
    return JobBegun(_begin(ledger, command, topics).number, False)


def _no_job(ledger: Ledger, topics: list[TopicState], by: str) -> Refused | None:
    """Refusal if no further job of these topics can begin now; None if one can."""
    if worn := [topic.name for topic in topics if topic.generation == MAX_GENERATION]:
        return Refused("too_many_generations", f"{worn[0]!r} was purged {MAX_GENERATION} times: use another name")
    ledger.by = by
    running = [job.by for job in ledger.jobs.values() if not job.ended_ms]
    wrong = shares.refusal(ledger, shares.JOBS, len(running), MAX_JOBS, mine=running.count(by))
    return Refused("too_many_jobs", wrong) if wrong else None


def _begin(ledger: Ledger, command: JobBegin, topics: list[TopicState]) -> BulkJob:
    if len(ledger.jobs) >= MAX_JOBS:
        oldest = next(job.number for job in ledger.jobs.values() if job.ended_ms)
        ledger.changes.note(JOBS, oldest)
        del ledger.jobs[oldest]
    for topic in topics:
        topic.generation += 1
        ledger.topics.generations[topic.number] = topic.generation
    ledger.jobs_begun += 1
    job = ledger.jobs[ledger.jobs_begun] = BulkJob(
        ledger.jobs_begun,
        command.spec,
        command.node,
        command.by,
        command.request,
        ledger.now_ms,
        {topic.number: topic.generation for topic in topics},
    )
    job.watch(partial(ledger.changes.note, JOBS, job.number))
    job.before_change()
    ledger.listener.on_topic(topics[0])  # wakes the leader, which proposes the job's steps
    return job


def apply_fill(ledger: Ledger, command: FillBegin) -> Done | Refused:
    """Create a subscription that begins with the pending messages of its topic, and begin the job that copies them. Of
    a subscription that exists, only the settings change, so a repeated request begins no second job."""
    put = SubscriptionPut(command.topic, command.subscription, command.config)
    name, topic = f"{command.topic}{SEPARATOR}{command.subscription}", ledger.topic(command.topic)
    if topic is None or ledger.topic(name) is not None:
        return apply_subscription_put(ledger, put)
    if not topic.settings.own_queue:
        text = "own_queue is false: the queue of the topic does not have all messages; set own_queue first"
        return Refused("no_own_queue", text)
    if (running := ledger.fills.get(topic.number)) is not None:
        return Refused("fill_running", f"job {running.number} still fills {running.spec.subscription!r}: wait for it")
    if (refused := _no_job(ledger, [topic], command.by)) is not None:
        return refused
    result = apply_subscription_put(ledger, put)
    if not isinstance(result, Refused):
        spec = JobSpec("fill", topic.name, subscription=name)
        begin = JobBegin(command.node, command.by, b"", [topic.name], spec)
        ledger.fills = {**ledger.fills, topic.number: _begin(ledger, begin, [topic])}
    return result


def apply_stop(ledger: Ledger, command: JobStop) -> Done | Refused:
    """End a job early. Messages that the job has changed stay changed."""
    job = ledger.jobs.get(command.job)
    if job is None:
        return Refused("no_job", f"there is no job {command.job}")
    if job.ended_ms:
        return Done(False)
    ledger.end_job(job, stopped=True)
    return Done()


def queued(ledger: Ledger, job: BulkJob) -> bool:
    """Whether the job waits for an earlier job of the same topics."""
    return any(other.number < job.number and job.waits_for(other) for other in ledger.jobs.values())


def apply_step(ledger: Ledger, step: JobStep) -> Done | Refused:
    """Change the next messages of a job, and move its cursor."""
    job = ledger.jobs.get(step.job)
    if job is None or job.ended_ms or job.cursor != step.expected:
        return Refused("stale", f"job {step.job} is not at {step.expected}")
    if queued(ledger, job):
        return Refused("stale", f"job {step.job} waits for another job")
    fills_up, ids = job.spec.action == "fill", np.array(step.ids, np.uint64)
    found = fills.entries_of(ledger, ids) if fills_up else _present(ledger, ids)
    sizes = [int(rows["size"].sum(dtype=np.int64)) for _, rows in found]
    if job.spec.action not in ("cancel", "delete_dead") and len(ids) > 1 and sum(sizes) > MAX_MOVED_BYTES:
        return Refused("too_large", f"a step moves at most {MAX_MOVED_BYTES} bytes of records")
    if fills_up:
        fills.step(ledger, job, found)
    else:
        job.settled += len(ids) - sum(len(rows) for _, rows in found)
    for hour, rows in () if fills_up else found:
        _judge(ledger, job, Leaving(hour, rows, node=ledger.number_of(NODE, job.node)))
    job.cursor = step.cursor
    if step.cursor == LAST:
        ledger.end_job(job)
    return Done()


def _present(ledger: Ledger, ids: NDArray[np.uint64]) -> list[tuple[int, Rows]]:
    """Present entries of these messages as (hour, INDEX rows); messages that are deleted are left out."""
    hours, indexes = find_entries(ledger, ids.tolist())
    found = []
    for hour, where in rows_by_value(hours):
        if hour >= 0:
            rows = ledger.store.entries(hour, indexes[where].astype(np.uint32))
            found.append((hour, rows[rows["first_id"] == ids[where]]))
    return found


def _judge(ledger: Ledger, job: BulkJob, leaving: Leaving) -> None:
    """Change those messages of one hour that the job may still change, and add all given messages to the job's
    counts."""
    rows, on_dead = leaving.rows, job.spec.action in ON_DEAD
    codes = states_of(ledger, leaving.hour, rows, ledger.now_ms)
    meant = rows["generation"] < job.generations(len(ledger.topics.all))[rows["topic"]]
    open_ = _DEAD[codes] if on_dead else _WAITING[codes]
    acts = meant & open_
    leased = meant & _LEASED[codes] & (not on_dead)
    over = ~(open_ | _WAITING[codes] | _LEASED[codes])
    done = _change(ledger, job, leaving.some(acts)) if acts.any() else 0
    job.done += done
    job.refused += int(acts.sum()) - done
    job.leased += int(leased.sum())
    job.settled += int(over.sum())
    job.moved += int((~(acts | leased | over)).sum())


def _change(ledger: Ledger, job: BulkJob, leaving: Leaving) -> int:
    """Cancel, transfer, delete, redrive or reschedule messages; returns the number of changed messages. The other
    messages count as `refused` (see BulkJob)."""
    rows = leaving.rows
    if job.spec.action == "cancel":
        settle(ledger, leaving, Event.CANCELLED)
        return len(rows)
    if job.spec.action == "transfer":
        return transfer(ledger, leaving, job.spec.into)
    if job.spec.action == "delete_dead":
        return dead.delete_letters(ledger, leaving)
    if job.spec.action == "redrive":
        numbers = [number for number, _ in by_topic(rows["topic"])]
        letters = [(ledger.topics[number], leaving.some(rows["topic"] == number)) for number in numbers]
        return sum(dead.redrive_letters(ledger, topic, some) for topic, some in letters)
    now_ms, before = ledger.now_ms, rows["deliver_at_ms"]
    wanted = new_due_ms(job.spec, job.began_ms, before)
    allowed = wanted <= now_ms + ledger.settings.max_delay_ms
    moves = allowed & ((before > now_ms) | (wanted > now_ms)) & (wanted != before)
    if moves.any():
        some = leaving.some(moves)
        refile(ledger, some, np.maximum(wanted[moves], now_ms), _generations(ledger, job, some.rows))
    return int(allowed.sum())


def _generations(ledger: Ledger, job: BulkJob, rows: Rows) -> NDArray[np.uint16]:
    """Generations for the new entries of messages that a job changes: the job's generation, or that of the topic's
    latest partial purge if it is higher, so that this purge does not cancel the changed messages."""
    found = np.zeros(len(rows), np.uint16)
    for number, _ in by_topic(rows["topic"]):
        purged = [mark.generation for mark in ledger.topics[number].marks]
        found[rows["topic"] == number] = max(job.topics[number], *purged, 0)
    return found
