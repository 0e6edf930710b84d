"""Types of arguments and results of a node's methods (server/service), besides the types of the HTTP API."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from msgspec import Struct

from hadelay.api.consuming import Received
from hadelay.errors import HadelayError
from hadelay.model import Key, State

#: Name suffixes of the hour files that other nodes and Spark may read.
HourFile = Literal["log", "idx", "dsp"]
HOUR_FILES: tuple[HourFile, ...] = ("log", "idx", "dsp")
SettleKind = Literal["ack", "nack", "extend"]


class Receipts(Struct):
    """Results of one publish: each list has one value per message, in the order of the request. A row is a message's
    position."""

    ids: list[int]
    deliver_at_ms: list[int]
    #: Rows of messages that repeat an earlier publish under the same idempotency key: their values in `ids` and
    #: `deliver_at_ms` are those of the earlier messages.
    duplicates: frozenset[int] = frozenset()
    #: Row → error of a refused message, whose values in `ids` and `deliver_at_ms` mean nothing.
    problems: dict[int, HadelayError] = {}
    #: Row → id of the message that this row's message replaced (on_conflict = replace).
    replaced: dict[int, int] = {}


#: Reference to a message: its id, or (topic, client key).
Target = int | tuple[str, bytes]

#: Callback of a publish, called exactly once, on the event loop, with receipts or with the error of the whole request.
PublishDone = Callable[[Receipts | None, HadelayError | None], None]


class ReceiveRequest(Struct):
    """A consumer's request for messages; `max`, `wait_ms` and `lease_ms` are within the limits."""

    topics: list[str]
    consumer: str
    #: Idempotency id of the receive, 1 to 64 bytes: a retry with it gets the messages again that are still leased.
    request_id: bytes
    max: int
    wait_ms: int
    #: Length of the leases; None: the topic's own lease, or the node's default.
    lease_ms: int | None
    #: Filter: only messages with all `tags`, and with one of `any_tags` if there are any.
    tags: tuple[str, ...] = ()
    any_tags: tuple[str, ...] = ()
    #: Whether messages of earlier topics go first; otherwise topics take turns.
    listed: bool = False
    #: Limit of messages of one message group in the answer.
    group_max: int = 1
    #: Name of the node that relayed the receive, as a header of the request says; "" if no node did.
    node: str = ""


class Handed(NamedTuple):
    """Messages that one receive leased, each with its payload as `body`. The caller may change the messages."""

    messages: list[Received[str]]
    #: Function that the caller must call once the answer is written.
    answered: Callable[[], None] = lambda: None
    #: Times at which the messages were published, in Unix ms. They can be read only once, because an iterator computes
    #: them.
    published_ms: Iterable[int] = ()


class ListRequest(Struct):
    """Query of a topic's messages that are in one of `states`, due in [from_ms, to_ms), and have all `tags`."""

    states: frozenset[State]
    from_ms: int
    to_ms: int
    tags: tuple[str, ...]
    #: Position (due time, id) of the last message of the previous page.
    after: Key
    limit: int
    #: Whether the list has the messages' bodies.
    body: bool = False
    #: Whether the list also has messages that wait after a failed attempt, independent of `states`.
    retrying: bool = False


class Histogram(Struct):
    """Counts per bucket, not cumulative; the last bucket is for values above the last bound."""

    bounds: Sequence[float]
    counts: list[int]
    sum: float = 0.0

    @classmethod
    def of(cls, bounds: Sequence[float]) -> Histogram:
        return cls(bounds, [0] * (len(bounds) + 1))

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class Family(NamedTuple):
    """A metric. Its name, kind and help text are public: do not change them."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


#: Values of a metric: one number, a number per tuple of label values, or a histogram.
Values = float | Mapping[tuple[str, ...], float] | Histogram
#: Metrics with their values. Counters begin at 0 with the process, except replicated counts of messages.
Measured = list[tuple[Family, Values]]


class Leader(Struct):
    name: str
    #: URL of the leader: its setting `http.advertise`.
    url: str
    #: Whether this node is the leader.
    here: bool


class Actor(Struct, frozen=True):
    """The token of a request, as the audit trail shows it. Both fields are empty in a cluster without tokens."""

    token_id: str = ""
    token: str = ""


class Granting(asyncio.CancelledError):
    """Cancellation of a receive whose grant may have been proposed already, so that messages may be leased."""


async def answered(begin: Callable[..., object], *args: Any) -> Any:
    """Call begin(*args, done), and wait until done(result, error) is called; returns the result or raises the error."""
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    begin(*args, settled_by(future))
    return await future


def settled_by(future: asyncio.Future[Any]) -> Callable[..., None]:
    """A callback done(result, error) or done(error) that settles the future, unless the future was cancelled."""

    def done(*said: Any) -> None:
        if future.done():
            return
        error = said[-1]
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(said[0])

    return done
