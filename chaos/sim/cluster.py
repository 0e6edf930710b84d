"""A cluster of real nodes in one world: machines with their disks and clocks, processes that come and go on them.

Everything of a node runs but HTTP: the state machine, storage and recovery, the Raft adapter with the real PySyncObj,
group commit and dispatcher.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from chaos.sim.door import Door
from chaos.sim.machines import Machine, Process
from chaos.sim.network import NetworkProfile
from chaos.sim.receiver import Caller
from chaos.sim.runtime import SimWorld
from chaos.sim.tables import SimBackend
from chaos.sim.watch import Watch
from chaos.sim.workload import HOUR_S, Workload
from hadelay.api.service import Actor
from hadelay.errors import HadelayError
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
    """See the module."""

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
        #: Brief syncs run on the loop, as in the real runtime: a slow one holds its node up.
        brief = random.Random(f"{seed} brief").random() < BRIEF
        world = world or SimWorld(seed, epoch_ms=epoch_ms)
        self.sync, self.group, self.window_ms = sync, group, window_ms
        rng = world.random
        #: Small: whoever lags gets files, not entries.
        self.journal_keep_bytes = rng.choice((0, 30_000, 1 << 30))
        self.checkpoint_bytes = rng.choice((1 << 15, 1 << 18, 1 << 20))
        self.far_buffer_bytes = rng.choice((1 << 14, 1 << 20, 1 << 20))
        super().__init__(world, names, profile, brief=brief, restart=restart, only=only)
        #: Those it was founded with; `names` are the members that are meant to be there now.
        self.founders = names
        self.workload = workload or Workload()
        self.door = Door(self)
        #: There is a fuzz client (chaos/sim/fuzz.py), and heads of chains are written down early.
        self.fuzzed = random.Random(f"{seed} fuzz").random() < FUZZED
        #: How long all machines were suspended: their monotonic clocks drifted apart, and nobody heard of a leader.
        self.slept_s = 0.0
        self.on_boot: list[Callable[[Node], None]] = []

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
        process.node, process.raft, process.service = node, node.raft, NodeService(node)
        self.note(f"starts at index {node.raft.applied_index}, journal to {node.raft.last_index}", process.name)

    def _look_at_journal(self, machine: Machine, journal: Journal) -> None:
        """I14: what this disk was said to have is there after a restart."""
        at, known = machine.held, self.applied.get(machine.held)
        if known is None or at <= journal.base_index:
            return
        gone = at > journal.last_index or journal.term_at(at) != known[0]
        text = f"{machine.name} had entry {at} and lost it: its journal ends at {journal.last_index}"
        self.decide("I14 durability, restart", gone, text, who=machine.name)

    def _note_held(self, machine: Machine, journal: Journal) -> None:
        """Its process ends: what it called synced, as far as that is committed."""
        machine.had = max(machine.had, journal.synced_index)
        at = min(journal.synced_index, max(self.applied, default=0))
        while at > journal.base_index and (at not in self.applied or self.applied[at][0] != journal.term_at(at)):
            at -= 1
        machine.held = at

    def transfer(self, asked: Process, to: str | None) -> None:
        count = self.history.count
        self.door.ask(
            asked,
            lambda service: service.cluster.transfer(to, Actor()),
            lambda result, error: count("transferred", error is None),
            8.0,
        )

    def _ending(self, machine: Machine, process: Process) -> None:
        self.count_node(process)
        if process.node is not None:
            self._note_held(machine, process.node.raft.journal)

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
