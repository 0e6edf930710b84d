"""Starts that end half-way: a crash between any two steps leaves directories with which the node starts again, as what
it is: a founder, or a node that has lost its disk."""

from __future__ import annotations

import random
from itertools import count
from typing import Literal

import pytest
from msgspec.structs import replace

from chaos.sim.cluster import SimCluster
from chaos.sim.disk import SimDisk
from chaos.sim.file import SimCrash
from chaos.sim.network import SimNet
from chaos.sim.runtime import SimRuntime, SimWorld
from chaos.sim.tables import SimBackend
from hadelay.raft.ports import FOUNDING
from hadelay.server.node import Node
from hadelay.server.recover import open_node
from hadelay.storage.identity import note_damage

DATA, JOURNAL = "/data/g0", "/data/raft/g0"
Before = Literal["blank", "journal lost", "data lost", "damaged"]


def _raise(error: BaseException) -> None:
    raise error


def start(disk: SimDisk, *, init: bool) -> Node:
    world = SimWorld(1)
    runtime = SimRuntime(world, "n1", disk)
    config = SimCluster(1, world=world).config("n1")
    config = replace(config, cluster=replace(config.cluster, init=init))
    network = SimNet(world).network("n1", runtime)
    return open_node(config, disk, network, runtime, _raise, backend=lambda path: SimBackend(disk, path))


def empty(disk: SimDisk, directory: str) -> None:
    for name in disk.listdir(directory):
        path = f"{directory}/{name}"
        if path in disk.copy():
            disk.unlink(path)


def prepared(before: Before, seed: int) -> SimDisk:
    disk = SimDisk(random.Random(seed))
    node = start(disk, init=before != "blank")
    if before != "blank":
        node.raft.journal.vote(3, "n2")
    node.stop()
    if before == "journal lost":
        empty(disk, JOURNAL)
    elif before == "data lost":
        empty(disk, DATA)
    elif before == "damaged":
        note_damage(disk, DATA, "an hour file")
    disk.sync_everything()
    return disk


@pytest.mark.parametrize("end", ["kill", "power_cut"])
@pytest.mark.parametrize("before", ["blank", "journal lost", "data lost", "damaged"])
def test_a_crash_at_any_step_of_a_start_leaves_a_node_that_starts(before: Before, end: str) -> None:
    """`cluster.init` is set, as a service file may have it."""
    for step in count(1):
        disk = prepared(before, step)
        disk.crash_in = step
        try:
            node = start(disk, init=True)
        except SimCrash:
            getattr(disk, end)()
            node = start(disk, init=True)
            crashed = True
        else:
            disk.crash_in, crashed = 0, False
        journal = node.raft.journal
        assert (journal.incarnation == FOUNDING, journal.admitted) == ((before == "blank",) * 2), step
        assert journal.incarnation == node.storage.identity.incarnation
        node.stop()
        if not crashed:
            return
