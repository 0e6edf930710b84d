"""Encodes the client's requests and decodes the answers. A decoding error means that the answer did not come from a
node."""

import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from textwrap import fill
from typing import Any, Generic, TypeVar

import msgspec

from hadelay.api.problems import error_of
from hadelay.api.publishing import BatchResult, BatchResults
from hadelay.api.publishoptions import HEADERS, OPTIONS
from hadelay.api.text import parse_duration
from hadelay.client import exactjson
from hadelay.client.message import AsyncMessage
from hadelay.client.putoptions import Put
from hadelay.client.transport import HttpAnswer
from hadelay.client.types import (
    BatchFailure,
    BatchInfo,
    Body,
    Bucket,
    Delay,
    JobInfo,
    Message,
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
#: Limit of the results of one ack, in bytes; the limit of nodes is higher.
_RESULT_BYTES = 1 << 18
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


#: Timeout of a request of a framework's adapter, in seconds, unless a program says otherwise: shorter than that of most
#: web servers, longer than a change of leadership takes.
ADAPTER_TIMEOUT_S = 10.0


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
    return exactjson.encode(body, "body"), content_type or "application/json"


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
    if put.idempotency_key is not None:
        own_or_new_key(put.idempotency_key)
    return item | options_of(put)


#: Option → name of the argument of `put` that sets it, and kind of its value.
_ARGUMENTS = {name: (row.put or name, row.kind.name) for name, row in OPTIONS.items() if name != "content_type"}


def options_of(put: Put) -> dict[str, Any]:
    """Options of a put as fields of a batch item, without the content type."""
    _check_text("topic", put.topic)
    found = dict[str, Any]()
    for name, (argument, kind) in _ARGUMENTS.items():
        value = getattr(put, argument)
        if value is None:
            continue
        if kind in ("meta", "headers"):
            for field, text in value.items():
                _check_text(f"name of {name}", field)
                _check_text(f"{name}[{field!r}]", text)
            value = dict(value)
        elif kind == "tags":
            value = each(value)
            for tag in value:
                _check_text("tag", tag)
        elif kind == "name":
            _check_text(name, value)
        else:
            value = when_of(value) if kind == "instant" else plain(value)
        if value or kind not in ("meta", "headers", "tags"):
            found[name] = value
    return found


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {type(value).__name__}: {name}={str(value)!r}")


def options_help() -> str:
    """Descriptions of the options of `put`, for its docstring."""
    lines = (f"    {row.put or name}: {row.help}" for name, row in OPTIONS.items())
    return "\n".join(fill(line, 100, subsequent_indent=" " * 8) for line in lines)


def headers_of(options: Mapping[str, Any]) -> dict[str, str]:
    """Headers of a publish with these options. ValueError for an option that a header cannot carry."""
    headers = {}
    for option, value in options.items():
        header = HEADERS[option]
        if not header.endswith("*"):
            headers[header] = _header_text(value)
            continue
        for name, text in value.items():
            if not _HEADER_NAME.fullmatch(name) or not HEADER_VALUE.fullmatch(text):
                raise ValueError(f"{option} {name!r}: a header cannot carry this name or value unchanged: use put_many")
            headers[header[:-1] + name] = text
    return headers


def _header_text(value: Any) -> str:
    if isinstance(value, list):
        if any("," in tag for tag in value):
            raise ValueError(f"tags {value!r}: a tag must not contain a comma")
        return ",".join(value)
    # Write a float without an exponent: str would write 0.00001 as 1e-05.
    return format(Decimal(repr(value)), "f") if isinstance(value, float) else str(value)


def result_batches(leases: Sequence[str | Message], results: Sequence[Any]) -> Iterator[list[tuple[Any, msgspec.Raw]]]:
    """Split acks with results into requests; yields the (lease, result as JSON) pairs of each request."""
    some: list[tuple[Any, msgspec.Raw]] = []
    size = 0
    for lease, result in zip(leases, results, strict=True):
        encoded = exactjson.encode(result, "result")
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


class WireBatches(msgspec.Struct):
    batches: list[BatchInfo]
    cursor: str | None = None


class WireBatchFailures(msgspec.Struct):
    failures: list[BatchFailure]
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
        id=result.id,
        topic=item["topic"],
        deliver_at=result.deliver_at,
        key=item.get("key"),
        duplicate=result.duplicate,
        replaced=result.replaced,
        resent=resent,
    )


def read_messages(answer: HttpAnswer) -> list[AsyncMessage]:
    return _decode_messages(answer.body).messages
