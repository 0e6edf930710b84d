"""What many messages cost: memory, publish rate, restart; and what an idle cluster costs."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable

import uvloop

from bench.cluster import Cluster, Void, cpu_seconds, rss_anon_mb, written_bytes
from bench.load import Session, Tally, now_ms, publish
from bench.result import Row, Setup, Target
from bench.wrk_run import wrk

HOUR_MS = 3_600_000
Due = Callable[[], int]


def within_48_hours() -> int:
    return now_ms() + random.randrange(HOUR_MS, 48 * HOUR_MS)


def within_two_years() -> int:
    return now_ms() + random.randrange(HOUR_MS, 729 * 24 * HOUR_MS)


def overdue() -> int:
    return now_ms() - 1000


async def _fill(cluster: Cluster, count: int, due: Due, tally: Tally) -> None:
    addresses = [node.http for node in cluster.nodes]
    left = count

    async def produce(i: int) -> None:
        nonlocal left
        session = Session(addresses, i)
        while left > 0:
            take = min(5000, left)
            left -= take
            await publish(session, tally, [due() for _ in range(take)])

    await asyncio.gather(*(produce(i) for i in range(6)))


def written_out(cluster: Cluster, quiet_s: float = 70.0, timeout_s: float = 300.0) -> None:
    """Wait until the last checkpoint that the filling left behind is over, which may be a `checkpoint_interval` later:
    what is measured is the pending messages."""
    end, since, before = time.monotonic() + timeout_s, time.monotonic(), [0]
    while time.monotonic() < end:
        written = [written_bytes(node.pid) for node in cluster.nodes]
        if sum(written) - sum(before) > 1 << 20:
            since, before = time.monotonic(), written
        if time.monotonic() - since >= quiet_s:
            return
        time.sleep(0.2)
    raise Void("the nodes do not stop writing")


def _publish_rate(cluster: Cluster, setup: Setup) -> tuple[float, int]:
    run = wrk(cluster.leader().http, "publish", 64, setup.seconds(6))
    return run.rate, run.requests - run.status


def memory(setup: Setup) -> list[Row]:
    targets = [
        Target(f"{name}: {figure}", *bound)
        for name in ("48 h", "2 years", "overdue")
        for figure, bound in (("RssAnon more", (150.0, None, True)), ("publish rate", (0.85,)))
    ]
    many, few = setup.many(10_000_000, 200_000), 10_000
    row = Row("memory", f"{many:,} pending against {few:,}: memory per node, publish rate", targets)
    for name, due in (("48 h", within_48_hours), ("2 years", within_two_years), ("overdue", overdue)):
        setup.say(f"memory, {many:,} messages, {name}")
        with setup.cluster() as cluster:
            tally = Tally()
            uvloop.run(_fill(cluster, few, due, tally))
            rate_few, extra_few = _publish_rate(cluster, setup)
            cluster.settle()
            rss_few = [rss_anon_mb(node.pid) for node in cluster.nodes]
            began = time.monotonic()
            uvloop.run(_fill(cluster, many - few, due, tally))
            row.add(f"{name}: filled at", (many - few) / (time.monotonic() - began), "msg/s")
            written_out(cluster)
            rate_many, extra_many = _publish_rate(cluster, setup)
            cluster.settle()
            rss_many = [rss_anon_mb(node.pid) for node in cluster.nodes]
            cluster.account(["bench"], tally.published + extra_few + extra_many, 0, unsure=128)
            row.add(f"{name}: RssAnon", max(rss_many), "MB")
            row.add(f"{name}: RssAnon more", max(b - a for a, b in zip(rss_few, rss_many, strict=True)), "MB")
            row.add(f"{name}: publish rate", rate_many / rate_few, "×")
    return [row]


def restart(setup: Setup) -> list[Row]:
    many = setup.many(10_000_000, 200_000)
    row = Row(
        "restart",
        f"restart of a node that holds {many:,} messages: ready within",
        [Target("clean", 5, 2, at_most=True), Target("after SIGKILL", 5, 2, at_most=True)],
    )
    setup.say(f"restart, filling {many:,}")
    with setup.cluster() as cluster:
        tally = Tally()
        uvloop.run(_fill(cluster, many, within_48_hours, tally))
        for _ in setup.each_round("restart"):
            for figure, how in (("clean", signal.SIGTERM), ("after SIGKILL", signal.SIGKILL)):
                node = cluster.follower()
                cluster.end(node, how)
                row.add(figure, cluster.restart(node), "s")
                cluster.settle()
        cluster.account(["bench"], tally.published, 0)
    return [row]


def at_rest(cluster: Cluster, seconds: float) -> list[tuple[float, int]]:
    """(processor time in % of a core, bytes written) of each node, while nothing is asked of it."""
    before = [(cpu_seconds(node.pid), written_bytes(node.pid)) for node in cluster.nodes]
    time.sleep(seconds)
    after = [(cpu_seconds(node.pid), written_bytes(node.pid)) for node in cluster.nodes]
    return [
        ((cpu - cpu_before) / seconds * 100, written - written_before)
        for (cpu_before, written_before), (cpu, written) in zip(before, after, strict=True)
    ]


def idle(setup: Setup) -> list[Row]:
    row = Row(
        "idle",
        "idle cluster: CPU per node, and what it writes",
        [Target("cpu", 2.0, at_most=True), Target("written", 0.0, at_most=True)],
    )
    seconds = setup.seconds(20)
    with setup.cluster() as cluster:
        uvloop.run(_fill(cluster, 10_000, within_48_hours, Tally()))
        # The checkpoint after the last message is work, not idling.
        time.sleep(setup.seconds(70))
        for _ in setup.each_round("idle"):
            nodes = at_rest(cluster, seconds)
            row.add("cpu", max(cpu for cpu, _ in nodes), "% of a core")
            row.add("written", float(max(written for _, written in nodes)), "bytes")
    return [row]
