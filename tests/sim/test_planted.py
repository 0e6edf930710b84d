"""One corruption per assertion of the checks of ledgers and dispatchers: an assertion that nothing makes fail could be
removed, and nobody would notice."""

from __future__ import annotations

import ast
import copy
import re
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from pyroaring import BitMap

from chaos.sim import (
    cursorcheck,
    groupcheck,
    jobcheck,
    ledgercheck,
    memorycheck,
    oracles,
    replicas,
    savedcheck,
    uniques,
    views,
)
from hadelay.codec.schedules import State
from hadelay.handout.dispatcher import Dispatcher
from hadelay.ledger.groups.messagegroups import GROUP, GROUP_KEY, GROUPOF, GROUPQ, IDLE, POSITION, Head, unpack_group
from hadelay.ledger.hours.lookup import TTL_OF, TTL_OF_VALUE
from hadelay.ledger.hours.transitions import ID_KEY, PLACE, PLACE_VALUE
from hadelay.ledger.leases import ackresults, dead
from hadelay.ledger.messages import copies, ttl, unique
from hadelay.ledger.messages.keys import KEY, KEYOF
from hadelay.ledger.schedules import schedules
from hadelay.model import HOUR_MS, Event
from tests.handout.desk import Desk
from tests.ledger.world import START_HOUR, draft
from tests.sim.planted import FREE_HOUR, FUTURE_HOUR, NOBODY, Busy, Planted

#: Modules all of whose assertions have a planted corruption.
MODULES = (ledgercheck, groupcheck, memorycheck, cursorcheck, savedcheck, jobcheck, oracles, replicas, uniques, views)

Case = Callable[[], None]
#: Message of the assertion, as the beginning of a regular expression, and function that plants the corruption and
#: calls the check.
CASES: list[tuple[str, Case]] = []


@cache
def world() -> Planted:
    return Planted()


def ledger(message: str, check: Callable[[Any], object] = ledgercheck.check) -> Callable[[Any], None]:
    """Decorator: a corruption of the healthy ledger."""

    def add(plant: Callable[[Planted], None]) -> None:
        def run() -> None:
            w = copy.deepcopy(world())
            plant(w)
            check(w.ledger)

        CASES.append((message, run))

    return add


def groups(message: str) -> Callable[[Any], None]:
    return ledger(message, groupcheck.check)


def memory(message: str) -> Callable[[Any], None]:
    """Decorator: a corruption of what a healthy leader counts."""

    def add(plant: Callable[[Busy], None]) -> None:
        def run() -> None:
            desk = Busy()
            plant(desk)
            memorycheck.check(desk.core)
            memorycheck.check_leases(desk.delivery)

        CASES.append((message, run))

    return add


# Topics


@ledger("topic t: open ")
def _(w: Planted) -> None:
    w.topic().open += 1


@ledger("topic t: tombstoned 1")
def _(w: Planted) -> None:
    w.topic().tombstoned += 1


@ledger("topic t: retrying 1")
def _(w: Planted) -> None:
    w.topic().retrying += 1


@ledger("topic t: published ")
def _(w: Planted) -> None:
    w.topic().published += 1


@ledger("topic t: generation")
def _(w: Planted) -> None:
    w.topic().generation += 1


@ledger("topic t: floor")
def _(w: Planted) -> None:
    w.topic().floor += 1


@ledger("topic ends: floor")
def _(w: Planted) -> None:
    topic = w.topic("ends")
    topic.floor = topic.generation + 1
    w.ledger.topics.floors[topic.number] = topic.floor


@ledger("topic t: with_work")
def _(w: Planted) -> None:
    w.ledger.topics.with_work.add(w.topic().number)


@ledger("topic ends: expiring")
def _(w: Planted) -> None:
    w.ledger.topics.expiring.clear()


@ledger("topic t: routing")
def _(w: Planted) -> None:
    w.ledger.topics.routing.add(w.topic().number)


@ledger("topic dies: died")
def _(w: Planted) -> None:
    w.ledger.topics.died.clear()


@ledger("topic dies: alerted")
def _(w: Planted) -> None:
    w.topic("dies").alerted = 3


