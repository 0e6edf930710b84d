"""A full disk is an OSError where it is met, never a signal and never a half-truth: the last checkpoint stands."""

from __future__ import annotations

import ctypes
import errno
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support import NOW, Loop, checkpoint, messages, open_storage

from chaos.sim.disk import SimDisk
from chaos.sim.tables import SimBackend
from hadelay.errors import is_disk_full
from hadelay.platform.disk import Disk
from hadelay.storage.identity import note_damage, noted_damage
from hadelay.storage.store import Storage

FAR = NOW + 50


@pytest.fixture
def disk() -> SimDisk:
    disk = SimDisk(random.Random(1), capacity=8 << 20)
    disk.makedirs("/")
    return disk


def start(disk: SimDisk, loop: Loop) -> Storage:
    return open_storage(disk, "/data", loop, backend=lambda path: SimBackend(disk, path), far_buffer_bytes=16 << 20)


def test_filing_into_a_near_hour(disk: SimDisk) -> None:
    loop = Loop()
    storage = start(disk, loop)
    storage.hours.append(*messages(NOW, sizes=[1000] * 100))
    checkpoint(storage, loop, 1)

    def fill() -> None:
        for seed in range(100):
            storage.hours.append(*messages(NOW, sizes=[1000] * 100, seed=seed))

    with pytest.raises(OSError) as caught:
        fill()
    assert caught.value.errno == errno.ENOSPC
    disk.kill()
    disk.capacity *= 4
    storage = start(disk, loop)
    assert storage.hours.count(NOW) == 100
    storage.hours.append(*messages(NOW, sizes=[1000] * 100))
    checkpoint(storage, loop, 2)


def test_writing_far_hours_at_a_checkpoint(disk: SimDisk) -> None:
    loop = Loop()
    storage = start(disk, loop)
    storage.hours.append(*messages(FAR, sizes=[1000] * 100))
    checkpoint(storage, loop, 1)
    for seed in range(100):
        storage.hours.append(*messages(FAR + seed, sizes=[1000] * 100, seed=seed))
    with pytest.raises(OSError) as caught:
        checkpoint(storage, loop, 2)
    assert caught.value.errno == errno.ENOSPC
    assert storage.checkpointing, "a failed checkpoint is never tried again"
    disk.kill()
    storage = start(disk, loop)
    assert (storage.applied_index, storage.hours.hours()) == (1, [FAR])
    assert storage.hours.count(FAR) == 100


def test_damage_is_noted_without_space_for_its_text(disk: SimDisk) -> None:
    disk.makedirs("/data")
    full, disk.capacity = disk.capacity, disk.used
    with pytest.raises(OSError) as caught:
        note_damage(disk, "/data", "a.log: the record's CRC is wrong")
    assert caught.value.errno == errno.ENOSPC
    disk.power_cut()
    assert noted_damage(disk, "/data") == "", "the next start would read the same damaged bytes, for ever"
    disk.capacity = full
    note_damage(disk, "/data", "a.log")
    disk.power_cut()
    assert noted_damage(disk, "/data") == "a.log"


@pytest.mark.parametrize("which", range(6))
def test_a_failed_sync_ends_the_checkpoint(disk: SimDisk, which: int) -> None:
    loop = Loop()
    storage = start(disk, loop)
    storage.hours.append(*messages(FAR, sizes=[100] * 10))
    checkpoint(storage, loop, 1)
    storage.hours.append(*messages(FAR, sizes=[100] * 10, seed=1))
    storage.hours.append(*messages(NOW, sizes=[100] * 10, seed=2))
    syncs = 0

    def fail_the_nth(step: str, path: str) -> None:
        nonlocal syncs
        if step == "sync":
            disk.fail_syncs = int(syncs == which)
            syncs += 1

    disk.watch = fail_the_nth
    outcome: list[BaseException | None] = []
    storage.checkpoint(2, 1, b"", {}, outcome.append)
    loop.run()
    if which >= syncs:
        assert outcome == [None]
        return
    assert isinstance(outcome[0], OSError)
    assert outcome[0].errno == errno.EIO
    assert storage.applied_index == 1
    disk.watch, disk.fail_syncs = None, 0
    disk.power_cut()
    # Never less than what was promised; the failed commit itself may have reached the platter.
    assert start(disk, loop).applied_index in (1, 2)


