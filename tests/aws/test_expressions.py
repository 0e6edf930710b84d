"""Schedule expressions of EventBridge Scheduler, as times of a schedule. Pure functions."""

from __future__ import annotations

from datetime import datetime
from itertools import islice

import pytest

from hadelay.aws.errors import AwsError
from hadelay.aws.scheduler import expressions
from hadelay.aws.scheduler.expressions import Times
from hadelay.codec.schedules import Spec
from hadelay.timing import plan, zones

FROM = "2026-11-29T12:00:00"


def ms(text: str, timezone: str = "UTC") -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=zones.zone(timezone)).timestamp()) * 1_000


def occurrences(expression: str, timezone: str = "UTC", count: int = 3) -> list[str]:
    """The first occurrences after FROM, in local time."""
    times = expressions.parse(expression, timezone)
    spec = Spec("t", cron=times.cron, timezone=timezone, start_ms=times.start_ms, end_ms=times.end_ms)
    found = islice(plan.occurrences(spec, ms(FROM)), count)
    return [
        datetime.fromtimestamp(at_ms / 1_000, zones.zone(timezone)).strftime("%Y-%m-%dT%H:%M %a") for at_ms in found
    ]


def test_one_time() -> None:
    assert expressions.parse("at(2026-12-24T18:00:00)", "UTC") == Times(at_ms=ms("2026-12-24T18:00:00"))
    vienna = expressions.parse("at(2026-07-01T09:30:15)", "Europe/Vienna")
    assert vienna == Times(at_ms=ms("2026-07-01T07:30:15"))


@pytest.mark.parametrize(
    ("expression", "every_ms"),
    [
        ("rate(1 minute)", 60_000),
        ("rate(5 minutes)", 300_000),
        ("rate(2 hours)", 7_200_000),
        ("rate(1 day)", 86_400_000),
    ],
)
def test_rates(expression: str, every_ms: int) -> None:
    assert expressions.parse(expression, "UTC") == Times(every_ms=every_ms)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("cron(0 9 ? * MON-FRI *)", ["2026-11-30T09:00 Mon", "2026-12-01T09:00 Tue", "2026-12-02T09:00 Wed"]),
        ("cron(0 9 ? * 2-6 *)", ["2026-11-30T09:00 Mon", "2026-12-01T09:00 Tue", "2026-12-02T09:00 Wed"]),
        ("cron(15 10 ? * 6L *)", ["2026-12-25T10:15 Fri", "2027-01-29T10:15 Fri", "2027-02-26T10:15 Fri"]),
        ("cron(15 10 ? * FRI#3 *)", ["2026-12-18T10:15 Fri", "2027-01-15T10:15 Fri", "2027-02-19T10:15 Fri"]),
        ("cron(15 10 ? * 2#1 *)", ["2026-12-07T10:15 Mon", "2027-01-04T10:15 Mon", "2027-02-01T10:15 Mon"]),
        ("cron(0 0 ? * L *)", ["2026-12-05T00:00 Sat", "2026-12-12T00:00 Sat", "2026-12-19T00:00 Sat"]),
        ("cron(0 0 L * ? *)", ["2026-11-30T00:00 Mon", "2026-12-31T00:00 Thu", "2027-01-31T00:00 Sun"]),
        ("cron(0 0 LW * ? *)", ["2026-11-30T00:00 Mon", "2026-12-31T00:00 Thu", "2027-01-29T00:00 Fri"]),
        ("cron(1/20 12 * * ? *)", ["2026-11-29T12:01 Sun", "2026-11-29T12:21 Sun", "2026-11-29T12:41 Sun"]),
        ("cron(*/30 13 ? * 1,SUN *)", ["2026-11-29T13:00 Sun", "2026-11-29T13:30 Sun", "2026-12-06T13:00 Sun"]),
        ("cron(0 0 ? * */3 *)", ["2026-12-02T00:00 Wed", "2026-12-05T00:00 Sat", "2026-12-06T00:00 Sun"]),
        ("cron(0 0 ? * 2/3 *)", ["2026-11-30T00:00 Mon", "2026-12-03T00:00 Thu", "2026-12-07T00:00 Mon"]),
        ("cron(0 0 1 JAN,MAR ? *)", ["2027-01-01T00:00 Fri", "2027-03-01T00:00 Mon", "2028-01-01T00:00 Sat"]),
        ("cron(0 0 ? * SAT-SUN *)", ["2026-12-05T00:00 Sat", "2026-12-06T00:00 Sun", "2026-12-12T00:00 Sat"]),
        ("cron(0 0 ? * 7-1 *)", ["2026-12-05T00:00 Sat", "2026-12-06T00:00 Sun", "2026-12-12T00:00 Sat"]),
        ("cron(0 0 ? * FRI-SUN/2 *)", ["2026-12-04T00:00 Fri", "2026-12-06T00:00 Sun", "2026-12-11T00:00 Fri"]),
        ("cron(0 0 ? * WED,SAT-SUN *)", ["2026-12-02T00:00 Wed", "2026-12-05T00:00 Sat", "2026-12-06T00:00 Sun"]),
        ("cron(0 0 1 JAN/3 ? *)", ["2027-01-01T00:00 Fri", "2027-04-01T00:00 Thu", "2027-07-01T00:00 Thu"]),
        ("cron(0 0 31 12 ? 2026)", ["2026-12-31T00:00 Thu"]),
        ("cron(0 0 29 2 ? 2048)", ["2048-02-29T00:00 Sat"]),
        ("cron(0 0 1 1 ? 2028-2029)", ["2028-01-01T00:00 Sat", "2029-01-01T00:00 Mon"]),
        ("cron(0 0 1 1 ? 2028,2029)", ["2028-01-01T00:00 Sat", "2029-01-01T00:00 Mon"]),
    ],
)
def test_cron_expressions_in_six_fields(expression: str, expected: list[str]) -> None:
    assert occurrences(expression) == expected
    assert occurrences(expression.lower(), "Asia/Tokyo") == expected or "*/30" in expression or "1/20" in expression


