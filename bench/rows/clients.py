"""What a user's program pays: one `put` of the Python client; and those who publish, beside others who only look."""

from __future__ import annotations

import asyncio
import statistics
import time

import uvloop

from bench.cluster import Cluster, Void
from bench.http1 import Connection, request
from bench.load import PADDING, TOPIC, Session, Tally, now_ms
from bench.result import Row, Setup, Target
from bench.rows.deliver import leader_first, steady
from bench.rows.size import HOUR_MS
from hadelay.client import AsyncClient

#: Puts in a row before the other side's turn.
_TURN = 100


async def one_at_a_time(cluster: Cluster, turns: int, row: Row) -> int:
    """The client and a raw connection, by turns, to the leader; number of messages published."""
    address = cluster.leader().http
    raw = await Connection.open(address)
    packed = request("POST", f"/v1/topics/{TOPIC}/messages?delay=600s", PADDING, kind="octet-stream", accept="json")
    took: dict[str, list[float]] = {"client": [], "socket": []}
    async with AsyncClient(address) as client:
        for turn in range(2 * (turns + 1)):
            side = "client" if turn % 2 else "socket"
            for _ in range(_TURN):
                began = time.perf_counter()
                if side == "client":
                    await client.put(TOPIC, PADDING, delay=600)
                else:
                    status, answer = await raw.send(packed)
                    if not 200 <= status < 300:
                        raise Void(f"{status}: {answer[:200]!r}")
                if turn > 1:  # the first turn of each side is not counted
                    took[side].append((time.perf_counter() - began) * 1000)
    raw.close()
    for side, values in took.items():
        row.add(f"{side} p50", statistics.median(values), "ms")
        row.add(f"{side} p99", statistics.quantiles(values, n=100)[98], "ms")
    return 2 * (turns + 1) * _TURN


def put(setup: Setup) -> list[Row]:
    row = Row(
        "put",
        "one put after the other by the Python client, against the same request over a raw connection",
        [Target("ratio", 1.8, 1.3, at_most=True)],
    )
    for _ in setup.each_round("put"):
        with setup.cluster() as cluster:
            count = uvloop.run(one_at_a_time(cluster, setup.many(20, 3), row))
            cluster.account([TOPIC], count, 0)
    row.ratio("ratio", "client p50", "socket p50")
    return [row]


def _questions() -> list[str]:
    now = now_ms()
    return [
        "/v1/topics", f"/v1/topics/{TOPIC}", f"/v1/topics/{TOPIC}/messages?limit=100", "/metrics",
        f"/v1/due?from={now - HOUR_MS}&to={now + 47 * HOUR_MS}&step=60s",
        f"/v1/topics/{TOPIC}/due?from={now - HOUR_MS}&to={now + 47 * HOUR_MS}&step=60s",
    ]  # fmt: skip


async def beside_readers(cluster: Cluster, seconds: float, readers: int) -> tuple[Tally, int]:
    """2,000 messages a second, and readers that each ask 20 questions a second; number of answers."""
    addresses, over, answers = leader_first(cluster), False, 0

    async def read(n: int) -> None:
        nonlocal answers
        session = Session(addresses, n)
        while not over:
            for path in _questions():
                await session.call(request("GET", path, accept="*/*"))
                answers += 1
                await asyncio.sleep(0.05)

    reading = [asyncio.create_task(read(n)) for n in range(readers)]
    tally = await steady(cluster, 2_000, seconds, over=lambda: any(task.done() for task in reading))
    over = True
    await asyncio.gather(*reading)
    return tally, answers


def readers(setup: Setup) -> list[Row]:
    row = Row(
        "readers",
        "lateness at 2,000 msg/s, commit mode, beside six readers of counts, lists, histograms and metrics",
        [Target("p99 against none", 3, 2, at_most=True)],
    )
    for _ in setup.each_round("readers"):
        for count, how in ((0, "alone"), (6, "beside readers")):
            with setup.cluster() as cluster:
                seconds = setup.seconds(20)
                cluster.put_topic(TOPIC)
                tally, answers = uvloop.run(beside_readers(cluster, seconds, count))
                cluster.account([TOPIC], tally.published, tally.acked)
                row.add(f"p50 {how}", tally.late(0.5), "ms")
                row.add(f"p99 {how}", tally.late(0.99), "ms")
                if count:
                    row.add("answers to readers", answers / seconds, "/s")
    row.ratio("p99 against none", "p99 beside readers", "p99 alone")
    return [row]
