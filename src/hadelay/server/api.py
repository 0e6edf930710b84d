"""What the HTTP layer asks of a node, and the words both sides use. `server.service` implements it.

Everything here is plain values: ids are u64 ints, times are Unix ms, durations ms, names str, `meta` the msgpack map
of a record (content type, key, tags, the caller's own meta) exactly as it was published. Text forms (13-character
ids, RFC 3339, base64) are the HTTP layer's business. Linearizability, forwarding to the leader, group commit and
the wait for a majority are the service's. Refusals are raised as `hadelay.errors`, ready to be answered.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from msgspec import Struct

from hadelay.codec.publishcommand import Draft
from hadelay.errors import HadelayError
from hadelay.http import types
from hadelay.model import Description, HistoryEvent, Key, State
from hadelay.rights import AuditEntry, Token
from hadelay.storage.manifest import SnapshotFile

#: Files of an hour that other nodes and Spark may read.
HourFile = Literal["log", "idx", "dsp"]
HOUR_FILES: tuple[HourFile, ...] = ("log", "idx", "dsp")
SettleKind = Literal["ack", "nack", "extend"]


class Receipts(Struct):
    """What became of the drafts of one publish, in their order. Plain lists: the next step is text."""

    ids: list[int]
    deliver_at_ms: list[int]
    #: Rows whose idempotency key (or the request's) had been seen with the same content: the first answer again.
    duplicates: frozenset[int] = frozenset()
    #: Rows refused on their own; id and deliver_at_ms of such a row mean nothing. Empty when all went well.
    problems: dict[int, HadelayError] = {}
    #: The message that a row replaced (on_conflict = replace).
    replaced: dict[int, int] = {}


#: A message, by its id or by (topic, client key).
Target = int | tuple[str, bytes]

#: Called exactly once, on the loop: with receipts, or with the error that befell the whole request.
PublishDone = Callable[[Receipts | None, HadelayError | None], None]


class Poll(Struct):
    """A consumer's wish. `max`, `wait_ms` and `lease_ms` are within the limits already."""

    topics: list[str]
    consumer: str
    #: 1 to 64 bytes; the same {consumer, request_id} again gets the same grant, as far as it is still held.
    request_id: bytes
    max: int
    wait_ms: int
    #: None: the topic's own lease, or the node's default.
    lease_ms: int | None
    #: Only messages with all of `tags`, and with one of `any_tags` if there are any.
    tags: tuple[str, ...] = ()
    any_tags: tuple[str, ...] = ()


class Delivered(Struct):
    """One message of a hand-out."""

    id: int
    lease: str
    topic: str
    meta: bytes | memoryview
    body: bytes | memoryview
    deliver_at_ms: int
    late_ms: int
    attempt: int
    #: It may have been handed out before.
    redelivered: bool


class Delivery(Struct):
    messages: list[Delivered]
    lease_until_ms: int
    #: As of the moment the service answered, in cluster time.
    lease_left_ms: int
    #: To be called when the answer is written: the messages are handed out then.
    answered: Callable[[], None] = lambda: None


class ListWish(Struct):
    """Messages of a topic that are in one of these states, due in [from_ms, to_ms), with all of these tags."""

    states: frozenset[State]
    from_ms: int
    to_ms: int
    tags: tuple[str, ...]
    #: Where the page before this one ended.
    after: Key
    limit: int


class MessagePage(Struct):
    #: Without their histories.
    messages: list[Description]
    #: Where the next page begins; None: there is none.
    after: Key | None


class DeadLetterView(Struct):
    #: Without its history.
    message: Description
    died_at_ms: int
    #: The last attempts that ended without an ack (nacked, lease_expired), the first of them first.
    errors: list[HistoryEvent]


class DeadPage(Struct):
    letters: list[DeadLetterView]
    #: Where the next page begins; None: there is none.
    after: bytes | None


class TopicView(Struct):
    name: str
    #: What was set (settings/topic.py).
    config: dict[str, Any]
    scheduled: int
    ready: int
    leased: int
    dead: int
    #: None: nothing is ready.
    oldest_ready_age_ms: int | None
    #: Of the records of what is pending.
    bytes: int = 0
    #: (messages, p50, p99 and maximum in ms) of what was handed out in the last minutes of this leader.
    lateness: tuple[int, float, float, float] | None = None
    #: Who asked for it last, and the cluster time of that, as the leader knows; None: that is not known here.
    consumers: list[tuple[str, int]] | None = None


class MemberView(Struct):
    name: str
    http: str
    raft: str
    #: leader, follower, unknown when nothing was heard of it; or learner: it does not vote yet.
    role: str
    applied_index: int
    lag: int
    version: str
    clock_skew_ms: float | None
    #: The highest that its program knows; 0 when nothing was heard of it.
    feature_level: int = 0


class DispatchView(Struct):
    """The replicated dispatch cursor (S2): everything before it was made ready."""

    hour: int
    second: int
    local_index: int
    sync: Literal["commit", "interval"]


