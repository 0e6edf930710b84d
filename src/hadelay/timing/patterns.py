"""Texts about cron patterns: the cause of a refusal, a description, and warnings about uneven steps. These texts decide
nothing: `hadelay.timing.cron` accepts and refuses patterns."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import NamedTuple

from cronsim import CronSim, CronSimError
from cronsim.explain import Expression

#: Errors by which cronsim refuses a pattern.
REFUSALS = (CronSimError, ValueError, IndexError, RecursionError, OverflowError)
#: Arbitrary time: cronsim needs a time to parse a pattern.
SOME_TIME = datetime(2026, 1, 1, tzinfo=UTC)
#: Limit of the values of an uneven step that a description lists; a step with more is left to cronsim.
_LISTED = 12
#: Ending of an ordinal number by its last digit; all others end in th.
_ENDINGS = {"1": "st", "2": "nd", "3": "rd"}
_DAYS = frozenset(range(1, 32))
_WEEKDAYS = frozenset(range(7))


class _Field(NamedTuple):
    name: str
    low: int
    high: int
    #: Number of values of the field (60 for minutes), after which the field begins again.
    size: int
    #: Name of the period in which the field begins again: a field of minutes does so every hour.
    period: str
    names: tuple[str, ...] = ()


_FIELDS = (
    _Field("second", 0, 59, 60, "minute"),
    _Field("minute", 0, 59, 60, "hour"),
    _Field("hour", 0, 23, 24, "day"),
    _Field("day of the month", 1, 31, 31, "month"),
    _Field("month", 1, 12, 12, "year", ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV",
                                        "DEC")),
    _Field("weekday", 0, 7, 7, "week", ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")),
)  # fmt: skip
_DAY, _MONTH, _WEEKDAY = _FIELDS[3:]
_SUNDAY = "weekdays are 0 (Sunday) to 6, where Quartz and AWS count from 1"
_NO_YEAR = "a year at the end is not supported: leave it out, and limit the schedule by start and end"

#: Beginnings of texts that other schedulers understand as a whole, and what to write instead.
_FOREIGN = (
    (r"(CRON_)?TZ=", "a time zone in front is not supported: leave it out, and set timezone"),
    (r"@every\b|rate\(", "an interval is no pattern: use every, such as 15m, instead of cron"),
    (r"@reboot\b", "nodes start at any time: @reboot is not supported"),
    (r"cron\(", "write the fields without cron( )"),
    (r"['\"]", "write the pattern without quotation marks"),
)
#: Terms of other schedulers: field (None: any), the whole term, what to write instead.
_TERMS: tuple[tuple[_Field | None, str, str], ...] = (
    (None, "", "a part of the list is empty: leave out the comma, and write no spaces inside a field"),
    (None, r"\?", f"? is not supported: write * ({_SUNDAY})"),
    (None, r"H\b.*", "H is not supported: write a number, and spread the occurrences by jitter"),
    (None, r".*~.*", "random values are not supported: write a number, and spread the occurrences by jitter"),
    (None, r"\d+:\d+.*", "write a time of day as minute and hour: 30 9 is 09:30"),
    (None, r".*/(|0+|.*\D.*)", "a step is a whole number of 1 or more"),
    (_DAY, r"LW?-\d+W?", "days before the last day are not supported: write L, the last day, or numbers"),
    (_DAY, r"\d+W", "the weekday nearest to a day is not supported: write LW, the last weekday, or numbers"),
    (_WEEKDAY, "L", "L needs a weekday: 5L is the last Friday of the month, and 6 is Saturday"),
    (_WEEKDAY, r"\w+#.*", "# needs a number from 1 to 5: 5#3 is the third Friday of the month"),
    (_WEEKDAY, r"(19|20)\d\d.*", _NO_YEAR),
)


def cause(pattern: str) -> str | None:
    """The cause for which a pattern is refused, with its field and what to write instead; None if it is not known."""
    text = pattern.strip()
    for begin, advice in _FOREIGN:
        if re.match(begin, text, re.IGNORECASE):
            return advice
    fields = text.upper().split()
    if len(fields) == 7:
        return f"7 fields: {_NO_YEAR}"
    if len(fields) not in (5, 6):
        return None
    if len(fields) == 6 and _ends_with_year(fields):
        return f"six fields begin with seconds, and {_NO_YEAR} ({_SUNDAY})"
    for field, value, given in zip(_FIELDS[-len(fields) :], fields, text.split(), strict=True):
        if not _is_valid(field, value):
            return f"{field.name} {given!r}: {_wrong(field, value)}"
    return "day of the month: no month of the pattern has such a day"


def _ends_with_year(fields: list[str]) -> bool:
    """Whether six fields that are refused look like minute, hour, day, month, weekday and year."""
    named = any(name in fields[4] for name in _WEEKDAY.names)
    year = re.fullmatch(r"\*|(19|20)\d\d.*", fields[5]) is not None
    return year and (named or "?" in (fields[2], fields[4]) or fields[5] != "*")


def _is_valid(field: _Field, value: str) -> bool:
    try:
        _values(field, value)
    except REFUSALS:
        return False
    return True


def _values(field: _Field, value: str) -> set[int]:
    """Values of one field; for `L`, `LW`, `5L` and `5#3` values of cronsim's own. Raises REFUSALS."""
    parts = ["*"] * len(_FIELDS)
    parts[_FIELDS.index(field)] = value
    sim = CronSim(" ".join(parts), SOME_TIME)
    found = (sim.seconds, sim.minutes, sim.hours, sim.days, sim.months, sim.weekdays)[_FIELDS.index(field)]
    return set(found)  # type: ignore[arg-type]


