"""A settlement says how long after its grant each message was handed out (ADR 206)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hadelay.codec import commands, settlement
from hadelay.codec.formats import MAX_NACK_DELAY_MS, handout_delay_ms
from hadelay.codec.leasetokens import LEASE
from hadelay.codec.results import LeaseOutcome, Refused
from hadelay.ledger.views.describe import describe
from hadelay.model import NONE32, Event
from tests.ledger.world import START_HOUR, World, draft


def settle(world: World, command: bytes, *delays: int) -> Any:
    return world.one(settlement.with_delays(command, np.array(delays, np.uint32)))


def delays(world: World) -> list[tuple[str, int]]:
    events = world.store.events(START_HOUR, slice(0, world.store.event_count(START_HOUR)))
    found = zip(events["event"].tolist(), handout_delay_ms(events).tolist(), strict=True)
    return [(Event(event).name.lower(), delay) for event, delay in found if event in (Event.ACKED, Event.NACKED)]


def reasons(world: World, message_id: int) -> list[str | None]:
    found = describe(world.ledger, message_id)
    assert found is not None
    return [event.reason for event in found.history if event.event is Event.NACKED]


def test_an_ack_carries_it_for_each_lease() -> None:
    world = World()
    leased = world.lease(*world.ids(*[draft()] * 4))
    shuffled = leased[[2, 0, 3, 1]]
    assert settle(world, commands.encode_ack("n1", shuffled), 20, 0, NONE32, 10).outcomes.tolist() == [0] * 4
    assert sorted(delays(world)) == [("acked", -1), ("acked", 0), ("acked", 10), ("acked", 20)]
    events = world.store.events(START_HOUR, slice(4, 8))
    assert dict(zip(events["index"].tolist(), handout_delay_ms(events).tolist(), strict=True)) == {
        2: 20,
        0: 0,
        3: -1,
        1: 10,
    }
    world.restart()


@pytest.mark.parametrize("reason", ["", "no connection"])
@pytest.mark.parametrize("delay_ms", [0, 19_700, MAX_NACK_DELAY_MS, MAX_NACK_DELAY_MS + 5, NONE32 - 1])
def test_a_nack_carries_it_beside_its_reason(reason: str, delay_ms: int) -> None:
    world = World()
    (message_id,) = world.ids(draft())
    result = settle(world, commands.encode_nack("n1", world.lease(message_id), 0, reason), delay_ms)
    assert result.outcomes.tolist() == [LeaseOutcome.DONE]
    assert delays(world) == [("nacked", min(delay_ms, MAX_NACK_DELAY_MS))]
    assert reasons(world, message_id) == [reason or None]
    world.nack(world.lease(message_id), 0, reason)
    assert delays(world)[1:] == [("nacked", -1)]
    assert reasons(world, message_id) == [reason or None] * 2


def test_lost_leases_are_not_reported() -> None:
    world = World()
    leased = world.lease(*world.ids(draft(), draft()))
    world.ack(leased[:1])
    outcomes = settle(world, commands.encode_ack("n1", leased), 5, 7).outcomes.tolist()
    assert outcomes == [LeaseOutcome.ALREADY_ACKED, LeaseOutcome.DONE]
    assert delays(world) == [("acked", -1), ("acked", 7)]


@pytest.mark.parametrize("kind", [2, 3, 255])
def test_other_kinds_are_malformed(kind: int) -> None:
    world = World()
    leased = world.lease(*world.ids(draft()))
    whole = bytearray(commands.encode_ack("n1", leased))
    whole[5] = kind
    refused = world.one(bytes(whole))
    assert isinstance(refused, Refused)
    assert refused.code == "malformed"


def test_an_ack_has_no_delay_and_no_reason() -> None:
    world = World()
    leased = world.lease(*world.ids(draft()))
    for nack in (commands.encode_nack("n1", leased, 5), commands.encode_nack("n1", leased, 0, "why")):
        whole = bytearray(nack)
        whole[5] = 0
        assert world.one(bytes(whole)).code == "malformed"


def test_only_whole_acks_and_nacks_get_delays() -> None:
    """A command without room for its delays would change its length, and spoil the entry that it is in."""
    rows = np.zeros(2, LEASE)
    rows["seq"] = (1, 2)
    for command in (commands.encode_ack("node", rows), commands.encode_nack("node", rows, 5, "why")):
        found = settlement.leases_in(command)
        assert found is not None
        assert found.tobytes() == rows.tobytes()
        for cut in range(5, 5 + 23 + 4 + rows.nbytes + 4 * len(rows)):
            assert settlement.leases_in(command[:cut]) is None
    assert settlement.leases_in(commands.encode_extend("node", rows, 5)) is None
