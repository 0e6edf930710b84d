"""Cron patterns: when they match, in a time zone.

Five fields (minute, hour, day of the month, month, day of the week), or six with seconds in front, or an alias. cronsim
finds the minutes, by five fields; this module adds the seconds, because cronsim with six fields ignores its own rules
for daylight saving (ADR 220). Those rules are Debian cron's: a fixed time in a gap comes once, right after the gap; a
fixed time that comes twice counts once; patterns whose minute or hour begins with a star go by real time.
"""

import copy
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import lru_cache
from typing import NamedTuple

from cronsim import CronSim

from hadelay.errors import BadRequest
from hadelay.model import NEVER_MS
from hadelay.timing import patterns, zones
from hadelay.timing.zones import zone

ALIASES = {
    "@yearly": "0 0 1 1 *", "@annually": "0 0 1 1 *", "@monthly": "0 0 1 * *", "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *", "@midnight": "0 0 * * *", "@hourly": "0 * * * *",
}  # fmt: skip
#: Limit of a pattern's text, in characters; a longer pattern is refused.
MAX_PATTERN = 256
#: Limit, in years, of the search for a pattern's next match; a pattern without a match until then has no further times.
MAX_YEARS = 10
_MINUTE_MS, _DAY_MS = 60_000, 86_400_000
#: Number of days ahead for which warnings name the clock changes that affect a pattern.
_WARNED_DAYS = 400


class Cron(NamedTuple):
    """A parsed pattern: five fields for cronsim, and the seconds of each minute at which it matches."""

    fields: str
    seconds: tuple[int, ...]
    zone: str


@lru_cache(4_096)
def parse(pattern: str, timezone: str) -> Cron:
    """Parse a cron pattern. Raises BadRequest."""
    text = ALIASES.get(pattern.strip().lower(), pattern)
    fields = text.split()
    if len(pattern) > MAX_PATTERN or not pattern.isascii() or len(fields) not in (5, 6):
        if len(pattern) <= MAX_PATTERN and (cause := patterns.cause(pattern)):
            raise BadRequest(f"cron: {pattern[:80]!r}: {cause}")
        raise BadRequest(
            f"cron: {pattern[:80]!r} is no pattern; write 5 fields (minute hour day month weekday), 6 with seconds in "
            f"front, or one of {' '.join(ALIASES)}"
        )
    zone(timezone)
    try:
        if len(fields) == 6:
            seconds = CronSim(f"{fields[0]} * * * * *", patterns.SOME_TIME).seconds
        else:
            seconds = {0}
        five = " ".join(fields[-5:])
        _simulation(five)
    except patterns.REFUSALS:
        raise BadRequest(f"cron: {pattern!r}: {patterns.cause(pattern) or 'it is no pattern'}") from None
    return Cron(five, tuple(sorted(seconds)), timezone)


@lru_cache(4_096)
def _simulation(fields: str, timezone: str = "Europe/Vienna") -> CronSim:
    """Parse the fields of a pattern; callers copy the cached object. Any zone but UTC makes cronsim note whether the
    pattern is of fixed times."""
    return CronSim(fields, patterns.SOME_TIME.astimezone(zone(timezone)))


def after(cron: Cron, after_ms: int) -> Iterator[int]:
    """Times in Unix ms after `after_ms` at which the pattern matches, ascending. The iterator ends if MAX_YEARS pass
    without a match."""
    for minute_ms in _minutes(cron, after_ms - after_ms % _MINUTE_MS):
        for second in cron.seconds:
            if (at_ms := minute_ms + 1_000 * second) > after_ms:
                yield at_ms


def _minutes(cron: Cron, from_ms: int) -> Iterator[int]:
    """Minutes from `from_ms` on that match the five fields, each once."""
    before_ms = from_ms - 1
    while (found := _next_minute(cron.fields, cron.zone, before_ms)) is not None:
        yield found
        before_ms = found


# Cached, because many schedules have the same pattern, and are due at the same time.
@lru_cache(8_192)
def _next_minute(fields: str, timezone: str, before_ms: int) -> int | None:
    """The first matching minute after `before_ms`; None if there is none within MAX_YEARS."""
    until_ms = before_ms + (MAX_YEARS * 366) * _DAY_MS
    search = _next_fixed if _simulation(fields).fixup_tz is not None else _next_by_real_time
    found_ms = search(fields, timezone, before_ms, until_ms)
    return None if found_ms is None or found_ms > until_ms else found_ms