@ledger("topic t: .* bytes")
def _(w: Planted) -> None:
    w.topic().bytes += 1


# Keys for a period, idempotency keys


@ledger("the tables of unique keys differ")
def _(w: Planted) -> None:
    w.drop(unique.UNIQEND)


@ledger("3 unique keys, 2 rows")
def _(w: Planted) -> None:
    w.ledger.unique_count += 1


@ledger("2 idempotency keys, 1 rows")
def _(w: Planted) -> None:
    w.ledger.key_count += 1


@ledger("1 idempotency keys, 0 rows")
def _(w: Planted) -> None:
    w.ledger.key_count_before += 1


# Ends of messages


@ledger(f"hour {FUTURE_HOUR + 1}: events, but no state")
def _(w: Planted) -> None:
    w.ids(draft(in_ms=4 * HOUR_MS))
    w.event(FUTURE_HOUR + 1, 0, Event.LEASED)


@ledger(f"hour {START_HOUR}: settled, and not in the log")
def _(w: Planted) -> None:
    w.event(START_HOUR, w.index("waiting"), Event.CANCELLED)


@ledger(f"hour {START_HOUR}: ended by TTL_EXPIRED")
def _(w: Planted) -> None:
    w.hour("cancelled").others[Event.TTL_EXPIRED] = BitMap([w.index("cancelled")])


@ledger(f"hour {START_HOUR}: retrying")
def _(w: Planted) -> None:
    w.hour("cancelled").retrying = BitMap([w.index("cancelled")])


@ledger(f"hour {START_HOUR}: settled at ")
def _(w: Planted) -> None:
    w.hour("cancelled").settled_at_ms += 1


@ledger(f"hour {START_HOUR}: topics of messages that ended")
def _(w: Planted) -> None:
    w.hour("cancelled").topics.add(w.topic("ends").number)


# Rows about messages


@ledger(f"{NOBODY:x} is not at {START_HOUR}, 0")
def _(w: Planted) -> None:
    w.tables.put(PLACE, ID_KEY.pack(NOBODY), PLACE_VALUE.pack(START_HOUR, 0))


@ledger(f"{NOBODY:x} is gone, and has a client key")
def _(w: Planted) -> None:
    w.tables.put(KEYOF, ID_KEY.pack(NOBODY), w.first(KEY))


@ledger("the client key .* has no message")
def _(w: Planted) -> None:
    w.drop(KEYOF)


@ledger(f"the TTL of {NOBODY:x} is never forgotten")
def _(w: Planted) -> None:
    w.tables.put(TTL_OF, ID_KEY.pack(NOBODY), TTL_OF_VALUE.pack(0, 0))


# Leases


@ledger(r"grant \(9, 9\) says it is ")
def _(w: Planted) -> None:
    w.ledger.grants[9, 9] = w.ledger.grants.pop(w.grant_of("leased").key)


@ledger("grant .*: 3 left of 2")
def _(w: Planted) -> None:
    w.grant_of("leased").left += 1


@ledger("grant .*: 0 left of 0")
def _(w: Planted) -> None:
    grant = w.grant_of("leased")
    grant.rows["open"], grant.left = 0, 0


@ledger("grant .*: progress of a lease that ended")
def _(w: Planted) -> None:
    w.grant_of("leased").progress[2] = "half"


@ledger(f"hour {START_HOUR}: leased twice")
def _(w: Planted) -> None:
    grant = copy.deepcopy(w.grant_of("leased"))
    grant.seq = 99
    w.ledger.grants[grant.key] = grant


@ledger(f"hour {START_HOUR}: leased$")
def _(w: Planted) -> None:
    w.hour("leased").leased.discard(w.index("leased"))


@ledger(rf"leased in hours nothing is known of: \[{FREE_HOUR}\]")
def _(w: Planted) -> None:
    w.hour("leased").leased -= BitMap(w.grant_of("leased").rows["index"].tolist())
    w.grant_of("leased").rows["hour"] = FREE_HOUR


@ledger("topic t: leased ")
def _(w: Planted) -> None:
    w.topic().leased += 1


@ledger("c/b'other' outlived its grant")
def _(w: Planted) -> None:
    w.ledger.requests["c"][b"other"] = 9, 9


