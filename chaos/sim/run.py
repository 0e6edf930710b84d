"""A run of one seed: build a cluster, run clients and faults, heal, drain all messages, check promises."""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from unittest.mock import patch

from chaos.sim import promises
from chaos.sim.admin import AdminClient, Reader
from chaos.sim.batchclient import BatchClient
from chaos.sim.bulk import BulkClient
from chaos.sim.cluster import SimCluster
from chaos.sim.consumer import Consumer
from chaos.sim.delayclient import DelayClient
from chaos.sim.fanout import FanOutClient, subscribes
from chaos.sim.fuzz import FuzzClient
from chaos.sim.history import Violation
from chaos.sim.machines import Machines
from chaos.sim.nemesis import Nemesis
from chaos.sim.producer import Producer
from chaos.sim.receiver import HOOKED, Receiver
from chaos.sim.replicas import conserved
from chaos.sim.scheduler import PatientOwner, ScheduleOwner
from chaos.sim.transferclient import TransferClient
from chaos.sim.uniqueclient import UniqueClient
from chaos.sim.views import seen
from chaos.sim.workload import HOUR_S, Workload
from hadelay.codec.commands import decode
from hadelay.codec.commandtypes import LEVEL_OF, Cancel, Command, Grant, SettleLeases
from hadelay.codec.entries import decode_entry
from hadelay.codec.wire import Malformed
from hadelay.ledger.changedrows import SLICE_ROWS
from hadelay.ledger.hours.lookup import find_entry
from hadelay.model import MAX_REPLY, Event, unpack_id
from hadelay.version import FEATURE_LEVEL

#: Limit of simulated seconds, after the faults, until all nodes agree and all due messages are settled.
DRAIN_S = 30.0
#: Share of runs with message groups, among those in commit mode.
GROUPED = 0.5
#: Start of an hour, 2026-11-20T11:00:00Z in Unix ms: most runs begin shortly before, so that the hour changes during
#: the run.
_AN_HOUR_MS = 494_579 * HOUR_S * 1000
#: Start of summer time in Vienna, 2027-03-28T01:00:00Z in Unix ms: some runs begin shortly before.
_CLOCK_CHANGE_MS = 1_806_195_600_000
#: Share of runs in which idempotency keys are forgotten during the faults, unless there are subscriptions.
_BRIEF_WINDOWS = 0.3
#: `_FORGETFUL`: share of runs in which one topic's settled messages are forgotten within seconds. `_RETENTIONS_MS`:
#: retentions that such a topic may have, in ms.
_FORGETFUL, _RETENTIONS_MS = 0.15, (1_500, 3_000)
#: Share of runs with quotas, and with many messages under few client keys.
_CROWDED = 0.15
#: Share of runs at whose end the power of all nodes is cut once more.
_BLACKOUT = 0.15
#: Limit, in bytes, of a consumer's answer in a callback; it replaces the usual limit in half of the runs.
_SHORT_REPLY = 9
#: Maximum number of lines of the trace in a report.
_TRACE_LINES = 70


