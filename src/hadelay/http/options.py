"""What a publish says about its message besides the payload: by header, by query, or as fields of a batch item.

The result is a `Head`: everything of a `Draft` but the body. Heads depend on nothing but the bytes of the request, so
the connection keeps those of recent requests (see connection.py) and most publishes parse nothing at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple
from urllib.parse import parse_qsl

import msgspec

from hadelay.config import HttpConfig
from hadelay.core.commands import Draft
from hadelay.errors import BadRequest, Impossible, UnsupportedMediaType
from hadelay.http.routes import refuse_unknown
from hadelay.http.values import check_topic, parse_duration, parse_instant

_META = b"hadelay-meta-"
_KNOWN_HEADERS = ("Hadelay-Delay", "Hadelay-Deliver-At", "Hadelay-Meta-*")
_KNOWN_QUERY = ("delay", "deliver_at")
_MAX_CONTENT_TYPE = 256
_MAX_IDEMPOTENCY_KEY = 255

#: One option, and nothing that would have to be decoded: what most queries are.
_PLAIN_QUERY = re.compile(r"(delay|deliver_at)=([0-9A-Za-z.:-]*)")

_encode = msgspec.msgpack.Encoder().encode


class Head(NamedTuple):
    topic: str
    when_ms: int
    relative: bool
    #: msgpack map of what travels with the message
    meta: bytes
    idempotency_key: bytes | None

    def draft(self, body: bytes) -> Draft:
        return Draft(self.topic, self.when_ms, self.relative, 0, 0, self.meta, body, None)


class Options(NamedTuple):
    """What the headers say; the request line says the rest."""

    found: dict[str, str]
    meta: bytes
    idempotency_key: bytes | None


def parse_head(
    limits: HttpConfig, max_delay_ms: int, topic: str, query: str, headers: Iterable[tuple[bytes, bytes]]
) -> Head:
    """`query` without the question mark, still encoded. Raises BadRequest, Impossible or UnsupportedMediaType."""
    return with_line(limits, max_delay_ms, topic, query, parse_headers(limits, headers))


def parse_headers(limits: HttpConfig, headers: Iterable[tuple[bytes, bytes]]) -> Options:
    found: dict[str, str] = {}
    meta: dict[str, str] = {}
    content_type = ""
    key: bytes | None = None
    for name, value in headers:
        name = name.lower()
        if name == b"content-type":
            content_type = value.decode("latin-1")
        elif name == b"idempotency-key":
            if key is not None:
                raise BadRequest("Idempotency-Key is given twice")
            key = check_idempotency_key(value)
        elif name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise UnsupportedMediaType("Content-Encoding is not kept with a message: send the payload as it is")
        elif name.startswith(_META):
            meta[name[len(_META) :].decode("latin-1")] = text_of(value)
        elif name.startswith(b"hadelay-"):
            option = name[8:].decode("latin-1").replace("-", "_")
            if option not in _KNOWN_QUERY:
                refuse_unknown("header", name.decode("latin-1").title(), _KNOWN_HEADERS)
            _once(found, option, text_of(value))
    return Options(found, pack_meta(limits, content_type, meta), key)


def with_line(limits: HttpConfig, max_delay_ms: int, topic: str, query: str, options: Options) -> Head:
    found, meta, key = options
    if query:
        found = found.copy()
        plain = _PLAIN_QUERY.fullmatch(query)
        pairs = [(plain[1], plain[2])] if plain else parse_qsl(query, keep_blank_values=True)
        for option, text in pairs:
            if option not in _KNOWN_QUERY:
                refuse_unknown("query parameter", option, _KNOWN_QUERY)
            _once(found, option, text)
    when_ms, relative = when(max_delay_ms, found.get("delay"), found.get("deliver_at"))
    check_topic(topic, limits.max_topic_bytes)
    return Head(topic, when_ms, relative, meta, key)


def _once(found: dict[str, str], option: str, text: str) -> None:
    if option in found:
        raise BadRequest(f"{option} is given twice: once by header or query is enough")
    found[option] = text


def text_of(value: bytes) -> str:
    """A header's value: UTF-8, or latin-1 as HTTP once had it."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def when(max_delay_ms: int, delay: object, deliver_at: object) -> tuple[int, bool]:
    """(when_ms, relative). Neither, zero or past: now, which is a delay of zero."""
    if delay is not None:
        if deliver_at is not None:
            raise BadRequest("delay and deliver_at contradict each other: give one of them")
        ms = parse_duration("delay", delay)
        if ms > max_delay_ms:
            days = max_delay_ms / 86_400_000
            raise Impossible(f"delay: {delay} is beyond max_delay, {days:g} days; it is refused, never shortened")
        return ms, True
    if deliver_at is None:
        return 0, True
    ms = parse_instant("deliver_at", deliver_at)
    return (ms, False) if ms > 0 else (0, True)


def pack_meta(limits: HttpConfig, content_type: str | None, meta: Mapping[str, str] | None) -> bytes:
    """The msgpack map kept in the record: `ct`, `meta`. Empty when there is nothing to say."""
    packed: dict[str, object] = {}
    if content_type:
        if len(content_type) > _MAX_CONTENT_TYPE or not content_type.isprintable():
            raise BadRequest(f"Content-Type: at most {_MAX_CONTENT_TYPE} printable characters")
        packed["ct"] = content_type
    if meta:
        size = sum(len(k.encode()) + len(v.encode()) for k, v in meta.items())
        if size > limits.max_meta_bytes:
            raise BadRequest(f"meta has {size} bytes, names included; at most {limits.max_meta_bytes} are kept")
        packed["meta"] = meta
    return _encode(packed) if packed else b""


def check_idempotency_key(value: bytes) -> bytes:
    value = value.strip()
    if not 0 < len(value) <= _MAX_IDEMPOTENCY_KEY:
        raise BadRequest(f"Idempotency-Key: 1 to {_MAX_IDEMPOTENCY_KEY} bytes, not {len(value)}")
    return value