def _wrong(field: _Field, value: str) -> str:
    """Advice in words about a value of a field that cronsim refuses: what to write instead."""
    term = next((term for term in value.split(",") if not term or not _is_valid(field, term)), value)
    for only, form, advice in _TERMS:
        if only in (None, field) and re.fullmatch(form, term):
            return advice
    if short := _with_short_names(field, term):
        return f"names have three letters, and L needs a number: write {short}"
    if (ascending := _ascending(field, term)) is not None:
        return f"ranges ascend: write {ascending}" if ascending else "ranges ascend"
    named = f" or {field.names[0]} to {field.names[-1]}" if field.names else ""
    return f"write {field.low} to {field.high}{named}, a list (1,5), a range (1-5), or a step (*/5)"


def _with_short_names(field: _Field, term: str) -> str | None:
    """Correct an invalid term of a field: cut names to three letters, and write a number in place of a name before L
    (FRIDAYL: 5L). None if this changes nothing, or does not make the term valid or a descending range."""
    if not field.names:
        return None
    short = re.sub(
        r"[A-Z]{3,}", lambda word: word[0][:3] + ("L" if field is _WEEKDAY and word[0][-1] == "L" else ""), term
    )
    for number, name in enumerate(field.names):
        short = short.replace(f"{name}L", f"{number}L")
    return short if short != term and (_is_valid(field, short) or _ascending(field, short)) else None


def _ascending(field: _Field, term: str) -> str | None:
    """Ascending ranges to write in place of a descending range, for the error text. "" for a descending range with a
    step: the text then suggests nothing. None if the term is no descending range."""
    found = re.fullmatch(r"(\w+)-(\w+)(/\d+)?", term)
    if found is None or not (_is_valid(field, found[1]) and _is_valid(field, found[2])):
        return None
    if found[3]:
        return ""
    (begin, end), numbers = found.group(1, 2), field.low + field.size - 1
    if field is _WEEKDAY and end in ("SUN", "0"):
        return f"{begin if begin.isdigit() else field.names.index(begin)}-7"
    low, high = (field.names[0], field.names[-1]) if begin in field.names else (f"{field.low}", f"{numbers}")
    head, tail = begin if begin == high else f"{begin}-{high}", end if end == low else f"{low}-{end}"
    return f"{head},{tail}"


def words(fields: list[str]) -> str:
    """Describe the times of a valid pattern of five or six fields, in words."""
    plain = [_plain(field, value.upper()) for field, value in zip(_FIELDS[-len(fields) :], fields, strict=True)]
    sim = CronSim(" ".join(fields), SOME_TIME)
    all_days = sim.days >= _DAYS
    all_weekdays = {day % 7 for day in sim.weekdays if isinstance(day, int)} >= _WEEKDAYS
    if sim.day_and:
        plain[-3] = "*" if all_days else plain[-3]
        plain[-1] = "*" if all_weekdays else plain[-1]
    elif all_days or all_weekdays:  # day or weekday has to match, and one of the two matches every day
        plain[-3] = plain[-1] = "*"
    expression = Expression(plain)
    expression.day_and = sim.day_and  # cronsim derives day_and from a star that `_plain` may have replaced
    # Correct the ordinal numbers of cronsim, which writes 22th.
    return re.sub(r"(?<=\b[2-5])([123])th\b", lambda end: end[1] + _ENDINGS[end[1]], expression.explain())


def _plain(field: _Field, value: str) -> str:
    """The field, with the values as a list in place of a step that is uneven and has few values. cronsim would describe
    */7 as "every seventh minute", although only four minutes are between minute 56 and minute 0."""
    terms = []
    for term in value.split(","):
        found = sorted(_values(field, term))
        if field is _WEEKDAY and found[0] == 0 and found[-1] == 7:  # 0 and 7 are both Sunday
            found.pop()
        even = len(found) > 1 and len(found) * _step(term) == field.size
        if _step(term) > 1 and found[0] >= 0 and len(found) <= _LISTED and not even:
            terms += [str(number) for number in found]
        else:
            terms.append(term)
    terms = list(dict.fromkeys(terms))
    return ",".join(sorted(terms, key=int) if all(map(str.isdigit, terms)) else terms)


def _step(term: str) -> int:
    return int(term.partition("/")[2] or 1)


def uneven_steps(fields: list[str]) -> Iterator[str]:
    """Warn of each step of a valid pattern that does not divide its field, such as */90."""
    known = _FIELDS[-len(fields) :]
    for at, (field, value) in enumerate(zip(known, fields, strict=True)):
        # Do not warn of a step of minutes in one fixed hour: the step does not go on into the next hour.
        goes_on = field in (_MONTH, _WEEKDAY) or not fields[at + 1].isdigit()
        for term in value.upper().split(","):
            if _step(term) > 1 and (text := _uneven(field, term, goes_on)):
                yield f"{field.name} {term}: {text}"


def _uneven(field: _Field, term: str, goes_on: bool) -> str:
    """Warning about a term whose step is uneven; "" if the step is even, or if the term ends before the field begins
    again."""
    found, step, begin = sorted(_values(field, term)), _step(term), term.partition("/")[0]
    if found[0] < 0:
        return "the step has no effect"
    if len({number % field.size for number in found}) == 1:
        return f"the step has no effect, only {found[0]} matches; for equal intervals use every"
    # Do not warn of a range, nor of a first value beyond the first step: users set these limits on purpose.
    whole = "-" not in begin or begin == f"{field.low}-{field.high}"
    if not whole or not goes_on or found[0] - field.low >= step:
        return ""
    if field is not _DAY and field.size % step == 0:
        return ""
    return (
        f"the step begins again at {found[0]} in each {field.period}, so the interval before is not always {step}; "
        "for equal intervals use every"
    )
