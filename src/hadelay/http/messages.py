"""Routes for messages, named by id or by client key: get, cancel, reschedule and list messages; dead letters."""

import json
import struct
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from hadelay.api import messages as api
from hadelay.api.base import Nothing
from hadelay.api.service import ListRequest, Target
from hadelay.api.text import LARGEST_MS, check_limit, check_topic, format_instant, parse_id
from hadelay.codec.checksums import crc32c
from hadelay.errors import BadRequest
from hadelay.http import merging
from hadelay.http.answers import NOTHING, Answer
from hadelay.http.call import Call
from hadelay.http.routes import Routes
from hadelay.model import FIRST, Key, encode_id
from hadelay.rules.access import need_publish, need_read
from hadelay.rules.messages import check_rate, new_due_time, states_of
from hadelay.rules.publishing import check_tags

routes = Routes()

_ID, _KEY = "/v1/messages/{id}", "/v1/topics/{topic}/keys/{key}"
_READ: Any = {
    "query": api.MessageQuery, "returns": {200: api.Message[str]}, "errors": (404, 422, 429, 503), "short": True,
    "scope": "read",
}  # fmt: skip
_CANCEL: Any = {"returns": {200: api.Outcome}, "errors": (404, 409), "short": True, "scope": "publish"}
_MOVE: Any = {"returns": {200: api.Rescheduled[str]}, "errors": (404, 409), "short": True, "scope": "publish"}
#: Options of routes whose path names no topic: their handlers check the token for the message's topic.
_OWN: Any = {"own_topics": True}


#: Size limit of a key in a path, in bytes: that of release 0.1.0, whose messages can still be read and cancelled.
_LONGEST_KEY = 1 << 10


async def _changed(call: Call) -> Target:
    """Get the message that a request changes. Raises Forbidden if the token may not publish to the message's topic."""
    target = _target(call)
    if isinstance(target, int) and not call.access.may("publish", None):
        found = await call.service.messages.describe(target, body=False, stale=False)
        need_publish(call.access, found)
    return target


def _target(call: Call) -> Target:
    path = call.path
    if "id" in path:
        return parse_id(path["id"])
    key = path["key"].encode("utf-8", "surrogateescape")
    if not 0 < len(key) <= _LONGEST_KEY:
        raise BadRequest(f"key: 1 to {_LONGEST_KEY} bytes, not {len(key)}")
    return check_topic(path["topic"]), key


@routes.add("GET", _KEY, **_READ, name="get_message_by_key", summary="The message published last under a key")
@routes.add("GET", _ID, **_READ, **_OWN)
async def get_message(call: Call) -> Answer:
    """A message, its state and its history"""
    query, context, messages = call.query, call.context, call.service.messages
    wait_ms = int(query.wait or 0)
    if wait_ms > context.config.max_wait_ms:
        raise BadRequest(
            f"wait: {wait_ms} ms is too long; wait at most {context.config.max_wait_ms} ms, then ask again"
        )
    reading = messages.describe(_target(call), body=query.body, stale=query.stale, wait_ms=wait_ms)
    if wait_ms:
        with context.waiting.one_more(call.access):
            message = await context.polls.run(reading, "ask another node")
    else:
        message = await reading
    need_read(call.access, message.topic)
    try:
        return call.answer(message)
    except OverflowError:  # MessagePack has no integers beyond 64 bits, and the result has one: answer with a float
        result = json.loads(msgspec.json.encode(message.result), parse_int=_number)
        return call.answer(msgspec.structs.replace(message, result=result))


def _number(digits: str) -> int | float:
    number = int(digits)
    return number if -(1 << 63) <= number < 1 << 64 else float(digits)


@routes.add(
    "DELETE", _KEY, **_CANCEL, name="cancel_message_by_key", summary="Cancel the message published last under a key"
)
@routes.add("DELETE", _ID, **_CANCEL, **_OWN)
async def cancel_message(call: Call) -> Answer:
    """Cancel a scheduled or ready message; may be repeated"""
    return call.answer(api.Outcome("cancelled", await call.service.messages.cancel(await _changed(call))))


