"""Selective consumers when there is much that they did not ask for, when there are many of them, and with damage."""

from __future__ import annotations

from typing import Any

import pytest

from hadelay.codec.meta import Filter, mask_of
from hadelay.errors import DamagedFile, LimitReached, OutcomeUnknown
from hadelay.handout.matching import Offer
from tests.handout.desk import START_HOUR, Desk


def test_a_window_full_of_others_does_not_starve_who_is_selective() -> None:
    desk = Desk(window=100, checking=False)
    desk.lead()
    desk.publish_many(3_000, at=500, spread_ms=2_000, tags=["other"])
    desk.publish("old", at=1_500, tags=["mine"])
    desk.publish_many(1_000, at=2_500, spread_ms=500)
    desk.run_to(4_000)
    poll = desk.poll(tags=["mine"])
    desk.run(100)
    assert desk.answer(poll).names == ["old"]  # type: ignore[union-attr]
    desk.consume(tags=["mine"])
    for n in range(5):
        desk.publish(f"new{n}", tags=["mine", "x"])
        desk.run(5)
    assert desk.delivered() == ["old", "new0", "new1", "new2", "new3", "new4"]
    assert max(r.at - 4_000 for r in desk.received) < 130
    desk.consume(max=50)
    desk.run(3_000)
    assert len(set(desk.delivered())) == len(desk.delivered()) == 4_006
    assert desk.delivery.sweeper_found == 0


def test_a_filter_that_is_used_again_is_not_given_up() -> None:
    desk = Desk(checking=False)
    desk.lead()
    desk.publish("none")
    first = desk.poll(tags=["mine"], wait=1_000)
    desk.run(2_000)
    assert desk.answer(first).names == []  # type: ignore[union-attr]
    poll = desk.poll(tags=["mine"], wait=200_000)
    for _ in range(13):
        desk.run(10_000)
    desk.publish("late", tags=["mine"])
    desk.run(100)
    assert desk.answer(poll).names == ["late"]  # type: ignore[union-attr]


def test_more_for_one_filter_than_its_window_holds() -> None:
    desk = Desk(window=50, checking=False)
    desk.lead()
    wanted = [desk.name_of(i) for i in desk.publish_many(700, at=100, spread_ms=3_000, tags=["a"])]
    desk.publish_many(700, at=100, spread_ms=3_000, tags=["b"])
    desk.run_to(4_000)
    desk.consume(max=7, tags=["a"])
    desk.run(3_000)
    assert sorted(desk.delivered()) == sorted(wanted)
    desk.consume(max=7, tags=["b"])
    desk.run(3_000)
    assert len(set(desk.delivered())) == len(desk.delivered()) == 1_400
    assert desk.delivery.sweeper_found == 0


def test_a_poll_without_a_filter_does_not_wait_for_entries_that_others_took() -> None:
    """All consumers but the last are selective: the topic's own window is full of what they took."""
    desk = Desk(window=64, checking=False)
    desk.lead()
    desk.consume(max=10, tags=["a"])
    desk.publish_many(1_000, at=100, spread_ms=2_000, tags=["a"])
    desk.run_to(3_000)
    assert len(desk.delivered()) == 1_000
    desk.publish("last")
    desk.run(5)
    assert desk.delivery.ready_counts() == {0: (1, 1_795_197_603_000)}
    poll = desk.poll(max=1)
    desk.run(5)
    assert desk.answer(poll).names == ["last"]  # type: ignore[union-attr]


def test_an_entry_offered_to_one_line_in_vain_comes_in_another() -> None:
    desk = Desk()
    desk.lead()
    polls = [desk.poll(tags=["a"]), desk.poll(tags=["b"])]
    desk.refuse_with = OutcomeUnknown("the grant may be committed")
    desk.publish("m", tags=["a", "b"])
    desk.until(lambda: bool(desk.received))
    desk.refuse_with = None
    (other,) = (poll for poll in polls if desk.answer(poll) is None)
    desk.run(1_000)
    assert desk.answer(other).names == ["m"]  # type: ignore[union-attr]
    assert desk.delivery.sweeper_found == 0


def test_a_line_goes_when_nobody_asks_any_more() -> None:
    desk = Desk()
    desk.lead()
    desk.publish("x", tags=["b"])
    desk.poll(tags=["a"], wait=1_000)
    desk.run(2_000)
    topic = desk.core.windows.topic(0)
    assert set(topic.filtered) == {Filter(["a"], [])}
    desk.poll(tags=["c"], wait=1_000)
    desk.run(30_000)
    desk.publish("y")
    assert set(topic.filtered) == {Filter(["a"], []), Filter(["c"], [])}
    desk.run(40_000)
    desk.publish("z")
    desk.run(10)
    assert topic.plain
    assert desk.core.windows.size == 3


