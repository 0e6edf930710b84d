"""Encodes the client's requests and decodes the answers. A decoding error means that the answer did not come from a
node."""

import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, Generic, TypeVar

import msgspec

from hadelay.api.problems import error_of
from hadelay.api.publishing import BatchResult, BatchResults
from hadelay.api.text import parse_duration
from hadelay.client.message import AsyncMessage
from hadelay.client.transport import HttpAnswer
from hadelay.client.types import (
    Body,
    Bucket,
    Delay,
    JobInfo,
    Message,
    Put,
    PutResult,
    Receipt,
    ScheduleInfo,
    TopicInfo,
    When,
)
from hadelay.errors import BadRequest

T = TypeVar("T")

#: Pattern of texts that a header carries unchanged: no space around the text, and no control characters.
HEADER_VALUE = re.compile(r"([^\0-\x20\x7f]([^\0-\x1f\x7f]*[^\0-\x20\x7f])?)?")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
#: Limits of one request of put_many, in messages and bytes: large for throughput, small for latency.
BATCH_ITEMS, _BATCH_BYTES = 1_000, 8 << 20
#: Limit of the results of one ack, in bytes; nodes have a higher one.
_RESULT_BYTES = 1 << 18
_HEADERS = {
    "delay": "Hadelay-Delay", "deliver_at": "Hadelay-Deliver-At", "key": "Hadelay-Key", "tags": "Hadelay-Tags",
    "on_conflict": "Hadelay-On-Conflict", "max_wait": "Hadelay-Max-Wait",
    "unique_for": "Hadelay-Unique-For", "ttl": "Hadelay-TTL", "callback": "Hadelay-Callback", "group": "Hadelay-Group",
    "on_success": "Hadelay-On-Success", "on_failure": "Hadelay-On-Failure",
}  # fmt: skip
MSGPACK = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}


def new_key() -> str:
    return os.urandom(16).hex()


def own_or_new_key(given: str | None) -> str:
    """The given Idempotency-Key, or a new one. ValueError for an empty key, which different publishes would share."""
    if given is None:
        return new_key()
    if not given or not HEADER_VALUE.fullmatch(given):
        raise ValueError(
            f"idempotency_key {given!r}: must not be empty, have control characters, or begin or end with a space"
        )
    return given


def each(values: str | Iterable[str]) -> list[str]:
    return [values] if isinstance(values, str) else list(values)


def shift_of(shift: Delay | None) -> Any:
    """Encode a duration, which may be negative, for JSON."""
    return shift.total_seconds() if isinstance(shift, timedelta) else plain(shift)


def plain(value: Any) -> Any:
    """Encode a duration, or settings with durations, for JSON. ValueError for nan and inf, which JSON lacks."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} cannot be sent as a JSON number")
    if isinstance(value, Mapping):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value


def seconds_of(delay: Delay) -> float:
    """A duration in seconds; ValueError with an explanation if it is invalid."""
    try:
        return parse_duration("duration", plain(delay)) / 1000
    except BadRequest as error:
        raise ValueError(error.detail) from None


def servers(urls: str | Sequence[str] | None) -> str | Sequence[str]:
    """Addresses of nodes: those given, those of the variable HADELAY_SERVERS, or a node on loopback."""
    return urls or os.environ.get("HADELAY_SERVERS") or "http://127.0.0.1:8400"


def when_of(at: When | None) -> str | int | None:
    if not isinstance(at, datetime):
        return at
    if at.tzinfo is None:
        raise ValueError(f"{at!r} has no time zone: pass an aware datetime, such as datetime.now(UTC)")
    return at.isoformat()


def present_span() -> str | None:
    """W3C's traceparent of OpenTelemetry's current span; None for a program that has not imported OpenTelemetry."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    span = api.get_current_span().get_span_context()
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}" if span.is_valid else None


def payload_of(body: Body, content_type: str | None) -> tuple[bytes, str]:
    """Encode a message's payload; returns (bytes, content type), whose default follows from the class of `body`."""
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body), content_type or "application/octet-stream"
    if isinstance(body, str):
        return body.encode(), content_type or "text/plain; charset=utf-8"
    return msgspec.json.encode(body), content_type or "application/json"


def batches(puts: Iterable[Put]) -> Iterator[list[dict[str, Any]]]:
    """Split puts into requests of `put_many`; yields the items of each request."""
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
    if put.forward:
        item["forward"] = dict(put.forward)
    return item | options_of(put)


