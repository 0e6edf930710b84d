"""A whole answer of HTTP, and its media types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

JSON, MSGPACK, NDJSON = "application/json", "application/msgpack", "application/x-ndjson"
JSON_TYPE, MSGPACK_TYPE = {"Content-Type": JSON}, {"Content-Type": MSGPACK}


class Answer(NamedTuple):
    """A whole response, but for the headers that all have."""

    status: int
    headers: Mapping[str, str]
    body: bytes


NOTHING = Answer(204, {}, b"")


def header_lines(headers: Mapping[str, str]) -> bytes:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode("utf-8", "surrogateescape")


def encoded(value: Any, *, packed: bool) -> Answer:
    """200 with `value` as JSON, or packed: as msgpack."""
    if packed:
        return Answer(200, MSGPACK_TYPE, msgspec.msgpack.encode(value))
    return Answer(200, JSON_TYPE, msgspec.json.encode(value))
