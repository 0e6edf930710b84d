"""The HTTP server of one node: its routes and connections, start and drain."""

import asyncio
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from aiohttp import web

from hadelay.errors import BadRequest, HadelayError, Misdirected, Overloaded
from hadelay.http import (
    cluster,
    completion,
    consume,
    files,
    health,
    jobs,
    messages,
    publish,
    schedules,
    shards,
    tokens,
    topics,
)
from hadelay.http.access import Authenticator, check_site
from hadelay.http.answers import Answer, as_page
from hadelay.http.bodies import Reservation
from hadelay.http.call import Call, Context
from hadelay.http.connection import Connection
from hadelay.http.decoding import check_headers, decode_query, parse_query
from hadelay.http.forwarding.forwarder import Destination
from hadelay.http.forwarding.heads import SHARD
from hadelay.http.listener import HttpListener
from hadelay.http.privates import Server
from hadelay.http.requestheads import RequestHeads
from hadelay.http.routes import OPEN, Route, Routes, origin_form
from hadelay.server.service.node import NodeService
from hadelay.settings.node import HttpConfig, SecurityConfig
from hadelay.settings.rules import split_address

ROUTES = Routes()
for _part in (publish, messages, jobs, consume, topics, schedules, completion, cluster, shards, files, tokens, health):
    ROUTES.include(_part.routes)


class HttpServer(Context):
    """The HTTP server of one node. sockets: see HttpListener. more: routes in addition to those of the API. doors:
    routes of the AWS services; the address `http.aws_listen` serves only these, /livez and /readyz. Raises ConfigError
    if the certificate can't be used."""

    def __init__(
        self,
        service: NodeService,
        config: HttpConfig,
        max_delay_ms: int,
        security: SecurityConfig | None = None,
        *,
        sockets: int | None = None,
        more: Routes | None = None,
        doors: Routes | None = None,
    ) -> None:
        tokens = security is not None and security.tokens
        routes = Routes()
        for some in (ROUTES, more, doors):
            if some is not None:
                routes.include(some)
        #: Addresses to listen at: name of the setting, its value, and the parser of request heads, which knows the
        #: address's routes.
        self._places: list[tuple[str, str, RequestHeads]] = []
        super().__init__(service, config, max_delay_ms, routes, tokens=tokens)
        self.heads = RequestHeads(self)
        self._places.append(("http.listen", config.listen, self.heads))
        if config.aws_listen and doors is not None:
            alone = Routes()
            alone.include(Routes([route for route in health.routes.all if route.name in health.PROBES]))
            alone.include(doors)
            self._places.append(("http.aws_listen", config.aws_listen, RequestHeads(self, alone)))
        if security is not None and tokens:
            self.authenticator = Authenticator(service.access, security, time.monotonic, self.forget_heads)
        self._sockets = sockets
        self._listeners: list[HttpListener] = []
        self._servers: list[Server] = []
        #: Address of `http.listen`, and address of `http.aws_listen`, each with the port that was assigned.
        self.address = self.aws_address = ""

    async def start(self) -> str:
        """Listen; returns the address, with the assigned port if the configured port is 0."""
        addresses = [self._listen(*place) for place in self._places]
        self.relay.full = lambda: any(listener.full for listener in self._listeners)
        self.metrics.watch()
        self.stalls.start()
        self.address, self.aws_address = addresses[0], addresses[-1]
        return self.address

    def _listen(self, key: str, where: str, heads: RequestHeads) -> str:
        served: list[int] = []
        server = Server(
            lambda request: self.handle(request, heads.routes, served[0]),
            keepalive_timeout=self.config.idle_timeout_ms / 1000,
            access_log=None,
            auto_decompress=False,
            lingering_time=2.0,
        )
        listener = HttpListener(self, partial(Connection, server, self, heads), self._sockets)
        self._servers.append(server)
        self._listeners.append(listener)
        served.append(port := listener.listen(key, where))
        host, _ = split_address(where)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def forget_heads(self) -> None:
        for _, _, heads in self._places:
            heads.recent.clear()

    async def stop(self, grace_s: float = 10.0) -> None:
        """Accept no more connections, answer waiting polls, finish requests under way for `grace_s`, then close."""
        self.polls.drain()
        self.metrics.stop()
        self.stalls.stop()
        for listener in self._listeners:
            listener.close()
        # Give requests that have just arrived a chance to begin: then their connections are not closed as idle
        await asyncio.sleep(0)
        for server in self._servers:
            server.pre_shutdown()
        await asyncio.gather(*(server.shutdown(grace_s) for server in self._servers))
        await self.relay.close()
        await self.forwarder.close()

    def _destination(
        self, request: web.BaseRequest, route: Route, path: Mapping[str, str], chosen: int | None
    ) -> Destination | None:
        """Shard to which the request is forwarded; None: this node answers it. Raises the errors of
        ShardRouter.judge."""
        try:
            return self.router.judge(route, path, request.headers.get(SHARD), chosen)
        except Misdirected as error:
            if self.authenticator is not None and route.scope == OPEN:
                del error.extra["nodes"]  # a caller without a token does not get the nodes' addresses
            raise

    async def handle(self, request: web.BaseRequest, routes: Routes, port: int) -> web.StreamResponse:
        """Answer a request. routes: routes of the address at which the request arrived. port: port of that address."""
        name, reservation = "none", Reservation(self.budget)
        limit = cast(Connection, request.protocol).limit
        answer: Any
        try:
            if request.version.major != 1:
                raise BadRequest(f"HTTP/{request.version.major}.{request.version.minor} is not supported: use HTTP/1.1")
            target, _, query = origin_form(request.raw_path).partition("?")
            method = request.method
            if method == "OPTIONS" and target in health.PLAIN_CHECKS:
                method, target = "GET", health.PLAIN_CHECKS[target]
            route, path = routes.find(method, target)
            name = route.name
            if limit and name not in health.PROBES:
                raise Overloaded(f"too many connections ({limit})", retry_after_ms=1_000)
            if name not in health.PROBES:
                self.hosts.check(request.headers.getall("Host", ()))
            check_site(request.method, request.headers, port)
            access = self.admit(route, path, request.headers.getall("Authorization", ()))
            self.router.look()
            shard, query = self.router.choose(query)
            call = Call(self, request, route, path, access=access, reservation=reservation, chosen=shard)
            if not route.own_head:
                check_headers(request.raw_headers)
                call.query = decode_query(parse_query(query), route.query)
            to = self._destination(request, route, path, shard)
            answer = await call.run() if to is None else await call.forward(to)
        except HadelayError as error:
            answer = self.refused(name, error)
            if name == "console" and "text/html" in request.headers.get(
                "Accept", ""
            ):  # the console makes error pages only for requests that are admitted
                answer = as_page(error)
        finally:
            reservation.give_back()
        if isinstance(answer, Answer):
            answer = web.Response(status=answer.status, body=answer.body, headers=answer.headers)
        response: web.StreamResponse = answer
        self.count(name, response.status)
        if not response.prepared and "Hadelay-Node" not in response.headers:
            self.add_headers(response.headers)
        if self.draining or limit:
            response.force_close()
        return response
