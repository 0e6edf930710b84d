"""Switching to a snapshot beside a checkpoint that is under way, and what a finished export still holds on to."""

from __future__ import annotations

from typing import Any

from support import NOW, events, messages
from test_snapshot import FAR, Node

from hadelay.errors import DamagedFile
from hadelay.storage.snapshot import Installer


def pulled(source: Node, target: Node) -> Installer:
    """Everything is there; nothing is switched."""
    manifest = source.manifest()
    installer = target.storage.install(manifest, target.start)
    for file in manifest.files:
        installer.write(file.name, 0, source.storage.exports.read(file.name, 0, file.length))
    return installer


def begin_checkpoint(node: Node, index: int) -> list[BaseException | None]:
    storage, outcome = node.storage, []
    for hour in range(FAR, FAR + 40):  # more than one slice
        storage.hours.append(*messages(hour, sizes=[30] * 50, seed=index))
    storage.hours.append_events(NOW, events([index]))
    storage.tables.put(b"keys", b"left over", b"")
    storage.checkpoint(index, 1, b"core", {NOW: b"mine"}, outcome.append)
    return outcome


def test_a_checkpoint_that_has_begun_ends_before_the_switch() -> None:
    source, target = Node("n1"), Node("n2")
    source.fill(9)
    target.fill(7)
    outcome: list[Any] = []
    installer = pulled(source, target)
    checkpoint = begin_checkpoint(target, 8)
    installer.finish(outcome.append)
    target.loop.run()
    assert checkpoint == [None]
    assert outcome == [None]
    assert target.seen() == source.seen()


def test_a_checkpoint_that_begins_while_files_are_verified_ends_before_the_switch() -> None:
    source, target = Node("n1"), Node("n2")
    source.fill(9)
    target.fill(7)
    outcome: list[Any] = []
    installer = pulled(source, target)
    installer.finish(outcome.append)
    checkpoint = begin_checkpoint(target, 8)
    target.loop.run()
    assert checkpoint == [None]
    assert outcome == [None]
    assert target.seen() == source.seen()


def test_an_export_that_nobody_uses_any_more_holds_no_retired_hour() -> None:
    node = Node("n1")
    node.fill(1)
    manifest = node.manifest()
    node.storage.exports.release(manifest)
    node.storage.hours.retire(FAR + 1)
    node.fill(2)
    assert not [path for path in node.disk.copy() if f"/{manifest.files[0].name}" in path]
    node.fill(3)
    gone = node.storage.hours.path(FAR + 1).rpartition("/")[2]
    assert not [path for path in node.disk.copy() if f"/{gone}." in path]


def test_a_node_that_stops_while_files_are_verified_switches_to_nothing() -> None:
    """The directory may be another process's by then."""
    source, target = Node("n1"), Node("n2")
    source.fill(9)
    target.fill(7)
    outcome: list[Any] = []
    pulled(source, target).finish(outcome.append)
    target.storage.close()
    target.start()
    another = target.storage
    target.loop.run()
    assert outcome == []
    assert target.storage is another
    assert another.applied_index == 7


def test_a_checkpoint_that_cannot_read_what_it_adds_to_ends() -> None:
    """One that never ends is the last one, and nobody hears of it."""
    node = Node("n1")
    node.fill(1)
    file = node.disk.open(node.storage.hours.path(FAR) + ".idx")
    file.truncate(40)
    outcome = begin_checkpoint(node, 2)
    node.loop.run()
    assert isinstance(outcome[0], DamagedFile)


def test_an_export_for_which_the_disk_has_no_room_leaves_nothing() -> None:
    node = Node("n1")
    node.fill(1)
    node.disk.capacity = node.disk.used + 1000
    assert node.storage.exports.manifest() is None
    node.loop.run()
    assert node.disk.was_full
    assert node.disk.listdir("/data/export") == []
    node.disk.capacity = 1 << 30
    assert node.manifest().index == 1
