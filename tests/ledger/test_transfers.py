"""Transfers: a job moves waiting messages to another topic, or dead letters back to the topics in which they died."""

from __future__ import annotations

import random
from typing import Any

from msgspec.structs import replace

from hadelay.codec import batches, commands
from hadelay.codec.commandtypes import Job
from hadelay.codec.jobcommands import FillBegin
from hadelay.codec.meta import Meta, pack
from hadelay.codec.publishcommand import hash_client_key, hash_group
from hadelay.codec.results import Done, JobBegun, Refused
from hadelay.ledger.messages.copies import copies_of
from hadelay.ledger.messages.keys import find_key
from hadelay.ledger.views.describe import describe
from hadelay.model import HOUR_MS, Draft, Event
from tests.ledger.test_batches import counts as batch_counts
from tests.ledger.test_batches import member, opened
from tests.ledger.test_bulk import begin, counts, run
from tests.ledger.world import START_HOUR, START_MS, World, draft
from tests.scale import size


def put(world: World, name: str, **config: Any) -> None:
    assert not isinstance(world.one(commands.encode_topic_put(name, config)), Refused)


def where(world: World, *ids: int) -> list[str]:
    found = [describe(world.ledger, one, START_MS + world.now) for one in ids]
    return [f"{one.topic} {one.state} {one.attempt}" if one else "gone" for one in found]


def routed(world: World, *drafts: Draft) -> list[int]:
    """Messages that died of their only attempt, and are in the topic for dead letters."""
    ids = world.ids(*drafts)
    for one in ids:
        world.nack(world.lease(one), reason="no")
    return ids


def failing(**more: Any) -> World:
    """A world whose topics a and b send dead letters to f."""
    world = World()
    for name in ("a", "b"):
        put(world, name, max_attempts=1, backoff=[0], dead_letter="f", **more)
    return world


def test_dead_letters_go_back_to_where_they_died_and_may_die_again() -> None:
    world = failing()
    one, two = routed(world, draft("a"), draft("b"))
    own = world.ids(draft("f"))[0]
    world.now += 5_000
    assert where(world, one, two, own) == ["f ready 0", "f ready 0", "f ready 0"]
    world.restart()
    begin(world, "transfer", "f")
    assert run(world, 1) == Done()
    assert counts(world, 1) == [2, 0, 0, 0, 1], "nobody knows where the third would go"
    assert where(world, one, two, own) == ["a ready 0", "b ready 0", "f ready 0"]
    found = describe(world.ledger, one)
    assert found is not None
    assert (found.deliver_at_ms, found.history[-1].event) == (START_MS + 5_000, Event.TRANSFERRED)
    assert world.topic("f").settled[Event.TRANSFERRED] == 2
    world.nack(world.lease(one), reason="again")
    assert where(world, one) == ["f ready 0"]
    begin(world, "transfer", "f", request=b"2")
    run(world, 2)
    assert where(world, one) == ["a ready 0"]
    world.ack(world.lease(one))
    assert world.states(one) == ["acked"]


def test_source_survives_retries_in_the_dead_letter_topic() -> None:
    world = failing()
    put(world, "f", backoff=[0], max_attempts=0)
    (one,) = routed(world, draft("a"))
    for n in range(20):
        world.nack(world.lease(one), reason=f"look {n}")
    world.now += HOUR_MS * 3
    world.maintain(Job.ROLL_FORWARD, START_HOUR)
    begin(world, "transfer", "f")
    run(world, 1)
    assert where(world, one) == ["a ready 0"]


def test_transfer_to_a_named_topic_keeps_the_due_time_and_takes_the_key() -> None:
    world = World()
    put(world, "to")
    later, due = world.ids(replace(draft(in_ms=2 * HOUR_MS), key=b"k", ttl_ms=60_000), draft())
    world.now = 700
    begin(world, "transfer", "t", into="to")
    assert run(world, 1) == Done()
    assert where(world, later, due) == ["to scheduled 0", "to ready 0"]
    found = describe(world.ledger, later)
    assert found is not None
    assert found.deliver_at_ms == START_MS + 2 * HOUR_MS
    assert find_key(world.ledger, "t", hash_client_key(b"k")) is None
    assert world.topic("t").open == 0
    assert world.topic("to").published == 2
    world.now = 2 * HOUR_MS + 60_000
    world.maintain(Job.TTL_EXPIRE)
    assert world.states(later) == ["expired"]


def test_leased_messages_and_full_topics_are_left_alone() -> None:
    world = World()
    put(world, "to", max_messages=1)
    leased, first, second = world.ids(draft(), draft(), draft())
    rows = world.lease(leased)
    begin(world, "transfer", "t", into="to")
    run(world, 1)
    assert counts(world, 1) == [1, 1, 0, 0, 1]
    assert where(world, first, second) == ["to ready 0", "t ready 0"]
    assert world.ack(rows) == [0]


