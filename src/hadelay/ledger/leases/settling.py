"""Applies ACK, NACK, EXTEND and EXPIRE: decides for each leased message how its lease ends or goes on.

An attempt is an entry: the first hand-out leases the entry a message was filed with, and what returns to waiting is
filed anew. So an entry is leased at most once, and "not leased since" is "this entry is neither leased nor moved".
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.commands import DEAD_NOW, uncounted
from hadelay.codec.commandtypes import SettleLeases
from hadelay.codec.formats import I64, INDEX, MAX_NACK_DELAY_MS, NO_REASON, NODE, REASON, REASON_BITS, U32, Rows
from hadelay.codec.results import ExpireResult, LeaseOutcome, LeaseResult, Refused
from hadelay.ledger.hours.hourstate import rows_by_value
from hadelay.ledger.hours.lookup import expired
from hadelay.ledger.hours.retries import MAX_EXCUSED, excused
from hadelay.ledger.hours.transitions import (
    FLAG_LEASE_EXPIRED,
    MOVE_BYTES,
    FailedTry,
    Leaving,
    fitting,
    log_events,
    move,
    settle,
)
from hadelay.ledger.leases.ackresults import keep_results
from hadelay.ledger.leases.callbacks import read_bytes, succeeded, within_bytes
from hadelay.ledger.leases.dead import die
from hadelay.ledger.leases.grantrows import NamedLeases, OpenGrant
from hadelay.ledger.leases.lateacks import late_acks
from hadelay.ledger.messages import fills, ttl
from hadelay.ledger.state import NO_NODE, Ledger
from hadelay.model import HOUR_MS, NONE32, Event
from hadelay.settings.topic import WEBHOOK_FLOOR_MS, Exponential

Backoff = tuple[int, ...] | Exponential

#: Limit of the number of waits of a backoff; also the highest attempt number (ledger/hours/transitions.py).
_MAX_STEPS = 65_534
#: Number of equal parts of a retry's wait: the jitter of a backoff is computed in these parts, with integers only.
_PARTS = 1 << 20
#: Cost of moving one returned message, in bytes that count towards MOVE_BYTES; the size of a copied record is added.
_MOVE_COST = 2_048


def _let_go(ledger: Ledger, grant: OpenGrant, positions: NDArray[np.intp]) -> None:
    """End the leases at these positions of a grant; forget the grant and its request id if no lease is left."""
    grant.close(positions)
    if grant.left:
        return
    key = grant.key
    ledger.changes.note_gone(key)
    del ledger.grants[key]
    requests = ledger.requests.get(grant.consumer)
    if requests is not None and requests.get(grant.request_id) == key:
        del requests[grant.request_id]
        if not requests:
            del ledger.requests[grant.consumer]


def _open_leases(ledger: Ledger, command: SettleLeases, outcomes: NDArray[np.uint8]) -> Iterator[NamedLeases]:
    """Yield the open leases that the command names, by grant, and set their outcomes to DONE."""
    keys = command.rows["term"].astype(np.uint64) << np.uint64(32) | command.rows["seq"]
    for key, where in rows_by_value(keys):
        grant = ledger.grants.get((key >> 32, key & 0xFFFFFFFF))
        if grant is None:
            continue
        positions, is_open = grant.take(command.rows[where])
        if not is_open.all():
            positions = positions[is_open]
            where = np.arange(len(outcomes))[where][is_open]
        outcomes[where] = LeaseOutcome.DONE
        if len(positions):
            yield NamedLeases(grant, positions, where)


def apply_ack(ledger: Ledger, command: SettleLeases) -> LeaseResult:
    outcomes = np.full(len(command.rows), LeaseOutcome.LEASE_LOST, np.uint8)
    node = ledger.number_of(NODE, command.node)
    found = _open_leases(ledger, command, outcomes)
    taken = list(within_bytes(ledger, found, outcomes) if ledger.topics.calls_back else found)
    if taken:
        _end_acked(ledger, command, taken, node)
    done = outcomes == LeaseOutcome.DONE
    if not done.all():
        late_acks(ledger, command, outcomes, taken, node)
        done = outcomes == LeaseOutcome.DONE
    if command.results is not None:
        keep_results(ledger, command, done)
    if ledger.topics.calls_back:
        succeeded(ledger, command, done)
    return LeaseResult(outcomes)


def _end_acked(ledger: Ledger, command: SettleLeases, taken: list[NamedLeases], node: int) -> None:
    """End these open leases and their messages as acked."""
    assert command.delays is not None, "every SETTLE has them"
    leased, consumers, delays = [], [], []
    for grant, positions, where in taken:
        leased.append(grant.rows[positions])
        consumers.append(np.full(len(positions), grant.consumer_number, np.uint32))
        delays.append(command.delays[where])
    rows, consumer, delay = _joined(leased), _joined(consumers), _joined(delays)
    for hour, where in rows_by_value(rows["hour"]):
        part = rows[where]
        leaving = Leaving(hour, part, part["event"], node, leased=True)
        settle(ledger, leaving, Event.ACKED, consumer=consumer[where], other_hour=delay[where])
    for grant, positions, _ in taken:
        _let_go(ledger, grant, positions)


def _joined(parts: list[NDArray[Any]]) -> NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def apply_nack(ledger: Ledger, command: SettleLeases) -> LeaseResult | Refused:
    delay_ms, counts = command.value_ms, True
    if delay_ms < -1 and delay_ms != DEAD_NOW:
        delay_ms, counts = uncounted(delay_ms), False
    if delay_ms > ledger.settings.max_delay_ms:
        return Refused("too_far", f"delay: at most {ledger.settings.max_delay_ms} ms are allowed (limits.max_delay)")
    outcomes = np.full(len(command.rows), LeaseOutcome.LEASE_LOST, np.uint8)
    failure = FailedTry(Event.NACKED, ledger.number_of(REASON, command.reason) if command.reason else NONE32)
    returned = ReturnedLeases(ledger, failure, delay_ms, ledger.number_of(NODE, command.node), counts=counts)
    for grant, positions, where in _open_leases(ledger, command, outcomes):
        delays = None if command.delays is None else command.delays[where]
        done = returned.give_back(grant, positions, delays)
        if done < len(positions):
            outcomes[np.arange(len(outcomes))[where][done:]] = LeaseOutcome.AGAIN
    _note_acked(ledger, command, outcomes)
    return LeaseResult(outcomes)


def _note_acked(ledger: Ledger, command: SettleLeases, outcomes: NDArray[np.uint8]) -> None:
    for at in np.flatnonzero(outcomes == LeaseOutcome.LEASE_LOST).tolist():
        lease = command.rows[at]
        if ledger.outcome_of(int(lease["hour"]), int(lease["index"]))[0] is Event.ACKED:
            outcomes[at] = LeaseOutcome.ALREADY_ACKED


class ReturnedLeases:
    """Ends attempts without an ack, in one apply: messages wait again, die, expire or end as cancelled."""

    def __init__(self, ledger: Ledger, failure: FailedTry, delay_ms: int, node: int, *, counts: bool = True) -> None:
        """delay_ms: delay of a NACK; negative: the topic's backoff; DEAD_NOW: no further attempt. counts: whether the
        hand-outs count as attempts."""
        self.counts = counts
        self.ledger, self.failure, self.delay_ms, self.node = ledger, failure, delay_ms, node
        #: Number of bytes that may still be moved in this apply.
        self.left = MOVE_BYTES

    def give_back(self, grant: OpenGrant, positions: NDArray[np.intp], delays: U32 | None = None) -> int:
        """End leases at these positions, as many as the command may still move; returns the number of ended leases.
        delays: hand-out delay of each lease of a NACK, in ms."""
        if self.left <= 0:
            return 0
        leased = grant.rows[positions]
        entries = np.zeros(len(leased), INDEX)
        for hour, where in rows_by_value(leased["hour"]):
            entries[where] = self.ledger.store.entries(hour, leased["index"][where])
        due_ms = self._due_ms(leased, entries)
        copied = (np.maximum(due_ms, self.ledger.now_ms) // HOUR_MS != leased["hour"]) | (self.delay_ms == DEAD_NOW)
        costs = np.where(copied, entries["size"].astype(np.int64), 0) + _MOVE_COST + read_bytes(self.ledger, leased)
        if self.ledger.fills:  # a copy for a subscription costs as much as a move
            costs += fills.meant(self.ledger, entries) * (entries["size"].astype(np.int64) + _MOVE_COST)
        count = fitting(costs, self.left, at_least=self.left == MOVE_BYTES)
        self.left = self.left - int(costs[:count].sum()) if count == len(costs) else 0
        if not count:
            return 0
        notes = self._notes(count, delays)
        for hour, where in rows_by_value(leased["hour"][:count]):
            part = leased[:count][where]
            events = log_events(
                self.ledger,
                hour,
                part,
                self.failure.event,
                node=self.node,
                previous=part["event"],
                consumer=grant.consumer_number,
                other_hour=notes[where],
            )
            leaving = Leaving(hour, part, events, self.node, leased=True)
            self._end(leaving, entries[:count][where], due_ms[:count][where])
        _let_go(self.ledger, grant, positions[:count])
        return count

    def _due_ms(self, leased: Rows, entries: Rows) -> I64:
        ledger = self.ledger
        due_ms = np.full(len(leased), ledger.now_ms + max(self.delay_ms, 0))
        for number, where in rows_by_value(leased["topic"]):
            settings = ledger.topics[number].settings
            if self.delay_ms < 0 and settings.backoff:
                waits = waits_ms(settings.backoff, _tries(leased[where], entries[where]), entries["first_id"][where])
                due_ms[where] += np.minimum(waits, ledger.settings.max_delay_ms)
            if settings.webhook is not None:
                due_ms[where] = np.maximum(due_ms[where], ledger.now_ms + WEBHOOK_FLOOR_MS)
        # A message that was leased before its due time must not become due earlier when it returns.
        later: I64 = np.maximum(due_ms, entries["deliver_at_ms"])
        return later

    def _notes(self, count: int, delays: U32 | None) -> I64:
        """Values of `other_hour` in nacked events: reason and hand-out delay, if known (formats.nack_reason)."""
        reason = self.failure.reason
        notes = np.full(count, reason, np.int64)
        if delays is None or NO_REASON <= reason < NONE32:
            return notes
        known = delays[:count] != NONE32
        above = np.minimum(delays[:count][known].astype(np.int64), MAX_NACK_DELAY_MS) + 1
        notes[known] = above << REASON_BITS | min(reason, NO_REASON)
        return notes

    def _end(self, leaving: Leaving, entries: Rows, due_ms: I64) -> None:
        """End attempts: messages are cancelled, expire, die or wait again. leaving: rows of LEASED; entries: rows of
        INDEX."""
        ledger, failure, leased = self.ledger, self.failure, leaving.rows
        gone = ~ledger.topics.alive(entries)
        over = ~gone & expired(ledger, entries, ledger.now_ms)
        # After MAX_EXCUSED hand-outs that did not count, every further attempt counts.
        counted = (excused(entries) == MAX_EXCUSED) | self.counts
        last = (_tries(leased, entries) >= self._limits(leased)) & counted
        dying = ~gone & ~over & (last | (self.delay_ms == DEAD_NOW))
        for ending, event in ((gone, Event.CANCELLED), (over, Event.TTL_EXPIRED)):
            if ending.any():
                settle(ledger, leaving.some(ending), event)
        fills.copy_before_move(ledger, leaving.hour, entries[~(gone | over)])
        leaving = leaving._replace(rows=entries, failure=failure)
        if dying.any():
            die(ledger, leaving.some(dying))
        again = ~(gone | over | dying)
        flags = FLAG_LEASE_EXPIRED if failure.event is Event.LEASE_EXPIRED else 0
        for excuse, some in enumerate((again & counted, again & ~counted)):
            if some.any():
                moving = leaving.some(some)._replace(failure=None if excuse else failure)
                move(ledger, moving, deliver_at_ms=due_ms[some], attempts=1, flags=flags, excuse=excuse)
                ttl.wait_again(ledger, moving.rows)

    def _limits(self, leased: Rows) -> I64:
        limits = np.full(len(leased), 1 << 30)
        for number, where in rows_by_value(leased["topic"]):
            if most := self.ledger.topics[number].settings.max_attempts:
                limits[where] = most
        return limits


def _tries(leased: Rows, entries: Rows) -> NDArray[np.uint16]:
    """Number of counted attempts of these leased messages, the present one included: at least 1."""
    tries: NDArray[np.uint16] = leased["attempt"] - np.minimum(excused(entries), leased["attempt"] - 1)
    return tries


def apply_extend(ledger: Ledger, command: SettleLeases) -> LeaseResult:
    outcomes = np.full(len(command.rows), LeaseOutcome.LEASE_LOST, np.uint8)
    until_ms = ledger.now_ms + min(max(command.value_ms, 1), ledger.settings.max_lease_ms)
    for grant, positions, _ in _open_leases(ledger, command, outcomes):
        grant.extend(positions, until_ms, command.reason)
        ledger.listener.on_extended(grant)
    _note_acked(ledger, command, outcomes)
    return LeaseResult(outcomes, until_ms)


def apply_expire(ledger: Ledger, command: list[tuple[int, int]]) -> ExpireResult:
    """End the leases of these grants that have run out at the cluster time of the ledger."""
    result = ExpireResult(0, [])
    returned = ReturnedLeases(ledger, FailedTry(Event.LEASE_EXPIRED, NONE32), -1, NO_NODE)
    for key in command:
        grant = ledger.grants.get(key)
        if grant is None:
            continue
        over = np.flatnonzero((grant.rows["open"] == 1) & (grant.rows["until_ms"] <= ledger.now_ms))
        if len(over):
            result.returned += returned.give_back(grant, over)
        if grant.left:
            result.remaining.append(key)
    return result


def waits_ms(backoff: Backoff, attempts: NDArray[np.uint16], ids: NDArray[np.uint64]) -> I64:
    """Wait in ms before the next retry, for each of these failed attempts (numbered from 1).

    Every node computes the same milliseconds. So the waits of an exponential backoff are a table made by multiplication
    (IEEE 754 defines the result; nothing defines that of `pow`), and the jitter is a hash of message id and attempt."""
    steps = _steps(backoff)
    waits: I64 = steps[np.minimum(attempts.astype(np.int64), len(steps)) - 1]
    parts = round(backoff.jitter * _PARTS) if isinstance(backoff, Exponential) else 0
    if not parts:
        return waits
    spread = waits * parts // _PARTS
    some: I64 = (_mixed(ids, attempts) % (spread.astype(np.uint64) + np.uint64(1))).astype(np.int64)
    return waits + some


@lru_cache(maxsize=1024)
def _steps(backoff: Backoff) -> I64:
    """Waits in ms after attempts 1, 2, …; the last wait is used for all further attempts."""
    if not isinstance(backoff, Exponential):
        return np.array(backoff or (0,), np.int64)
    waits: list[int] = []
    wait = float(backoff.min_ms)
    while wait < backoff.max_ms and len(waits) < _MAX_STEPS and (backoff.factor > 1 or not waits):
        waits.append(int(wait))
        wait *= backoff.factor
    return np.array([*waits, min(int(wait), backoff.max_ms)], np.int64)


def _mixed(ids: NDArray[np.uint64], attempts: NDArray[np.uint16]) -> NDArray[np.uint64]:
    """Hash of message id and attempt (SplitMix64), so that neighbouring ids and attempts get unrelated jitter."""
    x: NDArray[np.uint64] = (attempts.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x += ids.astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x
