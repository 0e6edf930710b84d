"""Receiving messages, and settling their leases."""

from typing import Any, Generic, Literal

from msgspec import UNSET, Struct, field

from hadelay.api.base import At, Document, Duration, Request


class ReceiveQuery(Request):
    #: False: a follower relays the poll instead of answering 307.
    redirect: bool = True


class Receive(Request):
    max: int | None = None
    wait: Duration | None = None
    lease: Duration | None = None
    consumer: str | None = None
    request_id: str | None = None
    #: Only messages that have all these tags.
    tags: list[str] = field(default_factory=list)
    #: Only messages that also have one of these tags.
    any_tags: list[str] = field(default_factory=list)


class ReceiveTopics(Receive, kw_only=True):
    topics: list[str]


class Received(Struct, Generic[At], omit_defaults=True, kw_only=True):
    """Times are cluster times. Not frozen: http moves the payload to the member that the client wants."""

    id: str
    lease: str
    topic: str
    #: The payload; instead `body` with `Accept: application/msgpack` (bytes), and with `Accept-Body: text` for text.
    body_base64: bytes | None = None
    body: Any = UNSET
    content_type: str
    key: str | None
    tags: list[str]
    meta: dict[str, str]
    deliver_at: At
    late_ms: int
    #: From 1.
    attempt: int
    #: Span of the publish (W3C Trace Context); link to it, as it may have ended long ago.
    traceparent: str | None = None
    #: The message may have been handed out before.
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
    #: Reason for people, shown with a dead letter; at most 128 bytes.
    reason: str | None = None
    #: False: the attempt counts neither for max_attempts nor for the backoff, and `delay` is 0 unless given.
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
