"""Reads properties that AMQP's decoder refuses: an exception there would end the connection, again at each delivery."""

import struct
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from pamqp import decode

from hadelay.bridge.envelope import time_of

_TIMESTAMP = struct.Struct(">Q")
#: Name of a header that stands for headers which cannot be read.
_MARK = "unreadable"


class Unreadable(str):
    """Stands for a value that cannot be read."""


def install() -> None:
    """Decode what this process receives in this way."""
    decode.TABLE_MAPPING[b"T"] = _timestamp
    decode.METHODS |= {
        "shortstr": _lenient(decode.short_str, lambda value: 1 + value[0], Unreadable("?")),
        "timestamp": _timestamp,
        "table": _lenient(
            decode.field_table, lambda value: 4 + int.from_bytes(value[:4], "big"), {_MARK: Unreadable("?")}
        ),
    }


def _timestamp(value: bytes) -> tuple[int, datetime]:
    """A timestamp, whose number stays as it is. The library's own decoder takes a large number for ms, and would send
    it on in seconds."""
    if len(value) < _TIMESTAMP.size:
        raise ValueError("a timestamp is cut short")
    return _TIMESTAMP.size, time_of(_TIMESTAMP.unpack_from(value)[0])


def _lenient(strict: Callable[[bytes], Any], size: Callable[[bytes], int], instead: Any) -> Callable[[bytes], Any]:
    """A decoder of one type of value. size: number of bytes that a value takes."""

    def decoded(value: bytes) -> Any:
        try:
            return strict(value)
        except (ValueError, OverflowError, OSError, RecursionError):  # UnicodeDecodeError is a ValueError
            return size(value), instead

    return decoded


def unreadable(values: Mapping[str, Any]) -> list[str]:
    """Names of those of these properties that could not be read."""
    return [
        name
        for name, value in values.items()
        if isinstance(value, Unreadable) or (isinstance(value, dict) and isinstance(value.get(_MARK), Unreadable))
    ]
