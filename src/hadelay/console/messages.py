"""The pages Messages (a search) and Message (one message: history, body, actions)."""

import re
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET

from hadelay.api.messages import Message
from hadelay.api.service import ListRequest
from hadelay.api.text import LARGEST_MS, check_topic, format_instant, parse_id, parse_instant
from hadelay.api.verdict import timeline, verdict
from hadelay.console.bodies import shown_body
from hadelay.console.render import millis
from hadelay.console.visit import Pages, Visit
from hadelay.errors import BadRequest, Conflict, HadelayError, NotFound
from hadelay.http.answers import Answer
from hadelay.http.messages import need_publish, need_read
from hadelay.http.options import check_tags, when
from hadelay.model import FIRST, PENDING, State, encode_id
from hadelay.server.service.messages import partly
from hadelay.words import span

pages = Pages()

#: Number of messages on one page of a search.
_PAGE = 50
_ID = re.compile(r"[0-9A-Fa-f][0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{12}")
_POSITION = re.compile(r"([0-9]{1,15})-([0-9]{1,20})")
_DURATION = re.compile(r"\d+(\.\d+)?((ms|s|m|h|d)(\d+(\.\d+)?(ms|s|m|h|d))*)?")
STATES = ("pending", *map(str, State), "all")
_SETS = {str(state): frozenset((state,)) for state in State} | {"pending": PENDING, "all": frozenset(State)}
#: State of a message → CSS class that shows how serious the state is.
TONES = {"ready": "warn", "blocked": "warn", "dead": "bad", "acked": "good", "expired": "warn"}


@pages.get("/console/messages")
async def find(visit: Visit) -> Answer:
    """Find a message by its id, by its key, or by topic, tag and time."""
    asked = {name: visit.query.get(name, "").strip() for name in ("q", "topic", "tag", "state", "from", "to", "after")}
    asked["state"] = asked["state"] or "pending"
    found, after, problem = list[Message[str]](), "", ""
    try:
        if asked["q"]:
            found = await _find_named(visit, asked["topic"], asked["q"])
            if len(found) == 1:
                return visit.go(f"/console/messages/{found[0].id}")
        elif asked["topic"]:
            found, after = await _find_many(visit, asked)
        elif asked["tag"] or asked["from"] or asked["to"]:
            raise BadRequest("topic: name the topic whose messages have these tags or times")
    except HadelayError as error:
        if error.http_status >= 500:
            raise
        problem = error.detail
    values: dict[str, Any] = {
        "asked": asked, "messages": found, "after": after, "problem": problem, "states": STATES, "tones": TONES,
        "searched": bool(asked["topic"]) and not problem, "now": now(visit),
    }  # fmt: skip
    return visit.page("find.html", active="messages", title="Messages", **values)


async def _find_named(visit: Visit, topic: str, text: str) -> list[Message[str]]:
    """Messages that `text` names: an id, a key of `topic`, topic/key, or a key of any topic. Raises NotFound."""
    describe = partial(visit.service.messages.describe, body=False, stale=visit.stale)
    of, slash, rest = text.partition("/")
    named = (topic, text) if topic else (of, rest) if slash and visit.may("read", of) else None
    if named is not None:
        if topic:
            visit.need("read", check_topic(topic))
        with suppress(NotFound):
            return [await describe((named[0], named[1].encode()))]
    if _ID.fullmatch(text):
        with suppress(NotFound):
            return [await describe(parse_id(text))]
    if topic:
        raise NotFound(f"{topic} has no message under the key {text[:100]!r}, or the message is past its retention")
    found, may = list[Message[str]](), partial(visit.may, "read")
    for message_id in await visit.service.overview.find_key(text, _PAGE, may=may, stale=visit.stale):
        with suppress(NotFound):
            found.append(await describe(message_id))
    if not found:
        raise NotFound(f"no message has the id or the key {text[:100]!r}, or the message is past its retention")
    return found


