"""Changes of the shard map over the real apply: random walks of three shards, two changes at a time that stop anywhere,
routers with old maps, clients that choose any shard, restores from old backups.

No topic is ever in two shards; the map never names another owner for an existing topic; a change can always be
finished. `HADELAY_SHARD_SEEDS=100000` plays more walks (`make shards`).
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Generator
from contextlib import ExitStack, suppress
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from msgspec.structs import replace

from hadelay.cli import shardchange
from hadelay.cli.shardchange import Collect, Commit, Known, Look, Named, Prepare, Step, Stopped
from hadelay.codec import commands
from hadelay.codec.results import Refused, RowCode
from hadelay.codec.shardcommands import ShardStep
from hadelay.ledger import checkpoint
from hadelay.ledger.state import Ledger
from hadelay.ledger.topics import shards as applied
from hadelay.ledger.views.shardnames import names
from hadelay.settings.shardmap import ALL, MAX_REPLACED, Rule, Shard, ShardMap, Shards
from tests.ledger.world import World, draft

SEEDS = int(os.environ.get("HADELAY_SHARD_SEEDS", "40"))
NAMES = [f"t{n}" for n in range(6)]
STEPS = 150


class Broken(AssertionError):
    """A promise is broken."""


class Down(Exception):
    """A shard does not answer, or refuses a step."""


def ruled(choice: list[int]) -> tuple[Rule, ...]:
    """Rules that give each name to a shard of the choice, as the model of the design does."""
    owners = [choice[sum(map(ord, name)) * 2_654_435_761 % 97 % len(choice)] for name in NAMES]
    return (*(Rule(name, (owner,)) for name, owner in zip(NAMES, owners, strict=True)), Rule(ALL, (choice[0],)))


class Group:
    """One shard: a real ledger that applies real commands."""

    def __init__(self, index: int) -> None:
        self.index, self.up = index, True
        self.world = World(group=index)
        self.world.checking = 0

    @property
    def shards(self) -> Shards:
        return self.world.ledger.shards

    @property
    def topics(self) -> set[str]:
        return {topic.name for topic in self.world.ledger.topics.all if topic.exists}

    def create(self, name: str) -> bool:
        (code,) = self.world.publish(draft(name)).codes.tolist()
        assert code in (RowCode.OK, RowCode.OTHER_SHARD)
        return code == RowCode.OK

    def backup(self) -> tuple[Any, ...]:
        world = self.world
        kept = msgspec.msgpack.encode([topic.name for topic in world.ledger.topics.all if topic.exists])
        return self.shards, kept

    def restore(self, backup: tuple[Any, ...]) -> None:
        """Become the shard of the backup, as a node of it restores: with another group number."""
        had, kept = backup
        world = World(group=self.world.ledger.group + 3)
        world.checking = 0
        for name in msgspec.msgpack.decode(kept):
            world.publish(draft(name))
        world.ledger.shards = had
        core, rows = checkpoint.dump(world.ledger)
        ledger = Ledger(world.ledger.group, world.store, world.tables, world.names)
        checkpoint.load(ledger, checkpoint.for_new_cluster(core, ledger.group, shard=True), rows)
        world.ledger = ledger
        self.world = world

    def put(self, step: ShardStep, shards: ShardMap) -> None:
        result = self.world.one(commands.encode_shard_map(step, msgspec.msgpack.encode(shards)))
        if isinstance(result, Refused):
            raise Down(result.detail)

    def collect(self) -> Named:
        cursor, topics, targets = "", set[str](), set[str]()
        while True:
            page = names(self.world.ledger, cursor, 4)
            topics.update(page.topics)
            targets.update(page.targets)
            if page.next is None:
                break
            cursor = page.next
        prepared = self.shards.prepared
        return Named(frozenset(topics), frozenset(targets), None if prepared is None else prepared.version)

    def answer(self, step: Step) -> Any:
        if not self.up:
            raise Down("down")
        if isinstance(step, Look):
            had = self.shards
            return Known(self.world.ledger.group, had.current, had.prepared, had.suspended)
        if isinstance(step, Collect):
            return self.collect()
        self.put(ShardStep.PREPARE if isinstance(step, Prepare) else ShardStep.COMMIT, step.map)
        return None


Change = Callable[..., Generator[Step, Any, ShardMap]]


class Walk:
    def __init__(self, seed: int, change: Change, *, skips_down: bool = False) -> None:
        self.random = random.Random(seed)
        self.groups = [Group(index) for index in range(3)]
        self.change, self.skips_down = change, skips_down
        self.maps: list[ShardMap] = []
        self.changes: list[tuple[Generator[Step, Any, ShardMap], list[Step]]] = []
        self.backups: dict[int, tuple[Any, ...]] = {}

    def check(self) -> None:
        found: dict[str, int] = {}
        for group in self.groups:
            for name in group.topics:
                if found.setdefault(name, group.index) != group.index:
                    raise Broken(f"{name} is in shards {found[name]} and {group.index}")
        newest = self.newest()
        if newest is None or any(
            group.shards.current is None or group.shards.current.version != newest.version or group.shards.prepared
            for group in self.groups
        ):
            return
        for name, index in found.items():
            if newest.owner(name) != index:
                raise Broken(f"{name} is in shard {index}, and the map says {newest.owner(name)}")

    def newest(self) -> ShardMap | None:
        found = [group.shards.current for group in self.groups if group.shards.current is not None]
        return max(found, key=lambda one: one.version, default=None)

    def begin(self, choice: list[int]) -> tuple[Generator[Step, Any, ShardMap], list[Step]]:
        def edit(base: ShardMap) -> ShardMap:
            shards = {n: base.shards.get(n, Shard(self.groups[n].world.ledger.group)) for n in range(3)}
            return replace(base, shards=shards, rules=ruled(choice))

        running = self.change(range(3), edit)
        return running, [next(running)]

    def go_on(self, running: Generator[Step, Any, ShardMap], due: list[Step]) -> bool:
        """Take one step of a change; False if it has ended."""
        step = due[0]
        group = self.groups[step.shard]
        try:
            if self.skips_down and not group.up and not isinstance(step, Look):
                version = self._version() if isinstance(step, Collect) else None
                answer: Any = Named(frozenset(), frozenset(), version)
            else:
                answer = group.answer(step)
            due[0] = running.send(answer)
        except (StopIteration, Down):
            return False
        except Stopped as error:
            if "two shards have a topic" in str(error):
                raise Broken(str(error)) from error
            return False
        return True

    def _version(self) -> int | None:
        return next((g.shards.prepared.version for g in self.groups if g.up and g.shards.prepared), None)

    def step(self) -> None:
        r, x = self.random, self.random.random()
        if x < 0.45:
            self.publish(r)
        elif x < 0.80 and self.changes:
            one = r.choice(self.changes)
            if not self.go_on(*one):
                self.changes.remove(one)
        elif x < 0.86 and len(self.changes) < 2:
            self.changes.append(self.begin([r.randrange(3) for _ in range(r.choice((1, 2, 3)))]))
        elif x < 0.89 and self.changes:
            self.changes.pop(r.randrange(len(self.changes)))
        elif x < 0.93:
            group = r.choice(self.groups)
            group.up = not group.up
        elif x < 0.95:
            group = r.choice(self.groups)
            self.backups[group.index] = group.backup()
        elif x < 0.965 and self.backups:
            index = r.choice(sorted(self.backups))
            self.groups[index].restore(self.backups[index])
        elif x < 0.975:
            self.readdress()
        self.check()

    def publish(self, r: random.Random) -> None:
        """A publish by a router with some old map, or by a client that chooses a shard."""
        name = r.choice(NAMES)
        self.maps += [group.shards.current for group in self.groups if group.shards.current is not None]
        self.maps = self.maps[-40:]
        shards = r.choice(self.maps) if self.maps else None
        group = self.groups[shards.owner(name) if shards is not None else 0]
        if r.random() < 0.2:
            group = r.choice(self.groups)
        # A cluster that has not joined yet has no clients.
        if group.up and (group.shards.current or group.shards.prepared or not group.index):
            group.create(name)

    def readdress(self) -> None:
        newest = self.newest()
        if newest is None:
            return
        had = [group.shards for group in self.groups]
        version = max(one.version for shards in had for one in (shards.current, shards.prepared) if one) + 1
        numbers = {group.index: Shard(group.world.ledger.group) for group in self.groups}
        for group in self.groups:
            if group.up:
                with suppress(Down):
                    group.put(ShardStep.ADDRESS, replace(newest, version=version, shards=numbers))

    def finish(self) -> None:
        for group in self.groups:
            group.up = True
        running, due = self.begin([0, 1, 2])
        while self.go_on(running, due):
            pass
        self.check()
        last = self.groups[0].shards.current
        assert last is not None
        for name in NAMES:
            if not self.groups[last.owner(name)].create(name):
                raise Broken(f"{name} cannot be created by its owner")
        self.check()


def play(seed: int, change: Change = shardchange.change, **options: bool) -> None:
    walk = Walk(seed, change, **options)
    for _ in range(STEPS):
        walk.step()
    walk.finish()


def test_promises_hold_in_random_walks() -> None:
    for seed in range(SEEDS):
        try:
            play(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


# ---- mutations: deliberate bugs that a walk notices


def _may(self: Shards, group: int, name: str, *, without: str) -> bool:
    """Shards.may_create without one of its checks."""
    if self.suspended and without != "suspended":
        return False
    if self.current is None and self.prepared is not None and without != "joining":
        return False

    def owns(one: ShardMap | None) -> bool:
        return one is None or one.owner(name) == one.index_of(group)

    return (without == "current" or owns(self.current)) and (without == "prepared" or owns(self.prepared))


def _checks(without: str) -> Callable[[ExitStack], None]:
    def mutate(stack: ExitStack) -> None:
        def may(self: Shards, group: int, name: str) -> bool:
            return _may(self, group, name, without=without)

        stack.enter_context(patch.object(Shards, "may_create", may))

    return mutate


def _owner_not_asked(stack: ExitStack) -> None:
    stack.enter_context(patch.object(Shards, "may_create", lambda *_: True))


def _commit_alone(stack: ExitStack) -> None:
    stack.enter_context(patch.dict(applied._STEPS, {ShardStep.COMMIT: applied._newer}))


def _no_pins(stack: ExitStack) -> None:
    stack.enter_context(patch.object(shardchange, "pinning", lambda new, named: new))


def _early(indexes: range, edit: shardchange.Edit) -> Generator[Step, Any, ShardMap]:
    """A change that collects the names before it prepares."""
    known: dict[int, Known] = {}
    for index in indexes:
        known[index] = yield Look(index)
    new = shardchange.next_map(known, edit)
    named: dict[int, Named] = {}
    for index in indexes:
        named[index] = yield Collect(index)
    final = shardchange.pinning(new, named)
    for index in indexes:
        yield Prepare(index, final)
    for index in indexes:
        yield Commit(index, final)
    return final


def _nothing(stack: ExitStack) -> None:
    pass


#: Name → seed that notices the bug, the bug, and the options of the walk.
MUTATIONS: dict[str, tuple[int, Callable[[ExitStack], None], dict[str, Any]]] = {
    "the owner is not asked": (0, _owner_not_asked, {}),
    "the current map is ignored": (0, _checks("current"), {}),
    "the prepared map is ignored": (194, _checks("prepared"), {}),
    "a joining shard creates": (7, _checks("joining"), {}),
    "a restored shard is not suspended": (128, _checks("suspended"), {}),
    "a shard that is down is passed over": (11, _nothing, {"skips_down": True}),
    "names are not pinned": (0, _no_pins, {}),
    "names are collected before the prepare": (26, _nothing, {"change": _early}),
}


def noticed(name: str, seed: int) -> bool:
    _, mutate, options = MUTATIONS[name]
    with ExitStack() as stack:
        mutate(stack)
        try:
            play(seed, **options)
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_bug_is_noticed(name: str) -> None:
    assert noticed(name, MUTATIONS[name][0])


@pytest.mark.parametrize("dropped", [False, True])
def test_prepared_map_that_is_dropped_in_place_puts_a_topic_into_two_shards(dropped: bool) -> None:
    """Why a change has no abort: another shard may already go by the map."""
    walk = Walk(0, shardchange.change)
    first = walk.begin([2])
    while walk.go_on(*first):
        pass
    second = walk.begin([0])
    while not isinstance(second[1][0], Commit):
        assert walk.go_on(*second)
    third = walk.groups[2].world.ledger
    if dropped:
        third.shards = replace(third.shards, prepared=None)
    assert walk.go_on(*second)
    created = [group.create("t0") for group in (walk.groups[0], walk.groups[2])]
    assert created == [True, dropped]


def _until(walk: Walk, change: tuple[Generator[Step, Any, ShardMap], list[Step]], kind: type[Step]) -> None:
    while not isinstance(change[1][0], kind):
        assert walk.go_on(*change)


@pytest.mark.parametrize("forgotten", [False, True])
def test_map_that_a_later_change_replaced_still_restricts(forgotten: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change stops after its first commit, and another one begins: what the first gave away stays given away."""
    if forgotten:
        monkeypatch.setattr(Shards, "preparing", lambda self, new: Shards(self.current, new, (), self.suspended))
    walk = Walk(0, shardchange.change)
    first = walk.begin([1])
    while walk.go_on(*first):
        pass
    stopped = walk.begin([0])
    _until(walk, stopped, Commit)
    assert walk.go_on(*stopped)  # in shard 0 alone
    assert walk.groups[0].create("t0")
    other = walk.begin([1])
    _until(walk, other, Collect)
    assert walk.groups[1].create("t0") is forgotten
    if not forgotten:
        while walk.go_on(*other):
            pass
        walk.check()
        owners = {group.shards.current.owner("t0") for group in walk.groups if group.shards.current is not None}
        assert owners == {0}


