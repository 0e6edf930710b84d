"""Message groups: settings that change under them, and how much one command does at most."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from hadelay.codec import commands
from hadelay.codec.commandtypes import Job
from hadelay.ledger.maintenance import MAX_GROUPED
from hadelay.model import HOUR_MS, Draft
from hadelay.version import GROUP_RATE_LEVEL
from tests.ledger.world import START_HOUR, World, draft


def world(limit: int = 1) -> World:
    made = World()
    made.one(commands.encode_topic_put("t", {"group_concurrency": limit, "max_attempts": 3}))
    return made


def grouped(in_ms: int = 0, group: int = 7) -> Draft:
    return replace(draft("t", in_ms), group=group)


@pytest.mark.parametrize("states", [2, 3])
def test_one_sweep_ends_a_part_of_a_purged_group(states: int) -> None:
    w = world()
    w.checking = False
    ids = [i for _ in range(2) for i in w.ids(*[grouped() for _ in range(MAX_GROUPED)])]
    (kept,) = w.ids(grouped(HOUR_MS))
    w.checking = True
    w.now += 1
    w.one(commands.encode_purge("t", states))
    ended = [w.maintain(Job.SWEEP).count for _ in range(3)]
    assert ended == [MAX_GROUPED, MAX_GROUPED, int(states == 3)]
    assert w.maintain(Job.SWEEP).done
    assert w.states(ids[0], ids[-1], kept) == ["cancelled", "cancelled", "cancelled" if states == 3 else "scheduled"]
    assert (w.topic().group_rows, w.topic().blocked) == (int(states == 2), 0)


def test_rolling_forward_ends_a_part_of_a_purged_group() -> None:
    w = world()
    w.checking = False
    w.ids(*[grouped() for _ in range(MAX_GROUPED + 5)])
    w.checking = True
    w.one(commands.encode_purge("t", 3))
    w.now = HOUR_MS + 1
    w.one(commands.encode_noop())
    w.maintain(Job.ROLL_FORWARD, START_HOUR)
    assert w.topic().group_rows == 5
    assert w.maintain(Job.ROLL_FORWARD, START_HOUR).done
    assert w.topic().group_rows == 0


@pytest.mark.parametrize(("before", "after", "blocked"), [(3, 1, 2), (3, 2, 1), (1, 2, 1), (1, 3, 0)])
def test_a_group_follows_a_changed_limit_at_its_next_message(before: int, after: int, blocked: int) -> None:
    w = world(before)
    w.ids(grouped(), grouped(5))
    w.one(commands.encode_topic_put("t", {"group_concurrency": after}))
    w.ids(grouped(3))
    assert w.topic().blocked == blocked


@pytest.mark.parametrize("few", ["blocked", "others"])
def test_an_hour_begins_with_blocked_messages(few: str) -> None:
    """ledgercheck compares the counts per second with the entries."""
    w = world()
    w.ids(*[grouped(HOUR_MS + n * 900, group=7 if (n % 5 == 0) == (few == "blocked") else 100 + n) for n in range(50)])
    w.now = HOUR_MS
    w.one(commands.encode_noop())
    assert w.topic().blocked == (9 if few == "blocked" else 39)
    seconds = w.ledger.hours[START_HOUR + 1].open_seconds
    assert seconds is not None
    assert seconds.sum() == 50 - w.topic().blocked


def test_group_rate_needs_groups_and_the_newest_level() -> None:
    w = World()
    refused = w.one(commands.encode_topic_put("t", {"group_rate": 1}))
    assert (refused.code, refused.detail.startswith("group_rate needs group_concurrency")) == (
        "impossible_config",
        True,
    )
    assert w.one(commands.encode_topic_put("t", {"group_rate": 1, "group_concurrency": 2})).changed
    assert w.one(commands.encode_topic_put("t", {"group_concurrency": None})).code == "impossible_config"
    for wrong in (0, 0.009, 1_001, True, "1/s", float("nan")):
        refused = w.one(commands.encode_topic_put("t", {"group_rate": wrong}))
        assert (refused.code, refused.detail.startswith("group_rate: ")) == ("bad_config", True)
    assert w.one(commands.encode_topic_put("t", {"group_rate": None, "group_concurrency": None})).changed
    w.ledger.level = GROUP_RATE_LEVEL - 1
    assert w.one(commands.encode_topic_put("t", {"group_rate": 1, "group_concurrency": 2})).code == "needs_upgrade"
