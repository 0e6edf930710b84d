"""One declaration per route gives dispatch, decoding, validation and its part of /openapi.json.

    @routes.add("PUT", "/v1/topics/{topic}", scope="admin", body=PutTopic, returns={200: Topic})
    async def put_topic(call: Call) -> web.Response: ...

A handler gets a `Call`: path parameters as text, query and body as the declared msgspec types. What the types do not
say (limits, names) the handler checks; whatever it raises from `hadelay.errors` becomes the answer.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, TypeVar, get_args, get_origin
from urllib.parse import parse_qsl, unquote

import msgspec
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from hadelay.errors import BadRequest, MethodNotAllowed, NotFound, TooLarge, UnsupportedMediaType
from hadelay.http import types
from hadelay.http.access import ANYBODY, OPEN, Access
from hadelay.http.bodies import Share, read_body
from hadelay.http.values import check_topic, suggest
from hadelay.words import plain

if TYPE_CHECKING:
    from hadelay.http.app import HttpServer
    from hadelay.server.api import Service


class Answer(NamedTuple):
    """A whole response, but for the headers that all have."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def header_lines(headers: Mapping[str, str]) -> bytes:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode("utf-8", "surrogateescape")


Handler = Callable[["Call"], Awaitable[web.StreamResponse | Answer]]
H = TypeVar("H", bound=Handler)

