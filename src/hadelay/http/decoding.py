"""Decodes query, headers and body of a request into the declared types; errors become BadRequest, in plain words."""

from collections.abc import Iterable
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from hadelay.api.base import Request, decode_hook
from hadelay.errors import BadRequest, UnsupportedMediaType
from hadelay.http.answers import JSON, MSGPACK
from hadelay.http.routes import Route
from hadelay.rules.documents import SHOWN, decoded, in_words, names_of, refuse_unknown

#: Media types read as JSON: clients send them by default (curl -d, raw bytes).
_JSON_ENOUGH = frozenset(
    (JSON, "", "text/json", "text/plain", "application/x-www-form-urlencoded", "application/octet-stream")
)
MSGPACK_NAMES = frozenset((MSGPACK, "application/x-msgpack", "application/vnd.msgpack"))


def parse_query(query: str) -> list[tuple[str, str]]:
    """Names and values of a query. query: without the question mark, percent-encoded. Raises BadRequest."""
    try:
        return parse_qsl(query, keep_blank_values=True, errors="strict")
    except UnicodeDecodeError:
        raise BadRequest("the query is not percent-encoded UTF-8") from None


def check_headers(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raises BadRequest for `Hadelay-*` headers: only a publish takes options in headers. Nodes of other shards add
    Hadelay-Shard."""
    for name, _ in headers:
        if name[:8].lower() == b"hadelay-" and name[8:].lower() != b"shard":
            refuse_unknown("header", name.decode("latin-1"), ())
        refuse_underscore(name.lower())


def refuse_underscore(name: bytes) -> None:
    """Raises BadRequest for a header such as Hadelay_Delay, which has underscores in place of hyphens and would be
    ignored. name: in lower case."""
    if b"_" in name and (name.startswith(b"hadelay_") or name == b"idempotency_key"):
        given = name.decode("latin-1").title()[:SHOWN]
        raise BadRequest(f"header {given}: write it with hyphens: {given.replace('_', '-')}")


def decode_query(pairs: list[tuple[str, str]], kind: type[Request] | None) -> Any:
    fields = names_of(kind)
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
        raise BadRequest(in_words("query", error, kind).removesuffix(", not text")) from None


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
        return decoded(route.msgpack.decode, data, route.body)
    if kind not in _JSON_ENOUGH and not kind.endswith("+json"):
        raise UnsupportedMediaType(
            f"Content-Type {kind!r} is not supported; send application/json or application/msgpack"
        )
    return decoded(route.json.decode, data, route.body)
