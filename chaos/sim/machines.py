"""Machines of a simulated world, and the processes on them.

A node that calls an error fatal ends, as its process would, and is started again like any other; when nothing had been
done to its disk that explains it, that is a violation.
"""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from chaos.sim.disk import SimDisk
from chaos.sim.file import SimCrash, is_injected
from chaos.sim.history import History, Violation
from chaos.sim.leaderless import Leaderless
from chaos.sim.logsafety import LogSafety
from chaos.sim.network import NetworkProfile, SimNet, SimNetwork
from chaos.sim.runtime import SimLoop, SimRuntime, SimWorld
from chaos.sim.workload import Parts
from hadelay.errors import DamagedFile
from hadelay.raft.journal import Journal
from hadelay.raft.node import RaftNode
from hadelay.server.node import Node
from hadelay.server.service.node import NodeService

#: Seconds between two checks of Raft's log on all running nodes.
WATCH_S = 0.01
#: Limit, in seconds, of the time until a node ends after a failed sync; on a slow disk, a sync may take as long.
FAILED_S = 4.0
#: `_SLOW_DISKS`: share of machines on whose disks a sync takes long, so that syncs of the journal overlap.
#: `_SLOW_SYNC_S`: duration of such a sync, in seconds.
_SLOW_DISKS, _SLOW_SYNC_S = 0.25, 0.004


@dataclass(eq=False)
class Machine:
    """A machine: its disk and clocks, which outlive its processes, and the faults of its clocks."""

    name: str
    disk: SimDisk
    drift: float
    wall_offset_ms: int
    #: Error, in ms, that a fault has added to the wall clock.
    stepped_ms: int = 0
    process: Process | None = None
    founded: bool = False
    #: Names of the other nodes in the machine's configuration file.
    others: tuple[str, ...] = ()
    #: Newest entry that the node's journal ever reported as synced.
    had: int = 0
    #: Newest committed entry that was synced when the last process ended: the next process must still have this entry.
    durable: int = 0


class OpenCall(Protocol):
    """A client's call on a process, until its answer."""

    def broken(self) -> None:
        """Called when the process has ended: the caller gets no answer, and cannot know the outcome of the call."""

    def hang_up(self) -> None:
        """Called when the caller has closed its connection."""


@dataclass(eq=False)
class Process:
    """One process of a node, from its start to its end."""

    name: str
    runtime: SimRuntime
    network: SimNetwork
    #: Event loop of the process, on virtual time.
    loop: SimLoop
    #: Raft node, and node of the process; None until started. If only Raft is simulated, `node` stays None.
    raft: RaftNode | None = None
    node: Node | None = None
    calls: list[OpenCall] = field(default_factory=list)
    #: Receives that this process relays to the leader.
    relays: set[OpenCall] = field(default_factory=set)
    #: Number of failed syncs of the disk before the process began.
    failed_before: int = 0
    #: Time of this process's first failed sync.
    failed_at: float | None = None
    #: Service of the node that answers clients (as HTTP does); set together with `node`.
    service: NodeService = field(init=False)


