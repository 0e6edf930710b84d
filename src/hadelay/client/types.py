"""API documents that the client returns, with datetimes. Unknown fields are ignored, and enumerations are plain text,
so that newer servers may add fields and values."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal, TypedDict, TypeVar, overload

import msgspec
from msgspec import Struct, field

from hadelay.api import cluster, jobs, messages, publishing, schedules, topics
from hadelay.errors import HadelayError

__all__ = [
    "AckOutcome", "Alert", "Backoff", "Bucket", "ClusterInfo", "DeadLetter", "Delay", "ExtendOutcome", "Failure",
    "Group", "HoursInfo", "JobAction", "JobCount", "JobInfo", "JobSelection", "Member", "Message", "MessageInfo",
    "NackOutcome", "Occurrence", "OnConflict", "Previewed", "Put", "PutResult", "Receipt", "Redriven", "Rescheduled",
    "ScheduleInfo", "ScheduleSettings", "State", "TopicInfo", "TopicSettings", "Triggered", "Webhook", "When",
]  # fmt: skip

T = TypeVar("T")

#: Type of durations: "15m", "2h30m", seconds, or a timedelta.
Delay = str | float | timedelta
#: Type of times: an aware datetime, RFC 3339 text, or Unix milliseconds.
When = datetime | str | int
#: Type of payloads: bytes are sent unchanged, str as text/plain, other values as JSON.
Body = Any

JobAction = Literal["cancel", "reschedule", "deliver_now", "redrive", "delete_dead"]
State = Literal["scheduled", "ready", "blocked", "leased", "acked", "cancelled", "expired", "dead"]
#: Values of `on_conflict`: effect of a publish if a pending message has the same key.
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
    unique_for: Delay | None = None
    tags: Sequence[str] | None = None
    ttl: Delay | None = None
    callback: str | None = None
    group: str | None = None
    forward: Mapping[str, str] | None = None
    on_success: str | None = None
    on_failure: str | None = None
    traceparent: str | None = None
    idempotency_key: str | None = None


class Receipt(publishing.Published[datetime], frozen=True):
    """Result of a publish: the message is on disk at a majority of the nodes."""

    #: Whether the request was repeated because an answer was lost: `duplicate` may then come from an earlier try.
    resent: bool = False


class Rescheduled(messages.Rescheduled[datetime], frozen=True):
    """Result of a reschedule; the message keeps its id."""


class Message(Struct, kw_only=True):
    """A leased message, which is handed out again unless acked or extended before `lease_until`."""

    id: str
    lease: str
    topic: str
    body: bytes
    content_type: str = "application/octet-stream"
    key: str | None = None
    tags: list[str] = []
    meta: dict[str, str] = {}
    #: W3C traceparent of the span that published the message; None if the publish was not traced.
    traceparent: str | None = None
    #: Name of the schedule that made the message, and planned time of the occurrence; None for other messages.
    schedule: str | None = None
    occurrence: datetime | None = None
    #: Message group.
    group: str | None = None
    deliver_at: datetime
    late_ms: int
    #: Number of this attempt to deliver the message, from 1.
    attempt: int
    #: Number of earlier attempts that do not count: snoozes and give-backs. `max_attempts` goes by the difference.
    uncounted: int = 0
    #: Whether the message may have been handed out before.
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
        """The body as JSON, validated as `kind`: any type of msgspec, such as a dataclass, a Struct or list[int]."""
        return msgspec.json.decode(self.body, type=kind)


class HistoryEvent(messages.History[datetime], frozen=True):
    event: str  # type: ignore[assignment]


class MessageInfo(messages.Message[datetime], frozen=True, kw_only=True):
    """State and history of a message; `body` only if requested."""

    history: list[HistoryEvent] = field(default_factory=list)  # type: ignore[assignment]


class Failure(messages.Failure[datetime], frozen=True):
    """An attempt that ended without an ack: nacked, or lease_expired."""

    event: str  # type: ignore[assignment]


class DeadLetter(MessageInfo, frozen=True, kw_only=True):
    """A message that failed as often as its topic allows, with the errors of its last 16 attempts."""

    died_at: datetime
    errors: list[Failure]


class Redriven(messages.RedriveResult, frozen=True):
    """Result for one dead letter. outcome: `redriven`; `key_taken`, if another message with its key is pending; or the
    state of a message that is no dead letter: scheduled, ready, blocked, leased, acked, cancelled, expired or
    not_found."""

    outcome: str  # type: ignore[assignment]


class Backoff(TypedDict, total=False):
    """Retry n waits min × factor^(n-1), at most max, changed by a random part of up to `jitter`."""

    min: Delay
    max: Delay
    factor: float
    jitter: float


class Webhook(TypedDict, total=False):
    """URL that a topic's messages are pushed to, with options. Omitted secrets are unchanged."""

    url: str
    secret: str
    secrets: Sequence[str]
    timeout: Delay
    headers: Mapping[str, str]
    #: Whether messages may name a webhook URL of their own (`callback`).
    allow_per_message: bool
    #: HTTP method of the calls; GET and DELETE send no body.
    method: Literal["POST", "PUT", "PATCH", "GET", "DELETE"]


