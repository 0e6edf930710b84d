"""A second's messages are found by walking back its chain, and a broken link is noticed for what it is."""

from __future__ import annotations

import numpy as np
import pytest

from hadelay.codec.formats import INDEX
from hadelay.codec.linking import INDEX_CRC
from hadelay.ledger.hours.chain import ChainWalk
from hadelay.model import NONE32
from tests.handout.desk import START_HOUR, START_MS, Desk


def filed(count: int = 60, seconds: int = 3, sync: str = "commit") -> Desk:
    """`count` messages in the first seconds, one after another."""
    desk = Desk(sync=sync)
    desk.lead()
    for n in range(count):
        desk.publish(f"m{n}", at=60_000 + n % seconds * 1000 + n)
    return desk


def walk(desk: Desk, second: int, limit: int = 1000) -> tuple[list[int], ChainWalk]:
    chain = ChainWalk(desk.store, START_HOUR, second)
    found: list[int] = []
    for _ in range(10_000):
        if chain.done:
            break
        found += chain.step(limit)["index"].tolist()
    return found, chain


def spoil(desk: Desk, entry: int, *, seal: bool = True, **fields: int) -> None:
    """Change an entry on disk; with `seal` even its CRC fits."""
    row = desk.store.files[START_HOUR].idx.all[entry].copy()
    for name, value in fields.items():
        row[name] = value
    rows = np.array([row], INDEX)
    if seal:
        INDEX_CRC.seal(rows)
    desk.store.files[START_HOUR].idx.all[entry] = rows[0]


@pytest.mark.parametrize("limit", [1, 2, 7, 20, 1000])
def test_exactly_the_second_newest_first(limit: int) -> None:
    desk = filed()
    for second in range(3):
        found, chain = walk(desk, 60 + second, limit)
        assert found == list(range(57 + second, -1, -3))
        assert chain.damage is None


def test_an_empty_second_is_done_at_once() -> None:
    desk = filed()
    assert walk(desk, 59)[0] == []


def test_later_entries_are_not_part_of_the_walk() -> None:
    desk = filed(9)
    chain = ChainWalk(desk.store, START_HOUR, 60)
    desk.publish("late", at=60_500)
    assert chain.step(100)["index"].tolist() == [6, 3, 0]
    assert chain.done
    assert chain.damage is None


@pytest.mark.parametrize("limit", [1, 4, 1000])
@pytest.mark.parametrize(
    ("fields", "seal", "lost"),
    [
        ({"pre": 33}, True, 10),  # a cycle: it leads to a newer one (the entry itself is fine)
        ({"pre": 30}, True, 10),  # to itself
        ({"pre": 1 << 30}, True, 10),  # out of the file
        ({"pre": NONE32}, True, 10),  # ends too early
        ({"pre": 28}, True, 10),  # into another second
        ({"pre": 24}, True, 10),  # past its predecessor, in its own second
        ({"second": 61}, True, 11),
        ({"index": 31}, True, 11),
        ({"local": 3}, True, 11),
        ({"deliver_at_ms": START_MS}, False, 11),  # rot: the CRC does not fit
    ],
)
def test_a_broken_link_ends_the_walk_where_it_is_broken(
    fields: dict[str, int], seal: bool, lost: int, limit: int
) -> None:
    desk = filed()
    spoil(desk, 30, seal=seal, **fields)
    found, chain = walk(desk, 60, limit)
    good = list(range(57, 30, -3)) + ([30] if lost == 10 else [])
    assert found == good
    assert chain.damage is not None
    assert (chain.damage.hour, chain.damage.second, chain.damage.lost) == (START_HOUR, 60, lost)
    assert chain.damage.at in (30, *fields.values())
    # The other seconds are as they were.
    assert walk(desk, 61)[1].damage is None


def test_a_chain_that_goes_on_behind_its_first_entry() -> None:
    desk = filed()
    spoil(desk, 0, pre=0)
    found, chain = walk(desk, 60)
    assert found == list(range(57, -1, -3))
    assert chain.damage is not None