JSON, MSGPACK, NDJSON = "application/json", "application/msgpack", "application/x-ndjson"
JSON_TYPE, MSGPACK_TYPE = {"Content-Type": JSON}, {"Content-Type": MSGPACK}
#: What clients send for JSON when they do not think about it (curl -d, raw bytes).
_JSON_ENOUGH = frozenset(
    (JSON, "", "text/json", "text/plain", "application/x-www-form-urlencoded", "application/octet-stream")
)
_MSGPACK_NAMES = frozenset((MSGPACK, "application/x-msgpack", "application/vnd.msgpack"))
#: Limit of a body that says nothing else: a topic's settings are up to 20 KiB.
MAX_BYTES = 64 << 10
_AUTHORITY = re.compile(r"https?://[^/?]*", re.IGNORECASE)
#: More of a name that is not known is not shown, nor compared.
_SHOWN = 64
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `([^`]*)`(?: - at `(.*)`)?$")


def encoded(value: Any, *, packed: bool) -> Answer:
    """200 with `value` as JSON, or packed: as msgpack."""
    if packed:
        return Answer(200, MSGPACK_TYPE, msgspec.msgpack.encode(value))
    return Answer(200, JSON_TYPE, msgspec.json.encode(value))


@dataclass(slots=True, frozen=True)
class Route:
    method: str
    path: str
    handler: Handler
    query: type[types.In] | None
    body: type[types.In] | None
    #: `Hadelay-*` request headers it understands, in lower case.
    headers: frozenset[bytes]
    returns: Mapping[int, Any]
    errors: tuple[int, ...]
    #: Reads the body by itself (payloads, batches): limits and types are its own.
    raw_body: tuple[str, ...]
    #: Reads headers and query by itself.
    own_head: bool
    json: msgspec.json.Decoder[Any] | None
    msgpack: msgspec.msgpack.Decoder[Any] | None
    #: Its handler gives an `Answer` and looks at nothing that `Head` lacks: connection.py may call it without aiohttp.
    short: bool
    #: What a token needs for it (rights.py), for the topic in its path or else for all of them; or OPEN.
    scope: str
    #: What it is about is known to the handler alone, which asks `Call.access` itself; here the scope is enough.
    own_topics: bool
    #: Limit of its body, which is decoded at once; of a raw body the handler has its own.
    max_bytes: int

    @property
    def name(self) -> str:
        return self.handler.__name__


class Head:
    """A request's head that connection.py has parsed: the same for all requests that repeat it."""

    def __init__(self, method: str, raw_path: str, raw_headers: tuple[tuple[bytes, bytes], ...]) -> None:
        self.method, self.raw_path, self.raw_headers = method, raw_path, raw_headers
        # As aiohttp decodes them.
        pairs = [(name.decode(), value.decode("utf-8", "surrogateescape")) for name, value in raw_headers]
        self.headers = CIMultiDictProxy(CIMultiDict(pairs))


@dataclass(slots=True)
class Call:
    """One request on its way through a handler."""

    server: HttpServer
    #: web.BaseRequest; or Head, in routes that are short.
    request: Any
    route: Route
    path: dict[str, str]
    query: Any = None
    body: Any = None
    #: The bytes of the body. None: not read yet.
    data: bytes | None = None
    access: Access = ANYBODY
    #: None: the body is here.
    share: Share | None = None

    @property
    def service(self) -> Service:
        """That tells the audit trail who it was."""
        return self.server.service.acting(self.access.actor)

    @property
    def topic(self) -> str:
        """Of the path. Raises BadRequest."""
        return check_topic(self.path["topic"], self.server.config.max_topic_bytes)

    @property
    def target(self) -> str:
        """Path and query, as they were sent."""
        return origin_form(self.request.raw_path)

    async def read(self, limit: int, name: str) -> bytes:
        """The body. Raises TooLarge, and what bodies.read_body raises."""
        if self.data is None:
            assert self.share is not None
            self.data = await read_body(self.request, limit, self.server.config.io_timeout_ms, name, self.share)
        elif len(self.data) > limit:
            raise TooLarge(f"a body of {len(self.data)} bytes; at most {limit} are allowed ({name})")
        return self.data

    def wants_msgpack(self) -> bool:
        return "msgpack" in self.request.headers.get("Accept", "")

    def answer(self, value: Any, headers: Mapping[str, str] | None = None) -> Answer:
        """Of a stale read, also which index it shows."""
        if getattr(self.query, "stale", False):
            headers = {"Hadelay-Applied": str(self.server.service.applied_index)}
        answer = encoded(value, packed=self.wants_msgpack())
        return answer._replace(headers={**answer.headers, **headers}) if headers else answer

    def reply(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
        _, lines, body = self.answer(value, headers)
        return web.Response(status=status, body=body, headers=lines)


@dataclass(slots=True)
class Routes:
    """Declared at import, looked up by path."""

    all: list[Route] = field(default_factory=list)
    _static: dict[str, dict[str, Route]] = field(default_factory=dict)
    _patterns: list[tuple[re.Pattern[str], dict[str, Route]]] = field(default_factory=list)

    def add(
        self,
        method: str,
        path: str,
        *,
        query: type[types.In] | None = None,
        body: type[types.In] | None = None,
        headers: Iterable[str] = (),
        returns: Mapping[int, Any],
        errors: tuple[int, ...] = (),
        raw_body: tuple[str, ...] = (),
        own_head: bool = False,
        short: bool = False,
        scope: str = "admin",
        own_topics: bool = False,
        max_bytes: int = MAX_BYTES,
    ) -> Callable[[H], H]:
        def declare(handler: H) -> H:
            json = msgspec.json.Decoder(body, dec_hook=types.decode_hook) if body else None
            msgpack = msgspec.msgpack.Decoder(body, dec_hook=types.decode_hook) if body else None
            known = frozenset(name.lower().encode() for name in headers)
            more = (401, 403) if scope != OPEN else ()
            self._register(
                Route(
                    method, path, handler, query, body, known, returns, (*errors, *more), raw_body, own_head, json,
                    msgpack, short, scope, own_topics, max_bytes,
                )
            )  # fmt: skip
            return handler

        return declare

    def _register(self, route: Route) -> None:
        self.all.append(route)
        if "{" not in route.path:
            self._static.setdefault(route.path, {})[route.method] = route
            return
        parts = re.split(r"\{(\w+)\}", route.path)
        # What follows a colon is a verb, but in keys, which may have any text.
        text = "".join(
            f"(?P<{p}>[^/{'' if p == 'key' else ':'}]*)" if n % 2 else re.escape(p) for n, p in enumerate(parts)
        )
        for pattern, methods in self._patterns:
            if pattern.pattern == text:
                methods[route.method] = route
                return
        self._patterns.append((re.compile(text), {route.method: route}))

    def include(self, other: Routes) -> None:
        for route in other.all:
            self._register(route)

    def find(self, method: str, path: str) -> tuple[Route, dict[str, str]]:
        """`path` still percent-encoded: %2F is part of a name, not a separator. Raises NotFound, MethodNotAllowed,
        BadRequest."""
        methods, found = self._static.get(path), {}
        if methods is None:
            for pattern, candidates in self._patterns:
                match = pattern.fullmatch(path)
                if match:
                    methods, found = candidates, {k: _decoded(v) for k, v in match.groupdict().items()}
                    break
            else:
                raise NotFound(f"there is no {path[:200]} here; /openapi.json lists what there is")
        route = methods.get("GET" if method == "HEAD" else method)
        if route is None:
            allow = ", ".join(sorted(methods))
            raise MethodNotAllowed(f"{method[:20]} is not for this address; it takes {allow}", allow=allow)
        return route, found


def origin_form(target: str) -> str:
    """Path and query of a request's target; `http://any.host/path` means `/path` (RFC 9112, 3.2.2)."""
    if "#" in target:
        raise BadRequest("the address of a request has no fragment: write # as %23")
    return target if target.startswith("/") else _AUTHORITY.sub("", target, count=1)


