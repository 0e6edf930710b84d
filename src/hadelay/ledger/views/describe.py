"""One message with its history, for GET: from the index, the record and the dispatch logs of the message's hours."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from hadelay.codec.commandtypes import MAX_AHEAD_MS
from hadelay.codec.formats import CONSUMER, NODE, REASON, nack_reason
from hadelay.codec.records import decode_record
from hadelay.ledger.hours.lookup import EntryRef, find_entry, state_of
from hadelay.ledger.hours.retries import EXCUSED_AT
from hadelay.ledger.hours.transitions import failures_of
from hadelay.ledger.leases.ackresults import result_of
from hadelay.ledger.state import NO_NODE, Ledger
from hadelay.ledger.topics.topics import TopicState
from hadelay.model import DEAD_HOURS, MOVES, NEVER_MS, NONE32, Description, Event, PastEvent, Retry, State, unpack_id

#: Limit of events in a history: bounds the time of an answer about a message that is nacked again and again.
MAX_EVENTS = 1_000
#: Number of dispatch log entries that are read in one go, 2 MiB.
_CHUNK = 65_536


def describe(ledger: Ledger, message_id: int, now_ms: int = 0, *, body: bool = False) -> Description | None:
    """Describe one message with its history; None if there is none. now_ms: cluster time of the request; the ledger's
    time stands still while nothing is applied."""
    place = find_entry(ledger, message_id)
    if place is None:
        return None
    row = place.rows[0]
    history, attempts = _history(ledger, message_id, place)
    now_ms = max(now_ms, ledger.now_ms)
    found, topic = state_of(ledger, place, now_ms), ledger.topics[int(row["topic"])]
    if found in _OVER and history and history[-1].at_ms + _kept_ms(topic) <= now_ms:
        return None  # a message that ended longer ago than its topic's retention is gone, even if its files still exist
    view = described(ledger, place.hour, row, found, max(attempts, int(row["attempt"])), history, body=body)
    if found is State.ACKED:
        view.result = result_of(ledger, message_id)
    if found is State.LEASED:
        reporting = (grant for grant in ledger.grants.values() if grant.progress)
        view.progress = next(filter(None, (grant.progress_of(place.hour, place.index) for grant in reporting)), None)
    return view


def described(
    ledger: Ledger, hour: int, row: np.void, found: State, attempt: int, history: list[PastEvent], *, body: bool
) -> Description:
    """Describe the message of an entry, from its INDEX row and its record, whose checksum is verified."""
    record = decode_record(ledger.store.record(hour, int(row["offset"]), int(row["size"]), verify=True))
    topic = ledger.topics[int(row["topic"])]
    return Description(
        int(row["first_id"]),
        topic.name,
        found,
        # The entry of a dead letter has the time of death instead of the due time, which is in the record.
        record.deliver_at_ms if found is State.DEAD else int(row["deliver_at_ms"]),
        record.published_at_ms,
        attempt,
        record.meta,
        len(record.body),
        history,
        record.body if body else None,
        hour,
        int(row["index"]),
        retry=_retry(ledger, topic, row) if found in _WAITING else None,
    )


def _retry(ledger: Ledger, topic: TopicState, row: np.void) -> Retry | None:
    """The next attempt of a waiting message, from its INDEX row; None if no attempt failed yet."""
    failures = int(row["attempt"]) - (int(row["flags"]) >> EXCUSED_AT)
    if failures <= 0:
        return None
    known = failures_of(ledger, int(row["first_id"]))
    last = None
    if known:
        at_ms, event, attempt, reason = known[-1]
        words = None if reason == NONE32 else ledger.names.name(REASON, reason)
        last = PastEvent(event, at_ms, attempt, None, None, words)
    return Retry(failures + 1, topic.settings.max_attempts or None, last)


_WAITING = (State.SCHEDULED, State.READY, State.BLOCKED)
_OVER = (State.ACKED, State.CANCELLED, State.EXPIRED)


def _kept_ms(topic: TopicState) -> int:
    """Retention of the topic in ms; a topic without this setting keeps a settled message until the files of its hour
    are removed."""
    kept: int = topic.config.get("retention_ms", NEVER_MS)
    return kept


def _history(ledger: Ledger, message_id: int, place: EntryRef) -> tuple[list[PastEvent], int]:
    """Returns (events of the message, its highest attempt).

    The entries are followed forwards: a `moved` event names the next entry. When the first hour is retired, the history
    begins with the present entry.
    """
    _, hour, index = unpack_id(message_id)
    if index >= ledger.store.count(hour):
        hour, index = place.hour, place.index
    happened: list[PastEvent] = []
    attempts = 0
    while len(happened) < MAX_EVENTS:
        following = None
        for event in _events_of(ledger, hour, index):
            kind = Event(int(event["event"]))
            if kind in MOVES:
                following = int(event["other_hour"]), int(event["consumer"])
            if kind is Event.LEASED or kind is Event.ACKED:
                attempts = max(attempts, int(event["attempt"]))
            elif kind in (Event.REDRIVEN, Event.TRANSFERRED) or (
                kind is Event.DEAD and int(event["other_hour"]) < DEAD_HOURS
            ):
                attempts = 0  # after a redrive, and in another topic, attempts are counted from 0 again
            happened.append(_history_event(ledger, hour, event, kind))
        if following is None:
            break
        hour, index = following
    return happened, attempts


def over(ledger: Ledger, topic: TopicState, hour: int, index: int, now_ms: int) -> bool:
    """Whether the message of a settled entry is past its topic's retention."""
    kept_ms = _kept_ms(topic)
    if kept_ms >= NEVER_MS:
        return False
    events = _events_of(ledger, hour, index)
    return bool(events) and int(events[-1]["at_ms"]) + kept_ms <= now_ms


