"""A message's history is found wherever its events stand in the dispatch log of its hour."""

from __future__ import annotations

import random

import pytest

from hadelay.ledger.views.describe import describe
from hadelay.model import HOUR_MS
from tests.ledger.world import START_HOUR, START_MS, World, draft


@pytest.mark.parametrize("chunk", [1, 2, 3, 65_536])
def test_every_event_is_found(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hadelay.ledger.views.describe._CHUNK", chunk)
    world, chance = World(), random.Random(chunk)
    world.checking = False
    ids = world.ids(*(draft(in_ms=n * 40) for n in range(60)))
    expected: dict[int, list[str]] = {i: [] for i in ids}
    for _ in range(150):
        world.now += 60
        message = chance.choice(ids)
        [state] = world.states(message)
        if state == "ready":
            world.lease(message)
            expected[message].append("leased")
        elif state == "leased":
            key = next(k for k, g in world.ledger.grants.items() if world.place(message)[1] in g.rows["index"])
            leases = world.leased(*key)
            if chance.random() < 0.5:
                world.ack(leases)
                expected[message].append("acked")
            else:
                world.nack(leases, chance.choice([0, 500, HOUR_MS]))
                expected[message] += ["nacked", "moved"]
        elif state == "scheduled" and chance.random() < 0.3:
            world.cancel(message)
            expected[message].append("cancelled")
    for message in ids:
        found = describe(world.ledger, message)
        assert found is not None
        assert [event.event.name.lower() for event in found.history] == expected[message]


def test_a_history_says_why_and_where_to() -> None:
    world = World()
    [message] = world.ids(draft())
    world.nack(world.lease(message), 2 * HOUR_MS, reason="HTTP 503")
    found = describe(world.ledger, message)
    assert found is not None
    leased, nacked, moved = found.history
    assert (leased.reason, nacked.reason) == (None, "HTTP 503")
    assert (nacked.from_hour, nacked.to_hour) == (None, None)
    assert (moved.from_hour, moved.to_hour) == (START_HOUR, START_HOUR + 2)
    assert found.hour == START_HOUR + 2


def test_a_history_keeps_when_each_attempt_was_due() -> None:
    """A retry after a backoff is due later than the attempt before it, which was not early."""
    world = World()
    (message_id,) = world.ids(draft())
    first_due_ms = START_MS
    world.now += 40
    world.nack(world.lease(message_id), 5_000)
    second_due_ms = START_MS + world.now + 5_000
    world.now += 5_020
    world.ack(world.lease(message_id))
    found = describe(world.ledger, message_id)
    assert found is not None
    assert found.deliver_at_ms == second_due_ms
    leased = [(one.at_ms - one.due_ms, one.due_ms) for one in found.history if one.due_ms is not None]
    assert leased == [(40, first_due_ms), (20, second_due_ms)]
