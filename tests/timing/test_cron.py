"""Cron patterns against an oracle that looks at every minute, around every change of the clock and over years."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from datetime import UTC, datetime
from itertools import islice, pairwise, takewhile

import pytest

from hadelay.errors import BadRequest
from hadelay.timing import cron, zones
from tests.scale import size
from tests.timing.oracle import Pattern, minutes

ZONES = ("Europe/Vienna", "America/New_York", "Australia/Lord_Howe", "UTC", "America/Santiago", "Asia/Kathmandu")
#: More specifications, and whole decades: SCHEDULE_SPECS=1000, weekly.
SPECS = int(os.environ.get("SCHEDULE_SPECS", size(16, 40)))
DECADE = "SCHEDULE_SPECS" in os.environ


def ms(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp() * 1_000)


def local(pattern: str, zone: str, after: str, count: int) -> list[str]:
    found = islice(cron.after(cron.parse(pattern, zone), ms(after)), count)
    return [datetime.fromtimestamp(at / 1_000, zones.zone(zone)).isoformat() for at in found]


def pattern_of(chance: random.Random) -> str:
    def field(low: int, high: int, star: float) -> str:
        kind = chance.random()
        if kind < star:
            return chance.choice(["*", "*", f"*/{chance.randint(1, high)}"])
        a, b = sorted(chance.sample(range(low, high + 1), k=2))
        return chance.choice([f"{a}", f"{a}", f"{a}-{b}", f"{a},{b}", f"{a}-{b}/{chance.randint(1, 9)}", f"{a}/7"])

    dom = field(1, 28, 0.6) if chance.random() < 0.8 else chance.choice(["L", "LW", "29", "30", "31", "1,L"])
    dow = field(0, 6, 0.6) if chance.random() < 0.7 else chance.choice(["MON-FRI", "5L", "5#3", "SUN", "7", "1#1,3#2"])
    month = "*" if chance.random() < 0.7 else chance.choice(["3", "10", "MAR,OCT", "4,9,11", "*/2", "2"])
    return f"{field(0, 59, 0.3)} {field(0, 23, 0.4)} {dom} {month} {dow}"


def changes(zone: str, first_year: int, years: int) -> list[int]:
    """Days since 1970 on which the zone's offset changes."""
    tz = zones.zone(zone)
    first = int(datetime(first_year, 1, 1, tzinfo=UTC).timestamp()) // 86_400
    offsets = [datetime.fromtimestamp(86_400 * day, tz).utcoffset() for day in range(first, first + years * 366)]
    return [first + n for n, (a, b) in enumerate(pairwise(offsets)) if a != b]


