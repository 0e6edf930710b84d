"""Translates schedule expressions of AWS, at(…), rate(…) and cron(…) with six fields, to the times of a schedule of
hadelay.

AWS counts weekdays from 1 (Sunday), has a ? in one of the two fields for days, and a year at the end. The year becomes
bounds of the schedule, so only years without gaps are possible.
"""

import re
from datetime import UTC, datetime
from typing import NamedTuple

from hadelay.aws.errors import AwsError
from hadelay.aws.scheduler.protocol import invalid
from hadelay.errors import BadRequest
from hadelay.timing import cron, zones

_FORMS = "at(2026-12-24T18:00:00), rate(5 minutes) or cron(0 9 ? * MON-FRI *)"
_EXPRESSION = re.compile(r"(at|rate|cron)\((.*)\)", re.DOTALL)
_RATE = re.compile(r"([1-9]\d{0,8}) +(minute|hour|day)s?", re.ASCII)
_AT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d(:\d\d)?", re.ASCII)
_UNITS_MS = {"minute": 60_000, "hour": 3_600_000, "day": 86_400_000}
#: Longest interval between two occurrences of a rate: 100 years, in ms.
_LONGEST_MS = 36_500 * 86_400_000
#: Years that AWS accepts in a cron expression.
_YEARS = range(1970, 2200)
_YEAR = re.compile(r"(\*|\d{4})(?:-(\d{4}))?(?:/(\d{1,3}))?", re.ASCII)
_WEEKDAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
#: Pattern of one term of the field for weekdays: a day or a range of days, with or without a step; or the last or n-th
#: such day of the month.
_DAY = rf"([1-7]|{'|'.join(_WEEKDAYS)})"
_DAYS = re.compile(rf"(?:\*|{_DAY}(?:-{_DAY})?)(/\d+)?|{_DAY}(L|#[1-5])", re.ASCII)
#: Largest value of the fields for minutes, hours, days and months. A step from a value on, such as 5/15, ends there.
_LAST = (59, 23, 31, 12)


class Times(NamedTuple):
    """Times at which a schedule fires: exactly one of at_ms, every_ms and cron is set. Values in ms are Unix times,
    except the interval every_ms."""

    at_ms: int | None = None
    every_ms: int | None = None
    #: Cron pattern of five fields, as schedules of hadelay have it.
    cron: str | None = None
    #: Beginning of the first year, and end of the last year, of a cron expression; None: no bound.
    start_ms: int | None = None
    end_ms: int | None = None


def parse(expression: str, timezone: str) -> Times:
    """Parse a schedule expression of AWS. Raises AwsError."""
    found = _EXPRESSION.fullmatch(expression)
    if found is None:
        raise invalid(f"ScheduleExpression: {expression[:80]!r} is none of {_FORMS}")
    try:
        zones.zone(timezone)
    except BadRequest as error:
        raise invalid(f"ScheduleExpressionTimezone: {error.detail.partition(': ')[2]}") from None
    kind, text = found[1], found[2]
    if kind == "at":
        return Times(at_ms=_local_ms(text, timezone))
    if kind == "rate":
        rate = _RATE.fullmatch(text)
        if rate is None:
            raise invalid(f"ScheduleExpression: rate({text[:80]}): write a whole number and minutes, hours or days")
        every_ms = int(rate[1]) * _UNITS_MS[rate[2]]
        if every_ms > _LONGEST_MS:
            raise invalid(f"ScheduleExpression: rate({text[:80]}): at most {_LONGEST_MS // 86_400_000} days")
        return Times(every_ms=every_ms)
    return _cron(text, timezone)


def _local_ms(text: str, timezone: str) -> int:
    try:
        if not _AT.fullmatch(text):
            raise ValueError("no time")
        at = datetime.fromisoformat(text)
        if (at_s := int(at.replace(tzinfo=zones.zone(timezone)).timestamp())) < 0:
            raise ValueError("before 1970")
        return at_s * 1_000
    except (ValueError, OverflowError):
        raise invalid(f"ScheduleExpression: at({text[:80]}): write the time as 2026-12-24T18:00:00") from None


