"""Schedules: a thousand that are due each second, and a hundred thousand that are due in the same second."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import uvloop

from bench.cluster import Cluster, Void, cpu_seconds
from bench.http1 import request
from bench.load import Session, Tally, consume, now_ms, publish, until
from bench.result import Row, Setup, Target
from bench.rows.deliver import gather_until_stopped, leader_first, nothing_early

TOPIC = "bench"
_EVERY_SECOND = 1_000
#: Requests under way at once while schedules are set.
_SETTERS = 64


class Occurrences(Tally):
    """Lateness by `deliver_at`, and which (schedule, occurrence) came."""

    def __init__(self) -> None:
        super().__init__()
        self.came: set[tuple[str, str]] = set()

    def received(self, messages: list[dict[str, Any]]) -> None:
        now = time.time() * 1000
        self.last_at = now
        for message in messages:
            due = datetime.fromisoformat(message["deliver_at"]).timestamp() * 1000
            self.early += now < due
            self.late_ms.append(now - due)
            which = message["schedule"], message["occurrence"]
            self.duplicates += which in self.came
            self.came.add(which)


def _known(cluster: Cluster) -> None:
    end = time.monotonic() + 30
    while cluster.get(cluster.leader(), "/v1/cluster")["feature_level"] < 4:
        if time.monotonic() > end:
            raise Void("the cluster does not know schedules")
        time.sleep(0.1)


async def _set_all(addresses: list[str], count: int, wish: dict[str, Any]) -> None:
    body = json.dumps({"topic": TOPIC, "body": "x" * 200, **wish}).encode()
    names: Iterator[int] = iter(range(count))

    async def some(first: int) -> None:
        session = Session(addresses, first)
        for n in names:
            await session.call(request("PUT", f"/v1/schedules/s{n}", body), 30)

    await asyncio.gather(*(some(n) for n in range(_SETTERS)))


async def _watched(cluster: Cluster, tally: Tally, seconds: float) -> float:
    """Receive and ack for so long, after some seconds that do not count; processor time of the leader in seconds."""
    addresses, stop = leader_first(cluster), asyncio.Event()
    consumers = [asyncio.create_task(consume(Session(addresses), tally, stop)) for _ in range(8)]
    await asyncio.sleep(5)
    tally.late_ms = []
    leader = cluster.leader()
    before = cpu_seconds(leader.pid)
    await asyncio.sleep(seconds)
    took = cpu_seconds(leader.pid) - before
    await gather_until_stopped(consumers, stop)
    return took


async def _each_second(cluster: Cluster, seconds: float) -> tuple[Occurrences, float]:
    """(occurrences, processor time of the leader in seconds)"""
    await _set_all(leader_first(cluster), _EVERY_SECOND, {"every": "1s", "catch_up": "all"})
    tally = Occurrences()
    return tally, await _watched(cluster, tally, seconds)


async def _published(cluster: Cluster, seconds: float) -> tuple[Tally, float]:
    """The same with as many messages that a client publishes: in batches of 100, due at full seconds."""
    tally, session, over = Tally(), Session(leader_first(cluster)), asyncio.Event()

    async def produce() -> None:
        while not over.is_set():
            second = now_ms() // 1000 * 1000
            for _ in range(_EVERY_SECOND // 100):
                await publish(session, tally, [second + 3_000] * 100)
            await asyncio.sleep(max(0.0, (second + 1_000 - now_ms()) / 1000))

    producer = asyncio.create_task(produce())
    took = await _watched(cluster, tally, seconds)
    over.set()
    await producer
    return tally, took


def schedules(setup: Setup) -> list[Row]:
    row = Row(
        "schedules", "1,000 schedules of one second each, delivered and acked, 10 min",
        [Target("rate", 950, 1_000), Target("lateness p99", 60, 30, at_most=True)],
    )  # fmt: skip
    seconds = setup.seconds(600)
    for _ in setup.each_round("schedules"):
        with setup.cluster() as cluster:
            _known(cluster)
            tally, took = uvloop.run(_each_second(cluster, seconds))
            if tally.early or tally.duplicates:
                raise Void(f"{tally.early} early, {tally.duplicates} twice")
            row.add("rate", len(tally.late_ms) / seconds, "/s")
            row.add("lateness p50", tally.late(0.5), "ms")
            row.add("lateness p99", tally.late(0.99), "ms")
            row.add("leader", took / max(len(tally.late_ms), 1) * 1e6, "µs")
            row.add("leader, of a core", took / seconds * 100, "%")
        with setup.cluster() as cluster:
            minute = setup.seconds(60)
            plain, took = uvloop.run(_published(cluster, minute))
            cluster.account([TOPIC], plain.published, plain.acked)
            nothing_early(plain)
            row.add("leader, of a core, the same rate published", took / minute * 100, "%")
    return [row]


async def _crowd(cluster: Cluster, count: int) -> tuple[Occurrences, int, float]:
    """(occurrences, the instant, seconds that setting took)"""
    addresses, tally, stop = leader_first(cluster), Occurrences(), asyncio.Event()
    began = time.monotonic()
    due = (now_ms() // 1000 + 30 + count // 400) * 1000
    await _set_all(addresses, count, {"at": [due]})
    took = time.monotonic() - began
    if now_ms() > due - 70_000 and count > 10_000:
        raise Void("setting the schedules took too long")
    await asyncio.sleep(max(0.0, (due - now_ms()) / 1000 - 3))
    consumers = [
        asyncio.create_task(consume(Session(addresses), tally, stop, most=1000, wait="30s")) for _ in range(16)
    ]
    await until(lambda: len(tally.came) >= count or any(t.done() for t in consumers), 90)
    stop.set()
    for task in consumers:
        task.cancel()
    await asyncio.gather(*consumers, return_exceptions=True)
    return tally, due, took


def crowd(setup: Setup) -> list[Row]:
    row = Row(
        "crowd", "100,000 schedules due at one instant: all handed out within",
        [Target("seconds", 5, 3, at_most=True)],
    )  # fmt: skip
    count = setup.many(100_000, 5_000)
    for _ in setup.each_round("crowd"):
        with setup.cluster() as cluster:
            _known(cluster)
            tally, due, took = uvloop.run(_crowd(cluster, count))
            if tally.early or tally.duplicates or len(tally.came) != count:
                raise Void(f"{tally.early} early, {tally.duplicates} twice, {len(tally.came)} of {count}")
            row.add("seconds", (tally.last_at - due) / 1000, "s")
            row.add("set", count / took, "/s")
    return [row]