class ClusterView(Struct):
    cluster_id: str
    leader: str | None
    term: int
    applied_index: int
    #: Cluster time.
    time_ms: int
    dispatch: DispatchView
    members: list[MemberView]
    #: What the cluster has switched to.
    feature_level: int = 1


class HourView(Struct):
    hour: int
    #: Committed entries and bytes of each file, and the CRC-32C over exactly those.
    files: dict[HourFile, tuple[int, int, int]]
    sealed: bool
    mapped: bool


class HoursView(Struct):
    applied_index: int
    #: Ascending, dead ones last; to go through once.
    hours: Iterator[HourView]


class SnapshotView(Struct):
    """A checkpoint whose files stay as they are until it is released, or not read from for a minute."""

    id: str
    cluster_id: str
    group: int
    index: int
    term: int
    feature_level: int
    #: Cluster time: nothing in it is later.
    time_ms: int
    files: list[SnapshotFile]


#: These are answered as they are.
Check = types.CheckOut
QuorumView = types.Quorum


class Leader(Struct):
    name: str
    #: `http.advertise` of the leader.
    url: str
    #: This node is it.
    here: bool


class Histogram(Struct):
    """Counts per bucket (not cumulative); one more bucket than bounds, for what is above the last."""

    bounds: Sequence[float]
    counts: list[int]
    sum: float = 0.0

    @classmethod
    def of(cls, bounds: Sequence[float]) -> Histogram:
        return cls(bounds, [0] * (len(bounds) + 1))

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Family(NamedTuple):
    """One metric: docs/reference/metrics.md lists it so, and http.metrics writes it so."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


#: What a family shows: one number, a number per values of its labels, or a histogram.
Values = float | Mapping[tuple[str, ...], float] | Histogram
#: Read at scrape time. Counters are of this process, but for those of messages: they are the cluster's.
Measured = list[tuple[Family, Values]]


class Actor(Struct, frozen=True):
    """Who asks: by which token, both empty where none are asked for."""

    token_id: str = ""
    token: str = ""


class Granting(asyncio.CancelledError):
    """A receive was cancelled when something may have been granted to it: nobody can say that nothing happened."""


async def answered(begin: Callable[[Callable[..., None]], object]) -> Any:
    """What `begin` tells its `done`: the result, or the error is raised."""
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    begin(settled_by(future))
    return await future


def settled_by(future: asyncio.Future[Any]) -> Callable[..., None]:
    """done(result, error) or done(error) for a future that its reader may have given up."""

    def done(*said: Any) -> None:
        if future.done():
            return
        error = said[-1]
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(said[0])

    return done


class Service(Protocol):
    """One node, as its HTTP layer sees it. Every method may be called on any node."""

    #: This node's name.
    node: str

    def acting(self, who: Actor) -> Service:
        """The same, for `who`: what goes into the audit trail says so."""
        ...

    @property
    def tokens(self) -> Mapping[str, Token]:
        """By id, as this node knows them: another mapping whenever they are others."""
        ...

    @property
    def knows_tokens(self) -> bool:
        """Since it started this node has been up to date once."""
        ...

    def now_ms(self) -> int:
        """Cluster time."""
        ...

    async def list_tokens(self) -> list[Token]: ...

    async def create_token(self, name: str, digest: bytes, scopes: list[str], lifetime_ms: int | None) -> Token:
        """Raises BadRequest, LimitReached. This node knows it when this returns."""
        ...

    async def revoke_token(self, token_id: str) -> None:
        """Raises NotFound. This node refuses it when this returns, others when they have applied as much."""
        ...

    async def audit(self, after: int, limit: int) -> list[AuditEntry]:
        """Entries with a number above `after`, oldest first, at most `limit`."""
        ...

    async def topics_of_leases(self, leases: list[str]) -> set[str]:
        """Names; leases that mean nothing are passed over."""
        ...

    @property
    def leader_name(self) -> str | None:
        """For the `Hadelay-Leader` header: what this node believes, without asking anyone."""
        ...

    # Callback style: one publish per request is the hottest path there is, and a future costs more than the call.
    def publish(self, drafts: list[Draft], request_key: bytes | None, done: PublishDone) -> None:
        """Commit the drafts in one entry. `request_key` covers all of them: seen with other drafts → Impossible.

        Raises nothing; Overloaded, NoLeader, DiskFull, LimitReached, OutcomeUnknown and the like come through `done`,
        which may be called before this returns.
        """
        ...

    async def find_leader(self) -> Leader:
        """At once when it is known; otherwise waits up to two seconds, then raises NoLeader."""
        ...

    async def receive(self, poll: Poll) -> Delivery:
        """On the leader (elsewhere: NoLeader). Waits up to poll.wait_ms; nothing in time is an empty delivery.

        Cancelling withdraws the poll; once a grant was proposed for it, the grant stands until its lease ends.
        """
        ...

    async def settle(
        self, kind: SettleKind, leases: list[str], value_ms: int | None, reason: str = "", *, count: bool = True
    ) -> list[str]:
        """After commit, the outcome per token: acked | nacked | extended, already_acked, lease_lost (malformed too).
        reason: of a nack, at most 128 bytes. count: whether a nack counts as an attempt; below level 3 each does.

        value_ms: the delay of a nack (None: the topic's), the new lease of an extend (required), None for ack.
        """
        ...

    async def describe(self, target: Target, *, body: bool, stale: bool) -> Description:
        """Raises NotFound for an id never issued, or past its retention. `stale`: this node's state, unconfirmed."""
        ...

    async def cancel(self, target: Target) -> str:
        """cancelled (again, too) | leased | acked | expired | dead; raises NotFound."""
        ...

    async def reschedule(self, target: Target, when_ms: int, relative: bool) -> tuple[int, int]:
        """(id, deliver_at_ms). Raises NotFound, Impossible, and Conflict whose outcome is leased, acked, cancelled,
        expired or dead."""
        ...

    async def list_messages(self, topic: str, wish: ListWish, *, stale: bool) -> MessagePage:
        """In due order, without their histories. Raises NotFound when there is no such topic."""
        ...

    async def dead_letters(self, topic: str, after: bytes, limit: int, *, body: bool, stale: bool) -> DeadPage:
        """In the order of their deaths, behind `after` (b"": from the first). Raises NotFound: no such topic."""
        ...

    async def redrive(self, topic: str, ids: list[int]) -> list[str]:
        """Per id: redriven; key_taken; or what it is instead: scheduled, ready, leased, acked, cancelled, expired,
        not_found."""
        ...

    async def redrive_all(self, topic: str, rate: float | None) -> int:
        """Begin to redrive all dead letters there are now, `rate` per second; how many they are."""
        ...

    async def purge(self, topic: str, states: list[str]) -> None:
        """Of scheduled, ready, dead: what was published (or died) before. Raises NotFound, LimitReached."""
        ...

    async def put_topic(self, name: str, config: dict[str, Any]) -> TopicView:
        """Raises BadRequest, with what is wrong. None as a value takes a setting back."""
        ...

    async def get_topic(self, name: str, *, stale: bool) -> TopicView: ...

    async def list_topics(self, *, stale: bool) -> list[TopicView]: ...

    async def delete_topic(self, name: str, *, force: bool) -> None:
        """Raises Conflict while messages are pending, unless `force`: then they are cancelled."""
        ...

    async def due(
        self, topic: str | None, from_ms: int, to_ms: int, step_ms: int, *, stale: bool
    ) -> tuple[list[int], list[int]]:
        """(start of bucket in ms, count) of the non-empty buckets of [from_ms, to_ms), in order."""
        ...

    async def cluster(self, *, stale: bool) -> ClusterView: ...

    async def transfer(self, to: str | None) -> str:
        """Hand leadership to `to`, or to the follower that has most; returns the new leader's name."""
        ...

    async def drain(self, node: str, undo: bool) -> None:
        """`node` hands over, and takes no publishes and polls until that is undone, or it restarts."""
        ...

    async def add_member(self, name: str, raft: str) -> None:
        """As a learner; it becomes a voter by itself. Raises Conflict, in words, whatever forbids it."""
        ...

    async def remove_member(self, name: str) -> None:
        """Raises NotFound, or Conflict in words. A leader hands over first."""
        ...

    @property
    def applied_index(self) -> int:
        """For the `Hadelay-Applied` header of stale reads."""
        ...

    async def hours(self) -> HoursView: ...

    async def hour_file_length(self, hour: int, file: HourFile) -> int:
        """Committed bytes; raises NotFound."""
        ...

    async def read_hour_file(self, hour: int, file: HourFile, offset: int, length: int) -> bytes:
        """Exactly `length` bytes, within what hour_file_length said."""
        ...

    async def open_snapshot(self) -> SnapshotView:
        """Of everything that was committed before the call. Raises Overloaded."""
        ...

    async def snapshot_file_length(self, snapshot: str, file: str) -> int:
        """Raises NotFound, also when the snapshot was given up."""
        ...

    async def read_snapshot(self, snapshot: str, file: str, offset: int, length: int) -> bytes:
        """Exactly `length` bytes, within what snapshot_file_length said."""
        ...

    async def release_snapshot(self, snapshot: str) -> None: ...

    async def names(self) -> Mapping[str, dict[str, int]]:
        """name → number, of topics, consumers, nodes and reasons."""
        ...

    def livez(self) -> list[Check]:
        """Is this process worth keeping? Never depends on a quorum, or a partition would restart every node."""
        ...

    def readyz(self) -> list[Check]:
        """Can it serve: leader known, caught up, disk fine."""
        ...

    def quorum(self, without: str) -> QuorumView:
        """As far as this node sees, at once. Raises NotFound: no such member."""
        ...

    async def metrics(self) -> Measured:
        """In slices: others on the loop have their turns meanwhile, however many topics there are."""
        ...
