"""Answers to publishes of one message or many; the requests are in publishrequest.py."""

from typing import Any, Generic

from msgspec import field

from hadelay.api.base import At, Document, null


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


class BatchResult(Document, Generic[At], frozen=True):
    """Result of one batch item: either `id` and `deliver_at`, or `error`."""

    id: str = ""
    deliver_at: At | None = None
    duplicate: bool = False
    replaced: str | None = None
    error: dict[str, Any] | None = None


class BatchResults(Document, Generic[At], frozen=True):
    results: list[BatchResult[At]]
