"""Message groups in the hand-out: entries that become blocked and unblocked while they wait in a loaded second, in a
window, or behind a mark."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from hadelay.codec import commands
from hadelay.ledger.groups.messagegroups import Change
from hadelay.ledger.topics.topicchanges import READY, SCHEDULED
from hadelay.model import HOUR_MS
from tests.handout.desk import START_MS, Desk


def desk(limit: int = 1, **how: int) -> Desk:
    made = Desk(commit_ms=2, **how)
    made.lead()
    made.put(group_concurrency=limit, max_attempts=100)
    return made


def arrivals(of: Desk) -> list[tuple[int, str]]:
    return [(round(r.at), name) for r in of.received for name in r.names]


@pytest.mark.parametrize("settled_at", [4_000, 4_999, 5_001, 7_000])
@pytest.mark.parametrize("how", ["ack", "cancel"])
def test_a_message_that_was_displaced_comes_once(settled_at: int, how: str) -> None:
    d = desk()
    d.publish("late", at=5_000, group="g")
    d.run(20)  # it is loaded
    d.publish("early", at=3_000, group="g")
    if how == "ack":
        first = d.poll(max=1)
        d.run_to(settled_at)
        received = d.answer(first)
        assert received is not None
        assert received.names == ["early"]
        d.ack(received)
    else:
        d.run_to(settled_at)
        assert d.delivery.ready_counts() == {0: (1, d.delivery.ready_counts()[0][1])}
        d.cancel("early")
    d.consume()
    d.run_to(10_000)
    came = [at for at, name in arrivals(d) if name == "late"]
    assert len(came) == 1
    assert max(settled_at, 5_000) <= came[0] <= max(settled_at, 5_000) + 10
    assert d.delivery.ready_counts() == {}
    assert d.delivery.sweeper_found == 0


def test_one_at_a_time_in_due_order() -> None:
    d = desk()
    for n, at in enumerate([900, 300, 600, 600]):
        d.publish(f"m{n}", at=at, group="g")
    d.publish("other", at=700, group="h")
    d.publish("free", at=700)
    d.consume()
    d.run_to(2_000)
    assert [name for _, name in arrivals(d)] == ["m1", "m2", "m3", "other", "free", "m0"]


def test_a_retry_holds_a_group_of_one_and_no_other() -> None:
    for limit, expected in ((1, ["a", "a", "b"]), (2, ["a", "b", "a"])):
        d = desk(limit)
        d.publish("a", group="g")
        d.publish("b", at=100, group="g")
        poll = d.poll(max=1)
        d.run_to(50)
        received = d.answer(poll)
        assert received is not None
        d.nack(received, delay=500)
        d.consume(max=1)
        d.run_to(3_000)
        assert [name for _, name in arrivals(d)] == expected


def test_a_new_leader_skips_the_blocked() -> None:
    """Also those that fell due without a leader, in a past hour, in front of others, through windows of 10 entries."""
    d = desk(window=10)
    for n in range(100):
        d.publish(f"blocked{n}", at=1_000 + n, group="big")
    for n in range(40):
        d.publish(f"other{n}", at=1_500, group=f"g{n}")
    d.publish("next hour", at=HOUR_MS + 5, group="big")
    d.depose()
    d.run_to(60_000)
    d.new_leader()
    d.consume(max=3)
    d.run_to(90_000)
    came = [name for _, name in arrivals(d)]
    assert sorted(came) == sorted([f"blocked{n}" for n in range(100)] + [f"other{n}" for n in range(40)])
    assert [name for name in came if name.startswith("blocked")] == [f"blocked{n}" for n in range(100)]
    assert max(came.index(f"other{n}") for n in range(40)) < 100, "the others take turns with the big group"
    d.run_to(HOUR_MS + 1_000)
    assert arrivals(d)[-1][1] == "next hour"
    assert d.delivery.sweeper_found == 0
    assert d.delivery.ready_counts() == {}


def test_a_question_for_the_oldest_drops_nothing_of_another_hour() -> None:
    """A message of a past hour that moves up stands behind one of the present hour. (seed 2150)"""
    d = desk()
    d.publish("head", "next", at=HOUR_MS - 1_000, group="g")
    d.publish("before", at=HOUR_MS - 500)
    d.publish("after", at=HOUR_MS + 500)
    d.run_to(HOUR_MS - 600)
    poll = d.poll(max=1)
    d.run_to(HOUR_MS + 1_000)
    received = d.answer(poll)
    assert received is not None
    assert received.names == ["head"]
    d.ack(received)
    d.cancel("before", "next")
    assert d.delivery.ready_counts()[0][0] == 1
    poll = d.poll(max=1)
    d.run(50)
    assert d.answer(poll).names == ["after"]  # type: ignore[union-attr]
    assert d.delivery.sweeper_found == 0


def test_a_leader_in_interval_mode_hands_groups_out_with_commits() -> None:
    """The mode was changed after the setting was made."""
    d = Desk(commit_ms=20, sync="interval")
    d.put(group_concurrency=1, max_attempts=100)
    d.lead()
    d.publish("a", "b", group="g")
    d.stuck = True
    poll = d.poll()
    d.run(500)
    assert d.answer(poll) is None
    d.unstick()
    d.run(100)
    received = d.answer(poll)
    assert received is not None
    assert received.names == ["a"]


def test_the_wait_behind_a_group_is_no_delay_of_the_cluster() -> None:
    d = desk()
    d.publish("a", "b", group="g")
    poll = d.poll(max=1)
    d.run(50)
    received = d.answer(poll)
    assert received is not None
    waiting = d.poll(max=1)
    d.run(9_000)
    d.ack(received)
    d.run(50)
    assert d.answer(waiting).names == ["b"]  # type: ignore[union-attr]
    assert d.delivery.delays.histogram.sum < 0.1


def test_a_message_that_ends_before_the_dispatcher_saw_its_hour_is_not_uncounted() -> None:
    d = Desk()
    d.lead()
    d.publish("a")
    d.cancel("a")
    d.publish("b")
    d.run(10)
    assert d.delivery.ready_counts()[0][0] == 1


def test_the_message_that_waits_longest_behind_a_group_is_known() -> None:
    """The leader walks over the groups with every sweep. A new leader and another head show at once or with the next
    sweep."""
    d = desk()
    d.publish("free", topic="u")
    for n in range(100):
        d.publish(f"a{n}", at=1_000, group=f"g{n}")
        d.publish(f"b{n}", at=5_000 + n, group=f"g{n}")
    d.run_to(25_000)
    assert d.delivery.groups.waits_since_ms() == d.delivery.groups.waits_since_ms(0) == START_MS + 5_000
    assert d.delivery.groups.waits_since_ms(1) == 0
    d.cancel("a0", "a1")
    assert d.delivery.groups.waits_since_ms(0) == 0
    d.run_to(45_000)
    assert d.delivery.groups.waits_since_ms(0) == START_MS + 5_002
    d.depose()
    d.new_leader()
    d.run(11_000)
    assert d.delivery.groups.waits_since_ms(0) == START_MS + 5_002
    assert d.delivery.groups.wrong == 0


def test_blocked_messages_that_are_not_due_wait_for_nobody() -> None:
    d = desk()
    d.publish("a", at=1_000, group="g")
    d.publish("b", at=60_000, group="g")
    d.run_to(30_000)
    assert d.delivery.groups.waits_since_ms() == 0
    d.run_to(61_000)
    assert d.delivery.groups.waits_since_ms() == START_MS + 60_000


@pytest.mark.parametrize("ended", [False, True])
def test_a_group_that_waits_for_nothing_is_counted_and_named(ended: bool, caplog: pytest.LogCaptureFixture) -> None:
    d = desk(checking=False)
    for name in "abc":
        d.publish(name, group="g")
    method = "remove" if ended else "fill"
    with patch.object(Change, method, lambda *_, **__: None):
        d.cancel("a")
    d.run(11_000)
    assert d.delivery.groups.wrong == 1
    (line,) = [record for record in caplog.records if record.message == "group_wrong"]
    what = "has ended and is still in the group" if ended else "2 messages are blocked by 0, although 1 may be"
    assert what in line.__dict__["what"]
    if not ended:
        d.publish("d", group="g")
        d.run(21_000)
        assert d.delivery.groups.wrong == 0


def test_groups_of_purged_topics_are_passed_over() -> None:
    d = desk()
    for n in range(3):
        d.put(f"t{n}", group_concurrency=1, max_attempts=3)
        for _ in range(2):
            d.publish("x", topic=f"t{n}", group="g")
    d.do(commands.encode_purge("t1", SCHEDULED | READY))
    d.run(2)
    d.publish("y", "z", topic="t1", group="g")
    d.delivery.groups.wake()
    assert all(d.delivery.groups.waits_since_ms(number) for number in (1, 2, 3))


def test_the_last_second_of_an_hour_is_loaded_after_the_next_hour_was_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both came while the leader slept, and a message of that second was blocked before all of them were loaded: the
    leader knew the first hour no more, and failed."""
    monkeypatch.setattr("hadelay.handout.preload.SLICE", 2)
    d = desk(sweep_ms=2 * HOUR_MS)
    d.run_to(HOUR_MS - 60)
    d.delivery._latency.ms = 80
    for n in range(20):
        d.publish(f"m{n}", at=HOUR_MS - 10, group=f"g{n}")
    d.publish("next", at=HOUR_MS + 20)
    loading = d.core._preload.loading
    d.until(lambda: bool(loading) and loading[0][1].left <= 10)
    d.publish("first", at=HOUR_MS - 30, group="g19")
    d.consume(max=1)
    d.run(2_000)
    came = d.delivered()
    assert sorted(came) == sorted([*(f"m{n}" for n in range(20)), "first", "next"])
    assert came.index("first") < came.index("m19")
    assert d.delivery.sweeper_found == 0