# Hours


@ledger(f"hour {START_HOUR}: settled and leased")
def _(w: Planted) -> None:
    w.hour("leased").settled.add(w.index("leased"))


@ledger(f"hour {START_HOUR}: settled beyond its end")
def _(w: Planted) -> None:
    w.hour("waiting").settled.add(w.store.count(START_HOUR))


@ledger(f"hour {START_HOUR}: CANCELLED but not settled")
def _(w: Planted) -> None:
    w.hour("waiting").others[Event.CANCELLED].add(w.index("waiting"))


@ledger(f"hour {START_HOUR}: blocked but not waiting")
def _(w: Planted) -> None:
    w.hour("leased").blocked.add(w.index("leased"))


@ledger(f"hour {START_HOUR}: open$")
def _(w: Planted) -> None:
    w.ledger.open_entries = w.store.count  # type: ignore[method-assign]


@ledger(f"hour {START_HOUR}: 3 have a key")
def _(w: Planted) -> None:
    w.hour("keyed").keyed += 1


@ledger(f"hour {FUTURE_HOUR}: counted by second before it began")
def _(w: Planted) -> None:
    w.hour("future").add_seconds(np.zeros(1, np.uint16))


@ledger(f"hour {START_HOUR}: not counted by second, ")
def _(w: Planted) -> None:
    w.hour("waiting").open_seconds = None


@ledger(f"hour {START_HOUR}: seconds")
def _(w: Planted) -> None:
    w.hour("waiting").add_seconds(np.array([77], np.uint16))


# Results, dead letters, TTL


@ledger("hour .*: 1 results")
def _(w: Planted) -> None:
    w.result()[0].results += 1


@ledger("hour .*: an open result")
def _(w: Planted) -> None:
    state, index = w.result()
    state.settled.discard(index)


@ledger("0 rows of results, 1 results")
def _(w: Planted) -> None:
    w.drop(ackresults.RESULTS)


@ledger("table dead")
def _(w: Planted) -> None:
    w.drop(dead.DEAD)


@ledger("dead letter .* has no place")
def _(w: Planted) -> None:
    w.tables.delete(PLACE, ID_KEY.pack(w["dead"]))


@ledger("dead letter .*: place")
def _(w: Planted) -> None:
    w.tables.put(PLACE, ID_KEY.pack(w["dead"]), PLACE_VALUE.pack(w.entry("dead").hour, 9))


@ledger("topic dies: dead 3 ≠ 2")
def _(w: Planted) -> None:
    w.topic("dies").dead += 1


@ledger(".* has a TTL, but nobody knows which")
def _(w: Planted) -> None:
    w.tables.delete(TTL_OF, ID_KEY.pack(w["brief"]))


def _unseen(name: str) -> None:
    @ledger(".* expires unseen")
    def _(w: Planted) -> None:
        w.tables.delete(ttl.TTL, ttl.KEY.pack(ttl.expire_ms(w.ledger, w[name]), w[name]))


_unseen("brief")
_unseen("brief.1")  # which is leased


# Schedules


@ledger("a schedule is not counted")
def _(w: Planted) -> None:
    w.ledger.schedules.count = 0


@ledger("the agenda has a row of no schedule")
def _(w: Planted) -> None:
    w.ledger.schedules.count = 0
    w.tables.drop_table(schedules.STATE)


@ledger("a schedule has no state, or a state no schedule")
def _(w: Planted) -> None:
    w.drop(schedules.STATE)


@ledger("3 schedules, 2 rows")
def _(w: Planted) -> None:
    w.ledger.schedules.count += 1


@ledger("templates: ")
def _(w: Planted) -> None:
    w.ledger.schedules.bytes += 1


@ledger("agenda: ")
def _(w: Planted) -> None:
    w.drop(schedules.AGENDA)


@ledger("topics of schedules")
def _(w: Planted) -> None:
    w.drop(schedules.OF_TOPIC)


@ledger("schedule b's': ")
def _(w: Planted) -> None:
    state = State.unpack(w.tables.rows[schedules.STATE][b"s"])
    w.tables.put(schedules.STATE, b"s", replace(state, ring=(*state.ring, state.ring[0])).pack())


