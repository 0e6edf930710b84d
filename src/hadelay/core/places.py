"""From a message's id to where it is now. A message that never moved is found by its id alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hadelay.core.lifecycle import PLACE, PLACE_KEY, PLACE_VALUE, log_events, settle
from hadelay.model import NONE32, Event, State, unpack_id

if TYPE_CHECKING:
    from hadelay.core.state import DelayState


@dataclass(frozen=True, slots=True)
class Place:
    hour: int
    index: int
    #: INDEX, one row
    rows: NDArray[np.void]


ENDED = {
    Event.ACKED: State.ACKED,
    Event.TTL_EXPIRED: State.EXPIRED,
    Event.CANCELLED: State.CANCELLED,
    Event.DEAD: State.DEAD,
}


def find(state: DelayState, message_id: int) -> tuple[int, int] | None:
    """(hour, globalIndex) of the message's present entry; None if it never was, or its hour is retired."""
    place = locate(state, message_id)
    return (place.hour, place.index) if place else None


def locate(state: DelayState, message_id: int) -> Place | None:
    group, hour, index = unpack_id(message_id)
    if group != state.group:
        return None
    hour_state = state.hours.get(hour)
    moved = hour_state.others.get(Event.MOVED) if hour_state else None
    here = index < state.store.count(hour)
    if not here or (moved is not None and index in moved):
        stored = state.tables.get(PLACE, PLACE_KEY.pack(message_id))
        if stored is None:
            return None
        hour, index = PLACE_VALUE.unpack(stored)
        if index >= state.store.count(hour):
            return None
    rows = state.store.entries(hour, slice(index, index + 1))
    # The place of a returned entry is not an id: ids are where a message was filed first.
    return Place(hour, index, rows) if int(rows["first_id"][0]) == message_id else None


def state_of(state: DelayState, place: Place, now_ms: int) -> State:
    ended, leased = state.fate(place.hour, place.index)
    if ended is not None:
        return ENDED[ended]
    if leased:
        return State.LEASED
    if not state.topics.alive(place.rows)[0]:
        return State.CANCELLED
    return State.READY if int(place.rows["deliver_at_ms"][0]) <= now_ms else State.SCHEDULED


def cancel_entries(state: DelayState, hour: int, rows: NDArray[np.void], node: int) -> None:
    """End waiting entries: they have no event yet."""
    log_events(
        state, hour, rows, Event.CANCELLED, attempts=rows["attempt"], previous=NONE32, consumer=NONE32, node=node
    )
    settle(state, hour, rows, Event.CANCELLED, leased=False)
