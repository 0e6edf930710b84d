"""A cluster of real nodes in one world: machines with their disks and clocks, processes that come and go on them.

Everything of a node runs but HTTP: the state machine, storage and recovery, the Raft adapter with the real PySyncObj,
group commit and dispatcher. A node that calls an error fatal ends, as its process would, and is started again like any
other; when nothing had been done to its disk that explains it, that is a violation.
"""

from __future__ import annotations

import pickle
import random
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from chaos.sim.disk import SimCrash, SimDisk
from chaos.sim.door import Call, Door
from chaos.sim.file import is_injected
from chaos.sim.history import History, Violation, number_of
from chaos.sim.logsafety import LogSafety
from chaos.sim.loop import SimLoop
from chaos.sim.network import NetworkProfile, SimNet, SimNetwork
from chaos.sim.receiver import Caller, Receiver
from chaos.sim.runtime import SimRuntime, SimWorld
from chaos.sim.tables import SimBackend
from hadelay.codec.commands import decode
from hadelay.codec.commandtypes import Command
from hadelay.codec.entries import decode_entry, members_in
from hadelay.codec.results import LeaseOutcome, LeaseResult
from hadelay.errors import DamagedFile, HadelayError
from hadelay.raft.journal import Journal
from hadelay.raft.node import RaftNode
from hadelay.raft.ports import FOUNDING
from hadelay.server.clustertime import NEAR_MS
from hadelay.server.node import Node
from hadelay.server.recover import open_node
from hadelay.server.service.node import NodeService
from hadelay.settings.node import (
    ClusterConfig,
    Config,
    DispatchConfig,
    HttpConfig,
    LimitsConfig,
    NodeConfig,
    RaftConfig,
    StorageConfig,
)

#: How often the log's safety is looked at.
WATCH_S = 0.01
HOUR_S = 3600
#: A sync may take some seconds on a slow disk, and so may the one that fails.
FAILED_S = 4.0
#: Share of runs that have a fuzz client.
FUZZED = 0.2
#: The share of runs in which brief syncs run on the loop; and the shortest of them that counts as a stall (seconds).
BRIEF, STALL_S = 0.4, 0.15
#: Of one entry in so many the results are compared as well.
_SAMPLE = 16


@dataclass(eq=False)
class Machine:
    """What outlives a process: the disk, and clocks with their faults."""

    name: str
    disk: SimDisk
    drift: float
    wall_offset_ms: int
    #: Added by the nemesis.
    stepped_ms: int = 0
    process: Process | None = None
    founded: bool = False
    #: Whom its configuration file names, besides itself.
    others: tuple[str, ...] = ()
    #: The newest entry that its journal ever called synced; and the newest one that is committed and that it called so
    #: when its last process ended: there it has to be when the next one starts.
    had: int = 0
    held: int = 0


@dataclass(eq=False)
class Process:
    """One run of one node, from its start to its end."""

    name: str
    runtime: SimRuntime
    network: SimNetwork
    #: For tasks on its virtual time.
    loop: SimLoop
    node: Node | None = None
    calls: list[Call] = field(default_factory=list)
    #: Receives that it relays to the leader.
    relays: set[Call] = field(default_factory=set)
    #: How many syncs of this disk had failed before it; and since when one of its own has.
    failed_before: int = 0
    failed_at: float | None = None
    #: Of the node, which it has too then.
    service: NodeService = field(init=False)


@dataclass(frozen=True)
class Workload:
    topics: tuple[str, ...] = ("orders", "mail", "jobs")
    #: The last of them has an administrator (chaos/sim/admin.py); a part of its messages always fails.
    max_attempts: int = 2
    failing: float = 0.3
    purges: float = 0.15
    leases_ms: tuple[int, ...] = (700, 2000, 5000)
    cancels: float = 0.04
    #: Batches that are published again, under the same key, after they were answered.
    repeated: float = 0.05
    #: Messages that have one of a few client keys; and those that are rescheduled.
    keyed: float = 0.15
    keys: int = 8
    reschedules: float = 0.08
    ttls: float = 0.15
    #: Messages that have tags; and polls that ask for some.
    tagged: float = 0.4
    tags: tuple[str, ...] = ("red", "green", "blue")
    selective: float = 0.25
    #: No delay is longer than this, but for the few that stay until the end.
    longest_ms: int = 4500
    far: float = 0.03

    @property
    def limited(self) -> str:
        return self.topics[-1]

    def delay_ms(self, rng: random.Random) -> int:
        chance = rng.random()
        if chance < self.far:
            return rng.choice((2, 5, 100)) * HOUR_S * 1000 + rng.randrange(100_000)
        if chance < 0.2:
            return rng.choice((-5000, 0, 0, 1))
        if chance < 0.6:
            return rng.randrange(1, 800)
        return rng.randrange(800, self.longest_ms)


