"""`Deadlines`: which keys need attention, in which order, and how much memory that takes."""

from __future__ import annotations

from hadelay.handout.deadlines import Deadlines


def test_keys_come_out_by_time_and_equal_times_in_the_order_of_set() -> None:
    deadlines: Deadlines[str] = Deadlines()
    for key, at in (("b", 2.0), ("a", 1.0), ("c", 2.0)):
        deadlines.set(key, at)
    assert deadlines.next() == 1.0
    assert deadlines.due(0.5) == []
    assert deadlines.due(2.0, limit=2) == ["a", "b"]
    assert list(deadlines) == ["c"]
    assert "c" in deadlines
    assert "a" not in deadlines
    assert deadlines.due(9.0) == ["c"]
    assert deadlines.next() is None


def test_a_key_has_one_time_the_last_that_was_set() -> None:
    deadlines: Deadlines[str] = Deadlines()
    deadlines.set("a", 1)
    deadlines.set("a", 3)
    deadlines.set("b", 2)
    deadlines.set("b", 2)
    assert deadlines.due(2) == ["b"]
    deadlines.set("a", 1)
    assert deadlines.due(1) == ["a"]
    assert deadlines.due(9) == []


def test_a_discarded_key_is_never_due() -> None:
    deadlines: Deadlines[str] = Deadlines()
    deadlines.set("a", 1)
    deadlines.discard("a")
    deadlines.discard("unknown")
    assert (len(deadlines), deadlines.next(), deadlines.due(9)) == (0, None, [])


def test_stale_items_take_no_more_memory_than_live_ones_and_a_spare() -> None:
    deadlines: Deadlines[int] = Deadlines()
    for n in range(10_000):
        deadlines.set(n % 3, n)
        deadlines.discard(n % 2)
        assert len(deadlines._heap) <= 2 * 3 + 1_024
    assert len(deadlines) <= 3