@routes.add(
    "PATCH",
    _KEY,
    body=api.Reschedule,
    **_MOVE,
    name="reschedule_message_by_key",
    summary="Reschedule the message published last under a key",
)
@routes.add("PATCH", _ID, body=api.Reschedule, **_MOVE, **_OWN)
async def reschedule_message(call: Call) -> Answer:
    """Reschedule a scheduled or ready message; it keeps its id"""
    when_ms, relative, expected_ms = new_due_time(call.context.max_delay_ms, call.body)
    return await _reschedule(call, when_ms, relative, expected_ms)


@routes.add("POST", _ID + ":deliver-now", body=Nothing, **_MOVE, **_OWN)
async def deliver_now(call: Call) -> Answer:
    """Make a message due at once; a message that is due already keeps its position"""
    return await _reschedule(call, 0, True)


async def _reschedule(call: Call, when_ms: int, relative: bool, expected_ms: int | None = None) -> Answer:
    target = await _changed(call)
    changed = await call.service.messages.reschedule(target, when_ms, relative, expected_ms=expected_ms)
    message_id, at_ms, blocked, outcomes = changed
    return call.answer(api.Rescheduled(encode_id(message_id), format_instant(at_ms), blocked, outcomes))


#: Cursor of a list: key {due_ms, id} of the page's last message, and CRC-32C of the query.
_CURSOR = struct.Struct(">QQI")


async def _page_of_all(call: Call, lists: merging.Lists) -> dict[str, Any]:
    rows = list[tuple[str, msgspec.Raw]]()
    for one in lists.values():
        if some := call.decode(one["messages"], list[msgspec.Raw]):
            rows += zip(call.decode(one["cursors"], list[str]), some, strict=True)
    page = merging.page(rows, lists, call, _position)
    document = {"messages": page.rows, "cursor": page.cursor}
    return {**document, "cursors": page.cursors} if call.query.cursors and page.rows else document


def _position(cursor: str) -> bytes:
    """Position of a cursor in the order of its list: without the CRC of the query, which all cursors of a list
    share."""
    return _packed(cursor)[:-4]


@routes.add(
    "GET",
    "/v1/topics/{topic}/messages",
    query=api.ListQuery,
    returns={200: api.Messages},
    errors=(404, 422, 503),
    scope="read",
)
async def list_messages(call: Call) -> Answer:
    """Messages of a topic in due order"""
    return await _list(call, call.topic, call.topic)


@routes.add(
    "GET",
    "/v1/messages",
    query=api.ListAllQuery,
    returns={200: api.Messages},
    errors=(422, 503),
    scope="read",
    own_topics=True,
    shards=merging.merged(_page_of_all, "cursors=true"),
)
async def list_all_messages(call: Call) -> Answer:
    """Messages of all topics that the token may read, in due order"""
    prefix, may = call.query.prefix, partial(call.access.may, "read")
    return await _list(call, lambda name: name.startswith(prefix) and may(name), ("all", prefix))


async def _list(call: Call, topics: str | Callable[[str], bool], asked: object) -> Answer:
    """A page of a list. asked: identifies the topics of the list; a part of the cursor's CRC, so that the cursor fits
    no other list."""
    query, limits = call.query, call.context.config
    start = 0 if query.from_ is None else int(query.from_)
    end = LARGEST_MS if query.to is None else int(query.to)
    if end <= start:
        raise BadRequest("to: must be after from")
    tags = check_tags(limits, query.tag.split(",")) if query.tag is not None else ()
    states, retrying = states_of(query.state)
    question = crc32c(repr((asked, sorted(states), retrying, start, end, sorted(tags))).encode())
    after = FIRST if query.cursor is None else _decode(query.cursor, question)
    ask = ListRequest(states, start, end, tags, after, check_limit(query.limit), retrying=retrying)
    found, behind = await call.service.messages.list_with_keys(topics, ask, stale=query.stale)
    # With several shards, this list may be one part of a merged list; merging needs the cursors.
    wants_cursors = getattr(query, "cursors", False) or call.router is not None
    cursors = tuple(_encode(key, question) for key, _ in found) if wants_cursors else ()
    cursor = None if behind is None else _encode(behind, question)
    return call.answer(api.Messages([message for _, message in found], cursor, cursors))


