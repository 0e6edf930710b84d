"""A node that has to start, or to start anew, on a disk that does not let it."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable

import pytest

from hadelay.server.node import Node
from hadelay.server.recover import open_node
from hadelay.testing.cluster import SimCluster
from hadelay.testing.disk import SimDisk
from hadelay.testing.network import SimNet
from hadelay.testing.runtime import SimRuntime, SimWorld
from hadelay.testing.tables import SimBackend


def _raise(error: BaseException) -> None:
    raise error


def start(disk: SimDisk, on_fatal: Callable[[BaseException], None]) -> Node:
    world = SimWorld(1)
    runtime = SimRuntime(world, "n1", disk)
    config, network = SimCluster(1, world=world).config("n1"), SimNet(world).network("n1", runtime)
    return open_node(config, disk, network, runtime, on_fatal, backend=lambda path: SimBackend(disk, path))


def test_it_says_what_is_full_and_what_to_do() -> None:
    disk = SimDisk(random.Random(1), capacity=4096)
    with pytest.raises(OSError, match=r"full disk: [\d,]+ bytes are free at .* start again") as caught:
        start(disk, _raise)
    assert caught.value.errno == errno.ENOSPC
    disk.capacity = 1 << 30
    start(disk, _raise).stop()


def test_it_ends_when_it_cannot_open_the_snapshot_that_it_has_switched_to() -> None:
    """It would have no state, and say nothing about it."""
    disk, fatal = SimDisk(random.Random(1)), list[BaseException]()
    node = start(disk, fatal.append)
    node.storage.close()
    disk.bad_paths.add(f"{node.storage.directory}/identity")
    node._installed()
    assert isinstance(fatal[0], OSError)
