"""What schedules, groups, subscriptions and callbacks cost where nothing uses them: processor time against an earlier
version."""

from __future__ import annotations

from pathlib import Path

import uvloop

from bench.cluster import cpu_seconds
from bench.result import Row, Setup, Target
from bench.rows.deliver import flow, nothing_early
from bench.rows.publish import SECONDS, WARM_S, of_a_batch
from bench.wrk_run import Missing, wrk


def _spent(setup: Setup, load: str, source: Path | None) -> tuple[float, float]:
    """Processor time per message in µs: of the leader, and of a follower."""
    with setup.cluster(source=source) as cluster:
        leader, seconds, each = cluster.leader(), setup.seconds(SECONDS), 1
        followers = [node for node in cluster.nodes if node is not leader]
        script, connections, environment = "publish", 256, dict[str, str]()
        if load == "batch":
            script, connections, environment, each = "file", 32, of_a_batch(setup.directory), 1000
        if load != "e2e":
            wrk(leader.http, script, connections, WARM_S, **environment)
        before = [cpu_seconds(node.pid) for node in (leader, *followers)]
        if load == "e2e":
            tally = uvloop.run(flow(cluster, seconds))
            nothing_early(tally)
            count = tally.acked
        else:
            run = wrk(leader.http, script, connections, seconds, **environment)
            count = (run.requests - run.status) * each
        cluster.settle()
        own, *others = [cpu_seconds(node.pid) - spent for node, spent in zip((leader, *followers), before, strict=True)]
        return own / count * 1e6, sum(others) / len(others) / count * 1e6


def unused(setup: Setup) -> list[Row]:
    if setup.before is None:
        raise Missing("no version to compare with: --before DIR, a checkout (git worktree add DIR edff2a69^)")
    loads = ("single", "batch", "e2e")
    targets = [Target(f"{load}, {who}", 1.02, at_most=True) for load in loads for who in ("leader", "follower")]
    row = Row("unused", "processor time per message, nothing of the scheduler in use, against --before", targets)
    for number in setup.each_round("unused"):
        for load in loads:
            # By turns, so that neither version is always the second.
            for source in (None, setup.before)[:: -1 if number % 2 else 1]:
                name = "now" if source is None else "before"
                for who, spent in zip(("leader", "follower"), _spent(setup, load, source), strict=True):
                    row.add(f"{load}, {who} {name}", spent, "µs/msg")
    for load in loads:
        for who in ("leader", "follower"):
            row.ratio(f"{load}, {who}", f"{load}, {who} now", f"{load}, {who} before")
    return [row]
