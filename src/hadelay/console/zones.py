"""Times of pages in the time zone that the reader chose (ADR 301)."""

import re
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

from markupsafe import Markup

from hadelay.api.text import format_instant, parse_instant
from hadelay.errors import BadRequest
from hadelay.timing.zones import zone as load_zone
from hadelay.words import span

#: Cookie with the name of the zone, for all clusters on a host; and the time for which a browser keeps it, in seconds.
COOKIE, LIFE_S = "hadelay-zone", 365 * 86_400
_LOCAL = re.compile(r"(\d{4}-\d\d-\d\d)(?:[T ](\d\d:\d\d(?::\d\d)?))?")


def zone_of(name: str | None) -> ZoneInfo:
    """The time zone with this IANA name; UTC if there is no such zone."""
    try:
        return load_zone((name or "UTC")[:64])
    except BadRequest:
        return load_zone("UTC")


def millis(text: str) -> int:
    """Parse a time in the API's format (RFC 3339) to Unix ms."""
    return round(datetime.fromisoformat(text).timestamp() * 1000)


def local(text: str, zone: ZoneInfo) -> datetime:
    """A time in the API's format as the clocks of the zone show it."""
    return datetime.fromisoformat(text).astimezone(zone)


def clock(text: str, zone: ZoneInfo, *, exact: bool = False) -> Markup:
    """HTML of a time for a line of a page: Mon 30 Nov, 09:00. With seconds unless they are zero, and with the year
    unless it is the present one. exact: with milliseconds, for timelines."""
    try:
        at = local(text, zone)
    except (ValueError, OverflowError):  # the time is at an end of the calendar: show the text as it is
        return Markup('<time datetime="{0}">{0}</time>').format(text)
    year = "" if at.year == datetime.now(UTC).year else f" {at.year}"
    hms = f"{at:%H:%M:%S}.{text[20:23] or '000'}" if exact else f"{at:%H:%M:%S}" if at.second else f"{at:%H:%M}"
    day = f"{at:%a} {at.day} {at:%b}{year},"
    title = f"{at:%Y-%m-%d %H:%M:%S} {at.tzname()}" + ("" if zone.key == "UTC" else f" = {text}")
    return Markup('<time datetime="{}" title="{}">{} <span class="hms">{}</span></time>').format(text, title, day, hms)


def beside(text: str, now_ms: int) -> Markup:
    """HTML of the time until a time, or since that time; console.js keeps it up to date."""
    left_ms = millis(text) - now_ms
    far_ms = abs(left_ms) if abs(left_ms) < 60_000 else abs(left_ms) // 60_000 * 60_000
    words = f"in {span(far_ms)}" if left_ms >= 0 else f"{span(far_ms)} ago"
    return Markup('<span class="muted beside" data-at="{}">{}</span>').format(millis(text), words)


def to_instant(name: str, text: str, default: int, zone: ZoneInfo) -> int:
    """Parse a time from a form to Unix ms: in the API's format, or as a browser's field has it, in the reader's time
    zone."""
    if not text:
        return default
    if (found := _LOCAL.fullmatch(text)) is None:
        return parse_instant(name, text)
    try:
        at = datetime.fromisoformat(f"{found[1]}T{found[2] or '00:00'}").replace(tzinfo=zone)
        return max(0, int(at.timestamp() * 1000))
    except (ValueError, OverflowError):
        return parse_instant(name, text)


def as_field(at_ms: int, zone: ZoneInfo) -> str:
    """The time as the value of a field of the type datetime-local."""
    return f"{local(format_instant(at_ms), zone):%Y-%m-%dT%H:%M:%S}"
