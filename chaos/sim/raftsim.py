"""Simulator of Raft alone: hadelay's journal, its adapter to the library PySyncObj, and PySyncObj itself, with a state
machine that only remembers applied entries.

A simulated second costs a fifth of one with whole nodes, so a seed has 20 of them under faults.
"""

from __future__ import annotations

import json
import random
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

from chaos.sim.disk import SimDisk
from chaos.sim.machines import Machines, Process
from chaos.sim.nemesis import FAMILIES, Nemesis
from chaos.sim.run import Report, report_on
from chaos.sim.runtime import SimWorld
from chaos.sim.workload import HOUR_S
from hadelay.errors import FatalError, HadelayError
from hadelay.members import Member, Members
from hadelay.raft.journal import Journal, JournalConfig
from hadelay.raft.node import RaftNode
from hadelay.raft.ports import FOUNDING, RaftTuning
from hadelay.storage import snapshots
from hadelay.storage.identity import Identity
from hadelay.storage.snapshots import Manifest, SnapshotFile

#: `FAULTS_S`: simulated seconds with faults. `CONVERGES_S`: limit of the seconds afterwards until the nodes agree.
FAULTS_S, CONVERGES_S = 20.0, 12.0
#: Fault families that a simulation of Raft alone does not have.
_OF_NODES = {"clock_step", "stop", "full_disk", "lost_answers", "members", "rot", "backup"}
#: Fault families, and the probability that a run has each family.
FAULTS = {name: chance for name, chance in FAMILIES.items() if name not in _OF_NODES}
#: Share of runs in which all machines are suspended for hours.
_SLEEPS = 0.1
#: Share of runs in which one fault may stop two voters, among the runs with five nodes.
TWO_DOWN = 1 / 3
#: Shapes of the runs: (limit of voters that one fault may stop, number of nodes).
SHAPES = (("one down", 3), ("one down", 5), ("two down", 5))


