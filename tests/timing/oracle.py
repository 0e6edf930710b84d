"""When a cron pattern matches, by looking at every minute: another parser and another rule for clock changes than the
code under test, and no shortcut.

A pattern whose minute or hour begins with a star goes by real time: each minute whose local time matches. Any other
pattern is of fixed times: each local time that matches comes once, the first time where the clock shows it twice, and
right after the gap where the clock skips it.
"""

from __future__ import annotations

import calendar
from datetime import UTC, datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo

import numpy as np

_DAYS = {"SUN": 0, "MON": 1, "TUE": 2, "WED": 3, "THU": 4, "FRI": 5, "SAT": 6}
_MONTHS = {name.upper(): n for n, name in enumerate(calendar.month_abbr) if n}


def _numbers(field: str, low: int, high: int, names: dict[str, int]) -> set[int]:
    found: set[int] = set()
    for part in field.split(","):
        span, _, step = part.partition("/")
        if span == "*":
            first, last = low, high
        elif "-" in span:
            first, last = (names.get(end) if end in names else int(end) for end in span.split("-"))  # type: ignore[misc]
        else:
            first = names[span] if span in names else int(span)
            last = high if step else first
        found |= set(range(first, last + 1, int(step or 1)))
    return found


class Pattern:
    def __init__(self, text: str) -> None:
        minute, hour, dom, month, dow = text.upper().split()
        self.minutes, self.hours = _numbers(minute, 0, 59, {}), _numbers(hour, 0, 23, {})
        self.months = _numbers(month, 1, 12, _MONTHS)
        self.dom, self.dow = dom.split(","), dow.split(",")
        self.both = dom.startswith("*") or dow.startswith("*")
        self.fixed = not (minute.startswith("*") or hour.startswith("*"))

    def day(self, date: datetime) -> bool:
        if date.month not in self.months:
            return False
        dom, dow = any(_dom(part, date) for part in self.dom), any(_dow(part, date) for part in self.dow)
        return (dom and dow) if self.both else (dom or dow)


def _dom(part: str, date: datetime) -> bool:
    last = calendar.monthrange(date.year, date.month)[1]
    if part == "L":
        return date.day == last
    if part == "LW":
        end = datetime(date.year, date.month, last)
        while end.isoweekday() > 5:
            end -= timedelta(days=1)
        return date.day == end.day
    return date.day in _numbers(part, 1, 31, {})


def _dow(part: str, date: datetime) -> bool:
    today = date.isoweekday() % 7
    if "#" in part:
        day, nth = part.split("#")
        return _weekday(day) == today and (date.day - 1) // 7 + 1 == int(nth)
    if part.endswith("L"):
        return _weekday(part[:-1]) == today and (date + timedelta(days=7)).month != date.month
    return today in {n % 7 for n in _numbers(part, 0, 7, _DAYS)} and part not in ("L",)


def _weekday(text: str) -> int:
    return _DAYS[text] if text in _DAYS else int(text) % 7


@cache
def _local(zone: str, first: int, last: int) -> np.ndarray:
    """Local time of each minute from `first` to `last` (minutes since 1970), in minutes."""
    tz = ZoneInfo(zone)
    offsets = [datetime.fromtimestamp(60 * m, tz).utcoffset() for m in range(first, last, 15)]
    minutes = [int(offset.total_seconds()) // 60 for offset in offsets if offset is not None]
    return np.arange(first, last) + np.repeat(minutes, 15)[: last - first]


def minutes(pattern: Pattern, zone: str, first: int, last: int) -> list[int]:
    """Minutes since 1970, from `first` (a multiple of 15) to `last`, exclusive, at which the pattern matches."""
    local = _local(zone, first, last)
    days = {}
    for day in range(int(local.min()) // 1440 - 1, int(local.max()) // 1440 + 2):
        days[day] = pattern.day(datetime.fromtimestamp(day * 86_400, UTC).replace(tzinfo=None))
    if not pattern.fixed:
        hit = np.isin(local % 60, list(pattern.minutes)) & np.isin(local // 60 % 24, list(pattern.hours))
        at = np.flatnonzero(hit)
        return [first + int(n) for n in at if days[int(local[n]) // 1440]]
    seen = {}
    for n, minute in enumerate(local.tolist()):
        seen.setdefault(minute, first + n)
    found = set()
    for day, on in days.items():
        for hour in pattern.hours if on else ():
            for minute in pattern.minutes:
                wanted = day * 1440 + hour * 60 + minute
                if wanted in seen:
                    found.add(seen[wanted])
                elif local[0] < wanted < local[-1]:
                    # skipped by the clock: right after the gap
                    found.add(first + int(np.flatnonzero(local > wanted)[0]))
    return sorted(found)
