"""Applies BATCH_OPEN, BATCH_SEAL and BATCH_CANCEL: a batch is opened under a key, takes members until it is sealed, and
ends with its last member (ledger/batches/ending.py).

    batch     number u64, all bits inverted  →  Stored: what BATCH_OPEN wrote
    batchend  {time u64, number u64}         →  nothing: when a batch expires, and when it is forgotten. The row of
                                                the expiry stays when the batch ends before: BATCHES skips it
"""

import struct
from typing import NamedTuple

from msgspec.structs import replace

from hadelay.codec import batches as codec
from hadelay.codec.batches import CANCELLED, ENDED, MAX_FAILURES, SEALED, State, Stored
from hadelay.codec.results import Done, Refused
from hadelay.ledger.batches.members import (
    BATCHFAIL,
    BATCHKEY,
    FAILURE_KEY,
    NUMBER,
    number_in,
    number_of,
    row_key,
    store_state,
)
from hadelay.ledger.changedrows import BATCHST
from hadelay.ledger.limits import shares
from hadelay.ledger.state import Ledger
from hadelay.ledger.topics import topicchanges
from hadelay.ledger.topics.shards import is_foreign, owner_in_words
from hadelay.model import SEPARATOR
from hadelay.settings.kinds import TOPIC_NAME

BATCH, BATCHEND = b"batch", b"batchend"
END_KEY = struct.Struct(">QQ")
#: Limit of batches in the cluster; at the limit, no batch can be opened. Ended batches count until they are deleted.
MAX_BATCHES = 100_000


class Found(NamedTuple):
    number: int
    stored: Stored
    state: State


def find(ledger: Ledger, key: str) -> Found | None:
    """The batch with this key, open or ended within the last 7 days; None if there is none."""
    number = number_of(ledger, key)
    return None if number is None else found_by(ledger, number)


def found_by(ledger: Ledger, number: int) -> Found | None:
    """The batch with this number; None if it does not exist or was deleted."""
    row, state = ledger.tables.get(BATCH, row_key(number)), ledger.batch_states.get(number)
    return None if row is None or state is None else Found(number, Stored.unpack(row), state)


def listing(ledger: Ledger, before: int | None, limit: int) -> list[Found]:
    """Batches with numbers below `before` (None: all), the newest first."""
    start = b"" if before is None else row_key(before) + b"\0"
    rows = ledger.tables.range(BATCH, start, None, limit) if ledger.batches.count else []
    numbers = [number_in(key) for key, _ in rows]
    return [
        Found(number, Stored.unpack(row), ledger.batch_states[number])
        for number, (_, row) in zip(numbers, rows, strict=True)
    ]


def apply_open(ledger: Ledger, command: codec.Open) -> Done | Refused:
    """Open a batch. A repetition changes nothing, also after the batch was sealed or has ended."""
    ledger.by = command.by
    known = find(ledger, command.key)
    if known is not None:
        if known.stored.spec == command.spec:
            return Done(False)
        return Refused("batch_exists", f"there is another batch with the key {command.key!r}: take a new key")
    topic = command.spec.topic
    if not TOPIC_NAME.fullmatch(topic) or SEPARATOR in topic:
        return Refused("bad_config", f"callback: {topic!r} is no name of a topic")
    if is_foreign(ledger, topic):
        return Refused("other_shard", owner_in_words(ledger.shards, topic))
    if ledger.topic(topic) is None and not ledger.settings.auto_create_topics:
        return Refused("no_topic", f"there is no topic {topic!r}")
    if wrong := shares.refusal(ledger, shares.BATCHES, ledger.batches.count, MAX_BATCHES):
        return Refused("too_many_batches", wrong)
    # Create the callback's topic now, if it is missing. At the end of the batch, the limit of topics might refuse it,
    # and the callback would be lost.
    if topicchanges.topic_or_new(ledger, topic) is None:
        return Refused("too_many_topics", topicchanges.no_room(ledger))
    ledger.batches.count += 1
    ledger.batches.opened += 1
    shares.took(ledger, shares.BATCHES)
    number, until_ms = ledger.batches.opened, ledger.now_ms + command.spec.lifetime_ms
    ledger.tables.put_new(BATCH, {row_key(number): Stored(command.key, command.by, command.spec).pack()})
    ledger.tables.put(BATCHKEY, command.key.encode(), NUMBER.pack(number))
    ledger.tables.put_new(BATCHEND, {END_KEY.pack(until_ms, number): b""})
    store_state(ledger, number, State(opened_ms=ledger.now_ms, until_ms=until_ms))
    return Done()


def apply_seal(ledger: Ledger, command: codec.Seal) -> Done | Refused:
    """Seal a batch: no further message can join it. If all members are settled already, the batch ends."""
    return _close(ledger, command.key, SEALED)


def apply_cancel(ledger: Ledger, command: codec.Cancel) -> Done | Refused:
    """Cancel a batch: seal it now. Then the leader searches for the waiting members, and cancels them by BATCH_STEP
    commands."""
    return _close(ledger, command.key, SEALED | CANCELLED)


def _close(ledger: Ledger, key: str, flags: int) -> Done | Refused:
    found = find(ledger, key)
    if found is None:
        return Refused("no_batch", f"there is no batch {key!r}")
    number, _, state = found
    if state.flags & ENDED:
        return Done(False)
    changed = state.flags & flags != flags
    if changed:
        sealed_ms = state.sealed_ms or ledger.now_ms
        store_state(ledger, number, replace(state, flags=state.flags | flags, sealed_ms=sealed_ms))
    if flags & CANCELLED and state.settled < state.joined:
        ledger.batches.cancels += 1
    return Done(changed)


def forget(ledger: Ledger, found: Found) -> None:
    """Delete an ended batch. Rows of `batchof`, which name the entries of its members, stay until the hours of these
    entries are deleted."""
    number, stored, state = found
    tables = ledger.tables
    tables.delete(BATCH, row_key(number))
    ledger.changes.note(BATCHST, number)
    del ledger.batch_states[number]
    tables.delete(BATCHKEY, stored.key.encode())
    expiry_ms = state.opened_ms + stored.spec.lifetime_ms
    if expiry_ms > ledger.now_ms:
        tables.delete(BATCHEND, END_KEY.pack(expiry_ms, number))
    tables.delete_many(BATCHFAIL, [FAILURE_KEY.pack(number, n) for n in range(min(state.failures, MAX_FAILURES))])
    shares.gave_back(ledger, shares.BATCHES, stored.creator)
    ledger.batches.count -= 1


def first_end_ms(ledger: Ledger) -> int | None:
    """Time in Unix ms at which the next batch may expire or be forgotten; None if there is no batch."""
    if not ledger.batches.count:
        return None
    # `next_key` is cheap, but may return a deleted row, whose time is at most that of the first existing row. If the
    # returned time is more than a minute ahead, nothing happens before it: return it without reading the existing rows.
    first = ledger.tables.next_key(BATCHEND, ledger.batchend_from)
    if first is not None and END_KEY.unpack(first)[0] > ledger.now_ms + 60_000:
        return int(END_KEY.unpack(first)[0])
    rows = ledger.tables.range(BATCHEND, ledger.batchend_from, None, 1)
    return END_KEY.unpack(rows[0][0])[0] if rows else None
