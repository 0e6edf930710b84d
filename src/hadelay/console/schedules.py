"""The pages Schedules and Schedule: next and last occurrences, what became of them; pause, trigger, preview."""

import re
from functools import partial
from typing import Any

import msgspec

from hadelay.api.base import decode_hook
from hadelay.api.schedules import Preview, Schedule
from hadelay.console.messages import TONES, now
from hadelay.console.render import millis
from hadelay.console.visit import Pages, Visit
from hadelay.errors import BadRequest, HadelayError, NotFound
from hadelay.http.answers import Answer
from hadelay.http.decoding import decoded
from hadelay.http.schedules import spec_of
from hadelay.words import span

pages = Pages()

#: Number of schedules on a page, and of times in a preview.
_PAGE, _PREVIEW = 100, 10
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


@pages.get("/console/schedules")
async def overview(visit: Visit) -> Answer:
    """All schedules by name, and a preview of a pattern."""
    prefix, after = visit.query.get("q", "").strip()[:128], visit.query.get("after", "")[:128]
    may = partial(visit.may, "read")
    page = await visit.service.schedules.page(prefix, after, _PAGE, stale=visit.stale, may=may, last=True)
    cron, timezone = visit.query.get("cron", "").strip()[:200], visit.query.get("timezone", "").strip()[:64] or "UTC"
    preview, problem = None, ""
    if cron:
        try:
            wish = decoded(lambda: msgspec.convert(_times(cron, timezone), Preview, dec_hook=decode_hook), Preview)
            preview = await visit.service.schedules.preview(spec_of(wish, "preview"), None, _PREVIEW)
        except HadelayError as error:
            if error.http_status >= 500:
                raise
            problem = error.detail
    values: dict[str, Any] = {
        "schedules": page.schedules, "after": page.cursor or "", "q": prefix, "cron": cron, "timezone": timezone,
        "preview": preview, "problem": problem, "health": health, "now": now(visit),
    }  # fmt: skip
    return visit.page("schedules.html", active="schedules", title="Schedules", **values)


def _times(text: str, timezone: str) -> dict[str, Any]:
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
        return "warn", f"{schedule.missed:,} missed, {schedule.overlapped:,} skipped because the one before was pending"
    return "good", "well"


def runs(schedule: Schedule[str], now_ms: int) -> str:
    """When the schedule is due next, and what became of its last message, in words; "" if both are unknown."""
    words = [f"next in {span(max(0, millis(schedule.next[0]) - now_ms))}"] if schedule.next else []
    past = [one for one in schedule.last or () if millis(one.at) <= now_ms]
    if past:
        gone = "past its retention" if past[-1].state == "gone" else past[-1].state
        words.append(f"the last one was {span(now_ms - millis(past[-1].at))} ago, its message is {gone}")
    return "; ".join(words)


def _name(visit: Visit) -> str:
    name = visit.path["schedule"]
    if not _NAME.fullmatch(name):
        raise BadRequest(f"{name[:40]!r} is no name of a schedule")
    return name


@pages.get("/console/schedules/{schedule}")
async def show(visit: Visit) -> Answer:
    found = await visit.service.schedules.get(_name(visit), body=False, stale=visit.stale)
    visit.access.need_of("read", found.topic, "schedule")
    said = runs(found, visit.service.access.now_ms())
    values: dict[str, Any] = {"schedule": found, "health": health(found), "tones": TONES, "runs": said}
    return visit.page("schedule.html", active="schedules", title=found.schedule, **values)


async def _own(visit: Visit) -> str:
    """The name in the path. Raises NotFound, and Forbidden if the visitor may not publish to the schedule's topic."""
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
