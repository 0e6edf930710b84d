"""Conversion of a RabbitMQ message to the payload of a hadelay message, and back: the payload is one line of JSON, then
the unchanged body (docs/howto/from-rabbitmq.md#the-envelope).

The JSON line has what AMQP keeps outside of the body: exchange, routing key, and properties with headers. Values that
JSON lacks are objects with one field: {"$bytes": base64}, {"$time": number}, {"$decimal": text}, {"$float": "nan",
"inf" or "-inf"}. The number of a time is the one that AMQP has: Unix seconds, or ms or µs of some clients. A table
whose only field begins with "$" is wrapped as {"$table": …}.
"""

import base64
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, NamedTuple

import msgspec

#: Content type of a hadelay message with an envelope.
CONTENT_TYPE = "application/vnd.hadelay.amqp"
#: Header with the delay in ms, as publishers of the delayed-message plugin set it.
DELAY = "x-delay"
#: Header with the time, in Unix ms, at which RabbitMQ took the message. RabbitMQ 3.13 sets the header if so configured.
TAKEN_AT = "timestamp_in_ms"
#: Header in which a publisher may set the client key of the hadelay message.
KEY = "x-hadelay-key"
#: Header that carries the original property user_id: RabbitMQ accepts this property only from the user whom it names.
USER = "x-hadelay-user-id"
#: Largest timestamp that is read as Unix seconds (in the year 2106); larger numbers are ms or µs.
_LAST_S = 0xFFFF_FFFF
#: Limit of a delay in ms, above the cluster's own limit (limits.max_delay_ms): longer delays in a header are cut to it.
_LONGEST_MS = 1 << 62


class Stamp(datetime):
    """An AMQP timestamp that is not in seconds, because some clients write ms or µs. `timestamp()` returns the
    unchanged number."""

    number: int

    def timestamp(self) -> int:
        return self.number


def time_of(number: float) -> datetime:
    """Return the AMQP timestamp with this number. Raises ValueError if the number is negative or has more than 64
    bits."""
    if not 0 <= number < 1 << 64:
        raise ValueError(f"{number} is not an AMQP timestamp, which is 0 to 2**64 - 1")
    if number <= _LAST_S:
        return datetime.fromtimestamp(number, UTC)
    found = Stamp(1970, 1, 1, tzinfo=UTC)
    found.number = int(number)
    return found


class Envelope(NamedTuple):
    exchange: str
    routing_key: str
    #: AMQP properties that are set, by name; `headers` is a dict.
    properties: Mapping[str, Any]
    body: bytes


def delay_of(headers: Mapping[str, Any]) -> int:
    """The delay in ms that a publisher asked for; 0 to deliver at once.

    As in the delayed-message plugin, `x-delay` is an integer, a text of an integer, or a fraction, whose decimals are
    cut off. A missing header, another type, a text that is no integer and a negative delay all mean 0.
    """
    value = headers.get(DELAY)
    if isinstance(value, str | bytes) and len(value) < 30:
        try:
            value = int(value)
        except ValueError:
            return 0
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return 0
    try:
        return min(max(0, int(value)), _LONGEST_MS)
    except (ValueError, OverflowError):  # deliver at once: the delay in the header is NaN or infinite
        return 0


def delayed(headers: Mapping[str, Any], delay_ms: int) -> dict[str, Any]:
    """Headers of a message whose delay is over: negate `x-delay`, as the delayed-message plugin does. So consumers see
    that the message was delayed, and a second bridge does not delay it again."""
    return {**headers, DELAY: -delay_ms} if DELAY in headers else dict(headers)


def pack(envelope: Envelope) -> bytes:
    head = {
        "exchange": envelope.exchange,
        "routing_key": envelope.routing_key,
        "properties": _plain(envelope.properties),
    }
    return msgspec.json.encode(head) + b"\n" + envelope.body


class _Head(msgspec.Struct):
    exchange: str
    routing_key: str
    properties: dict[str, Any]


def unpack(payload: bytes) -> Envelope:
    """Decode an envelope that `pack` made. Raises ValueError for other bytes."""
    line, newline, body = payload.partition(b"\n")
    try:
        head = msgspec.json.decode(line, type=_Head)
        properties = {name: _amqp(value) for name, value in head.properties.items()}
    except (msgspec.MsgspecError, ValueError, TypeError, ArithmeticError) as error:
        raise ValueError(f"the message is no envelope of a RabbitMQ message: {error}") from None
    if not newline:
        raise ValueError("the message is no envelope of a RabbitMQ message: no line end follows the JSON")
    return Envelope(head.exchange, head.routing_key, properties, body)


def _plain(value: Any) -> Any:
    match value:
        case bytes() | bytearray():
            return {"$bytes": base64.b64encode(value).decode()}
        case datetime():
            return {"$time": value.timestamp()}
        case Decimal():
            return {"$decimal": str(value)}
        case float() if not math.isfinite(value):
            return {"$float": str(value)}
        case Mapping():
            table = {name: _plain(one) for name, one in value.items()}
            return {"$table": table} if len(table) == 1 and next(iter(table)).startswith("$") else table
        case list():
            return [_plain(one) for one in value]
        case _:
            return value


def _amqp(value: Any) -> Any:
    match value:
        case {"$bytes": str(text), **others} if not others:
            return bytearray(base64.b64decode(text, validate=True))
        case {"$time": int(seconds) | float(seconds), **others} if not others:
            return time_of(seconds)
        case {"$decimal": str(text), **others} if not others:
            return Decimal(text)
        case {"$float": "nan" | "inf" | "-inf" as text, **others} if not others:
            return float(text)
        case {"$table": dict(table), **others} if not others:
            return {name: _amqp(one) for name, one in table.items()}
        case dict():
            return {name: _amqp(one) for name, one in value.items()}
        case list():
            return [_amqp(one) for one in value]
        case _:
            return value
