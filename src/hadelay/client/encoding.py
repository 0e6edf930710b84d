"""Arguments of the client's methods as the API has them: headers, queries and bodies."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

import msgspec

from hadelay.client.types import Body, Delay, Put, When
from hadelay.paths import segment

#: What comes out of a header as it went in: no space around it, and no control character.
HEADER_VALUE = re.compile(r"([^\0-\x20\x7f]([^\0-\x1f\x7f]*[^\0-\x20\x7f])?)?")
HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
#: put_many sends this many at once: enough that a request costs nothing, little enough that none waits for it.
BATCH_ITEMS, _BATCH_BYTES = 1_000, 8 << 20
HEADERS = {
    "delay": "Hadelay-Delay", "deliver_at": "Hadelay-Deliver-At", "key": "Hadelay-Key", "tags": "Hadelay-Tags",
    "on_conflict": "Hadelay-On-Conflict", "max_wait": "Hadelay-Max-Wait", "ttl": "Hadelay-TTL",
    "callback": "Hadelay-Callback",
}  # fmt: skip
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "": 1.0}
_DURATION = re.compile(r"[0-9.]+|([0-9.]+(ms|s|m|h|d))+")
_PART = re.compile(r"([0-9.]+)(ms|s|m|h|d|)")


def new_key() -> str:
    return os.urandom(16).hex()


def own_or_new_key(given: str | None) -> str:
    """One that is empty was meant to be none of those that all have in common."""
    if given is None:
        return new_key()
    if not given or not HEADER_VALUE.fullmatch(given):
        raise ValueError(f"idempotency_key {given!r}: at least one character, none of control, no space around it")
    return given


def each(values: str | Iterable[str]) -> list[str]:
    """A string is one of them, and not its characters."""
    return [values] if isinstance(values, str) else list(values)


def path_of(message_id: str | None, topic: str | None, key: str | None) -> str:
    if message_id is not None and topic is None and key is None:
        return f"/v1/messages/{segment(message_id)}"
    if message_id is None and topic is not None and key is not None:
        return f"/v1/topics/{segment(topic)}/keys/{segment(key)}"
    raise ValueError("name the message: by its id, or by topic and key")


def query_of(**flags: bool) -> str:
    given = [f"{name}=true" for name, value in flags.items() if value]
    return "?" + "&".join(given) if given else ""


def plain(value: Any) -> Any:
    """Settings as JSON has them."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, Mapping):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value


def delay_of(delay: Delay) -> str | float:
    if isinstance(delay, timedelta):
        return delay.total_seconds()
    return finite(delay) if isinstance(delay, float) else delay


def finite(number: float) -> float:
    """JSON has only null for the others, and null means something else."""
    if not math.isfinite(number):
        raise ValueError(f"{number} is not a number that can be sent")
    return number


def header_text(value: Any) -> str:
    if isinstance(value, list):
        if any("," in tag for tag in value):
            raise ValueError(f"tags {value!r}: a tag has no comma")
        return ",".join(value)
    # Never 1e-05.
    return format(Decimal(repr(value)), "f") if isinstance(value, float) else str(value)


def seconds_of(delay: Delay) -> float:
    """What the client itself has to know of a duration: how long it waits for an answer."""
    if isinstance(delay, timedelta):
        return delay.total_seconds()
    if isinstance(delay, int | float):
        return float(delay)
    if not _DURATION.fullmatch(delay):
        raise ValueError(f'{delay!r} is not a duration: "250ms", "15m", "2h30m", "7d", or a number of seconds')
    return sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(delay))


def when_of(at: When) -> str | int:
    if not isinstance(at, datetime):
        return at
    if at.tzinfo is None:
        raise ValueError(f"{at!r} has no time zone, so it could be any of 24 hours: use datetime.now(UTC), for one")
    return at.isoformat()


def present_span() -> str | None:
    """W3C's traceparent of OpenTelemetry's present span. A program that has not imported it has none."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    span = api.get_current_span().get_span_context()
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}" if span.is_valid else None


def payload_of(body: Body, content_type: str | None) -> tuple[bytes, str]:
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body), content_type or "application/octet-stream"
    if isinstance(body, str):
        return body.encode(), content_type or "text/plain; charset=utf-8"
    return msgspec.json.encode(body), content_type or "application/json"


def batches(puts: Iterable[Put]) -> Iterator[list[dict[str, Any]]]:
    """The items of each request that `put_many` makes."""
    items: list[dict[str, Any]] = []
    size = 0
    for put in puts:
        item = _item(put)
        if items and (len(items) == BATCH_ITEMS or size + len(item["body"]) > _BATCH_BYTES):
            yield items
            items, size = [], 0
        items.append(item)
        size += len(item["body"])
    if items:
        yield items


def _item(put: Put) -> dict[str, Any]:
    body, kind = payload_of(put.body, put.content_type)
    item: dict[str, Any] = {"topic": put.topic, "body": body}
    if put.content_type or not isinstance(put.body, bytes):
        item["content_type"] = kind
    if put.meta:
        item["meta"] = dict(put.meta)
    if put.idempotency_key is not None:
        item["idempotency_key"] = own_or_new_key(put.idempotency_key)
    if put.traceparent:
        item["traceparent"] = put.traceparent
    return item | options_of(put)


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {type(value).__name__}: {name}={str(value)!r}")


def options_of(put: Put) -> dict[str, Any]:
    """What was given of the options that headers and batch items have in common, by their names in the latter."""
    _text("topic", put.topic)
    if put.key is not None:
        _text("key", put.key)
    for tag in put.tags or ():
        _text("tag", tag)
    for name, value in (put.meta or {}).items():
        _text("name of meta", name)
        _text(f"meta[{name!r}]", value)
    given: dict[str, Any] = {
        "delay": None if put.delay is None else delay_of(put.delay),
        "deliver_at": None if put.at is None else when_of(put.at),
        "key": put.key,
        "on_conflict": put.on_conflict,
        "max_wait": None if put.max_wait is None else delay_of(put.max_wait),
        "tags": each(put.tags) if put.tags else None,
        "ttl": None if put.ttl is None else delay_of(put.ttl),
        "callback": put.callback,
    }
    return {name: value for name, value in given.items() if value is not None}