def test_years_begin_in_the_time_zone() -> None:
    times = expressions.parse("cron(0 0 * * ? 2027)", "Asia/Tokyo")
    assert times.start_ms == ms("2027-01-01T00:00:00", "Asia/Tokyo")
    assert times.end_ms == ms("2028-01-01T00:00:00", "Asia/Tokyo") - 1


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("every day", "is none of at("),
        ("at(tomorrow)", "write the time as 2026-12-24T18:00:00"),
        ("at(2026-13-24T18:00:00)", "write the time as"),
        ("at(2026-12-24T18:00:00Z)", "write the time as"),
        ("at(0001-01-01T00:00:00)", "write the time as"),
        ("rate(0 minutes)", "a whole number"),
        ("rate(5 seconds)", "minutes, hours or days"),
        ("rate(1.5 hours)", "a whole number"),
        ("cron(0 9 * * MON-FRI)", "six fields"),
        ("cron(0 9 * * MON-FRI *)", "exactly one of"),
        ("cron(0 9 ? * ? *)", "exactly one of"),
        ("cron(0 9 ? * 0 *)", "weekday '0': write 1 (Sunday) to 7, or SUN to SAT"),
        ("cron(0 9 ? * 0-5 *)", "weekday '0-5': write 1 (Sunday) to 7"),
        ("cron(0 9 ? * 8 *)", "weekday '8': write 1 (Sunday) to 7"),
        ("cron(0 9 ? * MON#6 *)", "weekday 'MON#6': write 1 (Sunday) to 7"),
        ("cron(0 9 ? * MONDAY *)", "weekday 'MONDAY': write 1 (Sunday) to 7"),
        ("cron(60 9 ? * 2 *)", "cron(60 9 ? * 2 *): minute '60'"),
        ("cron(0 9 15W * ? *)", "weekday nearest"),
        ("rate(999999999 days)", "rate(999999999 days)"),
        ("cron(0 9 * * ? 1969)", "from 1970 to 2199"),
        ("cron(0 9 * * ? 2028-2026)", "ascending"),
        ("cron(0 9 * * ? 2026,2028)", "gaps"),
        ("cron(0 9 * * ? 2026/2)", "gaps"),
        ("cron(0 9 * * ? *-2026)", "the year"),
        ("cron(0 9 * * ? 2026/0)", "the year"),
    ],
)
def test_wrong_expressions(expression: str, words: str) -> None:
    with pytest.raises(AwsError) as raised:
        expressions.parse(expression, "Europe/Vienna")
    assert raised.value.code == "ValidationException"
    assert words in raised.value.words


def test_unknown_time_zone() -> None:
    with pytest.raises(AwsError, match="ScheduleExpressionTimezone: 'Mars/Base' is not in"):
        expressions.parse("rate(1 day)", "Mars/Base")