# Fills of subscriptions


@ledger("3 copies of fills, 2 rows")
def _(w: Planted) -> None:
    w.ledger.filled_copies += 1


@ledger("two copies of .*")
def _(w: Planted) -> None:
    rows = w.tables.rows[copies.COPIES]
    rows[w.first(copies.COPIES)] *= 2


@ledger(r"two copies of .*: \[\]")
def _(w: Planted) -> None:
    w.tables.put(copies.COPIES, w.first(copies.COPIES), b"")


@ledger("the tables of copies differ")
def _(w: Planted) -> None:
    w.tables.put(copies.COPIES, ID_KEY.pack(NOBODY), copies.COPY.pack(0, 0, NOBODY))


@ledger(f"hour {START_HOUR}: .* is no copy of a fill")
def _(w: Planted) -> None:
    w.hour("waiting").filled.add(w.index("waiting"))


@ledger(f"hour {START_HOUR}: acked messages kept for no fill")
def _(w: Planted) -> None:
    w.hour("acked").unfilled[w.topic().number] = BitMap([w.index("acked")])


@ledger(f"hour {START_HOUR}: kept for a fill, but not acked")
def _(w: Planted) -> None:
    w.hour("order").unfilled[w.topic("orders").number] = BitMap([w.index("order")])


@ledger("a copy of a fill is in no hour")
def _(w: Planted) -> None:
    w.hour("order").filled.pop()


@ledger("fills: ")
def _(w: Planted) -> None:
    w.ledger.fills[w.topic().number] = next(iter(w.ledger.fills.values()))


@ledger("a fill without its subscription")
def _(w: Planted) -> None:
    w.topic("orders~late").exists = False


# Message groups


@groups(".* lives, but has the group of a dead letter")
def _(w: Planted) -> None:
    w.tables.put(GROUPOF, ID_KEY.pack(w["group"]), w.group_key + ID_KEY.pack(IDLE))


@groups(f"{NOBODY:x} has a group, but is gone")
def _(w: Planted) -> None:
    w.tables.put(GROUPOF, ID_KEY.pack(NOBODY), w.group_key + ID_KEY.pack(0))


@groups(".* has a group, but has ended")
def _(w: Planted) -> None:
    w.tables.put(GROUPOF, ID_KEY.pack(w["over"]), w.group_key + ID_KEY.pack(0))


@groups(".*: group in another topic")
def _(w: Planted) -> None:
    w.tables.put(GROUPOF, ID_KEY.pack(w["waiting"]), w.group_key + ID_KEY.pack(0))


@groups(".*: group of another floor")
def _(w: Planted) -> None:
    number, floor, group = GROUP_KEY.unpack(w.group_key)
    w.tables.put(GROUPOF, ID_KEY.pack(w["group"]), GROUP_KEY.pack(number, floor + 1, group) + ID_KEY.pack(0))


@groups("2 dead letters with a group, not 1")
def _(w: Planted) -> None:
    w.ledger.grouped_dead += 1


@groups("g: a group without a row")
def _(w: Planted) -> None:
    w.drop(GROUP)


@groups(".* is blocked, but not queued")
def _(w: Planted) -> None:
    w.drop(GROUPQ)


@groups("groups without messages: ")
def _(w: Planted) -> None:
    w.tables.put(GROUP, GROUP_KEY.pack(0, 0, 1), b"")


@groups("queued, but not blocked: ")
def _(w: Planted) -> None:
    w.tables.put(GROUPQ, w.group_key + POSITION.pack(1, NOBODY), b"")


@groups(r"blocked without a group: \[")
def _(w: Planted) -> None:
    w.hour("waiting").blocked.add(w.index("waiting"))


def _miscounted(name: str) -> None:
    @groups(f"g: {name} ")
    def _(w: Planted) -> None:
        setattr(w.topic("g"), name, getattr(w.topic("g"), name) + 1)


for _name in ("group_rows", "grouped", "blocked"):
    _miscounted(_name)


@groups("group .*: unblocked ")
def _(w: Planted) -> None:
    group = unpack_group(w.tables.rows[GROUP][w.group_key])
    group.heads = [Head(*group.heads[0][:3], 99)]
    w.tables.put(GROUP, w.group_key, group.pack())


