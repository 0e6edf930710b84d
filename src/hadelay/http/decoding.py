"""Decodes query, headers and body of a request into the declared types; errors become BadRequest, in plain words."""

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

#: Media types read as JSON: clients send them by default (curl -d, raw bytes).
_JSON_ENOUGH = frozenset(
    (JSON, "", "text/json", "text/plain", "application/x-www-form-urlencoded", "application/octet-stream")
)
MSGPACK_NAMES = frozenset((MSGPACK, "application/x-msgpack", "application/vnd.msgpack"))
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `([^`]*)`(?: - at `(.*)`)?$")


def parse_query(query: str) -> list[tuple[str, str]]:
    """Names and values of a query. query: without the question mark, percent-encoded. Raises BadRequest."""
    try:
        return parse_qsl(query, keep_blank_values=True, errors="strict")
    except UnicodeDecodeError:
        raise BadRequest("the query is not percent-encoded UTF-8") from None


def check_headers(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raises BadRequest for `Hadelay-*` headers: only a publish takes options in headers."""
    for name, _ in headers:
        if name[:8].lower() == b"hadelay-":
            refuse_unknown("header", name.decode("latin-1"), ())


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
        # Cut ", not text" from msgspec's error: every value of a query is text, so the words would mislead.
        raise BadRequest(_words("query", error, kind).removesuffix(", not text")) from None


def media_type(request: Any) -> str:
    """Media type without parameters, in lower case; "" without one."""
    kind: str = request.headers.get("Content-Type", "")
    return kind.partition(";")[0].strip().lower()


def decode_body(request: Any, route: Route, data: bytes) -> Any:
    """Decode a request's body. An absent body counts as an empty object, whose members may all be optional."""
    assert route.body is not None
    kind = media_type(request)
    if not data.strip():
        kind, data = JSON, b"{}"
    if kind in MSGPACK_NAMES:
        return decoded(lambda: route.msgpack.decode(data), route.body)
    if kind not in _JSON_ENOUGH and not kind.endswith("+json"):
        raise UnsupportedMediaType(
            f"Content-Type {kind!r} is not supported; send application/json or application/msgpack"
        )
    return decoded(lambda: route.json.decode(data), route.body)


def decoded(decode: Callable[[], Any], kind: type[Request]) -> Any:
    """Run a msgspec decoder; its refusal becomes BadRequest, with a suggestion for a mistyped field."""
    try:
        return decode()
    except msgspec.ValidationError as error:
        unknown = _UNKNOWN_FIELD.match(str(error))
        if unknown:
            where = f" at {unknown[2]}" if unknown[2] else ""
            known = () if "." in where else _names(kind)  # _names has no nested fields to suggest
            refuse_unknown("field", unknown[1], known, where)
        raise BadRequest(_words("body", error, kind)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"body: {error}") from None


def _words(where: str, error: msgspec.ValidationError, kind: type[Request]) -> str:
    """Text of the refusal for an error of msgspec; begins with the wrong member, as all refusals do."""
    text, _, path = str(error).partition(" - at `$")
    member = (path[1:] if path.startswith(".") else where + path).rstrip("`")
    of = {f.encode_name: f.type for f in msgspec.structs.fields(kind)}.get(member.partition("[")[0])
    return f"{member}: {plain(text, member, _choices(of) if of else ())}"


def _choices(kind: Any) -> list[str]:
    """Values of a Literal type, or of the Literal types in a union."""
    inner = get_args(kind)
    return [str(word) for word in inner] if get_origin(kind) is Literal else [w for one in inner for w in _choices(one)]
