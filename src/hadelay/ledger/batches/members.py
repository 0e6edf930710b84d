"""Members of batches: messages that join a batch when they are published, and are counted once when they are settled.

    batchst   number u64, all bits inverted      →  State (codec/batches.py), a row of the checkpoint
    batchkey  key of the batch                   →  number u64
    batchof   {hour u32, globalIndex / 256 u32}  →  RUNs: entries of members among these 256 entries of the hour
    batchfail {number u64, n u32}                →  Failure: the first members that were not acked

Numbers in keys are big-endian. An entry is a member's for good: its row stays until the hour is deleted, so an ack
deletes nothing. A member whose message is filed anew takes its number along to the new entry; a dead letter does not,
and so is counted once. A grant notes the numbers of its messages (LEASED.batch), so an ack reads nothing either.
"""

import struct
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.batches import CANCELLED, ENDED, MAX_FAILURES, SEALED, State
from hadelay.codec.formats import I64, U32, Rows
from hadelay.codec.results import RowCode
from hadelay.ledger.changedrows import BATCHST
from hadelay.ledger.hours.hourstate import is_in, rows_by_value
from hadelay.ledger.state import Ledger
from hadelay.ledger.topics.topics import by_topic
from hadelay.model import Event

BATCHKEY, BATCHOF, BATCHFAIL = b"batchkey", b"batchof", b"batchfail"
NUMBER = struct.Struct(">Q")
#: Layout of a key in `batchof`: hour, globalIndex of the row's first entry divided by BLOCK.
BLOCK_KEY = struct.Struct(">II")
#: Number of neighbouring entries whose members share a row of `batchof`.
BLOCK = 256
#: Layout of a run: consecutive entries whose messages are members of one batch. `first`, `last`: positions of the run's
#: first and last entry among the row's BLOCK entries. `number`: number of the batch.
RUN = np.dtype([("first", "u1"), ("last", "u1"), ("number", "<u8")])
_RUN = struct.Struct("<BBQ")
#: Layout of a key in `batchfail`: number of the batch, number of the failure in the batch from 0 on.
FAILURE_KEY = struct.Struct(">QI")
_FAILURE = struct.Struct("<QqB")
_ALL_BITS = (1 << 64) - 1
_OUTCOMES = {Event.ACKED: "acked", Event.DEAD: "dead", Event.TTL_EXPIRED: "expired", Event.CANCELLED: "cancelled"}
#: Batch numbers, one per entry; 0: the message is a member of no batch.
Numbers = NDArray[np.uint64]


class Failure(NamedTuple):
    """A member that was not acked: its id, the time of its end in Unix ms, and how it ended."""

    id: int
    at_ms: int
    event: Event


def row_key(number: int) -> bytes:
    """Key of a batch in the tables `batch` and `batchst`, which have the newest batch first."""
    return NUMBER.pack(number ^ _ALL_BITS)


def number_in(row_key: bytes) -> int:
    return int(NUMBER.unpack(row_key)[0]) ^ _ALL_BITS


def number_of(ledger: Ledger, key: str) -> int | None:
    """Number of the batch with this key; None if there is none."""
    stored = ledger.tables.get(BATCHKEY, key.encode()) if ledger.batches.count else None
    return None if stored is None else int(NUMBER.unpack(stored)[0])


def store_state(ledger: Ledger, number: int, state: State) -> None:
    """Set the state of a batch. If all its members are settled, note the batch in `ledger.complete`, so that it is
    ended (ledger/batches/ending.py)."""
    ledger.changes.note(BATCHST, number)
    ledger.batch_states[number] = state
    if state.complete and not state.flags & ENDED:
        ledger.complete.append(number)


def is_cancelled(ledger: Ledger, number: int) -> bool:
    """Whether the batch with this number was cancelled and has not ended."""
    state = ledger.batch_states.get(number)
    return state is not None and state.flags & (CANCELLED | ENDED) == CANCELLED


def to_join(ledger: Ledger, key: str) -> int | RowCode:
    """Number of the batch with this key that a message can join; else the code of the refusal."""
    number = number_of(ledger, key)
    if number is None:
        return RowCode.NO_BATCH
    return RowCode.BATCH_CLOSED if ledger.batch_states[number].flags & (SEALED | ENDED) else number


