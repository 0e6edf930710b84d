"""What the client gives back. Decoded straight from the wire; unknown members are ignored, so newer servers may add."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal, TypedDict, TypeVar, overload

import msgspec
from msgspec import Struct, field

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


class Receipt(Struct, frozen=True):
    """The message is on disk at a majority."""

    id: str
    #: Resolved against cluster time.
    deliver_at: datetime
    topic: str = ""
    #: It was published before, or its key's message is still pending: `id` and `deliver_at` are that one's.
    duplicate: bool = False
    key: str | None = None
    #: The id of the message that this one took the place of (on_conflict="replace").
    replaced: str | None = None
    #: The request was sent again, as the answer to an earlier try was lost: a duplicate may be of that try.
    resent: bool = False


class Rescheduled(Struct, frozen=True):
    """The id is the same as before."""

    id: str
    deliver_at: datetime


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


class HistoryEvent(Struct, frozen=True):
    event: str
    at: datetime
    attempt: int
    consumer: str | None = None
    node: str | None = None
    #: Why the attempt failed, if somebody said so.
    reason: str | None = None
    #: The hours it left and went to, when it was filed anew.
    from_hour: str | None = field(default=None, name="from")
    to_hour: str | None = field(default=None, name="to")
    #: Of leased: when this attempt was due.
    due_at: datetime | None = None


class MessageInfo(Struct, frozen=True, kw_only=True):
    """What is known of a message; `state` is scheduled, ready, leased, acked, cancelled, expired or dead."""

    id: str
    topic: str
    state: State
    deliver_at: datetime
    published_at: datetime
    attempt: int
    content_type: str
    size: int
    key: str | None = None
    tags: list[str] = field(default_factory=list)
    meta: dict[str, str] = field(default_factory=dict)
    traceparent: str | None = None
    history: list[HistoryEvent] = field(default_factory=list)
    #: Only when it was asked for.
    body: bytes | None = field(default=None, name="body_base64")


class Failure(Struct, frozen=True):
    """An attempt that ended without an ack."""

    #: nacked, or lease_expired.
    event: str
    at: datetime
    attempt: int
    reason: str | None = None


class DeadLetter(MessageInfo, frozen=True, kw_only=True):
    """A message that was tried as often as its topic allows, and why the last 16 attempts failed."""

    died_at: datetime
    errors: list[Failure]


class Redriven(Struct, frozen=True):
    """`redriven`; `key_taken`: another message with its key is pending, so it stays dead; or what it is instead:
    scheduled, ready, leased, acked, cancelled, expired or not_found."""

    id: str
    outcome: str


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


class Lateness(Struct, frozen=True):
    """How late messages were handed out, over the last five minutes of this leader."""

    count: int
    p50_ms: float
    p99_ms: float
    #: None: the node is older than this client.
    max_ms: float | None = None


class ConsumerInfo(Struct, frozen=True):
    name: str
    #: When it asked for messages last.
    asked_at: datetime


class TopicInfo(Struct, frozen=True, kw_only=True):
    """Counts, and the settings that were set: durations as text, secrets masked. None: not set."""

    topic: str
    scheduled: int
    ready: int
    leased: int
    dead: int
    oldest_ready_age_ms: int | None = None
    #: Of the records of what is pending.
    bytes: int = 0
    #: None: nothing was handed out lately.
    lateness: Lateness | None = None
    #: The feature level whose defaults hold for what is not set.
    defaults: int = 1
    lease: str | None = None
    max_attempts: int | None = None
    backoff: list[str] | dict[str, Any] | None = None
    dead_letter: str | None = None
    dead_retention: str | None = None
    rate: float | None = None
    publish_rate: float | None = None
    catch_up_rate: float | None = None
    concurrency: int | None = None
    max_messages: int | None = None
    max_bytes: int | None = None
    ttl: str | None = None
    retention: str | None = None
    webhook: dict[str, Any] | None = None
    alert: dict[str, Any] | None = None
    paused: bool = False
    paused_reason: str | None = None
    dispatch_sync: str | None = None
    #: Of `topic()`: who asked for its messages since the present leader took over, the latest first. None: not known.
    consumers: list[ConsumerInfo] | None = None


class Bucket(Struct, frozen=True, rename={"start": "from"}):
    start: datetime
    count: int


class Cursor(Struct, frozen=True):
    """The replicated dispatch cursor: hour tick, second tick, localIndex."""

    hour: str
    second: int
    local_index: int
    sync: str


class Member(Struct, frozen=True, kw_only=True):
    name: str
    http: str
    raft: str
    role: str
    applied_index: str
    lag: int
    version: str
    feature_level: int = 1
    clock_skew_ms: float | None = None


class ClusterInfo(Struct, frozen=True, kw_only=True):
    cluster_id: str
    feature_level: int = 1
    leader: str | None
    term: int
    applied_index: str
    time: datetime
    dispatch: Cursor
    members: list[Member]


class HourFile(Struct, frozen=True):
    entries: int
    bytes: str
    crc32c: str


class HourInfo(Struct, frozen=True, kw_only=True):
    hour: str
    sealed: bool
    mapped: bool
    log: HourFile
    idx: HourFile
    dsp: HourFile


class HoursInfo(Struct, frozen=True):
    """One node's files, all as of one applied index."""

    applied_index: str
    hours: list[HourInfo]


class Names(Struct, frozen=True):
    topics: dict[str, int]
    consumers: dict[str, int]
    nodes: dict[str, int]
    #: Why attempts failed.
    reasons: dict[str, int] = field(default_factory=dict)


class Check(Struct, frozen=True):
    name: str
    ok: bool
    detail: str = ""


class Health(Struct, frozen=True):
    status: str
    checks: list[Check] = field(default_factory=list)


#: Per item of put_many: a receipt, or why it was refused.
PutResult = Receipt | HadelayError
