"""Loaded seconds: the order of milliseconds, and when the leader wakes for them."""

from __future__ import annotations

import numpy as np

from hadelay.codec.formats import INDEX
from hadelay.handout.second import Second
from hadelay.model import HOUR_MS, NEVER_MS
from tests.handout.desk import START_MS, Desk

SECOND = START_MS // 1000


def rows(*due: int, first: int = 0, topic: int = 0) -> np.ndarray:
    """Messages due at these ms of the second, with numbers in order."""
    out = np.zeros(len(due), INDEX)
    out["deliver_at_ms"] = np.array(due) + START_MS
    out["index"] = np.arange(first, first + len(due))
    out["topic"] = topic
    return out


def taken(second: Second, ms: int) -> list[int]:
    return second.take(START_MS + ms)[0].tolist()


def test_entries_are_ordered_by_millisecond_then_by_number() -> None:
    second = Second(SECOND, 100)
    second.add(rows(500, 20, 500, 999))
    second.add(rows(20, 0, first=4))
    assert second.next_ms == START_MS
    assert taken(second, 10) == [5]
    assert second.next_ms == START_MS + 20
    assert taken(second, 19) == []
    assert taken(second, 500) == [1, 4, 0, 2]
    assert taken(second, 999) == [3]
    assert second.next_ms == NEVER_MS
    assert second.size == 0


def test_late_arrivals_join_a_second_that_runs() -> None:
    second = Second(SECOND, 1_000)
    second.add(rows(100, 600))
    assert taken(second, 100) == [0]
    second.add(rows(300, 700, first=2))
    assert second.next_ms == START_MS + 300
    assert taken(second, 600) == [1, 2]
    many = rows(*range(650, 950), first=10)  # enough for a sort
    second.add(many)
    assert taken(second, 655) == list(range(10, 16))
    assert sorted(taken(second, 999)) == [3, *range(16, 310)]


def test_an_entry_due_before_its_second_is_due_at_once() -> None:
    second = Second(SECOND, 100)
    second.add(rows(500, -90_000, -5))
    assert second.next_ms == START_MS - 90_000
    assert sorted(taken(second, 0)) == [1, 2]


def test_only_the_earliest_are_kept_beyond_the_limit() -> None:
    second = Second(SECOND, 10)
    for n in range(10):
        second.add(rows(*[990 - n * 10 + i for i in range(10)], first=n * 10, topic=n % 2))
    assert taken(second, 999) == list(range(90, 100))
    assert second.overflow.total() == 90
    assert set(second.overflow) == {0, 1}


def test_a_deleted_topic_leaves() -> None:
    second = Second(SECOND, 100)
    second.add(rows(1, 2, topic=7))
    second.add(rows(3, first=2))
    second.forget(7)
    assert second.next_ms == START_MS + 3
    assert taken(second, 999) == [2]


def wakes(desk: Desk, hours: float) -> int:
    before = desk.world.events
    desk.run(hours * HOUR_MS)
    return desk.world.events - before


def test_an_idle_cluster_sleeps_and_writes_nothing() -> None:
    desk = Desk()
    desk.lead()
    desk.publish("a", at=50 * HOUR_MS + 17)
    desk.run(100)
    written = desk.index
    # The sweeper every 10 s, maintenance every 30 s, and nothing else: no ticks.
    assert wakes(desk, 1) <= 2 * 360 + 120 + 10
    assert desk.index == written


def test_forty_eight_idle_hours_and_then_a_publish() -> None:
    desk = Desk()
    desk.lead()
    desk.publish("first", at=100)
    desk.consume()
    desk.run_to(48 * HOUR_MS + 123_456)
    desk.publish("now")
    desk.publish("soon", delay=1_500)
    desk.publish("later", delay=2 * HOUR_MS)
    desk.run(10)
    assert desk.delivered() == ["first", "now"]
    desk.run(1_600)
    assert desk.delivered() == ["first", "now", "soon"]
    desk.run(2 * HOUR_MS)
    assert desk.delivered()[3:] == ["later"]
    late = [received.at for received in desk.received if "later" in received.names]
    assert late[0] - (50 * HOUR_MS + 123_456) < 30


def test_messages_around_the_hour() -> None:
    desk = Desk()
    desk.lead()
    desk.consume(max=1)
    names = {}
    for at in (HOUR_MS - 11_000, HOUR_MS - 1, HOUR_MS, HOUR_MS + 1, HOUR_MS + 9_999, 2 * HOUR_MS - 1, 2 * HOUR_MS):
        names[f"m{at}"] = at
        desk.publish(f"m{at}", at=at)
    desk.run_to(HOUR_MS - 500)
    desk.publish("over", at=HOUR_MS + 250)  # the next hour is open already, 10 s ahead
    names["over"] = HOUR_MS + 250
    desk.run_to(3 * HOUR_MS)
    came = {name: r.delivery.now_ms - START_MS for r in desk.received if r.delivery for name in r.names}
    assert set(came) == set(names)
    assert all(0 <= came[name] - at <= 6 for name, at in names.items())


def test_a_second_is_loaded_once_with_what_comes_meanwhile() -> None:
    desk = Desk()
    desk.lead()
    desk.consume()
    desk.publish(*(f"early{n}" for n in range(50)), at=30_500)
    for step in range(40):
        desk.run_to(18_000 + step * 300)
        desk.publish(f"late{step}", at=30_100 + step * 20)
    desk.run_to(40_000)
    came = desk.delivered()
    assert len(came) == len(set(came)) == 90


def test_a_pause_of_hours_is_caught_up() -> None:
    """The process was stopped (SIGSTOP) and leads alone: what fell due meanwhile comes at once."""
    desk = Desk(checking=False)
    desk.lead()
    for hour in range(5):
        desk.publish(f"m{hour}", at=hour * HOUR_MS + 1_800_000)
    desk.consume()
    desk.runtime.pause()
    desk.run_to(5 * HOUR_MS)
    desk.runtime.resume()
    desk.run(100)
    assert sorted(desk.delivered()) == [f"m{n}" for n in range(5)]
