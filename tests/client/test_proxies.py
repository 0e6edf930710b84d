"""What clients make of answers that no node gave, and of nodes that give none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from hadelay.api.problems import retry_after_ms
from hadelay.client import AsyncClient, NotANode, Put, transport
from hadelay.errors import HadelayError, OutcomeUnknown, TooLarge, Unauthorized
from tests.http.conftest import Make

Proxy = Callable[[bytes], Awaitable[str]]


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    """Answers every request with these bytes."""
    servers: list[asyncio.Server] = []
    serving: set[asyncio.Task[None]] = set()

    async def start(answer: bytes) -> str:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            serving.add(task)
            try:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                if "content-length: " in head:
                    await reader.readexactly(int(head.partition("content-length: ")[2].split("\r\n")[0]))
                writer.write(answer)
                await writer.drain()
            except (ConnectionError, asyncio.IncompleteReadError):
                pass
            finally:
                writer.close()
                with suppress(ConnectionError):
                    await writer.wait_closed()
                serving.discard(task)

        servers.append(await asyncio.start_server(serve, "127.0.0.1", 0))
        return f"http://127.0.0.1:{servers[-1].sockets[0].getsockname()[1]}"

    yield start
    for server in servers:
        server.close()
    await asyncio.gather(*serving, return_exceptions=True)


def answer(status: str, body: bytes = b"", kind: str = "application/json", *headers: str) -> bytes:
    lines = [
        f"HTTP/1.1 {status}",
        f"Content-Type: {kind}",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


@pytest.mark.parametrize("status", ["301 Moved Permanently", "302 Found", "304 Not Modified", "307 Temporary Redirect"])
async def test_answers_of_proxies_are_not_taken_for_success(proxy: Proxy, status: str) -> None:
    where = ["Location: https://login.example/"] if status < "304" else []
    async with AsyncClient(await proxy(answer(status, b"", "text/html", *where)), timeout=2) as client:
        for ask in (client.cancel("0" * 13), client.purge("t"), client.delete_topic("t"), client.put("t", b"x")):
            with pytest.raises(HadelayError) as caught:
                await ask
            assert status[:3] in str(caught.value)
            assert not caught.value.retryable


@pytest.mark.parametrize("status", ["502 Bad Gateway", "503 Service Unavailable", "504 Gateway Timeout"])
@pytest.mark.parametrize(
    "body", [b'{"message":"upstream went away","type":["x"],"retry_after_ms":"1"}', b"<html>\xff", b'"\xff"']
)
async def test_a_request_answered_by_a_proxy_is_not_known_to_have_failed(
    proxy: Proxy, status: str, body: bytes
) -> None:
    """Only a node knows that nothing happened."""
    async with AsyncClient(await proxy(answer(status, body)), timeout=0.3) as client:
        with pytest.raises(OutcomeUnknown) as caught:
            await client.put("t", b"x")
    assert not caught.value.outcome_known


async def test_a_node_that_is_frozen_is_not_the_only_one_asked(make_node: Make) -> None:
    """It takes the connection and the request, and answers nothing."""
    frozen, other = await make_node(), await make_node()
    frozen.service.hold()
    async with AsyncClient([frozen.url, other.url], timeout=2) as client:
        client._transport._at = 0
        receipt = await client.put("t", b"x", idempotency_key="k")
    assert receipt.topic == "t"
    assert other.service.keys == [b"k"]
    frozen.service.deferred = None


PAGE = answer("200 OK", b"<html>please log in</html>", "text/html")


@pytest.mark.parametrize(
    "garbage",
    [PAGE, answer("200 OK", b'{"message":"hello"}'), answer("200 OK"), answer("200 OK", b"[" * 5_000)],
    ids=["page", "another service", "nothing", "deep"],
)
async def test_a_success_that_no_node_tells_is_none(proxy: Proxy, garbage: bytes) -> None:
    """Every method: one error, at once, that says what was seen; what changes something may have happened."""
    url = await proxy(garbage)
    async with AsyncClient(url, timeout=60) as client:
        writes = (
            client.put("t"), client.put_many([Put(topic="t")]), client.cancel("0" * 13), client.purge("t"),
            client.delete_topic("t"), client.purge_dead("t"), client.remove_member("n9"),
            client.add_member("n9", "a:1"), client.ack("x"), client.redrive_all("t"),
            client.redrive("t", ["0" * 13]), client.receive("t"),
        )  # fmt: skip
        reads = client.get("0" * 13), client.topics(), client.cluster(), client.hours(), client.names(), client.ready()
        for known, asks in ((False, writes), (True, reads)):
            for ask in asks:
                with pytest.raises(NotANode) as caught:
                    await ask
                assert (caught.value.outcome_known, caught.value.retryable) == (known, False)
                assert str(caught.value).startswith(f"{url}: the answer is not from a hadelay node: HTTP 200, ")
                assert "Check the address" in str(caught.value)


async def test_another_address_may_be_a_node(make_node: Make, proxy: Proxy) -> None:
    node = await make_node()
    async with AsyncClient([await proxy(PAGE), node.url], timeout=60) as client:
        client._transport._at = 0
        assert (await client.put("t", b"x", idempotency_key="k")).topic == "t"
        assert client._transport._at == 1
    assert node.service.keys == [b"k"]


@pytest.mark.parametrize(
    "refusal", ["404 Not Found", "400 Bad Request", "401 Unauthorized", "403 Forbidden", "413 Content Too Large"]
)
async def test_no_other_refusal_makes_an_unknown_outcome_known(proxy: Proxy, refusal: str) -> None:
    """The page may stand for a publish that did happen; that another one refuses changes nothing about it."""
    async with AsyncClient([await proxy(PAGE), await proxy(answer(refusal, b"", "text/html"))]) as client:
        client._transport._at = 0
        with pytest.raises(NotANode, match="please log in") as caught:
            await client.put("t", b"x")
    assert not caught.value.outcome_known


@pytest.mark.parametrize(
    ("status", "known", "kind"),
    [
        ("404 Not Found", True, NotANode), ("405 Method Not Allowed", True, NotANode), ("418 Teapot", True, NotANode),
        ("500 Internal Server Error", False, NotANode), ("524 A Timeout Occurred", False, NotANode),
        ("401 Unauthorized", True, Unauthorized), ("413 Content Too Large", True, TooLarge),
    ],
)  # fmt: skip
async def test_requests_refused_on_the_way(
    proxy: Proxy, status: str, known: bool, kind: type[HadelayError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy's 404 is not that a message was never there, and its 500 not that nothing happened."""
    # No second try, whose answer could come too late for the timeout.
    monkeypatch.setattr(transport, "_FIRST_BACKOFF_S", 60.0)
    async with AsyncClient(await proxy(answer(status, b"<html>", "text/html")), timeout=20) as client:
        with pytest.raises(kind, match=status[:3]) as caught:
            await client.put("t", b"x")
        assert caught.value.outcome_known is known
        with pytest.raises(kind) as caught:
            await client.get("0" * 13)
        assert caught.value.outcome_known


