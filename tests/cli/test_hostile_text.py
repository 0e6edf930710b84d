"""What the command line prints contains no character that a terminal obeys, wherever the text comes from: every command
is run on answers, refusals and words that have such characters in each place where free text may be."""

from __future__ import annotations

import base64
import io
import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hadelay.cli import app, output, top
from hadelay.cli.app import COMMANDS, run
from hadelay.http.openapi import document
from tests.http.conftest import unasked

#: ESC and a title, BEL, C1 CSI, right-to-left override, isolate, zero width space, DEL, line separator.
HOSTILE = "a\x1b]0;x\x07\x9b31m\u202e\u2066\u200b\x7f\u2028b"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f]")
ID, AT = "07D7EG00000G0", "2026-11-21T14:00:00.000Z"
#: Fields whose values commands compute with, with valid values.
VALUES: dict[str, Any] = {
    "id": ID, "cursor": None, "body_base64": base64.b64encode(HOSTILE.encode()).decode(), "ended_at": AT,
    "state": "dead", "leader": "n1", "hour": "2026112113", "applied": "4711",
}  # fmt: skip
#: Commands that show answers of a node, with their words.
REMOTE = {
    "msg put": "t x", "msg get": f"{ID}", "msg list": "t", "msg cancel": f"{ID}", "msg reschedule": f"{ID} --delay 5s",
    "msg deliver": f"{ID}", "msg receive": "t", "topic list": "", "topic get": "t", "topic group": "t g",
    "topic groups": "t",
    "topic set": "t --rate 5", "topic subscriptions": "t", "topic due": "t", "topic pause": "t",
    "topic resume": "t", "topic purge": "t --yes", "topic redrive": "t", "topic delete": "t --yes",
    "schedule set": "s t x --every 5s", "schedule get": "s", "schedule list": "", "schedule preview": "--every 5s",
    "schedule pause": "s", "schedule resume": "s", "schedule trigger": "s",
    "schedule backfill": f"s --from {AT} --to {AT}", "schedule delete": "s --yes", "dead list": "t",
    "dead redrive": f"t {ID}", "dead export": "t", "dead purge": "t --yes", "job cancel": "t --yes",
    "job reschedule": "t --shift 5s --yes", "job deliver": "t --yes", "job redrive": "t --yes",
    "job delete-dead": "t --yes", "job transfer": "t --into u --yes",
    "job list": "", "job get": "1", "job watch": "1", "job stop": "1", "trace": f"{ID}",
    "top": "--once --interval 0.1", "cluster status": "", "cluster transfer": "", "cluster drain": "n1",
    "cluster members list": "", "cluster members add": "n4 127.0.0.1:1", "cluster members remove": "n1",
    "cluster members replace": "n1 n4 127.0.0.1:1", "cluster audit": "",
    "token create": "x --scope admin", "token list": "", "token revoke": "0f1e2d3c4b5a", "check replicas": "",
    "attention": "", "consumers": "",
    "batch open": "b t", "batch get": "b", "batch list": "", "batch seal": "b", "batch cancel": "b",
    "batch failures": "b",
    "check files": "", "check quorum": "n1", "pipeline replay": "t", "bench": "--count 1",
}  # fmt: skip
#: Commands that read local files, or start processes: their words are hostile here.
LOCAL = {
    "serve": "{hostile}", "dev": "--data-dir {hostile}/x", "work": "{hostile}", "cluster certs": "{hostile}",
    "token bootstrap": "", "backup create": "s3://{hostile}", "backup verify": "{hostile}",
    "restore": "{hostile} {hostile} --node {hostile}",
    "pipeline reconcile": "{hostile}", "pipeline archive": "{hostile} {hostile}",
    "pipeline tail": "{hostile} {hostile}", "pipeline lateness": "{hostile}",
    "pipeline load": "{hostile}", "pipeline forecast": "{hostile}",
    "pipeline schedule": "{hostile}", "pipeline doctor": "--master {hostile}", "pipeline pack": "{hostile}/x",
    "outbox run": "sqlite:///{hostile}", "outbox status": "mysql://{hostile}", "outbox retry": "{hostile}",
    "outbox sql": "{hostile}", "batch watch": "{hostile}", "shards list": "{hostile}",
    "shards add": "{hostile} {hostile}",
    "shards rule": "{hostile}", "shards pin": "{hostile} {hostile}", "shards apply": "{hostile}",
    "shards balance": "{hostile}",
    "mcp": "{hostile}", "bridge rabbitmq": "amqp://{hostile}", "import redis-zset": "redis://{hostile}",
    "import bullmq": "{hostile}", "import sidekiq": "{hostile}", "import celery-redis": "{hostile}",
    "import rq-scheduler": "{hostile}", "import apscheduler": "{hostile}", "import rabbitmq-delayed": "{hostile}",
    "config check": "{hostile}", "inspect": "{hostile}", "completion": "{hostile}",
}  # fmt: skip


