"""Applies CANCEL and RESCHEDULE, for messages named by id or by client key; each message gets a definite outcome."""

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.commandtypes import Cancel, RescheduleCommand, Targets
from hadelay.codec.formats import I64, NODE
from hadelay.codec.results import CancelOutcome, CancelResult, RescheduleResult, TargetOutcome
from hadelay.ledger.hours.lookup import EntryRef, find_entry, is_blocked, state_of
from hadelay.ledger.hours.transitions import FLAG_LEASE_EXPIRED, FLAG_WAS_DUE, Leaving, move, settle
from hadelay.ledger.leases.suspects import AHEAD_MS
from hadelay.ledger.messages import fills, ttl
from hadelay.ledger.messages.copies import copies_of, family
from hadelay.ledger.messages.keys import find_key
from hadelay.ledger.state import Ledger
from hadelay.model import Event, State

#: Limit of the messages that one RESCHEDULE changes; further messages have to be proposed again.
MAX_TARGETS = 1_000
#: Limit of the records that one RESCHEDULE moves, in bytes; moving these takes some milliseconds.
MAX_MOVED_BYTES = 4 << 20
_WAITING = (State.SCHEDULED, State.READY, State.BLOCKED)


def _ids(ledger: Ledger, command: Targets) -> list[int | None]:
    return [*command.ids, *(find_key(ledger, topic, digest) for topic, digest in command.keys)]


def _waiting(ledger: Ledger, message_id: int | None) -> tuple[EntryRef | None, TargetOutcome]:
    """Look up a message to change: (entry, DONE) if it is scheduled or ready; else the outcome says why not."""
    place = None if message_id is None else find_entry(ledger, message_id)
    if place is None:
        return None, TargetOutcome.NOT_FOUND
    found = state_of(ledger, place, ledger.now_ms)
    return place, TargetOutcome.DONE if found in _WAITING else TargetOutcome[found.name]


def apply_cancel(ledger: Ledger, command: Cancel) -> CancelResult:
    node = ledger.number_of(NODE, command.node)
    joint = _Joint(ledger)
    for message_id in _ids(ledger, command):
        joint.change(message_id, partial(_cancel, ledger, node))
    return CancelResult(np.array(joint.outcomes, np.uint8), joint.answer())


def _cancel(ledger: Ledger, node: int, message_id: int | None) -> CancelOutcome:
    place, outcome = _waiting(ledger, message_id)
    if outcome is TargetOutcome.DONE:
        assert place is not None
        settle(ledger, Leaving(place.hour, place.rows, node=node), Event.CANCELLED)
    # A message that was cancelled before, or with its topic, counts as cancelled: a repeated CANCEL succeeds.
    return CancelOutcome.CANCELLED if outcome is TargetOutcome.CANCELLED else CancelOutcome(outcome)


