"""Corners in which one thing meets another: keys and purges, deaths within the ms of a purge or a redrive, tokens and
maps that nobody of ours makes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from hadelay.codec import commands
from hadelay.codec.commandtypes import Command, Grant, Job
from hadelay.codec.formats import Mask, Rows
from hadelay.codec.publishcommand import hash_client_key
from hadelay.codec.results import LeaseOutcome, Refused, RowCode, TargetOutcome
from hadelay.ledger.messages.keys import find_key
from hadelay.ledger.topics.topicchanges import DEAD, MAX_MARKS, READY, SCHEDULED
from hadelay.ledger.topics.topics import PurgeMark
from hadelay.ledger.views.describe import describe
from hadelay.model import DEAD_HOURS, HOUR_MS, Draft, State
from hadelay.settings.cluster import Settings
from tests.ledger.world import START_MS, World, draft, leases


def failing_once() -> World:
    """Topic t, whose messages die at the first failure."""
    world = World()
    world.one(commands.encode_topic_put("t", {"max_attempts": 1}))
    return world


def dies(world: World) -> int:
    (message_id,) = world.ids(draft())
    world.nack(world.lease(message_id))
    return message_id


def keyed(in_ms: int = 5_000) -> Draft:
    return replace(draft("t", in_ms), key=b"k")


def purge(world: World, states: int) -> None:
    world.one(commands.encode_purge("t", states))


def redrive(world: World, rate: float | None = None) -> None:
    world.one(commands.encode_redrive("n1", "t", [], all=True, rate=rate))


@pytest.mark.parametrize("states", [SCHEDULED, READY, SCHEDULED | READY])
def test_a_key_given_after_a_purge_is_found(states: int) -> None:
    world = failing_once()
    purge(world, states)
    (message_id,) = world.ids(keyed())
    assert find_key(world.ledger, "t", hash_client_key(b"k")) == message_id


def test_a_key_holds_over_a_purge_that_does_not_mean_its_message() -> None:
    world = failing_once()
    (first,) = world.ids(keyed())
    purge(world, READY)
    assert world.ids(keyed()) == [first]


def test_a_purged_message_that_is_not_swept_yet_answers_for_no_other() -> None:
    world = failing_once()
    (first,) = world.ids(keyed())
    purge(world, SCHEDULED)
    (second,) = world.ids(keyed())
    for _ in range(3):
        world.maintain(Job.SWEEP)
    assert world.states(first, second) == ["cancelled", "scheduled"]


def test_two_purges_of_dead_letters_in_one_ms() -> None:
    world = failing_once()
    dies(world)
    purge(world, DEAD)
    second = dies(world)
    purge(world, DEAD)
    assert world.states(second) == ["gone"]


def test_a_letter_that_was_purged_is_not_counted_again_when_its_hour_goes() -> None:
    world = failing_once()
    dies(world)
    purge(world, DEAD)
    kept = dies(world)
    topic = world.ledger.topic("t")
    assert topic is not None
    (hour,) = (hour for hour in world.store.hours() if hour >= DEAD_HOURS)
    world.now += topic.settings.dead_retention_ms + HOUR_MS
    assert topic.dead == 1
    world.maintain(Job.DROP_DEAD, hour)
    assert (world.states(kept), topic.dead) == (["gone"], 0)


def test_a_purge_of_dead_letters_in_the_ms_in_which_a_redrive_began() -> None:
    world = failing_once()
    dies(world)
    redrive(world, 0.1)
    second = dies(world)
    purge(world, DEAD)
    assert world.states(second) == ["gone"]


def test_a_purge_of_dead_letters_in_the_ms_of_a_whole_redrive() -> None:
    world = failing_once()
    first = dies(world)
    redrive(world)
    second = dies(world)
    world.maintain(Job.REDRIVE, topic="t")
    purge(world, DEAD)
    assert world.states(first, second) == ["ready", "gone"]


def test_a_second_redrive_in_one_ms_brings_back_what_died_between() -> None:
    world = failing_once()
    first = dies(world)
    redrive(world)
    second = dies(world)
    redrive(world)
    world.maintain(Job.REDRIVE, topic="t")
    assert world.states(first, second) == ["ready", "ready"]


def test_a_redrive_of_all_leaves_what_was_purged() -> None:
    world = failing_once()
    first = dies(world)
    purge(world, DEAD)
    world.now += 1_000
    second = dies(world)
    redrive(world)
    world.maintain(Job.REDRIVE, topic="t")
    assert world.states(first, second) == ["gone", "ready"]


def test_no_token_acks_a_dead_letter() -> None:
    world = failing_once()
    hour, index = world.place(dies(world))
    world.term += 1
    assert hour >= DEAD_HOURS
    assert world.ack(leases((1, 99, 0, hour, index))) == [LeaseOutcome.LEASE_LOST]


@pytest.mark.parametrize("raw", [b"\x81\x90\xc0", b"\x81\x80\x01"], ids=["list", "map"])
@pytest.mark.parametrize("kind", [Command.TOPIC_PUT, Command.SETTINGS])
def test_a_map_with_keys_that_cannot_be_keys_is_malformed(kind: Command, raw: bytes) -> None:
    world = World()
    name = b"\x92\xa1t" if kind == Command.TOPIC_PUT else b""
    result: Any = world.one(bytes([kind]) + len(name + raw).to_bytes(4, "little") + name + raw)
    assert isinstance(result, Refused)


def test_no_delay_reaches_the_hours_of_the_dead() -> None:
    world = World()
    result: Any = world.one(commands.encode_settings({"max_delay_ms": 1 << 52}))
    assert isinstance(result, Refused)


def test_topics_are_bounded_and_those_that_are_there_go_on() -> None:
    world = World(Settings(max_topics=2))
    world.ids(draft("a"), draft("b"))
    made = world.publish(draft("c"), draft("a"))
    assert made.codes.tolist() == [RowCode.TOO_MANY_TOPICS, RowCode.OK]
    refused: Any = world.one(commands.encode_topic_put("c", {}))
    assert (refused.code, [topic.name for topic in world.ledger.topics]) == ("too_many_topics", ["a", "b"])


def test_messages_of_a_partial_purge_are_cancelled_before_they_are_swept() -> None:
    world = failing_once()
    ready, scheduled = world.ids(draft(), draft("t", 5_000))
    purge(world, READY)
    purge(world, SCHEDULED)
    granted = world.grant(ready).granted.any()
    moved: Any = world.one(commands.encode_reschedule("n1", 0, True, [ready, scheduled]))
    assert (granted, moved.outcomes.tolist()) == (False, [TargetOutcome.CANCELLED] * 2)


def test_nothing_but_the_sweep_ends_what_a_partial_purge_means() -> None:
    world = failing_once()
    (limited,) = world.ids(replace(draft(), ttl_ms=1_000))
    (late,) = world.ids(draft())
    world.one(commands.encode_topic_put("t", {"max_attempts": 0}))
    taken = world.lease(late, lease_ms=1_000)
    world.now += 1_000
    world.expire((1, 1))
    purge(world, READY)
    world.maintain(Job.TTL_EXPIRE)
    outcomes = world.ack(taken)
    for _ in range(3):
        world.maintain(Job.SWEEP)
    assert (outcomes, world.states(limited, late)) == ([LeaseOutcome.LEASE_LOST], ["cancelled", "cancelled"])


def test_a_redrive_waits_for_its_rate_and_says_so() -> None:
    world = failing_once()
    dies(world)
    dies(world)
    redrive(world, 0.1)
    before = world.topic().redrive.waits(world.ledger.now_ms)
    world.maintain(Job.REDRIVE, topic="t")
    after = [world.topic().redrive.waits(world.ledger.now_ms + ms) for ms in (0, 9_999, 10_000)]
    assert (before, after) == (False, [True, True, False])


def test_a_grant_looks_ahead_as_far_as_it_says_and_never_further_than_100_ms() -> None:
    world = World()
    soon, later = world.ids(draft("t", 90), draft("t", 101))

    def granted(seq: int, ahead_ms: int, message_id: int) -> bool:
        hour, index = world.place(message_id)
        places = np.array([hour]), np.array([index])
        command = Grant(1, seq, 30_000, "c", b"", "n1", *places, ahead_ms=ahead_ms)
        return bool(world.one(commands.encode_grant(command)).granted.all())

    assert not granted(1, 89, soon)
    assert not granted(2, 65_535, later)
    assert granted(3, 90, soon)
    described = describe(world.ledger, soon)
    assert described.state is State.LEASED
    assert [e.at_ms for e in described.history] == [described.deliver_at_ms]
    world.now += 1
    assert granted(4, 65_535, later)


def test_a_message_that_returns_before_its_time_is_due_at_its_time() -> None:
    """Leased ahead of its time, and then the lease was made shorter."""
    world = World()
    (soon,) = world.ids(draft("t", 90))
    hour, index = world.place(soon)
    grant = Grant(1, 1, 30_000, "c", b"", "n1", np.array([hour]), np.array([index]), ahead_ms=90)
    world.one(commands.encode_grant(grant))
    world.extend(leases((1, 1, 0, hour, index)), 10)
    world.now += 10
    assert world.expire((1, 1)).returned == 1
    described = describe(world.ledger, soon)
    assert described is not None
    assert (described.state, described.deliver_at_ms) == (State.SCHEDULED, START_MS + 90)


def test_a_message_rescheduled_during_its_lease_is_handed_out_as_another_attempt() -> None:
    """Interval mode: the hand-out's record comes behind a reschedule that was on its way already."""
    world = World()
    (message_id,) = world.ids(draft())
    hour, index = world.place(message_id)
    world.one(commands.encode_reschedule("n1", 1_000, True, [message_id]))
    late = Grant(1, 1, 30_000, "c", b"r", "n1", np.array([hour]), np.array([index]), handed=True)
    assert not world.one(commands.encode_grant(late)).granted.any()
    world.now += 2_000
    world.lease(message_id)
    assert describe(world.ledger, message_id).attempt == 2


