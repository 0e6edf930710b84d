"""Applies CANCEL and RESCHEDULE, for messages named by id or by client key; each message gets a definite outcome."""

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.commandtypes import Cancel, RescheduleCommand
from hadelay.codec.formats import I64, NODE
from hadelay.codec.results import CancelOutcome, CancelResult, RescheduleResult, TargetOutcome
from hadelay.ledger import ttl
from hadelay.ledger.keys import find_key
from hadelay.ledger.lookup import EntryRef, find_entry, is_blocked, state_of
from hadelay.ledger.state import Ledger
from hadelay.ledger.transitions import FLAG_LEASE_EXPIRED, FLAG_WAS_DUE, Leaving, move, settle
from hadelay.model import Event, State
from hadelay.version import BOUNDED, MARKS_WAS_DUE

#: Limits of one RESCHEDULE: number of messages, and bytes of moved records, which take some milliseconds.
MAX_TARGETS = 1_000
MAX_MOVED_BYTES = 4 << 20
_WAITING = (State.SCHEDULED, State.READY, State.BLOCKED)
#: Time in ms: messages due within this time count as due, because the clock of a failed leader may have been ahead.
_NEARLY_MS = 1_000


def _ids(ledger: Ledger, command: Cancel | RescheduleCommand) -> list[int | None]:
    return [*command.ids.tolist(), *(find_key(ledger, topic, digest) for topic, digest in command.keys)]


def _waiting(ledger: Ledger, message_id: int | None) -> tuple[EntryRef | None, TargetOutcome]:
    """Look up a message to change: (entry, DONE) if it is scheduled or ready; else the outcome says why not."""
    place = None if message_id is None else find_entry(ledger, message_id)
    if place is None:
        return None, TargetOutcome.NOT_FOUND
    found = state_of(ledger, place, ledger.now_ms)
    return place, TargetOutcome.DONE if found in _WAITING else TargetOutcome[found.name]


def apply_cancel(ledger: Ledger, command: Cancel) -> CancelResult:
    node = ledger.number_of(NODE, command.node)
    outcomes = []
    for message_id in _ids(ledger, command):
        place, outcome = _waiting(ledger, message_id)
        if outcome is TargetOutcome.DONE:
            assert place is not None
            settle(ledger, Leaving(place.hour, place.rows, node=node), Event.CANCELLED)
        # A message that was cancelled before, or with its topic, counts as cancelled: a repeated CANCEL succeeds.
        outcomes.append(CancelOutcome.CANCELLED if outcome is TargetOutcome.CANCELLED else CancelOutcome(outcome))
    return CancelResult(np.array(outcomes, np.uint8))


def refile(
    ledger: Ledger, leaving: Leaving, deliver_at_ms: I64 | int, generations: NDArray[np.uint16] | None = None
) -> None:
    """Give waiting messages these due times, and restart TTLs. again: whether they get the topic's present
    generation."""
    rows = leaving.rows
    # Keep the flag that lets a late ack count for the attempt whose lease ran out.
    flags = rows["flags"] & np.uint16(FLAG_LEASE_EXPIRED)
    if ledger.level >= MARKS_WAS_DUE:
        flags[rows["deliver_at_ms"] <= ledger.now_ms + _NEARLY_MS] |= FLAG_WAS_DUE
    move(ledger, leaving, deliver_at_ms=deliver_at_ms, flags=flags, generations=generations)
    ttl.begin_again(ledger, rows, deliver_at_ms)


def apply_reschedule(ledger: Ledger, command: RescheduleCommand) -> RescheduleResult:
    """Give messages another due time; id and attempt stay. A due message that is to be due now stays in its entry, so
    that a repeated command does no harm."""
    node = ledger.number_of(NODE, command.node)
    ids = _ids(ledger, command)
    result = RescheduleResult(
        np.zeros(len(ids), np.uint8), np.array([i or 0 for i in ids], np.uint64), np.zeros(len(ids), np.int64)
    )
    now_ms = ledger.now_ms
    delay_ms = max(command.when_ms if command.relative else command.when_ms - now_ms, 0)
    bounded = ledger.level >= BOUNDED
    room = MAX_MOVED_BYTES
    for n, message_id in enumerate(ids):
        if bounded and (n >= MAX_TARGETS or room <= 0):
            result.outcomes[n] = TargetOutcome.AGAIN
            continue
        place, outcome = _waiting(ledger, message_id)
        if outcome is TargetOutcome.DONE and delay_ms > ledger.settings.max_delay_ms:
            outcome = TargetOutcome.TOO_FAR
        if outcome is TargetOutcome.DONE:
            assert place is not None
            before_ms = int(place.rows["deliver_at_ms"][0])
            deliver_at_ms = before_ms if delay_ms == 0 and before_ms <= now_ms else now_ms + delay_ms
            if deliver_at_ms != before_ms:
                refile(ledger, Leaving(place.hour, place.rows, node=node), deliver_at_ms)
                room -= int(place.rows["size"][0])
            result.deliver_at_ms[n] = deliver_at_ms
            if ledger.topics[int(place.rows["topic"][0])].blocked:
                after = find_entry(ledger, int(result.ids[n]))
                if after is not None and is_blocked(ledger, after):
                    result.blocked = np.zeros(len(ids), np.bool_) if result.blocked is None else result.blocked
                    result.blocked[n] = True
        result.outcomes[n] = outcome
    return result
