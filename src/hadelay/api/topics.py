"""HTTP API types about topics: subscriptions, message groups, and histograms of due times."""

from typing import Annotated, Generic, Literal

from hadelay.api.base import At, Document, Duration, Instant, Request, words
from hadelay.api.topicsettings import PutTopic, Topic


class PutSubscription(PutTopic, rename={"from_": "from"}):
    """Settings of a subscription: those of a topic, except own_queue, publish_rate and expires_after."""

    #: Messages that a new subscription gets: those published from now on; or also a copy of each message that is
    #: pending in the topic's own queue, by a job (GET /v1/jobs). Ignored if the subscription exists.
    from_: Literal["now", "pending"] = "now"


class Pause(Request):
    reason: str | None = None


class TopicsQuery(Request):
    stale: bool = False
    #: Filter: only topics whose names begin with this text.
    prefix: str = ""
    #: With several shards: leave out the topics of shards that do not answer, and name these shards in `missing`.
    partial: bool = False


class DeleteTopicQuery(Request):
    force: bool = False


class GroupHead(Document, Generic[At], frozen=True):
    """One of the first messages of a message group: it is leased, or may be handed out as soon as it is due."""

    id: str
    state: Annotated[str, words("scheduled", "ready", "leased", "cancelled", "expired")]
    deliver_at: At
    #: Number of hand-outs so far.
    attempt: int
    #: Begin of the lease of a leased message; due time of a ready message. Omitted in other states, and if the lease is
    #: not the last event in the message's history.
    since: At | None = None
    #: Consumer that has leased the message. Omitted for a message that is not leased, and where `since` is omitted.
    consumer: str | None = None


class Group(Document, Generic[At], frozen=True):
    topic: str
    group: str
    #: Limit of the group's messages that are leased at the same time.
    group_concurrency: int
    #: Number of the group's messages that are blocked by `heads`.
    blocked: int
    #: First messages of the group, in due order: leased, or not blocked by other messages of the group.
    heads: list[GroupHead[At]]


class GroupOfTopic(Document, Generic[At], frozen=True):
    """A message group in which messages wait behind the group's first message."""

    topic: str
    group: str
    #: Number of the group's messages that wait behind its first messages.
    blocked: int
    #: Time since which the first waiting message is due; None: it is not due yet.
    since: At | None
    #: The first message of the group: id, state, number of hand-outs so far, and last error.
    message: str
    state: Annotated[str, words("scheduled", "ready", "leased", "cancelled", "expired")]
    attempt: int
    error: str = ""


class GroupsQuery(Request):
    #: Name of a topic. Default: all topics.
    topic: str | None = None
    stale: bool = False
    #: With several shards: leave out the groups of shards that do not answer, and name these shards in `missing`.
    partial: bool = False


class Groups(Document, Generic[At], frozen=True):
    #: Groups in which a due message waits, the longest wait first, then groups with most blocked messages; at most 100.
    groups: list[GroupOfTopic[At]]
    #: Whether the node looked at all groups. It looks at no more than 10,000, which include the group with the longest
    #: wait of each topic.
    complete: bool
    #: Shards that do not answer, whose groups are left out.
    missing: tuple[int, ...] = ()


class Topics(Document, frozen=True):
    topics: list[Topic[str]]
    #: Shards that do not answer, whose topics are left out.
    missing: tuple[int, ...] = ()


class DueQuery(Request, rename={"from_": "from"}):
    from_: Instant
    to: Instant
    step: Duration
    stale: bool = False
    #: With several shards: leave out the messages of shards that do not answer, and name these shards in `missing`.
    partial: bool = False


class Bucket(Document, Generic[At], rename={"start": "from"}, frozen=True):
    start: At
    count: int


class Buckets(Document, Generic[At], frozen=True):
    buckets: list[Bucket[At]]
    #: Shards that do not answer, whose messages are left out.
    missing: tuple[int, ...] = ()
