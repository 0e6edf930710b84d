"""What HTTP asks of a node: doors by noun. `server.service` implements them.

Arguments are plain values: ids are u64 ints, times Unix ms, durations ms, names str. Answers are the documents of this
package, their times as text. Linearizability, forwarding to the leader, group commit and the wait for a majority are
the service's. Refusals are raised as `hadelay.errors`, ready to be answered. Every method may be called on any node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, Protocol

from msgspec import Struct

from hadelay.api.cluster import CheckOut, Cluster, Hour, Names, Quorum, Snapshot
from hadelay.api.consuming import Received
from hadelay.api.messages import DeadLetter, Message
from hadelay.api.metrics import Measured
from hadelay.api.topics import Topic
from hadelay.errors import HadelayError
from hadelay.model import Draft, Key, State
from hadelay.rights import AuditEntry, Token

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


class ReceiveRequest(Struct):
    """What a consumer asks for. `max`, `wait_ms` and `lease_ms` are within the limits already."""

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


class Handed(NamedTuple):
    """Messages for one receive, each with its payload as `body`. Their reader may change them."""

    messages: list[Received[str]]
    #: To be called when the answer is written: the messages are handed out then.
    answered: Callable[[], None] = lambda: None


class ListRequest(Struct):
    """Messages of a topic that are in one of these states, due in [from_ms, to_ms), with all of these tags."""

    states: frozenset[State]
    from_ms: int
    to_ms: int
    tags: tuple[str, ...]
    #: Where the page before this one ended.
    after: Key
    limit: int


class Leader(Struct):
    name: str
    #: `http.advertise` of the leader.
    url: str
    #: This node is it.
    here: bool


class Actor(Struct, frozen=True):
    """The token of a request, as the audit trail shows it. Both fields are empty in a cluster without tokens."""

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


# ---- the doors


class ConsumeDoor(Protocol):
    async def receive(self, ask: ReceiveRequest) -> Handed:
        """On the leader (elsewhere: NoLeader). Waits up to ask.wait_ms; nothing in time is an empty answer.

        Cancelling withdraws the request; once a grant was proposed for it, the grant stands until its lease ends.
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

    async def topics_of_leases(self, leases: list[str]) -> set[str]:
        """Names; leases that mean nothing are passed over."""
        ...


class MessageDoor(Protocol):
    async def describe(self, target: Target, *, body: bool, stale: bool) -> Message[str]:
        """Raises NotFound for an id never issued, or past its retention. `stale`: this node's state, unconfirmed."""
        ...

    async def cancel(self, target: Target) -> str:
        """cancelled (again, too) | leased | acked | expired | dead; raises NotFound."""
        ...

    async def reschedule(self, target: Target, when_ms: int, relative: bool) -> tuple[int, int]:
        """(id, deliver_at_ms). Raises NotFound, Impossible, and Conflict whose outcome is leased, acked, cancelled,
        expired or dead."""
        ...

    async def list_messages(self, name: str, ask: ListRequest, *, stale: bool) -> tuple[list[Message[str]], Key | None]:
        """In due order, without their histories; and where the next page begins, None: there is none. Raises NotFound
        when there is no such topic."""
        ...

    async def dead_letters(
        self, topic: str, after: bytes, limit: int, *, body: bool, stale: bool
    ) -> tuple[list[DeadLetter[str]], bytes | None]:
        """In the order of their deaths, behind `after` (b"": from the first); and where the next page begins. Raises
        NotFound: no such topic."""
        ...

    async def redrive(self, topic: str, ids: list[int], by: Actor) -> list[str]:
        """Per id: redriven; key_taken; or what it is instead: scheduled, ready, leased, acked, cancelled, expired,
        not_found."""
        ...

    async def redrive_all(self, topic: str, rate: float | None, by: Actor) -> int:
        """Begin to redrive all dead letters there are now, `rate` per second; how many they are."""
        ...

    async def purge(self, topic: str, states: list[str], by: Actor) -> None:
        """Of scheduled, ready, dead: what was published (or died) before. Raises NotFound, LimitReached."""
        ...


class TopicDoor(Protocol):
    async def put_topic(self, name: str, config: dict[str, Any], by: Actor) -> Topic[str]:
        """Raises BadRequest, with what is wrong. None as a value takes a setting back."""
        ...

    async def get_topic(self, name: str, *, stale: bool) -> Topic[str]: ...

    async def list_topics(self, *, stale: bool) -> list[Topic[str]]: ...

    async def delete_topic(self, name: str, *, force: bool, by: Actor) -> None:
        """Raises Conflict while messages are pending, unless `force`: then they are cancelled."""
        ...

    async def due(
        self, topic: str | None, from_ms: int, to_ms: int, step_ms: int, *, stale: bool
    ) -> tuple[list[int], list[int]]:
        """(start of bucket in ms, count) of the non-empty buckets of [from_ms, to_ms), in order."""
        ...


