"""A client that learns the address of the shard that owns a topic goes there itself."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hadelay.client import AsyncClient
from hadelay.errors import Conflict, NotFound
from tests.http.conftest import HERE, THERE, Node


def forwarded(front: Node) -> int:
    return front.server.forwarder.counts["answered"]


async def test_only_the_first_request_is_forwarded(shards: tuple[Node, Node]) -> None:
    front, owner = shards
    async with AsyncClient(front.url) as client:
        for topic in (THERE, HERE, THERE, THERE):
            await client.put(topic, b"x", delay="1h")
        assert forwarded(front) == 1
        assert client._transport.direct == {THERE: owner.url}
    assert [draft.topic for draft in owner.service.published] == [THERE] * 3
    assert [draft.topic for draft in front.service.published] == [HERE]


async def test_an_owner_that_is_gone_is_asked_through_the_front(shards: tuple[Node, Node]) -> None:
    front, owner = shards
    async with AsyncClient(front.url) as client:
        client._transport.direct[HERE] = owner.url
        await owner.server.stop(0)
        await client.put(HERE, b"x", delay="1h")
        transport = client._transport
        assert not transport.direct
        transport._learn(f"/v1/topics/{THERE}", front.url, {"Hadelay-Direct": owner.url})
        assert not transport.direct  # not before a while
        assert transport._follows(front.url, f"{front.url}/v1/receive", owner.url), "receives follow redirects there"
    assert len(front.service.published) == 1


async def test_an_address_with_another_server_is_given_up(shards: tuple[Node, Node]) -> None:
    front, _ = shards
    seen = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, AsyncClient(front.url) as client:
        client._transport.direct[HERE] = f"http://127.0.0.1:{port}"
        await client.put(HERE, b"x", delay="1h")
        await client.put(HERE, b"y", delay="1h")
        assert len(seen) == 1
        assert not client._transport.direct
    assert len(front.service.published) == 2


async def test_a_refusal_of_the_owner_is_final(shards: tuple[Node, Node]) -> None:
    front, owner = shards
    async with AsyncClient(front.url) as client:
        await client.put(THERE, b"x", delay="1h")
        with pytest.raises((NotFound, Conflict)):
            await client.get(topic=THERE, key="none")
        assert client._transport.direct == {THERE: owner.url}


async def test_a_refusal_teaches_the_address_too(shards: tuple[Node, Node]) -> None:
    front, owner = shards
    async with AsyncClient(front.url) as client:
        with pytest.raises((NotFound, Conflict)):
            await client.get(topic=THERE, key="none")
        assert client._transport.direct == {THERE: owner.url}


async def test_a_slow_owner_has_all_of_the_time() -> None:
    """Half of it would cut off long polls, and send a purge twice."""
    asked = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(2)
        writer.write(b"HTTP/1.1 204 No Content\r\nHadelay-Node: n1\r\nHadelay-Leader: n1\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, AsyncClient("http://127.0.0.1:1", timeout=3.9) as client:
        client._transport.direct["t"] = f"http://127.0.0.1:{port}"
        await client._transport.request("DELETE", "/v1/topics/t", lambda answer: answer.status)
        assert asked == 1
        assert client._transport.direct


@pytest.mark.parametrize(
    ("base", "headers", "left"),
    [
        ("https://a", {"Hadelay-Direct": "http://b"}, {}),
        ("https://a", {"Hadelay-Direct": "https://b"}, {"t": "https://b"}),
        ("http://a", {"Hadelay-Direct": "http://b/path"}, {}),
        ("http://a", {"Hadelay-Direct": "javascript:b"}, {}),
    ],
)
async def test_addresses_are_taken_unless_they_lose_encryption(
    base: str, headers: dict[str, str], left: dict[str, Any]
) -> None:
    async with AsyncClient("http://127.0.0.1:1") as client:
        client._transport._learn("/v1/topics/t/messages?delay=1s", base, headers)
        client._transport._learn("/v1/messages:batch", base, headers)
        assert client._transport.direct == left


async def test_a_node_that_does_not_lead_any_more_is_forgotten() -> None:
    async with AsyncClient("http://127.0.0.1:1") as client:
        transport = client._transport
        transport.direct["t"] = "http://b"
        transport._learn("/v1/topics/t", "http://b", {"Hadelay-Leader": "n1", "Hadelay-Node": "n1"})
        assert transport.direct
        transport._learn("/v1/topics/t", "http://b", {"Hadelay-Leader": "n2", "Hadelay-Node": "n1"})
        assert not transport.direct


async def test_the_memory_is_bounded() -> None:
    async with AsyncClient("http://127.0.0.1:1") as client:
        for n in range(3_000):
            client._transport._learn(f"/v1/topics/t{n}", "http://a", {"Hadelay-Direct": "http://b"})
        assert len(client._transport.direct) <= 1_024