class RaftSim(Machines):
    def __init__(self, seed: int, *, size: int = 3) -> None:
        world = SimWorld(seed)
        self.rng = world.random
        self.config = RaftTuning(
            max_entry_bytes=8000,
            journal_keep_bytes=self.rng.choice((0, 4000, 1 << 20)),
            append_bytes=self.rng.choice((300, 1 << 20)),
        )
        names = tuple(f"n{n + 1}" for n in range(size))
        super().__init__(world, names, quiet_s=self.config.election_min_ms / 1000)
        #: Index of each applied entry → (term, command), from the first node that applied it.
        self.entries: dict[int, tuple[int, bytes]] = {}
        self.acked: set[int] = set()
        #: Numbers of the commands that were refused definitely.
        self.refused: set[int] = set()
        self.number = 0
        #: Whether the run's last entry is committed; None: not proposed yet.
        self.final: bool | None = None

    def applied(self, name: str, index: int, term: int, command: bytes) -> None:
        first = self.entries.setdefault(index, (term, command))
        text = f"{name} applied {term} {command!r} at {index}, others {first}"
        self.decide("I12 divergence, entries", first != (term, command), text, who=name)

    def _boot(self, process: Process) -> None:
        name, machine = process.name, self.machines[process.name]
        disk, runtime = machine.disk, process.runtime
        config = JournalConfig(segment_bytes=16384, tail_bytes=4000)
        try:
            remembers = RaftMachine(self, process, disk)
            if Journal.exists(disk, "/data/raft"):
                journal = Journal.open(disk, "/data/raft", runtime, Identity("c", 0, name), config)
            else:
                incarnation = self.rng.randrange(2, 1 << 40) if machine.founded else FOUNDING
                owner = Identity("c", 0, name, incarnation)
                journal = Journal.create(disk, "/data/raft", runtime, owner, config)
            machine.founded = True
            self.safety.reopened(name, journal)
            raft = RaftNode(
                journal,
                process.network,
                runtime,
                remembers,
                self.config,
                members=tuple(Member(other, "") for other in sorted(self.names)),
                on_fatal=lambda error: self._fatal(process, error),
            )
            raft.set_applied(remembers.index, remembers.term)
            process.raft = raft
            raft.start()
        except (HadelayError, OSError) as error:
            self._fatal(process, error)
            return
        self.note(f"starts at index {remembers.index}, journal to {raft.last_index}, term {raft.term}", name)

    def transfer(self, asked: Process, to: str | None) -> None:
        if asked.raft is not None:
            asked.runtime.call_soon(asked.raft.transfer, to, lambda error: None)

    def run(self, nemesis: Nemesis) -> None:
        self.start_all()
        self._client()
        self._reader()
        nemesis.start()
        self._sleep()
        self._run_until(lambda: self.world.now >= FAULTS_S, 2 * FAULTS_S)
        self._run_until(self.converged, max(self.world.now, FAULTS_S) + CONVERGES_S)
        self.check()

    def _sleep(self) -> None:
        """In some runs, suspend all machines for hours between two faults; no faults come after the suspension."""
        rng = random.Random(f"{self.seed} sleep")
        if rng.random() < _SLEEPS:
            self._run_until(lambda: False, rng.uniform(0.3, 0.9) * FAULTS_S)
            self.note("hours pass")
            self.history.count("hours passed")
            self.world.now += rng.choice((1, 20)) * HOUR_S

    def check(self) -> None:
        decide, rafts = self.history.decide, self.rafts()
        state = {raft.name: (raft.applied_index, raft.last_index, raft.term, raft.leader) for raft in rafts}
        decide("I15 liveness", not self.converged(), str(state))
        first, *others = [_remembered(raft).items for raft in rafts]
        decide("I12 divergence, replicas", any(items != first for items in others), "states differ")
        numbers = Counter(item for item in first if item != -1)
        done = sorted(self.refused & numbers.keys())
        decide("I3 phantom", bool(done), f"answered as refused, and done: {done[:5]}")
        twice = sorted(n for n, times in numbers.items() if times > 1)
        decide("I8 duplicate, answered", bool(twice), f"applied twice: {twice[:5]}")
        gone = sorted(self.acked - numbers.keys())
        decide("I1 lost", bool(gone), f"{gone[:5]} of {len(self.acked)}")

    def _run_until(self, condition: Callable[[], bool], end: float) -> None:
        while self.world.now < end and not condition():
            self.world.run_for(0.2)
            self.raise_first()

    def converged(self) -> bool:
        if len(self.rafts()) < len(self.names) or self.leading() is None:
            return False
        return self.final_ok() and len({(raft.applied_index, raft.last_index) for raft in self.rafts()}) == 1

    def final_ok(self) -> bool:
        """Whether the run's last entry is committed; proposes it when there is a leader, and again after a failure."""
        leader = self.leading()
        if self.final is None and leader is not None:
            self.final = False

            def done(result: Any, error: HadelayError | None) -> None:
                self.final = True if error is None else None

            leader.propose(b'["add", -1]', done)
        return self.final is True

    def _someone(self) -> tuple[Process, RaftNode] | None:
        """Draw a node; returns its process and Raft node, or None if the process is not started or is paused."""
        process = self.process(self.rng.choice(self.names))
        if process is None or process.raft is None or process.runtime.paused:
            return None
        return process, process.raft

    def _client(self) -> None:
        if self.world.now > FAULTS_S:
            return
        self.world.after(self.rng.expovariate(12), self._client)
        if (someone := self._someone()) is None:
            return
        process, raft = someone
        for _ in range(self.rng.choice((1, 1, 2, 6))):
            self.number += 1
            n = self.number
            pad = "x" * self.rng.choice((0, 10, 700))

            def done(result: Any, error: HadelayError | None, n: int = n) -> None:
                if error is None:
                    assert result == n
                    self.acked.add(n)
                elif error.outcome_known:
                    self.refused.add(n)

            process.runtime.call_soon(raft.propose, json.dumps(["add", n, pad]).encode(), done)

    def _reader(self) -> None:
        if self.world.now <= FAULTS_S:
            self.world.after(self.rng.expovariate(8), self._reader)
            if (someone := self._someone()) is not None:
                self.read(*someone)

    def read(self, process: Process, raft: RaftNode) -> None:
        """Start a linearizable read, and check that it sees every command that was acknowledged before the read."""
        acked = frozenset(self.acked)

        def done(error: HadelayError | None) -> None:
            if error is None:
                missing = sorted(acked - set(_remembered(raft).items))
                text = f"{raft.name} has not applied {missing[:5]}"
                self.decide("stale read", bool(missing), text, who=raft.name)

        process.runtime.call_soon(raft.read_index, done)

    def _watch_process(self, process: Process, raft: RaftNode) -> None:
        if raft.is_leader and raft.term not in self.safety.leaders and not process.runtime.paused:
            self.read(process, raft)


def _remembered(raft: RaftNode) -> RaftMachine:
    return cast(RaftMachine, raft.machine)


def run_seed(seed: int, families: dict[str, float] | None = None) -> Report:
    """Run one seed. families: probability of each fault family; None: FAULTS."""
    rng = random.Random(seed)
    sim = RaftSim(seed, size=rng.choice((3, 5)))
    sim.slow_some_disks()
    chances, pace_s = FAULTS if families is None else families, rng.choice((0.2, 1.0, 2.0))
    # Draw from a separate random stream: old seeds that found bugs with one voter down then keep their runs.
    down = 2 if len(sim.names) == 5 and random.Random(f"{seed} both").random() < TWO_DOWN else 1
    nemesis = Nemesis(sim, FAULTS_S, chances, pace_s=pace_s, down=down)
    report = report_on(sim, nemesis, lambda report: sim.run(nemesis))
    report.messages, report.entries = len(sim.acked), len(sim.entries)
    report.mode, report.size = "two down" if down == 2 else "one down", len(sim.names)
    return report


