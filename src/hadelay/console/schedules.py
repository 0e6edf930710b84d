"""The pages Schedules and Schedule: occurrences and the states of their messages; pause, trigger, backfill, delete."""

import re
from functools import partial
from typing import Any

from hadelay.api.schedules import Preview, Schedule
from hadelay.console.messages import TONES, now
from hadelay.console.problems import Wrong
from hadelay.console.visit import Pages, Visit
from hadelay.console.zones import millis, to_instant
from hadelay.errors import HadelayError, Impossible, NotFound
from hadelay.http.answers import Answer
from hadelay.rules.documents import converted
from hadelay.rules.schedules import check_schedule_name, schedule_spec
from hadelay.words import span

pages = Pages()

#: Number of schedules on a page, and of times in a preview.
_PAGE, PREVIEW = 100, 10


@pages.get("/console/schedules")
async def overview(visit: Visit) -> Answer:
    """All schedules by name, and a preview of a cron pattern."""
    (prefix, behind), page = _asked(visit), await _page(visit)
    cron, timezone = visit.query.get("cron", "").strip()[:200], visit.query.get("timezone", "").strip()[:64] or "UTC"
    preview, problem = None, None
    if cron:
        try:
            document = converted(times_of(cron, timezone), Preview)
            preview = await visit.service.schedules.preview(schedule_spec(document, "preview"), None, PREVIEW)
        except HadelayError as error:
            if error.http_status >= 500:
                raise
            problem = visit.problem_of(error)
    values: dict[str, Any] = {
        "schedules": page.schedules, "after": page.cursor or "", "q": prefix, "cron": cron, "timezone": timezone,
        "behind": behind, "preview": preview, "problem": problem, "health": health, "now": now(visit),
        "creates": visit.access.rights.may_somewhere("publish"),
    }  # fmt: skip
    return visit.page("schedules.html", active="schedules", title="Schedules", **values)


def _asked(visit: Visit) -> tuple[str, str]:
    """Query of a list of schedules: (prefix of the names, name after which the page begins)."""
    return visit.query.get("q", "").strip()[:128], visit.query.get("after", "")[:128]


async def _page(visit: Visit) -> Any:
    prefix, after = _asked(visit)
    may = partial(visit.may, "read")
    return await visit.service.schedules.page(prefix, after, _PAGE, stale=visit.stale, may=may, last=True)


@pages.live("/console/live/schedules")
def live_rows(visit: Visit) -> tuple[str, Any]:
    """Stream of a list of schedules: its rows."""

    async def frame() -> dict[str, Any]:
        shared = {"health": health, "now": now(visit)}
        found = (await _page(visit)).schedules
        return {
            "html": {f"row-{one.schedule}": visit.render("schedule_row.html", {"one": one, **shared}) for one in found}
        }

    return f"schedules {_asked(visit)} {visit.sees}", frame


def times_of(text: str, timezone: str) -> dict[str, Any]:
    """Convert a schedule's pattern to fields of the API: an interval such as 15m to `every`, other text to `cron`."""
    if re.fullmatch(r"[0-9.]+(ms|s|m|h|d)?", text):
        return {"every": text}
    return {"cron": text, "timezone": timezone}


def health(schedule: Schedule[str]) -> tuple[str, str]:
    """Describe the health of a schedule: (severity, description)."""
    if schedule.problem:
        return "bad", f"this node cannot compute its times: {schedule.problem}"
    if schedule.restored:
        return "warn", "paused since the cluster was restored from a backup"
    if schedule.state != "active":
        return "off", schedule.state
    dead = sum(one.state == "dead" for one in schedule.last or ())
    if dead:
        return "bad", f"{dead} of the last messages died"
    if schedule.refused:
        return "warn", f"{schedule.refused:,} occurrences were refused"
    if schedule.missed or schedule.overlapped:
        return "warn", f"{schedule.missed:,} missed, {schedule.overlapped:,} skipped, as the message before was pending"
    return "good", "fine"


