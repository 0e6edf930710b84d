"""Reschedule a message from its page: by a shift, after a delay, or to a time; with a preview in the reader's time
zone, and an undo."""

import re
from datetime import datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from hadelay.api.base import Instant
from hadelay.api.messages import Message, Reschedule
from hadelay.api.text import parse_id, parse_instant
from hadelay.console.problems import Wrong
from hadelay.console.visit import Pages, Visit
from hadelay.console.zones import millis, to_instant
from hadelay.errors import BadRequest, Conflict, HadelayError
from hadelay.http.answers import Answer
from hadelay.rules.access import need_publish, need_read
from hadelay.rules.messages import new_due_time

pages = Pages()

#: Choice in the form → field of the API's document.
HOW = {"later by": "shift", "in": "delay", "at": "deliver_at"}
#: Time after a reschedule for which the page offers to undo it, in ms.
UNDO_MS = 30_000
_CLOCK = re.compile(r"(\d\d?):(\d\d)")
_FAILURES = ("nacked", "lease_expired")


async def _message(visit: Visit) -> Message[str]:
    return await visit.service.messages.describe(parse_id(visit.path["id"]), body=False, stale=visit.stale)


@pages.post("/console/messages/{id}/reschedule")
async def reschedule(visit: Visit) -> Answer:
    message = await _message(visit)
    need_publish(visit.access, message)
    when_ms, relative, expected_ms = _asked(visit, visit.text("how"), visit.text("when"), visit.text("expected"))
    try:
        changed = await visit.service.messages.reschedule(
            parse_id(message.id), when_ms, relative, visit.actor, expected_ms=expected_ms
        )
    except Conflict:
        if expected_ms is None or expected_ms == millis(message.deliver_at):
            raise
        words = moved(expected_ms, millis(message.deliver_at), visit.zone)
        raise Conflict(
            f"the message was rescheduled or retried meanwhile: {words}; reload the page, then repeat this"
        ) from None
    words = moved(millis(message.deliver_at), changed[1], visit.zone)
    return visit.go(f"/console/messages/{message.id}", f"Rescheduled: {words}.")


@pages.get("/console/messages/{id}/preview")
async def preview(visit: Visit) -> Answer:
    """Preview of a reschedule, in words: old and new due time in the reader's time zone."""
    message = await _message(visit)
    need_read(visit.access, message.topic)
    how, when = (visit.query.get(field, "").strip() for field in ("how", "when"))
    words = problem = ""
    if when:
        try:
            when_ms, relative, _ = _asked(visit, how, when, message.deliver_at)
            now_ms = visit.service.access.now_ms()
            new_ms = now_ms + when_ms if relative else when_ms
            words = moved(millis(message.deliver_at), max(new_ms, now_ms), visit.zone)
            words += "" if new_ms > now_ms else ", at once: that time is over"
        except HadelayError as error:
            problem = visit.problem_of(error).words
    return visit.part("preview.html", words=words, problem=problem)


def _asked(visit: Visit, how: str, when: str, expected: str) -> tuple[int, bool, int | None]:
    """Read a form: (when_ms, relative, expected_ms), as for MessageService.reschedule. Raises Wrong, Impossible."""
    if (field := HOW.get(how)) is None:
        raise Wrong("how", f"Choose {', '.join(HOW)}.")
    if not when:
        raise Wrong("when", "Write a time, such as 3h, or 18:00.")
    try:
        value: Any = when if field != "deliver_at" else _instant(when, visit.zone, visit.service.access.now_ms())
        due = Instant(parse_instant("expected", expected)) if expected else None
        document = Reschedule(**{field: value}, expected_deliver_at=due)
        return new_due_time(visit.call.context.max_delay_ms, document)
    except BadRequest as error:  # the text begins with the field of the API, which the form does not have
        raise Wrong("when", error.detail.removeprefix(f"{field}: ")) from None


def _instant(text: str, zone: ZoneInfo, now_ms: int) -> int:
    """Unix ms of a text. A time of day, such as 18:00, is the next one in the zone; any other text is a time as in all
    forms."""
    if (clock := _CLOCK.fullmatch(text)) is None:
        return max(to_instant("deliver_at", text.replace(" ", "T"), 0, zone), 0)
    here = datetime.fromtimestamp(now_ms / 1000, zone)
    try:
        there = here.replace(hour=int(clock[1]), minute=int(clock[2]), second=0, microsecond=0)
    except ValueError:
        raise BadRequest(f"{text!r} is no time of day") from None
    return round((there if there > here else there + timedelta(days=1)).timestamp() * 1000)


def moved(before_ms: int, after_ms: int, zone: ZoneInfo) -> str:
    """Old and new due time in a zone: `10:03 → 13:03 Vienna`; with days if these differ, and with seconds if there are
    any."""
    try:
        before, after = (datetime.fromtimestamp(ms // 1000, zone) for ms in (before_ms, after_ms))
    except (ValueError, OverflowError):
        return "at an end of the calendar"
    clock = "%H:%M:%S" if before.second or after.second else "%H:%M"
    day = "" if before.date() == after.date() else "%a %d %b "
    year = "" if before.year == after.year else "%Y "
    shown = [f"{one:{day}{year}{clock}}" for one in (before, after)]
    return f"{' → '.join(shown)} {zone.key.rpartition('/')[2].replace('_', ' ')}"


def undo_of(message: Message[str], now: str) -> dict[str, Any] | None:
    """Undo of a reschedule in the last 30 s: old and new due time, and time for which the page still offers the undo.
    None if there is nothing to undo."""
    history = message.history or []
    last, before = (history[-1] if history else None), (history[-2] if len(history) > 1 else None)
    if message.state not in ("scheduled", "ready", "blocked") or last is None or last.old_deliver_at is None:
        return None
    left_ms = UNDO_MS - (millis(now) - millis(last.at))
    if left_ms <= 0 or (before is not None and before.event in _FAILURES and before.at == last.at):
        return None
    return {"old": last.old_deliver_at, "new": last.new_deliver_at, "left_ms": left_ms}
