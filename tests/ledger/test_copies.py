"""Copies for subscriptions where client keys, quotas, deletions, dead letters and retirement of hours meet."""

from __future__ import annotations

from typing import Any

import pytest

from hadelay.codec import commands
from hadelay.codec.commandtypes import Job
from hadelay.codec.results import CancelOutcome, RedriveOutcome, RowCode
from hadelay.model import DEAD_HOURS, HOUR_MS, REPLACE
from tests.ledger.test_subscriptions import message, subscribed
from tests.ledger.world import START_HOUR, World

#: Dead letters are kept for fewer hours.
_KEPT_H = 30 * 24


def dying(world: World, message_id: int) -> None:
    """Let a message of a topic with max_attempts 1 die."""
    world.nack(world.lease(message_id))


def redriven(world: World, topic: str, *ids: int) -> list[int]:
    return world.one(commands.encode_redrive("n1", topic, list(ids))).outcomes.tolist()


def later(world: World, hours: int) -> None:
    world.now += hours * HOUR_MS
    world.apply(commands.encode_noop())


def test_a_dead_copy_stays_dead_while_another_message_has_the_key() -> None:
    world = World()
    subscribed(world, "billing", max_attempts=1)
    first = world.ids(message(key="k"))[0]
    world.ack(world.lease(first))
    dying(world, first + 1)
    second = world.publish(message(10_000, key="k")).ids.tolist()[0]
    assert second != first, "the key was free"
    assert redriven(world, "orders~billing", first + 1) == [RedriveOutcome.KEY_TAKEN]
    world.cancel(second)
    assert redriven(world, "orders~billing", first + 1) == [RedriveOutcome.REDRIVEN]
    known = world.publish(message(key="k"))
    assert (known.ids.tolist(), known.duplicate.tolist()) == ([first], [True]), "a pending copy takes the key again"


@pytest.mark.parametrize("by_id", [True, False])
def test_one_of_two_dead_copies_with_one_key_is_redriven(by_id: bool) -> None:
    world = World()
    subscribed(world, "billing", max_attempts=1)
    dead = []
    for _ in range(2):
        published = world.ids(message(key="k"))[0]
        world.ack(world.lease(published))
        dying(world, published + 1)
        dead.append(published + 1)
        world.now += 1
    if by_id:
        assert redriven(world, "orders~billing", *dead) == [RedriveOutcome.REDRIVEN, RedriveOutcome.KEY_TAKEN]
    else:
        world.one(commands.encode_redrive("n1", "orders~billing", [], all=True))
        world.maintain(Job.REDRIVE, topic="orders~billing")
    assert world.states(*dead) == ["ready", "dead"]


def test_the_key_of_a_purged_dead_letter_is_forgotten() -> None:
    world = World()
    subscribed(world, "billing", max_attempts=1)
    for topic in ("orders", "plain"):
        world.one(commands.encode_topic_put(topic, {"max_attempts": 1}))
    first, plain = world.ids(message(key="k"), message(topic="plain", key="k"))
    for one in (first, first + 1, plain):
        dying(world, one)
    for topic in ("orders", "orders~billing", "plain"):
        world.one(commands.encode_purge(topic, 4))
    later(world, _KEPT_H + 2)
    assert world.maintain(Job.RETIRE, START_HOUR).done
    for hour in [hour for hour in world.store.hours() if hour >= DEAD_HOURS]:
        assert world.maintain(Job.DROP_DEAD, hour).done
    assert not world.tables.range(b"key")
    assert not world.tables.range(b"keyof")


def test_a_replacing_publish_needs_room_where_it_replaces_nothing() -> None:
    world = World()
    subscribed(world, "billing")
    world.one(commands.encode_topic_put("orders", {"max_messages": 1}))
    first = world.ids(message(10, key="k"))[0]
    world.now += 10
    world.ack(world.lease(first))
    other = world.ids(message(1_000))[0]
    refused = world.publish(message(1_000, key="k", mode=REPLACE))
    assert refused.codes.tolist() == [RowCode.TOO_MANY_MESSAGES], "the copy of the replaced message waits elsewhere"
    world.cancel(other)
    assert world.publish(message(1_000, key="k", mode=REPLACE)).codes.tolist() == [RowCode.OK]
    assert world.topic("orders").pending == 1