class Alert(TypedDict, total=False):
    """URL to notify of a topic's new dead letters."""

    url: str
    secret: str


class TopicSettings(TypedDict, total=False):
    """Settings of `put_topic`. Omitted settings are unchanged; None resets a setting."""

    #: Default length of the topic's leases.
    lease: Delay | None
    #: Attempts before a message is a dead letter; 0: no limit. Default of topics of feature level 3 or later: 84.
    max_attempts: int | None
    #: Waits before retry 1, 2, …, of which the last repeats; or exponential. Default of topics of feature level 3 or
    #: later: 1 s doubling to 1 h, each up to 10 % longer, so that 84 attempts take at least 72 hours.
    backoff: Sequence[Delay] | Backoff | None
    #: Destination of dead letters: "keep" (their own topic), or the name of another topic.
    dead_letter: str | None
    dead_retention: Delay | None
    #: Limits per second: hand-outs, publishes, and hand-outs of messages that fell due in an outage.
    rate: float | None
    publish_rate: float | None
    catch_up_rate: float | None
    #: Limit of messages that are leased at the same time.
    concurrency: int | None
    #: Limits of a topic's pending messages, and of the bytes of their records.
    max_messages: int | None
    max_bytes: int | None
    #: Time from the due time until a message expires.
    ttl: Delay | None
    #: Time for which settled messages can be read.
    retention: Delay | None
    webhook: Webhook | None
    alert: Alert | None
    #: Limit of messages of one group that are handed out at once, in due order: 1 to 32.
    group_concurrency: int | None
    paused: bool | None
    dispatch_sync: Literal["commit", "interval"] | None
    #: Feature level of the defaults of unset settings: 3, or 1 for older topics; None: the newest.
    defaults: int | None
    #: False: messages that a subscription gets are not in the topic's own queue. Not for subscriptions.
    own_queue: bool | None
    #: Tag filter of a subscription: messages with all `tags`, and with one of `any_tags` if there are any.
    tags: Sequence[str] | None
    any_tags: Sequence[str] | None
    #: What a subscription at its max_messages or max_bytes does: "refuse" publishes, or "drop" its copies.
    on_full: Literal["refuse", "drop"] | None
    #: Time without use, 1 min or more, after which the topic is deleted. Not for subscriptions.
    expires_after: Delay | None
    #: Topics of callbacks: messages about acked messages, and about messages that become dead letters.
    on_success: str | None
    on_failure: str | None
    #: Limit per second of messages of one group that are handed out, evenly spaced: 0.01 to 1000.
    group_rate: float | None


class Lateness(topics.Lateness, frozen=True):
    #: Maximum lateness in ms; None: the node is too old to send it.
    max_ms: float | None = None  # type: ignore[assignment]


class TopicInfo(topics.Topic[datetime], frozen=True, kw_only=True):
    """A topic: counts, and settings (durations as text, secrets masked, None if unset)."""

    oldest_ready_age_ms: int | None = None
    bytes: int = 0
    lateness: Lateness | None = None
    defaults: int = 1
    backoff: list[str] | dict[str, Any] | None = None  # type: ignore[assignment]
    webhook: dict[str, Any] | None = None  # type: ignore[assignment]
    alert: dict[str, Any] | None = None  # type: ignore[assignment]
    paused: bool = False
    dispatch_sync: str | None = None  # type: ignore[assignment]


class JobFilter(jobs.JobFilterOut[datetime], frozen=True):
    """Messages that a job changes."""


class JobInfo(jobs.Job[datetime], frozen=True, kw_only=True):
    """A bulk job: what it changes, and how far it is. Times are datetimes, durations text."""

    action: str  # type: ignore[assignment]
    filter: JobFilter
    state: str  # type: ignore[assignment]

    @property
    def ended(self) -> bool:
        return self.ended_at is not None


