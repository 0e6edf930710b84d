"""Caches parsed request heads by their bytes: clients repeat their heads, so most requests parse nothing."""

import re
from typing import Any, NamedTuple

from hadelay.errors import HadelayError
from hadelay.http import options
from hadelay.http.access import RequestRights
from hadelay.http.call import Context, ParsedHead
from hadelay.http.decoding import check_headers, decode_query, parse_query
from hadelay.http.options import DraftTemplate
from hadelay.http.routes import Route

#: aiohttp's limits of a request head: bytes, and header lines.
_MAX_HEAD, _MAX_LINES = 8_190, 128
_TARGET = re.compile(rb'(GET|POST|PUT|DELETE|PATCH) (/[!"$-~]*) HTTP/1\.1\r\n')
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\x20-\x7e\x80-\xff]*)\r\n")
_PUBLISH = re.compile(rb"/v1/topics/([A-Za-z0-9._-]+)/messages(?:\?(.*))?")
_DIGITS = re.compile(rb"\d{1,15}")
#: Headers whose values rarely repeat.
_OWN = frozenset((b"idempotency-key", b"hadelay-key", b"traceparent"))
#: Path parameters that identify a message; such paths rarely repeat.
_OWN_PATH = frozenset(("id", "key"))
#: Headers that change where a body ends, or that only aiohttp checks: requests with such a header go to aiohttp.
_AIOHTTP_ONLY = frozenset(
    (b"transfer-encoding", b"expect", b"upgrade", b"content-encoding", b"te", b"trailer", b"origin", b"sec-fetch-site")
)


class Fields(NamedTuple):
    """The parsed header lines of a request, which requests with other request lines may share."""

    #: Value of Content-Length; None without the header.
    body_bytes: int | None
    #: Options of the publish; None: the head is not valid for a publish.
    publish: options.PublishOptions | None
    lines: tuple[tuple[bytes, bytes], ...]
    #: Whether these header lines are cached: no header is one whose values rarely repeat (_OWN).
    common: bool
    authorization: tuple[str, ...]


class ShortRequest(NamedTuple):
    """A request without its body, for a route that answers without aiohttp."""

    route: Route
    path: dict[str, str]
    query: Any
    head: ParsedHead
    access: RequestRights


class KnownHead(NamedTuple):
    """A parsed request head. Remembered only as long as the request's token is valid."""

    body_bytes: int
    #: The request of the head; None if it is invalid or its route has no fast path: then aiohttp handles it.
    asks: DraftTemplate | ShortRequest | None


#: Patterns of header lines whose values differ from publish to publish, each with the function that adds such a value
#: to a template. A client key is printable ASCII without spaces here.
_OWN_LINES = (
    (re.compile(rb"\r\n[Tt]raceparent: ?(%b)(?=\r\n)" % options.TRACEPARENT.pattern), options.with_trace),
    (re.compile(rb"\r\n[Ii]dempotency-[Kk]ey: ?([!-~]+)(?=\r\n)"), options.with_idempotency_key),
    (re.compile(rb"\r\n[Hh]adelay-[Kk]ey: ?([!-~]+)(?=\r\n)"), options.with_key),
)


class RequestHeads:
    def __init__(self, context: Context, capacity: int = 1024) -> None:
        self.context = context
        self.capacity = capacity
        self.recent: dict[bytes, KnownHead] = {}
        self._fields: dict[bytes, Fields] = {}

    def parse(self, text: bytes) -> KnownHead | None:
        """Parse a head. None: the head is not plain, so that only aiohttp can tell where the request ends."""
        # Remove header lines that differ from publish to publish (_OWN_LINES): many publishes share the other lines.
        rest, own = text, list[tuple[Any, bytes]]()
        for pattern, complete in _OWN_LINES:
            if line := pattern.search(rest):
                rest = rest[: line.start()] + rest[line.end() :]
                own.append((complete, line[1]))
        seen = (self.recent.get(rest) or self._parse(rest)) if own else None
        if seen is not None:
            asks = seen.asks
            for complete, value in own:
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
        asks = self._short(line, fields) if publish is None else self._publish(publish, fields)
        seen = KnownHead(fields.body_bytes or 0, asks)
        if fields.common and self._comes_again(asks):
            if len(self.recent) >= self.capacity:
                self.recent.clear()
            self.recent[text] = seen
        return seen

    def _comes_again(self, asks: DraftTemplate | ShortRequest | None) -> bool:
        if asks is None:
            # A node that requires tokens caches no heads for clients without a token.
            return self.context.authenticator is None
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
        try:
            found = options.parse_headers(self.context.config, headers)
        except HadelayError:
            found = None  # these headers are invalid for a publish: the route refuses the request
        authorization = tuple(value.decode("latin-1") for name, value in headers if name.lower() == b"authorization")
        fields = Fields(length, found, tuple(headers), common, authorization)
        if common:
            if len(self._fields) >= self.capacity:
                self._fields.clear()
            self._fields[text] = fields
        return fields

    def _short(self, line: re.Match[bytes], fields: Fields) -> ShortRequest | None:
        target = line[2].decode()
        path, _, query = target.partition("?")
        try:
            route, found = self.context.routes.find(line[1].decode(), path)
            if not route.short or (fields.body_bytes is None and route.body is not None):
                return None
            check_headers(fields.lines)
            decoded = decode_query(parse_query(query), route.query)
            access = self.context.admit(route, found, fields.authorization)
        except HadelayError:
            return None
        return ShortRequest(route, found, decoded, ParsedHead(line[1].decode(), target, fields.lines), access)

    def _publish(self, target: re.Match[bytes], fields: Fields) -> DraftTemplate | None:
        config, length = self.context.config, fields.body_bytes
        if fields.publish is None or length is None or length > config.max_body_bytes:
            return None
        query, topic = (target[2] or b"").decode("latin-1"), target[1].decode()
        try:
            template = options.with_line(config, self.context.max_delay_ms, topic, query, fields.publish)
            if self.context.authenticator is not None:
                access = self.context.authenticator.admit(fields.authorization)
                for needed in (topic, *options.callback_topics(template.draft)):
                    access.need("publish", needed)
            return template
        except HadelayError:
            return None
