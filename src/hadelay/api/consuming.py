"""HTTP API types for receiving messages and settling their leases."""

from typing import Annotated, Any, Generic, Literal

from msgspec import UNSET, Meta, Struct, field

from hadelay.api.base import At, Document, Duration, Request

#: Order in which a receive from several topics takes messages.
Order = Literal["turns", "listed"]


class ReceiveQuery(Request):
    #: Whether a follower redirects the receive (307) to the leader; False: it relays the receive.
    redirect: bool = True


class Receive(Request):
    max: int | None = None
    wait: Duration | None = None
    lease: Duration | None = None
    consumer: str | None = None
    request_id: str | None = None
    #: Filter: only messages that have all these tags.
    tags: list[str] = field(default_factory=list)
    #: Filter: only messages that have at least one of these tags, in addition to all of `tags`.
    any_tags: list[str] = field(default_factory=list)
    #: Limit of messages of one group, in order, from topics with group_concurrency 1. The group hands out nothing else
    #: until all of them are settled.
    group_max: int = 1


class ReceiveTopics(Receive, kw_only=True):
    topics: list[str]
    #: turns: the topics take turns. listed: a topic's messages are handed out only while no earlier topic of the list
    #: has due messages.
    order: Order = "turns"


class Received(Struct, Generic[At], omit_defaults=True, kw_only=True):
    """A leased message in an answer. Times are cluster times. Not frozen: the HTTP layer moves the payload to the field
    that the client asked for."""

    id: str
    lease: str
    topic: str
    #: Payload in base64; with `Accept: application/msgpack` or `Accept-Body: text`, it is in `body` instead.
    body_base64: bytes | None = None
    body: Any = UNSET
    content_type: str
    key: str | None
    tags: list[str]
    meta: dict[str, str]
    deliver_at: At
    late_ms: int
    #: Number of this attempt to deliver the message, from 1.
    attempt: int
    #: Number of earlier attempts that do not count (nacks with `"count": false`); absent if 0.
    uncounted: int = 0
    #: W3C Trace Context of the span that published the message. Refer to it by a span link: the span may have ended.
    traceparent: str | None = None
    #: Name of the schedule that made the message, and planned time of the occurrence; None for other messages.
    schedule: str | None = None
    occurrence: At | None = None
    #: Name of the message's group (message group).
    group: str | None = None
    #: Key of the batch that the message joined.
    batch: str | None = None
    #: Id of the published message, for a message of a subscription.
    published_id: str | None = None
    #: Whether the message may have been handed out before.
    redelivered: bool
    lease_until: At
    lease_left_ms: int


class ReceivedMessages(Document, frozen=True):
    messages: list[Received[str]]


class Ack(Request):
    leases: list[str]
    #: Result of the handler, if `leases` has one lease: any JSON, at most 64 KiB, kept with the message.
    result: Any = UNSET
    #: Results of the handler for all leases, in the order of `leases`. The whole request has at most 512 KiB.
    results: Annotated[list[Any], Meta(extra_json_schema={"items": {}})] | None = None


class Nack(Request):
    leases: list[str]
    delay: Duration | None = None
    #: Reason for people, shown with a dead letter; at most 128 bytes.
    reason: str | None = None
    #: Whether the attempt counts as failed, for max_attempts and backoff. If False, the default of `delay` is 0.
    count: bool = True
    #: Whether the message becomes a dead letter at once, even if attempts are left. Not together with `delay` or
    #: `count`.
    dead: bool = False


class Extend(Request):
    leases: list[str]
    lease: Duration
    #: Progress for people, shown with the message until its lease ends; at most 128 bytes.
    progress: str | None = None


AckOutcome = Literal["acked", "already_acked", "lease_lost"]
NackOutcome = Literal["nacked", "already_acked", "lease_lost"]
ExtendOutcome = Literal["extended", "already_acked", "lease_lost"]


class Acked(Document, frozen=True):
    lease: str
    outcome: AckOutcome


class Nacked(Document, frozen=True):
    lease: str
    outcome: NackOutcome


class Extended(Document, frozen=True):
    lease: str
    outcome: ExtendOutcome


class AckResults(Document, frozen=True):
    results: list[Acked]


class NackResults(Document, frozen=True):
    results: list[Nacked]


class ExtendResults(Document, frozen=True):
    results: list[Extended]
