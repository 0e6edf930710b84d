"""Requests for a topic of another shard: each node answers them as if it owned the topic."""

from __future__ import annotations

import asyncio
import time
from itertools import count
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from hadelay.errors import HadelayError
from hadelay.http import parts
from hadelay.http.access import Authenticator
from hadelay.http.forwarding.heads import forward_head
from hadelay.http.sharding import Forwarded
from hadelay.model import encode_id
from hadelay.rights import aws_key, aws_secret
from hadelay.settings.node import SecurityConfig
from hadelay.settings.shardmap import Rule
from tests.http.conftest import HERE, THERE, Answer, Make, Node, give, map_of, publish, read_answer, receive, until
from tests.http.peers import Peer, answer_of, peers
from tests.http.test_http_connections import open_warm, post


async def test_a_publish_is_stored_by_the_owner_of_its_topic(shards: tuple[Node, Node]) -> None:
    front, owner = shards
    for topic, node in ((HERE, front), (THERE, owner)):
        for asked in shards:
            answer = await publish(asked, topic, query="?delay=5s")
            assert answer.status == 201, answer.json
            assert answer.headers["Hadelay-Shard"] == str(shards.index(node))
            assert answer.headers["Location"] == f"/v1/messages/{answer.json['id']}"
            assert answer.headers.get("Hadelay-Direct") == (None if asked is node else node.url)
        assert [draft.topic for draft in node.service.published] == [topic, topic]


async def test_short_and_long_way_of_a_publish_are_answered_alike(shards: tuple[Node, Node]) -> None:
    """On the short way connection.py forwards the bytes; chunked bodies take the way through aiohttp."""
    front, owner = shards
    reader, writer = await open_warm(front)
    for _ in range(2):
        writer.write(post(f"/v1/topics/{THERE}/messages?delay=5s", b"short"))
        status, headers, body = await read_answer(reader)
        assert (status, headers["hadelay-shard"], headers["hadelay-direct"]) == (201, "1", owner.url)
        assert msgspec.json.decode(body)["topic"] == THERE
    assert Forwarded in [type(seen.asks) for seen in front.server.heads.recent.values()]
    chunked = b"POST /v1/topics/%b/messages?delay=5s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    writer.write(chunked % THERE.encode() + b"4\r\nlong\r\n0\r\n\r\n")
    status, headers, body = await read_answer(reader)
    assert (status, headers["hadelay-shard"], headers["hadelay-direct"]) == (201, "1", owner.url)
    assert [draft.body for draft in owner.service.published] == [b"short", b"short", b"long"]
    assert front.server.forwarder.connections == 1


async def test_headers_that_differ_from_publish_to_publish_are_forwarded(shards: tuple[Node, Node]) -> None:
    front, owner = shards
    for n in range(3):
        for _ in range(2):
            answer = await publish(front, THERE, Idempotency_Key=f"k{n}", Hadelay_Key=f"c{n}", Hadelay_Delay="5s")
            assert answer.status in (200, 201), answer.json
    assert [draft.key for draft in owner.service.published] == [b"c0", b"c1", b"c2"]
    assert owner.service.keys == [b"k0", b"k1", b"k2"]


async def test_a_name_that_is_too_long_is_refused_before_its_owner_is_looked_for(shards: tuple[Node, Node]) -> None:
    """Python reads no number of 5,000 digits."""
    front, _ = shards
    known = map_of(*shards)
    for node in shards:
        give(node, replace(known, rules=(Rule("far*", (0, 1), "number"), *known.rules)))
    long = "far" + "9" * 5_000
    reader, writer = await open_warm(front)
    for path in (f"/v1/topics/{long}/messages", f"/v1/topics/{long}:pause"):
        writer.write(post(path, b"{}", b"Content-Type: application/json\r\n"))
        status, _, body = await read_answer(reader)
        assert (status, msgspec.json.decode(body)["type"]) == (400, "bad-request"), body
    items = [{"topic": topic, "body": "x"} for topic in (long, "far1")]
    first, second = (await front.ask("POST", "/v1/messages:batch", items)).json["results"]
    assert (first["error"]["type"], "id" in second) == ("bad-request", True)
    assert [draft.topic for draft in shards[1].service.published] == ["far1"]