def test_refused_transfers() -> None:
    world = World()
    world.ids(draft())
    put(world, "to")
    for action, spec, code in (
        ("transfer", {"into": "nobody"}, "no_topic"), ("transfer", {"into": "t"}, "bad_job"),
        ("transfer", {"into": "no name"}, "bad_job"), ("cancel", {"into": "to"}, "bad_job"),
        ("transfer", {"into": "to", "delay_ms": 5}, "bad_job"),
    ):  # fmt: skip
        assert begin(world, action, **spec).code == code
    begin(world, "transfer", into="to")
    world.one(commands.encode_topic_delete("to", force=True))
    assert run(world, 1) == Done()
    assert counts(world, 1) == [0, 0, 0, 0, 1]


def test_group_and_batch_go_along() -> None:
    world = opened()
    put(world, "t", group_concurrency=1)
    put(world, "to", group_concurrency=1)
    group = {"group": hash_group("g"), "meta": pack(Meta(batch="b", group="g")), "batched": True}
    ids = world.ids(*[replace(member(), **group) for _ in range(3)])
    rows = world.lease(ids[0])
    assert world.states(*ids) == ["leased", "blocked", "blocked"]
    begin(world, "transfer", "t", into="to")
    run(world, 1)
    assert where(world, *ids) == ["t leased 1", "to ready 0", "to blocked 0"]
    assert (world.topic("t").batched, world.topic("to").batched) == (True, True)
    assert world.ack(rows) == [0]
    world.one(batches.encode_seal("b"))
    for one in ids[1:]:
        world.ack(world.lease(one))
    assert batch_counts(world) == (3, 3, 0, 0, 0)


def test_copies_for_subscriptions() -> None:
    """A copy that is back in its subscription is one again; elsewhere it is a message of its own."""
    world = World()
    put(world, "t")
    world.one(commands.encode_subscription_put("t", "s", {"max_attempts": 1, "backoff": [0], "dead_letter": "f"}))
    put(world, "to")
    (one,) = world.ids(draft())
    (copy,) = copies_of(world.ledger, one)
    world.nack(world.lease(copy), reason="no")
    begin(world, "transfer", "f")
    run(world, 1)
    assert where(world, copy) == ["t~s ready 0"]
    begin(world, "transfer", "t~s", into="to", request=b"2")
    run(world, 2)
    assert where(world, copy) == ["to ready 0"]
    assert world.cancel(one) == [0]
    assert where(world, one, copy) == ["t cancelled 0", "to ready 0"]
    world.ack(world.lease(copy))


def test_fill_gets_its_copy_before_the_message_leaves() -> None:
    world = World()
    put(world, "to")
    (one,) = world.ids(draft(in_ms=5_000))
    world.one(commands.encode_subscription_fill(FillBegin("n1", "", "t", "s", {})))
    begin(world, "transfer", "t", into="to", request=b"2")
    run(world, 2)
    assert where(world, one) == ["to scheduled 0"]
    assert world.topic("t~s").open == 1


def test_random_transfers_beside_other_changes() -> None:
    """The checks of the ledger hold after each entry; a message is in one topic, and is acked once."""
    for seed in range(size(3, 40)):
        rng, world = random.Random(seed), failing(group_concurrency=1)
        world.checking = 4
        put(world, "f", backoff=[0], max_attempts=3, group_concurrency=1)
        world.one(commands.encode_subscription_put("a", "s", {"max_attempts": 1, "backoff": [0], "dead_letter": "f"}))
        world.one(batches.encode_open("b", batches.Spec("done", batches.On.COMPLETE, 0, 0, 0, b"", None, 24 * HOUR_MS)))
        ids, rows = list[int](), []
        for n in range(120):
            world.now += rng.choice((1, 50, 5_000, HOUR_MS // 2))
            deed = rng.randrange(9)
            if deed < 2:
                fields: dict[str, Any] = {"ttl_ms": rng.choice((0, 0, 2 * HOUR_MS))}
                name, batched = rng.choice(("g", None)), rng.random() < 0.3
                fields |= {"meta": pack(Meta(group=name, batch="b" if batched else None)), "batched": batched}
                fields |= {"group": None if name is None else hash_group(name), "key": rng.choice((None, b"k"))}
                found = world.ids(replace(draft(rng.choice("ab"), rng.choice((0, 0, HOUR_MS))), **fields))
                ids += [one for one in [*found, *copies_of(world.ledger, found[0])] if one and one not in ids]
            elif deed < 4 and (ready := [one for one in ids if world.states(one) == ["ready"]]):
                result = world.grant(rng.choice(ready), lease_ms=600_000)
                rows += [world.leased(result.term, result.seq)] if result.granted.all() else []
            elif deed < 6 and rows:
                some = rows.pop(rng.randrange(len(rows)))
                world.nack(some, 0, "no") if rng.random() < 0.7 else world.ack(some)
            elif deed == 6:
                world.maintain(Job.ROLL_FORWARD, (START_MS + world.now) // HOUR_MS - 1)
                world.maintain(Job.TTL_EXPIRE)
            elif deed == 7 and n % 3 == 0:
                world.restart()
            else:
                into = rng.choice(("", "", "a", "b"))
                begun = begin(world, "transfer", rng.choice(("f", "f", "a~s", "b")), into=into, request=bytes([n]))
                if isinstance(begun, JobBegun):
                    run(world, begun.job)
        assert world.ledger.topic("f").settled[Event.TRANSFERRED] > 0, f"seed {seed}"
        assert "acked" in world.states(*ids), f"seed {seed}"
