"""Syncs of the journal that overlap on a slow disk (ADR 260): each counts only after all that began before it.

Crashes between any two steps of them, seeded: tests/sim/test_journal_torture.py.
"""

from __future__ import annotations

import random

from chaos.sim.disk import SimDisk
from chaos.sim.runtime import SimRuntime, SimWorld
from hadelay.raft.journal import Journal, JournalConfig
from hadelay.storage.identity import Identity

SYNC_S = 0.01
CONFIG = JournalConfig(segment_bytes=8192, tail_bytes=2000)
OWNER = Identity("test", 3, "n1")


class Slow:
    """A journal on a disk whose syncs take 5 to 20 ms, and which knows it after its first sync."""

    def __init__(self, sync_s: float = SYNC_S) -> None:
        self.world = SimWorld(1)
        self.disk = SimDisk(random.Random(1))
        self.runtime = SimRuntime(self.world, "n1", self.disk)
        self.journal = Journal.create(self.disk, "/raft", self.runtime, OWNER, CONFIG)
        self.errors: list[BaseException] = []
        self.journal.on_fatal = self.errors.append
        self.disk.sync_delay_s = sync_s
        self.begin(1)
        self.world.run_for(1.0)
        assert self.journal.all_synced

    def begin(self, count: int, size: int = 100) -> int:
        """Append entries and begin a sync of them, unless it has to wait. Returns the index of the last entry."""
        for _ in range(count):
            self.journal.append(bytes(size), self.journal.last_index + 1, 1)
        self.journal.kick()
        self.world.run_for(0.0002)  # the thread begins
        return self.journal.last_index

    def reopen(self) -> Journal:
        self.runtime.crash()
        self.disk.power_cut()
        return Journal.open(self.disk, "/raft", SimRuntime(self.world, "n1", self.disk), OWNER, CONFIG)


def test_records_need_not_wait_for_the_end_of_a_running_sync():
    slow = Slow()
    for _ in range(3):
        slow.begin(1)
    assert len(slow.disk.flights) == 3
    slow.begin(1)
    assert len(slow.disk.flights) == 3, "a fourth sync waits"
    slow.world.run_for(1.0)
    assert slow.journal.all_synced
    assert not slow.errors


def test_a_sync_waits_until_the_records_of_the_running_ones_are_written():
    """Else a killed process leaves half a record in front of whole ones, and its node refuses to start."""
    slow = Slow()
    slow.journal.append(bytes(100), slow.journal.last_index + 1, 1)
    slow.journal.kick()
    slow.journal.append(bytes(100), slow.journal.last_index + 1, 1)
    slow.journal.kick()
    slow.world.run_for(0.0002)
    assert len(slow.disk.flights) == 1, "the first thread had not begun"
    slow.journal.kick()
    slow.world.run_for(0.0002)
    assert len(slow.disk.flights) == 2
    slow.world.run_for(1.0)
    assert slow.journal.all_synced


def test_one_sync_of_a_fast_disk_covers_all_that_waits():
    fast = Slow(0.001)
    for _ in range(3):
        fast.begin(1)
    assert len(fast.disk.flights) == 1


def test_a_sync_that_gets_no_file_descriptor_waits_for_the_running_one():
    slow = Slow()
    (name,) = [name for name in slow.disk.listdir("/raft") if name.endswith(".seg")]
    slow.disk.bad_paths.add(f"/raft/{name}")  # the file cannot be opened again
    slow.begin(1)
    slow.begin(1)
    assert len(slow.disk.flights) == 1
    slow.world.run_for(1.0)
    assert slow.journal.all_synced
    assert not slow.errors


def test_a_sync_counts_after_those_that_began_before_it():
    slow = Slow()
    before = slow.journal.synced_index
    slow.disk.sync_delay_s = 0.1
    slow.begin(1)
    slow.disk.sync_delay_s = 0.001
    last = slow.begin(2)
    slow.world.run_for(0.01)
    assert len(slow.disk.flights) == 1, "the second one has ended"
    assert slow.journal.synced_index == before
    slow.world.run_for(1.0)
    assert slow.journal.synced_index == last
    assert slow.reopen().last_index == last


