"""One request, for its handler (`Call`), and the state that all requests of a node share (`Context`)."""

import logging
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from typing import Any

import msgspec
from multidict import CIMultiDict, CIMultiDictProxy

from hadelay.api.service import Actor
from hadelay.api.text import check_topic
from hadelay.errors import HadelayError, LimitReached, TooLarge
from hadelay.http.access import UNRESTRICTED, Authenticator, Denials, Hosts, RequestRights
from hadelay.http.answers import JSON_TYPE, MSGPACK_TYPE, Answer, header_lines, refusal, unexpected
from hadelay.http.bodies import ByteBudget, RequestTurns, Reservation, read_body
from hadelay.http.decoding import decode_body
from hadelay.http.metrics import Metrics
from hadelay.http.polls import Polls, Relay
from hadelay.http.routes import OPEN, Route, Routes, origin_form
from hadelay.loglimit import LogLimit
from hadelay.platform.tls import Certificates
from hadelay.server.service.node import NodeService
from hadelay.settings.node import HttpConfig

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
        self.denials = Denials(time.monotonic)
        self.turns = RequestTurns()
        self.metrics = Metrics(service, self.denials.counts, self.turns)
        self.log_limit = LogLimit(time.monotonic)
        self.budget = ByteBudget(config.max_reading_bytes)
        #: Number of receives and reads that wait at this node.
        self.waiting = 0
        #: Number of client connections within the limits; spares, which exceed a limit, do not count.
        self.connections = 0
        #: Encoded body of /openapi.json; empty until the first request for it.
        self.openapi = b""
        self._common: tuple[int, str | None, bytes] = (-1, None, b"")

    @contextmanager
    def one_more_waits(self) -> Iterator[None]:
        """Count a request that waits. Raises LimitReached if too many wait."""
        if self.waiting >= self.config.max_waiting:
            raise LimitReached(
                f"too many receives wait on this node ({self.waiting}); ask another node, or try again later",
                retry_after_ms=1_000,
            )
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1

    @property
    def draining(self) -> bool:
        return self.polls.draining

    def admit(self, route: Route, path: Mapping[str, str], authorization: Sequence[str]) -> RequestRights:
        """Rights of a request with these headers. Raises Unauthorized, Forbidden; NoLeader if tokens are unknown."""
        if self.authenticator is None or route.scope == OPEN:
            return UNRESTRICTED
        access = self.authenticator.admit(authorization)
        access.check(route, path)
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
        headers["Hadelay-Node"] = self.service.node
        leader = self.service.leader_name
        if leader is not None:
            headers["Hadelay-Leader"] = leader

    def head_of(self, status: int, lines: bytes, size: int) -> bytes:
        """Head of an answer with a body of `size` bytes. lines: the answer's own headers; common headers are cached."""
        second, leader = int(time.time()), self.service.leader_name
        if self._common[0] != second or self._common[1] != leader:
            common = {"Date": formatdate(second, usegmt=True)}
            self.add_headers(common)
            self._common = second, leader, header_lines(common)
        return b"%b%b%bContent-Length: %d\r\n\r\n" % (_STATUS_LINES[status], self._common[2], lines, size)


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
    #: Part of the byte budget reserved for the body; None: the body has been read.
    reservation: Reservation | None = None

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
        return await route.handler(self)

    async def read(self, limit: int, name: str) -> bytes:
        """Read the body. limit: in bytes. name: the limit's setting. Raises TooLarge and the errors of read_body."""
        if self.data is None:
            assert self.reservation is not None
            self.data = await read_body(self.request, limit, self.context.config.io_timeout_ms, name, self.reservation)
        elif len(self.data) > limit:
            raise TooLarge(f"the body has {len(self.data)} bytes; at most {limit} are allowed ({name})")
        return self.data

    def wants_msgpack(self) -> bool:
        return "msgpack" in self.request.headers.get("Accept", "")

    def encode(self, value: Any) -> bytes:
        return msgspec.msgpack.encode(value) if self.wants_msgpack() else msgspec.json.encode(value)

    def answer(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
        """Encode an answer. For a stale read, a header tells the applied index that the answer shows."""
        if getattr(self.query, "stale", False):
            headers = {"Hadelay-Applied": str(self.service.applied_index)}
        kind = MSGPACK_TYPE if self.wants_msgpack() else JSON_TYPE
        return Answer(status, {**kind, **headers} if headers else kind, self.encode(value))
