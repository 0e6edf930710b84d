"""API documents that the client returns, with datetimes. Unknown fields are ignored, and enumerations are plain text,
so that newer servers may add fields and values."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal, TypedDict, TypeVar, overload

import msgspec
from msgspec import Struct, field

from hadelay.api import batches, cluster, jobs, messages, publishing, schedules, topics, topicsettings
from hadelay.api.consuming import AckOutcome, ExtendOutcome, NackOutcome, Order
from hadelay.api.jobs import Action as JobAction
from hadelay.api.schedules import CatchUp, Overlap
from hadelay.errors import HadelayError

__all__ = [
    "AckOutcome", "BatchFailure", "BatchInfo", "Bucket", "ClusterInfo", "DeadLetter", "Delay", "ExtendOutcome",
    "Failure",
    "Group", "HoursInfo", "JobAction", "JobCount", "JobInfo", "JobSelection", "Member", "Message", "MessageInfo",
    "NackOutcome", "Occurrence", "Order", "Previewed", "PutResult", "Receipt", "Redriven", "Rescheduled",
    "ScheduleInfo", "ScheduleSettings", "State", "TopicInfo", "Triggered", "When",
]  # fmt: skip

T = TypeVar("T")

#: Type of durations: "15m", "2h30m", seconds, or a timedelta.
Delay = str | float | timedelta
#: Type of times: an aware datetime, RFC 3339 text, or Unix milliseconds.
When = datetime | str | int
#: Type of payloads: bytes are sent unchanged, str as text/plain, other values as JSON.
Body = Any

State = Literal["scheduled", "ready", "blocked", "leased", "acked", "cancelled", "expired", "dead"]


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
    #: Message group that the message belongs to; None without a group.
    group: str | None = None
    #: Key of the batch that the message joined.
    batch: str | None = None
    deliver_at: datetime
    late_ms: int
    #: Number of this attempt to deliver the message, from 1.
    attempt: int
    #: Number of earlier attempts that do not count: snoozes and give-backs. `max_attempts` limits `attempt` minus this
    #: number.
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


class MessageInfo(messages.Message[datetime], frozen=True, kw_only=True):
    """State and history of a message; `body` only if requested."""

    history: list[messages.History[datetime]] = field(default_factory=list)


class Failure(messages.Failure[datetime], frozen=True):
    """An attempt that ended without an ack: nacked, or lease_expired."""


class DeadLetter(MessageInfo, frozen=True, kw_only=True):
    """A message that failed as often as its topic allows, with the errors of its last 16 attempts."""

    died_at: datetime
    errors: list[Failure]


class Redriven(messages.RedriveResult, frozen=True):
    """Result for one dead letter. outcome: `redriven`; `key_taken`, if another message with its key is pending; or the
    state of a message that is no dead letter: scheduled, ready, blocked, leased, acked, cancelled, expired or
    not_found."""


class TopicInfo(topicsettings.Topic[datetime], frozen=True, kw_only=True):
    """A topic: counts, and settings (durations as text, secrets masked, None if unset)."""

    paused: bool = False


class JobFilter(jobs.JobFilterOut[datetime], frozen=True):
    """Selection of the messages that a job changes."""


class JobInfo(jobs.Job[datetime], frozen=True, kw_only=True):
    """A bulk job: what it changes, and how far it is. Times are datetimes, durations text."""

    filter: JobFilter

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
    #: Messages of the message group with this name.
    group: str
    #: Messages that this schedule made.
    schedule: str
    #: Messages with these ids; at most 200.
    ids: Sequence[str]
    #: Dead letters, or messages that wait after a failed attempt, whose last error is this text; a number in it stands
    #: for any number.
    error: str
    #: Messages that wait after a failed attempt.
    retrying: bool
    #: Messages due at `start` or later, and before `end`. For "redrive" and "delete_dead": dead letters that died in
    #: this range.
    start: When | None
    end: When | None
    #: For "reschedule", give one of shift, delay and at. shift: added to each due time, such as "1d" or "-90m".
    shift: Delay | None
    #: Delay of all selected messages, counted from the beginning of the job.
    delay: Delay | None
    #: New due time of all selected messages.
    at: When | None
    #: For "transfer": the topic that gets the messages. Without it, each goes back to the topic in which it died.
    into: str | None


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
    catch_up: CatchUp
    catch_up_window: Delay | None
    #: Whether an occurrence is published while the schedule's previous message is pending.
    overlap: Overlap
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


class ScheduleInfo(schedules.Schedule[datetime], frozen=True, kw_only=True):
    """A schedule: settings (durations as text), next occurrences, and the last ones with their messages."""

    last: list[Occurrence] = field(default_factory=list)  # type: ignore[assignment]


class Triggered(schedules.Triggered[datetime], frozen=True):
    """A message that a trigger or backfill made."""


class Previewed(schedules.Previewed[datetime], frozen=True):
    """Answer to `preview_schedule`: next times of a schedule that is not stored."""


class BatchInfo(batches.Batch[datetime], frozen=True, kw_only=True):
    """A batch with the numbers of its members by outcome."""


class BatchFailure(batches.BatchFailure[datetime], frozen=True):
    """A member of a batch that died, expired or was cancelled."""


class Group(topics.Group[datetime], frozen=True):
    """A message group: `heads` are leased or handed out when due; `blocked` counts the messages behind the heads."""


class Bucket(topics.Bucket[datetime], frozen=True, rename={"start": "from"}):
    """Number of messages that fall due in one step of a histogram: from `start` until `start` plus the step."""


class Member(cluster.Member, frozen=True):
    """A member of the cluster, as the answering node knows it."""


class ClusterInfo(cluster.Cluster[datetime], frozen=True, kw_only=True):
    """The cluster, its members and its latest terms."""

    members: list[Member]  # type: ignore[assignment]


class HoursInfo(cluster.Hours, frozen=True):
    """Lengths and checksums of one node's hour files, at one applied index of the Raft log."""


class Names(cluster.Names, frozen=True):
    """Names of a node's topics, consumers and reasons, by their numbers."""


#: Type of leases in arguments: lease tokens, or leased messages.
Leases = str | Message | Iterable[str | Message]
#: Result of an item of put_many: a receipt, or the refusal.
PutResult = Receipt | HadelayError
