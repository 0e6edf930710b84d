"""What somebody without a token can take up: little, and not for long."""

from __future__ import annotations

import asyncio
import errno
import os
import ssl
from contextlib import suppress
from typing import Any

import pytest

from hadelay.http import listener
from hadelay.http.app import HttpServer
from hadelay.settings.node import HttpConfig
from tests.http.conftest import Make, make_node, read_answer, unasked, until
from tests.http.served import serve
from tests.security.conftest import Pki
from tests.security.test_node_link import on_uvloop

__all__ = ["make_node"]

GET = b"GET /livez HTTP/1.1\r\nHost: x\r\n"


def sockets() -> int:
    """That this process has open."""
    links = (os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd"))
    return sum(os.readlink(link).startswith("socket:") for link in links if os.path.lexists(link))


async def test_connections_are_counted(make_node: Make) -> None:
    node = await make_node(max_connections=3)
    inside = [await node.raw() for _ in range(3)]
    for reader, writer in inside:
        writer.write(GET + b"\r\n")
        assert (await read_answer(reader))[0] == 200
    reader, writer = await node.raw()
    writer.write(b"POST /v1/topics/t/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx")
    status, headers, body = await read_answer(reader)
    assert (status, headers["connection"]) == (503, "close")
    assert b"max_connections" in body
    assert await reader.read() == b""
    assert not node.service.published
    inside[0][1].close()
    while node.server.connections > 2:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    reader, writer = await node.raw()
    writer.write(GET + b"\r\n")
    assert (await read_answer(reader))[0] == 200


async def test_health_is_answered_however_many_connections_there_are(
    make_node: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an orchestrator asks: on a new connection, once."""
    monkeypatch.setattr(listener, "_SPARE_S", 0.5)
    node = await make_node(max_connections=3)
    silent = [await node.raw() for _ in range(200)]
    for path, expected in ((b"/livez", 200), (b"/readyz?verbose", 200), (b"/livez?what", 400), (b"/v1/names", 503)):
        reader, writer = await node.raw()
        writer.write(b"GET " + path + b" HTTP/1.1\r\nHo")
        await asyncio.sleep(0.01)
        writer.write(b"st: x\r\n\r\n")
        status, headers, _ = await asyncio.wait_for(read_answer(reader), 10)
        assert (status, headers["connection"]) == (expected, "close")
        assert await reader.read() == b""
    assert node.server.connections == 3
    # Those that say nothing do not stay.
    for reader, _ in silent[3:]:
        with suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 10) == b""
    await until(lambda: not node.server._listeners[0]._spares)


async def test_a_spare_goes_to_whoever_has_few(make_node: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_SPARES", 4)
    node = await make_node(max_connections=1)
    await node.raw()
    reader, writer = await node.raw("127.0.0.2")
    await until(lambda: len(node.server._listeners[0]._spares) == 1)
    for _ in range(40):
        await node.raw("127.0.0.3")
    writer.write(GET + b"\r\n")
    assert (await asyncio.wait_for(read_answer(reader), 10))[0] == 200


async def test_connections_of_one_address(make_node: Make) -> None:
    node = await make_node(max_connections_per_address=2)
    opened = []
    for address, expected in (("127.0.0.2", 200), ("127.0.0.2", 200), ("127.0.0.2", 503), ("127.0.0.3", 200)):
        reader, writer = await node.raw(address)
        writer.write(b"GET /v1/names HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await read_answer(reader))[0] == expected
        opened.append(writer)
    opened[0].close()
    await until(lambda: node.server.connections == 2)
    reader, writer = await node.raw("127.0.0.2")
    writer.write(b"GET /v1/names HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await read_answer(reader))[0] == 200


@on_uvloop
async def test_handshakes_are_connections(pki: Pki) -> None:
    """Who begins TLS and says no more takes a descriptor too; health is answered under TLS as well."""
    cert, key, ca = pki.files("n1")
    config = HttpConfig(listen="127.0.0.1:0", hosts=["x"], tls_cert=cert, tls_key=key, tls_ca=ca, max_connections=5)
    service = await serve(config)
    server = HttpServer(service, config, 1 << 40)
    host, port = (await server.start()).split(":")
    before = sockets()
    silent = [await asyncio.open_connection(host, int(port)) for _ in range(80)]
    await until(lambda: server.connections == 5)
    context = ssl.create_default_context(cafile=ca)
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    writer.write(GET + b"\r\n")
    assert (await asyncio.wait_for(read_answer(reader), 10))[0] == 200
    assert server.connections == 5
    for _, closing in (*silent, (reader, writer)):
        closing.close()
    await until(lambda: not server.connections and sockets() == before)
    await server.stop(1)
    service.close()


@pytest.mark.parametrize(
    "head",
    [GET + b"X-Long: " + b"a" * 9_000 + b"\r\n\r\n", GET + b"X-Many: a\r\n" * 200 + b"\r\n", b"GET /" + b"a" * 9_000],
    ids=["long", "many", "target"],
)
async def test_heads_that_are_too_large(make_node: Make, head: bytes) -> None:
    node = await make_node()
    reader, writer = await node.raw()
    writer.write(head)
    status, _, _ = await asyncio.wait_for(read_answer(reader), 10)
    assert status == 400
    assert await asyncio.wait_for(reader.read(), 10) == b""


async def test_a_head_that_trickles_is_given_up(make_node: Make) -> None:
    node = await make_node(idle_timeout_ms=100)
    reader, writer = await node.raw()
    gone = asyncio.create_task(reader.read())
    for byte in GET * 1_000:
        if gone.done():
            break
        writer.write(bytes([byte]))
        await asyncio.sleep(0.005)
    with suppress(ConnectionResetError):
        assert await asyncio.wait_for(gone, 10) == b""


async def test_bodies_on_their_way_in_are_counted_together(make_node: Make) -> None:
    """What has arrived counts, not what was announced; it counts until the answer, and no longer."""
    node = await make_node(max_reading_bytes=3_000)
    head = b"POST /v1/topics/t/messages HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    clients = [await node.raw() for _ in range(3)]
    for _, writer in clients[:2]:
        writer.write(head % 2_000)
        writer.write(b"x" * 900)
    await until(lambda: node.server.budget.taken == 1_800)
    reader, writer = clients[2]
    writer.write(head % 2_000)
    status, headers, body = await read_answer(reader)
    assert (status, headers["retry-after"]) == (503, "1")
    assert b"too many large bodies" in body
    assert b'"outcome_known":true' in body
    clients[0][1].write(b"x" * 1_100)
    assert (await read_answer(clients[0][0]))[0] == 201
    await until(lambda: node.server.budget.taken == 900)
    clients[1][1].close()
    await until(lambda: node.server.budget.taken == 0)
    assert (await node.ask("POST", "/v1/topics/t/messages", b"x" * 4_000)).status == 201, "alone it always has room"


@on_uvloop
async def test_a_handshake_that_does_not_go_on(pki: Pki, monkeypatch: pytest.MonkeyPatch) -> None:
    cert, key, ca = pki.files("n1")
    monkeypatch.setattr(listener, "_HANDSHAKE_S", 0.1)
    server = unasked(HttpConfig(listen="127.0.0.1:0", hosts=["x"], tls_cert=cert, tls_key=key, tls_ca=ca))
    host, port = (await server.start()).split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"\x16\x03\x01")
    with suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()
    await server.stop(1)


async def test_accepting_goes_on_when_there_are_descriptors_again(
    make_node: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever waits is accepted then, and the log has one line about it."""
    monkeypatch.setattr(listener, "_RETRY_S", 0.005)
    node = await make_node()
    there = node.server._listeners[0]
    (real,) = there._listening
    failures = 0

    class Full:
        """Has no descriptor left for the next connection."""

        def accept(self) -> Any:
            nonlocal failures
            failures += 1
            if failures <= 20:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return real.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    full: Any = Full()
    loop = asyncio.get_running_loop()
    loop.remove_reader(real)
    there._listening = [full]
    loop.add_reader(full, there._accept, full)
    assert (await asyncio.wait_for(node.ask("GET", "/livez"), 10)).status == 200
    assert failures > 20
    assert [record.message for record in caplog.records].count("accept_failed") == 1


@on_uvloop
async def test_a_handshake_does_not_outlive_the_server(pki: Pki) -> None:
    """Its first request would come to a node that has stopped."""
    cert, key, ca = pki.files("n1")
    config = HttpConfig(listen="127.0.0.1:0", hosts=["x"], tls_cert=cert, tls_key=key, tls_ca=ca)
    server = unasked(config)
    host, port = (await server.start()).split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    await until(lambda: server.connections == 1)
    await server.stop(1)
    with suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), 5) == b""
    assert server.connections == 0
    writer.close()