async def test_messages_are_found_by_the_shard_in_their_id(shards: tuple[Node, Node]) -> None:
    front, owner = shards
    made = (await publish(front, THERE, query="?delay=1h&key=k")).json["id"]
    for node in shards:
        found = await node.ask("GET", f"/v1/messages/{made}")
        assert (found.status, found.json["topic"], found.headers["Hadelay-Shard"]) == (200, THERE, "1")
        assert (await node.ask("GET", f"/v1/topics/{THERE}/keys/k")).json["id"] == made
    moved = await front.ask("PATCH", f"/v1/messages/{made}", {"delay": "2h"})
    assert moved.status == 200, moved.json
    waiting = await front.ask("GET", f"/v1/messages/{made}?wait=10ms")
    assert (waiting.status, waiting.json["state"]) == (200, "scheduled")
    assert (await front.ask("DELETE", f"/v1/messages/{made}")).json["outcome"] == "cancelled"
    assert (await owner.ask("GET", f"/v1/messages/{made}")).json["state"] == "cancelled"


async def test_ids_of_a_former_number_belong_to_the_same_shard(shards: tuple[Node, Node]) -> None:
    """The second shard had the number 7 before its restore. A number that nobody had is answered here."""
    front, _ = shards
    for number, shard in ((7, "1"), (9, "0")):
        text = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
        value = number << 56 | 400_000 << 32
        name = "".join(text[value >> shift & 31] for shift in range(60, -1, -5))
        answer = await front.ask("GET", f"/v1/messages/{name}")
        assert (answer.status, answer.headers["Hadelay-Shard"]) == (404, shard)


async def test_routes_of_a_topic_go_to_its_owner(shards: tuple[Node, Node]) -> None:
    front, _ = shards
    put = await front.ask("PUT", f"/v1/topics/{THERE}", {"lease": "1m"})
    assert (put.status, put.headers["Hadelay-Shard"]) == (200, "1"), put.json
    for path in (
        "",
        "/messages",
        "/dead",
        "/due?from=2030-01-01T00:00:00Z&to=2030-01-01T01:00:00Z&step=60s",
        "/subscriptions",
    ):
        answer = await front.ask("GET", f"/v1/topics/{THERE}{path}")
        assert (answer.status, answer.headers["Hadelay-Shard"]) == (200, "1"), answer.json
    head = await front.ask("HEAD", f"/v1/topics/{THERE}")
    assert (head.status, head.body) == (200, b"")
    paused = await front.ask("POST", f"/v1/topics/{THERE}:pause", {"reason": "why"})
    assert paused.json["settings"]["paused"] if "settings" in paused.json else paused.json["paused"]
    refused = await front.ask("GET", "/v1/topics/far.missing")
    assert (refused.status, refused.json["type"], refused.headers["Hadelay-Shard"]) == (404, "not-found", "1")
    gone = await front.ask("DELETE", f"/v1/topics/{THERE}")
    assert (gone.status, gone.body) == (204, b"")
    assert front.service.raft_node.ledger.topic(THERE) is None


async def test_a_receive_is_sent_to_the_owner_s_leader(shards: tuple[Node, Node]) -> None:
    front, owner = shards
    await publish(front, THERE, b"due")
    sent = await front.ask("POST", f"/v1/topics/{THERE}/receive?redirect=true", {"max": 1})
    assert (sent.status, sent.headers["Location"]) == (307, f"{owner.url}/v1/topics/{THERE}/receive?redirect=true")
    sent = await front.ask("POST", "/v1/receive", {"topics": [THERE, "far.more"]})
    assert (sent.status, sent.headers["Location"]) == (307, f"{owner.url}/v1/receive")
    relayed = await front.ask("POST", f"/v1/topics/{THERE}/receive?redirect=false", {"max": 1})
    assert [message["topic"] for message in relayed.json["messages"]] == [THERE]
    assert owner.service.polls[-1].node == "n1"
    assert await receive(owner, THERE) == []


