"""Members of batches: messages that join a batch when they are published, and are counted once when they are settled.

    batchst   number u64, all bits inverted    →  State (codec/batches.py)
    batchkey  key of the batch                 →  number u64
    batchof   id u64 of an unsettled member    →  number u64
    batchfail {number u64, n u32}              →  Failure: the first members that were not acked

Numbers are big-endian. A batch costs the same however many members it has; a member costs a row until it is settled.
The rows of members of an ended batch go as these messages are settled. A topic counts the rows of its messages
(TopicState.batched), so that the settlement of other topics' messages reads no table.
"""

import struct
from collections import Counter, defaultdict
from typing import NamedTuple

from msgspec.structs import replace

from hadelay.codec.batches import ENDED, MAX_FAILURES, SEALED, State
from hadelay.codec.formats import Rows
from hadelay.codec.results import RowCode
from hadelay.ledger.state import Ledger
from hadelay.ledger.topics.topics import TopicState, by_topic
from hadelay.model import Event

BATCHST, BATCHKEY, BATCHOF, BATCHFAIL = b"batchst", b"batchkey", b"batchof", b"batchfail"
NUMBER = struct.Struct(">Q")
#: Layout of a key in `batchfail`: number of the batch, number of the failure in the batch from 0 on.
FAILURE_KEY = struct.Struct(">QI")
_FAILURE = struct.Struct("<QqB")
_ALL_BITS = (1 << 64) - 1
_OUTCOMES = {Event.ACKED: "acked", Event.DEAD: "dead", Event.TTL_EXPIRED: "expired", Event.CANCELLED: "cancelled"}


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


def state_of(ledger: Ledger, number: int) -> State | None:
    stored = ledger.tables.get(BATCHST, row_key(number))
    return None if stored is None else State.unpack(stored)


def store_state(ledger: Ledger, number: int, state: State) -> None:
    """Write the state of a batch, and note a batch whose last member is settled (ledger/batches/ending.py)."""
    ledger.tables.put(BATCHST, row_key(number), state.pack())
    if state.complete and not state.flags & ENDED:
        ledger.complete.append(number)


def to_join(ledger: Ledger, key: str) -> int | RowCode:
    """Number of the batch with this key that a message can join; else the code of the refusal."""
    number = number_of(ledger, key)
    state = None if number is None else state_of(ledger, number)
    if number is None or state is None:
        return RowCode.NO_BATCH
    return RowCode.BATCH_CLOSED if state.flags & (SEALED | ENDED) else number


def join(ledger: Ledger, entries: Rows, numbers: list[int | None]) -> None:
    """Make entries that were just filed (INDEX rows) members of the batches with these numbers."""
    ids, topics = entries["first_id"].tolist(), entries["topic"].tolist()
    joining = [(first_id, topic, n) for first_id, topic, n in zip(ids, topics, numbers, strict=True) if n is not None]
    ledger.tables.put_new(BATCHOF, {NUMBER.pack(first_id): NUMBER.pack(n) for first_id, _, n in joining})
    for topic, count in Counter(topic for _, topic, _ in joining).items():
        ledger.topics[topic].batched += count
    for number, count in Counter(n for _, _, n in joining).items():
        state = state_of(ledger, number)
        assert state is not None, "to_join found the batch"
        store_state(ledger, number, replace(state, joined=state.joined + count))


def leave(ledger: Ledger, hour: int, rows: Rows, event: Event) -> None:
    """Count members among messages of one hour (INDEX or LEASED rows) that this event settles."""
    names = rows.dtype.names or ()
    ids = (rows if "first_id" in names else ledger.store.entries(hour, rows["index"]))["first_id"].tolist()
    keys = [NUMBER.pack(first_id) for first_id in ids]
    found = ledger.tables.get_many(BATCHOF, keys)
    at = [n for n, stored in enumerate(found) if stored is not None]
    if not at:
        return
    ledger.tables.delete_many(BATCHOF, [keys[n] for n in at])
    for topic, count in by_topic(rows["topic"][at]):
        ledger.topics[topic].batched -= count
    settled = defaultdict[bytes, list[int]](list)
    for n in at:
        settled[found[n] or b""].append(ids[n])
    for packed, members in settled.items():
        _settle(ledger, int(NUMBER.unpack(packed)[0]), members, event)


def pass_on(ledger: Ledger, rows: Rows, topic: TopicState, to: TopicState) -> None:
    """Count members among messages (INDEX rows) of one topic as messages of the other one, to which they are moved."""
    if topic.batched:
        found = ledger.tables.get_many(BATCHOF, [NUMBER.pack(first_id) for first_id in rows["first_id"].tolist()])
        count = sum(stored is not None for stored in found)
        topic.batched -= count
        to.batched += count


def _settle(ledger: Ledger, number: int, ids: list[int], event: Event) -> None:
    state = state_of(ledger, number)
    if state is None or state.flags & ENDED:  # its lifetime ended before these members did
        return
    name, failures = _OUTCOMES[event], state.failures
    if event is not Event.ACKED:
        for first_id in ids[: MAX_FAILURES - failures]:
            row = _FAILURE.pack(first_id, ledger.now_ms, event)
            ledger.tables.put_new(BATCHFAIL, {FAILURE_KEY.pack(number, failures): row})
            failures += 1
    counts = {name: getattr(state, name) + len(ids)}
    store_state(ledger, number, replace(state, failures=failures, **counts))


def failures_of(ledger: Ledger, number: int, start: int, limit: int) -> list[Failure]:
    """Failures of a batch, in the order of their ends, from number `start` of them on."""
    first, last = FAILURE_KEY.pack(number, start), FAILURE_KEY.pack(number + 1, 0)
    rows = (_FAILURE.unpack(row) for _, row in ledger.tables.range(BATCHFAIL, first, last, limit))
    return [Failure(first_id, at_ms, Event(event)) for first_id, at_ms, event in rows]
