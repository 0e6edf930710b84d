"""200 people look at the leader's console: what their streams cost the leader, and how long a page takes. And the same
pages where lists are as long as they may be."""

from __future__ import annotations

import asyncio
import statistics
import time

import uvloop

from bench.cluster import Node, Void, cpu_seconds
from bench.http1 import Connection, request
from bench.load import PADDING
from bench.result import Row, Setup, Target
from bench.rows.metrics import Pings

_STREAM = request("GET", "/console/live/overview")
_PAGES = ("/console/", "/console/topics", "/console/topics/topic-1", "/console/dead", "/console/cluster")


async def _open(host: str, port: int, frames: list[int]) -> asyncio.Task[None]:
    """A stream that is read until it is cancelled; `frames` counts what came."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(_STREAM)

    async def read() -> None:
        try:
            while data := await reader.read(1 << 16):
                frames[0] += data.count(b"event: frame")
        finally:
            writer.close()

    return asyncio.create_task(read())


async def _look(node: Node, streams: int, seconds: float, row: Row) -> None:
    host, _, port = node.http.partition("://")[2].partition(":")
    connection = await Connection.open(node.http)
    for n in range(20):
        await connection.send(request("POST", f"/v1/topics/topic-{n}/messages?delay=1h", PADDING))
    for page in _PAGES:
        await connection.send(request("GET", page))
        took = []
        for _ in range(20):
            began = time.perf_counter()
            status, _ = await connection.send(request("GET", page))
            took.append((time.perf_counter() - began) * 1000)
            if status != 200:
                raise Void(f"{page}: {status}")
        row.add(page, statistics.median(took), "ms")
    before = cpu_seconds(node.pid)
    await asyncio.sleep(seconds)
    alone = (cpu_seconds(node.pid) - before) / seconds
    frames = [0]
    readers = [await _open(host, int(port), frames) for _ in range(streams)]
    await asyncio.sleep(3)
    before, frames[0] = cpu_seconds(node.pid), 0
    await asyncio.sleep(seconds)
    looked_at = (cpu_seconds(node.pid) - before) / seconds
    if frames[0] < streams * (seconds / 2 - 2):
        raise Void(f"{frames[0]} frames came on {streams} streams in {seconds:.0f} s")
    row.add("nobody looks", alone * 100, "% of a core")
    row.add("all look", looked_at * 100, "% of a core")
    row.add("cost", max(0.0, looked_at - alone) * 100, "% of a core")
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    connection.close()


def console(setup: Setup) -> list[Row]:
    streams = 200
    row = Row(
        "console",
        f"{streams} open pages of the leader's overview against none; and pages, one after another, to their last byte",
        [Target("cost", 3, at_most=True), Target("/console/", 50, at_most=True)],
    )
    with setup.cluster() as cluster:
        for _ in setup.each_round("console"):
            uvloop.run(_look(cluster.leader(), streams, setup.many(30, 10), row))
    return [row]


#: Number of messages per request when lists are filled.
_BATCH = 1_000
_LISTS = (
    "/console/", "/console/topics", "/console/topics?q=7&sort=oldest&page=39", "/console/topics?show=idle&sort=ready",
    "/console/topics/letters", "/console/dead", "/console/topics/letters/dead", "/console/cluster",
    "/console/messages?topic=letters&state=dead", "/console/jobs/count?action=redrive&topic=letters",
)  # fmt: skip


async def _fill(address: str, topics: int, letters: int) -> None:
    connection = await Connection.open(address)
    await connection.call("PUT", "/v1/topics/letters", {"max_attempts": 1})
    for first in range(0, topics, _BATCH):
        names = (f"topic-{n}" for n in range(first, min(first + _BATCH, topics)))
        items = [{"topic": name, "body": "x", "delay": "2h" if n % 3 else "0s"} for n, name in enumerate(names)]
        await connection.call("POST", "/v1/messages:batch", items)
    died = 0
    while died < letters:
        count = min(_BATCH, letters - died)
        await connection.call("POST", "/v1/messages:batch", [{"topic": "letters", "body": "x"}] * count)
        while count:
            query = {"max": count, "wait": "5s"}
            found = (await connection.call("POST", "/v1/topics/letters/receive?redirect=false", query))["messages"]
            settlement = {"leases": [message["lease"] for message in found], "reason": f"HTTP 50{died % 4} from bank"}
            await connection.call("POST", "/v1/leases:nack", settlement)
            count, died = count - len(found), died + len(found)
    connection.close()


async def _turn_pages(node: Node, row: Row) -> None:
    """Each page some times; beside it one asks for /livez all the time."""
    connection, pings = await Connection.open(node.http), Pings(node.http)
    pinging = asyncio.create_task(pings.run())
    slowest = delayed = 0.0
    for page in _LISTS:
        began, took = time.perf_counter(), list[float]()
        for _ in range(5):
            start = time.perf_counter()
            status, answer = await connection.send(request("GET", page))
            took.append((time.perf_counter() - start) * 1000)
            if status != 200:
                raise Void(f"{page}: {status} {answer[:200]!r}")
        slowest = max(slowest, statistics.median(took))
        delayed = max(delayed, pings.longest(began, time.perf_counter()))
        row.add(page, statistics.median(took), "ms")
    pings.over = True
    await pinging
    row.add("slowest page", slowest, "ms")
    row.add("delayed", delayed, "ms")
    connection.close()


def lists(setup: Setup) -> list[Row]:
    topics, letters = setup.many(99_990, 2_000), setup.many(1_000_000, 5_000)
    row = Row(
        "lists",
        f"pages of a leader with {topics:,} topics and {letters:,} dead letters of one; the longest that they hold up "
        "another request",
        [Target("slowest page", 1_000, at_most=True), Target("delayed", 100, at_most=True)],
    )
    with setup.cluster() as cluster:
        uvloop.run(_fill(cluster.leader().http, topics, letters))
        for _ in setup.each_round("lists"):
            uvloop.run(_turn_pages(cluster.leader(), row))
    return [row]
