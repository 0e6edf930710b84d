"""The two ways in which index entries change: entries end, and messages are filed anew in other entries.

    filed ──▶ waiting ──GRANT──▶ leased ──ACK──▶ acked
                 │                 │
                 │                 ├──NACK, EXPIRE──▶ moved: a new entry waits, same message id, attempt + 1
                 │                 └──for the last time──▶ dead: a new entry lies in a dead hour (ledger/leases/dead.py)
                 ├──CANCEL, SWEEP──▶ cancelled
                 ├──TTL_EXPIRE──▶ expired
                 └──CARRY──▶ moved: a new entry waits in the running hour, attempt unchanged

docs/spec/lifecycle.md is the table. An index entry is written once; what happens to it goes to the dispatch log of its
hour, and the bitmaps of HourState say what stands there.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap

from hadelay.codec.formats import DISPATCH, I64, U32, Mask, Rows
from hadelay.ledger.batches import members
from hadelay.ledger.groups import messagegroups
from hadelay.ledger.hours import retries
from hadelay.ledger.hours.hourstate import HourState, bitmap, is_in
from hadelay.ledger.hours.retries import EXCUSED_AT, excused
from hadelay.ledger.state import NO_NODE, Ledger
from hadelay.ledger.topics.topics import by_topic, by_topic_bytes
from hadelay.model import DEAD_HOURS, HOUR_MS, MOVES, NONE32, Event

#: Bit of INDEX.flags: the last attempt's lease ran out. An ack of the attempt counts until the next lease begins.
FLAG_LEASE_EXPIRED = 1
#: Bits of INDEX.flags: the message has a client key, a TTL (table `ttlof`), a webhook URL of its own (meta `cb`).
FLAG_KEYED, FLAG_TTL, FLAG_CALLBACK = 2, 4, 8
#: Bit of INDEX.flags: the message died in another topic and was routed to this one, which keeps it if it dies again.
FLAG_ROUTED = 16
#: Bit of INDEX.flags: the message may have been handed out although its `deliver_at_ms` does not show it. It was due,
#: or nearly, when it was rescheduled, or a failed leader of interval mode (ledger/leases/suspects.py) may have handed
#: it out before it was rolled forward.
FLAG_WAS_DUE = 32
#: Limit of bytes of records that one command copies into other hours or reads for callbacks; later commands continue.
MOVE_BYTES = 4 << 20
#: Flags that belong to the message and stay when it is filed anew; other flags belong to one entry.
FLAGS_OF_MESSAGE = FLAG_KEYED | FLAG_TTL | FLAG_CALLBACK | FLAG_ROUTED | FLAG_WAS_DUE

#: Layout of the key in tables that are keyed by message id.
ID_KEY = struct.Struct(">Q")
#: Table: id of a message that moved → hour and index of its entry, topic that it was routed from, last failures.
PLACE = b"place"
PLACE_VALUE = struct.Struct("<II")
SOURCE = struct.Struct("<I")
#: Layout of a failed attempt: at_ms, reason (a name's number, or NONE32), attempt, event.
FAILURE = struct.Struct("<qIHBx")
MAX_FAILURES = 16


class FailedTry(NamedTuple):
    """Reason for which an attempt ended without an ack; stored with the time and number of the attempt."""

    event: Event
    #: Number of the reason among the names of kind REASON; NONE32 without a reason.
    reason: int


class Leaving(NamedTuple):
    """Open entries of one hour (INDEX or LEASED rows) that end together."""

    hour: int
    rows: Rows
    #: Number of each entry's last event in the hour's dispatch log; NONE32 if there is none.
    previous: U32 | int = NONE32
    #: Number of the node that took the request which ends the entries; NO_NODE if no request does.
    node: int = NO_NODE
    #: True if all of the rows are leased, False if none is.
    leased: bool = False
    #: Failure to store with the messages (table `place`) when they are filed anew.
    failure: FailedTry | None = None

    def some(self, which: Mask) -> Leaving:
        previous = self.previous if isinstance(self.previous, int) else self.previous[which]
        return self._replace(rows=self.rows[which], previous=previous)


def log_events(
    ledger: Ledger, hour: int, rows: Rows, event: Event, *, node: int, attempts: NDArray[np.uint16] | None = None,
    previous: U32 | int = NONE32, consumer: U32 | int = NONE32, other_hour: I64 | U32 | int = NONE32,
) -> U32:  # fmt: skip
    """Append one event per row (INDEX or LEASED) to the hour's dispatch log; returns the events' numbers. attempts:
    attempt numbers, if other than those of the rows.

    For MOVES, `consumer` is the globalIndex of the new entry in `other_hour`, which makes the chain from a message's
    first entry to its last one readable from the files alone. For NACKED, `other_hour` is the reason.
    """
    events = np.zeros(len(rows), DISPATCH)
    events["index"] = rows["index"]
    events["previous"] = previous
    events["other_hour"] = other_hour
    events["consumer"] = consumer
    events["at_ms"] = ledger.now_ms
    events["attempt"] = rows["attempt"] if attempts is None else attempts
    events["event"] = event
    events["node"] = node
    first = ledger.store.append_events(hour, events)
    return np.arange(first, first + len(rows), dtype=np.uint32)


def settle(
    ledger: Ledger, leaving: Leaving, event: Event, *, attempts: NDArray[np.uint16] | None = None,
    consumer: U32 | int = NONE32, other_hour: I64 | U32 | int = NONE32,
) -> None:  # fmt: skip
    """End open entries with this event; in an hour of dead letters, this means that the letters are redriven. attempts,
    consumer, other_hour: as in `log_events`."""
    hour, rows = leaving.hour, leaving.rows
    log_events(
        ledger, hour, rows, event, node=leaving.node, attempts=attempts, previous=leaving.previous, consumer=consumer,
        other_hour=other_hour,
    )  # fmt: skip
    bits = bitmap(rows["index"])
    hour_state = ledger.hour_state(hour)
    hour_state.settle(bits, event)
    hour_state.leased -= bits
    retries.end(ledger, hour, rows)
    unblocked, blocked = rows, hour_state.blocked
    if blocked:
        unblocked, blocked = rows[~is_in(rows["index"], blocked)], blocked & bits
        hour_state.blocked -= bits
    hour_state.drop_seconds(unblocked["second"])
    if hour < ledger.now_hour and not ledger.open_entries(hour):
        hour_state.open_seconds = None
    if event not in MOVES:
        hour_state.settled_at_ms = ledger.now_ms
    grouped, batched = _count_settled(ledger, leaving, event, hour_state)
    if hour < DEAD_HOURS:
        if len(unblocked):
            ledger.listener.on_settled(hour, unblocked["index"], event)
        if grouped:
            messagegroups.leave(ledger, hour, rows, blocked, event)
        if batched and event not in (Event.MOVED, Event.TRANSFERRED):
            members.leave(ledger, hour, rows, event)


def _count_settled(ledger: Ledger, leaving: Leaving, event: Event, hour_state: HourState) -> tuple[bool, bool]:
    """Count settled entries in their topics. Returns two flags: whether one of the messages may be in a message group,
    and whether one may be a member of a batch."""
    hour, rows, grouped, batched = leaving.hour, leaving.rows, False, False
    for number, count, size in by_topic_bytes(rows):
        if event not in MOVES:
            hour_state.topics.add(number)
        topic = ledger.topics[number]
        grouped |= bool(topic.group_rows)
        batched |= topic.batched
        topic.before_change()
        topic.settled[event] += count
        if event is Event.DEAD:
            ledger.topics.died.add(number)
        if hour >= DEAD_HOURS:
            topic.dead -= count
        elif event is not Event.MOVED:
            topic.open -= count
            topic.bytes -= size
            if topic.batched and not topic.open:
                topic.batched = False
        if leaving.leased:
            topic.leased -= count
        if number in ledger.fills and event is Event.ACKED:
            kept = hour_state.unfilled.setdefault(number, BitMap())
            kept |= bitmap(rows["index"][rows["topic"] == number])
        if topic.settings.expires_after_ms is not None:
            topic.used_ms = ledger.now_ms
    return grouped, batched


def filed(ledger: Ledger, hours: int | I64, rows: Rows, blocked: Mask | None = None) -> None:
    """Count entries that were appended, by second and by client key, and tell the listener. blocked: which of the
    entries are blocked by their message groups."""
    keyed = rows["flags"] & FLAG_KEYED != 0
    if isinstance(hours, int):
        if keyed.any():
            ledger.hour_state(hours).keyed += int(np.count_nonzero(keyed))
    else:
        for hour, count in by_topic(hours[keyed]) if keyed.any() else ():
            ledger.hour_state(hour).keyed += count
    if blocked is not None and blocked.any():
        rows, hours = rows[~blocked], hours if isinstance(hours, int) else hours[~blocked]
    if isinstance(hours, int):
        if hours == ledger.now_hour:
            ledger.hour_state(hours).add_seconds(rows["second"])
    else:
        running = hours == ledger.now_hour
        if running.any():
            ledger.hour_state(ledger.now_hour).add_seconds(rows["second"][running])
    if len(rows):
        ledger.listener.on_filed(hours, rows)


def move(
    ledger: Ledger, leaving: Leaving, *, deliver_at_ms: I64 | int, attempts: int = 0,
    flags: NDArray[np.uint16] | int = 0, again: bool = True, excuse: int = 0,
    generations: NDArray[np.uint16] | None = None,
) -> None:  # fmt: skip
    """File messages (INDEX rows) anew, under the second of their new due time, or of now if that is later.

    Within the hour the new entry points at the same record; into another hour the record is copied, so that an hour is
    complete by itself. attempts: number added to each message's attempt number. flags: set for the new entries, beside
    the flags that stay with a message. again: the new entries get new generations, so that earlier purges do not cover
    them, and a new position in their message group. excuse: number of `attempts` that do not count as attempts, at most
    MAX_EXCUSED per message. generations: of the new entries, if `again`; None: the latest generations of their topics.
    """
    rows = leaving.rows
    new = rows.copy()
    new["deliver_at_ms"] = deliver_at_ms
    # Attempt numbers stop at 65,534, also in topics without a limit of attempts.
    new["attempt"] = np.minimum(rows["attempt"], 0xFFFE - attempts) + attempts
    new["flags"] = rows["flags"] & FLAGS_OF_MESSAGE | flags
    new["flags"] |= (excused(rows) + np.uint16(excuse)) << np.uint16(EXCUSED_AT)
    if again:
        new["generation"] = ledger.topics.generations[rows["topic"]] if generations is None else generations
    filing_ms = np.maximum(new["deliver_at_ms"], ledger.now_ms)
    hours: I64 = filing_ms // HOUR_MS
    new["second"] = filing_ms % HOUR_MS // 1000
    file_anew(ledger, leaving, hours, new, Event.MOVED, attempts=new["attempt"])
    blocked = None
    if any(ledger.topics[number].group_rows for number, _ in by_topic(rows["topic"])):
        blocked = messagegroups.rejoin(ledger, hours, new, keep=not again, retry=leaving.leased)
    retries.begin(ledger, hours, new)
    filed(ledger, hours, new, blocked)


def file_anew(
    ledger: Ledger, leaving: Leaving, hours: I64, new: Rows, event: Event, *, attempts: NDArray[np.uint16],
    source: int | None = None,
) -> None:  # fmt: skip
    """Append `new` entries to `hours` in place of the leaving INDEX rows, which end with `event`. The caller then calls
    `filed`, unless the hours are for dead letters. source: topic from which the messages are routed away."""
    _append_moved(ledger, leaving.hour, hours, new)
    settle(ledger, leaving, event, attempts=attempts, consumer=new["index"], other_hour=hours)
    hour_state = ledger.hour_state(leaving.hour)
    if hour_state.batched and event is not Event.DEAD:
        members.follow(ledger, leaving.hour, leaving.rows, hours, new, leased=leaving.leased)
    if filled := hour_state.filled:
        for before, to, index in zip(
            leaving.rows["index"].tolist(), hours.tolist(), new["index"].tolist(), strict=True
        ):
            if before in filled:
                filled.remove(before)
                ledger.hour_state(to).filled.add(index)
    put = ledger.tables.put
    tails = _kept(ledger, leaving, attempts, source)
    for first_id, to, index, tail in zip(
        new["first_id"].tolist(), hours.tolist(), new["index"].tolist(), tails, strict=True
    ):
        put(PLACE, ID_KEY.pack(first_id), PLACE_VALUE.pack(to, index) + tail)
    for to, count in by_topic(hours.astype(np.uint32)):
        ledger.hour_state(to).returned += count


def _kept(ledger: Ledger, leaving: Leaving, attempts: NDArray[np.uint16], source: int | None) -> list[bytes]:
    """Values of messages in table `place`, without the entry: source topic, and last failures with the new one."""
    rows, failure, get = leaving.rows, leaving.failure, ledger.tables.get
    # Skip the look-up for a message whose id names this entry: the message never moved, and has no failures.
    own = rows["index"].astype(np.uint64) | np.uint64(leaving.hour << 32)
    first = rows["first_id"] & np.uint64((1 << 56) - 1) == own
    tails = [
        (not at_home and (get(PLACE, ID_KEY.pack(first_id)) or b"")[PLACE_VALUE.size :]) or SOURCE.pack(NONE32)
        for first_id, at_home in zip(rows["first_id"].tolist(), first.tolist(), strict=True)
    ]
    if source is not None:
        tails = [SOURCE.pack(source) + tail[SOURCE.size :] for tail in tails]
    if failure is None:
        return tails
    room = (MAX_FAILURES - 1) * FAILURE.size
    pack, now_ms = FAILURE.pack, ledger.now_ms
    return [
        tail[: SOURCE.size] + tail[SOURCE.size :][-room:] + pack(now_ms, failure.reason, attempt, failure.event)
        for tail, attempt in zip(tails, attempts.tolist(), strict=True)
    ]


def failures_of(ledger: Ledger, first_id: int) -> list[tuple[int, Event, int, int]]:
    """The message's last failed attempts, oldest first: (at_ms, event, attempt, reason)."""
    stored = ledger.tables.get(PLACE, ID_KEY.pack(first_id)) or b""
    return [
        (at_ms, Event(event), attempt, reason)
        for at_ms, reason, attempt, event in FAILURE.iter_unpack(stored[PLACE_VALUE.size + SOURCE.size :])
    ]


def source_of(ledger: Ledger, first_id: int) -> int:
    """Number of the topic whose `dead_letter` routed the message away last, or NONE32."""
    stored = ledger.tables.get(PLACE, ID_KEY.pack(first_id))
    return NONE32 if stored is None else int(SOURCE.unpack_from(stored, PLACE_VALUE.size)[0])


def fitting(costs: NDArray[np.integer], room: int, *, at_least: bool = True) -> int:
    """Number of messages, from the first on, whose `costs` add up to at most `room` bytes. at_least: 1 in any case."""
    fits = int(np.cumsum(costs, dtype=np.int64).searchsorted(room, "right"))
    return max(fits, 1) if at_least and len(costs) else fits


def _append_moved(ledger: Ledger, hour: int, hours: I64, new: Rows) -> None:
    within = hours == hour
    if within.all():
        ledger.store.append_again(hour, new)
    elif not within.any():
        records = [
            ledger.store.record(hour, offset, size, verify=True)
            for offset, size in zip(new["offset"].tolist(), new["size"].tolist(), strict=True)
        ]
        ledger.store.append(hours, new, bytearray(b"".join(records)))
    else:
        for part in (within, ~within):
            some = new[part]
            _append_moved(ledger, hour, hours[part], some)
            new[part] = some
