"""What the client gives back: the documents of the API with datetimes, decoded straight from the wire. Unknown members
are ignored, and so are new words in place of known ones, so newer servers may add some."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal, TypedDict, TypeVar, overload

import msgspec
from msgspec import Struct, field

from hadelay.api import cluster, messages, publishing, topics
from hadelay.errors import HadelayError

T = TypeVar("T")

#: "15m", "2h30m", seconds, or a timedelta.
Delay = str | float | timedelta
#: An aware datetime, RFC 3339 text, or Unix milliseconds.
When = datetime | str | int
#: bytes go as they are, str as text/plain, anything else as JSON.
Body = Any

State = Literal["scheduled", "ready", "leased", "acked", "cancelled", "expired", "dead"]
#: What a publish does when the message of its key is still pending.
OnConflict = Literal["keep", "replace", "reject"]
AckOutcome = Literal["acked", "already_acked", "lease_lost"]
NackOutcome = Literal["nacked", "already_acked", "lease_lost"]
ExtendOutcome = Literal["extended", "already_acked", "lease_lost"]


class Put(Struct, kw_only=True):
    """One message of `put_many`; the fields mean what the arguments of `put` mean."""

    topic: str
    body: Body = b""
    delay: Delay | None = None
    at: When | None = None
    content_type: str | None = None
    meta: Mapping[str, str] | None = None
    key: str | None = None
    on_conflict: OnConflict | None = None
    max_wait: Delay | None = None
    tags: Sequence[str] | None = None
    ttl: Delay | None = None
    callback: str | None = None
    traceparent: str | None = None
    idempotency_key: str | None = None


class Receipt(publishing.Published[datetime], frozen=True):
    """The message is on disk at a majority."""

    #: The request was sent again, as the answer to an earlier try was lost: a duplicate may be of that try.
    resent: bool = False


class Rescheduled(messages.Rescheduled[datetime], frozen=True):
    """The id is the same as before."""


class Message(Struct, kw_only=True):
    """A leased message. It is handed out again unless it is acked, or its lease extended, before `lease_until`."""

    id: str
    lease: str
    topic: str
    body: bytes
    content_type: str = "application/octet-stream"
    key: str | None = None
    tags: list[str] = []
    meta: dict[str, str] = {}
    #: The span that published it, if it was traced: link to it.
    traceparent: str | None = None
    deliver_at: datetime
    late_ms: int
    #: 1 the first time.
    attempt: int
    #: It may have been handed out before.
    redelivered: bool
    lease_until: datetime
    lease_left_ms: int

    def text(self) -> str:
        return self.body.decode()

    @overload
    def json(self) -> Any: ...
    @overload
    def json(self, kind: type[T]) -> T: ...
    def json(self, kind: Any = Any) -> Any:
        """The body as JSON, validated as `kind` (any type msgspec knows: a dataclass, a Struct, list[int] …)."""
        return msgspec.json.decode(self.body, type=kind)


class HistoryEvent(messages.History[datetime], frozen=True):
    event: str  # type: ignore[assignment]


class MessageInfo(messages.Message[datetime], frozen=True, kw_only=True):
    """What is known of a message; `body` only when it was asked for."""

    history: list[HistoryEvent] = field(default_factory=list)  # type: ignore[assignment]


class Failure(messages.Failure[datetime], frozen=True):
    """An attempt that ended without an ack: nacked, or lease_expired."""

    event: str  # type: ignore[assignment]


class DeadLetter(MessageInfo, frozen=True, kw_only=True):
    """A message that was tried as often as its topic allows, and why the last 16 attempts failed."""

    died_at: datetime
    errors: list[Failure]


class Redriven(messages.RedriveResult, frozen=True):
    """`redriven`; `key_taken`: another message with its key is pending, so it stays dead; or what it is instead:
    scheduled, ready, leased, acked, cancelled, expired or not_found."""

    outcome: str  # type: ignore[assignment]


class Backoff(TypedDict, total=False):
    """Retry n waits min × factor^(n-1), at most max, less up to the part `jitter` of it."""

    min: Delay
    max: Delay
    factor: float
    jitter: float


class Webhook(TypedDict, total=False):
    """Where a topic's messages are pushed to. Secrets that are left out stay as they are."""

    url: str
    secret: str
    secrets: Sequence[str]
    timeout: Delay
    headers: Mapping[str, str]
    #: Messages may name a URL of their own (`callback`).
    allow_per_message: bool


class Alert(TypedDict, total=False):
    """Where deaths of a topic's messages are told."""

    url: str
    secret: str


class TopicSettings(TypedDict, total=False):
    """What `put_topic` takes. What is left out stays as it is; None takes a setting back."""

    #: How long a consumer holds a message when it does not say.
    lease: Delay | None
    #: Hand-outs before a message is a dead letter; 0: no limit. Topics made at feature level 3 or later: 84 attempts.
    max_attempts: int | None
    #: Waits before retry 1, 2, …, the last repeats; or an exponential one. Topics made at feature level 3 or later:
    #: 1 s doubling to 1 h, each up to 10 % longer, so that 84 attempts take 72 hours at least.
    backoff: Sequence[Delay] | Backoff | None
    #: "keep", or the topic where messages go after max_attempts.
    dead_letter: str | None
    dead_retention: Delay | None
    #: Messages handed out, published, and handed out of what fell due in an outage, per second.
    rate: float | None
    publish_rate: float | None
    catch_up_rate: float | None
    #: Unacked at once.
    concurrency: int | None
    #: Pending messages, and bytes of their records.
    max_messages: int | None
    max_bytes: int | None
    #: Messages expire this long after they were due.
    ttl: Delay | None
    #: How long a settled message can still be asked for.
    retention: Delay | None
    webhook: Webhook | None
    alert: Alert | None
    paused: bool | None
    dispatch_sync: Literal["commit", "interval"] | None
    #: The feature level whose defaults hold where nothing is set: 3, or 1 for topics from before; None: the newest.
    defaults: int | None


class Lateness(topics.Lateness, frozen=True):
    #: None: the node is older than this client.
    max_ms: float | None = None  # type: ignore[assignment]


class TopicInfo(topics.Topic[datetime], frozen=True, kw_only=True):
    """Counts, and the settings that were set: durations as text, secrets masked. None: not set."""

    oldest_ready_age_ms: int | None = None
    bytes: int = 0
    lateness: Lateness | None = None
    defaults: int = 1
    backoff: list[str] | dict[str, Any] | None = None  # type: ignore[assignment]
    webhook: dict[str, Any] | None = None  # type: ignore[assignment]
    alert: dict[str, Any] | None = None  # type: ignore[assignment]
    paused: bool = False
    dispatch_sync: str | None = None  # type: ignore[assignment]


class Bucket(topics.Bucket[datetime], frozen=True, rename={"start": "from"}):
    """Messages that are due from `start` on, until the next step."""


class Member(cluster.Member, frozen=True):
    feature_level: int = 1
    clock_skew_ms: float | None = None


class ClusterInfo(cluster.Cluster[datetime], frozen=True, kw_only=True):
    feature_level: int = 1
    members: list[Member]  # type: ignore[assignment]


class HoursInfo(cluster.Hours, frozen=True):
    """One node's files, all as of one applied index."""


class Names(cluster.Names, frozen=True):
    reasons: dict[str, int] = field(default_factory=dict)


#: Lease tokens, or messages that have them.
Leases = str | Message | Iterable[str | Message]
#: Per item of put_many: a receipt, or why it was refused.
PutResult = Receipt | HadelayError
