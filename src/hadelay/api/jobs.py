"""Bulk jobs: changes of all messages that a filter selects."""

from typing import Annotated, Generic, Literal, get_args

from msgspec import Struct, field

from hadelay.api.base import At, Document, Instant, Request, words
from hadelay.api.messages import ReadQuery

Action = Literal["cancel", "reschedule", "deliver_now", "redrive", "delete_dead", "transfer"]


class _Filter(Struct, Generic[At], rename={"from_": "from"}, frozen=True):
    """Filter of the messages that a job changes: all given conditions must be true."""

    #: Name of a topic, or a pattern in which `*` stands for any text: `orders-*`, or `*` for all topics; at most 1,000
    #: topics.
    topic: str
    #: Filter: only messages with all these tags.
    tags: list[str] = field(default_factory=list)
    #: Filter: only messages whose client key begins with this text.
    key_prefix: str = ""
    #: Filter: only messages of this message group.
    group: str = ""
    #: Filter: only messages that the schedule with this name made.
    schedule: str = ""
    #: Filter: only the messages with these ids; at most 200.
    ids: list[str] = field(default_factory=list)
    #: Filter: only dead letters, or messages that wait after a failed attempt, whose last error is this text; a number
    #: in the text stands for any number. A message whose last attempt ended without a reason has the text
    #: `lease expired` or `nacked`.
    error: str = ""
    #: Filter: only messages that wait after a failed attempt.
    retrying: bool = False
    #: Filter: only messages due at or after `from`, and before `to`. Dead letters are selected by the time of their
    #: death.
    from_: At | None = None
    to: At | None = None


class JobFilter(_Filter[Instant], forbid_unknown_fields=True, frozen=True):
    """Filter of the messages that a job changes, in a request: all given conditions must be true."""


class JobFilterOut(_Filter[At], Document, Generic[At], frozen=True):
    """Filter of the messages that a job changes, in an answer."""


class JobRequest(Request):
    """Selection of messages, and the change that a job makes to them."""

    #: `redrive` and `delete_dead` are for dead letters, the others for waiting messages. `transfer` moves messages to
    #: another topic.
    action: Action
    filter: JobFilter
    #: For `reschedule`, one of three: `shift`, by which each due time moves, such as 1d or -90m; `delay`, counted from
    #: the beginning of the job; or `deliver_at`, one time for all.
    shift: str | int | float | None = None
    delay: str | int | float | None = None
    deliver_at: str | int | float | None = None
    #: For `transfer`: topic that gets the messages. Without it, each message goes back to the topic whose `dead_letter`
    #: brought it here.
    into: str | None = None
    #: Limit of messages that the job changes per second.
    rate: float | None = None


class BeginJob(JobRequest):
    """Request to begin a bulk job."""

    #: Text of 1 to 64 bytes that is new for each job: a repeated request with the same text begins no second job.
    request_id: str | None = None


class CountJob(JobRequest):
    """Request to count the messages that a job would change, without beginning the job."""

    #: Cursor from the previous answer to the same count; None: begin to count.
    cursor: str | None = None


class JobCount(Document, Generic[At], omit_defaults=False, frozen=True):
    """Answer to one request of a count, which covers a part of the messages; add up the numbers of all answers."""

    #: Number of messages that the job would change.
    matched: int
    #: Number of messages that the job would leave unchanged because they are leased.
    leased: int
    #: Earliest and latest due time of the counted messages; for dead letters, time of death.
    first: At | None
    last: At | None
    #: Share of the entries that the count has looked at, from 0 to 1.
    progress: float
    #: Cursor for the next request of the count; None: the count is complete.
    cursor: str | None


class Job(Document, Generic[At], kw_only=True, frozen=True):
    """A bulk job and its progress. `leased`, `settled`, `moved`, `refused` count messages left unchanged."""

    #: Number of the job. With several shards: the shard's index times 10¹², plus the number in that shard.
    id: int
    #: `fill` is the job that a new subscription begins: it copies the topic's pending messages to the subscription.
    action: Annotated[str, words(*get_args(Action), "fill")]
    filter: JobFilterOut[At]
    shift: str | None = None
    delay: str | None = None
    deliver_at: At | None = None
    rate: float | None = None
    #: For `transfer`: topic that gets the messages; None: each message goes back to the topic in which it died.
    into: str | None = None
    #: For `fill`: the new subscription that gets the copies, such as orders~billing.
    subscription: str | None = None
    #: State of the job: queued jobs wait for an earlier job that reschedules messages of the same topics.
    state: Annotated[str, words("queued", "running", "done", "stopped")]
    began_at: At
    ended_at: At | None
    #: Name of the token that began the job; empty in a cluster without tokens.
    by: str
    #: Share of the entries that the job has looked at, from 0 to 1.
    progress: float
    #: Number of messages that were changed.
    done: int
    #: Number of messages left unchanged because they were leased when the job reached them.
    leased: int
    #: Number of messages left unchanged because they were settled before the job reached them.
    settled: int
    #: Number of messages left unchanged because they were retried, rescheduled, redriven or transferred since the job
    #: began.
    moved: int
    #: Number of messages that may not be changed: they would be due beyond max_delay, another message has the client
    #: key of the dead letter, or the topic to transfer them to is missing, full or unknown.
    refused: int


class JobsQuery(ReadQuery):
    #: With several shards: leave out jobs of shards that do not answer, and name these shards in `missing`.
    partial: bool = False


class Jobs(Document, Generic[At], frozen=True):
    """Running jobs, and jobs that ended last: at most 100 of each shard, oldest first."""

    jobs: list[Job[At]]
    #: Shards that do not answer, whose jobs are left out.
    missing: tuple[int, ...] = ()
