"""Publishing one message or many."""

from __future__ import annotations

from typing import Any, Generic, Literal

from msgspec import UNSET, UnsetType, field

from hadelay.api.base import At, Document, Duration, Instant, Request, null


class PublishQuery(Request):
    delay: Duration | None = None
    deliver_at: Instant | None = None
    key: str | None = None
    on_conflict: Literal["keep", "replace", "reject"] | None = None
    max_wait: Duration | None = None
    #: Separated by commas.
    tags: str | None = None
    ttl: Duration | None = None
    callback: str | None = None


class Published(Document, Generic[At], frozen=True):
    """The message is on disk at a majority."""

    id: str
    topic: str
    #: Resolved against cluster time.
    deliver_at: At
    key: str | None = field(default_factory=null)
    #: It was published before, or its key's message is still pending: `id` and `deliver_at` are that one's.
    duplicate: bool = False
    #: The id of the message that this one took the place of (on_conflict="replace").
    replaced: str | None = None


class BatchItem(Request, gc=False):
    """One message of a batch. `body` (text is text/plain, other JSON values application/json) or `body_base64`."""

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
    tags: list[str] | None = None
    ttl: str | int | float | None = None
    callback: str | None = None
    #: W3C Trace Context; else the request's.
    traceparent: str | None = None


class BatchResult(Document, Generic[At], frozen=True):
    """id and deliver_at, or error."""

    id: str = ""
    deliver_at: At | None = None
    duplicate: bool = False
    replaced: str | None = None
    error: dict[str, Any] | None = None


class BatchResults(Document, Generic[At], frozen=True):
    results: list[BatchResult[At]]