async def test_a_receive_from_several_shards_is_refused_with_the_topics_of_each(shards: tuple[Node, Node]) -> None:
    front, _ = shards
    answer = await front.ask("POST", "/v1/receive", {"topics": [HERE, THERE, "more"]})
    assert (answer.status, answer.json["shards"]) == (409, {"0": [HERE, "more"], "1": [THERE]})


async def test_a_receive_whose_shard_nobody_answers_for(make_node: Make) -> None:
    front = await make_node()
    give(front, map_of(front, "http://127.0.0.1:1"))
    for query in ("", "?redirect=false"):
        answer = await front.ask("POST", f"/v1/topics/{THERE}/receive{query}", {})
        assert (answer.status, answer.json["type"]) == (503, "no-leader")
        assert "shard 1" in answer.json["detail"]
    assert (await publish(front, THERE)).status == 503
    assert (await publish(front, HERE)).status == 201


async def test_a_node_without_a_map_forwards_nothing(make_node: Make) -> None:
    node = await make_node()
    answer = await publish(node, THERE)
    assert answer.status == 201
    assert "Hadelay-Shard" not in answer.headers
    # The request of a shard that has the map already, while this one is joining.
    assert (await publish(node, THERE, Hadelay_Shard="0; map=3")).status == 201
    assert node.server.forwarder.connections == 0


# --- a request that was forwarded


async def test_a_forwarded_request_is_never_forwarded_again(shards: tuple[Node, Node]) -> None:
    front, owner = shards
    for ask in (
        lambda: publish(front, THERE, Hadelay_Shard="0; map=16"),
        lambda: front.ask("GET", f"/v1/topics/{THERE}", Hadelay_Shard="0; map=16"),
        lambda: front.ask("POST", f"/v1/topics/{THERE}/receive", {}, Hadelay_Shard="0; map=16"),
        lambda: front.ask("POST", "/v1/receive", {"topics": [THERE]}, Hadelay_Shard="0; map=16"),
    ):
        answer = await ask()
        assert (answer.status, answer.json["type"]) == (421, "misdirected")
        assert (answer.json["shard"], answer.json["map_version"]) == (1, 17)
        assert answer.json["nodes"] == {"n1": owner.url}
    assert not owner.service.published
    # An address of the map that leads to another shard's node.
    wrong = await publish(front, HERE, Hadelay_Shard="1; map=17")
    assert (wrong.status, wrong.json["shard"]) == (421, 0)
    assert (await publish(front, HERE, Hadelay_Shard="0; map=17")).status == 201
    assert (await publish(front, HERE, Hadelay_Shard="0")).status == 400


async def test_an_older_map_makes_one_detour(make_node: Make) -> None:
    """Shard 0 has the map before the change by which far.* went to shard 2; shard 1 has the map after it."""
    nodes = [await make_node(group=n) for n in range(3)]
    old = map_of(*nodes)
    new = msgspec.structs.replace(old, version=18, rules=(Rule("far.*", (2,)), Rule("*", (0,))))
    give(nodes[0], old)
    give(nodes[1], new)
    give(nodes[2], new)
    answer = await publish(nodes[0], THERE)
    assert (answer.status, answer.headers["Hadelay-Shard"]) == (201, "2"), answer.json
    assert not nodes[0].service.published
    assert not nodes[1].service.published


# --- while the map changes


async def check_change_of_the_map(front: Node, owner: Node) -> None:
    reader, writer = await open_warm(front)
    request = post(f"/v1/topics/{THERE}/messages?delay=5s", b"x")
    for known, shard in ((None, None), (map_of(front, owner), "1"), (map_of(front, owner, version=18), "1")):
        give(front, known)
        for _ in range(2):
            writer.write(request)
            _, headers, _ = await read_answer(reader)
            assert headers.get("hadelay-shard") == shard


async def test_a_change_of_the_map_holds_for_the_next_request(shards: tuple[Node, Node]) -> None:
    await check_change_of_the_map(*shards)


