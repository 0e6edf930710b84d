"""Where the processor time of a message goes, on all nodes: by rooms of src/hadelay, and in the kernel."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from bench.cluster import Cluster, Node, Void
from bench.result import Row, Setup, Target
from bench.rows.access import tokens_and_tls
from bench.rows.deliver import flow, nothing_early
from bench.rows.publish import baseline, of_a_batch
from bench.rows.schedules import each_second
from bench.wrk_run import Missing, wrk

SECONDS = 15
#: Samples per second of each node; none stops it.
_HZ = 200
#: Room of src/hadelay → what it does on a message's way.
_STAGES = {
    "http": "HTTP: read requests, write answers",
    "api": "HTTP: read requests, write answers",
    "server": "collect requests into entries, answer them",
    "codec": "encode and decode commands",
    "raft": "Raft: append, send, commit",
    "storage": "journal and hour logs",
    "ledger": "apply",
    "handout": "hand out",
    "platform": "sockets, timers, disk threads",
    "model": "ids, states, rules",
    "rules": "ids, states, rules",
    "process": "event loop",
}


def _stage(stack: str) -> str:
    """The stage of py-spy's line of a stack, outermost frame first: of its innermost frame in src/hadelay."""
    for frame in reversed(stack.split(";")):
        _, found, path = frame.rpartition("(")[2].rpartition("/hadelay/")
        if found:
            room = path.partition("/")[0].partition(".")[0]
            return _STAGES.get(room, room)
    return _STAGES["process"]


def _times(pid: int) -> tuple[float, float]:
    """Processor time of a process in seconds: its own, and the kernel's for it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    tick = os.sysconf("SC_CLK_TCK")
    return int(fields[11]) / tick, int(fields[12]) / tick


@contextlib.contextmanager
def _sampled(nodes: list[Node], seconds: float, directory: Path) -> Iterator[dict[str, Counter[str]]]:
    """Sample the nodes meanwhile; afterwards the dict has, for each node, the samples of each stage."""
    found: dict[str, Counter[str]] = {}
    spies = []
    for node in nodes:
        out = directory / f"{node.name}.stacks"
        command = ["py-spy", "record", "--nonblocking", "--full-filenames", "--format", "raw", "--rate", str(_HZ)]
        command += ["--duration", str(round(seconds)), "--pid", str(node.pid), "--output", str(out)]
        spies.append((node, out, subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)))
    try:
        yield found
        for node, out, spy in spies:
            spy.wait(seconds + 60)
            stages = found[node.name] = Counter[str]()
            for line in out.read_text().splitlines():
                stack, _, count = line.rpartition(" ")
                stages[_stage(stack)] += int(count)
    finally:
        for _, _, spy in spies:
            spy.kill()
            spy.wait()


def _single(cluster: Cluster, seconds: float) -> int:
    run = wrk(cluster.leader().http, "publish", 256, seconds, BENCH_TOKEN=cluster.token)
    return run.requests - run.status


def _schedules(cluster: Cluster, seconds: float) -> int:
    found, _ = uvloop.run(each_second(cluster, seconds))
    if found.void():
        raise Void(found.void())
    return len(found.came)


def _batch(environment: dict[str, str], cluster: Cluster, seconds: float) -> int:
    run = wrk(cluster.leader().http, "file", 32, seconds, **environment)
    return 1000 * (run.requests - run.status)


def _end_to_end(cluster: Cluster, seconds: float) -> int:
    tally = uvloop.run(flow(cluster, seconds))
    nothing_early(tally)
    return tally.acked


def _measure(setup: Setup, row: Row, name: str, load: Callable[[Cluster, float], int], **how: Any) -> None:
    """how: arguments of Setup.cluster."""
    seconds = setup.seconds(SECONDS)
    with setup.cluster(**how) as cluster:
        load(cluster, 2)  # warm
        leader = cluster.leader()
        nodes = [leader, *(node for node in cluster.nodes if node is not leader)]
        before = [_times(node.pid) for node in nodes]
        with _sampled(nodes, seconds, setup.directory) as stages:
            count = load(cluster, seconds)
        cluster.settle()
        for who, some in (("leader", nodes[:1]), ("followers, both", nodes[1:])):
            spent: Counter[str] = Counter()
            for node in some:
                (own, kernel), (own_before, kernel_before) = _times(node.pid), before[nodes.index(node)]
                own, kernel = (own - own_before) / count * 1e6, (kernel - kernel_before) / count * 1e6
                spent["all"] += own + kernel  # type: ignore[assignment]
                spent["all of that in the kernel"] += kernel  # type: ignore[assignment]
                for stage, samples in stages[node.name].items():
                    spent[stage] += (own + kernel) * samples / stages[node.name].total()  # type: ignore[assignment]
            for stage, each in spent.most_common():
                row.add(f"{name}, {who}: {stage}", each, "µs/msg")


def _floor(setup: Setup, row: Row, kind: str, what: str) -> None:
    """Processor time per request of one process that does nothing else."""
    with baseline(kind, setup.port + 200) as (url, pid):
        wrk(url, "plain", 256, 1)
        own, kernel = _times(pid)
        run = wrk(url, "plain", 256, setup.seconds(5))
        own, kernel = _times(pid)[0] - own, _times(pid)[1] - kernel
        row.add(f"floor: {what}", (own + kernel) / run.requests * 1e6, "µs/msg")
        row.add(f"floor: {what}, in the kernel", kernel / run.requests * 1e6, "µs/msg")


def cost(setup: Setup) -> list[Row]:
    if shutil.which("py-spy") is None:
        raise Missing("py-spy is not installed (pip install py-spy)")
    row = Row("cost", "processor time per message by stages, samples of all nodes", list[Target]())
    for _ in setup.each_round("cost"):
        _floor(setup, row, "bare", "a protocol of uvloop that answers each request with the same bytes")
        _floor(setup, row, "plain", "an aiohttp handler that reads the body")
        _measure(setup, row, "single", _single)
        _measure(setup, row, "e2e", _end_to_end)
        _measure(setup, row, "batch", partial(_batch, of_a_batch(setup.directory)))
        _measure(setup, row, "access", _single, **tokens_and_tls(setup))
        _measure(setup, row, "schedules", _schedules)
    return [row]
