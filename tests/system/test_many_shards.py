"""Sixteen processes on one machine: four shards of four nodes, by `hadelay dev`. Function, not speed; so only `make
long` runs it. Every node is asked for every shard's topics, and each message is counted."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.freeports import free_ports
from hadelay.client import AsyncClient, Put
from hadelay.errors import HadelayError
from tests.cli.support import Dev, start
from tests.scale import LONG
from tests.system.cluster import alive

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not LONG, reason="sixteen processes in `make long`"),
]
NODES = SHARDS = 4
TOPICS = [f"topic-{n}" for n in range(32)]
#: Batches that each process gets, and messages of each batch.
BATCHES, BATCH = 10, 64
#: Timeout of a request, and of all hand-outs, in seconds.
REQUEST_S, DRAIN_S = 30.0, 200.0


@pytest.fixture
def sixteen(tmp_path: Path) -> Iterator[Dev]:
    ports = free_ports(2 * NODES * SHARDS)
    words = ("--port-base", ports, "--nodes", NODES, "--shards", SHARDS, "--set", "raft.segment_bytes=8MiB")
    dev = start(tmp_path, *words)
    try:
        yield dev
    finally:
        dev.end()


async def publish(url: str, number: int) -> dict[str, str]:
    """Through one node, into topics of all shards; returns body by id."""
    stored = {}
    async with AsyncClient(url, timeout=REQUEST_S) as client:
        for batch in range(BATCHES):
            bodies = [f"{number}-{batch}-{n}" for n in range(BATCH)]
            puts = [Put(topic=TOPICS[n % len(TOPICS)], body=body.encode()) for n, body in enumerate(bodies)]
            for body, receipt in zip(bodies, await client.put_many(puts), strict=True):
                assert not isinstance(receipt, HadelayError), receipt
                stored[receipt.id] = body
    return stored


async def receive(
    url: str, topics: list[str], given: Counter[str], bodies: dict[str, str], over: asyncio.Event
) -> None:
    async with AsyncClient(url, timeout=REQUEST_S) as client:
        while not over.is_set():
            for topic in topics:
                messages = await client.receive(topic, max=100, wait=0.02, lease=120.0)
                for message in messages:
                    given[message.id] += 1
                    bodies[message.id] = message.body.decode()
                if messages:
                    await client.ack(messages)


async def exchange(urls: list[str]) -> tuple[dict[str, str], Counter[str], dict[str, str]]:
    given, bodies, over = Counter[str](), dict[str, str](), asyncio.Event()
    # Two topics each, which move on by one node: so most are topics of another shard than the node's.
    receivers = [
        asyncio.create_task(receive(url, TOPICS[2 * n : 2 * n + 2], given, bodies, over)) for n, url in enumerate(urls)
    ]
    stored: dict[str, str] = {}
    for found in await asyncio.gather(*(publish(url, n) for n, url in enumerate(urls))):
        stored |= found
    end = asyncio.get_running_loop().time() + DRAIN_S
    while stored.keys() - given.keys() and asyncio.get_running_loop().time() < end:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    await asyncio.sleep(1)  # for a second hand-out, if there is one
    over.set()
    await asyncio.gather(*receivers)
    return stored, given, bodies


def test_sixteen_processes_hand_each_message_out_once(sixteen: Dev) -> None:
    urls = [node["http"] for node in sixteen.nodes]
    assert len(urls) == NODES * SHARDS
    stored, given, bodies = asyncio.run(exchange(urls))
    assert len(stored) == len(urls) * BATCHES * BATCH
    assert bodies == stored
    assert set(given.values()) == {1}
    topics = json.loads(sixteen.run("topic", "list", "-o", "json").stdout)
    shard_of = Counter(topic["topic"] for topic in topics)
    assert shard_of == Counter(TOPICS), "each topic is in one shard"
    assert {topic["shard"] for topic in topics} == set(range(SHARDS))
    pids = [node["pid"] for node in sixteen.nodes]
    assert sixteen.end() == 0
    assert not any(map(alive, pids))
