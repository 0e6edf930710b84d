"""The HTTP server of one node: routes, connections, the answer to every error, start and drain."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, MutableMapping, Sequence
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, TypeVar

import aiohttp
from aiohttp import web

from hadelay.errors import BadRequest, HadelayError, NoLeader, OutcomeUnknown, Overloaded
from hadelay.http import admin, consume, dead, health, listing, messages, openapi, problems, publish, tokens
from hadelay.http.access import ANYBODY, OPEN, Access, Denials, Door, Hosts, check_site
from hadelay.http.bodies import Room, Share
from hadelay.http.connection import Connection, Heads
from hadelay.http.listener import Listener
from hadelay.http.metrics import Metrics
from hadelay.http.routes import (
    Answer,
    Call,
    Route,
    Routes,
    check_headers,
    decode_body,
    decode_query,
    header_lines,
    origin_form,
    parse_query,
)
from hadelay.http.turns import Turns
from hadelay.loglimit import LogLimit
from hadelay.platform.tls import Certificates
from hadelay.server.api import Granting, Leader, Service
from hadelay.settings.node import HttpConfig, SecurityConfig
from hadelay.settings.rules import split_address

log = logging.getLogger(__name__)
T = TypeVar("T")

ROUTES = Routes()
for _part in (publish, messages, listing, dead, consume, admin, tokens, health):
    ROUTES.include(_part.routes)


class Polls:
    """Waiting receives. Draining ends them with an answer that sends the consumer, with the same request_id, elsewhere:
    503, or 504 when something may have been granted to it already."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()
        self.draining = False

    async def run(self, poll: Coroutine[Any, Any, T]) -> T:
        if self.draining:
            poll.close()
            raise self._gone()
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            return await poll
        except asyncio.CancelledError as cancelled:
            if self.draining and task.uncancel() == 0:
                raise self._gone(sure=not isinstance(cancelled, Granting)) from None
            raise
        finally:
            self.tasks.discard(task)

    def drain(self) -> None:
        self.draining = True
        for task in self.tasks:
            task.cancel()

    @staticmethod
    def _gone(*, sure: bool = True) -> HadelayError:
        detail = "the node is shutting down: ask another one, with the same request_id"
        return Overloaded(detail, retry_after_ms=0) if sure else OutcomeUnknown(detail)


class _Server(web.Server):
    """aiohttp's low-level server, with our connections."""

    def __init__(self, http: HttpServer, **kwargs: Any) -> None:
        super().__init__(http.handle, handler_cancellation=True, **kwargs)
        self._http = http

    def make(self, lost: Callable[[], None]) -> Connection:
        return Connection(self, self._http, lost, loop=self._loop, **self._kwargs)


