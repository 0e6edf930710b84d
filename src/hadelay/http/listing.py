"""The messages of a topic, a page at a time."""

from __future__ import annotations

import struct
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error

from aiohttp import web
from msgspec import UNSET

from hadelay.codec.checksums import crc32c
from hadelay.errors import BadRequest
from hadelay.http import types
from hadelay.http.messages import message_out
from hadelay.http.options import check_tags
from hadelay.http.routes import Call, Routes
from hadelay.http.values import LARGEST_MS, check_limit, suggest
from hadelay.model import FIRST, PENDING, Key, State
from hadelay.server.api import ListWish

routes = Routes()

_STATES = {**{str(state): frozenset((state,)) for state in State}, "pending": PENDING, "all": frozenset(State)}
#: Key {due_ms, id}, and CRC-32C of the question it belongs to.
_CURSOR = struct.Struct(">QQI")


@routes.add(
    "GET",
    "/v1/topics/{topic}/messages",
    query=types.ListQuery,
    returns={200: types.Messages},
    errors=(404, 422, 503),
    scope="read",
)
async def list_messages(call: Call) -> web.Response:
    """Messages of a topic in due order"""
    service, query, limits = call.server.service, call.query, call.server.config
    topic = call.topic
    start = 0 if query.from_ is None else int(query.from_)
    end = LARGEST_MS if query.to is None else int(query.to)
    if end <= start:
        raise BadRequest("to: must be after from")
    tags = check_tags(limits, query.tag.split(",")) if query.tag is not None else ()
    states = _states(query.state)
    question = crc32c(repr((topic, sorted(states), start, end, sorted(tags))).encode())
    after = FIRST if query.cursor is None else _decode(query.cursor, question)
    wish = ListWish(states, start, end, tags, after, check_limit(query.limit))
    page = await service.list_messages(topic, wish, stale=query.stale)
    cursor = None if page.after is None else _encode(page.after, question)
    messages = [message_out(view) for view in page.messages]
    for message in messages:
        message.history = UNSET
    return call.reply(types.Messages(messages, cursor))


def _states(text: str) -> frozenset[State]:
    states: frozenset[State] = frozenset()
    for name in text.split(","):
        if name.strip() not in _STATES:
            raise BadRequest(f"state: {name[:40]!r} is none{suggest(name, _STATES)}")
        states |= _STATES[name.strip()]
    return states


def _encode(after: Key, question: int) -> str:
    return urlsafe_b64encode(_CURSOR.pack(*after, question)).rstrip(b"=").decode()


def _decode(text: str, question: int) -> Key:
    try:
        due_ms, message_id, asked = _CURSOR.unpack(urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4)))
    except (Base64Error, UnicodeEncodeError, struct.error):
        raise BadRequest("cursor: is not one that a list answered") from None
    if asked != question:
        raise BadRequest("cursor: it belongs to another question; ask the same again, or leave it out to begin anew")
    if due_ms >= LARGEST_MS:
        raise BadRequest("cursor: is not one that a list answered")
    return due_ms, message_id
