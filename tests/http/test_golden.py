"""Every answer of the API, byte for byte, as clients know it: members, their order, what is null, what is absent.

golden/answers.txt is a scenario (tests/scenarios.py). Lines: `Name: value`, a header of the next request; a request,
its path, its body; and what is done to the node in between. $n stands for the id of message n, %n for its last lease,
%% for the lease that was given last, & for the last snapshot.
`pytest tests/http/test_golden.py --rewrite` accepts what is answered now, which is then a change of the API.
"""

from __future__ import annotations

import asyncio
import http.client
import re
import secrets
import socket
import string
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hadelay import errors
from hadelay.api.service import Leader
from hadelay.errors import HadelayError
from hadelay.http.app import ROUTES, HttpServer
from hadelay.http.openapi import document
from hadelay.model import encode_id
from hadelay.settings.node import HttpConfig
from tests import scenarios
from tests.http.conftest import MAX_DELAY_MS, unasked
from tests.http.served import Served, serve
from tests.ledger.world import START_MS

GOLDEN = Path(__file__).parent / "golden"
#: Of the machine, the second, or aiohttp.
_PASSING = {"date", "server"}
#: File of the state in the answer for a snapshot: its name has the applied index.
_STATE = re.compile(r'("name":"state-)[0-9]+(","bytes":")[0-9]+(","crc32c":")[0-9a-f]+')
#: Applied index, as JSON, in a snapshot's id, and as hex of MessagePack: it depends on the passes of the event loop.
_APPLIED = re.compile(
    r'("(?:applied_)?index":"|/snapshots/|"id":")[0-9]+(?=["-])|(6170706c6965645f696e646578)a[1-9](?:3[0-9])+'
)
#: Number of passes of the event loop in which a node does what is due.
_TURNS = 100
_PROBLEMS = {c.type: c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, HadelayError)}


class Player:
    """Asks a node whose clock stands still, or one without a leader."""

    def __init__(self, server: HttpServer, lost: HttpServer, loop: asyncio.AbstractEventLoop) -> None:
        assert isinstance(server.service, Served)
        self.server = self.leading = server
        self.service, self.lost, self.loop = server.service, lost, loop
        self.headers: dict[str, str] = {}
        self.asked: set[str] = set()
        #: Id of the last snapshot.
        self.snapshot = ""

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
        ids, leases = self.service.ids, self.service.leases
        text = re.sub(r"\$(\d+)", lambda match: encode_id(ids[int(match[1])]), text)
        if "%%" in text:
            text = text.replace("%%", list(leases.values())[-1])
        text = re.sub(r"%(\d+)(?!\d|[A-F])", lambda match: leases[encode_id(ids[int(match[1])])], text)
        return text.replace("&", self.snapshot) if text.startswith("/v1/snapshots") else text

    def _do(self, word: str, rest: str) -> None:
        service = self.service
        if word == "later":
            self._settled(int(rest))
        elif word == "fail":
            kind, retry_ms, detail = rest.split(" ", 2)
            service.fail = _PROBLEMS[kind](detail, retry_after_ms=int(retry_ms) or None)
        elif word == "well":
            service.fail = service.leader = None
            self.server = self.leading
        elif word == "leader" and rest:
            service.leader = Leader(rest, "http://n2.example:8400", False)
        elif word == "leader":
            self.server = self.lost
        else:
            raise AssertionError(f"{word}: no request, and nothing that is done here")

    def _settled(self, later_ms: int = 0) -> None:
        """Move the clock, and let the node do what is due."""

        async def pass_turns() -> None:
            self.service.runtime.move(later_ms / 1000)
            for _ in range(_TURNS):
                await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(pass_turns(), self.loop).result(20)

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
        self._settled()
        if target == "/v1/snapshots":
            self.snapshot = msgspec.json.decode(found)["id"]
        passing = _PASSING | ({"content-length"} if target in ("/metrics", "/v1/cluster") else set())
        said = sorted(
            _APPLIED.sub(r"\1…", f"{name}: {value}")
            for name, value in answer.getheaders()
            if name.lower() not in passing
        )
        return [f"{answer.status} {answer.reason}", *said, *_shown(found, answer.getheader("Content-Type", ""), target)]


def _shown(data: bytes, kind: str, target: str) -> list[str]:
    if not data:
        return []
    if kind in ("application/msgpack", "application/octet-stream"):
        return [_APPLIED.sub(r"\1\2…", data.hex())]
    lines = [_APPLIED.sub(r"\1\2…", _STATE.sub(r"\1…\2…\3…", line)) for line in data.decode().splitlines()]
    if target == "/metrics":  # its own process has other numbers each time
        lines = [line for line in lines if re.search("hadelay_(messages|raft_term|topic_messages)", line)]
    return lines


@pytest.fixture
async def servers(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[HttpServer]]:
    """A server of a node that leads, and one of a node that knows no leader."""
    letters = iter(string.ascii_uppercase)
    monkeypatch.setattr(secrets, "token_urlsafe", lambda size: next(letters) * 43)
    left = "hadelay.server.service.cluster.others_left"
    monkeypatch.setattr(left, lambda node, without: [name for name in ("n1", "n2") if name != without])
    config = HttpConfig(listen="127.0.0.1:0", hosts=["x"], no_leader_wait_ms=20)
    services = [await serve(config, at_ms=START_MS + 123), await serve(config, lost=True)]
    servers = [HttpServer(service, config, MAX_DELAY_MS) for service in services]
    for server in servers:
        await server.start()
    yield servers
    for server, service in zip(servers, services, strict=True):
        await server.stop(1)
        service.close()


async def test_answers(servers: list[HttpServer], request: pytest.FixtureRequest) -> None:
    player = Player(*servers, asyncio.get_running_loop())
    await asyncio.to_thread(scenarios.check, GOLDEN / "answers.txt", player, request)
    assert {route.name for route in ROUTES.all} - player.asked == {"openapi"}


def test_openapi(request: pytest.FixtureRequest) -> None:
    """Without the prose, references by their last name; an operation or a schema per line."""
    described = _bare(msgspec.json.decode(document(unasked().routes.all)))
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
