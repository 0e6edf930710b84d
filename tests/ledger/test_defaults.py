"""What a topic does whose owner set nothing, from feature level 3 on and before (ADR 205)."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import msgpack
import numpy as np
import pytest

from hadelay.codec import commands
from hadelay.codec.results import Done, Refused
from hadelay.ledger import checkpoint
from hadelay.ledger.describe import describe
from hadelay.ledger.leases import waits_ms
from hadelay.ledger.state import Ledger
from hadelay.model import HOUR_MS, State
from hadelay.settings.topic import DEFAULTS_OF, NEWEST_DEFAULTS, WEBHOOK_FLOOR_MS, Exponential
from hadelay.version import FIRST_LEVEL, RETRY_DEFAULTS, WEBHOOK_FLOOR
from tests.ledger.world import START_MS, World, draft

S = 1_000
#: What the version before level 3 makes of `_some_of_everything`, as a CRC.
BEFORE = 563_799_983


@pytest.fixture
def plain_topics() -> None:
    """Here the defaults are those of the cluster's level."""


def put(world: World, topic: str = "t", **config: Any) -> Any:
    return world.one(commands.encode_topic_put(topic, config))


def fail(world: World, message_id: int, delay_ms: int = -1) -> int | None:
    """Lease and nack it; the wait until it is due again in ms, None once it is dead."""
    world.nack(world.lease(message_id), delay_ms)
    seen = describe(world.ledger, message_id)
    assert seen is not None
    if seen.state is State.DEAD:
        return None
    wait_ms = seen.deliver_at_ms - START_MS - world.now
    world.now += wait_ms
    return wait_ms


@pytest.mark.parametrize("made_by", ["put", "publish"])
def test_a_message_that_always_fails_is_dead_after_84_attempts_and_72_hours(made_by: str) -> None:
    world = World()
    if made_by == "put":
        put(world)
    (message_id,) = world.ids(draft())
    waits = []
    while (wait := fail(world, message_id)) is not None:
        waits.append(wait)
    assert len(waits) == 83
    assert sum(waits) >= 72 * HOUR_MS
    plain = [min(S << n, HOUR_MS) for n in range(83)]
    assert all(least <= wait <= 1.1 * least for least, wait in zip(plain, waits, strict=True))
    assert len({wait for wait in waits if wait > HOUR_MS}) > 60, "jitter spreads them"
    assert world.topic().dead == 1
    world.restart()


def test_no_message_waits_less_than_72_hours_in_all() -> None:
    defaults = DEFAULTS_OF[NEWEST_DEFAULTS]
    attempts = np.arange(1, defaults.max_attempts, dtype=np.uint16)
    for message_id in range(1_000):
        waits = waits_ms(defaults.backoff, attempts, np.full(len(attempts), message_id, np.uint64))
        assert 72 * HOUR_MS <= waits.sum() <= 80 * HOUR_MS


def test_topics_from_before_the_switch_keep_their_defaults_until_somebody_changes_them() -> None:
    world = World(level=RETRY_DEFAULTS - 1)
    put(world, "set", max_attempts=100)
    old, chosen = world.ids(draft("implicit"), draft("set"))
    world.one(commands.encode_feature(RETRY_DEFAULTS))
    (new,) = world.ids(draft("new"))
    for message_id, wait in ((old, 0), (chosen, 0)):
        assert [fail(world, message_id) for _ in range(90)] == [wait] * 90
    assert [fail(world, new) is None for _ in range(84)] == [False] * 83 + [True]
    assert world.topic("implicit").config == {}
    # One PUT converts a topic; what was set stays.
    assert put(world, "set", defaults=None) == Done(True)
    assert world.topic("set").config == {"defaults": RETRY_DEFAULTS, "max_attempts": 100}
    assert fail(world, chosen) >= HOUR_MS
    assert put(world, "set", defaults=FIRST_LEVEL) == Done(True)
    assert fail(world, chosen) == 0
    world.restart()


def test_a_topic_that_is_made_again_has_the_defaults_of_then() -> None:
    world = World(level=RETRY_DEFAULTS - 1)
    put(world)
    world.one(commands.encode_feature(RETRY_DEFAULTS))
    world.one(commands.encode_topic_delete("t"))
    world.ids(draft())
    assert world.topic().settings == DEFAULTS_OF[RETRY_DEFAULTS]


