"""A directory of backups: what is copied, what is copied again, what is found to be wrong."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from msgspec import structs
from support import NOW, Loop, checkpoint, events, messages, open_storage

from chaos.sim.disk import SimDisk
from chaos.sim.tables import SimBackend
from hadelay.errors import ConfigError, DamagedFile, NotFound
from hadelay.model import hour_name
from hadelay.platform.disk import Disk
from hadelay.storage.backup import BLOCK, FORMAT, Archive, Backup, LocalBackups
from hadelay.storage.names import TOPIC
from hadelay.storage.snapshots import Manifest
from hadelay.version import LAST_DEVELOPMENT

BACKUP = "/backup"


class Broken(Exception):
    pass


class Source:
    """A node's storage, and the backups made of it. `budget`: bytes until the connection breaks."""

    def __init__(self, seed: int = 1) -> None:
        self.disk, self.loop, self.index = SimDisk(random.Random(seed)), Loop(), 0
        self.disk.makedirs(BACKUP)
        self.storage = open_storage(self.disk, "/data", self.loop, backend=lambda path: SimBackend(self.disk, path))
        self.archive = Archive(LocalBackups(self.disk, BACKUP))
        self.read: Counter[str] = Counter()
        self.budget = 1 << 40

    def fill(self, *hours: int) -> None:
        self.index += 1
        for hour in hours:
            self.storage.hours.append(*messages(hour, sizes=[3000] * 100, seed=self.index))
        self.storage.hours.append_events(NOW, events([self.index]))
        self.storage.names.register(TOPIC, f"t{self.index}")
        self.storage.tables.put(b"keys", b"%d" % self.index, bytes(100))
        checkpoint(self.storage, self.loop, self.index)

    def manifest(self) -> Manifest:
        self.storage.manifest()
        self.loop.run()
        manifest = self.storage.manifest()
        assert manifest is not None
        return manifest

    def back_up(self, keep: int = 2) -> Backup:
        manifest = self.manifest()
        before = self.archive.intact()
        files = {}
        for file in manifest.files:

            def read(offset: int, most: int, name: str = file.name) -> bytes:
                data = self.storage.exports.read(name, offset, min(most, 10_000, self.budget))
                self.budget -= len(data)
                if not data:
                    raise Broken
                self.read[name] += len(data)
                return data

            known = self.archive.has(file.name, file.length, file.crc, before)
            files[file.name] = known or self.archive.copy(file.name, file.length, file.crc, read)
        there, time = self.archive.files, "2026-11-21T00:00:00.000Z"
        backup = Backup(FORMAT, "test", 3, 1, manifest.index, manifest.term, time, files, there.part)
        self.archive.finish(backup, keep)
        self.storage.exports.release(manifest)
        return backup

    def wrong(self, index: int | None = None) -> list[tuple[str, int]]:
        found = self.archive.verify(self.archive.read(index))
        return [(damage.file, damage.offset) for _, damages in found for damage in damages]


@pytest.fixture
def source() -> Source:
    source = Source()
    source.archive.files.prepare()
    source.fill(NOW, NOW + 50)
    return source


def flip(disk: Disk, path: str, at: int) -> None:
    file = disk.open(path)
    file.pwrite(bytes([file.pread(1, at)[0] ^ 0x10]), at)
    file.close()


def hours(hour: int) -> list[str]:
    return [f"hours/{hour_name(hour)}.{kind}" for kind in ("log", "idx", "dsp")]


def test_a_second_backup_copies_what_is_new(source: Source) -> None:
    first = source.back_up()
    assert source.read == {name: file.length for name, file in first.files.items() if file.length}
    source.read.clear()
    source.fill(NOW)
    second = source.back_up()
    grown = {name: file.length - first.files[name].length for name, file in second.files.items() if name in first.files}
    assert source.read == {name: more for name, more in grown.items() if more} | {
        "state-2": second.files["state-2"].length
    }
    assert not any(source.read[name] for name in hours(NOW + 50))
    # Both are there, and each is the beginning of the same files.
    assert source.archive.indexes() == [1, 2]
    assert source.wrong(1) == source.wrong(2) == []
    assert source.archive.read(1) == first


def test_older_ones_go_and_what_only_they_needed(source: Source) -> None:
    source.back_up()
    source.storage.hours.retire(NOW + 50)
    source.fill(NOW)
    source.back_up()
    assert source.wrong(1) == []  # its hour is retired, and kept for it
    source.fill(NOW)
    source.back_up()
    assert source.archive.indexes() == [2, 3]
    kept = source.disk.copy()
    assert not [path for path in kept if "state-1" in path or hours(NOW + 50)[0] in path]
    assert source.wrong(2) == source.wrong(3) == []


