"""Nodes that go while there is load. Killed: how long until a message that fell due afterwards is delivered. Paused:
how long until another node stores a message. Asked to end, one after another: how long nothing is delivered."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import pairwise

import uvloop

from bench.cluster import Cluster, Void
from bench.load import TOPIC, Session, Tally, consume, now_ms, publish, until
from bench.result import Row, Setup, Target


async def kill_and_watch(cluster: Cluster, tally: Tally, kills: int, row: Row) -> None:
    for number in range(kills):
        leader = await asyncio.to_thread(cluster.leader)
        await asyncio.sleep(0.5 + random.random())
        killed_at = time.time() * 1000
        await asyncio.to_thread(cluster.end, leader, signal.SIGKILL)

        def next_delivery(since: float = killed_at, first: int = len(tally.deliveries)) -> float | None:
            return next((at for at, due in tally.deliveries[first:] if due >= since and at >= since), None)

        if not await until(lambda: next_delivery() is not None, 20):
            raise Void(f"no delivery within 20 s of kill {number + 1}")
        row.add("next delivery", (next_delivery() or 0) - killed_at, "ms")
        await asyncio.to_thread(cluster.restart, leader)


async def _pause_and_watch(cluster: Cluster, tally: Tally, pauses: int, row: Row) -> None:
    """A paused node closes no connection: its death is silent. Measured by a publish to another node that begins at the
    pause, because polls at the paused node wait as long as their clients do."""
    for _ in range(pauses):
        leader = await asyncio.to_thread(cluster.leader)
        await asyncio.sleep(0.5 + random.random())
        others = Session([node.http for node in cluster.nodes if node is not leader])
        paused_at = time.monotonic()
        os.kill(leader.pid, signal.SIGSTOP)
        try:
            await publish(others, tally, [now_ms() + 500])
        finally:
            os.kill(leader.pid, signal.SIGCONT)
        row.add("stored, leader paused", (time.monotonic() - paused_at) * 1000, "ms")


async def _restart_all(cluster: Cluster, tally: Tally, rolls: int, row: Row) -> None:
    """The followers first, as howto/upgrade has it: so leadership moves once in each roll."""
    for number in range(rolls):
        leader = await asyncio.to_thread(cluster.leader)
        for node in sorted(cluster.nodes, key=lambda node: node is leader):
            await asyncio.sleep(0.5 + random.random())
            began = time.time() * 1000
            await asyncio.to_thread(cluster.end, node, signal.SIGTERM)
            await asyncio.to_thread(cluster.restart, node)
            restarted = time.time() * 1000
            if not await until(lambda at=restarted: tally.last_at > at, 20):  # type: ignore[misc]
                raise Void(f"no delivery within 20 s of roll {number + 1}, {node.name}")
            times = [at for at, _ in tally.deliveries if at >= began - 1_000]
            gap = max(after - at for at, after in pairwise(times) if after >= began)
            row.add("gap of a transfer" if node is leader else "gap, a follower", gap, "ms")


_Watch = Callable[[Cluster, Tally, int, Row], Awaitable[None]]


async def _strike(cluster: Cluster, watch: _Watch, strikes: int, row: Row, tally: Tally) -> None:
    await watch(cluster, tally, strikes, row)


async def under_load(addresses: list[str], act: Callable[[Tally], Awaitable[None]], topic: str = TOPIC) -> Tally:
    """Publish and consume at these addresses while `act` runs, and until all messages are acked."""
    tally, stop, end = Tally(), asyncio.Event(), asyncio.Event()
    consumers = [
        asyncio.create_task(consume(Session(addresses, i), tally, stop, topic=topic, wait="2s")) for i in range(6)
    ]

    async def produce(i: int) -> None:
        session = Session(addresses, i)
        while not end.is_set():
            await publish(session, tally, [now_ms() + random.randrange(500, 2500) for _ in range(10)], topic)
            await asyncio.sleep(0.02)

    producers = [asyncio.create_task(produce(i)) for i in range(2)]
    try:
        await act(tally)
    finally:
        end.set()
    await asyncio.gather(*producers)
    await until(lambda: tally.acked >= tally.published, 60)
    stop.set()
    await asyncio.gather(*consumers)
    return tally


def failover(setup: Setup) -> list[Row]:
    row = Row(
        "failover",
        "SIGKILL of the leader under load, 200 times, and SIGSTOP, 50 times: next due delivery, next publish",
        [
            Target("next delivery", 600, 300, at_most=True),
            Target("worst", 1_500, 100, at_most=True),
            Target("worst, leader paused", 500, at_most=True),
        ],
    )
    kills, pauses = setup.many(200, 5), setup.many(50, 5)
    setup.say(f"failover, {kills} kills and {pauses} pauses")
    for watch, strikes in ((kill_and_watch, kills), (_pause_and_watch, pauses)):
        with setup.cluster() as cluster:
            act = partial(_strike, cluster, watch, strikes, row)
            complete(cluster, uvloop.run(under_load(cluster.addresses, act)), row)
    row.add("worst", max(row.samples["next delivery"]), "ms")
    row.add("worst, leader paused", max(row.samples["stored, leader paused"]), "ms")
    return [row]


def rolling(setup: Setup) -> list[Row]:
    rolls = setup.many(5 * setup.rounds, 2)
    row = Row(
        "rolling",
        f"all nodes restarted in turn under 1,000 messages/s, {rolls} times: longest time without a delivery",
        [Target("worst transfer", 300, at_most=True)],
    )
    setup.say(f"rolling, {rolls} times")
    with setup.cluster() as cluster:
        act = partial(_restart_all, cluster, rolls=rolls, row=row)
        complete(cluster, uvloop.run(under_load(cluster.addresses, act)), row)
    row.add("worst transfer", max(row.samples["gap of a transfer"]), "ms")
    return [row]


def complete(cluster: Cluster, tally: Tally, row: Row, topic: str = TOPIC) -> None:
    cluster.account([topic], tally.published, tally.acked)
    if tally.early or tally.duplicates or len(tally.seen) != tally.published:
        lost = tally.published - len(tally.seen)
        raise Void(f"{tally.early} early, {tally.duplicates} duplicated, {lost} lost in commit mode")
    row.notes.append(f"{tally.published:,} messages: 0 lost, 0 early, 0 duplicated")
