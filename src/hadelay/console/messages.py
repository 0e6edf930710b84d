"""The pages Messages (a search) and Message (one message: history, body, actions)."""

import re
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlencode

import msgspec
from msgspec import UNSET

from hadelay.api.messages import Message
from hadelay.api.service import ListRequest
from hadelay.api.text import LARGEST_MS, check_topic, format_instant, parse_id
from hadelay.api.verdict import timeline, verdict
from hadelay.codec.jobcommands import MAX_IDS
from hadelay.console.bodies import preview, shown_body
from hadelay.console.problems import Wrong
from hadelay.console.render import as_answer
from hadelay.console.reschedule import undo_of
from hadelay.console.visit import Pages, Visit
from hadelay.console.zones import as_field, millis, to_instant
from hadelay.errors import BadRequest, Conflict, HadelayError, NotFound
from hadelay.http.answers import Answer
from hadelay.model import FIRST, encode_id
from hadelay.rules.access import need_job, need_publish, need_read
from hadelay.rules.messages import RETRYING, STATES, states_of
from hadelay.rules.publishing import check_tags
from hadelay.words import span

pages = Pages()

#: Number of messages on one page of a list, and limit of the previous pages to which a page can lead back.
_PAGE, _TRAIL = 50, 30
_ASKED = ("q", "topic", "tag", "state", "from", "to", "after")
_MINUTE_MS, _LAST_ID = 60_000, (1 << 64) - 1
_ID = re.compile(r"[0-9A-Fa-f][0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{12}")
#: Pattern of the position behind which a page begins: due time in ms, id of a message, and number of messages on the
#: previous pages.
_POSITION = re.compile(r"([0-9]{1,15})-([0-9]{1,20})-([0-9]{1,12})")
#: State of a message → CSS class that shows how serious the state is.
TONES = {"ready": "warn", "blocked": "warn", "dead": "bad", "acked": "good", "expired": "warn"}


@pages.get("/console/messages")
async def find(visit: Visit) -> Answer:
    """Find a message by its id or key; or list messages in due order, of one topic or of all."""
    asked = {name: visit.query.get(name, "").strip() for name in _ASKED}
    asked["state"] = asked["state"] or "pending"
    for name in ("from", "to"):  # links have times in the API's format, and form fields in the reader's zone
        with suppress(HadelayError, ValueError, OverflowError):
            asked[name] = asked[name] and as_field(to_instant(name, asked[name], 0, visit.zone), visit.zone)
    page, problem = Page([], None), None
    try:
        if asked["q"]:
            found = await find_named(visit, asked["topic"], asked["q"])
            if len(found) == 1:
                return visit.go(f"/console/messages/{found[0].id}")
            page = Page(found, len(found))
        else:
            page = await _list(visit, asked)
    except HadelayError as error:
        if error.http_status >= 500:
            raise
        problem = visit.problem_of(error)
    values: dict[str, Any] = {
        "asked": asked, "page": page, "problem": problem, "states": list(STATES), "tones": TONES, "now": now(visit),
        "preview": preview, "chooses": _actions(visit, asked) if not asked["q"] else {},
    }  # fmt: skip
    return visit.page("find.html", active="messages", title="Messages", **values)


async def find_named(visit: Visit, topic: str, text: str) -> list[Message[str]]:
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


