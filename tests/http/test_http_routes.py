"""Consuming, reading, topics, cluster, and what every route refuses alike."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest
from prometheus_client import ProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from hadelay.api.service import Family, Histogram, Leader, Measured
from hadelay.api.text import format_instant
from hadelay.codec.checksums import crc32c
from hadelay.errors import NoLeader
from hadelay.http.app import ROUTES
from hadelay.model import encode_id
from hadelay.version import VERSION
from tests.http.conftest import Make, Node, read_answer, receive

HOUR_FILE = "/v1/hours/2026051008/log"
#: Size of the record of a message of 4,923 bytes, the only one of its hour.
HOUR_BYTES = 5_000


async def put(node: Node, body: bytes = b"hello", topic: str = "orders", query: str = "", **headers: str) -> str:
    answer = await node.ask("POST", f"/v1/topics/{topic}/messages{query}", body, **headers)
    assert answer.status == 201
    return str(answer.json["id"])


async def hour_file(node: Node) -> tuple[str, bytes]:
    """Name and content of an hour's log of HOUR_BYTES bytes."""
    await put(node, bytes(n % 251 for n in range(HOUR_BYTES - 77)), query="?delay=1h")
    (hour,) = (await node.ask("GET", "/v1/hours")).json["hours"]
    name = str(hour["hour"])
    data = (await node.ask("GET", f"/v1/hours/{name}/log")).body
    assert len(data) == int(hour["log"]["bytes"]) == HOUR_BYTES
    return name, data


# ---- consuming


async def test_a_message_from_publish_to_ack(node: Node) -> None:
    message_id = await put(node, Content_Type="text/plain", Hadelay_Meta_a="1")
    (got,) = await receive(node, query={"consumer": "c", "lease": "10s", "max": 5})
    assert got["id"] == message_id
    assert base64.b64decode(got["body_base64"]) == b"hello"
    assert {k: got[k] for k in ("topic", "content_type", "key", "tags", "meta", "attempt", "redelivered")} == {
        "topic": "orders", "content_type": "text/plain", "key": None, "tags": [], "meta": {"a": "1"}, "attempt": 1,
        "redelivered": False,
    }  # fmt: skip
    assert 9_000 < got["lease_left_ms"] <= 10_000
    assert got["late_ms"] >= 0
    assert got["lease_until"] > got["deliver_at"]
    leases = [got["lease"], "nonsense", got["lease"].lower()]
    answer = await node.ask("POST", "/v1/leases:ack", {"leases": leases})
    assert [r["outcome"] for r in answer.json["results"]] == ["acked", "lease_lost", "already_acked"]
    assert [r["lease"] for r in answer.json["results"]] == leases
    found = await node.ask("GET", f"/v1/messages/{message_id.lower()}")
    assert found.json["state"] == "acked"
    assert found.json["history"][0]["event"] == "leased"
    assert "body_base64" not in found.json


async def test_bodies_as_text_and_as_bytes(node: Node) -> None:
    await put(node, "ä".encode(), Content_Type="text/plain; charset=utf-8")
    await put(node, b"\xff", Content_Type="text/plain")
    await put(node, b'{"a":1}', Content_Type="application/cloudevents+json")
    await put(node, b"abc")
    got = await receive(node, Accept_Body="text")
    assert [m.get("body") for m in got] == ["ä", None, '{"a":1}', None]
    assert [m.get("body_base64") for m in got] == [None, "/w==", None, "YWJj"]
    await put(node, b"\x00")
    (raw,) = await receive(node, Accept="application/msgpack")
    assert raw["body"] == b"\x00"
    assert raw["content_type"] == "application/octet-stream"


async def test_requests_in_msgpack(node: Node) -> None:
    await put(node)
    options = msgspec.msgpack.encode({"topics": ["orders", "others", "orders"], "max": 1})
    answer = await node.ask("POST", "/v1/receive", options, Content_Type="application/msgpack")
    lease = answer.json["messages"][0]["lease"]
    assert node.service.polls[0].topics == ["orders", "others"]
    options = msgspec.msgpack.encode({"leases": [lease], "delay": "1h"})
    answer = await node.ask("POST", "/v1/leases:nack", options, Content_Type="application/msgpack")
    assert answer.json["results"][0]["outcome"] == "nacked"
    assert await receive(node) == []


async def test_a_poll_waits_for_the_first_message(node: Node) -> None:
    await put(node, query="?delay=60ms")
    assert await receive(node) == []
    (got,) = await receive(node, query={"wait": "10s"})
    assert got["late_ms"] >= 0


async def test_the_same_request_gets_the_same_grant(node: Node) -> None:
    await put(node)
    options = {"consumer": "c", "request_id": "r"}
    (first,), (again,) = await receive(node, query=options), await receive(node, query=options)
    assert (first["id"], first["lease"], first["attempt"]) == (again["id"], again["lease"], again["attempt"])


