"""HTTP API types about messages and dead letters: queries, changes and their answers."""

from typing import Annotated, Any, Generic, Literal

from msgspec import UNSET, field

from hadelay.api.base import At, Document, Duration, Instant, Request, words
from hadelay.model import Event, State

#: States of messages that a purge can select: it cancels scheduled and ready messages, and deletes dead letters.
PurgedState = Literal["scheduled", "ready", "dead"]


class ReadQuery(Request):
    stale: bool = False


class MessageQuery(Request):
    body: bool = False
    stale: bool = False
    #: Time to wait until a pending message is settled; the answer comes then, or after this time.
    wait: Duration | None = None


class History(Document, Generic[At], frozen=True):
    event: Annotated[str, words(*(event.name.lower() for event in Event))]
    at: At
    attempt: int
    consumer: str | None
    node: str | None
    #: Reason of a failed attempt, if the consumer gave one.
    reason: str | None = None
    #: For an event that moved the message to other hour files: old and new hour, as 2026112018.
    from_hour: str | None = field(default=None, name="from")
    to_hour: str | None = field(default=None, name="to")
    #: For a leased event: due time of this attempt. The message's own deliver_at is the due time of its latest attempt.
    due_at: At | None = None
    #: For a moved event that changed the due time: due time before and after.
    old_deliver_at: At | None = None
    new_deliver_at: At | None = None


class Failure(Document, Generic[At], frozen=True):
    """An attempt that ended without an ack."""

    event: Annotated[str, words("nacked", "lease_expired")]
    at: At
    attempt: int
    reason: str | None


class Retry(Document, Generic[At], frozen=True):
    """The next attempt of a message that waits after a failed attempt."""

    #: Number of the attempt; attempts that do not count are left out.
    attempt: int
    #: Setting `max_attempts` of the topic; None: no limit.
    max_attempts: int | None = None
    #: The last failed attempt; omitted if it is not known, as after a failover in interval mode.
    last: Failure[At] | None = None


class Copy(Document, Generic[At], frozen=True):
    """Copy of a published message for a subscription, which is a message with a state of its own."""

    id: str
    topic: str
    state: Annotated[str, words(*State)]
    deliver_at: At
    attempt: int


class Message(Document, Generic[At], frozen=True):
    id: str
    topic: str
    key: str | None
    state: Annotated[str, words(*State)]
    deliver_at: At
    published_at: At
    attempt: int
    tags: list[str]
    meta: dict[str, str]
    content_type: str
    size: int
    #: W3C Trace Context span that published the message.
    traceparent: str | None = None
    #: Name of the message's group (message group).
    group: str | None = None
    #: Key of the batch that the message joined.
    batch: str | None = None
    #: History of the message, and its body if requested; None in lists.
    history: list[History[At]] | None = None
    body: bytes | None = field(default=None, name="body_base64")
    #: Name of the schedule that made the message, and planned time of the occurrence; None for other messages.
    schedule: str | None = None
    occurrence: At | None = None
    #: JSON that the ack carried; omitted without one, in lists, and once the topic's retention is over.
    result: Any = UNSET
    #: Progress that the handler of a leased message reported with an extend.
    progress: str | None = None
    #: Id of the published message of which this message is a copy for a subscription; None for others, and in lists.
    published_id: str | None = None
    #: Copies of this message for subscriptions; None if it has none, and in lists.
    copies: list[Copy[At]] | None = None
    #: Shard that has the message; None without a shard map.
    shard: int | None = None
    #: For a message that waits after a failed attempt: the next attempt.
    retry: Retry[At] | None = None


class ListQuery(Request, rename={"from_": "from"}):
    #: States to list, joined by commas: scheduled, ready, blocked, leased (or pending), acked, cancelled, expired,
    #: dead; or all. `retrying` means messages that wait after a failed attempt, which are scheduled, ready or blocked.
    state: str = "pending"
    #: List only messages due at or after `from`, and before `to`.
    from_: Instant | None = None
    to: Instant | None = None
    #: Filter: only messages with all these tags, separated by commas.
    tag: str | None = None
    limit: int = 100
    #: Value of `cursor` in the previous page.
    cursor: str | None = None
    stale: bool = False


class ListAllQuery(ListQuery, rename={"from_": "from"}):
    #: Filter: only messages of topics whose names begin with this text.
    prefix: str = ""
    #: Whether the answer has `cursors`: one cursor per message.
    cursors: bool = False
    #: With several shards: leave out the messages of shards that do not answer, and name these shards in `missing`.
    partial: bool = False


class Messages(Document, frozen=True):
    """A page of messages in due order. A page may be short: more pages follow until `cursor` is null."""

    messages: list[Message[str]]
    cursor: str | None
    #: For each message, the cursor of a page that begins after it; only if the query asks for `cursors`.
    cursors: tuple[str, ...] = ()
    #: Shards that do not answer, whose messages are left out.
    missing: tuple[int, ...] = ()


class Outcome(Document, frozen=True):
    outcome: Literal["cancelled"]
    #: For a message with copies for subscriptions: outcome of each copy, by topic and subscription.
    outcomes: dict[str, str] | None = None


class Reschedule(Request):
    """New due time of a message: one of `shift`, `delay` and `deliver_at`."""

    #: Time by which the due time moves, such as 3h or -90m; requires `expected_deliver_at`.
    shift: str | int | float | None = None
    #: New due time, counted from now.
    delay: str | int | float | None = None
    #: New due time, as an absolute time.
    deliver_at: str | int | float | None = None
    #: Due time that the client has read. If the message was rescheduled or retried meanwhile, the answer is 409
    #: (`outcome` is `moved`), and nothing changes.
    expected_deliver_at: Instant | None = None


class Rescheduled(Document, Generic[At], frozen=True):
    """Result of a reschedule; the message keeps its id."""

    id: str
    deliver_at: At
    #: Whether the message waits behind other messages of its group.
    blocked: bool = False
    #: For a message with copies for subscriptions: outcome of each copy, by topic and subscription.
    outcomes: dict[str, str] | None = None


class DeadQuery(Request):
    limit: int = 100
    cursor: str | None = None
    body: bool = False
    stale: bool = False


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
    #: Errors of the last 16 failed attempts, oldest first.
    errors: list[Failure[At]]
    #: Name of the message's group (message group).
    group: str | None = None
    body: bytes | None = field(default=None, name="body_base64")


class DeadLetters(Document, frozen=True):
    messages: list[DeadLetter[str]]
    cursor: str | None


class Redrive(Request):
    """Dead letters to redrive: either `ids`, or all present dead letters at `rate` messages per second."""

    ids: list[str] | None = None
    all: bool = False
    rate: float | None = None


class RedriveResult(Document, frozen=True):
    id: str
    #: Outcome for one id: `redriven`; `key_taken`, if another message with its key is pending; or the state of a
    #: message that is not dead.
    outcome: Annotated[str, words("redriven", "key_taken", *(s for s in State if s is not State.DEAD), "not_found")]


class Redriven(Document, frozen=True):
    """Result of a redrive: `results` for given ids; else `redriving`, the number of dead letters to be redriven."""

    results: list[RedriveResult] | None = None
    redriving: int | None = None


class Purge(Request):
    states: list[PurgedState]


class Purged(Document, frozen=True):
    topic: str
    states: list[PurgedState]
