"""A cluster of real nodes in one simulated world: machines with disks and clocks, and the processes on them.

Everything of a node runs but HTTP: the state machine, storage and recovery, the Raft adapter with the real PySyncObj,
group commit and dispatcher.
"""

import pickle
import random
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from chaos.sim import groupcheck
from chaos.sim.door import Served
from chaos.sim.features import Features
from chaos.sim.history import Violation
from chaos.sim.jobcheck import left_over, not_meant, pending_in
from chaos.sim.machines import Machine, Process
from chaos.sim.network import NetworkProfile
from chaos.sim.oracles import Oracles
from chaos.sim.owndelays import OwnDelays
from chaos.sim.receiver import Caller, Receiver
from chaos.sim.runtime import SimWorld
from chaos.sim.tables import SimBackend
from chaos.sim.timetable import Timetable
from chaos.sim.uniques import Uniques
from chaos.sim.workload import HOUR_S, Workload
from hadelay.api.service import Actor
from hadelay.codec.commands import decode, encode_job_step
from hadelay.codec.commandtypes import Audited, Command
from hadelay.codec.entries import decode_entry, members_in
from hadelay.codec.jobcommands import LAST, JobStep
from hadelay.codec.results import Done, JobResult, LeaseOutcome, LeaseResult
from hadelay.errors import DamagedFile, HadelayError
from hadelay.ledger.leases.suspects import AHEAD_MS
from hadelay.ledger.state import Ledger
from hadelay.model import HOUR_MS
from hadelay.raft.journal import FIRST, Journal
from hadelay.raft.node import RaftNode
from hadelay.raft.ports import FOUNDING
from hadelay.server.node import Node
from hadelay.server.recover import open_node
from hadelay.server.service.node import NodeService
from hadelay.server.webhooks.pool import Webhooks
from hadelay.settings import node as settings
from hadelay.settings.node import Config, RaftSettings

#: Kinds of commands that may change or fire a schedule.
_SCHEDULES = frozenset((*range(Command.SCHEDULE_PUT, Command.SCHEDULE_RUN + 1), Command.AUDITED))
#: Interval, in log entries: the results of one in this many entries are compared between nodes.
_SAMPLE = 16
#: `FUZZED`: share of runs with a fuzz client. `FULL`: share of runs in which schedules have all kinds of bounds, and
#: bulk jobs all kinds of filters.
FUZZED, FULL = 0.2, 0.4
#: Retention of settled messages, in seconds: so short that it ends during most suspensions of all machines.
RETENTION_S = 2 * HOUR_S
#: Share of runs with short Raft logs: a node that was away for a while gets a snapshot.
SHORT_LOGS = 0.65
#: `BRIEF`: share of runs in which brief journal syncs run on the event loop, as in real nodes. `STALL_S`: duration of
#: such a sync, in seconds, from which it counts as a stall.
BRIEF, STALL_S = 0.4, 0.15


