"""The leader ends unused topics, and never those that consumers poll, before or behind a change of leader."""

from __future__ import annotations

import logging

import pytest

from hadelay.codec import commands
from hadelay.codec.commandtypes import Command
from hadelay.errors import Overloaded
from hadelay.ledger.topics.topicchanges import MAX_GENERATION
from tests.handout.desk import Desk

MINUTE = 60_000


def brief(*names: str) -> Desk:
    desk = Desk(checking=False)
    desk.lead()
    for name in names:
        desk.do(commands.encode_topic_put(name, {"expires_after_ms": MINUTE}))
    return desk


def exist(desk: Desk, *names: str) -> list[bool]:
    return [desk.ledger.topic(name) is not None for name in names]


def test_an_unused_topic_ends_and_a_polled_one_stays() -> None:
    desk = brief("polled", "unused", "full")
    desk.publish("a", topic="full")
    desk.consume("polled")
    desk.run_to(MINUTE)
    assert exist(desk, "polled", "unused", "full") == [True, True, True]
    desk.run_to(10 * MINUTE)
    assert exist(desk, "polled", "unused", "full") == [True, False, True]
    # Apply is told of polls now and then, and otherwise nothing is proposed.
    assert 10 < desk.kinds().count(Command.TOPIC_EXPIRY) <= 81


def test_short_polls_count_across_changes_of_leader() -> None:
    """Each leader goes before it would tell of the polls twice; the topic stays, and ends when the polls have ended."""
    desk = brief("t")
    for turn in range(1, 16):
        desk.run_to(turn * 20_000)
        desk.poll("t", wait=0)
        if turn % 3 == 0:
            desk.depose()
            desk.lead()
        assert exist(desk, "t") == [True], f"after {turn} polls"
    last = desk.now
    desk.run_to(last + MINUTE)
    assert exist(desk, "t") == [True]
    desk.run_to(last + 2 * MINUTE)
    assert exist(desk, "t") == [False]


def test_a_poll_counts_although_its_first_report_failed() -> None:
    desk = brief("t")
    desk.run_to(50_000)
    desk.poll("t", wait=0)
    desk.refuse_with = Overloaded("the log is busy")
    desk.run(6_000)
    desk.refuse_with = None
    desk.run_to(50_000 + MINUTE)
    assert exist(desk, "t") == [True], "used less than expires_after ago"
    desk.run(2 * MINUTE)
    assert exist(desk, "t") == [False]


def test_a_topic_that_has_no_life_left_stays_and_is_asked_about_now_and_then() -> None:
    desk = brief("t")
    desk.ledger.topics[0].generation = desk.ledger.topics.generations[0] = MAX_GENERATION
    desk.run_to(12 * MINUTE)
    assert exist(desk, "t") == [True]
    assert desk.kinds().count(Command.TOPIC_EXPIRY) < 12


def test_many_topics_end_in_bounded_commands(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    desk = brief(*(f"reply-{n}" for n in range(1_200)))
    desk.run_to(3 * MINUTE)
    assert not desk.ledger.topics.expiring
    assert desk.kinds().count(Command.TOPIC_EXPIRY) == 3
    reported = [record.__dict__ for record in caplog.records if record.message == "topics_expired"]
    assert sorted(record["count"] for record in reported) == [200, 500, 500]
    assert all(len(record["topics"]) == 20 for record in reported)
    since = desk.now
    desk.run(5 * MINUTE)
    assert Command.TOPIC_EXPIRY not in desk.kinds(since)
