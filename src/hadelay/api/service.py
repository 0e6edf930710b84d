"""Arguments and results of calls to a node (server/service) that are no documents of the API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from msgspec import Struct

from hadelay.api.consuming import Received
from hadelay.errors import HadelayError
from hadelay.model import Key, State

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
