"""SWEEP, CARRY, RETIRE: work over whole hours, a slice per command, never O(n) in one apply."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.commandtypes import Job, Maintain
from hadelay.codec.results import JobResult, Refused
from hadelay.ledger import dead, ttl
from hadelay.ledger.hourstate import bitmap, indexes_of
from hadelay.ledger.keys import forget_keys
from hadelay.ledger.lookup import cancel_entries
from hadelay.ledger.state import Ledger
from hadelay.ledger.topics import by_topic
from hadelay.ledger.transitions import FLAG_KEYED, PLACE, PLACE_KEY, PLACE_VALUE, fitting, move
from hadelay.model import DEAD_HOURS, NONE32, pack_id

#: CARRY copies at most this many bytes of records in one apply, and at least one record.
ROLL_FORWARD_BYTES = 4 << 20
#: RETIRE forgets at most this many keys in one apply: each costs some look-ups in the tables.
MAX_KEYS = 512
#: Of an id: the place that it was given at.
_WITHOUT_GROUP = np.uint64(pack_id(1, 0, 0) - 1)
#: Entries looked at per command, whatever it asks for: two to three milliseconds.
MAX_SLICE = 16_384


def _waiting(ledger: Ledger, hour: int, start: int, limit: int) -> tuple[NDArray[np.void], int]:
    """(INDEX rows neither settled nor leased, where to go on) of `limit` entries from `start`."""
    end = min(start + min(max(limit, 1), MAX_SLICE), ledger.store.count(hour))
    rows = ledger.store.entries(hour, slice(start, end))
    if hour_state := ledger.hours.get(hour):
        taken = (hour_state.settled | hour_state.leased) & bitmap(np.arange(start, end, dtype=np.uint32))
        if taken:
            rows = rows[~np.isin(rows["index"], indexes_of(taken))]
    return rows, end


def _cancel_tombstoned(ledger: Ledger, hour: int, rows: NDArray[np.void]) -> NDArray[np.void]:
    """Cancel what deletions and purges left behind; returns the others."""
    alive = ledger.topics.alive(rows)
    if not alive.all():
        tombstoned = rows[~alive]
        cancel_entries(ledger, hour, tombstoned, ledger.no_node)
        for number, count in by_topic(tombstoned["topic"]):
            ledger.topics[number].tombstoned -= count
            ledger.topics.note_work(ledger.topics[number])
        rows = rows[alive]
    marked = ledger.topics.marked(rows)
    if marked.any():
        cancel_entries(ledger, hour, rows[marked], ledger.no_node)
        rows = rows[~marked]
    return rows


def sweep(ledger: Ledger, command: Maintain) -> JobResult:
    """Go on from where the last sweep stopped, hour by hour, until nothing tombstoned is left."""
    if not ledger.topics.to_sweep():
        return JobResult(True, 0)
    hour, start = ledger.sweep
    hours = (h for h in ledger.store.hours() if h < DEAD_HOURS)
    later = [h for h in hours if h > hour or (h == hour and start < ledger.store.count(h))]
    if not later:
        # What is tombstoned still was filed while it ran (a return crossing the deletion): from the beginning.
        ledger.sweep = (0, 0)
        ledger.topics.swept()
        return JobResult(not ledger.topics.to_sweep(), 0)
    if later[0] != hour:
        hour, start = later[0], 0
    rows, end = _waiting(ledger, hour, start, command.limit)
    kept = _cancel_tombstoned(ledger, hour, rows)
    ledger.sweep = (hour, end)
    return JobResult(not ledger.topics.to_sweep(), len(rows) - len(kept))


def roll_forward(ledger: Ledger, command: Maintain) -> JobResult | Refused:
    """Move what an hour that is over still owes to the running hour, so that it can close."""
    hour = command.hour
    if hour >= ledger.now_hour:
        return Refused("hour_running", f"hour {hour} is not over")
    if not ledger.open_entries(hour):
        return JobResult(True, 0)
    hour_state = ledger.hour_state(hour)
    rows, end = _waiting(ledger, hour, hour_state.carried, MAX_SLICE)
    rows = _cancel_tombstoned(ledger, hour, rows)
    some = rows[: max(command.limit, 1)]
    some = some[: fitting(some["size"], ROLL_FORWARD_BYTES)]
    if len(some):
        move(
            ledger, hour, some, deliver_at_ms=some["deliver_at_ms"], attempts=0, flags=some["flags"],
            previous=NONE32, node=ledger.no_node, leased=False, again=False,
        )  # fmt: skip
    hour_state.carried = int(rows["index"][len(some)]) if len(some) < len(rows) else end
    # What is leased now comes back into the running hour, if it comes back: no need to look again.
    return JobResult(hour_state.carried >= ledger.store.count(hour), len(some))


def retire(ledger: Ledger, command: Maintain) -> JobResult | Refused:
    """Forget an hour that owes nothing: first the places that point into it, slice by slice, then its files."""
    hour = command.hour
    if hour in ledger.retired or not ledger.store.count(hour):
        return JobResult(True, 0)
    # Of dead hours, too: DROP_DEAD is theirs.
    if hour > ledger.now_hour - 2:
        return Refused("hour_running", f"hour {hour} is not two hours past")
    if open_entries := ledger.open_entries(hour):
        return Refused("hour_open", f"hour {hour} still owes {open_entries} messages")
    hour_state = ledger.hour_state(hour)
    if hour_state.returned or hour_state.keyed:
        end = min(hour_state.retire_at + min(max(command.limit, 1), MAX_SLICE), ledger.store.count(hour))
        rows = ledger.store.entries(hour, slice(hour_state.retire_at, end))
        if hour_state.keyed and np.count_nonzero(keyed := rows["flags"] & FLAG_KEYED) > MAX_KEYS:
            end = hour_state.retire_at + int(np.flatnonzero(keyed)[MAX_KEYS])
            rows = rows[: end - hour_state.retire_at]
        hour_state.keyed -= forget_keys(ledger, hour, rows)
        forgotten = _forget_places(ledger, hour, rows)
        hour_state.returned -= forgotten
        hour_state.retire_at = end
        if (hour_state.returned or hour_state.keyed) and end < ledger.store.count(hour):
            return JobResult(False, forgotten)
    ledger.store.retire(hour)
    ledger.retired.add(hour)
    ledger.forget_hour(hour)
    return JobResult(True, 0)


def _forget_places(ledger: Ledger, hour: int, rows: NDArray[np.void]) -> int:
    own = rows["index"] + np.uint64(pack_id(0, hour, 0))
    returned = rows[rows["first_id"] & _WITHOUT_GROUP != own]
    for first_id, index in zip(returned["first_id"].tolist(), returned["index"].tolist(), strict=True):
        key = PLACE_KEY.pack(first_id)
        # Unless it went on from here.
        if (ledger.tables.get(PLACE, key) or b"").startswith(PLACE_VALUE.pack(hour, index)):
            ledger.tables.delete(PLACE, key)
    return len(returned)


JOBS: dict[int, Callable[[Ledger, Maintain], JobResult | Refused]] = {
    Job.SWEEP: sweep,
    Job.ROLL_FORWARD: roll_forward,
    Job.RETIRE: retire,
    Job.TTL_EXPIRE: ttl.expire_due,
    Job.DROP_DEAD: dead.drop_hour,
    Job.REDRIVE: dead.redrive_some,
}
