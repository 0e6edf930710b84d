"""Backups of a simulated cluster under faults, and clusters restored from them. Runs the production code of `hadelay
backup` without HTTP."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any
from urllib.parse import unquote

import msgspec

from chaos.sim.cluster import SimCluster
from chaos.sim.disk import SimDisk
from chaos.sim.door import Client
from chaos.sim.evidence import WAITING
from chaos.sim.history import HandOut, History
from chaos.sim.machines import Process
from chaos.sim.receiver import Receiver
from chaos.sim.runtime import SimRuntime, SimWorld
from chaos.sim.tables import SimBackend
from hadelay.cli.backup import Copying
from hadelay.errors import DamagedFile, HadelayError, OutcomeUnknown
from hadelay.ledger.views.describe import describe
from hadelay.model import NEVER_MS
from hadelay.server.node import Node
from hadelay.server.restore import restore
from hadelay.storage.backup import Archive, LocalBackups


class Backups(Client):
    """Operator who makes backups on a separate disk. The code of a backup blocks until each answer; meanwhile other
    events of the simulation run."""

    cluster: SimCluster

    def __init__(self, cluster: SimCluster) -> None:
        super().__init__(cluster, "backup")
        self.disk = SimDisk(random.Random(f"{cluster.seed} backup disk"), record=self.world.record)
        self.archive = Archive(LocalBackups(self.disk, "/backup"))
        #: `points`: index of a snapshot → times of its request and answer. `made`: index of the last backup. `tries`:
        #: number of tries left for the running backup; 0: no backup is running.
        self.points: dict[int, tuple[float, float]] = {}
        self.made, self.tries = 0, 0

    def back_up(self) -> None:
        """Make a backup; if a backup is running, give it more tries. Runs as an event of the simulation."""
        idle, self.tries = not self.tries, 8
        while idle and self.tries:
            while (process := self.cluster.any_process(self.random)) is None:
                self.world.run_for(0.1)
            self.disk.power_cut()  # power cut at the operator's machine, which may crash between two tries
            try:
                self.archive.files.prepare()
                self.made = Copying(self.archive, partial(self._call, process), inf, hidden=True).run(keep=2)["index"]
                self.tries = 0
            except (HadelayError, ConnectionError) as error:
                self.note(f"no backup of {process.name}: {error}")
                if isinstance(error, DamagedFile) and not self.cluster.rotten:
                    raise
                self.world.run_for(self.random.uniform(0.05, 0.4))
                self.tries -= 1

    def _call(self, process: Process, method: str, url: str, **more: Any) -> Any:
        """Stand-in for cli.remote.call: answers requests about snapshots."""
        self.world.run_for(self.random.uniform(0.0, 0.01))
        name = {"POST": "open_snapshot", "GET": "read_snapshot", "DELETE": "release_snapshot"}[method]
        args: list[Any] = [*map(unquote, url.split("/")[3:])]
        if method == "GET":
            first, last = map(int, more["headers"]["Range"].removeprefix("bytes=").split("-"))
            args += [first, last + 1 - first]
        began, answers = self.world.now, list[tuple[Any, HadelayError | None]]()
        self.door.ask(process, lambda service: getattr(service.files, name)(*args), lambda *both: answers.append(both))
        self.world.run_until(inf, stop=lambda: bool(answers))
        result, error = answers[0]
        if error is not None:
            raise ConnectionError(str(error)) if isinstance(error, OutcomeUnknown) else error
        if method == "POST":
            self.points[int(result.index)] = began, self.world.now
        return msgspec.to_builtins(result, builtin_types=(bytes,))

    def restored(self) -> SimCluster:
        """Start a new simulated cluster whose nodes are restored from the last backup."""
        self.disk.power_cut()
        backup, old, hours = self.archive.read(self.made), self.cluster, self.random.choice((0, 0, 0, 1, 30))
        began, ended = self.points[backup.index]
        world = SimWorld(-old.seed, epoch_ms=old.world.epoch_ms)
        world.now = ended + self.random.random() + hours * 3600
        cluster = SimCluster(
            world.seed,
            names=old.founders[:3],
            sync=old.sync,
            workload=old.workload,
            window_ms=old.window_ms,
            group=1,
            world=world,
        )
        cluster.history = replace(_known(old.history, began, ended), slept=old.history.slept or hours > 0)
        if old.receiver is not None:
            cluster.receiver = Receiver(cluster, cluster.fails)
            cluster.receiver.alerts += old.receiver.alerts
        cluster.cold_starts = [at for at in old.cold_starts if at < ended] or [0.0]
        cluster.elected = [at for at in old.elected if at < ended]
        cluster.doubt_ms, cluster.slept_s = old.doubt_ms, old.slept_s
        cluster.grants = {lease: grant for lease, grant in old.grants.items() if lease[0] <= backup.term}
        cluster.on_boot.append(partial(_compare, cluster, set()))
        cluster.note(f"{', '.join(cluster.names)} get backup {backup.index} of t={began:.3f}, {hours} hours later")
        for name, machine in cluster.machines.items():
            machine.founded, disk, runtime = True, machine.disk, SimRuntime(world, name, machine.disk)
            config, tables, errors = cluster.config(name), partial(SimBackend, disk), list[HadelayError | None]()
            restore(config, self.archive, backup, disk, runtime, errors.append, backend=tables)
            world.run_for(0.2)
            assert errors == [None], errors
            disk.power_cut()
        return cluster


def _compare(cluster: SimCluster, compared: set[str], node: Node) -> None:
    """Check restored messages that wait and were never handed out: their content must be what clients know. (I1 checks
    that none is missing.) compared: names of the nodes already checked. Only a node's first start is checked: a later
    start begins at the node's own checkpoint, which may be older than what clients know."""
    if node.name in compared:
        return
    compared.add(node.name)
    for m in cluster.history.messages:
        found = describe(node.ledger, m.id, body=True) if m.id is not None else None
        if (
            found
            and found.state in WAITING
            and not found.history
            and cluster.history.message_of(found.body or b"") is m
        ):
            same = found.body == m.body and m.deliver_at_ms in (NEVER_MS, found.deliver_at_ms)
            cluster.decide("backup", not same, f"{m} is restored as {found}", found.id, who=node.name)


