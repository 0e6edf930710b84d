"""Caches parsed request heads by their bytes: clients repeat their heads, so most requests parse nothing."""

import re
from typing import Any, NamedTuple

from hadelay.errors import HadelayError
from hadelay.http import options
from hadelay.http.call import Context, ParsedHead
from hadelay.http.decoding import check_headers, decode_query, parse_query
from hadelay.http.forwarding.forwarder import Destination
from hadelay.http.forwarding.heads import ForwardLines, forward_lines
from hadelay.http.options import DraftTemplate
from hadelay.http.routes import Route, Routes
from hadelay.http.sharding import KEYED, Forwarded
from hadelay.rules.access import RequestRights
from hadelay.rules.publishing import TRACEPARENT, callback_topics
from hadelay.settings.node import HttpConfig

#: aiohttp's limits of a request head: bytes, and header lines.
_MAX_HEAD, _MAX_LINES = 8_190, 128
_TARGET = re.compile(rb'(GET|POST|PUT|DELETE|PATCH) (/[!"$-~]*) HTTP/1\.1\r\n')
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\x20-\x7e\x80-\xff]*)\r\n")
_PUBLISH = re.compile(rb"/v1/topics/([A-Za-z0-9._-]+)/messages(?:\?(.*))?")
_DIGITS = re.compile(rb"\d{1,15}")
_SHARD = b"hadelay-shard"
#: Headers whose values rarely repeat, so heads with them are not cached.
_OWN = frozenset((b"idempotency-key", b"hadelay-key", b"traceparent", b"x-amz-date", b"amz-sdk-invocation-id"))
#: Path parameters that identify a message; such paths rarely repeat, so heads with them are not cached.
_OWN_PATH = frozenset(("id", "key"))
#: Headers that change where a body ends, or that only aiohttp checks: requests with such a header go to aiohttp.
_AIOHTTP_ONLY = frozenset(
    (b"transfer-encoding", b"expect", b"upgrade", b"content-encoding", b"te", b"trailer", b"origin", b"sec-fetch-site")
)


class Fields:
    """The parsed header lines of a request, which requests with other request lines may share."""

    __slots__ = ("_forward", "_publish", "authorization", "body_bytes", "common", "forwarded", "lines")

    def __init__(self, body_bytes: int | None, lines: list[tuple[bytes, bytes]], *, common: bool) -> None:
        """body_bytes: value of Content-Length; None without the header. common: whether the header lines are cached, as
        they have no header whose value rarely repeats (_OWN)."""
        self.body_bytes, self.lines, self.common = body_bytes, tuple(lines), common
        self.authorization = tuple(value.decode("latin-1") for name, value in lines if name.lower() == b"authorization")
        #: Header Hadelay-Shard of a request that another node has forwarded.
        self.forwarded = next((value.decode("latin-1") for name, value in lines if name.lower() == _SHARD), None)
        self._publish: options.PublishOptions | None = None
        self._forward: ForwardLines | None = None

    def publish(self, config: HttpConfig) -> options.PublishOptions:
        """Options of a publish. Raises HadelayError if the head is not valid for a publish."""
        if self._publish is None:
            self._publish = options.parse_headers(config, self.lines)
        return self._publish

    def forward(self, node: str) -> ForwardLines:
        """The header lines for another shard. Raises HadelayError if the head cannot be forwarded."""
        if self._forward is None:
            self._forward = forward_lines(self.lines, node)
        return self._forward


class ShortRequest(NamedTuple):
    """A request, without its body, for a route that is answered without aiohttp."""

    route: Route
    path: dict[str, str]
    query: Any
    head: ParsedHead
    access: RequestRights


class KnownHead(NamedTuple):
    """A parsed request head. It is cached only as long as the request's token is valid."""

    body_bytes: int
    #: The request of the head; None if it is invalid or its route has no fast path: then aiohttp handles it.
    asks: DraftTemplate | ShortRequest | Forwarded | None


#: Patterns of header lines whose values differ from publish to publish, each with the header's name, and the function
#: that adds such a value to a template. A client key is printable ASCII without spaces here.
_OWN_LINES = (
    (re.compile(rb"\r\n[Tt]raceparent: ?(%b)(?=\r\n)" % TRACEPARENT.pattern), b"traceparent", options.with_trace),
    (re.compile(rb"\r\n[Ii]dempotency-[Kk]ey: ?([!-~]+)(?=\r\n)"), b"Idempotency-Key", options.with_idempotency_key),
    (re.compile(rb"\r\n[Hh]adelay-[Kk]ey: ?([!-~]+)(?=\r\n)"), b"Hadelay-Key", options.with_key),
)


