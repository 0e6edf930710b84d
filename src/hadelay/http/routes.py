"""Routes, declared by their handlers and looked up by path. This module imports no handler.

    @routes.add("PUT", "/v1/topics/{topic}", scope="admin", body=PutTopic, returns={200: Topic})
    async def put_topic(call: Call) -> Answer: ...

A handler gets a `Call`: path parameters as text, query and body as the declared msgspec types. The handler checks
limits and names, which the types do not express; an error of `hadelay.errors` becomes the answer.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import unquote

import msgspec

from hadelay.api.base import Request, decode_hook
from hadelay.errors import BadRequest, MethodNotAllowed, NotFound
from hadelay.rules.documents import SHOWN

#: Handler of a route: takes a Call; returns an Answer, or an aiohttp response that it has sent in pieces.
Handler = Callable[[Any], Awaitable[Any]]
H = TypeVar("H", bound=Handler)

#: Scope of routes that take no token.
OPEN = "open"
#: Default size limit of a request body, in bytes; a topic's settings have up to 20 KiB.
MAX_BYTES = 64 << 10
_AUTHORITY = re.compile(r"https?://[^/?]*", re.IGNORECASE)


@dataclass(slots=True, kw_only=True)
class Route:
    method: str
    path: str
    handler: Handler
    returns: Mapping[int, Any]
    query: type[Request] | None = None
    body: type[Request] | None = None
    #: `Hadelay-*` request headers, for the OpenAPI document; only a route with `own_head` has some.
    headers: Iterable[str] = ()
    errors: tuple[int, ...] = ()
    #: Whether the handler reads and limits the body itself (payloads, batches).
    raw_body: bool = False
    #: Whether the handler reads headers and query itself.
    own_head: bool = False
    #: True if the handler needs only a `ParsedHead` and returns an `Answer`: connection.py calls it without aiohttp.
    short: bool = False
    #: Scope that a token needs (rights.py) for the topic in the path, or for all topics without one; or OPEN.
    scope: str = "admin"
    #: True if the handler checks the scope for each topic; before that, the token needs the scope for any topic.
    own_topics: bool = False
    #: Whether the OpenAPI document describes the route; False: a page for browsers, which is no part of the API.
    described: bool = True
    #: With several shards: handler of requests that name no shard (http/merging.py); None: `handler` answers them, too.
    shards: Handler | None = None
    #: Limit of a decoded body, in bytes.
    max_bytes: int = MAX_BYTES
    #: Operation id and summary in OpenAPI; default: the handler's name and the first line of its docstring.
    name: str = ""
    summary: str = ""
    json: msgspec.json.Decoder[Any] = field(init=False)
    msgpack: msgspec.msgpack.Decoder[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.name or self.handler.__name__
        self.summary = self.summary or (self.handler.__doc__ or "").partition("\n")[0]
        self.json = msgspec.json.Decoder(self.body or Request, dec_hook=decode_hook)
        self.msgpack = msgspec.msgpack.Decoder(self.body or Request, dec_hook=decode_hook)


@dataclass(slots=True)
class Routes:
    all: list[Route] = field(default_factory=list)
    _static: dict[str, dict[str, Route]] = field(default_factory=dict)
    _patterns: list[tuple[re.Pattern[str], dict[str, Route]]] = field(default_factory=list)

    def add(self, method: str, path: str, *, returns: Mapping[int, Any], **options: Any) -> Callable[[H], H]:
        """Decorator that adds a handler as a route. options: fields of Route."""

        def declare(handler: H) -> H:
            self._register(Route(method=method, path=path, handler=handler, returns=returns, **options))
            return handler

        return declare

    def _register(self, route: Route) -> None:
        self.all.append(route)
        if "{" not in route.path:
            self._static.setdefault(route.path, {})[route.method] = route
            return
        parts = re.split(r"\{(\w+)\}", route.path)
        # In a path, a colon begins a verb, as in `:deliver-now`. Only keys and groups may contain a colon, because they
        # may have any text.
        text = "".join(
            f"(?P<{p}>[^/{'' if p in ('key', 'group') else ':'}]*)" if n % 2 else re.escape(p)
            for n, p in enumerate(parts)
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
        """Find a route. path: percent-encoded: %2F is part of a name. Raises NotFound, MethodNotAllowed, BadRequest."""
        methods, found = self._static.get(path), {}
        if methods is None:
            for pattern, candidates in self._patterns:
                match = pattern.fullmatch(path)
                if match:
                    methods, found = candidates, {k: _decoded(v) for k, v in match.groupdict().items()}
                    break
            else:
                raise NotFound(f"path {path[:200]} does not exist; /openapi.json lists all paths")
        route = methods.get("GET" if method == "HEAD" else method)
        if route is None:
            allow = ", ".join(sorted({*methods, *(["HEAD"] if "GET" in methods else [])}))
            raise MethodNotAllowed(f"method {method[:20]} is not allowed for this path; allowed: {allow}", allow=allow)
        return route, found


def origin_form(target: str) -> str:
    """Path and query of a request's target; `http://any.host/path` means `/path` (RFC 9112, 3.2.2)."""
    if "#" in target:
        raise BadRequest("a request's path and query must not contain #: write it as %23")
    return target if target.startswith("/") else _AUTHORITY.sub("", target, count=1)


def _decoded(text: str) -> str:
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        # Refuse bytes that are not UTF-8: replacement characters would make different names equal.
        raise BadRequest(f"the path {text[:SHOWN]!r} is not percent-encoded UTF-8") from None
