"""Every answer of the API, byte for byte, as clients know it: members, their order, what is null, what is absent.

golden/answers.txt is a scenario (tests/scenarios.py). Lines: `Name: value`, a header of the next request; a request,
its path, its body; and what is done to the node in between. $n stands for the id of message n, %n for its last lease.
`pytest tests/http/test_golden.py --rewrite` accepts what is answered now, which is then a change of the API.
"""

from __future__ import annotations

import asyncio
import http.client
import re
import secrets
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from hadelay import errors
from hadelay.api.messages import Message
from hadelay.api.service import Leader, Target
from hadelay.api.text import format_instant
from hadelay.api.topics import Consumer, Lateness, Topic
from hadelay.errors import HadelayError
from hadelay.http.app import ROUTES, HttpServer
from hadelay.http.openapi import document
from hadelay.model import HOUR_MS, Event, PastEvent, encode_id
from hadelay.server.service.messages import event_of
from hadelay.settings.node import HttpConfig
from tests import scenarios
from tests.http.conftest import MAX_DELAY_MS
from tests.http.memory_service import MemoryService
from tests.ledger.world import START_MS

GOLDEN = Path(__file__).parent / "golden"
#: Of the machine, the second, or aiohttp.
_PASSING = {"date", "server"}
_PROBLEMS = {c.type: c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, HadelayError)}


class GoldenService(MemoryService):
    """Its clock stands still, and it shows everything that can be shown."""

    clock_ms = START_MS + 123

    @staticmethod
    def now_ms() -> int:
        return GoldenService.clock_ms

    async def describe(self, target: Target, *, body: bool, stale: bool, wait_ms: int = 0) -> Message[str]:
        found = await super().describe(target, body=body, stale=stale, wait_ms=wait_ms)
        if found.topic == "traced":
            at, hour = START_MS, START_MS // HOUR_MS
            events = [
                PastEvent(Event.LEASED, at + 1, 1, "c1", "n1", due_ms=at),
                PastEvent(Event.NACKED, at + 2, 1, "c1", "n1", reason="no stock"),
                PastEvent(Event.LEASED, at + 3, 2, "c1", "n2"),
                PastEvent(Event.LEASE_EXPIRED, at + 4, 2, None, None),
                PastEvent(Event.MOVED, at + 5, 2, None, "n1", from_hour=hour, to_hour=hour + 1),
                PastEvent(Event.DEAD, at + 6, 2, None, None),
                PastEvent(Event.REDRIVEN, at + 7, 2, None, "n1"),
                PastEvent(Event.CANCELLED, at + 8, 2, None, "n1"),
            ]
            found = replace(found, history=[event_of(event) for event in events])
        return found

    def _topic(self, name: str) -> Topic[str]:
        view = super()._topic(name)
        if name == "orders":
            seen = [Consumer("worker-1", format_instant(START_MS), "n2", True)]
            return replace(view, bytes=12_345, lateness=Lateness(7, 1.5, 20.25, 21.0), consumers=seen)
        return view