class Terminal(io.TextIOWrapper):
    def __init__(self, *, is_terminal: bool = True) -> None:
        super().__init__(io.BytesIO(), "utf-8", errors="backslashreplace")
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal

    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode()  # type: ignore[attr-defined, no-any-return]


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool = True) -> Iterator[Terminal]:
    shown = Terminal(is_terminal=is_terminal)
    with monkeypatch.context() as patched:
        patched.setenv("TERM", "dumb")  # without the control sequences of progress bars
        patched.setattr(sys, "stdout", shown)
        patched.setattr(sys, "stderr", shown)
        yield shown


class Hostile:
    """A node whose answers have hostile text wherever the OpenAPI document allows free text."""

    def __init__(self) -> None:
        routes = unasked().routes.all
        self.api = json.loads(document(route for route in routes if route.described))
        self.refuses = False
        self.url = ""

    def answer(self, method: str, path: str) -> tuple[int, str, bytes]:
        if self.refuses:
            problem = {
                "type": "conflict", "title": HOSTILE, "status": 409, "detail": HOSTILE, "retryable": False,
                "outcome_known": True, "outcome": HOSTILE, "outcomes": {HOSTILE: HOSTILE},
            }  # fmt: skip
            return 409, "application/problem+json", json.dumps(problem).encode()
        for template, operations in self.api["paths"].items():
            if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", re.sub(r"([.:])", r"\\\1", template)), path):
                operation = operations[method.lower()]
                status, found = next((int(s), r) for s, r in operation["responses"].items() if s < "3")
                content = found.get("content", {})
                if "application/json" in content:
                    value = self.value("", content["application/json"]["schema"])
                    return status, "application/json", json.dumps(value).encode()
                return status, next(iter(content), "text/plain"), b"hadelay_up 1\n" if content else b""
        raise AssertionError(f"{method} {path} is in no route")

    def value(self, name: str, schema: dict[str, Any]) -> Any:
        if name in VALUES:
            return VALUES[name]
        if name in ("http", "url"):
            return self.url.removeprefix("http://")
        if "$ref" in schema:
            return self.value(name, self.api["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
        for choice in ("anyOf", "oneOf", "allOf"):
            if choice in schema:
                return self.value(name, schema[choice][0])
        if "const" in schema or "enum" in schema:
            return schema.get("const", schema.get("enum", [None])[0])
        kind = schema.get("type")
        if kind == "object":
            found = {member: self.value(member, of) for member, of in schema.get("properties", {}).items()}
            more = schema.get("additionalProperties")
            return found | ({HOSTILE: self.value("", more if isinstance(more, dict) else {})} if more else {})
        if kind == "array":
            return [self.value(name, of) for of in [schema.get("items") or {}, *schema.get("prefixItems", ())][:1]]
        if kind in ("integer", "number"):
            return max(schema.get("minimum", 1), 1)
        if kind == "boolean":
            return True
        if kind == "null":
            return None
        return AT if schema.get("format") == "date-time" or name.endswith("_at") or name in _TIMES else HOSTILE


_TIMES = ("from", "to", "time", "at", "start", "until", "lease_until", "first", "last", "occurrence", "began", "ended")


@pytest.fixture(scope="module")
def hostile() -> Iterator[Hostile]:
    node = Hostile()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one_request(self) -> None:
            super().handle_one_request()

        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, kind, body = node.answer(self.command, self.path.partition("?")[0])
            self.send_response(status)
            for header, value in (("Content-Type", kind), ("Content-Length", str(len(body))), ("Hadelay-Node", "n1")):
                self.send_header(header, value)
            self.end_headers()
            self.wfile.write(b"" if status == 204 else body)

        do_GET = do_PUT = do_POST = do_DELETE = do_PATCH = _answer

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        node.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield node
        server.shutdown()


def test_every_command_is_tried_here() -> None:
    assert sorted([*REMOTE, *LOCAL]) == sorted(command.path for command in COMMANDS)
    assert not REMOTE.keys() & LOCAL.keys()


@pytest.mark.parametrize("command", REMOTE)
def test_no_answer_is_obeyed(
    command: str, hostile: Hostile, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setenv("HADELAY_SERVERS", hostile.url)
    words = [*command.split(), *REMOTE[command].split()]
    for refuses in (False, True):
        for more in ((), ("-o", "json")):
            for is_terminal in (True, False):
                hostile.refuses = refuses
                with terminal(monkeypatch, is_terminal=is_terminal) as shown:
                    code = run([*words, *more])
                text = shown.text()
                assert code != app.USAGE, f"{words}: {text}"
                assert text
                assert not OBEYED.search(text), f"{words} {more}: {text!r}"
                if refuses:
                    assert "0;x" in text, f"{words} {more}: the node's words are not shown: {text!r}"


@pytest.mark.parametrize("command", [command.path for command in COMMANDS])
def test_no_word_of_the_command_line_is_obeyed(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:  # fmt: skip
    monkeypatch.setenv("HADELAY_SERVERS", "http://127.0.0.1:9")
    monkeypatch.chdir(tmp_path)
    tried = [["--" + HOSTILE], ["-o", HOSTILE], ["-o", "json", "--" + HOSTILE]]
    if command in LOCAL:
        tried.append([word.format(hostile=HOSTILE) for word in LOCAL[command].split()])
    for words in tried:
        with terminal(monkeypatch) as shown:
            run([*command.split(), *words])
        assert not OBEYED.search(shown.text()), f"{words}: {shown.text()!r}"


#: Nested as answers are: keys of maps, lists, verdicts.
VALUE = {HOSTILE: {HOSTILE: [HOSTILE, {HOSTILE: 1}]}, "verdict": HOSTILE, "error": {"reason": HOSTILE}}


def test_a_payload_is_shown_to_people_and_copied_to_pipes(
    hostile: Hostile, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setenv("HADELAY_SERVERS", hostile.url)
    hostile.refuses = False
    for words in (["msg", "get", ID, "--body"], ["schedule", "get", "s", "--body"]):
        with terminal(monkeypatch) as shown:
            assert run(words) == 0
        assert shown.text() == "".join(c if c.isprintable() else "�" for c in HOSTILE)
        with terminal(monkeypatch, is_terminal=False) as shown:
            assert run(words) == 0
        assert shown.text() == HOSTILE


def test_json_keeps_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    value = {**VALUE, "tag": "\U000e0041\U0001f600é"}
    for is_terminal in (True, False):
        with terminal(monkeypatch, is_terminal=is_terminal) as shown:
            output.emit_json(value)
        assert json.loads(shown.text()) == value
        assert not OBEYED.search(shown.text())
        assert "\U0001f600é" in shown.text()


def test_a_screen_that_is_refreshed_is_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "_looks", lambda *_: iter([{}, {}]))
    monkeypatch.setattr(top, "_render", lambda _: HOSTILE)
    with terminal(monkeypatch) as shown:
        monkeypatch.setenv("TERM", "xterm")
        assert run(["top"]) == 0
    assert "\x9b" not in shown.text()
    assert "\u202e" not in shown.text()
    assert "\x1b]0" not in shown.text()