def died_of_the_second(**config: object) -> tuple[World, int, np.ndarray]:
    """A message whose first lease ran out and whose second attempt was its last, and the first one's leases."""
    world = World()
    world.one(commands.encode_topic_put("t", {"max_attempts": 2, **config}))
    (message_id,) = world.ids(draft())
    first = world.lease(message_id, lease_ms=1_000)
    world.now += 1_001
    world.expire((world.term, world.seq))
    second = world.lease(message_id)
    world.now += 10
    world.nack(second)
    return world, message_id, first


@pytest.mark.parametrize("runs_out", [False, True])
def test_an_ack_from_before_a_message_died_does_not_count_when_it_is_back(runs_out: bool) -> None:
    world, message_id, first = died_of_the_second()
    world.now += 10
    world.one(commands.encode_redrive("n1", "t", [message_id]))
    if runs_out:  # as many attempts lie behind it as if it had never died
        world.lease(message_id, lease_ms=1_000)
        world.now += 1_001
        world.expire((world.term, world.seq))
    world.term += 1  # the next leader doesn't know the first grant either, as in interval mode
    assert world.ack(first) == [LeaseOutcome.LEASE_LOST]
    assert world.states(message_id) == ["ready"]


def test_an_ack_of_one_topic_ends_nothing_that_was_routed_to_another() -> None:
    world, message_id, first = died_of_the_second(dead_letter="other")
    world.term += 1
    assert world.ack(first) == [LeaseOutcome.LEASE_LOST]
    assert (world.states(message_id), world.topic("other").open) == (["ready"], 1)


