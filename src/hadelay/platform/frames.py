"""Frames of the node link whose fields are msgpack (docs/spec/node-link.md): one kind byte, then an array."""

from typing import Any

import msgpack

#: Upper limit of terms, indexes, incarnations and other numbers: each can still be incremented and encoded.
LIMIT = 1 << 63


class BadFrame(Exception):
    """A frame that violates docs/spec/node-link.md. The frame is ignored, and the link dropped."""


def encode(kind: int, *fields: Any) -> bytes:
    body: bytes = msgpack.packb(fields)
    return bytes((kind,)) + body


def decode(data: bytes, *types: type) -> list[Any]:
    """Fields of a frame. BadFrame unless they have these types, and numbers are from 0 to below LIMIT."""
    try:
        fields = msgpack.unpackb(memoryview(data)[1:])
    except Exception as error:  # msgpack raises several types of errors
        raise BadFrame(f"kind {data[0]}: {error}") from error
    if type(fields) is not list or [type(field) for field in fields] != list(types):
        raise BadFrame(f"kind {data[0]}: the fields are not {[t.__name__ for t in types]}")
    if any(type(field) is int and not 0 <= field < LIMIT for field in fields):
        raise BadFrame(f"kind {data[0]}: a number is negative or too large")
    return fields
