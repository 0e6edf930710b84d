"""A scrape of the leader that has many topics: how long it takes, and how long it holds others up."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
import urllib.request
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import msgpack
import uvloop

from bench.cluster import Node, Void, cpu_seconds
from bench.http1 import Connection, request
from bench.load import PADDING
from bench.result import Row, Setup, Target

_PING = request("GET", "/livez")


async def _fill(address: str, topics: int) -> None:
    """Some messages in each, of which some are due and some were handed out and acked: every series has a value."""
    connection = await Connection.open(address)
    for delay in ("1h", "0s", "0s"):
        names = [f"topic-{n:04}" for n in range(topics)]
        items = [{"topic": name, "body": PADDING, "delay": delay} for name in names]
        packed = request("POST", "/v1/messages:batch", msgpack.packb(items), kind="msgpack")
        status, answer = await connection.send(packed)
        if status != 200 or any("error" in result for result in msgpack.unpackb(answer)["results"]):
            raise Void(f"the topics could not be filled: {status}")
    for first in range(0, topics, 100):
        names = [f"topic-{n:04}" for n in range(first, first + 100)]
        query = {"topics": names, "max": 100, "wait": "5s"}
        messages = (await connection.call("POST", "/v1/receive?redirect=false", query))["messages"]
        await connection.call("POST", "/v1/leases:ack", {"leases": [message["lease"] for message in messages]})
    connection.close()


class Pings:
    """Requests that cost nothing, one after another: what each takes longer than usual, it waited for somebody."""

    def __init__(self, address: str) -> None:
        self._address, self.over = address, False
        #: (begin, ms)
        self.took: list[tuple[float, float]] = []

    async def run(self) -> None:
        connection = await Connection.open(self._address)
        while not self.over:
            began = time.perf_counter()
            await connection.send(_PING)
            self.took.append((began, (time.perf_counter() - began) * 1000))

    def longest(self, since: float, until: float) -> float:
        return max((ms for began, ms in self.took if began < until and began + ms / 1000 > since), default=0.0)


def _scraped(address: str) -> tuple[float, float, str]:
    """(began, ended, what it had), by a clock that all processes share."""
    began = time.perf_counter()
    with urllib.request.urlopen(f"{address}/metrics") as answer:
        text = answer.read()
    return began, time.perf_counter(), f"{len(text) / 1024:,.0f} KiB, {text.count(b'topic='):,} series of topics"


async def _scrape(node: Node, scrapes: int, row: Row) -> None:
    """The scraper is a process of its own: to take in an answer of this size would hold up the pings, too."""
    scrape = partial(_scraped, node.http)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as scraper:
        scraper.submit(scrape).result()
        before = cpu_seconds(node.pid)
        alone = [scraper.submit(scrape).result() for _ in range(scrapes)]
        row.add("processor", (cpu_seconds(node.pid) - before) / scrapes * 1000, "ms")
        row.add("scrape", statistics.median((ended - began) * 1000 for began, ended, _ in alone), "ms")
        pings, waited, calm = Pings(node.http), [], []
        pinging = asyncio.create_task(pings.run())
        for _ in range(scrapes):
            began, ended, had = await asyncio.get_running_loop().run_in_executor(scraper, scrape)
            await asyncio.sleep(0.1 + random.random() * 0.1)
            waited.append(pings.longest(began, ended))
            calm.append(pings.longest(ended + 0.02, 2 * ended - began + 0.02))  # not the ping that was under way
        pings.over = True
        await pinging
    row.add("step", statistics.median(waited), "ms")
    row.add("step, worst", max(waited), "ms")
    row.add("without a scrape", statistics.median(calm), "ms")
    row.add("without a scrape, worst", max(calm), "ms")
    row.notes[:] = [had]


def metrics(setup: Setup) -> list[Row]:
    topics = setup.many(1_000, 200)
    row = Row(
        "metrics",
        f"/metrics with {topics:,} topics; beside it one asks for /livez all the time: its longest wait, for two steps",
        [Target("scrape", 100, at_most=True), Target("step", 5, at_most=True)],
    )
    with setup.cluster() as cluster:
        uvloop.run(_fill(cluster.leader().http, topics))
        for _ in setup.each_round("metrics"):
            uvloop.run(_scrape(cluster.leader(), setup.many(50, 10), row))
    return [row]
