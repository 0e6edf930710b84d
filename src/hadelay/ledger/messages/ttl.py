"""TTL: a message that nobody took in time ends by itself, `expired`.

    ttlof  first id → {expire_ms i64, ttl_ms i64}             while the message is not known to be over
    ttl    {time u64, first id u64} big-endian → nothing      in the order in which they have to be looked at

A message expires at the due time that its publisher chose, plus the TTL; a retry does not prolong this. A leased
message does not expire; if its lease ends later than that, the message expires instead of waiting. Apply never grants
an expired message, even if TTL_EXPIRE has not recorded the expiry yet. That command records expiries in slices, so that
the hours of a topic that nobody polls can be deleted, too.

An ack leaves the rows of its message in these tables, to save time; TTL_EXPIRE drops them when their time comes. As
long as a message is open or dead, FLAG_TTL is set in its INDEX.flags exactly if `ttlof` has a row of it.
"""

import struct

import numpy as np

from hadelay.codec.commandtypes import Maintain
from hadelay.codec.formats import I64, Rows
from hadelay.codec.results import JobResult
from hadelay.ledger.hours.hourstate import is_in, rows_by_value
from hadelay.ledger.hours.lookup import TTL_OF, TTL_OF_VALUE, find_entries, ttl_of
from hadelay.ledger.hours.transitions import FLAG_TTL, ID_KEY, Leaving, settle
from hadelay.ledger.messages import unique
from hadelay.ledger.state import Ledger
from hadelay.model import DEAD_HOURS, NEVER_MS, Event

TTL = b"ttl"
KEY = struct.Struct(">QQ")

#: Limit of rows that one TTL_EXPIRE looks at, which takes some milliseconds.
MAX_SLICE = 1_000


def begin(ledger: Ledger, first_id: int, due_ms: int, ttl_ms: int) -> None:
    """Let a message expire ttl_ms after due_ms, whatever its expiry was before. If that time has passed, as it may have
    for a copy that a fill makes, the message expires now: TTL_EXPIRE would not find an earlier row of the table `ttl`,
    because it has searched that part of the table."""
    forget(ledger, [first_id])
    end_ms = max(due_ms + ttl_ms, ledger.now_ms)
    ledger.tables.put(TTL_OF, ID_KEY.pack(first_id), TTL_OF_VALUE.pack(end_ms, ttl_ms))
    _look_at(ledger, end_ms, first_id)


def begin_again(ledger: Ledger, rows: Rows, due_ms: I64 | int) -> None:
    """Restart the TTL of messages (INDEX rows) at due_ms, after a reschedule, redrive or routing."""
    limited = rows["flags"] & FLAG_TTL != 0
    if not limited.any():
        return
    times = np.broadcast_to(due_ms, len(rows))[limited]
    for first_id, at_ms in zip(rows["first_id"][limited].tolist(), times.tolist(), strict=True):
        found = ttl_of(ledger, first_id)
        if found is not None:
            begin(ledger, first_id, at_ms, found[1])


def wait_again(ledger: Ledger, rows: Rows) -> None:
    """Tell the listener when messages expire whose leases ended: TTL_EXPIRE skips messages while they are leased."""
    for first_id in rows["first_id"][rows["flags"] & FLAG_TTL != 0].tolist():
        ledger.listener.on_ttl(expire_ms(ledger, first_id))


def forget(ledger: Ledger, first_ids: list[int]) -> None:
    for first_id in first_ids:
        found = ttl_of(ledger, first_id)
        if found is not None:
            ledger.tables.delete(TTL, KEY.pack(found[0], first_id))
            ledger.tables.delete(TTL_OF, ID_KEY.pack(first_id))


def expire_ms(ledger: Ledger, first_id: int) -> int:
    """Time at which the message expires, NEVER_MS if it does not."""
    found = ttl_of(ledger, first_id)
    return NEVER_MS if found is None else found[0]


