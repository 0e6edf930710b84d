"""What the command line sends, as its own small client."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any
from unittest.mock import Mock

import pytest

from hadelay.api.problems import NotANode
from hadelay.cli.app import AUTH, INTERRUPTED, NOT_FOUND, OK, REFUSED, TIMEOUT, UNREACHABLE, USAGE, run
from hadelay.cli.output import Remote
from hadelay.cli.remote import RemoteAnswer, call, call_member, read_answer
from hadelay.client import Client
from hadelay.errors import BadRequest, Conflict, HadelayError


@pytest.mark.parametrize("value", ["plain", "grün", "日本 €", "Ã¼"])
def test_the_command_line_sends_text_as_it_is(url: str, value: str) -> None:
    remote = Remote(servers=url)
    made = call(remote, "POST", "/v1/topics/t/messages", b"x", needs="id", headers={"Hadelay-Meta-Who": value})
    assert call(remote, "GET", f"/v1/messages/{made['id']}", needs="id")["meta"] == {"who": value}


def test_the_command_line_does_not_follow_redirects_for_ever() -> None:
    asked: list[str] = []

    class Lost(BaseHTTPRequestHandler):
        """It takes itself for somebody else."""

        def do_POST(self) -> None:
            asked.append(self.path)
            self.send_response(307)
            self.send_header("Location", f"http://127.0.0.1:{server.server_port}{self.path}")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Lost) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(HadelayError, match="307"):
            call(Remote(servers=f"http://127.0.0.1:{server.server_port}"), "POST", "/v1/receive", {"topics": ["t"]})
        server.shutdown()
    assert 1 < len(asked) < 10


def test_a_leader_whose_name_means_nothing_here_is_asked_through_the_follower() -> None:
    asked: list[str] = []

    class Follower(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            relays = "redirect=false" in self.path
            self.send_response(200 if relays else 307)
            self.send_header("Location", f"http://127.0.0.1:1{self.path}")
            self.send_header("Content-Length", "15" if relays else "0")
            self.end_headers()
            self.wfile.write(b'{"messages":[]}' if relays else b"")

        def log_message(self, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Follower) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        remote = Remote(servers=f"http://127.0.0.1:{server.server_port}")
        assert call(remote, "POST", "/v1/receive", {"topics": ["t"]}, needs="messages") == {"messages": []}
        server.shutdown()
    assert asked == ["/v1/receive", "/v1/receive?redirect=false"]


def test_a_leader_that_does_not_answer_is_waited_for_once() -> None:
    """Only a leader without a connection is asked through the follower."""
    asked: list[str] = []

    class Follower(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(307)
            self.send_header("Location", f"http://127.0.0.1:{silent.getsockname()[1]}{self.path}")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None: ...

    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadingHTTPServer(("127.0.0.1", 0), Follower) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        remote = Remote(servers=f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(TimeoutError, match="did not answer in time"):
            call(remote, "GET", "/v1/hours", needs="hours", timeout_s=0.2)
        server.shutdown()
    assert asked == ["/v1/hours"]


def test_a_member_whose_name_means_nothing_here_is_found_among_the_servers() -> None:
    class Node(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = names[self.server.server_address[1]]
            body = json.dumps({"me": name}).encode()
            self.send_response(200)
            self.send_header("Hadelay-Node", name)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Node) as one, ThreadingHTTPServer(("127.0.0.1", 0), Node) as two:
        names = {one.server_port: "n1", two.server_port: "n2"}
        for server in (one, two):
            threading.Thread(target=server.serve_forever, daemon=True).start()
        remote = Remote(servers=",".join(f"http://127.0.0.1:{port}" for port in names))
        for name in ("n2", "n1"):
            member = {"name": name, "http": "http://127.0.0.1:1"}
            assert call_member(remote, member, "GET", "/v1/hours", needs="me") == {"me": name}
        with pytest.raises(ConnectionError, match=r"127.0.0.1:1.*node n1 .*, not n3.*node n2 .*, not n3"):
            call_member(remote, {"name": "n3", "http": "http://127.0.0.1:1"}, "GET", "/v1/hours", needs="me")
        one.shutdown()
        two.shutdown()


@pytest.mark.parametrize(
    ("query", "headers", "servers"),
    [
        ({"rate": float("nan")}, {}, ""),
        ({}, {"Hadelay-Meta-a": "x\nHadelay-Key: k"}, ""),
        ({}, {"Hadelay-Meta-a\n": "x"}, ""),
        ({}, {}, "http://127.0.0.1:99999"),
    ],
)
def test_the_command_line_refuses_in_words(url: str, query: Any, headers: dict[str, str], servers: str) -> None:
    with pytest.raises(BadRequest, match="sent"):
        call(Remote(servers=servers or url), "PUT", "/v1/topics/t", query, headers=headers)


@pytest.mark.parametrize("headers", [{}, {"Hadelay-Node": "n1"}])
@pytest.mark.parametrize("answer", [b"<html>", b'"\xff"', b"[" * 2_000, b'{"id":"7"}', b'["outcome"]', b""])
@pytest.mark.parametrize("needs", ["outcome", ""])
def test_a_server_that_is_no_node_is_named_as_none(answer: bytes, headers: dict[str, str], needs: str) -> None:
    for method, known in (("GET", True), ("POST", False)):
        with pytest.raises(NotANode, match="http://a: the answer is not from a hadelay node: HTTP 200") as caught:
            read_answer(RemoteAnswer("http://a", 200, headers, answer), method, needs)
        assert caught.value.outcome_known is known
    with pytest.raises(NotANode, match="no header Hadelay-Node"):
        read_answer(RemoteAnswer("http://a", 200, {}, answer), "GET", decode=bytes)


def test_a_gateway_may_drop_headers(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What an answer says itself is enough."""
    monkeypatch.setattr("hadelay.http.app.HttpServer.add_headers", Mock())
    monkeypatch.setenv("HADELAY_SERVERS", url)
    assert run(["msg", "put", "t", "x", "--delay", "1h", "-o", "json"]) == OK
    made = json.loads(capsys.readouterr().out)["id"]
    for words in (
        f"msg get {made}", "msg list t", f"msg reschedule {made} --delay 2h", f"msg deliver {made}", "msg receive t",
        f"msg cancel {made}", "topic list", "topic get t", "topic set t --lease 5s", "topic pause t", "topic resume t",
        "topic purge t --yes", "topic redrive t", "dead list t", "dead purge t -y", "topic delete t --force --yes",
        "cluster status", "cluster transfer n1", "cluster drain n1", "token list", "cluster audit", f"trace {made}",
    ):  # fmt: skip
        assert run(words.split()) in (OK, 1), words
        assert "not from a hadelay node" not in capsys.readouterr().err, words


