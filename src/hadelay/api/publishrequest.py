"""Requests that publish messages. Made by `make docs` from the rows of api/publishoptions.py: change those
instead."""

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from hadelay.api.base import Duration, Instant, Request


class PublishQuery(Request):
    """Options of a single publish; headers may have them, too."""

    #: Time until the message is due: 250ms, 15m, 2h30m, 7d.
    delay: Duration | None = None
    #: Due time instead of a delay: 2026-11-20T18:00:00Z, with any offset, or Unix milliseconds.
    deliver_at: Instant | None = None
    #: Your name for the message within the topic, to find, cancel, reschedule or replace it.
    key: str | None = None
    #: Message group: the topic hands out at most group_concurrency messages of a group at once.
    group: str | None = None
    #: Key of an open batch that the message joins: the batch's callback waits for this message.
    batch: str | None = None
    #: If a message with this key is pending (scheduled, ready or leased): keep it (the default), and answer with that
    #: message and `duplicate`; replace it, unless it is leased, and answer with the new one and `replaced`; or reject
    #: the new one, and answer 409 with the id of the pending one.
    on_conflict: Literal["keep", "replace", "reject"] | None = None
    #: With on_conflict replace: limit of the total delay since the first of the replaced messages.
    max_wait: Duration | None = None
    #: With a key: time, at most 7d, in which later publishes with this key and unique_for are dropped, even if this
    #: message is settled by then. Dropped publishes do not extend it.
    unique_for: Duration | None = None
    #: Tags that consumers can filter by, at most 16; commas separate them in a text.
    tags: str | None = None
    #: Time after which the message expires, counted from its due time.
    ttl: Duration | None = None
    #: Webhook URL for this message, if the topic allows one.
    callback: str | None = None
    #: Topic of the callback about this message's ack, if the topic allows one.
    on_success: str | None = None
    #: Topic of the callback about this message's death, if the topic allows one.
    on_failure: str | None = None


class BatchItem(Request, gc=False):
    """One message of a batch, with `body` (text: text/plain, other JSON: application/json) or `body_base64`."""

    topic: str
    body: Any = UNSET
    body_base64: str | UnsetType = UNSET
    #: Content type, stored and given to the consumer. Default: by the type of the payload.
    content_type: str | None = None
    #: Time until the message is due: 250ms, 15m, 2h30m, 7d.
    delay: str | int | float | None = None
    #: Due time instead of a delay: 2026-11-20T18:00:00Z, with any offset, or Unix milliseconds.
    deliver_at: str | int | float | None = None
    #: Your name for the message within the topic, to find, cancel, reschedule or replace it.
    key: str | None = None
    #: Message group: the topic hands out at most group_concurrency messages of a group at once.
    group: str | None = None
    #: Key of an open batch that the message joins: the batch's callback waits for this message.
    batch: str | None = None
    #: If a message with this key is pending (scheduled, ready or leased): keep it (the default), and answer with that
    #: message and `duplicate`; replace it, unless it is leased, and answer with the new one and `replaced`; or reject
    #: the new one, and answer 409 with the id of the pending one.
    on_conflict: str | None = None
    #: With on_conflict replace: limit of the total delay since the first of the replaced messages.
    max_wait: str | int | float | None = None
    #: With a key: time, at most 7d, in which later publishes with this key and unique_for are dropped, even if this
    #: message is settled by then. Dropped publishes do not extend it.
    unique_for: str | int | float | None = None
    #: Tags that consumers can filter by, at most 16; commas separate them in a text.
    tags: list[str] | None = None
    #: Time after which the message expires, counted from its due time.
    ttl: str | int | float | None = None
    #: Webhook URL for this message, if the topic allows one.
    callback: str | None = None
    #: Topic of the callback about this message's ack, if the topic allows one.
    on_success: str | None = None
    #: Topic of the callback about this message's death, if the topic allows one.
    on_failure: str | None = None
    #: Headers of the message's webhook calls, at most 2 KiB: NAME=VALUE.
    forward: dict[str, str] | None = None
    #: Your own fields, stored with the message: NAME=VALUE. Names in headers are in lower case.
    meta: dict[str, str] | None = None
    #: W3C traceparent of the span that publishes the message, given to the consumer. Default: the one of the request;
    #: the client sends OpenTelemetry's current span.
    traceparent: str | None = None
    #: Key that makes a repetition of this publish harmless. Default: a random key.
    idempotency_key: str | None = None


class UsualItem(Request, gc=False):
    """A batch item without options that few messages have: decoding and publishing it is faster."""

    topic: str
    body: bytes
    delay: str | int | float | None = None
    deliver_at: str | int | float | None = None
    key: str | None = None
    group: str | None = None
