"""Receiving messages, and settling their leases."""

from __future__ import annotations

from typing import Any, Generic, Literal

from msgspec import UNSET, Struct, field

from hadelay.api.base import At, Document, Duration, Request


class ReceiveQuery(Request):
    #: false: a follower relays the poll instead of answering 307.
    redirect: bool = True


class Receive(Request):
    max: int | None = None
    wait: Duration | None = None
    lease: Duration | None = None
    consumer: str | None = None
    request_id: str | None = None
    #: Only messages that have all of these.
    tags: list[str] = field(default_factory=list)
    #: Only messages that have one of these; besides all of `tags`.
    any_tags: list[str] = field(default_factory=list)


class ReceiveTopics(Receive, kw_only=True):
    topics: list[str]


class Received(Struct, Generic[At], omit_defaults=True, kw_only=True):
    """deliver_at, late_ms and the lease are in cluster time. Not frozen: http moves the payload where it is wanted."""

    id: str
    lease: str
    topic: str
    #: The payload; as `body` with `Accept: application/msgpack` (bytes), or with `Accept-Body: text` if it is text.
    body_base64: bytes | None = None
    body: Any = UNSET
    content_type: str
    key: str | None
    tags: list[str]
    meta: dict[str, str]
    deliver_at: At
    late_ms: int
    #: 1 the first time.
    attempt: int
    #: The span that published it (W3C Trace Context): link to it, for it may have ended long ago.
    traceparent: str | None = None
    #: It may have been handed out before.
    redelivered: bool
    lease_until: At
    lease_left_ms: int


class ReceivedMessages(Document, frozen=True):
    messages: list[Received[str]]


class Ack(Request):
    leases: list[str]


class Nack(Request):
    leases: list[str]
    delay: Duration | None = None
    #: Why, for people: told with a dead letter. At most 128 bytes.
    reason: str | None = None
    #: False: nobody tried, so the attempt counts neither for max_attempts nor for the backoff. `delay` is then 0 unless
    #: given.
    count: bool = True


class Extend(Request):
    leases: list[str]
    lease: Duration


class Acked(Document, frozen=True):
    lease: str
    outcome: Literal["acked", "already_acked", "lease_lost"]


class Nacked(Document, frozen=True):
    lease: str
    outcome: Literal["nacked", "already_acked", "lease_lost"]


class Extended(Document, frozen=True):
    lease: str
    outcome: Literal["extended", "already_acked", "lease_lost"]


class AckResults(Document, frozen=True):
    results: list[Acked]


class NackResults(Document, frozen=True):
    results: list[Nacked]


class ExtendResults(Document, frozen=True):
    results: list[Extended]