async def _find_many(visit: Visit, asked: dict[str, str]) -> tuple[list[Message[str]], str]:
    """Search a topic for messages; returns (messages of one page, cursor of the next page or "")."""
    visit.need("read", check_topic(asked["topic"]))
    start, end = to_instant("from", asked["from"], 0), to_instant("to", asked["to"], LARGEST_MS)
    if end <= start:
        raise BadRequest("to: must be after from")
    if asked["state"] not in _SETS:
        raise BadRequest(f"state: {asked['state'][:40]!r} is not a state of messages")
    tags = check_tags(visit.call.context.config, asked["tag"].split(",")) if asked["tag"] else ()
    position = _POSITION.fullmatch(asked["after"])
    after = FIRST if position is None else (int(position[1]), int(position[2]))
    ask = ListRequest(_SETS[asked["state"]], start, end, tags, after, _PAGE)
    found, behind = await visit.service.messages.list_messages(asked["topic"], ask, stale=visit.stale)
    return found, "" if behind is None else f"{behind[0]}-{behind[1]}"


def to_instant(name: str, text: str, default: int) -> int:
    """Parse a time from a form, in the API's or a browser's format (in UTC), to Unix ms."""
    if not text:
        return default
    if re.fullmatch(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?", text):
        text += ("" if text.count(":") == 2 else ":00") + "Z"
    elif re.fullmatch(r"\d{4}-\d\d-\d\d", text):
        text += "T00:00:00Z"
    return parse_instant(name, text)


def now(visit: Visit) -> str:
    """Cluster time as the API writes it."""
    return format_instant(visit.service.access.now_ms())


@pages.get("/console/messages/{id}")
async def show(visit: Visit) -> Answer:
    """One message: its state in a sentence, its history, its body."""
    values = await look(visit, body=True)
    message: Message[str] = values["message"]
    body = shown_body(message.body or b"", message.content_type, visit.query.get("as", ""))
    given = message.result is not UNSET
    result = shown_body(msgspec.json.encode(message.result), "application/json", "json") if given else None
    return visit.page("message.html", active="messages", title=message.id, body=body, result=result, **values)


async def look(visit: Visit, *, body: bool) -> dict[str, Any]:
    """Values for a message's page. Raises NotFound; Forbidden without the right to read the message's topic."""
    message = await visit.service.messages.describe(parse_id(visit.path["id"]), body=body, stale=visit.stale)
    need_read(visit.access, message.topic)
    topic: dict[str, Any] = {}
    # Without the settings if the topic is deleted, or is a subscription of which the token may read copies alone.
    with suppress(NotFound):
        if visit.may("read", message.topic):
            topic = msgspec.to_builtins(await visit.service.topics.get_topic(message.topic, stale=visit.stale))
    document, at = msgspec.to_builtins(msgspec.structs.replace(message, body=None)), now(visit)
    said = verdict(document, topic, [], at)
    return {
        "message": message, "rows": list(_rows(document)), "now": at, "topic": topic,
        "verdict": said[0].upper() + said[1:], "tone": TONES.get(message.state, "calm"),
    }  # fmt: skip


_WORDS = {
    "published": "Published", "due": "Due", "leased": "Leased", "acked": "Acked", "nacked": "Given back",
    "lease_expired": "Lease ran out", "ttl_expired": "Expired", "cancelled": "Cancelled", "moved": "Rescheduled",
    "dead": "Became a dead letter", "redriven": "Redriven",
}  # fmt: skip
_EVENT_TONES = {
    "leased": "lease", "acked": "good", "nacked": "warn", "lease_expired": "warn", "ttl_expired": "bad", "dead": "bad",
    "cancelled": "off",
}  # fmt: skip


def _rows(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of a message's timeline. late: how late a hand-out was, in words; gap: time since the previous row."""
    before: int | None = None
    failed = False
    for entry in timeline(message | {"history": message.get("history") or []}):
        at_ms, event = millis(entry["at"]), entry["event"]
        late_ms = at_ms - millis(entry["due_at"]) if event == "leased" and entry.get("due_at") else None
        what = "Planned again" if failed and event == "moved" else _WORDS.get(event, event)
        yield {
            **{name: entry.get(name) for name in ("at", "attempt", "consumer", "node", "reason")},
            "event": event, "what": what, "tone": _EVENT_TONES.get(event, "calm"),
            "late": None if late_ms is None else span(max(0, late_ms)), "very_late": (late_ms or 0) >= 1_000,
            # A dead letter is in the hour in which its retention ends, such as dead-2026122403.
            "kept": f"{to[5:9]}-{to[9:11]}-{to[11:13]}" if (to := entry.get("to") or "").startswith("dead-") else "",
            "gap": "" if before is None or at_ms - before < 1 else span(at_ms - before),
        }  # fmt: skip
        before, failed = at_ms, event in ("nacked", "lease_expired")


@pages.live("/console/live/messages/{id}")
def live(visit: Visit) -> tuple[str, Any]:
    message_id = parse_id(visit.path["id"])

    async def frame() -> dict[str, Any]:
        values = await look(visit, body=False)
        message: Message[str] = values["message"]
        html = {
            name: visit.render(part, values) for name, part in (("said", "verdict.html"), ("life", "timeline.html"))
        }
        return {"html": html, "state": message.state}

    return f"message {message_id} {visit.actor.token_id}", frame


async def _target(visit: Visit, *, changes: bool = True) -> Message[str]:
    """The message of the page. changes: whether the user may change it, too. Raises NotFound, Forbidden."""
    message = await visit.service.messages.describe(parse_id(visit.path["id"]), body=False, stale=visit.stale)
    if changes:
        need_publish(visit.access, message)
    else:
        need_read(visit.access, message.topic)
    return message


def _back(visit: Visit, notice: str) -> Answer:
    return visit.go(f"/console/messages/{encode_id(parse_id(visit.path['id']))}", notice)


@pages.post("/console/messages/{id}/cancel")
async def cancel(visit: Visit) -> Answer:
    message = await _target(visit)
    outcome, outcomes = await visit.service.messages.cancel(parse_id(message.id), visit.actor)
    if outcome == "partial":
        raise partly("cancelled", outcomes)
    if outcome != "cancelled":
        raise Conflict(f"the message cannot be cancelled: it is {outcome}", outcome=outcome)
    return _back(visit, "The message is cancelled.")


@pages.post("/console/messages/{id}/reschedule")
async def reschedule(visit: Visit) -> Answer:
    message, text = await _target(visit), visit.text("when")
    if not text:
        raise BadRequest("when: expected a delay such as 15m, or a time such as 2026-12-24T18:00:00Z")
    if _DURATION.fullmatch(text) is not None and len(text) < 12:
        times = when(visit.call.context.max_delay_ms, text, None)
    else:
        at_ms = to_instant("when", text, 0)
        times = (at_ms, False) if at_ms > 0 else (0, True)
    _, due_ms, *_ = await visit.service.messages.reschedule(parse_id(message.id), *times, visit.actor)
    return _back(visit, f"Rescheduled: the message falls due at {format_instant(due_ms)}.")


@pages.post("/console/messages/{id}/deliver-now")
async def deliver_now(visit: Visit) -> Answer:
    message = await _target(visit)
    await visit.service.messages.reschedule(parse_id(message.id), 0, True, visit.actor)
    return _back(visit, "The message is due now.")


@pages.post("/console/messages/{id}/redrive")
async def redrive(visit: Visit) -> Answer:
    message = await _target(visit, changes=False)
    visit.need("admin", message.topic)
    outcome = (await visit.service.messages.redrive(message.topic, [parse_id(message.id)], visit.actor))[0]
    if outcome != "redriven":
        raise Conflict(f"the message cannot be redriven: {outcome.replace('_', ' ')}", outcome=outcome)
    return _back(visit, "Redriven: the message is due now, and its attempts begin anew.")
