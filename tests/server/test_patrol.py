"""The patrol: damage at rest is found and repaired before anybody reads the damaged bytes."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import Any

import pytest

from chaos.sim.cluster import SimCluster
from hadelay.codec.commands import encode_cancel
from hadelay.codec.formats import DISPATCH_SIZE, INDEX_SIZE
from hadelay.model import unpack_id
from hadelay.server import patrol
from hadelay.server.metrics import NodeMetrics
from hadelay.server.node import Node
from hadelay.server.service.files import Files
from tests.server.test_lost_disks import publish, wait_for_leader

MESSAGES = 40


class Patrolled(SimCluster):
    def __init__(self, seed: int, rate: int = 1 << 20) -> None:
        super().__init__(seed, restart=False)
        self.patrol_bytes = rate
        self.start_all()
        wait_for_leader(self)
        ids = [publish(self, b"%d at rest" % n)[0] for n in range(MESSAGES)]
        leader = self.leader()
        assert leader is not None
        leader.publishing.propose(encode_cancel("n1", ids[::2]), lambda result, error: None)
        self.world.run_for(6.0)  # until the last checkpoint
        self.hour = unpack_id(ids[0])[1]

    def role(self, leads: bool) -> Node:
        return next(node for node in self.nodes() if (node is self.leader()) == leads)

    def content(self, node: Node, path: str) -> bytes:
        return self.machines[node.name].disk.copy()[path]

    def flip(self, node: Node, path: str, offset: int) -> Any:
        return self.machines[node.name].disk.flip_bit(path, offset, 3)

    def round(self, node: Node) -> None:
        """Run until the node has read all of its files once more."""
        rounds = node.patrol.rounds
        self.world.run_until(self.world.now + 120.0, stop=lambda: node.patrol.rounds > rounds)
        assert node.patrol.rounds > rounds


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patrol, "_FIRST_S", 1.0)
    monkeypatch.setattr(patrol, "_PAUSE_S", 1.0)


def metric(node: Node, name: str) -> float:
    collected = NodeMetrics(node).collect()
    try:
        while True:
            next(collected)
    except StopIteration as end:
        return next(value for family, value in end.value if family.name == f"hadelay_{name}")  # type: ignore[no-any-return]


@pytest.mark.parametrize("leads", [True, False], ids=["leader", "follower"])
@pytest.mark.parametrize(
    ("suffix", "offset"),
    [(".dsp", 3 * DISPATCH_SIZE + 5), (".idx", 7 * INDEX_SIZE + 20), (".log", 70), (".log", 0)],
    ids=["event", "entry", "payload", "header"],
)
def test_a_wrong_bit_at_rest_is_repaired_from_another_node(suffix: str, offset: int, leads: bool) -> None:
    cluster = Patrolled(3)
    node = cluster.role(leads)
    path = node.storage.hours.path(cluster.hour) + suffix
    whole = cluster.content(node, path)
    cluster.flip(node, path, offset)
    assert cluster.content(node, path) != whole
    cluster.round(node)
    cluster.round(node)
    assert cluster.content(node, path) == whole
    assert (metric(node, "patrol_repaired_total"), metric(node, "patrol_damaged_files")) == (1, 0)
    assert metric(node, "patrol_age_seconds") < 120
    assert metric(node, "patrol_read_bytes_total") >= len(whole.rstrip(b"\0"))
    assert [other.patrol.repaired for other in cluster.nodes() if other is not node] == [0, 0]
    assert not cluster.violations


def test_an_entry_and_its_record_are_repaired_together() -> None:
    cluster = Patrolled(4)
    node = cluster.role(leads=False)
    stem = node.storage.hours.path(cluster.hour)
    before = {suffix: cluster.content(node, stem + suffix) for suffix in (".idx", ".log", ".dsp")}
    cluster.flip(node, stem + ".idx", 8)
    for offset in (3, 90, 200, 700):
        cluster.flip(node, stem + ".log", offset)
    cluster.flip(node, stem + ".dsp", DISPATCH_SIZE - 1)
    cluster.round(node)
    cluster.round(node)
    assert {suffix: cluster.content(node, stem + suffix) for suffix in before} == before
    assert node.patrol.damaged == set()


def test_damage_on_all_nodes_is_reported_until_it_is_repaired(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Patrolled(5)
    path = cluster.nodes()[0].storage.hours.path(cluster.hour) + ".dsp"
    undo = [cluster.flip(node, path, 5) for node in cluster.nodes()]
    with caplog.at_level(logging.INFO):
        for node in cluster.nodes():
            cluster.round(node)
            cluster.round(node)
            assert (node.patrol.damaged, metric(node, "patrol_damaged_files")) == ({path}, 1)
    (damaged, *_) = [vars(line) for line in caplog.records if line.message == "patrol_damaged"]
    assert (damaged["path"], damaged["offset"], damaged["places"]) == (path, 0, 1)
    assert "hadelay check quorum" in damaged["next"]
    assert any(line.message == "patrol_round" for line in caplog.records)
    for one in undo:
        one()
    for node in cluster.nodes():
        cluster.round(node)
        cluster.round(node)
        assert node.patrol.damaged == set()


def test_a_file_that_vanished_or_lost_its_end_is_reported() -> None:
    cluster = Patrolled(6)
    node = cluster.role(leads=False)
    stem = node.storage.hours.path(cluster.hour)
    disk = cluster.machines[node.name].disk
    disk.unlink(stem + ".dsp")
    disk.open(f"{node.storage.directory}/names").truncate(9)
    cluster.round(node)
    assert node.patrol.damaged == {stem + ".dsp", f"{node.storage.directory}/names"}


def test_a_damaged_identity_is_written_again() -> None:
    cluster = Patrolled(7)
    node = cluster.role(leads=True)
    path = f"{node.storage.directory}/identity"
    whole = cluster.content(node, path)
    cluster.flip(node, path, 20)
    cluster.round(node)
    cluster.round(node)
    assert cluster.content(node, path) == whole


def test_the_patrol_keeps_to_its_rate_and_ends_with_the_node() -> None:
    rate = 2_000
    cluster = Patrolled(8, rate)
    node = cluster.role(leads=False)
    begun, before = cluster.world.now, node.patrol.bytes_read
    cluster.world.run_for(10.0)
    assert node.patrol.bytes_read - before <= rate * (cluster.world.now - begun) + (256 << 10)
    assert node.patrol.bytes_read < 64 << 10
    node.patrol.stop()
    read = node.patrol.bytes_read
    cluster.world.run_for(10.0)
    assert node.patrol.bytes_read == read


def test_a_rate_of_zero_is_no_patrol() -> None:
    cluster = Patrolled(9, 0)
    cluster.world.run_for(10.0)
    assert [(node.patrol.rounds, node.patrol.bytes_read) for node in cluster.nodes()] == [(0, 0)] * 3


def test_a_round_that_fails_does_not_end_the_patrol(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Patrolled(10)
    node = cluster.role(leads=False)
    path = f"{node.storage.directory}/identity"
    whole = cluster.content(node, path)
    cluster.flip(node, path, 20)
    with monkeypatch.context() as full:
        full.setattr(node.storage, "set_identity", lambda: os.close(-1))
        cluster.world.run_for(20.0)
    cluster.round(node)
    assert cluster.content(node, path) == whole


@pytest.mark.parametrize("rate", [0, 1_000])
def test_all_files_are_checked_at_once_when_a_user_asks(rate: int) -> None:
    cluster = Patrolled(12, rate)
    node = cluster.role(leads=False)
    path = node.storage.hours.path(cluster.hour) + ".dsp"
    if rate:  # a slow round has begun, and may have read the file that is damaged now
        cluster.world.run_until(cluster.world.now + 60, stop=lambda: node.patrol.bytes_read > 4_000)
    cluster.flip(node, path, 5)
    service = Files(node)
    asked = service.patrol(now=True)
    assert (asked.rounds, asked.wanted, asked.checked_at) == (0, 1 + bool(rate), None)
    cluster.world.run_until(cluster.world.now + 20, stop=lambda: service.patrol().rounds == asked.wanted)
    found = service.patrol()
    assert (found.rounds, found.repaired, found.damaged) == (asked.wanted, 1, [])
    assert found.checked_at is not None
    assert (node.patrol._bytes_per_s, cluster.violations) == (rate, [])


def test_files_that_a_snapshot_replaced_meanwhile_are_no_damage() -> None:
    cluster = Patrolled(11)
    node = cluster.role(leads=False)
    storage = node.storage
    for work in (node.patrol._check_hour(storage.hours, cluster.hour, ".dsp"), node.patrol._check_names(storage)):
        node.replica.storage = storage
        next(work)  # the file is being read
        node.replica.storage = cluster.role(leads=True).storage
        with suppress(StopIteration):
            while True:
                work.send((None, FileNotFoundError("the hour is retired in the snapshot")))
    node.replica.storage = storage
    assert node.patrol.damaged == set()
