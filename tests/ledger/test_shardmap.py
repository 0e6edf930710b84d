"""The shard map: the owner of a name, and what is wrong with a map."""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hadelay.rights import covers
from hadelay.settings.shardmap import ALONE, Rule, Shard, ShardMap, Shards, job_of

TWO = {0: Shard(0, nodes={"n1": "http://10.0.0.1:7000"}), 1: Shard(5, (1, 3), {"n1": "https://[::1]:7001"})}
ALL_TO_0 = Rule("*", (0,))


def map_of(*rules: Rule, count: int = 4, **pinned: int) -> ShardMap:
    return ShardMap(1, {index: Shard(index) for index in range(count)}, (*rules, ALL_TO_0), pinned)


def test_first_matching_rule_gives_the_owner() -> None:
    shards = map_of(Rule("eu-*", (1,)), Rule("*-eu", (2,)))
    owners = {name: shards.owner(name) for name in ("eu-1", "a-eu", "eu-eu", "eu", "us")}
    assert owners == {"eu-1": 1, "a-eu": 2, "eu-eu": 1, "eu": 0, "us": 0}


def test_pinned_name_goes_before_the_rules_and_a_subscription_with_its_topic() -> None:
    shards = map_of(Rule("orders*", (1,)), orders=3)
    assert [shards.owner(name) for name in ("orders", "orders~billing", "orders2", "orders2~a")] == [3, 3, 1, 1]


def test_hashed_names_spread_evenly_and_move_little() -> None:
    names = [f"tenant.{n}" for n in range(4_000)]
    eight, nine = (map_of(Rule("*", tuple(range(count))), count=count) for count in (8, 9))
    counts = Counter(map(eight.owner, names))
    assert len(counts) == 8
    assert max(counts.values()) < 1.2 * 500
    moved = [name for name in names if eight.owner(name) != nine.owner(name)]
    assert all(nine.owner(name) == 8 for name in moved)
    assert 0.8 * 444 < len(moved) < 1.2 * 444


def test_hash_of_a_name_never_changes() -> None:
    shards = map_of(Rule("*", (0, 1, 2, 3)))
    assert [shards.owner(f"t{n}") for n in range(12)] == [1, 1, 2, 3, 2, 3, 3, 2, 2, 2, 0, 0]


def test_example_of_the_spec() -> None:
    page = (Path(__file__).parents[2] / "docs/spec/shards.md").read_text()
    blocks = dict(re.findall(r"```json (\w+)\n(.*?)```", page, re.DOTALL))
    shards = msgspec.json.decode(blocks["map"], type=ShardMap)
    assert shards.problem() == ""
    owners = msgspec.json.decode(blocks["owners"])
    assert {name: shards.owner(name) for name in owners} == owners


def test_prefix_keeps_names_with_one_prefix_together() -> None:
    shards = map_of(Rule("*", (0, 1, 2, 3), "prefix"))
    for name in ("invoices", "orders", "x"):
        assert shards.owner(name) == shards.owner(f"{name}.failed") == shards.owner(f"{name}.a.b")
    assert len({shards.owner(f"p{n}.failed") for n in range(40)}) == 4


def test_trailing_number_fills_shards_in_turn() -> None:
    shards = map_of(Rule("*", (3, 1, 2), "number"))
    assert [shards.owner(f"orders-{n}") for n in range(6)] == [3, 1, 2, 3, 1, 2]
    assert shards.owner("orders-007") == shards.owner("7")
    assert shards.owner("orders") == map_of(Rule("*", (3, 1, 2))).owner("orders")


@pytest.mark.parametrize(
    ("pattern", "shards"),
    [
        ("*", {0, 1, 2, 3}), ("eu.*", {1, 3}), ("eu.a*", {1}), ("eu*", {0, 1, 3}), ("eu.a", {1}), ("e*u", {0, 1, 3}),
        ("us*", {0, 2, 3}), ("us.*", {0, 2}), ("us.*~billing", {0, 2}), ("us.new~*", {0}), ("z*", {0}),
        ("us.old~*", {2}), ("u*", {0, 2, 3}), ("eu.old~a*", {3}), ("us-*", {0}), ("p.x*", {2}), ("p*", {0, 2, 3}),
    ],
)  # fmt: skip
def test_shards_that_a_pattern_of_topics_may_reach(pattern: str, shards: set[int]) -> None:
    pins = {"eu.old": 3, "us.old": 2}
    rules = (Rule("eu.*", (1,)), Rule("us", (3,)), Rule("p*", (2, 3, 0), "prefix"))
    assert map_of(*rules, **pins).reach(pattern) == shards


def test_no_topic_of_a_pattern_is_in_a_shard_beyond_its_reach() -> None:
    draw = random.Random(1)

    def name(letters: str) -> str:
        return "".join(draw.choice(letters) for _ in range(draw.randrange(1, 5)))

    for _ in range(500):
        rules = [
            Rule(name("ab.*"), tuple(draw.sample(range(4), draw.randrange(1, 4))), draw.choice(("name", "prefix")))
            for _ in range(draw.randrange(4))
        ]
        shards = map_of(*rules, **{name("ab."): draw.randrange(4) for _ in range(3)})
        pattern = name("ab.*~")
        reached = shards.reach(pattern)
        for topic in {name("ab.~") for _ in range(40)} | set(shards.pinned):
            if covers(pattern, topic):
                assert shards.owner(topic) in reached, (shards, pattern, topic)


