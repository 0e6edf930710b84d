"""What a topic does whose owner set nothing (ADR 205)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hadelay.codec import commands
from hadelay.ledger.leases.settling import waits_ms
from hadelay.ledger.views.describe import describe
from hadelay.model import HOUR_MS, State
from hadelay.settings.topic import DEFAULTS, WEBHOOK_FLOOR_MS, Exponential
from tests.ledger.world import START_MS, World, draft

S = 1_000


@pytest.fixture
def plain_topics() -> None:
    """Topics as nodes make them."""


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
    attempts = np.arange(1, DEFAULTS.max_attempts, dtype=np.uint16)
    for message_id in range(1_000):
        waits = waits_ms(DEFAULTS.backoff, attempts, np.full(len(attempts), message_id, np.uint64))
        assert 72 * HOUR_MS <= waits.sum() <= 80 * HOUR_MS


def test_the_jitter_of_a_backoff_of_ones_own_lengthens_waits() -> None:
    world = World()
    put(world, backoff={"min_ms": 10 * S, "max_ms": HOUR_MS, "jitter": 0.5})
    assert world.topic().settings.backoff == Exponential(10 * S, HOUR_MS, jitter=0.5)
    waits = [fail(world, i) for i in world.ids(*[draft()] * 20)]
    assert all(10 * S <= wait <= 15 * S for wait in waits if wait is not None)


@pytest.mark.parametrize("delay_ms", [-1, 0, 1, 5 * S])
def test_a_webhook_is_not_called_again_within_a_second_even_if_asked_to(delay_ms: int) -> None:
    world = World()
    put(world, webhook={"url": "http://receiver/"}, backoff=[0])
    (message_id,) = world.ids(draft())
    asked = max(delay_ms, 0)
    assert fail(world, message_id, delay_ms) == max(asked, WEBHOOK_FLOOR_MS)
    # So too where the lease of a call ran out.
    result = world.grant(message_id, lease_ms=10)
    world.now += 10
    world.expire((result.term, result.seq))
    seen = describe(world.ledger, message_id)
    assert seen is not None
    assert seen.deliver_at_ms - START_MS - world.now == WEBHOOK_FLOOR_MS
