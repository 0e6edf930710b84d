"""Dead letters of a topic: look at them, bring them back, forget them; and the purge of what a topic holds."""

from __future__ import annotations

from hadelay.api.messages import DeadLetters, DeadQuery, Purge, Purged, Redrive, Redriven, RedriveResult
from hadelay.api.text import check_limit, parse_id
from hadelay.errors import BadRequest
from hadelay.http.answers import NOTHING, Answer
from hadelay.http.call import Call
from hadelay.http.routes import Routes
from hadelay.model import MAX_RATE, encode_id

routes = Routes()

_MAX_IDS = 1_000
#: A cursor is {died_at_ms u64, id u64}, in hex.
_CURSOR_BYTES = 16


@routes.add(
    "GET",
    "/v1/topics/{topic}/dead",
    query=DeadQuery,
    returns={200: DeadLetters},
    errors=(404, 503),
    scope="read",
)
async def list_dead(call: Call) -> Answer:
    """Dead letters in the order of their deaths, with what went wrong"""
    query, door, topic = call.query, call.service.messages, call.topic
    limit = check_limit(query.limit)
    letters, after = await door.dead_letters(topic, _after(query.cursor), limit, body=query.body, stale=query.stale)
    return call.answer(DeadLetters(letters, None if after is None else after.hex()))


def _after(cursor: str | None) -> bytes:
    try:
        after = bytes.fromhex(cursor or "")
    except ValueError:
        after = b"?"
    if len(after) not in (0, _CURSOR_BYTES):
        raise BadRequest("cursor: is not one that this list answered")
    return after


@routes.add("POST", "/v1/topics/{topic}/dead:redrive", body=Redrive, returns={202: Redriven}, errors=(404,))
async def redrive(call: Call) -> Answer:
    """Make dead letters due again: these at once, or all there are, at a rate"""
    wish, door, topic = call.body, call.service.messages, call.topic
    if wish.all == (wish.ids is not None):
        raise BadRequest('say which: {"ids": […]} or {"all": true}')
    if wish.all:
        if wish.rate is not None and not 0 < wish.rate <= MAX_RATE:
            raise BadRequest(f"rate: messages per second, more than 0 and at most {MAX_RATE}, not {wish.rate}")
        return call.answer(Redriven(redriving=await door.redrive_all(topic, wish.rate, call.actor)), 202)
    if wish.rate is not None:
        raise BadRequest("rate: goes with all; ids are redriven at once")
    if len(wish.ids) > _MAX_IDS:
        raise BadRequest(f"ids: {len(wish.ids)}; at most {_MAX_IDS} at once")
    ids = [parse_id(text) for text in wish.ids]
    outcomes = await door.redrive(topic, ids, call.actor) if ids else []
    results = [RedriveResult(encode_id(i), outcome) for i, outcome in zip(ids, outcomes, strict=True)]  # type: ignore[arg-type]
    return call.answer(Redriven(results=results), 202)


@routes.add("DELETE", "/v1/topics/{topic}/dead", returns={204: None}, errors=(404,))
async def purge_dead(call: Call) -> Answer:
    """Forget a topic's dead letters"""
    await call.service.messages.purge(call.topic, ["dead"], call.actor)
    return NOTHING


@routes.add("POST", "/v1/topics/{topic}:purge", body=Purge, returns={202: Purged}, errors=(404, 429))
async def purge(call: Call) -> Answer:
    """Cancel what was published before and is scheduled or ready; forget dead letters"""
    topic, states = call.topic, sorted(set(call.body.states))
    if not states:
        raise BadRequest("states: at least one of scheduled, ready, dead")
    await call.service.messages.purge(topic, states, call.actor)
    return call.answer(Purged(topic, states), 202)
