"""A new leader starts from the replicated state alone, in time with the old one's wheels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hadelay.codec.commands import encode_cursor
from hadelay.codec.commandtypes import Command
from hadelay.errors import DamagedFile
from hadelay.handout.dispatcher import TakeOver
from hadelay.model import HOUR_MS
from tests.handout.desk import START_HOUR, START_MS, Desk


def fallen(desk: Desk) -> None:
    """The leader is gone, and with it what it had not committed."""
    desk.forget_waiting()
    desk.depose()
    desk.received.clear()


def test_messages_that_fell_due_meanwhile_come_at_once_and_in_order() -> None:
    desk = Desk()
    desk.lead()
    for n in range(40):
        desk.publish(f"m{n}", at=5_000 + n * 300)
    desk.run_to(6_000)
    fallen(desk)
    desk.run_to(14_000)
    desk.new_leader()
    desk.consume(max=7)
    desk.run(40)
    came = desk.delivered()
    assert came == [f"m{n}" for n in range(31)]
    desk.run_to(30_000)
    assert desk.delivered() == [f"m{n}" for n in range(40)]


def test_nothing_that_is_leased_or_settled_comes_again() -> None:
    desk = Desk()
    desk.lead()
    desk.publish(*(f"m{n}" for n in range(10)), at=1_000)
    desk.poll(max=4, lease=60_000)
    desk.run_to(1_100)
    desk.ack(desk.received[0], "m0", "m1")
    desk.cancel("m9")
    fallen(desk)
    desk.new_leader()
    desk.consume(ack=False)
    desk.run(1_000)
    assert sorted(desk.delivered()) == [f"m{n}" for n in range(4, 9)]


def test_a_grant_of_the_old_leader_expires_under_the_new_one() -> None:
    desk = Desk()
    desk.lead()
    desk.publish("a")
    desk.poll(lease=3_000)
    desk.run(10)
    fallen(desk)
    desk.new_leader()
    poll = desk.poll()
    desk.run(2_900)
    assert desk.answer(poll) is None
    desk.run(150)
    assert desk.answer(poll).delivery.attempts[0] == 2  # type: ignore[union-attr]


def test_nothing_expires_for_the_skew_bound() -> None:
    desk = Desk()
    desk.lead()
    desk.publish("a")
    desk.poll(lease=1_000)
    desk.run(10)
    fallen(desk)
    desk.run(5_000)
    desk.new_leader()
    took_over = desk.now
    poll = desk.poll()
    desk.run(245)
    assert desk.answer(poll) is None
    desk.run(20)
    assert 250 <= desk.answer(poll).at - took_over <= 260  # type: ignore[union-attr]


def test_a_lost_answer_is_given_again_by_the_new_leader() -> None:
    desk = Desk()
    desk.lead()
    desk.publish("a", "b")
    desk.poll(consumer="x", request=b"r")
    desk.run(10)
    one = desk.received[0]
    fallen(desk)
    desk.new_leader()
    desk.poll(consumer="x", request=b"r")
    other = desk.poll(consumer="y")
    desk.run(10)
    two = desk.received[0]
    assert two.names == ["a", "b"]
    assert (two.delivery.term, two.delivery.seq) == (one.delivery.term, one.delivery.seq)  # type: ignore[union-attr]
    assert desk.answer(other) is None


@pytest.mark.parametrize("good", [True, False])
def test_a_damaged_entry_is_repaired_before_a_grant_is_handed_out_again(good: bool) -> None:
    desk = Desk()
    damaged: list[DamagedFile] = []
    repairs: list[Any] = []
    read = desk.store.entries

    def entries(hour: int, indexes: Any, *, verify: bool = True) -> Any:
        if damaged:
            raise damaged[0]
        return read(hour, indexes, verify=verify)

    desk.store.entries = entries
    reader: Any = SimpleNamespace(repair=lambda damage, done: repairs.append(done))
    desk.delivery._reader = reader
    desk.lead()
    desk.publish("a", "b")
    desk.poll(consumer="x", request=b"r")
    desk.run(10)
    desk.received.clear()
    damaged.append(DamagedFile("hour.idx", 64, "the entry's CRC is wrong", size=64))
    desk.poll(consumer="x", request=b"r")
    desk.run(10)
    assert not desk.received
    if good:
        damaged.clear()
    repairs.pop()(bytes(64) if good else None)
    desk.run(10)
    (received,) = desk.received
    assert received.names == (["a", "b"] if good else [])
    assert isinstance(received.error, DamagedFile) is not good


def test_a_tick_ahead_of_the_clock_is_waited_for() -> None:
    """The old leader's wheels stood further on than this node's clock: wait until they meet (S2)."""
    desk = Desk()
    desk.lead()
    desk.publish("old", at=1_000)
    desk.run_to(1_500)
    desk.publish("a", at=7_000)
    desk.do(encode_cursor(START_HOUR, 6, 0))
    fallen(desk)
    desk.new_leader(clock_behind_ms=0)
    poll = desk.poll(max=1)
    desk.run_to(5_990)
    assert desk.answer(poll) is None
    desk.run_to(6_010)
    assert desk.answer(poll).names == ["old"]  # type: ignore[union-attr]
    second = desk.poll()
    desk.run_to(6_990)
    assert desk.answer(second) is None
    desk.run_to(7_010)
    assert desk.answer(second).names == ["a"]  # type: ignore[union-attr]


def test_time_does_not_run_back_behind_the_tick() -> None:
    """Clock alignment: what the tick adds to the last stamp. Commits are slow, so grants are proposed ahead of their
    time, and the cursor rides with them. A consumer got a message at its due time; then the leader fell. The new one
    knows nothing but the last stamp, 50 ms before, and hands out nothing until its clock has reached the tick."""
    desk = Desk(commit_ms=30)
    desk.lead()
    for n in range(8):
        desk.publish(f"before{n}", at=500 + n * 400)
    desk.publish("a", at=5_000)
    desk.consume(ack=False)
    desk.until(lambda: bool(desk.offers()) and desk.now > 4_500)
    riding = desk.delivery.riding_cursor()
    assert riding is not None
    desk.propose(*riding)
    stamp = desk.cluster_ms()
    desk.until(lambda: desk.received[-1].names == ["a"])
    assert desk.received[-1].delivery.now_ms >= START_MS + 5_000  # type: ignore[union-attr]
    assert desk.ledger.now_ms - START_MS == stamp < 4_960
    assert desk.ledger.cursor[1] == 5
    fallen(desk)
    desk.commit_ms = 1
    desk.new_leader(clock_behind_ms=int(desk.now) - stamp)
    assert desk.cluster_ms() == stamp
    desk.publish("b", at=4_970)
    poll = desk.poll()
    desk.until(lambda: desk.answer(poll) is not None)
    after = desk.answer(poll)
    assert after is not None
    assert after.names == ["b"]
    assert after.delivery.now_ms >= START_MS + 5_000  # type: ignore[union-attr]


def test_a_clock_that_is_behind_hands_out_nothing_early() -> None:
    desk = Desk()
    desk.lead()
    desk.publish("a", at=3_000)
    fallen(desk)
    desk.new_leader(clock_behind_ms=200)
    poll = desk.poll()
    desk.run_to(3_190)
    assert desk.answer(poll) is None
    desk.run_to(3_210)
    assert desk.answer(poll).names == ["a"]  # type: ignore[union-attr]


def test_the_cursor_is_no_permission() -> None:
    """localIndex order is not millisecond order: what the cursor has passed and nobody got is still owed."""
    desk = Desk()
    desk.lead()
    desk.publish("late", at=2_900)
    desk.publish("early", at=2_100)
    desk.run_to(2_500)
    assert desk.ledger.cursor == (START_HOUR, 2, 1)
    fallen(desk)
    desk.run_to(2_600)
    desk.new_leader()
    desk.consume()
    desk.run_to(3_000)
    assert desk.delivered() == ["early", "late"]


def test_hours_that_went_by_without_a_leader_or_a_commit() -> None:
    desk = Desk()
    desk.lead()
    for n in range(6):
        desk.publish(f"m{n}", at=n * HOUR_MS + 600_000)
    desk.run_to(700_000)
    fallen(desk)
    desk.run_to(5 * HOUR_MS + 700_000)
    desk.new_leader()
    desk.consume()
    desk.run(100)
    assert desk.delivered() == [f"m{n}" for n in range(6)]


def test_the_present_does_not_wait_for_the_past(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hadelay.handout.scans.SLICE", 50)
    desk = Desk(checking=False)
    desk.lead()
    desk.publish_many(5_000, topic="nobody", at=1_000, spread_ms=9_000)
    fallen(desk)
    desk.run_to(19_980)
    desk.publish("now", at=20_001)
    desk.new_leader()
    took_over = desk.world.events
    poll = desk.poll()
    desk.until(lambda: desk.answer(poll) is not None)
    assert desk.now <= 20_010
    # Far fewer turns than the backlog has slices.
    assert desk.world.events - took_over < 500


def test_the_next_due_message_does_not_wait_for_what_is_owed_before_the_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new leader resumes at the cursor: the backlog before it costs no slice before the next hand-out."""
    monkeypatch.setattr("hadelay.handout.scans.SLICE", 50)
    desk = Desk(checking=False)
    desk.lead()
    backlog = desk.publish_many(3_000, topic="nobody", at=1_000, spread_ms=9_000)
    desk.publish("missed", at=20_200)
    desk.run_to(20_050)
    desk.publish("reached", at=20_040)
    desk.run(60)
    assert desk.ledger.cursor[1] == 20
    fallen(desk)
    desk.run_to(20_400)
    desk.new_leader()
    desk.publish("due", at=20_400)
    missed = desk.poll(max=2)
    desk.until(lambda: bool(desk.offers()))
    # At most two slices have looked at the backlog when the first messages are offered.
    assert desk.core.scans.found <= 102
    desk.until(lambda: desk.answer(missed) is not None)
    assert desk.answer(missed).names == ["reached", "missed"]  # type: ignore[union-attr]
    rest = desk.poll()
    desk.until(lambda: desk.answer(rest) is not None)
    assert desk.answer(rest).names == ["due"]  # type: ignore[union-attr]
    desk.until(lambda: not desk.core.scans.jobs)
    assert desk.core.scans.found >= len(backlog)
    desk.consume("nobody")
    desk.run(3_000)
    assert len(desk.delivered()) == len(backlog) + 3
    assert desk.delivery.sweeper_found == 0