async def test_extend(node: Node) -> None:
    await put(node)
    (got,) = await receive(node)
    answer = await node.ask("POST", "/v1/leases:extend", {"leases": [got["lease"]], "lease": "1m"})
    assert answer.json["results"][0]["outcome"] == "extended"


async def test_defaults_of_a_poll(node: Node) -> None:
    await receive(node)
    await receive(node)
    first, second = node.service.polls
    assert (first.max, first.wait_ms, first.lease_ms, first.consumer) == (10, 0, None, "anonymous")
    assert len(first.request_id) == 16
    assert first.request_id != second.request_id


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/topics/orders/receive", {"max": 0}, 400, "max"),
        ("/v1/topics/orders/receive", {"max": 1001}, 400, "1000"),
        ("/v1/topics/orders/receive", {"max": "many"}, 400, "max: "),
        ("/v1/topics/orders/receive", {"wait": "61s"}, 400, "60000"),
        ("/v1/topics/orders/receive", {"wait": -1}, 400, "negative"),
        ("/v1/topics/orders/receive", {"lease": 0}, 400, "lease"),
        ("/v1/topics/orders/receive", {"lease": "13h"}, 400, "lease"),
        ("/v1/topics/orders/receive", {"consumer": ""}, 400, "consumer"),
        ("/v1/topics/orders/receive", {"consumer": "a\nb"}, 400, "consumer"),
        ("/v1/topics/orders/receive", {"request_id": "x" * 65}, 400, "request_id"),
        ("/v1/topics/orders/receive", {"wiat": 1}, 400, "did you mean 'wait'"),
        ("/v1/topics/a%2fb/receive", {}, 400, "topic"),
        ("/v1/topics//receive", {}, 400, "empty"),
        ("/v1/receive", {}, 400, "topics"),
        ("/v1/receive", {"topics": []}, 400, "topics"),
        ("/v1/receive", {"topics": ["a/b"]}, 400, "only"),
        ("/v1/receive", [], 400, "object"),
        ("/v1/topics/orders/receive?wait=1s", {}, 400, "wait"),
        ("/v1/topics/orders/receive?redirect=maybe", {}, 400, "redirect"),
        ("/v1/leases:ack", {}, 400, "leases"),
        ("/v1/leases:ack", {"leases": ["x"], "delay": 1}, 400, "delay"),
        ("/v1/leases:ack", {"leases": ["x"] * 10_001}, 400, "10000"),
        ("/v1/leases:nack", {"leases": ["x"], "delay": "900d"}, 422, "max_delay"),
        ("/v1/leases:extend", {"leases": ["x"]}, 400, "lease"),
        ("/v1/leases:extend", {"leases": ["x"], "lease": "13h"}, 400, "lease"),
    ],
)
async def test_wrong_queries(node: Node, path: str, body: Any, status: int, words: str) -> None:
    answer = await node.ask("POST", path, body)
    assert answer.status == status, answer.json
    assert words in answer.json["detail"]


@pytest.mark.parametrize("data", [b"{", b"\xff", b'{"max":1', b"[" * 10_000, b"null", b'"x"'])
async def test_broken_json(node: Node, data: bytes) -> None:
    answer = await node.ask("POST", "/v1/topics/orders/receive", data, Content_Type="application/json")
    assert answer.status == 400
    assert answer.headers["Content-Type"] == "application/problem+json"


async def test_media_types(node: Node) -> None:
    path = "/v1/topics/orders/receive"
    assert (await node.ask("POST", path, b"<x/>", Content_Type="text/xml")).status == 415
    assert (await node.ask("POST", path, b"", Content_Type="text/xml")).status == 200
    curl = await node.ask("POST", path, b'{"max":1}', Content_Type="application/x-www-form-urlencoded")
    assert curl.status == 200


# ---- where the leader is


async def test_a_follower_sends_consumers_to_the_leader(make_node: Make) -> None:
    follower, leader = await make_node(), await make_node()
    await put(leader)
    follower.service.node = "n2"
    follower.service.leader = Leader("n1", leader.url, False)
    options = {"max": 1, "consumer": "c"}
    answer = await follower.ask("POST", "/v1/topics/orders/receive", options)
    assert answer.status == 307
    assert answer.headers["Location"] == leader.url + "/v1/topics/orders/receive"
    assert (answer.headers["Hadelay-Node"], answer.headers["Hadelay-Leader"]) == ("n2", "n1")
    relayed = await follower.ask("POST", "/v1/topics/orders/receive?redirect=false", options, Accept_Body="text")
    assert relayed.status == 200
    assert len(relayed.json["messages"]) == 1
    assert relayed.headers["Hadelay-Node"] == "n2"
    assert leader.service.polls[0].consumer == "c"


