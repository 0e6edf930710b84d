"""One message with its history, for GET: from the index, the record and the dispatch logs it went through."""

from __future__ import annotations

import numpy as np

from hadelay.codec.commandtypes import MAX_AHEAD_MS
from hadelay.codec.formats import CONSUMER, NODE, REASON, RECORD, RECORD_SIZE, nack_reason
from hadelay.ledger.lookup import EntryRef, find_entry, state_of
from hadelay.ledger.state import NO_NODE, Ledger
from hadelay.ledger.topics import Topic
from hadelay.model import DEAD_HOURS, MOVES, NEVER_MS, NONE32, Description, Event, HistoryEvent, State, unpack_id

#: A history is cut here: a message nacked for ever is still answered in no time.
MAX_EVENTS = 1_000
#: Dispatch log entries looked at in one go, 2 MiB.
_CHUNK = 65_536


def describe(ledger: Ledger, message_id: int, now_ms: int = 0, *, body: bool = False) -> Description | None:
    """`now_ms`: cluster time of the question, since state.now stands still while nothing is applied."""
    place = find_entry(ledger, message_id)
    if place is None:
        return None
    row = place.rows[0]
    history, attempts = _history(ledger, message_id, place)
    now_ms = max(now_ms, ledger.now_ms)
    found, topic = state_of(ledger, place, now_ms), ledger.topics[int(row["topic"])]
    if found in _OVER and history and history[-1].at_ms + _kept_ms(topic) <= now_ms:
        return None  # its hour may be kept longer, for the sake of other topics
    return described(ledger, place.hour, row, found, max(attempts, int(row["attempt"])), history, body=body)


def described(
    ledger: Ledger, hour: int, row: np.void, found: State, attempt: int, history: list[HistoryEvent], *, body: bool
) -> Description:
    """Of the entry that has this INDEX row, by its record, which is verified."""
    record = ledger.store.record(hour, int(row["offset"]), int(row["size"]), verify=True)
    header = np.frombuffer(record, RECORD, 1)[0]
    meta_end = RECORD_SIZE + int(header["meta_size"])
    return Description(
        int(row["first_id"]),
        ledger.topics[int(row["topic"])].name,
        found,
        # A dead letter's entry has the time of its death.
        int((header if found is State.DEAD else row)["deliver_at_ms"]),
        int(header["published_at_ms"]),
        attempt,
        record[RECORD_SIZE:meta_end],
        len(record) - meta_end,
        history,
        record[meta_end:] if body else None,
        hour,
        int(row["index"]),
    )


_OVER = (State.ACKED, State.CANCELLED, State.EXPIRED)


def _kept_ms(topic: Topic) -> int:
    """A topic that says nothing keeps what it has for as long as its hours last."""
    kept: int = topic.config.get("retention_ms", NEVER_MS)
    return kept


def _history(ledger: Ledger, message_id: int, place: EntryRef) -> tuple[list[HistoryEvent], int]:
    """Every event from the first entry on, and the highest attempt among them.

    The chain is followed forwards: a `moved` event names the next entry. When the first hour is retired, what is
    left is the history of the present entry.
    """
    _, hour, index = unpack_id(message_id)
    if index >= ledger.store.count(hour):
        hour, index = place.hour, place.index
    happened: list[HistoryEvent] = []
    attempts = 0
    while len(happened) < MAX_EVENTS:
        following = None
        for event in _events_of(ledger, hour, index):
            kind = Event(int(event["event"]))
            if kind in MOVES:
                following = int(event["other_hour"]), int(event["consumer"])
            if kind is Event.LEASED or kind is Event.ACKED:
                attempts = max(attempts, int(event["attempt"]))
            elif kind is Event.REDRIVEN or (kind is Event.DEAD and int(event["other_hour"]) < DEAD_HOURS):
                attempts = 0  # it began anew
            happened.append(_history_event(ledger, hour, event, kind))
        if following is None:
            break
        hour, index = following
    return happened, attempts


