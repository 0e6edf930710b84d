"""Requests that a node forwards to another shard: bytes of one answer never reach another client, and an error says
whether the request may have had an effect."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest

from hadelay.errors import BadRequest, HadelayError, NoLeader, OutcomeUnknown, TooLarge
from hadelay.http.forwarding import exchange, pool
from hadelay.http.forwarding.exchange import Exchange, Odd, State, TooLong, WholeAnswer
from hadelay.http.forwarding.forwarder import Destination, Forwarder
from hadelay.http.forwarding.heads import ForwardHead, forward_head, shard_of
from hadelay.http.forwarding.pool import Asked, Failure, Pool, Request, Server
from hadelay.settings.node import HttpConfig
from tests.http.conftest import until
from tests.http.peers import Peer, Peers, answer_of, peers

ANSWER = answer_of(b'{"id": "0123456789ABC"}', "201 Created", "Content-Type: application/json", "Hadelay-Node: n1")


# --- one connection


def fed(answer: bytes, *, step: int = 1 << 20) -> tuple[Exchange, WholeAnswer | None]:
    """A connection after a request whose answer arrives in pieces of `step` bytes."""
    one, whole = Exchange(), None
    one.begin()
    for at in range(0, len(answer), step):
        whole = one.feed(answer[at : at + step])
    return one, whole


def feed(one: Exchange, data: bytes, step: int, found: list[WholeAnswer]) -> None:
    for at in range(0, len(data), step):
        if whole := one.feed(data[at : at + step]):
            found.append(whole)


@pytest.mark.parametrize("step", [1, 2, 7, 1 << 20])
def test_an_answer_is_whole_however_its_bytes_arrive(step: int) -> None:
    one, whole = fed(ANSWER, step=step)
    assert whole is not None
    assert (whole.status, whole.body) == (201, b'{"id": "0123456789ABC"}')
    assert whole.head + b"\r\n" + whole.body == ANSWER
    assert whole.fields[b"hadelay-node"] == b"n1"
    assert one.state is State.IDLE


def check_every_half_answer() -> None:
    """After any part of an answer, the connection carries no other request."""
    for size in range(len(ANSWER)):
        one, whole = fed(ANSWER[:size])
        assert (whole, one.state) == (None, State.ASKED), size
        with pytest.raises(AssertionError):
            one.begin()
        one.end()
        with pytest.raises(AssertionError):
            one.begin()


def test_half_an_answer_never_frees_a_connection() -> None:
    check_every_half_answer()


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        (answer_of(b""), True),
        (answer_of(b"x", "200 OK", "Connection: keep-alive"), True),
        (answer_of(b"x", "200 OK", "Connection: close"), False),
        (answer_of(b"x", "200 OK", "Connection: Keep-Alive, upgrade"), False),
        (b"HTTP/1.1 204 No Content\r\n\r\n", True),
        (answer_of(b"", "204 No Content"), True),
    ],
)
def test_a_connection_is_kept_only_if_its_node_keeps_it(answer: bytes, kept: bool) -> None:
    one, whole = fed(answer)
    assert whole is not None
    assert (one.state is State.IDLE) == kept
    assert b"onnection" not in whole.head


ODD = {
    "another protocol": b"SSH-2.0-OpenSSH\r\n",
    "HTTP/1.0": b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n",
    "an interim answer": b"HTTP/1.1 100 Continue\r\n\r\n" + ANSWER,
    "another protocol from now on": b"HTTP/1.1 101 Switching\r\nContent-Length: 0\r\n\r\n",
    "no length": b"HTTP/1.1 200 OK\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\nx",
    "two locations": b"HTTP/1.1 201 Created\r\nLocation: /a\r\nLocation: /b\r\nContent-Length: 1\r\n\r\nx",
    "a list of lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 1, 1\r\n\r\nx",
    "a negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
    "a signed length": b"HTTP/1.1 200 OK\r\nContent-Length: +1\r\n\r\nx",
    "chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
    "chunks and a length": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\nx",
    "a folded line": b"HTTP/1.1 200 OK\r\nA: b\r\n c\r\nContent-Length: 0\r\n\r\n",
    "a space before a colon": b"HTTP/1.1 200 OK\r\nContent-Length : 0\r\n\r\n",
    "a bare line feed": b"HTTP/1.1 200 OK\nContent-Length: 0\n\n" + b"x" * (17 << 10),
    "a zero byte": b"HTTP/1.1 200 OK\r\nA: \0\r\nContent-Length: 0\r\n\r\n",
    "a carriage return": b"HTTP/1.1 200 OK\r\nA: a\rb\r\nContent-Length: 0\r\n\r\n",
    "more than its length": answer_of(b"x") + b"y",
    "two answers": ANSWER + ANSWER,
    "a body without content": answer_of(b"x", "204 No Content"),
    "not modified": answer_of(b"", "304 Not Modified"),
    "a long head": b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 5_000,
    "a long head at once": b"HTTP/1.1 200 OK\r\nA: " + b"b" * (17 << 10) + b"\r\nContent-Length: 0\r\n\r\n",
}


@pytest.mark.parametrize("name", ODD)
def test_odd_answers_end_their_connection(name: str) -> None:
    for step in (1 << 20, 1):
        one = Exchange()
        one.begin()
        found: list[WholeAnswer] = []
        with pytest.raises(Odd):
            feed(one, ODD[name], step, found)
        # Byte by byte, bytes behind an answer arrive later: they end the connection all the same.
        assert len(found) <= (step == 1 and name in ("more than its length", "two answers"))
        assert one.state is State.ENDED


def test_a_long_answer_is_refused_by_its_head() -> None:
    with pytest.raises(TooLong):
        fed(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (exchange.MAX_BODY + 1))


def test_bytes_that_no_request_asked_for_end_a_connection() -> None:
    one = Exchange()
    with pytest.raises(Odd):
        one.feed(ANSWER)
    assert one.state is State.ENDED


# --- the pool


class Client:
    """A pool, and requests of it whose results can be awaited."""

    def __init__(self, *, full: Callable[[], bool] = lambda: False, connect_s: float = 5.0) -> None:
        self.pool = Pool(full, connect_s)

    def begin(self, server: Peers, name: str = "x", **how: Any) -> tuple[Asked, asyncio.Future[Any]]:
        found: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        data = f"POST /{name} HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n".encode()
        request = Request(data, how.pop("timeout_s", 20.0))
        there = Server("127.0.0.1", server.port, None)
        asked = self.pool.ask(there, request, lambda whole, failure: found.set_result(whole or failure), **how)
        return asked, found

    async def ask(self, server: Peers, name: str = "x", **how: Any) -> WholeAnswer | Failure:
        result: WholeAnswer | Failure = await asyncio.wait_for(self.begin(server, name, **how)[1], 20)
        return result


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    made = Client()
    yield made
    await made.pool.close()


def named(request: bytes) -> bytes:
    """An answer that has the request's path as its body."""
    return answer_of(request.split(b" ")[1])