def test_a_late_ack_counts_after_a_redrive_as_before_one() -> None:
    world, message_id, _ = died_of_the_second()
    world.one(commands.encode_redrive("n1", "t", [message_id]))
    again = world.lease(message_id, lease_ms=1_000)
    world.now += 1_001
    world.expire((world.term, world.seq))
    assert world.ack(again) == [LeaseOutcome.DONE]
    assert world.ack(again) == [LeaseOutcome.ALREADY_ACKED]


def test_an_ack_of_a_hand_out_nobody_recorded_counts_after_a_redrive_too() -> None:
    world, message_id, _ = died_of_the_second()
    world.one(commands.encode_redrive("n1", "t", [message_id]))
    hour, index = world.place(message_id)
    world.term += 1
    assert world.ack(leases((world.term - 1, 77, 0, hour, index))) == [LeaseOutcome.DONE]


def test_purges_that_are_not_written_down_yet_are_bounded() -> None:
    world = World()
    (first,) = world.ids(draft(in_ms=50_000))
    for _ in range(MAX_MARKS):
        world.now += 1
        purge(world, SCHEDULED)
        world.ids(draft(in_ms=50_000))
    refused = world.one(commands.encode_purge("t", SCHEDULED))
    assert isinstance(refused, Refused)
    assert refused.code == "too_many_marks"
    purge(world, READY)
    purge(world, READY)  # means what the one before it means
    assert len(world.topic().marks) == MAX_MARKS + 1
    for _ in range(4):
        world.maintain(Job.SWEEP)
    assert not world.topic().marks
    purge(world, SCHEDULED)
    assert world.states(first) == ["cancelled"]
    assert len(world.topic().marks) == 1


