from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import pytest
import yarl

from hadelay.http.app import HttpServer
from hadelay.settings.node import HttpConfig
from tests.http.memory_service import MemoryService

MAX_DELAY_MS = 730 * 86_400_000


@dataclass
class Answer:
    status: int
    headers: Any
    body: bytes
    json: Any


@dataclass
class Node:
    service: MemoryService
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


async def until(condition: Callable[[], bool]) -> None:
    """Lets the loop run until it is so; a test that waits in vain ends by its timeout."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


Make = Callable[..., Awaitable[Node]]


@pytest.fixture
async def make_node() -> AsyncIterator[Make]:
    nodes: list[Node] = []

    async def make(**config: Any) -> Node:
        service = MemoryService()
        server = HttpServer(service, HttpConfig(**{"listen": "127.0.0.1:0", "hosts": ["x"]} | config), MAX_DELAY_MS)
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


@pytest.fixture
async def node(make_node: Make) -> Node:
    return await make_node()
