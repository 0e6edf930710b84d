"""What happens between the bytes: pieces, pipelines, hang-ups, slow readers, crowds, and the end of a node."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import random
import re
import resource
import socket
import sys
from itertools import pairwise

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos.freeports import free_ports
from hadelay.api.service import Receipts
from hadelay.errors import ConfigError, HadelayError
from hadelay.http.app import HttpServer
from hadelay.settings.node import HttpConfig
from tests.http.conftest import Make, Node, read_answer, until
from tests.http.served import serve

POST = b"POST /v1/topics/orders/messages HTTP/1.1\r\nHost: x\r\n"


def publish(body: bytes, extra: bytes = b"") -> bytes:
    return POST + extra + b"Content-Length: %d\r\n\r\n" % len(body) + body


POLL = b'{"wait":"60s"}'
RECEIVE = b"POST /v1/topics/empty/receive HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(POLL), POLL)


async def open_warm(node: Node) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """aiohttp has answered on it before."""
    reader, writer = await node.raw()
    writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await read_answer(reader))[0] == 200
    return reader, writer


def bodies(node: Node) -> list[bytes]:
    return [bytes(draft.body) for draft in node.service.published]


def test_a_request_that_comes_with_the_connect_takes_the_short_way() -> None:
    """uvloop tells of a connection and of its first bytes in one pass, before aiohttp's handler has begun."""

    async def run() -> None:
        http = HttpConfig(listen="127.0.0.1:0", hosts=["x"])
        service = await serve(http)
        server = HttpServer(service, http, 1 << 40)
        host, port = (await server.start()).split(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(publish(b"at once"))
            client.setblocking(False)
            answer = await asyncio.get_running_loop().sock_recv(client, 1024)
        await server.stop(1)
        service.close()
        assert answer.startswith(b"HTTP/1.1 201 ")
        # Only the short way remembers heads.
        assert len(server.heads.recent) == 1

    uvloop.run(run())


@pytest.mark.parametrize("cut", [1, 5, 30, 60, 90, -1])
async def test_a_request_in_two_pieces(node: Node, cut: int) -> None:
    reader, writer = await open_warm(node)
    for n in range(4):
        request = publish(b"body %d" % n)
        writer.write(request[:cut])
        await writer.drain()
        for _ in range(20):
            await asyncio.sleep(0)
        writer.write(request[cut:])
        assert (await read_answer(reader))[0] == 201
        writer.write(publish(b"whole %d" % n))
        assert (await read_answer(reader))[0] == 201
    assert len(bodies(node)) == 8
    assert bodies(node)[6:] == [b"body 3", b"whole 3"]


async def test_a_large_body_and_then_small_ones(roomy: Node) -> None:
    node = roomy
    reader, writer = await open_warm(node)
    for body in (b"x" * 900_000, b"a", b"y" * 900_000, b"b"):
        writer.write(publish(body))
        assert (await read_answer(reader))[0] == 201
    assert [len(body) for body in bodies(node)] == [900_000, 1, 900_000, 1]


async def test_pipelined_requests_are_answered_in_order(node: Node) -> None:
    reader, writer = await open_warm(node)
    node.service.hold()
    gets = b"GET /v1/topics/none HTTP/1.1\r\nHost: x\r\n\r\n"
    writer.write(publish(b"0") + publish(b"1") + gets + publish(b"2") + publish(b"3", b"Expect: 100-continue\r\n"))
    await until(lambda: bool(node.service.deferred))
    writer.write(publish(b"4") * 3)
    await asyncio.sleep(0.01)
    assert len(node.service.deferred or ()) == 1  # one at a time, so that the answers keep the order
    node.service.release()
    statuses = []
    while len(statuses) < 9:
        status, _, _ = await read_answer(reader)
        statuses.append(status)
    assert statuses == [201, 201, 404, 201, 100, 201, 201, 201, 201]
    assert bodies(node) == [b"0", b"1", b"2", b"3", b"4", b"4", b"4"]


async def test_a_thousand_pipelined(node: Node) -> None:
    reader, writer = await open_warm(node)
    writer.write(b"".join(publish(b"%d" % n) for n in range(1000)))
    ids = []
    for _ in range(1000):
        status, headers, _ = await read_answer(reader)
        assert status == 201
        ids.append(headers["location"])
    assert bodies(node) == [b"%d" % n for n in range(1000)]
    assert all(a < b for a, b in pairwise(ids))


def post(path: str, body: bytes, extra: bytes = b"") -> bytes:
    head = b"POST %b HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n" % (path.encode(), extra, len(body))
    return head + body


SHORT = [
    (
        post("/v1/messages:batch", b'[{"topic":"a","body":"x"},{"topic":"/"}]', b"Content-Type: application/json\r\n"),
        200,
    ),
    (post("/v1/messages:batch", b"[]", b"Content-Type: text/csv\r\n"), 415),
    (post("/v1/messages:batch", b"[]", b"Hadelay-Delay: 1\r\nContent-Type: application/json\r\n"), 400),
    (post("/v1/topics/none/receive", b""), 200),
    (post("/v1/topics/none/receive?redirect=false", b'{"max":5}', b"Accept: application/msgpack\r\n"), 200),
    (post("/v1/topics/none/receive?redirct=false", b'{"max":5}'), 400),
    (post("/v1/topics/none/receive", b'{"max":0}'), 400),
    (post("/v1/receive", b'{"topics":["a%2Fb"]}'), 400),
    (post("/v1/leases:ack", b'{"leases":["0"]}'), 200),
    (post("/v1/leases:nack", b'{"leases":["0"],"delay":"5s"}'), 200),
    (post("/v1/leases:extend", b'{"leases":["0"],"lease":"0s"}'), 400),
    (post("/v1/leases:ack", b'{"leases":1}'), 400),
    (post("/v1/leases:ack", b"<a/>", b"Content-Type: text/xml\r\n"), 415),
    (post("/v1/leases:acq", b"{}"), 404),
    *(
        (post(path, body).replace(b"POST", method, 1), expected)
        for method, path, body, expected in (
            (b"GET", "/v1/messages/nonsense", b"{}", 400),
            (b"GET", "/v1/messages/0000000000000?body=false&stale=true", b"", 404),
            (b"GET", "/v1/messages/0000000000000?body=false&body=false", b"", 400),
            (b"GET", "//v1/messages/0000000000000", b"", 404),
            (b"GET", "/v1/topics/orders/keys/a%2Fb", b"", 404),
            (b"GET", "/v1/topics/orders/keys/%ff", b"", 400),
            (b"DELETE", "/v1/topics/orders/keys/%C3%A4", b"x", 404),
            (b"DELETE", "/v1/topics/orders/keys/", b"", 400),
            (b"PATCH", "/v1/topics/orders/keys/a:b", b'{"delay":"1h"}', 404),
            (b"PATCH", "/v1/messages/0000000000000", b'{"dealy":"1h"}', 400),
            (b"PUT", "/v1/messages/0000000000000", b"{}", 405),
        )
    ),
]


@pytest.mark.parametrize(("request_", "expected"), SHORT)
async def test_both_ways_give_the_same_answer(make_node: Make, request_: bytes, expected: int) -> None:
    """Whole, a request is answered without aiohttp; in pieces, by it."""
    answers = []
    for pieces in (
        [request_],
        [request_[:-1], request_[-1:]] if request_[-1:] != b"\n" else [request_[:9], request_[9:]],
    ):
        node = await make_node()
        reader, writer = await open_warm(node)
        for piece in pieces:
            writer.write(piece)
            for _ in range(20):
                await asyncio.sleep(0)
        status, headers, body = await read_answer(reader)
        assert status == expected
        kept = {name: value for name, value in headers.items() if name not in ("date", "server")}
        times = re.compile(rb'"(id|deliver_at)":"[^"]*"')
        answers.append((kept, times.sub(b"", body)))
    assert answers[0] == answers[1]


async def test_pipelined_requests_of_all_kinds_are_answered_in_order(node: Node) -> None:
    reader, writer = await open_warm(node)
    kinds = [*SHORT, (publish(b"x"), 201), (b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n", 200)] * 20
    random.Random(7).shuffle(kinds)
    writer.write(b"".join(data for data, _ in kinds))
    assert [(await read_answer(reader))[0] for _ in kinds] == [status for _, status in kinds]


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 1\r\nContent-Length: 2\r\n",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: +5\r\n",
        b"Content-Length: 5\r\n folded: x\r\n",
        b"Content-Length : 5\r\n",
        b"Content-Length: 5\r\nBad\x00Name: 1\r\n",
        b"Content-Length: -1\r\n",
    ],
)
async def test_heads_that_could_mean_two_things(node: Node, head: bytes) -> None:
    """Request smuggling: whatever it is, it publishes at most what stands before the next request."""
    reader, writer = await open_warm(node)
    writer.write(POST + head + b"\r\n" + b"hello" + publish(b"smuggled"))
    status, headers, _ = await read_answer(reader)
    assert status == 400
    assert headers["content-type"] == "application/problem+json"
    assert headers["hadelay-node"] == "n1"
    assert not node.service.published


async def test_bytes_that_are_not_http(node: Node) -> None:
    reader, writer = await node.raw()
    writer.write(b"\x16\x03\x01 hello there\r\n\r\n")
    status, headers, body = await read_answer(reader)
    assert status == 400
    assert headers["content-type"] == "application/problem+json"
    assert b"retryable" in body
    assert await reader.read() == b""


async def test_http_10_and_connection_close(node: Node) -> None:
    for head in (b"Connection: close\r\n",):
        reader, writer = await open_warm(node)
        writer.write(publish(b"x", head))
        assert (await read_answer(reader))[0] == 201
        assert await reader.read() == b""


async def test_a_repeated_head_is_known_but_its_body_is_not(node: Node) -> None:
    reader, writer = await open_warm(node)
    for body in (b"one", b"two", b"six"):
        writer.write(publish(body))
        await read_answer(reader)
    assert bodies(node) == [b"one", b"two", b"six"]
    assert publish(b"")[: -len(b"0\r\n\r\n")] + b"3\r\n\r\n" in node.server.heads.recent


async def test_remembered_heads_are_bounded(node: Node) -> None:
    node.server.heads.capacity = 10
    reader, writer = await open_warm(node)
    for n in range(50):
        writer.write(publish(b"x", b"Hadelay-Delay: %d\r\n" % n) + publish(b"x", b"Idempotency-Key: k%d\r\n" % n))
        assert (await read_answer(reader))[0] == 201
        assert (await read_answer(reader))[0] == 201
    assert len(node.server.heads.recent) <= 10
    assert not any(b"Idempotency" in head for head in node.server.heads.recent)


# ---- hang-ups


async def test_hang_up_in_the_middle_of_a_request(node: Node) -> None:
    for cut in (10, 60, -2):
        _, writer = await open_warm(node)
        writer.write(publish(b"never whole")[:cut])
        writer.close()
        await writer.wait_closed()
    assert (await node.ask("GET", "/livez")).status == 200
    assert not node.service.published


async def test_hang_up_while_a_publish_is_under_way(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    for extra in (b"", b"Accept: a\r\nTE: trailers\r\n"):
        _, writer = await open_warm(node)
        node.service.hold()
        writer.write(publish(b"x", extra))
        await until(lambda: bool(node.service.deferred))
        writer.transport.abort()
        await until(lambda: len(node.server._servers[0].connections) == 0)
        node.service.release()
    await until(lambda: len(node.service.published) == 2)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


async def test_hang_up_while_a_poll_waits_withdraws_it(node: Node) -> None:
    _, writer = await node.raw()
    writer.write(RECEIVE)
    await until(lambda: node.server.waiting.count == 1)
    writer.close()
    await until(lambda: node.service.withdrawn == 1)
    assert node.server.waiting.count == 0


async def test_hang_up_with_more_requests_behind_a_poll_that_waits(node: Node) -> None:
    _, writer = await open_warm(node)
    writer.write(RECEIVE + publish(b"never begun"))
    await until(lambda: node.server.waiting.count == 1)
    writer.write(publish(b"nor this"))
    writer.close()
    await until(lambda: node.service.withdrawn == 1)
    assert node.server.waiting.count == 0
    assert not node.service.published


async def test_a_body_that_does_not_arrive(make_node: Make) -> None:
    node = await make_node(io_timeout_ms=50)
    reader, writer = await open_warm(node)
    writer.write(POST + b"Content-Length: 10\r\n\r\nhalf")
    status, _, body = await read_answer(reader)
    assert status == 408
    assert b'"retryable":true' in body
    writer.close()


async def test_an_idle_connection_is_closed(make_node: Make) -> None:
    node = await make_node(idle_timeout_ms=100)
    reader, writer = await open_warm(node)
    writer.write(publish(b"x"))
    await read_answer(reader)
    assert await reader.read() == b""
    half, writer = await node.raw()
    writer.write(b"POST /v1/top")
    assert await half.read() == b""


async def test_a_slow_commit_is_not_an_idle_connection(make_node: Make) -> None:
    node = await make_node(idle_timeout_ms=30)
    reader, writer = await open_warm(node)
    node.service.hold()
    writer.write(publish(b"x"))
    await until(lambda: bool(node.service.deferred))
    await asyncio.sleep(0.1)
    node.service.release()
    assert (await read_answer(reader))[0] == 201


async def test_a_slow_reader_is_dropped(make_node: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    async def length(hour: int, file: str) -> int:
        return 64 << 20

    async def read(hour: int, file: str, offset: int, length: int) -> bytes:
        return b"x" * length

    node = await make_node(io_timeout_ms=100)
    monkeypatch.setattr(node.service.files, "hour_file_length", length)
    monkeypatch.setattr(node.service.files, "read_hour_file", read)
    reader, writer = await node.raw()
    writer.write(b"GET /v1/hours/2026051008/log HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    await until(lambda: len(node.server._servers[0].connections) == 0)
    assert (await node.ask("GET", "/livez")).status == 200


async def test_a_pipelining_client_that_never_reads_is_slowed(make_node: Make) -> None:
    node = await make_node(io_timeout_ms=200)
    node.service.publish = lambda drafts, key, done, by="": done(Receipts([1], [0]), None)  # as fast as can be
    _, writer = await open_warm(node)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    request = publish(b"x") * 1000
    sent = 0
    try:
        while sent < 2_000_000:
            writer.write(request)
            await writer.drain()
            sent += 1000
    except ConnectionError:
        pass
    assert sent < 2_000_000  # it was held back, then dropped, before it could fill our memory
    assert (await node.ask("GET", "/livez")).status == 200


# ---- crowds


CROWD = """
import asyncio, sys
async def main(host, port, count, request):
    crowd = []
    for _ in range(count // 100):
        crowd += await asyncio.gather(*(asyncio.open_connection(host, port) for _ in range(100)))
        for _, writer in crowd[-100:]:
            writer.write(request)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.stdin.buffer.read(int(sys.argv[4]))))
"""


async def test_ten_thousand_waiting_polls(node: Node) -> None:
    """Their other ends are in a process of their own: one process seldom may have 20,000 files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 11_000:
        pytest.skip(f"needs 11,000 open files, the limit is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 11_000), hard))
    host, port = node.server.address.split(":")
    crowd = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CROWD, host, port, "10000", str(len(RECEIVE)), stdin=asyncio.subprocess.PIPE
    )
    assert crowd.stdin
    crowd.stdin.write(RECEIVE)
    await until(lambda: node.server.waiting.count == 10_000)
    one_more = await node.ask("POST", "/v1/topics/empty/receive", POLL)
    assert (one_more.status, one_more.json["type"]) == (429, "limit-reached")
    assert int(one_more.headers["Retry-After"]) >= 1
    assert (await node.ask("POST", "/v1/topics/orders/messages", b"x")).status == 201
    crowd.kill()
    await crowd.wait()
    await until(lambda: node.server.waiting.count == 0)


# ---- the end


async def test_draining_finishes_publishes_and_sends_polls_away(node: Node) -> None:
    reader, writer = await open_warm(node)
    poll_reader, poll_writer = await node.raw()
    idle_reader, _ = await open_warm(node)
    poll_writer.write(RECEIVE)
    await until(lambda: node.server.waiting.count == 1)
    node.service.hold()
    writer.write(publish(b"x"))
    await until(lambda: bool(node.service.deferred))
    stopping = asyncio.create_task(node.server.stop(5))
    status, headers, body = await read_answer(poll_reader)
    assert (status, headers["connection"]) == (503, "close")
    assert b"shutting down" in body
    assert b'"retryable":true' in body
    assert await idle_reader.read() == b""
    assert not stopping.done()
    node.service.release()
    assert (await read_answer(reader))[0] == 201
    assert await reader.read() == b""
    await stopping
    with pytest.raises(ConnectionError):
        await node.raw()


async def test_a_name_with_an_address_twice_and_one_of_a_family_that_is_not_here(
    make_node: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As /etc/hosts often has it: localhost in two lines, or as ::1 where the kernel has no IPv6."""
    own = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", free_ports(1)))
    foreign = (socket.AF_AX25, socket.SOCK_STREAM, 6, "", ("::1", 1, 0, 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *asked, **how: [foreign, own, own])
    node = await make_node(listen=f"localhost:{own[4][1]}")
    monkeypatch.undo()
    assert (await node.ask("GET", "/livez")).status == 200


async def test_a_port_in_use_is_named(node: Node, make_node: Make) -> None:
    with pytest.raises(ConfigError, match=f"{node.server.address} is in use"):
        await make_node(listen=node.server.address)


async def test_a_bug_is_a_problem_too(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(node.service, "publish", broken)
    monkeypatch.setattr(node.service.files, "names", broken)
    await node.ask("GET", "/livez")
    for answer in (
        await node.ask("POST", "/v1/topics/orders/messages", b"x"),
        await node.ask("GET", "/v1/names"),
    ):
        assert answer.status == 500
        assert answer.json["type"] == HadelayError.type
        assert not answer.json["outcome_known"], "it may have failed after the commit"
        assert b"secret" not in answer.body
        assert answer.headers["Hadelay-Node"] == "n1"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
async def test_a_node_without_room_to_read_sends_readers_elsewhere(
    node: Node, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(node.service.files, "names", full)
    for _ in range(2):  # at first aiohttp's way, then the short one, where there is one
        answer = await node.ask("GET", "/v1/names")
        assert (answer.status, answer.json["type"], answer.json["retryable"]) == (503, "overloaded", True)
        assert "disk is full" in answer.json["detail"]


# ---- any bytes, cut anywhere


HEADS = st.sampled_from(
    [b"", b"Hadelay-Delay: 5s\r\n", b"Idempotency-Key: k\r\n", b"Expect: 100-continue\r\n", b"Hadelay-Dealy: 1\r\n",
     b"Transfer-Encoding: chunked\r\n", b"Connection: keep-alive\r\n", b"Content-Type: a/b\r\n"]
)  # fmt: skip


def one_request(head: bytes, body: bytes) -> tuple[bytes, list[int]]:
    """(bytes, the statuses they are answered with)"""
    if head.startswith(b"Transfer"):
        chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        return POST + head + b"\r\n" + chunk + b"0\r\n\r\n", [201]
    request = publish(body, head)
    if head.startswith(b"Expect"):
        return request, [100, 201]
    return request, [400 if b"Dealy" in head else 201]


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(HEADS, st.binary(max_size=60)), min_size=1, max_size=12),
    cuts=st.lists(st.integers(0, 3000), max_size=12),
    slow=st.booleans(),
)
def test_any_pipeline_cut_anywhere(requests: list[tuple[bytes, bytes]], cuts: list[int], slow: bool) -> None:
    """The short way and aiohttp's take turns on one connection; nothing is lost, doubled or out of order."""
    # Each key once: the second would be refused, or answered by the first.
    requests = [(h.replace(b"k\r", b"k%d\r" % n), b) for n, (h, b) in enumerate(requests)]
    data = b"".join(one_request(head, body)[0] for head, body in requests)
    expected = [status for head, body in requests for status in one_request(head, body)[1]]

    async def run() -> None:
        http = HttpConfig(listen="127.0.0.1:0", hosts=["x"])
        service = await serve(http)
        server = HttpServer(service, http, 1 << 40)
        if slow:  # answers come a pass of the loop later, as from a log
            publish_now = service.publish
            service.publish = lambda *a: asyncio.get_running_loop().call_soon(publish_now, *a)  # type: ignore
        host, port = (await server.start()).split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        places = sorted({0, len(data), *(cut % len(data) for cut in cuts)})
        for start, end in pairwise(places):
            writer.write(data[start:end])
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert [(await read_answer(reader))[0] for _ in expected] == expected
        writer.close()
        wanted = [body for head, body in requests if b"Dealy" not in head]
        assert [bytes(draft.body) for draft in service.published] == wanted
        await server.stop(1)
        service.close()

    asyncio.run(run())


async def test_a_node_without_descriptors_pauses_and_accepts_later(node: Node) -> None:
    """The connection waits in the kernel, so the loop would otherwise call `accept` again and again."""
    listener, loop, failed = node.server._listeners[0], asyncio.get_running_loop(), 0
    assert listener is not None
    (real,) = listener._listening

    class Full:
        def fileno(self) -> int:
            return real.fileno()

        def close(self) -> None:
            real.close()

        def accept(self) -> tuple[socket.socket, tuple[str, int]]:
            nonlocal failed
            if failed < 2:
                failed += 1
                raise OSError(errno.EMFILE, "too many open files")
            return real.accept()

    full: socket.socket = Full()  # type: ignore[assignment]
    loop.remove_reader(real)
    listener._listening = [full]
    loop.add_reader(full, listener._accept, full)
    began = loop.time()
    assert (await node.ask("GET", "/livez")).status == 200
    assert loop.time() - began >= 0.15, "two pauses of a tenth of a second"
    assert failed == 2
