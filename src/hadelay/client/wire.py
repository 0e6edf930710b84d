"""What answers look like on the wire, and how each is read. What does not look like it was said by no node."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeVar

import msgspec

from hadelay.api.problems import error_of
from hadelay.client.transport import Answer
from hadelay.client.types import Bucket, DeadLetter, Message, MessageInfo, PutResult, Receipt, Redriven, TopicInfo

T = TypeVar("T")


class Result(msgspec.Struct):
    id: str = ""
    deliver_at: datetime | None = None
    duplicate: bool = False
    replaced: str | None = None
    error: dict[str, Any] | None = None


class Results(msgspec.Struct):
    results: list[Result]


class Messages(msgspec.Struct):
    messages: list[Message]


class Page(msgspec.Struct):
    messages: list[MessageInfo]
    cursor: str | None = None


class DeadPage(msgspec.Struct):
    messages: list[DeadLetter]
    cursor: str | None = None


class RedrivenResults(msgspec.Struct):
    results: list[Redriven]


class Redriving(msgspec.Struct):
    redriving: int


class Purged(msgspec.Struct):
    states: list[str]


class Named(msgspec.Struct):
    name: str


class Outcome(msgspec.Struct):
    outcome: str


class Outcomes(msgspec.Struct):
    results: list[Outcome]


class Topics(msgspec.Struct):
    topics: list[TopicInfo]


class Buckets(msgspec.Struct):
    buckets: list[Bucket]


class Leader(msgspec.Struct):
    leader: str


_decode_results = msgspec.msgpack.Decoder(Results).decode
_decode_messages = msgspec.msgpack.Decoder(Messages).decode


def read(kind: type[T]) -> Callable[[Answer], T]:
    return lambda answer: msgspec.json.decode(answer.body, type=kind)


def read_nothing(answer: Answer) -> None:
    if answer.status != 204:
        raise ValueError("a node answers 204")


def read_results(items: list[dict[str, Any]], answer: Answer) -> list[PutResult]:
    results = _decode_results(answer.body).results
    return [_result(item, result, answer.resent) for item, result in zip(items, results, strict=True)]


def _result(item: dict[str, Any], result: Result, resent: bool) -> PutResult:
    if result.error is not None:
        return error_of(result.error, result.error.get("status", 500))
    if result.deliver_at is None:
        raise ValueError("neither a receipt nor an error")
    return Receipt(
        result.id, result.deliver_at, item["topic"], result.duplicate, item.get("key"), result.replaced, resent
    )


def read_messages(answer: Answer) -> list[Message]:
    return _decode_messages(answer.body).messages
