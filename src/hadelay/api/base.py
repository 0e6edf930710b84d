"""Documents of API version 1: msgspec types that decode, validate and encode, and that OpenAPI 3.1 describes.

One declaration serves node and client. `At` is the type of a time: text that was formatted before on a node, datetime
in the client. A member of an answer is one of three kinds:

    without a default               always sent
    a default                       sent only if the value is another one
    field(default_factory=…)        always sent; a reader does without it
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from msgspec import Struct

from hadelay.api.text import parse_duration, parse_instant
from hadelay.errors import BadRequest

At = TypeVar("At")
DispatchSync = Literal["commit", "interval"]


class Duration(int):
    """Milliseconds; on the wire "250ms", "2h30m" or a number of seconds."""


class Instant(int):
    """Unix ms; on the wire RFC 3339, or Unix milliseconds on input."""


class Request(Struct, forbid_unknown_fields=True):
    """What a client sends. A misspelt name is refused: `?dealy=1h` would fire at once."""


class Nothing(Request):
    """The body of an action that takes no options."""


class Document(Struct, omit_defaults=True, frozen=True):
    """What a node answers. Clients ignore members that they do not know, so newer nodes may add some."""


def null() -> None:
    return None


def decode_hook(kind: type, value: Any) -> Any:
    try:
        if kind is Duration:
            return Duration(parse_duration("duration", value))
        if kind is Instant:
            return Instant(parse_instant("time", value))
    except BadRequest as error:
        # msgspec knows which member it is, and says so of a ValueError.
        raise ValueError(error.detail.partition(": ")[2]) from None
    raise NotImplementedError(kind)


def schema_hook(kind: type) -> dict[str, Any]:
    if kind is Duration:
        return {
            "description": "250ms, 15m, 2h30m, 7d; a bare number is seconds",
            "anyOf": [
                {"type": "string", "pattern": r"^([0-9]+(\.[0-9]+)?(ms|s|m|h|d))+$|^[0-9]+(\.[0-9]+)?$"},
                {"type": "number", "minimum": 0},
            ],
        }
    if kind is Instant:
        return {
            "description": "RFC 3339 with any offset, or Unix milliseconds",
            "anyOf": [{"type": "string", "format": "date-time"}, {"type": "integer", "minimum": 100_000_000_000}],
        }
    raise NotImplementedError(kind)
