"""One run: one contender, one workload, servers with empty data, and figures from the history."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.delays.contender import Contender
from bench.delays.contenders import CONTENDERS, contender_of
from bench.delays.field import ROOT, environment
from bench.delays.history import Reader, Writer, now_ms, read
from bench.delays.judge import Judgement, causes, judge
from bench.delays.plan import VARIABLE, Load, Plan
from bench.delays.server import cpu_s, end, tree, wait_gone

#: Interval at which the harness reads the history, in seconds.
_LOOK_S = 0.25
#: Time limit of a producer beyond the time that its load takes, in seconds.
_PRODUCE_S = 900
#: Visibility timeout where workers take messages before they are due, in seconds: Celery's default.
_LONG_S = 3600.0


@dataclass
class Sizes:
    """Sizes of the workloads; the defaults are those of the published table."""

    rate: int = 1000
    seconds: float = 60
    span_s: float = 60
    burst: int = 100_000
    pending: int = 1_000_000
    pending_s: float = 600
    cancels: int = 10_000
    kills: int = 5
    between_kills_s: float = 10
    in_hand: int = 100
    visibility_s: float = 10
    #: Time limit of waiting for messages that are due.
    drain_s: float = 300

    @property
    def quiet_s(self) -> float:
        """Time without hand-outs after which missing messages are lost: three visibility timeouts, and half a minute
        for slow polls and slow starts."""
        return 3 * self.visibility_s + 30


QUICK = Sizes(
    rate=200, seconds=8, span_s=5, burst=2000, pending=10_000, pending_s=30, cancels=200, kills=2, between_kills_s=4,
    visibility_s=5, drain_s=60,
)  # fmt: skip


@dataclass
class Run:
    contender: Contender
    sizes: Sizes
    directory: Path
    plan: Plan
    figures: dict[str, float] = field(default_factory=dict)
    #: Every 1/200 of the lateness in ms, for the plot.
    late_ms: list[float] = field(default_factory=list)
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    producer: subprocess.Popen[bytes] | None = None

    @classmethod
    def make(cls, name: str, sizes: Sizes, directory: Path, port: int, *, short: bool) -> Run:
        """short: the visibility timeout is that of the sizes, also where workers take messages before they are due."""
        visibility_s = _LONG_S if CONTENDERS[name].prefetches and not short else sizes.visibility_s
        for part in ("server", "history"):
            (directory / part).mkdir(parents=True)
        plan = Plan(name, str(directory / "server"), port, visibility_s, str(directory / "history"), Load("once"))
        return cls(contender_of(plan), sizes, directory, plan)

    # --- processes ---

    def role(self, command: Sequence[str], plan: Plan, name: str) -> subprocess.Popen[bytes]:
        path = self.directory / f"{name}.plan"
        plan.save(path)
        with open(self.directory / f"{name}.log", "ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=ROOT,
                env=environment() | {VARIABLE: str(path)}, start_new_session=True,
            )  # fmt: skip

    def start(self) -> None:
        """Start servers, and make what they need."""
        self.contender.start()
        made = self.role([sys.executable, "-m", "bench.delays.roles", "prepare"], self.plan, "prepare")
        if made.wait(60) != 0:
            raise RuntimeError((self.directory / "prepare.log").read_text().strip().splitlines()[-1])

    def work(self, count: int, hold: int = 0) -> None:
        plan = replace(self.plan, hold=hold)
        name = "hold" if hold else "work"
        self.workers += [self.role(self.contender.worker(), plan, name) for _ in range(count)]

    def produce(self, load: Load) -> subprocess.Popen[bytes]:
        plan = replace(self.plan, load=load)
        self.producer = self.role([sys.executable, "-m", "bench.delays.roles", "produce"], plan, "produce")
        return self.producer

    def published(self) -> None:
        assert self.producer is not None
        if self.producer.wait(self.plan.load.seconds + _PRODUCE_S) != 0:
            raise RuntimeError(f"the producer failed: {(self.directory / 'produce.log').read_text()[-300:]}")

    def stop(self) -> None:
        """End producers, workers and servers; each even if another one fails."""
        try:
            for process in [*self.workers, *([self.producer] if self.producer else [])]:
                if process.stdin is not None:
                    process.stdin.close()
                end(process)
        finally:
            self.contender.stop()

    # --- faults ---

    def note(self, event: str, **fields: object) -> None:
        Writer(self.directory / "history", "harness").write(event, **fields)

    def kill_server(self) -> None:
        at = now_ms()
        pids = self.contender.kill()
        self.note("fault", what="server", pids=pids, at=at)
        self.contender.restart()

    def kill_worker(self) -> None:
        """End the first worker with all its children by SIGKILL."""
        worker = self.workers.pop(0)
        pids = tree(worker.pid)
        self.note("fault", what="worker", pids=pids)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        worker.wait()
        wait_gone(pids)

    def supervise(self) -> None:
        """Start workers again that ended by themselves, as a supervisor would: some end with their server."""
        for n, worker in enumerate(self.workers):
            if worker.poll() is not None:
                self.workers[n] = self.role(self.contender.worker(), self.plan, "work")
                self.figures["worker restarts"] = self.figures.get("worker restarts", 0) + 1

    # --- waiting and judging ---

    def wait_got(self, count: int, timeout_s: float) -> None:
        """Wait until workers have `count` messages in hand, or not: the judge decides."""
        reader, got, until = Reader(self.directory / "history"), 0, time.monotonic() + timeout_s
        while got < count and time.monotonic() < until:
            time.sleep(_LOOK_S)
            got += sum(len(event["ids"]) for event in reader.new() if event["e"] == "got")

    def drain(self, more_s: float = 1.0, since_ms: float = 0.0, *, supervised: bool = False) -> None:
        """Wait until every acknowledged message that is due was handed out after `since_ms`, or nothing comes any
        longer; then for `more_s`, in which messages may come twice. supervised: workers that end are started again."""
        reader, due, got, last = Reader(self.directory / "history"), dict[str, int](), set[str](), now_ms()
        until = time.monotonic() + self.sizes.drain_s
        while time.monotonic() < until:
            for event in reader.new():
                if event["e"] == "pub" and event["ok"] is not None:
                    due.update(zip(event["ids"], event["due"], strict=True))
                elif event["e"] == "got" and event["at"] > since_ms:
                    got.update(event["ids"])
                    last = max(last, event["at"])
                elif event["e"] == "cancel" and event["ok"] is not None:
                    got.update(event["ids"])
            soon = now_ms() + self.sizes.drain_s * 1000
            owed = [when for id, when in due.items() if id not in got and when < soon]
            if not owed or now_ms() > max(last, *owed) + self.sizes.quiet_s * 1000:
                break
            if supervised:
                self.supervise()
            time.sleep(_LOOK_S)
        time.sleep(more_s)
        self.note("end")
        if ended := [worker.args for worker in self.workers if worker.poll() is not None]:
            raise RuntimeError(f"a worker ended by itself, so the history proves nothing: {ended[0]!r}")

    def spent(self) -> tuple[float, float]:
        """Processor time in seconds of the servers, and of everything."""
        servers = cpu_s(self.contender.servers())
        others = [*self.workers, *([self.producer] if self.producer else [])]
        return servers, servers + sum(cpu_s(tree(process.pid)) for process in others)

    def judged(self) -> Judgement:
        """Judge the history, and take the figures that every workload has."""
        events = read(self.directory / "history")
        found = judge(events, self.sizes.quiet_s)
        self.figures |= {"published": found.published, "delivered": found.delivered, **causes(found)}
        self.figures |= {"unsure": found.unsure, "unfinished": found.unfinished, "redelivered": found.redelivered}
        if found.early:
            self.figures["early by"] = found.early_ms
        if found.late_ms:
            self.figures |= {"late p50": found.late(0.5), "late p99": found.late(0.99), "late max": found.late(1)}
            self.figures["gap"] = found.gap_s
            self.late_ms = [found.late(n / 200) for n in range(201)]
        for event in events:
            if event["e"] == "loaded" and event["seconds"]:
                self.figures["publish rate"] = event["count"] / event["seconds"]
        return found