def test_a_purge_of_ready_ones_means_what_those_before_it_meant() -> None:
    world = World()
    before, _ = world.ids(draft(), draft(in_ms=50_000))
    purge(world, READY)
    (between,) = world.ids(draft())
    purge(world, READY)
    (after,) = world.ids(draft())
    assert world.states(before, between, after) == ["cancelled", "cancelled", "ready"]


@pytest.mark.parametrize("states", [SCHEDULED, READY, SCHEDULED | READY])
def test_a_purge_of_nothing_costs_no_generation(states: int) -> None:
    world = World()
    (message_id,) = world.ids(draft())
    taken = world.lease(message_id)
    purge(world, states)
    assert world.topic().generation == 1  # a whole one means what is leased, should it come back
    world.ack(taken)
    purge(world, states)
    assert world.topic().generation == 1


def test_purges_of_other_topics_cost_a_grant_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    mine, _, other = world.ids(draft("t0"), draft("t0", 5_000), draft("other"))
    world.ids(*(draft(f"t{n}", 5_000) for n in range(1, 10)))
    for n in range(10):
        world.one(commands.encode_purge(f"t{n}", SCHEDULED))
    world.checking = 0
    looks, means = [0], PurgeMark.means

    def counted(mark: PurgeMark, rows: Rows) -> Mask:
        looks[0] += 1
        return means(mark, rows)

    monkeypatch.setattr(PurgeMark, "means", counted)
    world.lease(other)
    assert looks == [0]
    world.lease(mine)
    assert looks == [1]
    world.maintain(Job.SWEEP)
    assert world.states(mine, other) == ["leased", "leased"]


def test_only_existing_subscriptions_are_looked_at_in_the_order_of_their_numbers() -> None:
    world = World()
    world.ids(draft())
    for name in ("a", "b", "c", "d"):
        world.one(commands.encode_subscription_put("t", name, {}))
    for name in ("a", "b", "d"):
        world.one(commands.encode_topic_delete(f"t~{name}", True))
    world.one(commands.encode_subscription_put("t", "b", {}))
    topics = world.ledger.topics
    assert [topic.name for topic in topics.subscriptions_of("t")] == ["t~b", "t~c"]
    assert len(topics.subscriptions["t"]) == 2
    world.restart()
    for name in ("b", "c"):
        world.one(commands.encode_topic_delete(f"t~{name}", True))
    world.restart()
    assert world.ledger.topics.subscriptions == {"t": {}}
