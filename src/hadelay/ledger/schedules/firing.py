"""Applies SCHEDULE_FIRE and SCHEDULE_RUN: publishes occurrences of schedules that the leader computed, and those that
users asked for."""

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from hadelay.codec.commandtypes import MAX_AHEAD_MS
from hadelay.codec.results import FireOutcome, FireResult, PublishResult, Refused, RowCode
from hadelay.codec.schedules import (
    ANY_VERSION,
    FINISHED,
    KEPT_MS,
    LAST,
    REMOVE,
    Fire,
    Firing,
    Made,
    Overlap,
    Run,
    Spec,
)
from hadelay.ledger.messages import idempotency
from hadelay.ledger.messages.copies import pending
from hadelay.ledger.schedules import occurrences, schedules
from hadelay.ledger.state import Ledger
from hadelay.model import NEVER_MS, encode_id

#: Numbers of messages that a schedule remembers: the last _RING, and up to _MAX_FILED others not due yet.
_RING, _MAX_FILED = 10, 250
_OTHER_RUN = Refused("key_conflict", "this Idempotency-Key was used for another trigger or backfill: take a new key")
_ANEW = "try again, with a new Idempotency-Key if the request had one"


class _Judged(NamedTuple):
    """Occurrences of one schedule that apply has accepted, and whose messages it has still to publish."""

    firing: Firing
    found: schedules.Found
    #: Number of occurrences to publish, from the first on; the overlap policy drops the later occurrences.
    made: int


def apply_fire(ledger: Ledger, command: Fire) -> FireResult:
    """Publish occurrences that the leader computed, for every schedule that is still as the leader saw it."""
    result = FireResult(np.zeros(len(command.firings), np.uint8))
    accepted: list[_Judged] = []
    seen: set[str] = set()
    batch = occurrences.Occurrences()
    for at, firing in enumerate(command.firings):
        found = None if firing.name in seen else schedules.find(ledger, firing.name)
        seen.add(firing.name)
        outcome = _outcome(ledger, firing, found)
        result.outcomes[at] = outcome
        if found is None or outcome is not FireOutcome.DONE:
            continue
        if firing.flags & REMOVE:
            schedules.remove(ledger, firing.name, found)
            continue
        made = _without_overlap(ledger, found, len(firing.times))
        batch.add(found.stored, firing.times[:made])
        accepted.append(_Judged(firing, found, made))
    codes, ids = batch.publish(ledger)
    at = 0
    for judged in accepted:
        end = at + judged.made
        _note_fired(ledger, judged, codes[at:end], ids[at:end], result)
        at = end
    if command.tzdata > ledger.schedules.tzdata:
        ledger.schedules.tzdata = command.tzdata
    return result


def _outcome(ledger: Ledger, firing: Firing, found: schedules.Found | None) -> FireOutcome:
    if found is None:
        return FireOutcome.STALE
    state, spec = found.state, found.stored.spec
    if state.paused or (firing.version, firing.expected) != (state.version, state.next):
        return FireOutcome.STALE
    if state.finished or firing.flags & REMOVE:
        over = state.finished and firing.flags & REMOVE and state.next <= ledger.now_ms + MAX_AHEAD_MS
        return FireOutcome.DONE if over else FireOutcome.STALE
    # Refuse occurrences up to `state.last`: they were decided before, so only a faulty leader proposes them.
    times = firing.occurrences
    room = _MAX_FILED if spec.max_occurrences is None else spec.max_occurrences - state.made
    in_order = all(a < b for a, b in zip((state.last, *times), times, strict=False))
    newest = times[-1] if times else state.last
    sane = in_order and newest <= firing.last and len(times) <= min(room, _MAX_FILED)
    if spec.end_ms is not None and times:
        sane = sane and times[-1] <= spec.end_ms
    if not firing.flags & LAST:
        sane = sane and firing.last < firing.next < NEVER_MS
    return FireOutcome.DONE if sane else FireOutcome.REFUSED


def _without_overlap(ledger: Ledger, found: schedules.Found, count: int) -> int:
    """Number of the next `count` occurrences that become messages under the schedule's overlap policy. skip: at most
    one, and none while the schedule's last message is pending. wait: until two messages are pending."""
    policy = Overlap(found.stored.spec.overlap)
    if policy is Overlap.ALLOW or not count:
        return count
    most = 2 if policy is Overlap.WAIT else 1
    left = sum(1 for _ in islice(pending_of(ledger, found.state.ring), most))
    return min(count, most - left)


