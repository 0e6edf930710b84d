"""Requests that concern all shards: each shard gets the whole request, and the answers are merged into one.

    merged(…)   a list: rows of all shards; a shard that does not answer fails the request, or is named in `missing`
    wherever    a name that one of the shards knows: that shard's answer
    in_all      a change that each shard may carry out: done once all shards have done it
    of_one      refused until the request names a shard

A route names one of these functions (`Route.shards`). Each shard checks the token itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple, NoReturn
from urllib.parse import unquote_plus

import msgspec

from hadelay.api.problems import NONSENSE
from hadelay.errors import Conflict, HadelayError, Impossible, NoLeader, NotFound
from hadelay.http.answers import Answer
from hadelay.http.call import Call
from hadelay.http.parts import all_parts, ask_shard, failure_of_all

#: Limit of rows that are decoded for sorting before other requests have their turn.
_ROWS_AT_ONCE = 500
#: Shard → members of its list. Their values are still encoded: as MessagePack if the client accepts it, otherwise as
#: JSON.
Lists = dict[int, dict[str, msgspec.Raw]]
#: Function that merges the shards' lists: returns the members of the merged document.
Combine = Callable[[Call, Lists], Awaitable[dict[str, Any]]]
Over = Callable[[Call], Awaitable[Answer]]


async def ask_all(call: Call, more: str = "") -> dict[int, Answer | HadelayError]:
    """Send the request to each shard of the map, this one included: shard → its answer, or its error. more: an option
    for the query of the requests to other shards, such as cursors=true; it replaces the client's own."""
    router = call.router
    assert router is not None
    assert router.here is not None
    others, target = router.others(), call.target
    if more:
        target = _with_option(target, more)
    asking: list[Awaitable[Answer]] = [_here(call, router.here)]
    asking += [ask_shard(call, to, target=target) for to in others]
    found = await all_parts(asking)
    return dict(sorted(zip([router.here, *(to.shard for to in others)], found, strict=True)))


def _with_option(target: str, option: str) -> str:
    """Add an option to the query of a path; it replaces options of the same name."""
    path, _, query = target.partition("?")
    name = option.partition("=")[0]
    pairs = [pair for pair in query.split("&") if pair and unquote_plus(pair.partition("=")[0]) != name]
    return f"{path}?{'&'.join([*pairs, option])}"


async def _here(call: Call, shard: int) -> Answer:
    try:
        return await call.route.handler(call)  # type: ignore[no-any-return]
    except HadelayError as error:
        if error.retryable:
            error.detail = f"shard {shard}: {error.detail}"
        raise


# --- lists over all shards


def merged(combine: Combine, more: str = "") -> Over:
    """Make a route's function for a list over all shards. combine: merges the shards' lists. more: option for the query
    to other shards."""

    async def answer(call: Call) -> Answer:
        lists, missing = await _lists(call, more)
        document = await combine(call, lists)
        return call.answer({**document, "missing": missing} if missing else document)

    return answer


async def _lists(call: Call, more: str) -> tuple[Lists, list[int]]:
    """(lists by shard, shards without an answer). Raises the error of this shard if a retry cannot help, and the error
    of any shard unless the query accepts a partial list."""
    found, lists, errors = await ask_all(call, more), Lists(), dict[int, HadelayError]()
    for shard, one in found.items():
        try:
            lists[shard] = _decoded(call, shard, one)
        except HadelayError as error:
            errors[shard] = error
    assert call.router is not None
    own = None if call.router.here is None else errors.get(call.router.here)
    if own is not None and not own.retryable:
        raise own
    if errors and not (lists and call.query.partial):
        raise next(iter(errors.values()))
    return lists, list(errors)


def _decoded(call: Call, shard: int, answer: Answer | HadelayError) -> dict[str, msgspec.Raw]:
    if isinstance(answer, HadelayError):
        raise answer
    try:
        return call.decode(answer.body, dict[str, msgspec.Raw])
    except NONSENSE as error:
        what = f"shard {shard}: its answer is not that of a node ({error})"
        raise NoLeader(what, retry_after_ms=200) from None