def _encode(after: Key, question: int) -> str:
    return urlsafe_b64encode(_CURSOR.pack(*after, question)).rstrip(b"=").decode()


def _packed(cursor: str) -> bytes:
    return urlsafe_b64decode(cursor.encode("ascii") + b"=" * (-len(cursor) % 4))


def _decode(text: str, question: int) -> Key:
    try:
        due_ms, message_id, asked = _CURSOR.unpack(_packed(text))
    except (Base64Error, UnicodeEncodeError, struct.error):
        raise BadRequest("cursor: this is not a cursor from a list") from None
    if asked != question:
        raise BadRequest("cursor: from a list with other options; repeat these, or leave the cursor out to start again")
    if due_ms >= LARGEST_MS:
        raise BadRequest("cursor: this is not a cursor from a list")
    return due_ms, message_id


_MAX_IDS = 1_000
#: A cursor of dead letters is {died_at_ms u64, id u64} in hex.
_DEAD_CURSOR_BYTES = 16


@routes.add(
    "GET",
    "/v1/topics/{topic}/dead",
    query=api.DeadQuery,
    returns={200: api.DeadLetters},
    errors=(404, 503),
    scope="read",
)
async def list_dead(call: Call) -> Answer:
    """Dead letters in the order of their deaths, with the errors of their attempts"""
    query, door, topic = call.query, call.service.messages, call.topic
    limit = check_limit(query.limit)
    letters, after = await door.dead_letters(topic, _after(query.cursor), limit, body=query.body, stale=query.stale)
    return call.answer(api.DeadLetters(letters, None if after is None else after.hex()))


def _after(cursor: str | None) -> bytes:
    try:
        after = bytes.fromhex(cursor or "")
    except ValueError:
        after = b"?"
    if len(after) not in (0, _DEAD_CURSOR_BYTES):
        raise BadRequest("cursor: this is not a cursor from a list of dead letters")
    return after


@routes.add("POST", "/v1/topics/{topic}/dead:redrive", body=api.Redrive, returns={202: api.Redriven}, errors=(404,))
async def redrive(call: Call) -> Answer:
    """Make dead letters due again: the named ones at once, or all at a rate"""
    document, door, topic = call.body, call.service.messages, call.topic
    if document.all == (document.ids is not None):
        raise BadRequest('say which dead letters to redrive: {"ids": […]} or {"all": true}')
    if document.all:
        redriving = await door.redrive_all(topic, check_rate(document.rate), call.actor)
        return call.answer(api.Redriven(redriving=redriving), 202)
    if document.rate is not None:
        raise BadRequest("rate: is only allowed with all; dead letters given by ids are redriven at once")
    if len(document.ids) > _MAX_IDS:
        raise BadRequest(f"ids: {len(document.ids)} given; at most {_MAX_IDS} are allowed per request")
    ids = [parse_id(text) for text in document.ids]
    outcomes = await door.redrive(topic, ids, call.actor) if ids else []
    results = [api.RedriveResult(encode_id(i), outcome) for i, outcome in zip(ids, outcomes, strict=True)]
    return call.answer(api.Redriven(results=results), 202)


@routes.add("DELETE", "/v1/topics/{topic}/dead", returns={204: None}, errors=(404,))
async def purge_dead(call: Call) -> Answer:
    """Delete a topic's dead letters"""
    await call.service.messages.purge(call.topic, ["dead"], call.actor)
    return NOTHING


@routes.add("POST", "/v1/topics/{topic}:purge", body=api.Purge, returns={202: api.Purged}, errors=(404, 429))
async def purge(call: Call) -> Answer:
    """Cancel a topic's scheduled or ready messages that were published before, or delete its dead letters"""
    topic, states = call.topic, sorted(set(call.body.states))
    if not states:
        raise BadRequest("states: give at least one of scheduled, ready, dead")
    await call.service.messages.purge(topic, states, call.actor)
    return call.answer(api.Purged(topic, states), 202)
