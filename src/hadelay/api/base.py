"""Base types of the HTTP API's documents (version 1): msgspec types that decode, validate and encode.

Node and client share these declarations. `At` is the type of a time: formatted text on a node, datetime in the client.
A member of an answer is one of three kinds:

    without a default               always sent
    a default                       sent only if the value differs from it
    field(default_factory=…)        always sent; older nodes may leave it out
"""

from typing import Any, Literal, TypeVar

from msgspec import Meta, Struct

from hadelay.api.text import parse_duration, parse_instant
from hadelay.errors import BadRequest

At = TypeVar("At")
DispatchSync = Literal["commit", "interval"]


class Duration(int):
    """A duration in milliseconds; JSON has "250ms", "2h30m" or a number of seconds."""


class Instant(int):
    """A time in Unix ms; JSON has RFC 3339 text, and in requests also Unix milliseconds."""


class Request(Struct, forbid_unknown_fields=True):
    """Query or body of a request. Unknown names are refused: a misspelt `?dealy=1h` would deliver at once."""


class Nothing(Request):
    """Request body of an action without options."""


class Document(Struct, omit_defaults=True, frozen=True):
    """Body of an answer. Clients ignore unknown fields, so newer nodes may add fields."""


def null() -> None:
    return None


def words(*known: str) -> Meta:
    """Mark text of an answer that is one of a few words: Annotated[str, words("a", "b")]. The JSON Schema lists them;
    clients take other words too, which newer nodes may send."""
    return Meta(extra_json_schema={"enum": [str(word) for word in known]})


def decode_hook(kind: type, value: Any) -> Any:
    try:
        if kind is Duration:
            return Duration(parse_duration("duration", value))
        if kind is Instant:
            return Instant(parse_instant("time", value))
    except BadRequest as error:
        # Cut the name "duration: " or "time: " from the parser's error text: msgspec adds the name of the field.
        raise ValueError(error.detail.partition(": ")[2]) from None
    raise NotImplementedError(kind)


def schema_hook(kind: type) -> dict[str, Any]:
    if kind is Duration:
        return {
            "description": "250ms, 15m, 2h30m, 7d; a bare number is seconds",
            "anyOf": [
                {"type": "string", "pattern": r"^([0-9]+(\.[0-9]+)?(ms|s|m|h|d))+$|^[0-9]+(\.[0-9]+)?$"},
                {"type": "number", "minimum": 0, "maximum": 3_153_600_000},
            ],
        }
    if kind is Instant:
        return {
            "description": "RFC 3339 with any offset, or Unix milliseconds",
            "anyOf": [{"type": "string", "format": "date-time"}, {"type": "integer", "minimum": 100_000_000_000}],
        }
    raise NotImplementedError(kind)
