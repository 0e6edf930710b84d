"""Several messages of one group in one answer, where a topic hands out one message of a group at a time."""

from __future__ import annotations

import pytest

from chaos.sim import groupcheck
from hadelay.codec import commands
from tests.handout.desk import Desk, Received


def desk(**config: float) -> Desk:
    made = Desk(commit_ms=2)
    made.lead()
    made.put(group_concurrency=1, max_attempts=100, **config)
    return made


def line(of: Desk, *names: str, group: str = "g", at: int = 0) -> None:
    for name in names:
        of.publish(name, group=group, at=at)


def take(of: Desk, **how: int) -> Received:
    """What a receive gets at once."""
    poll = of.poll(**{"max": 10, "group_max": 10, "wait": 100} | how)  # type: ignore[arg-type]
    of.run(200)
    received = of.answer(poll)
    assert received is not None
    groupcheck.check(of.ledger)
    return received


def test_one_answer_has_the_first_messages_of_a_group_in_order() -> None:
    d = desk()
    line(d, *"abcdef")
    line(d, *"xy", group="h")
    d.publish("free")
    d.run(20)
    first = take(d, max=6, group_max=3)
    assert first.names == ["a", "x", "free", "b", "c", "y"], "heads of groups go before second messages"
    assert take(d).names == []
    d.ack(first, "a", "c", "x", "y", "free")
    assert take(d).names == []
    d.ack(first, "b")
    assert take(d).names == ["d", "e", "f"]
    assert d.delivery.sweeper_found == 0
    assert d.delivery.ready_counts() == {}


def test_a_receive_that_does_not_ask_for_it_gets_one() -> None:
    d = desk()
    line(d, *"abc")
    d.run(20)
    assert take(d, group_max=1).names == ["a"]
    line(d, *"xyz", group="h")
    assert take(d, max=1).names == ["x"], "an answer that is full has no room for the next of the group"


def test_a_receive_with_a_filter_gets_no_runs() -> None:
    """Nodes refuse such a receive; one that waits while group_concurrency changes gets what it asked for."""
    d = desk()
    for name, tag in (("a", "red"), ("b", "blue"), ("c", "red")):
        d.publish(name, group="g", tags=[tag])
    d.run(20)
    assert take(d, tags=["red"]).names == ["a"]  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["nack", "expire"])
def test_later_messages_keep_the_group_until_they_are_settled(how: str) -> None:
    """SQS does the same. The failed message goes first again, with those behind it that failed, too."""
    d = desk(backoff=[0])
    line(d, *"abcd")
    d.run(20)
    first = take(d, lease=2_000)
    assert first.names == [*"abcd"]
    d.ack(first, "b")
    if how == "nack":
        d.nack(first, "a")
        assert take(d).names == []
        d.nack(first, "c")
    else:
        d.extend(first, 60_000, "d")
        d.run(3_000)
        assert take(d).names == []
    assert d.ack(first, "d") == [0]
    line(d, "e")
    assert take(d).names == ["a", "c", "e"]


def test_a_group_waits_for_the_backoff_of_its_first_message() -> None:
    d = desk(backoff=[5_000])
    line(d, *"abc")
    d.run(20)
    first = take(d)
    d.nack(first, "a", "b")
    d.ack(first, "c")
    assert take(d).names == []
    d.run(5_000)
    assert take(d).names == ["a", "b"]


def test_messages_of_later_due_times_wait_for_theirs() -> None:
    d = desk()
    line(d, "a", "b")
    line(d, "c", at=60_000)
    line(d, "z", at=70_000)
    d.run(20)
    first = take(d, lease=100_000)
    assert first.names == ["a", "b"]
    d.run_to(61_000)
    assert take(d).names == []
    d.ack(first)
    assert take(d).names == ["c"]


def test_limits_of_the_topic_count_every_message() -> None:
    d = desk(concurrency=3)
    line(d, *"abcdef")
    d.run(20)
    first = take(d)
    assert first.names == [*"abc"]
    d.ack(first)
    assert take(d).names == [*"def"]
    paced = desk(group_rate=1)
    line(paced, *"ab")
    paced.run(2_000)
    assert take(paced).names == ["a"], "a group's rate counts each message"


def test_a_head_that_is_cancelled_between_offer_and_grant_leaves_the_next_ones_in_order() -> None:
    d = desk()
    line(d, *"abcd")
    d.run(20)
    d.stuck = True
    poll = d.poll(max=10, group_max=4)
    d.run(10)
    assert [len(offer.entries) for offer in d.offers()] == [4]
    d.cancel("a", "c")
    d.unstick()
    d.run(100)
    groupcheck.check(d.ledger)
    received = d.answer(poll)
    assert received is not None
    assert received.names == ["b", "d"]


def test_the_same_request_gets_the_same_messages_from_a_new_leader() -> None:
    d = desk()
    line(d, *"abcd")
    d.run(20)
    first = take(d, group_max=3, consumer="c", request=b"r")  # type: ignore[arg-type]
    d.ack(first, "a")
    d.depose()
    d.new_leader()
    d.run(20)
    again = take(d, group_max=3, consumer="c", request=b"r")  # type: ignore[arg-type]
    assert again.names == ["b", "c"]
    assert take(d).names == []
    d.ack(again)
    assert take(d).names == ["d"]


def test_a_purge_ends_a_run() -> None:
    d = desk()
    line(d, *"abcd")
    d.run(20)
    first = take(d, group_max=2)
    d.do(commands.encode_purge("t", 3))
    line(d, "new")
    assert take(d).names == ["new"]
    d.nack(first)
    assert take(d).names == []
