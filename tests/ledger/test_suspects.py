"""Due times of messages that earlier leaders of interval mode may have handed out without a record."""

from __future__ import annotations

import numpy as np

from hadelay.codec import commands
from hadelay.ledger.leases import suspects
from tests.ledger.world import START_HOUR, START_MS, World, draft


def cursor(world: World, second: int) -> None:
    world.one(commands.encode_cursor(START_HOUR + second // 3600, second % 3600, 1))


def next_term(world: World) -> list[tuple[int, int]]:
    """Another leader writes its first entry. Returns the ranges, in ms since START_MS."""
    world.term += 1
    world.one(commands.encode_noop())
    return [(first_ms - START_MS, last_ms - START_MS) for first_ms, last_ms in world.ledger.suspects]


def test_a_term_leaves_what_its_cursor_and_last_stamp_bound() -> None:
    world = World()
    world.publish(draft(at=4_900), draft(at=5_300), draft(at=9_000))
    world.now = 5_200
    cursor(world, 5)
    assert next_term(world) == [(5_000, 5_250)]
    due = np.array([4_900, 4_999, 5_000, 5_250, 5_251]) + START_MS
    assert suspects.within(world.ledger.suspects, due).tolist() == [False, False, True, True, False]
    world.restart()
    assert world.ledger.suspects == ((START_MS + 5_000, START_MS + 5_250),)


def test_a_range_ends_with_its_open_messages() -> None:
    world = World()
    (one, two) = world.ids(draft(at=5_100), draft(at=8_100))
    world.now = 5_200
    cursor(world, 5)
    assert next_term(world) == [(5_000, 5_250)]
    world.now = 8_200
    cursor(world, 8)
    assert next_term(world) == [(5_000, 5_250), (8_000, 8_250)]
    world.ack(world.lease(one))
    assert next_term(world) == [(8_000, 8_250)]
    world.cancel(two)
    assert next_term(world) == []


def test_terms_without_messages_leave_nothing() -> None:
    world = World()
    world.publish(draft(at=60_000))
    world.now = 5_200
    cursor(world, 5)
    assert next_term(world) == []


def test_the_ranges_are_bounded() -> None:
    world = World()
    for n in range(suspects.MAX_RANGES + 8):
        world.now = n * 3_000
        world.publish(draft())
        cursor(world, n * 3)
        found = next_term(world)
    assert len(found) == suspects.MAX_RANGES
    assert found[0] == (0, 8 * 3_000 + 50)
    assert found[-1] == ((suspects.MAX_RANGES + 7) * 3_000, (suspects.MAX_RANGES + 7) * 3_000 + 50)


def test_ranges_that_overlap_are_one() -> None:
    world = World()
    world.publish(draft(at=5_100), draft(at=5_900))
    for world.now in (5_200, 5_600, 5_950):
        cursor(world, 5)
        found = next_term(world)
    assert found == [(5_000, 6_000)]


def test_a_message_due_in_an_hour_that_has_not_begun_counts() -> None:
    world = World()
    world.now = 3_599_980
    world.publish(draft(at=3_600_010))
    cursor(world, 3_599)
    assert next_term(world) == [(3_599_000, 3_600_030)]
