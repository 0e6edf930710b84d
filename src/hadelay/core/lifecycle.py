"""The two things that happen to entries, whole columns at a time: they end, and they are filed anew elsewhere.

    filed ──▶ waiting ──GRANT──▶ leased ──ACK──▶ acked
                 │                 │
                 │                 └──NACK, EXPIRE──▶ moved: a new entry waits, same message id, attempt + 1
                 ├──CANCEL, SWEEP──▶ cancelled
                 └──CARRY──▶ moved: a new entry waits in the running hour, attempt unchanged

docs/spec/lifecycle.md is the table. An index entry is written once; what happens to it goes to the dispatch log of its
hour, and the bitmaps of HourState say what stands there.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hadelay.core.formats import DISPATCH
from hadelay.core.hourstate import bitmap
from hadelay.core.topics import by_topic, by_topic_bytes
from hadelay.model import HOUR_MS, NONE32, Event

if TYPE_CHECKING:
    from hadelay.core.state import DelayState

#: INDEX.flags: the attempt before this entry ended because its lease ran out, so its ack still counts until the
#: message is leased again.
FLAG_LEASE_EXPIRED = 1
#: It has a client key; it ends by itself (table `ttlof`); it is pushed to a URL of its own (meta `cb`).
FLAG_KEYED, FLAG_TTL, FLAG_CALLBACK = 2, 4, 8
#: Of the message, not of the entry: they go with it wherever it is filed anew.
FLAGS_OF_MESSAGE = FLAG_KEYED | FLAG_TTL | FLAG_CALLBACK

#: first id → where the message is now, for every message that ever moved.
PLACE = b"place"
PLACE_KEY = struct.Struct(">Q")
PLACE_VALUE = struct.Struct("<II")


def log_events(
    state: DelayState, hour: int, rows: NDArray[np.void], event: Event, *, attempts: NDArray[np.uint16],
    previous: NDArray[np.uint32] | int, consumer: NDArray[np.uint32] | int, node: int,
    other_hour: NDArray[np.int64] | int = NONE32,
) -> NDArray[np.uint32]:  # fmt: skip
    """Append one event per row (INDEX or HELD) to the hour's dispatch log; returns their numbers.

    For MOVED, `consumer` is the globalIndex of the new entry in `other_hour`, which makes the chain from a message's
    first entry to its last one readable from the files alone.
    """
    events = np.zeros(len(rows), DISPATCH)
    events["index"] = rows["index"]
    events["previous"] = previous
    events["other_hour"] = other_hour
    events["consumer"] = consumer
    events["at_ms"] = state.now_ms
    events["attempt"] = attempts
    events["event"] = event
    events["node"] = node
    first = state.store.append_events(hour, events)
    return np.arange(first, first + len(rows), dtype=np.uint32)


def settle(state: DelayState, hour: int, rows: NDArray[np.void], event: Event, *, leased: bool) -> None:
    """These open entries (INDEX or HELD rows of one hour) are over. `leased`: all of them were, else none."""
    bits = bitmap(rows["index"])
    hour_state = state.hour_state(hour)
    hour_state.settle(bits, event)
    if leased:
        hour_state.leased -= bits
    hour_state.drop_seconds(rows["second"])
    if hour < state.now_hour and not state.open_entries(hour):
        hour_state.open_seconds = None
    for number, count, size in by_topic_bytes(rows):
        topic = state.topics[number]
        topic.settled[event] += count
        if event is not Event.MOVED:
            topic.open -= count
            topic.bytes -= size
        if leased:
            topic.leased -= count
    state.listener.on_settled(hour, rows["index"], event)


def filed(state: DelayState, hours: int | NDArray[np.int64], rows: NDArray[np.void]) -> None:
    """Entries were appended: count them where counts are kept, and tell the leader."""
    if isinstance(hours, int):
        if hours == state.now_hour:
            state.hour_state(hours).add_seconds(rows["second"])
    else:
        running = hours == state.now_hour
        if running.any():
            state.hour_state(state.now_hour).add_seconds(rows["second"][running])
    keyed = rows["flags"] & FLAG_KEYED != 0
    if keyed.any():
        for hour, count in by_topic(np.broadcast_to(hours, len(rows))[keyed]):
            state.hour_state(hour).keyed += count
    state.listener.on_filed(hours, rows)


def move(
    state: DelayState, hour: int, rows: NDArray[np.void], *, deliver_at_ms: NDArray[np.int64] | int, attempts: int,
    flags: NDArray[np.uint16] | int, previous: NDArray[np.uint32] | int, node: int, leased: bool,
) -> None:  # fmt: skip
    """File the messages of these open INDEX rows anew, under max(second of deliver_at, second of now).

    `attempts` is added to the attempt of each; `flags` are the new entry's, and those of the message stay. Within the
    hour the new entry points at the same record; into another hour the record is copied, so that an hour is complete
    by itself.
    """
    new = rows.copy()
    new["deliver_at_ms"] = deliver_at_ms
    # No limit of attempts is a limit of 65,534: there it stays.
    new["attempt"] = np.minimum(rows["attempt"], 0xFFFE - attempts) + attempts
    new["flags"] = rows["flags"] & FLAGS_OF_MESSAGE | flags
    filing_ms = np.maximum(new["deliver_at_ms"], state.now_ms)
    hours = filing_ms // HOUR_MS
    new["second"] = filing_ms % HOUR_MS // 1000
    _append_moved(state, hour, hours, new)
    log_events(
        state, hour, rows, Event.MOVED,
        attempts=new["attempt"], previous=previous, consumer=new["index"], node=node,
        other_hour=hours,
    )  # fmt: skip
    settle(state, hour, rows, Event.MOVED, leased=leased)
    put = state.tables.put
    for first_id, to, index in zip(new["first_id"].tolist(), hours.tolist(), new["index"].tolist(), strict=True):
        put(PLACE, PLACE_KEY.pack(first_id), PLACE_VALUE.pack(to, index))
    for to, count in by_topic(hours):
        state.hour_state(to).returned += count
    filed(state, hours, new)


def _append_moved(state: DelayState, hour: int, hours: NDArray[np.int64], new: NDArray[np.void]) -> None:
    within = hours == hour
    if within.all():
        state.store.append_again(hour, new)
    elif not within.any():
        records = [
            state.store.record(hour, offset, size, verify=True)
            for offset, size in zip(new["offset"].tolist(), new["size"].tolist(), strict=True)
        ]
        state.store.append(hours, new, bytearray(b"".join(records)))
    else:
        for part in (within, ~within):
            some = new[part]
            _append_moved(state, hour, hours[part], some)
            new[part] = some
