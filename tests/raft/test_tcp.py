"""The node link over real sockets: who is let in, what is refused, limits; three nodes that elect, commit and go on."""

from __future__ import annotations

import asyncio
import pickle
import random
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from hadelay.errors import ConfigError
from hadelay.platform import strangers
from hadelay.platform.disk import Disk
from hadelay.platform.hello import HELLO, packed
from hadelay.platform.network import MAX_FRAME
from hadelay.platform.runtime import Runtime
from hadelay.platform.tcp import AsyncioNetwork
from hadelay.raft import messages
from hadelay.raft.journal import Journal, JournalConfig
from hadelay.raft.node import RaftNode
from hadelay.raft.ports import RaftTuning
from hadelay.storage.identity import Identity
from tests.raft.rig import Machine, founders


class Inbox:
    def __init__(self) -> None:
        self.up: list[str] = []
        self.down: list[tuple[str, bool]] = []
        self.frames: list[tuple[str, bytes]] = []

    def link_up(self, peer: str) -> None:
        self.up.append(peer)

    def link_down(self, peer: str, reset: bool) -> None:
        self.down.append((peer, reset))

    def frame(self, peer: str, data: bytes) -> None:
        self.frames.append((peer, data))


def free_addresses(count: int) -> list[str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{sock.getsockname()[1]}" for sock in sockets]
    for sock in sockets:
        sock.close()
    return addresses


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def make(name: str, peers: dict[str, str], runtime: Runtime, **changes: object) -> AsyncioNetwork:
    identity = {"cluster_id": "test", "group": 0} | changes
    return AsyncioNetwork(name, peers[name], peers, runtime=runtime, **identity)


@asynccontextmanager
async def pair(**changes: object) -> AsyncIterator[tuple[AsyncioNetwork, Inbox, AsyncioNetwork, Inbox]]:
    """n1 and n2 (which dials); `changes` are n2's."""
    runtime = Runtime(asyncio.get_running_loop())
    peers = dict(zip(("n1", "n2"), free_addresses(2), strict=True))
    one, two = make("n1", peers, runtime), make("n2", peers, runtime, **changes)
    inboxes = Inbox(), Inbox()
    one.start(inboxes[0])
    two.start(inboxes[1])
    try:
        yield one, inboxes[0], two, inboxes[1]
    finally:
        one.close()
        two.close()
        await asyncio.sleep(0.01)
        runtime.close()


async def test_frames_arrive_whole_and_in_order():
    async with pair() as (one, _, two, inbox):
        await until(lambda: inbox.up)
        rng = random.Random(1)
        sent = []
        for size in (1, 2, 3, 100, 65_536, 300_000, 1 << 20, 5):
            parts = [rng.randbytes(size), b"", rng.randbytes(size // 3)]
            sent.append(b"".join(parts))
            assert one.send("n2", parts)
        await until(lambda: len(inbox.frames) == len(sent))
        assert inbox.frames == [("n1", frame) for frame in sent]
        assert two.send("n1", b"one buffer")
        await until(lambda: one.buffered("n2") == 0)


async def test_urgent_frames_overtake_what_waits_here(monkeypatch):
    async with pair() as (one, _, _, inbox):
        await until(lambda: inbox.up)
        for _ in range(20):
            assert one.send("n2", b"x" * (1 << 20))
        assert one.send("n2", b"urgent", urgent=True)
        assert one.buffered("n2") > 1 << 20
        await until(lambda: len(inbox.frames) == 21)
        assert [frame for _, frame in inbox.frames].index(b"urgent") < 5


async def test_frames_that_cannot_be_queued_are_refused():
    async with pair() as (one, _, _, inbox):
        await until(lambda: inbox.up)
        assert not one.send("n2", [bytes(MAX_FRAME), b"x"])
        assert not one.send("n3", b"nobody")
        accepted = 0
        while one.send("n2", bytes(4 << 20)):
            accepted += 1
            assert accepted < 20
        assert one.send("n2", b"urgent ones always fit", urgent=True)


async def test_both_ends_learn_of_the_end_and_dial_again():
    async with pair() as (one, left, _, right):
        await until(lambda: left.up and right.up)
        one.disconnect("n2")
        await until(lambda: len(left.up) == 2 and len(right.up) == 2)
        assert [peer for peer, _ in left.down + right.down] == ["n2", "n1"]
        assert right.down == [("n1", True)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cluster_id": "prod"}, "n1 is in cluster 'test', you are in 'prod'"),
        ({"group": 7}, "n1 is in group 0, you are in 7"),
    ],
)
async def test_strangers_are_refused_in_words(changes, words, caplog):
    async with pair(**changes) as (_, left, _, right):
        await until(lambda: any(getattr(record, "reason", "") == words for record in caplog.records))
        assert not left.up
        assert not right.up


async def _talk(address: str, data: bytes) -> bytes:
    """What the node answers to a stranger who sends `data`, until it hangs up."""
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    received = b""
    try:
        async with asyncio.timeout(3):
            while chunk := await reader.read(1 << 16):
                received += chunk
    except (ConnectionError, TimeoutError):
        pass
    writer.close()
    return received


def _hello(*fields: object) -> bytes:
    return packed(messages.encode(HELLO, *fields))


async def test_nonsense_from_a_stranger_ends_the_connection(monkeypatch):
    monkeypatch.setattr(strangers, "HELLO_TIMEOUT_S", 0.2)
    async with pair() as (one, left, _, _):
        await until(lambda: left.up)
        before = list(left.frames)
        evil = pickle.dumps(print)
        for data in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"\xff\xff\xff\xff" + bytes(100),
            bytes(4),
            packed(evil),
            packed(evil)[:-1] + b"?",
            b"\x05\x00\x00\x00\x01",
            _hello("hadelay-link", 1, "test", 0, "n9", 1),
            _hello("hadelay-link", 1, "test", 0, "n1", 1),
            _hello("hadelay-link", 9, "test", 0, "n2", 1),
            _hello("hadelay-link", 1, "test"),
        ):
            answer = await _talk(one.listen, data)
            assert b"hadelay-link" in answer, "it says who it is, and hangs up"
        assert await _talk(one.listen, b"") == b"", "whoever says nothing costs nothing"
        assert left.frames == before
        assert left.up == ["n2"], "and the link that is there is not disturbed"
    refused = await _refusal("n9")
    assert "n1 has no member 'n9'" in refused


async def _refusal(name: str) -> str:
    async with pair() as (one, left, _, _):
        await until(lambda: left.up)
        answer = await _talk(one.listen, _hello("hadelay-link", 1, "test", 0, name, 1))
        return answer.decode(errors="replace")


async def test_a_port_in_use_is_a_configuration_error():
    runtime = Runtime(asyncio.get_running_loop())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        network = make("n1", {"n1": address, "n2": "127.0.0.1:1"}, runtime)
        with pytest.raises(ConfigError, match=f"raft.listen: cannot listen on {address}"):
            network.start(Inbox())
    runtime.close()


class Three:
    """Three nodes on one loop, over real sockets and a real disk."""

    def __init__(self, directory: Path) -> None:
        self.runtime = Runtime(asyncio.get_running_loop())
        self.directory = directory
        self.addresses = dict(zip(("n1", "n2", "n3"), free_addresses(3), strict=True))
        self.nodes: dict[str, RaftNode] = {}
        self.machines: dict[str, Machine] = {}
        self.fatal: list[BaseException] = []

    def start(self, name: str) -> RaftNode:
        disk, path = Disk(), str(self.directory / name)
        owner, config = Identity("test", 0, name), JournalConfig(segment_bytes=9 << 20)
        if Journal.exists(disk, path):
            journal = Journal.open(disk, path, self.runtime, owner, config)
        else:
            journal = Journal.create(disk, path, self.runtime, owner, config)
        machine = self.machines[name] = Machine()
        network = make(name, self.addresses, self.runtime)
        node = self.nodes[name] = RaftNode(
            journal, network, self.runtime, machine, RaftTuning(),
            members=founders(*self.addresses), on_fatal=self.fatal.append,
        )  # fmt: skip
        node.start()
        return node

    def stop(self, name: str) -> None:
        self.nodes.pop(name).stop()

    async def leader(self) -> RaftNode:
        await until(lambda: any(n.is_leader and n.term in self.machines[n.name].leads for n in self.nodes.values()))
        return next(node for node in self.nodes.values() if node.is_leader)

    async def propose(self, command: bytes) -> object:
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        (await self.leader()).propose(command, lambda result, error: future.set_result(error or result))
        return await asyncio.wait_for(future, 10)

    async def close(self) -> None:
        for name in list(self.nodes):
            self.stop(name)
        await asyncio.sleep(0.02)
        self.runtime.close()
        assert not self.fatal


async def test_three_nodes_elect_commit_fail_over_and_come_back(tmp_path):
    three = Three(tmp_path)
    for name in three.addresses:
        three.start(name)
    commands = [b"%d " % n * (n * 40 + 1) for n in range(100)] + [bytes(4 << 20)]
    for command in commands:
        assert isinstance(await three.propose(command), int)
    dead = (await three.leader()).name
    started = three.runtime.monotonic()
    three.stop(dead)
    assert isinstance(await three.propose(b"after the failover"), int)
    assert three.runtime.monotonic() - started < 3.0
    three.start(dead)
    await until(lambda: all(len(machine.items) == 102 for machine in three.machines.values()))
    assert len({tuple(machine.items) for machine in three.machines.values()}) == 1
    reads: list[object] = []
    three.nodes[dead].read_index(reads.append)
    await until(lambda: reads)
    assert reads == [None]
    await three.close()