def _cron(text: str, timezone: str) -> Times:
    fields = text.upper().split()
    if len(fields) != 6:
        raise _wrong(text, "write six fields: minutes, hours, day of the month, month, day of the week, year")
    day, weekday = fields[2], fields[4]
    if (day == "?") == (weekday == "?"):
        raise _wrong(text, "write ? in exactly one of day of the month and day of the week")
    fields[4] = weekday if weekday == "?" else ",".join(_weekdays(text, term) for term in weekday.split(","))
    five = [_stepped(field, last) for field, last in zip(fields[:4], _LAST, strict=True)] + fields[4:5]
    first, last = _years(text, fields[5])
    pattern = " ".join("*" if field == "?" else field for field in five)
    try:
        cron.parse(pattern, timezone)
    except BadRequest as error:
        raise _wrong(text, error.detail.removeprefix(f"cron: {pattern!r}: ")) from None
    return Times(
        cron=pattern,
        start_ms=None if first == _YEARS[0] else _year_ms(first, timezone),
        end_ms=None if last == _YEARS[-1] else _year_ms(last + 1, timezone) - 1,
    )


def _weekdays(text: str, term: str) -> str:
    """Translate one term of the field for weekdays: AWS counts Sunday as 1, hadelay as 0. A range may begin before
    Sunday and end after it: FRI-MON."""
    found = _DAYS.fullmatch("7" if term == "L" else term)
    if found is None:
        form = "write 1 (Sunday) to 7, or SUN to SAT, a list, a range, a step, 6L (the last Friday) or 6#3 (the third)"
        raise _wrong(text, f"weekday {term[:40]!r}: {form}")
    begin, end, step, day, which = found.groups()
    if which:
        return f"{_counted_from_0(day)}{which}"
    if begin is None:
        return term
    first = _counted_from_0(begin)
    last = _counted_from_0(end) if end else 6 if step else first
    every = int(step[1:]) if step else 1
    if every < 1:
        raise _wrong(text, f"weekday {term[:40]!r}: a step is a whole number of 1 or more")
    if first < last:
        return f"{first}-{last}{step or ''}"
    return ",".join(str(one % 7) for one in range(first, last + (1 if first == last else 8), every))


def _counted_from_0(day: str) -> int:
    return _WEEKDAYS.index(day) if day in _WEEKDAYS else int(day) - 1


def _stepped(field: str, last: int) -> str:
    """Write the end of each step that has only a beginning: 5/15 of minutes becomes 5-59/15."""
    return re.sub(r"(?<![-\w])([A-Z0-9]+)/", rf"\1-{last}/", field)


def _years(text: str, field: str) -> tuple[int, int]:
    """First and last year of a cron expression's field for years. Raises AwsError if years between them are missing."""
    found: set[int] = set()
    for term in field.split(","):
        part = _YEAR.fullmatch(term)
        if part is None or (part[1] == "*" and part[2]) or part[3] == "0":
            raise _wrong(text, f"the year {term[:40]!r}: write *, 2026, 2026-2028 or 2026,2027")
        first = _YEARS[0] if part[1] == "*" else int(part[1])
        last = int(part[2]) if part[2] else _YEARS[-1] if part[1] == "*" or part[3] else first
        found |= set(range(first, last + 1, int(part[3] or 1)))
    if not found or not found <= set(_YEARS):
        raise _wrong(text, f"years are from {_YEARS[0]} to {_YEARS[-1]}, in ascending ranges")
    first, last = min(found), max(found)
    if len(found) <= last - first:
        raise _wrong(text, "years with gaps are not supported: make a schedule for each range of years")
    return first, last


def _year_ms(year: int, timezone: str) -> int:
    return int(datetime(year, 1, 1, tzinfo=zones.zone(timezone)).astimezone(UTC).timestamp()) * 1_000


def _wrong(text: str, words: str) -> AwsError:
    return invalid(f"ScheduleExpression: cron({text[:80]}): {words}")
