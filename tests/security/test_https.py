"""HTTPS: every way a request can take, clients, and a certificate that changes while the node serves."""

from __future__ import annotations

import asyncio
import re
import shutil
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from hadelay import AsyncClient
from hadelay.api.service import Leader
from hadelay.cli.app import OK, USAGE, run
from hadelay.client.paths import may_follow
from hadelay.errors import ConfigError, NoLeader
from hadelay.http.app import HttpServer
from hadelay.settings.node import HttpConfig
from tests.http.conftest import Make, make_node, read_answer, unasked
from tests.http.served import Served, serve
from tests.security.conftest import Pki
from tests.security.test_node_link import on_uvloop

__all__ = ["make_node"]

PUBLISH = b"POST /v1/topics/orders/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"


@asynccontextmanager
async def served(files: tuple[str, str, str]) -> AsyncIterator[tuple[HttpServer, Served, str]]:
    cert, key, ca = files
    config = HttpConfig(listen="127.0.0.1:0", hosts=["x"], tls_cert=cert, tls_key=key, tls_ca=ca)
    service = await serve(config, roomy=True)
    server = HttpServer(service, config, 1 << 40)
    address = await server.start()
    try:
        yield server, service, f"https://{address}"
    finally:
        await server.stop(1)
        service.close()


