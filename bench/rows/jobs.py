"""Bulk jobs over a million messages: how long they take, also over a kill of the leader, and how late others are
meanwhile."""

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
#: Name and options of each job.
_JOBS: dict[str, dict[str, Any]] = {
    "shifted": {"action": "reschedule", "shift": "1d"}, "cancelled": {"action": "cancel"},
}  # fmt: skip
#: The others' p99 beside a job is at most twice that without a job, or so much more, in ms.
_MORE_MS = 15
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


async def _job(cluster: Cluster, options: dict[str, Any]) -> float:
    """Begin a job and wait until it has ended; seconds."""
    session, began = Session([node.http for node in cluster.nodes]), time.monotonic()
    body = msgspec.json.encode({"filter": {"topic": TOPIC}, "request_id": f"{began}", **options})
    job = msgspec.json.decode(await session.call(request("POST", "/v1/jobs", body)))
    while job["ended_at"] is None:
        if time.monotonic() > began + PATIENCE_S:
            raise Void(f"a job does not end: {job}")
        await asyncio.sleep(0.2)
        job = msgspec.json.decode(await session.call(request("GET", f"/v1/jobs/{job['id']}")))
    options["done"] = job["done"]
    return time.monotonic() - began


async def _beside(cluster: Cluster, options: dict[str, Any]) -> tuple[float, Tally]:
    """A job beside 2,000 messages per second."""
    running = asyncio.create_task(_job(cluster, options))
    tally = await steady(cluster, RATE, PATIENCE_S, over=running.done)
    return await running, tally


async def _over_a_kill(cluster: Cluster, options: dict[str, Any], after_s: float) -> float:
    """A job whose leader is killed half-way, and started again afterwards."""
    running = asyncio.create_task(_job(cluster, options))
    await asyncio.sleep(after_s)
    leader = await asyncio.to_thread(cluster.leader)
    await asyncio.to_thread(cluster.end, leader, signal.SIGKILL)
    seconds = await running
    await asyncio.to_thread(cluster.restart, leader)
    return seconds


def _all_changed(job: dict[str, Any], count: int) -> None:
    if job["done"] != count:
        raise Void(f"{job['action']}: {job['done']} of {count} messages")


def _jobs_beside(setup: Setup, cluster: Cluster, row: Row, count: int) -> int:
    """Each job beside the other messages, whose lateness is compared with that without a job; number of these."""
    alone = uvloop.run(steady(cluster, RATE, setup.seconds(30)))
    row.add("p99, alone", alone.late(0.99), "ms")
    bound, published = max(2 * alone.late(0.99), alone.late(0.99) + _MORE_MS), alone.published
    for name, options in _JOBS.items():
        job = dict(options)
        seconds, beside = uvloop.run(_beside(cluster, job))
        _all_changed(job, count)
        published += beside.published
        row.add(name, seconds, "s")
        row.add(f"p99, {name}", beside.late(0.99), "ms")
        row.add(f"p99 beyond the bound, {name}", max(0.0, beside.late(0.99) - bound), "ms")
    return published


def jobs(setup: Setup) -> list[Row]:
    count = setup.many(1_000_000, 40_000)
    row = Row(
        "jobs",
        f"{count:,} messages shifted by a day, then cancelled: beside {RATE:,}/s, and again while the leader is killed",
        [
            Target("shifted", 240, at_most=True), Target("shifted over a kill", 240, at_most=True),
            Target("cancelled", 120, at_most=True), Target("cancelled over a kill", 120, at_most=True),
            Target("p99 beyond the bound, shifted", 0, at_most=True),
            Target("p99 beyond the bound, cancelled", 0, at_most=True),
        ],
    )  # fmt: skip
    for _ in setup.each_round("jobs"):
        with setup.cluster() as cluster:
            uvloop.run(_fill(cluster, count))
            cluster.settle()
            others = _jobs_beside(setup, cluster, row, count)
            uvloop.run(_fill(cluster, count))
            cluster.settle()
            for name, options in _JOBS.items():
                job = dict(options)
                seconds = uvloop.run(_over_a_kill(cluster, job, setup.seconds(20) / 4))
                row.add(f"{name} over a kill", seconds, "s")
                _all_changed(job, count)
            published = others + 2 * count
            cluster.account(["bench", TOPIC], published, published)
            left = get(f"{cluster.leader().http}/v1/topics/{TOPIC}", cluster.ca, cluster.token)
            if left["scheduled"] or left["ready"]:
                raise Void(f"{left['scheduled']} are left")
    return [row]
