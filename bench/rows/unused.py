"""What schedules, groups, subscriptions and callbacks cost where nothing uses them: processor time against an earlier
version."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import uvloop

from bench.cluster import Cluster, cpu_seconds
from bench.result import Row, Setup, Target
from bench.rows.deliver import flow, nothing_early
from bench.rows.publish import of_a_batch
from bench.wrk_run import Missing, wrk

#: Slices per version and round, and their length in seconds. The first of each version warms it, and does not count.
_SLICES, _SLICE_S = 8, 5
#: Distance between the ports of the two clusters.
_PORTS = 40
#: Puts a load on a cluster for so many seconds; returns the number of messages.
Load = Callable[[Cluster, float], int]


def end_to_end(cluster: Cluster, seconds: float) -> int:
    tally = uvloop.run(flow(cluster, seconds))
    nothing_early(tally)
    return tally.acked


def published(script: str, connections: int, each: int, **environment: str) -> Load:
    def load(cluster: Cluster, seconds: float) -> int:
        run = wrk(cluster.leader().http, script, connections, seconds, **environment)
        return (run.requests - run.status) * each

    return load


def spent_by(cluster: Cluster, load: Load, seconds: float) -> tuple[float, float]:
    """Processor time per message in µs: of the leader, and of a follower."""
    leader = cluster.leader()
    followers = [node for node in cluster.nodes if node is not leader]
    before = [cpu_seconds(node.pid) for node in (leader, *followers)]
    count = load(cluster, seconds)
    cluster.settle()
    own, *others = [cpu_seconds(node.pid) - spent for node, spent in zip((leader, *followers), before, strict=True)]
    return own / count * 1e6, sum(others) / len(others) / count * 1e6


def _compare(setup: Setup, row: Row, name: str, load: Load, before: Path) -> None:
    """Both versions run all the time and get the load by turns, so that whatever else slows this machine slows both."""
    with (
        setup.cluster() as now,
        Cluster.start(setup.directory / "before", setup.port + _PORTS, source=before) as then,
    ):
        for number in range(_SLICES + 1):
            versions = [("now", now), ("before", then)]
            for version, cluster in versions[:: -1 if number % 2 else 1]:
                spent = spent_by(cluster, load, setup.seconds(_SLICE_S))
                for who, each in zip(("leader", "follower"), spent, strict=True):
                    if number:
                        row.add(f"{name}, {who} {version}", each, "µs/msg")


def unused(setup: Setup) -> list[Row]:
    if setup.before is None:
        raise Missing("no version to compare with: --before DIR, a checkout (git worktree add DIR edff2a69^)")
    loads = {
        "single": published("publish", 256, 1),
        "batch": published("file", 32, 1000, **of_a_batch(setup.directory)),
        "e2e": end_to_end,
    }
    targets = [Target(f"{load}, {who}", 1.02, at_most=True) for load in loads for who in ("leader", "follower")]
    row = Row("unused", "processor time per message, nothing of the scheduler in use, against --before", targets)
    for _ in setup.each_round("unused"):
        for name, load in loads.items():
            _compare(setup, row, name, load, setup.before)
    for name in loads:
        for who in ("leader", "follower"):
            row.ratio(f"{name}, {who}", f"{name}, {who} now", f"{name}, {who} before")
    return [row]
