"""Polls that a follower hands on to the leader, and leaders that are not what they seem."""

from __future__ import annotations

import asyncio
import socket
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from hadelay.api.service import Handed, Leader, ReceiveRequest
from hadelay.errors import NoLeader
from hadelay.http.polls import Relay
from hadelay.server.peers import PeerStatus
from hadelay.settings.node import HttpConfig
from tests.http.conftest import Make, Node, read_answer, until
from tests.http.peers import Peer, answer_of, peers
from tests.http.test_http_connections import open_warm, post
from tests.http.test_http_shards import give, map_of

MESSAGES = "/v1/topics/orders/messages"


@pytest.mark.parametrize("case", [str.title, str.lower, str.upper])
async def test_a_relay_keeps_the_headers_however_they_are_written(make_node: Make, case: Any) -> None:
    follower, leader = await make_node(), await make_node()
    follower.service.leader = Leader("n2", leader.url, False)
    await leader.ask("POST", MESSAGES, b"\xff")
    reader, writer = await open_warm(follower)
    extra = "".join(f"{case(name)}: application/msgpack\r\n" for name in ("content-type", "accept")).encode()
    query = msgspec.msgpack.encode({"max": 1})
    writer.write(post("/v1/topics/orders/receive?redirect=false", query, extra))
    status, headers, body = await read_answer(reader)
    assert (status, headers["content-type"]) == (200, "application/msgpack"), body
    assert msgspec.msgpack.decode(body)["messages"][0]["body"] == b"\xff"
    assert leader.service.polls[-1].node == "n1", "the leader learns who relayed the receive"


async def test_a_leader_that_never_answers_a_relay(make_node: Make) -> None:
    """Frozen, or cut off without a word: the poll ends all the same, and what came of it is not known."""
    asked = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await reader.read()
        writer.close()

    frozen = await asyncio.start_server(hang, "127.0.0.1", 0)
    node = await make_node(io_timeout_ms=200)
    node.service.leader = Leader("n2", f"http://127.0.0.1:{frozen.sockets[0].getsockname()[1]}", False)
    poll = node.ask("POST", "/v1/topics/orders/receive?redirect=false", {"wait": "10ms"})
    answer = await asyncio.wait_for(poll, 20)
    assert asked.is_set()
    assert (answer.status, answer.json["outcome_known"], answer.json["retryable"]) == (504, False, True)
    assert node.server.waiting.count == 0
    frozen.close()


async def test_an_answer_that_comes_after_the_wait_is_relayed(make_node: Make) -> None:
    """The grant is committed after the poll's wait is over: the messages are leased, so the answer must arrive."""
    follower, leader = await make_node(), await make_node()
    follower.service.leader = Leader("n2", leader.url, False)
    await leader.ask("POST", MESSAGES, b"late")
    receive = leader.service.consume.receive

    async def late(ask: ReceiveRequest) -> Handed:
        await asyncio.sleep(0.1 + ask.wait_ms / 1000)
        return await receive(ask)

    leader.service.consume.receive = late  # type: ignore[method-assign]
    answer = await follower.ask("POST", "/v1/topics/orders/receive?redirect=false", {"wait": "50ms"})
    assert (answer.status, len(answer.json["messages"])) == (200, 1)


async def test_nodes_that_take_one_another_for_the_leader_do_not_relay_for_ever(make_node: Make) -> None:
    """As when two of them advertise the same address."""
    one, other = await make_node(max_waiting=50), await make_node(max_waiting=50)
    one.service.leader, other.service.leader = Leader("n2", other.url, False), Leader("n1", one.url, False)
    one.server.relay.known = lambda: {one.url, other.url}
    answer = await one.ask("POST", "/v1/topics/orders/receive?redirect=false", {"wait": "1s"})
    assert (answer.status, answer.json["type"]) == (503, "no-leader")
    assert sum(one.server.metrics.requests.values()) < 20


