"""Schedules: what makes messages again and again, and what became of them."""

from typing import Any, Generic, Literal

from msgspec import UNSET, UnsetType, field

from hadelay.api.base import At, Document, Duration, Instant, Request

CatchUp = Literal["one", "none", "all"]
Overlap = Literal["allow", "skip", "wait"]


class Times(Request, kw_only=True):
    """When a schedule is due: exactly one of `cron`, `every` and `at`."""

    #: Five fields (minute hour day month weekday), six with seconds in front, or @hourly, @daily, @weekly, @monthly,
    #: @yearly; in `timezone`.
    cron: str | None = None
    #: Interval of 1 s or more, counted from `start`, else from 1970-01-01T00:00:00Z.
    every: Duration | None = None
    #: At most 1,000 times.
    at: list[Instant] | None = None
    #: IANA time zone of the pattern, such as Europe/Vienna.
    timezone: str = "UTC"
    #: No occurrence before `start`, or after `end`.
    start: Instant | None = None
    end: Instant | None = None


class PutSchedule(Times, kw_only=True):
    """A schedule as a whole: what is left out has its default. `body` and `body_base64` are as in a batch."""

    topic: str
    #: Number of messages after which the schedule is finished.
    max_occurrences: int | None = None
    #: Each message is due up to so much later, by a part that is the same for the same occurrence.
    jitter: Duration | None = None
    #: Occurrences missed in an outage, more than a minute old: the last one, none, or all (1,000 at most).
    catch_up: CatchUp = "one"
    #: Older occurrences are not caught up. Default: 7d.
    catch_up_window: Duration | None = None
    #: What happens to an occurrence while the message of the one before is pending: allow makes its message; skip does
    #: not; wait makes one message, which waits for the end of the pending one. Wait needs a topic with
    #: group_concurrency 1.
    overlap: Overlap = "allow"
    #: Null: as it is; a new schedule is active.
    paused: bool | None = None
    body: Any = UNSET
    body_base64: str | UnsetType = UNSET
    content_type: str | None = None
    tags: list[str] = field(default_factory=list)
    meta: dict[str, str] = field(default_factory=dict)
    ttl: Duration | None = None
    #: Message group of the messages; not with overlap wait, which uses one of its own.
    group: str | None = None


class PutScheduleQuery(Request):
    #: Version that the schedule must have; 0: there must be none. A conflict is 409.
    version: int | None = None


class ScheduleQuery(Request):
    body: bool = False
    stale: bool = False


class ListSchedulesQuery(Request):
    #: Only schedules whose names begin so.
    prefix: str = ""
    limit: int = 100
    #: Cursor from the previous page.
    cursor: str | None = None
    stale: bool = False


class Occurrence(Document, Generic[At], frozen=True):
    """A message that a schedule made."""

    at: At
    id: str
    #: State of the message; gone: past its retention.
    state: Literal["scheduled", "ready", "leased", "acked", "cancelled", "expired", "dead", "gone"]
    #: Whether a trigger or backfill asked for it.
    manual: bool = False


class Schedule(Document, Generic[At], kw_only=True, frozen=True):
    schedule: str
    topic: str
    state: Literal["active", "paused", "finished"]
    #: Whether the schedule is paused because the cluster was restored from a backup.
    restored: bool = False
    #: Raised by each change.
    version: int
    #: When the schedule is due, in words.
    times: str
    cron: str | None = None
    every: str | None = None
    at: list[At] | None = None
    timezone: str
    start: At | None = None
    end: At | None = None
    max_occurrences: int | None = None
    jitter: str | None = None
    catch_up: CatchUp
    catch_up_window: str
    overlap: Overlap
    #: Next occurrences: ten of a single schedule, one in lists; none while it is paused.
    next: list[At]
    #: Last messages, oldest first; only in the answer for a single schedule.
    last: list[Occurrence[At]] | None = None
    #: Number of occurrences by what became of them; `manual` are those of triggers and backfills.
    made: int
    missed: int
    overlapped: int
    refused: int
    manual: int
    changed_at: At
    #: Name of the token that set the schedule.
    creator: str | None = None
    content_type: str
    tags: list[str]
    meta: dict[str, str]
    ttl: str | None = None
    group: str | None = None
    size: int
    body: bytes | None = field(default=None, name="body_base64")
    #: Why the answering node cannot compute times: for example, a time zone that its data lack.
    problem: str | None = None
    #: Hints at settings that may surprise; only in the answer to a PUT.
    warnings: list[str] | None = None


class Schedules(Document, frozen=True):
    """A page of schedules by name. A page may be short: more pages follow until `cursor` is null."""

    schedules: list[Schedule[str]]
    cursor: str | None


class Preview(Times, kw_only=True):
    """Times of a schedule that need not exist."""

    #: Number of times: at most 100.
    count: int = 10
    #: Time after which to begin. Default: now.
    after: Instant | None = None


class PreviewTime(Document, Generic[At], frozen=True):
    at: At
    #: The same time with the zone's UTC offset.
    local: str


class Previewed(Document, Generic[At], frozen=True):
    times: str
    next: list[PreviewTime[At]]
    #: Version of the IANA time zone data of the answering node.
    tzdata: str
    #: What clock changes do to the pattern within 400 days.
    warnings: list[str]


class Backfill(Request, rename={"from_": "from"}):
    """Make the occurrences of [from, to) due now, also those made before: at most 1,000, all of them past."""

    from_: Instant
    to: Instant


class Triggered(Document, Generic[At], frozen=True):
    id: str
    deliver_at: At
    #: Whether the Idempotency-Key was used before: `id` is the earlier message's.
    duplicate: bool = False


class Backfilled(Document, Generic[At], frozen=True):
    results: list[Triggered[At]]