class JobCount(jobs.JobCount[datetime], frozen=True):
    """Number of messages that a job would change."""


class JobSelection(TypedDict, total=False):
    """Messages that a bulk job changes (all given conditions hold), and what "reschedule" makes of their due times."""

    #: Messages with all of these tags.
    tags: Sequence[str]
    #: Messages whose client key begins with this text.
    key_prefix: str
    #: Messages of this group.
    group: str
    #: Messages that this schedule made.
    schedule: str
    #: Messages with these ids; at most 200.
    ids: Sequence[str]
    #: For "redrive" and "delete_dead": letters whose last error is this text; a number in it stands for any number.
    error: str
    #: Messages due at `start` or later, and before `end`; for "redrive" and "delete_dead", times of death.
    start: When | None
    end: When | None
    #: One of these for "reschedule". shift: move of each due time, "1d" or "-90m".
    shift: Delay | None
    #: New due time of all.
    at: When | None
    #: New due time of all, counted from the beginning of the job.
    delay: Delay | None


class ScheduleSettings(TypedDict, total=False):
    """Settings of `put_schedule`: exactly one of cron, every and at. Omitted settings have their defaults."""

    #: Five fields (minute hour day month weekday), six with seconds in front, or @daily, @hourly, …; in `timezone`.
    cron: str | None
    #: Interval of 1 s or more, counted from `start`, else from 1970-01-01T00:00:00Z.
    every: Delay | None
    at: Sequence[When] | None
    #: IANA time zone, such as Europe/Vienna.
    timezone: str
    start: When | None
    end: When | None
    max_occurrences: int | None
    #: Maximum jitter: each message is due later than its occurrence by up to this.
    jitter: Delay | None
    #: Which of the occurrences missed in an outage are published afterwards: the last one, none, or all.
    catch_up: Literal["one", "none", "all"]
    catch_up_window: Delay | None
    #: Whether an occurrence is published while the schedule's previous message is pending.
    overlap: Literal["allow", "skip", "wait"]
    #: Whether to pause the schedule; None: as before, and a new schedule is active.
    paused: bool | None
    content_type: str | None
    tags: Sequence[str]
    meta: Mapping[str, str]
    ttl: Delay | None
    #: Message group of the messages.
    group: str | None


class Occurrence(schedules.Occurrence[datetime], frozen=True):
    """A message that a schedule made."""

    state: str  # type: ignore[assignment]


class ScheduleInfo(schedules.Schedule[datetime], frozen=True, kw_only=True):
    """A schedule: settings (durations as text), next occurrences, and the last ones with their messages."""

    state: str  # type: ignore[assignment]
    catch_up: str  # type: ignore[assignment]
    overlap: str  # type: ignore[assignment]
    last: list[Occurrence] = field(default_factory=list)  # type: ignore[assignment]


class Triggered(schedules.Triggered[datetime], frozen=True):
    """A message that a trigger or backfill made."""


class Previewed(schedules.Previewed[datetime], frozen=True):
    """Answer to `preview_schedule`: next times of a schedule that is not stored."""


class Group(topics.Group[datetime], frozen=True):
    """A message group: `heads` are leased or handed out when due; `blocked` counts the messages behind the heads."""


class Bucket(topics.Bucket[datetime], frozen=True, rename={"start": "from"}):
    """Number of messages that fall due in one step of a histogram: from `start` until `start` plus the step."""


class Member(cluster.Member, frozen=True):
    feature_level: int = 1
    clock_skew_ms: float | None = None


class ClusterInfo(cluster.Cluster[datetime], frozen=True, kw_only=True):
    feature_level: int = 1
    members: list[Member]  # type: ignore[assignment]
    terms: list[cluster.Term[datetime]] = field(default_factory=list)
    backups: list[cluster.BackupOut[datetime]] = field(default_factory=list)


class HoursInfo(cluster.Hours, frozen=True):
    """Lengths and checksums of one node's hour files, at one applied index of the Raft log."""


class Names(cluster.Names, frozen=True):
    reasons: dict[str, int] = field(default_factory=dict)


#: Type of leases in arguments: lease tokens, or leased messages.
Leases = str | Message | Iterable[str | Message]
#: Result of an item of put_many: a receipt, or the refusal.
PutResult = Receipt | HadelayError
