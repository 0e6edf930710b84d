"""One message, named by its id or by its client key: look at it, cancel it, make it due at another time, or now."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET

from hadelay.codec.meta import unpack
from hadelay.errors import BadRequest, Conflict
from hadelay.http import types
from hadelay.http.options import when
from hadelay.http.routes import Answer, Call, Routes
from hadelay.http.values import check_topic, format_instant, parse_id
from hadelay.model import Description, HistoryEvent, encode_id, hour_name
from hadelay.server.api import Target

routes = Routes()

_ID, _KEY = "/v1/messages/{id}", "/v1/topics/{topic}/keys/{key}"
_READ: Any = {
    "query": types.MessageQuery, "returns": {200: types.Message}, "errors": (404, 503), "short": True, "scope": "read"
}  # fmt: skip
_CANCEL: Any = {"returns": {200: types.Outcome}, "errors": (404, 409), "short": True, "scope": "publish"}
_MOVE: Any = {"returns": {200: types.Rescheduled}, "errors": (404, 409), "short": True, "scope": "publish"}
#: Whose topic is that of the message.
_OWN: Any = {"own_topics": True}


#: Bytes of the longest key that 0.1.0 could be told to take: what is stored under one can be read and cancelled.
_LONGEST_KEY = 1 << 10


async def _changed(call: Call) -> Target:
    """What is to be changed: the topic of an id is looked up for tokens that may not publish to all of them."""
    target = _target(call)
    if isinstance(target, int) and not call.access.may("publish", None):
        topic = (await call.server.service.describe(target, body=False, stale=False)).topic
        call.access.need_of("publish", topic, "message")
    return target


def _target(call: Call) -> Target:
    path, limits = call.path, call.server.config
    if "id" in path:
        return parse_id(path["id"])
    key = path["key"].encode("utf-8", "surrogateescape")
    if not 0 < len(key) <= _LONGEST_KEY:
        raise BadRequest(f"key: 1 to {_LONGEST_KEY} bytes, not {len(key)}")
    return check_topic(path["topic"], limits.max_topic_bytes), key


@routes.add("GET", _ID, **_READ, **_OWN)
async def get_message(call: Call) -> Answer:
    """A message, its state and its history"""
    service, query = call.server.service, call.query
    view = await service.describe(_target(call), body=query.body, stale=query.stale)
    call.access.need_of("read", view.topic, "message")
    return call.answer(message_out(view))


@routes.add("GET", _KEY, **_READ)
async def get_message_by_key(call: Call) -> Answer:
    """The message published last under a key"""
    return await get_message(call)


def message_out(view: Description) -> types.Message:
    meta = unpack(view.meta)
    message = types.Message(
        id=encode_id(view.id), topic=view.topic, key=meta.key, state=str(view.state),  # type: ignore[arg-type]
        deliver_at=format_instant(view.deliver_at_ms), published_at=format_instant(view.published_at_ms),
        attempt=view.attempt, tags=meta.tags, meta=meta.meta, content_type=meta.ct, size=view.size,
        traceparent=meta.tp or UNSET, history=[_event(event) for event in view.history],
    )  # fmt: skip
    if view.body is not None:
        message.body_base64 = bytes(view.body)
    return message


def _event(e: HistoryEvent) -> types.History:
    shown = types.History(
        e.event.name.lower(), format_instant(e.at_ms), e.attempt, e.consumer, e.node, e.reason or UNSET,  # type: ignore[arg-type]
        *(UNSET if hour is None else hour_name(hour) for hour in (e.from_hour, e.to_hour)),
    )  # fmt: skip
    if e.due_ms is not None:
        shown.due_at = format_instant(e.due_ms)
    return shown


@routes.add("DELETE", _ID, **_CANCEL, **_OWN)
async def cancel_message(call: Call) -> Answer:
    """Cancel a message that is scheduled or ready; again is harmless"""
    outcome = await call.server.service.cancel(await _changed(call))
    if outcome != "cancelled":
        raise Conflict(f"the message cannot be cancelled: it is {outcome}", outcome=outcome)
    return call.answer(types.Outcome("cancelled"))


@routes.add("DELETE", _KEY, **_CANCEL)
async def cancel_message_by_key(call: Call) -> Answer:
    """Cancel the message published last under a key"""
    return await cancel_message(call)


@routes.add("PATCH", _ID, body=types.Reschedule, **_MOVE, **_OWN)
async def reschedule_message(call: Call) -> Answer:
    """Make a message that is scheduled or ready due at another time; it keeps its id"""
    wish = call.body
    if wish.delay is None and wish.deliver_at is None:
        raise BadRequest("say when: delay or deliver_at")
    return await _reschedule(call, *when(call.server.max_delay_ms, wish.delay, wish.deliver_at))


@routes.add("PATCH", _KEY, body=types.Reschedule, **_MOVE)
async def reschedule_message_by_key(call: Call) -> Answer:
    """Make the message published last under a key due at another time"""
    return await reschedule_message(call)


@routes.add("POST", _ID + ":deliver-now", body=types.Nothing, **_MOVE, **_OWN)
async def deliver_now(call: Call) -> Answer:
    """Make a message due at once; one that is due already stays where it stands"""
    return await _reschedule(call, 0, True)


async def _reschedule(call: Call, when_ms: int, relative: bool) -> Answer:
    message_id, deliver_at_ms = await call.server.service.reschedule(await _changed(call), when_ms, relative)
    return call.answer(types.Rescheduled(encode_id(message_id), format_instant(deliver_at_ms)))
