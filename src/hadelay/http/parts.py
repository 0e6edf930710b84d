"""Requests with parts that belong to several shards: settling leases, and publishing batches of messages.

Each part goes to its own shard, all at once, with the client's headers: its token, and its Idempotency-Key. A repeated
request is divided alike, because a topic stays in its shard, so each shard sees its own part again under the same key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec.structs import asdict

from hadelay.api.problems import NONSENSE, refusal
from hadelay.api.publishing import BatchResult, BatchResults
from hadelay.api.publishrequest import UsualItem
from hadelay.errors import HadelayError, Impossible, OutcomeUnknown
from hadelay.http.answers import JSON, MSGPACK, Answer
from hadelay.http.call import Call
from hadelay.http.decoding import MSGPACK_NAMES
from hadelay.http.forwarding.forwarder import Destination
from hadelay.http.forwarding.heads import forward_head
from hadelay.http.sharding import KEYED, UNKNOWN, ShardRouter

T = TypeVar("T")
#: Outcome of a lease that a shard does not know, or no longer knows.
_LOST = "lease_lost"
#: Headers that a part does not take from the client's request, but sets itself.
_OF_THE_WHOLE = frozenset((b"accept", b"content-type"))


async def ask_shard(
    call: Call, to: Destination, *, method: str = "", target: str = "", part: tuple[bytes, str] | None = None
) -> Answer:
    """Send a request to a shard with the client's headers; returns the answer. method, target: replace those of the
    client's request. part: (body, media type), replaces the client's body; the answer is then JSON. Raises
    HadelayError, also if the shard refuses the request."""
    fields, body = call.request.raw_headers, call.data or b""
    if part is not None:
        body, kind = part
        fields = [field for field in fields if field[0].lower() not in _OF_THE_WHOLE]
        fields += [(b"Content-Type", kind.encode()), (b"Accept", JSON.encode())]
    method, keyed = method or call.request.method, call.route.name in KEYED
    head = forward_head(method, target or call.target, fields, call.service.node, keyed=keyed)
    answer = await call.context.forwarder.answer(to, head, body)
    if not 200 <= answer.status < 300:
        error = refusal(f"shard {to.shard}", head.method, answer.status, answer.headers, answer.body)
        error.detail = f"shard {to.shard}: {error.detail}"
        raise error
    return answer


async def ask_part(call: Call, to: Destination, body: bytes, kind: str, document: type[T]) -> T:
    """Send a part to its shard; returns the answer, decoded; None for an answer without content. kind: media type of
    the body. Raises HadelayError."""
    answer = await ask_shard(call, to, part=(body, kind))
    try:
        return msgspec.json.decode(answer.body or b"null", type=document)
    except NONSENSE as error:
        what = f"shard {to.shard}: its answer is not that of a node ({error})"
        raise OutcomeUnknown(what) from None


async def all_parts(parts: Iterable[Awaitable[T]]) -> list[T | HadelayError]:
    """Wait for all parts of a request: results in their order, an error in place of each failed part. Cancelling
    cancels all parts."""
    found = await asyncio.gather(*parts, return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException) and not isinstance(one, HadelayError):
            raise one
    return found  # type: ignore[return-value]


def failure_of_all(found: Sequence[object]) -> HadelayError | None:
    """Error of a request that succeeds only if all its parts do; None if all did. An unknown outcome takes
    precedence."""
    errors = [one for one in found if isinstance(one, HadelayError)]
    if not errors:
        return None
    first = min(errors, key=lambda error: error.outcome_known)
    if len(errors) == len(found) or not first.outcome_known:
        return first
    return OutcomeUnknown(f"a part of the request is done, and another part is not: {first.detail}")


# --- settling leases


class _Result(msgspec.Struct):
    outcome: str


class _Results(msgspec.Struct):
    results: list[_Result]


async def settle(call: Call, router: ShardRouter, here: Callable[[list[int]], Awaitable[list[str]]]) -> list[str]:
    """Ack, nack or extend leases at the shards that issued them; returns the outcome of each lease. here: settles the
    leases at the given positions in this shard. Raises the error of a failed part; the client may repeat the whole
    request."""
    leases: list[str] = call.body.leases
    shares: dict[int | None, list[int]] = {}
    for place, lease in enumerate(leases):
        shares.setdefault(router.of_lease(lease), []).append(place)

    async def elsewhere(shard: int, places: list[int]) -> list[str]:
        kind = MSGPACK if call.media_type in MSGPACK_NAMES else JSON
        body = _part_of_leases(call.data or b"", kind, leases, places)
        answer = await ask_part(call, router.destination(shard), body, kind, _Results)
        if len(answer.results) != len(places):
            raise OutcomeUnknown(f"shard {shard}: {len(answer.results)} outcomes of {len(places)} leases")
        return [result.outcome for result in answer.results]

    async def anywhere(places: list[int]) -> list[str]:
        """Settle leases whose group number is not in the shard map: a restored shard has a new number, which the map
        may not have yet. All shards are asked, and only the issuer knows such a lease."""
        found = await all_parts(elsewhere(to.shard, places) for to in router.others())
        answers = [some for some in found if not isinstance(some, HadelayError)] or [[_LOST] * len(places)]
        outcomes = [next((one for one in of_one if one != _LOST), _LOST) for of_one in zip(*answers, strict=True)]
        if _LOST in outcomes and (error := failure_of_all(found)) is not None:
            raise error
        return outcomes

    def part(shard: int | None, places: list[int]) -> Awaitable[list[str]]:
        if shard is None:
            return here(places)
        return anywhere(places) if shard == UNKNOWN else elsewhere(shard, places)

    found = await all_parts(part(shard, places) for shard, places in shares.items())
    if (error := failure_of_all(found)) is not None:
        raise error
    outcomes = [""] * len(leases)
    for places, some in zip(shares.values(), found, strict=True):
        assert not isinstance(some, HadelayError)
        for place, outcome in zip(places, some, strict=True):
            outcomes[place] = outcome
    return outcomes


def _part_of_leases(data: bytes, kind: str, leases: list[str], places: list[int]) -> bytes:
    """Body of a part: the leases at the given positions, and their results. Other members stay as the client sent
    them."""
    form: Any = msgspec.msgpack if kind == MSGPACK else msgspec.json
    document: dict[str, Any] = form.decode(data, type=dict[str, msgspec.Raw])
    document["leases"] = [leases[place] for place in places]
    if "results" in document:
        results = form.decode(document["results"], type=list[msgspec.Raw] | None)
        document["results"] = None if results is None else [results[place] for place in places]
    return form.encode(document)  # type: ignore[no-any-return]


# --- publishing batches


class Division:
    """Divides the items of a batch by the shard that owns the item's topic. Invalid items count as items of this shard,
    which answers each of them with its error."""

    def __init__(self, call: Call, router: ShardRouter) -> None:
        self._call, self._router = call, router
        self._msgpack = call.media_type in MSGPACK_NAMES
        self._owners: dict[str, int | None] = {}
        #: Positions of the items for this shard. And for each other shard: positions of its items, and the encoded
        #: items.
        self.here: list[int] = []
        self.elsewhere: dict[int, tuple[list[int], list[bytes]]] = {}
        self.total = 0
        #: Key of a batch that items join (option `batch`) → owners of these items' topics.
        self._joined: dict[str, set[int | None]] = {}

    def take(self, items: list[Any]) -> list[Any]:
        """Take the next items of the batch; returns the items of this shard."""
        owners, here = self._owners, []
        for place, item in enumerate(items, self.total):
            if isinstance(item, HadelayError):
                owner = None
            elif item.topic in owners:
                owner = owners[item.topic]
            else:
                owner = owners[item.topic] = self._router.owner(item.topic)
            if (batch := getattr(item, "batch", None)) is not None:
                self._joined.setdefault(batch, set()).add(owner)
            if owner is None:
                self.here.append(place)
                here.append(item)
            else:
                places, encoded = self.elsewhere.setdefault(owner, ([], []))
                places.append(place)
                encoded.append(self._encoded(item))
        self.total += len(items)
        return here

    def _encoded(self, item: Any) -> bytes:
        if type(item) is UsualItem:
            return msgspec.msgpack.encode(item)
        found = {name: value for name, value in asdict(item).items() if not _is_absent(name, value)}
        return msgspec.msgpack.encode(found) if self._msgpack else msgspec.json.encode(found)

    def check(self) -> None:
        """Raise Impossible if items for several shards join the same batch. Then nothing of the request is stored."""
        for name, owners in self._joined.items():
            if len(owners) > 1:
                raise Impossible(
                    f"batch: items join the batch {name[:80]!r} in several shards, and a batch counts the messages of "
                    "its own shard alone: publish the messages of one batch to topics of one shard"
                )

    @property
    def only(self) -> Destination | None:
        """The shard to which all items belong, if it is another shard than this one; otherwise None."""
        if self.here or len(self.elsewhere) != 1:
            return None
        return self._router.destination(*self.elsewhere)

    async def publish(self, here: Callable[[], Awaitable[list[BatchResult[str]]]]) -> list[BatchResult[str]]:
        """Publish each part in its shard; returns the results of all items. here: publishes the part for this shard.
        Items of a failed part have its error as result. Raises the error if all parts failed."""
        parts = list(self.elsewhere.items())
        asking: list[Awaitable[list[BatchResult[str]]]] = [self._part(shard, *part) for shard, part in parts]
        all_places = [places for _, (places, _) in parts]
        if self.here:
            asking.append(here())
            all_places.append(self.here)
        found = await all_parts(asking)
        if (error := failure_of_all(found)) is not None and all(isinstance(one, HadelayError) for one in found):
            raise error
        results: list[BatchResult[str]] = [BatchResult()] * self.total
        for places, some in zip(all_places, found, strict=True):
            if isinstance(some, HadelayError):
                some = [BatchResult(error=some.document())] * len(places)
            for place, result in zip(places, some, strict=True):
                results[place] = result
        return results

    async def _part(self, shard: int, places: list[int], encoded: list[bytes]) -> list[BatchResult[str]]:
        if self._msgpack:
            body, kind = b"\xdd" + len(encoded).to_bytes(4) + b"".join(encoded), MSGPACK
        else:
            body, kind = b"[" + b",".join(encoded) + b"]", JSON
        answer = await ask_part(self._call, self._router.destination(shard), body, kind, BatchResults[str])
        if len(answer.results) != len(places):
            what = f"shard {shard} answered with {len(answer.results)} results for {len(places)} messages"
            raise OutcomeUnknown(f"{what}: it is not known which of them are stored")
        return answer.results


def _is_absent(name: str, value: Any) -> bool:
    """Whether a batch item lacks the member. A null `body` is a payload, so it is not absent."""
    if value is msgspec.UNSET or (isinstance(value, msgspec.Raw) and not bytes(value)):
        return True
    return value is None and name != "body"
