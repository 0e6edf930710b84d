"""Leases that run out: also those that were shortened; and what is over costs no memory until its time comes."""

from __future__ import annotations

from typing import Any

import numpy as np

from hadelay.codec import commands
from hadelay.codec.commandtypes import Command, Grant
from hadelay.errors import Overloaded
from tests.handout.desk import Desk
from tests.ledger.world import World, draft

HOUR_MS = 3_600_000


def test_a_lease_that_was_shortened_runs_out_when_it_says() -> None:
    desk = Desk(checking=False)
    desk.lead()
    desk.publish("a", at=1_000)
    poll = desk.poll(lease=HOUR_MS)
    desk.until(lambda: desk.answer(poll) is not None)
    received = desk.answer(poll)
    assert received is not None
    assert received.names == ["a"]
    desk.extend(received, 2_000)
    again = desk.poll(wait=10_000)
    desk.run(5_000)
    received = desk.answer(again)
    assert received is not None
    assert received.names == ["a"]


def test_a_lease_runs_out_though_its_first_expire_failed() -> None:
    desk = Desk()
    desk.lead()
    desk.publish("a", at=1_000)
    poll = desk.poll(lease=5_000)
    desk.until(lambda: desk.answer(poll) is not None)
    desk.refuse_with = Overloaded("leadership is being handed over", retry_after_ms=500)
    desk.run(10_000)
    assert desk.ledger.grants
    desk.refuse_with = None
    again = desk.poll(wait=10_000)
    desk.run(5_000)
    received = desk.answer(again)
    assert received is not None
    assert received.names == ["a"]


def test_long_leases_that_ended_with_an_ack_are_forgotten_at_once() -> None:
    desk = Desk(checking=False)
    desk.lead()
    desk.publish_many(2_500, at=1_000)
    desk.run_to(2_000)
    for _ in range(2_500):
        poll = desk.poll(max=1, lease=12 * HOUR_MS)
        desk.until(lambda poll=poll: desk.answer(poll) is not None)  # type: ignore[misc]
        received = desk.answer(poll)
        assert received is not None
        desk.ack(received)
    assert not desk.ledger.grants
    assert len(desk.delivery._expiry) < 1_500


def test_an_entry_copies_a_bounded_part_of_the_large_messages_that_expire_at_once() -> None:
    world = World()
    world.checking = False
    for _ in range(40):
        world.publish(draft(body=bytes(1 << 20)))
    hour = world.ledger.now_hour
    for index in range(40):
        world.one(grant(index, hour))
    world.now += 2 * HOUR_MS
    passes = 0
    while world.ledger.grants:
        result = world.one(commands.encode_expire(list(world.ledger.grants)))
        assert result.returned <= 4
        passes += 1
    assert world.store.count(world.ledger.now_hour) == 40
    assert passes == 14


def grant(index: int, hour: int) -> bytes:
    places = np.array([hour], np.uint32), np.array([index], np.uint32)
    return commands.encode_grant(Grant(1, index + 1, 1_000, "c", b"", "n1", *places))


def test_one_entry_holds_one_expire_however_many_leases_run_out_at_once() -> None:
    desk = Desk(checking=False, commit_ms=50)
    desk.lead()
    desk.publish_many(1_500, at=1_000)
    for _ in range(1_500):
        desk.poll(max=1, lease=30_000)
    desk.run_to(5_000)
    assert len(desk.ledger.grants) == 1_500
    under_way, most = 0, 0
    term = desk.delivery._expiry._term
    propose = term._propose

    def counted(command: bytes, done: Any) -> None:
        nonlocal under_way, most
        if command[0] != Command.EXPIRE:
            propose(command, done)
            return
        under_way += 1
        most = max(most, under_way)

        def settled(result: Any, error: Any) -> None:
            nonlocal under_way
            under_way -= 1
            done(result, error)

        propose(command, settled)

    term._propose = counted
    desk.run_to(40_000)
    assert not desk.ledger.grants
    assert most == 1
