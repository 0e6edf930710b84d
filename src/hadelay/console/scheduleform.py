"""The form that creates a schedule, or edits one: all fields of the API, with a preview of the times."""

from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from typing import Any
from zoneinfo import ZoneInfo

from hadelay.api.schedules import CATCH_UPS, OVERLAPS, Preview, Previewed, PutSchedule, Schedule
from hadelay.api.text import check_new_topic
from hadelay.console.problems import Problem, Wrong
from hadelay.console.schedules import PREVIEW, times_of
from hadelay.console.visit import Pages, Visit, pairs, whole
from hadelay.console.zones import to_instant
from hadelay.errors import Conflict, Forbidden, HadelayError
from hadelay.http.answers import Answer
from hadelay.rules.documents import converted
from hadelay.rules.schedules import check_schedule_name, schedule_spec, schedule_to_put

pages = Pages()

#: Fields of the form that are fields of the API under the same name; an empty field is left out.
_PLAIN = (
    "topic",
    "max_occurrences",
    "jitter",
    "catch_up",
    "catch_up_window",
    "overlap",
    "content_type",
    "ttl",
    "group",
)
#: Fields of the form and their values for a new schedule.
_NEW = {
    "name": "", "version": "0", "when": "", "at": "", "timezone": "UTC", "start": "", "end": "", "tags": "", "meta": "",
    "body": "", "encoding": "", "paused": "", **dict.fromkeys(_PLAIN, ""), "catch_up": "one", "overlap": "allow",
    "content_type": "application/json",
}  # fmt: skip


@pages.get("/console/new/schedule")
async def create(visit: Visit) -> Answer:
    """The form for a new schedule. Query parameters of the URL fill some of its fields."""
    if not visit.access.rights.may_somewhere("publish"):
        visit.need("publish")
    given = {name: visit.query.get(name, "")[:1_000] for name in ("name", "topic", "timezone") if visit.query.get(name)}
    return _page(visit, {**_NEW, **given, "when": visit.query.get("cron", "")[:200]})


@pages.get("/console/schedules/{schedule}/edit")
async def edit(visit: Visit) -> Answer:
    """The form with the values of an existing schedule."""
    found = await visit.service.schedules.get(check_schedule_name(visit.path["schedule"]), body=True, stale=visit.stale)
    for scope in ("read", "publish"):
        visit.access.need_of(scope, found.topic, "schedule")
    return _page(visit, _filled(found))


def _filled(found: Schedule[str]) -> dict[str, str]:
    """Values of the form for a schedule."""
    plain = {name: getattr(found, name) for name in _PLAIN} | {"start": found.start, "end": found.end}
    body, encoding = bytes(found.body or b""), ""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        text = "\0"
    if "\r" in text or "\0" in text:  # send base64: a text field changes line ends, and cannot have NUL
        text, encoding = b64encode(body).decode(), "base64"
    if found.overlap == "wait":
        plain["group"] = None
    return {
        **{name: "" if value is None else str(value) for name, value in plain.items()},
        "name": found.schedule, "version": str(found.version), "when": found.cron or found.every or "",
        "at": "\n".join(found.at or ()), "timezone": found.timezone, "tags": ",".join(found.tags),
        "meta": "\n".join(f"{name}={value}" for name, value in found.meta.items()), "body": text, "encoding": encoding,
        "paused": "yes" if found.state == "paused" else "",
    }  # fmt: skip


def _page(
    visit: Visit,
    typed: dict[str, str],
    problem: Problem | None = None,
    preview: Previewed[str] | None = None,
    status: int = 200,
) -> Answer:
    edits = typed["version"] != "0"
    return visit.page(
        "schedule_form.html",
        status=status,
        active="schedules",
        title=f"Edit {typed['name']}" if edits else "New schedule",
        typed=typed,
        edits=edits,
        problem=problem,
        preview=preview,
        catch_ups=CATCH_UPS,
        overlaps=OVERLAPS,
    )


@pages.post("/console/new/schedule")
async def save(visit: Visit) -> Answer:
    """Create the schedule, or replace it if nobody changed it meanwhile. A refusal shows the form again, as typed."""
    typed = {name: visit.text(name)[:100_000] for name in _NEW} | {"body": visit.raw("body").replace("\r\n", "\n")}
    try:
        if visit.text("preview"):
            times = converted(_times(typed, visit.zone), Preview)
            found = await visit.service.schedules.preview(schedule_spec(times, "preview"), None, PREVIEW)
            return _page(visit, typed, preview=found)
        warnings = await _put(visit, typed)
    except HadelayError as error:
        if visit.scripted or error.http_status >= 500 or isinstance(error, Forbidden):
            raise
        return _page(visit, typed, visit.problem_of(error), status=error.http_status)
    return visit.go(f"/console/schedules/{typed['name']}", " ".join(["Saved.", *warnings]))


def _times(typed: dict[str, str], zone: ZoneInfo) -> dict[str, Any]:
    """Fields of the API about the times of the schedule."""
    found: dict[str, Any] = {name: to_instant(name, typed[name], 0, zone) for name in ("start", "end") if typed[name]}
    if typed["at"]:
        found["at"] = [to_instant("at", one.strip(), 0, zone) for one in typed["at"].splitlines() if one.strip()]
    if typed["when"]:
        found |= times_of(typed["when"], typed["timezone"] or "UTC")
    return found


async def _put(visit: Visit, typed: dict[str, str]) -> list[str]:
    """Set the schedule; returns hints at settings that may have unexpected effects."""
    name, limits = check_schedule_name(typed["name"]), visit.call.context.config
    wanted: dict[str, Any] = {name: typed[name] for name in _PLAIN if typed[name]} | _times(typed, visit.zone)
    wanted["tags"] = [tag.strip() for tag in typed["tags"].split(",") if tag.strip()]
    wanted["meta"] = dict(pairs("meta", typed["meta"]))
    wanted["paused"] = typed["paused"] == "yes"
    document = converted(wanted, PutSchedule)
    visit.need("publish", check_new_topic(document.topic, limits.max_topic_bytes))
    topic = await visit.service.schedules.topic_of(name)
    if topic is not None:
        visit.access.need_of("publish", topic, "schedule")
    version = whole(typed["version"], 9) or 0
    if topic is not None and not version:
        raise Conflict(f"name: there is a schedule {name} already: open its page to edit it")
    payload = _body(typed), document.content_type or "text/plain"
    spec, draft = schedule_to_put(limits, visit.call.context.max_delay_ms, name, document, payload)
    made = await visit.service.schedules.put(name, spec, draft, visit.actor, version=version, paused=document.paused)
    return made.warnings or []


def _body(typed: dict[str, str]) -> bytes:
    if typed["encoding"] != "base64":
        return typed["body"].encode()
    try:
        return b64decode("".join(typed["body"].split()), validate=True)
    except (Base64Error, ValueError) as error:
        raise Wrong("body", f"This is not base64: {error}.") from None
