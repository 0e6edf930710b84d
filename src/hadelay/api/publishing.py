"""HTTP API types for publishing one message or many."""

from typing import Any, Generic, Literal

from msgspec import UNSET, UnsetType, field

from hadelay.api.base import At, Document, Duration, Instant, Request, null


class PublishQuery(Request):
    delay: Duration | None = None
    deliver_at: Instant | None = None
    key: str | None = None
    on_conflict: Literal["keep", "replace", "reject"] | None = None
    max_wait: Duration | None = None
    #: Only with a key: the publish is dropped if the key was published with `unique_for` within that publish's period;
    #: 7d at most.
    unique_for: Duration | None = None
    #: Tags of the message, separated by commas.
    tags: str | None = None
    ttl: Duration | None = None
    callback: str | None = None
    #: Message group: the topic's group_concurrency limits how many messages of a group are handed out at once.
    group: str | None = None
    #: Topics of the message's callbacks, where the topic's webhook has allow_per_message.
    on_success: str | None = None
    on_failure: str | None = None


class Published(Document, Generic[At], frozen=True):
    """Answer to a publish: the message is on disk at a majority of the nodes."""

    id: str
    topic: str
    #: Due time of the message, in cluster time.
    deliver_at: At
    key: str | None = field(default_factory=null)
    #: True if no message was stored: the publish is a repetition, or the message `id` has the key and is pending, or
    #: within its `unique_for`.
    duplicate: bool = False
    #: Id of the message that this message replaced (on_conflict="replace").
    replaced: str | None = None


class BatchItem(Request, gc=False):
    """One message of a batch, with `body` (text: text/plain, other JSON: application/json) or `body_base64`."""

    topic: str
    body: Any = UNSET
    body_base64: str | UnsetType = UNSET
    content_type: str | None = None
    delay: str | int | float | None = None
    deliver_at: str | int | float | None = None
    meta: dict[str, str] | None = None
    idempotency_key: str | None = None
    key: str | None = None
    on_conflict: str | None = None
    max_wait: str | int | float | None = None
    unique_for: str | int | float | None = None
    tags: list[str] | None = None
    ttl: str | int | float | None = None
    callback: str | None = None
    group: str | None = None
    #: Header fields of the message's webhook calls, at most 2 KiB.
    forward: dict[str, str] | None = None
    on_success: str | None = None
    on_failure: str | None = None
    #: W3C traceparent of the message; None: the traceparent of the request.
    traceparent: str | None = None


class BatchResult(Document, Generic[At], frozen=True):
    """Result of one batch item: either `id` and `deliver_at`, or `error`."""

    id: str = ""
    deliver_at: At | None = None
    duplicate: bool = False
    replaced: str | None = None
    error: dict[str, Any] | None = None


class BatchResults(Document, Generic[At], frozen=True):
    results: list[BatchResult[At]]