class PlainMachine:
    """Base of a state machine whose members never change and whose checkpoints are never deleted; Raft's callbacks,
    such as on_leader, do nothing."""

    incarnations: dict[str, int]

    def incarnation(self, node: str) -> int | None:
        return self.incarnations.get(node)

    def members(self) -> tuple[int, Members]:
        return 0, ()

    def members_in(self, command: bytes) -> Members | None:
        return None

    def members_command(self, members: Members) -> bytes:
        raise NotImplementedError

    def _ignore(self, *_: Any) -> None:
        pass

    on_incarnation = on_members = on_link = on_leader = on_follower = on_heartbeat_info = on_message = release = _ignore


class RaftMachine(PlainMachine):
    """State machine whose state is the set of all applied numbers. A checkpoint is one file."""

    def __init__(self, sim: RaftSim, process: Process, disk: SimDisk) -> None:
        self.sim, self.process, self.disk, self.runtime = sim, process, disk, process.runtime
        self.index, self.term = 1, 0
        self.items: list[int] = []
        self.incarnations = {}
        disk.makedirs("/data")
        if disk.exists("/data/state"):
            f = disk.open("/data/state")
            self._load(f.pread(f.size(), 0))
        self.durable = self._dump()
        self.busy = False

    def _dump(self) -> bytes:
        body = json.dumps([self.index, self.term, self.items, self.incarnations]).encode()
        return b"%08x" % zlib.crc32(body) + body

    def _load(self, data: bytes) -> None:
        body = data[8:]
        assert int(data[:8], 16) == zlib.crc32(body), "torn checkpoint"
        self.index, self.term, self.items, self.incarnations = json.loads(body)

    def apply(self, index: int, term: int, command: bytes) -> Any:
        assert index > self.index, f"{self.process.name}: {index} after {self.index}"
        self.index, self.term = index, term
        kind, *values = json.loads(command)
        if kind == "inc":
            self.incarnations[values[0]] = values[1]
        else:
            self.items.append(values[0])
        self.sim.applied(self.process.name, index, term, command)
        if index % 40 == 0:
            self.runtime.call_soon(self.checkpoint)
        return values[0]

    def checkpoint(self) -> None:
        if self.busy:
            return
        self.busy = True
        data, index = self._dump(), self.index

        def done(result: Any, error: BaseException | None) -> None:
            self.busy = False
            if error is not None:
                self.sim._fatal(self.process, error)
                return
            self.durable = data
            if self.process.raft is not None:
                self.process.raft.compact(index)

        self.runtime.in_thread("disk", lambda: self.write(data), done)

    def write(self, data: bytes) -> None:
        f = self.disk.open("/data/state.new", create=True)
        f.truncate(0)
        f.pwrite(data, 0)
        f.sync()
        self.disk.rename("/data/state.new", "/data/state")
        self.disk.sync_dir("/data")

    def incarnation_command(self, node: str, incarnation: int) -> bytes:
        return json.dumps(["inc", node, incarnation]).encode()

    def heartbeat_info(self) -> bytes:
        return b"t"

    @property
    def checkpointed(self) -> int:
        index: int = json.loads(self.durable[8:])[0]
        return index if index > 1 else 0

    def manifest(self) -> Manifest | None:
        index, term, *_ = json.loads(self.durable[8:])
        if index <= 1:
            return None
        return Manifest(index, term, [SnapshotFile("state", len(self.durable), zlib.crc32(self.durable))], self.durable)

    def read_chunk(self, manifest: Manifest, name: str, offset: int, size: int) -> bytes:
        return manifest.blob[offset : offset + size]

    def install(self, manifest: Manifest) -> Installer:
        return Installer(self, manifest)


class Installer(snapshots.Installer):
    """Installer of a snapshot with one file, `state`, kept in memory until `finish`."""

    def __init__(self, machine: RaftMachine, manifest: Manifest) -> None:
        self.machine, self.manifest, self.data = machine, manifest, bytearray()

    def have(self, name: str) -> int:
        return len(self.data)

    def write(self, name: str, offset: int, data: bytes) -> None:
        assert offset == len(self.data)
        self.data += data

    def finish(self, done: Any) -> None:
        machine, data = self.machine, bytes(self.data)

        def written(result: Any, error: BaseException | None) -> None:
            if error is not None:
                fatal = FatalError(str(error))
                fatal.__cause__ = error
                done(fatal)
                return
            machine._load(data)
            machine.durable = data
            done(None)

        machine.runtime.in_thread("disk", lambda: machine.write(data), written)

    def abort(self) -> None:
        pass
