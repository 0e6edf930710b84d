"""A node that has to start on a full disk."""

from __future__ import annotations

import errno
import random

import pytest

from hadelay.server.recover import open_node
from hadelay.testing.cluster import SimCluster
from hadelay.testing.disk import SimDisk
from hadelay.testing.network import SimNet
from hadelay.testing.runtime import SimRuntime, SimWorld
from hadelay.testing.tables import SimBackend


def test_it_says_what_is_full_and_what_to_do() -> None:
    world = SimWorld(1)
    disk = SimDisk(random.Random(1), capacity=4096)
    runtime = SimRuntime(world, "n1", disk)
    config, network = SimCluster(1, world=world).config("n1"), SimNet(world).network("n1", runtime)
    with pytest.raises(OSError, match=r"full disk: [\d,]+ bytes are free at .* start again") as caught:
        open_node(config, disk, network, runtime, pytest.fail, backend=lambda path: SimBackend(disk, path))
    assert caught.value.errno == errno.ENOSPC
    disk.capacity = 1 << 30
    open_node(config, disk, network, runtime, pytest.fail, backend=lambda path: SimBackend(disk, path)).stop()
