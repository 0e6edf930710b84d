"""200 people look at the leader's console: what their streams cost the leader, and how long a page takes."""

from __future__ import annotations

import asyncio
import statistics
import time

import uvloop

from bench.cluster import Node, Void, cpu_seconds
from bench.http1 import Connection, request
from bench.load import PADDING
from bench.result import Row, Setup, Target

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
