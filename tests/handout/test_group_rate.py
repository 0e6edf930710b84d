"""group_rate: hand-outs of one group are an interval apart, whatever commits, leaders and windows do."""

from __future__ import annotations

import itertools

import pytest

from hadelay.errors import NoLeader, OutcomeUnknown
from hadelay.raft.ports import Done
from tests.handout.desk import Desk


def desk(rate: float | None = 1, limit: int = 1, **how: float) -> Desk:
    made = Desk(**({"commit_ms": 2} | how))  # type: ignore[arg-type]
    made.put(group_concurrency=limit, max_attempts=100, group_rate=rate)
    made.lead()
    return made


def gaps(of: Desk, group: str) -> list[int]:
    """Times between the hand-outs of a group, whose messages have names that begin with its name."""
    times = [r.at for r in of.received for name in r.names if name.startswith(group)]
    return [round(b - a) for a, b in itertools.pairwise(times)]


@pytest.mark.parametrize("limit", [1, 3])
def test_a_group_gets_one_message_per_interval_and_others_do_not_wait(limit: int) -> None:
    d = desk(limit=limit)
    d.run_to(2_000)  # the first interval of a leader is over
    d.consume(max=1)
    d.publish("a1", "a2", "a3", "a4", group="a")
    d.publish("b1", group="b")
    d.publish("free1", "free2", "free3")
    d.run(500)
    assert d.delivered() == ["a1", "b1", "free1", "free2", "free3"]
    d.run(3_000)
    assert d.delivered()[5:] == ["a2", "a3", "a4"]
    assert all(1_000 <= gap <= 1_010 for gap in gaps(d, "a"))
    assert d.delivery.sweeper_found == 0


def test_a_group_that_was_quiet_gets_its_next_message_at_once_and_no_burst() -> None:
    d = desk(limit=3)
    d.consume()
    d.run_to(60_000)
    d.publish("a1", "a2", group="a")
    d.run(10)
    assert d.delivered() == ["a1"]


def test_messages_due_later_are_handed_out_when_due() -> None:
    d = desk(rate=10)
    d.consume()
    for n in range(5):
        d.publish(f"a{n}", at=3_000 + 100 * n, group="a")
    d.run_to(5_000)
    assert all(100 <= gap <= 104 for gap in gaps(d, "a"))
    assert next(r.at for r in d.received if r.names) == pytest.approx(3_000, abs=3)


@pytest.mark.parametrize("rate", [100, 30])
def test_an_interval_is_never_a_part_of_a_millisecond_short(rate: int) -> None:
    """Hand-outs at any part of a millisecond, while times are whole milliseconds of cluster time. The leader has a turn
    every 0.37 ms, and commits take no time: rounded timers and commits would hide an interval that is too short."""
    d = desk(rate=rate, commit_ms=0)
    d.checking = False
    d.run_to(2_000)
    d.consume(max=1)
    for n in range(25):
        d.publish(f"a{n}", f"b{n}", group="a")
        end = d.now + 2_040 / rate + 3
        while d.now < end:
            d.delivery.cancel_poll(d.poll("other"))
            d.run(0.37)
    times = [r.at for r in d.received if r.names]
    assert len(times) == 50
    assert min(b - a for a, b in itertools.pairwise(times)) >= 1_000 / rate - 1e-6


def test_a_new_leader_begins_with_empty_buckets() -> None:
    d = desk(rate=0.5)
    d.run_to(3_000)
    d.publish("a1", "a2", group="a")
    d.consume()
    d.run(10)
    assert d.delivered() == ["a1"]
    d.depose()
    d.new_leader()
    d.consume()
    began = d.now
    d.run(4_000)
    assert d.delivered() == ["a1", "a2"]
    assert d.received[-1].at >= began + 2_000
    assert d.core.turns.throttled["group_rate"] == 1


def test_the_interval_counts_from_the_hand_out_not_from_the_offer() -> None:
    """Commits that take longer than the interval do not bring two hand-outs together."""
    d = desk(rate=5, limit=3, commit_ms=2)
    d.run_to(1_000)
    d.publish(*(f"a{n}" for n in range(6)), group="a")
    d.stuck = True
    for _ in range(6):
        d.poll(max=1)
    d.run(700)
    d.unstick()
    d.run(3_000)
    assert len(d.delivered()) == 3  # the concurrency
    assert all(gap >= 200 for gap in gaps(d, "a"))


