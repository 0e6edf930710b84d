"""hadelay through its own client: three nodes, commit mode, batches of 100."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

from bench.cluster import Cluster, Node
from bench.delays.contender import Client, Contender, Message, Received
from bench.delays.server import tree

TOPIC = "bench"


class Hadelay(Contender):
    """A cluster of three on this machine; its leader is the server that is killed."""

    durability = "synced to disk by two of three nodes"

    def start(self) -> None:
        self._cluster = Cluster.start(self.directory / "cluster", self.port)
        self._dead: Node | None = None

    def stop(self) -> None:
        self._cluster.stop()

    def kill(self) -> list[int]:
        self._dead = self._cluster.leader()
        self._cluster.end(self._dead, signal.SIGKILL)
        return [self._dead.pid]

    def restart(self) -> None:
        assert self._dead is not None
        self._cluster.restart(self._dead)

    def servers(self) -> list[int]:
        return [pid for node in self._cluster.nodes for pid in tree(node.pid)]

    def addresses(self) -> list[str]:
        return [f"127.0.0.1:{self.port + i}" for i in range(3)]


class HadelayClient(Hadelay):
    name = "hadelay"
    setup = "`hadelay dev --nodes 3`, dispatch.sync commit; Python client: put_many, receive with a lease, ack"
    cancels = "`cancel(topic, key)`, with a definite answer"
    notes = "three nodes share the machine with everything else; the others run one server"

    def connect(self) -> Client:
        return _Client(self)


class _Client(Client):
    def __init__(self, contender: Hadelay) -> None:
        from hadelay.client import Client as Library

        self._library = Library(contender.addresses())
        self._lease_s = contender.visibility_s

    def publish(self, messages: Sequence[Message]) -> None:
        from hadelay.client import Put

        puts = [Put(topic=TOPIC, body=m.body(), at=m.due_ms, key=m.id) for m in messages]
        for result in self._library.put_many(puts):
            if isinstance(result, Exception):
                raise result

    def receive(self, most: int, wait_s: float) -> list[Received]:
        got = self._library.receive(TOPIC, max=most, wait=wait_s, lease=self._lease_s)
        return [Received(_text(message.body).rstrip(), message) for message in got]

    def ack(self, received: Sequence[Received]) -> None:
        self._library.ack([one.token for one in received])

    def cancel(self, ids: Sequence[str]) -> int:
        return sum(self._library.cancel(topic=TOPIC, key=id) == "cancelled" for id in ids)

    def close(self) -> None:
        self._library.close()


def _text(body: Any) -> str:
    return body.decode() if isinstance(body, bytes) else str(body)
