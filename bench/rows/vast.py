"""A hundred million pending messages: memory, publish rate, restart. Takes tens of GB of disk."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time

import msgpack
import uvloop

from bench.cluster import Cluster, cpu_seconds, rss_anon_mb
from bench.http1 import Failed, request
from bench.load import TOPIC, Session
from bench.result import Row, Setup, Target
from bench.rows.size import written_out
from bench.wrk_run import wrk

_DAYS = 30
_BATCH = 5_000


def _packed() -> bytes:
    """The request of one batch: its times count from when it is sent, so it may be sent often."""
    span = random.Random(os.urandom(8))
    items = [
        {"topic": TOPIC, "body": os.urandom(16), "delay": span.randrange(3600, _DAYS * 24 * 3600)}
        for _ in range(_BATCH)
    ]
    return request("POST", "/v1/messages:batch", msgpack.packb(items), kind="msgpack")


async def _fill(cluster: Cluster, count: int, setup: Setup) -> None:
    left = count

    async def produce(i: int) -> None:
        nonlocal left
        session, batches = Session([node.http for node in cluster.nodes], i), [_packed() for _ in range(20)]
        while left > 0:
            left -= _BATCH
            results = msgpack.unpackb(await session.call(random.choice(batches), 60))["results"]
            if any("error" in result for result in results):
                raise Failed(422, repr(results[:1]).encode())
            if left % 10_000_000 == 0:
                setup.say(f"vast, {left:,} to go")

    await asyncio.gather(*(produce(i) for i in range(6)))


def _publish(cluster: Cluster, setup: Setup, row: Row, name: str) -> int:
    """Rate, and processor time of the leader; how many were published."""
    leader = cluster.leader()
    before = cpu_seconds(leader.pid)
    # Due in a day, so that nothing is handed out while the rest is filled in, which takes longer than ten minutes.
    run = wrk(leader.http, "publish", 64, setup.seconds(10), BENCH_DELAY_S=str(24 * 3600))
    row.add(f"{name}: publish", run.rate, "msg/s")
    row.add(f"{name}: leader CPU", (cpu_seconds(leader.pid) - before) / run.requests * 1e6, "µs/msg")
    return run.requests - run.status


def vast(setup: Setup) -> list[Row]:
    many, few = setup.many(100_000_000, 200_000), 10_000
    row = Row(
        "vast",
        f"{many:,} pending over {_DAYS} days, bodies of 16 bytes, against {few:,}: memory, publish rate, restart",
        [
            Target("RssAnon more", 200, at_most=True),
            Target("publish rate", 0.9),
            Target("restart after SIGKILL", 5, at_most=True),
        ],
    )
    with setup.cluster() as cluster:
        extra, memory = 0, {}
        for name, count in (("few", few), ("many", many)):
            began = time.monotonic()
            uvloop.run(_fill(cluster, count, setup))
            row.add(f"{name}: filled at", count / (time.monotonic() - began), "msg/s")
            written_out(cluster, timeout_s=1200)
            memory[name] = [rss_anon_mb(node.pid) for node in cluster.nodes]
            for _ in setup.each_round(f"vast, {name}"):
                extra += _publish(cluster, setup, row, name)
        row.add("RssAnon more", max(b - a for a, b in zip(memory["few"], memory["many"], strict=True)), "MB")
        row.ratio("publish rate", "many: publish", "few: publish")
        cluster.settle()
        cluster.account([TOPIC], few + many + extra, 0, unsure=128 * setup.rounds)
        for figure, how in (("restart, clean", signal.SIGTERM), ("restart after SIGKILL", signal.SIGKILL)):
            for _ in setup.each_round(figure):
                node = cluster.follower()
                cluster.end(node, how)
                row.add(figure, cluster.restart(node), "s")
                cluster.settle()
    return [row]
