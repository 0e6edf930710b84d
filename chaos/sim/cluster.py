"""A cluster of real nodes in one world: machines with their disks and clocks, processes that come and go on them.

Everything of a node runs but HTTP: the state machine, storage and recovery, the Raft adapter with the real PySyncObj,
group commit and dispatcher. A node that calls an error fatal ends, as its process would, and is started again like any
other; when nothing had been done to its disk that explains it, that is a violation.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from chaos.sim.disk import SimCrash, SimDisk
from chaos.sim.door import Door
from chaos.sim.file import is_injected
from chaos.sim.history import Violation
from chaos.sim.loop import SimLoop
from chaos.sim.machines import Machine, Process
from chaos.sim.network import NetworkProfile
from chaos.sim.receiver import Caller
from chaos.sim.runtime import SimRuntime, SimWorld
from chaos.sim.tables import SimBackend
from chaos.sim.watch import Watch
from chaos.sim.workload import HOUR_S, Parts, Workload
from hadelay.errors import DamagedFile, HadelayError
from hadelay.raft.journal import Journal
from hadelay.raft.ports import FOUNDING
from hadelay.server.node import Node
from hadelay.server.recover import open_node
from hadelay.server.service.node import NodeService
from hadelay.server.webhooks.webhooks import Webhooks
from hadelay.settings.node import (
    ClusterConfig,
    Config,
    DispatchConfig,
    HttpConfig,
    LimitsConfig,
    NodeConfig,
    RaftSettings,
    StorageConfig,
)

#: Share of runs that have a fuzz client.
FUZZED = 0.2
#: The share of runs in which brief syncs run on the loop; and the shortest of them that counts as a stall (seconds).
BRIEF, STALL_S = 0.4, 0.15


class SimCluster(Watch):
    """See the module. `kill`, `power_cut`, `wipe` and the like are the nemesis's tools."""

    def __init__(
        self,
        seed: int,
        *,
        names: tuple[str, ...] = ("n1", "n2", "n3"),
        sync: str = "commit",
        workload: Workload | None = None,
        window_ms: int = HOUR_S * 1000,
        epoch_ms: int = 1_790_000_000_000,
        profile: NetworkProfile | None = None,
        group: int = 0,
        world: SimWorld | None = None,
        restart: bool = True,
        only: frozenset[str] | None = None,
    ) -> None:
        self.seed, self.names, self.sync, self.group = seed, names, sync, group
        super().__init__(world or SimWorld(seed, epoch_ms=epoch_ms), profile)
        #: Those it was founded with; `names` are the members that are meant to be there now.
        self.founders = names
        self.world.on_crash = self._crashed_at_io
        self.parts = Parts(only)
        self.workload = workload or Workload()
        self.door = Door(self)
        self.restart, self.window_ms = restart, window_ms
        rng = self.world.random
        #: Small: whoever lags gets files, not entries.
        self.journal_keep_bytes = rng.choice((0, 30_000, 1 << 30))
        self.checkpoint_bytes = rng.choice((1 << 15, 1 << 18, 1 << 20))
        self.far_buffer_bytes = rng.choice((1 << 14, 1 << 20, 1 << 20))
        #: There is a fuzz client (chaos/sim/fuzz.py), and heads of chains are written down early.
        self.fuzzed = random.Random(f"{seed} fuzz").random() < FUZZED
        #: Brief syncs run on the loop, as in the real runtime: a slow one holds its node up.
        self.brief = random.Random(f"{seed} brief").random() < BRIEF
        self.machines |= {name: self._machine(name) for name in names}
        #: A change of the members that is under way.
        self.changing = ""
        self.healed_at = float("inf")
        #: How long all machines were suspended: their monotonic clocks drifted apart, and nobody heard of a leader.
        self.slept_s = 0.0
        #: Nodes in whose files bits flipped: they may meet damage, and begin anew.
        self.rotten: set[str] = set()
        self.on_boot: list[Callable[[Node], None]] = []

    def _machine(self, name: str) -> Machine:
        rng = self.world.random
        disk = SimDisk(random.Random(f"{self.seed} disk {name}"), record=self.world.record)
        return Machine(name, disk, rng.uniform(-50e-6, 50e-6), rng.randint(-60, 60))

    # -- members

    def join(self, name: str) -> None:
        """A machine with an empty disk, or that of a former member, whose file names the members and itself. It still
        has to be added."""
        machine = self.machines[name] = self.retired.pop(name) if name in self.retired else self._machine(name)
        machine.founded, machine.others = True, self.names
        self.names = (*self.names, name)
        self.start(name)

    def retire(self, name: str) -> None:
        """It was removed, and is switched off."""
        process = self.process(name)
        node = process.node if process is not None else None
        keeps = node is not None and name not in node.raft.membership.names and node.raft.journal.incarnation > FOUNDING
        self.kill(name)
        self.retired[name] = machine = self.machines.pop(name)
        if not keeps:
            # A founder is not let in again with its disk; another would look for the members of then, who may be gone.
            self._blank(machine)
        self.names = tuple(other for other in self.names if other != name)

    # -- processes

    def config(self, name: str) -> Config:
        machine = self.machines[name]
        peers = sorted({name, *(machine.others or self.founders)})
        return Config(
            node=NodeConfig(name=name, data_dir="/data"),
            cluster=ClusterConfig(id="sim", init=not machine.founded, group=self.group),
            http=HttpConfig(no_leader_wait_ms=1000),
            raft=RaftSettings(peers={n: f"{n}:1" for n in peers}, segment_bytes=64 << 10, max_entry_bytes=4 << 10),
            dispatch=DispatchConfig(sync=self.sync, sweep_ms=2000, preload_ms=3000),  # type: ignore[arg-type]
            limits=LimitsConfig(commit_timeout_ms=3000, idempotency_window_ms=self.window_ms),
            storage=StorageConfig(
                checkpoint_bytes=self.checkpoint_bytes,
                checkpoint_interval_ms=4000,
                far_buffer_bytes=self.far_buffer_bytes,
                min_free_bytes=1 << 20,
            ),
        )

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
        machine = self.machines[process.name]

        def fatal(error: BaseException) -> None:
            self._fatal(process, error)

        config = self.config(process.name)
        process.network.members = frozenset(config.members) - {process.name}
        try:
            node = open_node(
                config,
                machine.disk,
                process.network,
                process.runtime,
                fatal,
                backend=lambda path: SimBackend(machine.disk, path),
            )
        except (HadelayError, OSError) as error:
            self._fatal(process, error)
            return
        machine.founded = True
        self._look_at_journal(machine, node.raft.journal)
        self.safety.reopened(machine.name, node.raft.journal)
        node.raft.config = replace(node.raft.config, journal_keep_bytes=self.journal_keep_bytes)
        if self.fuzzed:
            node.storage.hours._heads.worth_writing = 8
        self._observe(process, node)
        if self.receiver is not None:
            Webhooks(node, Caller(self.receiver, process).call)
        for hook in self.on_boot:
            hook(node)
        node.start()
        process.node, process.service = node, NodeService(node)
        self.note(f"starts at index {node.raft.applied_index}, journal to {node.raft.last_index}", process.name)

    def _fatal(self, process: Process, error: BaseException) -> None:
        machine = self.machines[process.name]
        self.note(f"ends itself: {error!r}", process.name)
        self.history.count("checked I17 fail-stop, own error")
        self.history.count("checked I17 fail-stop, failed sync", machine.disk.failed_syncs > process.failed_before)
        rotten = isinstance(error, DamagedFile) and process.name in self.rotten
        if not rotten and not is_injected(error):
            self.violate(
                Violation("I17 fail-stop, own error", f"{process.name} ended itself: {error!r}", who=process.name)
            )
        if machine.process is process:
            # Not from inside its own call: the stack below still belongs to it.
            process.runtime.crash()
            self.world.at(self.world.now, self._end, machine, process)
            if rotten:
                self.history.count("rot ended a node")
                # A node that meets damage while it applies begins anew; for one that does not start, the operator does
                # what the error says.
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

    def _look_at_journal(self, machine: Machine, journal: Journal) -> None:
        """I14: what this disk was said to have is there after a restart."""
        at, known = machine.held, self.applied.get(machine.held)
        if known is None or at <= journal.base_index:
            return
        self.history.count("checked I14 durability, restart")
        if at > journal.last_index or journal.term_at(at) != known[0]:
            text = f"{machine.name} had entry {at} and lost it: its journal ends at {journal.last_index}"
            self.violate(Violation("I14 durability, restart", text, who=machine.name))

    def _note_held(self, machine: Machine, journal: Journal) -> None:
        """Its process ends: what it called synced, as far as that is committed."""
        machine.had = max(machine.had, journal.synced_index)
        at = min(journal.synced_index, max(self.applied, default=0))
        while at > journal.base_index and (at not in self.applied or self.applied[at][0] != journal.term_at(at)):
            at -= 1
        machine.held = at

    def _end(self, machine: Machine, process: Process) -> None:
        self.count_node(process)
        if process.node is not None:
            self._note_held(machine, process.node.raft.journal)
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
        """kill -9."""
        machine = self.machines[name]
        if machine.process is not None:
            self._end(machine, machine.process)
        machine.disk.kill()

    def power_cut(self, *names: str) -> None:
        for name in names:
            self.kill(name)
            self.machines[name].disk.power_cut()

    def stop(self, name: str) -> None:
        """A clean end, as SIGTERM's is."""
        process = self.machines[name].process
        if process is not None:
            if process.node is not None:
                with suppress(SimCrash, OSError):
                    process.node.stop()
            self.kill(name)

    def wipe(self, name: str) -> None:
        """The disk is replaced by an empty one."""
        self.kill(name)
        self._blank(self.machines[name])

    def _blank(self, machine: Machine) -> None:
        machine.disk.wipe()
        self._forget(machine)

    def _forget(self, machine: Machine) -> None:
        """Its node begins anew: it has promised nothing."""
        machine.held = 0
        self.terms.pop(machine.name, None)
        self.admitted.discard(machine.name)
        self.safety.wiped(machine.name)

    def step_clock(self, name: str, stepped_ms: int) -> None:
        """From now on its wall clock is off by this much (besides its own small error)."""
        machine = self.machines[name]
        if machine.process is not None:
            machine.process.runtime.step_wall(stepped_ms - machine.stepped_ms)
        machine.stepped_ms = stepped_ms

    @property
    def leaders(self) -> dict[int, str]:
        """Term → name of its leader."""
        return self.safety.leaders

    def process(self, name: str | None) -> Process | None:
        machine = self.machines.get(name or "")
        return machine.process if machine is not None else None

    def any_process(self, rng: random.Random) -> Process | None:
        """Some node that a client may try: it may be paused, cut off, or only starting."""
        running = [m.process for m in self.machines.values() if m.process is not None]
        return rng.choice(running) if running else None

    def count_node(self, process: Process) -> None:
        """What only the node knows, added to the history's counts."""
        self.history.count("a sync held its node up", sum(stall_s >= STALL_S for stall_s in process.runtime.stalls))
        if process.node is not None:
            self.history.count("snapshot installed", process.node.raft.stats.snapshots_installed)
            self.history.count("checkpoint", process.node.checkpoints.count)
            self.history.count("rot was mended", process.node.repairer.repaired if self.rotten else 0)

    def nodes(self) -> list[Node]:
        return [m.process.node for m in self.machines.values() if m.process is not None and m.process.node is not None]

    def leader(self) -> Node | None:
        """The leader of the newest term."""
        leading = [node for node in self.nodes() if node.leading]
        return max(leading, key=lambda node: node.leading) if leading else None

    # -- looking

    @property
    def pulled(self) -> tuple[str, ...]:
        """Topics that consumers receive from."""
        return self.workload.topics if self.receiver is None else self.workload.topics[:-1]

    def fails(self, body: bytes) -> bool:
        """What this message asks its consumer to do cannot be done: whoever tries."""
        message = self.history.message_of(body)
        if message is None or message.topic != self.workload.limited:
            return False
        return message.number % 10 < 10 * self.workload.failing