class RequestHeads:
    def __init__(self, context: Context, routes: Routes | None = None, capacity: int = 1024) -> None:
        """routes: routes that requests may ask for; None: all routes of the context."""
        self.context, self.routes = context, context.routes if routes is None else routes
        self.capacity = capacity
        self.recent: dict[bytes, KnownHead] = {}
        self._fields: dict[bytes, Fields] = {}

    def parse(self, text: bytes) -> KnownHead | None:
        """Parse a head. None: the head is not plain, so that only aiohttp can tell where the request ends."""
        # Remove header lines that differ from publish to publish (_OWN_LINES): many publishes share the other lines.
        rest, own = text, list[tuple[bytes, Any, bytes]]()
        for pattern, name, complete in _OWN_LINES:
            if line := pattern.search(rest):
                rest = rest[: line.start()] + rest[line.end() :]
                own.append((name, complete, line[1]))
        seen = (self.recent.get(rest) or self._parse(rest)) if own else None
        if seen is not None:
            asks = seen.asks
            for name, complete, value in own:
                if isinstance(asks, Forwarded):
                    asks = asks.adding(name, value)
                else:
                    asks = complete(asks, value, self.context.config) if isinstance(asks, DraftTemplate) else None
            if asks is not None:
                return KnownHead(seen.body_bytes, asks)
        return self._parse(text)

    def _parse(self, text: bytes) -> KnownHead | None:
        line = _TARGET.match(text)
        if line is None or len(text) > _MAX_HEAD:
            return None
        lines = text[line.end() :]
        fields = self._fields.get(lines) or self._parse_fields(lines)
        if fields is None:
            return None
        publish = _PUBLISH.fullmatch(line[2]) if line[1] == b"POST" else None
        asks = self._short(line, fields) if publish is None else self._publish(line, publish, fields)
        seen = KnownHead(fields.body_bytes or 0, asks)
        if fields.common and self._comes_again(asks):
            if len(self.recent) >= self.capacity:
                self.recent.clear()
            self.recent[text] = seen
        return seen

    def _comes_again(self, asks: DraftTemplate | ShortRequest | Forwarded | None) -> bool:
        if asks is None:
            # Cache a head that the fast path cannot answer only if the node requires no tokens, so that clients without
            # a token cannot fill the cache.
            return self.context.authenticator is None
        if isinstance(asks, Forwarded):
            return asks.again
        return asks.draft.key is None if isinstance(asks, DraftTemplate) else _OWN_PATH.isdisjoint(asks.path)

    def _parse_fields(self, text: bytes) -> Fields | None:
        headers: list[tuple[bytes, bytes]] = []
        names: set[bytes] = set()
        at = 0
        length: int | None = None
        common = True
        while at < len(text) - 2:
            header = _HEADER.match(text, at)
            if header is None:
                return None
            name, value = header[1].lower(), header[2].rstrip()
            common = common and name not in _OWN
            if name in _AIOHTTP_ONLY or name in names or (name == b"connection" and value.lower() != b"keep-alive"):
                return None
            if name == b"content-length":
                if not _DIGITS.fullmatch(value):
                    return None
                length = int(value)
            elif name == b"host" and not self.context.hosts.allows(value.decode("latin-1")):
                return None
            names.add(name)
            headers.append((header[1], value))
            at = header.end()
        if b"host" not in names or len(names) > _MAX_LINES:
            return None
        fields = Fields(length, headers, common=common)
        if common:
            if len(self._fields) >= self.capacity:
                self._fields.clear()
            self._fields[text] = fields
        return fields

    def _short(self, line: re.Match[bytes], fields: Fields) -> ShortRequest | Forwarded | None:
        target = line[2].decode()
        path, _, query = target.partition("?")
        try:
            route, found = self.routes.find(line[1].decode(), path)
            if not route.short or (fields.body_bytes is None and route.body is not None):
                return None
            check_headers(fields.lines)
            decoded = decode_query(parse_query(query), route.query)
            access = self.context.admit(route, found, fields.authorization)
            to = self.context.router.judge(route, found, fields.forwarded)
            if to is not None:
                # Leave a request that waits to aiohttp: it needs a task, which ends when this node stops.
                again = _OWN_PATH.isdisjoint(found)
                return None if getattr(decoded, "wait", None) else self._forwarded(line, fields, route, to, again)
        except HadelayError:
            return None
        return ShortRequest(route, found, decoded, ParsedHead(line[1].decode(), target, fields.lines), access)

    def _forwarded(
        self, line: re.Match[bytes], fields: Fields, route: Route, to: Destination, again: bool
    ) -> Forwarded:
        lines = fields.forward(self.context.service.node)
        head = lines.head(line[1].decode(), line[2].decode(), keyed=route.name in KEYED)
        return Forwarded(to, head, route.name, again)

    def _publish(
        self, line: re.Match[bytes], target: re.Match[bytes], fields: Fields
    ) -> DraftTemplate | Forwarded | None:
        config, length = self.context.config, fields.body_bytes
        if length is None or length > config.max_body_bytes:
            return None
        query, topic = (target[2] or b"").decode("latin-1"), target[1].decode()
        try:
            if self.context.router.several or fields.forwarded is not None:
                route, path = self.routes.find("POST", line[2].decode().partition("?")[0])
                to = self.context.router.judge(route, path, fields.forwarded)
                if to is not None:
                    self.context.admit(route, path, fields.authorization)
                    return self._forwarded(line, fields, route, to, again=True)
            template = options.with_line(config, self.context.max_delay_ms, topic, query, fields.publish(config))
            if self.context.authenticator is not None:
                access = self.context.authenticator.admit(fields.authorization)
                for needed in (topic, *callback_topics(template.draft)):
                    access.need("publish", needed)
                template = template._replace(by=access.actor.token)
            return template
        except HadelayError:
            return None
