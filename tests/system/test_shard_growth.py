"""One cluster without a map becomes four shards under load, as an admin does it: node after node restarted, shards
added, one rule. Twelve real processes, so only `make long` runs it. The client has the addresses of the first cluster,
and lives from the beginning to the end."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos.freeports import free_ports
from hadelay.cli.dev import Layout, Replica
from hadelay.client import AsyncClient, Put
from hadelay.errors import HadelayError
from tests.scale import LONG
from tests.system.cluster import ask, end, hadelay, ready_line, spawn, until

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not LONG, reason="one shard becomes four in `make long`"),
]
NODES, SHARDS = 3, 4
#: Messages per second, with their delay in seconds; and interval between two new topics.
RATE, DELAY_S, NEW_TOPIC_S = 60, 1.5, 0.4
#: Difference between cluster time and this machine's clock that no fault of the clocks explains, in seconds.
ROUNDING_S = 0.03
#: Timeout of a request, of the whole change, and of the rest of the hand-outs, in seconds.
REQUEST_S, CHANGE_S, DRAIN_S = 20.0, 300.0, 90.0


class Machines:
    """The processes of three machines, by `hadelay serve FILE --shard N`, each in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.layout = Layout(
            id="grows", nodes=NODES, shards=SHARDS, port_base=free_ports(2 * NODES * SHARDS),
            settings=["raft.segment_bytes=8MiB"],
        )  # fmt: skip
        for i, name in enumerate(self.layout.names()):
            (directory / f"{name}.toml").write_text(self.layout.toml(i, directory))
        self.processes: dict[Replica, subprocess.Popen[bytes]] = {}

    def start(self, *replicas: Replica, first: bool = False) -> None:
        """And wait until each is ready."""
        options = [word for setting in self.layout.settings for word in ("--set", setting)]
        for one in replicas:
            words = ["serve", self.directory / f"n{one.node + 1}.toml", "--shard", one.shard, "-o", "json", *options]
            words += ["--init"] if first else []
            self.processes[one] = spawn(*words, errors=self.directory / f"{one.name}.log")
        for one in replicas:
            ready_line(self.processes[one], self.directory / f"{one.name}.log")

    def stop(self, one: Replica) -> None:
        self.processes[one].send_signal(signal.SIGTERM)
        self.processes[one].wait(30)
        end(self.processes[one])

    def found(self, shard: int) -> None:
        self.start(*(Replica(i, shard) for i in range(NODES)), first=True)

    def url(self, shard: int, node: int = 0) -> str:
        return self.layout.urls(shard)[f"n{node + 1}"]

    def run(self, *words: object, shard: int = 0) -> str:
        done = hadelay(*words, "--servers", ",".join(self.layout.urls(shard).values()), timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def topics(self, shard: int) -> set[str]:
        answer = ask(self.url(shard), "GET", "/v1/shards/names?limit=1000")
        assert answer.status == 200, answer
        assert answer.json["next"] is None
        return set(answer.json["topics"])

    def close(self) -> None:
        for process in self.processes.values():
            end(process)


class Load:
    """Publishes and receives all the time, and insists until each publish is answered."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self.topics = [f"kept-{n}" for n in range(4)]
        #: By key: (topic, time before the publish). By id: key; and the hand-outs of the id, with their times.
        self.asked: dict[str, tuple[str, float]] = {}
        self.stored: dict[str, str] = {}
        self.given: dict[str, list[tuple[str, float]]] = {}
        self.acked: set[str] = set()
        self.publishing, self.receiving = True, True

    async def publish(self, single: bool) -> None:
        number = 0
        many = 1 if single else 10
        while self.publishing:
            number += 1
            keys = [f"{'s' if single else 'b'}{number}-{i}" for i in range(many)]
            topics = [self.topics[(number + i) % len(self.topics)] for i in range(many)]
            begun = time.monotonic()
            self.asked.update({key: (topic, begun) for key, topic in zip(keys, topics, strict=True)})
            for key, message_id in zip(keys, await self.insist(keys, topics), strict=True):
                assert self.stored.setdefault(message_id, key) == key
            await asyncio.sleep(max(0.0, begun + 2 * many / RATE - time.monotonic()))

    async def insist(self, keys: list[str], topics: list[str]) -> list[str]:
        """Publish until there is an answer; returns the ids."""
        puts = [Put(topic=topic, body=key.encode(), delay=DELAY_S) for key, topic in zip(keys, topics, strict=True)]
        while True:
            try:
                if len(puts) == 1:
                    (put,) = puts
                    receipt = await self.client.put(put.topic, put.body, delay=DELAY_S, idempotency_key=keys[0])
                    return [receipt.id]
                results = await self.client.put_many(puts, idempotency_key=keys[0])
            except (HadelayError, OSError):
                await asyncio.sleep(0.05)
                continue
            if not any(isinstance(one, HadelayError) for one in results):
                return [one.id for one in results]  # type: ignore[union-attr]
            await asyncio.sleep(0.05)

    async def name_topics(self) -> None:
        while self.publishing:
            await asyncio.sleep(NEW_TOPIC_S)
            self.topics.append(f"new-{len(self.topics)}")

    async def receive(self, share: int, of: int) -> None:
        while self.receiving:
            for topic in self.topics[share::of]:
                try:
                    messages = await self.client.receive(topic, max=50, wait=0.02, lease=60.0, timeout=REQUEST_S)
                except (HadelayError, OSError):
                    continue
                for message in messages:
                    hand_out = (message.body.decode(), time.monotonic())
                    self.given.setdefault(message.id, []).append(hand_out)
                await self.ack(messages)
            await asyncio.sleep(0.01)

    async def ack(self, messages: list[Any]) -> None:
        while messages:
            try:
                self.acked.update(m.id for m in messages)
                await self.client.ack(messages)
                return
            except (HadelayError, OSError):
                await asyncio.sleep(0.05)

    def missing(self) -> set[str]:
        return self.stored.keys() - self.given.keys()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    found = Machines(tmp_path)
    try:
        yield found
    finally:
        found.close()


def grow(machines: Machines) -> None:
    """What the admin does."""
    for node in range(NODES):
        machines.stop(Replica(node, 0))
        machines.start(Replica(node, 0))
    for shard in range(1, SHARDS):
        machines.found(shard)
        machines.run("shards", "add", shard, ",".join(machines.layout.urls(shard).values()))
    machines.run("shards", "rule", "*", "0,1,2,3", "--key", "number", shard=2)
    machines.run("shards", "balance", shard=3)
    until(lambda: all(machines.topics(shard) for shard in range(SHARDS)), "each shard has topics of the load")
    for node in range(NODES):  # and every machine once more
        for shard in range(SHARDS):
            machines.stop(Replica(node, shard))
        machines.start(*(Replica(node, shard) for shard in range(SHARDS)))


async def under_load(machines: Machines) -> Load:
    async with AsyncClient(list(machines.layout.urls(0).values()), timeout=REQUEST_S) as client:
        load = Load(client)
        publishers = [asyncio.create_task(work) for work in (load.publish(True), load.publish(False))]
        naming = asyncio.create_task(load.name_topics())
        consumers = [asyncio.create_task(load.receive(n, 8)) for n in range(8)]
        try:
            await asyncio.wait_for(asyncio.to_thread(grow, machines), CHANGE_S)
            load.publishing = False
            await asyncio.wait_for(asyncio.gather(*publishers, naming), 60)
            over = time.monotonic() + DRAIN_S
            while load.missing() and time.monotonic() < over:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
            load.receiving = False
            await asyncio.wait_for(asyncio.gather(*consumers), 60)
            # Each key is one message, whichever node is asked.
            for message_id, key in list(load.stored.items())[::40]:
                if key.startswith("s"):
                    assert await load.insist([key], [load.asked[key][0]]) == [message_id]
        finally:
            for task in (*publishers, naming, *consumers):
                task.cancel()
            await asyncio.gather(*publishers, naming, *consumers, return_exceptions=True)
        return load


def test_one_shard_becomes_four_under_load(machines: Machines) -> None:
    machines.found(0)
    load = asyncio.run(under_load(machines))
    assert len(load.stored) > 500
    assert not load.missing(), f"lost: {sorted(load.missing())[:10]} of {len(load.stored)}"
    bodies = Counter(body for hand_outs in load.given.values() for body, _ in hand_outs)
    assert {body: n for body, n in bodies.items() if n > 1} == {}, "doubled"
    assert load.given.keys() <= load.stored.keys()
    early = {
        body: got - load.asked[body][1]
        for hand_outs in load.given.values() for body, got in hand_outs
        if got < load.asked[body][1] + DELAY_S - ROUNDING_S
    }  # fmt: skip
    assert early == {}
    topics = [machines.topics(shard) for shard in range(SHARDS)]
    assert all(topics), topics
    assert sum(map(len, topics)) == len(set().union(*topics)), "a topic is in one shard"
    assert set().union(*topics) == {topic for topic, _ in load.asked.values()}
    assert topics[0] >= {f"kept-{n}" for n in range(4)}, "existing topics stay"
    for message_id, key in load.stored.items():
        assert any(load.asked[key][0] in topics[shard] for shard in range(SHARDS)), (message_id, key)
    found = json.loads(machines.run("shards", "list", "-o", "json"))
    assert sorted(found["current"]["shards"]) == ["0", "1", "2", "3"]