def test_a_token_of_a_refused_offer_is_not_lost() -> None:
    d = desk(rate=0.1)
    d.run_to(11_000)
    d.publish("a1", group="a")
    d.refuse_with = NoLeader("not now", retry_after_ms=1)
    d.consume()
    d.run(100)
    d.refuse_with = None
    d.run(200)
    assert d.delivered() in ([], ["a1"])
    d.run(10_100)
    assert d.delivered() == ["a1"]


@pytest.mark.parametrize("committed", [True, False])
def test_a_hand_out_whose_outcome_is_unknown_may_have_used_the_token(committed: bool) -> None:
    """The grant may be committed late, and its consumer gets the message by a repeated request: the next message of the
    group waits for its interval all the same."""
    d = desk(rate=0.5, limit=3)
    d.run_to(3_000)
    d.publish("a1", "a2", group="a")
    grants = d.delivery._grants
    assert grants is not None
    propose, late = grants.term._propose, list[bytes]()

    def unknown(command: bytes, done: Done) -> None:
        late.append(command)
        d.runtime.call_soon(done, None, OutcomeUnknown("no majority answered in time"))

    grants.term._propose = unknown
    d.poll(max=1, consumer="x", request=b"1")
    d.until(lambda: bool(late))
    offered = d.now
    grants.term._propose = propose
    d.run(1)
    if committed:
        d.do(late[0])
    d.consume()
    d.run(1_900)
    assert d.delivered() == []
    d.run(200)
    first = ["a2"] if committed else ["a1"]
    assert d.delivered() == first
    assert d.received[-1].at >= offered + 2_000 if d.received[-1].names else True
    if committed:
        d.poll(max=1, consumer="x", request=b"1")
        d.run(10)
        assert d.delivered() == ["a2", "a1"]


def test_a_retry_needs_a_token_too() -> None:
    d = desk()
    d.run_to(2_000)
    d.publish("a1", group="a")
    first = d.poll(max=1)
    d.run(10)
    received = d.answer(first)
    assert received is not None
    d.nack(received, delay=0)
    d.consume()
    d.run(2_000)
    assert all(1_000 <= gap <= 1_010 for gap in gaps(d, "a"))
    assert d.delivered() == ["a1", "a1"]


def test_a_full_heap_stops_the_topic_until_the_first_token() -> None:
    d = desk(rate=2, limit=4, window=8)
    d.run_to(2_000)
    for n in range(12):
        d.publish(f"g{n:02}a", f"g{n:02}b", group=f"g{n:02}")
    d.publish("free")
    d.consume(max=3)
    d.run(5_000)
    assert len(d.delivered()) == 25
    assert len(set(d.delivered())) == 25
    assert d.core.turns.throttled["group_rate"] >= 1
    for n in range(12):
        assert all(gap >= 500 for gap in gaps(d, f"g{n:02}"))
    d.run(15_000)
    assert (d.core.windows.size, d.core.matcher.rests.size, d.core.windows.in_flight) == (0, 0, {})
    assert d.delivery.sweeper_found == 0


@pytest.mark.parametrize("rate", [None, 100])
def test_another_rate_holds_at_once(rate: float | None) -> None:
    d = desk(rate=0.01)
    d.run_to(101_000)
    d.publish("a1", "a2", "a3", group="a")
    d.consume()
    d.run(100)
    assert d.delivered() == ["a1"]
    d.put(group_rate=rate)
    d.run(500)
    assert d.delivered() == ["a1", "a2", "a3"]
    assert rate is None or min(gaps(d, "a")) >= 10


def test_a_message_that_rests_can_be_cancelled_moved_and_purged() -> None:
    d = desk(rate=0.1, limit=5)
    d.run_to(11_000)
    d.publish("a1", "a2", "a3", "a4", group="a")
    d.consume()
    d.run(100)
    d.cancel("a2")
    d.reschedule("a3", 60_000)
    d.run(25_000)
    assert d.delivered() == ["a1", "a4"]
    d.run(60_000)
    assert d.delivered() == ["a1", "a4", "a3"]
    assert d.delivery.ready_counts() == {}
