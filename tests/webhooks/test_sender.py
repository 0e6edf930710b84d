"""One call, at receivers that do everything wrong."""

from __future__ import annotations

import asyncio
import resource
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp.abc import AbstractResolver, ResolveResult

from hadelay.server.webhooks.call import Answer, Request
from hadelay.server.webhooks.guard import Guard
from hadelay.server.webhooks.sender import Sender, retry_after
from tests.webhooks import receiver as r
from tests.webhooks.receiver import Behave, Receiver

LOOPBACK = Guard(["127.0.0.0/8"])


@pytest.fixture
async def sender() -> AsyncIterator[Sender]:
    sender = Sender(LOOPBACK, "hadelay/test")
    yield sender
    await sender.close()


async def call(sender: Sender, url: str, timeout_s: float = 5.0, body: bytes = b"x") -> Answer:
    future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    sender.call(Request(url, {"webhook-id": "1"}, body, timeout_s), future.set_result)
    return await future


CASES = [
    ("200", r.answers(200), 200, ""),
    ("204", r.answers(204), 204, ""),
    ("299", r.answers(299, body=b"thanks"), 299, ""),
    ("a gigabyte of thanks", r.gigabyte(200), 200, ""),
    ("500", r.answers(500), 500, "HTTP 500"),
    ("a gigabyte of regret", r.gigabyte(503), 503, "HTTP 503"),
    ("301", r.answers(301, "Location: http://127.0.0.1:1/"), 301, "redirect refused (HTTP 301)"),
    ("307", r.answers(307, "Location: http://127.0.0.1:1/"), 307, "redirect refused (HTTP 307)"),
    ("410", r.answers(410), 410, "HTTP 410"),
    ("hangs", r.hangs, 0, "timeout"),
    ("byte by byte", r.byte_by_byte, 0, "timeout"),
    ("resets", r.resets, 0, "connection closed"),
    ("hangs up", r.hangs_up, 0, "connection closed"),
    ("babbles", r.babbles, 0, "no HTTP answer"),
    ("endless head", r.endless_head, 0, "no HTTP answer"),
]


@pytest.mark.parametrize(("behave", "status", "reason"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
async def test_what_comes_of_a_call(sender: Sender, behave: Behave, status: int, reason: str) -> None:
    async with Receiver(behave) as receiver:
        answer = await call(sender, receiver.url, 0.3 if reason == "timeout" else 5.0)
        assert (answer.status, answer.reason) == (status, reason)
        assert len(receiver.calls) == 1
        # Whatever the last one did, the next call is a call.
        receiver.behave = r.answers(200)
        assert (await call(sender, receiver.url)).status == 200


async def test_a_gigabyte_costs_no_memory(sender: Sender) -> None:
    async with Receiver(r.gigabyte(200)) as receiver:
        await call(sender, receiver.url)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(5):
            await call(sender, receiver.url)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


async def test_a_connection_is_used_again(sender: Sender) -> None:
    async with Receiver(r.answers(200, body=b"ok")) as receiver:
        for _ in range(5):
            await call(sender, receiver.url)
        assert (len(receiver.calls), receiver.connections) == (5, 1)


async def test_nobody_listens(sender: Sender) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        answer = await call(sender, f"http://127.0.0.1:{taken.getsockname()[1]}/")
    assert (answer.status, answer.reason) == (0, "connection refused")


@pytest.fixture
def self_signed(tmp_path: Path) -> ssl.SSLContext:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    key, cert = tmp_path / "key", tmp_path / "cert"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "1",
         "-subj", "/CN=127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return context


async def test_a_certificate_that_nobody_signed(sender: Sender, self_signed: ssl.SSLContext) -> None:
    async with Receiver(r.answers(200), self_signed) as receiver:
        answer = await call(sender, receiver.url)
    assert (answer.status, answer.reason) == (0, "TLS error")
    assert receiver.calls == []


async def test_private_addresses_are_not_connected_to() -> None:
    sender = Sender(Guard(), "hadelay/test")
    async with Receiver(r.answers(200)) as receiver:
        for host in ("127.0.0.1", "localhost", "[::ffff:127.0.0.1]"):
            answer = await call(sender, f"http://{host}:{receiver.port}/")
            assert (answer.status, answer.reason) == (0, "address refused"), host
        assert receiver.connections == 0
    await sender.close()


class Rebinding(AbstractResolver):
    """A public address when it is looked at, a private one when it is used."""

    async def resolve(self, host: str, port: int = 0, family: int = 0) -> list[ResolveResult]:
        return [ResolveResult(hostname=host, host="127.0.0.1", port=port, family=socket.AF_INET, proto=0, flags=0)]

    async def close(self) -> None: ...


async def test_a_name_that_changes_its_mind_gains_nothing() -> None:
    """As if the check of what was resolved had been passed by another answer: the socket's own check holds."""
    sender = Sender(Guard(), "hadelay/test")
    sender._session.connector._resolver = Rebinding()  # type: ignore[union-attr]
    async with Receiver(r.answers(200)) as receiver:
        answer = await call(sender, f"http://rebound.example:{receiver.port}/")
        assert (answer.reason, receiver.connections) == ("address refused", 0)
    await sender.close()


async def test_the_environment_is_not_looked_at(monkeypatch: pytest.MonkeyPatch, sender: Sender) -> None:
    async with Receiver(r.answers(200)) as proxy, Receiver(r.answers(200)) as receiver:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        await call(sender, receiver.url)
        assert (len(proxy.calls), len(receiver.calls)) == (0, 1)


async def test_closing_ends_what_is_under_way() -> None:
    sender = Sender(LOOPBACK, "hadelay/test")
    async with Receiver(r.hangs) as receiver:
        sender.call(Request(receiver.url, {}, b"", 60.0), lambda answer: pytest.fail("it has not ended by itself"))
        await receiver.called(1)
        await asyncio.wait_for(sender.close(), 30)


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        (None, None), ("", None), ("soon", None), ("-5", None), ("1.5", None),
        ("0", 0), ("120", 120_000), (" 7 ", 7_000), ("9" * 40, 999_999_999_999_000),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 60_000), ("Wed, 21 Oct 2015 07:26:00 GMT", 0),
        ("Wed, 21 Oct 99999 07:28:00 GMT", None),
    ],
)  # fmt: skip
def test_retry_after(text: str | None, ms: int | None) -> None:
    assert retry_after(text, 1_445_412_420.0) == ms