def pending_of(ledger: Ledger, ring: tuple[Made, ...]) -> Iterator[Made]:
    """Messages of a schedule that are pending, or of which a copy for a subscription is pending, newest first."""
    return (made for made in reversed(ring) if pending(ledger, made.id))


def _note_fired(ledger: Ledger, judged: _Judged, codes: list[int], ids: list[int], result: FireResult) -> None:
    firing, (stored, before), _ = judged
    at_times = firing.occurrences
    made = [Made(at_ms, id_, 0) for at_ms, code, id_ in zip(at_times, codes, ids, strict=False) if not code]
    overlapped, refused = len(at_times) - judged.made, judged.made - len(made)
    last = firing.flags & LAST
    after = replace(
        before,
        flags=before.flags | FINISHED * bool(last),
        next=ledger.now_ms + KEPT_MS if last else firing.next,
        last=firing.last,
        made=before.made + len(made),
        missed=before.missed + firing.missed,
        overlapped=before.overlapped + overlapped,
        refused=before.refused + refused,
        ring=_remembered(ledger, stored.spec, (*before.ring, *made)),
    )
    schedules.store(ledger, firing.name, before, schedules.finished(ledger, stored.spec, after))
    result.made += len(made)
    result.missed += firing.missed
    result.overlapped += overlapped
    result.refused += refused


def _remembered(ledger: Ledger, spec: Spec, ring: tuple[Made, ...]) -> tuple[Made, ...]:
    """Messages that a schedule goes on to remember: the last _RING, and earlier ones that may not be due yet or, under
    the policies skip and wait, are pending."""
    if len(ring) <= _RING:
        return ring
    since_ms, older = ledger.now_ms - spec.jitter_ms, ring[:-_RING]
    if spec.overlap:
        # Sort the messages of triggers and backfills to the front, where the limit cuts them off: there may be a
        # thousand.
        more = sorted(pending_of(ledger, older), key=lambda made: (-made.manual, made.occurrence))
    else:
        more = [made for made in older if made.occurrence > since_ms and not made.manual]
    return (*more[-_MAX_FILED:], *ring[-_RING:])


def apply_run(ledger: Ledger, command: Run) -> PublishResult | Refused:
    """Publish occurrences that a user asked for: one for now (trigger), which the overlap policy may refuse, or those
    of a range (backfill). An answer that no retry could change is remembered under the
    Idempotency-Key, and outlives the schedule."""
    if command.key is None:
        return _run(ledger, command)
    idempotency.turn(ledger)
    if (earlier := idempotency.answered_before(ledger, *command.key, _OTHER_RUN)) is not None:
        return earlier
    result = _run(ledger, command)
    return idempotency.remember_refusal(ledger, *command.key, result) if isinstance(result, Refused) else result


def _run(ledger: Ledger, command: Run) -> PublishResult | Refused:
    found = schedules.find(ledger, command.name)
    if found is None:
        return schedules.unknown(command.name)
    stored, before = found
    if command.version not in (ANY_VERSION, before.version):
        return Refused("schedule_changed", f"schedule {command.name!r} has version {before.version} by now: {_ANEW}")
    times = [(at_ms or ledger.now_ms, due_ms or ledger.now_ms) for at_ms, due_ms in command.times]
    triggers = not command.times[0][0]
    # Forget old Idempotency-Keys before the look-up, as the publish does. A key that only the publish forgot would
    # count as a repetition here, skip the overlap check, and still make another message.
    idempotency.turn(ledger)
    repeated = command.key is not None and idempotency.is_known_hash(ledger, command.key[0])
    if triggers and not repeated and not _without_overlap(ledger, found, 1):
        return Refused("overlap", encode_id(next(pending_of(ledger, before.ring)).id))
    batch = occurrences.Occurrences()
    batch.add(stored, times)
    result = batch.result(ledger, command.key)
    columns = zip(times, result.codes.tolist(), result.ids.tolist(), result.duplicate.tolist(), strict=True)
    made = [Made(at_ms, id_, 1) for (at_ms, _), code, id_, again in columns if code == RowCode.OK and not again]
    ring = _remembered(ledger, stored.spec, (*before.ring, *made))
    schedules.store(ledger, command.name, before, replace(before, manual=before.manual + len(made), ring=ring))
    return result