def test_filters_have_a_limit_and_room_is_made_of_idle_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hadelay.handout.waiting.TOPIC_FILTERS", 3)
    monkeypatch.setattr("hadelay.handout.waiting.MAX_FILTERS", 5)
    desk = Desk()
    desk.lead()
    desk.publish("a")
    desk.poll(tags=["idle"], wait=10)
    desk.run(20)
    waiting = [desk.poll(tags=[f"t{n}"]) for n in range(3)]
    one_more, the_same = desk.poll(tags=["t3"]), desk.poll(tags=["t2"])
    assert isinstance(desk.answer(one_more).error, LimitReached)  # type: ignore[union-attr]
    assert all(desk.answer(poll) is None for poll in (*waiting, the_same))
    others = [desk.poll("u", tags=[f"t{n}"]) for n in range(2)]
    too_many = desk.poll("w", tags=["t0"])
    assert isinstance(desk.answer(too_many).error, LimitReached)  # type: ignore[union-attr]
    assert all(desk.answer(poll) is None for poll in others)
    assert desk.core.turns.throttled["filters"] == 2
    desk.publish("b", tags=["t1"])
    desk.run(5)
    assert desk.answer(waiting[1]).names == ["b"]  # type: ignore[union-attr]


def test_a_record_that_cannot_be_read_is_reported_and_comes_when_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    desk.lead()
    record, broken = desk.store.record, True

    def read(hour: int, offset: int, size: int, *, verify: bool = False) -> bytes:
        if broken and verify:
            raise DamagedFile("x.log", offset, "damaged", size=size)
        return bytes(record(hour, offset, size, verify=verify))

    monkeypatch.setattr(desk.store, "record", read)
    poll = desk.poll(tags=["a"])
    desk.publish("m", tags=["a"])
    desk.run(100)
    assert desk.answer(poll) is None
    assert [(hour, index) for hour, index, _ in desk.damage] == [(0, 0)]
    broken = False
    desk.delivery.repaired(START_HOUR)
    desk.run(10)
    assert desk.answer(poll).names == ["m"]  # type: ignore[union-attr]


def test_only_those_that_match_pass_the_record() -> None:
    """One bit pattern may stand for many tags: with sixteen per message the mask says perhaps often."""
    desk = Desk(checking=False)
    desk.lead()
    for n in range(60):
        desk.publish(f"m{n}", tags=[f"tag-{n}-{k}" for k in range(16)])
    poll = desk.poll(tags=["tag-7-3"], max=100)
    desk.run(20)
    assert desk.answer(poll).names == ["m7"]  # type: ignore[union-attr]
    matcher = desk.core.matcher
    assert matcher.checked == matcher.false_positives + 1


#: So many tags that their mask has all bits: messages with them pass the mask of every filter.
MANY = [f"other{n}" for n in range(200)]


def test_messages_that_only_seem_to_match_are_read_in_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages with many tags pass the masks of filters that they do not match: a window full of them held the loop."""
    monkeypatch.setattr("hadelay.handout.matching._READS", 100)
    assert mask_of(MANY) == (1 << 64) - 1
    desk = Desk(checking=False)
    desk.lead()
    desk.publish_many(1_000, tags=MANY)
    desk.publish("wanted", tags=["mine"])
    matcher, reads = desk.core.matcher, [0]
    match = matcher.match

    def counted(room: int, now_ms: int) -> list[Offer]:
        before = matcher.checked
        offers = match(room, now_ms)
        reads.append(matcher.checked - before)
        return offers

    monkeypatch.setattr(matcher, "match", counted)
    poll = desk.poll(tags=["mine"])
    desk.run(20)
    assert desk.answer(poll).names == ["wanted"]  # type: ignore[union-attr]
    assert sum(reads) == 1_001
    assert max(reads) <= 100
    desk.consume()
    desk.run(100)
    assert len(desk.delivered()) == 1_001


def test_a_poll_without_a_filter_does_not_wait_for_those_that_read_many_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The filtered topics take turns: each comes to its message in the end."""
    monkeypatch.setattr("hadelay.handout.matching._READS", 100)
    desk = Desk(checking=False, commit_ms=50)
    desk.lead()
    due = desk.now + 3_000
    for topic in "abcde":
        desk.publish("wanted", topic=topic, at=due, tags=["mine"])
        desk.publish_many(500, topic=topic, at=due, tags=MANY)
    desk.publish("plain", topic="plain", at=due)
    polls = [desk.poll(topic, tags=["mine"]) for topic in "abcde"]
    plain = desk.poll("plain")
    desk.run_to(due + 400)
    answer = desk.answer(plain)
    assert answer is not None
    assert answer.at - due <= desk.commit_ms
    assert [desk.answer(poll).names for poll in polls] == [["wanted"]] * 5  # type: ignore[union-attr]


def test_the_sweeper_counts_the_records_that_it_reads() -> None:
    desk = Desk(checking=False)
    desk.lead()
    desk.publish_many(1_000, tags=MANY)
    for n in range(8):
        desk.poll(tags=[f"mine{n}"])
    desk.run(3_000)
    desk.publish("last")  # a turn of the loop, after which the sweeper looks at the others
    desk.run(10)
    owed, reads = desk.core.scans._owed, [0]
    passes = owed.passes

    def counted(*args: Any) -> bool:
        reads[-1] += 1
        return passes(*args)

    owed.passes = counted  # type: ignore[method-assign]
    while not desk.core.scans.sweep():
        reads.append(0)
    assert sum(reads) == 8_000
    assert max(reads) <= 1_000