class Parts:
    """What clients and nemesis would do in a run, each under a name and drawn from a stream of its own: so one can be
    left out, and the others stay what they were (chaos/sim/shrink.py). only: the names of those that are done, or all.
    """

    def __init__(self, only: frozenset[str] | None = None) -> None:
        self.only = only
        #: All that came up, in order.
        self.seen: list[str] = []

    def take(self, name: str) -> bool:
        self.seen.append(name)
        return self.only is None or name in self.only


class SimCluster:
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
        #: Those it was founded with; `names` are the members that are meant to be there now.
        self.founders = names
        self.world = world or SimWorld(seed, epoch_ms=epoch_ms)
        self.world.on_crash = self._crashed_at_io
        self.history = History()
        self.parts = Parts(only)
        self.workload = workload or Workload()
        self.net = SimNet(self.world, profile)
        self.safety = LogSafety(self.net, self._unsafe, quiet_s=RaftConfig().election_min_ms / 1000)
        self.door = Door(self)
        #: The receiver of the limited topic's webhook; None: it has none.
        self.receiver: Receiver | None = None
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
        self.machines = {name: self._machine(name) for name in names}
        #: Those whose nodes are no members any more.
        self.retired: dict[str, Machine] = {}
        #: A change of the members that is under way.
        self.changing = ""
        #: What each index was applied as, by whoever was first: (term, crc of entry, crc of results).
        self.applied: dict[int, tuple[int, int, int]] = {}
        #: The entries themselves: when they were first applied, where, and what.
        self.entries: dict[int, tuple[float, str, bytes]] = {}
        self.terms: dict[str, int] = {}
        #: Nodes that have heard of a term, and vote.
        self.admitted: set[str] = set()
        #: When a grant was first applied, its cluster time, and the term it was committed in.
        self.grants: dict[tuple[int, int], tuple[float, int, int]] = {}
        #: When leases that were extended end: (term, seq, position) → cluster time.
        self.extended: dict[tuple[int, int, int], int] = {}
        #: When an entry of that term was first applied.
        self.term_began: dict[int, float] = {}
        self.healed_at = float("inf")
        #: When an entry was proposed; (true seconds, now_ms) of those that were committed.
        self.proposed: dict[bytes, float] = {}
        self.stamps: list[tuple[float, int]] = []
        #: When a new leader was first seen.
        self.elected: list[float] = []
        #: When the cluster switched to the feature level of this code.
        self.switched = float("inf")
        #: When cluster time was taken from the wall clocks, because no node knew it any more.
        self.cold_starts: list[float] = []
        #: How wrong, at most, a node may have been that learnt cluster time from slow answers only.
        self.doubt_ms = 0.0
        #: How long all machines were suspended: their monotonic clocks drifted apart, and nobody heard of a leader.
        self.slept_s = 0.0
        #: Nodes in whose files bits flipped: they may meet damage, and begin anew.
        self.rotten: set[str] = set()
        self.violations: list[Violation] = []
        self.on_boot: list[Callable[[Node], None]] = []
        self.world.after(WATCH_S, self._watch)

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
            raft=RaftConfig(peers={n: f"{n}:1" for n in peers}, segment_bytes=64 << 10, max_entry_bytes=4 << 10),
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
            node.webhooks.call_by(Caller(self.receiver, process))
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
        """Who led each term."""
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
        """Whoever leads in the newest term."""
        leading = [node for node in self.nodes() if node.leading]
        return max(leading, key=lambda node: node.leading) if leading else None

    # -- looking

    @property
    def pulled(self) -> tuple[str, ...]:
        """Topics that consumers receive from."""
        return self.workload.topics if self.receiver is None else self.workload.topics[:-1]

    def fails(self, body: bytes) -> bool:
        """What this message asks its consumer to do cannot be done: whoever tries."""
        number = number_of(body)
        if number is None or number >= len(self.history.messages):
            return False
        limited = self.history.messages[number].topic == self.workload.limited
        return limited and number % 10 < 10 * self.workload.failing

    def note(self, text: str, who: str = "nemesis") -> None:
        self.history.note(self.world.now, who, text)

    def violate(self, violation: Violation) -> None:
        self.note(f"VIOLATION {violation}", violation.who or "nemesis")
        self.violations.append(violation)

    def _observe(self, process: Process, node: Node) -> None:
        """Every apply of every node goes through here."""
        machine = node.raft.machine
        apply = machine.apply

        def observed(index: int, term: int, command: bytes) -> Any:
            results = apply(index, term, command)
            # Results are costly to compare, and equal states give equal ones: a sample is enough.
            mark = (term, zlib.crc32(command), 0 if index % _SAMPLE else zlib.crc32(pickle.dumps(results)))
            first = self.applied.setdefault(index, mark)
            what = "entries" if first[:2] != mark[:2] else "results"
            if first is not mark:
                self.history.count("checked I12 divergence, entries")
                self.history.count("checked I12 divergence, results", not index % _SAMPLE)
            if first != mark:
                text = f"{node.name} applied entry {index} with other {what}"
                self.violate(Violation(f"I12 divergence, {what}", text, who=node.name))
            elif first is mark:
                self.entries[index] = (self.world.now, node.name, bytes(command))
                self._committed(index, term, command, results, node)
            return results

        machine.apply = observed  # type: ignore[method-assign]
        propose = node.raft.propose

        def proposed(command: bytes, done: Any) -> None:
            # What waits for a transfer to end passes here twice; the first time is the stamp's.
            self.proposed.setdefault(bytes(command), self.world.now)
            propose(command, done)

        node.raft.propose = proposed  # type: ignore[method-assign]
        start_cold = node.clock._start_cold

        def started(agreed: float | None, mono: float) -> None:
            start_cold(agreed, mono)
            if node.clock.ready:
                self.note(f"takes cluster time from the wall clocks: {node.clock.exact(mono):.1f}", node.name)
                self.cold_starts.append(self.world.now)

        node.clock._start_cold = started  # type: ignore[method-assign]
        learn = node.clock._learn

        def learnt(least: float, most: float, mono: float) -> bool:
            ready = learn(least, most, mono)
            low, high = node.clock._told
            if ready and high - low > NEAR_MS:
                self.note(f"learns cluster time from slow answers: to {(high - low) / 2:.1f} ms", node.name)
                self.history.count("learnt slowly")
                self.doubt_ms = max(self.doubt_ms, (high - low) / 2)
            return ready

        node.clock._learn = learnt  # type: ignore[method-assign]

    def _committed(self, index: int, term: int, entry: bytes, results: list[Any], node: Node) -> None:
        """An entry that counts: when its leader wrote cluster time into it, what it grants, and on whose disks it is
        (I14: on those of a majority, or it may be lost with an answer that was given)."""
        _, now_ms, commands = decode_entry(entry)
        at = self.proposed.get(bytes(entry))
        if at is not None:
            self.stamps.append((at, now_ms))
        self.term_began.setdefault(term, self.world.now)
        for (kind, body), result in zip(commands, results, strict=True):
            if kind in (Command.EXTEND, Command.ACK, Command.SETTLE) and isinstance(result, LeaseResult):
                self._note_leases(decode(kind, body), kind, result)
            elif kind == Command.GRANT:
                grant = decode(kind, body)
                self.grants.setdefault((grant.term, grant.seq), (self.world.now, now_ms, term))
                if (grant.consumer, grant.request_id) in self.history.hung_up:
                    text = f"grant {grant.term}.{grant.seq} is for {grant.consumer}, who hung up while it waited"
                    self.violate(Violation("hang-ups", text, who=node.name))
            elif kind == Command.FEATURE:
                self.switched = min(self.switched, self.world.now)
        for machine in self.machines.values():
            if machine.process is not None and machine.process.node is not None:
                machine.had = max(machine.had, machine.process.node.raft.synced_index)
        having = {name for name, m in (*self.machines.items(), *self.retired.items()) if m.had >= index}
        votes = node.raft.membership.electorates(index)
        self.history.count("checked I14 durability, majority")
        if not any(len(voters & having) > len(voters) // 2 for voters in votes):
            text = f"entry {index} counts as committed, and only the disks of {sorted(having)} have it"
            self.violate(Violation("I14 durability, majority", text))

    def _note_leases(self, command: Any, kind: int, result: LeaseResult) -> None:
        """Leases that were extended, and webhooks' leases that ended with an ack."""
        if kind == Command.SETTLE:
            kind, command = command
        for row, outcome in zip(command.rows.tolist(), result.outcomes, strict=True):
            if kind == Command.EXTEND and outcome == LeaseOutcome.DONE:
                self.extended[row[:3]] = result.until_ms
            elif kind == Command.ACK and outcome == LeaseOutcome.DONE and self.receiver is not None:
                self.receiver.settled(row[:3])

    def _watch(self) -> None:
        """I13, log safety, on everything that is up."""
        self.world.after(WATCH_S, self._watch)
        up: dict[str, RaftNode] = {}
        stirred: set[str] = set()
        for name, machine in self.machines.items():
            process = machine.process
            if process is None or process.node is None or process.runtime.crashed:
                continue
            self._watch_syncs(machine, process)
            raft = up[name] = process.node.raft
            if process.runtime.stirred():
                stirred.add(name)
                self._watch_members(name, raft)
                self._watch_votes(name, raft.journal)
                if raft.is_leader and raft.term not in self.leaders:
                    self.elected.append(self.world.now)
        self.safety.look(up, stirred.__contains__)

    def _watch_members(self, name: str, raft: RaftNode) -> None:
        """I13: majorities go by lists of the members that are in the log."""
        if raft.applier.installing:
            return  # the state may be the snapshot's, and the log not yet
        at, members = raft.machine.members()
        since, counted = raft.membership.applied_list
        wrong = [since] if since != at or (members and counted != members) else []
        for since, counted in raft.membership.appended_lists:
            self.history.count("checked I13 log safety, members")
            if since > raft.last_index or members_in(raft.journal.entries(since, 1)[0][0]) != counted:
                wrong.append(since)
        if wrong:
            text = f"{name} goes by a list of the members, of entry {wrong[0]}, that its log does not have"
            self.violate(Violation("I13 log safety, members", text, who=name))

    def _unsafe(self, promise: str, text: str, who: str) -> None:
        self.violate(Violation(promise, text, who=who))

    def _watch_syncs(self, machine: Machine, process: Process) -> None:
        """I17: whoever was told that a sync failed ends, since it cannot know what its disk has."""
        if machine.disk.failed_syncs == process.failed_before or process.runtime.paused:
            process.failed_at = None
            return
        process.failed_at = self.world.now if process.failed_at is None else process.failed_at
        if self.world.now > process.failed_at + FAILED_S:
            process.failed_before = machine.disk.failed_syncs
            text = f"{machine.name} goes on {FAILED_S:.0f} s after a sync of its disk failed"
            self.violate(Violation("I17 fail-stop, failed sync", text, who=machine.name))

    def _watch_votes(self, name: str, journal: Journal) -> None:
        """What is durable: a term or vote that never reached the disk has not left the node either."""
        if not journal.all_synced:
            return
        self.history.count("checked I13 log safety, term", journal.term > 0)
        if journal.term < self.terms.get(name, 0):
            text = f"the term of {name} went back to {journal.term}"
            self.violate(Violation("I13 log safety, term", text, who=name))
        self.terms[name] = journal.term
        (self.admitted.add if journal.admitted and journal.term else self.admitted.discard)(name)
