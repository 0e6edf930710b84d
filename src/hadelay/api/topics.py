"""HTTP API types about topics: settings, counts, and histograms of due times."""

from typing import Generic, Literal

from msgspec import UNSET, UnsetType

from hadelay.api.base import At, DispatchSync, Document, Duration, Instant, Request

#: What a subscription without room for a copy does.
OnFull = Literal["refuse", "drop"]


class Backoff(Request):
    """Retry n waits min × factor^(n−1), at most max, changed by a random part of up to `jitter`."""

    min: Duration
    max: Duration
    factor: float | UnsetType = UNSET
    jitter: float | UnsetType = UNSET


class Webhook(Request):
    url: str
    #: `secret` signs webhook calls; `secrets` has several valid ones, newest first. If both are omitted, the stored
    #: secrets stay. Answers show secrets masked.
    secret: str | UnsetType = UNSET
    secrets: list[str] | UnsetType = UNSET
    timeout: Duration | UnsetType = UNSET
    #: Headers of webhook requests. Answers mask the values, which may be secret. A masked value keeps the stored value;
    #: if the URL has another scheme, host or port, the header is dropped.
    headers: dict[str, str] | UnsetType = UNSET
    #: Whether messages may name a webhook URL of their own (`callback`).
    allow_per_message: bool | UnsetType = UNSET
    #: HTTP method of the calls: POST, PUT, PATCH, or without a body GET, DELETE.
    method: Literal["POST", "PUT", "PATCH", "GET", "DELETE"] | UnsetType = UNSET


class Alert(Request):
    url: str
    secret: str | UnsetType = UNSET


class PutTopic(Request):
    """Settings to change; null resets a setting.

    By default, topics created at feature level 3 or later retry after 1 s, doubling to 1 h, each wait up to 10 %
    longer; after 84 attempts, at least 72 hours, a message becomes a dead letter. Older topics retry at once without
    end; `"defaults": null` gives them the newest defaults."""

    lease: Duration | UnsetType | None = UNSET
    #: Limit of attempts to deliver a message; 0: no limit.
    max_attempts: int | UnsetType | None = UNSET
    #: Waits before retries: a list of durations, or the bounds between which waits grow.
    backoff: list[str | int | float] | Backoff | UnsetType | None = UNSET
    #: Destination of dead letters: keep (this topic), or the name of another topic.
    dead_letter: str | UnsetType | None = UNSET
    dead_retention: Duration | UnsetType | None = UNSET
    #: Limits in messages per second: hand-outs, publishes, hand-outs of messages that fell due in an outage or pause.
    rate: float | UnsetType | None = UNSET
    publish_rate: float | UnsetType | None = UNSET
    catch_up_rate: float | UnsetType | None = UNSET
    concurrency: int | UnsetType | None = UNSET
    max_messages: int | UnsetType | None = UNSET
    max_bytes: int | UnsetType | None = UNSET
    ttl: Duration | UnsetType | None = UNSET
    retention: Duration | UnsetType | None = UNSET
    webhook: Webhook | UnsetType | None = UNSET
    alert: Alert | UnsetType | None = UNSET
    #: Limit of messages of one group that are handed out at once, in due order.
    group_concurrency: int | UnsetType | None = UNSET
    paused: bool | UnsetType | None = UNSET
    dispatch_sync: DispatchSync | UnsetType | None = UNSET
    #: Feature level (version of the cluster's features) whose defaults the topic has: 3, or 1 for an older topic; null:
    #: the newest level.
    defaults: int | UnsetType | None = UNSET
    #: False: messages that a subscription gets are not in the topic's own queue. Not for subscriptions.
    own_queue: bool | UnsetType | None = UNSET
    #: Tag filter of a subscription (a topic orders~billing): messages with all `tags`, and with one of `any_tags` if
    #: there are any.
    tags: list[str] | UnsetType | None = UNSET
    any_tags: list[str] | UnsetType | None = UNSET
    #: What a subscription at its max_messages or max_bytes does: refuse publishes (default), or drop its copies, which
    #: are counted as `dropped`.
    on_full: OnFull | UnsetType | None = UNSET
    #: Delete the topic some time after it was unused for this long, 1m or more. Not for subscriptions.
    expires_after: Duration | UnsetType | None = UNSET
    #: Topics of callbacks: messages about acked messages, and about messages that become dead letters.
    on_success: str | UnsetType | None = UNSET
    on_failure: str | UnsetType | None = UNSET
    #: Limit per second of messages of one group that are handed out, evenly spaced; needs group_concurrency.
    group_rate: float | UnsetType | None = UNSET


