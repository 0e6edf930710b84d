"""The simulated disk may lose what the rules of platform/disk.py allow, and nothing else."""

from __future__ import annotations

import random

import pytest

from chaos.sim.disk import SECTOR, SimCrash, SimDisk, SimFile
from chaos.sim.runtime import SimRuntime, SimWorld
from hadelay.platform.disk import Disk, File
from hadelay.platform.runtime import Runtime


def disk(seed: int = 1, **more: int) -> SimDisk:
    d = SimDisk(random.Random(seed), **more)
    d.makedirs("/d")
    d.sync_everything()
    return d


def test_synced_bytes_survive_and_others_may_go():
    outcomes = set()
    for seed in range(60):
        d = disk(seed)
        f = d.open("/d/a", create=True)
        f.pwrite(b"x" * 10, 0)
        f.sync()
        d.sync_dir("/d")
        f.pwrite(b"y" * 10, 10)
        d.power_cut()
        data = d.open("/d/a").pread(100, 0)
        assert data[:10] == b"x" * 10
        outcomes.add(data[10:])
    assert outcomes == {b"", b"y" * 10}


def test_a_name_needs_sync_dir():
    seen = set()
    for seed in range(60):
        d = disk(seed)
        f = d.open("/d/a", create=True)
        f.pwrite(b"x", 0)
        f.sync()
        d.power_cut()
        seen.add(d.exists("/d/a"))
    assert seen == {True, False}


def test_a_rename_is_atomic():
    for seed in range(60):
        d = disk(seed)
        for name, data in (("old", b"1"), ("new", b"2")):
            f = d.open(f"/d/{name}", create=True)
            f.pwrite(data, 0)
        d.sync_everything()
        d.rename("/d/new", "/d/old")
        d.power_cut()
        assert d.copy() in ({"/d/old": b"1", "/d/new": b"2"}, {"/d/old": b"2"})


def test_writes_survive_in_any_subset_and_tear_at_sectors():
    kept = set()
    for seed in range(200):
        d = disk(seed)
        f = d.open("/d/a", create=True)
        f.pwrite(bytes(4 * SECTOR), 0)
        d.sync_everything()
        f.pwrite(b"1" * SECTOR * 2, 0)
        f.pwrite(b"2" * SECTOR * 2, 2 * SECTOR)
        d.power_cut()
        data = d.open("/d/a").pread(4 * SECTOR, 0)
        sectors = [data[i * SECTOR : (i + 1) * SECTOR] for i in range(4)]
        assert all(len(set(s)) == 1 for s in sectors)
        kept.add(tuple(s[0] for s in sectors))
    assert len(kept) > 10


def test_kill_keeps_the_page_cache_and_frees_locks():
    d = disk()
    f = d.open("/d/a", create=True)
    f.pwrite(b"abc", 0)
    lock = d.lock("/d/lock")
    with pytest.raises(BlockingIOError):
        d.lock("/d/lock")
    d.kill()
    assert d.open("/d/a").pread(3, 0) == b"abc"
    d.lock("/d/lock")
    assert lock is not None
    with pytest.raises(SimCrash):
        f.pwrite(b"late", 0)


def test_a_map_sees_later_writes_even_when_the_file_grows():
    d = disk()
    f = d.open("/d/a", create=True)
    f.allocate(100)
    view = f.map(100)
    f.allocate(100_000)
    f.pwrite(b"hello", 95)
    assert bytes(view[95:]) == b"hello"
    with pytest.raises(AssertionError, match="SIGBUS"):
        f.truncate(10)
    del view
    f.truncate(10)


def test_full_disk_and_failing_sync():
    d = disk(capacity=1000)
    f = d.open("/d/a", create=True)
    f.pwrite(bytes(900), 0)
    with pytest.raises(OSError, match="full"):
        f.allocate(2000)
    f.pwrite(b"1" * 10, 0)
    d.sync_dir("/d")
    d.fail_syncs = 1
    with pytest.raises(OSError, match="fdatasync"):
        f.sync()
    f.sync()
    d.power_cut()
    assert d.free("/d") == (1000 - d.used, 1000)


def test_crash_at_the_nth_step():
    d = disk()
    f = d.open("/d/a", create=True)
    d.crash_in = 2
    f.pwrite(b"1", 0)
    with pytest.raises(SimCrash):
        f.pwrite(b"22", 1)
    d.kill()
    assert d.open("/d/a").pread(3, 0) in (b"1", b"12", b"122")


def test_spared_writes_meet_no_fault_and_count_as_no_step():
    d = disk(capacity=1000)
    f = d.open("/d/a", create=True)
    d.crash_in, d.fail_syncs = 1, 1
    with d.spared():
        f.pwrite(bytes(2000), 0)
        f.sync()
    with pytest.raises(SimCrash):
        f.pwrite(b"1", 0)
    d.kill()
    f = d.open("/d/a")
    with pytest.raises(OSError, match="fdatasync"):
        f.sync()
    with pytest.raises(OSError, match="full"):
        f.pwrite(b"1", 2000)


def test_a_thread_syncs_what_was_written_before_it_started():
    world = SimWorld(1)
    d = disk()
    runtime = SimRuntime(world, "n1", d)
    f = d.open("/d/a", create=True)
    d.sync_everything()
    f.pwrite(b"1", 0)
    d.sync_delay_s = 0.01
    done: list[object] = []
    runtime.in_thread("disk", f.sync, lambda result, error: done.append(error))
    world.run_for(0.001)  # started, not yet landed
    f.pwrite(b"2", 1)
    world.run_for(0.1)
    assert done == [None]
    seen = set()
    for _ in range(40):
        inode = d._lookup("/d/a")
        seen.add((bytes(inode.durable), len(inode.ops)))
    assert seen == {(b"1", 1)}


def test_a_crash_in_flight_keeps_a_prefix_of_the_job():
    """The second file is written after the sync of the first: it never survives without it."""
    seen = set()
    for seed in range(80):
        world = SimWorld(seed)
        d = disk(seed)
        runtime = SimRuntime(world, "n1", d)
        a, b = d.open("/d/a", create=True), d.open("/d/b", create=True)
        d.sync_everything()

        def job(a=a, b=b) -> None:
            a.pwrite(b"1", 0)
            a.sync()
            b.pwrite(b"2", 0)
            b.sync()

        runtime.in_thread("disk", job, lambda result, error: None)
        world.run_for(0.0002)
        runtime.crash()
        d.power_cut()
        content = d.copy()
        seen.add((content["/d/a"], content["/d/b"]))
    assert (b"", b"2") not in seen
    assert {(b"", b""), (b"1", b""), (b"1", b"2")} <= seen


def test_rot():
    d = disk()
    d.open("/d/a", create=True).pwrite(b"abc", 0)
    d.sync_everything()
    d.flip_bit("/d/a", 1)
    assert d.open("/d/a").pread(3, 0) == b"acc"


@pytest.mark.parametrize(("real", "simulated"), [(Disk, SimDisk), (File, SimFile), (Runtime, SimRuntime)])
def test_a_simulation_overrides_all_that_is_real(real: type, simulated: type):
    public = {name for name in vars(real) if not name.startswith("_")}
    assert public - vars(simulated).keys() <= ({"close"} if real is Runtime else set())