async def test_a_leader_that_cannot_be_reached(node: Node) -> None:
    node.service.leader = Leader("n2", "http://127.0.0.1:1", False)
    answer = await node.ask("POST", "/v1/topics/orders/receive?redirect=false")
    assert answer.status == 503
    assert answer.json["retry_after_ms"] > 0


async def test_no_leader(lost: Node) -> None:
    node = lost
    answer = await node.ask("POST", "/v1/topics/orders/receive")
    assert answer.status == 503
    assert (answer.json["type"], answer.json["retryable"]) == ("no-leader", True)
    assert "Hadelay-Leader" not in answer.headers
    assert (await node.ask("GET", "/readyz")).status == 503
    assert (await node.ask("GET", "/livez")).status == 200


async def test_a_leader_deposed_while_a_poll_waits(node: Node) -> None:
    node.service.fail = NoLeader("deposed")
    answer = await node.ask("POST", "/v1/topics/orders/receive", {"wait": "5s"})
    assert answer.status == 503
    assert len(node.service.polls) > 1


# ---- messages


async def test_cancel(node: Node) -> None:
    message_id = await put(node, query="?delay=1h")
    for _ in range(2):
        answer = await node.ask("DELETE", f"/v1/messages/{message_id}")
        assert (answer.status, answer.json) == (200, {"outcome": "cancelled"})
    taken = await put(node)
    await receive(node)
    answer = await node.ask("DELETE", f"/v1/messages/{taken}")
    assert (answer.status, answer.json["outcome"], answer.json["type"]) == (409, "leased", "conflict")


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_ids_that_never_were(node: Node, method: str) -> None:
    unknown = await node.ask(method, f"/v1/messages/{encode_id(2**63)}")
    assert (unknown.status, unknown.json["type"]) == (404, "not-found")
    for malformed in ("x", "Z" * 13, "0" * 14, "%00" * 13):
        assert (await node.ask(method, f"/v1/messages/{malformed}")).status == 400


async def test_stale_reads_say_how_stale(node: Node) -> None:
    message_id = await put(node)
    assert (await node.ask("GET", f"/v1/messages/{message_id}?stale=true")).headers["Hadelay-Applied"] == str(
        node.service.applied_index
    )
    assert "Hadelay-Applied" not in (await node.ask("GET", f"/v1/messages/{message_id}")).headers


# ---- topics, due


async def test_topics(node: Node) -> None:
    made = await node.ask("PUT", "/v1/topics/orders", {"lease": "1m"})
    assert made.json == {
        "topic": "orders", "lease": "1m", "scheduled": 0, "ready": 0, "leased": 0, "dead": 0,
        "oldest_ready_age_ms": None, "bytes": 0, "lateness": None, "consumers": [],
    }  # fmt: skip
    await put(node, query="?delay=1h")
    await put(node)
    topic = (await node.ask("GET", "/v1/topics/orders")).json
    assert (topic["scheduled"], topic["ready"]) == (1, 1)
    assert [t["topic"] for t in (await node.ask("GET", "/v1/topics")).json["topics"]] == ["orders"]
    assert (await node.ask("DELETE", "/v1/topics/orders")).status == 409
    assert (await node.ask("DELETE", "/v1/topics/orders?force=true")).status == 204
    assert (await node.ask("GET", "/v1/topics/orders")).status == 404
    # Again after success: the answer to the first may have been lost.
    assert (await node.ask("DELETE", "/v1/topics/orders")).status == 204
    assert (await node.ask("DELETE", "/v1/topics/nowhere")).status == 404
    assert (await node.ask("PUT", "/v1/topics/orders")).status == 200


async def test_topic_settings_come_back_as_they_were_put(node: Node) -> None:
    secret = "whsec_" + "a" * 32 + "1234"
    options: dict[str, Any] = {
        "lease": "1m30s", "max_attempts": 5, "backoff": ["1s", "1m", "1h"], "dead_letter": "graveyard",
        "dead_retention": "7d", "rate": 12.5, "concurrency": 4, "ttl": "2h", "retention": "2d",
        "webhook": {"url": "https://example.com/h?x=1", "timeout": "5s", "headers": {"X_ms": "b"}}, "paused": True,
    }  # fmt: skip
    hook = options.pop("webhook")
    shown = (await node.ask("PUT", "/v1/topics/orders", options | {"webhook": {**hook, "secret": secret}})).json
    assert {name: shown[name] for name in options} == options
    assert shown["webhook"] == {**hook, "secrets": ["whsec_****1234"], "headers": {"X_ms": "****"}}
    # The rest stays as it is, secrets too; null takes a setting back.
    change = {"webhook": {"url": "https://b"}, "rate": None, "max_attempts": 6}
    again = await node.ask("PUT", "/v1/topics/orders", change)
    assert again.json["webhook"] == {"url": "https://b", "secrets": ["whsec_****1234"]}
    assert (again.json["max_attempts"], again.json["lease"], "rate" in again.json) == (6, "1m30s", False)