@pytest.mark.parametrize("alone", [False, True])
def test_commit_needs_its_prepare(alone: bool) -> None:
    """A change goes on after another one has prepared its map and read the names."""
    with ExitStack() as stack:
        if alone:
            _commit_alone(stack)
        walk = Walk(0, shardchange.change)
        first = walk.begin([1])
        while walk.go_on(*first):
            pass
        late, other = walk.begin([0]), walk.begin([1])
        _until(walk, late, Commit)
        _until(walk, other, Commit)
        assert walk.go_on(*late) is alone
        assert walk.groups[0].create("t0") is alone, "a topic of which the other change does not know"


def test_changes_that_never_end_stop_new_topics_until_one_ends() -> None:
    walk = Walk(0, shardchange.change)
    first = walk.begin([0])
    while walk.go_on(*first):
        pass
    for n in (1, 2, 1, 2, 1, 2):  # repetitions of the same changes count once
        _until(walk, walk.begin([n]), Collect)
    (zero, *_) = walk.groups
    assert len(zero.shards.replaced) == 2
    for choice in ([0, 1, 2], [1, 2, 0], [2, 0, 1]):
        _until(walk, walk.begin(choice), Collect)
    assert len(zero.shards.replaced) == MAX_REPLACED
    assert not any(zero.create(name) for name in NAMES)
    walk.finish()
    assert zero.shards.replaced == ()