@dataclass(frozen=True)
class Rows:
    """Merges the rows of the shards' lists. member: name of the document's member that has the rows. kind: type of a
    row, with only the members that sorting needs. order: sort key of such a row."""

    member: str
    kind: type
    order: Callable[[Any], Any]

    async def of(self, call: Call, lists: Lists) -> list[tuple[Any, msgspec.Raw]]:
        """Rows of all shards' lists, sorted by their keys: (sort key, encoded row)."""
        found = list[tuple[Any, msgspec.Raw]]()
        for one in lists.values():
            rows = call.decode(one[self.member], list[msgspec.Raw])
            for first in range(0, len(rows), _ROWS_AT_ONCE):
                found += [(self.order(call.decode(row, self.kind)), row) for row in rows[first : first + _ROWS_AT_ONCE]]
                await asyncio.sleep(0)
        found.sort(key=itemgetter(0))
        return found

    def whole(self, most: int | None = None) -> Combine:
        """Make a Combine for lists without pages. most: limit of rows, of which the first stay; None: all stay."""

        async def combine(call: Call, lists: Lists) -> dict[str, Any]:
            return {self.member: [row for _, row in (await self.of(call, lists))[:most]]}

        return combine


class _Placed(NamedTuple):
    """A row of a page. position: position in the list, from the row's cursor; pages are sorted by position."""

    position: bytes
    cursor: str
    row: msgspec.Raw


def page(rows: Iterable[tuple[str, msgspec.Raw]], lists: Lists, call: Call, position: Callable[[str], bytes]) -> Page:
    """Merge one page of each shard into a page over all shards. A cursor is a position in the order of the list, and
    means the same in each shard. The merged page ends where the first of the pages ends that are not the last of their
    shard. Rows of equal position stay on one page, even beyond its limit: the cursor behind one of them is behind all.
    rows: (cursor behind the row, encoded row). position: makes the position of a cursor."""
    ends = [str(cursor) for one in lists.values() if (cursor := call.decode(one["cursor"], object)) is not None]
    end = min(ends, key=position, default=None)
    placed = sorted((_Placed(position(cursor), cursor, row) for cursor, row in rows), key=itemgetter(0))
    if end is not None:
        last = position(end)
        placed = [one for one in placed if one.position <= last]
    count = call.query.limit
    while 0 < count < len(placed) and placed[count].position == placed[count - 1].position:
        count += 1
    kept = placed[:count]
    return Page(
        [one.row for one in kept], [one.cursor for one in kept], kept[-1].cursor if placed[len(kept) :] else end
    )


class Page(NamedTuple):
    rows: list[msgspec.Raw]
    #: For each row, the cursor of a page that begins after it.
    cursors: list[str]
    #: Cursor of the next page; None: no more.
    cursor: str | None


# --- names that one shard knows, and changes in all shards


async def wherever(call: Call) -> Answer:
    """Answer of the shard that knows the name in the path. All shards are asked, because the shard map does not tell
    which one knows it; the others answer 404."""
    found = await ask_all(call)
    answers = {shard: one for shard, one in found.items() if isinstance(one, Answer)}
    if len(answers) > 1:
        raise in_several(answers)
    for answer in answers.values():
        return answer
    own, found = found, {shard: one for shard, one in found.items() if not isinstance(one, NotFound)}
    if not found and call.router is not None and call.router.here is not None:
        found = {call.router.here: own[call.router.here]}
    errors = [one for one in found.values() if isinstance(one, HadelayError)]
    # Prefer a final refusal, which comes from the shard that has the name. If there is none, raise the error of a shard
    # that did not answer, because that shard may have the name.
    raise min(errors, key=lambda error: (error.retryable, error.outcome_known))


def in_several(shards: Iterable[int]) -> Conflict:
    """Error for a request for a name that several shards have."""
    return Conflict(f"shards {', '.join(map(str, shards))} have this name: choose one with ?shard=")


async def in_all(call: Call) -> Answer:
    """Make a change in all shards. Shards that do not know the name change nothing, and a repetition is harmless."""
    found = list((await ask_all(call)).values())
    if (error := failure_of_all(found)) is not None:
        raise error
    return next(one for one in found if isinstance(one, Answer))


async def at(call: Call, owner: int | None) -> Answer:
    """Answer of one shard. owner: the shard; None for this one."""
    if owner is None:
        return await call.route.handler(call)  # type: ignore[no-any-return]
    assert call.router is not None
    return await call.forward(call.router.destination(owner))


async def of_one(call: Call) -> NoReturn:
    """Refuse a request that concerns a single shard but does not name it."""
    assert call.router is not None
    what = "is of one shard, and there are several: name a shard of the map with ?shard="
    raise Impossible(f"{call.route.method} {call.route.path} {what} ({call.router.all})")