def stored_headers(node: Node, topic: str) -> dict[str, str]:
    """Headers of a topic's webhook calls, which no answer shows."""
    known = node.service.raft_node.ledger.topic(topic)
    assert known is not None
    return dict(known.config["webhook"].get("headers", {}))


async def test_headers_are_masked_and_may_be_put_as_they_are_shown(node: Node) -> None:
    path, url = "/v1/topics/orders", "https://a"
    headers = {"Authorization": "Bearer " + "s" * 20 + "1234", "X-Env": "prod"}
    shown = (await node.ask("PUT", path, {"webhook": {"url": url, "headers": headers}})).json["webhook"]["headers"]
    assert shown == {"Authorization": "****1234", "X-Env": "****"}
    put = await node.ask("PUT", path, {"webhook": {"url": url, "headers": shown | {"X-New": "1"}}})
    assert put.status == 200
    assert stored_headers(node, "orders") == headers | {"X-New": "1"}
    for wrong in ({"X-Env": "****1234"}, {"X-Other": "****"}, {"Authorization": "Bearer ****1234"}):
        refused = await node.ask("PUT", path, {"webhook": {"url": url, "headers": wrong}})
        assert (refused.status, "a masked value" in refused.json["detail"]) == (400, True)
    assert stored_headers(node, "orders") == headers | {"X-New": "1"}


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("https://a.example/other?x", True), ("HTTPS://A.example:443/", True), ("https://a.example:444/", False),
        ("http://a.example/", False), ("https://a.example.evil/", False), ("https://b/?https://a.example/", False),
        ("https://[::1]/", False), ("https://sub.a.example/", False),
    ],
)  # fmt: skip
async def test_a_masked_header_stays_with_its_origin(node: Node, url: str, kept: bool) -> None:
    hook = {"url": "https://a.example/hook", "headers": {"Authorization": "secret"}}
    shown = (await node.ask("PUT", "/v1/topics/t", {"webhook": hook})).json["webhook"]
    assert (await node.ask("PUT", "/v1/topics/t", {"webhook": {**shown, "url": url}})).status == 200
    assert stored_headers(node, "t") == (hook["headers"] if kept else {})


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"leese": 1}, 400, "did you mean 'lease'"),
        ({"max_attempts": -1}, 400, "0 for no limit"),
        ({"rate": 0}, 400, "to stop a topic, pause it"),
        ({"backoff": []}, 400, "the last one repeats"),
        ({"backoff": {"min": "1h", "max": "1m"}}, 400, "0 < min"),
        ({"backoff": {"min": "1s", "max": "1m", "factor": 0.5}}, 400, "factor: 1 to 100"),
        ({"dead_letter": "no/topic"}, 400, "another topic"),
        ({"webhook": {"url": "ftp://x"}}, 400, "begins with http"),
        ({"webhook": {"url": "http://x", "secret": "short"}}, 400, "base64 of 24 to 64 bytes"),
        ({"webhook": {"url": "http://x", "secret": "****abcd"}}, 400, "leave secrets out"),
        ({"webhook": {"url": "http://x", "headers": {"Host": "y"}}}, 400, "set by hadelay"),
        ({"webhook": {"url": "http://x", "headers": {"Hadelay-Attempt": "1"}}}, 400, "Hadelay-Attempt: names that"),
        ({"dispatch_sync": "never"}, 400, "dispatch_sync: 'never': choose commit or interval"),
        ({"lease": -1}, 400, "lease: '-1' is negative"),
        ({"lease": 0}, 400, "lease"),
        ({"lease": "1y"}, 400, "not a duration"),
    ],
)
async def test_wrong_topic_settings(node: Node, body: Any, status: int, words: str) -> None:
    answer = await node.ask("PUT", "/v1/topics/orders", body)
    assert answer.status == status
    assert words in answer.json["detail"]


async def test_due(node: Node) -> None:
    for at in (1_900_000_000_000, 1_900_000_000_999, 1_900_000_060_000):
        await put(node, query=f"?deliver_at={at}")
    query = "?from=1899999960000&to=2030-03-17T18:46:00Z&step="
    answer = await node.ask("GET", "/v1/due" + query + "1s")
    assert answer.json == {
        "buckets": [
            {"from": format_instant(1_900_000_000_000), "count": 2},
            {"from": format_instant(1_900_000_060_000), "count": 1},
        ]
    }
    answer = await node.ask("GET", "/v1/topics/orders/due" + query + "1h")
    assert [b["count"] for b in answer.json["buckets"]] == [3]
    within = "?from=1899999999500&to=1900000060001&step=1h"
    answer = await node.ask("GET", "/v1/topics/orders/due" + within)
    assert [b["count"] for b in answer.json["buckets"]] == [3], "a range may begin and end within a minute"
    answer = await node.ask(
        "GET", "/v1/topics/orders/due" + query.replace("2030-03-17T18:46:00Z", "1900007160000") + "1s"
    )
    assert [b["count"] for b in answer.json["buckets"]] == [2, 1]