def test_a_large_second_that_was_reached_to_its_end_is_backlog(monkeypatch: pytest.MonkeyPatch) -> None:
    """The localIndex says how much of the cursor's second was reached: all of it here, so nothing goes first."""
    monkeypatch.setattr("hadelay.handout.scans.SLICE", 50)
    monkeypatch.setattr("hadelay.handout.dispatcher.SLICE", 50)
    desk = Desk(checking=False)
    desk.lead()
    desk.publish_many(1_000, topic="nobody", at=20_000)
    desk.run_to(20_500)
    desk.run(100)
    assert desk.ledger.cursor == (START_HOUR, 20, 1_000)
    fallen(desk)
    desk.run_to(21_500)
    desk.new_leader()
    assert not desk.core.scans.first
    desk.publish("now")
    desk.poll()
    desk.until(lambda: bool(desk.offers()))
    assert desk.core.scans.found <= 100


@pytest.mark.parametrize("again_ms", [2_700, 3_200], ids=["within the second", "after it"])
def test_the_local_index_counts_what_earlier_leaders_reached(again_ms: int) -> None:
    """The localIndex is right after a take-over, whoever made the second's messages ready, and whoever has them."""
    desk = Desk()
    desk.lead()
    names = [f"m{n}" for n in range(100)]
    for n, name in enumerate(names):
        desk.publish(name, at=2_000 + n * 10)
    desk.cancel("m70", "m95")
    desk.poll(max=20, lease=60_000)
    desk.run_to(2_505)
    desk.ack(desk.received[0])
    fallen(desk)
    desk.run_to(again_ms)
    desk.new_leader()
    desk.consume(max=7)
    desk.cancel("m99" if again_ms < 3_000 else "m60")
    desk.run_to(again_ms + 100)
    reached = 100 if again_ms > 3_000 else 81 + 2
    # m99 and m95 were cancelled before they were due: nothing of them is to come.
    assert desk.core.cursor == (START_HOUR, 2, reached)
    desk.run_to(4_000)
    assert desk.core.cursor == desk.ledger.cursor == (START_HOUR, 2, 100)