def test_a_replacing_publish_needs_no_room_where_it_replaces_a_copy() -> None:
    """Debounce: each publish replaces the one before, and a full subscription never refuses it."""
    world = World()
    subscribed(world, "billing", max_messages=1)
    for _ in range(3):
        assert world.publish(message(1_000, key="k", mode=REPLACE)).codes.tolist() == [RowCode.OK]
    again = message(1_000, key="k", mode=REPLACE)
    assert world.publish(again, again).codes.tolist() == [RowCode.OK] * 2
    assert world.publish(message(1_000)).codes.tolist() == [RowCode.SUBSCRIPTION_FULL]
    assert [world.topic(name).pending for name in ("orders", "orders~billing")] == [1, 1]


def test_a_replaced_row_of_one_batch_frees_only_the_queues_that_it_had() -> None:
    world = World()
    subscribed(world, "eu", tags=["eu"], max_messages=1)
    world.ids(message(1_000, tags=("eu",)))
    codes = world.publish(
        message(1_000, key="k", mode=REPLACE), message(1_000, tags=("eu",), key="k", mode=REPLACE)
    ).codes.tolist()
    assert codes == [RowCode.OK, RowCode.SUBSCRIPTION_FULL]
    assert world.topic("orders~eu").pending == 1


def test_a_leased_copy_of_a_deleted_subscription_does_not_keep_the_key() -> None:
    world = World()
    subscribed(world, "billing")
    first = world.ids(message(key="k"))[0]
    leases = world.lease(first + 1)
    world.one(commands.encode_topic_delete("orders~billing", True))
    replaced = world.publish(message(key="k", mode=REPLACE))
    assert (replaced.codes.tolist(), replaced.others.tolist()) == ([RowCode.OK], [first])
    assert world.ack(leases) == [0]


@pytest.mark.parametrize("names", [["billing"], ["billing", "mail"]])
def test_a_row_with_the_published_id_does_not_either(names: list[str]) -> None:
    world = World()
    subscribed(world, *names)
    world.one(commands.encode_topic_put("orders", {"own_queue": False}))
    first = world.ids(message(key="k"))[0]
    leases = world.lease(first)
    world.one(commands.encode_topic_delete("orders~billing", True))
    replaced = world.publish(message(key="k", mode=REPLACE))
    others = None if len(names) == 1 else [first]
    found = None if replaced.others is None else replaced.others.tolist()
    assert (replaced.codes.tolist(), found) == ([RowCode.OK], others)
    assert world.ack(leases) == [0]


def test_a_copy_that_was_routed_to_another_topic_is_no_copy_any_more() -> None:
    """As a message of the topic itself, whose client key is free once it was routed."""
    world = World()
    subscribed(world, "billing", max_attempts=1, dead_letter="failed")
    first = world.ids(message(10_000, key="k"))[0]
    world.one(commands.encode_reschedule("n1", 0, True, [first + 1]))
    dying(world, first + 1)
    result: Any = world.one(commands.encode_cancel("n1", [first]))
    assert result.outcomes.tolist() == [CancelOutcome.CANCELLED]
    assert [name for name, _, _ in result.copies[0]] == ["orders"]
    assert world.states(first, first + 1) == ["cancelled", "ready"]
    assert world.publish(message(key="k")).ids.tolist() != [first], "the routed copy has no key"


def test_the_end_of_an_hour_reads_no_bodies() -> None:
    """A damaged body must not stop nodes at the end of its hour, and 512 bodies take long to read."""
    world = World()
    subscribed(world, "billing")
    ids = world.ids(*(message(key=f"k{n}", body=b"x" * 50) for n in range(5)))
    world.nack(world.lease(ids[4] + 1), delay_ms=3 * HOUR_MS)
    for one in [*ids, *(first + 1 for first in ids[:4])]:
        world.ack(world.lease(one))
    world.store.files[START_HOUR].log[:] = bytes(len(world.store.files[START_HOUR].log))
    later(world, 3)
    assert world.maintain(Job.RETIRE, START_HOUR).done
    assert len(world.tables.range(b"keyof")) == 1
    log = world.store.files[START_HOUR + 3].log
    log[-1] ^= 1
    world.ack(world.lease(ids[4] + 1))
    later(world, 3)
    assert world.maintain(Job.RETIRE, START_HOUR + 3).done
    assert not world.tables.range(b"keyof")