@groups("group .*: 4 blocked, not 3")
def _(w: Planted) -> None:
    group = unpack_group(w.tables.rows[GROUP][w.group_key])
    group.blocked += 1
    w.tables.put(GROUP, w.group_key, group.pack())


@groups("group .*: the first blocked message is before the bound")
def _(w: Planted) -> None:
    group = unpack_group(w.tables.rows[GROUP][w.group_key])
    group.lowest = (IDLE, 0)
    w.tables.put(GROUP, w.group_key, group.pack())


@groups("Rule G, group .*, n = 2: ")
def _(w: Planted) -> None:
    group = unpack_group(w.tables.rows[GROUP][w.group_key])
    group.limit += 1
    w.tables.put(GROUP, w.group_key, group.pack())


@ledger("topic g: .*|g: blocked 4 ≠ 3")
def _(w: Planted) -> None:
    """The check of the ledger asks that of groups."""
    w.topic("g").blocked += 1


# What a leader counts in memory


@memory("3 entries rest, and 2 are found")
def _(desk: Busy) -> None:
    desk.core.matcher.rests.size += 1


@memory("windows count ")
def _(desk: Busy) -> None:
    desk.core.windows.size += 1


@memory("4 entries are in flight, and topics count ")
def _(desk: Busy) -> None:
    desk.core.windows.in_flight[1] = ()


@memory("polls name 4 topics, not 3")
def _(desk: Busy) -> None:
    desk.core.waiting.named += 1


@memory("3 filters, not 2")
def _(desk: Busy) -> None:
    desk.core.waiting._filters += 1


@memory(".* does not wait where it is said to")
def _(desk: Busy) -> None:
    poll, (queue, *_) = next(iter(desk.core.waiting.queues.items()))
    del queue.waiters[poll]


@memory("2 waiters are in queues")
def _(desk: Busy) -> None:
    queues = next(iter(desk.core.waiting.queues.values()))
    queues.pop().waiters.clear()
    queues.append(queues[0])


@memory("polls wait without a timeout, or time out without waiting")
def _(desk: Busy) -> None:
    desk.core.waiting.deadlines.discard(next(iter(desk.core.waiting.queues)))


@memory("0 queues with a filter count as idle, and 1 are")
def _(desk: Busy) -> None:
    desk.core.waiting.idle.clear()


def _ready(desk: Busy) -> Any:
    """A queue with a poll, into whose window a message came."""
    queue = desk.core.windows.by_name["empty"].any
    queue.now.entries.append(1)
    desk.core.windows.size += 1
    return queue


@memory("a queue of empty has polls and messages, and no turn")
def _(desk: Busy) -> None:
    _ready(desk)


@memory("empty has polls and messages, and no turn")
def _(desk: Busy) -> None:
    queue = _ready(desk)
    queue.topic.turns.append(queue)


@memory(r"the leader never looks at the leases of grant \(2, 1\), ")
def _(desk: Busy) -> None:
    desk.delivery._expiry._leases.discard((2, 1))


@memory(r"the leases of grant \(2, 1\) end at ")
def _(desk: Busy) -> None:
    desk.delivery._expiry._leases.set((2, 1), 1e15)


def node_counts(message: str, **wrong: int) -> None:
    """Add a corruption of what a node's group commit and consumers' names count."""

    def run() -> None:
        desk, sent = Busy(), [SimpleNamespace(publishes=2), SimpleNamespace(publishes=0)]
        commit = {"inflight": 2, "_publishing": 1, **wrong}
        desk.delivery.askers._names += commit.pop("names", 0)
        memorycheck.check_node(
            SimpleNamespace(delivery=desk.delivery, group_commit=SimpleNamespace(_sent=sent, **commit))
        )  # type: ignore[arg-type]

    CASES.append((message, run))


node_counts("3 batches in flight, not 2", inflight=3)
node_counts("2 batches with publishes, not 1", _publishing=2)
node_counts("consumers name 8 topics, not 7", names=1)


