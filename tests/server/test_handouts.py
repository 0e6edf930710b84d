"""The leader measures how long after its grant a message reached its consumer, and the settlement carries it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from chaos.sim.cluster import SimCluster
from hadelay.codec import commands, settlement
from hadelay.codec.ackparts import encode_results
from hadelay.codec.formats import handout_delay_ms
from hadelay.codec.leasetokens import LEASE
from hadelay.ledger.state import Ledger
from hadelay.ledger.views.describe import describe
from hadelay.model import Event
from hadelay.server.delivery.lateness import HandoutDelays
from hadelay.server.service import consuming
from tests.handout.desk import Desk
from tests.ledger.world import START_MS, World, draft
from tests.memory import MemoryHours, MemoryNames, MemoryTables
from tests.server.test_lost_disks import wait_for_leader
from tests.server.test_metrics import publish, receive


def test_a_settlement_says_what_is_known_of_its_leases() -> None:
    world = World()
    delays = HandoutDelays()
    leased = world.lease(*world.ids(*[draft()] * 3))
    key = int(leased["term"][0]), int(leased["seq"][0])
    assert delays.settling(world.ledger, commands.encode_ack("n1", leased)) == commands.encode_ack("n1", leased)
    delays.answered(world.ledger, key, np.array([0, 2]), START_MS, START_MS + 250)
    delays.answered(world.ledger, key, np.array([2]), START_MS, START_MS + 19_700)
    command = delays.settling(world.ledger, commands.encode_ack("n1", leased))
    world.one(command)
    (hour,) = world.store.hours()
    events = world.store.events(hour, slice(0, world.store.event_count(hour)))
    acked = events[events["event"] == Event.ACKED]
    assert dict(zip(acked["index"].tolist(), handout_delay_ms(acked).tolist(), strict=True)) == {
        0: 250,
        1: -1,
        2: 19_700,
    }
    assert (delays.histogram.sum, sum(delays.histogram.counts)) == (pytest.approx(20.2), 3)


def test_delays_and_results_go_together() -> None:
    world, delays = World(), HandoutDelays()
    (message_id,) = world.ids(draft())
    leased = world.lease(message_id)
    with_result = commands.encode_ack("n1", leased, encode_results([b"[1]"]))
    assert delays.settling(world.ledger, with_result) == with_result
    key = int(leased["term"][0]), int(leased["seq"][0])
    delays.answered(world.ledger, key, np.array([0]), START_MS, START_MS + 250)
    command = delays.settling(world.ledger, with_result)
    assert command == settlement.with_delays(with_result, np.array([250], np.uint32))
    world.one(command)
    found = describe(world.ledger, message_id)
    assert found is not None
    assert found.result == b"[1]"


def test_grants_that_are_over_are_forgotten() -> None:
    world = World()
    delays = HandoutDelays()
    for seq in range(1, 5_000):
        delays.answered(world.ledger, (1, seq), np.array([0]), START_MS, START_MS)
    assert len(delays._at) <= 1_025


def test_a_leader_that_installed_a_snapshot_looks_at_the_ledger_of_the_snapshot() -> None:
    desk = Desk()
    installed, desk.ledger = desk.ledger, Ledger(0, MemoryHours(), MemoryTables(), MemoryNames())
    desk.new_leader(lead=False)
    desk.ledger = desk.delivery.ledger = installed  # as Node.installed does
    desk.lead()
    desk.publish("a")
    poll = desk.poll()
    desk.until(lambda: desk.answer(poll) is not None)
    received = desk.answer(poll)
    assert received is not None
    assert received.delivery is not None
    desk.run(250)
    desk.delivery.answered(received.delivery.term, received.delivery.seq, received.delivery.positions, 0)
    desk.do(desk.delivery.settling(commands.encode_ack("n1", received.leases())))
    (hour,) = desk.store.hours()
    events = desk.store.events(hour, slice(0, desk.store.event_count(hour)))
    assert handout_delay_ms(events[events["event"] == Event.ACKED])[0] >= 250
    assert sum(desk.delivery.handout_delays.histogram.counts) == 1


def test_an_ack_through_any_node_carries_it_and_every_replica_has_it() -> None:
    cluster = SimCluster(4, restart=False)
    cluster.start_all()
    wait_for_leader(cluster)
    cluster.world.run_for(3.0)
    leader = cluster.leader()
    assert leader is not None
    publish(cluster, leader, ["orders"] * 2)
    delivery = receive(cluster, leader, "orders", 2)
    cluster.world.run_for(0.3)  # as much as the answer takes to be read, built and written
    due_ms = int(delivery.rows["deliver_at_ms"].max())
    leader.delivery.answered(delivery.term, delivery.seq, delivery.positions, due_ms)
    leases = np.zeros(2, LEASE)
    leases["term"], leases["seq"], leases["pos"] = delivery.term, delivery.seq, delivery.positions
    leases["hour"], leases["index"] = delivery.hours, delivery.indexes
    nodes = [m.process.node for m in cluster.machines.values() if m.process is not None and m.process.node is not None]
    follower = next(node for node in nodes if node is not leader)
    done: list[Any] = []
    for node, row in ((leader, leases[:1]), (follower, leases[1:])):
        command = commands.encode_ack(node.name, row, delays=node.delivery.delays_of(row))
        node.publishing.propose(command, lambda result, error: done.append(error))
    cluster.world.run_for(2.0)
    assert done == [None, None]
    for node in nodes:
        (hour,) = {int(hour) for hour in delivery.hours}
        events = node.ledger.store.events(hour, slice(0, node.ledger.store.event_count(hour)))
        delays = handout_delay_ms(events[events["event"] == Event.ACKED])
        assert len(delays) == 2
        assert (delays >= 300).all(), node.name
        assert (delays < 2_000).all(), node.name


async def test_a_lease_that_ran_while_the_disk_was_read_is_shorter_by_that(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = SimCluster(4, restart=False)
    cluster.start_all()
    wait_for_leader(cluster)
    cluster.world.run_for(3.0)
    leader = cluster.leader()
    assert leader is not None
    publish(cluster, leader, ["orders"])
    delivery = receive(cluster, leader, "orders", 1)

    async def slowly(hours: Any, rows: Any) -> list[bytes]:
        cluster.world.run_for(3.0)
        return [leader.storage.hours.record(int(hours[0]), int(rows["offset"][0]), int(rows["size"][0]), verify=True)]

    monkeypatch.setattr(leader.reader, "records", slowly)
    handed = await consuming.ConsumingService(leader)._handed(delivery)
    granted_ms = int(delivery.until_ms[0]) - delivery.now_ms
    # The clocks of simulated nodes drift: 3 s are 2,999 to 3,001 ms of cluster time.
    assert handed.messages[0].lease_left_ms <= granted_ms - 2_999
    assert handed.messages[0].late_ms >= 2_999
    cluster.world.run_for(60.0)
    assert (await consuming.ConsumingService(leader)._handed(delivery)).messages[0].lease_left_ms == 0
