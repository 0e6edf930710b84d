"""TTL: a message that nobody took in time ends by itself, `expired`.

    ttlof  first id → {expire_ms i64, ttl_ms i64}             while the message is not known to be over
    ttl    {time u64, first id u64} big-endian → nothing      in the order in which they have to be looked at

Expiry is the due time that the message's owner chose, plus the TTL: a retry does not prolong it. A running lease wins;
when it ends after the expiry, the message expires instead of waiting. Apply never grants what has expired, whether or
not TTL_EXPIRE came by: that only writes it down, in slices, so that the hours of a topic nobody polls drain.

An ack does not touch these tables (it has no time for it): rows of what is over are found and dropped when their time
comes. So INDEX.flags says TTL ⇔ `ttlof` knows the message, as long as it is open or dead.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.commandtypes import Maintain
from hadelay.codec.results import JobResult
from hadelay.ledger.lookup import TTL_OF, TTL_OF_KEY, TTL_OF_VALUE, find_entries
from hadelay.ledger.state import Ledger
from hadelay.ledger.transitions import FLAG_TTL, log_events, settle
from hadelay.model import DEAD_HOURS, NEVER_MS, NONE32, Event

TTL = b"ttl"
KEY = struct.Struct(">QQ")

#: Rows looked at per command, whatever it asks for: some milliseconds.
MAX_SLICE = 1_000


def begin(ledger: Ledger, first_id: int, due_ms: int, ttl_ms: int) -> None:
    """This message expires ttl_ms after due_ms. Whatever held before is forgotten."""
    before = ledger.tables.get(TTL_OF, TTL_OF_KEY.pack(first_id))
    if before is not None:
        ledger.tables.delete(TTL, KEY.pack(TTL_OF_VALUE.unpack(before)[0], first_id))
    expire_ms = due_ms + ttl_ms
    ledger.tables.put(TTL_OF, TTL_OF_KEY.pack(first_id), TTL_OF_VALUE.pack(expire_ms, ttl_ms))
    _look_at(ledger, expire_ms, first_id)


def begin_again(ledger: Ledger, rows: NDArray[np.void], due_ms: int | NDArray[np.int64]) -> None:
    """The owner chose a new due time for these messages (INDEX rows), or they start anew: the TTL counts from there."""
    limited = np.flatnonzero(rows["flags"] & FLAG_TTL)
    if not len(limited):
        return
    dues = np.broadcast_to(due_ms, len(rows))
    for at in limited.tolist():
        first_id = int(rows["first_id"][at])
        stored = ledger.tables.get(TTL_OF, TTL_OF_KEY.pack(first_id))
        if stored is not None:
            begin(ledger, first_id, int(dues[at]), TTL_OF_VALUE.unpack(stored)[1])


def wait_again(ledger: Ledger, rows: NDArray[np.void]) -> None:
    """A lease of these messages (INDEX rows) ended. Who looks for what is over may have passed them just before, as
    leased: the end was on its way."""
    for first_id in rows["first_id"][rows["flags"] & FLAG_TTL != 0].tolist():
        ledger.listener.on_ttl(expire_ms(ledger, first_id))


def forget(ledger: Ledger, first_ids: list[int]) -> None:
    """These messages are gone."""
    for first_id in first_ids:
        stored = ledger.tables.get(TTL_OF, TTL_OF_KEY.pack(first_id))
        if stored is not None:
            ledger.tables.delete(TTL, KEY.pack(TTL_OF_VALUE.unpack(stored)[0], first_id))
            ledger.tables.delete(TTL_OF, TTL_OF_KEY.pack(first_id))


def expire_ms(ledger: Ledger, first_id: int) -> int:
    """When it expires, NEVER_MS if it does not."""
    stored = ledger.tables.get(TTL_OF, TTL_OF_KEY.pack(first_id))
    return TTL_OF_VALUE.unpack(stored)[0] if stored is not None else NEVER_MS


def first_ms(ledger: Ledger, start: bytes = b"") -> int:
    """When the first row from `start` on has to be looked at, NEVER_MS if there is none."""
    found = ledger.tables.range(TTL, start, None, 1)
    return KEY.unpack(found[0][0])[0] if found else NEVER_MS


def due(ledger: Ledger, now_ms: int, start: bytes, limit: int) -> list[bytes]:
    """Keys of the rows from `start` on whose time has come."""
    return [key for key, _ in ledger.tables.range(TTL, start, KEY.pack(now_ms + 1, 0), limit)]


def ends_something(ledger: Ledger, keys: list[bytes]) -> bool:
    """One of these messages waits. What is over, or leased, gives TTL_EXPIRE nothing to write down."""
    hours, indexes = find_entries(ledger, [KEY.unpack(key)[1] for key in keys])
    for hour in np.unique(hours[(hours >= 0) & (hours < DEAD_HOURS)]).tolist():
        hour_state = ledger.hours.get(hour)
        mine = indexes[hours == hour].tolist()
        if hour_state is None or any(i not in hour_state.settled and i not in hour_state.leased for i in mine):
            return True
    return False


def expire_due(ledger: Ledger, command: Maintain) -> JobResult:
    """End what waits and is over by state.now; drop the rows of what ended otherwise."""
    limit = min(max(command.limit, 1), MAX_SLICE)
    ids = []
    # Rows are only ever put behind now: before what was done there is none.
    keys = due(ledger, ledger.now_ms, ledger.ttl_from, limit)
    for key in keys:
        ledger.tables.delete(TTL, key)
        first_id = KEY.unpack(key)[1]
        # Later: it was leased when it expired, was looked at again in vain, and died; and was redriven since.
        if expire_ms(ledger, first_id) <= ledger.now_ms:
            ids.append(first_id)
    ended = _expire(ledger, ids)
    if keys:
        ledger.ttl_from = keys[-1] + b"\0"
    return JobResult(len(keys) < limit, ended)


def _expire(ledger: Ledger, ids: list[int]) -> int:
    hours, indexes = find_entries(ledger, ids)
    first_ids = np.array(ids, np.uint64)
    over_already: list[int] = first_ids[hours < 0].tolist()
    ended = 0
    for hour in np.unique(hours[(hours >= 0) & (hours < DEAD_HOURS)]).tolist():
        where = hours == hour
        rows = ledger.store.entries(hour, indexes[where].astype(np.uint32))
        hour_state = ledger.hour_state(hour)
        settled, leased = (
            np.array([i in bits for i in rows["index"].tolist()], np.bool_)
            for bits in (hour_state.settled, hour_state.leased)
        )
        over_already += rows["first_id"][settled].tolist()
        for first_id in rows["first_id"][leased].tolist():
            # The lease wins. When it ends, whoever ends it sees that the time is over.
            _look_at(ledger, ledger.now_ms + ledger.settings.max_lease_ms, first_id)
        # What went with its topic is cancelled: SWEEP writes it down.
        waiting = rows[~settled & ~leased & ledger.topics.owed(rows)]
        if len(waiting):
            end_waiting(ledger, hour, waiting)
            ended += len(waiting)
        over_already += rows["first_id"][~settled & ~leased].tolist()
    for first_id in over_already:
        ledger.tables.delete(TTL_OF, TTL_OF_KEY.pack(first_id))
    return ended


def end_waiting(ledger: Ledger, hour: int, rows: NDArray[np.void]) -> None:
    log_events(
        ledger, hour, rows, Event.TTL_EXPIRED,
        attempts=rows["attempt"], previous=NONE32, consumer=NONE32, node=ledger.no_node,
    )  # fmt: skip
    settle(ledger, hour, rows, Event.TTL_EXPIRED, leased=False)


def _look_at(ledger: Ledger, at_ms: int, first_id: int) -> None:
    ledger.tables.put(TTL, KEY.pack(at_ms, first_id), b"")
    ledger.listener.on_ttl(at_ms)
