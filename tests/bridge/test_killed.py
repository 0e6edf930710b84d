"""Bridges, RabbitMQ and the leader, killed in a loop: each confirmed message comes out, none early.

At full size behind HADELAY_BRIDGE (`make bridge`): RabbitMQ takes half a minute to start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.bridge.conftest import Rabbit
from tests.system.cluster import Cluster, end, spawn

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(1_200),
    pytest.mark.skipif(not os.environ.get("HADELAY_BRIDGE"), reason="takes minutes: make bridge"),
]
MESSAGES, ROUNDS = 3_000, 4
QUEUE, EXCHANGE, INTAKE = "shop.q", "shop", "shop.delay"


async def connection_to(rabbit: Rabbit) -> Any:
    from aiormq import connect

    while True:
        with contextlib.suppress(Exception):
            return await connect(f"{rabbit.url}?heartbeat=10")
        await asyncio.sleep(0.2)


async def publisher(rabbit: Rabbit, sent: dict[str, float], chance: random.Random) -> None:
    """Publish with confirms; a message without a confirm is published again, under its id."""
    from pamqp.commands import Basic

    number = 0
    while number < MESSAGES:
        with contextlib.suppress(Exception):
            async with await connection_to(rabbit) as connection:
                channel = await connection.channel()
                while number < MESSAGES:
                    name, delay_ms = f"m{number}", chance.randrange(1, 20_000)
                    properties = Basic.Properties(message_id=name, delivery_mode=2, headers={"x-delay": delay_ms})
                    due = time.time() + delay_ms / 1000
                    async with asyncio.timeout(10):
                        await channel.basic_publish(
                            name.encode(), exchange=INTAKE, routing_key="shop.mail", properties=properties
                        )
                    sent[name] = due
                    number += 1
                    await asyncio.sleep(0.01)


async def consumer(rabbit: Rabbit, sent: dict[str, float], got: Counter[str], early: list[str]) -> None:
    while True:
        ended = asyncio.Event()
        with contextlib.suppress(Exception):
            async with await connection_to(rabbit) as connection:
                channel = await connection.channel()
                channel.closing.add_done_callback(lambda _, ended=ended: ended.set())

                async def take(message: Any, channel: Any = channel) -> None:
                    name = message.body.decode()
                    got[name] += 1
                    if time.time() < sent.get(name, 0) - 0.002:
                        early.append(name)
                    await channel.basic_ack(message.delivery_tag, wait=False)

                await channel.basic_qos(prefetch_count=100)
                await channel.basic_consume(QUEUE, take)
                await ended.wait()
        await asyncio.sleep(0.2)


async def settle(rabbit: Rabbit) -> None:
    """Declare what the program has."""
    async with await connection_to(rabbit) as connection:
        channel = await connection.channel()
        await channel.exchange_declare(EXCHANGE, exchange_type="topic", durable=True)
        await channel.queue_declare(QUEUE, durable=True)
        await channel.queue_bind(QUEUE, EXCHANGE, routing_key="#")


async def test_everything_is_killed(rabbit: Rabbit, tmp_path: Path) -> None:
    await settle(rabbit)
    sent: dict[str, float] = {}
    got, early, chance = Counter[str](), list[str](), random.Random(11)
    with Cluster(tmp_path / "cluster") as cluster, ExitStack() as stack:
        servers = ",".join(cluster.urls.values())
        words = ("bridge", "rabbitmq", rabbit.url, "--exchange", INTAKE, "--to", EXCHANGE, "--servers", servers)

        def start() -> subprocess.Popen[bytes]:
            process = spawn(*words, errors=tmp_path / "bridge.err")
            stack.callback(end, process)
            return process

        bridges = [start(), start()]
        await asyncio.to_thread(wait_for_bridges, tmp_path / "bridge.err")
        tasks = [
            asyncio.create_task(publisher(rabbit, sent, chance)),
            asyncio.create_task(consumer(rabbit, sent, got, early)),
        ]
        for _ in range(ROUNDS):
            for _ in range(4):
                await asyncio.sleep(chance.uniform(0.5, 3))
                victim = bridges.pop(0)
                end(victim)
                bridges.append(start())
            await asyncio.to_thread(cluster.kill, cluster.leader())
            await asyncio.sleep(chance.uniform(1, 4))
            await asyncio.to_thread(cluster.revive)
            await asyncio.to_thread(rabbit.kill)
            await asyncio.to_thread(rabbit.start)
        deadline = time.monotonic() + 300
        while not tasks[0].done() or len(got) < MESSAGES:
            assert time.monotonic() < deadline, f"{len(sent)} sent, {len(got)} came out; see {tmp_path}"
            await asyncio.sleep(0.2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert set(got) == set(sent)
        assert not early
        doubled = sum(count - 1 for count in got.values())
        print(f"\n{MESSAGES} messages, {doubled} second deliveries, 0 lost, 0 early")
        # Each kill may double what was under way, no more.
        assert doubled < MESSAGES // 5
        for process in bridges:
            process.terminate()
            assert process.wait(30) == 0


def wait_for_bridges(errors: Path) -> None:
    deadline = time.monotonic() + 60
    while errors.read_text().count("bridging queue") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(2)