async def test_a_head_cached_over_a_change_of_the_map_is_noticed(
    shards: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deliberate bug."""
    monkeypatch.setattr(shards[0].server.router, "_forget", lambda: None)
    with pytest.raises(AssertionError):
        await check_change_of_the_map(*shards)


# --- clients and owners that leave


async def test_a_client_that_leaves_withdraws_its_request(make_node: Make) -> None:
    gone = asyncio.Event()

    async def act(peer: Peer, number: int, request: bytes) -> None:
        await peer.left()
        gone.set()

    async with peers(act) as owner:
        front = await make_node()
        give(front, map_of(front, owner.url))
        _, writer = await open_warm(front)
        writer.write(post(f"/v1/topics/{THERE}/messages", b"x"))
        await until(lambda: len(owner.requests) == 1)
        assert b"Hadelay-Shard: 1; map=17\r\n" in owner.requests[0]
        writer.close()
        await asyncio.wait_for(gone.wait(), 20)
        await until(lambda: front.server.forwarder.connections == 0)


async def test_an_owner_that_breaks_off_leaves_the_outcome_unknown(make_node: Make) -> None:
    async def act(peer: Peer, number: int, request: bytes) -> None:
        peer.send(answer_of(b'{"id"', "201 Created")[:-2])
        peer.close()

    async with peers(act) as owner:
        front = await make_node()
        give(front, map_of(front, owner.url))
        answer = await publish(front, THERE)
        assert (answer.status, answer.json["outcome_known"]) == (504, False)
        assert "shard 1" in answer.json["detail"]
        assert len(owner.requests) == 1
        answer = await publish(front, THERE, Idempotency_Key="k")
        assert (answer.status, len(owner.requests)) == (504, 3)


async def test_pipelined_requests_of_two_shards_are_answered_in_order(shards: tuple[Node, Node]) -> None:
    front, _ = shards
    reader, writer = await open_warm(front)
    topics = [THERE, HERE, THERE, THERE, HERE]
    writer.write(b"".join(post(f"/v1/topics/{topic}/messages", b"x") for topic in topics))
    found = [msgspec.json.decode((await read_answer(reader))[2])["topic"] for _ in topics]
    assert found == topics


# --- requests with parts of both shards


async def leased(*nodes: Node) -> list[str]:
    """Leases of a message of each topic, from the node that has it."""
    found = []
    for node, topic in zip(nodes, (HERE, THERE), strict=False):
        assert (await publish(node, topic)).status == 201
        found += [message["lease"] for message in await receive(node, topic)]
    return found


@pytest.mark.parametrize("form", ["json", "msgpack"])
async def test_leases_are_settled_by_the_shards_that_issued_them(shards: tuple[Node, Node], form: str) -> None:
    front, owner = shards
    near, far = await leased(*shards)
    codec: Any = msgspec.msgpack if form == "msgpack" else msgspec.json
    names = {"Content-Type": f"application/{form}", "Accept": f"application/{form}"}

    async def settle(kind: str, **document: Any) -> list[str]:
        answer = await front.ask("POST", f"/v1/leases:{kind}", codec.encode(document), **names)
        assert answer.status == 200, answer.json
        results = codec.decode(answer.body)["results"]
        assert [result["lease"] for result in results] == document["leases"]
        return [result["outcome"] for result in results]

    assert await settle("extend", leases=[far, near], lease="1m") == ["extended", "extended"]
    nonsense = await settle("ack", leases=["nonsense"])
    acked = await settle("ack", leases=[far, "nonsense", near], results=[{"a": 1.5}, None, "b"])
    assert acked == ["acked", *nonsense, "acked"]
    for node, topic, result in ((owner, THERE, {"a": 1.5}), (front, HERE, "b")):
        (message,) = node.service.ids
        found = (await front.ask("GET", f"/v1/messages/{encode_id(message)}")).json
        assert (found["topic"], found["result"]) == (topic, result)


async def test_a_part_of_leases_that_fails_fails_the_request(shards: tuple[Node, Node]) -> None:
    front, owner = shards
    near, far = await leased(*shards)
    shard = map_of(front, "http://127.0.0.1:1")
    give(front, shard)
    answer = await front.ask("POST", "/v1/leases:ack", {"leases": [far]})
    assert (answer.status, answer.json["outcome_known"]) == (503, True)
    answer = await front.ask("POST", "/v1/leases:ack", {"leases": [near, far]})
    assert (answer.status, answer.json["outcome_known"]) == (504, False)
    assert "shard 1" in answer.json["detail"]
    give(front, map_of(front, owner))
    answer = await front.ask("POST", "/v1/leases:ack", {"leases": [near, far]})
    assert [result["outcome"] for result in answer.json["results"]] == ["already_acked", "acked"]


async def test_leases_of_a_restored_shard_are_settled_before_the_map_has_its_number(shards: tuple[Node, Node]) -> None:
    front, owner = shards
    near, far = await leased(*shards)
    known = map_of(front, owner)
    other = replace(known, shards={**known.shards, 1: replace(known.shards[1], group=77)})
    for node in shards:
        give(node, other)
    assert owner.service.shards.known.index_of(owner.service.shards.group) is None

    async def settle(node: Node, kind: str, *leases: str) -> list[str]:
        answer = await node.ask(
            "POST", f"/v1/leases:{kind}", {"leases": leases, **({"lease": "1m"} if kind == "extend" else {})}
        )
        assert answer.status == 200, answer.json
        return [result["outcome"] for result in answer.json["results"]]

    strange = "Z" * (len(far) - 1) + "0"
    assert await settle(front, "extend", near, far) == ["extended", "extended"]
    assert await settle(owner, "extend", far, near) == ["extended", "extended"]
    assert await settle(front, "ack", far, strange, near) == ["acked", "lease_lost", "acked"]
    # While that shard does not answer, nobody knows.
    silent = replace(other, shards={**other.shards, 1: replace(other.shards[1], nodes={"n1": "http://127.0.0.1:1"})})
    give(front, silent)
    answer = await front.ask("POST", "/v1/leases:ack", {"leases": [far]})
    assert (answer.status, answer.json["outcome_known"]) == (503, True)
    give(front, map_of(front))
    assert await settle(front, "ack", far, near) == ["lease_lost", "already_acked"]


ITEMS = [
    {"topic": HERE, "body": "a", "delay": "5s"}, {"topic": THERE, "body": {"b": [1e3, None]}, "key": "k"},
    {"topic": "?", "body": "wrong"}, {"topic": THERE, "body_base64": "aGk=", "tags": ["t"], "delay": 1.5},
    {"topic": HERE, "body": "", "ttl": "1m"}, {"topic": THERE}, {"topic": THERE, "body": None},
]  # fmt: skip


def batch_of(form: str, items: list[dict[str, Any]]) -> tuple[bytes, str]:
    if form == "msgpack":
        return msgspec.msgpack.encode(items), "application/msgpack"
    if form == "lines":
        return b"\n".join(map(msgspec.json.encode, items)), "application/x-ndjson"
    return msgspec.json.encode(items), "application/json"


async def publish_batch(node: Node, form: str, items: list[dict[str, Any]], **headers: str) -> Answer:
    data, kind = batch_of(form, items)
    return await node.ask("POST", "/v1/messages:batch", data, **{"Content-Type": kind, **headers})


@pytest.mark.parametrize("form", ["json", "lines", "msgpack"])
async def test_a_batch_is_divided_over_the_shards(shards: tuple[Node, Node], make_node: Make, form: str) -> None:
    """Each message is stored as by a cluster without a map."""
    front, owner = shards
    alone = await make_node()
    expected = await publish_batch(alone, form, ITEMS)
    answer = await publish_batch(front, form, ITEMS)
    assert answer.status == expected.status == 200, answer.json
    results = answer.json["results"]
    assert [sorted(result) for result in results] == [sorted(result) for result in expected.json["results"]]
    assert [result.get("error", {}).get("type") for result in results] == [None] * 2 + ["bad-request"] + [None] * 4
    stored = {draft.topic: [] for draft in alone.service.published}
    for node, topic in ((front, HERE), (owner, THERE)):
        stored[topic] = [(draft.body, draft.meta, draft.key) for draft in node.service.published]
        assert {draft.topic for draft in node.service.published} == {topic}
    for topic, found in stored.items():
        assert found == [(d.body, d.meta, d.key) for d in alone.service.published if d.topic == topic]
    for result, item in zip(results, ITEMS, strict=True):
        if "id" in result:
            assert (await front.ask("GET", f"/v1/messages/{result['id']}")).json["topic"] == item["topic"]


async def check_repeated_batch(front: Node, owner: Node) -> None:
    """One part fails, and is repeated with the whole batch under its key: each message is stored once."""
    items = [{"topic": HERE, "body": "a"}, {"topic": THERE, "body": "b"}, {"topic": HERE, "body": "c"}]
    give(front, map_of(front, "http://127.0.0.1:1"))
    answer = await publish_batch(front, "json", items, **{"Idempotency-Key": "key"})
    assert answer.status == 200
    first, failed, last = answer.json["results"]
    assert (failed["error"]["type"], failed["error"]["outcome_known"]) == ("no-leader", True)
    assert "shard 1" in failed["error"]["detail"]
    give(front, map_of(front, owner))
    answers = [await publish_batch(front, "json", items, **{"Idempotency-Key": "key"}) for _ in range(2)]
    for n, again in enumerate(answers):
        results = again.json["results"]
        assert [result["id"] for result in (results[0], results[2])] == [first["id"], last["id"]]
        assert [result.get("duplicate", False) for result in results] == [True, n == 1, True]
    assert [len(node.service.published) for node in (front, owner)] == [2, 1]


async def test_a_part_of_a_batch_is_repeated_under_its_key(shards: tuple[Node, Node]) -> None:
    await check_repeated_batch(*shards)


async def test_deliberate_bugs_of_batches_are_noticed(
    shards: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    def new_key(*args: Any, **how: Any) -> Any:
        """A part is repeated under a new key."""
        method, target, fields, node = args
        fields = [(name, f"new {next(numbers)}".encode() if name.lower() == b"idempotency-key" else value)
                  for name, value in fields]  # fmt: skip
        return forward_head(method, target, fields, node, **how)

    def stored(self: HadelayError) -> dict[str, Any]:
        """A failed part is reported as stored."""
        return {}

    numbers = count()
    for where, name, bug in ((parts, "forward_head", new_key), (HadelayError, "document", stored)):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, bug)
            with pytest.raises((AssertionError, KeyError)):
                await check_repeated_batch(*shards)
        for node in shards:
            node.service.published.clear()


async def test_a_batch_of_another_shard_alone_is_forwarded_as_it_is(shards: tuple[Node, Node]) -> None:
    front, owner = shards
    answer = await publish_batch(front, "lines", [{"topic": THERE, "body": n} for n in range(3)])
    assert (answer.status, answer.headers["Hadelay-Shard"]) == (200, "1")
    assert len(owner.service.published) == 3
    give(front, map_of(front, "http://127.0.0.1:1"))
    assert (await publish_batch(front, "json", [{"topic": THERE}])).status == 503


async def test_messages_join_batches_of_their_own_shard(shards: tuple[Node, Node]) -> None:
    front = shards[0]
    made = await front.ask("POST", "/v1/batches?shard=0", {"key": "import", "callback": {"topic": HERE}})
    assert made.status == 201, made.json
    refused = await publish(front, THERE, query="?batch=import")
    assert (refused.status, refused.json["type"]) == (404, "not-found")
    assert f"in the shard of topic {THERE}" in refused.json["detail"]
    items = [{"topic": HERE, "batch": "import"}, {"topic": THERE, "batch": "import"}, {"topic": HERE}]
    whole = await publish_batch(front, "json", items, **{"Idempotency-Key": "k"})
    assert (whole.status, whole.json["type"]) == (422, "impossible")
    assert "several shards" in whole.json["detail"]
    assert [draft.topic for node in shards for draft in node.service.published] == [THERE], "the one that was refused"
    assert (await publish_batch(front, "json", [items[0], {"topic": THERE}])).status == 200
    assert (await publish(front, HERE, query="?batch=import")).status == 201


async def test_addresses_of_nodes_are_for_callers_with_a_token(shards: tuple[Node, Node]) -> None:
    front, _ = shards
    wrong = {"Hadelay-Shard": "1; map=17"}
    seen = await front.ask("GET", "/livez", **wrong)
    assert (seen.status, seen.json["nodes"]) == (421, {"n1": front.url}), "a cluster without tokens hides nothing"
    config = SecurityConfig(tokens=True)
    front.server.authenticator = Authenticator(front.service.access, config, time.monotonic, front.server.forget_heads)
    for path in ("/livez", "/openapi.json", "/metrics", "/v1/topics"):
        answer = await front.ask("GET", path, **wrong)
        assert answer.status in (401, 421), path
        assert b"127.0.0.1" not in answer.body, path


# --- tokens, and requests of one shard


async def test_a_request_of_one_shard_must_name_it(shards: tuple[Node, Node]) -> None:
    front, _ = shards
    refused = await front.ask("GET", "/v1/batches")
    assert (refused.status, refused.json["type"]) == (422, "impossible"), refused.json
    assert "?shard= (0, 1)" in refused.json["detail"]
    chosen = await front.ask("GET", "/v1/batches?shard=1")
    assert (chosen.status, chosen.headers["Hadelay-Shard"]) == (200, "1")
    assert (await front.ask("GET", "/v1/cluster")).headers["Hadelay-Shard"] == "0"
    assert (await front.ask("GET", "/v1/cluster?shard=1")).headers["Hadelay-Shard"] == "1"
    for wrong in ("2", "x", "1&shard=0", ""):
        assert (await front.ask("GET", f"/v1/jobs?shard={wrong}")).status == 400
    give(front, map_of(front))
    assert (await front.ask("GET", "/v1/batches")).status == 200, "the map has one shard alone"
    give(front, None)
    assert (await front.ask("GET", "/v1/jobs?shard=0")).status == 400, "without a map there are no shards"
    assert (await front.ask("GET", "/v1/jobs")).status == 200


async def test_tokens_are_created_and_revoked_in_all_shards(shards: tuple[Node, Node]) -> None:
    front, owner = shards
    made = await front.ask("POST", "/v1/tokens", {"name": "a", "scopes": ["read:*"], "lifetime": "1d"})
    assert (made.status, "missing" in made.json) == (201, False)
    (here,), (there,) = (node.service.access.tokens.values() for node in shards)
    assert (here.hash, here.name, here.scopes) == (there.hash, there.name, there.scopes)
    assert here.id == there.id == made.json["id"]
    give(front, map_of(front, "http://127.0.0.1:1"))
    missed = await front.ask("POST", "/v1/tokens", {"name": "b", "scopes": ["admin"]})
    assert (missed.status, missed.json["missing"]) == (201, [1])
    gone = await front.ask("DELETE", f"/v1/tokens/{here.id}")
    assert (gone.status, gone.json["outcome_known"]) == (504, False)
    give(front, map_of(front, owner))
    second = next(iter(front.service.access.tokens.values()))
    copied = {"name": "b", "scopes": ["admin"], "hash": second.hash.hex()}
    again = await front.ask("POST", "/v1/tokens?shard=1", copied)
    assert (again.status, "token" in again.json, again.json["id"]) == (201, False, second.id)
    assert (await front.ask("DELETE", f"/v1/tokens/{here.id}")).status == 204
    assert (await front.ask("DELETE", f"/v1/tokens/{second.id}")).status == 204
    assert [len(node.service.access.tokens) for node in shards] == [0, 0]
    assert (await front.ask("DELETE", f"/v1/tokens/{second.id}")).status == 404
    aws = await front.ask("POST", "/v1/tokens", {"name": "a", "scopes": ["read:*"], "aws": True})
    key = aws_key(aws.json["token"])
    assert (aws.status, aws.json["aws_secret"]) == (201, aws_secret(key))
    assert [token.aws_key for node in shards for token in node.service.access.tokens.values()] == [key, key]
    (listed,) = (await front.ask("GET", "/v1/tokens?hashes=true")).json["tokens"]
    assert (listed["aws_key"], "aws_key" in (await front.ask("GET", "/v1/tokens")).json["tokens"][0]) == (
        key.hex(),
        False,
    )
    for wrong in ({"hash": "12"}, {"aws": True}, {"aws_key": "12"}, {"aws_key": key.hex(), "hash": None}):
        assert (await front.ask("POST", "/v1/tokens", copied | wrong)).status == 400