class Machines:
    """Base of SimCluster and RaftSim, which start their own kinds of nodes. Faults use `kill`, `power_cut`, `wipe` and
    similar methods.

    brief: brief syncs run on the loop. restart: a process that ended by itself is started again. only: see Parts."""

    def __init__(
        self, world: SimWorld, names: tuple[str, ...], profile: NetworkProfile | None = None, *, brief: bool = False,
        restart: bool = True, only: frozenset[str] | None = None, quiet_s: float,
    ) -> None:  # fmt: skip
        """quiet_s: time after a heartbeat in which a follower must not request votes."""
        self.world, self.seed, self.names, self.brief, self.restart = world, world.seed, names, brief, restart
        world.on_crash = self._crashed_at_io
        self.history, self.net, self.parts = History(), SimNet(world, profile), Parts(only)
        self.safety = LogSafety(self.net, self.decide, quiet_s=quiet_s)
        self.violations: list[Violation] = []
        self.leaderless = Leaderless(self.net, self.decide)
        self.machines: dict[str, Machine] = {name: self._machine(name) for name in names}
        #: Machines whose nodes are no members any more.
        self.retired: dict[str, Machine] = {}
        #: Node → its newest durable Raft term.
        self.terms: dict[str, int] = {}
        #: Nodes that know a Raft term and are allowed to vote.
        self.admitted: set[str] = set()
        #: Nodes with flipped bits in their files: such a node may find the damage, and start again with an empty disk.
        self.rotten: set[str] = set()
        self.lost_answers = 0.0
        #: Times of cold starts: no node knew cluster time, so the nodes took it from their wall clocks.
        self.cold_starts: list[float] = []
        #: Largest error, in ms, of a node's cluster time if the node learned it only from slow answers.
        self.doubt_ms = 0.0
        #: Member change that is under way, such as "add m1"; "": none.
        self.changing = ""
        self.healed_at = float("inf")
        world.after(WATCH_S, self._watch)

    def _machine(self, name: str) -> Machine:
        rng = self.world.random
        disk = SimDisk(random.Random(f"{self.seed} disk {name}"), record=self.world.record)
        return Machine(name, disk, rng.uniform(-50e-6, 50e-6), rng.randint(-60, 60))

    def slow_some_disks(self) -> None:
        """Give a drawn share of the machines slow disks."""
        for name, machine in self.machines.items():
            if random.Random(f"{self.seed} slow disk {name}").random() < _SLOW_DISKS:
                machine.disk.sync_delay_s = machine.disk.usual_sync_s = _SLOW_SYNC_S

    def note(self, text: str, who: str = "nemesis") -> None:
        self.history.note(self.world.now, who, text)

    def violate(self, violation: Violation) -> None:
        self.note(f"VIOLATION {violation}", violation.who or "nemesis")
        self.violations.append(violation)

    def decide(self, promise: str, broken: bool, text: str, *ids: int, who: str = "") -> None:
        """Count a case in which a promise was checked, and note a violation if it was broken."""
        try:
            self.history.decide(promise, broken, text, *ids, who=who)
        except Violation as violation:
            self.violate(violation)

    def raise_first(self) -> None:
        """Raise the first Violation so far, if any."""
        for violation in self.violations:
            raise violation

    def start_all(self) -> None:
        for name in self.names:
            self.start(name)

    def start(self, name: str) -> None:
        machine = self.machines.get(name)
        if machine is None or machine.process is not None:
            return
        runtime = SimRuntime(
            self.world,
            name,
            machine.disk,
            drift=machine.drift,
            wall_offset_ms=machine.wall_offset_ms + machine.stepped_ms,
            brief=self.brief,
        )
        network, failed = self.net.network(name, runtime), machine.disk.failed_syncs
        process = Process(name, runtime, network, SimLoop(runtime), failed_before=failed)
        machine.process = process
        runtime.call_soon(self._boot, process)

    def _boot(self, process: Process) -> None:
        """Start a node in the process."""
        raise NotImplementedError

    def transfer(self, asked: Process, to: str | None) -> None:
        """Ask this process for a transfer of leadership to node `to`; None: to any other node."""
        raise NotImplementedError

    def _fatal(self, process: Process, error: BaseException) -> None:
        machine = self.machines[process.name]
        self.note(f"ends itself: {error!r}", process.name)
        self.history.count("checked I17 fail-stop, failed sync", machine.disk.failed_syncs > process.failed_before)
        rotten = isinstance(error, DamagedFile) and process.name in self.rotten
        text = f"{process.name} ended itself: {error!r}"
        self.decide("I17 fail-stop, own error", not rotten and not is_injected(error), text, who=process.name)
        if machine.process is process:
            # End the process in a later event: the call stack still runs its code.
            process.runtime.crash()
            self.world.at(self.world.now, self._end, machine, process)
            if rotten:
                self.history.count("rot ended a node")
                # A node that finds damage while it applies entries starts again with an empty disk. If a node refuses
                # to start, the simulated operator follows the advice in its error.
                self.world.at(self.world.now, self._forget if process.node is not None else self._blank, machine)
            self._restart_later(process.name)

    def _crashed_at_io(self, runtime: SimRuntime) -> None:
        machine = self.machines[runtime.name]
        if machine.process is not None and machine.process.runtime is runtime:
            self.note("crashes at an I/O step", runtime.name)
            self.history.count("crashed at an I/O step")
            self.kill(runtime.name)
            self._restart_later(runtime.name)

    def _restart_later(self, name: str) -> None:
        if self.restart:
            self.world.after(self.world.random.uniform(0.05, 2.0), self.start, name)

    def _ending(self, machine: Machine, process: Process) -> None:
        """Called before a process ends."""

    def _end(self, machine: Machine, process: Process) -> None:
        self._ending(machine, process)
        process.runtime.crash()
        process.network.close()
        for call in list(process.calls):
            call.broken()
        process.calls.clear()
        for relayed in process.relays:
            relayed.hang_up()
        process.loop.close()
        if machine.process is process:
            machine.process = None
            machine.disk.kill()

    def kill(self, name: str) -> None:
        """End the process at once, as SIGKILL does."""
        machine = self.machines[name]
        if machine.process is not None:
            self._end(machine, machine.process)
        machine.disk.kill()

    def power_cut(self, *names: str) -> None:
        for name in names:
            self.kill(name)
            self.machines[name].disk.power_cut()

    def stop(self, name: str) -> None:
        """End the process cleanly, as SIGTERM does."""
        process = self.machines[name].process
        if process is not None:
            if process.node is not None:
                with suppress(SimCrash, OSError):
                    process.node.stop()
            self.kill(name)

    def wipe(self, name: str) -> None:
        self.kill(name)
        self._blank(self.machines[name])

    def _blank(self, machine: Machine) -> None:
        machine.disk.wipe()
        self._forget(machine)

    def _forget(self, machine: Machine) -> None:
        """Forget the durable term, votes and entries recorded for the machine's node, because its disk is now empty."""
        machine.durable = 0
        self.terms.pop(machine.name, None)
        self.admitted.discard(machine.name)
        self.safety.wiped(machine.name)

    def step_clock(self, name: str, stepped_ms: int) -> None:
        """Set the offset of the machine's wall clock, in addition to the clock's own small error."""
        machine = self.machines[name]
        if machine.process is not None:
            machine.process.runtime.step_wall(stepped_ms - machine.stepped_ms)
        machine.stepped_ms = stepped_ms

    def leading(self) -> RaftNode | None:
        """The Raft node that leads the newest term."""
        return max((raft for raft in self.rafts() if raft.is_leader), key=lambda raft: raft.term, default=None)

    def rafts(self) -> list[RaftNode]:
        return [m.process.raft for m in self.machines.values() if m.process is not None and m.process.raft is not None]

    def process(self, name: str | None) -> Process | None:
        machine = self.machines.get(name or "")
        return machine.process if machine is not None else None

    def any_process(self, rng: random.Random) -> Process | None:
        """Draw a running process that a client may ask; its node may be paused, cut off, or still starting. None if no
        process runs."""
        running = [m.process for m in self.machines.values() if m.process is not None]
        return rng.choice(running) if running else None

    def _watch(self) -> None:
        """In a loop: check I13 (safety of Raft's log), syncs and terms on all running processes."""
        self.world.after(WATCH_S, self._watch)
        stirred: dict[str, RaftNode] = {}
        for name, machine in self.machines.items():
            process = machine.process
            if process is None or process.raft is None or process.runtime.crashed:
                continue
            self._watch_syncs(machine, process)
            if process.runtime.stirred():
                stirred[name] = process.raft
                self._watch_process(process, process.raft)
                self._watch_votes(name, process.raft.journal)
        self.safety.look(stirred)
        self.leaderless.look(self.rafts(), self._undisturbed)

    def _undisturbed(self) -> list[RaftNode]:
        """Running members that may lead, and that no fault slows down."""
        return [raft for name in self.names if (raft := self._fit_node(name)) is not None]

    def _fit_node(self, name: str) -> RaftNode | None:
        """The Raft node, if it runs, may lead, and is not slowed down by a fault; otherwise None."""
        process, disk = self.process(name), self.machines[name].disk
        if process is None or process.raft is None or process.runtime.crashed or process.runtime.busy:
            return None
        if disk.sync_delay_s > disk.usual_sync_s or disk.fail_syncs or not process.raft.elections.eligible:
            return None
        return process.raft

    def _watch_process(self, process: Process, raft: RaftNode) -> None:
        """Called for each process that did something since the last check."""

    def _watch_syncs(self, machine: Machine, process: Process) -> None:
        """I17: a node whose sync failed has to end, because it cannot know what its disk holds."""
        if machine.disk.failed_syncs == process.failed_before or process.runtime.paused:
            process.failed_at = None
            return
        process.failed_at = self.world.now if process.failed_at is None else process.failed_at
        if self.world.now > process.failed_at + FAILED_S:
            process.failed_before = machine.disk.failed_syncs
            text = f"{machine.name} still runs {FAILED_S:.0f} s after a sync of its disk failed"
            self.violate(Violation("I17 fail-stop, failed sync", text, who=machine.name))

    def _watch_votes(self, name: str, journal: Journal) -> None:
        """Check that a node's durable Raft term never goes back. A term that is not durable yet does not count: no
        other node has seen it."""
        if not journal.all_synced:
            return
        if journal.term:
            text = f"the term of {name} went back to {journal.term}"
            self.decide("I13 log safety, term", journal.term < self.terms.get(name, 0), text, who=name)
        self.terms[name] = journal.term
        (self.admitted.add if journal.admitted and journal.term else self.admitted.discard)(name)
