"""HTTP API types about schedules, which publish a message at each of their times (occurrences)."""

from typing import Annotated, Any, Generic, Literal

from msgspec import UNSET, UnsetType, field

from hadelay.api.base import At, Document, Duration, Instant, Request, words
from hadelay.model import State

CatchUp = Literal["one", "none", "all"]
Overlap = Literal["allow", "skip", "wait"]
#: Names in the API of the values of the enums CatchUp and Overlap, in the order of these values.
CATCH_UPS: tuple[CatchUp, ...] = ("one", "none", "all")
OVERLAPS: tuple[Overlap, ...] = ("allow", "skip", "wait")


class Times(Request, kw_only=True):
    """When a schedule is due: exactly one of `cron`, `every` and `at`."""

    #: Cron pattern: five fields (minute hour day month weekday), six with seconds in front, or @hourly, @daily,
    #: @weekly, @monthly, @yearly. Its times are in `timezone`.
    cron: str | None = None
    #: Interval of 1 s or more between occurrences, from `start`, else from 1970-01-01T00:00:00Z.
    every: Duration | None = None
    #: Times of the occurrences, as a list of at most 1,000.
    at: list[Instant] | None = None
    #: IANA time zone of the cron pattern, such as Europe/Vienna.
    timezone: str = "UTC"
    #: Range of the occurrences: none before `start`, and none after `end`.
    start: Instant | None = None
    end: Instant | None = None


class PutSchedule(Times, kw_only=True):
    """Request that sets a whole schedule: a field that is left out has its default. `body` and `body_base64` are as in
    a batch item."""

    topic: str
    #: Number of messages after which the schedule is finished.
    max_occurrences: int | None = None
    #: Maximum jitter: each message is due later than its occurrence by a random time up to this; the random time of one
    #: occurrence never changes.
    jitter: Duration | None = None
    #: Which missed occurrences (over a minute late) to publish afterwards: the last, none, or all (at most 1,000).
    catch_up: CatchUp = "one"
    #: Maximum age of missed occurrences that are still published. Default: 7d.
    catch_up_window: Duration | None = None
    #: Whether to publish an occurrence while an earlier message of the schedule is pending. allow: publish it; skip:
    #: drop it; wait: publish one message more, which waits behind the pending message.
    overlap: Overlap = "allow"
    #: Whether to pause the schedule; null: as before, and a new schedule is active.
    paused: bool | None = None
    body: Any = UNSET
    body_base64: str | UnsetType = UNSET
    content_type: str | None = None
    tags: list[str] = field(default_factory=list)
    meta: dict[str, str] = field(default_factory=dict)
    ttl: Duration | None = None
    #: Message group of the messages. Not allowed with overlap `wait`, for which the schedule uses a message group of
    #: its own.
    group: str | None = None


class PutScheduleQuery(Request):
    #: Version that the schedule must have before the PUT, otherwise the answer is 409; 0: the schedule must not exist.
    #: None: any version.
    version: int | None = None


class ScheduleQuery(Request):
    body: bool = False
    stale: bool = False


class ListSchedulesQuery(Request):
    #: Filter: only schedules whose names begin with this text.
    prefix: str = ""
    limit: int = 100
    #: Cursor from the previous page.
    cursor: str | None = None
    stale: bool = False
    #: With several shards: leave out the schedules of shards that do not answer, and name these shards in `missing`.
    partial: bool = False


class Occurrence(Document, Generic[At], frozen=True):
    """A message that a schedule made."""

    at: At
    id: str
    #: State of the message; "gone": the message is deleted, because its retention is over.
    state: Annotated[str, words(*State, "gone")]
    #: Whether a user asked for the message by trigger or backfill.
    manual: bool = False


class Schedule(Document, Generic[At], kw_only=True, frozen=True):
    schedule: str
    topic: str
    state: Annotated[str, words("active", "paused", "finished")]
    #: Whether the schedule is paused because the cluster was restored from a backup.
    restored: bool = False
    #: Version of the schedule; each change by a user raises it.
    version: int
    #: Description, in words, of the times at which the schedule is due.
    times: str
    cron: str | None = None
    every: str | None = None
    at: list[At] | None = None
    timezone: str
    start: At | None = None
    end: At | None = None
    max_occurrences: int | None = None
    jitter: str | None = None
    catch_up: Annotated[str, words(*CATCH_UPS)]
    catch_up_window: str
    overlap: Annotated[str, words(*OVERLAPS)]
    #: Times of the next occurrences: ten in a GET of one schedule, one in lists; none while paused.
    next: list[At]
    #: Messages that the schedule published last, oldest first; only if one schedule is asked for.
    last: list[Occurrence[At]] | None = None
    #: Numbers of occurrences: published, missed in an outage, dropped by `overlap`, refused, and made by trigger or
    #: backfill.
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
    #: Reason why the answering node cannot compute occurrences, such as a time zone that is missing in its data.
    problem: str | None = None
    #: Hints at settings of the schedule that may have unexpected effects; only in the answer to a PUT.
    warnings: list[str] | None = None
    #: Shard of the schedule's topic; None without a shard map.
    shard: int | None = None


class ScheduleTopic(Document, frozen=True):
    topic: str


class Schedules(Document, frozen=True):
    """A page of schedules by name. A page may be short: more pages follow until `cursor` is null."""

    schedules: list[Schedule[str]]
    cursor: str | None
    #: Shards that do not answer, whose schedules are left out.
    missing: tuple[int, ...] = ()


class Preview(Times, kw_only=True):
    """Request for the next times of a schedule that the request describes; nothing is stored."""

    #: Number of times to show: at most 100.
    count: int = 10
    #: Show times after this time. Default: now.
    after: Instant | None = None


class PreviewTime(Document, Generic[At], frozen=True):
    at: At
    #: `at` as local time of the schedule's time zone, with UTC offset.
    local: str


class Previewed(Document, Generic[At], frozen=True):
    times: str
    next: list[PreviewTime[At]]
    #: Version of the IANA time zone data of the answering node.
    tzdata: str
    #: Uneven steps of the cron pattern, such as */90, and effects of daylight-saving changes within the next 400 days.
    warnings: list[str]


class Backfill(Request, rename={"from_": "from"}):
    """Request to publish the messages of past occurrences, in [from, to), even if they were published before. The
    messages are due now. `to` must not be in the future; at most 1,000 messages and 4 MiB."""

    from_: Instant
    to: Instant


class Triggered(Document, Generic[At], frozen=True):
    id: str
    deliver_at: At
    #: Whether the request repeats one with the same Idempotency-Key: `id` is the message of the earlier request.
    duplicate: bool = False


class Backfilled(Document, Generic[At], frozen=True):
    results: list[Triggered[At]]