class Player:
    def __init__(self, server: HttpServer, service: GoldenService) -> None:
        self.server, self.service = server, service
        self.headers: dict[str, str] = {}
        self.asked: set[str] = set()

    def play(self, line: str) -> list[str]:
        if match := re.fullmatch(r"([A-Za-z-]+): (.*)", line):
            self.headers[match[1]] = match[2]
            return []
        word, _, rest = line.partition(" ")
        if word.isupper():
            return self._ask(word, *self._named(rest).partition(" ")[::2])
        self._do(word, rest)
        return []

    def _named(self, text: str) -> str:
        stored = list(self.service.stored.values())
        text = re.sub(r"\$(\d+)", lambda match: encode_id(stored[int(match[1])].id), text)
        return re.sub(r"%(\d)(?!\d|[A-F])", lambda match: stored[int(match[1])].lease, text)

    def _do(self, word: str, rest: str) -> None:
        service = self.service
        if word == "later":
            GoldenService.clock_ms += int(rest)
        elif word == "state":
            number, state = rest.split()
            list(service.stored.values())[int(number)].state = state
        elif word == "fail":
            kind, retry_ms, detail = rest.split(" ", 2)
            service.fail = _PROBLEMS[kind](detail, retry_after_ms=int(retry_ms) or None)
        elif word == "well":
            service.fail, service.leader, service.leader_name = None, Leader("n1", "", True), "n1"
        elif word == "leader":
            service.leader = Leader(rest, "http://n2.example:8400", False) if rest else None
            service.leader_name = rest or None
        else:
            raise AssertionError(f"{word}: no request, and nothing that is done here")

    def _ask(self, method: str, target: str, body: str) -> list[str]:
        headers, self.headers = self.headers, {}
        if body[:1] in ("{", "["):
            headers.setdefault("Content-Type", "application/json")
        self.asked.add(ROUTES.find(method, target.partition("?")[0])[0].name)
        data = body.encode()
        headers = {"Host": "x", "Content-Length": str(len(data))} | headers
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        host, port = self.server.address.split(":")
        with socket.create_connection((host, int(port)), 20) as connection:
            # In one piece: otherwise a race decides whether it goes the short way or aiohttp's.
            connection.sendall(f"{method} {target} HTTP/1.1\r\n{head}\r\n".encode() + data)
            answer = http.client.HTTPResponse(connection, method=method)
            answer.begin()
            found = answer.read()
        passing = _PASSING | ({"content-length"} if target == "/metrics" else set())
        said = sorted(f"{name}: {value}" for name, value in answer.getheaders() if name.lower() not in passing)
        return [f"{answer.status} {answer.reason}", *said, *_shown(found, answer.getheader("Content-Type", ""), target)]


def _shown(data: bytes, kind: str, target: str) -> list[str]:
    if not data:
        return []
    if kind in ("application/msgpack", "application/octet-stream"):
        return [data.hex()]
    lines = data.decode().splitlines()
    if target == "/metrics":  # its own process has other numbers each time
        lines = [line for line in lines if re.search("hadelay_(messages|nobody|raft_term|delivery_late)", line)]
    return lines


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HttpServer]:
    monkeypatch.setattr(secrets, "token_urlsafe", lambda size: "A" * 43)
    monkeypatch.setattr(GoldenService, "clock_ms", START_MS + 123)
    config = HttpConfig(listen="127.0.0.1:0", hosts=["x"])
    server = HttpServer(GoldenService(), config, MAX_DELAY_MS)
    await server.start()
    yield server
    await server.stop(1)


async def test_answers(server: HttpServer, request: pytest.FixtureRequest) -> None:
    assert isinstance(server.service, GoldenService)
    player = Player(server, server.service)
    await asyncio.to_thread(scenarios.check, GOLDEN / "answers.txt", player, request)
    assert {route.name for route in ROUTES.all} - player.asked == {"openapi"}


async def test_openapi(server: HttpServer, request: pytest.FixtureRequest) -> None:
    """Without the prose, references by their last name; an operation or a schema per line."""
    described = _bare(msgspec.json.decode(document(server.routes.all)))
    parts = [
        (f"{method} {path}", of) for path, methods in described.pop("paths").items() for method, of in methods.items()
    ]
    parts += [
        (f"{kind} {name}", of) for kind, named in described.pop("components").items() for name, of in named.items()
    ]
    lines = [f"{name}: {msgspec.json.encode(part).decode()}\n" for name, part in [*parts, *described.items()]]
    scenarios.same(GOLDEN / "openapi.txt", "".join(lines), request)


def _bare(value: Any) -> Any:
    if isinstance(value, list):
        return [_bare(one) for one in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"$ref"}:
        return value["$ref"].rpartition("/")[2]
    if value and all(one == {"$ref": f"#/components/headers/{name}"} for name, one in value.items()):
        return " ".join(value)
    prose = ("summary", "description", "version")
    return {name: _bare(one) for name, one in value.items() if not (name in prose and isinstance(one, str))}
