"""Lenient decoding of AMQP properties: an exception in the library's decoder would end the connection, again at each
delivery of the message."""

import struct
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from pamqp import decode

from hadelay.bridge.envelope import time_of

_TIMESTAMP = struct.Struct(">Q")
#: Name of the one header that stands in place of a table of headers that could not be decoded.
_MARK = "unreadable"


class Unreadable(str):
    """Placeholder for a value that could not be decoded."""


def install() -> None:
    """Replace the decoders of the library pamqp by lenient ones, for this whole process."""
    decode.TABLE_MAPPING[b"T"] = _timestamp
    decode.METHODS |= {
        "shortstr": _lenient(decode.short_str, lambda value: 1 + value[0], Unreadable("?")),
        "timestamp": _timestamp,
        "table": _lenient(
            decode.field_table, lambda value: 4 + int.from_bytes(value[:4], "big"), {_MARK: Unreadable("?")}
        ),
    }


def _timestamp(value: bytes) -> tuple[int, datetime]:
    """Decode a timestamp, and keep its number. The library's own decoder takes a large number for ms, so the bridge
    would send the number on in seconds."""
    if len(value) < _TIMESTAMP.size:
        raise ValueError("a timestamp is cut short")
    return _TIMESTAMP.size, time_of(_TIMESTAMP.unpack_from(value)[0])


def _lenient(strict: Callable[[bytes], Any], size: Callable[[bytes], int], instead: Any) -> Callable[[bytes], Any]:
    """Make a decoder that returns `instead` for a value that `strict` cannot decode. size: returns the number of bytes
    that the value takes."""

    def decoded(value: bytes) -> Any:
        try:
            return strict(value)
        except (ValueError, OverflowError, OSError, RecursionError):  # ValueError includes UnicodeDecodeError
            return size(value), instead

    return decoded


def unreadable(values: Mapping[str, Any]) -> list[str]:
    """Names of the properties that could not be decoded."""
    return [
        name
        for name, value in values.items()
        if isinstance(value, Unreadable) or (isinstance(value, dict) and isinstance(value.get(_MARK), Unreadable))
    ]
