"""The worst request of every route, to the leader: how long each holds up another request."""

from __future__ import annotations

import asyncio
import time
import urllib.error
import urllib.request
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from multiprocessing import get_context

import uvloop

from bench.cluster import Node, Void
from bench.result import Row, Setup, Target
from bench.rows.metrics import Pings
from bench.worst import MIB, Worst, batches, others


def _send(address: str, sent: Worst) -> tuple[float, float, int]:
    """(began, ended, status), by a clock that all processes share."""
    head = {"Content-Type": sent.kind} if sent.kind else {}
    asked = urllib.request.Request(address + sent.path, sent.body or None, head, method=sent.method)
    began = time.perf_counter()
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            answer.read()
            status = answer.status
    except urllib.error.HTTPError as error:
        status = error.code
    except urllib.error.URLError:  # refused while it was still being sent
        status = sent.status
    return began, time.perf_counter(), status


async def _measure(node: Node, size: int, row: Row) -> None:
    """The sender is a process of its own: to send, and take in, so much would hold up the pings, too."""
    waits: dict[str, float] = {}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as sender:
        pings, loop = Pings(node.http), asyncio.get_running_loop()
        pinging = asyncio.create_task(pings.run())
        for sent in chain(batches(size), others()):
            began, ended, status = await loop.run_in_executor(sender, _send, node.http, sent)
            if status != sent.status:
                raise Void(f"{sent.name} was answered {status}, not {sent.status}")
            await asyncio.sleep(0.05)
            waits[sent.name] = pings.longest(began, ended)
        pings.over = True
        await pinging
    worst = max(waits, key=waits.__getitem__)
    row.add("longest wait", waits[worst], "ms")
    row.notes.append(f"longest beside {worst!r}")


def bounds(setup: Setup) -> list[Row]:
    row = Row(
        "worst",
        "the worst request of every route to the leader; beside it one asks for /livez all the time: its longest wait",
        [Target("longest wait", 50, at_most=True), Target("changes of leader", 0, at_most=True)],
    )
    with setup.cluster() as cluster:
        leader = cluster.leader()
        _fill(leader)
        for _ in setup.each_round("worst"):
            uvloop.run(_measure(leader, setup.many(16, 5) * MIB, row))
            row.add("changes of leader", float(cluster.leader() is not leader))
    return [row]


def _fill(leader: Node) -> None:
    """Topic t, which the requests are about."""
    item = b'{"topic":"t","delay":"1h"}\n'
    _, _, status = _send(
        leader.http, Worst("", "POST", "/v1/messages:batch", "application/x-ndjson", item * 1_000, 200)
    )
    if status != 200:
        raise Void(f"the topic could not be filled: {status}")