def windows(zone: str) -> list[tuple[int, int]]:
    """Minutes around every change of the clock, a leap day and an end of the year."""
    special = [int(datetime(*at, tzinfo=UTC).timestamp()) // 86_400 for at in ((2028, 2, 28), (2027, 12, 31))]
    days = changes(zone, 2026, 10) if DECADE else changes(zone, 2026, 2)
    return [((day - 3) * 1440, (day + 4) * 1440) for day in [*days, *special]]


def compare(pattern: str, zone: str, first: int, last: int) -> None:
    oracle = minutes(Pattern(pattern), zone, first, last)
    parsed = cron.parse(pattern, zone)
    found = takewhile(lambda at: at < last * 60_000, cron.after(parsed, first * 60_000 - 1))
    ours = [at // 60_000 for at in found]
    # What the clock skipped before the window comes at its begin; the oracle does not see it.
    assert [m for m in ours if m >= first + 120] == [m for m in oracle if m >= first + 120], (pattern, zone, first)


@pytest.mark.parametrize("zone", ZONES)
def test_random_patterns_around_every_change_of_the_clock(zone: str) -> None:
    chance = random.Random(f"cron {zone}")
    for _ in range(SPECS):
        pattern = pattern_of(chance)
        try:
            cron.parse(pattern, zone)
        except BadRequest:
            continue
        for first, last in windows(zone):
            compare(pattern, zone, first, last)


@pytest.mark.skipif(not DECADE, reason="weekly: SCHEDULE_SPECS=1000")
@pytest.mark.timeout(0)
@pytest.mark.parametrize("zone", ZONES)
def test_random_patterns_over_ten_years(zone: str) -> None:
    chance = random.Random(f"decade {zone}")
    first = int(datetime(2026, 1, 1, tzinfo=UTC).timestamp()) // 60
    for _ in range(SPECS // len(ZONES)):
        pattern = pattern_of(chance)
        try:
            cron.parse(pattern, zone)
        except BadRequest:
            continue
        compare(pattern, zone, first, first + 3_650 * 1440)


@pytest.mark.parametrize(
    ("pattern", "zone", "after", "expected"),
    [
        # The clock goes forward: a fixed time comes right after the gap, with seconds as without.
        ("30 2 * * *", "Europe/Vienna", "2027-03-27T12:00Z",
         ["2027-03-28T03:00:00+02:00", "2027-03-29T02:30:00+02:00"]),
        ("0 30 2 * * *", "Europe/Vienna", "2027-03-27T12:00Z",
         ["2027-03-28T03:00:00+02:00", "2027-03-29T02:30:00+02:00"]),
        ("15 30 2 * * *", "Europe/Vienna", "2027-03-27T12:00Z",
         ["2027-03-28T03:00:15+02:00", "2027-03-29T02:30:15+02:00"]),
        ("0,30 2 * * *", "Europe/Vienna", "2027-03-27T12:00Z",
         ["2027-03-28T03:00:00+02:00", "2027-03-29T02:00:00+02:00"]),
        # It goes back: a fixed time counts once, the first time.
        ("30 2 * * *", "Europe/Vienna", "2026-10-24T12:00Z",
         ["2026-10-25T02:30:00+02:00", "2026-10-26T02:30:00+01:00"]),
        ("30 2 * * *", "Europe/Vienna", "2026-10-25T01:10Z",
         ["2026-10-26T02:30:00+01:00", "2026-10-27T02:30:00+01:00"]),
        ("30 1 * * *", "America/New_York", "2026-11-01T04:00Z",
         ["2026-11-01T01:30:00-04:00", "2026-11-02T01:30:00-05:00"]),
        # A star for the hour goes by real time.
        ("30 * * * *", "Europe/Vienna", "2027-03-28T00:00Z",
         ["2027-03-28T01:30:00+01:00", "2027-03-28T03:30:00+02:00"]),
        ("30 * * * *", "Europe/Vienna", "2026-10-25T00:10Z",
         ["2026-10-25T02:30:00+02:00", "2026-10-25T02:30:00+01:00"]),
        # Half an hour, at Lord Howe.
        ("15 2 * * *", "Australia/Lord_Howe", "2026-10-03T12:00Z",
         ["2026-10-04T02:30:00+11:00", "2026-10-05T02:15:00+11:00"]),
        ("45 1 * * *", "Australia/Lord_Howe", "2027-04-03T12:00Z",
         ["2027-04-04T01:45:00+11:00", "2027-04-05T01:45:00+10:30"]),
        ("0 9 29 2 *", "UTC", "2026-11-22T00:00Z", ["2028-02-29T09:00:00+00:00", "2032-02-29T09:00:00+00:00"]),
        ("@yearly", "Europe/Vienna", "2026-11-22T00:00Z", ["2027-01-01T00:00:00+01:00", "2028-01-01T00:00:00+01:00"]),
        ("59 59 23 31 12 *", "UTC", "2026-11-22T00:00Z", ["2026-12-31T23:59:59+00:00", "2027-12-31T23:59:59+00:00"]),
        ("0 9 L * *", "UTC", "2027-01-30T12:00Z", ["2027-01-31T09:00:00+00:00", "2027-02-28T09:00:00+00:00"]),
        ("0 9 LW * *", "UTC", "2027-01-30T12:00Z", ["2027-02-26T09:00:00+00:00", "2027-03-31T09:00:00+00:00"]),
        ("0 9 * * 5#3", "UTC", "2026-11-22T00:00Z", ["2026-12-18T09:00:00+00:00", "2027-01-15T09:00:00+00:00"]),
        ("0 9 * * 5L", "UTC", "2026-11-22T00:00Z", ["2026-11-27T09:00:00+00:00", "2026-12-25T09:00:00+00:00"]),
        ("*/20 * * * * *", "UTC", "2026-11-22T00:00:20Z", ["2026-11-22T00:00:40+00:00", "2026-11-22T00:01:00+00:00"]),
    ],
)  # fmt: skip
def test_rules(pattern: str, zone: str, after: str, expected: list[str]) -> None:
    assert local(pattern, zone, after, len(expected)) == expected


def test_the_start_of_a_search_does_not_matter() -> None:
    """From any moment on, the same times follow: a new leader computes from where the last one ended."""
    for zone, day in (
        ("Europe/Vienna", "2027-03-28"),
        ("Europe/Vienna", "2026-10-25"),
        ("Australia/Lord_Howe", "2027-04-04"),
    ):
        begin = ms(f"{day}T00:00+00:00") - 86_400_000
        for pattern in ("30 2 * * *", "*/7 * * * *", "15,45 1-3 * * *", "5 30 2 * * *", "0 */2 * * *"):
            parsed = cron.parse(pattern, zone)
            every = list(takewhile(lambda at: at < begin + 4 * 86_400_000, cron.after(parsed, begin)))  # noqa: B023
            for at in range(begin, begin + 3 * 86_400_000, 1_234_567):
                assert next(cron.after(parsed, at)) == next(t for t in every if t > at), (pattern, zone, at)


@pytest.mark.parametrize(
    "pattern",
    ["", "* * * *", "* * * * * * *", "61 * * * *", "* 24 * * *", "* * 0 * *", "* * * 13 *", "* * * * 8", "15W * * * *",
     "* * 15W * *", "@reboot", "é * * * *", "*/0 * * * *", "5-1 * * * *", "1,,2 * * * *", "60 * * * * *", "x" * 300,
     "0 9 30 2 *", "H * * * *", "-1 * * * *", "1- * * * *", "* * * * L", "* * * * 5#6", "0x1 * * * *", "１ * * * *"],
)  # fmt: skip
def test_no_pattern(pattern: str) -> None:
    with pytest.raises(BadRequest, match="cron"):
        cron.parse(pattern, "UTC")


def test_a_pattern_that_never_matches_ends() -> None:
    assert list(cron.after(cron.parse("* * */20 * 1L", "Europe/Vienna"), ms("2026-11-22T00:00Z"))) == []


@pytest.mark.parametrize("name", ["Europe/Wien", "", "../etc/passwd", "UTC\0", "/etc/localtime", "x" * 100, "Ä/B"])
def test_no_zone(name: str) -> None:
    with pytest.raises(zones.UnknownZone):
        zones.zone(name)


def test_words() -> None:
    assert cron.explain("0 9 * * MON-FRI") == "At 09:00 on Monday through Friday"
    assert cron.explain("@daily") == "At 00:00 every day"


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        # Neither day begins with a star, so either has to match: every day does.
        ("0 9 1-31 * 1", "At 09:00 every day"), ("0 9 1/1 * 1", "At 09:00 every day"),
        ("0 9 15 * 0-7", "At 09:00 every day"), ("0 9 15 * SUN-SAT", "At 09:00 every day"),
        ("0 9 1,* * 1", "At 09:00 every day"), ("0 0 9 1-31 * 1", "At 09:00 every day"),
        # A star in front: both have to match.
        ("0 9 * * 1", "At 09:00 on Monday"), ("0 9 */1 * 1", "At 09:00 on Monday"),
        ("0 9 */2 * 1", "At 09:00 on every second day of month if it's on Monday"),
        ("0 9 15 * *", "At 09:00 on the 15th day of every month"),
        # Steps that end before they come to their length.
        ("*/90 * * * *", "At the start of every hour"), ("*/45 * * * *", "At minutes 0 and 45 of every hour"),
        ("0 22/5 * * *", "At 22:00 every day"), ("10-20/30 * * * *", "At minute 10 of every hour"),
        ("0 0 1 */5 *", "At 00:00 on the first day of January, June, and November"),
        ("0 9 * * 0-7/7", "At 09:00 on Sunday"), ("*/15 * * * *", "Every 15th minute of every hour"),
        # Uneven steps, which begin again in each hour, day, month or week.
        ("*/7 * * * *", "At minutes 0, 7, 14, 21, 28, 35, 42, 49, and 56 of every hour"),
        ("*/20,*/25,3 * * * *", "At every 20th minute, minute 0, minute 25, minute 50, and minute 3 of every hour"),
        ("*/25,3 * * * *", "At minutes 0, 3, 25, and 50 of every hour"),
        ("0 */5 * * *", "At minute 0 past hours 0, 5, 10, 15, and 20"),
        ("0 9 */10 * *", "At 09:00 on the first, the 11th, the 21st, and the 31st day of month"),
        ("0 9 */10 * 1", "At 09:00 on the first, the 11th, the 21st, and the 31st day of month if it's on Monday"),
        ("0 9 * * */2", "At 09:00 on Sunday, Tuesday, Thursday, and Saturday"),
        ("0 9 22 * *", "At 09:00 on the 22nd day of every month"), ("*/12 * * * *", "Every 12th minute of every hour"),
    ],
)  # fmt: skip
def test_words_do_not_contradict_the_times(pattern: str, expected: str) -> None:
    assert cron.explain(pattern) == expected


@pytest.mark.parametrize(
    ("pattern", "field", "cause"),
    [
        ("CRON_TZ=Europe/Paris 0 4 * * 1", "", "set timezone"), ("TZ=UTC 0 0 4 * * 1", "", "set timezone"),
        ("@every 5m", "", "use every"), ("rate(5 minutes)", "", "use every"), ("cron(0 9 * * ? *)", "", "without cron"),
        ("0 0/3 * * * ?", "weekday '?'", "write *"), ("0 5 ? * *", "day of the month '?'", "write *"),
        ("0 12 ? * SUN,WED *", "", "a year"), ("0 5 ? * * *", "", "a year"), ("0 9 1 1 * 2027", "", "a year"),
        ("0 0 12 * * ? 2027", "7 fields", "a year"), ("* * * * * * *", "7 fields", "a year"),
        ("0 0 L-3 * *", "day of the month 'L-3'", "write L"), ("0 0 LW-3 * *", "day of the month 'LW-3'", "write L"),
        ("0 0 15W * *", "day of the month '15W'", "write LW"), ("0 0 * * L", "weekday 'L'", "5L"),
        ("0 0 * * FRIL", "weekday 'FRIL'", "write 5L"), ("0 0 * * FridayL", "weekday 'FridayL'", "write 5L"),
        ("0 0 * * Monday", "weekday 'Monday'", "write MON"), ("0 0 * Sept *", "month 'Sept'", "write SEP"),
        ("0 0 * * Monday-Friday", "weekday 'Monday-Friday'", "write MON-FRI"),
        ("0 22-2 * * *", "hour '22-2'", "write 22-23,0-2"), ("50-10 * * * *", "minute '50-10'", "write 50-59,0-10"),
        ("0 0 * * FRI-MON", "weekday 'FRI-MON'", "write FRI-SAT,SUN-MON"), ("0 0 * * FRI-SUN", "weekday", "write 5-7"),
        ("0 0 * * MON-SUN", "weekday 'MON-SUN'", "write 1-7"),
        ("0 0 * NOV-FEB *", "month 'NOV-FEB'", "write NOV-DEC,JAN-FEB"), ("0 0 * * 5-7,6-1", "weekday", "write 6,0-1"),
        ("H * * * *", "minute 'H'", "jitter"), ("0~30 * * * *", "minute '0~30'", "jitter"),
        ("*/0 * * * *", "minute '*/0'", "1 or more"), ("1,,2 * * * *", "minute '1,,2'", "leave out the comma"),
        ("60 0 0 * * *", "second '60'", "0 to 59"), ("0 24 * * *", "hour '24'", "0 to 23"),
        ("0 0 24 * * *", "hour '24'", "0 to 23"), ("0 0 * * 5#6", "weekday '5#6'", "1 to 5"),
        ("0 9 30 2 *", "day of the month", "no month"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_field_and_what_to_write(pattern: str, field: str, cause: str) -> None:
    with pytest.raises(BadRequest) as refused:
        cron.parse(pattern, "UTC")
    text = str(refused.value)
    assert text.startswith(f"cron: {pattern!r}: {field}")
    assert cause in text
    if found := re.search(r"write ([-,A-Z0-9]*\d[-,A-Z0-9]*|[A-Z]{3}(?:[-,][A-Z]{3})*)$", text):
        at = next(n for n, value in enumerate(pattern.split()) if f"'{value}'" in text[len(f"cron: {pattern!r}") :])
        fields = [*pattern.split()[:at], found[1], *pattern.split()[at + 1 :]]
        cron.parse(" ".join(fields), "UTC")


@pytest.mark.parametrize(
    ("pattern", "warned"),
    [
        ("*/90 * * * *", ["minute */90"]), ("*/7 * * * *", ["minute */7"]), ("0 */5 * * *", ["hour */5"]),
        ("*/45 * * * * *", ["second */45"]), ("0 0 */2 * *", ["day of the month */2"]), ("0 0 1 */5 *", ["month */5"]),
        ("0 0 * * */2", ["weekday */2"]), ("5/25 * * * *", ["minute 5/25"]), ("0-59/7 * * * *", ["minute 0-59/7"]),
        ("*/7 */5 * * *", ["minute */7", "hour */5"]), ("0 0 L/2 * *", ["day of the month L/2"]),
        ("10-20/30 * * * *", ["minute 10-20/30"]),
        ("*/15 * * * *", []), ("*/1 * * * *", []), ("0 */8 * * *", []), ("0 0 1 */3 *", []), ("0 9-17/3 * * *", []),
        ("*/7 9 * * *", []), ("0 9/2 * * *", []), ("0 9 * * MON-FRI", []), ("@daily", []), ("0 9 * * 5#3,5L", []),
    ],
)  # fmt: skip
def test_uneven_steps_are_warned_of(pattern: str, warned: list[str]) -> None:
    found = cron.warnings(pattern, "UTC", ms("2026-11-22T00:00Z"))
    assert [text.partition(":")[0] for text in found] == warned


def test_clock_changes_are_reported() -> None:
    reported = cron.clock_changes(cron.parse("30 2 * * *", "Europe/Vienna"), ms("2026-09-01T00:00Z"))
    assert [text[:10] for text in reported] == ["2026-10-25", "2027-03-28"]
    assert "twice" in reported[0]
    assert "2027-03-28T03:00:00+02:00" in reported[1]
    assert cron.clock_changes(cron.parse("30 * * * *", "Europe/Vienna"), ms("2026-09-01T00:00Z")) == []
    assert cron.clock_changes(cron.parse("30 9 * * *", "Europe/Vienna"), ms("2026-09-01T00:00Z")) == []


def test_the_systems_zones_are_not_read() -> None:
    """A process whose system has other zones finds those of the package."""
    code = "from hadelay.timing import zones; import zoneinfo; print(zoneinfo.TZPATH, zones.zone('Europe/Vienna').key)"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONTZPATH": "/usr/share/zoneinfo"},
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert done.stdout.split() == ["()", "Europe/Vienna"]