def test_the_oldest_sync_tells_how_slow_the_disk_is():
    slow = Slow()
    slow.disk.sync_delay_s = 0.1
    started = slow.runtime.monotonic()
    slow.begin(1)
    slow.disk.sync_delay_s = 0.001
    slow.begin(1)
    slow.world.run_for(0.01)
    assert slow.journal.sync_started == started


def test_a_failed_sync_counts_neither_for_itself_nor_for_those_beside_it():
    """The disk lost bytes of both; each has an open file of its own, so both hear of it."""
    slow = Slow()
    before = slow.journal.synced_index
    slow.begin(1)
    slow.disk.fail_syncs = 1
    slow.begin(1)
    slow.world.run_for(1.0)
    assert slow.journal.synced_index == before
    assert len(slow.errors) == 2


def test_a_cut_lowers_what_every_running_sync_counts_for():
    slow = Slow()
    for _ in range(3):
        slow.begin(3)
    counted: list[int] = []
    slow.journal.on_synced = lambda seconds: counted.append(slow.journal.synced_index)
    cut = slow.journal.synced_index + 2
    slow.journal.truncate(cut)
    slow.world.run_for(1.0)
    assert counted == [cut - 1] * 4, "three running syncs, and the one of the new segment"
    assert slow.reopen().last_index == cut - 1


def test_a_new_segment_is_synced_alone():
    slow = Slow()
    first = len(slow.disk.listdir("/raft"))
    most = 0
    for _ in range(30):
        slow.begin(1, 1000)
        alone = any(sync.alone for sync in slow.journal._running)
        most = max(most, len(slow.disk.flights))
        assert not alone or len(slow.journal._running) == 1
        slow.world.run_for(0.002)
    slow.world.run_for(1.0)
    assert len(slow.disk.listdir("/raft")) > first + 2
    assert most == 3
    assert slow.reopen().last_index == slow.journal.last_index


def test_a_segment_is_not_deleted_while_a_sync_of_it_runs():
    slow = Slow()
    slow.begin(50)
    slow.world.run_for(1.0)
    (name,) = [name for name in slow.disk.listdir("/raft") if name.endswith(".seg")]
    for term in (3, 4):
        slow.journal.vote(term, "n2")
        slow.begin(0)
    assert len(slow.disk.flights) == 2
    slow.begin(1, 2000)  # a new segment, whose sync waits
    slow.journal.compact(slow.journal.synced_index, 0)
    assert slow.journal.base_index == 1, "it stays for now"
    slow.world.run_for(1.0)
    slow.journal.compact(slow.journal.synced_index, 0)
    slow.world.run_for(1.0)
    assert name not in slow.disk.listdir("/raft")


def test_callers_that_wait_for_the_disk_are_called_while_no_sync_runs():
    """A callback may replace the journal's files, as a new incarnation does."""
    slow = Slow()
    slow.begin(1)
    slow.begin(1)
    slow.journal.when_synced(lambda: slow.journal.become(77))
    slow.begin(1)
    assert len(slow.disk.flights) == 2, "nobody gets in before who waits"
    slow.world.run_for(1.0)
    assert (slow.journal.incarnation, slow.journal.all_synced, slow.errors) == (77, True, [])
    assert slow.reopen().last_index == slow.journal.last_index


def test_a_power_cut_keeps_what_the_second_of_two_syncs_made_durable():
    """The second one covers the whole file, so the first one has nothing to add when it ends after it."""
    slow = Slow()
    slow.disk.sync_delay_s = 0.1
    slow.begin(1)
    slow.disk.sync_delay_s = 0.001
    last = slow.begin(1)
    slow.world.run_for(0.01)
    assert slow.journal.synced_index < last
    assert slow.reopen().last_index == last