def first_ms(ledger: Ledger, start: bytes = b"") -> int:
    """Time of the first expiry in the table `ttl`, from the key `start` on; NEVER_MS if there is none."""
    found = ledger.tables.range(TTL, start, None, 1)
    return KEY.unpack(found[0][0])[0] if found else NEVER_MS


def due(ledger: Ledger, now_ms: int, start: bytes, limit: int) -> list[bytes]:
    """Keys of the first TTL rows from `start` on whose time has come, at most `limit`."""
    return [key for key, _ in ledger.tables.range(TTL, start, KEY.pack(now_ms + 1, 0), limit)]


def ends_something(ledger: Ledger, keys: list[bytes]) -> bool:
    """Whether one of these messages is scheduled or ready; for others, TTL_EXPIRE has nothing to write."""
    hours, indexes = find_entries(ledger, [KEY.unpack(key)[1] for key in keys])
    for hour, where in rows_by_value(hours):
        hour_state = ledger.hours.get(hour)
        if not 0 <= hour < DEAD_HOURS:
            continue
        if hour_state is None or any(
            i not in hour_state.settled and i not in hour_state.leased for i in indexes[where].tolist()
        ):
            return True
    return False


def expire_due(ledger: Ledger, command: Maintain) -> JobResult:
    """Expire waiting messages whose TTL is over by cluster time; drop the TTLs of messages that ended before,
    and periods of `unique_for` that are over."""
    limit = min(max(command.limit, 1), MAX_SLICE)
    ids = []
    # Begin where the last TTL_EXPIRE ended, `ttl_from`: no row is before that key.
    keys = due(ledger, ledger.now_ms, ledger.ttl_from, limit)
    for key in keys:
        ledger.tables.delete(TTL, key)
        first_id = KEY.unpack(key)[1]
        # Skip a message with a later expiry by now: it was leased at its first expiry, died, and was redriven.
        if expire_ms(ledger, first_id) <= ledger.now_ms:
            ids.append(first_id)
    ended = _expire(ledger, ids)
    if keys:
        ledger.ttl_from = keys[-1] + b"\0"
    return JobResult(unique.drop_ended(ledger, limit) and len(keys) < limit, ended)


def _expire(ledger: Ledger, ids: list[int]) -> int:
    hours, indexes = find_entries(ledger, ids)
    over_already: list[int] = np.array(ids, np.uint64)[hours < 0].tolist()
    ended = 0
    for hour, where in rows_by_value(hours):
        if not 0 <= hour < DEAD_HOURS:
            continue
        rows = ledger.store.entries(hour, indexes[where].astype(np.uint32))
        hour_state = ledger.hour_state(hour)
        settled, leased = is_in(rows["index"], hour_state.settled), is_in(rows["index"], hour_state.leased)
        over_already += rows["first_id"][settled].tolist()
        for first_id in rows["first_id"][leased].tolist():
            # A leased message does not expire: its expiry is checked again when the lease ends.
            _look_at(ledger, ledger.now_ms + ledger.settings.max_lease_ms, first_id)
        over_already += rows["first_id"][~settled & ~leased].tolist()
        # Leave out messages cancelled with their topic: SWEEP writes their events.
        waiting = rows[~settled & ~leased & ledger.topics.owed(rows)]
        if len(waiting):
            settle(ledger, Leaving(hour, waiting), Event.TTL_EXPIRED)
            ended += len(waiting)
    for first_id in over_already:
        ledger.tables.delete(TTL_OF, ID_KEY.pack(first_id))
    return ended


def _look_at(ledger: Ledger, at_ms: int, first_id: int) -> None:
    key = KEY.pack(at_ms, first_id)
    ledger.tables.put(TTL, key, b"")
    # Let TTL_EXPIRE search from this key on. It may have finished this millisecond already, and would miss a message
    # whose TTL ends now.
    ledger.ttl_from = min(ledger.ttl_from, key)
    ledger.listener.on_ttl(at_ms)
