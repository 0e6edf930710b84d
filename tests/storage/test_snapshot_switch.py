"""Switching to a snapshot beside a checkpoint that is under way, and what a finished export still holds on to."""

from __future__ import annotations

import errno
from typing import Any
from unittest.mock import Mock

import pytest
from support import NOW, events, messages, puts
from test_snapshot import FAR, Node, pull

from hadelay.codec.checksums import crc32c
from hadelay.errors import DamagedFile, DiskFull, FatalError
from hadelay.storage.snapshots import Installer


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
    storage.checkpoint(index, 1, b"core", [puts({NOW: b"mine"})], outcome.append)
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
    assert not [path for path in node.disk.copy() if f"/{manifest.files[-1].name}" in path]
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
    assert node.storage.manifest() is None
    node.loop.run()
    assert node.disk.was_full
    assert node.disk.listdir("/data/export") == []
    was_full = node.disk.was_full
    for _ in range(9):  # as often as a leader's sign of life
        assert node.storage.manifest() is None
        node.loop.run()
        node.loop.now += 1
    assert node.disk.was_full == was_full, "what is left may be what the journal needs"
    node.disk.capacity = 1 << 30
    node.loop.now += 10
    assert node.manifest().index == 1


def test_an_export_that_failed_holds_no_retired_hour() -> None:
    node = Node("n1")
    node.fill(1)
    gone = node.storage.hours.path(FAR + 1)
    node.disk.capacity = node.disk.used + 1000
    assert node.storage.manifest() is None
    node.loop.run()
    assert node.storage.exports.failure is not None
    node.disk.capacity = 1 << 30
    node.storage.hours.retire(FAR + 1)
    node.fill(2)
    assert not [path for path in node.disk.copy() if path.startswith(gone)]


@pytest.mark.parametrize("step", ["begin", "write", "tables", "sync"])
def test_a_disk_without_room_for_a_snapshot_is_left_as_it_was(step: str) -> None:
    """What came of it would keep the disk full, and the whole cluster from being published to. Once there is room, it
    is installed, by a node that was never stopped."""
    source, target = Node("n1"), Node("n2")
    source.fill(9)
    target.fill(7)
    before, used = target.seen(), target.disk.used
    disk, manifest, outcome = target.disk, source.manifest(), list[Any]()
    total = sum(file.length for file in manifest.files)
    if step == "begin":
        disk.capacity = used + total
    elif step != "sync":
        disk.free = lambda path: (1 << 30, 1 << 30)  # type: ignore[method-assign]
        disk.capacity = used + total + {"write": -1, "tables": 1000}[step]
    else:
        # A quota may be told of by the sync: the file system had promised the room before it looked.
        disk.sync_files = Mock(side_effect=OSError(errno.EDQUOT, "Disk quota exceeded"))  # type: ignore[method-assign]

    def install() -> None:
        installer = target.storage.install(manifest, target.start)
        for file in manifest.files:
            installer.write(file.name, 0, source.storage.exports.read(file.name, 0, file.length))
        installer.finish(outcome.append)
        target.loop.run()

    if step in ("begin", "write"):
        with pytest.raises(DiskFull):
            install()
    else:
        install()
        assert isinstance(outcome.pop(), DiskFull)
    assert (target.seen(), disk.used) == (before, used)
    disk.capacity = 1 << 30
    if step == "sync":
        del disk.sync_files
    install()
    assert outcome == [None]
    assert target.seen() == source.seen()


@pytest.mark.parametrize("which", range(9))
def test_nothing_of_a_snapshot_is_trusted_behind_a_sync_that_failed(which: int) -> None:
    """The page cache looks clean then: a later try would find every file whole, and the next power cut none."""
    source, target = Node("n1"), Node("n2", seed=which)
    source.fill(9)
    target.fill(7)
    installer, syncs, outcome = pulled(source, target), 0, list[Any]()

    def fail_the_nth(step: str, path: str) -> None:
        nonlocal syncs
        if step == "sync":
            target.disk.fail_syncs = int(syncs == which)
            syncs += 1

    target.disk.watch = fail_the_nth
    installer.finish(outcome.append)
    target.loop.run()
    target.disk.watch, target.disk.fail_syncs = None, 0
    assert which < syncs
    assert isinstance(outcome[0], FatalError)
    target.storage.close()
    target.start()  # another process finds the same cache
    manifest = source.storage.manifest()
    assert manifest is not None
    assert pull(source, target, manifest) == [None]
    target.disk.power_cut()
    target.start()
    assert target.seen() == source.seen()
    for file in manifest.files[:-1]:
        assert crc32c(target.storage.exports.read(file.name, 0, file.length)) == file.crc, file.name


def test_a_node_that_cannot_close_its_files_does_not_go_on_with_half_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = Node("n1"), Node("n2")
    source.fill(9)
    outcome = list[Any]()
    installer = pulled(source, target)
    monkeypatch.setattr(target.storage.hours, "close", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    installer.finish(outcome.append)
    target.loop.run()
    assert isinstance(outcome[0], FatalError)
    monkeypatch.undo()
    target.disk.kill()
    target.start()
    assert target.seen() == source.seen()


def test_files_that_were_pulled_stay_when_one_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is no disk that is full: too many are open, say. The next process goes on with them."""
    source, target = Node("n1"), Node("n2")
    source.fill(9)
    installer, manifest = pulled(source, target), source.storage.manifest()
    assert manifest is not None
    installer.abort()
    with monkeypatch.context() as patched:
        patched.setattr(target.disk, "open", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        with pytest.raises(OSError, match="open files"):
            installer.write(manifest.files[-1].name, 0, b"")
    again = target.storage.install(manifest, target.start)
    assert all(again.have(file.name) == file.length for file in manifest.files)
