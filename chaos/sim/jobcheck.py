"""Check J2 of bulk jobs: a model of the messages that a job selects, computed without the job's own search
(ledger/jobs/bulkscan.py)."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np
from msgspec.structs import replace

from hadelay.codec.commands import decode
from hadelay.codec.commandtypes import Command
from hadelay.codec.formats import REASON
from hadelay.codec.jobcommands import JobSpec
from hadelay.codec.meta import unpack
from hadelay.codec.wire import Malformed
from hadelay.ledger.hours.lookup import EntryRef, find_entry, state_of
from hadelay.ledger.hours.transitions import FLAG_ROUTED, ID_KEY, failures_of
from hadelay.ledger.jobs.bulkjob import BulkJob
from hadelay.ledger.messages.copies import filled_copies
from hadelay.ledger.messages.keys import KEYOF
from hadelay.ledger.state import Ledger
from hadelay.model import DEAD_HOURS, NEVER_MS, NONE32, PENDING, State
from hadelay.server.reading import split_record
from hadelay.words import error_group

#: Fields of a job's specification that select messages.
FILTERS = ("tags", "key_prefix", "from_ms", "to_ms", "group", "schedule", "ids", "error")
_WAITING = (State.SCHEDULED, State.READY, State.BLOCKED)


def not_meant(ledger: Ledger, commands: Iterable[tuple[int, Any]]) -> set[int]:
    """Ids of messages that a step names although its job does not select them, judged by the state before the step.
    Messages that were filed anew since the job began are left out, because apply ignores them, for example when a step
    is proposed again. A message with earlier attempts passes each time filter: a retry may have changed its due time
    since the job's search."""
    found = set[int]()
    for body in [body for kind, body in commands if kind == Command.JOB_STEP]:
        with suppress(Malformed):
            step = decode(Command.JOB_STEP, body)
            job = ledger.jobs.get(step.job)
            if job is not None and job.cursor == step.expected and job.spec.action != "fill":
                entries = [(i, find_entry(ledger, i)) for i in step.ids]
                older = [(i, entry) for i, entry in entries if entry is not None and _is_older(job, entry.rows[0])]
                untimed = replace(job.spec, from_ms=None, to_ms=None)
                for i, entry in older:
                    spec = untimed if entry.rows[0]["attempt"] else job.spec
                    if not _passes(ledger, spec, entry):
                        found.add(i)
    return found


def left_over(ledger: Ledger, job: BulkJob) -> list[int]:
    """Ids of messages that a job should have changed before it ended."""
    found = []
    for hour in ledger.store.hours():
        rows = ledger.store.entries(hour, slice(0, ledger.store.count(hour)))
        if job.spec.action == "fill":
            found += [int(row["first_id"]) for row in rows if _lacks_copy(ledger, job, hour, row)]
            continue
        for row in rows:
            if _is_older(job, row):
                entry, place = find_entry(ledger, int(row["first_id"])), (hour, int(row["index"]))
                if entry is None or (entry.hour, entry.index) != place:
                    continue
                if _may_change(ledger, job, entry) and _passes(ledger, job.spec, entry):
                    found.append(int(row["first_id"]))
    return found


def pending_in(ledger: Ledger, name: str) -> set[int]:
    """Ids of the pending messages of a topic."""
    topic, found = ledger.topic(name), set()
    for hour in ledger.store.hours():
        rows = ledger.store.entries(hour, slice(0, ledger.store.count(hour)))
        for row in rows[rows["topic"] == topic.number] if topic is not None and hour < DEAD_HOURS else ():
            entry = find_entry(ledger, int(row["first_id"]))
            if entry is not None and state_of(ledger, entry, ledger.now_ms) in PENDING:
                found.add(int(row["first_id"]))
    return found


def _is_older(job: BulkJob, row: np.void) -> bool:
    """Whether an index entry is in a topic of the job, and was made before the job began."""
    return int(row["generation"]) < job.topics.get(int(row["topic"]), 0)


def _passes(ledger: Ledger, spec: JobSpec, entry: EntryRef) -> bool:
    """Whether a message passes the filters of a job."""
    row, message_id = entry.rows[0], int(entry.rows[0]["first_id"])
    record = ledger.store.record(entry.hour, int(row["offset"]), int(row["size"]), verify=True)
    meta = unpack(split_record(record)[0])
    due = range(spec.from_ms or 0, NEVER_MS if spec.to_ms is None else spec.to_ms)
    return (
        set(spec.tags) <= set(meta.tags)
        and (meta.key or "").startswith(spec.key_prefix)
        and spec.group in ("", meta.group)
        and spec.schedule in ("", meta.sch)
        and int(row["deliver_at_ms"]) in due
        and (not spec.ids or message_id in spec.ids)
        and (not spec.error or _error(ledger, message_id) == error_group(None, spec.error))
    )


def _error(ledger: Ledger, message_id: int) -> str:
    """Group of a dead letter's last error (words.error_group), by which jobs can filter."""
    failures = failures_of(ledger, message_id)
    if not failures:
        return error_group(None, None)
    _, event, _, reason = failures[-1]
    return error_group(event.name.lower(), None if reason == NONE32 else ledger.names.name(REASON, reason))


def _may_change(ledger: Ledger, job: BulkJob, entry: EntryRef) -> bool:
    """Whether the action of a job changes a message in its present state."""
    spec, row, state = job.spec, entry.rows[0], state_of(ledger, entry, ledger.now_ms)
    due_ms = int(row["deliver_at_ms"])
    if spec.action == "delete_dead":
        return state is State.DEAD and due_ms <= job.began_ms
    if spec.action == "redrive":
        # A dead letter is not redriven if another message has its client key.
        keyed = ledger.tables.get(KEYOF, ID_KEY.pack(int(row["first_id"]))) is not None
        return state is State.DEAD and due_ms <= job.began_ms and not keyed
    if entry.hour >= DEAD_HOURS or state not in _WAITING or spec.action in ("cancel", "transfer"):
        # Expect nothing of a transfer that refused messages because its target was full: the messages stay in their
        # topic. Check J3 covers transfers.
        return state in _WAITING and (spec.action == "cancel" or (spec.action == "transfer" and not job.refused))
    wanted_ms = job.began_ms + (spec.delay_ms or 0) if spec.shift_ms is None else due_ms + spec.shift_ms
    wanted_ms = wanted_ms if spec.at_ms is None else spec.at_ms
    moves = max(due_ms, wanted_ms) > ledger.now_ms and wanted_ms != due_ms
    return moves and wanted_ms <= ledger.now_ms + ledger.settings.max_delay_ms


def _lacks_copy(ledger: Ledger, job: BulkJob, hour: int, row: np.void) -> bool:
    """Whether a message lacks a copy that a fill should have made: the message is pending since before the fill began,
    and passes the subscription's filter."""
    to, number, message_id = ledger.topic(job.spec.subscription), int(row["topic"]), int(row["first_id"])
    entry = find_entry(ledger, message_id)
    if to is None or job.refused or entry is None or (entry.hour, entry.index) != (hour, int(row["index"])):
        return False
    born = ledger.topics[number].born
    older = hour < DEAD_HOURS and number in job.topics and born <= int(row["generation"]) < job.topics[number]
    if not older or int(row["flags"]) & FLAG_ROUTED or state_of(ledger, entry, ledger.now_ms) not in PENDING:
        return False
    record = ledger.store.record(hour, int(row["offset"]), int(row["size"]), verify=True)
    passes = to.filter is None or to.filter.matches(unpack(split_record(record)[0]).tags)
    return passes and to.number not in [copy.topic for copy in filled_copies(ledger, message_id)]
