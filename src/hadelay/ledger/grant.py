"""GRANT: which of the proposed messages a consumer gets, decided message by message, written column by column."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.commandtypes import MAX_AHEAD_MS, Grant
from hadelay.codec.formats import CONSUMER, NODE
from hadelay.codec.results import GrantResult, Refused
from hadelay.ledger.grants import HELD, HeldGrant
from hadelay.ledger.hourstate import bitmap, groups, indexes_of
from hadelay.ledger.lookup import expired, find_entry
from hadelay.ledger.state import Ledger
from hadelay.ledger.topics import by_topic
from hadelay.ledger.transitions import log_events, move
from hadelay.model import DEAD_HOURS, NONE32, Event


def apply_grant(ledger: Ledger, command: Grant) -> GrantResult | Refused:
    count = len(command.hours)
    result = GrantResult(command.term, command.seq, np.zeros(count, bool), np.zeros(count, np.uint16), 0)
    held = ledger.held_by(command.consumer, command.request_id)
    if held is not None:
        result.existing = held.key
        return result
    if (command.term, command.seq) in ledger.grants:
        return Refused("grant_exists", f"{command.term}/{command.seq} was granted before")
    due_ms = ledger.now_ms + min(command.ahead_ms, MAX_AHEAD_MS)
    result.until_ms = due_ms + min(max(command.lease_ms, 1), ledger.settings.max_lease_ms)
    consumer = ledger.number_of(CONSUMER, command.consumer)
    node = ledger.number_of(NODE, command.node)
    rows = np.zeros(count, HELD)
    rows["hour"], rows["index"], rows["until_ms"] = command.hours, command.indexes, result.until_ms
    for hour, where in groups(command.hours):
        part = rows[where]
        _lease(ledger, hour, part, consumer, node, command.handed, due_ms)
        rows[where] = part
    result.granted = rows["open"] == 1
    if command.handed and not result.granted.all():
        _count_handed(ledger, rows[~result.granted], node)
    result.attempts = rows["attempt"]
    left = int(np.count_nonzero(result.granted))
    if left:
        grant = HeldGrant(
            command.term, command.seq, command.consumer, consumer, command.request_id, ledger.now_ms, rows, left
        )
        ledger.grants[grant.key] = grant
        _remember_request(ledger, grant)
        ledger.listener.on_granted(grant)
    return result


def _lease(
    ledger: Ledger, hour: int, rows: NDArray[np.void], consumer: int, node: int, handed: bool, due_ms: int
) -> None:
    """Lease those of these rows that may be; fills everything but hour, index and until_ms, `open` included."""
    inside = rows["index"] < (ledger.store.count(hour) if hour < DEAD_HOURS else 0)
    if not inside.all():
        some = rows[inside]
        if len(some):
            _lease(ledger, hour, some, consumer, node, handed, due_ms)
            rows[inside] = some
        return
    entries = ledger.store.entries(hour, rows["index"])
    rows["topic"], rows["second"], rows["attempt"] = entries["topic"], entries["second"], entries["attempt"] + 1
    rows["size"] = entries["size"]
    # A grant only gives out what is due, or will be before its answer leaves (server/delivery/deferred.py): never
    # early, whatever the leader believed.
    free = (entries["deliver_at_ms"] <= due_ms) & ledger.topics.owed(entries)
    bits = bitmap(rows["index"])
    if len(bits) != len(rows):
        first = np.zeros(len(rows), bool)
        first[np.unique(rows["index"], return_index=True)[1]] = True
        free &= first
    hour_state = ledger.hour_state(hour)
    if hour_state.settled.intersect(bits) or hour_state.leased.intersect(bits):
        free &= ~np.isin(rows["index"], indexes_of((hour_state.settled | hour_state.leased) & bits))
    if not handed:
        free &= ~expired(ledger, entries, ledger.now_ms)
        _apply_topic_limits(ledger, rows["topic"], free)
    if free.all():
        _lease_free(ledger, hour, rows, consumer, node)
    elif free.any():
        some = rows[free]
        _lease_free(ledger, hour, some, consumer, node)
        rows[free] = some


def _count_handed(ledger: Ledger, rows: NDArray[np.void], node: int) -> None:
    """Interval mode: these were in a consumer's hands when a reschedule came first in the log. It holds, but what it
    filed counts the attempt, so that the next hand-out is another one and says so."""
    for hour, index in zip(rows["hour"].tolist(), rows["index"].tolist(), strict=True):
        if hour >= DEAD_HOURS or ledger.outcome_of(hour, index)[0] is not Event.MOVED:
            continue
        entry = ledger.store.entries(hour, slice(index, index + 1))
        place = find_entry(ledger, int(entry["first_id"][0]))
        if place is None or place.hour >= DEAD_HOURS or ledger.outcome_of(place.hour, place.index) != (None, False):
            continue
        if place.rows["attempt"][0] == entry["attempt"][0] and ledger.topics.owed(place.rows)[0]:
            move(
                ledger, place.hour, place.rows, deliver_at_ms=place.rows["deliver_at_ms"], attempts=1,
                flags=0, previous=NONE32, node=node, leased=False,
            )  # fmt: skip


def _apply_topic_limits(ledger: Ledger, topics: NDArray[np.uint32], free: NDArray[np.bool_]) -> None:
    """Nothing of a paused topic, and no more at once than its concurrency: decided here, they hold over a failover."""
    for number, _ in by_topic(topics):
        topic = ledger.topics[number]
        if topic.settings.paused:
            free[topics == number] = False
        elif topic.settings.concurrency is not None:
            mine = np.flatnonzero(free & (topics == number))
            free[mine[max(0, topic.settings.concurrency - topic.leased) :]] = False


def _lease_free(ledger: Ledger, hour: int, rows: NDArray[np.void], consumer: int, node: int) -> None:
    rows["open"] = 1
    rows["event"] = log_events(
        ledger, hour, rows, Event.LEASED, attempts=rows["attempt"], previous=NONE32, consumer=consumer, node=node
    )
    ledger.hour_state(hour).leased |= bitmap(rows["index"])
    for number, count in by_topic(rows["topic"]):
        ledger.topics[number].leased += count


def _remember_request(ledger: Ledger, grant: HeldGrant) -> None:
    if not grant.request_id:
        return
    requests = ledger.requests.setdefault(grant.consumer, {})
    requests.pop(grant.request_id, None)
    while len(requests) >= ledger.settings.requests_per_consumer:
        del requests[next(iter(requests))]
    requests[grant.request_id] = grant.key
