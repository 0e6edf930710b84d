"""The Raft journal against a disk that loses what it may: hundreds of lives, each ended at any I/O step.

After each death: everything that was reported as synced is there, entry by entry, with term and vote, and nothing that
was never appended. Cuts of the end, segment rolls, compaction and failing syncs are part of the mix.
"""

from __future__ import annotations

import random

import pytest

from chaos.sim.disk import SimDisk
from chaos.sim.runtime import SimRuntime, SimWorld
from hadelay.raft.journal import Journal, JournalConfig
from hadelay.storage.identity import Identity

CONFIG = JournalConfig(segment_bytes=8192, tail_bytes=2000)
OWNER = Identity("c", 0, "n1")


class Life:
    """One process with the journal, and what it may rely on: `entries[index]` is the newest it appended there."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.world = SimWorld(seed)
        self.disk = SimDisk(random.Random(seed + 1))
        self.disk.makedirs("/data")
        self.disk.sync_everything()
        self.world.on_crash = lambda runtime: None
        self.synced_index, self.synced_vote = 1, (0, None)
        #: Every entry that may be there: index → {(term, command)}.
        self.written: dict[int, set[tuple[int, bytes]]] = {}
        self.entries: dict[int, tuple[int, bytes]] = {}
        self.votes: set[tuple[int, str | None]] = {(0, None)}
        self.base = 1
        self.created = False
        #: Number of syncs that began while another one ran.
        self.overlaps = 0

    def boot(self) -> None:
        self.runtime = SimRuntime(self.world, "n1", self.disk)
        self.journal: Journal | None = None
        self.dead = False
        self.world.on_crash = self._died
        self.runtime.call_soon(self._open)
        self.world.run_for(0.1)

    def _open(self) -> None:
        if Journal.exists(self.disk, "/data/raft"):
            journal = Journal.open(self.disk, "/data/raft", self.runtime, OWNER, CONFIG)
        else:
            assert not self.created, "the journal is gone"
            journal = Journal.create(self.disk, "/data/raft", self.runtime, OWNER, CONFIG)
            self.created = True
        journal.on_fatal = lambda error: self._died(self.runtime)
        journal.on_synced = self._synced
        self.journal = journal

    def _synced(self, seconds: float) -> None:
        """Rely on what a node answers for now."""
        journal = self.journal
        self.synced_index = max(self.synced_index, journal.synced_index)
        if journal.term_is_durable:
            self.synced_vote = (journal.term, journal.voted_for)

    def _died(self, runtime: SimRuntime) -> None:
        self.dead = True
        runtime.crash()

    def check(self) -> None:
        journal = self.journal
        assert journal is not None
        assert journal.last_index >= self.synced_index, "a synced entry is gone"
        assert journal.base_index <= max(self.base, 1)
        got = list(self._all())
        for command, index, term, *_ in got:
            if index <= self.synced_index:
                assert (term, command) == self.entries[index], f"entry {index} changed"
            assert (term, command) in self.written[index], f"entry {index} was never appended"
        assert [e[1] for e in got] == list(range(journal.base_index + 1, journal.last_index + 1))
        assert journal.term >= self.synced_vote[0]
        if journal.term == self.synced_vote[0]:
            assert journal.voted_for == self.synced_vote[1], "the vote was forgotten"
        assert (journal.term, journal.voted_for) in self.votes, "a vote was forgotten, or was never given"
        # What is there now counts as synced: `open` promises it.
        self.synced_index, self.synced_vote = journal.last_index, (journal.term, journal.voted_for)
        self.entries = {index: (term, command) for command, index, term, *_ in got}

    def _all(self):
        journal, index = self.journal, self.journal.base_index + 1
        while index <= journal.last_index:
            part = journal.entries(index, 3000)
            yield from part
            index += len(part)

    def work(self) -> None:
        journal, rng = self.journal, self.random
        what = rng.random()
        if what < 0.6:
            for _ in range(rng.choice((1, 1, 3, 8))):
                index, command = journal.last_index + 1, rng.randbytes(rng.choice((2, 50, 300, 1500)))
                term = max(journal.term, 1)
                journal.append(command, index, term)
                self.entries[index] = (term, command)
                self.written.setdefault(index, set()).add((term, command))
        elif what < 0.7:
            vote = (journal.term + rng.randint(0, 1), rng.choice((None, "n1", "n2")))
            if vote[0] > journal.term:
                journal.vote(*vote)
                self.votes.add(vote)
        elif what < 0.76 and journal.last_index > max(self.base, journal.base_index) + 1:
            # Only what was never committed is cut; the model: anything above the base.
            index = rng.randint(max(self.base, journal.base_index) + 1, journal.last_index)
            journal.vote(journal.term + 1, None)
            self.votes.add((journal.term, None))
            journal.truncate(index)
            self.synced_index = min(self.synced_index, index - 1)
            for gone in [i for i in self.entries if i >= index]:
                del self.entries[gone]
        elif what < 0.8 and journal.synced_index > journal.base_index + 3:
            keep = rng.randint(journal.base_index + 1, journal.synced_index)
            self.base = max(self.base, keep)
            journal.compact(keep, 0)
        snapshot = (journal.last_index, (journal.term, journal.voted_for), dict(self.entries))

        def synced() -> None:
            last, vote, entries = snapshot
            if all(self.entries.get(i) == e for i, e in entries.items() if i <= last):
                self.synced_index = max(self.synced_index, last)
            if vote[0] >= self.synced_vote[0]:
                self.synced_vote = vote

        if rng.random() < 0.2:  # no sync begins while somebody waits
            journal.when_synced(synced)
        running = len(journal._running)
        journal.kick()
        self.overlaps += len(journal._running) > running > 0


def torture(seed: int) -> int:
    """A dozen lives of one journal. Returns the number of syncs that overlapped with others."""
    life = Life(seed)
    rng, disk = life.random, life.disk
    for _ in range(12):
        life.boot()
        if life.dead:  # crashed while it opened
            disk.power_cut() if rng.random() < 0.5 else disk.kill()
            continue
        life.check()
        if rng.random() < 0.4:
            disk.crash_in = rng.randint(1, 40)
        if rng.random() < 0.15:
            disk.fail_syncs = 1
        disk.sync_delay_s = rng.choice((0.0004, 0.004, 0.01))  # on a slow disk, syncs overlap
        for _ in range(rng.randint(1, 25)):
            life.runtime.call_soon(life.work)
            life.world.run_for(rng.choice((0.0, 0.0002, 0.003, 0.01)))
            if life.dead:
                break
        life.runtime.crash()
        disk.fail_syncs = 0
        disk.power_cut() if rng.random() < 0.6 else disk.kill()
    return life.overlaps


@pytest.mark.parametrize("block", range(4))
def test_nothing_synced_is_ever_missing(block: int):
    assert sum(map(torture, range(block * 50, block * 50 + 50))) > 50
