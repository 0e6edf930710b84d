"""Decoding of answers. An error here means that the answer is not a node's."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, Generic, TypeVar

import msgspec

from hadelay.api.problems import error_of
from hadelay.api.publishing import BatchResult, BatchResults
from hadelay.client.transport import Answer
from hadelay.client.types import Bucket, Message, PutResult, Receipt, TopicInfo

T = TypeVar("T")


class Page(msgspec.Struct, Generic[T]):
    messages: list[T]
    cursor: str | None = None


class Results(msgspec.Struct, Generic[T]):
    results: list[T]


class Redriving(msgspec.Struct):
    redriving: int


class Outcome(msgspec.Struct):
    outcome: str


class Topics(msgspec.Struct):
    topics: list[TopicInfo]


class Buckets(msgspec.Struct):
    buckets: list[Bucket]


_decode_results = msgspec.msgpack.Decoder(BatchResults[datetime]).decode
_decode_messages = msgspec.msgpack.Decoder(Page[Message]).decode


def read(kind: type[T]) -> Callable[[Answer], T]:
    return lambda answer: msgspec.json.decode(answer.body, type=kind)


def read_nothing(answer: Answer) -> None:
    if answer.status != 204:
        raise ValueError("a node answers 204")


def read_results(items: list[dict[str, Any]], answer: Answer) -> list[PutResult]:
    results = _decode_results(answer.body).results
    return [_result(item, result, answer.resent) for item, result in zip(items, results, strict=True)]


def _result(item: dict[str, Any], result: BatchResult[datetime], resent: bool) -> PutResult:
    if result.error is not None:
        return error_of(result.error, result.error.get("status", 500))
    if result.deliver_at is None:
        raise ValueError("neither a receipt nor an error")
    return Receipt(
        id=result.id, topic=item["topic"], deliver_at=result.deliver_at, key=item.get("key"),
        duplicate=result.duplicate, replaced=result.replaced, resent=resent,
    )  # fmt: skip


def read_messages(answer: Answer) -> list[Message]:
    return _decode_messages(answer.body).messages
