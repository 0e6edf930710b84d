"""Hours that nobody drains are carried on, and hours that are over are forgotten, by proposals of the leader."""

from __future__ import annotations

from msgspec.structs import replace

from hadelay.codec import commands
from hadelay.codec.commands import encode_purge, encode_topic_delete
from hadelay.codec.commandtypes import Command
from hadelay.ledger.topics.topicchanges import READY, SCHEDULED
from hadelay.model import HOUR_MS, Draft
from hadelay.settings.node import RetentionConfig
from tests.handout.desk import START_HOUR, Desk

DAY = 24 * HOUR_MS


def test_messages_that_nobody_consumes_are_carried_to_the_running_hour() -> None:
    desk = Desk(checking=False, sweep_ms=30_000)
    desk.lead()
    for n in range(5):
        desk.publish(f"m{n}", at=n * 1_000)
    desk.run_to(25 * HOUR_MS - 1_000)
    assert Command.CARRY not in desk.kinds()
    desk.run_to(25 * HOUR_MS + 60_000)
    assert Command.CARRY in desk.kinds()
    assert desk.ledger.open_entries(START_HOUR) == 0
    assert desk.delivery.ready_counts()[0][0] == 5
    assert desk.delivery.sweeper_found == 0
    carried = desk.kinds().count(Command.CARRY)
    desk.run_to(26 * HOUR_MS)
    assert desk.kinds().count(Command.CARRY) == carried
    desk.consume()
    desk.run(100)
    assert sorted(desk.delivered()) == [f"m{n}" for n in range(5)]


def test_an_hour_that_owes_nothing_is_retired_after_its_retention() -> None:
    desk = Desk(checking=False)
    desk.lead()
    desk.consume()
    desk.publish("a", at=1_000)
    desk.run_to(25 * HOUR_MS - 1_000)
    assert START_HOUR in desk.store.hours()
    desk.run_to(25 * HOUR_MS + 60_000)
    assert START_HOUR not in desk.store.hours()
    assert desk.kinds().count(Command.RETIRE) == 1


def test_retention_is_configured_but_never_less_than_two_hours_past() -> None:
    desk = Desk(retention=RetentionConfig(settled_ms=2 * HOUR_MS), checking=False)
    desk.lead()
    desk.consume()
    desk.publish("a", at=1_000)
    desk.run_to(3 * HOUR_MS - 1_000)
    assert START_HOUR in desk.store.hours()
    desk.run_to(3 * HOUR_MS + 60_000)
    assert START_HOUR not in desk.store.hours()


def test_the_retention_counts_from_the_last_settlement() -> None:
    desk = Desk(retention=RetentionConfig(settled_ms=2 * HOUR_MS), checking=False)
    desk.lead()
    desk.publish("a", at=1_000)
    desk.run_to(10 * HOUR_MS)
    desk.consume()
    desk.run_to(12 * HOUR_MS - 1_000)
    assert desk.delivered() == ["a"]
    assert START_HOUR in desk.store.hours()
    desk.run_to(12 * HOUR_MS + 60_000)
    assert START_HOUR not in desk.store.hours()


def test_an_hour_stays_for_the_longest_retention_of_its_topics() -> None:
    desk = Desk(checking=False)
    desk.lead()
    kept = {"brief": 2, "long": 8, "middle": 5}
    for topic, hours in kept.items():
        desk.publish(topic, topic=topic, at=1_000)
        desk.put(topic, retention_ms=hours * HOUR_MS)
        desk.consume(topic)
    desk.run_to(9 * HOUR_MS - 1_000)
    assert sorted(desk.delivered()) == sorted(kept)
    assert START_HOUR in desk.store.hours()
    desk.run_to(9 * HOUR_MS + 60_000)
    assert START_HOUR not in desk.store.hours()


def test_a_long_lease_does_not_make_it_propose_for_ever() -> None:
    desk = Desk(checking=False, retention=RetentionConfig(carry_ms=2 * HOUR_MS))
    desk.lead()
    desk.publish("a", at=1_000)
    desk.poll(lease=12 * HOUR_MS)
    desk.run_to(4 * HOUR_MS)
    count = desk.kinds().count(Command.CARRY)
    desk.run_to(5 * HOUR_MS)
    assert desk.kinds().count(Command.CARRY) == count <= 2
    desk.run_to(14 * HOUR_MS)
    desk.consume()
    desk.run(1_000)
    assert desk.delivered() == ["a", "a"]


def test_messages_of_a_deleted_topic_are_settled() -> None:
    desk = Desk(checking=False)
    desk.lead()
    desk.publish("a", "b", at=50_000)
    desk.do(encode_topic_delete("t", force=True))
    desk.run_to(40_000)
    assert not desk.ledger.topics.to_sweep()
    assert desk.ledger.open_entries(START_HOUR) == 0


def test_a_retired_hour_in_a_window_is_no_trouble() -> None:
    desk = Desk(checking=False, retention=RetentionConfig(carry_ms=2 * HOUR_MS, settled_ms=2 * HOUR_MS))
    desk.lead()
    desk.publish("a", at=1_000)
    desk.run_to(4 * HOUR_MS)
    assert START_HOUR not in desk.store.hours()
    desk.consume()
    desk.run(1_000)
    assert desk.delivered() == ["a"]


def test_hours_go_while_somebody_purges_again_and_again() -> None:
    desk = Desk(retention=RetentionConfig(settled_ms=0), checking=False)
    desk.lead()
    desk.publish("a", at=1_000)
    desk.poll()
    desk.run_to(2_000)
    desk.ack(desk.received[0])
    for hour in range(1, 40):  # what a sweep has to go through, each time from the beginning
        desk.publish(f"far{hour}", topic="other", at=(hour + 5) * HOUR_MS)
    desk.run_to(2 * HOUR_MS - 5_000)
    for _ in range(200):
        desk.publish("b", topic="purged", at=60 * HOUR_MS)
        desk.do(encode_purge("purged", SCHEDULED | READY))
        desk.run(300)
    assert desk.ledger.topics.to_sweep()
    assert START_HOUR not in desk.store.hours()


def test_ended_periods_of_unique_keys_are_dropped_without_another_publish() -> None:
    desk = Desk()
    desk.lead()
    once = Draft("t", 0, True, 0, 0, b"", b"x", key=b"k", unique_ms=5_000)
    desk.do(commands.encode_publish("n1", [once, replace(once, key=b"l", unique_ms=HOUR_MS)]))
    desk.run_to(4_000)
    assert desk.ledger.unique_count == 2
    desk.run_to(40_000)
    assert desk.ledger.unique_count == 1
    assert desk.kinds().count(Command.TTL_EXPIRE) == 1
