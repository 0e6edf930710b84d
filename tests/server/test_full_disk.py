"""A node that has to start, or to start anew, on a disk that does not let it."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from chaos.sim.cluster import SimCluster
from chaos.sim.disk import SimDisk
from chaos.sim.network import SimNet
from chaos.sim.runtime import SimRuntime, SimWorld
from chaos.sim.tables import SimBackend
from hadelay.platform.disk import Disk
from hadelay.server.delivery.term import Alarm
from hadelay.server.node import Node
from hadelay.server.recover import open_node
from tests.storage.support import messages


def _raise(error: BaseException) -> None:
    raise error


def start(disk: SimDisk, on_fatal: Callable[[BaseException], None]) -> Node:
    world = SimWorld(1)
    runtime = SimRuntime(world, "n1", disk)
    config, network = SimCluster(1, world=world).config("n1"), SimNet(world).network("n1", runtime)
    return open_node(config, disk, network, runtime, on_fatal, backend=lambda path: SimBackend(disk, path))


def test_the_error_says_what_is_full_and_what_to_do() -> None:
    disk = SimDisk(random.Random(1), capacity=4096)
    with pytest.raises(OSError, match=r"full disk: [\d,]+ bytes are free at .* start again") as caught:
        start(disk, _raise)
    assert caught.value.errno == errno.ENOSPC
    disk.capacity = 1 << 30
    start(disk, _raise).stop()


def test_the_error_of_a_disk_without_room_for_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk()
    monkeypatch.setattr(disk, "makedirs", lambda path: _raise(OSError(errno.ENOSPC, "No space left on device", path)))
    config = SimCluster(1).config("n1")
    config = replace(config, node=replace(config.node, data_dir=f"{tmp_path}/not/there"))
    with pytest.raises(OSError, match=r"No space.*: [\d,]+ bytes are free at .*/not/there.* start again"):
        open_node(config, disk, Mock(), Mock(), _raise)


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.EACCES, r"user \d+, as whom this runs, has to own /data and "), (errno.EROFS, "dmesg.* ReadWritePaths=")],
)
def test_the_error_says_why_the_node_may_not_write_and_what_to_do(
    number: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimDisk(random.Random(1))

    def refuse(path: str) -> None:
        raise OSError(number, "the system's words", path)

    monkeypatch.setattr(disk, "makedirs", refuse)
    with pytest.raises(OSError, match=f"the system's words: .*?{words}") as caught:
        start(disk, _raise)
    assert caught.value.errno == number


def test_a_node_ends_when_it_cannot_open_the_snapshot_that_it_has_switched_to() -> None:
    """It would have no state, and say nothing about it."""
    disk, fatal = SimDisk(random.Random(1)), list[BaseException]()
    node = start(disk, fatal.append)
    node.storage.close()
    disk.bad_paths.add(f"{node.storage.directory}/identity")
    node.installed(node.ledger)
    assert isinstance(fatal[0], OSError)


def test_a_repair_after_a_switched_snapshot_changes_the_new_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer of a peer comes late: the store that was damaged is closed by then."""
    disk, fatal = SimDisk(random.Random(1)), list[BaseException]()
    node = start(disk, fatal.append)
    hour = 490_000
    node.storage.hours.append(*messages(hour, sizes=[10]))
    asked = list[Callable[[bytes | None], None]]()
    monkeypatch.setattr(node.repairer, "repair", lambda *place: asked.append(place[-1]))
    node._damaged(hour, 0, "a chain that is broken")
    node.storage.close()
    node.installed(node.ledger)
    asked[0](b"the entry")
    assert fatal == []
    assert node.storage.hours.count(hour) == 0
    node.stop()


def test_warnings_name_the_next_refusal_of_a_disk_that_fills(caplog: pytest.LogCaptureFixture) -> None:
    disk = SimDisk(random.Random(1))
    node = start(disk, _raise)
    least = node.config.storage.min_free_bytes
    for left in (least - 1, least // 8 - 1, 2 * least):
        disk.capacity = disk.used + left
        node.checkpoints.applied(4 << 20)
    lines = [(line.msg, getattr(line, "next", "")) for line in caplog.records if line.msg.startswith("space_")]
    assert [event for event, _ in lines[:2]] == ["space_low", "space_nearly_gone"]
    assert "refused (507)" in lines[0][1]
    assert "exit code 70" in lines[1][1]
    node.stop()


def test_leader_s_parts_go_on_when_a_disk_has_room_again() -> None:
    """A read of new entries of a far hour writes them out first; bulk jobs stood still after one error."""
    world = SimWorld(1)
    runtime = SimRuntime(world, "n1", SimDisk(random.Random(1)))
    answers: list[OSError | None] = [OSError(errno.ENOSPC, "no space left"), OSError(errno.EIO, "broken"), None]
    rung: list[float] = []

    def ring() -> None:
        rung.append(world.now)
        if error := answers[len(rung) - 1]:
            raise error

    Alarm(runtime, ring).at(runtime.monotonic())
    world.run_for(5)
    assert [round(at, 1) for at in rung] == [0.0, 0.5, 1.0]