async def check_stops(client: Client) -> None:
    """A peer stops in the middle of every byte of an answer. Each later request gets the answer to itself."""
    answers: list[bytes] = []

    async def act(peer: Peer, number: int, request: bytes) -> None:
        if number % 2:
            peer.send(named(request))
            return
        answers.append(request)
        peer.send(ANSWER[: number // 2])
        if number // 2 % 2:
            await asyncio.sleep(0)
            peer.close()
        else:
            await peer.left()

    async with peers(act) as server:
        for size in range(len(ANSWER)):
            waiting = size % 2 == 0
            lost = await client.ask(server, f"lost{size}", timeout_s=0.002 if waiting else 20.0)
            assert isinstance(lost, Failure), (size, lost)
            assert lost.sent, (size, lost)
            found = await client.ask(server, f"next{size}")
            assert isinstance(found, WholeAnswer), (size, found)
            assert found.body == b"/next%d" % size
        assert len(answers) == len(ANSWER)


async def test_a_peer_that_stops_in_the_middle_of_every_byte(client: Client) -> None:
    await check_stops(client)


async def test_a_connection_is_used_again(client: Client) -> None:
    async def act(peer: Peer, number: int, request: bytes) -> None:
        peer.send(named(request))

    async with peers(act) as server:
        for n in range(20):
            found = await client.ask(server, str(n))
            assert isinstance(found, WholeAnswer)
            assert found.body == b"/%d" % n
        assert server.connections == client.pool.count == 1


async def check_leaving_clients(client: Client) -> None:
    """A client leaves while its answer is on its way; the next client gets its own answer."""
    begun, go = asyncio.Event(), asyncio.Event()

    async def act(peer: Peer, number: int, request: bytes) -> None:
        if number == 0:
            peer.send(ANSWER[:40])
            begun.set()
            await go.wait()
            peer.send(ANSWER[40:])
        else:
            peer.send(named(request))

    async with peers(act) as server:
        asked, result = client.begin(server)
        await asyncio.wait_for(begun.wait(), 20)
        asked.cancel()
        go.set()
        for n in range(3):
            found = await client.ask(server, str(n))
            assert isinstance(found, WholeAnswer)
            assert found.body == b"/%d" % n
        assert not result.done()
        assert server.connections == 2


async def test_a_client_that_leaves_closes_its_connection(client: Client) -> None:
    await check_leaving_clients(client)


async def test_a_client_that_leaves_while_its_request_waits(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_CONNECTIONS", 1)
    go = asyncio.Event()

    async def act(peer: Peer, number: int, request: bytes) -> None:
        await go.wait()
        peer.send(named(request))

    async with peers(act) as server:
        first, (asked, left), last = (client.begin(server, name) for name in ("first", "left", "last"))
        await until(lambda: len(server.requests) == 1)
        asked.cancel()
        go.set()
        assert [(await one[1]).body for one in (first, last)] == [b"/first", b"/last"]
        assert not left.done()
        assert len(server.requests) == 2
        assert server.connections == 1


async def test_requests_beyond_the_limits_are_refused_unsent(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_CONNECTIONS", 2)
    monkeypatch.setattr(pool, "_WAITING", 3)

    async def act(peer: Peer, number: int, request: bytes) -> None:
        await peer.left()

    async with peers(act) as server:
        some = [client.begin(server)[1] for _ in range(2)]
        await until(lambda: len(server.requests) == 2)
        waiting = [client.begin(server)[1] for _ in range(3)]
        beyond = await client.ask(server)
        assert isinstance(beyond, Failure)
        assert not beyond.sent
        server.close_connections()
        assert [(await one).sent for one in some] == [True, True]
        await until(lambda: len(server.requests) == 4)
        server.close_connections()
        await until(lambda: len(server.requests) == 5)
        server.close_connections()
        assert [(await one).sent for one in waiting] == [True, True, True]
        assert client.pool.count <= 2


async def test_no_connection_in_time_is_unsent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_CONNECTIONS", 1)
    client = Client(connect_s=0.05)

    async def act(peer: Peer, number: int, request: bytes) -> None:
        await peer.left()

    async with peers(act) as server:
        first, _ = client.begin(server)
        late = await client.ask(server)
        assert isinstance(late, Failure)
        assert not late.sent
        first.cancel()
    await client.pool.close()
    refused = await Client().ask(server)
    assert isinstance(refused, Failure)
    assert not refused.sent
    assert "refused" in refused.reason.lower()


async def test_a_process_without_sockets_sends_nothing() -> None:
    client = Client(full=lambda: True)

    async def act(peer: Peer, number: int, request: bytes) -> None:
        peer.send(named(request))

    async with peers(act) as server:
        found = await client.ask(server)
        assert isinstance(found, Failure)
        assert not found.sent
        assert "socket" in found.reason
        assert server.connections == client.pool.count == 0


async def check_stray_bytes(client: Client) -> None:
    """A peer sends a second answer, which nobody asked for, after the first."""
    stray = asyncio.Event()

    async def act(peer: Peer, number: int, request: bytes) -> None:
        peer.send(named(request))
        if number == 0:
            await stray.wait()
            peer.send(ANSWER)
            await peer.left()

    async with peers(act) as server:
        await client.ask(server, "first")
        stray.set()
        await until(lambda: client.pool.count == 0)
        found = await client.ask(server, "next")
        assert isinstance(found, WholeAnswer)
        assert found.body == b"/next"


async def test_bytes_on_an_idle_connection_close_it(client: Client) -> None:
    await check_stray_bytes(client)


async def test_idle_connections_close(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_IDLE_S", 0.05)

    async def act(peer: Peer, number: int, request: bytes) -> None:
        peer.send(named(request))

    async with peers(act) as server:
        await asyncio.gather(*(client.ask(server, str(n)) for n in range(3)))
        assert client.pool.count == 3
        await until(lambda: client.pool.count == 0)
        assert isinstance(await client.ask(server), WholeAnswer)


async def test_an_early_answer_closes_a_connection_whose_request_is_half_sent(client: Client) -> None:
    """The rest of the request would be read as the next one."""

    async def act(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer_of(b"", "413 Content Too Large"))
        gone.append(writer)

    gone: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(act, "127.0.0.1", 0, limit=1 << 10)
    result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    large = b"POST / HTTP/1.1\r\nContent-Length: 50000000\r\n\r\n" + bytes(50_000_000)
    there = Server("127.0.0.1", server.sockets[0].getsockname()[1], None)
    client.pool.ask(there, Request(large, 20.0), lambda whole, failure: result.set_result(whole or failure))
    assert (await asyncio.wait_for(result, 20)).status == 413
    await until(lambda: client.pool.count == 0)
    for writer in gone:
        writer.close()
    server.close()


# --- deliberate bugs, each of which one of the checks above notices


def _kept_after_half(self: Exchange, data: bytes) -> WholeAnswer | None:
    self._head, self.state = self._head + data, State.IDLE
    return WholeAnswer(200, {}, b"", b"") if b"\r\n\r\n" in self._head else None


def _lenient(self: Exchange, data: bytes) -> WholeAnswer | None:
    """Bytes that nobody asked for are ignored."""
    if self.state is not State.ASKED:
        return None
    whole = self._read(data)
    self.state = State.ASKED if whole is None else State.IDLE
    return whole


def _left_open(self: Asked) -> None:
    """A request that is given up leaves its connection to the next one."""
    self.peer.waiting.pop(self, None)
    link, self.link = self.link, None
    if self.timer is not None:
        self.timer.cancel()
    if link is not None:
        link._asked, link.exchange = None, Exchange()
        link.free()


async def test_deliberate_bugs_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    bugs: list[tuple[Any, str, Any, Callable[[Client], Any]]] = [
        (Exchange, "feed", _kept_after_half, check_stops),
        (Exchange, "feed", _lenient, check_stray_bytes),
        (Asked, "_leave", _left_open, check_leaving_clients),
        (Asked, "_leave", _left_open, check_stops),
    ]
    for kind, name, bug, check in bugs:
        made = Client()
        with monkeypatch.context() as patch:
            patch.setattr(kind, name, bug)
            with pytest.raises((AssertionError, TimeoutError)):
                await asyncio.wait_for(check(made), 1)
        await made.pool.close()


# --- which node is asked, and what an error says


CONFIG = HttpConfig(io_timeout_ms=20_000, no_leader_wait_ms=5_000)
GET = forward_head("GET", "/v1/topics/t", [(b"Host", b"front")], "n1")
POST = forward_head("POST", "/v1/topics/t/messages", [(b"Host", b"front")], "n1")
KEYED = forward_head("POST", "/v1/topics/t/messages", [(b"Idempotency-Key", b"k")], "n1", keyed=True)
ELSEWHERE = '{"type": "misdirected", "shard": 2, "map_version": 18, "nodes": {"n1": "http://127.0.0.1:9"}}'


async def forwarded(by: Forwarder, head: ForwardHead, *urls: str, body: bytes = b"x") -> WholeAnswer | HadelayError:
    found: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    to = Destination(1, 17, {f"n{n}": url for n, url in enumerate(urls, 1)})
    by.ask(to, head, body, lambda answer, error: found.set_result(answer or error))
    result: WholeAnswer | HadelayError = await asyncio.wait_for(found, 30)
    return result


@pytest.fixture
async def forwarder() -> AsyncIterator[Forwarder]:
    made = Forwarder(CONFIG, None, "n1", lambda: False)
    yield made
    await made.close()


def answering(answer: bytes) -> Any:
    async def act(peer: Peer, number: int, request: bytes) -> None:
        peer.send(answer)

    return act


def breaking(first: int, then: bytes) -> Any:
    """Close the connection without an answer to the first requests; answer `then` to the others."""

    async def act(peer: Peer, number: int, request: bytes) -> None:
        if number < first:
            peer.close()
        else:
            peer.send(then)

    return act


#: A port of loopback at which nothing listens.
NOBODY = "http://127.0.0.1:1"


async def test_an_unreachable_node_is_passed_over(forwarder: Forwarder) -> None:
    async with peers(answering(answer_of(b"", "201 Created", "Hadelay-Leader: n2"))) as server:
        found = await forwarded(forwarder, POST, NOBODY, server.url)
        assert isinstance(found, WholeAnswer)
        assert found.status == 201
        to = Destination(1, 17, {"n1": NOBODY, "n2": server.url})
        assert forwarder.nodes(to) == [server.url, NOBODY]
        assert forwarder.leader_url(to) == server.url


async def test_nothing_sent_is_503_and_names_the_shard(forwarder: Forwarder) -> None:
    for head in (GET, POST, KEYED):
        found = await forwarded(forwarder, head, NOBODY)
        assert isinstance(found, NoLeader)
        assert found.detail.startswith(f"shard 1: {NOBODY}")
    assert isinstance(await forwarded(forwarder, POST), NoLeader)


async def check_unknown_outcomes(forwarder: Forwarder) -> None:
    """Bytes were sent: the outcome of a change is unknown, whatever a repetition is answered."""
    refusal = answer_of(b"", "503 Service Unavailable")
    for head, breaks, then, kind in (
        (POST, 1, answer_of(b"", "201 Created"), OutcomeUnknown),  # without a key, it is not repeated
        (KEYED, 1, answer_of(b"", "201 Created"), WholeAnswer),
        (KEYED, 2, answer_of(b"", "201 Created"), OutcomeUnknown),
        (KEYED, 1, refusal, OutcomeUnknown),  # the first one may have been carried out
        (GET, 1, answer_of(b""), WholeAnswer),
        (GET, 2, answer_of(b""), NoLeader),  # a read has no effect
        (GET, 1, refusal, WholeAnswer),
    ):
        async with peers(breaking(breaks, then)) as server:
            found = await forwarded(forwarder, head, server.url)
            assert isinstance(found, kind), (head, breaks, found)
            if head is not POST:
                assert len(server.requests) == min(breaks + 1, 2)


async def test_the_outcome_is_unknown_once_bytes_are_sent(forwarder: Forwarder) -> None:
    await check_unknown_outcomes(forwarder)


def batch_answer(*errors: str | None, form: str = "json") -> bytes:
    """Answer of a batch whose items have errors of these types; None: the item is stored."""
    results = [{"id": "1"} if name is None else {"error": {"type": name, "status": 400}} for name in errors]
    codec: Any = msgspec.msgpack if form == "msgpack" else msgspec.json
    return answer_of(codec.encode({"results": results}), "200 OK", f"Content-Type: application/{form}")


async def check_repeated_batches(forwarder: Forwarder) -> None:
    """The answer to a repetition counts if it is remembered under the key; the first try may be carried out yet."""
    for errors, kind in (
        ([None, None], WholeAnswer),
        ([None, "limit-reached", "bad-request"], WholeAnswer),
        (["limit-reached", "limit-reached"], OutcomeUnknown),
        ([None, "other-shard"], OutcomeUnknown),
        ([None, "forbidden"], OutcomeUnknown),
        ([], WholeAnswer),
    ):
        for form in ("json", "msgpack"):
            answer = batch_answer(*errors, form=form)
            async with peers(breaking(1, answer)) as server:
                found = await forwarded(forwarder, KEYED, server.url)
                assert isinstance(found, kind), (errors, form, found)
            async with peers(answering(answer)) as server:
                assert isinstance(await forwarded(forwarder, KEYED, server.url), WholeAnswer), "the first try"


async def test_errors_of_a_repeated_batch_count_only_if_they_are_remembered(
    forwarder: Forwarder, monkeypatch: pytest.MonkeyPatch
) -> None:
    await check_repeated_batches(forwarder)
    monkeypatch.setattr("hadelay.http.forwarding.forwarder._PASSING", frozenset())
    with pytest.raises(AssertionError):
        await check_repeated_batches(forwarder)


async def test_a_sent_request_whose_repetition_finds_nobody_is_unknown(forwarder: Forwarder) -> None:
    async with AsyncExitStack() as stack:

        async def act(peer: Peer, number: int, request: bytes) -> None:
            await stack.aclose()
            peer.close()

        server = await stack.enter_async_context(peers(act))
        found = await forwarded(forwarder, KEYED, server.url)
        assert isinstance(found, OutcomeUnknown), found


async def check_one_detour(forwarder: Forwarder) -> None:
    """A node says that another shard owns the topic: the request goes there once, and not further."""
    async with peers(answering(answer_of(b"", "201 Created"))) as owner:
        misdirected = answer_of(ELSEWHERE.encode(), "421 Misdirected Request")
        async with peers(answering(misdirected)) as wrong:
            forwarder.known = {2: Destination(2, 18, {"n1": owner.url})}.get
            found = await forwarded(forwarder, POST, wrong.url)
            assert isinstance(found, WholeAnswer)
            assert found.status == 201
            assert b"Hadelay-Shard: 1; map=17\r\n" in wrong.requests[0]
            assert b"Hadelay-Shard: 2; map=18\r\n" in owner.requests[0]
            # Two nodes that each name the other.
            back = answer_of(ELSEWHERE.encode(), "421 Misdirected Request")
            owner.act = answering(back)
            found = await forwarded(forwarder, POST, wrong.url)
            assert isinstance(found, NoLeader)
            assert "shard maps" in found.detail
            assert (len(wrong.requests), len(owner.requests)) == (2, 2)


async def test_a_misdirected_request_makes_one_detour(forwarder: Forwarder) -> None:
    await check_one_detour(forwarder)


@pytest.mark.parametrize(
    "url", ["http://a:99999999", "ftp://a", "http://a b", "http://a\r\nX: y", "http://u@a", "", "a"]
)
async def test_addresses_that_are_none_are_refused(forwarder: Forwarder, url: str) -> None:
    found = await forwarded(forwarder, POST, url)
    assert isinstance(found, NoLeader)
    assert "no address" in found.detail
    misdirected = answer_of(
        json.dumps({"shard": 2, "map_version": 18, "nodes": {"n1": url}}).encode(), "421 Misdirected"
    )
    for answer in (misdirected, answer_of(b'\xff{"nodes"', "421 Misdirected"), answer_of(b"[" * 5_000, "421 M")):
        async with peers(answering(answer)) as wrong:
            assert isinstance(await forwarded(forwarder, POST, wrong.url), NoLeader)


async def test_a_token_goes_to_no_address_that_an_answer_names(forwarder: Forwarder) -> None:
    """Of a 421, the shard counts; its addresses are those of this node's own map."""
    head = forward_head("POST", "/v1/topics/t/messages", [(b"Authorization", b"Bearer secret")], "n1")
    async with peers(answering(answer_of(b"", "201 Created"))) as stranger:
        named = {"shard": 2, "map_version": 18, "nodes": {"n1": stranger.url}}
        async with peers(answering(answer_of(json.dumps(named).encode(), "421 Misdirected"))) as wrong:
            assert isinstance(await forwarded(forwarder, head, wrong.url), NoLeader)
        assert stranger.requests == []


@pytest.mark.parametrize(
    ("fields", "keyed"),
    [
        # The key goes no further than this connection.
        ([(b"Connection", b"keep-alive, Idempotency-Key"), (b"Idempotency-Key", b"k")], True),
        # The route remembers no key.
        ([(b"Idempotency-Key", b"k")], False),
    ],
)
async def test_a_change_without_a_key_that_counts_is_sent_once(
    forwarder: Forwarder, fields: list[tuple[bytes, bytes]], keyed: bool
) -> None:  # fmt: skip
    head = forward_head("POST", "/v1/topics/t/messages", fields, "n1", keyed=keyed)
    async with peers(breaking(1, answer_of(b"", "201 Created"))) as server:
        assert isinstance(await forwarded(forwarder, head, server.url), OutcomeUnknown)
        assert len(server.requests) == 1


async def test_answers_have_a_limit_of_memory(forwarder: Forwarder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_MAX_PARTIAL", 10)

    async def half(peer: Peer, number: int, request: bytes) -> None:
        peer.send(answer_of(bytes(100))[:-50])

    async with peers(half) as server:
        assert isinstance(await forwarded(forwarder, GET, server.url), TooLarge)
        assert forwarder._pool is not None
        assert forwarder._pool.partial == 0


async def test_a_long_answer_to_a_read_is_explained(forwarder: Forwarder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "MAX_BODY", 10)
    async with peers(answering(answer_of(bytes(11)))) as server:
        assert isinstance(await forwarded(forwarder, GET, server.url), TooLarge)
        assert isinstance(await forwarded(forwarder, POST, server.url), OutcomeUnknown)


class Encrypted:
    """Certificates of a node that serves HTTPS."""

    client = ssl.create_default_context()


async def check_plain_addresses(kind: type[Forwarder]) -> None:
    """A node that serves HTTPS sends nothing to an address that does not."""
    by = kind(CONFIG, Encrypted(), "n1", lambda: False)  # type: ignore[arg-type]
    async with peers(answering(answer_of(b""))) as server:
        found = await forwarded(by, KEYED, server.url)
        assert isinstance(found, HadelayError)
        assert "not encrypted" in found.detail
        assert server.connections == 0
    await by.close()


async def test_no_token_goes_from_https_to_http() -> None:
    await check_plain_addresses(Forwarder)


async def test_deliberate_bugs_of_the_rules_are_noticed(forwarder: Forwarder, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unencrypted(Forwarder):
        def server(self, url: str) -> Server:
            return (
                super().server(url)._replace(tls=None)
                if url.startswith("https")
                else Server("127.0.0.1", int(url.rpartition(":")[2]), None)
            )

    with pytest.raises(AssertionError):
        await check_plain_addresses(Unencrypted)

    from hadelay.http.forwarding.forwarder import Forwarding

    over = Forwarding._over

    def unsent(self: Forwarding, answer: WholeAnswer | None, failure: Failure | None) -> None:
        """503 after bytes were sent."""
        over(self, answer, None if failure is None else failure._replace(sent=False))

    def on_and_on(self: Forwarding, answer: WholeAnswer) -> None:
        """Forwarded twice."""
        if answer.status == 421:
            self._redirected = False
        answered(self, answer)

    answered = Forwarding._answered
    for name, bug, check in (("_over", unsent, check_unknown_outcomes), ("_answered", on_and_on, check_one_detour)):
        with monkeypatch.context() as patch:
            patch.setattr(Forwarding, name, bug)
            with pytest.raises((AssertionError, TimeoutError)):
                await asyncio.wait_for(check(forwarder), 1)


# --- heads


def test_a_head_is_asked_for_as_a_get() -> None:
    """So that each answer on a connection has the body that its head says."""
    assert forward_head("HEAD", "/v1/topics/t", [], "n1").data("n2", 1, 17, b"").startswith(b"GET /v1/topics/t ")


def test_headers_of_the_client_s_connection_are_not_forwarded() -> None:
    fields = [
        (b"Host", b"front.example"), (b"Connection", b"keep-alive, X-Mine"), (b"X-Mine", b"1"), (b"TE", b"trailers"),
        (b"Expect", b"100-continue"), (b"Transfer-Encoding", b"chunked"), (b"Upgrade", b"h2c"), (b"Keep-Alive", b"5"),
        (b"Proxy-Authorization", b"Basic x"), (b"Content-Length", b"99"), (b"Origin", b"http://front.example"),
        (b"hadelay-shard", b"9; map=1"), (b"Authorization", b"Bearer t"), (b"Hadelay-Delay", b"5s"), (b"Via", b"1.1 p"),
    ]  # fmt: skip
    data = forward_head("POST", "/v1/topics/t/messages?key=k", fields, "n1").data("n2:8401", 1, 17, b"body")
    assert data == (
        b"POST /v1/topics/t/messages?key=k HTTP/1.1\r\nHost: n2:8401\r\nAuthorization: Bearer t\r\n"
        b"Hadelay-Delay: 5s\r\nVia: 1.1 p, 1.1 n1\r\nHadelay-Shard: 1; map=17\r\nContent-Length: 4\r\n\r\nbody"
    )


@pytest.mark.parametrize(
    ("target", "fields"),
    [
        ("/a b", []), ("/a\r\nX: y", []), ("a", []), ("/ä", []), ("/#a", []),
        ("/", [(b"A", b"b\r\nC: d")]), ("/", [(b"A", b"\0")]), ("/", [(b"A b", b"c")]), ("/", [(b"A:", b"c")]),
    ],
)  # fmt: skip
def test_heads_that_a_node_may_read_otherwise_are_refused(target: str, fields: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(BadRequest):
        forward_head("GET", target, fields, "n1")


def test_the_header_of_forwarded_requests_names_shard_and_map() -> None:
    assert shard_of("2; map=17") == (2, 17)
    for wrong in ("", "2", "2;map=17", "two; map=17", "2; map=17, 3; map=17", "-1; map=1"):
        with pytest.raises(BadRequest):
            shard_of(wrong)