def over(ledger: Ledger, topic: Topic, hour: int, index: int, now_ms: int) -> bool:
    """The entry's message is settled, and past its topic's retention."""
    kept_ms = _kept_ms(topic)
    if kept_ms >= NEVER_MS:
        return False
    events = _events_of(ledger, hour, index)
    return bool(events) and int(events[-1]["at_ms"]) + kept_ms <= now_ms


def _events_of(ledger: Ledger, hour: int, index: int) -> list[np.void]:
    """Events of one entry, the first one first: its last one is looked for, the others hang on it."""
    hour_state = ledger.hours.get(hour)
    if hour_state is None or (index not in hour_state.settled and index not in hour_state.leased):
        return []  # nothing has happened to it: no need to look through the hour
    last = _last_event(ledger, hour, index, hour_state.ended(index))
    mine: list[np.void] = []
    while last != NONE32:
        mine.append(ledger.store.events(hour, slice(last, last + 1))[0])
        last = int(mine[-1]["previous"])
    return mine[::-1]


def _last_event(ledger: Ledger, hour: int, index: int, ended: Event | None) -> int:
    """Number of the entry's last event: looked for from the end, where the latest stand, and forwards from when it
    could be leased, where the lease and what ended it usually stand; by turns, so that it costs no more than twice the
    shorter way.
    """
    start, end = 0, ledger.store.event_count(hour)
    # An ack that came late (of the attempt before) may stand before the time it was due.
    if ended in (None, Event.ACKED) and index not in ledger.hours[hour].late:
        due_ms = int(ledger.store.entries(hour, slice(index, index + 1))["deliver_at_ms"][0])
        start = _first_event_at(ledger, hour, due_ms - MAX_AHEAD_MS)
    while start < end:
        # Unverified: what counts is read again, by its number.
        for chunk in (slice(start, min(start + _CHUNK, end)), slice(max(start, end - _CHUNK), end)):
            events = ledger.store.events(hour, chunk, verify=False)
            found = np.flatnonzero(events["index"] == index)
            if len(found) and (chunk.stop == end or events["event"][found[-1]] == (ended or Event.LEASED)):
                return chunk.start + int(found[-1])
        start, end = min(start + _CHUNK, end), max(start, end - _CHUNK)
    return NONE32


def _first_event_at(ledger: Ledger, hour: int, at_ms: int) -> int:
    """Number of the hour's first event at that time or after it: they stand in the order in which they happened."""
    low, high = 0, ledger.store.event_count(hour)
    while low < high:
        middle = (low + high) // 2
        if int(ledger.store.events(hour, slice(middle, middle + 1), verify=False)["at_ms"][0]) < at_ms:
            low = middle + 1
        else:
            high = middle
    return low


def _history_event(ledger: Ledger, hour: int, event: np.void, kind: Event) -> HistoryEvent:
    consumer = NONE32 if kind in MOVES else int(event["consumer"])
    node, other = int(event["node"]), int(event["other_hour"])
    reason = int(nack_reason(event["other_hour"])) if kind is Event.NACKED else NONE32
    at_ms, due_ms = int(event["at_ms"]), None
    if kind is Event.LEASED:  # the commit may have come first; it was handed out when it was due
        index = int(event["index"])
        due_ms = int(ledger.store.entries(hour, slice(index, index + 1))["deliver_at_ms"][0])
        at_ms = max(at_ms, due_ms)
    return HistoryEvent(
        kind,
        at_ms,
        int(event["attempt"]),
        None if consumer == NONE32 else ledger.names.name(CONSUMER, consumer),
        None if node == NO_NODE else ledger.names.name(NODE, node),
        ledger.names.name(REASON, reason) if reason != NONE32 else None,
        hour if kind in MOVES else None,
        other if kind in MOVES else None,
        due_ms,
    )