def test_no_room_for_the_heads_of_chains(disk: SimDisk) -> None:
    """They are there to save time: without them a checkpoint is as whole as with them."""
    loop = Loop()
    storage = start(disk, loop)
    storage.hours.append(*messages(FAR, sizes=[10] * 100))
    storage.hours._heads.worth_writing = 50
    storage.hours.heads(FAR)
    heads = storage.hours._heads.get(FAR, 100)
    disk.capacity = disk.used
    storage.hours._heads.save(1)
    assert heads.on_disk == 0
    disk.capacity = 8 << 20
    checkpoint(storage, loop, 1)
    assert heads.on_disk == 100


@pytest.mark.parametrize("suffix", [".log", ".idx"])
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("during", [False, True])
def test_looking_at_a_far_hour_that_cannot_be_written(suffix: str, cached: bool, during: bool) -> None:
    """Who looks gets the error and the node goes on. Once there is room, what stands in the files is what would stand
    there if nobody had looked: chains and checksums, the checkpoint's too."""

    def run(looks: bool) -> dict[str, tuple[int, int]]:
        disk, loop = SimDisk(random.Random(1), capacity=8 << 20), Loop()
        disk.makedirs("/")
        storage = start(disk, loop)
        hours = FAR + np.arange(200) % 2
        storage.hours.append(*messages(hours, sizes=[10] * 200))
        checkpoint(storage, loop, 1)
        if cached:
            storage.hours.heads(FAR + 1)
        storage.hours.append(*messages(hours, sizes=[10] * 200, seed=1))
        outcome: list[BaseException | None] = []
        if during:
            storage.hours.write_some = lambda: False  # type: ignore[method-assign]
            storage.checkpoint(2, 1, b"", {}, outcome.append)
        if looks:
            charge = disk.charge
            disk.charge = lambda size, path: charge(disk.capacity if path.endswith(suffix) else size, path)  # type: ignore[method-assign]
            with pytest.raises(OSError, match="full"):
                storage.hours.entries(FAR + 1, slice(0, 200))
            disk.charge = charge  # type: ignore[method-assign]
        if during:
            del storage.hours.write_some
            loop.run()
            assert outcome == [None]
        else:
            checkpoint(storage, loop, 2)
        storage.close()
        return start(disk, loop).hours.checksums()

    assert run(looks=True) == run(looks=False)


def test_a_checkpoint_after_one_who_found_no_room_for_far_hours(disk: SimDisk) -> None:
    """What that left unwritten is written first: when there still is no room, the checkpoint ends like any other."""
    loop = Loop()
    storage = start(disk, loop)
    storage.hours.append(*messages(FAR, sizes=[1000] * 100))
    checkpoint(storage, loop, 1)
    storage.hours.append(*messages(FAR, sizes=[1000] * 100, seed=1))
    disk.capacity = disk.used
    outcome: list[BaseException | None] = []
    storage.write_out(outcome.append)
    storage.checkpoint(2, 1, b"", {}, outcome.append)
    loop.run()
    assert [isinstance(error, OSError) for error in outcome] == [True, True]


def test_a_sync_of_the_whole_file_system_that_fails_is_no_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows whose bytes are lost: perhaps those of files that were written long before."""

    def syncfs(fd: int) -> int:
        ctypes.set_errno(errno.ENOSPC)
        return -1

    paths = [str(tmp_path / str(n)) for n in range(64)]
    monkeypatch.setattr("hadelay.platform.disk._libc", SimpleNamespace(syncfs=syncfs))
    with pytest.raises(OSError, match="No space left") as caught:
        Disk().sync_files(paths, str(tmp_path))
    assert not is_disk_full(caught.value)