async def test_a_leader_whose_connections_are_not_taken(make_node: Make) -> None:
    """Its backlog is full: it was not asked, so nothing happened."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        crowd = [socket.socket() for _ in range(3)]
        for one in crowd:
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        node = await make_node(no_leader_wait_ms=100)
        node.service.leader = Leader("n2", f"http://127.0.0.1:{full.getsockname()[1]}", False)
        answer = await node.ask("POST", "/v1/topics/orders/receive?redirect=false")
        assert (answer.status, answer.json["outcome_known"]) == (503, True)
        for one in crowd:
            one.close()


async def test_a_relayed_poll_is_sent_away_when_the_node_stops(make_node: Make) -> None:
    """Like other polls. The leader may have leased messages already."""
    follower, leader = await make_node(), await make_node()
    follower.service.leader = Leader("n2", leader.url, False)
    reader, writer = await open_warm(follower)
    writer.write(post("/v1/topics/orders/receive?redirect=false", b'{"wait": "20s"}', b""))
    await until(lambda: leader.server.waiting.count == 1)
    stopping = asyncio.create_task(follower.server.stop(20))
    status, headers, body = await asyncio.wait_for(read_answer(reader), 5)
    assert (status, headers["connection"]) == (504, "close"), body
    assert b"with the same request_id" in body
    await asyncio.wait_for(stopping, 5)
    await until(lambda: leader.server.waiting.count == 0)


async def test_a_poll_waits_no_longer_because_the_leader_changed(node: Node) -> None:
    waits: list[int] = []

    async def deposed(ask: ReceiveRequest) -> Handed:
        waits.append(ask.wait_ms)
        await asyncio.sleep(0.02)
        raise NoLeader("deposed")

    node.service.consume.receive = deposed  # type: ignore[method-assign]
    assert (await node.ask("POST", "/v1/topics/orders/receive", {"wait": "5s"})).status == 503
    assert len(waits) > 1
    assert all(later < before for before, later in pairwise(waits))


async def test_a_redirect_to_a_strange_address_is_not_followed(make_node: Make) -> None:
    """A node that is no member any more, or lies, would get the client's token. Redirects go to addresses that this
    node knows, and never from https to http."""

    async def redirect(peer: Peer, _: int, request: bytes) -> None:
        path = request.split()[1].decode()
        peer.send(answer_of(b"", "307 Temporary Redirect", f"Location: {strange.url}{path}"))

    async def take(peer: Peer, _: int, request: bytes) -> None:
        peer.send(answer_of(b'{"messages": []}'))

    token = {"Authorization": "Bearer hd_secret"}
    async with peers(take) as strange, peers(redirect) as redirecting:
        node = await make_node()
        node.service.leader = Leader("n2", redirecting.url, False)
        path = "/v1/topics/orders/receive?redirect=false"
        answer = await node.ask("POST", path, {"max": 1}, **token)
        assert (answer.status, answer.json["type"], answer.json["outcome_known"]) == (503, "no-leader", True)
        assert strange.url in answer.json["detail"]
        assert not strange.requests
        node.server.relay.known = lambda: {strange.url}
        assert (await node.ask("POST", path, {"max": 1}, **token)).status == 200
        assert b"Bearer hd_secret" in strange.requests[0]


def test_addresses_that_a_relay_may_follow() -> None:
    relay = Relay(HttpConfig(), None, "n1")
    relay.known = lambda: {"http://a:1", "https://b:1"}
    assert relay._followed("http://a:1", "https://b:1") == "https://b:1"
    for there, why in (("http://a:1", "not encrypted"), ("https://b:1@evil", "no address"), ("", "no address")):
        with pytest.raises(NoLeader, match=why):
            relay._followed("https://b:1", there)


async def test_a_relay_follows_redirects_to_members_and_to_the_shard_map(make_node: Make) -> None:
    node = await make_node()
    node.service.raft_node.peers.peers["n9"] = PeerStatus("n9", "http://stranger:1")
    give(node, map_of(node, "http://127.0.0.1:1"))
    await node.ask("GET", "/v1/topics")
    assert node.server.relay.known() >= {"http://127.0.0.1:1"}
    assert "http://stranger:1" not in node.server.relay.known()