def runs(schedule: Schedule[str], now_ms: int) -> str:
    """Next due time of the schedule, and state of its last message, in words; "" if both are unknown."""
    words = [f"next in {span(max(0, millis(schedule.next[0]) - now_ms))}"] if schedule.next else []
    past = [one for one in schedule.last or () if millis(one.at) <= now_ms]
    if past:
        gone = "past its retention" if past[-1].state == "gone" else past[-1].state
        words.append(f"the last one was {span(now_ms - millis(past[-1].at))} ago, its message is {gone}")
    return "; ".join(words)


def _name(visit: Visit) -> str:
    return check_schedule_name(visit.path["schedule"])


async def _look(visit: Visit) -> dict[str, Any]:
    """Values for a schedule's page. Raises NotFound; Forbidden without the right to read its topic."""
    found = await visit.service.schedules.get(_name(visit), body=False, stale=visit.stale)
    visit.access.need_of("read", found.topic, "schedule")
    said = runs(found, visit.service.access.now_ms())
    return {
        "schedule": found,
        "health": health(found),
        "tones": TONES,
        "runs": said,
        "now": now(visit),
    }


#: Id of a part of a schedule's page → its template.
_LIVE = {
    "said": "schedule_said.html",
    "tiles": "schedule_tiles.html",
    "last": "schedule_last.html",
    "next": "schedule_next.html",
}


@pages.live("/console/live/schedules/{schedule}")
def live(visit: Visit) -> tuple[str, Any]:
    async def frame() -> dict[str, Any]:
        values = await _look(visit)
        html = {name: visit.render(part, values) for name, part in _LIVE.items()}
        return {"html": html, "state": values["schedule"].state}

    return f"schedule {_name(visit)} {visit.actor.token_id}", frame


@pages.get("/console/schedules/{schedule}")
async def show(visit: Visit) -> Answer:
    values = await _look(visit)
    return visit.page("schedule.html", active="schedules", title=values["schedule"].schedule, **values)


async def _own(visit: Visit) -> str:
    """Get the schedule's name from the path, and check access. Raises NotFound, and Forbidden if the visitor may not
    publish to the schedule's topic."""
    name = _name(visit)
    topic = await visit.service.schedules.topic_of(name)
    if topic is None:
        raise NotFound(f"there is no schedule {name!r}")
    visit.access.need_of("publish", topic, "schedule")
    return name


@pages.post("/console/schedules/{schedule}/pause")
async def pause(visit: Visit) -> Answer:
    name = await _own(visit)
    await visit.service.schedules.pause(name, True, visit.actor)
    return visit.go(f"/console/schedules/{name}", "Paused: messages that are not due yet are cancelled.")


@pages.post("/console/schedules/{schedule}/resume")
async def resume(visit: Visit) -> Answer:
    name = await _own(visit)
    await visit.service.schedules.pause(name, False, visit.actor)
    return visit.go(f"/console/schedules/{name}", "Resumed: the schedule goes on from now.")


@pages.post("/console/schedules/{schedule}/trigger")
async def trigger(visit: Visit) -> Answer:
    name = await _own(visit)
    made = await visit.service.schedules.trigger(name, None, visit.actor)
    return visit.go(f"/console/messages/{made.id}", f"Triggered: this is the message of {name}.")


@pages.post("/console/schedules/{schedule}/backfill")
async def backfill(visit: Visit) -> Answer:
    """Make the occurrences of a past range; their messages are due now."""
    name = await _own(visit)
    start, end = (to_instant(field, visit.text(field), -1, visit.zone) for field in ("from", "to"))
    if start < 0 or end < 0:
        raise Wrong("from" if start < 0 else "to", "Give both ends of the range.")
    if end <= start:
        raise Impossible("to: must be after from")
    made = (await visit.service.schedules.backfill(name, start, end, None, visit.actor)).results
    return visit.go(f"/console/schedules/{name}", f"Backfilled: {len(made):,} messages are due now.")


@pages.post("/console/schedules/{schedule}/delete")
async def delete(visit: Visit) -> Answer:
    """Delete the schedule, after the person typed its name."""
    name = await _own(visit)
    if visit.text("typed") != name:
        raise Wrong("typed", f"Type the name of the schedule, {name}, to confirm.")
    await visit.service.schedules.delete(name, visit.actor)
    return visit.go("/console/schedules", f"The schedule {name} is deleted.")
