"""Applies SWEEP, CARRY and RETIRE: maintenance of whole hours, a slice per command, so that no command takes long."""

from collections.abc import Callable

import numpy as np

from hadelay.codec.commandtypes import Job, Maintain
from hadelay.codec.formats import Rows
from hadelay.codec.results import JobResult, Refused
from hadelay.ledger.batches import members
from hadelay.ledger.hours.hourstate import is_in
from hadelay.ledger.hours.transitions import (
    FLAG_KEYED,
    FLAG_WAS_DUE,
    ID_KEY,
    PLACE,
    PLACE_VALUE,
    Leaving,
    fitting,
    move,
    settle,
)
from hadelay.ledger.leases import dead, suspects
from hadelay.ledger.messages import fills, ttl
from hadelay.ledger.messages.keys import forget_keys
from hadelay.ledger.state import Ledger
from hadelay.ledger.topics.topics import by_topic
from hadelay.model import DEAD_HOURS, Event, pack_id

#: Limit, in bytes, of the records that one CARRY copies; the next CARRY continues. A larger record is copied alone.
ROLL_FORWARD_BYTES = 4 << 20
#: Limits of client keys that RETIRE forgets in one apply, without and with subscriptions: each key costs some look-ups
#: in the tables, and with subscriptions also reads of the index.
MAX_KEYS, MAX_SHARED_KEYS = 512, 128
#: Bit mask for the part of a message id without the group: hour and index of the message's first entry.
_WITHOUT_GROUP = np.uint64(pack_id(1, 0, 0) - 1)
#: Limit of entries that one maintenance command looks at, in two to three milliseconds; the next command continues.
MAX_SLICE = 16_384
#: Limit of cancelled entries that one maintenance command ends in topics with message groups. Each of them changes some
#: table rows.
MAX_GROUPED = 512


def _waiting(ledger: Ledger, hour: int, start: int, limit: int) -> tuple[Rows, int]:
    """Read up to `limit` entries of an hour, from number `start` on. Returns (INDEX rows of the entries that wait,
    number of the next entry to read)."""
    end = min(start + min(max(limit, 1), MAX_SLICE), ledger.store.count(hour))
    rows = ledger.store.entries(hour, slice(start, end))
    if hour_state := ledger.hours.get(hour):
        rows = rows[~is_in(rows["index"], hour_state.settled, hour_state.leased)]
    if any(topic.group_rows for topic in ledger.topics.unfinished_in(rows)):
        ending = np.flatnonzero(~ledger.topics.owed(rows))
        if len(ending) > MAX_GROUPED:
            rows, end = rows[: ending[MAX_GROUPED]], int(rows["index"][ending[MAX_GROUPED]])
    return rows, end


def _cancel_tombstoned(ledger: Ledger, hour: int, rows: Rows) -> Rows:
    """Cancel the entries whose topic was deleted or purged after they were filed; returns the other entries."""
    alive = ledger.topics.alive(rows)
    marked = alive & ledger.topics.marked(rows)
    for some in (rows[~alive], rows[marked]):
        if len(some):
            settle(ledger, Leaving(hour, some), Event.CANCELLED)
    if not alive.all():
        for number, count in by_topic(rows["topic"][~alive]):
            ledger.topics[number].tombstoned -= count
            ledger.topics.note_work(ledger.topics[number])
    return rows[alive & ~marked]


def sweep(ledger: Ledger, command: Maintain) -> JobResult:
    """Write the cancelled events of deletions and purges, from where the last SWEEP stopped."""
    if not ledger.topics.to_sweep():
        return JobResult(True, 0)
    hour, start = ledger.sweep
    hours = (h for h in ledger.store.hours() if h < DEAD_HOURS)
    later = [h for h in hours if h > hour or (h == hour and start < ledger.store.count(h))]
    if not later:
        # SWEEP is through all hours. Cancelled entries that are left were filed meanwhile (by a returned lease, say):
        # start again.
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
    """Move messages that still wait in an hour that is over to the running hour, so that the old hour can be
    deleted."""
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
        flags = some["flags"].copy()
        # Set FLAG_WAS_DUE for each message whose due time is in a suspected range (ledger/leases/suspects.py): a leader
        # may have handed the message out without a record. The range itself is forgotten once its seconds have no open
        # messages, and the move takes these messages out of their seconds.
        flags[suspects.within(ledger.suspects, some["deliver_at_ms"])] |= FLAG_WAS_DUE
        move(ledger, Leaving(hour, some), deliver_at_ms=some["deliver_at_ms"], flags=flags, again=False)
    hour_state.carried = int(rows["index"][len(some)]) if len(some) < len(rows) else end
    # Leased messages are not moved here: if their leases end without an ack, they return to the running hour.
    return JobResult(hour_state.carried >= ledger.store.count(hour), len(some))


def retire(ledger: Ledger, command: Maintain) -> JobResult | Refused:
    """Delete an hour without open entries: first the table rows that point into it, in slices, then its files."""
    hour = command.hour
    if hour in ledger.retired or not ledger.store.count(hour):
        return JobResult(True, 0)
    # The next comparison also refuses hours of dead letters, whose numbers are higher than all others: DROP_DEAD
    # deletes those.
    if hour > ledger.now_hour - 2:
        return Refused("hour_running", f"hour {hour} is not two hours past")
    if open_entries := ledger.open_entries(hour):
        return Refused("hour_open", f"hour {hour} still has {open_entries} unsettled messages")
    if fills.holds(ledger, hour):
        return Refused("hour_open", f"a subscription that is being filled still needs hour {hour}")
    hour_state = ledger.hour_state(hour)
    if hour_state.returned or hour_state.keyed or hour_state.batched:
        end = min(hour_state.retire_at + min(max(command.limit, 1), MAX_SLICE), ledger.store.count(hour))
        rows = ledger.store.entries(hour, slice(hour_state.retire_at, end))
        most = MAX_SHARED_KEYS if ledger.topics.subscriptions else MAX_KEYS
        if hour_state.keyed and np.count_nonzero(keyed := rows["flags"] & FLAG_KEYED) > most:
            end = hour_state.retire_at + int(np.flatnonzero(keyed)[most])
            rows = rows[: end - hour_state.retire_at]
        hour_state.keyed -= forget_keys(ledger, hour, rows)
        forgotten = _forget_places(ledger, hour, rows)
        hour_state.returned -= forgotten
        hour_state.batched -= members.forget(ledger, hour, hour_state.retire_at, end) if hour_state.batched else 0
        hour_state.retire_at = end
        if (hour_state.returned or hour_state.keyed or hour_state.batched) and end < ledger.store.count(hour):
            return JobResult(False, forgotten)
    if hour_state.filled:
        return JobResult(False, fills.forget_some(ledger, hour, MAX_KEYS))
    ledger.retire_hour(hour)
    return JobResult(True, 0)


def _forget_places(ledger: Ledger, hour: int, rows: Rows) -> int:
    own = rows["index"] + np.uint64(pack_id(0, hour, 0))
    returned = rows[rows["first_id"] & _WITHOUT_GROUP != own]
    for first_id, index in zip(returned["first_id"].tolist(), returned["index"].tolist(), strict=True):
        key = ID_KEY.pack(first_id)
        # Keep the row of the table `place` if the message has moved on to another entry.
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