class PutSubscription(PutTopic, rename={"from_": "from"}):
    """Settings of a subscription; those of topics, except own_queue, publish_rate and expires_after."""

    #: Messages that a new subscription gets: those published from now on; or also a copy of each message that is
    #: pending in the topic's own queue, by a job (GET /v1/jobs). Ignored if the subscription exists.
    from_: Literal["now", "pending"] = "now"


class Pause(Request):
    reason: str | None = None


class TopicsQuery(Request):
    stale: bool = False
    #: Beginning of the names of the wanted topics.
    prefix: str = ""


class DeleteTopicQuery(Request):
    force: bool = False


class BackoffOut(Document, frozen=True):
    min: str
    max: str
    factor: float | None = None
    jitter: float | None = None


class WebhookOut(Document, frozen=True):
    url: str
    secrets: list[str] | None = None
    timeout: str | None = None
    headers: dict[str, str] | None = None
    allow_per_message: bool | None = None
    method: str | None = None


class AlertOut(Document, frozen=True):
    url: str
    secret: str | None = None


class Lateness(Document, frozen=True):
    """Time from deliver_at to the hand-out, for messages that this leader handed out in the last five minutes. p50 and
    p99 are at most 0.8 % too high; the maximum is exact."""

    count: int
    p50_ms: float
    p99_ms: float
    max_ms: float


class Consumer(Document, Generic[At], frozen=True):
    name: str
    #: Time of the consumer's latest receive.
    asked_at: At
    #: Node to which that receive was sent; absent while a node is not upgraded.
    node: str = ""
    #: Whether a receive of the consumer waits now; absent if not.
    waiting: bool = False


class Topic(Document, Generic[At], frozen=True):
    """A topic: counts of its messages, and the settings that were set."""

    topic: str
    scheduled: int
    ready: int
    leased: int
    dead: int
    oldest_ready_age_ms: int | None
    #: Size of the records of pending messages, in bytes.
    bytes: int
    #: Lateness of recent hand-outs; None: there were none.
    lateness: Lateness | None
    #: Feature level whose defaults apply to the settings that are not shown.
    defaults: int
    lease: str | None = None
    max_attempts: int | None = None
    backoff: list[str] | BackoffOut | None = None
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
    group_concurrency: int | None = None
    webhook: WebhookOut | None = None
    alert: AlertOut | None = None
    paused: bool | None = None
    paused_reason: str | None = None
    dispatch_sync: DispatchSync | None = None
    own_queue: bool | None = None
    tags: list[str] | None = None
    any_tags: list[str] | None = None
    on_full: OnFull | None = None
    expires_after: str | None = None
    on_success: str | None = None
    on_failure: str | None = None
    group_rate: float | None = None
    #: Number of messages that are blocked by earlier messages of their groups, due or not.
    blocked: int = 0
    #: Longest wait of a due message behind the first ones of its group, in ms; None if none is known to wait. Only in
    #: the answer for a single topic.
    oldest_blocked_age_ms: int | None = None
    #: Number of copies that the subscription, and earlier ones of its name, dropped because it was full (`on_full`).
    dropped: int = 0
    #: Consumers since the present leader took over, latest first, at most 16; only in the answer for a single topic.
    consumers: list[Consumer[At]] | None = None


class GroupHead(Document, Generic[At], frozen=True):
    """One of the first messages of a message group: it is leased, or may be handed out as soon as it is due."""

    id: str
    state: Literal["scheduled", "ready", "leased", "cancelled", "expired"]
    deliver_at: At
    #: Number of hand-outs so far.
    attempt: int
    #: Begin of the lease of a leased message, and its consumer; due time of a ready message. Omitted for other states,
    #: and for a lease that is not the last event in the message's history.
    since: At | None = None
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


class Topics(Document, frozen=True):
    topics: list[Topic[str]]


class DueQuery(Request, rename={"from_": "from"}):
    from_: Instant
    to: Instant
    step: Duration
    stale: bool = False


class Bucket(Document, Generic[At], rename={"start": "from"}, frozen=True):
    start: At
    count: int


class Buckets(Document, Generic[At], frozen=True):
    buckets: list[Bucket[At]]
