"""Messages and dead letters: what is known of them, and what changes them."""

from __future__ import annotations

from typing import Generic, Literal

from msgspec import field

from hadelay.api.base import At, Document, Instant, Request


class ReadQuery(Request):
    stale: bool = False


class MessageQuery(Request):
    body: bool = False
    stale: bool = False


class History(Document, Generic[At], frozen=True):
    event: Literal[
        "leased", "acked", "nacked", "lease_expired", "ttl_expired", "cancelled", "moved", "dead", "redriven"
    ]
    at: At
    attempt: int
    consumer: str | None
    node: str | None
    #: Why the attempt failed, if somebody said so.
    reason: str | None = None
    #: The hours that the message left and went to, when it was filed anew.
    from_hour: str | None = field(default=None, name="from")
    to_hour: str | None = field(default=None, name="to")
    #: Of leased: when this attempt was due. The message's deliver_at is that of its latest attempt.
    due_at: At | None = None


class Message(Document, Generic[At], frozen=True):
    id: str
    topic: str
    key: str | None
    state: Literal["scheduled", "ready", "leased", "acked", "cancelled", "expired", "dead"]
    deliver_at: At
    published_at: At
    attempt: int
    tags: list[str]
    meta: dict[str, str]
    content_type: str
    size: int
    #: The span that published the message.
    traceparent: str | None = None
    #: Not in lists.
    history: list[History[At]] | None = None
    body: bytes | None = field(default=None, name="body_base64")


class ListQuery(Request, rename={"from_": "from"}):
    #: scheduled, ready, leased, acked, cancelled, expired, dead, separated by commas; pending is the first three, and
    #: all is all.
    state: str = "pending"
    #: Due from here on, and before `to`.
    from_: Instant | None = None
    to: Instant | None = None
    #: Separated by commas: messages that have all of them.
    tag: str | None = None
    limit: int = 100
    #: From the page before.
    cursor: str | None = None
    stale: bool = False


class Messages(Document, frozen=True):
    """In due order. A page may be short while there is more: go on until `cursor` is null."""

    messages: list[Message[str]]
    cursor: str | None


class Outcome(Document, frozen=True):
    outcome: Literal["cancelled"]


class Reschedule(Request):
    """One of the two."""

    delay: str | int | float | None = None
    deliver_at: str | int | float | None = None


class Rescheduled(Document, Generic[At], frozen=True):
    """The id is the same as before."""

    id: str
    deliver_at: At


# ---- dead letters


class DeadQuery(Request):
    limit: int = 100
    cursor: str | None = None
    body: bool = False
    stale: bool = False


class Failure(Document, Generic[At], frozen=True):
    """An attempt that ended without an ack."""

    event: Literal["nacked", "lease_expired"]
    at: At
    attempt: int
    reason: str | None


class DeadLetter(Document, Generic[At], kw_only=True, frozen=True):
    id: str
    topic: str
    key: str | None
    state: Literal["dead"] = field(default_factory=lambda: "dead")
    deliver_at: At
    published_at: At
    died_at: At
    attempt: int
    tags: list[str]
    meta: dict[str, str]
    content_type: str
    size: int
    #: The last 16, the first of them first.
    errors: list[Failure[At]]
    body: bytes | None = field(default=None, name="body_base64")


class DeadLetters(Document, frozen=True):
    messages: list[DeadLetter[str]]
    cursor: str | None


class Redrive(Request):
    """Either ids, or all: those there are now, `rate` messages per second."""

    ids: list[str] | None = None
    all: bool = False
    rate: float | None = None


class RedriveResult(Document, frozen=True):
    id: str
    outcome: Literal[
        "redriven", "key_taken", "scheduled", "ready", "leased", "acked", "cancelled", "expired", "not_found"
    ]


class Redriven(Document, frozen=True):
    """Of ids: an outcome each. Of all: how many will be redriven."""

    results: list[RedriveResult] | None = None
    redriving: int | None = None


class Purge(Request):
    states: list[Literal["scheduled", "ready", "dead"]]


class Purged(Document, frozen=True):
    topic: str
    states: list[Literal["scheduled", "ready", "dead"]]