@pytest.mark.parametrize(("ms", "status"), [(10_000_000, 200), (9_999_001, 200), (10_000_001, 400)])
async def test_the_limit_of_buckets(node: Node, ms: int, status: int) -> None:
    start = 1_900_000_000_000
    answer = await node.ask("GET", f"/v1/due?from={start}&to={start + ms}&step=1s")
    assert answer.status == status


@pytest.mark.parametrize(
    ("method", "path", "body", "words"),
    [
        ("GET", "/v1/topics/orders/messages?stale=yes", None, "stale: expected true or false"),
        ("GET", "/v1/topics/orders/messages?limit=few", None, "limit: expected a whole number"),
        (
            "POST",
            "/v1/topics/orders:purge",
            {"states": ["leased"]},
            "states[0]: 'leased': choose scheduled, ",
        ),
        ("GET", "/v1/hours/20261122/log", None, "an hour is written YYYYMMDDHH, not '20261122'"),
    ],
)
async def test_mistakes_are_answered_in_words(node: Node, method: str, path: str, body: Any, words: str) -> None:
    answer = await node.ask(method, path, body)
    assert answer.status in (400, 415)
    assert words in answer.json["detail"]


async def test_an_hour_that_no_calendar_has_is_not_found(node: Node) -> None:
    """The request fits the document."""
    for name in ("2026112299", "2026023010", "dead-2026130100"):
        assert (await node.ask("GET", f"/v1/hours/{name}/log")).status == 404


@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("/v1/due", "from=1900000000000&to=1900000060000&step=500ms"),
        ("/v1/due", "from=1900000000000&to=1900000060000&step=1500ms"),
        ("/v1/topics/orders/due", "from=1900000000000&to=1900007201000&step=30s"),
        ("/v1/topics/orders/due", "from=1900000000000&to=1900000060000&step=500ms"),
        ("/v1/due", "from=1900000000000&to=1900000000000&step=1s"),
        ("/v1/due", "from=1900000000000&to=1900100000000&step=1s"),
        ("/v1/due", "from=1900000000&to=1900000060&step=1s"),
        ("/v1/due", "to=1900000060000&step=1s"),
        ("/v1/due", "from=1900000000000&to=1900000060000&step=0"),
    ],
)
async def test_wrong_histograms(node: Node, path: str, query: str) -> None:
    assert (await node.ask("GET", f"{path}?{query}")).status == 400


# ---- cluster, files, health


async def test_cluster(node: Node) -> None:
    answer = await node.ask("GET", "/v1/cluster")
    assert answer.json["leader"] == "n1"
    parts = {"cluster_id", "feature_level", "leader", "term", "applied_index", "time", "dispatch", "members"}
    assert set(answer.json) == parts | {"terms"}
    assert [term["why"] for term in answer.json["terms"]] == ["n1 is the only voter"]
    assert set(answer.json["dispatch"]) == {"hour", "second", "local_index", "sync"}
    answer = await node.ask("POST", "/v1/cluster:transfer-leader", {"to": "n1"})
    assert answer.json == {"leader": "n1"}
    assert (await node.ask("POST", "/v1/cluster:transfer-leader")).status == 503  # there is no follower
    assert (await node.ask("POST", "/v1/cluster:transfer-leader", {"to": "n9"})).status == 400


async def test_drain(node: Node) -> None:
    answer = await node.ask("POST", "/v1/cluster:drain", {"node": "n1"})
    assert (answer.status, "only voter" in answer.json["detail"]) == (409, True)
    answer = await node.ask("POST", "/v1/cluster:drain", {"node": "n1", "undo": True})
    assert answer.json == {"node": "n1", "drained": False}
    assert (await node.ask("POST", "/v1/cluster:drain", {"node": "n9"})).status == 404


async def test_members(node: Node) -> None:
    answer = await node.ask("POST", "/v1/cluster/members", {"name": "n2", "raft": "127.0.0.1:8501"})
    assert (answer.status, answer.json) == (201, {"name": "n2", "raft": "127.0.0.1:8501", "role": "learner"})
    answer = await node.ask("POST", "/v1/cluster/members", {"name": "n1", "raft": "127.0.0.1:8502"})
    assert (answer.status, answer.json["detail"]) == (409, "n1 is a member already, at 127.0.0.1:8500")
    assert (await node.ask("POST", "/v1/cluster/members", {"name": "n2"})).status == 400
    assert (await node.ask("DELETE", "/v1/cluster/members/n2")).status == 204
    assert (await node.ask("DELETE", "/v1/cluster/members/n9")).status == 404


