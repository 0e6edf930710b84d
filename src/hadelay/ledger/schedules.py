"""Schedules in the ledger: commands 96–100. Apply knows no time zones and no clock: the leader computes times, and
apply compares what the leader saw with what is (server/delivery/schedules.py, ADR 221).

    table `sched`      name  →  specification and template, written by SCHEDULE_PUT alone
    table `schedst`    name  →  State
    table `schednext`  next u64 (big-endian), name  →  nothing: the agenda, a row per schedule that is not paused
    table `schedof`    topic, 0, name  →  nothing

Nothing of a schedule is in memory. An occurrence is an ordinary message, filed ahead of its time; messages that are not
due yet are cancelled when their schedule is changed, paused or deleted.
"""

import struct
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

from hadelay.codec.commandtypes import MAX_AHEAD_MS
from hadelay.codec.results import Done, FireOutcome, FireResult, PublishResult, Refused, RowCode
from hadelay.codec.schedules import (
    ANY_VERSION,
    FINISHED,
    HELD,
    KEEP_PAUSE,
    KEPT_MS,
    LAST,
    MAX_RUN,
    MAX_TEMPLATE_BYTES,
    PAUSE,
    PAUSED,
    REMOVE,
    Fire,
    Firing,
    Made,
    Overlap,
    Put,
    Run,
    Spec,
    State,
    Stored,
    same_message,
)
from hadelay.ledger import idempotency, topicchanges
from hadelay.ledger.changes import MAX_MOVED_BYTES
from hadelay.ledger.copies import pending
from hadelay.ledger.lookup import EntryRef, state_of
from hadelay.ledger.occurrences import Occurrences
from hadelay.ledger.state import Ledger
from hadelay.ledger.transitions import FLAG_WAS_DUE, Leaving, settle
from hadelay.model import NEVER_MS, Event, encode_id
from hadelay.model import State as MessageState
from hadelay.version import SAME_PUT_LEVEL

SCHED, STATE, AGENDA, OF_TOPIC = b"sched", b"schedst", b"schednext", b"schedof"
#: Limits: schedules of a cluster; bytes of all their templates (messages to publish); schedules that one deletion of a
#: topic pauses.
MAX_SCHEDULES = 100_000
MAX_BYTES = 1 << 30
MAX_PAUSED = 10_000
#: Number of schedules that the refusal of a topic's deletion names.
_SHOWN = 10
#: Numbers of messages that a schedule remembers: the last _RING, and up to _MAX_FILED others not due yet.
_RING = 10
_MAX_FILED = 250
_NEXT = struct.Struct(">Q")


class Found(NamedTuple):
    stored: Stored
    state: State


def find(ledger: Ledger, name: str) -> Found | None:
    row = ledger.tables.get(STATE, name.encode())
    stored = None if row is None else ledger.tables.get(SCHED, name.encode())
    return None if row is None or stored is None else Found(Stored.unpack(stored), State.unpack(row))


def of_topic(ledger: Ledger, topic: str, limit: int) -> list[str]:
    """Names of the first schedules that publish to a topic."""
    start = topic.encode() + b"\0"
    rows = ledger.tables.range(OF_TOPIC, start, topic.encode() + b"\1", limit) if ledger.schedules.count else []
    return [key[len(start) :].decode() for key, _ in rows]


def agenda_key(next_ms: int, name: str = "") -> bytes:
    return _NEXT.pack(max(next_ms, 0)) + name.encode()


def agenda(ledger: Ledger, start: bytes, until_ms: int, limit: int) -> list[tuple[bytes, int, str]]:
    """(key, time, name) of the next schedules from the key `start` on whose time is at most `until_ms`."""
    rows = ledger.tables.range(AGENDA, start, agenda_key(until_ms + 1), limit)
    return [(key, _NEXT.unpack_from(key)[0], key[_NEXT.size :].decode()) for key, _ in rows]