def _known(old: History, began: float, ended: float) -> History:
    """History of the restored cluster, derived from the old cluster's history. The snapshot was requested at `began`
    and answered at `ended`: requests answered before `began` are in the backup, and requests sent before `ended` may be
    in it. Messages that may be missing have no id. Attempts are 0: grants after the backup are lost, and their attempts
    repeat."""
    acks = dict[int, HandOut]()
    for h in old.hand_outs:
        if h.ack_invoked is not None and h.ack_invoked < ended:
            first = min(h.ack_invoked, acks[h.id].ack_invoked or inf) if h.id in acks else h.ack_invoked
            acks[h.id] = replace(h, attempt=0, nack_invoked=0.0, result_taken=False, ack_invoked=first)
    for h in acks.values():
        h.acked = h.acked if (h.acked or inf) < began else None
    messages = [*map(replace, old.messages)]
    for m in messages:
        m.cancelled = m.cancelled if (m.cancelled or inf) < began else None
        m.cancel_invoked = m.cancel_invoked if (m.cancel_invoked or inf) < ended else None
        if (m.stored or inf) >= began:
            m.id, m.stored, m.refused = None, None, True
        elif old.moved(m):  # unknown due time: the reschedule may have come too late for the backup
            m.deliver_at_ms, m.unsure = NEVER_MS, True
    orders = [replace(order, answered=None) for order in old.orders if order.invoked < ended]
    return replace(old, messages=messages, hand_outs=[*acks.values()], orders=orders, second_ids=[], limited=None)
