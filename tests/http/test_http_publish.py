"""Publishing, one and many: what is understood, what is refused, and that both ways in answer alike."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest

from hadelay.api.text import format_instant
from hadelay.codec.meta import unpack
from hadelay.errors import DiskFull, NoLeader, OutcomeUnknown, Overloaded
from hadelay.model import OWN_DELAY
from tests.http.conftest import Answer, Make, Node, read_answer

MESSAGES = "/v1/topics/orders/messages"
BATCH = "/v1/messages:batch"
DAY_MS = 86_400_000


@pytest.fixture(params=["short way", "routes"])
def way(request: pytest.FixtureRequest) -> dict[str, str]:
    """Expect: 100-continue is one of the things that only the routes deal with."""
    return {} if request.param == "short way" else {"Expect": "100-continue"}


async def test_a_publish_is_answered_as_documented(node: Node, way: dict[str, str]) -> None:
    await node.ask("POST", MESSAGES, b"warm")
    before = node.service.access.now_ms()
    answer = await node.ask("POST", MESSAGES + "?delay=15m", b"\x00\xff", Content_Type="a/b", **way)
    assert answer.status == 201
    assert answer.json.keys() == {"id", "topic", "deliver_at", "key"}
    assert answer.json["topic"] == "orders"
    assert answer.json["deliver_at"] >= format_instant(before + 900_000)
    assert answer.headers["Location"] == f"/v1/messages/{answer.json['id']}"
    assert answer.headers["Hadelay-Node"] == answer.headers["Hadelay-Leader"] == "n1"
    assert answer.headers["Content-Type"] == "application/json"
    assert "Date" in answer.headers
    draft = node.service.published[-1]
    assert (draft.topic, draft.when_ms, draft.relative) == ("orders", 900_000, True)
    assert draft.body == b"\x00\xff"
    assert msgspec.msgpack.decode(draft.meta) == {"ct": "a/b"}
    found = await node.ask("GET", answer.headers["Location"] + "?body=true")
    assert found.json["content_type"] == "a/b"
    assert base64.b64decode(found.json["body_base64"]) == b"\x00\xff"


WHEN = [
    ("", {}, (OWN_DELAY, True)),
    ("?delay=0", {}, (0, True)),
    ("?delay=2h30m", {}, (9_000_000, True)),
    ("?delay=1.5", {}, (1_500, True)),
    ("", {"Hadelay-Delay": "250ms"}, (250, True)),
    ("", {"hadelay-delay": "7d"}, (7 * DAY_MS, True)),
    ("?deliver_at=2026-11-20T18:00:00%2B08:00", {}, (1_795_168_800_000, False)),
    ("?deliver_at=2026-11-20T18:00:00+08:00", {}, (1_795_168_800_000, False)),
    ("?deliver_at=2028-02-29T00:00:00Z", {}, (1_835_395_200_000, False)),
    ("?deliver_at=1795168800000", {}, (1_795_168_800_000, False)),
    ("", {"Hadelay-Deliver-At": "2001-01-01T00:00:00Z"}, (978_307_200_000, False)),
    ("?deliver_at=1950-01-01T00:00:00Z", {}, (0, True)),
    ("?deliver_at=0", {}, (0, True)),
]


@pytest.mark.parametrize(("query", "headers", "expected"), WHEN)
async def test_times_of_delivery(
    node: Node, way: dict[str, str], query: str, headers: dict[str, str], expected: tuple[int, bool]
) -> None:
    answer = await node.ask("POST", MESSAGES + query, b"x", **headers, **way)
    assert answer.status == 201, answer.json
    assert (node.service.published[0].when_ms, node.service.published[0].relative) == expected


REFUSED = [
    ("?delay=-5", {}, 400, "negative"),
    ("?delay=soon", {}, 400, "not a duration"),
    ("?delay=731d", {}, 422, "beyond max_delay"),
    ("?delay=1000000000000d", {}, 422, "longest"),
    ("?deliver_at=1795168800", {}, 400, "seconds? use milliseconds"),
    ("?deliver_at=2027-02-29T00:00:00Z", {}, 400, "not a time"),
    ("?deliver_at=2026-11-20T18:00:00", {}, 400, "no time zone"),
    ("?deliver_at=99999999999999999", {}, 422, "latest time"),
    ("?delay=1&deliver_at=1795168800000", {}, 400, "contradict"),
    ("?delay=1", {"Hadelay-Delay": "1"}, 400, "twice"),
    ("?delay=1&delay=1", {}, 400, "twice"),
    ("?dealy=1h", {}, 400, "did you mean 'delay'?"),
    ("", {"Hadelay-Dealy": "1h"}, 400, "did you mean 'Hadelay-Delay'?"),
    ("", {"Hadelay-Node": "n1"}, 400, "unknown header"),
    ("?key=", {}, 400, "1 to 256 bytes, not 0"),
    ("", {"Hadelay-Key": "k" * 257}, 400, "1 to 256 bytes, not 257"),
    ("?key=a", {"Hadelay-Key": "b"}, 400, "twice"),
    ("?on_conflict=replace", {}, 400, "only allowed with a key"),
    ("?key=k&on_conflict=overwrite", {}, 400, "keep, replace or reject"),
    ("?key=k&max_wait=1h", {}, 400, "only allowed with on_conflict=replace"),
    ("?key=k&on_conflict=replace&max_wait=0", {}, 400, "more than 0"),
    ("?unique_for=1h", {}, 400, "unique_for is only allowed with a key"),
    ("?key=k&unique_for=0", {}, 400, "unique_for: must be more than 0"),
    ("?key=k&unique_for=soon", {}, 400, "unique_for"),
    ("?key=k&unique_for=7d1ms", {}, 422, "beyond the limit of 7 days"),
    ("?key=k&unique_for=1h&on_conflict=replace", {}, 400, "not allowed with on_conflict=replace"),
    ("?key=k&on_conflict=replace&max_wait=731d", {}, 422, "beyond max_delay"),
    ("", {"Hadelay-TTL": "0s"}, 400, "more than 0"),
    ("", {"Hadelay-TTL": "soon"}, 400, "not a duration"),
    ("", {"Hadelay-Tags": "a,,b"}, 400, "1 to 64 bytes"),
    ("", {"Hadelay-Tags": "x" * 65}, 400, "1 to 64 bytes"),
    ("", {"Hadelay-Tags": ",".join(f"t{n}" for n in range(17))}, 400, "at most 16"),
    ("", {"Hadelay-Callback": "ftp://x/"}, 400, "begins with http"),
    ("", {"Hadelay-Callback": "http://u:p@x/"}, 400, "password"),
    ("", {"Hadelay-Callback": "http:///x"}, 400, "no host"),
    ("", {"Idempotency-Key": "k" * 256}, 400, "255"),
    ("", {"Hadelay-Meta-a": "x" * 5000}, 400, "meta has"),
    ("", {"Content-Encoding": "gzip"}, 415, "Content-Encoding"),
    ("", {"Content-Type": "x" * 300}, 400, "Content-Type"),
    ("?ttl=-5", {}, 400, "ttl: '-5' is negative"),
    ("", {"Hadelay-Meta-": "x"}, 400, "no name"),
]


@pytest.mark.parametrize(("query", "headers", "status", "words"), REFUSED)
async def test_refused(
    node: Node, way: dict[str, str], query: str, headers: dict[str, str], status: int, words: str
) -> None:
    answer = await node.ask("POST", MESSAGES + query, b"x", **headers, **way)
    assert answer.status == status == answer.json["status"]
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert words in answer.json["detail"]
    assert answer.json.keys() >= {"type", "title", "status", "detail", "retryable", "outcome_known"}
    assert not node.service.published


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/topics//messages", 400),
        ("/v1/topics/a%2Fb/messages", 400),
        ("/v1/topics/a%20b/messages", 400),
        ("/v1/topics/%C3%BC/messages", 400),
        (f"/v1/topics/{'x' * 129}/messages", 400),
        ("/v1/topics/a/b/messages", 404),
        ("/v1/topics/orders/message", 404),
        ("/v2/topics/orders/messages", 404),
    ],
)
async def test_wrong_addresses(node: Node, path: str, status: int) -> None:
    answer = await node.ask("POST", path, b"x")
    assert answer.status == status == answer.json["status"]
    assert not node.service.published


async def test_meta_travels_with_the_message(node: Node, way: dict[str, str]) -> None:
    answer = await node.ask("POST", MESSAGES, b"", **{"Hadelay-Meta-Trace": "ä1", "hadelay-meta-b": ""}, **way)
    found = await node.ask("GET", f"/v1/messages/{answer.json['id']}")
    assert found.json["meta"] == {"trace": "ä1", "b": ""}


async def test_the_same_idempotency_key(node: Node, way: dict[str, str]) -> None:
    first = await node.ask("POST", MESSAGES, b"x", Idempotency_Key="k1", **way)
    again = await node.ask("POST", MESSAGES, b"x", Idempotency_Key="k1", **way)
    other = await node.ask("POST", MESSAGES, b"y", Idempotency_Key="k1", **way)
    assert (first.status, again.status, other.status) == (201, 200, 422)
    assert again.json == first.json | {"duplicate": True}
    assert again.headers["Location"] == first.headers["Location"]
    assert len((await node.ask("GET", MESSAGES)).json["messages"]) == 1


@pytest.mark.parametrize(
    ("error", "status", "retry_after", "known"),
    [
        (NoLeader("elections are on", retry_after_ms=500), 503, "1", True),
        (Overloaded("the queue is full", retry_after_ms=1500), 503, "2", True),
        (DiskFull("no space"), 507, None, True),
        (OutcomeUnknown("no commit in time"), 504, None, False),
    ],
)
async def test_errors_of_the_node(
    node: Node, way: dict[str, str], error: Any, status: int, retry_after: str | None, known: bool
) -> None:
    node.service.fail = error
    answer = await node.ask("POST", MESSAGES, b"x", **way)
    assert answer.status == status
    assert answer.json["retryable"] is True
    assert answer.json["outcome_known"] is known
    assert answer.headers.get("Retry-After") == retry_after
    assert answer.headers["Hadelay-Node"] == "n1"
    assert answer.json.get("retry_after_ms") == error.retry_after_ms


async def test_bodies_up_to_the_limit(make_node: Make, way: dict[str, str]) -> None:
    node = await make_node(roomy=True, max_body_bytes=300_000)
    fits = await node.ask("POST", MESSAGES, b"x" * 300_000, **way)
    assert fits.status == 201
    assert len(node.service.published[0].body) == 300_000
    over = await node.ask("POST", MESSAGES, b"x" * 300_001, **way)
    assert over.status == 413
    assert "max_body_bytes" in over.json["detail"]

    async def pieces() -> Any:
        for _ in range(4):
            yield b"x" * 100_000

    chunked = await node.ask("POST", MESSAGES, pieces())
    assert chunked.status == 413
    assert len(node.service.published) == 1


async def test_a_chunked_body_is_a_body(node: Node) -> None:
    async def pieces() -> Any:
        yield b"one "
        yield b"two"

    assert (await node.ask("POST", MESSAGES, pieces())).status == 201
    assert node.service.published[0].body == b"one two"


async def test_an_empty_body_is_a_message(node: Node, way: dict[str, str]) -> None:
    assert (await node.ask("POST", MESSAGES, b"", **way)).status == 201
    assert node.service.published[0].body == b""


# ---- batches


async def batch(node: Node, data: Any, kind: str = "application/json", **headers: str) -> Answer:
    if not isinstance(data, bytes):
        data = msgspec.json.encode(data) if "json" in kind else msgspec.msgpack.encode(data)
    return await node.ask("POST", BATCH, data, Content_Type=kind, **headers)


async def test_payloads_of_json_items(node: Node) -> None:
    items = [
        {"topic": "a", "body": "text"},
        {"topic": "a", "body": {"n": 1}, "delay": "1h"},
        {"topic": "b", "body_base64": "AP8=", "content_type": "x/y", "deliver_at": 1_795_168_800_000},
        {"topic": "b", "body": None},
        {"topic": "b"},
        {"topic": "b", "body": "t", "content_type": "text/html", "meta": {"k": "v"}, "idempotency_key": "i"},
    ]
    answer = await batch(node, items)
    assert answer.status == 200, answer.json
    assert [set(r) for r in answer.json["results"]] == [{"id", "deliver_at"}] * 6
    drafts = node.service.published
    assert [d.body for d in drafts] == [b"text", b'{"n":1}', b"\x00\xff", b"null", b"", b"t"]
    metas = [msgspec.msgpack.decode(d.meta) if d.meta else {} for d in drafts]
    assert [m.get("ct") for m in metas] == [
        "text/plain", "application/json", "x/y", "application/json", None, "text/html",
    ]  # fmt: skip
    assert metas[5]["meta"] == {"k": "v"}
    assert drafts[5].idem == b"i"
    assert (drafts[1].when_ms, drafts[1].relative) == (3_600_000, True)
    assert (drafts[2].when_ms, drafts[2].relative) == (1_795_168_800_000, False)


async def test_json_is_kept_as_it_was_written(node: Node) -> None:
    await batch(node, b'[{"topic":"a","body":{"n":1e3,"m": 1.50}}]')
    assert node.service.published[0].body == b'{"n":1e3,"m": 1.50}'


async def test_ndjson(node: Node) -> None:
    lines = b'{"topic":"a","body":1}\n{"topic":"a","body":"two"}\n'
    answer = await batch(node, lines, "application/x-ndjson")
    assert len(answer.json["results"]) == 2
    assert [d.body for d in node.service.published] == [b"1", b"two"]


async def test_msgpack(node: Node) -> None:
    items = [
        {"topic": "a", "body": b"\xff", "deliver_at": 1_900_000_000_000},
        {"topic": "a", "body": b"again"},
        {"topic": "a", "body": "text", "delay": 5},
        {"topic": "a", "body": [1, 2]},
    ]
    answer = await batch(node, items, "application/msgpack", Accept="application/msgpack")
    assert answer.headers["Content-Type"] == "application/msgpack"
    results = msgspec.msgpack.decode(answer.body)["results"]
    assert [set(r) for r in results] == [{"id", "deliver_at"}] * 4
    assert results[0]["deliver_at"] == "2030-03-17T17:46:40.000Z"
    assert [d.body for d in node.service.published] == [b"\xff", b"again", b"text", b"[1,2]"]
    assert [(d.when_ms, d.relative) for d in node.service.published] == [
        (1_900_000_000_000, False), (OWN_DELAY, True), (5_000, True), (OWN_DELAY, True),
    ]  # fmt: skip


async def test_items_with_keys_and_groups_are_read_alike_in_any_place(node: Node) -> None:
    """An item of a topic that is known from an item before takes a shorter way."""
    names = [{"key": "k"}, {"group": "g"}, {"key": "ä", "group": "ö" * 64}, {"group": "g" * 128}]
    items = [{"topic": "a", "body": b"x", "delay": 5, **name} for name in names]
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    for item in items:
        await batch(node, [item, item], "application/msgpack", traceparent=trace)
        first, second = node.service.published[-2:]
        assert first == second
        meta = unpack(second.meta)
        assert (meta.key, meta.group, meta.tp) == (item.get("key"), item.get("group"), trace)
        assert (second.key is None, second.group is None) == (meta.key is None, meta.group is None)
    for wrong in ({"group": ""}, {"group": ".."}, {"group": "ö" * 65}, {"key": ".", "group": "g"}):
        answer = await batch(node, [items[0], items[0] | wrong], "application/msgpack")
        assert ["error" in result for result in answer.json["results"]] == [False, True]


@pytest.mark.parametrize("count", [1, 15, 16, 300, 10_000])
@pytest.mark.parametrize("accept", ["application/json", "application/msgpack"])
async def test_answers_of_every_length(make_node: Make, count: int, accept: str) -> None:
    node = await make_node(roomy=count > 1_000)
    answer = await batch(node, [{"topic": "a", "body": b"x"}] * count, "application/msgpack", Accept=accept)
    document = answer.json if answer.json is not None else msgspec.msgpack.decode(answer.body)
    ids = [r["id"] for r in document["results"]]
    assert len(set(ids)) == count
    assert (await node.ask("GET", f"/v1/messages/{ids[-1]}")).status == 200


async def test_an_empty_batch(node: Node) -> None:
    assert (await batch(node, [])).json == {"results": []}
    answer = await batch(node, [], "application/msgpack", Accept="application/msgpack")
    assert msgspec.msgpack.decode(answer.body) == {"results": []}


async def test_wrong_items_are_refused_in_their_place(node: Node) -> None:
    wrong: list[tuple[dict[str, Any], int]] = [
        ({"topic": "a/b"}, 400),
        ({"topic": "a", "delay": -1}, 400),
        ({"topic": "a", "delay": "900d"}, 422),
        ({"topic": "a", "deliver_at": 1_795_168_800}, 400),
        ({"topic": "a", "delay": 1, "deliver_at": "2026-11-20T18:00:00Z"}, 400),
        ({"topic": "a", "body_base64": "%%"}, 400),
        ({"topic": "a", "body": "x", "body_base64": "eA=="}, 400),
        ({"topic": "a", "idempotency_key": ""}, 400),
        ({"topic": "a", "body": "x" * 1_048_577}, 413),
    ]
    items = [{"topic": "a", "body": "first"}, *(item for item, _ in wrong), {"topic": "a", "body": "last"}]
    answer = await batch(node, items)
    assert answer.status == 200
    results = answer.json["results"]
    assert [r["error"]["status"] for r in results[1:-1]] == [status for _, status in wrong]
    assert "id" in results[0]
    assert "id" in results[-1]
    assert [d.body for d in node.service.published] == [b"first", b"last"]


async def test_rows_that_the_log_refused(node: Node) -> None:
    kept = {"topic": "a", "key": "k", "delay": "1h"}
    await batch(node, [kept])
    answer = await batch(node, [{"topic": "a"}, {"topic": "-/-"}, kept | {"on_conflict": "reject"}, kept])
    plain, refused_here, refused_there, duplicate = answer.json["results"]
    assert set(plain) == {"id", "deliver_at"}
    assert refused_here["error"]["status"] == 400
    assert refused_there["error"]["outcome"] == "pending"
    assert duplicate["duplicate"] is True


@pytest.mark.parametrize(
    ("data", "kind", "status", "words"),
    [
        (b"[{", "application/json", 400, "truncated"),
        (b"\x92\x81", "application/msgpack", 400, "truncated"),
        (b"[1]", "application/json", 400, "expected an object"),
        (b"{}", "application/json", 400, "expected a list"),
        (b'[{"topic":"a","dealy":1}]', "application/json", 400, "did you mean 'delay'?"),
        (b'[{"body":"a"}]', "application/json", 400, "topic"),
        (b'[{"topic":1}]', "application/json", 400, "topic"),
        (b'[{"topic":"a","delay":true}]', "application/json", 400, "delay"),
        (b'[{"topic":"a","body":"\xff"}]', "application/json", 400, "body"),
        (b"[" * 100_000, "application/json", 400, "body"),
        (b"[]", "text/html", 415, "text/html"),
        (b"[]", "application/x-www-form-urlencoded", 415, "a batch is"),
    ],
)
async def test_wrong_batches(node: Node, data: bytes, kind: str, status: int, words: str) -> None:
    answer = await batch(node, data, kind)
    assert answer.status == status, answer.json
    assert words in answer.json["detail"]
    assert not node.service.published


async def test_batch_limits(make_node: Make) -> None:
    node = await make_node(max_body_bytes=100, max_batch_bytes=2_000, max_batch_items=10)
    assert (await batch(node, [{"topic": "a"}] * 11)).status == 413
    assert (await batch(node, [{"topic": "a", "body": "x" * 250}] * 9)).status == 413
    assert (await batch(node, [{"topic": "a"}] * 10)).status == 200
    assert (await batch(node, [{"topic": "a", "meta": {"a": "{{{{"}}] * 10)).status == 200


async def test_a_batch_names_a_thousand_topics(make_node: Make) -> None:
    """Items beyond are refused in their place, those of the named topics are published."""
    node = await make_node()
    topics = [f"t{n}" for n in range(1_002)]
    answer = await batch(node, [{"topic": topic} for topic in (*topics, "t0", "t999")])
    assert answer.status == 200
    statuses = [each.get("error", {"status": 200})["status"] for each in answer.json["results"]]
    assert statuses == [200] * 1_000 + [413] * 2 + [200] * 2
    assert "at most 1000 topics" in answer.json["results"][1_000]["error"]["detail"]
    assert not answer.json["results"][1_000]["error"]["retryable"]


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b'[{"topic": 1}' + b', {"topic": 1}' * 10 + b"]", "application/json"),
        (b'{"topic": 1}\n' * 11, "application/x-ndjson"),
        (b"\xdd" + (11).to_bytes(4) + msgspec.msgpack.encode({"topic": 1}) * 11, "application/msgpack"),
    ],
)
async def test_a_batch_of_too_many_is_refused_before_it_is_read(make_node: Make, data: bytes, kind: str) -> None:
    """A wrong item would be told otherwise: none was looked at."""
    node = await make_node(max_batch_items=10)
    answer = await batch(node, data, kind)
    assert (answer.status, "11 items" in answer.json["detail"]) == (413, True), answer.json


async def test_a_key_covers_the_whole_batch(node: Node) -> None:
    first = await batch(node, [{"topic": "a"}, {"topic": "b"}], Idempotency_Key="k")
    again = await batch(node, [{"topic": "a"}, {"topic": "b"}], Idempotency_Key="k")
    other = await batch(node, [{"topic": "c"}, {"topic": "b"}], Idempotency_Key="k")
    assert [r["id"] for r in again.json["results"]] == [r["id"] for r in first.json["results"]]
    assert all(r["duplicate"] for r in again.json["results"])
    assert [result["error"]["status"] for result in other.json["results"]] == [422, 422]
    assert [topic["topic"] for topic in (await node.ask("GET", "/v1/topics")).json["topics"]] == ["a", "b"]


FORM = "application/x-www-form-urlencoded"


@pytest.mark.parametrize(
    ("said", "body", "kept"),
    [
        (FORM, b'{"a": 1}', "application/json"),
        (FORM, b' [1, "\xc3\xa9"]\n', "application/json"),
        (f"{FORM.title()}; charset=utf-8", b"{}", "application/json"),
        (FORM, b"a=1&b=2", FORM),
        (FORM, b'{"a": 1', FORM),
        (FORM, b'{"a": 1} {}', FORM),
        (FORM, b'["\xff"]', FORM),
        (FORM, b"[" * 100_000, FORM),
        (FORM, b"", FORM),
        ("text/plain", b'{"a": 1}', "text/plain"),
        ("", b'{"a": 1}', "application/octet-stream"),
    ],
)
@pytest.mark.parametrize("options", ["", "?key=k", "?delay=1h&tags=a"])
async def test_the_content_type_of_curl_with_json(node: Node, said: str, body: bytes, kept: str, options: str) -> None:
    """On every way in: aiohttp's, the short one, with a key or a trace, of heads that are remembered."""
    trace = b"traceparent: 00-%b-%b-01\r\n" % (b"1" * 32, b"2" * 16)
    line = b"Content-Type: %b\r\n" % said.encode() if said else b""
    reader, writer = await node.raw()
    for extra in (b"X-A: 1\r\nExpect:\r\n", b"", b"", trace, trace, b"Hadelay-Key: k\r\n" if not options else b""):
        head = f"POST /v1/topics/t/messages{options} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n".encode()
        writer.write(head + line + extra + b"\r\n" + body)
        assert (await read_answer(reader))[0] in (200, 201)
    assert [unpack(draft.meta).ct for draft in node.service.published] == [kept] * 6
    assert [bytes(draft.body) for draft in node.service.published] == [body] * 6
    assert [unpack(draft.meta).key for draft in node.service.published][-1] == ("k" if "tags" not in options else None)