class _Joint:
    """Outcomes of a command: one per named message, which covers the message and its copies for subscriptions."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.outcomes: list[int] = []
        #: Number of a named message with copies → (topic or subscription, id, outcome) of itself and of each copy.
        self._parts: dict[int, list[tuple[str, int, int]]] = {}

    def change(self, message_id: int | None, change: Callable[[int | None], int]) -> None:
        """Change a message and its copies for subscriptions, and note the outcome."""
        ledger, outcome = self._ledger, change(message_id)
        if message_id is not None and copies_of(ledger, message_id):
            parts = [
                (ledger.topics[int(place.rows["topic"][0])].name, one, outcome if one == message_id else change(one))
                for one, place in family(ledger, message_id)
            ]
            different = {each for _, _, each in parts}
            outcome = TargetOutcome.PARTIAL if len(different) > 1 else different.pop() if parts else outcome
            self._parts[len(self.outcomes)] = [(name, one, int(each)) for name, one, each in parts]
        self.outcomes.append(outcome)

    def answer(self) -> list[list[tuple[str, int, int]]] | None:
        count = len(self.outcomes)
        return [self._parts.get(n, []) for n in range(count)] if self._parts else None


def refile(
    ledger: Ledger, leaving: Leaving, deliver_at_ms: I64 | int, generations: NDArray[np.uint16] | None = None
) -> None:
    """Give waiting messages these due times, and restart their TTLs. generations: generations of the new entries; None:
    the latest generations of their topics."""
    rows = leaving.rows
    fills.copy_before_move(ledger, leaving.hour, rows)
    # Keep the flag that lets a late ack count for the attempt whose lease ran out.
    flags = rows["flags"] & np.uint16(FLAG_LEASE_EXPIRED)
    flags[rows["deliver_at_ms"] <= ledger.now_ms + AHEAD_MS] |= FLAG_WAS_DUE
    move(ledger, leaving, deliver_at_ms=deliver_at_ms, flags=flags, generations=generations)
    ttl.begin_again(ledger, rows, deliver_at_ms)


def apply_reschedule(ledger: Ledger, command: RescheduleCommand) -> RescheduleResult:
    """Give messages another due time; id and attempt stay. A due message that is to be due now stays in its entry, so
    that a repeated command does no harm."""
    ids = _ids(ledger, command)
    result = RescheduleResult(
        np.zeros(len(ids), np.uint8), np.array([i or 0 for i in ids], np.uint64), np.zeros(len(ids), np.int64)
    )
    change, joint = _Reschedule(ledger, command), _Joint(ledger)
    for n, message_id in enumerate(ids):
        if n >= MAX_TARGETS or change.room <= 0:
            joint.outcomes.append(TargetOutcome.AGAIN)
            continue
        joint.change(message_id, change.make)
        result.deliver_at_ms[n] = change.deliver_at_ms
        if change.blocked:
            result.blocked = np.zeros(len(ids), np.bool_) if result.blocked is None else result.blocked
            result.blocked[n] = True
        change.deliver_at_ms, change.blocked = 0, False
    result.outcomes[:], result.copies = joint.outcomes, joint.answer()
    return result


class _Reschedule:
    """A RESCHEDULE that is being applied."""

    def __init__(self, ledger: Ledger, command: RescheduleCommand) -> None:
        self._ledger, self._node = ledger, ledger.number_of(NODE, command.node)
        self._delay_ms = max(command.when_ms if command.relative else command.when_ms - ledger.now_ms, 0)
        #: A message is changed only if its due time is one of these: the time that the command expects (negative: any),
        #: or the new time, which the message has already if the command is repeated.
        self._expected = (command.expected_ms, -1 if command.relative else command.when_ms)
        #: Number of bytes of records that may still be moved.
        self.room = MAX_MOVED_BYTES
        #: Result for the named message that is being changed: new due time of whichever changed first, the message or
        #: one of its copies; and whether a group blocks the message or a copy.
        self.deliver_at_ms, self.blocked = 0, False

    def make(self, message_id: int | None) -> TargetOutcome:
        """Give one message the new due time, if it waits; returns the outcome."""
        ledger, now_ms = self._ledger, self._ledger.now_ms
        place, outcome = _waiting(ledger, message_id)
        if outcome is not TargetOutcome.DONE:
            return outcome
        if self._delay_ms > ledger.settings.max_delay_ms:
            return TargetOutcome.TOO_FAR
        assert place is not None
        before_ms = int(place.rows["deliver_at_ms"][0])
        if self._expected[0] >= 0 and before_ms not in self._expected:
            self.deliver_at_ms = self.deliver_at_ms or before_ms
            return TargetOutcome.MOVED
        deliver_at_ms = before_ms if self._delay_ms == 0 and before_ms <= now_ms else now_ms + self._delay_ms
        if deliver_at_ms != before_ms:
            refile(ledger, Leaving(place.hour, place.rows, node=self._node), deliver_at_ms)
            self.room -= int(place.rows["size"][0])
        self.deliver_at_ms = self.deliver_at_ms or deliver_at_ms
        if ledger.topics[int(place.rows["topic"][0])].blocked:
            after = find_entry(ledger, int(place.rows["first_id"][0]))
            self.blocked |= after is not None and is_blocked(ledger, after)
        return outcome
