"""What the leader does by itself for messages that fail, expire or are purged, and what the wheels make of it: nothing
is handed out that is over, nothing is forgotten, and nothing is written while nothing ends."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from hadelay.codec import commands
from hadelay.codec.commandtypes import Command
from hadelay.ledger.messages import ttl
from hadelay.ledger.topics.topicchanges import READY, SCHEDULED
from hadelay.ledger.views.describe import describe
from hadelay.ledger.views.listing import ListQuery, listing
from hadelay.model import DEAD_HOURS, FIRST, Event, State
from hadelay.settings.node import RetentionConfig
from tests.handout.desk import START_HOUR, START_MS, Desk
from tests.ledger.test_listing import drain

S, M, H = 1_000, 60_000, 3_600_000


def ready(desk: Desk, topic: str = "t") -> int:
    return desk.core.windows.ready_counts[desk.ledger.topic(topic).number]  # type: ignore[union-attr]


def nothing_forgotten(desk: Desk) -> None:
    desk.run(30 * S)
    assert desk.delivery.sweeper_found == 0


def test_retries_come_back_when_their_backoff_says_and_end_as_dead_letters() -> None:
    desk = Desk()
    desk.lead()
    desk.put(max_attempts=3, backoff=[10 * S, M])
    desk.publish("a", at=5 * S)
    times = []
    for _ in range(3):
        poll = desk.poll(wait=10 * M)
        desk.until(lambda poll=poll: desk.answer(poll) is not None, 10 * M)  # type: ignore[misc]
        received = desk.answer(poll)
        assert received is not None
        times.append(received.at)
        desk.nack(received)
    assert [round(at / S) for at in times] == [5, 15, 75]
    topic = desk.ledger.topic("t")
    assert topic is not None
    assert (topic.dead, topic.open, topic.settled[Event.DEAD]) == (1, 0, 1)
    assert desk.store.hours()[-1] > DEAD_HOURS
    nothing_forgotten(desk)


def test_no_search_passes_over_the_ttls_that_were_dropped() -> None:
    """Until the next checkpoint a deleted row costs each search that begins before it, of leaders and of lists."""
    desk = Desk(checking=False)
    desk.lead()
    desk.put(ttl_ms=20 * S)
    desk.publish(*"abcdef")
    desk.publish("g", at=H)
    desk.run_to(M)
    begun, of_table = [], desk.ledger.tables.range
    first = ttl.KEY.pack(START_MS + 20 * S, 0)

    def noted(table: bytes, start: bytes = b"", end: bytes | None = None, limit: int = 1000) -> Any:
        if table == ttl.TTL:
            begun.append(start)
        return of_table(table, start, end, limit)

    desk.ledger.tables.range = noted  # type: ignore[method-assign]
    desk.depose()
    desk.new_leader()
    desk.run(S)
    question = ListQuery(0, frozenset(State), 0, 1 << 50, 0, FIRST, 10)
    assert len(drain(listing(desk.ledger, question, START_MS + M)).rows) == 7
    assert len(begun) > 1
    assert min(begun) > first
    desk.run_to(H + M)
    (last,) = [message_id for message_id, name in desk.names.items() if name == "g"]
    assert describe(desk.ledger, last).state == "expired"  # type: ignore[union-attr]


def test_expiring_messages_are_settled_by_themselves_at_their_time_and_nobody_gets_them() -> None:
    desk = Desk()
    desk.lead()
    desk.put(ttl_ms=20 * S)
    desk.publish(*"abc", at=10 * S)
    desk.publish("d", at=H)
    desk.run_to(29 * S)
    assert ready(desk) == 3
    assert Command.TTL_EXPIRE not in desk.kinds()
    desk.run_to(31 * S)
    assert ready(desk) == 0
    assert desk.kinds().count(Command.TTL_EXPIRE) == 1
    assert desk.ledger.topic("t").settled[Event.TTL_EXPIRED] == 3  # type: ignore[union-attr]
    desk.consume()
    desk.run(10 * S)
    assert desk.delivered() == []
    nothing_forgotten(desk)


def test_nothing_is_written_for_a_ttl_that_was_not_needed() -> None:
    desk = Desk()
    desk.lead()
    desk.put(ttl_ms=20 * S)
    desk.consume()
    desk.publish(*"abc", at=10 * S)
    desk.run_to(12 * S)
    assert desk.delivered() == ["a", "b", "c"]
    before = len(desk.log)
    desk.run_to(10 * M)
    assert len(desk.log) == before
    # The rows they left are dropped when something expires, or when there are many of them.
    desk.publish_many(1_000, at=desk.now)
    desk.run(30 * S)
    assert desk.kinds().count(Command.TTL_EXPIRE) == 2
    assert len(desk.ledger.tables.range(b"ttl")) == len(desk.ledger.tables.range(b"ttlof")) == 3


def test_an_offered_message_that_expires_is_not_granted_and_not_offered_again() -> None:
    desk = Desk(commit_ms=50)
    desk.lead()
    desk.put(ttl_ms=S)
    desk.publish("a", at=5 * S)
    desk.run_to(6 * S + 10)
    assert Command.TTL_EXPIRE not in desk.kinds()
    poll = desk.poll(wait=2 * S)
    desk.run(5 * S)
    received = desk.answer(poll)
    assert received is not None
    assert received.names == []
    assert desk.kinds(5 * S).count(Command.GRANT) <= 2
    nothing_forgotten(desk)


def test_a_new_leader_expires_what_the_old_one_did_not() -> None:
    desk = Desk()
    desk.lead()
    desk.put(ttl_ms=10 * S)
    desk.publish_many(3_000, at=S, spread_ms=2_000)
    desk.run_to(8 * S)
    desk.depose()
    desk.run_to(20 * S)
    desk.new_leader()
    desk.run_to(25 * S)
    assert desk.ledger.topic("t").settled[Event.TTL_EXPIRED] == 3_000  # type: ignore[union-attr]
    assert ready(desk) == 0
    nothing_forgotten(desk)


def test_a_lease_that_outlives_the_ttl_wins_and_then_it_is_over() -> None:
    desk = Desk()
    desk.lead()
    desk.put(ttl_ms=5 * S)
    desk.publish("a", "b", at=S)
    poll = desk.poll(lease=M)
    desk.run_to(30 * S)
    received = desk.answer(poll)
    assert received is not None
    desk.ack(received, "a")
    desk.run_to(5 * M)
    topic = desk.ledger.topic("t")
    assert topic is not None
    assert (topic.settled[Event.ACKED], topic.settled[Event.TTL_EXPIRED], topic.open) == (1, 1, 0)
    nothing_forgotten(desk)


def test_a_message_given_back_just_before_its_ttl_ends_is_recorded_as_expired_too() -> None:
    """Found by seed 142919: whoever looked for what is over met it leased, and the nack was on its way."""
    desk = Desk(commit_ms=20)
    desk.lead()
    desk.put(ttl_ms=5 * S)
    desk.publish("a", at=S)
    poll = desk.poll(lease=M)
    desk.run_to(6 * S - 5)
    received = desk.answer(poll)
    assert received is not None
    desk.ask(commands.encode_nack("n1", received.leases(), -1), lambda result, error: None)
    desk.run_to(7 * S)
    topic = desk.ledger.topic("t")
    assert topic is not None
    assert (topic.settled[Event.TTL_EXPIRED], topic.open) == (1, 0)
    nothing_forgotten(desk)


@pytest.mark.parametrize("states", [READY | SCHEDULED, READY, SCHEDULED])
def test_a_purge_takes_what_was_there_and_leaves_what_comes(states: int) -> None:
    desk = Desk()
    desk.lead()
    desk.publish("due", "due too", at=S)
    desk.publish("soon", at=25 * S)
    desk.publish("later", at=2 * H)
    desk.run_to(20 * S)
    assert ready(desk) == 2
    desk.do(commands.encode_purge("t", states))
    desk.publish("new", at=20 * S)
    desk.publish("new, soon", at=26 * S)
    desk.run_to(24 * S)
    kept = ["new"] + ([] if states & READY else ["due", "due too"])
    assert ready(desk) == len(kept)
    desk.consume()
    desk.run_to(30 * S)
    kept += ["new, soon"] + ([] if states & SCHEDULED else ["soon"])
    assert sorted(desk.delivered()) == sorted(kept)
    assert desk.ledger.topic("t").open == (not states & SCHEDULED)  # type: ignore[union-attr]
    assert ready(desk) == 0
    nothing_forgotten(desk)


def test_dead_letters_are_redriven_at_their_rate_by_whoever_leads() -> None:
    desk = Desk()
    desk.lead()
    desk.put(max_attempts=1)
    desk.publish_many(40, at=S)
    poll = desk.poll(max=100)
    desk.until(lambda: desk.answer(poll) is not None)
    desk.nack(desk.answer(poll))  # type: ignore[arg-type]
    topic = desk.ledger.topic("t")
    assert topic is not None
    assert topic.dead == 40
    start = desk.now
    desk.do(commands.encode_redrive("n1", "t", [], all=True, rate=5.0))
    desk.run_to(start + 2 * S)
    assert 40 - topic.dead in (10, 11)
    desk.depose()
    desk.run(2 * S)
    desk.new_leader()
    desk.consume()
    # What was missed while nobody led is not caught up with: a receiver is not flattened.
    desk.run(500)
    assert 40 - topic.dead <= 11 + 6 + 3
    desk.run(20 * S)
    assert (topic.dead, topic.redrive) == (0, None)
    assert topic.settled[Event.ACKED] == 40
    before = len(desk.log)
    desk.run(M)
    assert len(desk.log) == before
    assert desk.delivery.sweeper_found == 0


def test_a_redrive_without_a_rate_is_quick_and_may_be_stopped() -> None:
    desk = Desk(checking=False)
    desk.lead()
    desk.put(max_attempts=1)
    for _ in range(3):
        desk.publish_many(1_000, at=desk.now)
        poll = desk.poll(max=1_000)
        desk.until(lambda poll=poll: desk.answer(poll) is not None)  # type: ignore[misc]
        desk.nack(desk.answer(poll))  # type: ignore[arg-type]
    topic = desk.ledger.topic("t")
    assert topic is not None
    assert topic.dead == 3_000
    desk.do(commands.encode_redrive("n1", "t", [], all=True))
    desk.run(2 * S)
    assert topic.dead == 0
    assert ready(desk) == 3_000


def test_hours_go_when_the_longest_retention_of_their_topics_is_over() -> None:
    desk = Desk(checking=False, retention=RetentionConfig(settled_ms=3 * H))
    desk.lead()
    desk.put("long", retention_ms=8 * H)
    desk.put("short", retention_ms=0)
    desk.publish("a", topic="long", at=S)
    desk.publish("b", topic="short", at=H + S)
    desk.publish("c", topic="plain", at=2 * H + S)
    for topic in ("long", "short", "plain"):
        desk.consume(topic)
    gone: Counter[int] = Counter()
    for hour in range(1, 14):
        desk.run_to(hour * H + 2 * M)
        for n in range(3):
            if START_HOUR + n not in desk.store.hours() and n not in gone:
                gone[n] = hour
    assert dict(gone) == {0: 9, 1: 3, 2: 6}


def test_a_dead_hour_is_dropped_when_it_is_over() -> None:
    desk = Desk(checking=False)
    desk.lead()
    desk.put(max_attempts=1, dead_retention_ms=2 * H)
    desk.publish("a", at=S)
    poll = desk.poll()
    desk.until(lambda: desk.answer(poll) is not None)
    desk.nack(desk.answer(poll))  # type: ignore[arg-type]
    desk.run_to(2 * H + 30 * M)
    assert DEAD_HOURS + START_HOUR + 2 in desk.store.hours()
    assert describe(desk.ledger, desk.id_of("a")) is not None
    desk.run_to(3 * H + M)
    assert DEAD_HOURS + START_HOUR + 2 not in desk.store.hours()
    assert describe(desk.ledger, desk.id_of("a")) is None
    assert desk.ledger.topic("t").dead == 0  # type: ignore[union-attr]
