"""Schedules in the ledger: commands 48–52, of which firing.py applies those that publish. Apply knows no time zones and
no clock: the leader computes times, and apply compares the state that the leader saw with the present one
(server/delivery/schedules.py, ADR 221).

    table `sched`      name  →  specification and template, written by SCHEDULE_PUT alone
    table `schedst`    name  →  State
    table `schednext`  next u64 (big-endian), name  →  nothing: the agenda, a row per schedule that is not paused
    table `schedof`    topic, 0, name  →  nothing

Nothing of a schedule is in memory. An occurrence is an ordinary message, filed ahead of its time; messages that are not
due yet are cancelled when their schedule is changed, paused or deleted.
"""

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from msgspec.structs import replace

from hadelay.codec.commandtypes import TopicDelete
from hadelay.codec.results import Done, Refused
from hadelay.codec.schedules import (
    ANY_VERSION,
    FINISHED,
    KEEP_PAUSE,
    KEPT_MS,
    MAX_RUN,
    MAX_TEMPLATE_BYTES,
    PAUSE,
    PAUSED,
    RESTORED,
    Delete,
    Pause,
    Put,
    Spec,
    State,
    Stored,
    same_message,
)
from hadelay.ledger.limits import shares
from hadelay.ledger.messages.changes import MAX_MOVED_BYTES
from hadelay.ledger.schedules import occurrences
from hadelay.ledger.state import Ledger
from hadelay.ledger.topics import topicchanges
from hadelay.ledger.topics.shards import is_foreign, owner_in_words

SCHED, STATE, AGENDA, OF_TOPIC = b"sched", b"schedst", b"schednext", b"schedof"
#: Limits: schedules of a cluster; bytes of all their templates (messages to publish); schedules that one deletion of a
#: topic pauses.
MAX_SCHEDULES, MAX_BYTES, MAX_PAUSED = 100_000, 1 << 30, 10_000
#: Number of schedules that the refusal of a topic's deletion names.
_SHOWN = 10
_NEXT = struct.Struct(">Q")


class Found(NamedTuple):
    stored: Stored
    state: State


def find(ledger: Ledger, name: str) -> Found | None:
    row = ledger.tables.get(STATE, name.encode())
    stored = None if row is None else ledger.tables.get(SCHED, name.encode())
    return None if row is None or stored is None else Found(Stored.unpack(stored), State.unpack(row))


def of_topic(ledger: Ledger, topic: str, limit: int) -> list[str]:
    """Names of the first `limit` schedules that publish to a topic."""
    start = topic.encode() + b"\0"
    rows = ledger.tables.range(OF_TOPIC, start, topic.encode() + b"\1", limit) if ledger.schedules.count else []
    return [key[len(start) :].decode() for key, _ in rows]


def agenda_key(next_ms: int, name: str = "") -> bytes:
    return _NEXT.pack(max(next_ms, 0)) + name.encode()


def agenda(ledger: Ledger, start: bytes, until_ms: int, limit: int) -> list[tuple[bytes, int, str]]:
    """The next schedules of the agenda, from the key `start` on, whose time is at most `until_ms`: (key, time, name) of
    each."""
    rows = ledger.tables.range(AGENDA, start, agenda_key(until_ms + 1), limit)
    return [(key, _NEXT.unpack_from(key)[0], key[_NEXT.size :].decode()) for key, _ in rows]