def test_a_head_beyond_the_index() -> None:
    desk = filed()
    desk.store.files[START_HOUR].last[60] = 5_000
    found, chain = walk(desk, 60)
    assert found == []
    assert chain.damage is not None


def test_an_hour_that_is_not_mapped_is_read_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = filed(600, seconds=2)
    monkeypatch.setattr(desk.store, "mapped", lambda hour: False, raising=False)
    monkeypatch.setattr(desk.store, "pre_view", lambda hour: pytest.fail("the whole index was read"))
    found, chain = walk(desk, 60)
    assert found == list(range(598, -1, -2))
    assert chain.damage is None


def test_messages_behind_a_broken_link_come_after_the_repair() -> None:
    desk = filed(9)
    whole = desk.store.files[START_HOUR].idx.all[3].copy()
    desk.checking = False
    spoil(desk, 3, seal=False, pre=2)
    desk.delivery.on_follower()
    desk.lead()
    desk.consume()
    desk.run_to(70_000)
    assert sorted(desk.delivered()) == ["m1", "m2", "m4", "m5", "m6", "m7", "m8"]
    assert [(hour, index) for hour, index, _ in desk.damage] == [(0, 3)]
    assert desk.delivery.damaged_links == 1
    desk.store.files[START_HOUR].idx.all[3] = whole
    desk.delivery.repaired(START_HOUR)
    desk.run_to(71_000)
    assert sorted(desk.delivered()) == sorted(f"m{n}" for n in range(9))
    assert desk.delivery.sweeper_found == 0


@pytest.mark.parametrize("repaired_at", [55_000, 60_004])
def test_a_link_repaired_before_its_second_is_over_makes_nothing_late(repaired_at: int) -> None:
    """Seconds are walked ten seconds ahead: then the repair is in time, or at the latest when the second has passed."""
    desk = filed(9)
    whole = desk.store.files[START_HOUR].idx.all[3].copy()
    desk.checking = False
    spoil(desk, 3, seal=False, pre=2)
    desk.consume()
    desk.run_to(repaired_at)
    assert [index for _, index, _ in desk.damage] == [3]
    desk.store.files[START_HOUR].idx.all[3] = whole
    desk.delivery.repaired(START_HOUR)
    desk.run_to(61_200)
    assert {"m0", "m3", "m6"} <= set(desk.delivered())
    desk.run_to(100_000)
    assert sorted(desk.delivered()) == sorted(f"m{n}" for n in range(9))
    assert desk.delivery.sweeper_found == 0


def test_an_entry_that_rots_while_it_is_ready_is_not_proposed() -> None:
    desk = filed(9)
    desk.run_to(70_000)  # all are ready, nobody asks
    whole = desk.store.files[START_HOUR].idx.all[3].copy()
    desk.checking = False
    spoil(desk, 3, seal=False, topic=9)
    desk.consume()
    desk.run_to(71_000)
    assert len(desk.delivered()) == 8
    assert [index for _, index, _ in desk.damage] == [3]
    desk.store.files[START_HOUR].idx.all[3] = whole
    desk.delivery.repaired(START_HOUR)
    desk.run_to(72_000)
    assert sorted(desk.delivered()) == sorted(f"m{n}" for n in range(9))


@pytest.mark.parametrize("sync", ["commit", "interval"])
def test_a_damaged_message_that_is_read_twice_is_handed_out_once(sync: str) -> None:
    desk = filed(9, sync=sync)
    desk.run_to(70_000)
    whole = desk.store.files[START_HOUR].idx.all[0].copy()
    desk.checking = False
    spoil(desk, 0, seal=False, topic=9)
    for _ in range(2):
        desk.delivery.ready_counts()
    desk.store.files[START_HOUR].idx.all[0] = whole
    desk.delivery.repaired(START_HOUR)
    desk.consume()
    desk.run_to(72_000)
    assert sorted(desk.delivered()) == [f"m{n}" for n in range(9)]
