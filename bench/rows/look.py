"""Looking at, and changing, single messages among many: by key, in lists, in counts."""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

import uvloop

from bench.http1 import request
from bench.load import PADDING, TOPIC, Session, Tally, now_ms, publish, put
from bench.result import Row, Setup, Target
from bench.rows.size import HOUR_MS, within_48_hours, written_out

#: Keyed commands per second, and publishes per second beside them.
RATE, PUBLISHES = 500, 2_000
_KEYS = f"/v1/topics/{TOPIC}/keys/"


async def fill(addresses: list[str], count: int, tally: Tally) -> None:
    """Messages due within 48 hours, in batches of 5,000, each under a key: its number."""
    firsts = iter(range(0, count, 5_000))

    async def produce(n: int) -> None:
        session = Session(addresses, n)
        for first in firsts:
            items = [
                {"topic": TOPIC, "body": PADDING, "deliver_at": within_48_hours(), "key": f"{key}"}
                for key in range(first, min(first + 5_000, count))
            ]
            await put(session, tally, items, 60)

    await asyncio.gather(*(produce(n) for n in range(6)))


def scattered(count: int) -> Iterator[int]:
    """Every number below `count` once, in no order that matters. Not from a list: the collector of this process would
    go through its millions every few seconds, and all requests would wait for that."""
    step = next(n for n in range(int(count * 0.618), count + 2) if math.gcd(n, count) == 1)
    return (n * step % count for n in range(count))


class Clock:
    """How long each kind of request took, in ms."""

    def __init__(self) -> None:
        self.took: dict[str, list[float]] = {}

    async def time(self, what: str, session: Session, packed: bytes) -> Any:
        began = time.perf_counter()
        answer = await session.call(packed)
        self.took.setdefault(what, []).append((time.perf_counter() - began) * 1000)
        return json.loads(answer)

    def p99(self, what: str) -> float:
        return statistics.quantiles(self.took[what], n=100)[98]


def _questions(now: int) -> dict[str, str]:
    """Name → path of each read request. now: Unix time in ms."""
    span = f"from={now - HOUR_MS}&to={now + 49 * HOUR_MS}"
    return {
        "counts": f"/v1/topics/{TOPIC}",
        "due": f"/v1/due?{span}&step=60s",
        "due of a topic": f"/v1/topics/{TOPIC}/due?{span}&step=60s",
        "first page": f"/v1/topics/{TOPIC}/messages?limit=100",
        "first page from the middle": f"/v1/topics/{TOPIC}/messages?limit=100&from={now + 24 * HOUR_MS}",
    }


def _commands(keys: Iterator[int]) -> Iterator[tuple[str, bytes]]:
    while True:
        yield "get", request("GET", f"{_KEYS}{next(keys)}")
        yield "cancel", request("DELETE", f"{_KEYS}{next(keys)}")
        yield "reschedule", request("PATCH", f"{_KEYS}{next(keys)}", b'{"delay": "20h"}')


async def look(addresses: list[str], keys: Iterator[int], seconds: float, tally: Tally) -> tuple[Clock, int]:
    """Counts, histograms and lists, alone; gets, cancels and reschedules by keys, each of which is used once, beside
    publishes; then all of it at once. What took how long, and how many were cancelled."""
    clock, end, cancelled = Clock(), 0.0, 0
    questions, commands = _questions(now_ms()), _commands(keys)

    async def command(n: int, clients: int, how: str) -> None:
        nonlocal cancelled
        session, every = Session(addresses, n), clients / RATE
        at = time.monotonic() + random.random() * every
        while at < end:
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            what, packed = next(commands)
            answer = await clock.time(what + how, session, packed)
            cancelled += answer.get("outcome") == "cancelled"
            at = max(at + every, time.monotonic() - 1)

    async def produce(n: int) -> None:
        session, every, at = Session(addresses, n), 20 * 4 / PUBLISHES, time.monotonic()
        while at < end:
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            await publish(session, tally, [within_48_hours() for _ in range(20)])
            at = max(at + every, time.monotonic() - 1)

    async def watch(how: str = "", pause_s: float = 0.05) -> None:
        sessions = [Session(addresses, n) for n in range(len(addresses))]
        while time.monotonic() < end:
            for session in sessions:
                for what, path in questions.items():
                    await clock.time(what + how, session, request("GET", path))
                    await asyncio.sleep(pause_s)

    for n in range(len(addresses)):  # the first time something may have to be counted
        for what, path in questions.items():
            await clock.time(f"{what}, the first time", Session(addresses, n), request("GET", path))

    def load(how: str = "") -> list[Any]:
        return [*(command(n, 16, how) for n in range(16)), *(produce(n) for n in range(4))]

    end = time.monotonic() + seconds / 4
    await watch(", alone", 0.01)
    end = time.monotonic() + seconds / 2
    await asyncio.gather(*load())
    end = time.monotonic() + seconds / 4
    await asyncio.gather(*load(", beside lists"), watch())
    return clock, cancelled


def looking(setup: Setup) -> list[Row]:
    count = setup.many(10_000_000, 200_000)
    row = Row(
        "look",
        f"among {count:,} pending: by key at {RATE}/s beside {PUBLISHES:,} publishes/s; counts, histograms, lists; p99",
        [
            *(Target(what, 25.0, at_most=True) for what in ("get", "cancel", "reschedule")),
            *(Target(f"{what}, alone", 10.0, at_most=True) for what in ("counts", "due", "due of a topic")),
            *(Target(what, 100.0, at_most=True) for what in ("first page", "first page from the middle")),
        ],
    )
    setup.say(f"look, filling {count:,}")
    with setup.cluster() as cluster:
        addresses, tally = [node.http for node in cluster.nodes], Tally()
        uvloop.run(fill(addresses, count, tally))
        written_out(cluster)
        keys, total = scattered(count), 0
        for _ in setup.each_round("look"):
            clock, cancelled = uvloop.run(look(addresses, keys, setup.seconds(30), tally))
            total += cancelled
            for what, took in clock.took.items():
                row.add(what, max(took) if what.endswith("the first time") else clock.p99(what), "ms")
        cluster.account([TOPIC], tally.published, total)
    return [row]
