"""Two groups in one process: a group is an object, and nothing of one is seen by the other.

Nodes without their HTTP, on real disks and real sockets: three per group, all six in this one process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from chaos.freeports import free_ports
from hadelay.api.service import ReceiveRequest
from hadelay.model import Draft, decode_id, unpack_id
from hadelay.platform.disk import Disk
from hadelay.platform.runtime import Runtime
from hadelay.process import node_link
from hadelay.server.node import Node
from hadelay.server.recover import open_node
from hadelay.server.service.node import NodeService
from hadelay.settings.node import ClusterConfig, Config, NodeConfig, RaftSettings, RetentionConfig

NAMES = ("n1", "n2", "n3")


def raised(error: BaseException) -> None:
    raise error


@asynccontextmanager
async def groups(directory: Path, numbers: tuple[int, ...]) -> AsyncIterator[dict[int, list[Node]]]:
    """{group: its three nodes}, both groups of a node in the same directories."""
    base = free_ports(3 * len(numbers))
    found: dict[int, list[Node]] = {}
    runtimes = []
    try:
        for k, group in enumerate(numbers):
            peers = {name: f"127.0.0.1:{base + 3 * k + i}" for i, name in enumerate(NAMES)}
            for name in NAMES:
                config = Config(
                    node=NodeConfig(name=name, data_dir=str(directory / name)),
                    cluster=ClusterConfig(id="two", init=True, group=group),
                    raft=RaftSettings(listen=peers[name], peers=peers, segment_bytes=8 << 20),
                    retention=RetentionConfig(),
                )
                runtimes.append(runtime := Runtime(asyncio.get_running_loop()))
                network = node_link(config, runtime)
                node = open_node(config, Disk(), network, runtime, raised)
                found.setdefault(group, []).append(node)
                node.start()
        yield found
    finally:
        for nodes in found.values():
            for node in nodes:
                node.stop()
        for runtime in runtimes:
            runtime.close()


async def leader(nodes: list[Node]) -> Node:
    async with asyncio.timeout(30):
        while not (leading := [node for node in nodes if node.leading]):  # noqa: ASYNC110 (told by no event)
            await asyncio.sleep(0.01)
    return leading[0]


async def publish(node: Node, topic: str, count: int, delay_ms: int = 0) -> list[int]:
    future: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
    drafts = [Draft(topic, delay_ms, True, 0, 0, b"", f"{topic}-{i}".encode()) for i in range(count)]

    def done(receipts: Any, error: Exception | None) -> None:
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(receipts.ids)

    node.publishing.publish(drafts, None, done)
    return await asyncio.wait_for(future, 15)


async def receive(node: Node, topic: str, count: int) -> list[Any]:
    service, found = NodeService(node), []
    async with asyncio.timeout(20):
        while len(found) < count:
            ask = ReceiveRequest([topic], "c", f"r{len(found)}".encode(), 100, 2_000, 60_000)
            handed = await service.consume.receive(ask)
            found += handed.messages
            await service.consume.settle("ack", [message.lease for message in handed.messages], None)
    return found


async def test_two_groups_in_one_process(tmp_path: Path) -> None:
    async with groups(tmp_path, (0, 7)) as found:
        leaders = {group: await leader(nodes) for group, nodes in found.items()}
        # The same topics at the same time in both: numbers, names, hours and leases are each group's own.
        ids: dict[int, list[int]] = {}
        ids[0], ids[7] = await asyncio.gather(publish(found[0][0], "orders", 50), publish(found[7][1], "orders", 30))
        await publish(found[7][2], "only", 5, 3_600_000)
        for group, expected in ids.items():
            assert {unpack_id(i)[0] for i in expected} == {group}
            got = await receive(leaders[group], "orders", len(expected))
            assert sorted(decode_id(message.id) for message in got) == sorted(expected)
        assert leaders[0].ledger.topic("only") is None
        # A leader of one steps down; the other's does not notice.
        term = leaders[7].raft.term
        leaders[0].stop()
        rest = [node for node in found[0] if node is not leaders[0]]
        new = await leader(rest)
        assert len(await receive(new, "orders", 0)) == 0
        later = await publish(rest[0], "orders", 10)
        assert {decode_id(m.id) for m in await receive(await leader(rest), "orders", 10)} == set(later)
        assert (leaders[7].raft.term, bool(leaders[7].leading)) == (term, True)
        for name in NAMES:
            assert {path.name for path in (tmp_path / name).glob("g*") if path.is_dir()} == {"g0", "g7"}


async def test_both_come_back(tmp_path: Path) -> None:
    async with groups(tmp_path, (1, 2)) as found:
        kept = {group: await publish(await leader(nodes), "kept", 20, 800) for group, nodes in found.items()}
    async with groups(tmp_path, (1, 2)) as found:
        for group, expected in kept.items():
            got = await receive(await leader(found[group]), "kept", len(expected))
            assert sorted(decode_id(message.id) for message in got) == sorted(expected)
