"""A backup of a full cluster while it takes publishes: what that costs them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable

import uvloop

from bench.cluster import Cluster, Void
from bench.load import Session, Tally, now_ms, publish, put
from bench.result import Row, Setup, Target
from bench.rows.deliver import leader_first

#: Of a message that fills the cluster.
BODY = 16 << 10
#: Producers, and messages per batch of theirs.
PRODUCERS, BATCH = 8, 100
DAY_MS = 86_400_000


def _later() -> int:
    """Within the week after tomorrow: nothing falls due, and a backup has files of many hours."""
    return now_ms() + DAY_MS + random.randrange(7 * DAY_MS)


async def fill(cluster: Cluster, gigabytes: float, tally: Tally) -> None:
    """With so much on every node that does not fall due soon."""
    addresses, left = leader_first(cluster), int(gigabytes * (1 << 30) / BODY)

    async def produce() -> None:
        nonlocal left
        session = Session(addresses)
        while left > 0:
            count = min(left, 200)
            left -= count
            items = [{"topic": "bench", "body": os.urandom(BODY), "deliver_at": _later()} for _ in range(count)]
            await put(session, tally, items, 60)

    await asyncio.gather(*(produce() for _ in range(2)))


async def _rate(cluster: Cluster, tally: Tally, over: Callable[[], bool]) -> float:
    """Messages of 200 bytes per second, in batches, until `over`."""
    addresses, before, began = leader_first(cluster), tally.published, time.monotonic()

    async def produce() -> None:
        session = Session(addresses)
        while not over():
            await publish(session, tally, [_later() for _ in range(BATCH)])

    await asyncio.gather(*(produce() for _ in range(PRODUCERS)))
    return (tally.published - before) / (time.monotonic() - began)


async def _alone(cluster: Cluster, tally: Tally, seconds: float) -> float:
    end = time.monotonic() + seconds
    return await _rate(cluster, tally, lambda: time.monotonic() > end)


async def _round(setup: Setup, cluster: Cluster, row: Row, tally: Tally) -> None:
    out = setup.directory / "backup"
    row.add("alone", await _alone(cluster, tally, setup.seconds(20)), "messages/s")
    servers = ",".join(node.http for node in cluster.nodes)
    command = [sys.executable, "-m", "hadelay", "backup", "create", str(out), "-s", servers, "-o", "json"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    ended = asyncio.create_task(process.communicate())
    row.add("meanwhile", await _rate(cluster, tally, ended.done), "messages/s")
    said, _ = await ended
    shutil.rmtree(out, ignore_errors=True)
    if process.returncode:
        raise Void(f"the backup ended with {process.returncode}")
    done = json.loads(said)
    row.add("size", done["bytes"] / (1 << 30), "GB")
    row.add("backup", done["copied_bytes"] / (1 << 20) / max(done["seconds"], 0.1), "MB/s")


def backup(setup: Setup) -> list[Row]:
    row = Row(
        "backup",
        "publishing in batches of 100 while 5 GB are backed up into a directory, against publishing alone",
        [Target("ratio", 0.8)],
    )
    gigabytes = setup.many(5_000, 100) / 1000
    setup.say(f"backup of {gigabytes} GB")
    with setup.cluster() as cluster:
        tally = Tally()
        uvloop.run(fill(cluster, gigabytes, tally))
        for _ in range(setup.rounds):
            uvloop.run(_round(setup, cluster, row, tally))
        cluster.account(["bench"], tally.published, 0)
    row.ratio("ratio", "meanwhile", "alone")
    return [row]
