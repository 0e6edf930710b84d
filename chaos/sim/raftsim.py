"""Raft alone: journal, adapter and the real PySyncObj under a machine that only remembers what it applied.

Smaller and deeper than the whole cluster: thousands of seeds find in minutes what whole nodes would take hours for.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from functools import partial
from typing import Any

from chaos.sim.disk import SimDisk
from chaos.sim.file import is_injected
from chaos.sim.logsafety import LogSafety
from chaos.sim.network import SimNet
from chaos.sim.raftmachine import Machine
from chaos.sim.run import Report
from chaos.sim.runtime import SimRuntime, SimWorld
from hadelay.errors import DamagedFile, HadelayError
from hadelay.members import Member
from hadelay.raft import messages
from hadelay.raft.journal import Journal, JournalConfig
from hadelay.raft.node import RaftNode
from hadelay.raft.ports import RaftTuning
from hadelay.storage.identity import Identity

#: Faults that a run may draw.
FAULTS = (
    "reset", "cut", "split", "oneway", "pause", "kill", "io", "power", "power_all", "power_at_send", "slow", "fail",
    "wipe", "transfer", "slow_link",
)  # fmt: skip


class RaftSim:
    def __init__(
        self, seed: int, *, size: int = 3, seconds: float = 20.0, faults: tuple[str, ...] | None = None
    ) -> None:
        self.seed, self.seconds = seed, seconds
        self.world = SimWorld(seed)
        self.rng = self.world.random
        self.world.on_crash = lambda runtime: self.crash(runtime.name, restart=True)
        self.net = SimNet(self.world)
        self.names = [f"n{n + 1}" for n in range(size)]
        self.disks = {n: SimDisk(random.Random(f"{seed} {n}"), record=self.world.record) for n in self.names}
        self.nodes: dict[str, RaftNode] = {}
        self.machines: dict[str, Machine] = {}
        self.runtimes: dict[str, SimRuntime] = {}
        self.founded: set[str] = set()
        self.history: dict[int, tuple[int, bytes]] = {}
        self.acked: set[int] = set()
        #: Told in so many words that nothing happened.
        self.refused: set[int] = set()
        self.number = 0
        self.wiped = False
        #: Whether the last entry is committed; None: it has to be proposed.
        self.final: bool | None = None
        self.log: list[str] = []
        self.broken: list[str] = []
        self.strikes: Counter[str] = Counter()
        #: Linearizable reads that were answered.
        self.reads = 0
        self.faults = faults or tuple(self.rng.sample(FAULTS, self.rng.randint(2, 7)))
        self.config = RaftTuning(
            max_entry_bytes=8000,
            journal_keep_bytes=self.rng.choice((0, 4000, 1 << 20)),
            append_bytes=self.rng.choice((300, 1 << 20)),
        )
        self.safety = LogSafety(
            self.net,
            lambda promise, text, who: self.broken.append(f"{promise}: {text}"),
            quiet_s=self.config.election_min_ms / 1000,
        )

    def note(self, text: str) -> None:
        self.log.append(f"{self.world.now:9.4f} {text}")

    def applied(self, name: str, index: int, term: int, command: bytes) -> None:
        first = self.history.setdefault(index, (term, command))
        assert first == (term, command), f"I12: {name} applied {term} {command!r} at {index}, others {first}"

    def start(self, name: str) -> None:
        if name not in self.nodes and name not in self.runtimes:
            runtime = self.runtimes[name] = SimRuntime(
                self.world, name, self.disks[name], drift=self.rng.uniform(-5e-5, 5e-5)
            )
            runtime.call_soon(self._boot, name, runtime)

    def _boot(self, name: str, runtime: SimRuntime) -> None:
        disk = self.disks[name]
        config = JournalConfig(segment_bytes=16384, tail_bytes=4000)
        try:
            machine = Machine(self, name, disk, runtime)
            if Journal.exists(disk, "/data/raft"):
                journal = Journal.open(disk, "/data/raft", runtime, Identity("c", 0, name), config)
            else:
                incarnation = 1 if name not in self.founded else self.rng.randrange(2, 1 << 40)
                owner = Identity("c", 0, name, incarnation)
                journal = Journal.create(disk, "/data/raft", runtime, owner, config)
            self.founded.add(name)
            self.safety.reopened(name, journal)
            node = RaftNode(
                journal,
                self.net.network(name, runtime),
                runtime,
                machine,
                self.config,
                members=tuple(Member(other, "") for other in sorted(self.names)),
                on_fatal=lambda error: self.fatal(name, error),
            )
            node.set_applied(machine.index, machine.term)
            machine.raft = node
            self.machines[name], self.nodes[name] = machine, node
            node.start()
        except (HadelayError, OSError) as error:
            self.fatal(name, error)
            return
        self.note(f"{name} up: applied {machine.index}, last {node.last_index}, term {node.term}")

    def fatal(self, name: str, error: BaseException) -> None:
        self.note(f"{name} FATAL {error!r}")
        assert is_injected(error), f"I17: {name}: {error!r}"
        if isinstance(error, DamagedFile):
            raise error
        runtime = self.runtimes.get(name)
        if runtime is not None:
            runtime.crash()
            self.world.after(0.0, self.crash, name, True)

    def crash(self, name: str, restart: bool = False) -> None:
        runtime = self.runtimes.pop(name, None)
        self.nodes.pop(name, None)
        self.machines.pop(name, None)
        if runtime is not None:
            runtime.crash()
        network = self.net.nodes.get(name)
        if network is not None:
            network.close()
        self.disks[name].kill()
        if restart:
            self.world.after(self.rng.uniform(0.02, 2.0), self.start, name)

    def power_cut(self, name: str) -> None:
        self.crash(name, True)
        self.disks[name].power_cut()

    def run(self) -> None:
        for name in self.names:
            self.start(name)
        self._client()
        self._reader()
        self._nemesis()
        self._watch()
        self.world.run_until(self.seconds)
        self.heal()
        end = self.world.now + 12.0
        while self.world.now < end and not self.converged():
            self.world.run_for(0.2)
        assert self.converged(), "I15: " + str(
            {n: (x.applied_index, x.last_index, x.term, x.leader) for n, x in self.nodes.items()}
        )
        items = {n: m.items for n, m in self.machines.items()}
        first = items[self.names[0]]
        assert all(i == first for i in items.values()), "I12: states differ"
        gone = self.acked - set(first)
        assert not self.refused & set(first), f"answered as refused, and done: {sorted(self.refused & set(first))[:5]}"
        assert len(set(first)) == len(first) - first.count(-1) + (-1 in first), "applied twice"
        assert not gone, f"I1: lost {sorted(gone)[:5]} of {len(self.acked)}"

    def converged(self) -> bool:
        if len(self.nodes) < len(self.names) or not any(m.leading for m in self.machines.values()):
            return False
        return self.final_ok() and len({(n.applied_index, n.last_index) for n in self.nodes.values()}) == 1

    def final_ok(self) -> bool:
        """A last entry is committed: proposed once there is a leader, and again when that failed."""
        if self.final is None:
            leader = next((n for n, m in self.machines.items() if m.leading), None)
            if leader is not None:
                self.final = False

                def done(result: Any, error: HadelayError | None) -> None:
                    self.final = True if error is None else None

                self.nodes[leader].propose(b'["add", -1]', done)
            return False
        return self.final

    def _client(self) -> None:
        if self.world.now > self.seconds:
            return
        self.world.after(self.rng.expovariate(12), self._client)
        node = self.nodes.get(self.rng.choice(self.names))
        if node is None or self.runtimes[node.name].paused:
            return
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

            self.runtimes[node.name].call_soon(node.propose, json.dumps(["add", n, pad]).encode(), done)

    def _reader(self) -> None:
        if self.world.now <= self.seconds:
            self.world.after(self.rng.expovariate(8), self._reader)
            self.read(self.rng.choice(self.names))

    def read(self, name: str) -> None:
        """Linearizable: the state that is read holds everything that was acknowledged before."""
        node, machine, acked = self.nodes.get(name), self.machines.get(name), frozenset(self.acked)
        if node is None or machine is None or self.runtimes[name].paused:
            return

        def done(error: HadelayError | None) -> None:
            if error is None:
                self.reads += 1
                missing = acked - set(machine.items)
                assert not missing, f"stale read: {name} has not applied {sorted(missing)[:5]}"

        self.runtimes[name].call_soon(node.read_index, done)

    def _watch(self) -> None:
        self.world.after(0.005, self._watch)
        known = len(self.safety.leaders)
        self.safety.look(self.nodes, lambda name: self.runtimes[name].stirred())
        if len(self.safety.leaders) > known:
            self.read(self.safety.leaders[max(self.safety.leaders)])
        assert not self.broken, self.broken[0]

    def _victim(self) -> str:
        leading = [n for n, m in self.machines.items() if m.leading]
        return self.rng.choice(leading if leading and self.rng.random() < 0.5 else self.names)

    def _nemesis(self) -> None:
        if self.world.now > self.seconds - 1:
            return
        self.world.after(self.rng.expovariate(1 / self.rng.choice((0.2, 1.0, 2.0))), self._nemesis)
        if self.world.now < 1.0:
            return
        fault, a = self.rng.choice(self.faults), self._victim()
        b = self.rng.choice([n for n in self.names if n != a])
        disk = self.disks[a]
        self.note(f"{fault} {a} {b}")
        self.strikes[fault] += 1
        if fault == "reset":
            self.net.reset(a, b)
        elif fault == "cut":
            for n in self.names:
                if n != a:
                    self.net.cut(a, n)
                    self.net.cut(n, a)
            self.world.after(self.rng.uniform(0.2, 4), self.net.heal)
        elif fault == "split":
            apart = self.rng.sample(self.names, len(self.names) // 2)
            for one in apart:
                for other in self.names:
                    if other not in apart:
                        self.net.cut(one, other)
                        self.net.cut(other, one)
            self.world.after(self.rng.uniform(0.2, 4), self.net.heal)
        elif fault == "oneway":
            self.net.cut(a, b)
            self.world.after(self.rng.uniform(0.2, 4), self.net.heal)
        elif fault == "slow_link":
            self.net.slow[a, b] = self.rng.choice((2e3, 3e4))
            self.world.after(self.rng.uniform(0.2, 4), self.net.heal)
        elif fault == "pause" and a in self.runtimes:
            self.runtimes[a].pause()
            self.world.after(self.rng.uniform(0.05, 3), self.runtimes[a].resume)
        elif fault == "kill":
            self.crash(a, True)
        elif fault == "io":
            disk.crash_in = disk.crash_in or self.rng.choice((1, 2, 5, 20))
        elif fault == "power":
            self.power_cut(a)
        elif fault == "power_all":
            for n in self.names:
                self.crash(n, True)
                self.disks[n].power_cut()
        elif fault == "power_at_send":
            kind = self.rng.choice((messages.VOTE_REPLY, messages.APPEND_REPLY, messages.SNAPSHOT_DONE))
            self.safety.at_send[a, kind] = partial(self.power_cut, a)
        elif fault == "slow":
            disk.sync_delay_s = self.rng.choice((0.01, 0.1, 1.5))
            self.world.after(self.rng.uniform(0.2, 3), setattr, disk, "sync_delay_s", 0.0004)
        elif fault == "fail":
            disk.fail_syncs = 1
        elif fault == "transfer" and a in self.nodes:
            self.runtimes[a].call_soon(self.nodes[a].transfer, self.rng.choice((b, None)), lambda error: None)
        elif fault == "wipe" and not self.wiped and len(self.names) > 1:
            self.wiped = True
            self.crash(a, True)
            disk.wipe()
            self.safety.wiped(a)

    def heal(self) -> None:
        self.note("heal")
        self.faults = ()
        self.safety.at_send.clear()
        self.net.heal()
        for name in self.names:
            self.disks[name].sync_delay_s, self.disks[name].fail_syncs, self.disks[name].crash_in = 0.0004, 0, 0
            if name in self.runtimes:
                self.runtimes[name].resume()
            self.start(name)


def run_seed(seed: int, faults: tuple[str, ...] | None = None) -> Report:
    """faults: those of this run; None: some, drawn from the seed."""
    started = time.perf_counter()
    sim = RaftSim(seed, size=random.Random(seed).choice((3, 5)), faults=faults)
    report = Report(seed)
    try:
        sim.run()
    except (AssertionError, HadelayError) as error:
        report.failure = str(error) or repr(error)
        report.invariant = report.failure.split(":")[0]
        report.story = sim.log[-40:]
    report.counts = {
        "checked stale read": sim.reads, **{f"checked {promise}": n for promise, n in sim.safety.decided.items()},
        **{f"fault {name}": n for name, n in sim.strikes.items()},
    }  # fmt: skip
    report.simulated_s, report.wall_s = sim.world.now, time.perf_counter() - started
    report.messages, report.entries, report.terms = len(sim.acked), len(sim.history), max(sim.safety.leaders, default=0)
    report.trace = sim.world.trace
    return report
