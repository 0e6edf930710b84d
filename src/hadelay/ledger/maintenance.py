"""SWEEP, CARRY, RETIRE: work over whole hours, a slice per command, never O(n) in one apply."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.results import Progress, Refused
from hadelay.ledger.hourstate import bitmap, indexes_of
from hadelay.ledger.keys import forget_keys
from hadelay.ledger.lookup import cancel_entries
from hadelay.ledger.topics import by_topic
from hadelay.ledger.transitions import FLAG_KEYED, PLACE, PLACE_KEY, PLACE_VALUE, fitting, move
from hadelay.model import DEAD_HOURS, NONE32, pack_id

if TYPE_CHECKING:
    from hadelay.codec.commands import Slice
    from hadelay.ledger.state import DelayState

#: CARRY copies at most this many bytes of records in one apply, and at least one record.
CARRY_BYTES = 4 << 20
#: RETIRE forgets at most this many keys in one apply: each costs some look-ups in the tables.
MAX_KEYS = 512
#: Of an id: the place that it was given at.
_WITHOUT_GROUP = np.uint64(pack_id(1, 0, 0) - 1)
#: Entries looked at per command, whatever it asks for: two to three milliseconds.
MAX_SLICE = 16_384


def _waiting(state: DelayState, hour: int, start: int, limit: int) -> tuple[NDArray[np.void], int]:
    """(INDEX rows neither settled nor leased, where to go on) of `limit` entries from `start`."""
    end = min(start + min(max(limit, 1), MAX_SLICE), state.store.count(hour))
    rows = state.store.entries(hour, slice(start, end))
    if hour_state := state.hours.get(hour):
        taken = (hour_state.settled | hour_state.leased) & bitmap(np.arange(start, end, dtype=np.uint32))
        if taken:
            rows = rows[~np.isin(rows["index"], indexes_of(taken))]
    return rows, end


def _forget_doomed(state: DelayState, hour: int, rows: NDArray[np.void]) -> NDArray[np.void]:
    """Cancel what deletions and purges left behind; returns the others."""
    alive = state.topics.alive(rows)
    if not alive.all():
        doomed = rows[~alive]
        cancel_entries(state, hour, doomed, state.no_node)
        for number, count in by_topic(doomed["topic"]):
            state.topics[number].doomed -= count
            state.topics.note_chores(state.topics[number])
        rows = rows[alive]
    marked = state.topics.marked(rows)
    if marked.any():
        cancel_entries(state, hour, rows[marked], state.no_node)
        rows = rows[~marked]
    return rows


def apply_sweep(state: DelayState, command: Slice) -> Progress:
    """Go on from where the last sweep stopped, hour by hour, until nothing doomed is left."""
    if not state.topics.to_sweep():
        return Progress(True, 0)
    hour, start = state.sweep
    hours = (h for h in state.store.hours() if h < DEAD_HOURS)
    later = [h for h in hours if h > hour or (h == hour and start < state.store.count(h))]
    if not later:
        # What is doomed still was filed while it ran (a return crossing the deletion): from the beginning.
        state.sweep = (0, 0)
        state.topics.swept()
        return Progress(not state.topics.to_sweep(), 0)
    if later[0] != hour:
        hour, start = later[0], 0
    rows, end = _waiting(state, hour, start, command.limit)
    kept = _forget_doomed(state, hour, rows)
    state.sweep = (hour, end)
    return Progress(not state.topics.to_sweep(), len(rows) - len(kept))


def apply_carry(state: DelayState, command: Slice) -> Progress | Refused:
    """Move what an hour that is over still owes to the running hour, so that it can close."""
    hour = command.hour
    if hour >= state.now_hour:
        return Refused("hour_running", f"hour {hour} is not over")
    if not state.open_entries(hour):
        return Progress(True, 0)
    hour_state = state.hour_state(hour)
    rows, end = _waiting(state, hour, hour_state.carried, MAX_SLICE)
    rows = _forget_doomed(state, hour, rows)
    some = rows[: max(command.limit, 1)]
    some = some[: fitting(some["size"], CARRY_BYTES)]
    if len(some):
        move(
            state, hour, some, deliver_at_ms=some["deliver_at_ms"], attempts=0, flags=some["flags"],
            previous=NONE32, node=state.no_node, leased=False, again=False,
        )  # fmt: skip
    hour_state.carried = int(rows["index"][len(some)]) if len(some) < len(rows) else end
    # What is leased now comes back into the running hour, if it comes back: no need to look again.
    return Progress(hour_state.carried >= state.store.count(hour), len(some))


def apply_retire(state: DelayState, command: Slice) -> Progress | Refused:
    """Forget an hour that owes nothing: first the places that point into it, slice by slice, then its files."""
    hour = command.hour
    if hour in state.retired or not state.store.count(hour):
        return Progress(True, 0)
    # Of dead hours, too: DROP_DEAD is theirs.
    if hour > state.now_hour - 2:
        return Refused("hour_running", f"hour {hour} is not two hours past")
    if open_entries := state.open_entries(hour):
        return Refused("hour_open", f"hour {hour} still owes {open_entries} messages")
    hour_state = state.hour_state(hour)
    if hour_state.returned or hour_state.keyed:
        end = min(hour_state.retire_at + min(max(command.limit, 1), MAX_SLICE), state.store.count(hour))
        rows = state.store.entries(hour, slice(hour_state.retire_at, end))
        if hour_state.keyed and np.count_nonzero(keyed := rows["flags"] & FLAG_KEYED) > MAX_KEYS:
            end = hour_state.retire_at + int(np.flatnonzero(keyed)[MAX_KEYS])
            rows = rows[: end - hour_state.retire_at]
        hour_state.keyed -= forget_keys(state, hour, rows)
        forgotten = _forget_places(state, hour, rows)
        hour_state.returned -= forgotten
        hour_state.retire_at = end
        if (hour_state.returned or hour_state.keyed) and end < state.store.count(hour):
            return Progress(False, forgotten)
    state.store.retire(hour)
    state.retired.add(hour)
    state.forget_hour(hour)
    return Progress(True, 0)


def _forget_places(state: DelayState, hour: int, rows: NDArray[np.void]) -> int:
    own = rows["index"] + np.uint64(pack_id(0, hour, 0))
    returned = rows[rows["first_id"] & _WITHOUT_GROUP != own]
    for first_id, index in zip(returned["first_id"].tolist(), returned["index"].tolist(), strict=True):
        key = PLACE_KEY.pack(first_id)
        # Unless it went on from here.
        if (state.tables.get(PLACE, key) or b"").startswith(PLACE_VALUE.pack(hour, index)):
            state.tables.delete(PLACE, key)
    return len(returned)