async def dial(url: str, ca: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = url.removeprefix("https://").split(":")
    return await asyncio.open_connection(host, int(port), ssl=ssl.create_default_context(cafile=ca))


def serial(writer: asyncio.StreamWriter) -> str:
    return str(writer.get_extra_info("peercert")["serialNumber"])


@on_uvloop
async def test_short_and_long_ways(pki: Pki) -> None:
    async with served(pki.files("n1")) as (server, service, url):
        reader, writer = await dial(url, pki.ca)
        writer.write(PUBLISH + PUBLISH + b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n" + PUBLISH[:-2])
        assert [(await read_answer(reader))[0] for _ in range(3)] == [201, 201, 200]
        assert any(seen.asks is not None for seen in server.heads.recent.values()), "they came the short way"
        writer.write(PUBLISH[-2:])
        assert (await read_answer(reader))[0] == 201
        large = bytes(1 << 20)
        writer.write(PUBLISH.replace(b"Length: 5", b"Length: %d" % len(large))[:-5] + large)
        assert (await read_answer(reader))[0] == 201
        assert [len(draft.body) for draft in service.published] == [5, 5, 5, 1 << 20]
        writer.close()


@on_uvloop
async def test_clients(pki: Pki, strangers: Pki) -> None:
    async with served(pki.files("n1")) as (_, _, url):
        async with AsyncClient(url, ca=pki.ca) as client:
            receipt = await client.put("orders", b"x")
            (message,) = await client.receive("orders", max=1, wait=5)
            assert message.id == receipt.id
        async with AsyncClient(url, ca=strangers.ca, timeout=0.5) as client:
            with pytest.raises(NoLeader, match="certificate verify failed"):
                await client.put("orders", b"x")


@on_uvloop
async def test_a_poll_is_relayed_to_a_leader_it_trusts(pki: Pki, strangers: Pki) -> None:
    async with served(pki.files("n1")) as (_, leads, there), served(pki.files("n2")) as (_, follows, here):
        follows.leader = Leader("n1", there, False)
        body = b'{"wait": 0}'
        head = b"POST /v1/topics/orders/receive?redirect=false HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        reader, writer = await dial(here, pki.ca)
        writer.write(head % len(body) + body)
        assert (await read_answer(reader))[0] == 200
        assert len(leads.polls) == 1
        async with served(strangers.files("n1")) as (_, false, false_url):
            follows.leader = Leader("n1", false_url, False)
            writer.write(head % len(body) + body)
            assert (await read_answer(reader))[0] == 503
            assert not false.polls
        writer.close()


@on_uvloop
async def test_a_new_certificate_without_a_restart(pki: Pki, tmp_path: Path) -> None:
    files = pki.copy("n1", tmp_path)
    async with served(files) as (server, _, url):
        old_reader, old = await dial(url, pki.ca)
        before = serial(old)
        pki.make("n1")
        for path, copy in zip(pki.files("n1"), files, strict=True):
            shutil.copy(path, copy)
        assert server.tls is not None
        assert server.tls.refresh()
        _, new = await dial(url, pki.ca)
        assert serial(new) != before
        old.write(PUBLISH)
        assert (await read_answer(old_reader))[0] == 201, "who was connected stays connected"
        old.close()
        new.close()


@pytest.mark.parametrize("days", [2, 20_000])
@on_uvloop
async def test_the_end_of_a_certificate_is_known_and_shown(pki: Pki, tmp_path: Path, days: int) -> None:
    """Beyond 2049 it is written otherwise."""
    pki.make("soon", days)
    async with served(pki.files("soon")) as (server, _, _):
        assert server.tls is not None
        assert abs(server.tls.expires_s - time.time() - days * 86_400) < 300
        server.metrics.certificates = [server.tls]
        text = (await server.metrics.exposition(0, 0, 0)).decode()
    shown = re.search(r'^hadelay_certificate_expiry_timestamp_seconds{section="http"} (\S+)$', text, re.M)
    assert shown is not None
    assert float(shown[1]) == server.tls.expires_s


@on_uvloop
async def test_plain_http_and_nonsense_are_not_answered(pki: Pki) -> None:
    async with served(pki.files("n1")) as (_, service, url):
        host, port = url.removeprefix("https://").split(":")
        for data in (PUBLISH, b"\x16\x03\x01\xff\xff" + bytes(300), b"\x00" * 50):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(data)
            answer = await asyncio.wait_for(reader.read(), 10)
            assert b"HTTP/1.1 2" not in answer
            writer.close()
        assert not service.published


def test_a_certificate_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"http\.tls_cert: .*no\.pem: No such file"):
        unasked(HttpConfig(tls_cert=str(tmp_path / "no.pem"), tls_key="x"))


def test_a_check_of_the_configuration_reads_the_files_that_it_names(
    pki: Pki, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cert, key, ca = pki.copy("n1", tmp_path)
    path = tmp_path / "n1.toml"
    path.write_text(f'[raft]\ntls_cert = "{cert}"\ntls_key = "{key}"\ntls_ca = "{ca}"\n')
    assert run(["config", "check", str(path)]) == OK
    Path(key).unlink()
    assert run(["config", "check", str(path)]) == USAGE
    assert f"raft.tls_key: {key}: No such file" in capsys.readouterr().err


def test_nobody_leaves_the_encrypted_way() -> None:
    assert not may_follow("https://n1:8400/v1/receive", "http://n2:8400/v1/receive")
    assert may_follow("http://n1/x", "http://n2/x")
    assert may_follow("https://n1/x", "https://n2/x")


async def test_a_proxy_that_ends_tls(
    make_node: Make, pki: Pki, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Behind the proxy the nodes serve http, and redirect to http: clients do not follow, and ask for a relay."""
    follower, leader = await make_node(), await make_node()
    follower.service.leader = Leader("n2", leader.url, False)
    asked: list[bytes] = []

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", int(follower.url.rpartition(":")[2]))

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, note: bool) -> None:
            while data := await source.read(1 << 16):
                asked.append(data) if note else None
                sink.write(data)
            sink.close()

        await asyncio.gather(pump(reader, back, note=True), pump(there, writer, note=False), return_exceptions=True)

    cert, key, ca = pki.files("n1")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    proxy = await asyncio.start_server(pass_on, "127.0.0.1", 0, ssl=context)
    url = f"https://localhost:{proxy.sockets[0].getsockname()[1]}"
    for _ in range(4):
        await leader.ask("POST", "/v1/topics/orders/messages", b"x")
    async with AsyncClient(url, ca=ca, timeout=10) as client:
        for _ in range(3):
            assert len(await client.receive("orders", max=1)) == 1
    receives = [data for data in asked if b"/receive" in data]
    assert [b"redirect=false" in data for data in receives] == [False, True, True, True], "it remembers, and asks once"
    monkeypatch.setenv("SSL_CERT_FILE", ca)
    monkeypatch.setenv("HADELAY_SERVERS", url)
    assert await asyncio.to_thread(run, ["msg", "receive", "orders", "--wait", "1s", "--keep"]) == OK
    proxy.close()
    await proxy.wait_closed()
