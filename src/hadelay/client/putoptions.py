"""Options of a publish as arguments of `put`, and as fields of `Put`. Made by `make docs` from the rows of
api/publishoptions.py: change those instead."""

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from msgspec import Struct

from hadelay.client.types import Body, Delay, When

__all__ = ["OnConflict", "Put", "PutOptions"]

OnConflict = Literal["keep", "replace", "reject"]


class PutOptions(TypedDict, total=False):
    """Options of `put`."""

    #: Time until the message is due: 250ms, 15m, 2h30m, 7d.
    delay: Delay | None
    #: Due time instead of a delay: 2026-11-20T18:00:00Z, with any offset, or Unix milliseconds.
    at: When | None
    #: Your name for the message within the topic, to find, cancel, reschedule or replace it.
    key: str | None
    #: Message group: the topic hands out at most group_concurrency messages of a group at once.
    group: str | None
    #: Key of an open batch that the message joins: the batch's callback waits for this message.
    batch: str | None
    #: If a message with this key is pending (scheduled, ready or leased): keep it (the default), and answer with that
    #: message and `duplicate`; replace it, unless it is leased, and answer with the new one and `replaced`; or reject
    #: the new one, and answer 409 with the id of the pending one.
    on_conflict: OnConflict | None
    #: With on_conflict replace: limit of the total delay since the first of the replaced messages.
    max_wait: Delay | None
    #: With a key: time, at most 7d, in which later publishes with this key and unique_for are dropped, even if this
    #: message is settled by then. Dropped publishes do not extend it.
    unique_for: Delay | None
    #: Tags that consumers can filter by, at most 16; commas separate them in a text.
    tags: Sequence[str] | None
    #: Time after which the message expires, counted from its due time.
    ttl: Delay | None
    #: Webhook URL for this message, if the topic allows one.
    callback: str | None
    #: Topic of the callback about this message's ack, if the topic allows one.
    on_success: str | None
    #: Topic of the callback about this message's death, if the topic allows one.
    on_failure: str | None
    #: Headers of the message's webhook calls, at most 2 KiB: NAME=VALUE.
    forward: Mapping[str, str] | None
    #: Your own fields, stored with the message: NAME=VALUE. Names in headers are in lower case.
    meta: Mapping[str, str] | None
    #: Content type, stored and given to the consumer. Default: by the type of the payload.
    content_type: str | None
    #: W3C traceparent of the span that publishes the message, given to the consumer. Default: the one of the request;
    #: the client sends OpenTelemetry's current span.
    traceparent: str | None
    #: Key that makes a repetition of this publish harmless. Default: a random key.
    idempotency_key: str | None


class Put(Struct, kw_only=True):
    """One message of `put_many`; the fields mean what the arguments of `put` mean."""

    topic: str
    body: Body = b""
    delay: Delay | None = None
    at: When | None = None
    key: str | None = None
    group: str | None = None
    batch: str | None = None
    on_conflict: OnConflict | None = None
    max_wait: Delay | None = None
    unique_for: Delay | None = None
    tags: Sequence[str] | None = None
    ttl: Delay | None = None
    callback: str | None = None
    on_success: str | None = None
    on_failure: str | None = None
    forward: Mapping[str, str] | None = None
    meta: Mapping[str, str] | None = None
    content_type: str | None = None
    traceparent: str | None = None
    idempotency_key: str | None = None