@pages.post("/console/messages/chosen")
async def chosen(visit: Visit) -> Answer:
    """Go to the page that counts the chosen messages, and changes them once their number is typed. The person has
    chosen single rows, or the whole list."""
    action, listed = visit.text("action"), {name: visit.text(name) for name in _ASKED}
    wanted = {"action": action, "topic": listed["topic"] or "*"}
    if visit.text("all"):
        at = as_field(visit.service.access.now_ms() // 1000 * 1000 + 1000, visit.zone)
        # A job selects by due time instead of state: scheduled messages are due from `at` on, ready ones before it.
        start = max(listed["from"], at) if listed["state"] == "scheduled" else listed["from"]
        end = min(filter(None, (listed["to"], at))) if listed["state"] == "ready" else listed["to"]
        wanted |= {"tags": listed["tag"], "from": start, "to": end}
        wanted |= {"retrying": "yes"} if listed["state"] == RETRYING else {}
    else:
        pairs = [one.partition("@") for one in visit.texts("id")]
        if not pairs:
            raise BadRequest("choose at least one message")
        if len(pairs) > MAX_IDS:
            raise BadRequest(f"{len(pairs)} messages are chosen; at most {MAX_IDS} at once, or all of the list")
        topics = {topic for _, _, topic in pairs}
        wanted |= {"topic": topics.pop() if len(topics) == 1 else "*", "ids": ",".join(one for one, _, _ in pairs)}
    need_job(visit.access, action, wanted["topic"])
    return visit.go(f"/console/jobs?{urlencode({name: text for name, text in wanted.items() if text})}")


def _actions(visit: Visit, asked: dict[str, str]) -> dict[str, str]:
    """Bulk jobs that the visitor may begin with messages of a list: action → text of its button."""
    scope, topic = "admin" if asked["state"] == "dead" else "publish", asked["topic"]
    if not (visit.may(scope, topic) if topic else visit.access.rights.may_somewhere(scope)):
        return {}
    if asked["state"] == "dead":
        return {"redrive": "Redrive…", "delete_dead": "Delete…"}
    waits = asked["state"] in ("pending", "scheduled", "ready", "blocked", RETRYING)
    return {"deliver_now": "Deliver now…", "reschedule": "Reschedule…", "cancel": "Cancel…"} if waits else {}


class Page(NamedTuple):
    """A page of a list of messages."""

    messages: list[Message[str]]
    #: Number of all messages of the list; None: not counted.
    total: int | None
    #: Number of messages on the pages before this one.
    before: int = 0
    #: Query of the page before this one; None on the first page.
    previous: dict[str, str] | None = None
    #: Query of the next page; None on the last page.
    following: dict[str, str] | None = None


async def _list(visit: Visit, asked: dict[str, str]) -> Page:
    """List a page of the messages of a topic, or of all topics that the visitor may read."""
    topic, may = asked["topic"], partial(visit.may, "read")
    if topic:
        visit.need("read", check_topic(topic))
    start, end = to_instant("from", asked["from"], 0, visit.zone), to_instant("to", asked["to"], LARGEST_MS, visit.zone)
    if end <= start:
        raise Wrong("to", "The end must be after the beginning.")
    tags = check_tags(visit.call.context.config, asked["tag"].split(",")) if asked["tag"] else ()
    # Positions after which this page and the previous pages begin; the page before this one begins after the last but
    # one.
    trail = [position for one in asked["after"].split(",") if (position := _POSITION.fullmatch(one))][-_TRAIL:]
    after, before = FIRST, 0
    if trail:
        due_ms, message_id, before = map(int, trail[-1].groups())
        after = due_ms, min(message_id, _LAST_ID)
    states, retrying = states_of(asked["state"])
    ask = ListRequest(states, start, end, tags, after, _PAGE, body=True, retrying=retrying)
    found, behind = await visit.service.messages.list_messages(topic or may, ask, stale=visit.stale)
    texts = [position[0] for position in trail]
    following = None if behind is None else ",".join([*texts, f"{behind[0]}-{behind[1]}-{before + len(found)}"])
    kept = {name: text for name, text in asked.items() if text and name != "after"}
    return Page(
        found,
        await _count(visit, asked, start, end),
        before,
        {**kept, "after": ",".join(texts[:-1])} if texts else None,
        None if following is None else {**kept, "after": following},
    )


async def _count(visit: Visit, asked: dict[str, str], start_ms: int, end_ms: int) -> int | None:
    """Number of messages of a list; None if each message would have to be read to count them."""
    if asked["state"] != "pending" or asked["tag"] or not (asked["topic"] or visit.may("read")):
        return None
    step_ms = -(-(end_ms - start_ms) // _MINUTE_MS) * _MINUTE_MS
    _, counts = await visit.service.topics.due(asked["topic"] or None, start_ms, end_ms, step_ms, stale=visit.stale)
    return sum(counts)


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
    # Leave the settings out if the topic is deleted, or if the token may read the message of a subscription, but not
    # the subscription itself.
    with suppress(NotFound):
        if visit.may("read", message.topic):
            topic = msgspec.to_builtins(await visit.service.topics.get_topic(message.topic, stale=visit.stale))
    document, at = msgspec.to_builtins(msgspec.structs.replace(message, body=None)), now(visit)
    said = verdict(document, topic, [], at)
    return {
        "message": message, "rows": list(_rows(document)), "now": at, "topic": topic,
        "verdict": said[0].upper() + said[1:], "tone": "warn" if message.retry else TONES.get(message.state, "calm"),
        "undo": undo_of(message, at),
    }  # fmt: skip


#: Id of a part of a message's page → its template. The parts change together.
_LIVE = {"said": "verdict.html", "life": "timeline.html", "about": "facts.html", "copies-list": "copies.html"}
_WORDS = {
    "published": "Published", "due": "Due", "leased": "Leased", "acked": "Acked", "nacked": "Given back",
    "lease_expired": "Lease ran out", "ttl_expired": "Expired", "cancelled": "Cancelled", "moved": "Rescheduled",
    "dead": "Became a dead letter", "redriven": "Redriven", "transferred": "Moved to another topic",
}  # fmt: skip
_EVENT_TONES = {
    "leased": "lease", "acked": "good", "nacked": "warn", "lease_expired": "warn", "ttl_expired": "bad", "dead": "bad",
    "cancelled": "off",
}  # fmt: skip


#: Members of an event with the due times before and after a move.
_MOVED = ("old_deliver_at", "new_deliver_at")


def _rows(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of a message's timeline. late: how late a hand-out was, in words; gap: time since the previous row."""
    before: int | None = None
    failed = False
    for entry in timeline(message | {"history": message.get("history") or []}):
        at_ms, event = millis(entry["at"]), entry["event"]
        late_ms = at_ms - millis(entry["due_at"]) if event == "leased" and entry.get("due_at") else None
        what = "Planned again" if failed and event == "moved" else _WORDS.get(event, event)
        yield {
            **{name: entry.get(name) for name in ("at", "attempt", "consumer", "node", "reason", *_MOVED)},
            "event": event, "what": what, "tone": _EVENT_TONES.get(event, "calm"),
            "late": None if late_ms is None else span(max(0, late_ms)), "very_late": (late_ms or 0) >= 1_000,
            # A dead letter is in the hour in which its retention ends, such as dead-2026122403.
            "kept": f"{to[5:9]}-{to[9:11]}-{to[11:13]}" if (to := entry.get("to") or "").startswith("dead-") else "",
            "gap": "" if before is None or at_ms - before < 1 else span(at_ms - before),
        }  # fmt: skip
        before, failed = at_ms, event in ("nacked", "lease_expired")


@pages.get("/console/messages/{id}/body")
async def body(visit: Visit) -> Answer:
    """The body of a message, as a file."""
    message = await visit.service.messages.describe(parse_id(visit.path["id"]), body=True, stale=visit.stale)
    need_read(visit.access, message.topic)
    headers = {
        "Content-Type": "application/octet-stream",
        "Content-Disposition": f'attachment; filename="{message.id}"',
    }
    return as_answer(200, headers, message.body or b"", packs=False)


@pages.live("/console/live/messages/{id}")
def live(visit: Visit) -> tuple[str, Any]:
    message_id = parse_id(visit.path["id"])

    async def frame() -> dict[str, Any]:
        values = await look(visit, body=False)
        message: Message[str] = values["message"]
        html = {name: visit.render(part, values) for name, part in _LIVE.items()}
        return {"html": html, "state": message.state}

    return f"message {message_id} {visit.actor.token_id}", frame


async def _target(visit: Visit, *, changes: bool = True) -> Message[str]:
    """Get the message of the path. changes: whether the user must be allowed to change it, too. Raises NotFound,
    Forbidden."""
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
    await visit.service.messages.cancel(parse_id(message.id), visit.actor)
    return _back(visit, "The message is cancelled.")


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
