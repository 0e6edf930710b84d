"""What does not fit into a window is found again: nothing forgotten, nothing twice, and no memory for it."""

from __future__ import annotations

from typing import Any

import pytest

from hadelay.codec.commands import encode_maintain, encode_purge, encode_topic_delete
from hadelay.codec.commandtypes import Job
from hadelay.handout import scans
from hadelay.ledger.topics.topicchanges import READY, SCHEDULED
from hadelay.model import HOUR_MS
from tests.handout.desk import START_HOUR, Desk


@pytest.fixture(params=[8_192, 64])
def small_slices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scans, "SLICE", request.param)
    monkeypatch.setattr("hadelay.handout.preload.SLICE", request.param)


def window(desk: Desk) -> int:
    core = desk.core
    return max(
        (len(window.entries) for topic in core.windows.by_number.values() for window in topic.windows()), default=0
    )


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("sync", ["commit", "interval"])
def test_more_overdue_than_the_window_holds(sync: str) -> None:
    desk = Desk(window=100, sync=sync, checking=False)
    desk.lead()
    ids = desk.publish_many(3_000, at=500, spread_ms=6_000)
    desk.run_to(7_000)
    assert window(desk) == 100
    assert desk.delivery.ready_counts()[0][0] == 3_000
    desk.consume(max=17)
    desk.run(3_000)
    came = desk.delivered()
    assert sorted(came) == sorted(desk.name_of(i) for i in ids)
    assert desk.delivery.ready_counts() == {}
    assert desk.delivery.sweeper_found == 0


