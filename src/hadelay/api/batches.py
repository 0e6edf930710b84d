"""HTTP API types about batches: a batch is a set of messages with one callback, which is published once all of them are
settled."""

from typing import Annotated, Any, Generic, Literal, get_args

from msgspec import UNSET, UnsetType, field

from hadelay.api.base import At, Document, Duration, Request, words

On = Literal["complete", "success", "death"]
#: Names in the API of the values of the enum On (codec/batches.py), in the order of these values.
ONS: tuple[On, ...] = get_args(On)
#: States of a batch. open: messages can join; sealed: no message can join; cancelled: its waiting members are being
#: cancelled; done: all members are settled; expired: its lifetime ended before all members were settled.
STATES = ("open", "sealed", "cancelled", "done", "expired")


class BatchCallback(Request, kw_only=True):
    """Message that is published once all members of a batch are settled. `body` and `body_base64` are as in a publish
    of many messages; without both, the body is a JSON document with the key and the counts of the batch."""

    topic: str
    body: Any = UNSET
    body_base64: str | UnsetType = UNSET
    content_type: str | None = None
    tags: list[str] = field(default_factory=list)
    meta: dict[str, str] = field(default_factory=dict)
    #: Time from the end of the batch until the callback is due.
    delay: Duration | None = None
    #: TTL of the callback, from its due time.
    ttl: Duration | None = None


class OpenBatch(Request, kw_only=True):
    #: Your name for the batch: at most 128 characters of A-Z a-z 0-9 . _ ~ -, and not with a dot in front.
    key: str
    callback: BatchCallback
    #: When to publish the callback, once all members are settled: in any case; if every member was acked; or if a
    #: member became a dead letter.
    on: On = "complete"
    #: Lifetime: an unfinished batch expires after this time, without a callback; its messages are delivered
    #: nonetheless. Default: 7d.
    ttl: Duration | None = None


class BatchQuery(Request):
    stale: bool = False


class ListBatchesQuery(Request):
    limit: int = 100
    #: Cursor from the previous page.
    cursor: str | None = None
    stale: bool = False


class Batch(Document, Generic[At], kw_only=True, frozen=True):
    batch: str
    state: Annotated[str, words(*STATES)]
    on: Annotated[str, words(*ONS)]
    #: Topic of the callback.
    topic: str
    #: Numbers of members: of all, of those that are not settled yet, and of the settled ones by outcome.
    joined: int
    pending: int
    acked: int
    dead: int
    expired: int
    cancelled: int
    #: Share of the members that are settled, from 0 to 1.
    progress: float
    opened_at: At
    sealed_at: At | None = None
    ended_at: At | None = None
    #: Time at which an unfinished batch expires, or at which a finished batch is deleted.
    until: At
    #: Id of the callback, once it is published.
    callback_id: str | None = None
    #: Name of the token that opened the batch.
    creator: str | None = None


class Batches(Document, frozen=True):
    """A page of batches, the newest first. A page may be short: more pages follow until `cursor` is null."""

    batches: list[Batch[str]]
    cursor: str | None


class BatchFailure(Document, Generic[At], frozen=True):
    """A member of a batch that was not acked."""

    id: str
    at: At
    outcome: Annotated[str, words("dead", "expired", "cancelled")]


class BatchFailures(Document, frozen=True):
    """A page of failures in the order of their times; a batch remembers the first 1,000."""

    failures: list[BatchFailure[str]]
    cursor: str | None
