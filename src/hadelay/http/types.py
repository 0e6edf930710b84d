"""Requests and responses of API version 1 as msgspec types: they decode, validate, encode and become OpenAPI 3.1."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType, field

from hadelay.errors import BadRequest
from hadelay.http.values import parse_duration, parse_instant


class Duration(int):
    """Milliseconds; on the wire "250ms", "2h30m" or a number of seconds."""


class Instant(int):
    """Unix ms; on the wire RFC 3339, or Unix milliseconds on input."""


def decode_hook(kind: type, value: Any) -> Any:
    try:
        if kind is Duration:
            return Duration(parse_duration("duration", value))
        if kind is Instant:
            return Instant(parse_instant("time", value))
    except BadRequest as error:
        # msgspec knows which member it is, and says so of a ValueError.
        raise ValueError(error.detail.partition(": ")[2]) from None
    raise NotImplementedError(kind)


def schema_hook(kind: type) -> dict[str, Any]:
    if kind is Duration:
        return {
            "description": "250ms, 15m, 2h30m, 7d; a bare number is seconds",
            "anyOf": [
                {"type": "string", "pattern": r"^([0-9]+(\.[0-9]+)?(ms|s|m|h|d))+$|^[0-9]+(\.[0-9]+)?$"},
                {"type": "number", "minimum": 0},
            ],
        }
    if kind is Instant:
        return {
            "description": "RFC 3339 with any offset, or Unix milliseconds",
            "anyOf": [{"type": "string", "format": "date-time"}, {"type": "integer", "minimum": 100_000_000_000}],
        }
    raise NotImplementedError(kind)


class In(Struct, forbid_unknown_fields=True):
    """A typo must not be taken for a wish: `?dealy=1h` would fire at once."""


class Nothing(In):
    """Nor must a wish that an action does not know."""


class Out(Struct):
    pass


# ---- publishing


class PublishQuery(In):
    delay: Duration | None = None
    deliver_at: Instant | None = None
    key: str | None = None
    on_conflict: Literal["keep", "replace", "reject"] | None = None
    max_wait: Duration | None = None
    #: Separated by commas.
    tags: str | None = None
    ttl: Duration | None = None
    callback: str | None = None


class Published(Out):
    id: str
    topic: str
    deliver_at: str
    key: str | None = None
    duplicate: bool | UnsetType = UNSET
    replaced: str | UnsetType = UNSET


class BatchItem(In, gc=False):
    """One message of a batch. `body` (text is text/plain, other JSON values application/json) or `body_base64`."""

    topic: str
    body: Any = UNSET
    body_base64: str | UnsetType = UNSET
    content_type: str | None = None
    delay: str | int | float | None = None
    deliver_at: str | int | float | None = None
    meta: dict[str, str] | None = None
    idempotency_key: str | None = None
    key: str | None = None
    on_conflict: str | None = None
    max_wait: str | int | float | None = None
    tags: list[str] | None = None
    ttl: str | int | float | None = None
    callback: str | None = None
    #: W3C Trace Context; else the request's.
    traceparent: str | None = None


class BatchResult(Out):
    """id and deliver_at, or error."""

    id: str | UnsetType = UNSET
    deliver_at: str | UnsetType = UNSET
    duplicate: bool | UnsetType = UNSET
    replaced: str | UnsetType = UNSET
    error: dict[str, Any] | UnsetType = UNSET


class BatchResults(Out):
    results: list[BatchResult]


# ---- messages


class ReadQuery(In):
    stale: bool = False


class MessageQuery(In):
    body: bool = False
    stale: bool = False


class History(Out, rename={"from_": "from"}):
    event: Literal[
        "leased", "acked", "nacked", "lease_expired", "ttl_expired", "cancelled", "moved", "dead", "redriven"
    ]
    at: str
    attempt: int
    consumer: str | None
    node: str | None
    #: Why the attempt failed, if somebody said so.
    reason: str | UnsetType = UNSET
    #: The hours it left and went to, when it was filed anew.
    from_: str | UnsetType = UNSET
    to: str | UnsetType = UNSET
    #: Of leased: when this attempt was due. The message's deliver_at is that of its latest attempt.
    due_at: str | UnsetType = UNSET


class Message(Out):
    id: str
    topic: str
    key: str | None
    state: Literal["scheduled", "ready", "leased", "acked", "cancelled", "expired", "dead"]
    deliver_at: str
    published_at: str
    attempt: int
    tags: list[str]
    meta: dict[str, str]
    content_type: str
    size: int
    #: The span that published it.
    traceparent: str | UnsetType = UNSET
    #: Not in lists.
    history: list[History] | UnsetType = UNSET
    body_base64: bytes | UnsetType = UNSET


class ListQuery(In, rename={"from_": "from"}):
    #: scheduled, ready, leased, acked, cancelled, expired, dead, separated by commas; pending is the first three, and
    #: all is all.
    state: str = "pending"
    #: Due from here on, and before `to`.
    from_: Instant | None = None
    to: Instant | None = None
    #: Separated by commas: messages that have all of them.
    tag: str | None = None
    limit: int = 100
    #: From the page before.
    cursor: str | None = None
    stale: bool = False


class Messages(Out):
    """In due order. A page may be short while there is more: go on until `cursor` is null."""

    messages: list[Message]
    cursor: str | None


class Outcome(Out):
    outcome: Literal["cancelled"]


class Reschedule(In):
    """One of the two."""

    delay: str | int | float | None = None
    deliver_at: str | int | float | None = None


class Rescheduled(Out):
    id: str
    deliver_at: str


# ---- consuming


class ReceiveQuery(In):
    #: false: a follower relays the poll instead of answering 307.
    redirect: bool = True


class Receive(In):
    max: int | None = None
    wait: Duration | None = None
    lease: Duration | None = None
    consumer: str | None = None
    request_id: str | None = None
    #: Only messages that have all of these.
    tags: list[str] = []
    #: Only messages that have one of these; besides all of `tags`.
    any_tags: list[str] = []


class ReceiveTopics(Receive, kw_only=True):
    topics: list[str]


class Received(Out, kw_only=True):
    """deliver_at, late_ms and the lease are in cluster time."""

    id: str
    lease: str
    topic: str
    #: The payload; as `body` with `Accept: application/msgpack` (bytes), or with `Accept-Body: text` if it is text.
    body_base64: bytes | UnsetType = UNSET
    body: Any = UNSET
    content_type: str
    key: str | None
    tags: list[str]
    meta: dict[str, str]
    deliver_at: str
    late_ms: int
    attempt: int
    #: The span that published it (W3C Trace Context): link to it, for it may have ended long ago.
    traceparent: str | UnsetType = UNSET
    #: It may have been handed out before.
    redelivered: bool
    lease_until: str
    lease_left_ms: int


class ReceivedMessages(Out):
    messages: list[Received]


class Ack(In):
    leases: list[str]


class Nack(In):
    leases: list[str]
    delay: Duration | None = None
    #: Why, for people: told with a dead letter. At most 128 bytes.
    reason: str | None = None
    #: False: nobody tried, so the attempt counts neither for max_attempts nor for the backoff. `delay` is then 0 unless
    #: given.
    count: bool = True


class Extend(In):
    leases: list[str]
    lease: Duration


class Acked(Out):
    lease: str
    outcome: Literal["acked", "already_acked", "lease_lost"]


class Nacked(Out):
    lease: str
    outcome: Literal["nacked", "already_acked", "lease_lost"]


class Extended(Out):
    lease: str
    outcome: Literal["extended", "already_acked", "lease_lost"]


class AckResults(Out):
    results: list[Acked]


class NackResults(Out):
    results: list[Nacked]


class ExtendResults(Out):
    results: list[Extended]


# ---- dead letters


class DeadQuery(In):
    limit: int = 100
    cursor: str | None = None
    body: bool = False
    stale: bool = False


class Failure(Out):
    """An attempt that ended without an ack."""

    event: Literal["nacked", "lease_expired"]
    at: str
    attempt: int
    reason: str | None


class DeadLetter(Out, kw_only=True):
    id: str
    topic: str
    key: str | None
    state: Literal["dead"] = "dead"
    deliver_at: str
    published_at: str
    died_at: str
    attempt: int
    tags: list[str]
    meta: dict[str, str]
    content_type: str
    size: int
    #: The last 16, the first of them first.
    errors: list[Failure]
    body_base64: bytes | UnsetType = UNSET


class DeadLetters(Out):
    messages: list[DeadLetter]
    cursor: str | None


class Redrive(In):
    """Either ids, or all: those there are now, `rate` messages per second."""

    ids: list[str] | None = None
    all: bool = False
    rate: float | None = None


class RedriveResult(Out):
    id: str
    outcome: Literal[
        "redriven", "key_taken", "scheduled", "ready", "leased", "acked", "cancelled", "expired", "not_found"
    ]


class Redriven(Out):
    """Of ids: an outcome each. Of all: how many will be redriven."""

    results: list[RedriveResult] | UnsetType = UNSET
    redriving: int | UnsetType = UNSET


class Purge(In):
    states: list[Literal["scheduled", "ready", "dead"]]


class Purged(Out):
    topic: str
    states: list[Literal["scheduled", "ready", "dead"]]


# ---- topics


class Backoff(In):
    """Retry n waits min × factor^(n−1), at most max, less up to the part `jitter` of it."""

    min: Duration
    max: Duration
    factor: float | UnsetType = UNSET
    jitter: float | UnsetType = UNSET


class Webhook(In):
    url: str
    #: One, or those valid at once, the newest first. Left out: those set before stay. Shown masked.
    secret: str | UnsetType = UNSET
    secrets: list[str] | UnsetType = UNSET
    timeout: Duration | UnsetType = UNSET
    #: Shown masked, since one may be a secret; a value that is given as it is shown stays what it is,
    #: and is dropped where the URL is of another scheme, host or port.
    headers: dict[str, str] | UnsetType = UNSET
    #: Messages may name a URL of their own (`callback`).
    allow_per_message: bool | UnsetType = UNSET


class Alert(In):
    url: str
    secret: str | UnsetType = UNSET


class PutTopic(In):
    """What is left out stays as it is; null takes a setting back.

    A topic that was made at feature level 3 or later and sets nothing retries after 1 s, doubling to 1 h, each wait up
    to 10 % longer; after 84 attempts, which take 72 hours at least, a message is a dead letter. Topics from before
    retry at once and for ever; `"defaults": null` ends that."""

    lease: Duration | UnsetType | None = UNSET
    #: 0: no limit.
    max_attempts: int | UnsetType | None = UNSET
    #: A list of durations, or the bounds between which waits grow.
    backoff: list[str | int | float] | Backoff | UnsetType | None = UNSET
    #: keep, or the name of another topic.
    dead_letter: str | UnsetType | None = UNSET
    dead_retention: Duration | UnsetType | None = UNSET
    #: Messages per second.
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
    paused: bool | UnsetType | None = UNSET
    dispatch_sync: Literal["commit", "interval"] | UnsetType | None = UNSET
    #: The feature level whose defaults hold where nothing is set: 3, or 1 for topics from before; null: the newest.
    defaults: int | UnsetType | None = UNSET


class Pause(In):
    #: Shown with the topic while it is paused.
    reason: str | None = None


class DeleteTopicQuery(In):
    force: bool = False


class BackoffOut(Out):
    min: str
    max: str
    factor: float | UnsetType = UNSET
    jitter: float | UnsetType = UNSET


class WebhookOut(Out):
    url: str
    secrets: list[str] | UnsetType = UNSET
    timeout: str | UnsetType = UNSET
    headers: dict[str, str] | UnsetType = UNSET
    allow_per_message: bool | UnsetType = UNSET


class AlertOut(Out):
    url: str
    secret: str | UnsetType = UNSET


class Lateness(Out):
    """How long after its deliver_at a message was handed out, over the last five minutes of this leader. p50 and p99
    are of the nearest rank, at most 0.8 % too high; the maximum is exact."""

    count: int
    p50_ms: float
    p99_ms: float
    max_ms: float


class Consumer(Out):
    name: str
    #: When it asked for messages last.
    asked_at: str


class Topic(Out):
    """Counts, and of the settings those that were set."""

    topic: str
    scheduled: int
    ready: int
    leased: int
    dead: int
    oldest_ready_age_ms: int | None
    #: Of the records of what is pending.
    bytes: int
    #: None: nothing was handed out lately.
    lateness: Lateness | None
    #: The feature level whose defaults hold for the settings that are not shown.
    defaults: int
    lease: str | UnsetType = UNSET
    max_attempts: int | UnsetType = UNSET
    backoff: list[str] | BackoffOut | UnsetType = UNSET
    dead_letter: str | UnsetType = UNSET
    dead_retention: str | UnsetType = UNSET
    rate: float | UnsetType = UNSET
    publish_rate: float | UnsetType = UNSET
    catch_up_rate: float | UnsetType = UNSET
    concurrency: int | UnsetType = UNSET
    max_messages: int | UnsetType = UNSET
    max_bytes: int | UnsetType = UNSET
    ttl: str | UnsetType = UNSET
    retention: str | UnsetType = UNSET
    webhook: WebhookOut | UnsetType = UNSET
    alert: AlertOut | UnsetType = UNSET
    paused: bool | UnsetType = UNSET
    paused_reason: str | UnsetType = UNSET
    dispatch_sync: Literal["commit", "interval"] | UnsetType = UNSET
    #: Of one topic: who asked for its messages since the present leader took over, the latest first, at most 16.
    consumers: list[Consumer] | UnsetType = UNSET


class Topics(Out):
    topics: list[Topic]


class DueQuery(In, rename={"from_": "from"}):
    from_: Instant
    to: Instant
    step: Duration
    stale: bool = False


class Bucket(Out, rename={"from_": "from"}):
    from_: str
    count: int


class Buckets(Out):
    buckets: list[Bucket]


# ---- cluster


class Dispatch(Out):
    hour: str
    second: int
    local_index: int
    sync: Literal["commit", "interval"]


class Member(Out):
    name: str
    http: str
    raft: str
    role: str
    applied_index: str
    lag: int
    version: str
    #: The highest that its program knows.
    feature_level: int
    clock_skew_ms: float | None


class Cluster(Out):
    cluster_id: str
    #: What the cluster has switched to: the highest that every member knew at once.
    feature_level: int
    leader: str | None
    term: int
    applied_index: str
    time: str
    dispatch: Dispatch
    members: list[Member]


class Transfer(In):
    to: str | None = None


class Transferred(Out):
    leader: str


class Drain(In):
    node: str
    undo: bool = False


class Drained(Out):
    node: str
    drained: bool


class AddMember(In):
    name: str
    #: host:port of its node link, as the others reach it.
    raft: str


class AddedMember(Out):
    name: str
    raft: str
    role: str


# ---- tokens and the audit trail


class CreateToken(In):
    #: For people: two tokens may have the same, as they do while one takes the place of the other.
    name: str
    scopes: list[str]
    #: It expires so long after it was made; without it, it holds until it is revoked.
    lifetime: Duration | None = None


class TokenOut(Out):
    id: str
    name: str
    scopes: list[str]
    created_at: str
    expires_at: str | None
    expired: bool
    #: The token itself: shown once, when it is made.
    token: str | UnsetType = UNSET


class Tokens(Out):
    tokens: list[TokenOut]


class AuditQuery(In):
    after: int = 0
    limit: int = 100


class AuditOut(Out):
    number: int
    at: str
    node: str
    token_id: str
    token: str
    action: str
    target: str
    #: "done", or why it was refused.
    outcome: str


class AuditTrail(Out):
    #: Oldest first.
    entries: list[AuditOut]


class HourFileOut(Out):
    entries: int
    bytes: str
    #: CRC-32C over exactly those bytes, in hex.
    crc32c: str


class Hour(Out):
    hour: str
    sealed: bool
    mapped: bool
    log: HourFileOut
    idx: HourFileOut
    dsp: HourFileOut


class Hours(Out):
    applied_index: str
    hours: list[Hour]


class SnapshotFileOut(Out):
    name: str
    bytes: str
    #: CRC-32C over exactly those bytes, in hex.
    crc32c: str


class Snapshot(Out):
    id: str
    cluster_id: str
    group: int
    index: str
    term: int
    feature_level: int
    #: Cluster time: nothing in it is later.
    time: str
    files: list[SnapshotFileOut]


class Names(Out):
    topics: dict[str, int]
    consumers: dict[str, int]
    nodes: dict[str, int]
    #: Why attempts failed.
    reasons: dict[str, int]


class ReadyQuery(In):
    verbose: str | None = None
    exclude: str | None = None


class QuorumQuery(In):
    #: The node that would stop; the one that is asked, if not given.
    without: str | None = None


class Quorum(Out):
    """Who would be left, as the asked node sees it."""

    without: str
    left: list[str]
    members: int
    needed: int


class CheckOut(Out):
    name: str
    ok: bool
    #: How it stands, or what is wrong.
    detail: str = ""


class Health(Out):
    status: Literal["ok", "failing"]
    checks: list[CheckOut] = field(default_factory=list)
