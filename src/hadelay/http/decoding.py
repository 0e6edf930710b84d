"""Query, headers and body of a request into the declared types. What is wrong becomes BadRequest, in words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Literal, NoReturn, get_args, get_origin
from urllib.parse import parse_qsl

import msgspec

from hadelay.api.base import Request, decode_hook
from hadelay.api.text import suggest
from hadelay.errors import BadRequest, UnsupportedMediaType
from hadelay.http.answers import JSON, MSGPACK
from hadelay.http.routes import SHOWN, Route
from hadelay.words import plain

#: What clients send for JSON when they do not think about it (curl -d, raw bytes).
_JSON_ENOUGH = frozenset(
    (JSON, "", "text/json", "text/plain", "application/x-www-form-urlencoded", "application/octet-stream")
)
_MSGPACK_NAMES = frozenset((MSGPACK, "application/x-msgpack", "application/vnd.msgpack"))
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `([^`]*)`(?: - at `(.*)`)?$")


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
    name = name if len(name) <= SHOWN else name[: SHOWN - 1] + "…"
    raise BadRequest(f"unknown {what} {name!r}{where}{suggest(name, known)}")


@cache
def _names(kind: type[Request] | None) -> set[str]:
    return {f.encode_name for f in msgspec.structs.fields(kind)} if kind else set()


def decode_query(pairs: list[tuple[str, str]], kind: type[Request] | None) -> Any:
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
        return msgspec.convert(found, kind, strict=False, dec_hook=decode_hook)
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


def decoded(decode: Callable[[], Any], kind: type[Request]) -> Any:
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


def _words(where: str, error: msgspec.ValidationError, kind: type[Request]) -> str:
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
