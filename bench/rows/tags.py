"""Selective consumers beside plain ones, and a topic that catches up beside one that is on time."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import statistics
import time
import urllib.request

import msgpack
import uvloop

from bench.cluster import Cluster, cpu_seconds
from bench.http1 import request
from bench.load import PADDING, Session, Tally, _receive, now_ms, settle, until
from bench.result import Row, Setup, Target
from bench.rows.deliver import WINDOW, leader_first, nothing_early

TAGS = [f"customer-{n}" for n in range(16)]


async def send(session: Session, tally: Tally, topic: str, due_ms: list[int], tags: list[str]) -> None:
    """One batch; each message has three of `tags`, if there are any."""
    items = [
        {"topic": topic, "body": due.to_bytes(8, "little") + PADDING, "deliver_at": due} for due in due_ms
    ]  # fmt: skip
    for item in items if tags else ():
        item["tags"] = random.sample(tags, 3)
    key = f"Idempotency-Key: {os.urandom(12).hex()}\r\n"
    packed = request("POST", "/v1/messages:batch", msgpack.packb(items), kind="msgpack", headers=key)
    results = msgpack.unpackb(await session.call(packed, 30))["results"]
    tally.published += len(results)


async def take(
    session: Session, tally: Tally, topic: str, stop: asyncio.Event, tags: list[str], most: int = 100
) -> None:
    """Receive and ack until `stop`; with tags, only messages that have all of them."""
    consumer = f"bench-{os.urandom(4).hex()}"
    for number in itertools.count():
        if stop.is_set():
            return
        wish = {"max": most, "wait": "1s", "lease": "60s", "consumer": consumer, "request_id": f"{number}"}
        packed = json.dumps({**wish, "tags": tags}).encode()
        path = f"/v1/topics/{topic}/receive?redirect=false"
        answer = msgpack.unpackb(await session.call(_receive(path, packed, "Accept: application/msgpack\r\n")))
        messages = answer["messages"]
        assert all(set(tags) <= set(message["tags"]) for message in messages)
        if messages:
            tally.received(messages)
            await settle(session, tally, [message["lease"] for message in messages])


async def flow(cluster: Cluster, seconds: float, selective: int) -> Tally:
    """Due at once, in batches of 100, three tags each; 16 consumers, `selective` of which want one tag each."""
    addresses, tally, stop, end = leader_first(cluster), Tally(), asyncio.Event(), time.monotonic() + seconds

    async def produce() -> None:
        session = Session(addresses)
        while time.monotonic() < end:
            if tally.published - tally.acked > WINDOW:
                await asyncio.sleep(0.002)
                continue
            await send(session, tally, "bench", [now_ms()] * 100, TAGS)

    wishes = [[TAGS[n]] if n < selective else [] for n in range(16)]
    consumers = [asyncio.create_task(take(Session(addresses), tally, "bench", stop, wish)) for wish in wishes]
    await asyncio.gather(*(produce() for _ in range(8)))
    await until(lambda: tally.acked >= tally.published or any(t.done() for t in consumers), 30)
    stop.set()
    await asyncio.gather(*consumers)
    return tally


def tags(setup: Setup) -> list[Row]:
    row = Row("tags", "half of 16 consumers ask for a tag each, against none", [Target("rate, ratio", 0.7)])
    seconds = setup.seconds(30)
    for number in range(setup.rounds):
        for name, selective in (("plain", 0), ("selective", 8)):
            setup.say(f"tags, round {number + 1}: {name}")
            with Cluster.start(setup.directory / "ours", setup.port) as cluster:
                leader, began = cluster.leader(), time.monotonic()
                before = cpu_seconds(leader.pid)
                tally = uvloop.run(flow(cluster, seconds, selective))
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
        await asyncio.gather(*(send(session, past, "past", [due] * 1_000, []) for session in sessions))
    await asyncio.sleep(max(0.0, (due + 12_000 - now_ms()) / 1000))
    await on_time(addresses, alone, seconds)
    stop = asyncio.Event()
    consumers = [asyncio.create_task(take(Session(addresses), past, "past", stop, [])) for _ in range(4)]
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
    consumers = [asyncio.create_task(take(Session(addresses), tally, "present", stop, [])) for _ in range(2)]
    while time.monotonic() < end:
        await send(session, tally, "present", [now_ms() + 500 + 5 * n for n in range(10)], [])
        await asyncio.sleep(0.05)
    await until(lambda: tally.acked >= tally.published, 10)
    stop.set()
    await asyncio.gather(*consumers)


def catch_up(setup: Setup) -> list[Row]:
    row = Row("catchup", "a topic of a million overdue messages, catch_up_rate 1,000/s", [Target("rate", 950)])
    for number in range(setup.rounds):
        setup.say(f"catchup, round {number + 1}")
        with Cluster.start(setup.directory / "ours", setup.port) as cluster:
            put(cluster, "past", {"catch_up_rate": CATCH_UP_RATE})
            backlog = setup.many(1_000_000, 50_000)
            counts, alone, beside = uvloop.run(catching_up(cluster, backlog, setup.seconds(20)))
            row.add("rate", statistics.median(counts), "msg/s")
            row.add("highest second", max(counts), "msg/s")
            for name, tally in (("alone", alone), ("beside it", beside)):
                row.add(f"other topic, {name}: p50", tally.late(0.5), "ms")
                row.add(f"other topic, {name}: p99", tally.late(0.99), "ms")
    return [row]


def put(cluster: Cluster, topic: str, config: dict[str, float]) -> None:
    url = f"{cluster.leader().http}/v1/topics/{topic}"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(config).encode(), method="PUT")) as answer:
        assert answer.status == 200
