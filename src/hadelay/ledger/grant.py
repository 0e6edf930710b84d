"""Applies GRANT: decides for each proposed message whether the consumer gets it, and records the leases."""

import numpy as np

from hadelay.codec.commandtypes import MAX_AHEAD_MS, Grant
from hadelay.codec.formats import CONSUMER, NODE, U32, Mask, Rows
from hadelay.codec.results import GrantResult, Refused
from hadelay.ledger import fills
from hadelay.ledger.grants import HELD, HeldGrant
from hadelay.ledger.hourstate import bitmap, groups, indexes_of
from hadelay.ledger.lookup import expired, find_entry
from hadelay.ledger.state import Ledger
from hadelay.ledger.topics import by_topic
from hadelay.ledger.transitions import Leaving, log_events, move
from hadelay.model import DEAD_HOURS, Event


def apply_grant(ledger: Ledger, command: Grant) -> GrantResult | Refused:
    count = len(command.hours)
    result = GrantResult(command.term, command.seq, np.zeros(count, bool), np.zeros(count, np.uint16), 0)
    held = ledger.held_by(command.consumer, command.request_id)
    if held is not None:
        result.existing = held.key
        return result
    if (command.term, command.seq) in ledger.grants:
        return Refused("grant_exists", f"grant {command.term}/{command.seq} was applied before")
    due_ms = ledger.now_ms + min(command.ahead_ms, MAX_AHEAD_MS)
    result.until_ms = due_ms + min(max(command.lease_ms, 1), ledger.settings.max_lease_ms)
    consumer = ledger.number_of(CONSUMER, command.consumer)
    node = ledger.number_of(NODE, command.node)
    rows = np.zeros(count, HELD)
    rows["hour"], rows["index"], rows["until_ms"] = command.hours, command.indexes, result.until_ms
    for hour, where in groups(command.hours):
        part = rows[where]
        inside = part["index"] < (ledger.store.count(hour) if hour < DEAD_HOURS else 0)
        if not inside.all():
            part, where = part[inside], np.arange(count)[where][inside]
        if len(part):
            free = _fill(ledger, hour, part, command.handed, due_ms)
            if free.all():
                _lease(ledger, hour, part, consumer, node)
            elif free.any():
                some = part[free]
                _lease(ledger, hour, some, consumer, node)
                part[free] = some
            rows[where] = part
    result.granted = rows["open"] == 1
    if command.handed and not result.granted.all():
        _count_handed(ledger, rows[~result.granted], node)
    result.attempts = rows["attempt"]
    if result.granted.any():
        key = command.term, command.seq
        grant = HeldGrant(*key, command.consumer, consumer, command.request_id, ledger.now_ms, rows)
        ledger.grants[grant.key] = grant
        _remember_request(ledger, grant)
        ledger.listener.on_granted(grant)
    return result


def _fill(ledger: Ledger, hour: int, rows: Rows, handed: bool, due_ms: int) -> Mask:
    """Fill HELD rows of a grant from their index entries; returns a mask of the messages that may be leased."""
    entries = ledger.store.entries(hour, rows["index"])
    rows["topic"], rows["second"], rows["attempt"] = entries["topic"], entries["second"], entries["attempt"] + 1
    rows["size"] = entries["size"]
    # Lease only messages that are due before the answer leaves: never early, even if the leader was wrong.
    free = (entries["deliver_at_ms"] <= due_ms) & ledger.topics.owed(entries)
    bits = bitmap(rows["index"])
    if len(bits) != len(rows):
        first = np.zeros(len(rows), bool)
        first[np.unique(rows["index"], return_index=True)[1]] = True
        free &= first
    hour_state = ledger.hour_state(hour)
    if hour_state.settled.intersect(bits) or hour_state.leased.intersect(bits):
        free &= ~np.isin(rows["index"], indexes_of((hour_state.settled | hour_state.leased) & bits))
    if hour_state.blocked and hour_state.blocked.intersect(bits):
        free &= ~np.isin(rows["index"], indexes_of(hour_state.blocked & bits))
    if not handed:
        free &= ~expired(ledger, entries, ledger.now_ms)
        _apply_topic_limits(ledger, rows["topic"], free)
    return free


def _count_handed(ledger: Ledger, rows: Rows, node: int) -> None:
    """dispatch.sync = "interval": count hand-outs of messages rescheduled before their grant was applied. The new due
    time stays, but the new entry counts the attempt, so that the next hand-out has another number."""
    for hour, index in zip(rows["hour"].tolist(), rows["index"].tolist(), strict=True):
        if hour >= DEAD_HOURS or ledger.outcome_of(hour, index)[0] is not Event.MOVED:
            continue
        entry = ledger.store.entries(hour, slice(index, index + 1))
        place = find_entry(ledger, int(entry["first_id"][0]))
        if place is None or place.hour >= DEAD_HOURS or ledger.outcome_of(place.hour, place.index) != (None, False):
            continue
        if place.rows["attempt"][0] == entry["attempt"][0] and ledger.topics.owed(place.rows)[0]:
            leaving = Leaving(place.hour, place.rows, node=node)
            fills.copy_before_move(ledger, place.hour, place.rows)
            move(ledger, leaving, deliver_at_ms=place.rows["deliver_at_ms"], attempts=1)


def _apply_topic_limits(ledger: Ledger, topics: U32, free: Mask) -> None:
    """Clear `free` (may be leased) for messages whose topic is paused or has as many leases as its concurrency."""
    for number, _ in by_topic(topics):
        topic = ledger.topics[number]
        if topic.settings.paused:
            free[topics == number] = False
        elif topic.settings.concurrency is not None:
            mine = np.flatnonzero(free & (topics == number))
            free[mine[max(0, topic.settings.concurrency - topic.leased) :]] = False


def _lease(ledger: Ledger, hour: int, rows: Rows, consumer: int, node: int) -> None:
    rows["open"] = 1
    rows["event"] = log_events(ledger, hour, rows, Event.LEASED, node=node, consumer=consumer)
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