class ClusterDoor(Protocol):
    async def find_leader(self) -> Leader:
        """At once when it is known; otherwise waits up to two seconds, then raises NoLeader."""
        ...

    async def view(self, *, stale: bool) -> Cluster[str]: ...

    async def transfer(self, to: str | None, by: Actor) -> str:
        """Hand leadership to `to`, or to the follower that has most; returns the new leader's name."""
        ...

    async def drain(self, node: str, undo: bool, by: Actor) -> None:
        """`node` hands over, and takes no publishes and polls until that is undone, or it restarts."""
        ...

    async def add_member(self, name: str, raft: str, by: Actor) -> None:
        """As a learner; it becomes a voter by itself. Raises Conflict, in words, whatever forbids it."""
        ...

    async def remove_member(self, name: str, by: Actor) -> None:
        """Raises NotFound, or Conflict in words. A leader hands over first."""
        ...

    def livez(self) -> list[CheckOut]:
        """Is this process worth keeping? Never depends on a quorum, or a partition would restart every node."""
        ...

    def readyz(self) -> list[CheckOut]:
        """Can it serve: leader known, caught up, disk fine."""
        ...

    def quorum(self, without: str) -> Quorum:
        """As far as this node sees, at once. Raises NotFound: no such member."""
        ...


class FileDoor(Protocol):
    async def hours(self) -> tuple[int, Iterator[Hour]]:
        """The applied index, and the hours of then: ascending, dead ones last; to go through once."""
        ...

    async def hour_file_length(self, hour: int, file: HourFile) -> int:
        """Committed bytes; raises NotFound."""
        ...

    async def read_hour_file(self, hour: int, file: HourFile, offset: int, length: int) -> bytes:
        """Exactly `length` bytes, within what hour_file_length said."""
        ...

    async def open_snapshot(self) -> Snapshot:
        """Of everything that was committed before the call. Raises Overloaded."""
        ...

    async def snapshot_file_length(self, snapshot: str, file: str) -> int:
        """Raises NotFound, also when the snapshot was given up."""
        ...

    async def read_snapshot(self, snapshot: str, file: str, offset: int, length: int) -> bytes:
        """Exactly `length` bytes, within what snapshot_file_length said."""
        ...

    async def release_snapshot(self, snapshot: str) -> None: ...

    async def names(self) -> Names: ...


class AccessDoor(Protocol):
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

    async def create_token(
        self, name: str, digest: bytes, scopes: list[str], lifetime_ms: int | None, by: Actor
    ) -> Token:
        """Raises BadRequest, LimitReached. This node knows it when this returns."""
        ...

    async def revoke_token(self, token_id: str, by: Actor) -> None:
        """Raises NotFound. This node refuses it when this returns, others when they have applied as much."""
        ...

    async def audit(self, after: int, limit: int) -> list[AuditEntry]:
        """Entries with a number above `after`, oldest first, at most `limit`."""
        ...


class Service(Protocol):
    """One node, as its HTTP layer sees it."""

    #: This node's name.
    node: str

    @property
    def consume(self) -> ConsumeDoor: ...
    @property
    def messages(self) -> MessageDoor: ...
    @property
    def topics(self) -> TopicDoor: ...
    @property
    def cluster(self) -> ClusterDoor: ...
    @property
    def files(self) -> FileDoor: ...
    @property
    def access(self) -> AccessDoor: ...

    @property
    def leader_name(self) -> str | None:
        """For the `Hadelay-Leader` header: what this node believes, without asking anyone."""
        ...

    @property
    def applied_index(self) -> int:
        """For the `Hadelay-Applied` header of stale reads."""
        ...

    # Callback style: one publish per request is the hottest path there is, and a future costs more than the call.
    def publish(self, drafts: list[Draft], request_key: bytes | None, done: PublishDone) -> None:
        """Commit the drafts in one entry. `request_key` covers all of them: seen with other drafts → Impossible.

        Raises nothing; Overloaded, NoLeader, DiskFull, LimitReached, OutcomeUnknown and the like come through `done`,
        which may be called before this returns.
        """
        ...

    async def metrics(self) -> Measured:
        """In slices: others on the loop have their turns meanwhile, however many topics there are."""
        ...
