"""How long the event loop stands still when the tables are full: a probe asks each node for /livez all the time, while
checkpoints, scrapes, lists and take-overs go through topics, leases and tokens by the ten thousand."""

from __future__ import annotations

import asyncio
import json
import signal
import time

import uvloop

from bench.cluster import Cluster, Node
from bench.http1 import request
from bench.load import Session, Tally, now_ms, publish
from bench.result import Row, Setup, Target

#: Interval between two questions of the probe, in seconds; and between two checkpoints, in ms.
_PROBE_S, _CHECKPOINT_MS = 0.002, 2_000
_LEASED = "leased"


class Probe:
    """Asks nodes for /livez all the time. worst_ms: longest wait for an answer since `reset`, of any node that runs."""

    def __init__(self, nodes: list[Node]) -> None:
        self.worst_ms, self._over = 0.0, False
        self._tasks = [asyncio.create_task(self._ask(node)) for node in nodes]

    async def _ask(self, node: Node) -> None:
        session, packed = Session([node.http]), request("GET", "/livez", b"")
        while not self._over:
            began = time.monotonic()
            await session.call(packed, timeout_s=60)
            self.worst_ms = max(self.worst_ms, (time.monotonic() - began) * 1000)
            await asyncio.sleep(_PROBE_S)

    def reset(self) -> None:
        self.worst_ms = 0.0

    async def end(self) -> None:
        self._over = True
        await asyncio.gather(*self._tasks)


async def _fill(cluster: Cluster, topics: int, leases: int) -> None:
    """Messages for next year in as many topics, and leases of one message each."""
    session = Session([cluster.leader().http])
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 300 * 86_400))
    for first in range(0, topics, 1_000):
        some = [{"topic": f"t{n}", "deliver_at": at, "body": ""} for n in range(first, min(first + 1_000, topics))]
        await session.call(request("POST", "/v1/messages:batch", json.dumps(some).encode()))
    await publish(session, Tally(), [now_ms()] * leases, _LEASED)
    asked = [
        request("POST", f"/v1/topics/{_LEASED}/receive", json.dumps({"max": 1, "wait": "5s", "lease": "1h"}).encode())
        for _ in range(leases)
    ]

    async def receive(i: int) -> None:
        mine = Session([cluster.leader().http], i)
        while asked:
            await mine.call(asked.pop())

    await asyncio.gather(*(receive(i) for i in range(32)))


async def _measure(cluster: Cluster, setup: Setup, row: Row) -> None:
    leader = cluster.leader()
    session = Session([leader.http])

    async def scrape() -> None:
        await session.call(request("GET", "/metrics", b""), timeout_s=60)

    async def lists() -> None:
        for path in ("/v1/topics", "/v1/cluster", "/v1/jobs", "/v1/schedules"):
            await session.call(request("GET", path, b""), timeout_s=60)

    async def changes() -> None:
        """Two checkpoints, each with as many changed topics as a batch may have."""
        for part in range(2):
            due = [{"topic": f"t{n}", "delay": "300d", "body": ""} for n in range(part * 1_000, part * 1_000 + 1_000)]
            await session.call(request("POST", "/v1/messages:batch", json.dumps(due).encode()))
            await asyncio.sleep(1.2 * _CHECKPOINT_MS / 1000)

    async def take_over() -> None:
        await asyncio.to_thread(cluster.end, leader, signal.SIGKILL)
        await asyncio.to_thread(cluster.leader)
        await asyncio.sleep(3)

    for name, act in (("checkpoint", changes), ("scrape", scrape), ("lists", lists), ("take-over", take_over)):
        probed = [node for node in cluster.nodes if act is not take_over or node is not leader]
        for _ in range(setup.many(5, 1) if act is not take_over else 1):
            probe = Probe(probed)
            await asyncio.sleep(0.5)
            probe.reset()
            await act()
            row.add(name, probe.worst_ms, "ms")
            await probe.end()


def limits(setup: Setup) -> list[Row]:
    topics, leases = setup.many(99_000, 20_000), setup.many(50_000, 5_000)
    row = Row(
        "limits",
        f"{topics:,} topics and {leases:,} leases: longest wait for /livez at any node, so the loop's longest turn",
        [Target(name, 40, 20, at_most=True) for name in ("checkpoint", "scrape", "lists", "take-over")],
    )
    setting = f"storage.checkpoint_interval_ms={_CHECKPOINT_MS}"
    for _ in setup.each_round("limits"):
        with setup.cluster(settings=(setting,)) as cluster:
            uvloop.run(_fill(cluster, topics, leases))
            cluster.settle()
            uvloop.run(_measure(cluster, setup, row))
    return [row]
