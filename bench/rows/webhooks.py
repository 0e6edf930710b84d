"""Webhooks: how many calls the leader makes, and what one topic's hanging receiver costs the others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import uvloop

from bench.cluster import Cluster, Void, cpu_seconds, get
from bench.http1 import request
from bench.load import Session, Tally, now_ms, publish, until
from bench.result import Row, Setup, Target
from bench.rows.deliver import leader_first

#: From the cluster's first port: nothing else of the harness is there.
_PORT = 90
SECRET = "whsec_" + "A" * 43 + "="


@contextlib.contextmanager
def receiver(port: int) -> Iterator[str]:
    command = [sys.executable, "-m", "bench.receiver", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise Void("the receiver did not start")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def hook(cluster: Cluster, topic: str, url: str | None, timeout: str = "15s") -> None:
    webhook = {"url": url, "secret": SECRET, "timeout": timeout} if url is not None else None
    cluster.put_topic(topic, webhook=webhook, backoff=["1h"])


async def overdue(cluster: Cluster, count: int) -> Tally:
    """`count` messages that fall due at one moment; returns shortly before."""
    tally, session = Tally(), Session(leader_first(cluster))
    due = now_ms() + 4_000 + count // 20
    for start in range(0, count, 1000):
        await publish(session, tally, [due] * min(1000, count - start))
    if now_ms() > due:
        raise Void("publishing took longer than the delay")
    await asyncio.sleep(max(0.0, (due - now_ms()) / 1000 - 0.1))
    return tally


def _pending(cluster: Cluster, topic: str) -> int:
    counts = get(f"{cluster.leader().http}/v1/topics/{topic}")
    return int(counts["scheduled"] + counts["ready"] + counts["leased"])


def calls(setup: Setup) -> list[Row]:
    row = Row("webhooks", "webhook calls to one local receiver, signed, commit mode", [Target("rate", 3_000)])
    count = setup.many(60_000, 10_000)
    for _ in setup.each_round("webhooks"):
        with setup.cluster() as cluster, receiver(setup.port + _PORT) as url:
            hook(cluster, "bench", f"{url}/ok")
            leader = cluster.leader()
            uvloop.run(overdue(cluster, count))
            before = cpu_seconds(leader.pid)
            deadline = time.monotonic() + 120
            while _pending(cluster, "bench") and time.monotonic() < deadline:
                time.sleep(0.25)
            spent = cpu_seconds(leader.pid) - before
            seen = get(url)
            if seen["ids"] != count or seen["calls"] != count or seen["early"]:
                raise Void(f"{count} messages, {seen['calls']} calls about {seen['ids']}, {seen['early']} early")
            cluster.account(["bench"], count, count)
            row.add("rate", count / (seen["last"] - seen["first"]), "calls/s")
            row.add("leader's processor per call", spent / count * 1e6, "µs")
    return [row]


async def steady(cluster: Cluster, rate: int, seconds: float) -> int:
    """Publish `rate` a second, due 1 s later, and wait until they are due."""
    tally, session, began = Tally(), Session(leader_first(cluster)), time.monotonic()
    for step in range(int(seconds * 20)):
        await asyncio.sleep(max(0.0, began + step / 20 - time.monotonic()))
        due = now_ms() + 1_000
        await publish(session, tally, [due + n * 50 // max(1, rate // 20) for n in range(max(1, rate // 20))])
    await until(lambda: False, 2.0)
    return tally.published


async def _stuff(cluster: Cluster, topic: str, count: int) -> None:
    body = json.dumps([{"topic": topic, "body": "x"}] * count).encode()
    await Session(leader_first(cluster)).call(request("POST", "/v1/messages:batch", body), 30)


def _lateness(cluster: Cluster, url: str, rate: int, seconds: float) -> dict[str, Any]:
    get(url)
    published = uvloop.run(steady(cluster, rate, seconds))
    seen: dict[str, Any] = get(url)
    if seen["ids"] != published or seen["calls"] != published or seen["early"]:
        raise Void(f"{published} messages, {seen['calls']} calls about {seen['ids']}, {seen['early']} early")
    return seen


def hanging(setup: Setup) -> list[Row]:
    row = Row(
        "hanging",
        "lateness at 500 calls/s, alone and beside a topic whose receiver hangs on every call, in turns",
        [Target("p99 more", 10, at_most=True)],
    )
    seconds = setup.seconds(6)
    for _ in setup.each_round("hanging"):
        with setup.cluster() as cluster, receiver(setup.port + _PORT) as url:
            hook(cluster, "bench", f"{url}/ok")
            uvloop.run(_stuff(cluster, "slow", 5_000))
            _lateness(cluster, url, 500, 2)  # connections, caches
            for _ in range(1 if setup.quick else 3):
                alone = _lateness(cluster, url, 500, seconds)
                hook(cluster, "slow", f"{url}/hang", "2s")
                beside = _lateness(cluster, url, 500, seconds)
                if not beside["hanging"]:
                    raise Void("nothing hung")
                hook(cluster, "slow", None)
                time.sleep(2.5)
                for name, seen in (("alone", alone), ("beside", beside)):
                    row.add(f"p50 {name}", seen["p50"], "ms")
                    row.add(f"p99 {name}", seen["p99"], "ms")
                row.add("p99 more", beside["p99"] - alone["p99"], "ms")
    row.ratio("p99 ratio", "p99 beside", "p99 alone")
    return [row]
