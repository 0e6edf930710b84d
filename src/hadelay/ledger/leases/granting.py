"""Applies GRANT: decides for each proposed message whether the consumer gets it, and records the leases."""

from functools import partial

import numpy as np

from hadelay.codec.commandtypes import MAX_AHEAD_MS, Grant
from hadelay.codec.formats import CONSUMER, NODE, U32, Mask, Rows
from hadelay.codec.results import GrantResult, Refused
from hadelay.ledger.batches import members
from hadelay.ledger.changedrows import GRANTS
from hadelay.ledger.groups import runs
from hadelay.ledger.hours import retries
from hadelay.ledger.hours.hourstate import bitmap, indexes_of, rows_by_value
from hadelay.ledger.hours.lookup import expired, find_entry
from hadelay.ledger.hours.transitions import Leaving, log_events, move
from hadelay.ledger.leases.grantrows import LEASED, OpenGrant
from hadelay.ledger.messages import fills
from hadelay.ledger.state import Ledger
from hadelay.ledger.topics.topics import by_topic
from hadelay.model import DEAD_HOURS, Event


def apply_grant(ledger: Ledger, command: Grant) -> GrantResult | Refused:
    count = len(command.hours)
    result = GrantResult(command.term, command.seq, np.zeros(count, bool), np.zeros(count, np.uint16), 0)
    earlier = ledger.grant_for(command.consumer, command.request_id)
    if earlier is not None:
        result.existing = earlier.key
        return result
    if (command.term, command.seq) in ledger.grants:
        return Refused("grant_exists", f"grant {command.term}/{command.seq} was applied before")
    due_ms = ledger.now_ms + min(command.ahead_ms, MAX_AHEAD_MS)
    result.until_ms = due_ms + min(max(command.lease_ms, 1), ledger.settings.max_lease_ms)
    consumer = ledger.number_of(CONSUMER, command.consumer)
    node = ledger.number_of(NODE, command.node)
    rows = np.zeros(count, LEASED)
    rows["hour"], rows["index"], rows["until_ms"] = command.hours, command.indexes, result.until_ms
    behind: list[int] = []
    for hour, where in rows_by_value(command.hours):
        part = rows[where]
        inside = part["index"] < (ledger.store.count(hour) if hour < DEAD_HOURS else 0)
        if not inside.all():
            part, where = part[inside], np.arange(count)[where][inside]
        if len(part):
            free, blocked = _fill(ledger, hour, part, command.handed, due_ms)
            if blocked is not None:
                behind += np.arange(count)[where][blocked].tolist()
            if free.all():
                _lease(ledger, hour, part, consumer, node)
            elif free.any():
                some = part[free]
                _lease(ledger, hour, some, consumer, node)
                part[free] = some
            rows[where] = part
    if behind and len(behind) < count:
        _lease_runs(ledger, rows, sorted(behind), consumer, node)
    result.granted = rows["open"] == 1
    if command.handed and not result.granted.all():
        _count_handed(ledger, rows[~result.granted], node)
    result.attempts = rows["attempt"]
    if result.granted.any():
        key = command.term, command.seq
        ledger.granted += 1
        grant = OpenGrant(*key, command.consumer, consumer, command.request_id, ledger.now_ms, rows)
        grant.number = ledger.granted
        ledger.changes.note_new(key)
        grant.watch(partial(ledger.changes.note, GRANTS, key))
        ledger.grants[key] = grant
        _remember_request(ledger, grant)
        ledger.listener.on_granted(grant)
    return result


def _fill(ledger: Ledger, hour: int, rows: Rows, handed: bool, due_ms: int) -> tuple[Mask, Mask | None]:
    """Fill LEASED rows of a grant from their index entries. Returns two masks: messages that may be leased, and
    messages that only their groups block (None: no message is blocked)."""
    entries = ledger.store.entries(hour, rows["index"])
    rows["topic"], rows["second"], rows["attempt"] = entries["topic"], entries["second"], entries["attempt"] + 1
    rows["size"] = entries["size"]
    # Lease no message that is due after `due_ms`, even if a faulty leader proposed it: no message is handed out early.
    free = (entries["deliver_at_ms"] <= due_ms) & ledger.topics.owed(entries)
    bits = bitmap(rows["index"])
    if len(bits) != len(rows):
        first = np.zeros(len(rows), bool)
        first[np.unique(rows["index"], return_index=True)[1]] = True
        free &= first
    hour_state = ledger.hour_state(hour)
    if hour_state.batched and any(ledger.topics[number].batched for number, _ in by_topic(rows["topic"])):
        rows["batch"] = members.numbers_of(ledger, hour, rows["index"])
    if hour_state.settled.intersect(bits) or hour_state.leased.intersect(bits):
        free &= ~np.isin(rows["index"], indexes_of((hour_state.settled | hour_state.leased) & bits))
    if not handed:
        free &= ~expired(ledger, entries, ledger.now_ms)
    blocked = None
    if hour_state.blocked and hour_state.blocked.intersect(bits):
        blocked = free & np.isin(rows["index"], indexes_of(hour_state.blocked & bits))
        free &= ~blocked
    if not handed:
        _apply_topic_limits(ledger, rows["topic"], free)
    return free, blocked


def _lease_runs(ledger: Ledger, rows: Rows, behind: list[int], consumer: int, node: int) -> None:
    """Lease the blocked messages (positions `behind`) that continue the runs of messages leased by the same grant."""
    if not (taken := np.array(runs.take_next(ledger, rows, behind), np.intp)).size:
        return
    for hour, where in rows_by_value(rows["hour"][taken]):
        part = rows[taken[where]]
        _lease(ledger, hour, part, consumer, node)
        rows[taken[where]] = part


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
    retries.end(ledger, hour, rows)
    for number, count in by_topic(rows["topic"]):
        ledger.topics[number].leased += count


def _remember_request(ledger: Ledger, grant: OpenGrant) -> None:
    if not grant.request_id:
        return
    requests = ledger.requests.setdefault(grant.consumer, {})
    requests.pop(grant.request_id, None)
    while len(requests) >= ledger.settings.requests_per_consumer:
        request_id, key = next(iter(requests.items()))
        ledger.changes.note(GRANTS, key)  # the grant's row changes: it says whether the request id is remembered
        del requests[request_id]
    requests[grant.request_id] = grant.key