async def test_hours_and_names(node: Node) -> None:
    name, log = await hour_file(node)
    (hour,) = (await node.ask("GET", "/v1/hours")).json["hours"]
    index = (await node.ask("GET", f"/v1/hours/{name}/idx")).body
    assert hour == {
        "hour": name, "sealed": False, "mapped": hour["mapped"],
        "log": {"entries": 1, "bytes": "5000", "crc32c": f"{crc32c(log):08x}"},
        "idx": {"entries": 1, "bytes": "64", "crc32c": f"{crc32c(index):08x}"},
        "dsp": {"entries": 0, "bytes": "0", "crc32c": "00000000"},
    }  # fmt: skip
    assert (await node.ask("GET", "/v1/names")).json["topics"] == {"orders": 0}


async def test_the_patrol_reports_and_begins_at_once(node: Node) -> None:
    found = (await node.ask("GET", "/v1/patrol")).json
    assert (found["node"], found["rounds"], found["wanted"], found["damaged"]) == ("n1", 0, 0, [])
    answer = await node.ask("POST", "/v1/patrol")
    assert (answer.status, answer.json["wanted"]) == (202, 1)
    while not (await node.ask("GET", "/v1/patrol")).json["rounds"]:
        node.service.runtime.move(1)


@pytest.mark.parametrize(
    ("header", "status", "start", "end"),
    [
        (None, 200, 0, 5000), ("bytes=0-99", 206, 0, 100), ("bytes=4990-", 206, 4990, 5000),
        ("bytes=-10", 206, 4990, 5000), ("bytes=10-99999", 206, 10, 5000), ("bytes=-9999", 200, 0, 5000),
        ("bytes=0-1,3-4", 200, 0, 5000), ("lines=1-2", 200, 0, 5000), ("bytes=5000-", 416, 0, 0),
        ("bytes=9-3", 416, 0, 0), ("bytes=-0", 416, 0, 0),
    ],
)  # fmt: skip
async def test_ranges(node: Node, header: str | None, status: int, start: int, end: int) -> None:
    name, data = await hour_file(node)
    answer = await node.ask("GET", f"/v1/hours/{name}/log", **({"Range": header} if header else {}))
    assert answer.status == status
    if status < 400:
        assert answer.body == data[start:end]
        assert answer.headers.get("Content-Range") == (f"bytes {start}-{end - 1}/5000" if status == 206 else None)


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/hours/2026051007/log", 404), ("/v1/hours/20260510/log", 400), (HOUR_FILE + "x", 404)]
)
async def test_files_that_are_not(node: Node, path: str, status: int) -> None:
    assert (await node.ask("GET", path)).status == status


async def outcomes_of_backups(node: Node) -> list[str]:
    """What became of the snapshots, the newest first."""
    return [backup["outcome"] for backup in (await node.ask("GET", "/v1/cluster")).json["backups"]]


async def test_a_snapshot_is_taken_read_and_closed(node: Node) -> None:
    name, data = await hour_file(node)
    opened = await node.ask("POST", "/v1/snapshots")
    path = f"/v1/snapshots/{opened.json['id']}"
    assert (opened.status, opened.headers["Location"]) == (201, path)
    assert (opened.json["cluster_id"], opened.json["group"], opened.json["term"]) == ("hadelay", 0, 1)
    first = {"name": f"hours/{name}.log", "bytes": "5000", "crc32c": f"{crc32c(data):08x}"}
    assert opened.json["files"][0] == first
    log = f"{path}/hours%2F{name}.log"
    part = await node.ask("GET", log, Range="bytes=10-19")
    assert (part.status, part.body) == (206, data[10:20])
    assert (await node.ask("GET", log)).body == data
    assert (await node.ask("GET", f"{path}/identity")).status == 404
    assert (await node.ask("DELETE", path)).status == 204
    other = (await node.ask("POST", "/v1/snapshots")).headers["Location"]
    assert (await node.ask("DELETE", f"{other}?complete=true")).status == 204
    assert await outcomes_of_backups(node) == ["complete", "incomplete"]
    assert (await node.ask("GET", log)).status == 404


async def test_health(node: Node, lost: Node) -> None:
    assert (await node.ask("GET", "/livez")).json == {"status": "ok", "checks": []}
    verbose = await node.ask("GET", "/readyz?verbose")
    assert [c["name"] for c in verbose.json["checks"]] == ["leader", "clock", "applied", "admitted", "space"]
    for no in ("false", "0"):
        assert (await node.ask("GET", f"/readyz?verbose={no}")).json["checks"] == []
    failing = await lost.ask("GET", "/readyz")
    assert failing.status == 503
    first, *others = failing.json["checks"]
    assert (first["name"], first["ok"], "n2 and n3 are not connected" in first["detail"]) == ("leader", False, True)
    wrong = ",".join(check["name"] for check in (first, *others) if not check["ok"])
    assert (await lost.ask("GET", f"/readyz?exclude={wrong}")).status == 200


