"""The HTTP server of one node: its routes and connections, start and drain."""

import asyncio
import time
from functools import partial
from typing import Any, cast

from aiohttp import web

from hadelay.errors import BadRequest, HadelayError, Overloaded
from hadelay.http import cluster, consume, files, health, jobs, messages, publish, schedules, tokens, topics
from hadelay.http.access import Authenticator, check_site
from hadelay.http.answers import Answer
from hadelay.http.bodies import Reservation
from hadelay.http.call import Call, Context
from hadelay.http.connection import Connection
from hadelay.http.decoding import check_headers, decode_query, parse_query
from hadelay.http.listener import HttpListener
from hadelay.http.privates import Server
from hadelay.http.requestheads import RequestHeads
from hadelay.http.routes import Routes, origin_form
from hadelay.server.service.node import NodeService
from hadelay.settings.node import HttpConfig, SecurityConfig
from hadelay.settings.rules import split_address

ROUTES = Routes()
for _part in (publish, messages, jobs, consume, topics, schedules, cluster, files, tokens, health):
    ROUTES.include(_part.routes)


class HttpServer(Context):
    """The HTTP server of one node. sockets: see HttpListener. more: routes besides those of the API. Raises ConfigError
    if the certificate can't be used."""

    def __init__(
        self, service: NodeService, config: HttpConfig, max_delay_ms: int, security: SecurityConfig | None = None,
        *, sockets: int | None = None, more: Routes | None = None,
    ) -> None:  # fmt: skip
        tokens = security is not None and security.tokens
        routes = Routes()
        for some in (ROUTES, more):
            if some is not None:
                routes.include(some)
        super().__init__(service, config, max_delay_ms, routes, tokens=tokens)
        self.heads = RequestHeads(self)
        if security is not None and tokens:
            self.authenticator = Authenticator(service.access, security, time.monotonic, self.heads.recent.clear)
        self._sockets = sockets
        self._listener: HttpListener | None = None
        self._server: Server | None = None
        self.address = ""

    async def start(self) -> str:
        """Listen; returns the address, with the assigned port if the configured port is 0."""
        host, port = split_address(self.config.listen)
        server = self._server = Server(
            self.handle,
            keepalive_timeout=self.config.idle_timeout_ms / 1000,
            access_log=None,
            auto_decompress=False,
            lingering_time=2.0,
        )
        self._listener = HttpListener(self, partial(Connection, server, self, self.heads), self._sockets)
        self.relay.full = lambda: self._listener is not None and self._listener.full
        port = self._listener.listen(host, port)
        self.metrics.watch()
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return self.address

    async def stop(self, grace_s: float = 10.0) -> None:
        """Accept no more connections, answer waiting polls, finish requests under way for `grace_s`, then close."""
        self.polls.drain()
        self.metrics.stop()
        if self._listener is not None and self._server is not None:
            self._listener.close()
            # Give requests that have just arrived a chance to begin: then their connections are not closed as idle
            await asyncio.sleep(0)
            self._server.pre_shutdown()
            await self._server.shutdown(grace_s)
        await self.relay.close()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        name, reservation = "none", Reservation(self.budget)
        limit = cast(Connection, request.protocol).limit
        answer: Any
        try:
            if request.version.major != 1:
                raise BadRequest(f"HTTP/{request.version.major}.{request.version.minor} is not supported: use HTTP/1.1")
            target, _, query = origin_form(request.raw_path).partition("?")
            if limit and target[1:] not in health.PROBES:
                raise Overloaded(f"too many connections ({limit})", retry_after_ms=1_000)
            route, path = self.routes.find(request.method, target)
            name = route.name
            if name not in health.PROBES:
                self.hosts.check(request.headers.getall("Host", ()))
            check_site(request.method, request.headers)
            access = self.admit(route, path, request.headers.getall("Authorization", ()))
            call = Call(self, request, route, path, access=access, reservation=reservation)
            if not route.own_head:
                check_headers(request.raw_headers)
                call.query = decode_query(parse_query(query), route.query)
            answer = await call.run()
        except HadelayError as error:
            answer = self.refused(name, error)
        finally:
            reservation.give_back()
        if isinstance(answer, Answer):
            answer = web.Response(status=answer.status, body=answer.body, headers=answer.headers)
        response: web.StreamResponse = answer
        self.count(name, response.status)
        if not response.prepared:
            self.add_headers(response.headers)
        if self.draining or limit:
            response.force_close()
        return response