def test_a_new_leader_says_how_it_resumed(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk()
    taken: list[TakeOver] = []
    desk.lead()
    desk.publish(*(f"old{n}" for n in range(5)), at=1_000)
    desk.poll(max=2, lease=60_000)
    desk.run_to(1_100)
    desk.publish("reached", at=4_000)
    desk.run_to(4_100)
    desk.publish("missed", at=5_300)
    fallen(desk)
    desk.run_to(6_000)
    desk.new_leader(lead=False)
    desk.delivery.on_take_over = taken.append
    with caplog.at_level("INFO"):
        desk.lead()
        desk.run(20)
    # Three of `old`, `reached` and `missed` are owed; `reached`, in the cursor's second, is late by 2 s.
    assert taken == [TakeOver(START_HOUR, 4, 1, overdue=5, leases=2, lag_ms=2_000)]
    (record,) = [record for record in caplog.records if record.message == "took_over"]
    assert (record.overdue, record.leases, record.lag_ms) == (5, 2, 2_000)  # type: ignore[attr-defined]
    desk.run(5_000)
    assert len(taken) == 1


def test_messages_that_fall_due_between_two_leaders_of_one_second_are_late() -> None:
    desk = Desk()
    taken: list[TakeOver] = []
    desk.lead()
    desk.publish("a", at=2_100)
    desk.publish("b", at=2_400)
    desk.run_to(2_300)
    fallen(desk)
    desk.run_to(2_900)
    desk.new_leader(lead=False)
    desk.delivery.on_take_over = taken.append
    desk.lead()
    desk.run(20)
    assert [(one.second, one.local, one.overdue) for one in taken] == [(2, 1, 0)]
    assert taken[0].lag_ms == 800  # of a, which nobody had polled for


def test_a_planned_transfer_leaves_neither_gap_nor_duplicate() -> None:
    desk = Desk(commit_ms=5)
    desk.lead()
    for n in range(200):
        desk.publish(f"m{n}", at=1_000 + n * 10)
    desk.consume(ack=False)
    desk.run_to(2_003)
    leased: list[float] = []
    desk.delivery.hold(lambda: leased.append(desk.now))
    desk.run(300)
    assert leased[0] < 2_003 + 15
    before = desk.delivered()
    assert desk.ledger.cursor == desk.core.cursor
    assert not [at for at, kind in desk.log if kind == Command.GRANT and at > leased[0]]
    fallen(desk)
    desk.new_leader()
    desk.consume(ack=False)
    desk.run_to(4_000)
    assert before + desk.delivered() == [f"m{n}" for n in range(200)]


def test_a_transfer_that_failed_goes_on() -> None:
    desk = Desk()
    desk.lead()
    leased: list[bool] = []
    desk.delivery.hold(lambda: leased.append(True))
    poll = desk.poll()
    desk.publish("a")
    desk.run(300)
    assert leased
    assert desk.answer(poll) is None
    desk.delivery.resume()
    desk.run(10)
    assert desk.answer(poll).names == ["a"]  # type: ignore[union-attr]


def test_a_transfer_of_an_idle_leader_needs_no_commit() -> None:
    desk = Desk()
    desk.lead()
    desk.run(10)
    leased: list[bool] = []
    desk.delivery.hold(lambda: leased.append(True))
    assert leased
    assert desk.index == 0


def test_many_take_overs_lose_and_repeat_nothing() -> None:
    desk = Desk(commit_ms=3)
    desk.lead()
    names = [f"m{n}" for n in range(300)]
    for n, name in enumerate(names):
        desk.publish(name, at=1_000 + n * 10)
    came: list[str] = []
    for turn in range(30):
        desk.consume(ack=turn % 2 == 0)
        desk.run_to(1_000 + turn * 113)
        came += desk.delivered()
        fallen(desk)
        desk.run(37)
        desk.new_leader()
    desk.consume()
    desk.run_to(20_000)
    came += desk.delivered()
    leased = [desk.name_of(int(i)) for g in desk.ledger.grants.values() for i in _ids(desk, g)]
    # What was granted while nobody was there to be told comes after its lease; nothing comes twice before.
    assert len(came) == len(set(came))
    assert sorted(set(came) | set(leased)) == sorted(names)


def _ids(desk: Desk, grant: object) -> list[int]:
    rows = grant.rows[grant.rows["open"] == 1]  # type: ignore[attr-defined]
    return [int(desk.store.entries(int(r["hour"]), slice(r["index"], r["index"] + 1))["first_id"][0]) for r in rows]