@pytest.mark.parametrize("window", [3, 10, 40])
def test_a_message_that_comes_late_to_a_second_that_is_being_scanned(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window is full, and the scan has passed the end of the second's chain: the message needs another scan."""
    monkeypatch.setattr(scans, "SLICE", 1)
    monkeypatch.setattr("hadelay.handout.scans._SECOND_COST", 1)
    desk = Desk(window=window, checking=False)
    desk.lead()
    ids = desk.publish_many(60, at=500)
    desk.run_to(600)
    for _ in range(12):
        desk.poll(max=4)
        for _ in range(4):
            desk.run(0.4)
            ids += desk.publish_many(1, at=desk.now)
    desk.consume(max=4)
    desk.run(1_000)
    assert sorted(desk.delivered()) == sorted(desk.name_of(i) for i in ids)
    assert desk.delivery.sweeper_found == 0


@pytest.mark.parametrize("events", range(6, 18))
def test_a_message_that_comes_late_during_the_last_scan_of_its_second(
    events: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scan finds all other messages of the second, and has room for them: only the note that one came meanwhile
    leads to another scan. Without the note, the sweeper would have to find the message."""
    monkeypatch.setattr(scans, "SLICE", 1)
    monkeypatch.setattr("hadelay.handout.scans._SECOND_COST", 1)
    desk = Desk(window=10, checking=False)
    desk.lead()
    ids = desk.publish_many(15, at=500)
    desk.run_to(600)
    (queue,) = desk.core.windows.by_name["t"].queues()
    desk.poll(max=9)
    desk.until(lambda: queue.now.scanning)
    begun = desk.world.events
    desk.until(lambda: desk.world.events >= begun + events)
    late = desk.publish_many(1, at=desk.now)
    desk.consume(max=4)
    desk.run(2_000)
    assert sorted(desk.delivered()) == sorted(map(desk.name_of, ids + late))
    assert desk.core.scans.swept == 0


@pytest.mark.usefixtures("small_slices")
def test_a_window_that_runs_over_while_it_is_drained() -> None:
    desk = Desk(window=50, checking=False)
    desk.lead()
    desk.consume(max=5)
    ids: list[int] = []
    for _ in range(60):
        ids += desk.publish_many(40, at=desk.now)
        ids += desk.publish_many(20, at=desk.now, spread_ms=700)
        desk.run(50)
    desk.run(10_000)
    assert sorted(desk.delivered()) == sorted(desk.name_of(i) for i in ids)
    assert desk.delivery.sweeper_found == 0


@pytest.mark.usefixtures("small_slices")
def test_one_second_with_more_than_fits_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hadelay.handout.preload.PRELOAD_ROWS", 200)
    desk = Desk(window=100, checking=False)
    desk.lead()
    ids = desk.publish_many(1_500, at=15_000, spread_ms=900)
    others = desk.publish_many(10, topic="small", at=15_950)
    desk.run_to(14_900)
    desk.consume(max=50)
    desk.consume("small")
    desk.run_to(25_000)
    assert sorted(desk.delivered()) == sorted(desk.name_of(i) for i in [*ids, *others])
    assert not [r for r in desk.received if r.at < 15_000 and r.names]


@pytest.mark.usefixtures("small_slices")
def test_a_large_backlog_is_found_after_a_take_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scans, "_CATCH_UP_ROWS", 150)
    desk = Desk(window=100, checking=False)
    desk.lead()
    ids = desk.publish_many(2_000, topic="a", at=500, spread_ms=3_000)
    ids += desk.publish_many(1_000, topic="b", at=500, spread_ms=3_000)
    desk.run_to(5_000)
    desk.depose()
    desk.new_leader()
    desk.run(500)
    counts = {number: count for number, (count, _) in desk.delivery.ready_counts().items()}
    assert counts == {0: 2_000, 1: 1_000}
    assert window(desk) <= 100
    desk.consume("a", max=20)
    desk.consume("b", max=20)
    desk.run(2_000)
    assert sorted(desk.delivered()) == sorted(desk.name_of(i) for i in ids)
    assert desk.delivery.sweeper_found == 0


def test_a_deleted_topic_with_a_backlog() -> None:
    desk = Desk(window=100, checking=False)
    desk.lead()
    desk.publish_many(1_000, at=100)
    desk.run_to(1_500)
    desk.do(encode_topic_delete("t", force=True))
    desk.publish("new")
    desk.consume()
    desk.run(3_000)
    assert desk.delivered() == ["new"]


@pytest.mark.parametrize("limit", [{"paused": True}, {"concurrency": 1}])
def test_a_question_for_the_oldest_leaves_no_poll_without_messages(limit: dict[str, Any]) -> None:
    """The question drops messages that are gone. Here they were all of the window, and others were left on disk."""
    desk = Desk(window=10)
    desk.lead()
    desk.publish("held")
    first = desk.poll(max=1)
    desk.run(10)
    desk.put(**limit)
    gone = [f"gone{n}" for n in range(10)]
    desk.publish(*gone)
    desk.publish("left")
    poll = desk.poll()
    desk.run(10)
    desk.cancel(*gone)
    assert desk.delivery.ready_counts()[0][0] == 1
    desk.run(10)
    assert desk.answer(poll) is None
    received = desk.answer(first)
    assert received is not None
    if "paused" in limit:
        desk.put(paused=None)
    else:
        desk.ack(received)
    desk.run(50)
    assert desk.answer(poll).names == ["left"]  # type: ignore[union-attr]


def test_a_purge_leaves_nothing_of_a_loaded_second_in_memory() -> None:
    """Each purge left the emptied seconds behind, and every turn of the loop looked at all of them."""
    desk = Desk()
    desk.lead()
    for n in range(5):
        desk.publish_many(20, at=desk.now + 5_000, spread_ms=4_000)
        desk.run(20)
        assert desk.core._preload._seconds
        desk.do(encode_purge("t", SCHEDULED | READY) if n % 2 else encode_topic_delete("t", force=True))
        desk.run(20)
        assert not desk.core._preload._seconds
    desk.publish("new", at=desk.now + 5_000)
    desk.consume()
    desk.run(10_000)
    assert desk.delivered() == ["new"]


@pytest.mark.parametrize("when", [1_000, 5_300])
def test_a_purge_beside_messages_that_found_no_room(monkeypatch: pytest.MonkeyPatch, when: int) -> None:
    """All of the second's messages in memory are purged, and only then are the others left to a scan."""
    monkeypatch.setattr("hadelay.handout.preload.PRELOAD_ROWS", 10)
    desk = Desk()
    desk.lead()
    desk.publish_many(15, topic="purged", at=5_500)
    names = [f"m{n}" for n in range(5)]
    desk.publish(*names, at=5_900)
    desk.publish("soon", at=5_100, topic="purged")
    desk.run_to(when)
    desk.do(encode_purge("purged", SCHEDULED | READY))
    desk.consume()
    desk.run_to(6_100)
    assert desk.delivered() == names
    desk.run_to(30_000)
    assert desk.delivery.ready_counts() == {}
    assert desk.delivery.sweeper_found == 0


def test_the_sweeper_finds_what_a_bug_forgot(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk()
    desk.lead()
    desk.publish("a", "b", "c", at=1_000)
    desk.run_to(2_000)
    core = desk.core
    core.windows.topic(0).any.now.entries.clear()  # the bug
    core.windows.size = 0
    core.windows.ready_counts.clear()
    poll = desk.poll()
    desk.run_to(9_000)
    assert desk.answer(poll) is None
    desk.run_to(31_000)
    assert desk.answer(poll).names == ["a", "b", "c"]  # type: ignore[union-attr]
    assert desk.delivery.sweeper_found == 3
    assert "messages_forgotten" in caplog.text


@pytest.mark.usefixtures("small_slices")
def test_the_sweeper_finds_nothing_else() -> None:
    desk = Desk(window=100, sweep_ms=50, checking=False)
    desk.lead()
    desk.publish_many(500, topic="nobody", at=100, spread_ms=5_000)
    ids = desk.publish_many(600, topic="slow", at=100, spread_ms=5_000)
    desk.consume("slow", max=3)
    for step in range(20):
        desk.run_to(step * 400)
        ids += desk.publish_many(10, topic="slow", at=desk.now)
    desk.run(5_000)
    assert len(desk.delivered()) == len(ids)
    assert desk.delivery.sweeper_found == 0


def test_many_topics_are_swept_in_slices_and_what_is_taken_meanwhile_is_not_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scans, "SLICE", 1_000)
    desk = Desk(sweep_ms=3_600_000)
    desk.lead()
    topics = [f"t{n}" for n in range(100)]
    for topic in topics:
        desk.publish(f"first of {topic}", f"other of {topic}", topic=topic, at=1_000)
    desk.publish("later", topic="later", at=5_000)
    desk.run_to(6_000)
    core = desk.core
    core.windows.topic(99).any.now.entries.pop()  # a bug
    core.windows.size -= 1
    assert not core.scans.sweep()
    for topic in topics[50:]:
        desk.consume(topic, max=1)
    desk.run(1_000)
    steps = 1
    while not core.scans.sweep():
        steps += 1
    assert steps > 5
    assert core.scans.swept == 1


def test_an_hour_is_retired_while_the_sweeper_is_in_the_middle_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scans, "SLICE", 64)
    desk = Desk(sweep_ms=24 * HOUR_MS)
    desk.lead()
    names = [f"m{n}" for n in range(200)]
    desk.publish(*names, at=1_000)
    desk.publish("later", at=3 * HOUR_MS)
    desk.run_to(3 * HOUR_MS + 1_000)
    assert not desk.core.scans.sweep()
    desk.cancel(*names)
    assert desk.do(encode_maintain(Job.RETIRE, START_HOUR)).done
    while not desk.core.scans.sweep():
        pass
    assert desk.delivery.sweeper_found == 0
    assert desk.damage == []


def test_a_slow_topic_holds_up_nobody() -> None:
    desk = Desk(window=100, checking=False)
    desk.lead()
    desk.publish_many(20_000, topic="nobody", at=100, spread_ms=3_000)
    for n in range(100):
        desk.publish(f"m{n}", at=200 + n * 30)
    desk.consume()
    desk.run_to(4_000)
    late = [r.at - (200 + 30 * int(name[1:])) for r in desk.received for name in r.names]
    assert len(late) == 100
    assert max(late) < 10


def test_topics_take_turns_by_messages_and_bytes() -> None:
    """A consumer of all topics gets as many bytes of each while all have something."""
    desk = Desk(checking=False, commit_ms=1)
    desk.lead()
    for _ in range(150):
        desk.publish(*("x" * 10), topic="small", at=1_000, body=bytes(100))
        desk.publish("large", topic="large", at=1_000, body=bytes(100_000))
    desk.run_to(2_000)
    for _ in range(40):
        desk.poll("small", "large", max=10)
    desk.run(10)
    small = sum(1 for name in desk.delivered() if name == "x")
    large = desk.delivered().count("large")
    assert large
    assert small >= large


def test_an_answer_has_a_limit_in_bytes() -> None:
    desk = Desk(checking=False)
    desk.lead()
    for n in range(12):
        desk.publish(f"m{n}", at=1_000, body=bytes(1 << 20))
    desk.run_to(1_500)
    for _ in range(5):
        desk.poll(max=100)
        desk.run(10)
    assert [len(r.names) for r in desk.received] == [3, 3, 3, 3]
    assert desk.delivered() == [f"m{n}" for n in range(12)]


def test_a_poll_of_several_topics_is_filled_from_all() -> None:
    desk = Desk()
    desk.lead()
    desk.publish("a", topic="a", at=100)
    desk.publish("b1", "b2", topic="b", at=100)
    desk.publish("c", topic="c", at=100)
    desk.run_to(200)
    poll = desk.poll("b", "a", "none", "c", max=3)
    desk.run(10)
    assert len(desk.answer(poll).names) == 3  # type: ignore[union-attr]
    assert len(set(desk.delivered())) == 3


def test_a_poll_takes_topics_in_the_order_of_its_list() -> None:
    """Priorities by topic: no turns, and a later topic fills only the rest of the answer."""
    desk = Desk()
    desk.lead()
    for n in range(3):
        desk.publish(f"low{n}", topic="low", at=100 + n)
        desk.publish(f"high{n}", topic="high", at=500 + n)
    desk.run_to(1_000)
    polls = [desk.poll("high", "none", "low", max=2, listed=True)]
    desk.run(10)
    polls.append(desk.poll("high", "low", max=3, listed=True))
    desk.run(10)
    polls.append(desk.poll("low", "high", max=2))
    desk.run(10)
    answers = [desk.answer(poll) for poll in polls]
    assert [sorted(answer.names) for answer in answers if answer is not None] == [
        ["high0", "high1"], ["high2", "low0", "low1"], ["low2"],
    ]  # fmt: skip


def test_a_listed_poll_waits_for_all_of_its_topics() -> None:
    desk = Desk()
    desk.lead()
    poll = desk.poll("high", "low", listed=True)
    desk.publish("low", topic="low", at=100)
    desk.run_to(300)
    answer = desk.answer(poll)
    assert answer is not None
    assert answer.names == ["low"]


def test_many_topics_share_a_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hadelay.handout.windows.TOTAL", 300)
    monkeypatch.setattr("hadelay.handout.windows.SMALL_WINDOW", 20)
    desk = Desk(window=100, checking=False)
    desk.lead()
    ids: list[int] = []
    for topic in range(30):
        ids += desk.publish_many(60, topic=f"t{topic}", at=1_000)
    desk.run_to(2_500)
    core = desk.core
    assert core.windows.size <= 300 + 60
    for topic in range(30):
        desk.consume(f"t{topic}", max=7)
    desk.run(3_000)
    assert len(set(desk.delivered())) == len(desk.delivered()) == len(ids)
    assert core.windows.size == 0


def test_topics_take_turns_when_only_one_poll_comes_at_a_time() -> None:
    """Consumers that can't keep up with several topics: nobody waits, and still no topic is left to the end."""
    desk = Desk()
    desk.lead()
    topics = ("a", "b", "c")
    for topic in topics:
        desk.publish_many(60, at=100, spread_ms=1, topic=topic)
    desk.run_to(1_000)
    served = []
    for _ in range(6):
        poll = desk.poll(*topics, max=20)
        desk.run(20)
        answer = desk.answer(poll)
        assert answer is not None
        assert answer.delivery is not None
        served.append(sorted({desk.ledger.topics[n].name for n in answer.delivery.rows["topic"].tolist()}))
    assert served == [["a"], ["b"], ["c"]] * 2


@pytest.mark.parametrize("again_ms", [0, 400], ids=["one leader", "two leaders"])
def test_the_sweeper_recounts_the_local_index(caplog: pytest.LogCaptureFixture, again_ms: int) -> None:
    """Settled, leased, blocked and ready messages of the cursor's second are as many as its localIndex."""
    desk = Desk(sweep_ms=50)
    desk.lead()
    desk.publish(*(f"m{n}" for n in range(20)), at=1_100)
    desk.publish(*(f"late{n}" for n in range(5)), at=1_900)
    desk.cancel("late0")
    desk.poll(max=3)
    desk.run_to(1_400)
    if again_ms:
        desk.depose()
        desk.run(again_ms)
        desk.new_leader()
    counts: list[int | None] = []
    recount = desk.core.recount
    desk.core.recount = lambda: counts.append(recount()) or counts[-1]  # type: ignore[method-assign,func-returns-value]
    desk.run(80)
    assert counts[-1] == desk.core.cursor[2] == 21
    assert desk.delivery.wrong_cursors == 0
    (second,) = desk.core._preload._seconds.values()
    second.coming.pop()  # the bug
    desk.checking = False
    desk.run(100)
    assert desk.delivery.wrong_cursors > 0
    assert "local_index_wrong" in caplog.text