@dataclass
class Report:
    """Report of one seed. `failure` is empty if every promise was kept."""

    seed: int
    failure: str = ""
    invariant: str = ""
    lines: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    trace: int = 0
    simulated_s: float = 0.0
    wall_s: float = 0.0
    messages: int = 0
    hand_outs: int = 0
    entries: int = 0
    terms: int = 0
    drained_s: float = 0.0
    #: Mode of hand-outs, "commit" or "interval". In a run of Raft alone, the limit of voters that one fault may stop:
    #: "one down" or "two down".
    mode: str = ""
    #: Number of nodes.
    size: int = 0
    #: Names of the fault families that the run used.
    struck: list[str] = field(default_factory=list)
    #: Names of the parts of the run (workload.Parts), both those done and those left out.
    parts: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Properties of a run besides its faults, drawn from the seed, each with its own random stream (swarm testing)."""

    size: int
    sync: str
    #: Duration of the faults, in simulated seconds.
    faults_s: float
    producers: int
    consumers: int
    #: Mean seconds between two publishes of one producer.
    interval_s: float
    #: Maximum number of nodes that one fault may stop at once.
    down: int
    #: Mean seconds between two faults.
    pace_s: float
    #: Hours for which all machines are suspended during the faults, which then end; 0: no suspension.
    nap_h: int
    #: Time, in ms, for which idempotency keys are kept: shorter than the faults, longer than the run, or longer than a
    #: suspension of all machines.
    window_ms: int
    workload: Workload

    @classmethod
    def of(cls, seed: int) -> Shape:
        rng = random.Random(f"shape {seed}")
        size = rng.choices((3, 5, 1), (0.62, 0.32, 0.06))[0]
        large = rng.random() < 0.1
        nap_h = rng.choices((0, 1, 6, 20), (0.8, 0.1, 0.05, 0.05))[0]
        workload = Workload() if large else Workload(leases_ms=(300, 900, 2000), longest_ms=1500)
        if random.Random(f"crowded {seed}").random() < _CROWDED:
            workload = replace(workload, crowded=True, keyed=0.6, keys=random.Random(f"keys {seed}").choice((1, 3)))
        retention = random.Random(f"retention_ms {seed}")
        if retention.random() < _FORGETFUL:
            workload = replace(workload, retention_ms=retention.choice(_RETENTIONS_MS))
        own = random.Random(f"window {seed}")
        # Leave brief windows out if there are subscriptions: their clients repeat requests for longer than a brief
        # window.
        brief = own.random() < _BRIEF_WINDOWS and not subscribes(seed)
        if brief:
            workload = replace(workload, repeated=0.4)
        scale = 1.0 if large else 0.3
        return cls(
            size=size,
            sync=rng.choices(("commit", "interval"), (0.7, 0.3))[0],
            faults_s=10.0 * scale,
            producers=2 if large else 1,
            consumers=3 if large else 2,
            interval_s=0.6 if large else 0.4,
            down=rng.choice((1, 2)) if size == 5 else 1,
            pace_s=rng.choice((0.2, 0.4, 1.0, 2.0)) * scale,
            nap_h=nap_h,
            window_ms=24 * HOUR_S * 1000 if nap_h else own.choice((2_000, 3_500)) if brief else 60_000,
            workload=workload,
        )


def _begin_ms(seed: int) -> int:
    """Time, in Unix ms, before which the run begins shortly: the start of an hour or, in some runs, of summer time in
    Vienna."""
    return _CLOCK_CHANGE_MS if random.Random(f"clock {seed}").random() < 0.15 else _AN_HOUR_MS


def build(seed: int, only: frozenset[str] | None = None, sync: str = "") -> tuple[SimCluster, Shape]:
    shape = Shape.of(seed)
    shape = replace(shape, sync=sync or shape.sync)
    groups = random.Random(f"groups {seed}")
    if shape.sync == "commit" and groups.random() < GROUPED:
        limit, rate = groups.choice((1, 1, 2, 3)), groups.choice((0.0, 0.0, 5.0, 20.0))
        shape = replace(shape, workload=replace(shape.workload, group_concurrency=limit, group_rate=rate))
    rng = random.Random(f"epoch {seed}")
    cluster = SimCluster(
        seed,
        names=tuple(f"n{n + 1}" for n in range(shape.size)),
        sync=shape.sync,
        workload=shape.workload,
        window_ms=shape.window_ms,
        epoch_ms=_begin_ms(seed) - rng.randrange(int(4000 * shape.faults_s)),
        only=only,
    )
    cluster.slow_some_disks()
    if random.Random(f"{seed} hooked").random() < HOOKED:
        cluster.receiver = Receiver(cluster, cluster.fails)
    return cluster, shape


@contextmanager
def next_level() -> Iterator[None]:
    """Context manager in which all nodes know one more feature level, which adds the command PURGE: clusters then
    switch to a new level under load."""
    level = FEATURE_LEVEL + 1
    with patch("hadelay.version.FEATURE_LEVEL", level), patch.dict(LEVEL_OF, {Command.PURGE: level}):
        yield


def run_seed(
    seed: int, families: dict[str, float] | None = None, only: frozenset[str] | None = None, sync: str = ""
) -> Report:
    """Run one seed. families: probability of each fault family; None: the usual ones. only: names of the parts to run
    (workload.Parts). sync: mode of hand-outs; "": as the seed draws."""
    cluster, shape = build(seed, only, sync)
    nemesis = Nemesis(cluster, shape.faults_s, families, pace_s=shape.pace_s, down=shape.down)

    def work(report: Report) -> None:
        play(cluster, nemesis, shape, report)
        check(cluster)
        if nemesis.backups is not None and nemesis.backups.made:
            try:
                restored = nemesis.backups.restored()
                play(restored, Nemesis(restored, shape.faults_s, {}), shape, report)
                check(restored)
            except AssertionError as broken:
                raise Violation("backup", f"after a restore, {broken}", getattr(broken, "ids", frozenset())) from broken

    # Use a small limit of answers in callbacks in half of the runs: only then are answers cut, as an entry has no room
    # for an answer beyond the usual limit.
    limit = random.Random(f"reply {seed}").choice((MAX_REPLY, _SHORT_REPLY))
    # Encode checkpoints a few rows at a time, so that rows change between the begin of the checkpoint and their turn.
    rows = random.Random(f"slices {seed}").choice((1, 2, SLICE_ROWS))
    reply, slices = "hadelay.ledger.leases.callbacks.MAX_REPLY", "hadelay.ledger.changedrows.SLICE_ROWS"
    with patch(reply, limit), patch(slices, rows), next_level():
        report = report_on(cluster, nemesis, work)
    history = cluster.history
    for machine in cluster.machines.values():
        if machine.process is not None:
            cluster.count_node(machine.process)
        history.count("a sync failed", machine.disk.failed_syncs)
        history.count("a disk was full", machine.disk.was_full)
    for topic in cluster.nodes()[0].ledger.topics.all if cluster.nodes() else ():
        history.count("died", topic.settled[Event.DEAD])
        history.count("redriven", topic.settled[Event.REDRIVEN])
        history.count("expired", topic.settled[Event.TTL_EXPIRED])
    report.mode, report.messages, report.hand_outs = cluster.sync, len(history.messages), len(history.hand_outs)
    report.entries, report.size = len(cluster.applied), shape.size
    return report


def report_on(sim: Machines, nemesis: Nemesis, work: Callable[[Report], None]) -> Report:
    """Run `work` and report what the run did and which promise broke."""
    started = time.perf_counter()
    report = Report(sim.seed, counts=sim.history.counts, parts=sim.parts.seen)
    try:
        work(report)
    except Violation as violation:
        report.invariant, report.failure = violation.invariant, str(violation)
        report.lines = tell(sim, violation)
    except Exception as error:
        report.invariant, report.failure = "error", repr(error)
        report.lines = [*tell(sim, Violation("error", "")), *traceback.format_exception(error)]
    report.struck, report.terms = sorted(nemesis.struck), max(sim.safety.leaders, default=0)
    report.trace, report.simulated_s, report.wall_s = sim.world.trace, sim.world.now, time.perf_counter() - started
    return report


def play(cluster: SimCluster, nemesis: Nemesis, shape: Shape, report: Report) -> None:
    world = cluster.world
    cluster.start_all()
    nemesis.start()
    producers = [Producer(cluster, f"p{n}") for n in range(shape.producers)]
    others: list[
        Consumer
        | AdminClient
        | Reader
        | BulkClient
        | ScheduleOwner
        | FanOutClient
        | UniqueClient
        | BatchClient
        | DelayClient
        | TransferClient
    ] = [Consumer(cluster, f"c{n}") for n in range(shape.consumers)]
    others += [AdminClient(cluster, "admin"), Reader(cluster, "reader"), BulkClient(cluster, "jobs")]
    others += [ScheduleOwner(cluster, "scheduler"), PatientOwner(cluster, "patient")]
    others += [FanOutClient(cluster, "fan-out"), UniqueClient(cluster, "once"), BatchClient(cluster, "batches")]
    others += [DelayClient(cluster, "later"), TransferClient(cluster, "transfers")]
    for producer in producers:
        producer.start(shape.faults_s + 1.0, interval_s=shape.interval_s)
    for client in others:
        client.start()
    FuzzClient(cluster).start(shape.faults_s)
    if shape.nap_h and cluster.parts.take("nap"):
        world.run_for(random.Random(f"nap {cluster.seed}").uniform(0.3, 0.9) * shape.faults_s)
        sleep(cluster, shape.nap_h)
    while world.now < shape.faults_s and not cluster.violations:
        world.run_for(0.25)
    # Run the events that are due now: at this time the nemesis heals all faults, also after a suspension.
    world.run_for(0.0)
    # Check before the drain: after the drain, no leases and dead letters are left to check.
    conserved(cluster)
    if cluster.seed % 2:
        seen(cluster)
    for taking in (*others, *([cluster.receiver] if cluster.receiver is not None else [])):
        taking.good = True
    drain(cluster)
    hours = random.Random(f"hours {cluster.seed}").choice((0,) * 28 + (1, 6, 30, 60))
    if hours and cluster.parts.take("hours"):
        sleep(cluster, hours)
        drain(cluster)
    for stopping in (*producers, *others):
        stopping.stopped = True
    world.run_for(0.5)  # wait for the answers to the last requests
    settle(cluster)
    if random.Random(f"blackout {cluster.seed}").random() < _BLACKOUT and cluster.parts.take("blackout"):
        black_out(cluster)
    report.drained_s = max(0.0, world.now - cluster.healed_at)


def drain(cluster: SimCluster) -> None:
    """Run until no due message is unsettled, for two seconds at least."""
    world, start = cluster.world, cluster.world.now
    # Take the begin of the drain as the time of healing: a backup that runs when the faults end delays the drain, and
    # consumers ask for all messages only in the drain.
    cluster.healed_at = max(cluster.healed_at, start)
    while world.now < start + DRAIN_S and not cluster.violations:
        world.run_for(0.25)
        if world.now > start + 2.0 and drained(cluster):
            break


def sleep(cluster: SimCluster, hours: int) -> None:
    """Suspend all machines for hours. Afterwards, all messages that fell due meanwhile are due at once."""
    cluster.note(f"{hours} hours pass")
    cluster.history.count("hours passed")
    cluster.history.slept = True
    # A publish without an answer may be committed after the suspension, when its idempotency key is forgotten.
    for message in cluster.history.messages:
        message.repeated_late |= message.stored is None and not message.absent
    cluster.slept_s += hours * HOUR_S
    cluster.naps_ms.append(cluster.world.wall_ms())
    cluster.world.now += hours * HOUR_S
    cluster.healed_at = cluster.world.now


def black_out(cluster: SimCluster) -> None:
    """Cut the power of all nodes, which are idle and agree, and start them again: each has to find its whole state on
    its disk."""
    cluster.note("power cut of all")
    cluster.history.count("blackout")
    cluster.power_cut(*cluster.names)
    cluster.start_all()
    cluster.healed_at = cluster.world.now
    cluster.world.run_until(cluster.world.now + DRAIN_S, lambda: cluster.leader() is not None)
    # Wait until the leader has made the due occurrences of schedules, and has sent alerts about new dead letters.
    cluster.world.run_for(2.5)
    settle(cluster)


def drained(cluster: SimCluster) -> bool:
    done = not cluster.changing and not promises.unsettled(cluster) and not promises.unfinished_jobs(cluster)
    # Wait for overdue schedules, too: after a suspension of hours, a leader makes missed occurrences a few at a time.
    return done and not promises.unreported(cluster) and not promises.overdue(cluster)


def settle(cluster: SimCluster) -> None:
    """Wait until every node has applied the same index. On a slow disk, a running checkpoint takes 1.5 s per file, and
    a node that fetches files waits for the checkpoint."""
    for _ in range(120):
        nodes = cluster.nodes()
        if cluster.violations:
            return
        if len(nodes) == len(cluster.names) and len({(n.raft.applied_index, n.raft.last_index) for n in nodes}) == 1:
            return
        cluster.world.run_for(0.25)


def check(cluster: SimCluster) -> None:
    """Check all promises. Raises Violation for the first broken one."""
    cluster.raise_first()
    for definition in promises.OUTSIDE:
        definition(cluster)
    nodes = cluster.nodes()
    same = len(nodes) == len(cluster.names) and len({node.raft.applied_index for node in nodes}) == 1
    promises.converged(cluster, same and drained(cluster), cluster.world.now - cluster.healed_at)
    for definition in promises.REPLICAS:
        definition(cluster)


def tell(sim: Machines, violation: Violation) -> list[str]:
    """Trace of a violation in order of time: the last notes about its messages or its node, and the faults of the same
    period."""
    ids, who = violation.ids, violation.who
    lines = [
        (at, actor, text)
        for at, actor, text, about in sim.history.notes
        if actor == "nemesis" or (about & ids if ids else not who or actor == who)
    ]
    if ids and isinstance(sim, SimCluster):
        lines += _entries(sim, ids)
    lines.sort(key=lambda line: line[0])
    return [f"{at:10.4f}  {actor:<9} {text}" for at, actor, text in lines[-_TRACE_LINES:]]


def _entries(cluster: SimCluster, ids: frozenset[int]) -> Iterator[tuple[float, str, str]]:
    """Trace lines of committed commands that concern these messages: by id, by entry, or by a grant."""
    places = {unpack_id(i)[1:] for i in ids}
    for node in cluster.nodes()[:1]:
        places |= {(ref.hour, ref.index) for i in ids if (ref := find_entry(node.ledger, i)) is not None}
    grants: set[tuple[int, int]] = set()
    for index, (at, node_name, entry) in sorted(cluster.entries.items()):
        term = cluster.applied[index][0]
        try:
            _, now_ms, commands = decode_entry(entry)
            decoded = [(kind, decode(kind, body)) for kind, body in commands]
        except Malformed:
            continue  # skip malformed entries, which come from a fuzz client and which apply refused
        for kind, command in decoded:
            text = _about(command, kind, places, grants, ids)
            if text:
                yield at, node_name, f"applies {index}, term {term}, at {now_ms}: {Command(kind).name} {text}"


def _about(
    command: object, kind: int, places: set[tuple[int, int]], grants: set[tuple[int, int]], ids: frozenset[int]
) -> str:
    if isinstance(command, Grant):
        if any(place in places for place in zip(command.hours.tolist(), command.indexes.tolist(), strict=True)):
            grants.add((command.term, command.seq))
            return f"{command.term}.{command.seq} to {command.consumer} for {command.lease_ms} ms"
    elif isinstance(command, SettleLeases):
        rows = [row for row in command.rows.tolist() if (row[3], row[4]) in places]
        if rows:
            return f"{rows} {command.value_ms}"
    elif isinstance(command, Cancel):
        if any(int(i) in ids for i in command.ids):
            return "of it"
    elif kind == Command.EXPIRE and isinstance(command, list):
        named = [key for key in command if key in grants]
        if named:
            return f"{named}"
    return ""
