from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import pytest
import yarl

from hadelay.http.app import HttpServer
from hadelay.settings.node import HttpConfig
from hadelay.settings.shardmap import ALONE, Rule, Shard, ShardMap, Shards
from tests.http.served import Served, serve

MAX_DELAY_MS = 730 * 86_400_000


@dataclass
class Answer:
    status: int
    headers: Any
    body: bytes
    json: Any


@dataclass
class Node:
    service: Served
    server: HttpServer
    url: str
    session: aiohttp.ClientSession
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def ask(self, method: str, path: str, data: Any = None, /, **headers: str) -> Answer:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        if isinstance(data, dict | list):
            data = msgspec.json.encode(data)
            names.setdefault("Content-Type", "application/json")
        if isinstance(data, bytes) and len(data) >= 1 << 20:
            data = io.BytesIO(data)  # aiohttp warns about large bytes
        async with self.session.request(
            method, yarl.URL(self.url + path, encoded=True), data=data, headers=names, allow_redirects=False
        ) as answer:
            body = await answer.read()
            document = msgspec.json.decode(body) if body and "json" in answer.content_type else None
            return Answer(answer.status, answer.headers, body, document)

    async def raw(self, local: str = "127.0.0.1") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """local: the address to connect from, of loopback."""
        host, port = self.server.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port), local_addr=(local, 0))
        self.writers.append(writer)
        return reader, writer


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    lines = head.split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
    return int(lines[0].split()[1]), headers, await reader.readexactly(int(headers.get("content-length", 0)))


async def receive(node: Node, topic: str = "orders", query: Any = None, **headers: str) -> list[dict[str, Any]]:
    """The messages that a receive is answered."""
    answer = await node.ask("POST", f"/v1/topics/{topic}/receive", query, **headers)
    assert answer.status == 200, answer.json
    document = answer.json if answer.json is not None else msgspec.msgpack.decode(answer.body)
    return list(document["messages"])


async def kill(node: Node, topic: str = "orders", reason: str = "no") -> str:
    """Let the topic's next message die; returns its id."""
    (got,) = await receive(node, topic, {"max": 1})
    nack = {"leases": [got["lease"]], "dead": True, "reason": reason}
    answer = await node.ask("POST", "/v1/leases:nack", nack)
    assert answer.json["results"][0]["outcome"] == "nacked"
    return str(got["id"])


async def state_of(node: Node, message_id: str) -> str:
    return str((await node.ask("GET", f"/v1/messages/{message_id}")).json["state"])


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until the condition holds."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def unasked(config: HttpConfig | None = None) -> HttpServer:
    """A server for what needs no node: it parses heads, and has routes."""
    ledger = SimpleNamespace(shards=ALONE, group=0)
    view = SimpleNamespace(replica=SimpleNamespace(ledger=ledger), known=ALONE, group=0)
    service: Any = SimpleNamespace(node="n1", leader_name="n1", access=SimpleNamespace(tokens={}), shards=view)
    return HttpServer(service, config or HttpConfig(listen="127.0.0.1:0", hosts=["x"]), MAX_DELAY_MS)


Make = Callable[..., Awaitable[Node]]


@pytest.fixture
async def make_node() -> AsyncIterator[Make]:
    nodes: list[Node] = []

    async def make(*, lost: bool = False, roomy: bool = False, group: int = 0, **config: Any) -> Node:
        http = HttpConfig(**{"listen": "127.0.0.1:0", "hosts": ["x"]} | config)
        service = await serve(http, lost=lost, roomy=roomy, group=group)
        server = HttpServer(service, http, MAX_DELAY_MS)
        address = await server.start()
        session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        nodes.append(Node(service, server, f"http://{address}", session))
        return nodes[-1]

    yield make
    for node in nodes:
        await node.session.close()
        for writer in node.writers:
            writer.close()
        await node.server.stop(1)
        node.service.close()


@pytest.fixture
async def roomy(make_node: Make) -> Node:
    """A node with room for large entries."""
    return await make_node(roomy=True)


@pytest.fixture
async def lost(make_node: Make) -> Node:
    """A node that does not reach the other two members."""
    return await make_node(lost=True, no_leader_wait_ms=20)


@pytest.fixture
async def node(make_node: Make) -> Node:
    return await make_node()


# --- two shards

#: Topics of the first shard, and of the second.
HERE, THERE = "orders", "far.orders"


def map_of(*nodes: Node | str, version: int = 17) -> ShardMap:
    """A map of shards 0, 1, …, each of one node. Topics that begin with "far." belong to shard 1."""
    urls = [node if isinstance(node, str) else node.url for node in nodes]
    shards = {n: Shard(n, (7,) if n else (), {"n1": url}) for n, url in enumerate(urls)}
    return ShardMap(version, shards, (Rule("far.*", (1,)), Rule("*", (0,))))


def give(node: Node, known: ShardMap | None) -> None:
    node.service.raft_node.ledger.shards = ALONE if known is None else Shards(known)


@pytest.fixture
async def shards(make_node: Make) -> tuple[Node, Node]:
    """A node of shard 0 and one of shard 1, which know the map."""
    one, other = await make_node(), await make_node(group=1)
    for node in (one, other):
        give(node, map_of(one, other))
    return one, other


async def publish(node: Node, topic: str, body: bytes = b"x", query: str = "", **headers: str) -> Answer:
    return await node.ask("POST", f"/v1/topics/{topic}/messages{query}", body, **headers)
