"""The unmodified library between queues in memory: the control group. Its clock is ours, its messages move by hand."""

from __future__ import annotations

import pickle
from collections import defaultdict, deque
from typing import Any

import pysyncobj.syncobj as library
import pytest
from pysyncobj import SyncObj, SyncObjConf
from pysyncobj.node import Node
from pysyncobj.transport import Transport


class PlainTransport(Transport):
    def __init__(self, cluster: PlainCluster, name: str) -> None:
        super().__init__(None, None, None)
        self.cluster, self.name = cluster, name

    def send(self, node: Node, message: Any) -> bool:
        if (self.name, node.id) in self.cluster.links:
            self.cluster.queues[self.name, node.id].append(pickle.dumps(message))
            return True
        return False

    def destroy(self) -> None:
        pass


class PlainNode(SyncObj):
    def __init__(self, cluster: PlainCluster, name: str, names: list[str], **conf: Any) -> None:
        self.applied: list[Any] = []
        self.on_apply = lambda value: None
        self.transport = PlainTransport(cluster, name)
        options = {"raftMinTimeout": 0.4, "raftMaxTimeout": 1.4, "appendEntriesUseBatch": True} | conf
        super().__init__(
            Node(name),
            [Node(n) for n in names if n != name],
            SyncObjConf(autoTick=False, **options),
            transport=self.transport,
        )

    def _SyncObj__doApplyCommand(self, command: bytes) -> Any:  # values instead of pickled method calls
        if command[:1] == b"\0":
            self.on_apply(command[1:])
            self.applied.append(command[1:])
            return command[1:]
        return None

    def propose(self, command: bytes, callback: Any = None) -> None:
        self._applyCommand(b"\0" + command, callback)

    def get(self, private: str) -> Any:
        return getattr(self, f"_SyncObj__{private}")

    def log(self) -> list[tuple[bytes, int, int]]:
        return list(self.get("raftLog")[:])

    def receive(self, peer: str, message: dict[str, Any]) -> None:
        self.transport._onMessageReceived(Node(peer), message)


class PlainCluster:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, **conf: Any) -> None:
        self.now = 100.0
        monkeypatch.setattr(library, "monotonicTime", lambda: self.now)
        self.names = [f"n{n + 1}" for n in range(count)]
        self.links: set[tuple[str, str]] = set()
        self.queues: dict[tuple[str, str], deque[bytes]] = defaultdict(deque)
        self.nodes = {name: PlainNode(self, name, self.names, **conf) for name in self.names}
        for a in self.names:
            for b in self.names:
                if a < b:
                    self.connect(a, b)

    def connect(self, a: str, b: str) -> None:
        for one, two in ((a, b), (b, a)):
            self.links.add((one, two))
            self.nodes[one].transport._onNodeConnected(Node(two))

    def cut(self, a: str, b: str) -> None:
        """Silently: both still believe to be connected."""
        self.links -= {(a, b), (b, a)}
        self.queues[a, b].clear()
        self.queues[b, a].clear()

    def deliver(self) -> None:
        moved = True
        while moved:
            moved = False
            for (a, b), queue in list(self.queues.items()):
                while queue:
                    self.nodes[b].receive(a, pickle.loads(queue.popleft()))
                    moved = True

    def run(self, seconds: float, step: float = 0.05) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += step
            for node in self.nodes.values():
                node.doTick(0.0)
            self.deliver()

    def elect(self, name: str) -> PlainNode:
        node = self.nodes[name]
        node._SyncObj__raftElectionDeadline = 0
        for _ in range(4):
            self.now += 0.01
            node.doTick(0.0)
            self.deliver()
        assert node._isLeader()
        return node