def test_job_numbers_say_the_shard() -> None:
    assert [job_of(text) for text in ("7", "3000000000007", "127000000000001")] == [(0, 7), (3, 7), (127, 1)]
    assert {job_of(text) for text in ("", "x", "-1", "²", "1 ", "9" * 20)} == {(0, 0)}


def test_group_numbers_of_a_shard_present_and_former() -> None:
    shards = ShardMap(1, TWO, (ALL_TO_0,))
    assert [shards.index_of(group) for group in (0, 5, 1, 9)] == [0, 1, None, None]
    assert [shards.issuer(group) for group in (0, 5, 1, 3, 9)] == [0, 1, 1, 1, None]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"shards": {0: Shard(0), 1: Shard(0)}}, "group number 0 is listed 2 times"),
        ({"shards": {0: Shard(0), 1: Shard(1, (1,))}}, "group number 1 is listed 2 times"),
        ({"shards": {0: Shard(0, nodes={"": "http://a"}), 1: Shard(1)}}, "the name of a node"),
        ({"shards": {0: Shard(0, nodes={"n1": "ftp://a"}), 1: Shard(1)}}, "'ftp://a' is no URL of a node"),
        ({"shards": {0: Shard(0, nodes={"n1": "http://u:p@a"}), 1: Shard(1)}}, "no URL of a node"),
        ({"shards": {0: Shard(0, nodes={"n1": "http://a/path"}), 1: Shard(1)}}, "no URL of a node"),
        ({"rules": (Rule("a b", (0,)), ALL_TO_0)}, "'a b' is no pattern"),
        ({"rules": (Rule("a~*", (0,)), ALL_TO_0)}, "'a~*' is no pattern"),
        ({"rules": (Rule("a", (0, 0)), ALL_TO_0)}, "a shard is listed twice"),
        ({"rules": (Rule("a", (0, 7)), ALL_TO_0)}, "the map has no shard 7"),
        ({"rules": (Rule("a", (0,)),)}, "the last rule must have the pattern *"),
        ({"pinned": {"a~b": 0}}, "'a~b' is no name of a topic"),
        ({"pinned": {"a": 9}}, "a: the map has no shard 9"),
        ({}, ""),
    ],
)
def test_problems_of_a_map(change: dict[str, Any], said: str) -> None:
    shards = msgspec.structs.replace(ShardMap(1, TWO, (ALL_TO_0,), {"a": 1}), **change)
    assert said in shards.problem()
    assert bool(said) == bool(shards.problem())


@pytest.mark.parametrize("kind", ["json", "msgpack"])
def test_map_is_the_same_after_encoding(kind: str) -> None:
    module = getattr(msgspec, kind)
    shards = Shards(ShardMap(1, TWO, (Rule("a-*", (0, 1), "prefix"), ALL_TO_0), {"a": 1}), None, suspended=True)
    assert module.decode(module.encode(shards), type=Shards) == shards


@pytest.mark.parametrize(
    "text",
    [
        b'{"version":0,"shards":{"0":{"group":0}},"rules":[{"pattern":"*","shards":[0]}]}',
        b'{"version":1,"shards":{"128":{"group":0}},"rules":[{"pattern":"*","shards":[0]}]}',
        b'{"version":1,"shards":{"0":{"group":256}},"rules":[{"pattern":"*","shards":[0]}]}',
        b'{"version":1,"shards":{},"rules":[{"pattern":"*","shards":[0]}]}',
        b'{"version":1,"shards":{"0":{"group":0}},"rules":[]}',
        b'{"version":1,"shards":{"0":{"group":0}},"rules":[{"pattern":"*","shards":[]}]}',
        b'{"version":1,"shards":{"0":{"group":0}},"rules":[{"pattern":"*","shards":[0],"key":"x"}]}',
        b'{"version":1,"shards":{"0":{"group":0}},"rules":[{"pattern":"*","shards":[0]}],"colour":1}',
    ],
)
def test_decoding_refuses_what_is_no_map(text: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=ShardMap)


def test_shard_creates_what_both_maps_give_it() -> None:
    first, second = map_of(Rule("a*", (1,))), map_of(Rule("*a", (1,)))

    def created(shards: Shards, group: int) -> list[str]:
        return [name for name in ("a", "ab", "ba", "b") if shards.may_create(group, name)]

    assert created(ALONE, 0) == created(ALONE, 9) == ["a", "ab", "ba", "b"]
    assert created(Shards(first), 1) == ["a", "ab"]
    assert created(Shards(first), 0) == ["ba", "b"]
    assert created(Shards(first, second), 1) == ["a"]
    assert created(Shards(first, second), 0) == ["b"]
    assert created(Shards(None, second), 1) == []
    assert created(Shards(first, suspended=True), 1) == []
    assert created(Shards(first), 9) == [], "a shard that the map does not have"