class Stranger(BaseHTTPRequestHandler):
    """Another service, or one that takes the request and goes away."""

    status, body = 200, b'{"message":"hello"}'

    def do_POST(self) -> None:
        if not self.status:
            return
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    do_GET = do_DELETE = do_POST

    def log_message(self, *args: Any) -> None: ...


@contextmanager
def serving(status: int) -> Iterator[str]:
    kind = type("Stranger", (Stranger,), {"status": status})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def stranger(request: pytest.FixtureRequest) -> Iterator[str]:
    with serving(request.param) as url:
        yield url


@pytest.mark.parametrize("stranger", [200, 502, 500, 0], indirect=True)
def test_a_command_that_no_node_answered_is_neither_done_nor_refused(
    stranger: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever another server says after that; and the key that finds out is told."""
    for servers in (stranger, f"{stranger},http://127.0.0.1:1"):
        assert run(["msg", "put", "t", "x", "--servers", servers]) == TIMEOUT
        shown = capsys.readouterr()
        assert shown.out == ""
        assert re.search(
            r"may or may not have happened: repeat the command with --idempotency-key [0-9a-f]{32}", shown.err
        )
        assert run(["msg", "cancel", "0" * 13, "--servers", servers]) == TIMEOUT
        assert "idempotency" not in capsys.readouterr().err


@pytest.mark.parametrize("refusal", [400, 401, 403, 413])
@pytest.mark.parametrize("stranger", [200, 0], indirect=True)
def test_a_refused_request_says_nothing_about_an_earlier_one(stranger: str, refusal: int) -> None:
    with serving(refusal) as other:
        assert run(["msg", "put", "t", "x", "--servers", f"{stranger},{other}"]) == TIMEOUT
        assert run(["msg", "put", "t", "x", "--servers", other]) not in (OK, TIMEOUT)


@pytest.mark.parametrize("stranger", [200, 404, 502], indirect=True)
def test_a_server_that_is_no_node_is_none_for_every_command(stranger: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("topic list", "msg list t", "trace 0000000000000", "top --once", "cluster status", "token list"):
        assert run([*words.split(), "--servers", stranger]) == UNREACHABLE
        assert "not from a hadelay node" in capsys.readouterr().err


@pytest.mark.parametrize("stranger", [200, 0], indirect=True)
def test_another_server_may_be_a_node(stranger: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["msg", "put", "t", "x", "--servers", f"{stranger},{url}"]) == OK
    assert "deliver_at" in capsys.readouterr().out


def test_a_nodes_answer_counts_for_more_than_the_absence_of_another(capsys: pytest.CaptureFixture[str]) -> None:
    class NoLeader(Stranger):
        status = 503
        body = b'{"type":"no_leader","title":"No leader","detail":"no majority","retryable":true,"outcome_known":true}'

        def end_headers(self) -> None:
            self.send_header("Hadelay-Node", "n1")
            self.send_header("Content-Type", "application/problem+json")
            super().end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), NoLeader) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers = f"http://127.0.0.1:1,http://127.0.0.1:{server.server_port},http://127.0.0.1:2"
        assert run(["cluster", "status", "--servers", servers]) == UNREACHABLE
        server.shutdown()
    shown = capsys.readouterr().err
    assert "no majority" in shown
    assert "/readyz?verbose" in shown
    assert "refused" not in shown


def test_everybody_who_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cluster", "status", "--servers", "http://127.0.0.1:1,http://127.0.0.1:2"]) == UNREACHABLE
    shown = capsys.readouterr().err
    assert "http://127.0.0.1:1: Connection refused; http://127.0.0.1:2: Connection refused" in shown


def test_a_refused_connection_is_an_unreachable_node(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """Also by a command that asks as the client does."""
    monkeypatch.setattr(Client.__init__, "__kwdefaults__", {"timeout": 0.2, "ca": None, "shard": None})
    assert run(["pipeline", "replay", "t", "--servers", "http://127.0.0.1:1"]) == UNREACHABLE
    assert "127.0.0.1:1" in (shown := capsys.readouterr().err)
    assert "--servers names another" in shown
    assert "A node answers, but does not serve" not in shown


@pytest.mark.parametrize("stranger", [0], indirect=True)
def test_a_server_that_hangs_up_may_want_tls(stranger: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cluster", "status", "--servers", stranger]) == UNREACHABLE
    assert "try https://" in capsys.readouterr().err


@contextmanager
def saying(words: bytes) -> Iterator[str]:
    """host:port of a server that answers every connection with the bytes."""

    class Speaker(StreamRequestHandler):
        def handle(self) -> None:
            self.request.recv(65_536)
            self.wfile.write(words)

    with ThreadingTCPServer(("127.0.0.1", 0), Speaker) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


NODE_LINK = (
    b'"\0\0\0\x8f)\xcdp\1\x96\xachadelay-link\1\xacdev\0\xa2n1\1E\0\0\0\xbar:\x0e\0the first frame must be HELLO'
)


@pytest.mark.parametrize(
    ("words", "said", "known"),
    [
        (NODE_LINK, "node link of a node (raft.listen): use the node's HTTP address (http.listen)", True),
        (b"\x15\x03\x01\0\x02\x02F", "try https://", True),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "the answer is not HTTP: b'SSH-2.0-OpenSSH_9.2", False),
    ],
)
def test_servers_that_do_not_speak_http_are_named_in_words(
    words: bytes, said: str, known: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with saying(words) as address:
        for command in (["topic", "list"], ["msg", "put", "t", "x"]):
            assert run([*command, "-s", address]) == (UNREACHABLE if known or command[0] == "topic" else TIMEOUT)
            assert said in (shown := capsys.readouterr().err)
            assert shown.replace("\n", "").isprintable()
        with Client(address, timeout=5) as client, pytest.raises(NotANode) as caught:
            client.put("t", "x")
        assert said in str(caught.value)
        assert caught.value.outcome_known is known


def test_https_to_a_server_without_tls_is_said_in_words(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    https = f"https://{url}"
    for command in (["topic", "list"], ["msg", "put", "t", "x"]):
        assert run([*command, "-s", https]) == UNREACHABLE
        assert "the server does not speak TLS: try http://" in capsys.readouterr().err
    with Client(https, timeout=5) as client, pytest.raises(HadelayError, match="not speak TLS: try http://"):
        client.put("t", "x")


@pytest.mark.parametrize("token", ["", "hadelay_other"])
def test_a_refused_token_names_the_variable(token: str, capsys: pytest.CaptureFixture[str]) -> None:
    class Guarded(Stranger):
        status = 401
        body = (
            b'{"type":"unauthorized","title":"Unauthorized","detail":"send Authorization: Bearer","retryable":false,'
            b'"outcome_known":true}'
        )

    with ThreadingHTTPServer(("127.0.0.1", 0), Guarded) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers = f"http://127.0.0.1:{server.server_port}"
        for words in (["topic", "list"], ["msg", "put", "t", "x"]):
            assert run([*words, "-s", servers, "--token", token]) == AUTH
            shown = capsys.readouterr().err
            assert "HADELAY_TOKEN" in shown
            assert ("Authorization" in shown) == bool(token)
        server.shutdown()


def test_a_negative_duration_is_named_as_one(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["msg", "put", "t", "x", "--delay", "-5s"], ["msg", "put", "t", "x", "--ttl", "-5s"]):
        assert run([*words, "-s", url]) == USAGE
        assert "'-5s' is negative" in capsys.readouterr().err
    assert run(["msg", "put", "t", "-s", url, "--", "--delay", "-5s"]) == USAGE  # two words too many
    assert "'-5s' is negative" not in capsys.readouterr().err


def test_a_secret_is_not_passed_on(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["topic", "list", "--servers", url, "--token", "abc\n"]) == OK
    assert run(["topic", "list", "--servers", url, "--token", "sec\nret"]) == USAGE
    assert "sec" not in capsys.readouterr().err


def test_an_empty_idempotency_key_is_not_put_away(url: str) -> None:
    assert run(["msg", "put", "t", "x", "--servers", url, "--idempotency-key", ""]) == USAGE


def test_ctrl_c_tells_the_key(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("hadelay.cli.remote._exchange", Mock(side_effect=KeyboardInterrupt))
    assert run(["msg", "put", "t", "x", "--idempotency-key", "k7"]) == INTERRUPTED
    assert "may or may not have happened: repeat the command with --idempotency-key k7" in capsys.readouterr().err
    assert run(["topic", "list"]) == INTERRUPTED
    assert capsys.readouterr().err == ""


def test_messages_cancelled_before_an_error_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers: list[Any] = [{"outcome": "cancelled"}, Conflict("too late", outcome="leased"), ConnectionError("gone")]
    monkeypatch.setattr("hadelay.cli.msg.call", Mock(side_effect=answers))
    assert run(["msg", "cancel", "a", "b", "c", "d", "-o", "json"]) == UNREACHABLE
    shown = capsys.readouterr()
    assert [(row["id"], row["outcome"]) for row in json.loads(shown.out)] == [("a", "cancelled"), ("b", "leased")]
    assert json.loads(shown.err)["type"] == "unreachable"


def test_a_refusal_of_some_copies_shows_the_outcome_of_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = {"t": "leased", "t~billing": "cancelled"}
    late = Conflict("not every copy of the message could be changed", outcome="partial", outcomes=outcomes)
    monkeypatch.setattr("hadelay.cli.msg.call", Mock(side_effect=late))
    for words in ("msg cancel a", "msg reschedule a --delay 1h", "msg deliver a"):
        assert run(words.split()) == REFUSED
        assert capsys.readouterr().err.splitlines()[1:] == ["  t: leased", "  t~billing: cancelled"]
        assert run([*words.split(), "-o", "json"]) == REFUSED
        assert problem(capsys)["outcomes"] == outcomes
    assert run(["msg", "cancel", "a", "b"]) == REFUSED
    assert "t=leased t~billing=cancelled" in capsys.readouterr().out
    assert run(["msg", "cancel", "a", "b", "-o", "json"]) == REFUSED
    assert [row["outcomes"] for row in json.loads(capsys.readouterr().out)] == [outcomes] * 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("topic purge t", "deletes 1 scheduled, 0 ready, 999,999 blocked messages of topic t"),
        (
            "topic purge t --state ready --state dead",
            "deletes 0 ready, 2 dead, up to 999,999 blocked messages of topic t",
        ),
        ("topic purge t --state dead", "deletes 2 dead messages of topic t"),
        ("topic delete t --force", "1 scheduled, 0 ready, 3 leased, 2 dead, 999,999 blocked messages of topic t"),
        ("topic delete t", "and 2 dead messages of topic t"),
    ],
)
def test_a_question_counts_blocked_messages(
    words: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    topic = {"scheduled": 1, "ready": 0, "leased": 3, "dead": 2, "blocked": 999_999}
    monkeypatch.setattr("hadelay.cli.topic.call", Mock(return_value=topic))
    assert run(words.split()) == USAGE
    assert said in capsys.readouterr().err


def problem(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What a command said of its failure: nothing but one document."""
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    document: dict[str, Any] = json.loads(line)
    assert document["title"]
    assert document["detail"]
    return document


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        ("msg get 0000000000000", NOT_FOUND, ("not-found", False, True)),
        ("msg put a/b x", USAGE, ("bad-request", False, True)),
        ("msg put", USAGE, ("usage", False, True)),
        ("msg putt", USAGE, ("usage", False, True)),
        ("topic list --servers http://127.0.0.1:1", UNREACHABLE, ("unreachable", True, True)),
        ("msg put t --file no/such/file", REFUSED, ("system", False, True)),
        ("config check no/such/file", USAGE, ("config", False, True)),
    ],
)
@pytest.mark.parametrize("how", ["-o json", "--output=json", "environment"])
def test_a_failure_is_a_document_where_json_is_asked_for(
    words: str,
    code: int,
    expected: tuple[str, bool, bool],
    how: str,
    url: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HADELAY_SERVERS", url)
    if how == "environment":
        monkeypatch.setenv("HADELAY_OUTPUT", "json")
    assert run([*words.split(), *([] if how == "environment" else how.split())]) == code
    found = problem(capsys)
    assert (found["type"], found["retryable"], found["outcome_known"]) == expected


@pytest.mark.parametrize("stranger", [0, 502], indirect=True)
def test_the_document_has_the_key_that_finds_out(stranger: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["msg", "put", "t", "x", "--servers", stranger, "--idempotency-key", "k7", "-o", "json"]
    assert run(words) == TIMEOUT
    found = problem(capsys)
    assert (found["outcome_known"], found["idempotency_key"]) == (False, "k7")


def test_an_interruption_is_a_document_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("hadelay.cli.remote._exchange", Mock(side_effect=KeyboardInterrupt))
    assert run(["msg", "put", "t", "x", "--idempotency-key", "k7", "-o", "json"]) == INTERRUPTED
    found = problem(capsys)
    assert (found["type"], found["outcome_known"], found["idempotency_key"]) == ("interrupted", False, "k7")


@pytest.mark.parametrize("words", ["topic list -o table", "topic list", "msg get -- --output=json"])
def test_words_are_words_where_json_is_not_asked_for(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HADELAY_SERVERS", "http://127.0.0.1:1")
    assert run(words.split()) == UNREACHABLE
    assert capsys.readouterr().err.startswith("hadelay: http://127.0.0.1:1: Connection refused\n")
