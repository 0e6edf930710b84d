"""Webhooks of real processes: a cluster of three, receivers on loopback, and the leader killed while it calls."""

from __future__ import annotations

import base64
import json
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.system.cluster import Cluster, until
from tests.webhooks.receiver import verified_by

pytestmark = pytest.mark.processes
OLD, NEW = ("whsec_" + base64.b64encode(bytes([n]) * 32).decode() for n in (1, 2))


class Hook:
    """Answers by path: /204, /503, /hold (until `release`). Keeps what came."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, str], bytes]] = []
        self.methods: list[str] = []
        #: Body of the answers.
        self.answer = b""
        self.release = threading.Event()
        hook = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                hook.methods.append(self.command)
                hook.calls.append((self.path, {name.lower(): value for name, value in self.headers.items()}, body))
                if self.path == "/hold":
                    hook.release.wait(30)
                try:
                    self.send_response(204 if self.path == "/hold" else int(self.path[1:4]))
                    self.send_header("Content-Length", str(len(hook.answer)))
                    self.end_headers()
                    self.wfile.write(hook.answer)
                except OSError:
                    self.close_connection = True

            do_GET = do_PUT = do_POST

            def log_message(self, *args: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def of(self, topic: str) -> list[tuple[str, dict[str, str], bytes]]:
        return [call for call in self.calls if call[1].get("hadelay-topic") == topic]

    def close(self) -> None:
        self.release.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def hook() -> Iterator[Hook]:
    hook = Hook()
    yield hook
    hook.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("webhooks")) as running:
        yield running


def put(cluster: Cluster, topic: str, **settings: Any) -> Any:
    return cluster.ask(cluster.leader(), "PUT", f"/v1/topics/{topic}", settings)


def state(cluster: Cluster, message: str) -> str:
    return str(cluster.ask(cluster.leader(), "GET", f"/v1/messages/{message}").json["state"])


def test_a_call_says_what_a_consumer_would_see(cluster: Cluster, hook: Hook) -> None:
    answer = put(
        cluster, "orders", webhook={"url": f"{hook.url}/204", "secrets": [NEW, OLD], "headers": {"X-Own": "1"}}
    )
    assert answer.status == 200
    assert NEW not in answer.body.decode()
    head = {"Hadelay-Key": "o 1", "Hadelay-Tags": "a,b", "Hadelay-Meta-Who": "grün", "Content-Type": "text/x-order"}
    path = "/v1/topics/orders/messages?delay=300ms"
    sent = cluster.ask(cluster.leader(), "POST", path, b"\x00body", headers=head).json
    until(lambda: state(cluster, sent["id"]) == "acked", "the message is acked")
    ((path, got, body),) = hook.of("orders")
    assert (path, body) == ("/204", b"\x00body")
    assert verified_by(NEW, got, body)
    assert verified_by(OLD, got, body)
    cluster_id = cluster.ask(cluster.leader(), "GET", "/v1/cluster").json["cluster_id"]
    expected = {
        "content-type": "text/x-order", "webhook-id": sent["id"], "ce-specversion": "1.0", "ce-id": sent["id"],
        "ce-source": f"/{cluster_id}/topics/orders", "ce-type": "hadelay.message", "ce-time": sent["deliver_at"],
        "ce-subject": "o%201", "hadelay-topic": "orders", "hadelay-key": "o%201", "hadelay-tags": "a,b",
        "hadelay-attempt": "1", "hadelay-deliver-at": sent["deliver_at"], "x-own": "1", "user-agent": "hadelay",
    }  # fmt: skip
    assert {name: got.get(name) for name in expected} == expected
    assert "hadelay-redelivered" not in got
    metrics = cluster.ask(cluster.leader(), "GET", "/metrics").body.decode()
    assert 'hadelay_webhook_calls_total{outcome="2xx"}' in metrics


def test_a_call_for_a_copy_names_the_published_message_and_its_group(cluster: Cluster, hook: Hook) -> None:
    leader, webhook = cluster.leader(), {"url": f"{hook.url}/204"}
    cluster.ask(leader, "PUT", "/v1/topics/shared", {"webhook": webhook})
    early = cluster.publish(leader, "shared", b"0", "?delay=2s", Hadelay_Group="Käufer 7")
    fill = {"webhook": webhook, "from": "pending"}
    cluster.ask(leader, "PUT", "/v1/topics/shared/subscriptions/billing", fill)
    late = cluster.publish(leader, "shared", b"1", "?delay=2s")
    until(lambda: len(hook.of("shared") + hook.of("shared~billing")) == 4, "both are called about both messages")
    own = {body: head for _, head, body in hook.of("shared")}
    copies = {body: head for _, head, body in hook.of("shared~billing")}
    for body, published, group in ((b"0", early, "K%C3%A4ufer%207"), (b"1", late, None)):
        assert (own[body]["webhook-id"], own[body].get("hadelay-published-id")) == (published, None)
        assert copies[body]["hadelay-published-id"] == published != copies[body]["webhook-id"]
        assert [head[body].get("hadelay-group") for head in (own, copies)] == [group] * 2


@pytest.mark.parametrize("name", ["Hadelay-Published-Id", "hadelay-group", "hadelay_group"])
def test_a_publisher_cannot_set_headers_of_hadelay(cluster: Cluster, name: str) -> None:
    leader, path = cluster.leader(), "/v1/topics/forged/messages"
    answer = cluster.ask(leader, "POST", path, b"x", headers={f"Hadelay-Forward-{name}": "mine"})
    item = {"topic": "forged", "body": "x", "forward": {name: "mine"}}
    (result,) = cluster.ask(leader, "POST", "/v1/messages:batch", [item]).json["results"]
    for refused in (answer.json, result["error"]):
        assert "is not for publishers to set" in refused["detail"]


def test_calls_have_the_topic_s_method_and_the_message_s_headers(cluster: Cluster, hook: Hook) -> None:
    webhook = {"url": f"{hook.url}/204", "method": "PUT", "headers": {"X-Tenant": "7"}, "secret": NEW}
    assert put(cluster, "methods", webhook=webhook).json["webhook"]["method"] == "PUT"
    leader, path = cluster.leader(), "/v1/topics/methods/messages"
    head = {"Hadelay-Forward-Authorization": "Bearer own", "Hadelay-Forward-X-Tenant": "8"}
    sent = cluster.ask(leader, "POST", path, b"one", headers=head).json["id"]
    until(lambda: state(cluster, sent) == "acked", "the message is acked")
    put(cluster, "methods", webhook={**webhook, "method": "GET"})
    item = {"topic": "methods", "body": "two", "forward": {"X-Trace": "9"}}
    sent = cluster.ask(leader, "POST", "/v1/messages:batch", [item]).json["results"][0]["id"]
    until(lambda: state(cluster, sent) == "acked", "the message is acked")
    (_, first, body), (_, second, nothing) = hook.of("methods")
    assert (hook.methods, body, nothing) == (["PUT", "GET"], b"one", b"")
    assert (first["authorization"], first["x-tenant"], second["x-trace"]) == ("Bearer own", "7", "9")
    assert verified_by(NEW, second, b""), "a call without a body signs none"
    long = {"X": "x" * 1_024, "Y": "y" * 1_024}
    for wrong, words in (({"Host": "x"}, "hadelay itself"), ({"X": "ä"}, "ASCII"), (long, "2048")):
        refused = cluster.ask(leader, "POST", "/v1/messages:batch", [{**item, "forward": wrong}]).json["results"][0]
        assert (refused["error"]["status"], words in refused["error"]["detail"]) == (400, True), refused
    refused = put(cluster, "methods", webhook={**webhook, "method": "TRACE"})
    assert (refused.status, "method" in refused.json["detail"]) == (400, True)


def test_a_callback_has_the_answer_of_the_receiver(cluster: Cluster, hook: Hook) -> None:
    hook.answer = '{"paid":"ja, grün"}'.encode()
    put(cluster, "pays", webhook={"url": f"{hook.url}/201", "allow_per_message": True}, on_success="paid")
    put(cluster, "fails", webhook={"url": f"{hook.url}/500"}, max_attempts=1, on_failure="unpaid")
    leader = cluster.leader()
    sent = cluster.publish(leader, "pays", b"x")
    dies = cluster.publish(leader, "fails", b"x")
    (done,), (dead,) = (cluster.receive(leader, topic, wait="20s") for topic in ("paid", "unpaid"))
    document = json.loads(base64.b64decode(done["body_base64"]))
    assert {name: document[name] for name in ("id", "topic", "attempt", "status", "body", "truncated")} == {
        "id": sent, "topic": "pays", "attempt": 1, "status": 201, "body": '{"paid":"ja, grün"}', "truncated": False,
    }  # fmt: skip
    assert (done["content_type"], done["meta"]) == ("application/json", {"callback": "success"})
    document = json.loads(base64.b64decode(dead["body_base64"]))
    assert (document["id"], [error["reason"] for error in document["errors"]]) == (dies, ["HTTP 500"])
    answer = cluster.ask(leader, "POST", "/v1/topics/pays/messages?on_success=mine", b"y")
    until(lambda: state(cluster, answer.json["id"]) == "acked", "the message is acked")
    assert len(cluster.receive(leader, "mine", wait="20s")) == 1
    refused = cluster.ask(leader, "POST", "/v1/topics/fails/messages", b"y", headers={"Hadelay-On-Failure": "mine"})
    assert (refused.status, "allow_per_message" in refused.json["detail"]) == (422, True)
    metrics = cluster.ask(leader, "GET", "/metrics").body.decode()
    assert 'hadelay_callbacks_total{outcome="filed"} 3' in metrics


def test_headers_are_shown_masked_and_stay_when_that_is_put(cluster: Cluster, hook: Hook) -> None:
    own = "Bearer abcdefghijklmnop"
    shown = put(cluster, "masked", webhook={"url": f"{hook.url}/204", "headers": {"Authorization": own}}).json
    assert shown["webhook"]["headers"] == {"Authorization": "****mnop"}
    put(cluster, "masked", webhook=shown["webhook"])
    sent = cluster.publish(cluster.names[0], "masked")
    until(lambda: state(cluster, sent) == "acked", "the message is acked")
    ((_, got, _),) = hook.of("masked")
    assert got["authorization"] == own


def test_a_receiver_gets_json_of_what_curl_sends(cluster: Cluster, hook: Hook) -> None:
    put(cluster, "curl", webhook={"url": f"{hook.url}/204"})
    for body in ('{"a": 1}', "a=1"):
        words = ["curl", "-sS", "-d", body, f"{cluster.urls[cluster.leader()]}/v1/topics/curl/messages"]
        sent = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)["id"]
        until(lambda at=sent: state(cluster, at) == "acked", "the message is acked")  # type: ignore[misc]
    kinds = [(got["content-type"], body) for _, got, body in hook.of("curl")]
    assert kinds == [("application/json", b'{"a": 1}'), ("application/x-www-form-urlencoded", b"a=1")]


def test_a_header_that_is_not_shown_goes_to_no_other_receiver(cluster: Cluster, hook: Hook) -> None:
    """Who may set the URL, or give a message one, is not told what GET masks."""
    own, elsewhere = "Bearer abcdefghijklmnop", hook.url.replace("127.0.0.1", "localhost")
    webhook = {"url": f"{hook.url}/204", "headers": {"Authorization": own, "X-Env": "a"}, "allow_per_message": True}
    shown = put(cluster, "stolen", webhook=webhook).json["webhook"]
    path = "/v1/topics/stolen/messages"
    for callback, sent in ((f"{elsewhere}/204", None), (f"{hook.url}/202", own)):
        answer = cluster.ask(cluster.leader(), "POST", path, b"x", headers={"Hadelay-Callback": callback})
        until(lambda at=answer.json["id"]: state(cluster, at) == "acked", "the message is acked")  # type: ignore[misc]
        assert [got.get("authorization") for _, got, _ in hook.of("stolen")] == [sent]
        hook.calls.clear()
    moved = put(cluster, "stolen", webhook={**shown, "url": f"{hook.url}/203"})
    assert moved.json["webhook"]["headers"] == shown["headers"], "the same origin"
    moved = put(
        cluster, "stolen", webhook={**shown, "url": f"{elsewhere}/204", "headers": {**shown["headers"], "X-B": "b"}}
    )
    assert moved.json["webhook"]["headers"] == {"X-B": "****"}
    sent = cluster.publish(cluster.names[0], "stolen")
    until(lambda: state(cluster, sent) == "acked", "the message is acked")
    ((_, got, _),) = hook.of("stolen")
    assert (got.get("authorization"), got.get("x-env"), got["x-b"]) == (None, None, "b")
    # To put back what was shown brings no value back.
    assert not put(cluster, "stolen", webhook=shown).json["webhook"].get("headers")


def test_a_topic_that_was_deleted_may_be_deleted_again(cluster: Cluster, hook: Hook) -> None:
    put(cluster, "masked")
    assert cluster.ask(cluster.leader(), "DELETE", "/v1/topics/masked?force=true").status == 204
    for name in cluster.names:
        assert cluster.ask(name, "DELETE", "/v1/topics/masked").status == 204
        assert cluster.ask(name, "DELETE", "/v1/topics/never-was").status == 404


def test_secrets_stay_when_a_put_leaves_them_out(cluster: Cluster, hook: Hook) -> None:
    put(cluster, "rotated", webhook={"url": f"{hook.url}/204", "secret": OLD})
    put(cluster, "rotated", webhook={"url": f"{hook.url}/204?again"})
    sent = cluster.publish(cluster.leader(), "rotated")
    until(lambda: state(cluster, sent) == "acked", "the message is acked")
    ((_, got, body),) = hook.of("rotated")
    assert got["webhook-id"] == sent
    assert verified_by(OLD, got, body)


def test_nobody_receives_what_is_pushed(cluster: Cluster, hook: Hook) -> None:
    put(cluster, "pushed", webhook={"url": f"{hook.url}/204"})
    for name in cluster.names:
        answer = cluster.receive(name, "pushed")
        assert (answer.status, "webhook" in answer.json["detail"]) == (409, True)


@pytest.mark.parametrize(
    ("settings", "status", "words"),
    [
        ({"webhook": {"url": "http://10.0.0.1/x"}}, 422, "private"),
        ({"webhook": {"url": "http://[::ffff:192.168.0.1]/x"}}, 422, "private"),
        ({"webhook": {"url": "http://169.254.169.254/latest/meta-data"}}, 422, "private"),
        ({"alert": {"url": "http://10.0.0.1/x"}}, 422, "private"),
        ({"webhook": {"url": "ftp://example.com/"}}, 400, "http"),
        ({"webhook": {"url": "http://user:secret@example.com/"}}, 400, "password"),
        ({"webhook": {"url": "http:///x"}}, 400, "host"),
        ({"webhook": {"url": "http://exa mple.com/"}}, 400, "space"),
        ({"webhook": {"url": "http://example.com/" + "x" * 3000}}, 400, "2048"),
        ({"webhook": {"secret": OLD}}, 400, "url"),
        ({"webhook": {"url": "http://127.0.0.1:9/", "secret": "whsec_c2hvcnQgc2VjcmV0"}}, 400, "24 to 64 bytes"),
        ({"webhook": {"url": "http://127.0.0.1:9/", "secret": OLD, "secrets": [NEW]}}, 400, "both"),
        ({"webhook": {"url": "http://127.0.0.1:9/", "headers": {"Webhook-Signature": "v1,x"}}}, 400, "hadelay itself"),
        ({"webhook": {"url": "http://127.0.0.1:9/", "headers": {"Connection": "close"}}}, 400, "hadelay itself"),
        ({"webhook": {"url": "http://127.0.0.1:9/", "headers": {"X": "a\r\nY: b"}}}, 400, "printable"),
        ({"webhook": {"url": "http://127.0.0.1:9/", "headers": {f"x{n}": "" for n in range(20)}}}, 400, "at most 16"),
        ({"webhook": {"url": "http://127.0.0.1:9/", "timeout": "1h"}}, 400, "timeout"),
    ],
)  # fmt: skip
def test_settings_refused_by_the_topic(cluster: Cluster, settings: dict[str, Any], status: int, words: str) -> None:
    answer = put(cluster, "refused", **settings)
    assert answer.status == status, answer
    assert words in answer.json["detail"]


def test_urls_of_messages(cluster: Cluster, hook: Hook) -> None:
    leader = cluster.leader()
    put(cluster, "plain", webhook={"url": f"{hook.url}/204"})
    put(cluster, "open", webhook={"url": f"{hook.url}/204", "allow_per_message": True})

    def publish(topic: str, callback: str) -> Any:
        path = f"/v1/topics/{topic}/messages"
        return cluster.ask(leader, "POST", path, b"x", headers={"Hadelay-Callback": callback})

    for topic in ("plain", "nowhere"):
        refused = publish(topic, f"{hook.url}/204")
        assert (refused.status, "allow_per_message" in refused.json["detail"]) == (422, True)
    assert publish("open", "http://10.0.0.1/").status == 422
    assert publish("open", "gopher://x/").status == 400
    urls = (f"{hook.url}/203", "http://10.0.0.1/", None)
    items = [{"topic": "open", "body": "x", **({"callback": url} if url else {})} for url in urls]
    results = cluster.ask(leader, "POST", "/v1/messages:batch", items).json["results"]
    assert ["id" in result for result in results] == [True, False, True]
    assert results[1]["error"]["status"] == 422
    until(lambda: len(hook.of("open")) == 2, "both are called about")
    hook.calls.clear()
    sent = publish("open", f"{hook.url}/202")
    assert sent.status == 201
    until(lambda: state(cluster, sent.json["id"]) == "acked", "the message is acked")
    assert [path for path, _, _ in hook.of("open")] == ["/202"]


def test_a_leader_killed_while_it_calls(tmp_path: Path, hook: Hook) -> None:
    """What was acked is not called again; what was under way is, once its lease has run out; nothing is lost."""
    with Cluster(tmp_path / "c") as cluster:
        put(cluster, "jobs", webhook={"url": f"{hook.url}/204"})
        put(cluster, "held", webhook={"url": f"{hook.url}/hold", "timeout": "1s"})
        done = [cluster.publish(cluster.leader(), "jobs", b"%d" % n) for n in range(20)]
        until(lambda: all(state(cluster, one) == "acked" for one in done), "the first are acked")
        leased = cluster.publish(cluster.leader(), "held")
        later = [cluster.publish(cluster.leader(), "jobs", b"%d" % n, "?delay=3s") for n in range(20, 40)]
        until(lambda: hook.of("held"), "the call is under way")
        cluster.kill(cluster.leader())
        hook.release.set()
        until(lambda: all(state(cluster, one) == "acked" for one in [*later, leased]), "all are acked", 60)
        called = [headers["webhook-id"] for _, headers, _ in hook.of("jobs")]
        assert sorted(called) == sorted(done + later)
        (first, *again) = hook.of("held")
        # On a slow machine the first call is over, by its timeout, before its leader is.
        assert {headers["webhook-id"] for _, headers, _ in (first, *again)} == {leased}
        assert again[0][1]["hadelay-redelivered"] == "true"
        assert again[0][1]["hadelay-attempt"] == "2"
