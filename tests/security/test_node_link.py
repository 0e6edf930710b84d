"""Mutual TLS between nodes: who is let in, who is refused and in which words, and certificates that change."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import random
import re
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import uvloop

from hadelay.errors import ConfigError
from hadelay.platform import strangers, tcp
from hadelay.platform.runtime import Runtime
from hadelay.platform.tcp import AsyncioNetwork
from hadelay.platform.tls import Certificates
from tests.raft.test_tcp import Inbox, free_addresses, until
from tests.scale import LONG
from tests.security.conftest import Pki


def on_uvloop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """On the loop that nodes run on: its TLS is its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        uvloop.run(test(*args, **kwargs))

    return run


@asynccontextmanager
async def pair(
    one: Certificates | None, two: Certificates | None, name: str = "n2", through: Any = None
) -> AsyncIterator[tuple[AsyncioNetwork, Inbox, AsyncioNetwork, Inbox]]:
    """n1, and `name` which dials it; `through(that network)`, if it is given, which is then its `middle`."""
    runtime = Runtime(asyncio.get_running_loop())
    peers = dict(zip(("n1", name), free_addresses(2), strict=True))
    nodes = [
        AsyncioNetwork(who, peers[who], peers, cluster_id="test", group=0, runtime=runtime, tls=tls)
        for who, tls in (("n1", one), (name, two))
    ]
    inboxes = Inbox(), Inbox()
    if through is not None:
        nodes[1].middle = through(nodes[1])
        await nodes[1].middle.start(nodes[1])
    for node, inbox in zip(nodes, inboxes, strict=True):
        node.start(inbox)
    try:
        yield nodes[0], inboxes[0], nodes[1], inboxes[1]
    finally:
        for node in nodes:
            node.close()
        await asyncio.sleep(0.01)
        runtime.close()


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.reason for record in caplog.records if record.msg == "link_refused"]  # type: ignore[attr-defined]


@on_uvloop
async def test_frames_of_every_size_arrive_both_ways(pki: Pki) -> None:
    async with pair(pki.mutual("n1"), pki.mutual("n2")) as (one, left, two, right):
        await until(lambda: left.up and right.up)
        rng = random.Random(1)
        sent = [rng.randbytes(size) for size in (1, 100, 16_384, 65_537, 1 << 20, 5 << 20, 7)]
        for frame in sent:
            assert one.send("n2", [frame[:1], frame[1:]])
            assert two.send("n1", frame)
        await until(lambda: len(left.frames) == len(right.frames) == len(sent))
        assert right.frames == [("n1", frame) for frame in sent]
        assert left.frames == [("n2", frame) for frame in sent]
        await until(lambda: one.buffered("n2") == 0)
        one.disconnect("n2")
        await until(lambda: len(left.up) == len(right.up) == 2)


@on_uvloop
async def test_refused_nodes(pki: Pki, strangers: Pki, caplog: pytest.LogCaptureFixture) -> None:
    pki.expire("n4")
    expired = Certificates("raft", *pki.files("n4"), mutual=True)
    cases = [
        ("n2", strangers.mutual("n2"), "self-signed certificate in certificate chain|unable to get local issuer"),
        ("n4", expired, "the other side's certificate is not accepted: certificate has expired"),
        ("n2", pki.mutual("n3"), "n2 shows a certificate that names localhost, n3"),
        ("n2", None, "the other side does not use TLS"),
    ]
    for name, certificates, words in cases:
        caplog.clear()
        async with pair(pki.mutual("n1"), certificates, name) as (_, left, _, _):
            pattern = re.compile(words)
            await until(lambda pattern=pattern: any(map(pattern.search, reasons(caplog))))
            assert not left.up


