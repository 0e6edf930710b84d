"""A new leader starts from the replicated state alone, in time with the old one's wheels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hadelay.codec.commands import encode_cursor
from hadelay.codec.commandtypes import Command
from hadelay.errors import DamagedFile
from hadelay.model import HOUR_MS
from tests.handout.desk import START_HOUR, Desk


def fallen(desk: Desk) -> None:
    """The leader is gone, and with it what it had not committed."""
    desk.forget_waiting()
    desk.depose()
    desk.received.clear()


def test_what_fell_due_meanwhile_comes_at_once_and_in_order() -> None:
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


def test_a_planned_transfer_leaves_neither_gap_nor_duplicate() -> None:
    desk = Desk(commit_ms=5)
    desk.lead()
    for n in range(200):
        desk.publish(f"m{n}", at=1_000 + n * 10)
    desk.consume(ack=False)
    desk.run_to(2_003)
    held: list[float] = []
    desk.delivery.hold(lambda: held.append(desk.now))
    desk.run(300)
    assert held[0] < 2_003 + 15
    before = desk.delivered()
    assert desk.ledger.cursor == desk.core.cursor
    assert not [at for at, kind in desk.log if kind == Command.GRANT and at > held[0]]
    fallen(desk)
    desk.new_leader()
    desk.consume(ack=False)
    desk.run_to(4_000)
    assert before + desk.delivered() == [f"m{n}" for n in range(200)]


def test_a_transfer_that_failed_goes_on() -> None:
    desk = Desk()
    desk.lead()
    held: list[bool] = []
    desk.delivery.hold(lambda: held.append(True))
    poll = desk.poll()
    desk.publish("a")
    desk.run(300)
    assert held
    assert desk.answer(poll) is None
    desk.delivery.resume()
    desk.run(10)
    assert desk.answer(poll).names == ["a"]  # type: ignore[union-attr]


def test_a_transfer_of_an_idle_leader_needs_no_commit() -> None:
    desk = Desk()
    desk.lead()
    desk.run(10)
    held: list[bool] = []
    desk.delivery.hold(lambda: held.append(True))
    assert held
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
    held = [desk.name_of(int(i)) for g in desk.ledger.grants.values() for i in _ids(desk, g)]
    # What was granted while nobody was there to be told comes after its lease; nothing comes twice before.
    assert len(came) == len(set(came))
    assert sorted(set(came) | set(held)) == sorted(names)


def _ids(desk: Desk, grant: object) -> list[int]:
    rows = grant.rows[grant.rows["open"] == 1]  # type: ignore[attr-defined]
    return [int(desk.store.entries(int(r["hour"]), slice(r["index"], r["index"] + 1))["first_id"][0]) for r in rows]
