"""Delivering: end to end, a hundred thousand in one second, lateness at a steady rate, and from a cold disk."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import uvloop

from bench.cluster import Cluster, Node, Void
from bench.http1 import request
from bench.load import TOPIC, Session, Tally, consume, messages, now_ms, publish, put, until
from bench.result import Row, Setup, Target

#: Published and not yet acked, at most: producers wait for consumers, or the run would measure a backlog.
WINDOW = 20_000


def leader_first(cluster: Cluster) -> list[str]:
    leader = cluster.leader()
    return [leader.http, *(node.http for node in cluster.nodes if node is not leader)]


def nothing_early(tally: Tally, *, duplicates: bool = True) -> None:
    if tally.early or (duplicates and tally.duplicates):
        raise Void(f"{tally.early} early, {tally.duplicates} handed out twice")


async def gather_until_stopped(tasks: list[asyncio.Task[None]], stop: asyncio.Event) -> None:
    """A task that fails ends the run with its own error."""
    stop.set()
    await asyncio.gather(*tasks)


async def flow(
    cluster: Cluster, seconds: float, tags: Sequence[str] = (), selective: int = 0, groups: int = 0
) -> Tally:
    """Due at once, in batches of 100, each with three of `tags` if there are any; 16 consumers take and ack 100 at a
    time, `selective` of them only what has one tag of theirs. groups: as of `messages`."""
    addresses, tally, stop, end = leader_first(cluster), Tally(), asyncio.Event(), time.monotonic() + seconds

    async def produce() -> None:
        session = Session(addresses)
        while time.monotonic() < end:
            if tally.published - tally.acked > WINDOW:
                await asyncio.sleep(0.002)
                continue
            items = messages([now_ms()] * 100, groups=groups)
            for item in items if tags else ():
                item["tags"] = random.sample(tags, 3)
            await put(session, tally, items)

    filters = [tags[n : n + 1] if n < selective else () for n in range(16)]
    consumers = [asyncio.create_task(consume(Session(addresses), tally, stop, tags=some)) for some in filters]
    await asyncio.gather(*(produce() for _ in range(8)))
    await until(lambda: tally.acked >= tally.published or any(t.done() for t in consumers), 30)
    await gather_until_stopped(consumers, stop)
    return tally


def end_to_end(setup: Setup) -> list[Row]:
    row = Row(
        "e2e",
        "end to end: publish in batches of 100, deliver, ack, commit mode, 60 s",
        [Target("rate", 15_000, 30_000)],
    )
    seconds = setup.seconds(60)
    for _ in setup.each_round("e2e"):
        with setup.cluster() as cluster:
            began = time.monotonic()
            tally = uvloop.run(flow(cluster, seconds))
            took = time.monotonic() - began
            cluster.account(["bench"], tally.published, tally.acked)
            nothing_early(tally)
            row.add("rate", tally.acked / took, "msg/s")
            row.add("lateness p50", tally.late(0.5), "ms")
            row.add("lateness p99", tally.late(0.99), "ms")
    return [row]


async def all_at_once(cluster: Cluster, count: int) -> tuple[Tally, int]:
    """`count` messages due within one second; the start of that second."""
    addresses, tally, stop = leader_first(cluster), Tally(), asyncio.Event()
    second = (now_ms() // 1000 + 15) * 1000
    session = Session(addresses)
    for start in range(0, count, 1000):
        await publish(session, tally, [second + random.randrange(1000) for _ in range(min(1000, count - start))])
    if now_ms() > second - 3000:
        raise Void("publishing took longer than the delay")
    consumers = [
        asyncio.create_task(consume(Session(addresses), tally, stop, most=1000, wait="30s")) for _ in range(16)
    ]
    await until(lambda: tally.acked >= count or any(t.done() for t in consumers), 60)
    stop.set()
    for task in consumers:
        task.cancel()
    await asyncio.gather(*consumers, return_exceptions=True)
    return tally, second


def burst(setup: Setup) -> list[Row]:
    row = Row(
        "burst", "100,000 messages due in one second: all handed out within", [Target("seconds", 5, 3, at_most=True)]
    )
    for _ in setup.each_round("burst"):
        with setup.cluster() as cluster:
            tally, second = uvloop.run(all_at_once(cluster, setup.many(100_000, 20_000)))
            cluster.account(["bench"], tally.published, tally.acked)
            nothing_early(tally)
            if len(tally.seen) != tally.published:
                raise Void(f"{tally.published - len(tally.seen)} were never handed out")
            row.add("seconds", (tally.last_at - second) / 1000, "s")
    return [row]


async def steady(
    cluster: Cluster, rate: int, seconds: float, addresses: list[str] | None = None,
    over: Callable[[], bool] = lambda: False, groups: int = 0, *, topics: Sequence[str] = (TOPIC,),
    consumer: Callable[[Tally, asyncio.Event], Coroutine[Any, Any, None]] | None = None, tally: Tally | None = None,
) -> Tally:  # fmt: skip
    """Published in small batches at `rate`, to the topics by turns, due 1 to 4 s later, for that long or until `over`;
    then until the last one is acked. consumer: receives and acks, in place of eight connections that poll one topic.
    tally: an empty one, which is filled and returned."""
    addresses = addresses or leader_first(cluster)
    tally, stop = tally or Tally(), asyncio.Event()
    if consumer is not None:
        consumers = [asyncio.create_task(consumer(tally, stop))]
    else:
        consumers = [asyncio.create_task(consume(Session(addresses), tally, stop, wait="2s")) for _ in range(8)]
    sessions = [Session(addresses) for _ in range(4)]
    tick, began = 0.01, time.monotonic()
    running: set[asyncio.Task[None]] = set()
    for step in range(int(seconds / tick)):
        if over():
            break
        await asyncio.sleep(max(0.0, began + step * tick - time.monotonic()))
        due = [now_ms() + random.randrange(1000, 4000) for _ in range(max(1, int(rate * tick)))]
        # One request at a time per session: when all are busy, this tick waits for one of them.
        while len(running) >= len(sessions):
            _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        session, items = sessions.pop(), messages(due, groups=groups)
        for item, topic in zip(items, itertools.cycle(topics), strict=False):
            item["topic"] = topic
        running.add(asyncio.create_task(_put_and_return(session, tally, items, sessions)))
    await asyncio.gather(*running)
    await until(lambda: tally.acked >= tally.published or any(t.done() for t in consumers), 30)
    await gather_until_stopped(consumers, stop)
    nothing_early(tally)
    return tally


async def _put_and_return(session: Session, tally: Tally, items: list[dict[str, Any]], idle: list[Session]) -> None:
    await put(session, tally, items)
    idle.append(session)


def lateness(setup: Setup) -> list[Row]:
    row = Row(
        "lateness",
        "lateness at 2,000 msg/s, commit mode",
        [Target(*one, at_most=True) for one in (("p50", 5, 3), ("p99", 50, 10), ("max", 100, 30))],
    )
    for _ in setup.each_round("lateness"):
        with setup.cluster() as cluster:
            tally = uvloop.run(steady(cluster, 2_000, setup.seconds(30)))
            cluster.account(["bench"], tally.published, tally.acked)
            row.add("p50", tally.late(0.5), "ms")
            row.add("p99", tally.late(0.99), "ms")
            row.add("max", max(tally.late_ms), "ms")
    return [row]


async def from_disk(cluster: Cluster, count: int, *, cold: bool) -> tuple[Tally, float]:
    """`count` messages of 4 KiB due within ten seconds, all forgotten by the page cache before if `cold`; and the
    longest that the leader took to answer /livez from before they were loaded until the last was acked, in seconds."""
    addresses, tally, stop, waits = leader_first(cluster), Tally(), asyncio.Event(), [0.0]
    session, first = Session(addresses), now_ms() + 30_000
    for start in range(0, count, 500):
        due = [first + random.randrange(10_000) for _ in range(min(500, count - start))]
        items = [{"topic": TOPIC, "body": at.to_bytes(8, "little") + bytes(4_088), "deliver_at": at} for at in due]
        await put(session, tally, items)
    if now_ms() > first - 15_000:
        raise Void("publishing took longer than the delay")
    if cold:
        await asyncio.to_thread(forget, cluster)

    async def ask() -> None:
        health = Session(addresses[:1])
        while not stop.is_set():
            began = time.monotonic()
            await health.call(request("GET", "/livez"))
            waits.append(time.monotonic() - began)
            await asyncio.sleep(0.005)

    await asyncio.sleep((first - 12_000 - now_ms()) / 1000)
    asking = asyncio.create_task(ask())
    consumers = [asyncio.create_task(consume(Session(addresses), tally, stop, most=1000, wait="2s")) for _ in range(4)]
    await until(lambda: tally.acked >= count or any(t.done() for t in consumers), 90)
    await gather_until_stopped([*consumers, asking], stop)
    return tally, max(waits)


def forget(cluster: Cluster) -> None:
    """Every file of the cluster leaves the page cache."""
    os.sync()
    for path in cluster.directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def term(cluster: Cluster, node: Node) -> int:
    found: int = cluster.get(node, "/v1/cluster?stale=true")["term"]
    return found


def cold(setup: Setup) -> list[Row]:
    row = Row(
        "cold",
        "20,000 messages of 4 KiB due in 10 s, the page cache empty",
        [
            Target("leader /livez max", 50, at_most=True),
            Target("lateness max, cold to warm", 2, at_most=True),
            Target("changes of leader", 0, at_most=True),
        ],
    )
    count = setup.many(20_000, 5_000)
    for _ in setup.each_round("cold"):
        for side in ("warm", "cold"):
            with setup.cluster() as cluster:
                before = term(cluster, cluster.leader())
                tally, longest = uvloop.run(from_disk(cluster, count, cold=side == "cold"))
                cluster.account(["bench"], tally.published, tally.acked)
                nothing_early(tally)
                row.add(f"lateness max, {side}", max(tally.late_ms), "ms")
                if side == "cold":
                    row.add("leader /livez max", longest * 1000, "ms")
                    row.add("changes of leader", term(cluster, cluster.leader()) - before)
    row.ratio("lateness max, cold to warm", "lateness max, cold", "lateness max, warm")
    return [row]