def join(ledger: Ledger, hours: int | I64, entries: Rows, numbers: list[int]) -> None:
    """Note that the messages of entries just filed (INDEX rows, in these hours) are members of the batches with these
    numbers; number 0: of no batch."""
    _mark(ledger, hours, entries, np.array(numbers, np.uint64))
    for number, count in Counter(numbers).items():
        if number:
            ledger.changes.note(BATCHST, number)
            ledger.batch_states[number].joined += count


def follow(ledger: Ledger, hour: int, rows: Rows, hours: I64, new: Rows, *, leased: bool) -> None:
    """Note that messages filed anew stay members of their batches. new, hours: the new entries (INDEX rows) and their
    hours; rows, hour: the entries that they replace. leased: whether the messages were leased until now."""
    numbers = numbers_of(ledger, hour, rows["index"])
    if not numbers.any():
        return
    _mark(ledger, hours, new, numbers)
    counts = ledger.batches
    if not leased and counts.searched < counts.cancels and any(is_cancelled(ledger, n) for n, _ in by_topic(numbers)):
        counts.cancels += 1  # a running search for waiting members may have missed the new entries: repeat it


def _mark(ledger: Ledger, hours: int | I64, entries: Rows, numbers: Numbers) -> None:
    """Store the batch number of each of these entries (INDEX rows), which are new in their hours, and in ascending
    order within each hour."""
    members = numbers != 0
    if not members.all():
        entries, numbers = entries[members], numbers[members]
        hours = hours if isinstance(hours, int) else hours[members]
    if not len(entries):
        return
    for topic, _ in by_topic(entries["topic"]):
        if not ledger.topics[topic].batched:
            ledger.topics[topic].batched = True
    added: dict[bytes, list[tuple[int, int, int]]] = {}
    for hour, first, last, number in _runs(hours, entries["index"], numbers):
        runs = added.setdefault(BLOCK_KEY.pack(hour, first // BLOCK), [])
        runs.append((first % BLOCK, last % BLOCK, number))
    stored = ledger.tables.get_many(BATCHOF, list(added))
    rows = {}
    for (key, runs), row in zip(added.items(), stored, strict=True):
        if row is None:
            ledger.hour_state(BLOCK_KEY.unpack(key)[0]).batched += 1
            row = b""
        elif (tail := _RUN.unpack_from(row, len(row) - _RUN.size))[1:] == (runs[0][0] - 1, runs[0][2]):
            row, runs[0] = row[: -_RUN.size], (tail[0], *runs[0][1:])
        rows[key] = row + b"".join([_RUN.pack(*run) for run in runs])
    ledger.tables.put_many(BATCHOF, rows)


def _runs(hours: int | I64, indexes: U32, numbers: Numbers) -> Iterator[tuple[int, int, int, int]]:
    """Split entries into runs: (hour, first index, last index, number of the batch). All messages of a run are members
    of one batch, and all its entries share one row of `batchof`."""
    ends = (indexes[1:] != indexes[:-1] + np.uint32(1)) | (indexes[1:] % BLOCK == 0) | (numbers[1:] != numbers[:-1])
    if not isinstance(hours, int):
        ends |= hours[1:] != hours[:-1]
    at = np.flatnonzero(ends)
    firsts, lasts = np.append(0, at + 1), np.append(at, len(indexes) - 1)
    of = [hours] * len(firsts) if isinstance(hours, int) else hours[firsts].tolist()
    return zip(of, indexes[firsts].tolist(), indexes[lasts].tolist(), numbers[firsts].tolist(), strict=True)


def numbers_of(ledger: Ledger, hour: int, indexes: U32) -> Numbers:
    """Numbers of the batches of these entries of an hour, settled ones included."""
    found = np.zeros(len(indexes), np.uint64)
    hour_state = ledger.hours.get(hour)
    if hour_state is None or not hour_state.batched:
        return found
    blocks = list(rows_by_value(indexes // np.uint32(BLOCK)))
    stored = ledger.tables.get_many(BATCHOF, [BLOCK_KEY.pack(hour, block) for block, _ in blocks])
    for (_, where), row in zip(blocks, stored, strict=True):
        if row is not None:
            runs, offsets = np.frombuffer(row, RUN), (indexes[where] % BLOCK).astype(np.uint8)
            at = np.minimum(runs["last"].searchsorted(offsets), len(runs) - 1)
            within = (runs["first"][at] <= offsets) & (offsets <= runs["last"][at])
            found[where] = np.where(within, runs["number"][at], 0)
    return found


def leave(ledger: Ledger, hour: int, rows: Rows, event: Event) -> None:
    """Count members among messages of one hour (INDEX or LEASED rows) that this event settles."""
    names = rows.dtype.names or ()
    numbers = rows["batch"] if "batch" in names else numbers_of(ledger, hour, rows["index"])
    for number, count in by_topic(numbers):
        state = ledger.batch_states.get(number)
        if state is None or state.flags & ENDED:  # not a member, or the batch has ended: nothing to count
            continue
        ledger.changes.note(BATCHST, number)
        if event is Event.ACKED:
            state.acked += count
        else:
            _fail(ledger, number, state, hour, rows[numbers == number], event)
        if state.complete:
            ledger.complete.append(number)


def _fail(ledger: Ledger, number: int, state: State, hour: int, rows: Rows, event: Event) -> None:
    """Count members of one batch (INDEX or LEASED rows) that were not acked; list the first MAX_FAILURES."""
    name = _OUTCOMES[event]
    setattr(state, name, getattr(state, name) + len(rows))
    rows = rows[: MAX_FAILURES - state.failures]
    if "first_id" not in (rows.dtype.names or ()):
        rows = ledger.store.entries(hour, rows["index"])
    for n, first_id in enumerate(rows["first_id"].tolist(), state.failures):
        row = _FAILURE.pack(first_id, ledger.now_ms, event)
        ledger.tables.put_new(BATCHFAIL, {FAILURE_KEY.pack(number, n): row})
    state.failures += len(rows)


def failures_of(ledger: Ledger, number: int, start: int, limit: int) -> list[Failure]:
    """Failures of a batch in the order in which its members ended, from failure number `start` on."""
    first, last = FAILURE_KEY.pack(number, start), FAILURE_KEY.pack(number + 1, 0)
    rows = (_FAILURE.unpack(row) for _, row in ledger.tables.range(BATCHFAIL, first, last, limit))
    return [Failure(first_id, at_ms, Event(event)) for first_id, at_ms, event in rows]


def to_cancel(ledger: Ledger, key: bytes, row: bytes) -> list[int]:
    """Ids of the waiting members of cancelled batches in this row of `batchof`, for BATCH_STEP to cancel."""
    hour, block = BLOCK_KEY.unpack(key)
    runs = np.frombuffer(row, RUN)
    runs = runs[[is_cancelled(ledger, number) for number in runs["number"].tolist()]]
    hour_state = ledger.hours.get(hour)
    if not len(runs) or hour_state is None or not hour_state.batched:  # the hour may have been deleted meanwhile
        return []
    spans = [np.arange(first, last + 1, dtype=np.uint32) for first, last, _ in runs.tolist()]
    indexes = np.concatenate(spans) + np.uint32(block * BLOCK)
    indexes = indexes[~is_in(indexes, hour_state.settled, hour_state.leased)]
    return ledger.store.entries(hour, indexes)["first_id"].tolist() if len(indexes) else []


def forget(ledger: Ledger, hour: int, start: int, end: int) -> int:
    """Delete the rows of `batchof` for entries `start` to `end` (exclusive) of an hour without open entries; returns
    the number of deleted rows."""
    keys = [BLOCK_KEY.pack(hour, block) for block in range(start // BLOCK, -(-end // BLOCK))]
    found = ledger.tables.get_many(BATCHOF, keys)
    there = [key for key, row in zip(keys, found, strict=True) if row is not None]
    ledger.tables.delete_many(BATCHOF, there)
    return len(there)
