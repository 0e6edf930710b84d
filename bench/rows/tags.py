"""Selective consumers beside plain ones, and a topic that catches up beside one that is on time."""

from __future__ import annotations

import asyncio
import statistics
import time

import uvloop

from bench.cluster import Cluster, cpu_seconds
from bench.load import Session, Tally, consume, now_ms, publish, until
from bench.result import Row, Setup, Target
from bench.rows.deliver import flow, leader_first, nothing_early

TAGS = [f"customer-{n}" for n in range(16)]


def tags(setup: Setup) -> list[Row]:
    row = Row("tags", "half of 16 consumers ask for a tag each, against none", [Target("rate, ratio", 0.7)])
    seconds = setup.seconds(30)
    for number in range(setup.rounds):
        for name, selective in (("plain", 0), ("selective", 8)):
            setup.say(f"tags, round {number + 1}: {name}")
            with setup.cluster() as cluster:
                leader, began = cluster.leader(), time.monotonic()
                before = cpu_seconds(leader.pid)
                tally = uvloop.run(flow(cluster, seconds, TAGS, selective))
                took, spent = time.monotonic() - began, cpu_seconds(leader.pid) - before
                cluster.account(["bench"], tally.published, tally.acked)
                nothing_early(tally)
                row.add(f"{name} rate", tally.acked / took, "msg/s")
                row.add(f"{name} leader CPU", spent / tally.acked * 1e6, "µs/msg")
    row.ratio("rate, ratio", "selective rate", "plain rate")
    row.ratio("leader CPU, ratio", "selective leader CPU", "plain leader CPU")
    return [row]


CATCH_UP_RATE = 1_000


async def catching_up(cluster: Cluster, backlog: int, seconds: float) -> tuple[list[float], Tally, Tally]:
    """Rates per second at which an overdue topic is handed out, and lateness of another, alone and beside it."""
    addresses = leader_first(cluster)
    past, alone, beside = Tally(), Tally(), Tally()
    sessions = [Session(addresses) for _ in range(8)]
    due = now_ms()
    for _ in range(0, backlog, 8_000):
        await asyncio.gather(*(publish(session, past, [due] * 1_000, "past") for session in sessions))
    await asyncio.sleep(max(0.0, (due + 12_000 - now_ms()) / 1000))
    await on_time(addresses, alone, seconds)
    stop = asyncio.Event()
    consumers = [asyncio.create_task(consume(Session(addresses), past, stop, topic="past")) for _ in range(4)]
    counts: list[float] = []

    async def watch() -> None:
        while not stop.is_set():
            before, began = past.acked, time.monotonic()
            await asyncio.sleep(1)
            counts.append((past.acked - before) / (time.monotonic() - began))

    watching = asyncio.create_task(watch())
    await on_time(addresses, beside, seconds)
    stop.set()
    await asyncio.gather(*consumers, watching)
    return counts[1:-1], alone, beside


async def on_time(addresses: list[str], tally: Tally, seconds: float) -> None:
    """200 messages a second, due half a second later."""
    stop, session, end = asyncio.Event(), Session(addresses), time.monotonic() + seconds
    consumers = [asyncio.create_task(consume(Session(addresses), tally, stop, topic="present")) for _ in range(2)]
    while time.monotonic() < end:
        await publish(session, tally, [now_ms() + 500 + 5 * n for n in range(10)], "present")
        await asyncio.sleep(0.05)
    await until(lambda: tally.acked >= tally.published, 10)
    stop.set()
    await asyncio.gather(*consumers)


def catch_up(setup: Setup) -> list[Row]:
    row = Row("catchup", "a topic of a million overdue messages, catch_up_rate 1,000/s", [Target("rate", 950)])
    for _ in setup.each_round("catchup"):
        with setup.cluster() as cluster:
            cluster.put_topic("past", catch_up_rate=CATCH_UP_RATE)
            backlog = setup.many(1_000_000, 50_000)
            counts, alone, beside = uvloop.run(catching_up(cluster, backlog, setup.seconds(20)))
            row.add("rate", statistics.median(counts), "msg/s")
            row.add("highest second", max(counts), "msg/s")
            for name, tally in (("alone", alone), ("beside it", beside)):
                row.add(f"other topic, {name}: p50", tally.late(0.5), "ms")
                row.add(f"other topic, {name}: p99", tally.late(0.99), "ms")
    return [row]
