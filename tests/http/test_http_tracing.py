"""W3C Trace Context: what comes with a publish comes with the delivery, and costs those who do not trace nothing."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import msgspec
import pytest

from hadelay import AsyncClient
from hadelay.client.putoptions import Put
from hadelay.codec.meta import Meta, pack, unpack
from hadelay.codec.publishcommand import decode_body, encode_publish
from hadelay.model import Draft
from hadelay.server.webhooks.calls import Facts, call_headers
from tests.http.conftest import Node

TRACES = [f"00-0af7651916cd43dd8448eb211c8031{n:02x}-b7ad6b7169203331-01" for n in range(20)]
TRACE = TRACES[0]
PATH = "/v1/topics/orders/messages"


def traces(node: Node) -> list[str | None]:
    return [unpack(draft.meta).tp for draft in node.service.published]


async def test_a_trace_parent_is_kept_and_given_at_delivery(node: Node) -> None:
    sent = (await node.ask("POST", PATH, b"a", traceparent=TRACE)).json["id"]
    await node.ask("POST", PATH, b"b")
    assert traces(node) == [TRACE, None]
    assert (await node.ask("GET", f"/v1/messages/{sent}")).json["traceparent"] == TRACE
    first, second = (await node.ask("POST", "/v1/topics/orders/receive", {"max": 2})).json["messages"]
    assert first["traceparent"] == TRACE
    assert "traceparent" not in second


@pytest.mark.parametrize("wrong", ["", "00", TRACE + "0", TRACE.upper(), TRACE.replace("-", "_"), "x" * 55])
async def test_a_trace_parent_that_is_none_is_left_out(node: Node, wrong: str) -> None:
    assert (await node.ask("POST", PATH, b"a", traceparent=wrong)).status == 201
    answer = await node.ask("POST", "/v1/messages:batch", [{"topic": "orders", "traceparent": wrong}])
    assert "id" in answer.json["results"][0]
    assert traces(node) == [None, None]


async def test_a_trace_parent_beside_keys_options_and_meta(node: Node) -> None:
    own = {"Hadelay-Key": "k1", "Hadelay-Tags": "a,b", "Hadelay-Meta-Who": "me", "traceparent": TRACE}
    await node.ask("POST", PATH, b"a", **own)
    await node.ask("POST", PATH, b"b", **{"Hadelay-Key": "k2", "traceparent": TRACES[1]})
    first, second = (unpack(draft.meta) for draft in node.service.published)
    assert (first.key, first.tags, first.meta, first.tp) == ("k1", ["a", "b"], {"who": "me"}, TRACE)
    assert (second.key, second.tp) == ("k2", TRACES[1])


async def test_requests_that_differ_in_it_alone_are_parsed_once(node: Node) -> None:
    for trace in TRACES:
        await node.ask("POST", PATH, b"a", traceparent=trace)
    assert traces(node) == TRACES
    assert len(node.server.heads.recent) == 1
    parsed = node.server.heads._parse
    calls = []
    node.server.heads._parse = lambda text: calls.append(text) or parsed(text)  # type: ignore[func-returns-value,method-assign]
    await node.ask("POST", PATH, b"a", traceparent=TRACE)
    await node.ask("POST", PATH, b"a")
    assert calls == []


async def test_items_of_a_batch_have_their_own_or_the_requests(node: Node) -> None:
    items = [
        {"topic": "orders", "body": "a"},
        {"topic": "orders", "body": "a", "traceparent": TRACES[1]},
        {"topic": "orders", "body": "a", "key": "k", "tags": ["t"]},
        {"topic": "orders", "body": "a", "traceparent": TRACES[2], "meta": {"who": "me"}},
    ]
    await node.ask("POST", "/v1/messages:batch", items, traceparent=TRACE)
    assert traces(node) == [TRACE, TRACES[1], TRACE, TRACES[2]]
    node.service.published.clear()
    plain = [
        {"topic": "orders", "body": b"a"},
        {"topic": "orders", "body": b"a"},
        {"topic": "orders", "body": b"a", "key": "x"},
    ]
    packed = msgspec.msgpack.encode(plain)
    await node.ask("POST", "/v1/messages:batch", packed, Content_Type="application/msgpack", traceparent=TRACE)
    assert traces(node) == [TRACE] * 3


def fingerprint(draft: Draft) -> int:
    return int(decode_body(encode_publish("n1", [draft])).keys["fingerprint"][0])


def test_a_retry_is_a_span_of_its_own_and_the_same_publish() -> None:
    def draft(meta: Meta, body: bytes = b"a") -> Draft:
        return Draft("orders", 0, True, 0, 0, pack(meta), body, b"key")

    plain = fingerprint(draft(Meta(ct="text/plain")))
    assert fingerprint(draft(Meta(ct="text/plain", tp=TRACE))) == plain
    assert fingerprint(draft(Meta(ct="text/plain", tp=TRACES[1]))) == plain
    assert fingerprint(draft(Meta(ct="text/html", tp=TRACE))) != plain
    assert fingerprint(draft(Meta(ct="text/plain", tp=TRACE), b"b")) != plain


def test_a_webhook_gets_the_alert() -> None:
    facts = Facts("ID", "orders", "/c/topics/orders", "2026-11-20T18:00:00.000Z", 1, 0, False, Meta(tp=TRACE))
    assert call_headers(facts, [], [], 0, b"")["traceparent"] == TRACE
    assert "traceparent" not in call_headers(facts._replace(meta=Meta()), [], [], 0, b"")


async def test_the_client_sends_the_present_span(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(trace_id=10, span_id=11, trace_flags=1, is_valid=True)
    span = SimpleNamespace(get_span_context=lambda: context)
    ours = f"00-{10:032x}-{11:016x}-01"
    async with AsyncClient(node.url) as client:
        await client.put("orders", b"a")
        monkeypatch.setitem(sys.modules, "opentelemetry.trace", SimpleNamespace(get_current_span=lambda: span))  # type: ignore[misc]
        await client.put("orders", b"b")
        await client.put("orders", b"c", traceparent=TRACE)
        await client.put_many([Put(topic="orders", body=b"d"), Put(topic="orders", body=b"e", traceparent=TRACE)])
        context.is_valid = False
        await client.put("orders", b"f")
        assert traces(node) == [None, ours, TRACE, ours, TRACE, None]
        received = {message.body: message.traceparent for message in await client.receive("orders", max=10)}
        assert received[b"b"] == ours
        assert received[b"a"] is None


def test_a_topics_header_replaces_a_messages_in_any_case() -> None:
    meta = Meta(fw={"x-trace": "message", "x-other": "message"})
    facts = Facts("ID", "orders", "/c/topics/orders", "2026-11-20T18:00:00.000Z", 1, 0, False, meta)
    sent = call_headers(facts, [], [("X-Trace", "topic")], 0, b"")
    assert [(name.lower(), text) for name, text in sent.items() if name.lower().startswith("x-")] == [
        ("x-other", "message"), ("x-trace", "topic"),
    ]  # fmt: skip


def test_no_header_of_a_topic_or_message_stands_beside_one_of_the_cluster() -> None:
    """Topics may have such headers from before they were refused."""
    meta = Meta(fw={"traceparent": "message"}, tp=TRACE)
    facts = Facts("ID", "orders", "/c/topics/orders", "2026-11-20T18:00:00.000Z", 7, 0, False, meta)
    own = [("Hadelay-Attempt", "1"), ("Traceparent", "topic"), ("X-Own", "topic")]
    sent = call_headers(facts, [], own, 0, b"")
    assert len({name.lower() for name in sent}) == len(sent)
    assert (sent["hadelay-attempt"], sent["traceparent"], sent["X-Own"]) == ("7", TRACE, "topic")