def at_once(template: bytes) -> int:
    """Limit of messages that one command makes from this template. Every node copies the template on its event loop, so
    a large template has a lower limit."""
    return max(min(MAX_MOVED_BYTES // len(template), MAX_RUN), 1)


def store(ledger: Ledger, name: str, before: State | None, after: State) -> None:
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


def remove(ledger: Ledger, name: str, found: Found) -> None:
    tables, raw = ledger.tables, name.encode()
    tables.delete(SCHED, raw)
    tables.delete(STATE, raw)
    tables.delete(OF_TOPIC, found.stored.spec.topic.encode() + b"\0" + raw)
    if not found.state.paused:
        tables.delete(AGENDA, agenda_key(found.state.next, name))
    _give_back(ledger, found.stored)
    ledger.schedules.count -= 1
    ledger.schedules.bytes -= len(found.stored.template)


def _give_back(ledger: Ledger, stored: Stored) -> None:
    shares.gave_back(ledger, shares.SCHEDULES, stored.creator)
    shares.gave_back(ledger, shares.SCHEDULE_BYTES, stored.creator, len(stored.template))


def apply_put(ledger: Ledger, command: Put) -> Done | Refused:
    found = find(ledger, command.name)
    if refused := _refusal(ledger, command, found):
        return refused
    name, new = command.name, command.stored
    before = None if found is None else found.state
    pause = PAUSED if command.paused == PAUSE else 0
    if command.paused == KEEP_PAUSE and before is not None:
        pause = before.flags & (PAUSED | RESTORED)
    unchanged = before is not None and pause == before.flags & (PAUSED | RESTORED)
    if found is not None and unchanged and _same(found.stored, new):
        return Done(False)
    ledger.tables.put(SCHED, name.encode(), new.pack())
    _count_put(ledger, name, found, new)
    if found is None or before is None:
        after = State(1, pause, 0, ledger.now_ms, ledger.now_ms)
    elif found.stored.spec.same_times(new.spec) and not (before.paused or pause):
        after = replace(before, version=_following(before.version), put_ms=ledger.now_ms)
        if found.stored.template != new.template:
            after = occurrences.made_again(ledger, new, after)
        if before.finished:
            # The PUT may have raised max_occurrences: let the finished schedule go on, from now, as after a change of
            # times.
            after = replace(after, flags=0, next=0, last=max(ledger.now_ms, after.last))
    else:
        after = _from_now(ledger, found, pause)
        if found.stored.template != new.template:
            after = occurrences.made_again(ledger, new, after)
    store(ledger, name, before, finished(ledger, new.spec, after))
    return Done()


def _same(one: Stored, other: Stored) -> bool:
    """Whether two PUTs of a schedule are equal except for the node that encoded the template (the message to publish):
    the template names this node."""
    return one.spec == other.spec and (one.template == other.template or same_message(one.template, other.template))


def _refusal(ledger: Ledger, command: Put, found: Found | None) -> Refused | None:
    template, topic = command.stored.template, command.stored.spec.topic
    version = 0 if found is None else found.state.version
    # A repetition of the last PUT, whose answer was lost, is not refused: it changes nothing.
    repeats = (
        found is not None
        and found.stored.creator == command.stored.creator
        and _same(found.stored, command.stored)
        and _following(command.expected) == version
    )
    if command.expected not in (ANY_VERSION, version) and not repeats:
        return Refused("schedule_changed", f"schedule {command.name!r} has version {version}, not {command.expected}")
    if command.publish.topics != [topic] or int(command.publish.rows["body_size"][0]) > MAX_TEMPLATE_BYTES:
        return Refused("bad_config", f"the message is for topic {topic!r} and has at most {MAX_TEMPLATE_BYTES} bytes")
    if is_foreign(ledger, topic):
        return Refused("other_shard", owner_in_words(ledger.shards, topic))
    if not ledger.settings.auto_create_topics and ledger.topic(topic) is None:
        return Refused("no_topic", f"there is no topic {topic!r}")
    growth = len(template) - (0 if found is None else len(found.stored.template))
    wrong = shares.refusal(
        ledger, shares.SCHEDULES, ledger.schedules.count, MAX_SCHEDULES, amount=found is None
    ) or shares.refusal(ledger, shares.SCHEDULE_BYTES, ledger.schedules.bytes, MAX_BYTES, amount=max(growth, 0))
    if wrong:
        return Refused("too_many_schedules", wrong)
    if ledger.settings.auto_create_topics and (wrong := topicchanges.name_topics(ledger, [topic])):
        return Refused("too_many_topics", wrong)
    return None


def _count_put(ledger: Ledger, name: str, found: Found | None, new: Stored) -> None:
    tables, raw = ledger.tables, name.encode()
    if found is None:
        ledger.schedules.count += 1
    else:
        _give_back(ledger, found.stored)
        ledger.schedules.bytes -= len(found.stored.template)
        tables.delete(OF_TOPIC, found.stored.spec.topic.encode() + b"\0" + raw)
    ledger.schedules.bytes += len(new.template)
    # Count the schedule's row for the name of the token that put the schedule last (ledger/limits/shares.py).
    if new.creator == ledger.by:
        shares.took(ledger, shares.SCHEDULES)
        shares.took(ledger, shares.SCHEDULE_BYTES, len(new.template))
    tables.put(OF_TOPIC, new.spec.topic.encode() + b"\0" + raw, b"")


def _following(version: int) -> int:
    return version % (ANY_VERSION - 1) + 1


def _from_now(ledger: Ledger, found: Found, flags: int) -> State:
    """New state of a schedule that restarts now: its messages whose occurrences are ahead are cancelled, and
    occurrences before now are skipped. Occurrences whose messages users delivered early are not published again.

    An occurrence whose time has come is never dropped silently. Its message stays, even if the jitter makes the message
    due later. Only a pause cancels the message, and counts the occurrence as missed, like occurrences not made in
    time."""
    before, now_ms = found.state, ledger.now_ms
    stays_ms = -1 if flags & PAUSED else now_ms
    kept, cancelled = occurrences.cancel_filed(ledger, before, stays_ms)
    newest = max((made.occurrence for made in kept if not made.manual), default=0)
    missed = sum(made.occurrence <= now_ms for made, _ in cancelled) + _overdue(found, now_ms)
    return replace(
        before,
        version=_following(before.version),
        flags=flags,
        next=0,
        last=max(now_ms, newest),
        put_ms=now_ms,
        made=before.made - len(cancelled),
        missed=before.missed + missed,
        ring=kept,
    )


def _overdue(found: Found, now_ms: int) -> int:
    """Number of occurrences up to now_ms that are not made yet. For a cron pattern, which apply cannot compute, 1
    stands for any number above 0."""
    spec, state = found.stored.spec, found.state
    if state.flags or not 0 < state.next <= now_ms:
        return 0
    if spec.at is not None:
        return sum(state.next <= at_ms <= now_ms for at_ms in spec.at)
    until_ms = now_ms if spec.end_ms is None else min(now_ms, spec.end_ms)
    return 1 if spec.every_ms is None else 1 + (until_ms - state.next) // spec.every_ms


def finished(ledger: Ledger, spec: Spec, state: State) -> State:
    """Mark the schedule as finished if it has published max_occurrences messages; returns the resulting state."""
    if spec.max_occurrences is None or state.made < spec.max_occurrences or state.flags:
        return state
    return replace(state, flags=state.flags | FINISHED, next=ledger.now_ms + KEPT_MS)


def apply_delete(ledger: Ledger, command: Delete) -> Done | Refused:
    name = command.name
    found = find(ledger, name)
    if found is None:
        return unknown(name)
    occurrences.cancel_filed(ledger, found.state)
    remove(ledger, name, found)
    return Done()


def apply_state(ledger: Ledger, command: Pause) -> Done | Refused:
    """Pause a schedule, or let it go on from now. A finished schedule stays finished, and is still removed after
    KEPT_MS."""
    name, paused = command.name, command.paused
    found = find(ledger, name)
    if found is None:
        return unknown(name)
    if found.state.flags & (PAUSED | RESTORED) == PAUSED * paused or found.state.flags & FINISHED:
        return Done(False)
    after = _from_now(ledger, found, PAUSED * paused)
    store(ledger, name, found.state, finished(ledger, found.stored.spec, after))
    return Done()


def apply_topic_delete(ledger: Ledger, command: TopicDelete) -> Done | Refused:
    """Delete a topic. If schedules publish to the topic: refuse without `force`, else pause these schedules."""
    topic, force = command.topic, command.force
    names = of_topic(ledger, topic, MAX_PAUSED + 1) if ledger.topic(topic) is not None else []
    if names and (not force or len(names) > MAX_PAUSED):
        shown = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
        return Refused("topic_has_schedules", f"schedules publish to {topic!r}: {shown}")
    result = topicchanges.apply_delete(ledger, command)
    for name in names if isinstance(result, Done) else ():
        # Change only the state of the schedule: its messages were cancelled with the topic, and reading the templates
        # would take long.
        row = ledger.tables.get(STATE, name.encode())
        before = None if row is None else State.unpack(row)
        if before is not None and not before.flags & (PAUSED | FINISHED):
            after = replace(before, version=_following(before.version), flags=PAUSED, put_ms=ledger.now_ms)
            store(ledger, name, before, after)
    return result


def paused_by_restore(states: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes, bytes | None]]:
    """Changes (table, key, value) that pause every schedule of a restored cluster, so that the original and the
    restored cluster do not both publish its occurrences (ADR 222). A finished schedule publishes none, and keeps its
    row of the agenda, which removes it. states: rows of table `schedst`."""
    for raw, row in states:
        state = State.unpack(row)
        if not state.paused and not state.finished:
            yield AGENDA, agenda_key(state.next, raw.decode()), None
            yield STATE, raw, replace(state, flags=state.flags | PAUSED | RESTORED).pack()


def unknown(name: str) -> Refused:
    return Refused("no_schedule", f"there is no schedule {name!r}")
