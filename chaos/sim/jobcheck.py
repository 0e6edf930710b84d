"""Check J2 of bulk jobs: a model of which messages a job means, without the job's search (ledger/bulkscan.py)."""

import numpy as np

from hadelay.codec.meta import unpack
from hadelay.ledger.bulkjob import BulkJob
from hadelay.ledger.copies import filled_copies
from hadelay.ledger.keys import KEYOF
from hadelay.ledger.lookup import EntryRef, find_entry, state_of
from hadelay.ledger.state import Ledger
from hadelay.ledger.transitions import FLAG_ROUTED, ID_KEY
from hadelay.model import DEAD_HOURS, PENDING, State
from hadelay.server.reading import split_record

_WAITING = (State.SCHEDULED, State.READY, State.BLOCKED)


def left_over(ledger: Ledger, job: BulkJob) -> list[int]:
    """Ids of messages that a job should have changed before it ended. Filters by time, key, group, schedule, id and
    error are not known here: no job of the simulator has one."""
    found = []
    for hour in ledger.store.hours():
        rows = ledger.store.entries(hour, slice(0, ledger.store.count(hour)))
        if job.spec.action == "fill":
            found += [int(row["first_id"]) for row in rows if _lacks_copy(ledger, job, hour, row)]
            continue
        for first_id, index, number, generation in rows[["first_id", "index", "topic", "generation"]].tolist():
            if generation < job.topics.get(number, 0):
                entry = find_entry(ledger, first_id)
                if entry is not None and (entry.hour, entry.index) == (hour, index) and _is_meant(ledger, job, entry):
                    found.append(first_id)
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


def _is_meant(ledger: Ledger, job: BulkJob, entry: EntryRef) -> bool:
    spec, row, state = job.spec, entry.rows[0], state_of(ledger, entry, ledger.now_ms)
    if spec.tags:
        record = ledger.store.record(entry.hour, int(row["offset"]), int(row["size"]), verify=True)
        if not set(spec.tags) <= set(unpack(split_record(record)[0]).tags):
            return False
    due_ms = int(row["deliver_at_ms"])
    if spec.action == "delete_dead":
        return state is State.DEAD and due_ms <= job.began_ms
    if spec.action == "redrive":
        # A letter stays dead if another message has its client key.
        keyed = ledger.tables.get(KEYOF, ID_KEY.pack(int(row["first_id"]))) is not None
        return state is State.DEAD and due_ms <= job.began_ms and not keyed
    if entry.hour >= DEAD_HOURS or state not in _WAITING or spec.action == "cancel":
        return state in _WAITING and spec.action == "cancel"
    wanted_ms = job.began_ms + (spec.delay_ms or 0) if spec.shift_ms is None else due_ms + spec.shift_ms
    moves = max(due_ms, wanted_ms) > ledger.now_ms and wanted_ms != due_ms
    return moves and wanted_ms <= ledger.now_ms + ledger.settings.max_delay_ms


def _lacks_copy(ledger: Ledger, job: BulkJob, hour: int, row: np.void) -> bool:
    """Whether an entry is of a message that is pending since before the fill began, without a copy that it should
    have."""
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
