"""Cron patterns against an oracle that looks at every minute, around every change of the clock and over years."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from datetime import UTC, datetime
from itertools import islice, pairwise, takewhile

import pytest

from hadelay.errors import BadRequest
from hadelay.timing import cron, zones
from tests.timing.oracle import Pattern, minutes

ZONES = ("Europe/Vienna", "America/New_York", "Australia/Lord_Howe", "UTC", "America/Santiago", "Asia/Kathmandu")
#: More specifications, and whole decades: SCHEDULE_SPECS=1000, weekly.
SPECS = int(os.environ.get("SCHEDULE_SPECS", "40"))
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


def test_where_one_begins_to_look_does_not_matter() -> None:
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


def test_clock_changes_are_told() -> None:
    told = cron.clock_changes(cron.parse("30 2 * * *", "Europe/Vienna"), ms("2026-09-01T00:00Z"))
    assert [text[:10] for text in told] == ["2026-10-25", "2027-03-28"]
    assert "twice" in told[0]
    assert "2027-03-28T03:00:00+02:00" in told[1]
    assert cron.clock_changes(cron.parse("30 * * * *", "Europe/Vienna"), ms("2026-09-01T00:00Z")) == []
    assert cron.clock_changes(cron.parse("30 9 * * *", "Europe/Vienna"), ms("2026-09-01T00:00Z")) == []


def test_the_systems_zones_are_not_read() -> None:
    """A process whose system has other zones finds those of the package."""
    code = "from hadelay.timing import zones; import zoneinfo; print(zoneinfo.TZPATH, zones.zone('Europe/Vienna').key)"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONTZPATH": "/usr/share/zoneinfo"},
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert done.stdout.split() == ["()", "Europe/Vienna"]