class HttpServer:
    """Serves `service`. `max_delay_ms` refuses what the log would refuse anyway, before it travels. sockets: see
    Listener.

    Raises ConfigError if the certificate can't be used.
    """

    def __init__(
        self, service: Service, config: HttpConfig, max_delay_ms: int, security: SecurityConfig | None = None,
        *, sockets: int | None = None,
    ) -> None:  # fmt: skip
        self.service = service
        self.tls = Certificates("http", config.tls_cert, config.tls_key, config.tls_ca) if config.tls_cert else None
        self.config = config
        self.max_delay_ms = max_delay_ms
        self.heads = Heads(self)
        #: None: nobody is asked for a token.
        self.door: Door | None = None
        if security is not None and security.tokens:
            self.door = Door(service, security, time.monotonic, self.heads.recent.clear)
        self.hosts = Hosts(config, tokens=self.door is not None)
        self.polls = Polls()
        self.denials = Denials(time.monotonic)
        self.turns = Turns()
        self.metrics = Metrics(service, self.denials.counts, self.turns)
        self.log_limit = LogLimit(time.monotonic)
        self.room = Room(config.max_reading_bytes)
        #: Receives that wait, here or for a leader.
        self.waiting = 0
        #: Polls that wait for the leader's answer, each on a connection to it.
        self.relaying = 0
        self._sockets = sockets
        self._listener: Listener | None = None
        self._server: _Server | None = None
        self._relay: aiohttp.ClientSession | None = None
        self._openapi: bytes | None = None
        self._common: tuple[int, str | None, bytes] = (-1, None, b"")
        self.address = ""

    # ---- life

    async def start(self) -> str:
        """Listens; returns the address, with the port that was taken for port 0."""
        host, port = split_address(self.config.listen)
        self._server = _Server(
            self,
            keepalive_timeout=self.config.idle_timeout_ms / 1000,
            access_log=None,
            auto_decompress=False,
            lingering_time=2.0,
        )
        self._listener = Listener(self, self._server.make, self._sockets)
        port = self._listener.listen(host, port)
        self.metrics.watch()
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return self.address

    async def stop(self, grace_s: float = 10.0) -> None:
        """Drains: no new connections, waiting polls answered, publishes under way finished. Then closes."""
        self.polls.drain()
        self.metrics.stop()
        if self._listener is not None and self._server is not None:
            self._listener.close()
            await asyncio.sleep(0)  # what has just arrived begins, so that its connection is not idle
            self._server.pre_shutdown()
            await self._server.shutdown(grace_s)
        if self._relay is not None:
            await self._relay.close()

    @property
    def draining(self) -> bool:
        return self.polls.draining

    @property
    def accepting(self) -> bool:
        return not self.polls.draining

    # ---- one request

    @staticmethod
    def route(method: str, path: str) -> tuple[Route, dict[str, str]]:
        return ROUTES.find(method, path)

    def admit(self, route: Route, path: Mapping[str, str], authorization: Sequence[str]) -> Access:
        """Who asks for that. Raises Unauthorized, Forbidden; NoLeader while this node cannot tell."""
        if self.door is None or route.scope == OPEN:
            return ANYBODY
        access = self.door.admit(authorization)
        access.check(route, path)
        return access

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        name, share = "none", Share(self.room)
        try:
            if request.version.major != 1:
                raise BadRequest(f"HTTP/{request.version.major}.{request.version.minor}: this node speaks HTTP/1.1")
            target, _, query = origin_form(request.raw_path).partition("?")
            route, path = self.route(request.method, target)
            name = route.name
            if name not in health.PROBES:
                self.hosts.check(request.headers.getall("Host", ()))
            check_site(request.method, request.headers)
            access = self.admit(route, path, request.headers.getall("Authorization", ()))
            call = Call(self, request, route, path, access=access, share=share)
            if not route.own_head:
                check_headers(request.raw_headers, route.headers)
                call.query = decode_query(parse_query(query), route.query)
            answer = await self.run(call)
        except HadelayError as error:
            answer = self.refused(name, error)
        finally:
            share.give_back()
        response = answer
        if isinstance(response, Answer):
            response = web.Response(status=response.status, body=response.body, headers=response.headers)
        self.count(name, response.status)
        if not response.prepared:
            self.add_headers(response.headers)
        if self.draining:
            response.force_close()
        return response

    async def run(self, call: Call) -> web.StreamResponse | Answer:
        """`call` has its query. Raises HadelayError."""
        route = call.route
        if route.body is not None:
            call.body = decode_body(call.request, route, await call.read(route.max_bytes, "of this request"))
        return await route.handler(call)

    def log_failure(self, where: str, error: BaseException | None) -> None:
        """An unexpected error, with its traceback. where: the route or path."""
        if count := self.log_limit.count(f"request_failed {type(error).__name__}"):
            log.error("request_failed", exc_info=error, extra={"path": where, "count": count})

    def refused(self, route: str, error: HadelayError) -> Answer:
        self.denials.note(route, error)
        if error.http_status == HTTPStatus.INTERNAL_SERVER_ERROR:
            self.log_failure(route, error)
        return Answer(error.http_status, problems.headers(error), problems.encode(error))

    async def relay(self, call: Call, leader: Leader) -> Answer:
        """The same poll to the leader, for clients that cannot follow a redirect. Without its query: whoever is asked
        and does not lead answers with a redirect, which is followed some times, and does not relay it in turn."""
        request, path = call.request, call.target.partition("?")[0]
        if self._listener is not None and self._listener.full:
            raise Overloaded("no socket is left to ask the leader: ask it yourself", retry_after_ms=1_000)
        if self._relay is None:
            self._relay = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)
        headers = {name: request.headers[name] for name in _RELAYED if name in request.headers}
        if self.tls is not None and not leader.url.startswith("https:"):
            headers.pop("Authorization", None)  # what came encrypted does not leave otherwise
        longest_ms = (call.body.wait or 0) + self.config.io_timeout_ms
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self.config.no_leader_wait_ms / 1000, sock_read=longest_ms / 1000
        )
        self.relaying += 1
        try:
            async with self._relay.request(
                request.method, leader.url + path, data=call.data, headers=headers, timeout=timeout,
                ssl=self.tls.client if self.tls is not None else True,
            ) as answer:  # fmt: skip
                body = await answer.read()
                kept = {name: answer.headers[name] for name in _ANSWERED if name in answer.headers}
                return Answer(answer.status, kept, body)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.TooManyRedirects) as error:
            raise NoLeader(f"{leader.name} could not be asked: {error}", retry_after_ms=200) from None
        except aiohttp.ClientError as error:
            raise OutcomeUnknown(
                f"{leader.name} went away before it answered the poll ({error}): messages may be leased to this "
                "consumer. Ask again with the same request_id"
            ) from None
        finally:
            self.relaying -= 1

    # ---- answers

    def count(self, route: str, status: int) -> None:
        self.metrics.requests[route, status] += 1

    def add_headers(self, headers: MutableMapping[str, str]) -> None:
        headers["Hadelay-Node"] = self.service.node
        leader = self.service.leader_name
        if leader is not None:
            headers["Hadelay-Leader"] = leader

    def head_of(self, status: int, lines: bytes, size: int) -> bytes:
        """What goes before a body of `size` bytes; `lines`: its own headers. Much of it is the same for a second."""
        second, leader = int(time.time()), self.service.leader_name
        if self._common[0] != second or self._common[1] != leader:
            common = {"Date": formatdate(second, usegmt=True)}
            self.add_headers(common)
            self._common = second, leader, header_lines(common)
        return b"%b%b%bContent-Length: %d\r\n\r\n" % (_STATUS_LINES[status], self._common[2], lines, size)

    def openapi_document(self) -> bytes:
        if self._openapi is None:
            self._openapi = openapi.document(ROUTES.all, tokens=self.door is not None)
        return self._openapi

    @property
    def connections(self) -> int:
        return 0 if self._listener is None else self._listener.inside


_STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}
_RELAYED = ("Content-Type", "Accept", "Accept-Body", "Authorization")
_ANSWERED = ("Content-Type", "Retry-After", "Location")
