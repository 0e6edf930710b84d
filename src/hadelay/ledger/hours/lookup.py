"""Look-up from a message's id to its present entry and state. A message that never moved is found by its id alone."""

import struct
from dataclasses import dataclass

import numpy as np

from hadelay.codec.formats import I64, Mask, Rows
from hadelay.ledger.hours.transitions import FLAG_TTL, ID_KEY, PLACE, PLACE_VALUE
from hadelay.ledger.state import Ledger
from hadelay.model import DEAD_HOURS, Event, State, unpack_id


@dataclass(frozen=True, slots=True)
class EntryRef:
    hour: int
    index: int
    #: The index entry, as an array of one INDEX row.
    rows: Rows


#: Table: message id → {expire_ms i64, ttl_ms i64}, for messages with a TTL.
TTL_OF = b"ttlof"
TTL_OF_VALUE = struct.Struct("<qq")

ENDED = {
    Event.ACKED: State.ACKED,
    Event.TTL_EXPIRED: State.EXPIRED,
    Event.CANCELLED: State.CANCELLED,
    Event.DEAD: State.DEAD,
}


def find_entry(ledger: Ledger, message_id: int) -> EntryRef | None:
    """Present entry of a message; None for an unknown id, a deleted hour, or a purged dead letter."""
    found = stored_entry(ledger, message_id)
    if found is None or found.hour < DEAD_HOURS:
        return found
    # The deliver_at_ms of a dead letter is its time of death: letters that died at or before dead_mark_ms are purged.
    mark_ms = ledger.topics[int(found.rows["topic"][0])].dead_mark_ms
    return found if found.rows["deliver_at_ms"][0] > mark_ms else None


def stored_entry(ledger: Ledger, message_id: int) -> EntryRef | None:
    """Like `find_entry`, but also finds a purged dead letter until the hour of the letter is deleted."""
    hour, index = _present(ledger, message_id)
    if hour < 0 or index >= ledger.store.count(hour):
        return None
    rows = ledger.store.entries(hour, slice(index, index + 1))
    # Compare ids: a moved message keeps the id of its first entry, so an id made from its present entry's number is
    # invalid.
    return EntryRef(hour, index, rows) if int(rows["first_id"][0]) == message_id else None


def find_entries(ledger: Ledger, ids: list[int]) -> tuple[I64, I64]:
    """Look up the present entries of these messages: (hours, globalIndexes); hour -1 for a message that is gone. Does
    not read the entries."""
    found = np.array([_present(ledger, message_id) for message_id in ids], np.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def _present(ledger: Ledger, message_id: int) -> tuple[int, int]:
    """Look up the present entry of a message: (hour, globalIndex); (-1, -1) for a message that is gone."""
    # Ignore the group in the id: messages restored from another cluster's backup keep their ids (ADR 141).
    _, hour, index = unpack_id(message_id)
    if index < ledger.store.count(hour):
        hour_state = ledger.hours.get(hour)
        others = hour_state.others if hour_state is not None else {}
        if not any(index in others.get(event, ()) for event in (Event.MOVED, Event.DEAD, Event.TRANSFERRED)):
            return hour, index
    stored = ledger.tables.get(PLACE, ID_KEY.pack(message_id))
    return (-1, -1) if stored is None else PLACE_VALUE.unpack_from(stored)


def state_of(ledger: Ledger, place: EntryRef, now_ms: int) -> State:
    if place.hour >= DEAD_HOURS:
        return State.DEAD
    ended, leased = ledger.outcome_of(place.hour, place.index)
    if ended is not None:
        return ENDED[ended]
    if leased:
        return State.LEASED
    if not ledger.topics.owed(place.rows)[0]:
        return State.CANCELLED
    if is_blocked(ledger, place):
        return State.EXPIRED if expired(ledger, place.rows, now_ms)[0] else State.BLOCKED
    if int(place.rows["deliver_at_ms"][0]) > now_ms:
        return State.SCHEDULED
    return State.EXPIRED if expired(ledger, place.rows, now_ms)[0] else State.READY


def is_blocked(ledger: Ledger, place: EntryRef) -> bool:
    """Whether the message waits behind other messages of its group."""
    hour_state = ledger.hours.get(place.hour)
    return hour_state is not None and place.index in hour_state.blocked


def ttl_of(ledger: Ledger, first_id: int) -> tuple[int, int] | None:
    """Time of expiry (Unix ms) and TTL (ms) of a message; None without a TTL, or once apply has dropped its row."""
    stored = ledger.tables.get(TTL_OF, ID_KEY.pack(first_id))
    return None if stored is None else TTL_OF_VALUE.unpack(stored)


def expired(ledger: Ledger, rows: Rows, now_ms: int) -> Mask:
    """Which of these open messages (INDEX rows) have a TTL that is over by now_ms (ledger/messages/ttl.py)."""
    over = np.zeros(len(rows), np.bool_)
    for at in np.flatnonzero(rows["flags"] & FLAG_TTL).tolist():
        found = ttl_of(ledger, int(rows["first_id"][at]))
        over[at] = found is not None and found[0] <= now_ms
    return over
