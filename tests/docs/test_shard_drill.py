"""The commands of docs/howto/shards.md that back up, lose and restore one of two shards of three nodes each, with what
an admin must be able to rely on before, between and after them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from hadelay.client import AsyncClient
from hadelay.settings.shardmap import ShardMap
from tests.docs.test_operations import Lab
from tests.docs.test_pages import ROOT
from tests.system.cluster import Cluster, until

PAGE = ROOT / "docs/howto/shards.md"
RESTORE = "## Restore one shard\n"
#: Topics of shard 0 and shard 1; one whose name moves from shard 1 to shard 0 after the backup; and one of shard 1 that
#: the worker does not consume.
NEAR, FAR, MOVED, LEFT = "users", "orders", "parcels", "orders.left"
#: Delays, in seconds, of the messages that wait while the shard is lost and restored.
DELAYS = [n / 2 for n in range(20)]
pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]


class Worker(threading.Thread):
    """Consumes the topics of both shards by a client that asks nodes of shard 0 first, and counts what it is given."""

    def __init__(self, urls: list[str]) -> None:
        super().__init__(daemon=True)
        self.urls, self.acked = urls, set[str]()
        #: Message → time and topic of each hand-out, with the outcome of the ack.
        self.given: dict[str, list[tuple[float, str, str]]] = {}
        self.over = threading.Event()

    def run(self) -> None:
        asyncio.run(self._work())

    async def _work(self) -> None:
        async with AsyncClient(self.urls) as client:
            consumer = client.consume([NEAR, FAR, MOVED], concurrency=10)
            while not self.over.is_set():
                if (message := await consumer.next(0.2)) is not None:
                    given, at = self.given.setdefault(message.id, []), time.monotonic()
                    given.append((at, message.topic, await message.ack()))
                    self.acked.add(message.id)
            await consumer.close()


class Drill(Lab):
    def __init__(self, directory: Path, cluster: Cluster) -> None:
        super().__init__(directory, cluster)
        urls = cluster.urls
        self.ports["127.0.0.1:8401"] = urls["n1-s1"].removeprefix("http://")
        self.worker = Worker([urls[name] for name in ("n1", "n2", "n3", "n1-s1", "n2-s1", "n3-s1")])
        #: Ids of the messages that have to come.
        self.expected: set[str] = set()
        self.suspended = False
        #: Id of a message that the restored shard takes before it is in the map.
        self.far = ""

    def map(self, name: str = "n1") -> ShardMap:
        answer = self.cluster.ask(name, "GET", "/v1/shards")
        return msgspec.convert(answer.json["current"], ShardMap, strict=False)

    def put(self, topic: str, delay: float = 0, **headers: str) -> str:
        return self.cluster.publish("n1", topic, query=f"?delay={int(delay * 1000)}ms", **headers)

    def before(self) -> None:
        assert [self.map().owner(name) for name in (NEAR, FAR, MOVED, LEFT)] == [0, 1, 1, 1]
        self.put(LEFT)
        for topic in (NEAR, FAR):
            acked = self.put(topic)
            (message,) = self.cluster.receive(f"n2{'-s1' if topic == FAR else ''}", topic, wait="10s")
            assert message["id"] == acked
            assert self.cluster.settle("n1", "ack", [message]) == ["acked"]
            self.expected |= {self.put(topic, delay) for delay in DELAYS}

    def stop(self, verb: str, name: str) -> None:
        """Called by the page once the backup is made, for each node that is lost."""
        if name == "n1-s1":
            self.put(FAR, Idempotency_Key="made after the backup")
            self.do(f"hadelay shards rule '{MOVED}*' 0", "…")
            self.expected |= {self.put(MOVED, 1), self.put(NEAR, 1)}
        super().stop(verb, name)
        if name == "n3-s1":  # what was acked between the backup and the loss would come once more
            self.worker.start()

    def do(self, command: str, expected: str) -> None:
        super().do(command, expected)
        if command.startswith("hadelay shards list --servers") and not self.suspended:
            self.while_suspended()

    def while_suspended(self) -> None:
        """The restored shard has an old map, by which it owns the name that moved."""
        self.suspended = True
        assert self.map("n1-s1").owner(MOVED) == 1
        assert self.cluster.metric("n2-s1", "shard_suspended") == 1
        for topic in (MOVED, "orders.new"):
            refused = self.cluster.ask("n1-s1", "POST", f"/v1/topics/{topic}/messages", b"x")
            assert (refused.status, refused.json["type"]) == (503, "other-shard"), refused
        # It is no shard of its map, so it must carry out nothing that is meant for one.
        refused = self.cluster.ask("n1-s1", "DELETE", f"/v1/topics/{FAR}?shard=0")
        assert (refused.status, "is in no shard of its map" in refused.json["detail"]) == (400, True), refused
        self.far = self.put(FAR)
        self.expected |= {self.far, self.put(NEAR), self.put(MOVED)}
        until(lambda: self.worker.acked >= {self.far}, "the restored shard hands out, and takes acks")
        # Shard 0 does not know the group number of its leases yet, and must not call them lost.
        (message,) = self.cluster.receive("n1", LEFT, wait="10s")
        assert self.cluster.settle("n1", "ack", [message]) == ["acked"]

    def after(self) -> None:
        assert self.suspended
        known = self.map("n1-s1")
        assert known == self.map()
        assert (known.shards[1].group, known.shards[1].former) == (129, (1,))
        self.expected.add(self.put(FAR, Idempotency_Key="made after the backup"))
        for front in ("n3", "n3-s1"):
            new = {name: known.owner(name) for name in (f"{front}-{n}" for n in range(8))}
            assert set(new.values()) == {0, 1}
            for name, owner in new.items():
                self.cluster.publish(front, name, query="?delay=1h")
                assert self.cluster.ask(front, "GET", f"/v1/topics/{name}").headers["hadelay-shard"] == str(owner)
        until(lambda: self.worker.acked >= self.expected, "all messages come")
        self.worker.over.set()
        self.worker.join(30)
        assert set(self.worker.given) == self.expected
        assert {message: given for message, given in self.worker.given.items() if len(given) > 1} == {}
        names = [
            set(self.cluster.ask(node, "GET", "/v1/shards/names").json["topics"]) for node in ("n1", "n1-s1")
        ]  # fmt: skip
        assert names[0] & names[1] == set()
        assert {NEAR, MOVED} <= names[0]
        assert FAR in names[1]


@pytest.fixture
def drill(tmp_path: Path) -> Iterator[Drill]:
    with Cluster(tmp_path / "shards", shards=2) as cluster:
        found = Drill(tmp_path, cluster)
        yield found
        found.worker.over.set()


def test_a_lost_shard_is_restored_by_the_commands_of_the_page(drill: Drill) -> None:
    drill.before()
    drill.run(PAGE.read_text().partition(RESTORE)[2])
    drill.after()