@on_uvloop
async def test_the_other_side_learns_why(pki: Pki, strangers: Pki, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever dials accepts n1's certificate, and is told that its own is not accepted."""
    both = Certificates("raft", *strangers.files("n2")[:2], pki.ca, mutual=True)
    async with pair(pki.mutual("n1"), both) as (_, left, _, right):
        await until(lambda: any("not accept this node's certificate" in r for r in reasons(caplog)))
        assert any("unable to get local issuer certificate" in r for r in reasons(caplog)), "n1 says it, too"
        assert not left.up + right.up


@on_uvloop
async def test_a_node_without_tls_is_not_spoken_to(pki: Pki, caplog: pytest.LogCaptureFixture) -> None:
    async with pair(None, pki.mutual("n2")) as (_, left, _, right):
        await until(lambda: any("does not use TLS" in reason for reason in reasons(caplog)))
        assert not left.up + right.up


@on_uvloop
async def test_new_files_count_for_the_next_connection(
    pki: Pki, strangers: Pki, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "_REFUSED_RETRY_S", 0.05)
    caplog.set_level(logging.INFO)
    files = strangers.copy("n2", tmp_path)
    changing = Certificates("raft", *files, mutual=True)
    async with pair(pki.mutual("n1"), changing) as (one, left, _, _):
        await until(lambda: reasons(caplog))
        assert not changing.refresh(), "nothing has changed"
        cert, key, ca = pki.files("n2")
        shutil.copy(cert, files[0])
        assert not changing.refresh(), "a certificate without its key is half a rotation"
        (reported,) = [record.reason for record in caplog.records if record.msg == "certificate_not_read"]  # type: ignore[attr-defined]
        assert "the key is for another certificate" in reported
        shutil.copy(key, files[1])
        shutil.copy(ca, files[2])
        assert changing.refresh()
        await until(lambda: left.up)
        pki.make("n2")
        for path, copy in zip(pki.files("n2"), files, strict=True):
            shutil.copy(path, copy)
        assert changing.refresh()
        assert left.down == [], "what is linked stays linked"
        one.disconnect("n2")
        await until(lambda: len(left.up) == 2)


#: Connects 5,000 times a second until its input ends, sends what it is told to, and keeps what is not closed.
FLOOD = """
import socket, sys, time
from collections import deque
address, data = (sys.argv[1], int(sys.argv[2])), bytes.fromhex(sys.argv[3])
made, kept, began = 0, deque(), time.monotonic()
while time.monotonic() - began < 60:
    time.sleep(0.002)
    for _ in range(min(100, int((time.monotonic() - began) * 5_000) - made)):
        connection = socket.socket()
        connection.setblocking(False)
        connection.connect_ex(address)
        try:
            connection.send(data)
        except OSError:
            pass
        kept.append(connection)
        made += 1
        if len(kept) > 800:
            kept.popleft().close()
"""


@contextmanager
def flood(address: str, data: bytes) -> Iterator[None]:
    """Strangers from the address that members have, too."""
    command = [sys.executable, "-c", FLOOD, *address.split(":"), data.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            yield
        finally:
            process.kill()


def client_hello() -> bytes:
    context, sent = ssl.create_default_context(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname="n1").do_handshake()
    return sent.read()


@pytest.mark.parametrize(
    ("words", "encrypted"),
    # TLS against TLS takes half a minute of processor time.
    [*product(["nothing", "half a HELLO", "HTTP"], [False, True]), ("TLS", False), *([("TLS", True)] if LONG else [])],
)
def test_strangers_do_not_keep_a_member_out(
    pki: Pki, encrypted: bool, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = {"nothing": b"", "half a HELLO": b"\x1a\0\0", "HTTP": b"GET / HTTP/1.1\r\n\r\n", "TLS": client_hello()}[
        words
    ]

    @on_uvloop
    async def run() -> None:
        certificates = [pki.mutual(name) if encrypted else None for name in ("n1", "n2")]
        async with pair(*certificates) as (one, left, two, right):
            await until(lambda: left.up and right.up)
            with flood(one.listen, data):
                await until(lambda: sum(one.refused.values()) > 500)
                for links in (2, 3):
                    two.disconnect("n1")
                    await until(lambda links=links: len(left.up) == len(right.up) == links, 120)
                assert len(left.down) == 2, "nobody else ends a link"

    run()
    lines = [record for record in caplog.records if record.msg == "link_refused"]
    assert any(record.peer == "127.0.0.1" for record in lines), "where they come from"  # type: ignore[attr-defined]
    assert len(lines) < 40, "strangers do not fill the log"


def test_an_address_with_few_connections_is_served_before_one_with_many() -> None:
    crowd = strangers.Crowd(4)
    left, right = socket.socketpair()
    with left, right:
        many = [strangers.Stranger(left, "10.0.0.1") for _ in range(4)]
        few = [strangers.Stranger(left, "fd00::1"), strangers.Stranger(left, "fd00::2")]
        assert [crowd.add(one) for one in many] == [None] * 4
        assert crowd.add(few[0]) is many[0]
        crowd.remove(many[0])
        assert crowd.add(few[1]) is many[1], "the two of one /64 count as one address"
        crowd.remove(many[1])
        crowd.remove(many[2])
        for expected in (many[3], few[1], few[0]):
            assert crowd.newest() is expected
            crowd.remove(expected)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (("missing.pem", "cert.key", "ca.pem"), "raft.tls_cert: .*missing.pem: No such file"),
        (("cert.pem", "ca.pem", "ca.pem"), "raft.tls_cert"),
        (("cert.pem", "other.key", "ca.pem"), "the key is for another certificate"),
        (("cert.pem", "cert.key", "cert.key"), "raft.tls_ca"),
    ],
)
def test_files_that_cannot_be_used(pki: Pki, tmp_path: Path, files: tuple[str, ...], words: str) -> None:
    pki.copy("n1", tmp_path)
    shutil.copy(pki.files("n2")[1], tmp_path / "other.key")
    with pytest.raises(ConfigError, match=words):
        Certificates("raft", *(str(tmp_path / name) for name in files), mutual=True)
