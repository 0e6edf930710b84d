"""Bulk jobs over a million messages: how long, how late others are meanwhile, and how many log entries they take."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from typing import Any

import msgspec
import uvloop

from bench.cluster import Cluster, Void, get
from bench.http1 import request
from bench.load import Session, Tally, now_ms, publish
from bench.result import Row, Setup, Target
from bench.rows.deliver import leader_first, steady

RATE = 2_000
TOPIC = "jobs"
HOUR_MS, DAY_MS = 3_600_000, 86_400_000
#: Beyond this it has not worked.
PATIENCE_S = 900.0


async def _fill(cluster: Cluster, count: int) -> None:
    """Messages over the 48 hours that begin in an hour."""
    tally, addresses = Tally(), leader_first(cluster)

    async def produce(n: int) -> None:
        session = Session(addresses, n)
        for _ in range(count // 4000):
            due = [now_ms() + HOUR_MS + random.randrange(2 * DAY_MS) for _ in range(1000)]
            await publish(session, tally, due, TOPIC)

    await asyncio.gather(*(produce(n) for n in range(4)))


async def _job(cluster: Cluster, wish: dict[str, Any]) -> float:
    """Begin a job and wait until it has ended; seconds."""
    session, began = Session([node.http for node in cluster.nodes]), time.monotonic()
    body = msgspec.json.encode({"filter": {"topic": TOPIC}, "request_id": f"{began}", **wish})
    job = msgspec.json.decode(await session.call(request("POST", "/v1/jobs", body)))
    while job["ended_at"] is None:
        if time.monotonic() > began + PATIENCE_S:
            raise Void(f"a job does not end: {job}")
        await asyncio.sleep(0.2)
        job = msgspec.json.decode(await session.call(request("GET", f"/v1/jobs/{job['id']}")))
    wish["done"] = job["done"]
    return time.monotonic() - began


async def _beside(cluster: Cluster, wish: dict[str, Any]) -> tuple[float, Tally]:
    """A job beside 2,000 messages per second."""
    running = asyncio.create_task(_job(cluster, wish))
    tally = await steady(cluster, RATE, PATIENCE_S, over=running.done)
    return await running, tally


async def _over_a_kill(cluster: Cluster, wish: dict[str, Any], after_s: float) -> float:
    """A job whose leader is killed half-way, and started again afterwards."""
    running = asyncio.create_task(_job(cluster, wish))
    await asyncio.sleep(after_s)
    leader = await asyncio.to_thread(cluster.leader)
    await asyncio.to_thread(cluster.end, leader, signal.SIGKILL)
    seconds = await running
    await asyncio.to_thread(cluster.restart, leader)
    return seconds


def jobs(setup: Setup) -> list[Row]:
    count = setup.many(1_000_000, 40_000)
    row = Row(
        "jobs",
        f"{count:,} messages shifted by a day beside {RATE:,}/s, then cancelled while the leader is killed",
        [
            Target("shifted", 240, at_most=True), Target("cancelled over a kill", 120, at_most=True),
            Target("lateness p99 of others, beyond twice that without a job", 15, at_most=True),
        ],
    )  # fmt: skip
    for _ in setup.each_round("jobs"):
        with setup.cluster() as cluster:
            uvloop.run(_fill(cluster, count))
            cluster.settle()
            before = uvloop.run(steady(cluster, RATE, setup.seconds(30)))
            shift: dict[str, Any] = {"action": "reschedule", "shift": "1d"}
            seconds, during = uvloop.run(_beside(cluster, shift))
            row.add("shifted", seconds, "s")
            row.add("lateness p99 of others before", before.late(0.99), "ms")
            row.add("lateness p99 of others meanwhile", during.late(0.99), "ms")
            row.add(
                "lateness p99 of others, beyond twice that without a job",
                max(0.0, during.late(0.99) - 2 * before.late(0.99)), "ms",
            )  # fmt: skip
            cancel: dict[str, Any] = {"action": "cancel"}
            row.add("cancelled over a kill", uvloop.run(_over_a_kill(cluster, cancel, setup.seconds(20) / 4)), "s")
            done = {"shifted": shift["done"], "cancelled": cancel["done"]}
            if set(done.values()) != {count}:
                raise Void(f"of {count} messages {done}")
            published = before.published + during.published
            cluster.account(["bench", TOPIC], published + count, published + count)
            left = get(f"{cluster.leader().http}/v1/topics/{TOPIC}", cluster.ca, cluster.token)
            if left["scheduled"] or left["ready"]:
                raise Void(f"{left['scheduled']} are left")
    return [row]
