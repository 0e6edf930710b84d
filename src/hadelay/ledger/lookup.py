"""From a message's id to where it is now. A message that never moved is found by its id alone."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hadelay.ledger.state import Ledger
from hadelay.ledger.transitions import FLAG_TTL, PLACE, PLACE_KEY, PLACE_VALUE, log_events, settle
from hadelay.model import DEAD_HOURS, NONE32, Event, State, unpack_id


@dataclass(frozen=True, slots=True)
class EntryRef:
    hour: int
    index: int
    #: INDEX, one row
    rows: NDArray[np.void]


#: first id → {expire_ms i64, ttl_ms i64} of those that end by themselves.
TTL_OF = b"ttlof"
TTL_OF_KEY = struct.Struct(">Q")
TTL_OF_VALUE = struct.Struct("<qq")

ENDED = {
    Event.ACKED: State.ACKED,
    Event.TTL_EXPIRED: State.EXPIRED,
    Event.CANCELLED: State.CANCELLED,
    Event.DEAD: State.DEAD,
}


def find_entry(ledger: Ledger, message_id: int) -> EntryRef | None:
    """The message's present entry; None if there never was one, or its hour is retired."""
    hour, index = _present(ledger, message_id)
    if hour < 0 or index >= ledger.store.count(hour):
        return None
    rows = ledger.store.entries(hour, slice(index, index + 1))
    # The number of a returned entry is not an id: an id says where a message was filed first.
    if int(rows["first_id"][0]) != message_id:
        return None
    # deliver_at_ms of a dead letter is when it died.
    purged = hour >= DEAD_HOURS and rows["deliver_at_ms"][0] <= ledger.topics[int(rows["topic"][0])].dead_mark_ms
    return None if purged else EntryRef(hour, index, rows)


def find_entries(ledger: Ledger, ids: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(hours, globalIndexes) of messages that exist or did; hour -1 for those that are gone. Reads no entry."""
    found = np.full((2, len(ids)), -1, np.int64)
    for at, message_id in enumerate(ids):
        found[:, at] = _present(ledger, message_id)
    return found[0], found[1]


def _present(ledger: Ledger, message_id: int) -> tuple[int, int]:
    """(hour, globalIndex), (-1, -1) of a message that is gone."""
    # Of any group: what was restored keeps its ids, and the entry says its own (ADR 141).
    _, hour, index = unpack_id(message_id)
    if index < ledger.store.count(hour) and not _went_on(ledger, hour, index):
        return hour, index
    stored = ledger.tables.get(PLACE, PLACE_KEY.pack(message_id))
    return (-1, -1) if stored is None else PLACE_VALUE.unpack_from(stored)


def _went_on(ledger: Ledger, hour: int, index: int) -> bool:
    """The message filed here first is elsewhere."""
    hour_state = ledger.hours.get(hour)
    if hour_state is None:
        return False
    return any(index in bits for event, bits in hour_state.others.items() if event in (Event.MOVED, Event.DEAD))


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
    if int(place.rows["deliver_at_ms"][0]) > now_ms:
        return State.SCHEDULED
    return State.EXPIRED if expired(ledger, place.rows, now_ms)[0] else State.READY


def expired(ledger: Ledger, rows: NDArray[np.void], now_ms: int) -> NDArray[np.bool_]:
    """Which of these open messages (INDEX rows) have a TTL that is over by now_ms (ledger/ttl.py)."""
    over = np.zeros(len(rows), np.bool_)
    for at in np.flatnonzero(rows["flags"] & FLAG_TTL).tolist():
        stored = ledger.tables.get(TTL_OF, TTL_OF_KEY.pack(int(rows["first_id"][at])))
        over[at] = stored is not None and TTL_OF_VALUE.unpack(stored)[0] <= now_ms
    return over


def cancel_entries(ledger: Ledger, hour: int, rows: NDArray[np.void], node: int) -> None:
    """End waiting entries: they have no event yet."""
    log_events(
        ledger, hour, rows, Event.CANCELLED, attempts=rows["attempt"], previous=NONE32, consumer=NONE32, node=node
    )
    settle(ledger, hour, rows, Event.CANCELLED, leased=False)