@memory("windows count ")
def _(desk: Busy) -> None:
    """The check of a node asks that of its dispatcher."""
    desk.core.windows.size += 1


def cursor(message: str) -> Callable[[Any], None]:
    """Decorator: a leader in whose cursor's second one message is ready and one is to come, with a wrong localIndex."""

    def add(plant: Callable[[Desk], None]) -> None:
        def run() -> None:
            desk = Desk()
            desk.lead()
            desk.publish("ready", at=2_100)
            desk.publish("to come", at=2_900)
            desk.run_to(2_500)
            cursorcheck.check(desk.core)
            plant(desk)
            cursorcheck.check_node(SimpleNamespace(delivery=desk.delivery))  # type: ignore[arg-type]

        CASES.append((message, run))

    return add


@cursor("localIndex 2 of second ")
def _(desk: Desk) -> None:
    (second,) = desk.core._preload._seconds.values()
    second.coming.clear()


@cursor("cursor .*, although nothing is known of ")
def _(desk: Desk) -> None:
    """A leader whose clock has not reached the cursor makes a cursor up."""
    desk.core.turns.now_ms -= 1_000
    hour, second, _ = desk.ledger.cursor
    desk.core.__class__ = type("Wrong", (Dispatcher,), {"cursor": (hour, second, 7)})


# What a checkpoint has


def _not_saved(message: str, one: Any, other: Any) -> None:
    CASES.append((message, lambda: savedcheck.same(one, other, "it")))


_not_saved("it: 1 became True", 1, True)  # which are equal
_not_saved("it: 1 became 2", 1, 2)
_not_saved(r"it: \[1\] became \[2\]", np.ones(1, int), np.full(1, 2))
_not_saved(r"it: \[1\] became \[2\]", {1: 1}, {2: 1})
_not_saved(r"it\[1\]: 1 became 2", {1: 1}, {1: 2})
_not_saved(r"it: \[1\] became \[1, 2\]", [1], [1, 2])
_not_saved(r"it\[1\]: 2 became 3", (1, 2), (1, 3))
_not_saved(r"it: BitMap\(\[1\]\) became BitMap\(\[2\]\)", BitMap([1]), BitMap([2]))


@ledger(f"hour-states {START_HOUR:08x} changed, and the next checkpoint leaves them out", lambda found: None)
def _(w: Planted) -> None:
    saved = savedcheck.Saved(w.ledger)
    w.ledger.changes.clear()
    w.hour("waiting").carried += 1
    saved.look(w.ledger)


@ledger(f"hour-states {START_HOUR:08x}: encoded in a later state", lambda found: None)
def _(w: Planted) -> None:
    sliced = savedcheck.Sliced(w.ledger)
    w.hour("waiting").carried += 1
    sliced.look()


@ledger(r"ledger\.hours\[.*\]\.carried: 0 became 1", lambda found: savedcheck.same(world().ledger, found, "ledger"))
def _(w: Planted) -> None:
    w.hour("waiting").carried += 1


# The tests


def failed(case: Case) -> AssertionError:
    with pytest.raises(AssertionError) as error:
        case()
    return error.value


@pytest.mark.parametrize(("message", "case"), [pytest.param(*each, id=f"{n}") for n, each in enumerate(CASES)])
def test_an_assertion_fails_by_its_corruption(message: str, case: Case) -> None:
    error = failed(case)
    assert re.match(message, str(error)), f"{message}: {error}"


def test_every_assertion_has_a_corruption() -> None:
    """Also a new one, and one that an earlier assertion hides: that one cannot fail, and should go."""
    noticed: set[tuple[str, int]] = set()
    for _, case in CASES:
        at = traceback.extract_tb(failed(case).__traceback__)[-1]
        noticed.add((at.filename, at.lineno or 0))
    for module in MODULES:
        path = module.__file__ or ""
        asserts = [node for node in ast.walk(ast.parse(Path(path).read_text())) if isinstance(node, ast.Assert)]
        lines = {at for file, at in noticed if file == path}
        missed = [node.lineno for node in asserts if lines.isdisjoint(range(node.lineno, (node.end_lineno or 0) + 1))]
        assert not missed, f"nothing makes the assertions in these lines of {path} fail: {missed}"
