"""One call, at receivers that do everything wrong."""

from __future__ import annotations

import asyncio
import resource
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from aiohappyeyeballs import AddrInfoType

from hadelay.api.problems import retry_after_ms
from hadelay.codec.ackparts import CallReply
from hadelay.model import MAX_REPLY
from hadelay.server.guard import Guard, Info
from hadelay.server.webhooks import sender as sender_module
from hadelay.server.webhooks.calls import CallRequest, Reply
from hadelay.server.webhooks.sender import Sender
from hadelay.settings.topic import METHODS
from tests.webhooks import receiver as r
from tests.webhooks.receiver import Behave, Receiver

LOOPBACK = Guard(["127.0.0.0/8"])
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@pytest.fixture
async def sender() -> AsyncIterator[Sender]:
    sender = Sender(LOOPBACK, "hadelay/test")
    yield sender
    await sender.close()


async def call(
    sender: Sender, url: str, timeout_s: float = 5.0, body: bytes = b"x", method: str = "POST", **how: bool
) -> Reply:
    future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
    sender.call(CallRequest(url, {"webhook-id": "1"}, body, timeout_s, method, **how), future.set_result)
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
    ("says 103 first", r.says(b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\n" + OK), 200, ""),
    ("changes the protocol", r.says(b"HTTP/1.1 101 X\r\n\r\n"), 101, "HTTP 101"),
    ("HTTP/2", r.says(b"HTTP/2 200 OK\r\n\r\n"), 0, "no HTTP answer"),
    ("bare line feeds", r.says(b"HTTP/1.1 503 X\nContent-Length: 0\n\n"), 503, "HTTP 503"),
    ("half an answer", r.says(b"HTTP/1.1 200 OK\r\nContent-Le", True), 0, "connection closed"),
    ("half a body", r.says(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", True), 200, ""),
]


@pytest.mark.parametrize(("behave", "status", "reason"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
async def test_outcomes_of_a_call(sender: Sender, behave: Behave, status: int, reason: str) -> None:
    async with Receiver(behave) as receiver:
        answer = await call(sender, receiver.url, 0.3 if reason == "timeout" else 5.0)
        assert (answer.status, answer.reason) == (status, reason)
        assert len(receiver.calls) == 1
        # Whatever the last one did, the next call is a call.
        receiver.behave = r.answers(200)
        assert (await call(sender, receiver.url)).status == 200


async def test_calls_have_the_method_that_is_asked_for(sender: Sender) -> None:
    async with Receiver(r.answers(200)) as receiver:
        for method in METHODS:
            await call(sender, receiver.url, method=method)
        assert [one.method for one in receiver.calls] == list(METHODS)


CHUNKED, LONG = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"x" * 20_000
NINE = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"
KEPT = [
    ("all", r.answers(200, "Content-Type: text/plain", body=b"paid"), CallReply(200, "text/plain", b"paid", False)),
    ("none", r.answers(204), CallReply(204, "", b"", False)),
    ("an error", r.answers(503, body=b"later"), CallReply(503, "", b"later", False)),
    ("long", r.answers(200, body=LONG), CallReply(200, "", LONG[:MAX_REPLY], True)),
    ("a gigabyte", r.gigabyte(200), CallReply(200, "", bytes(MAX_REPLY), True)),
    ("exactly", r.answers(200, body=LONG[:MAX_REPLY]), CallReply(200, "", LONG[:MAX_REPLY], False)),
    ("chunks", r.says(CHUNKED + b"2;x=y\r\nok\r\n3\r\nay!\r\n0\r\n\r\n"), CallReply(200, "", b"okay!", False)),
    ("half of the chunks", r.says(CHUNKED + b"2\r\nok\r\n9\r\nay", True), CallReply(200, "", b"okay", True)),
    ("until the end", r.says(b"HTTP/1.1 200 OK\r\n\r\nfine", True), CallReply(200, "", b"fine", False)),
    ("half a body", r.says(NINE + b"half", True), CallReply(200, "", b"half", True)),
    ("too slow", r.says(NINE + b"slow"), CallReply(200, "", b"slow", True)),
    ("no answer", r.hangs_up, CallReply(0, "", b"", True)),
]


@pytest.mark.parametrize(("behave", "kept"), [case[1:] for case in KEPT], ids=[case[0] for case in KEPT])
async def test_an_answer_is_kept_for_callbacks(sender: Sender, behave: Behave, kept: CallReply) -> None:
    async with Receiver(behave) as receiver:
        timeout_s = 0.3 if kept.body == b"slow" else 5.0
        assert (await call(sender, receiver.url, timeout_s, keeps=True)).kept == kept
        receiver.behave = r.answers(200, body=b"next")
        assert (await call(sender, receiver.url, keeps=True)).kept == CallReply(200, "", b"next", False)
        assert (await call(sender, receiver.url)).kept is None


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


@pytest.mark.parametrize("ends", [r.hangs_up, r.resets])
async def test_a_connection_that_closes_as_a_call_is_sent_costs_no_attempt(sender: Sender, ends: Behave) -> None:
    async with Receiver(r.in_turn(r.answers(200), ends, r.answers(204))) as receiver:
        assert [(await call(sender, receiver.url)).status for _ in range(2)] == [200, 204]
        assert [one.connection for one in receiver.calls] == [0, 0, 1]
        assert receiver.calls[1] == replace(receiver.calls[2], connection=0)


@pytest.mark.parametrize(
    ("behaviours", "reason"),
    [
        # Once, and not on a fresh connection; nor when an answer has begun.
        ([r.answers(200), r.hangs_up, r.hangs_up], "connection closed"),
        ([r.answers(200), r.says(b"H", True)], "connection closed"),
        ([r.answers(200), r.says(b"HTTP/1.1 103 Early\r\n\r\n", True)], "connection closed"),
        ([r.answers(200), r.hangs], "timeout"),
        ([r.answers(200), r.hangs_up, r.hangs], "timeout"),
    ],
)
async def test_a_call_is_made_twice_at_the_most(sender: Sender, behaviours: list[Behave], reason: str) -> None:
    async with Receiver(r.in_turn(*behaviours, r.answers(200))) as receiver:
        await call(sender, receiver.url)
        answer = await call(sender, receiver.url, 0.3)
        assert (answer.status, answer.reason, len(receiver.calls)) == (0, reason, len(behaviours))
        assert not sender.calls


@pytest.mark.parametrize(
    ("said", "connections"),
    [
        (OK, 1),
        (b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n", 1),
        (b"HTTP/1.1 200 OK\r\ncontent-length:2 \r\nX: connection: close\r\n\r\nok", 1),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 0\r\n\r\n", 1),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n0\r\nX: y\r\n\r\n", 1),
        # The end of these is not certain, or is the connection's.
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n", 3),
        (b"HTTP/1.1 200 OK\r\nConnection: Close\r\nContent-Length: 0\r\n\r\n", 3),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nContent-Length: 2\r\n\r\n", 3),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 3),
    ],
)
async def test_the_end_of_an_answer(sender: Sender, said: bytes, connections: int) -> None:
    """In pieces of any size: the next call's answer is its own."""
    for size in (len(said), 1, 7):
        async with Receiver(r.says(said, pieces=size)) as receiver:
            answers = [await call(sender, receiver.url) for _ in range(3)]
            assert [answer.reason for answer in answers] == [""] * 3
            assert receiver.connections == connections


async def test_more_than_an_answer_costs_the_connection(sender: Sender) -> None:
    async with Receiver(r.says(OK + b"HTTP/1.1 500 X\r\n\r\n")) as receiver:
        assert [(await call(sender, receiver.url)).status for _ in range(3)] == [200] * 3
        assert receiver.connections == 3


async def test_an_answer_that_never_ends_is_the_status(sender: Sender) -> None:
    async with Receiver(r.says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nab")) as receiver:
        answer = await call(sender, receiver.url, 0.3)
        assert (answer.status, answer.reason) == (200, "")


async def test_names_are_resolved_once_and_failures_are_not_kept() -> None:
    asked: list[str] = []

    async def resolve(host: str, port: int) -> list[AddrInfoType]:
        asked.append(host)
        if len(asked) == 1:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    sender = Sender(LOOPBACK, "hadelay/test", resolve)
    async with Receiver(r.says(OK + b"?")) as receiver:
        url = f"http://name.example:{receiver.port}/"
        assert [(await call(sender, url)).reason for _ in range(4)] == ["name not resolved", "", "", ""]
        assert len(asked) == 2
        assert receiver.calls[0].headers["host"] == f"name.example:{receiver.port}"
    await sender.close()


async def test_a_name_server_that_falls_silent_costs_only_names_that_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = False

    async def resolve(host: str, port: int) -> list[AddrInfoType]:
        if silent:
            await asyncio.Event().wait()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(sender_module, "_DNS_S", -1.0)
    monkeypatch.setattr(sender_module, "_SLOW_DNS_S", 0.05, raising=False)
    sender = Sender(LOOPBACK, "hadelay/test", resolve)
    async with Receiver(r.answers(200, "Connection: close")) as receiver:
        url = f"http://old.example:{receiver.port}/"
        assert (await call(sender, url)).status == 200
        silent = True
        assert [(await call(sender, url, 0.5)).reason for _ in range(2)] == ["", ""]
        assert (await call(sender, f"http://new.example:{receiver.port}/", 0.3)).reason == "timeout"
    await sender.close()


@pytest.mark.parametrize("header", [{"X": "a\r\nInjected: 1"}, {"X\r\nInjected: 1": "a"}, {"X": "a\nb"}])
async def test_headers_have_no_line_ends(sender: Sender, header: dict[str, str]) -> None:
    async with Receiver(r.answers(200)) as receiver:
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        sender.call(CallRequest(receiver.url, header, b"", 5.0), future.set_result)
        assert (await future).reason == "invalid request"
        assert receiver.connections == 0


async def test_a_topics_headers_take_the_place_of_the_usual_ones(sender: Sender) -> None:
    async with Receiver(r.answers(200)) as receiver:
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        sender.call(CallRequest(receiver.url, {"USER-AGENT": "own"}, b"", 5.0), future.set_result)
        await future
        assert receiver.calls[0].headers["user-agent"] == "own"
        assert receiver.calls[0].headers["accept"] == "*/*"


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


class Rebound(Guard):
    """As if what the name was resolved to had passed, and something else were connected to."""

    def permitted(self, found: list[Info]) -> list[Info]:
        return found


async def test_a_name_that_changes_its_mind_gains_nothing() -> None:
    """The socket's own check holds."""

    async def resolve(host: str, port: int) -> list[AddrInfoType]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    sender = Sender(Rebound(), "hadelay/test", resolve)
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
        sender.call(CallRequest(receiver.url, {}, b"", 60.0), lambda answer: pytest.fail("it has not ended by itself"))
        await receiver.called(1)
        await asyncio.wait_for(sender.close(), 30)


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("", None), ("soon", None), ("-5", None), ("1.5", None),
        ("0", 0), ("120", 120_000), (" 7 ", 7_000), ("9" * 40, 1_000_000_000_000_000),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 60_000), ("Wed, 21 Oct 2015 07:26:00 GMT", 0),
        ("Wed, 21 Oct 99999 07:28:00 GMT", None),
    ],
)  # fmt: skip
def test_retry_after(text: str, ms: int | None) -> None:
    assert retry_after_ms(text, 1e12, 1_445_412_420.0) == ms
