"""Routes as they are declared, and looked up by path. They know nothing of what handles them.

    @routes.add("PUT", "/v1/topics/{topic}", scope="admin", body=PutTopic, returns={200: Topic})
    async def put_topic(call: Call) -> Answer: ...

A handler gets a `Call`: path parameters as text, query and body as the declared msgspec types. What the types do not
say (limits, names) the handler checks; whatever it raises from `hadelay.errors` becomes the answer.
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

#: Takes a Call; an Answer, or what aiohttp sends in pieces.
Handler = Callable[[Any], Awaitable[Any]]
H = TypeVar("H", bound=Handler)

#: Scope of routes that take no token.
OPEN = "open"
#: Limit of a body that says nothing else: a topic's settings are up to 20 KiB.
MAX_BYTES = 64 << 10
_AUTHORITY = re.compile(r"https?://[^/?]*", re.IGNORECASE)
#: More of a name that is not known is not shown, nor compared.
SHOWN = 64


@dataclass(slots=True, kw_only=True)
class Route:
    method: str
    path: str
    handler: Handler
    returns: Mapping[int, Any]
    query: type[Request] | None = None
    body: type[Request] | None = None
    #: `Hadelay-*` request headers that the route understands.
    headers: Iterable[str] = ()
    errors: tuple[int, ...] = ()
    #: Media types of a body that the handler reads by itself (payloads, batches): limits and types are its own.
    raw_body: tuple[str, ...] = ()
    #: The handler reads headers and query by itself.
    own_head: bool = False
    #: The handler gives an `Answer` and looks at nothing that `ParsedHead` lacks: connection.py may call it without
    #: aiohttp.
    short: bool = False
    #: What a token needs for it (rights.py), for the topic in its path or else for all of them; or OPEN.
    scope: str = "admin"
    #: What it is about is known to the handler alone, which asks `Call.access` itself; here the scope is enough.
    own_topics: bool = False
    #: Limit of its body, which is decoded at once; of a raw body the handler has its own.
    max_bytes: int = MAX_BYTES
    #: Default: the handler's name and the first line of its docstring.
    name: str = ""
    summary: str = ""
    #: `headers` in lower case.
    known_headers: frozenset[bytes] = field(init=False)
    json: msgspec.json.Decoder[Any] | None = field(init=False)
    msgpack: msgspec.msgpack.Decoder[Any] | None = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.name or self.handler.__name__
        self.summary = self.summary or (self.handler.__doc__ or "").partition("\n")[0]
        self.known_headers = frozenset(name.lower().encode() for name in self.headers)
        self.json = msgspec.json.Decoder(self.body, dec_hook=decode_hook) if self.body else None
        self.msgpack = msgspec.msgpack.Decoder(self.body, dec_hook=decode_hook) if self.body else None


@dataclass(slots=True)
class Routes:
    """Declared at import, looked up by path."""

    all: list[Route] = field(default_factory=list)
    _static: dict[str, dict[str, Route]] = field(default_factory=dict)
    _patterns: list[tuple[re.Pattern[str], dict[str, Route]]] = field(default_factory=list)

    def add(self, method: str, path: str, *, returns: Mapping[int, Any], **options: Any) -> Callable[[H], H]:
        """options: fields of Route."""

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
        raise BadRequest(f"the address: {text[:SHOWN]!r} is not UTF-8, percent-encoded") from None