def options_of(put: Put) -> dict[str, Any]:
    """Options of a put that can be sent as a header or in a batch item, by their names in the batch item."""
    _check_text("topic", put.topic)
    for name, text in (("key", put.key), ("group", put.group)):
        if text is not None:
            _check_text(name, text)
    for tag in put.tags or ():
        _check_text("tag", tag)
    for name, value in (put.meta or {}).items():
        _check_text("name of meta", name)
        _check_text(f"meta[{name!r}]", value)
    for name, value in (put.forward or {}).items():
        _check_text("name of forward", name)
        _check_text(f"forward[{name!r}]", value)
    given: dict[str, Any] = {
        "delay": plain(put.delay),
        "deliver_at": when_of(put.at),
        "key": put.key,
        "on_conflict": put.on_conflict,
        "max_wait": plain(put.max_wait),
        "unique_for": plain(put.unique_for),
        "tags": each(put.tags) if put.tags else None,
        "ttl": plain(put.ttl),
        "callback": put.callback,
        "group": put.group,
        "on_success": put.on_success,
        "on_failure": put.on_failure,
    }
    return {name: value for name, value in given.items() if value is not None}


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {type(value).__name__}: {name}={str(value)!r}")


def headers_of(options: Mapping[str, Any], **named: Mapping[str, str]) -> dict[str, str]:
    """Headers of a publish. named: fields with a header each, meta and forward. ValueError for an option that a header
    cannot carry."""
    headers = {_HEADERS[name]: _header_text(value) for name, value in options.items()}
    for kind, fields in named.items():
        for name, value in fields.items():
            if not _HEADER_NAME.fullmatch(name) or not HEADER_VALUE.fullmatch(value):
                raise ValueError(f"{kind} {name!r}: a header cannot carry this name or value unchanged: use put_many")
            headers[f"Hadelay-{kind.title()}-{name}"] = value
    return headers


def _header_text(value: Any) -> str:
    if isinstance(value, list):
        if any("," in tag for tag in value):
            raise ValueError(f"tags {value!r}: a tag must not contain a comma")
        return ",".join(value)
    # Write a float without an exponent: str would write 0.00001 as 1e-05.
    return format(Decimal(repr(value)), "f") if isinstance(value, float) else str(value)


def result_batches(leases: Sequence[str | Message], results: Sequence[Any]) -> Iterator[list[tuple[Any, msgspec.Raw]]]:
    """Split acks with results into requests: (lease, result as JSON) of each."""
    some: list[tuple[Any, msgspec.Raw]] = []
    size = 0
    for lease, result in zip(leases, results, strict=True):
        encoded = msgspec.json.encode(result)
        if some and (size + len(encoded) > _RESULT_BYTES or len(some) == BATCH_ITEMS):
            yield some
            some, size = [], 0
        some.append((lease, msgspec.Raw(encoded)))
        size += len(encoded)
    if some:
        yield some


class WirePage(msgspec.Struct, Generic[T]):
    messages: list[T]
    cursor: str | None = None


class Results(msgspec.Struct, Generic[T]):
    results: list[T]


class Redriving(msgspec.Struct):
    redriving: int


class WireSchedules(msgspec.Struct):
    schedules: list[ScheduleInfo]
    cursor: str | None = None


class WireOutcome(msgspec.Struct):
    outcome: str


class WireTopics(msgspec.Struct):
    topics: list[TopicInfo]


class WireJobs(msgspec.Struct):
    jobs: list[JobInfo]


class WireBuckets(msgspec.Struct):
    buckets: list[Bucket]


_decode_results = msgspec.msgpack.Decoder(BatchResults[datetime]).decode
_decode_messages = msgspec.msgpack.Decoder(WirePage[AsyncMessage]).decode


def read(kind: type[T]) -> Callable[[HttpAnswer], T]:
    return lambda answer: msgspec.json.decode(answer.body, type=kind)


def read_nothing(answer: HttpAnswer) -> None:
    if answer.status != 204:
        raise ValueError(f"expected status 204, not {answer.status}")


def read_results(items: list[dict[str, Any]], answer: HttpAnswer) -> list[PutResult]:
    results = _decode_results(answer.body).results
    return [_result(item, result, answer.resent) for item, result in zip(items, results, strict=True)]


def _result(item: dict[str, Any], result: BatchResult[datetime], resent: bool) -> PutResult:
    if result.error is not None:
        return error_of(result.error, result.error.get("status", 500))
    if result.deliver_at is None:
        raise ValueError("a batch result has neither deliver_at nor an error")
    return Receipt(
        id=result.id, topic=item["topic"], deliver_at=result.deliver_at, key=item.get("key"),
        duplicate=result.duplicate, replaced=result.replaced, resent=resent,
    )  # fmt: skip


def read_messages(answer: HttpAnswer) -> list[AsyncMessage]:
    return _decode_messages(answer.body).messages