def _next_fixed(fields: str, timezone: str, before_ms: int, until_ms: int) -> int | None:
    """Next match, in Unix ms, of a pattern of fixed times, by cronsim's own rules for clock changes; None if there is
    none."""
    sim, tz = copy.copy(_simulation(fields)), zone(timezone)
    sim.fixup_tz = tz
    sim.dt = datetime.fromtimestamp(before_ms // 1_000, tz).replace(tzinfo=None, fold=0)
    for found in sim:
        found_ms = int(found.timestamp()) * 1_000
        # A clock change may repeat a local time: cronsim then returns the first of the two times, even if that is past.
        if found_ms > before_ms:
            return found_ms
    return None


def _next_by_real_time(fields: str, timezone: str, before_ms: int, until_ms: int) -> int | None:
    """Next match, in Unix ms, of a pattern with a star; None if there is none. Between two clock changes, local
    time is UTC plus a constant, so cronsim runs in UTC: in the zone, it omits times after a change of half an hour
    (Lord Howe)."""
    sim = copy.copy(_simulation(fields))
    sim.fixup_tz = None
    while before_ms <= until_ms:
        offset_ms = zones.offset_ms(timezone, before_ms + 1_000)
        change_ms = zones.next_change(timezone, before_ms + 1_000)
        sim.dt = datetime.fromtimestamp((before_ms + offset_ms) // 1_000, UTC).replace(tzinfo=None)
        found = next(sim, None)
        found_ms = NEVER_MS if found is None else int(found.replace(tzinfo=UTC).timestamp()) * 1_000 - offset_ms
        if change_ms is None or found_ms < change_ms:
            return found_ms
        # No local time before the found one matches under any offset, but a clock change may repeat local times from
        # before the start of the search.
        before_ms = change_ms - 1 if change_ms - before_ms < _DAY_MS else max(change_ms - 1, found_ms - _DAY_MS)
    return None


def explain(pattern: str) -> str:
    """Describe a cron pattern in words. Raises BadRequest."""
    text = ALIASES.get(pattern.strip().lower(), pattern)
    parse(pattern, "UTC")
    try:
        return patterns.words(text.split())
    except Exception:  # return the pattern: cronsim cannot describe some valid patterns
        return text


def warnings(pattern: str, timezone: str, after_ms: int) -> list[str]:
    """Describe uneven steps of a pattern, and how clock changes after `after_ms` affect it. Raises BadRequest."""
    parsed = parse(pattern, timezone)
    text = ALIASES.get(pattern.strip().lower(), pattern)
    return [*patterns.uneven_steps(text.split()), *clock_changes(parsed, after_ms)]


def clock_changes(cron: Cron, after_ms: int) -> list[str]:
    """Describe how clock changes in the next 400 days affect a pattern of fixed times; an empty list if none does."""
    tz, fixed = zone(cron.zone), _simulation(cron.fields)
    if fixed.fixup_tz is None:
        return []
    found: list[str] = []
    for day in range(_WARNED_DAYS):
        from_ms = after_ms + day * _DAY_MS
        begin, end = (datetime.fromtimestamp(ms // 1_000, tz).utcoffset() for ms in (from_ms, from_ms + _DAY_MS))
        if begin != end:
            found += _changed(cron, fixed, from_ms)
    return found


def _changed(cron: Cron, fixed: CronSim, from_ms: int) -> Iterator[str]:
    """Describe each occurrence of one day that a clock change moves, or whose local time it repeats."""
    tz = zone(cron.zone)
    for at_ms in _minutes(cron, from_ms):
        if at_ms >= from_ms + _DAY_MS:
            return
        local = datetime.fromtimestamp(at_ms // 1_000, tz)
        if local.hour not in fixed.hours or local.minute not in fixed.minutes:
            yield f"{local:%Y-%m-%d}: the clock skips a time of the pattern; the occurrence is at {local.isoformat()}"
        elif local.replace(fold=0).utcoffset() != local.replace(fold=1).utcoffset():
            yield f"{local:%Y-%m-%d}: {local:%H:%M} comes twice; the occurrence is the first, {local.isoformat()}"