def at_once(template: bytes) -> int:
    """Limit of the messages of a template that one command makes: every node copies them on its event loop."""
    return max(min(MAX_MOVED_BYTES // len(template), MAX_RUN), 1)


def _store(ledger: Ledger, name: str, before: State | None, after: State) -> None:
    tables, raw = ledger.tables, name.encode()
    had = None if before is None or before.paused else agenda_key(before.next, name)
    has = None if after.paused else agenda_key(after.next, name)
    tables.put(STATE, raw, after.pack())
    ledger.schedules_finished += after.finished and not (before is not None and before.finished)
    if had != has:
        if had is not None:
            tables.delete(AGENDA, had)
        if has is not None:
            tables.put_new(AGENDA, {has: b""})
            ledger.listener.on_agenda(after.next)


def _remove(ledger: Ledger, name: str, found: Found) -> None:
    tables, raw = ledger.tables, name.encode()
    tables.delete(SCHED, raw)
    tables.delete(STATE, raw)
    tables.delete(OF_TOPIC, found.stored.spec.topic.encode() + b"\0" + raw)
    if not found.state.paused:
        tables.delete(AGENDA, agenda_key(found.state.next, name))
    ledger.schedules.count -= 1
    ledger.schedules.bytes -= len(found.stored.template)


def apply_put(ledger: Ledger, command: Put) -> Done | Refused:
    found = find(ledger, command.name)
    if refused := _refusal(ledger, command, found):
        return refused
    name, new = command.name, command.stored
    before = None if found is None else found.state
    pause = PAUSED if command.paused == PAUSE else 0
    if command.paused == KEEP_PAUSE and before is not None:
        pause = before.flags & (PAUSED | HELD)
    unchanged = before is not None and pause == before.flags & (PAUSED | HELD)
    if found is not None and unchanged and _same(ledger, found.stored, new):
        return Done(False)
    ledger.tables.put(SCHED, name.encode(), new.pack())
    _count_put(ledger, name, found, new)
    if found is None or before is None:
        after = State(1, pause, 0, ledger.now_ms, ledger.now_ms, 0, 0, 0, 0, 0)
    elif found.stored.spec.same_times(new.spec) and not (before.paused or pause):
        after = before._replace(version=_following(before.version), put_ms=ledger.now_ms)
        if found.stored.template != new.template:
            after = _made_again(ledger, name, new, after)
        if before.finished:
            # It may go on if max_occurrences is higher now: from now, as after a change of times.
            after = after._replace(flags=0, next=0, last=max(ledger.now_ms, after.last))
    else:
        after = _from_now(ledger, before, pause)
    _store(ledger, name, before, _finished(ledger, new.spec, after))
    return Done()


def _same(ledger: Ledger, one: Stored, other: Stored) -> bool:
    """Whether two PUTs of a schedule say the same. A template has the name of the node that encoded the message."""
    if one.spec != other.spec or one.template == other.template:
        return one.spec == other.spec
    return ledger.level >= SAME_PUT_LEVEL and same_message(one.template, other.template)


def _refusal(ledger: Ledger, command: Put, found: Found | None) -> Refused | None:
    template, topic = command.stored.template, command.stored.spec.topic
    version = 0 if found is None else found.state.version
    # A repetition of the last PUT, whose answer was lost, changes nothing.
    repeats = (
        found is not None
        and found.stored.creator == command.stored.creator
        and _same(ledger, found.stored, command.stored)
        and _following(command.expected) == version
    )
    if command.expected not in (ANY_VERSION, version) and not repeats:
        return Refused("schedule_changed", f"schedule {command.name!r} has version {version}, not {command.expected}")
    if command.publish.topics != [topic] or int(command.publish.rows["body_size"][0]) > MAX_TEMPLATE_BYTES:
        return Refused("bad_config", f"the message is for topic {topic!r} and has at most {MAX_TEMPLATE_BYTES} bytes")
    if not ledger.settings.auto_create_topics and ledger.topic(topic) is None:
        return Refused("no_topic", f"there is no topic {topic!r}")
    if found is None and ledger.schedules.count >= MAX_SCHEDULES:
        return Refused("too_many_schedules", f"there are {ledger.schedules.count} schedules, as many as there may be")
    room = MAX_BYTES - ledger.schedules.bytes + (0 if found is None else len(found.stored.template))
    if len(template) > room:
        return Refused("too_many_schedules", f"the messages of all schedules have at most {MAX_BYTES >> 20} MiB")
    return None


def _count_put(ledger: Ledger, name: str, found: Found | None, new: Stored) -> None:
    tables, raw = ledger.tables, name.encode()
    if found is None:
        ledger.schedules.count += 1
    else:
        ledger.schedules.bytes -= len(found.stored.template)
        tables.delete(OF_TOPIC, found.stored.spec.topic.encode() + b"\0" + raw)
    ledger.schedules.bytes += len(new.template)
    tables.put(OF_TOPIC, new.spec.topic.encode() + b"\0" + raw, b"")


def _following(version: int) -> int:
    return version % (ANY_VERSION - 1) + 1


def _from_now(ledger: Ledger, before: State, flags: int) -> State:
    """New state of a schedule that restarts now: its messages that are not due yet are cancelled, and occurrences
    before now are skipped. Occurrences whose messages users delivered early are not published again."""
    kept, cancelled = _cancel_filed(ledger, before)
    newest = max((made.occurrence for made in kept if not made.manual), default=0)
    return before._replace(
        version=_following(before.version), flags=flags, next=0, last=max(ledger.now_ms, newest), put_ms=ledger.now_ms,
        made=before.made - len(cancelled), ring=kept,
    )  # fmt: skip


def _cancel_filed(ledger: Ledger, state: State) -> tuple[tuple[Made, ...], list[tuple[Made, int]]]:
    """Cancel the schedule's messages that are not due yet, except those of triggers and backfills. Returns (its other
    remembered messages, cancelled messages with their due times)."""
    kept, cancelled = [], []
    for made in state.ring:
        entries = [] if made.manual else [entry for entry, _ in pending(ledger, made.id)]
        if not entries or not all(_is_ahead(ledger, entry) for entry in entries):
            kept.append(made)
            continue
        for entry in entries:
            settle(ledger, Leaving(entry.hour, entry.rows), Event.CANCELLED)
        cancelled.append((made, int(entries[0].rows["deliver_at_ms"][0])))
    return tuple(kept), cancelled


def _is_ahead(ledger: Ledger, entry: EntryRef) -> bool:
    """Whether the message waits and was never due: it has no attempt, and no reschedule found it due (FLAG_WAS_DUE)."""
    row = entry.rows[0]
    untouched = not int(row["attempt"]) and not int(row["flags"]) & FLAG_WAS_DUE
    waits = state_of(ledger, entry, ledger.now_ms) in (MessageState.SCHEDULED, MessageState.BLOCKED)
    return untouched and waits and int(row["deliver_at_ms"]) > ledger.now_ms


def _made_again(ledger: Ledger, name: str, new: Stored, state: State) -> State:
    """Replace the schedule's messages that are not due yet by messages of its new template, with the same due times."""
    kept, cancelled = _cancel_filed(ledger, state)
    batch, times = Occurrences(), [(made.occurrence, due_ms) for made, due_ms in cancelled]
    batch.add(new, times)
    codes, ids = batch.publish(ledger)
    made = [Made(occurrence, id_, 0) for (occurrence, _), code, id_ in zip(times, codes, ids, strict=True) if not code]
    ring = sorted((*kept, *made), key=lambda one: one.occurrence)
    refused = len(times) - len(made)
    return state._replace(ring=tuple(ring), made=state.made - refused, refused=state.refused + refused)


def _finished(ledger: Ledger, spec: Spec, state: State) -> State:
    """Mark the schedule as finished if it has published max_occurrences messages; returns the resulting state."""
    if spec.max_occurrences is None or state.made < spec.max_occurrences or state.flags:
        return state
    return state._replace(flags=state.flags | FINISHED, next=ledger.now_ms + KEPT_MS)


def apply_delete(ledger: Ledger, name: str) -> Done | Refused:
    found = find(ledger, name)
    if found is None:
        return _unknown(name)
    _cancel_filed(ledger, found.state)
    _remove(ledger, name, found)
    return Done()


def apply_state(ledger: Ledger, command: tuple[str, bool]) -> Done | Refused:
    """Pause a schedule, or let it go on from now. A finished schedule stays finished, and is removed in its time."""
    name, paused = command
    found = find(ledger, name)
    if found is None:
        return _unknown(name)
    if found.state.flags & (PAUSED | HELD) == PAUSED * paused or found.state.flags & FINISHED:
        return Done(False)
    after = _from_now(ledger, found.state, PAUSED * paused)
    _store(ledger, name, found.state, _finished(ledger, found.stored.spec, after))
    return Done()


def apply_topic_delete(ledger: Ledger, command: tuple[str, bool]) -> Done | Refused:
    """Delete a topic. If schedules publish to the topic: refuse without `force`, else pause these schedules."""
    topic, force = command
    names = of_topic(ledger, topic, MAX_PAUSED + 1) if ledger.topic(topic) is not None else []
    if names and (not force or len(names) > MAX_PAUSED):
        shown = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
        return Refused("topic_has_schedules", f"schedules publish to {topic!r}: {shown}")
    result = topicchanges.apply_delete(ledger, command)
    for name in names if isinstance(result, Done) else ():
        # The messages have ended with the topic. Read no templates: that would take long.
        row = ledger.tables.get(STATE, name.encode())
        before = None if row is None else State.unpack(row)
        if before is not None and not before.flags & (PAUSED | FINISHED):
            after = before._replace(version=_following(before.version), flags=PAUSED, put_ms=ledger.now_ms)
            _store(ledger, name, before, after)
    return result


def held(states: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes, bytes | None]]:
    """Changes (table, key, value) that pause every schedule of a restored cluster, so that the original and the
    restored cluster do not both publish its occurrences (ADR 222). A finished schedule publishes none, and keeps its
    row of the agenda, which removes it. states: rows of table `schedst`."""
    for raw, row in states:
        state = State.unpack(row)
        if not state.paused and not state.finished:
            yield AGENDA, agenda_key(state.next, raw.decode()), None
            yield STATE, raw, state._replace(flags=state.flags | PAUSED | HELD).pack()


def _unknown(name: str) -> Refused:
    return Refused("no_schedule", f"there is no schedule {name!r}")


class _Judged(NamedTuple):
    """Occurrences of one schedule that apply accepted, until their messages are published."""

    firing: Firing
    found: Found
    #: Number of occurrences to publish, from the first on; the overlap policy drops the later occurrences.
    made: int


def apply_fire(ledger: Ledger, command: Fire) -> FireResult:
    """Publish occurrences that the leader computed, for every schedule that is still as the leader saw it."""
    result = FireResult(np.zeros(len(command.firings), np.uint8))
    accepted: list[_Judged] = []
    seen: set[str] = set()
    batch = Occurrences()
    for at, firing in enumerate(command.firings):
        found = None if firing.name in seen else find(ledger, firing.name)
        seen.add(firing.name)
        outcome = _outcome(ledger, firing, found)
        result.outcomes[at] = outcome
        if found is None or outcome is not FireOutcome.DONE:
            continue
        if firing.flags & REMOVE:
            _remove(ledger, firing.name, found)
            continue
        made = _without_overlap(ledger, found, len(firing.times))
        batch.add(found.stored, firing.times[:made].tolist())
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


def _outcome(ledger: Ledger, firing: Firing, found: Found | None) -> FireOutcome:
    if found is None:
        return FireOutcome.STALE
    state, spec = found.state, found.stored.spec
    if state.paused or (firing.version, firing.expected) != (state.version, state.next):
        return FireOutcome.STALE
    if state.finished or firing.flags & REMOVE:
        over = state.finished and firing.flags & REMOVE and state.next <= ledger.now_ms + MAX_AHEAD_MS
        return FireOutcome.DONE if over else FireOutcome.STALE
    # Refuse occurrences up to `state.last`: they were decided before, so only a faulty leader proposes them.
    times = firing.times["occurrence"].tolist()
    room = _MAX_FILED if spec.max_occurrences is None else spec.max_occurrences - state.made
    in_order = all(a < b for a, b in zip((state.last, *times), times, strict=False))
    newest = times[-1] if times else state.last
    sane = in_order and newest <= firing.last and len(times) <= min(room, _MAX_FILED)
    if spec.end_ms is not None and times:
        sane = sane and times[-1] <= spec.end_ms
    if not firing.flags & LAST:
        sane = sane and firing.last < firing.next < NEVER_MS
    return FireOutcome.DONE if sane else FireOutcome.REFUSED


def _without_overlap(ledger: Ledger, found: Found, count: int) -> int:
    """Number of the next `count` occurrences that become messages under the schedule's overlap policy. skip: at most
    one, and none while the schedule's last message is pending. wait: until two messages are pending."""
    policy = Overlap(found.stored.spec.overlap)
    if policy is Overlap.ALLOW or not count:
        return count
    most = 2 if policy is Overlap.WAIT else 1
    left = sum(1 for _ in islice(pending_of(ledger, found.state.ring), most))
    return min(count, most - left)


def pending_of(ledger: Ledger, ring: tuple[Made, ...]) -> Iterator[Made]:
    """Those of a schedule's messages of which a copy is pending, newest first."""
    return (made for made in reversed(ring) if pending(ledger, made.id))


def _note_fired(ledger: Ledger, judged: _Judged, codes: list[int], ids: list[int], result: FireResult) -> None:
    firing, (stored, before), _ = judged
    occurrences = firing.times["occurrence"].tolist()
    made = [Made(at_ms, id_, 0) for at_ms, code, id_ in zip(occurrences, codes, ids, strict=False) if not code]
    overlapped, refused = len(occurrences) - judged.made, judged.made - len(made)
    last = firing.flags & LAST
    after = before._replace(
        flags=before.flags | FINISHED * bool(last), next=ledger.now_ms + KEPT_MS if last else firing.next,
        last=firing.last, made=before.made + len(made), missed=before.missed + firing.missed,
        overlapped=before.overlapped + overlapped, refused=before.refused + refused,
        ring=_remembered(ledger, stored.spec, (*before.ring, *made)),
    )  # fmt: skip
    _store(ledger, firing.name, before, _finished(ledger, stored.spec, after))
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
        # Those of a backfill last: there may be a thousand.
        more = sorted(pending_of(ledger, older), key=lambda made: (-made.manual, made.occurrence))
    else:
        more = [made for made in older if made.occurrence > since_ms and not made.manual]
    return (*more[-_MAX_FILED:], *ring[-_RING:])


def apply_run(ledger: Ledger, command: Run) -> PublishResult | Refused:
    """Publish occurrences that a user asked for: one for now (trigger), which the overlap policy may refuse, or those
    of a range (backfill)."""
    found = find(ledger, command.name)
    if found is None:
        return _unknown(command.name)
    stored, before = found
    if command.version not in (ANY_VERSION, before.version):
        return Refused("schedule_changed", f"schedule {command.name!r} has version {before.version} by now: try again")
    times = [(at_ms or ledger.now_ms, due_ms or ledger.now_ms) for at_ms, due_ms in command.times.tolist()]
    triggers = not int(command.times["occurrence"][0])
    # First forget the keys that the publish would forget: a forgotten key makes another message.
    idempotency.turn(ledger)
    repeated = command.key is not None and idempotency.is_known_hash(ledger, command.key[0])
    if triggers and not repeated and not _without_overlap(ledger, found, 1):
        return Refused("overlap", encode_id(next(pending_of(ledger, before.ring)).id))
    batch = Occurrences()
    batch.add(stored, times)
    result = batch.result(ledger, command.key)
    columns = zip(times, result.codes.tolist(), result.ids.tolist(), result.duplicate.tolist(), strict=True)
    made = [Made(at_ms, id_, 1) for (at_ms, _), code, id_, again in columns if code == RowCode.OK and not again]
    ring = _remembered(ledger, stored.spec, (*before.ring, *made))
    _store(ledger, command.name, before, before._replace(manual=before.manual + len(made), ring=ring))
    return result
