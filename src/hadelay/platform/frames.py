"""Frames of the node link whose fields are msgpack (docs/spec/node-link.md): one kind byte, then an array."""

from __future__ import annotations

from typing import Any

import msgpack

#: Terms, indexes, incarnations and the like are below: one more than any of them can still be counted and written.
LIMIT = 1 << 63


class BadFrame(Exception):
    """A frame that is not what docs/spec/node-link.md says. Nothing of it was used; the link is dropped."""


def encode(kind: int, *fields: Any) -> bytes:
    body: bytes = msgpack.packb(fields)
    return bytes((kind,)) + body


def decode(data: bytes, *types: type) -> list[Any]:
    """The fields of a frame, checked against `types`; numbers are from 0 to below LIMIT."""
    try:
        fields = msgpack.unpackb(memoryview(data)[1:])
    except Exception as error:  # msgpack raises a family of them
        raise BadFrame(f"kind {data[0]}: {error}") from error
    if type(fields) is not list or [type(field) for field in fields] != list(types):
        raise BadFrame(f"kind {data[0]}: the fields are not {[t.__name__ for t in types]}")
    if any(type(field) is int and not 0 <= field < LIMIT for field in fields):
        raise BadFrame(f"kind {data[0]}: a number that none is")
    return fields
