"""The leader is killed while a backlog is overdue that nobody asks for: how long until the next due message of another
topic is delivered. The next due message must not wait until the new leader has looked through the backlog."""

from __future__ import annotations

import asyncio
import random
import signal
import time

import uvloop

from bench.cluster import Cluster, Void
from bench.load import Session, Tally, consume, now_ms, publish, until
from bench.result import Row, Setup, Target

_BATCH = 5_000
_BACKLOG = "backlog"


async def _fill(cluster: Cluster, count: int) -> None:
    """Publish messages that are overdue already, in batches, to a topic without consumers."""
    batches = [_BATCH] * (count // _BATCH) + [count % _BATCH] * (count % _BATCH > 0)

    async def produce(i: int) -> None:
        session = Session([node.http for node in cluster.nodes], i)
        while batches:
            await publish(session, Tally(), [now_ms() - 1_000] * batches.pop(), _BACKLOG)

    await asyncio.gather(*(produce(i) for i in range(4)))


async def _kill(cluster: Cluster, kills: int, name: str, row: Row) -> Tally:
    addresses = [node.http for node in cluster.nodes]
    tally, stop, end = Tally(), asyncio.Event(), asyncio.Event()
    consumers = [asyncio.create_task(consume(Session(addresses, i), tally, stop, wait="2s")) for i in range(3)]

    async def produce() -> None:
        session = Session(addresses, 1)
        while not end.is_set():
            await publish(session, tally, [now_ms() + random.randrange(500, 2_500) for _ in range(10)])
            await asyncio.sleep(0.02)

    producer = asyncio.create_task(produce())
    for number in range(kills):
        await asyncio.sleep(3)
        leader = await asyncio.to_thread(cluster.leader)
        killed_at, first = time.time() * 1000, len(tally.deliveries)
        await asyncio.to_thread(cluster.end, leader, signal.SIGKILL)

        def found(since: float = killed_at, first: int = first) -> float | None:
            return next((at for at, due in tally.deliveries[first:] if due >= since), None)

        if not await until(lambda: found() is not None, 60):
            raise Void(f"no delivery within 60 s of kill {number + 1}")
        row.add(f"{name}: next delivery", (found() or 0) - killed_at, "ms")
        row.add(f"{name}: found in", await _caught_up(cluster, killed_at), "ms")
        await asyncio.to_thread(cluster.restart, leader)
    end.set()
    await producer
    await until(lambda: tally.acked >= tally.published, 60)
    stop.set()
    await asyncio.gather(*consumers)
    return tally


async def _caught_up(cluster: Cluster, killed_at: float, timeout_s: float = 300) -> float:
    """Time in ms from the kill until the new leader says that it has found all overdue messages."""
    over = time.monotonic() + timeout_s
    while time.monotonic() < over:
        leader = await asyncio.to_thread(cluster.leader)
        newest = (await asyncio.to_thread(cluster.get, leader, "/v1/cluster?stale=true"))["terms"][0]
        if newest["leader"] == leader.name and newest.get("took_over"):
            return time.time() * 1000 - killed_at
        await asyncio.sleep(0.01)
    raise Void("the new leader does not say that it has found all overdue messages")


def takeover(setup: Setup) -> list[Row]:
    sizes, kills = [1_000, 100_000, *([] if setup.quick else [10_000_000])], setup.many(5, 3)
    row = Row(
        "takeover",
        f"SIGKILL of the leader, {kills} times, with 1,000, 100,000 and 10 million overdue messages: next due delivery",
        [Target(f"{size:,} overdue: next delivery", 600, 300, at_most=True) for size in sizes],
    )
    for size in sizes:
        name = f"{size:,} overdue"
        setup.say(f"takeover, {name}, {kills} kills")
        with setup.cluster() as cluster:
            uvloop.run(_fill(cluster, size))
            cluster.settle()
            tally = uvloop.run(_kill(cluster, kills, name, row))
            cluster.account(["bench", _BACKLOG], tally.published + size, tally.acked)
            if tally.early or tally.duplicates or len(tally.seen) != tally.published:
                raise Void(f"{tally.early} early, {tally.duplicates} duplicated, {len(tally.seen)} seen")
    return [row]