class Watch(Served):
    """Base of SimCluster: observes all nodes, records applied entries and grants, checks promises, and notes each
    broken promise."""

    def __init__(self, world: SimWorld, names: tuple[str, ...], profile: NetworkProfile | None, **more: Any) -> None:
        super().__init__(world, names, profile, quiet_s=RaftSettings().election_min_ms / 1000, **more)
        #: Receiver of webhook calls for the administrator's topic; None: the topic has no webhook.
        self.receiver: Receiver | None = None
        #: Checks of the promises about schedules, and comparisons of running nodes.
        self.timetable, self.oracles = Timetable(self), Oracles(self)
        #: Checks of the promises about unique keys and about delays of topics.
        self.uniques, self.own_delays = Uniques(self.decide), OwnDelays(self.decide)
        #: Model of callbacks, results, copies for subscriptions, transfers, and counts of bulk jobs.
        self.features = Features(self.decide)
        #: Index of each applied entry → (term, CRC of the entry, CRC of its results), as first applied.
        self.applied: dict[int, tuple[int, int, int]] = {}
        #: Index of each applied entry → (time and node of its first application, bytes of the entry).
        self.entries: dict[int, tuple[float, str, bytes]] = {}
        #: (term, seq) of each grant → (time of its first application, cluster time, term of its entry).
        self.grants: dict[tuple[int, int], tuple[float, int, int]] = {}
        #: Extended leases: (term of the grant, number of the grant, position in the grant) → per extension the new end
        #: of the lease in cluster time, and the true time of the first application.
        self.extended: dict[tuple[int, int, int], list[tuple[int, float]]] = {}
        #: `judged`: number of a bulk job → ids of the messages in its applied steps. `job_steps`: these steps, encoded.
        self.judged: dict[int, set[int]] = {}
        self.job_steps: list[bytes] = []
        #: Messages that a step of a bulk job in the present entry names although the job does not select them.
        self._strays: set[int] = set()
        #: Raft term → time at which an entry of the term was first applied.
        self.term_began: dict[int, float] = {}
        #: Interval mode. `_bound`: range of due times that the state after the last entry allows for hand-outs: from
        #: the second of the cursor to AHEAD_MS after the entry's time. `bounds`: (term, this range at the begin of the
        #: term).
        self.bounds: list[tuple[int, int, int]] = []
        self._bound = (0, 0)
        #: `proposed`: log entry → true time of its proposal. `stamps`: for each committed entry, (true time of its
        #: proposal, cluster time in the entry).
        self.proposed: dict[bytes, float] = {}
        self.stamps: list[tuple[float, int]] = []
        #: Time at which each new leader was first seen.
        self.elected: list[float] = []
        #: `_blocked`: ids of the messages that were blocked by their groups after the last entry. `unblocked_ms`:
        #: message id → cluster time at which its group last unblocked the message.
        self._blocked: set[int] = set()
        self.unblocked_ms: dict[int, int] = {}

    def _observe(self, process: Process, node: Node) -> None:
        """Wrap methods of a node, to observe which entries it applies and proposes, and how it deletes entries and
        learns cluster time."""
        machine, disk = node.raft.machine, self.machines[node.name].disk
        apply = machine.apply

        def observed(index: int, term: int, command: bytes) -> Any:
            self.timetable.begin(node.ledger)
            self.uniques.begin(node.ledger)
            self.own_delays.begin(node.ledger)
            if index not in self.applied and node.ledger.jobs and not self.rotten:
                self._strays = not_meant(node.ledger, decode_entry(command)[2])
            if index not in self.applied and not self.rotten:
                _, now_ms, commands = decode_entry(command)
                self.features.begin(node.ledger, now_ms, commands)
            results = apply(index, term, command)
            # Compare the results of only some entries: comparing is slow, and equal states give equal results.
            mark = (term, zlib.crc32(command), 0 if index % _SAMPLE else zlib.crc32(pickle.dumps(results)))
            first = self.applied.setdefault(index, mark)
            if first is mark:
                self.entries[index] = (self.world.now, node.name, bytes(command))
                with disk.spared():
                    self._committed(index, term, command, results, node)
            else:
                text = f"{node.name} applied another entry {index}"
                self.decide("I12 divergence, entries", first[:2] != mark[:2], text, who=node.name)
                if not index % _SAMPLE and first[:2] == mark[:2]:
                    text = f"{node.name} applied entry {index} with other results"
                    self.decide("I12 divergence, results", first != mark, text, who=node.name)
            return results

        machine.apply = observed  # type: ignore[method-assign]
        propose = node.raft.propose

        def proposed(command: bytes, done: Any) -> None:
            # A request that waits for the end of a leadership transfer is proposed twice: keep the time of the first
            # proposal.
            self.proposed.setdefault(bytes(command), self.world.now)
            propose(command, done)

        node.raft.propose = proposed  # type: ignore[method-assign]
        compact = node.raft.journal.compact

        def compacted(index: int, keep_bytes: int) -> None:
            at = node.storage.applied_index
            text = f"{node.name} deletes entries up to {index} from its journal; its checkpoint ends at {at}"
            self.decide("I14 durability, compacted", index > at, text, who=node.name)
            compact(index, keep_bytes)

        node.raft.journal.compact = compacted  # type: ignore[method-assign]
        self.oracles.observe(node)

    def _committed(self, index: int, term: int, entry: bytes, results: list[Any], node: Node) -> None:
        """Check a committed entry: record its cluster time and its grants, and check I14: a majority of disks has the
        entry, so that it cannot be lost."""
        _, now_ms, commands = decode_entry(entry)
        if any(topic.group_rows for topic in node.ledger.topics.all):
            self._check_groups(index, node)
        if not self.rotten:
            self.features.committed(node.ledger, commands, results)
        at = self.proposed.get(bytes(entry))
        if at is not None:
            self.stamps.append((at, now_ms))
        if term not in self.term_began:
            self.bounds.append((term, *self._bound))
            self.term_began[term] = self.world.now
        hour, second, _ = node.ledger.cursor
        self._bound = hour * HOUR_MS + second * 1000, node.ledger.now_ms + AHEAD_MS
        alone = sum(kind in _SCHEDULES for kind, _ in commands) == 1
        for (kind, body), result in zip(commands, results, strict=True):
            self.own_delays.committed(kind, body, result, now_ms)
            if kind in (Command.EXTEND, Command.SETTLE) and isinstance(result, LeaseResult):
                self._note_leases(decode(kind, body), kind, result)
            elif kind == Command.GRANT:
                grant = decode(kind, body)
                self.grants.setdefault((grant.term, grant.seq), (self.world.now, now_ms, term))
                if (grant.consumer, grant.request_id) in self.history.hung_up:
                    text = f"grant {grant.term}.{grant.seq} is for {grant.consumer}, who hung up while it waited"
                    self.violate(Violation("hang-ups", text, who=node.name))
            elif kind == Command.JOB_STEP and isinstance(result, Done):
                self._note_step(decode(kind, body), node)
            elif kind == Command.TOPIC_EXPIRY and isinstance(result, JobResult):
                self.history.count("topics ended", result.count)
            elif kind == Command.PUBLISH:
                self.uniques.committed(body, result, node.ledger)
            elif kind in _SCHEDULES:
                self.timetable.committed(kind, body, result, node.ledger, alone=alone)
                if kind == Command.AUDITED and isinstance(result, Done):
                    self._note_fill(decode(kind, body), node.ledger)
            elif kind == Command.FEATURE:
                self.history.count("a feature level")
        for machine in self.machines.values():
            if machine.process is not None and machine.process.raft is not None:
                machine.had = max(machine.had, machine.process.raft.journal.synced_index)
        having = {name for name, m in (*self.machines.items(), *self.retired.items()) if m.had >= index}
        votes = node.raft.membership.electorates(index)
        stored = any(len(voters & having) > len(voters) // 2 for voters in votes)
        text = f"entry {index} counts as committed, and only the disks of {sorted(having)} have it"
        self.decide("I14 durability, majority", not stored, text)

    def _note_fill(self, audited: Audited, ledger: Ledger) -> None:
        """Record a topic's pending messages, if the command has just begun to copy them to a new subscription."""
        if audited.kind == Command.SUBSCRIPTION_FILL:
            for job in ledger.fills.values():
                if job.began_ms == ledger.now_ms:
                    self.history.filled_from |= pending_in(ledger, job.spec.topic)

    def _note_step(self, step: JobStep, node: Node) -> None:
        """Check J1 and J2 of one step. J1: no message is in two steps of one bulk job. J2: a job that ends by itself
        has met all messages that it selects, and no others."""
        ids = set(step.ids)
        strays, self._strays = ids & self._strays, set()
        text = f"job {step.job} does not mean {[f'{i:x}' for i in strays]}"
        self.decide("J2 jobs, complete", bool(strays), text, *strays)
        if step.cursor == LAST and not self.rotten:
            left = left_over(node.ledger, node.ledger.jobs[step.job])
            text = f"job {step.job} ended, and did not meet {[f'{i:x}' for i in left[:5]]}"
            self.decide("J2 jobs, complete", bool(left), text, *left[:5])
        self.job_steps.append(encode_job_step(step.job, step.expected, step.cursor, step.ids))
        if step.expected == (0, 0):
            self.judged[step.job] = set()
        if step.job not in self.judged:
            return  # skip the check: the job began before the backup from which this cluster was restored
        known, text = self.judged[step.job], f"job {step.job} judges a message twice"
        self.decide("J1 jobs, twice", bool(ids & known), text, *sorted(ids & known))
        known |= ids

    def _check_groups(self, index: int, node: Node) -> None:
        """Check G1 after an applied entry: the stored state of message groups is what Rule G
        (ledger/groups/messagegroups.py) demands."""
        wrong, blocked = "", set[int]()
        try:
            blocked = groupcheck.check(node.ledger)
        except AssertionError as error:
            wrong = f"{node.name}, entry {index}: {error}"
        except DamagedFile:
            if node.name not in self.rotten:
                raise
            return  # skip the check: it reads more entries than apply does, and met a damaged one
        self.decide("G1 groups", bool(wrong), wrong)
        self.unblocked_ms.update(dict.fromkeys(self._blocked - blocked, node.ledger.now_ms))
        self._blocked = blocked

    def _note_leases(self, command: Any, kind: int, result: LeaseResult) -> None:
        """Record extended leases, and tell the webhook's receiver which of its leases ended with an ack."""
        for row, outcome in zip(command.rows.tolist(), result.outcomes, strict=True):
            if outcome != LeaseOutcome.DONE:
                continue
            if kind == Command.EXTEND:
                self.extended.setdefault(row[:3], []).append((result.until_ms, self.world.now))
            elif not command.nack and self.receiver is not None:
                self.receiver.settled(row[:3])

    def _watch_process(self, process: Process, raft: RaftNode) -> None:
        self._watch_members(process.name, raft)
        if raft.is_leader and raft.term not in self.safety.leaders:
            self.elected.append(self.world.now)

    def _watch_members(self, name: str, raft: RaftNode) -> None:
        """Check, for I13, that the list of members by which a node counts majorities is in the node's log."""
        if raft.applier.installing:
            return  # skip the check: a snapshot is being installed, whose members are not in this log yet
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


class SimCluster(Watch):
    """Nodes of one simulated cluster, with their machines, network and processes."""

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
        #: True: brief syncs run on the event loop, as in the real runtime, so a slow sync stalls its node.
        brief = random.Random(f"{seed} brief").random() < BRIEF
        world = world or SimWorld(seed, epoch_ms=epoch_ms)
        self.sync, self.group, self.window_ms = sync, group, window_ms
        rng = world.random
        #: Sizes of journal, checkpoint and write buffer, drawn per run: with small sizes, a node that lags behind has
        #: to fetch files instead of log entries.
        self.journal_keep_bytes = rng.choice((0, 30_000, 1 << 30))
        self.checkpoint_bytes = rng.choice((1 << 15, 1 << 18, 1 << 20))
        #: Limit of bytes per second that the patrol of a node reads; 0: no patrol.
        self.patrol_bytes = 0
        self.far_buffer_bytes = rng.choice((1 << 14, 1 << 20, 1 << 20))
        self.segment_bytes = 64 << 10
        own = random.Random(f"{seed} journal")
        if own.random() < SHORT_LOGS:
            # Use the smallest segments that have room for the largest entry, and frequent checkpoints.
            self.segment_bytes, self.journal_keep_bytes = 17 << 10, own.choice((0, 0, 20_000))
            self.checkpoint_bytes = own.choice((1 << 16, 1 << 18))
        super().__init__(world, names, profile, brief=brief, restart=restart, only=only)
        #: Names of the members at the start of the run; `names` are the members that should exist now.
        self.founders = names
        self.workload = workload or Workload()
        #: True: the run has a fuzz client (chaos/sim/fuzz.py), and nodes write `.heads` files (cached heads of the
        #: index's linked lists) early.
        self.fuzzed = random.Random(f"{seed} fuzz").random() < FUZZED
        #: True: schedules and bulk jobs have all kinds of bounds and filters.
        self.full = random.Random(f"{seed} full").random() < FULL
        #: Time, in seconds, for which all machines were suspended. Meanwhile their monotonic clocks drift apart, and no
        #: node hears of a leader.
        self.slept_s = 0.0
        #: Times, in Unix ms, at which suspensions of all machines began.
        self.naps_ms: list[int] = []
        self.on_boot: list[Callable[[Node], None]] = []
        #: Limit of ready messages in memory per topic: with a small one, scans of the index find most messages.
        self.ready_window = random.Random(f"{seed} window").choice((3, 3, 65_536))

    def join(self, name: str) -> None:
        """Add a machine with an empty disk, or with a former member's disk; its configuration names the members and
        itself. The machine is no member yet."""
        machine = self.machines[name] = self.retired.pop(name) if name in self.retired else self._machine(name)
        machine.founded, machine.others = True, self.names
        self.names = (*self.names, name)
        self.start(name)

    def retire(self, name: str) -> None:
        """Switch off a machine that was removed from the cluster."""
        process = self.process(name)
        node = process.node if process is not None else None
        keeps = node is not None and name not in node.raft.membership.names and node.raft.journal.incarnation > FOUNDING
        self.kill(name)
        self.retired[name] = machine = self.machines.pop(name)
        if not keeps:
            # Empty the disk of the retired machine, so that it can be added again: a founding member is not admitted
            # again with its old disk, and an old disk names members that may be gone.
            self._blank(machine)
        self.names = tuple(other for other in self.names if other != name)

    def config(self, name: str) -> Config:
        machine = self.machines[name]
        peers = sorted({name, *(machine.others or self.founders)})
        return Config(
            node=settings.NodeConfig(name=name, data_dir="/data"),
            cluster=settings.ClusterConfig(id=f"sim{self.group or ''}", init=not machine.founded, group=self.group),
            http=settings.HttpConfig(no_leader_wait_ms=1000, advertise=f"http://{name}:8400"),
            raft=RaftSettings(
                peers={n: f"{n}:1" for n in peers}, segment_bytes=self.segment_bytes, max_entry_bytes=4 << 10
            ),
            dispatch=settings.DispatchConfig(
                sync=self.sync,  # type: ignore[arg-type]
                sweep_ms=2000,
                preload_ms=3000,
                ready_window=self.ready_window,
                job_step=2 if self.seed % 2 else 500,
            ),
            webhooks=settings.WebhooksConfig(alert_interval_ms=1500 if self.receiver is not None else 60_000),
            retention=settings.RetentionConfig(settled_ms=RETENTION_S * 1000),
            limits=settings.LimitsConfig(commit_timeout_ms=3000, idempotency_window_ms=self.window_ms),
            storage=settings.StorageConfig(
                checkpoint_bytes=self.checkpoint_bytes,
                checkpoint_interval_ms=4000,
                far_buffer_bytes=self.far_buffer_bytes,
                min_free_bytes=1 << 20,
                patrol_bytes=self.patrol_bytes,
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
        journal = node.raft.journal
        anew = journal.incarnation != FOUNDING and (journal.last_index, journal.term) == FIRST
        if anew and machine.name in self.rotten:
            # an earlier process noted damage and had its disk emptied, but crashed before it called `fatal`
            self._forget(machine)
        self._look_at_journal(machine, journal)
        self.safety.reopened(machine.name, node.raft.journal)
        # Even the smallest segment has room for the largest entry that a leader makes.
        node.raft.config = replace(
            node.raft.config, journal_keep_bytes=self.journal_keep_bytes, max_entry_bytes=16 << 10
        )
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
        """I14: after a restart, the journal still has the entries that it had reported as synced."""
        at, known = machine.durable, self.applied.get(machine.durable)
        if known is None or at <= journal.base_index:
            return
        gone = at > journal.last_index or journal.term_at(at) != known[0]
        text = f"{machine.name} had entry {at} and lost it: its journal ends at {journal.last_index}"
        self.decide("I14 durability, restart", gone, text, who=machine.name)

    def _note_durable(self, machine: Machine, journal: Journal) -> None:
        """Record, when a node's process ends, the newest committed entry that its journal had reported as synced."""
        machine.had = max(machine.had, journal.synced_index)
        at = min(journal.synced_index, max(self.applied, default=0))
        while at > journal.base_index and (at not in self.applied or self.applied[at][0] != journal.term_at(at)):
            at -= 1
        machine.durable = at

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
            self.oracles.nothing_forgotten(process.node)
            self._note_durable(machine, process.node.raft.journal)

    def count_node(self, process: Process) -> None:
        """Add the counters of a node's process to the history's counts."""
        self.history.count("a sync stalled its node", sum(stall_s >= STALL_S for stall_s in process.runtime.stalls))
        if process.node is not None:
            self.history.count("snapshot installed", process.node.raft.stats.snapshots_installed)
            self.history.count("checkpoint", process.node.checkpoints.count)
            self.history.count("rot was mended", process.node.repairer.repaired if self.rotten else 0)

    def nodes(self) -> list[Node]:
        return [m.process.node for m in self.machines.values() if m.process is not None and m.process.node is not None]

    def leader(self) -> Node | None:
        """The leader's node, by the newest term; None if no node leads."""
        leading = [node for node in self.nodes() if node.leading]
        return max(leading, key=lambda node: node.leading) if leading else None

    @property
    def pulled(self) -> tuple[str, ...]:
        """Topics that consumers receive from; a topic with a webhook is not among them."""
        return self.workload.topics if self.receiver is None else self.workload.topics[:-1]

    def fails(self, body: bytes) -> bool:
        """True if the message with this body fails at every consumer that processes it."""
        message = self.history.message_of(body)
        if message is None or message.topic != self.workload.limited:
            return False
        return message.number % 10 < 10 * self.workload.failing
