"""One request, for its handler (`Call`), and the state that all requests of a node share (`Context`)."""

import logging
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from multidict import CIMultiDict, CIMultiDictProxy

from hadelay.api.service import Actor
from hadelay.api.text import check_topic
from hadelay.errors import HadelayError, TooLarge
from hadelay.http.access import Authenticator, Denials, Hosts, check_route
from hadelay.http.answers import JSON_TYPE, MSGPACK_TYPE, Answer, header_lines, refusal, unexpected
from hadelay.http.bodies import ByteBudget, RequestTurns, Reservation, read_body
from hadelay.http.decoding import decode_body, media_type
from hadelay.http.forwarding.forwarder import Destination, Forwarder
from hadelay.http.forwarding.heads import SHARD, forward_head
from hadelay.http.metrics import Metrics
from hadelay.http.polls import Polls, Relay
from hadelay.http.routes import OPEN, Route, Routes, origin_form
from hadelay.http.sharding import KEYED, ShardRouter
from hadelay.http.stalls import Stalls
from hadelay.platform.loglimit import LogLimit
from hadelay.platform.tls import Certificates
from hadelay.rules.access import UNRESTRICTED, RequestRights
from hadelay.rules.sharedcount import SharedCount
from hadelay.server.service.node import NodeService
from hadelay.settings.node import HttpConfig

T = TypeVar("T")
log = logging.getLogger(__name__)


class Context:
    """State that all requests of a node share. max_delay_ms: `limits.max_delay`, checked before a command is proposed.

    Raises ConfigError if the certificate can't be used.
    """

    def __init__(
        self, service: NodeService, config: HttpConfig, max_delay_ms: int, routes: Routes, *, tokens: bool
    ) -> None:
        self.service, self.config, self.max_delay_ms, self.routes = service, config, max_delay_ms, routes
        self.tls = Certificates("http", config.tls_cert, config.tls_key, config.tls_ca) if config.tls_cert else None
        #: Authenticator; None: requests need no token.
        self.authenticator: Authenticator | None = None
        self.hosts = Hosts(config, tokens=tokens)
        self.polls, self.relay = Polls(), Relay(config, self.tls, service.node)
        self.router = ShardRouter(service.shards, self.forget_heads)
        self.forwarder = Forwarder(config, self.tls, service.node, lambda: self.relay.full())
        self.forwarder.known = self.router.known_shard
        self.relay.known = lambda: {*service.cluster.urls(), *self.router.urls()}
        self.denials = Denials(time.monotonic)
        self.turns = RequestTurns()
        self.metrics = Metrics(service, self.denials.counts, self.turns, self.forwarder)
        self.log_limit, self.stalls = LogLimit(time.monotonic), Stalls()
        self.budget = ByteBudget(config.max_reading_bytes)
        #: Number and limit of receives and reads that wait at this node.
        self.waiting = SharedCount(config.max_waiting, "receives wait", "ask another node, or try again later")
        #: Number and limit of receives and reads that wait at other shards. The limit is half of the connections to a
        #: node, so that other requests can use the other half.
        self.waiting_elsewhere = SharedCount(128, "requests wait at other shards", "ask a node of that shard")
        #: Number of client connections within the limits; spares, which exceed a limit, do not count.
        self.connections = 0
        #: Encoded body of /openapi.json; empty until the first request for it.
        self.openapi = b""
        self._common: tuple[int, str | None, int | None, bytes] = (-1, None, None, b"")

    def forget_heads(self) -> None:
        """Clear the caches of parsed heads, because the tokens or the shard map have changed."""

    @property
    def draining(self) -> bool:
        return self.polls.draining

    def admit(self, route: Route, path: Mapping[str, str], authorization: Sequence[str]) -> RequestRights:
        """Rights of a request with these headers. Raises Unauthorized, Forbidden; NoLeader if tokens are unknown."""
        if self.authenticator is None or route.scope == OPEN:
            return UNRESTRICTED
        access = self.authenticator.admit(authorization)
        check_route(access, route, path)
        return access

    def failed(self, where: str, error: BaseException | None, method: str) -> Answer:
        """The answer to an unexpected error, which is logged with its traceback. where: the route or path."""
        if count := self.log_limit.count(f"request_failed {type(error).__name__}"):
            log.error("request_failed", exc_info=error, extra={"path": where, "count": count})
        return refusal(unexpected(error, method))

    def refused(self, route: str, error: HadelayError) -> Answer:
        self.denials.note(route, error)
        if error.http_status == HTTPStatus.INTERNAL_SERVER_ERROR:
            self.failed(route, error, "")
        return refusal(error)

    def count(self, route: str, status: int) -> None:
        self.metrics.requests[route, status] += 1

    def add_headers(self, headers: MutableMapping[str, str]) -> None:
        headers["Server"] = "hadelay"  # aiohttp's own value would name the versions of Python and aiohttp
        headers["Hadelay-Node"] = self.service.node
        leader = self.service.leader_name
        if leader is not None:
            headers["Hadelay-Leader"] = leader
        if self.router.here is not None:
            headers["Hadelay-Shard"] = str(self.router.here)

    def head_of(self, status: int, lines: bytes, size: int, *, own: bool = False) -> bytes:
        """Head of an answer with a body of `size` bytes. lines: the answer's own headers; common headers are cached.
        own: whether the answer is of another shard's node, and has that node's common headers."""
        if own:
            return b"%b%bContent-Length: %d\r\n\r\n" % (_STATUS_LINES[status], lines, size)
        second, leader, shard = int(time.time()), self.service.leader_name, self.router.here
        known = self._common
        if known[0] != second or known[1] != leader or known[2] != shard:
            common = {"Date": formatdate(second, usegmt=True)}
            self.add_headers(common)
            known = self._common = second, leader, shard, header_lines(common)
        return b"%b%b%bContent-Length: %d\r\n\r\n" % (_STATUS_LINES[status], known[3], lines, size)


_STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}


class ParsedHead:
    """A request's head that requestheads.py has parsed, shared by all requests that repeat it."""

    def __init__(self, method: str, raw_path: str, raw_headers: tuple[tuple[bytes, bytes], ...]) -> None:
        self.method, self.raw_path, self.raw_headers = method, raw_path, raw_headers
        # Decode header values as aiohttp does.
        pairs = [(name.decode(), value.decode("utf-8", "surrogateescape")) for name, value in raw_headers]
        self.headers = CIMultiDictProxy(CIMultiDict(pairs))


@dataclass(slots=True)
class Call:
    context: Context
    #: The request: a web.BaseRequest, or a ParsedHead if connection.py answers without aiohttp.
    request: Any
    route: Route
    path: dict[str, str]
    query: Any = None
    body: Any = None
    #: Bytes of the request's body; None: not read yet.
    data: bytes | None = None
    access: RequestRights = UNRESTRICTED
    #: Part of the node's byte budget that the body takes while it arrives; None: `data` has the body already.
    reservation: Reservation | None = None
    #: Shard that the query names, with the option `shard`.
    chosen: int | None = None

    @property
    def service(self) -> NodeService:
        return self.context.service

    @property
    def actor(self) -> Actor:
        return self.access.actor

    @property
    def topic(self) -> str:
        """Topic of the path. Raises BadRequest."""
        return check_topic(self.path["topic"])

    @property
    def target(self) -> str:
        """Path and query of the request, as sent."""
        return origin_form(self.request.raw_path)

    async def run(self) -> Any:
        """Decode the body and run the handler. Raises HadelayError."""
        route = self.route
        if route.body is not None:
            self.body = decode_body(self.request, route, await self.read(route.max_bytes, "of this request"))
        return await (route.handler if route.shards is None or self.router is None else route.shards)(self)

    @property
    def router(self) -> ShardRouter | None:
        """The shard router, if the request may concern other shards. None without a shard map, for a request that
        another node has forwarded, and for one that names a shard."""
        router = self.context.router
        if not router.several or SHARD in self.request.headers or self.chosen is not None:
            return None
        return router

    async def forward(self, to: Destination) -> Answer:
        """Forward the unchanged request to another shard; returns the shard's answer. Raises HadelayError."""
        config, route, wait_ms = self.context.config, self.route, getattr(self.query, "wait", None) or 0
        limit, name = route.max_bytes, "of this request"
        if route.raw_body:
            limit, name = config.max_body_bytes, "max_body_bytes"
        if route.name == "publish_batch":
            limit, name = config.max_batch_bytes, "max_batch_bytes"
        data = await self.read(limit, name) if self.data is None else self.data
        request = self.request
        node, wait_s = self.context.service.node, wait_ms / 1000
        head = forward_head(
            request.method, self.target, request.raw_headers, node, wait_s=wait_s, keyed=route.name in KEYED
        )
        asking = self.context.forwarder.answer(to, head, data)
        if not wait_ms:
            return await asking
        with self.context.waiting.one_more(self.access), self.context.waiting_elsewhere.one_more(self.access):
            return await self.context.polls.run(asking, "ask another node")

    async def read(self, limit: int, name: str) -> bytes:
        """Read the body. limit: in bytes. name: the limit's setting. Raises TooLarge and the errors of read_body."""
        if self.data is None:
            assert self.reservation is not None
            self.data = await read_body(self.request, limit, self.context.config.io_timeout_ms, name, self.reservation)
        elif len(self.data) > limit:
            raise TooLarge(f"the body has {len(self.data)} bytes; at most {limit} are allowed ({name})")
        return self.data

    @property
    def media_type(self) -> str:
        return media_type(self.request)

    def wants_msgpack(self) -> bool:
        return "msgpack" in self.request.headers.get("Accept", "")

    def encode(self, value: Any) -> bytes:
        return msgspec.msgpack.encode(value) if self.wants_msgpack() else msgspec.json.encode(value)

    def decode(self, encoded: bytes | msgspec.Raw, kind: type[T]) -> T:
        """Decode a value in a shard's answer: MessagePack if the client accepts MessagePack, otherwise JSON."""
        found: T = (msgspec.msgpack if self.wants_msgpack() else msgspec.json).decode(encoded, type=kind)
        return found

    def answer(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
        """Encode an answer. For a stale read, a header tells the applied index that the answer shows."""
        if getattr(self.query, "stale", False):
            headers = {"Hadelay-Applied": str(self.service.applied_index)}
        msgpack = self.wants_msgpack()
        kind = MSGPACK_TYPE if msgpack else JSON_TYPE
        body = msgspec.msgpack.encode(value) if msgpack else msgspec.json.encode(value)
        return Answer(status, {**kind, **headers} if headers else kind, body)
