"""What only somebody who means harm, or a library nobody tried, would send; and that both ways in agree about it."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hadelay.api.text import parse_duration, parse_instant
from hadelay.errors import BadRequest
from hadelay.http.app import HttpServer
from hadelay.settings.node import HttpConfig
from tests.http.conftest import Node, read_answer
from tests.http.served import serve
from tests.http.test_http_connections import open_warm, post

MESSAGES = "/v1/topics/orders/messages"
BATCH = "/v1/messages:batch"
#: Ids and times; and what aiohttp shows of bytes that are no HTTP, which depends on where they were cut.
NOISE = re.compile(rb'"(id|deliver_at)":"[^"]*"| b[\'\\].*?\^"')


async def reported(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """The final answer, without what differs between two messages."""
    while True:
        status, _, body = await read_answer(reader)
        if status >= 200:
            return status, NOISE.sub(b"", body)


# ---- requests that mean the same, whole or in pieces

TARGETS = [
    MESSAGES, MESSAGES + "?delay=1h", MESSAGES + "?key=a%20b&tags=x", MESSAGES + "?key=a#b", MESSAGES + "?key=%ff",
    MESSAGES + "?dealy=1h", MESSAGES + "?delay=1&delay=1", MESSAGES + "?key=a;b&", "/v1/topics/%6Frders/messages",
    "/v1/topics/orders/messages/", "//v1/topics/orders/messages", "http://x" + MESSAGES + "?delay=5", BATCH,
    BATCH + "?delay=1h", "/v1/topics/orders/receive", "/v1/topics/orders/receive?redirect=fals%65",
    "/v1/topics/orders/receive?redirect=", "/v1/receive", "/v1/leases:ack", "/v1/leases:ack?x", "/nowhere",
]  # fmt: skip
HEADERS = [
    b"Host: x", b"host: y", b"Content-Type: a/b", b"content-type: application/json", b"Idempotency-Key: k",
    b"Idempotency-Key:  l ", b"Hadelay-Key: a", b"Hadelay-Key: \xc3\xa4", b"hadelay-key:a b ", b"Hadelay-Delay: 5s",
    b"Hadelay-Tags: a, b", b"Hadelay-Meta-A: \xff", b"Hadelay-Meta-A:b", b"Hadelay-Meta-%: \t c", b"Hadelay-Node: n",
    b"Accept: application/msgpack", b"Accept-Body: text", b"Connection: keep-alive", b"Connection: close",
    b"Expect: 100-continue", b"Content-Encoding: gzip", b"X:", b"X: a\tb", b"X : a", b" folded", b"X", b": x",
    b"Transfer-Encoding: chunked", b"Content-Length: 3", b"Upgrade: h2c", b"X: \x7f", b"Trailer: x", b"TE: trailers",
]  # fmt: skip
PAYLOADS = [b"", b"{}", b"[]", b'{"topics":["orders"]}', b'{"leases":["x"]}', b'[{"topic":"a"}]', b"\xff\x00"]


@settings(max_examples=150, deadline=None)
@given(
    target=st.sampled_from(TARGETS),
    lines=st.lists(st.sampled_from(HEADERS), max_size=4),
    host=st.sampled_from([b"Host: x\r\n", b"Host: x\r\n", b"Host: x\r\n", b""]),
    body=st.sampled_from(PAYLOADS),
    cut=st.integers(1, 400),
)
def test_both_ways_agree(target: str, lines: list[bytes], host: bytes, body: bytes, cut: int) -> None:
    head = b"POST %b HTTP/1.1\r\n%b%b" % (target.encode(), host, b"".join(line + b"\r\n" for line in lines))
    request = head + b"Content-Length: %d\r\n\r\n" % len(body) + body

    async def ask(*pieces: bytes) -> Any:
        http = HttpConfig(listen="127.0.0.1:0", hosts=["x"])
        service = await serve(http)
        server = HttpServer(service, http, 1 << 40)
        address, port = (await server.start()).split(":")
        reader, writer = await asyncio.open_connection(address, int(port))
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        await read_answer(reader)
        # Some are answered, and the connection closed, before all of it is sent.
        answer = asyncio.create_task(reported(reader))
        for piece in pieces:
            writer.write(piece)
            for _ in range(5):
                await asyncio.sleep(0)
        await answer
        writer.close()
        await server.stop(1)
        service.close()
        return answer.result(), service.published

    async def both() -> None:
        assert await ask(request) == await ask(request[: cut % len(request)], request[cut % len(request) :])

    asyncio.run(both())


MANY = b"".join(b"X-%d: 1\r\n" % n for n in range(130))


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (b"", b"Missing 'Host'"),
        (b"Host: x\r\nHost: y\r\n", b"Duplicate 'Host'"),
        (b"Host: x\r\nContent-Type: a/b\r\nContent-Type: c/d\r\n", b"Duplicate 'Content-Type'"),
        (b"Host: x\r\n" + MANY, b"Too many headers"),
    ],
)
async def test_heads_that_nobody_should_send(node: Node, head: bytes, words: bytes) -> None:
    """RFC 9112, 3.2: a request without a Host, or with two, is answered with 400."""
    reader, writer = await open_warm(node)
    writer.write(b"POST %b HTTP/1.1\r\n%bContent-Length: 1\r\n\r\nx" % (MESSAGES.encode(), head))
    status, _, body = await read_answer(reader)
    assert (status, words in body) == (400, True), body
    assert not node.service.published


async def test_addresses_with_a_host_in_front(node: Node) -> None:
    """RFC 9112, 3.2.2: a server understands the absolute form, whatever it names."""
    reader, writer = await node.raw()
    for where in (b"http://elsewhere.example", b"HTTPS://x:1"):
        writer.write(b"GET %b/v1/topics/none HTTP/1.1\r\nHost: x\r\n\r\n" % where)
        status, _, body = await read_answer(reader)
        assert (status, b"no topic" in body) == (404, True)
        writer.write(post(where.decode() + MESSAGES + "?delay=1h", b"x"))
        assert (await read_answer(reader))[0] == 201
    assert [draft.when_ms for draft in node.service.published] == [3_600_000] * 2


@pytest.mark.parametrize("target", [MESSAGES + "?key=a#b", MESSAGES + "#x", "/livez#x"])
async def test_fragments_are_not_sent(node: Node, target: str) -> None:
    """Some would cut them off: the message would have another key than its owner thinks."""
    reader, writer = await open_warm(node)
    writer.write(post(target, b"x"))
    status, _, body = await read_answer(reader)
    assert (status, b"%23" in body) == (400, True), body
    assert not node.service.published


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", MESSAGES + "?key=%ff"), ("POST", MESSAGES + "?key=a%C3"), ("GET", "/v1/topics/orders/keys/%ff"),
        ("DELETE", "/v1/topics/orders/keys/%C3%28"), ("GET", MESSAGES + "?tag=%ff"), ("GET", "/v1/messages/%ff"),
    ],
)  # fmt: skip
async def test_text_that_is_not_utf8(node: Node, method: str, path: str) -> None:
    """A character put in its place would be the same for all: another message would pass for a duplicate."""
    await node.ask("POST", MESSAGES, b"x", **{"Hadelay-Key": "\ufffd"})
    answer = await node.ask(method, path, b"y" if method == "POST" else None)
    assert (answer.status, "UTF-8" in answer.json["detail"]) == (400, True), answer
    assert len(node.service.published) == 1


async def test_http_10_gets_no_continue(node: Node) -> None:
    """RFC 9110, 10.1.1: who speaks 1.0 does not know 100, and would take it for the answer."""
    reader, writer = await node.raw()
    head = b"POST %b HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\nx" % MESSAGES.encode()
    writer.write(head)
    assert (await read_answer(reader))[0] == 201
    assert await reader.read() == b""


# ---- what nobody asked for must not be taken for something else


@pytest.mark.parametrize("query", ["?delay=1h", "?dealy=1h", "?"])
async def test_a_batch_has_no_parameters(node: Node, query: str) -> None:
    answer = await node.ask("POST", BATCH + query, [{"topic": "a"}])
    assert answer.status == (200 if query == "?" else 400)
    assert len(node.service.published) == (query == "?")


async def test_a_batch_says_what_it_is(node: Node) -> None:
    reader, writer = await open_warm(node)
    writer.write(post(BATCH, b"[]"))
    status, _, body = await read_answer(reader)
    assert (status, b"application/msgpack, not a body without Content-Type" in body) == (415, True)


async def test_a_batch_has_one_idempotency_key(node: Node) -> None:
    reader, writer = await open_warm(node)
    keys = b"Content-Type: application/json\r\nIdempotency-Key: a\r\nIdempotency-Key: b\r\n"
    writer.write(post(BATCH, b'[{"topic":"a"}]', keys))
    status, _, body = await read_answer(reader)
    assert (status, b"twice" in body) == (400, True)
    assert not node.service.published


async def test_a_meta_is_given_once(node: Node) -> None:
    reader, writer = await open_warm(node)
    writer.write(post(MESSAGES, b"x", b"Hadelay-Meta-Who: me\r\nhadelay-meta-who: you\r\n"))
    status, _, body = await read_answer(reader)
    assert (status, b"Hadelay-Meta-Who is given twice" in body) == (400, True)


async def test_transfer_coding_is_not_part_of_the_payload(node: Node) -> None:
    reader, writer = await open_warm(node)
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n" % MESSAGES.encode()
    writer.write(head + b"1\r\nx\r\n0\r\n\r\n")
    assert (await read_answer(reader))[0] == 415
    assert not node.service.published


async def test_a_content_type_is_text_as_other_headers_are(node: Node) -> None:
    made = (await node.ask("POST", MESSAGES, b"x", Content_Type="text/plain; name=grün€")).json
    assert (await node.ask("GET", f"/v1/messages/{made['id']}")).json["content_type"] == "text/plain; name=grün€"


@pytest.mark.parametrize("action", ["/v1/topics/orders:resume", "/v1/messages/{id}:deliver-now"])
async def test_actions_do_not_take_what_they_do_not_know(node: Node, action: str) -> None:
    made = (await node.ask("POST", MESSAGES + "?delay=1h", b"x")).json
    path = action.replace("{id}", made["id"])
    wrong = await node.ask("POST", path, {"delay": "2h"})
    assert (wrong.status, "'delay'" in wrong.json["detail"]) == (400, True)
    assert (await node.ask("GET", f"/v1/messages/{made['id']}")).json["deliver_at"] == made["deliver_at"]
    for body in (None, {}):
        assert (await node.ask("POST", path, body)).status == 200


async def test_msgpack_that_json_has_no_words_for(node: Node) -> None:
    bodies: list[Any] = [msgspec.msgpack.Ext(5, b"x"), {None: 1}, {(1, 2): 3}, b"fine"]
    items = msgspec.msgpack.encode([{"topic": "a", "body": body} for body in bodies])
    answer = await node.ask("POST", BATCH, items, Content_Type="application/msgpack")
    assert answer.status == 200, answer
    assert [r["error"]["status"] if "error" in r else 0 for r in answer.json["results"]] == [400, 400, 400, 0]
    assert [draft.body for draft in node.service.published] == [b"fine"]


# ---- numbers and names without end


async def test_a_range_of_a_million_bytes_digits(node: Node) -> None:
    await node.ask("POST", "/v1/topics/orders/messages?delay=1h", b"x" * 5_000)
    (hour,) = (await node.ask("GET", "/v1/hours")).json["hours"]
    answer = await node.ask("GET", f"/v1/hours/{hour['hour']}/log", Range="bytes=0-" + "9" * 5000)
    assert (answer.status, len(answer.body)) == (200, int(hour["log"]["bytes"]))


@pytest.mark.parametrize("text", ["1" * 101, "1d" * 51, "0." + "0" * 200, "9" * 1_000_000])
def test_numbers_without_end(text: str) -> None:
    for parse in (parse_duration, parse_instant):
        with pytest.raises(BadRequest, match="is not a"):
            parse("delay", text)


async def test_names_without_end(node: Node) -> None:
    name = "x" * 200_000
    answer = await node.ask("POST", BATCH, [{"topic": "a", name: 1}])
    assert (answer.status, len(answer.body) < 2_000) == (400, True)
    assert "'xxx" in answer.json["detail"]