async def test_the_answer_whether_a_node_may_stop(node: Node, lost: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    there = ("n1", "n2")
    left = "hadelay.server.service.cluster.others_left"
    monkeypatch.setattr(left, lambda node, without: [name for name in there if name != without])
    answer = await lost.ask("GET", "/v1/health/quorum?without=n3")
    assert (answer.status, answer.json) == (200, {"without": "n3", "left": ["n1", "n2"], "members": 3, "needed": 2})
    refused = await lost.ask("GET", "/v1/health/quorum")
    assert (refused.status, refused.json["left"], refused.json["without"]) == (409, ["n2"], "n1")
    assert "n1 may not stop now: of 3 nodes 1 would be left as far as n1 sees (n2)" in refused.json["detail"]
    assert (await node.ask("GET", "/v1/health/quorum?without=n9")).status == 404


async def test_metrics(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    async def measured() -> Measured:
        return [
            (Family("hadelay_raft_term", "gauge", "Raft term"), 3),
            (Family("hadelay_sweeper_found_messages_total", "counter", "Forgotten"), 0),
            (Family("hadelay_messages", "gauge", "Kept", ("state",)), {("waiting",): 1, ('odd "\\\n',): 2}),
            (Family("hadelay_nobody", "gauge", "Without a value", ("peer",)), {}),
            (Family("hadelay_delivery_lateness_seconds", "histogram", "Late"),
             Histogram([0.001, 0.01], [3, 1, 0], 0.012)),
        ]  # fmt: skip

    monkeypatch.setattr(node.service, "metrics", measured)
    await put(node)
    await put(node)
    answer = await node.ask("GET", "/metrics")
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = {f.name: f for f in text_string_to_metric_families(answer.body.decode())}
    samples = {(s.name, *sorted(s.labels.items())): s.value for f in families.values() for s in f.samples}
    expected = {
        ("hadelay_raft_term",): 3,
        ("hadelay_sweeper_found_messages_total",): 0,
        ("hadelay_messages", ("state", "waiting")): 1,
        ("hadelay_messages", ("state", 'odd "\\\n')): 2,
        ("hadelay_delivery_lateness_seconds_bucket", ("le", "0.001")): 3,
        ("hadelay_delivery_lateness_seconds_bucket", ("le", "0.01")): 4,
        ("hadelay_delivery_lateness_seconds_bucket", ("le", "+Inf")): 4,
        ("hadelay_delivery_lateness_seconds_sum",): 0.012,
        ("hadelay_delivery_lateness_seconds_count",): 4,
        ("hadelay_http_requests_total", ("code", "201"), ("route", "publish")): 2,
        ("hadelay_http_connections",): 1,
        ("hadelay_build_info", ("node", "n1"), ("version", VERSION)): 1,
    }
    assert expected.items() <= samples.items()
    assert "hadelay_nobody" not in families
    assert families["hadelay_messages"].documentation == "Kept"


async def test_names_that_clients_make_up_are_no_labels(node: Node) -> None:
    for n in range(20):
        await node.ask("GET", f"/v1/topics/made-up-{n}")
        await node.ask("POST", f"/v1/topics/made-up-{n}/messages", b"x")
        await node.ask(f"MADE-UP-{n}", f"/made-up/{n}", Authorization=f"Bearer made-up-{n}")
    text = (await node.ask("GET", "/metrics")).body.decode()
    assert "made-up" not in "".join(line for line in text.lower().splitlines() if "hadelay_http" in line)
    assert 0 < text.count("hadelay_http_requests_total{") < 6


async def test_process_metrics_are_those_of_the_process(node: Node) -> None:
    text = (await node.ask("GET", "/metrics")).body.decode()
    theirs = {f.name: f.samples[0].value for f in ProcessCollector(registry=None).collect()}
    ours = {f.name: f.samples[0].value for f in text_string_to_metric_families(text) if f.name.startswith("process")}
    assert ours.keys() == theirs.keys()
    assert ours["process_max_fds"] == theirs["process_max_fds"]
    assert ours["process_start_time_seconds"] == pytest.approx(theirs["process_start_time_seconds"], abs=1)
    for name in theirs:
        assert ours[name] == pytest.approx(theirs[name], rel=0.5, abs=5), name


# ---- what all refuse alike


async def test_methods(node: Node) -> None:
    answer = await node.ask("PATCH", "/v1/topics/orders")
    assert (answer.status, answer.headers["Allow"]) == (405, "DELETE, GET, HEAD, PUT")
    assert (await node.ask("DELETE", "/v1/topics/orders/messages")).status == 405
    name, _ = await hour_file(node)
    head = await node.ask("HEAD", f"/v1/hours/{name}/log")
    assert (head.status, head.headers["Content-Length"], head.body) == (200, "5000", b"")


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/", "/v1/topics/orders/", "/console", "/v1/messages/x/y"])
async def test_unknown_routes(node: Node, path: str) -> None:
    answer = await node.ask("GET", path)
    assert (answer.status, answer.json["type"]) == (404, "not-found")
    assert answer.headers["Hadelay-Node"] == "n1"


GETS = [r.path for r in ROUTES.all if r.method == "GET" and "{" not in r.path]


@pytest.mark.parametrize("path", GETS)
async def test_unknown_parameters_and_headers(node: Node, path: str) -> None:
    assert (await node.ask("GET", path + "?stael=true")).status == 400
    assert (await node.ask("GET", path, Hadelay_Stale="true")).status == 400


def test_openapi_describes_every_route(make_node: Make) -> None:
    from hadelay.http.openapi import document

    spec = msgspec.json.decode(document(ROUTES.all))
    assert spec["openapi"] == "3.1.0"
    described = {(m.upper(), path) for path, methods in spec["paths"].items() for m in methods}
    assert described == {(r.method, r.path) for r in ROUTES.all}
    references = set(_references(spec))
    assert references <= {f"#/components/{kind}/{name}" for kind, names in spec["components"].items() for name in names}
    assert spec["components"]["schemas"]["Receive"]["additionalProperties"] is False
    ids = [op["operationId"] for methods in spec["paths"].values() for op in methods.values()]
    assert len(ids) == len(set(ids))


def test_openapi_requires_of_a_request_only_what_the_node_requires() -> None:
    """openapi-typescript demands every member with a default, and would demand `tags` of a receive."""
    from hadelay.http.openapi import document

    spec = msgspec.json.decode(document(ROUTES.all))
    schemas = spec["components"]["schemas"]
    bodies = [
        one["requestBody"] for methods in spec["paths"].values() for one in methods.values() if "requestBody" in one
    ]
    todo, seen = list(_references(bodies)), set[str]()
    while todo:
        name = todo.pop().rpartition("/")[2]
        if name not in seen:
            seen.add(name)
            todo += _references(schemas[name])
    assert {"Receive", "ReceiveTopics", "Ack", "Nack", "BatchItem", "PutTopic", "Webhook", "JobFilter"} <= seen
    for name in seen:
        for member, shown in schemas[name].get("properties", {}).items():
            assert "default" not in shown, f"{name}.{member}"
    assert schemas["Nack"]["properties"]["count"] == {"type": "boolean", "description": "Default: true"}
    assert schemas["ReceiveTopics"]["properties"]["order"]["description"] == "Default: turns"


def _references(node: Any) -> Any:
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"]
        for value in node.values():
            yield from _references(value)
    elif isinstance(node, list):
        for value in node:
            yield from _references(value)


@pytest.mark.parametrize("path", ["/readyz", "/livez", "/", "/readyz?verbose"])
async def test_plain_checks_of_load_balancers(make_node: Make, path: str) -> None:
    """HAProxy's plain `option httpchk` sends OPTIONS / HTTP/1.0, without a Host."""
    node, lost = await make_node(max_connections=2), await make_node(lost=True)
    reader, writer = await node.raw()
    writer.write(f"OPTIONS {path} HTTP/1.0\r\n\r\n".encode())
    status, _, body = await read_answer(reader)
    assert (status, msgspec.json.decode(body)["status"]) == (200, "ok")
    for method in ("GET", "HEAD", "OPTIONS"):
        assert (await node.ask(method, "/readyz", Host="lb.example")).status == 200
    assert (await lost.ask("OPTIONS", path)).status == (200 if path == "/livez" else 503)


@pytest.mark.parametrize(
    "name", ["Hadelay_Delay", "HADELAY_DELAY", "hadelay_meta_a", "Hadelay_Delay-Until", "Idempotency_Key"]
)
@pytest.mark.parametrize("method", ["publish", "another"])
async def test_headers_with_underscores_are_refused(node: Node, name: str, method: str) -> None:
    """Ignored, the message would be due at once, or stored twice."""
    path = "/v1/topics/t/messages" if method == "publish" else "/v1/topics/t/receive"
    for extra in ("", "Origin: http://x\r\n"):  # which takes the slower way
        reader, writer = await node.raw()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{extra}{name}: 1h\r\nContent-Length: 2\r\n\r\n"
        writer.write(head.encode() + b"{}")
        status, _, body = await read_answer(reader)
        assert status == 400
        assert "write it with hyphens: " in msgspec.json.decode(body)["detail"]
    assert (await node.ask("GET", "/v1/topics")).json == {"topics": []}


@pytest.mark.parametrize("path", ["/livez", "/v1/topics", "/nosuch", "/metrics", "/console/", "/v1/topics/t/messages"])
async def test_a_node_tells_no_versions_of_its_libraries(node: Node, path: str) -> None:
    method, body = ("POST", b"x") if path.endswith("messages") else ("GET", None)
    answer = await node.ask(method, path, body)
    assert answer.headers["Server"] == "hadelay"
