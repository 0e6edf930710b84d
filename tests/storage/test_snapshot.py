"""A checkpoint as files: what one node exports, another installs, and both are the same."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from support import IDENTITY, NOW, Loop, checkpoint, events, hour_states, messages, open_storage

from chaos.sim.disk import SimCrash, SimDisk
from chaos.sim.tables import SimBackend
from hadelay.errors import DamagedFile
from hadelay.storage.names import TOPIC
from hadelay.storage.snapshots import Manifest
from hadelay.storage.store import Storage
from hadelay.storage.tables import CHECKPOINT, CORE

FAR = NOW + 50


class Node:
    def __init__(self, name: str, seed: int = 1) -> None:
        self.disk, self.loop, self.name = SimDisk(random.Random(seed)), Loop(), name
        self.disk.makedirs("/")
        self.start()

    def start(self) -> None:
        self.storage: Storage = open_storage(
            self.disk,
            "/data",
            self.loop,
            identity=replace(IDENTITY, node=self.name),
            backend=lambda path: SimBackend(self.disk, path),
        )

    def fill(self, index: int) -> None:
        storage = self.storage
        for hour in (NOW, FAR, FAR + index):
            storage.hours.append(*messages(hour, sizes=[30 + index] * 50, seed=index, copies=[0, 2] * 25))
        storage.hours.append_events(NOW, events([index]))
        storage.names.register(TOPIC, f"t{index}")
        for n in range(500):
            storage.tables.put(b"keys", b"%d %d" % (index, n), bytes(n))
        checkpoint(storage, self.loop, index, hours={NOW: b"%d" % index})

    def manifest(self) -> Manifest:
        assert self.storage.manifest() is None, "the first call starts the export"
        self.loop.run()
        manifest = self.storage.manifest()
        assert manifest is not None
        return manifest

    def seen(self) -> tuple[Any, ...]:
        storage = self.storage
        return (
            storage.applied_index,
            storage.tables.backend.get(CHECKPOINT, CORE),
            hour_states(storage),
            storage.hours.checksums(),
            storage.names.all(),
            storage.tables.range(b"keys", limit=100_000),
        )


def pull(source: Node, target: Node, manifest: Manifest, *, stop_after: int | None = None) -> list[Any]:
    """Fetch what is missing in small pieces and finish; the outcome of finish."""
    outcome: list[Any] = []
    installer = target.storage.install(manifest, target.start)
    for file in manifest.files:
        at = installer.have(file.name)
        while at < file.length:
            if stop_after is not None and stop_after <= 0:
                installer.abort()
                return outcome
            data = source.storage.exports.read(file.name, at, min(1000, file.length - at))
            installer.write(file.name, at, data)
            at += len(data)
            if stop_after is not None:
                stop_after -= len(data)
    installer.finish(outcome.append)
    target.loop.run()
    return outcome


@pytest.fixture
def source() -> Node:
    node = Node("n1")
    node.fill(1)
    node.fill(2)
    return node


def test_the_copy_is_equal_and_goes_on_equally(source: Node) -> None:
    target = Node("n2")
    target.fill(7)  # what it had before is gone
    assert pull(source, target, source.manifest()) == [None]
    assert target.seen() == source.seen()
    assert target.storage.identity.node == "n2"
    source.fill(3)
    target.fill(3)
    assert target.seen() == source.seen()
    assert not [path for path in target.disk.copy() if "outgoing" in path or "incoming" in path]


def test_the_source_goes_on_meanwhile(source: Node) -> None:
    expected = source.seen()
    manifest = source.manifest()
    source.storage.hours.retire(FAR + 1)
    source.fill(3)
    source.fill(4)
    target = Node("n2")
    assert pull(source, target, manifest) == [None]
    assert target.seen()[:3] == expected[:3]
    assert target.seen()[3] == expected[3]
    source.storage.exports.release(manifest)
    source.fill(5)
    assert not [path for path in source.disk.copy() if "/export/" in path]
    with pytest.raises(FileNotFoundError):
        source.storage.exports.read(f"state-{manifest.index}", 0, 10)


def test_a_pull_goes_on_where_it_was_given_up(source: Node) -> None:
    manifest = source.manifest()
    target = Node("n2")
    for stop_after in (500, 3000, 20_000):
        assert pull(source, target, manifest, stop_after=stop_after) == []
        assert target.seen()[0] == 0
    installer = target.storage.install(manifest, target.start)
    assert sum(installer.have(file.name) for file in manifest.files) > 20_000
    assert pull(source, target, manifest) == [None]
    assert target.seen() == source.seen()


def test_a_newer_manifest_keeps_what_the_older_one_brought(source: Node) -> None:
    target = Node("n2")
    older = source.manifest()
    pull(source, target, older, stop_after=40_000)
    source.storage.exports.release(older)
    source.fill(3)
    assert pull(source, target, source.manifest()) == [None]
    assert target.seen() == source.seen()


def test_files_that_do_not_verify_are_pulled_anew(source: Node) -> None:
    manifest = source.manifest()
    target = Node("n2")
    name = next(file.name for file in manifest.files if file.name.endswith(".log"))
    pull(source, target, manifest, stop_after=60_000)
    installer = target.storage.install(manifest, target.start)
    installer.write(name, 10, b"rotten")
    outcome = pull(source, target, manifest)
    assert isinstance(outcome[0], DamagedFile)
    assert target.seen()[0] == 0
    assert pull(source, target, manifest) == [None]
    assert target.seen() == source.seen()


def test_paths_of_others_are_not_served(source: Node) -> None:
    for name in ("identity", "../secret", "hours/../identity", "/etc/passwd", "state.mdb"):
        with pytest.raises(FileNotFoundError):
            source.storage.exports.read(name, 0, 10)


@pytest.mark.parametrize("end", ["kill", "power_cut"])
def test_dying_at_every_step_of_an_install(source: Node, end: str) -> None:
    """Either the old data or the new, never some of both."""
    manifest, expected = source.manifest(), source.seen()
    step, outcomes = 0, set()
    while True:
        step += 1
        target = Node("n2", seed=step)
        target.fill(7)
        before = target.seen()
        target.disk.sync_everything()
        for file in manifest.files:
            data = source.storage.exports.read(file.name, 0, file.length)
            target.storage.install(manifest, target.start).write(file.name, 0, data)
            target.disk.open(f"/data/incoming/{file.name}").sync()  # the name is not synced
        installer = target.storage.install(manifest, target.start)
        target.disk.crash_in = step
        try:
            outcome: list[Any] = []
            installer.finish(outcome.append)
            target.loop.run()
        except SimCrash:
            getattr(target.disk, end)()
            target.loop = Loop()
            target.start()
        else:
            assert outcome == [None]
            break
        found = target.seen()
        assert found in (before, expected), step
        outcomes.add(found == expected)
        if found == before:
            assert pull(source, target, manifest) == [None]
            assert target.seen() == expected
    assert outcomes == {True, False}
    assert step > 20
