"""The shard map in the ledger: topics that another shard owns are not created, and the steps of a change."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from hadelay.codec import commands, schedules
from hadelay.codec.commandtypes import Command
from hadelay.codec.meta import Meta, pack
from hadelay.codec.publishcommand import encode_publish
from hadelay.codec.results import Done, Refused, RowCode
from hadelay.codec.shardcommands import ShardStep
from hadelay.errors import ConfigError
from hadelay.ledger import checkpoint
from hadelay.ledger.state import Ledger
from hadelay.ledger.views.shardnames import names
from hadelay.model import Draft
from hadelay.settings.cluster import Settings
from hadelay.settings.shardmap import ALL, ALONE, Rule, Shard, ShardMap, Shards
from tests.ledger.world import World, draft

#: Names that begin with "b" belong to shard 1, the others to this shard.
MAP = ShardMap(1, {0: Shard(0), 1: Shard(1)}, (Rule("b*", (1,)), Rule(ALL, (0,))))
MIXED = {0: Shard(0, nodes={"n1": "http://a:1"}), 1: Shard(1, nodes={"n1": "https://b:1"})}
OK, OTHER = RowCode.OK, RowCode.OTHER_SHARD


def put(world: World, step: ShardStep, shards: ShardMap) -> Any:
    return world.one(commands.encode_shard_map(step, msgspec.msgpack.encode(shards)))


def one_of_two(shards: ShardMap = MAP) -> World:
    world = World()
    assert put(world, ShardStep.PREPARE, shards) == Done()
    assert put(world, ShardStep.COMMIT, shards) == Done()
    return world


def codes(world: World, *drafts: Draft, key: bytes | None = None) -> list[int]:
    found: list[int] = world.publish(*drafts, key=key).codes.tolist()
    return found


def topics(world: World) -> list[str]:
    return [topic.name for topic in world.ledger.topics.all if topic.exists]


def test_foreign_topic_is_not_created_by_a_publish() -> None:
    world = one_of_two()
    assert codes(world, draft("a"), draft("b"), draft("c")) == [OK, OTHER, OK]
    assert topics(world) == ["a", "c"]


def test_topic_that_exists_goes_on_whatever_the_map_says() -> None:
    world = World()
    world.ids(draft("b"))
    for step in (ShardStep.PREPARE, ShardStep.COMMIT):
        put(world, step, MAP)
    assert codes(world, draft("b"), draft("b2")) == [OK, OTHER]
    assert world.one(commands.encode_topic_put("b", {"lease_ms": 1_000})) == Done()
    assert world.one(commands.encode_subscription_put("b", "copy", {})) == Done(False)
    # After its deletion, the name is its owner's.
    world.one(commands.encode_topic_delete("b", True))
    assert codes(world, draft("b")) == [OTHER]


def test_request_of_which_another_shard_gets_a_part_is_refused_as_a_whole() -> None:
    world = one_of_two()
    assert codes(world, draft("a"), draft("b"), key=b"k") == [OTHER, OTHER]
    assert topics(world) == []
    # Nothing was remembered: the sender splits the request, under the same key.
    assert codes(world, draft("a"), key=b"k") == [OK]
    assert world.publish(draft("a"), key=b"k").duplicate.tolist() == [True]


def test_part_that_was_answered_before_does_not_make_a_refusal_last() -> None:
    world = one_of_two()
    first = draft("a", idem=b"k")
    world.publish(first)
    assert codes(world, first, draft("b"), key=b"k") == [OK, OTHER]
    put(world, ShardStep.PREPARE, replace(MAP, version=2, rules=(Rule(ALL, (0,)),)))
    put(world, ShardStep.COMMIT, replace(MAP, version=2, rules=(Rule(ALL, (0,)),)))
    assert codes(world, first, draft("b"), key=b"k") == [OK, OK]


def test_rows_of_other_requests_are_stored() -> None:
    world = one_of_two()
    result = world.publish(draft("a", idem=b"1"), draft("b", idem=b"2"), draft("a", idem=b"3"))
    assert result.codes.tolist() == [OK, OTHER, OK]


def test_foreign_topic_is_refused_where_publishing_creates_none() -> None:
    world = one_of_two()
    world.ledger.settings = Settings(auto_create_topics=False)
    assert codes(world, draft("a"), draft("b")) == [RowCode.NO_TOPIC, OTHER]


def code_of(result: Any) -> str:
    assert isinstance(result, Refused)
    return result.code


def test_foreign_names_in_settings_and_schedules_are_refused() -> None:
    world = one_of_two()
    assert code_of(world.one(commands.encode_topic_put("b", {}))) == "other_shard"
    for setting in ("dead_letter", "on_success", "on_failure"):
        assert code_of(world.one(commands.encode_topic_put("a", {setting: "b-1"}))) == "foreign_target"
    assert world.one(commands.encode_topic_put("a", {"dead_letter": "a.failed"})) == Done()
    assert code_of(world.one(schedule("b"))) == "other_shard"
    assert topics(world) == ["a"]


def schedule(topic: str) -> bytes:
    template = encode_publish("n1", [Draft(topic, 0, True, 0, 0, schedules.template_meta(pack(Meta(sch="s"))), b"x")])
    stored = schedules.Stored("", schedules.Spec(topic, every_ms=60_000), template)
    return schedules.encode_put(f"s-{topic}", schedules.ANY_VERSION, 0, stored)


def test_message_that_names_a_foreign_topic_for_its_callbacks_is_refused() -> None:
    world = one_of_two()
    world.one(commands.encode_topic_put("a", {"webhook": {"url": "http://x.example/", "allow_per_message": True}}))

    def own(target: str) -> list[int]:
        return codes(world, replace(draft("a"), meta=pack(Meta(os=target)), callback=True))

    assert [own("b-done"), own("a-done")] == [[RowCode.FOREIGN_TARGET], [OK]]


def test_dead_letter_stays_if_its_target_moved_to_another_shard() -> None:
    world = World()
    world.one(commands.encode_topic_put("a", {"dead_letter": "b-dead", "max_attempts": 1, "on_failure": "b-failed"}))
    for step in (ShardStep.PREPARE, ShardStep.COMMIT):
        put(world, step, MAP)
    (message,) = world.ids(draft("a"))
    world.nack(world.lease(message))
    assert world.states(message) == ["dead"]
    assert topics(world) == ["a"]
    assert world.ledger.callbacks == {"lost": 1}


STEPS = (ShardStep.PREPARE, ShardStep.COMMIT, ShardStep.ADDRESS)
MOVED = {0: Shard(0), 1: Shard(7, (1,), {"n1": "http://10.0.0.2:7000"})}


@pytest.mark.parametrize(
    ("step", "new", "code"),
    [
        (ShardStep.PREPARE, replace(MAP, version=1), "other_shard_map"),
        (ShardStep.PREPARE, replace(MAP, version=2, rules=(Rule("b*", (1,)),)), "bad_shard_map"),
        (ShardStep.PREPARE, replace(MAP, version=2, shards={1: Shard(1)}, rules=(Rule(ALL, (1,)),)), "bad_shard_map"),
        (ShardStep.PREPARE, replace(MAP, version=2, shards={0: Shard(1), 1: Shard(0)}), "bad_shard_map"),
        (ShardStep.PREPARE, replace(MAP, version=2, shards={0: Shard(0)}, rules=(Rule(ALL, (0,)),)), "bad_shard_map"),
        (ShardStep.PREPARE, replace(MAP, version=2, shards=MIXED), "bad_shard_map"),
        (ShardStep.COMMIT, replace(MAP, version=2), "other_shard_map"),
        (ShardStep.ADDRESS, replace(MAP, version=1, shards=MOVED), "other_shard_map"),
        (ShardStep.ADDRESS, replace(MAP, version=2, pinned={"x": 0}), "other_shard_map"),
        (ShardStep.ADDRESS, replace(MAP, version=2, rules=(Rule(ALL, (0,)),)), "other_shard_map"),
    ],
)
def test_refused_steps(step: ShardStep, new: ShardMap, code: str) -> None:
    world = one_of_two()
    assert code_of(put(world, step, new)) == code
    assert world.ledger.shards == Shards(MAP)


def test_change_in_two_steps_and_one_of_addresses() -> None:
    world, new = one_of_two(), replace(MAP, version=5, rules=(Rule("c*", (1,)), Rule(ALL, (0,))))
    put(world, ShardStep.PREPARE, new)
    assert world.ledger.shards == Shards(MAP, new)
    assert codes(world, draft("b"), draft("c"), draft("d")) == [OTHER, OTHER, OK]
    assert code_of(put(world, ShardStep.ADDRESS, replace(MAP, version=6, shards=MOVED))) == "other_shard_map"
    assert code_of(put(world, ShardStep.PREPARE, replace(new, rules=MAP.rules))) == "other_shard_map"
    assert code_of(put(world, ShardStep.COMMIT, replace(new, rules=MAP.rules))) == "other_shard_map"
    pinned = replace(new, pinned={"b": 0})
    assert put(world, ShardStep.COMMIT, pinned) == Done()
    assert put(world, ShardStep.COMMIT, pinned) == Done(False)
    assert put(world, ShardStep.ADDRESS, replace(pinned, version=6, shards=MOVED)) == Done()
    assert codes(world, draft("b"), draft("c")) == [OK, OTHER]


def test_joining_cluster_creates_nothing_until_the_map_is_in_force() -> None:
    world = World(group=1)
    world.ids(draft("b"))
    put(world, ShardStep.PREPARE, MAP)
    assert codes(world, draft("b"), draft("b2")) == [OK, OTHER]
    put(world, ShardStep.COMMIT, MAP)
    assert codes(world, draft("b2"), draft("a")) == [OK, OTHER]


@pytest.mark.parametrize("body", [[0], [3, {}], [0, {}], [0, 5], [0, {"version": 1}], ["0", {}], [0, {"version": -1}]])
def test_malformed_bodies_are_refused(body: list[Any]) -> None:
    assert code_of(World().raw(Command.SHARD_MAP, *body)) in ("malformed", "bad_shard_map")


def test_checkpoint_keeps_the_map_and_a_restore_suspends_the_shard() -> None:
    world = one_of_two(replace(MAP, pinned={"b-1": 0}))
    put(world, ShardStep.PREPARE, replace(MAP, version=9))
    before = world.ledger.shards
    world.restart()
    assert world.ledger.shards == before
    core, rows = checkpoint.dump(world.ledger)
    ledger = Ledger(6, world.store, world.tables, world.names)
    checkpoint.load(ledger, checkpoint.for_new_cluster(core, 6), rows)
    assert ledger.shards == replace(before, suspended=True)
    # A shard that was restored has a new number, and creates nothing before the map has it.
    world.ledger, world.store.group = ledger, 6
    assert codes(world, draft("new")) == [OTHER]
    moved = replace(MAP, version=10, shards={0: Shard(6, (0,)), 1: Shard(1)})
    for step in (ShardStep.PREPARE, ShardStep.COMMIT):
        assert put(world, step, moved) == Done()
    assert codes(world, draft("new"), draft("b")) == [OK, OTHER]


@pytest.mark.parametrize(("group", "index"), [(1, 1), (7, 0)])
def test_restored_shard_gets_no_number_of_a_shard(group: int, index: int) -> None:
    world = one_of_two(replace(MAP, shards={0: replace(MAP.shards[0], former=(7,)), 1: MAP.shards[1]}))
    core, _ = checkpoint.dump(world.ledger)
    with pytest.raises(ConfigError, match=f"{group} is a number that shard {index} has, or had"):
        checkpoint.for_new_cluster(core, group)


def test_cluster_without_a_map_has_the_same_checkpoint_as_before() -> None:
    world = World()
    core, rows = checkpoint.dump(world.ledger)
    assert b"shards" not in core
    world.restart()
    assert world.ledger.shards is ALONE
    ledger = Ledger(1, world.store, world.tables, world.names)
    checkpoint.load(ledger, checkpoint.for_new_cluster(core, 1), rows)
    assert ledger.shards is ALONE


def test_backup_from_before_the_first_map_restores_a_shard_that_waits_for_the_map() -> None:
    world = World()
    core, rows = checkpoint.dump(world.ledger)
    world.ledger = Ledger(1, world.store, world.tables, world.names)
    checkpoint.load(world.ledger, checkpoint.for_new_cluster(core, 1, shard=True), rows)
    assert codes(world, draft("a")) == [OTHER]


def test_names_of_topics_targets_and_schedules_in_pages() -> None:
    world = World()
    world.ids(*(draft(f"t{n}") for n in range(5)))
    world.one(commands.encode_subscription_put("t1", "copy", {"dead_letter": "sub.failed"}))
    world.one(commands.encode_topic_put("t2", {"dead_letter": "t2.failed", "on_success": "done"}))
    world.one(commands.encode_topic_delete("t4", True))
    for topic in ("t0", "later", "later2"):
        assert world.one(schedule(topic)) == Done()
    for limit in (1, 2, 100):
        cursor, found, targets, pages = "", [], [], 0
        while True:
            page = names(world.ledger, cursor, limit)
            found += page.topics
            targets += page.targets
            pages += 1
            if page.next is None:
                break
            cursor = page.next
        assert found == ["t0", "t1", "t2", "t3"]
        assert set(targets) == {"sub.failed", "t2.failed", "done", "t0", "later", "later2"}
        assert pages < 14
    for wrong in ("x", "t:x", "u:1"):
        with pytest.raises(ValueError, match=r"."):
            names(world.ledger, wrong, 1)