TOO_BUSY = "429 Too Many Requests", "503 Service Unavailable"


@pytest.mark.parametrize("status", TOO_BUSY)
async def test_a_proxy_says_when_to_come_again(proxy: Proxy, status: str) -> None:
    """Not within the time of this call: it is not asked in vain until that is over."""
    url = await proxy(answer(status, b"<html>", "text/html", "Retry-After: 3600"))
    async with AsyncClient(url, timeout=60) as client:
        with pytest.raises(HadelayError) as caught:
            await asyncio.wait_for(client.put("t", b"x"), 20)
    assert caught.value.retryable
    assert caught.value.retry_after_ms == 3_600_000


@pytest.mark.parametrize("status", TOO_BUSY)
async def test_a_proxy_says_nothing_of_other_addresses(make_node: Make, proxy: Proxy, status: str) -> None:
    node = await make_node()
    busy = await proxy(answer(status, b"", "text/html", "Retry-After: 3600"))
    async with AsyncClient([busy, node.url], timeout=60) as client:
        client._transport._at = 0
        assert (await asyncio.wait_for(client.put("t", b"x"), 20)).topic == "t"


@pytest.mark.parametrize(
    ("said", "ms"),
    [
        ("7", 7_000), (" 0 ", 0), ("9" * 400, 86_400_000), ("99999999", 86_400_000), ("", None), ("soon", None),
        ("-1", None), ("1.5", None), ("\xb2", None), ("Wed, 21 Oct 2015 07:28:00 GMT", 0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 86_400_000),
    ],
)  # fmt: skip
def test_retry_after_is_read_in_both_forms(said: str, ms: int | None) -> None:
    assert retry_after_ms(said) == ms
    in_an_hour = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)
    assert 3_000_000 < (retry_after_ms(in_an_hour) or 0) <= 3_600_000
    without_a_zone = (datetime.now(UTC) + timedelta(hours=1)).strftime("%a %b %d %H:%M:%S %Y")
    assert 3_000_000 < (retry_after_ms(without_a_zone) or 0) <= 3_600_000


@pytest.mark.parametrize("garbage", [PAGE, answer("302 Found", b"")])
async def test_a_consumer_that_gets_nonsense_says_so(proxy: Proxy, garbage: bytes) -> None:
    """It must not stand there and wait for messages that nobody will fetch."""

    async def consume() -> None:
        async for _ in client.consume("t"):
            pass

    async with AsyncClient(await proxy(garbage), timeout=1) as client:
        with pytest.raises(NotANode):
            await asyncio.wait_for(consume(), 20)
