"""Message groups: settings that change under them, and how much one command does at most."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from hadelay.codec import commands
from hadelay.codec.commandtypes import Job
from hadelay.ledger.groups.messagegroups import GROUP_KEY, GROUPQ, POSITION, find_group
from hadelay.ledger.hours.maintenance import MAX_GROUPED
from hadelay.model import HOUR_MS, Draft
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


def first_blocked(w: World) -> list[tuple[int, int]]:
    """Where the search for the first blocked message begins, and where this message is: (order_ms, id)."""
    group = find_group(w.ledger, w.topic(), 7)
    assert group is not None
    rows = w.tables.range(GROUPQ, limit=1)
    return [group.lowest, *(POSITION.unpack_from(key, GROUP_KEY.size) for key, _ in rows)]


@pytest.mark.parametrize("how", ["cancel", "shift", "expire", "release"])
@pytest.mark.parametrize("order", [1, -1])
def test_no_search_passes_over_blocked_messages_that_have_gone(how: str, order: int) -> None:
    """Until the next checkpoint each deleted row costs a search some microseconds, and a job cancels a million."""
    w = world()
    ids = w.ids(*[replace(grouped(100 * n), ttl_ms=50) for n in range(8)], grouped(HOUR_MS), grouped(HOUR_MS))
    if how == "release":
        w.now = 10
    else:
        lease = w.lease(ids[0], lease_ms=10 * HOUR_MS)
    for n, gone in enumerate(ids[1:8][::order]):
        if how == "cancel":
            w.cancel(gone)
        elif how == "shift":
            w.one(commands.encode_reschedule("n1", 2 * HOUR_MS, True, [gone]))
        elif how == "expire":
            w.now = 100 * (n + 1) + 50
            w.maintain(Job.TTL_EXPIRE)
        else:
            w.cancel(ids[n])
        if how == "release" or order == 1 or n == 6:
            lowest, first = first_blocked(w)
            assert lowest == first
    if how != "release":
        w.ack(lease)
        assert w.topic().blocked == (8 if how == "shift" else 1)


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
