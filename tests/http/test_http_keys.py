"""Keys, rescheduling and delivering now, as HTTP has them. What apply decides: tests/ledger/scenarios/keys.txt."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hadelay.codec.meta import unpack
from hadelay.http.requestheads import RequestHeads
from tests.http.conftest import Node, unasked

KEYS = "/v1/topics/orders/keys/"
LATER = "2030-01-01T00:00:00.000Z"


async def put(node: Node, query: str, **headers: str) -> Any:
    return await node.ask("POST", "/v1/topics/orders/messages" + query, b"x", **headers)


@pytest.mark.parametrize("way", [{}, {"Connection": "close"}], ids=["short way", "routes"])
async def test_keep_replace_reject(node: Node, way: dict[str, str]) -> None:
    first = await put(node, "?key=a&delay=1h", **way)
    assert (first.status, first.json["key"]) == (201, "a")
    kept = await put(node, "?key=a", **way)
    assert (kept.status, kept.json) == (200, first.json | {"duplicate": True})
    refused = await put(node, "?key=a&on_conflict=reject", **way)
    assert (refused.status, refused.json["id"], refused.json["outcome"]) == (409, first.json["id"], "pending")
    second = await put(node, "?delay=1h", **{"Hadelay-Key": "a", "Hadelay-On-Conflict": "replace"}, **way)
    assert (second.status, second.json["replaced"]) == (201, first.json["id"])
    assert (await node.ask("GET", KEYS + "a")).json["id"] == second.json["id"]
    assert (await node.ask("GET", "/v1/messages/" + first.json["id"])).json["state"] == "cancelled"


async def allow_callbacks(node: Node) -> None:
    hook = {"url": "https://example.com/hook", "allow_per_message": True}
    assert (await node.ask("PUT", "/v1/topics/orders", {"webhook": hook})).status == 200


async def test_options_reach_the_draft(node: Node) -> None:
    await allow_callbacks(node)
    options = "?key=k%20%C3%A4&on_conflict=replace&max_wait=1h&tags=a,%20b,a&ttl=2h&callback=https://example.com/x"
    assert (await put(node, options)).json["key"] == "k ä"
    item = {
        "topic": "orders", "body": "x", "key": "k ä", "on_conflict": "replace", "max_wait": "1h",
        "tags": ["a", "b", "a"], "ttl": "2h", "callback": "https://example.com/x", "delay": "1h",
    }  # fmt: skip
    answer = (await node.ask("POST", "/v1/messages:batch", [item])).json["results"][0]
    assert "replaced" in answer
    single, batched = node.service.published
    for draft in (single, batched):
        assert (draft.key, draft.on_conflict, draft.max_wait_ms) == ("k ä".encode(), 1, 3_600_000)
        assert (draft.ttl_ms, draft.callback, draft.tag_mask.bit_count()) == (
            7_200_000,
            True,
            single.tag_mask.bit_count(),
        )
    seen = (await node.ask("GET", KEYS + "k%20%C3%A4")).json
    assert (seen["key"], seen["tags"]) == ("k ä", ["a", "b"])


async def test_header_fields_of_webhook_calls_reach_the_record(node: Node) -> None:
    own = {"Hadelay-Forward-X-Tenant": "7", "Hadelay-Forward-Authorization": "Bearer x"}
    assert (await put(node, "?key=a", **own)).status == 201
    assert (await put(node, "", **own)).status == 201
    item = {"topic": "orders", "body": "x", "forward": {"X-Tenant": "7", "authorization": "Bearer x"}}
    assert "id" in (await node.ask("POST", "/v1/messages:batch", [item])).json["results"][0]
    for draft in node.service.published[-3:]:
        assert unpack(draft.meta).fw == {"x-tenant": "7", "authorization": "Bearer x"}
    for wrong in ({"Hadelay-Forward-Host": "x"}, {"Hadelay-Forward-": "x"}, {"Hadelay-Forward-A": "x" * 1_025}):
        assert (await put(node, "", **wrong)).status == 400
    wrongs = [{"X": "1", "x": "2"}, {"a b": "x"}, {"X": "x" * 1_024, "Y": "y" * 1_024}]
    # What a receiver reads as said by the cluster, and what concerns a single connection.
    wrongs += [{name: "1"} for name in ("Hadelay-Schedule", "Expect", "Keep-Alive", "Trailer", "Proxy-Connection")]
    for wrong in wrongs:
        refused = (await node.ask("POST", "/v1/messages:batch", [{**item, "forward": wrong}])).json["results"][0]
        assert (refused["error"]["status"], refused["error"]["detail"].startswith("forward: ")) == (400, True)


@pytest.mark.parametrize("way", [{}, {"Connection": "close"}], ids=["short way", "routes"])
async def test_unique_for_reaches_the_draft_and_drops_a_settled_key(node: Node, way: dict[str, str]) -> None:
    first = await put(node, "?key=night&unique_for=1d&delay=1h", **way)
    await node.ask("DELETE", "/v1/messages/" + first.json["id"])
    again = await put(node, "", **{"Hadelay-Key": "night", "Hadelay-Unique-For": "1d"}, **way)
    assert (again.status, again.json) == (200, first.json | {"duplicate": True})
    item = {"topic": "orders", "body": "x", "key": "night", "unique_for": "1d"}
    for kind in ("application/json", "application/msgpack"):
        body = msgspec.msgpack.encode([item]) if "msgpack" in kind else msgspec.json.encode([item])
        answer = await node.ask("POST", "/v1/messages:batch", body, **{"Content-Type": kind})
        assert answer.json["results"][0] == {
            "id": first.json["id"], "deliver_at": first.json["deliver_at"], "duplicate": True
        }  # fmt: skip
    assert [draft.unique_ms for draft in node.service.published] == [86_400_000] * 4


async def test_topics_of_callbacks_reach_the_record(node: Node) -> None:
    await allow_callbacks(node)
    item = {"topic": "orders", "body": "x", "on_success": "done", "on_failure": "failed"}
    assert (await put(node, "?on_success=done&on_failure=failed")).status == 201
    assert (await put(node, "", **{"Hadelay-On-Success": "done", "Hadelay-On-Failure": "failed"})).status == 201
    assert "id" in (await node.ask("POST", "/v1/messages:batch", [item])).json["results"][0]
    for draft in node.service.published[-3:]:
        assert ((meta := unpack(draft.meta)).os, meta.of, draft.callback) == ("done", "failed", True)
    for wrong in ("no/topic", "orders~billing", ".."):
        refused = (await node.ask("POST", "/v1/messages:batch", [{**item, "on_success": wrong}])).json["results"][0]
        assert refused["error"]["status"] == 400


async def test_a_batch_answers_per_item(node: Node) -> None:
    items = [{"topic": "orders", "body": "x", "key": "k", "delay": "1h", "on_conflict": mode} for mode in
             ("reject", "keep", "replace", "reject")]  # fmt: skip
    first, kept, second, refused = (await node.ask("POST", "/v1/messages:batch", items)).json["results"]
    assert kept == first | {"duplicate": True}
    assert second["replaced"] == first["id"]
    assert (refused["error"]["status"], refused["error"]["id"]) == (409, second["id"])


async def test_look_ups_by_id_and_by_key(node: Node) -> None:
    """The same under both names."""
    for key in ("order/1:a", "b"):
        path = KEYS + key.replace("/", "%2F")
        made = (await put(node, f"?delay=1h&key={key}")).json
        for where in (path, "/v1/messages/" + made["id"]):
            moved = await node.ask("PATCH", where, {"deliver_at": LATER})
            assert (moved.status, moved.json) == (200, {"id": made["id"], "deliver_at": LATER})
        assert (await node.ask("GET", path)).json["deliver_at"] == LATER
        now = await node.ask("POST", f"/v1/messages/{made['id']}:deliver-now")
        assert (now.status, now.json["deliver_at"] < LATER) == (200, True)
        assert (await node.ask("DELETE", path)).json == {"outcome": "cancelled"}
        assert (await node.ask("DELETE", path)).json == {"outcome": "cancelled"}
        late = await node.ask("PATCH", path, {"delay": "1m"})
        assert (late.status, late.json["outcome"]) == (409, "cancelled")


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("PATCH", KEYS + "k", {}, 400, "give one of shift, delay and deliver_at"),
        ("PATCH", KEYS + "k", {"delay": "1h", "deliver_at": LATER}, 400, "give one of shift, delay and deliver_at"),
        ("PATCH", KEYS + "k", {"shift": "1h"}, 400, "give expected_deliver_at, too"),
        ("PATCH", KEYS + "k", {"shift": 0, "expected_deliver_at": LATER}, 400, "moves nothing"),
        ("PATCH", KEYS + "k", {"shift": "later", "expected_deliver_at": LATER}, 400, "shift"),
        ("PATCH", KEYS + "k", {"delay": "-1h"}, 400, "negative"),
        ("PATCH", KEYS + "k", {"delay": "800d"}, 422, "max_delay"),
        ("PATCH", KEYS + "k", {"dealy": "1h"}, 400, "did you mean"),
        ("PATCH", KEYS + "nobody", {"delay": "1h"}, 404, ""),
        ("GET", KEYS + "nobody", None, 404, ""),
        ("DELETE", KEYS + "nobody", None, 404, ""),
        ("GET", KEYS, None, 400, "1 to 1024"),
        ("GET", KEYS + "k" * 1_025, None, 400, "1 to 1024"),
        ("GET", KEYS + "k" * 1_024, None, 404, ""),
        ("GET", "/v1/topics/or%20ders/keys/k", None, 400, "topic"),
        ("POST", "/v1/messages/0000000000000:deliver-now", None, 404, ""),
        ("POST", "/v1/messages/nonsense:deliver-now", None, 400, "13 characters"),
        ("POST", "/v1/messages/0000000000000:deliver-then", None, 404, "openapi"),
    ],
)  # fmt: skip
async def test_wrong(node: Node, method: str, path: str, body: Any, status: int, words: str) -> None:
    await put(node, "?delay=1h&key=k")
    answer = await node.ask(method, path, body)
    assert answer.status == status, answer.json
    assert words in answer.json["detail"]


LINES = [
    b"Hadelay-Key: a-1", b"hadelay-key:a", b"HADELAY-KEY: a", b"Hadelay-Key: a b", b"Hadelay-Key: \xc3\xa4",
    b"Hadelay-Key: ", b"Hadelay-Key: " + b"k" * 257, b"Hadelay-On-Conflict: replace", b"Hadelay-Tags: x",
    b"Content-Type: text/x", b"Hadelay-Meta-Who: me", b"Idempotency-Key: i", b"Hadelay-Kee: a", b" folded",
    b"Expect: 100-continue",
]  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(lines=st.lists(st.sampled_from(LINES), max_size=4), query=st.sampled_from([b"", b"?delay=1h", b"?key=b"]))
def test_a_key_taken_out_of_a_known_head(lines: list[bytes], query: bytes) -> None:
    """Means what the whole head means, also when the rest of it was seen before."""
    server = unasked()
    heads = RequestHeads(server)
    for key in (b"first", b"a-1", b"other"):
        sent = [line.replace(b"a-1", key) for line in lines]
        first = b"POST /v1/topics/t/messages%b HTTP/1.1" % query
        text = b"\r\n".join([first, *sent, b"Host: x", b"Content-Length: 1", b"", b""])
        assert heads.parse(text) == RequestHeads(server)._parse(text)


@pytest.mark.parametrize("times", [12, 3_000])
def test_repeated_lines_are_parsed_once(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a head repeats lines that are taken out of it, the work is bounded."""
    server = unasked()
    heads, parse, parsed = RequestHeads(server), RequestHeads._parse, list[bytes]()
    monkeypatch.setattr(RequestHeads, "_parse", lambda heads, text: parsed.append(text) or parse(heads, text))  # type: ignore[func-returns-value]
    trace = b"traceparent: 00-%032x-%016x-01" % (1, 1)
    text = b"POST /v1/topics/t/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n"
    text += b"".join(line + b"\r\n" for line in (trace, b"Idempotency-Key: i", b"Hadelay-Key: k") for _ in range(times))
    assert heads.parse(text + b"\r\n") is None
    assert len(parsed) == 2
