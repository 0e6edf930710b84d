"""Conversion of APScheduler's triggers to settings of a schedule, and to JSON and back."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from apscheduler.triggers.base import BaseTrigger
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.cron.expressions import (
    AllExpression,
    LastDayOfMonthExpression,
    RangeExpression,
    WeekdayPositionExpression,
)
from apscheduler.triggers.cron.fields import MAX_VALUES, MIN_VALUES
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger

#: Names of the fields of the cluster's cron patterns, in the order of the pattern.
_ORDER = ("second", "minute", "hour", "day", "month", "day_of_week")


def zone_of(zone: Any) -> str:
    """Name of a time zone. Raises ValueError for a zone without a name that the cluster knows."""
    name = getattr(zone, "key", None) or getattr(zone, "zone", None) or str(zone)
    if "/" not in name and name != "UTC":
        raise ValueError(f"the time zone {name} has no name such as Europe/Vienna: give the trigger a timezone")
    return str(name)


def times_of(trigger: BaseTrigger, first: datetime) -> dict[str, Any]:
    """Settings of a schedule whose next occurrence is `first`, the job's next_run_time. Raises ValueError, with advice,
    for a trigger that a schedule cannot express."""
    jitter = getattr(trigger, "jitter", None) or None
    if type(trigger) is DateTrigger:
        return {"at": [first]}
    if type(trigger) is IntervalTrigger:
        if trigger.interval < timedelta(seconds=1):
            raise ValueError(f"the cluster's shortest interval is 1 s, not {trigger.interval}")
        # Start the series at the next run: APScheduler adds the interval to the previous run, which gives the same
        # times.
        return {"every": trigger.interval, "start": first, "end": trigger.end_date, "jitter": jitter}
    if type(trigger) is CronTrigger:
        return {
            "cron": pattern_of(trigger),
            "timezone": zone_of(trigger.timezone),
            "start": _start_of(trigger, first),
            "end": trigger.end_date,
            "jitter": jitter,
        }
    raise ValueError(
        f"a cluster has no equivalent of {trigger}: use a cron, interval or date trigger, or keep the job in another "
        "job store"
    )


def _start_of(trigger: CronTrigger, first: datetime) -> datetime | None:
    """Start time of a cron schedule whose next occurrence is to be `first`. Raises ValueError if `first` is in the
    future and no time of the pattern."""
    now, plain = datetime.now(first.tzinfo), CronTrigger.__new__(CronTrigger)
    plain.__setstate__({**trigger.__getstate__(), "jitter": None})
    begin: datetime | None = trigger.start_date
    if first <= now:
        return begin
    found = plain.get_next_fire_time(None, first - timedelta(seconds=trigger.jitter or 0))
    if found is None or found > first:
        raise ValueError(
            f"next_run_time {first} is no time of {trigger}: give a time of the pattern, now, or None for a paused job"
        )
    soonest = plain.get_next_fire_time(None, now)
    if soonest is not None and found > soonest:
        begin = found
    return begin


def pattern_of(trigger: CronTrigger) -> str:
    """Convert a cron trigger to a cron pattern of the cluster. Raises ValueError if the pattern cannot express the
    trigger."""
    fields = {field.name: field for field in trigger.fields}
    for name in ("year", "week"):
        if str(fields[name]) != "*":
            raise ValueError(f"{trigger}: a cluster's cron has no {name}: use start_date, end_date or another field")
    found = {name: _field(name, fields[name].expressions) for name in _ORDER}
    if found["day"].startswith("="):  # a cluster has days such as "3rd fri" in the field for the weekday
        if found["day_of_week"] != "*":
            raise ValueError(f"{trigger}: use one of day and day_of_week, and check the other in the job")
        found["day"], found["day_of_week"] = "*", found["day"][1:]
    elif found["day"] != "*" and found["day_of_week"] != "*":
        raise ValueError(
            f"{trigger}: day and day_of_week mean days that fit both; in the cluster's cron they mean days that fit "
            "one. Use one of them, and check the other in the job"
        )
    return " ".join(found[name] for name in _ORDER)


def _field(name: str, expressions: list[Any]) -> str:
    """Convert one field of a cron trigger. A day that is a position such as "3rd fri" becomes "=" and the pattern's
    field for the weekday."""
    if any(type(one) is WeekdayPositionExpression for one in expressions):
        if len(expressions) > 1:
            raise ValueError(f"{name}: give one position of a weekday, such as 3rd fri, not a list")
        (one,) = expressions
        weekday = (one.weekday + 1) % 7
        return f"={weekday}L" if one.option_num == 5 else f"={weekday}#{one.option_num + 1}"
    values = [value for one in expressions for value in _values(name, one)]
    size = MAX_VALUES[name] - MIN_VALUES[name] + 1
    if len({*values}) == size:
        return "*"
    first = expressions[0]
    if len(expressions) == 1 and type(first) is AllExpression and name not in ("day", "day_of_week"):
        return f"*/{first.step}"  # keep the star: patterns with a star go by real time when the clock changes
    texts = ["L" if value is None else str(value) for value in values]
    return ",".join(dict.fromkeys(sorted(texts, key=lambda text: (text == "L", text.zfill(2)))))


def _values(name: str, expression: Any) -> Iterator[int | None]:
    """Values that an expression of a cron trigger selects, weekdays as in the cluster's patterns (Sunday is 0). None
    stands for the last day of the month."""
    low, high = MIN_VALUES[name], MAX_VALUES[name]
    if type(expression) is LastDayOfMonthExpression:
        yield None
        return
    if isinstance(expression, RangeExpression):
        low, high = expression.first, high if expression.last is None else expression.last
    elif type(expression) is not AllExpression:
        raise ValueError(f"{name} {expression}: a cluster's cron has no such expression")
    for value in range(low, high + 1, expression.step or 1):
        yield (value + 1) % 7 if name == "day_of_week" else value


def to_json(trigger: BaseTrigger) -> dict[str, Any]:
    """Encode a trigger that `times_of` accepts as JSON."""
    if isinstance(trigger, DateTrigger):
        return {"date": trigger.run_date.isoformat(), "timezone": str(trigger.run_date.tzinfo)}
    common = {
        "timezone": zone_of(trigger.timezone),
        "start_date": _text(trigger.start_date),
        "end_date": _text(trigger.end_date),
        "jitter": trigger.jitter,
    }
    if isinstance(trigger, IntervalTrigger):
        return {"interval": trigger.interval_length, **common}
    return {"cron": {field.name: str(field) for field in trigger.fields if not field.is_default}, **common}


def from_json(document: dict[str, Any]) -> BaseTrigger:
    if "date" in document:
        return DateTrigger(datetime.fromisoformat(document["date"]))
    common: dict[str, Any] = {
        "timezone": document["timezone"],
        "start_date": _time(document["start_date"]),
        "end_date": _time(document["end_date"]),
        "jitter": document["jitter"],
    }
    if "interval" in document:
        return IntervalTrigger(seconds=document["interval"], **common)
    return CronTrigger(**document["cron"], **common)


def keeps_phase(old: BaseTrigger, new: BaseTrigger, first: datetime) -> bool:
    """Whether a job that is added again keeps the times of its runs: it has the same interval, and nobody chose its
    start. APScheduler counts an interval without start_date from the call, so each start of a program would shift the
    runs. first: next_run_time of the job."""
    if not (type(old) is type(new) is IntervalTrigger):
        return False
    same = (old.interval, old.end_date, old.jitter) == (new.interval, new.end_date, new.jitter)
    since = datetime.now(new.start_date.tzinfo) - (new.start_date - new.interval)
    # A start_date that APScheduler chose itself has microseconds, and is one interval after the call.
    own = new.start_date.microsecond != 0 and timedelta(0) <= since <= new.interval
    return same and own and timedelta(0) <= first - new.start_date <= timedelta(seconds=new.jitter or 0)


def _text(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat()


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)