@pytest.mark.parametrize("value", [0, 2, 4, "3", True, 3.0])
def test_other_defaults_are_refused(value: object) -> None:
    world = World()
    refused = put(world, defaults=value)
    assert isinstance(refused, Refused)
    assert refused.detail.startswith("defaults: 1 or 3")
    assert world.topic() is None


@pytest.mark.parametrize("value", [1, 3, None])
def test_below_the_level_the_setting_is_refused_as_one_that_nobody_knows(value: object) -> None:
    world = World(level=RETRY_DEFAULTS - 1)
    before = checkpoint.dump(world.ledger, everything=True)
    refused = put(world, defaults=value)
    assert isinstance(refused, Refused)
    assert refused.code == "bad_config"
    assert world.topic() is None
    unknown = World(level=RETRY_DEFAULTS - 1)
    put(unknown, unheard_of=1)
    assert before is not None
    assert unknown.ledger.topics.all == world.ledger.topics.all == []


def test_the_jitter_of_a_backoff_of_ones_own_goes_by_the_topics_defaults() -> None:
    own = {"min_ms": 10 * S, "max_ms": HOUR_MS, "jitter": 0.5}
    world = World()
    for topic, defaults in (("old", FIRST_LEVEL), ("new", RETRY_DEFAULTS)):
        put(world, topic, defaults=defaults, backoff=own)
    assert world.topic("old").settings.backoff == Exponential(10 * S, HOUR_MS, jitter=0.5)
    assert world.topic("new").settings.backoff == Exponential(10 * S, HOUR_MS, jitter=0.5, longer=True)
    waits = [[fail(world, i) for i in world.ids(*[draft(topic)] * 20)] for topic in ("old", "new")]
    assert all(wait <= 10 * S for wait in waits[0] if wait is not None)
    assert all(10 * S <= wait <= 15 * S for wait in waits[1] if wait is not None)


@pytest.mark.parametrize("level", [WEBHOOK_FLOOR - 1, WEBHOOK_FLOOR])
@pytest.mark.parametrize("delay_ms", [-1, 0, 1, 5 * S])
def test_a_webhook_is_not_called_again_within_a_second_even_when_told_to(level: int, delay_ms: int) -> None:
    world = World(level=level)
    put(world, webhook={"url": "http://receiver/"}, backoff=[0])
    (message_id,) = world.ids(draft())
    asked = max(delay_ms, 0)
    least = WEBHOOK_FLOOR_MS if level >= WEBHOOK_FLOOR else 0
    assert fail(world, message_id, delay_ms) == max(asked, least)
    # So too where the lease of a call ran out.
    result = world.grant(message_id, lease_ms=10)
    world.now += 10
    world.expire((result.term, result.seq))
    seen = describe(world.ledger, message_id)
    assert seen is not None
    assert seen.deliver_at_ms - START_MS - world.now == least


def _some_of_everything(world: World) -> int:
    """CRC of entries, state and files after topics, failures, deaths, redrives, acks and an hour that passed."""
    put(world, "a", max_attempts=2, webhook={"url": "http://receiver/"})
    put(world, "b", backoff={"min_ms": 100, "max_ms": HOUR_MS, "jitter": 0.5}, max_attempts=9)
    ids = world.ids(*[draft(topic, in_ms) for topic in "abc" for in_ms in (0, 0, 5 * S, 2 * HOUR_MS)])
    world.now += 10
    first = world.lease(*[ids[n] for n in (0, 1, 4, 5, 8, 9)], lease_ms=20)
    world.ack(first[::3])
    world.nack(first[1:2], 7 * S, "a reason")
    world.now += 30
    world.expire((int(first["term"][0]), int(first["seq"][0])))
    world.now += 10 * S
    world.nack(world.lease(ids[1], ids[2], ids[6]), reason="another")
    world.now += 2 * HOUR_MS
    world.one(commands.encode_redrive("n1", "a", [ids[1]]))
    world.ack(world.lease(ids[1], ids[3]))
    main, hours = checkpoint.dump(world.ledger, everything=True)
    assert isinstance(world.ledger, Ledger)
    files = [
        [hour, world.store.entries(hour, slice(0, world.store.count(hour))).tobytes(),
         world.store.events(hour, slice(0, world.store.event_count(hour))).tobytes()]
        for hour in world.store.hours()
    ]  # fmt: skip
    return crc32(msgpack.packb([world.entries, main, sorted(hours.items()), files]))


def test_a_cluster_below_level_3_writes_the_bytes_of_before() -> None:
    assert _some_of_everything(World(level=2)) == BEFORE
    assert _some_of_everything(World(level=3)) != BEFORE