def _decoded(text: str) -> str:
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        # Whatever stood for it would stand for others too.
        raise BadRequest(f"the address: {text[:_SHOWN]!r} is not UTF-8, percent-encoded") from None


def parse_query(query: str) -> list[tuple[str, str]]:
    """`query` without the question mark, still encoded."""
    try:
        return parse_qsl(query, keep_blank_values=True, errors="strict")
    except UnicodeDecodeError:
        raise BadRequest("query: is not UTF-8, percent-encoded") from None


def check_headers(headers: Iterable[tuple[bytes, bytes]], known: frozenset[bytes]) -> None:
    for name, _ in headers:
        if name[:8].lower() == b"hadelay-" and name.lower() not in known:
            lowered = name.lower()
            if not (lowered.startswith(b"hadelay-meta-") and b"hadelay-meta-*" in known):
                refuse_unknown("header", name.decode("latin-1"), [_titled(k) for k in known])


def _titled(name: bytes) -> str:
    return name.decode().title().replace("Ttl", "TTL")


def refuse_unknown(what: str, name: str, known: Iterable[str], where: str = "") -> NoReturn:
    name = name if len(name) <= _SHOWN else name[: _SHOWN - 1] + "…"
    raise BadRequest(f"unknown {what} {name!r}{where}{suggest(name, known)}")


@cache
def _names(kind: type[types.In] | None) -> set[str]:
    return {f.encode_name for f in msgspec.structs.fields(kind)} if kind else set()


def decode_query(pairs: list[tuple[str, str]], kind: type[types.In] | None) -> Any:
    fields = _names(kind)
    found = dict(pairs)
    for name in found:
        if name not in fields:
            refuse_unknown("query parameter", name, fields)
    if len(found) < len(pairs):
        twice = next(name for n, (name, _) in enumerate(pairs) if name in dict(pairs[:n]))
        raise BadRequest(f"query parameter {twice!r} is given twice")
    if kind is None:
        return None
    try:
        return msgspec.convert(found, kind, strict=False, dec_hook=types.decode_hook)
    except msgspec.ValidationError as error:
        # Everything in a query is text, so that it is text is not what is wrong.
        raise BadRequest(_words("query", error, kind).removesuffix(", not text")) from None


def media_type(request: Any) -> str:
    """Without parameters, in lower case, "" when there is none."""
    kind: str = request.headers.get("Content-Type", "")
    return kind.partition(";")[0].strip().lower()


def decode_body(request: Any, route: Route, data: bytes) -> Any:
    """No body is an empty object: everything in it may be optional."""
    body, json, msgpack = route.body, route.json, route.msgpack
    assert body is not None
    assert json is not None
    assert msgpack is not None
    kind = media_type(request)
    if not data.strip():
        kind, data = JSON, b"{}"
    if kind in _MSGPACK_NAMES:
        return decoded(lambda: msgpack.decode(data), body)
    if kind not in _JSON_ENOUGH and not kind.endswith("+json"):
        raise UnsupportedMediaType(f"{kind!r} is not understood here; send application/json or application/msgpack")
    return decoded(lambda: json.decode(data), body)


def decoded(decode: Callable[[], Any], kind: type[types.In]) -> Any:
    """Runs a msgspec decoder; what it refuses becomes BadRequest, with a suggestion for a mistyped field."""
    try:
        return decode()
    except msgspec.ValidationError as error:
        unknown = _UNKNOWN_FIELD.match(str(error))
        if unknown:
            where = f" at {unknown[2]}" if unknown[2] else ""
            known = () if "." in where else _names(kind)  # else it is of something within `kind`
            refuse_unknown("field", unknown[1], known, where)
        raise BadRequest(_words("body", error, kind)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"body: {error}") from None


def _words(where: str, error: msgspec.ValidationError, kind: type[types.In]) -> str:
    """With the member that is wrong at the front, as it is everywhere else."""
    text, _, path = str(error).partition(" - at `$")
    member = (path[1:] if path.startswith(".") else where + path).rstrip("`")
    of = {f.encode_name: f.type for f in msgspec.structs.fields(kind)}.get(member.partition("[")[0])
    return f"{member}: {plain(text, member, _choices(of) if of else ())}"


def _choices(kind: Any) -> list[str]:
    """The words that a type allows."""
    inner = get_args(kind)
    return [str(word) for word in inner] if get_origin(kind) is Literal else [w for one in inner for w in _choices(one)]


def is_msgpack(kind: str) -> bool:
    return kind in _MSGPACK_NAMES