def _events_of(ledger: Ledger, hour: int, index: int) -> list[np.void]:
    """Events of one entry, in order. Each event has its predecessor's number: only the last is searched for."""
    hour_state = ledger.hours.get(hour)
    if hour_state is None or (index not in hour_state.settled and index not in hour_state.leased):
        return []  # the entry has no event: spare a search through the dispatch log
    last = _last_event(ledger, hour, index, hour_state.ended(index))
    mine: list[np.void] = []
    while last != NONE32:
        mine.append(ledger.store.events(hour, slice(last, last + 1))[0])
        last = int(mine[-1]["previous"])
    return mine[::-1]


def _last_event(ledger: Ledger, hour: int, index: int, ended: Event | None) -> int:
    """Number of the entry's last event. Searches the dispatch log alternately backwards from its end and forwards from
    the time when the entry could be leased: at most twice the cost of the shorter search."""
    start, end = 0, ledger.store.event_count(hour)
    # Search the whole log for a late ack, and for an end other than an ack: such an event may precede the due time.
    if ended in (None, Event.ACKED) and index not in ledger.hours[hour].late:
        due_ms = int(ledger.store.entries(hour, slice(index, index + 1))["deliver_at_ms"][0])
        start = _first_event_at(ledger, hour, due_ms - MAX_AHEAD_MS)
    while start < end:
        # Search without checksums: the caller reads the found event again and verifies it.
        for chunk in (slice(start, min(start + _CHUNK, end)), slice(max(start, end - _CHUNK), end)):
            events = ledger.store.events(hour, chunk, verify=False)
            found = np.flatnonzero(events["index"] == index)
            if len(found) and (chunk.stop == end or events["event"][found[-1]] == (ended or Event.LEASED)):
                return chunk.start + int(found[-1])
        start, end = min(start + _CHUNK, end), max(start, end - _CHUNK)
    return NONE32


def _first_event_at(ledger: Ledger, hour: int, at_ms: int) -> int:
    """Number of the hour's first event at or after at_ms, by bisection: events are in the order of time."""

    def time_of(number: int) -> int:
        return int(ledger.store.events(hour, slice(number, number + 1), verify=False)["at_ms"][0])

    return bisect_left(range(ledger.store.event_count(hour)), at_ms, key=time_of)


def _history_event(ledger: Ledger, hour: int, event: np.void, kind: Event) -> PastEvent:
    consumer = NONE32 if kind in MOVES else int(event["consumer"])
    node, other = int(event["node"]), int(event["other_hour"])
    reason = int(nack_reason(event["other_hour"])) if kind is Event.NACKED else NONE32
    at_ms, due_ms, moved_ms = int(event["at_ms"]), None, None
    if kind is Event.LEASED:  # the lease may begin up to 100 ms early, but the message is handed out when due
        index = int(event["index"])
        due_ms = int(ledger.store.entries(hour, slice(index, index + 1))["deliver_at_ms"][0])
        at_ms = max(at_ms, due_ms)
    if kind is Event.MOVED:
        before, after = (hour, int(event["index"])), (other, int(event["consumer"]))
        moved_ms = _due_times(ledger, before, after)
    return PastEvent(
        kind,
        at_ms,
        int(event["attempt"]),
        None if consumer == NONE32 else ledger.names.name(CONSUMER, consumer),
        None if node == NO_NODE else ledger.names.name(NODE, node),
        ledger.names.name(REASON, reason) if reason != NONE32 else None,
        hour if kind in MOVES else None,
        other if kind in MOVES else None,
        due_ms,
        moved_ms,
    )


def _due_times(ledger: Ledger, *entries: tuple[int, int]) -> tuple[int, int] | None:
    """Due times of an entry and of the entry that its message moved to, each given as (hour, index); None if the due
    times are equal, or if one of the hours is deleted."""
    if any(index >= ledger.store.count(hour) for hour, index in entries):
        return None
    rows = (ledger.store.entries(hour, slice(index, index + 1))[0] for hour, index in entries)
    before_ms, after_ms = (int(row["deliver_at_ms"]) for row in rows)
    return None if before_ms == after_ms else (before_ms, after_ms)
