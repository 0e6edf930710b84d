"""The plan of `hadelay shards balance`; tests/docs/test_shards_page.py runs the command."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product

import pytest

from hadelay.cli import shardbalance
from hadelay.cli.output import Remote
from hadelay.cli.shardbalance import Move, Seen, plan
from hadelay.errors import Conflict


def seen(leader: str, able: str) -> Seen:
    return Seen(leader, frozenset(able))


def test_machine_that_leads_all_gives_shards_to_the_others() -> None:
    found = plan({n: seen("a", "abc") for n in range(4)})
    assert Counter(move.target for move in found) == {"b": 1, "c": 1}
    assert {move.source for move in found} == {"a"}


def test_machines_that_differ_by_one_are_left_alone() -> None:
    assert plan({0: seen("a", "abc"), 1: seen("b", "abc")}) == []
    assert plan({0: seen("a", "a"), 1: seen("a", "a"), 2: seen("b", "bc")}) == []
    assert plan({}) == []


def test_chain_of_transfers_reaches_a_machine_that_shares_no_shard() -> None:
    """a can give to b alone, and b to c alone."""
    found = plan({0: seen("a", "ab"), 1: seen("a", "ab"), 2: seen("b", "bc")})
    assert found == [Move(0, "a", "b"), Move(2, "b", "c")]


def test_leader_that_may_not_lead_is_no_machine_to_fill() -> None:
    """It is drained, and has not handed over yet."""
    assert plan({0: seen("a", "bc"), 1: seen("b", "bc")}) == []


def counts(leaders: list[str], nodes: str) -> list[int]:
    return sorted((leaders.count(node) for node in nodes), reverse=True)


@pytest.mark.parametrize("seed", range(30))
def test_no_other_leaders_would_be_more_alike(seed: int) -> None:
    draw = random.Random(seed)
    nodes = "abcd"
    shards = {}
    for n in range(5):
        able = draw.sample(nodes, draw.randint(1, 3))
        shards[n] = Seen(draw.choice(able), frozenset(able))
    moves = plan(shards)
    assert len({move.shard for move in moves}) == len(moves)
    leads = {n: one.leader for n, one in shards.items()} | {move.shard: move.target for move in moves}
    assert all(leads[n] in one.able for n, one in shards.items())
    best = min(counts(list(leaders), nodes) for leaders in product(*(one.able for one in shards.values())))
    assert counts(list(leads.values()), nodes) == best


def test_transfer_of_a_shard_that_changed_meanwhile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shardbalance, "_look", lambda at: seen("c", "abc"))
    with pytest.raises(Conflict, match="shard 3 has changed: c leads"):
        shardbalance._transfer(Remote(), Move(3, "a", "b"))
