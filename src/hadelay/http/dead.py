"""Dead letters of a topic: look at them, bring them back, forget them; and the purge of what a topic holds."""

from __future__ import annotations

from aiohttp import web

from hadelay.errors import BadRequest
from hadelay.http import types
from hadelay.http.messages import message_out
from hadelay.http.routes import Call, Routes
from hadelay.http.values import check_limit, format_instant, parse_id
from hadelay.model import MAX_RATE, HistoryEvent, encode_id
from hadelay.server.api import DeadLetterView

routes = Routes()

_MAX_IDS = 1_000
#: A cursor is {died_at_ms u64, id u64}, in hex.
_CURSOR_BYTES = 16


@routes.add(
    "GET",
    "/v1/topics/{topic}/dead",
    query=types.DeadQuery,
    returns={200: types.DeadLetters},
    errors=(404, 503),
    scope="read",
)
async def list_dead(call: Call) -> web.Response:
    """Dead letters in the order of their deaths, with what went wrong"""
    service, query, topic = call.server.service, call.query, call.topic
    limit = check_limit(query.limit)
    page = await service.dead_letters(topic, _after(query.cursor), limit, body=query.body, stale=query.stale)
    cursor = None if page.after is None else page.after.hex()
    return call.reply(types.DeadLetters([_letter(view) for view in page.letters], cursor))


def _after(cursor: str | None) -> bytes:
    try:
        after = bytes.fromhex(cursor or "")
    except ValueError:
        after = b"?"
    if len(after) not in (0, _CURSOR_BYTES):
        raise BadRequest("cursor: is not one that this list answered")
    return after


def _letter(view: DeadLetterView) -> types.DeadLetter:
    message = message_out(view.message)
    return types.DeadLetter(
        id=message.id, topic=message.topic, key=message.key, deliver_at=message.deliver_at,
        published_at=message.published_at, died_at=format_instant(view.died_at_ms), attempt=message.attempt,
        tags=message.tags, meta=message.meta, content_type=message.content_type, size=message.size,
        errors=[_failure(e) for e in view.errors],
        body_base64=message.body_base64,
    )  # fmt: skip


def _failure(e: HistoryEvent) -> types.Failure:
    return types.Failure(e.event.name.lower(), format_instant(e.at_ms), e.attempt, e.reason)  # type: ignore[arg-type]


@routes.add(
    "POST",
    "/v1/topics/{topic}/dead:redrive",
    body=types.Redrive,
    returns={202: types.Redriven},
    errors=(404,),
)
async def redrive(call: Call) -> web.Response:
    """Make dead letters due again: these at once, or all there are, at a rate"""
    wish, service, topic = call.body, call.service, call.topic
    if wish.all == (wish.ids is not None):
        raise BadRequest('say which: {"ids": […]} or {"all": true}')
    if wish.all:
        if wish.rate is not None and not 0 < wish.rate <= MAX_RATE:
            raise BadRequest(f"rate: messages per second, more than 0 and at most {MAX_RATE}, not {wish.rate}")
        return call.reply(types.Redriven(redriving=await service.redrive_all(topic, wish.rate)), 202)
    if wish.rate is not None:
        raise BadRequest("rate: goes with all; ids are redriven at once")
    if len(wish.ids) > _MAX_IDS:
        raise BadRequest(f"ids: {len(wish.ids)}; at most {_MAX_IDS} at once")
    ids = [parse_id(text) for text in wish.ids]
    outcomes = await service.redrive(topic, ids) if ids else []
    results = [types.RedriveResult(encode_id(i), outcome) for i, outcome in zip(ids, outcomes, strict=True)]  # type: ignore[arg-type]
    return call.reply(types.Redriven(results=results), 202)


@routes.add("DELETE", "/v1/topics/{topic}/dead", returns={204: None}, errors=(404,))
async def purge_dead(call: Call) -> web.Response:
    """Forget a topic's dead letters"""
    await call.service.purge(call.topic, ["dead"])
    return web.Response(status=204)


@routes.add("POST", "/v1/topics/{topic}:purge", body=types.Purge, returns={202: types.Purged}, errors=(404, 429))
async def purge(call: Call) -> web.Response:
    """Cancel what was published before and is scheduled or ready; forget dead letters"""
    topic, states = call.topic, sorted(set(call.body.states))
    if not states:
        raise BadRequest("states: at least one of scheduled, ready, dead")
    await call.service.purge(topic, states)
    return call.reply(types.Purged(topic, states), 202)