@pytest.mark.parametrize("budget", [0, 1, 9_000, 250_000, 500_000])
def test_an_interrupted_backup_is_none_and_goes_on(source: Source, budget: int) -> None:
    source.budget = budget
    with pytest.raises(Broken):
        source.back_up()
    assert source.archive.indexes() == []
    with pytest.raises(NotFound, match="interrupted"):
        source.archive.read()
    source.budget = 1 << 40
    backup = source.back_up()
    assert sum(source.read.values()) == backup.size
    assert source.wrong() == []


def test_an_interrupted_backup_leaves_the_one_before(source: Source) -> None:
    source.back_up()
    source.fill(NOW)
    source.budget = 50_000
    with pytest.raises(Broken):
        source.back_up()
    assert source.archive.indexes() == [1]
    assert source.wrong() == []


def test_a_flipped_byte_is_named(source: Source) -> None:
    backup = source.back_up()
    for name, file in backup.files.items():
        at = file.length * 2 // 3
        flip(source.disk, f"{BACKUP}/{name}", at)
        assert source.wrong() == [(name, at // BLOCK * BLOCK)]
        flip(source.disk, f"{BACKUP}/{name}", at)
    assert source.wrong() == []


def test_a_file_that_is_short_or_gone_is_named(source: Source) -> None:
    source.back_up()
    log = hours(NOW)[0]
    file = source.disk.open(f"{BACKUP}/{log}")
    file.truncate(70_000)
    source.disk.unlink(f"{BACKUP}/names")
    assert sorted(source.wrong()) == [(log, 70_000), ("names", 0)]


def test_the_next_backup_repairs_what_it_copies(source: Source) -> None:
    source.back_up()
    log = hours(NOW)[0]
    flip(source.disk, f"{BACKUP}/{log}", 1000)
    source.fill(NOW)
    source.back_up()
    assert source.wrong() == source.wrong(1) == []


def test_a_manifest_that_does_not_verify_is_none(source: Source) -> None:
    source.back_up()
    source.fill(NOW)
    source.back_up()
    flip(source.disk, f"{BACKUP}/manifest-2.json", 100)
    with pytest.raises(DamagedFile):
        source.archive.read()
    assert source.archive.read(1).index == 1
    source.fill(NOW)
    source.back_up()
    assert source.archive.indexes() == [3]


def test_files_that_a_node_sends_must_be_those_of_its_manifest(source: Source) -> None:
    manifest = source.manifest()
    file = next(file for file in manifest.files if file.name == hours(NOW)[0])
    with pytest.raises(DamagedFile, match="twice"):
        source.archive.copy(file.name, file.length, file.crc, lambda at, most: bytes(min(most, 5000)))
    with pytest.raises(ConfigError):
        source.archive.copy("../identity", 1, 0, lambda at, most: b"x")


def test_a_newer_format_is_refused_in_words(source: Source) -> None:
    backup = source.back_up()
    for newer in (structs.replace(backup, format=FORMAT + 1), structs.replace(backup, feature_level=99)):
        with pytest.raises(ConfigError, match="newer hadelay"):
            source.archive.finish(newer, 2)
        with pytest.raises(ConfigError, match="newer hadelay"):
            source.archive.read()


def test_a_development_versions_backup_is_refused_in_words(source: Source) -> None:
    backup = source.back_up()
    with pytest.raises(ConfigError, match=f"development version .* commit {LAST_DEVELOPMENT} "):
        source.archive.finish(structs.replace(backup, format=FORMAT - 1), 2)


def test_two_at_once_are_refused(source: Source) -> None:
    with pytest.raises(ConfigError, match="another backup is writing to"):
        LocalBackups(source.disk, BACKUP).prepare()


@pytest.mark.parametrize("which", range(8))
def test_a_file_whose_sync_failed_is_not_taken_for_durable_by_the_next_try(which: int) -> None:
    """The page cache looks whole: what is read back has to come from the disk."""
    source = Source(seed=which)
    source.archive.files.prepare()
    source.fill(NOW, NOW + 50)
    manifest, syncs = source.manifest(), 0

    def fail_the_nth(step: str, path: str) -> None:
        nonlocal syncs
        if step == "sync" and path.startswith(BACKUP):
            source.disk.fail_syncs = int(syncs == which)
            syncs += 1

    source.disk.watch = fail_the_nth
    with pytest.raises(OSError, match="fdatasync"):
        source.back_up()
    source.disk.watch, source.disk.fail_syncs = None, 0
    source.storage.exports.release(manifest)
    source.back_up()
    source.disk.power_cut()
    assert source.wrong() == []


@pytest.mark.parametrize("seed", range(20))
def test_a_power_cut_brings_no_older_backup_back_without_its_files(seed: int) -> None:
    source = Source(seed=seed)
    source.archive.files.prepare()
    for _ in range(3):
        source.fill(NOW)
        source.back_up(keep=1)
    source.disk.power_cut()
    assert 3 in source.archive.indexes()
    for index in source.archive.indexes():
        assert source.wrong(index) == []
