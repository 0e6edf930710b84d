"""Reads and writes durations, times, ids and names in the formats of the HTTP API (docs/reference/http.md).

Parsers raise BadRequest or Impossible, which say what to write instead. Times round up to the next millisecond: a
message may be late, never early.
"""

import difflib
import math
import re
from collections.abc import Iterable
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import lru_cache

from hadelay.errors import BadRequest, Impossible
from hadelay.model import SEPARATOR, decode_id

_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
#: Pattern of most durations, such as "15m": a whole number of one unit, far below any limit.
_WHOLE = re.compile(r"([0-9]{1,9})(ms|s|m|h|d)")
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h|d))+", re.ASCII)
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", re.ASCII)
_NUMBER = re.compile(r"\d+(?:\.\d+)?", re.ASCII)
_NEGATIVE = re.compile(r"-\s*\d")
_INSTANT = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[Tt ](\d\d):(\d\d):(\d\d)(?:\.(\d{1,18}))?(?:([Zz])|([+\- ])(\d\d):(\d\d))?", re.ASCII
)
_MAX_LIMIT = 1_000
_TOPIC = re.compile(rf"[A-Za-z0-9._-]+({SEPARATOR}[A-Za-z0-9._-]+)?")
#: Limit in bytes of an existing topic's name (its length is one byte in the log); new topics have a lower one.
LONGEST_TOPIC = 255
#: Path segments that clients resolve to another path (RFC 3986, 5.2.4).
DOTS = frozenset((".", ".."))

#: Smallest number read as Unix milliseconds (1973); smaller numbers were probably meant as seconds.
SMALLEST_INSTANT_MS = 10**11
#: Limit of the characters of a time or duration: to parse a million digits takes seconds.
_LONGEST_TEXT = 100
#: Limit of times and durations in ms: above every max_delay, and far below the maximum of a 64-bit integer.
LARGEST_MS = 10**15
#: End of the times that `format_instant` can write, in Unix ms: the year 10000.
END_OF_YEARS_MS = 253_402_300_800_000

DURATION_HELP = 'write it as "250ms", "15m", "2h30m" or "7d"; a bare number is seconds'
INSTANT_HELP = 'write it as RFC 3339, "2026-11-20T18:00:00Z", with any offset, or as Unix milliseconds'


def parse_duration(name: str, value: object) -> int:
    """Parse a duration, text or a number of seconds, into ms. name: name of the field, for error texts."""
    if type(value) is int and 0 <= value < LARGEST_MS // 1000:
        return value * 1000
    if type(value) is str and (whole := _WHOLE.fullmatch(value)):
        return int(whole[1]) * _UNITS_MS[whole[2]]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadRequest(f"{name}: {DURATION_HELP}")
    if isinstance(value, float) and not math.isfinite(value):
        raise BadRequest(f"{name}: {value} is not a duration; {DURATION_HELP}")
    text = value.strip() if isinstance(value, str) else format(Decimal(repr(value)), "f")
    if isinstance(value, str) and len(text) > _LONGEST_TEXT:
        raise BadRequest(f"{name}: {_shown(text)} is not a duration; {DURATION_HELP}")
    if _NUMBER.fullmatch(text):
        ms = Decimal(text) * 1000
    elif _DURATION.fullmatch(text):
        ms = sum((Decimal(number) * _UNITS_MS[unit] for number, unit in _DURATION_PART.findall(text)), Decimal(0))
    elif _NEGATIVE.match(text):
        hint = "; it cannot go back in time, leave it out for now" if name == "delay" else ""
        raise BadRequest(f"{name}: {text!r} is negative{hint}")
    else:
        raise BadRequest(f"{name}: {_shown(text)} is not a duration; {DURATION_HELP}")
    if ms >= LARGEST_MS:
        raise Impossible(f"{name}: {_shown(text)} exceeds the longest duration that hadelay supports")
    return math.ceil(ms)


def parse_shift(value: str | int | float) -> int:
    """Parse the shift of a due time, a duration with a sign (3h, -90m, or a number of seconds), into ms."""
    if isinstance(value, str):
        back, value = value.strip().startswith("-"), value.strip().removeprefix("+").removeprefix("-")
    else:
        back, value = value < 0, abs(value)
    ms = parse_duration("shift", value)
    return -ms if back else ms


def format_shift(ms: int) -> str:
    """The shortest text of a shift of a due time: `3h`, `-1h30m`."""
    return f"{'-' if ms < 0 else ''}{format_duration(abs(ms))}"


def format_duration(ms: int) -> str:
    """The shortest text of a duration: `15m`, `2h30m`, `0s`."""
    parts = []
    for unit in ("d", "h", "m", "s", "ms"):
        count, ms = divmod(ms, _UNITS_MS[unit])
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


def parse_instant(name: str, value: object) -> int:
    """Parse a time, RFC 3339 text or Unix milliseconds, into Unix ms. 0 means now. name: name of the field, for error
    texts."""
    if type(value) is int and SMALLEST_INSTANT_MS <= value < LARGEST_MS:
        return value
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadRequest(f"{name}: {INSTANT_HELP}")
    text = value.strip() if isinstance(value, str) else repr(value)
    if isinstance(value, str) and len(text) > _LONGEST_TEXT:
        raise BadRequest(f"{name}: {_shown(text)} is not a time; {INSTANT_HELP}")
    if isinstance(value, int) or _NUMBER.fullmatch(text):
        return _unix_ms(name, text)
    match = _INSTANT.fullmatch(text)
    if match is None:
        hint = "it is negative" if _NEGATIVE.match(text) else INSTANT_HELP
        raise BadRequest(f"{name}: {_shown(text)} is not a time; {hint}")
    return _rfc3339_ms(name, text, match)


def _unix_ms(name: str, text: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise BadRequest(f"{name}: {_shown(text)} is not a time; it is negative")
    ms = math.ceil(Decimal(text))
    if 0 < ms < SMALLEST_INSTANT_MS:
        raise BadRequest(f"{name}: {_shown(text)} is too early; in seconds? use milliseconds, {ms * 1000}, or RFC 3339")
    if ms >= LARGEST_MS:
        raise Impossible(f"{name}: {_shown(text)} is later than the latest time that hadelay supports")
    return ms


def _rfc3339_ms(name: str, text: str, match: re.Match[str]) -> int:
    year, month, day, hour, minute, second = (int(part) for part in match.groups()[:6])
    fraction, zulu, sign, offset_hours, offset_minutes = match.groups()[6:]
    if zulu is None and sign is None:
        raise BadRequest(f"{name}: {text!r} has no time zone: add Z, or an offset such as +08:00")
    offset_s = int(offset_hours or 0) * 3600 + int(offset_minutes or 0) * 60
    if sign is not None and (int(offset_hours) > 23 or int(offset_minutes) > 59):
        raise BadRequest(f"{name}: {text!r} has an offset of more than a day")
    # Second 60 (leap second) counts as the second after :59. A " " in the text is a "+" changed by query decoding.
    try:
        at = datetime(year, month, day, hour, minute, min(second, 59), tzinfo=UTC)
    except ValueError as error:
        raise BadRequest(f"{name}: {text!r} is not a time: {error}") from None
    if second > 60:
        raise BadRequest(f"{name}: {text!r} is not a time: second must be in 0..59")
    seconds = (at.date() - date(1970, 1, 1)).days * 86_400 + at.hour * 3600 + at.minute * 60 + second
    seconds += offset_s if sign == "-" else -offset_s
    return seconds * 1000 + math.ceil(Decimal(f"0.{fraction or 0}") * 1000)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "…")


_MINUTES = [f"{second // 60:02d}:{second % 60:02d}" for second in range(3600)]


@lru_cache(64)
def _hour(hour: int) -> str:
    return datetime.fromtimestamp(hour * 3600, UTC).strftime("%Y-%m-%dT%H:")


def format_instant(ms: int) -> str:
    """RFC 3339 text of a time, such as `2026-11-20T18:00:00.000Z`."""
    hour, rest = divmod(ms, 3_600_000)
    second, rest = divmod(rest, 1000)
    return f"{_hour(hour)}{_MINUTES[second]}.{rest:03d}Z"


def parse_id(text: str) -> int:
    try:
        return decode_id(text)
    except ValueError as error:
        raise BadRequest(f"{_shown(text)}: {error}; give the id as it is in the answer to the publish") from None


def check_topic(name: str, max_bytes: int = LONGEST_TOPIC) -> str:
    if not name:
        raise BadRequest("the topic's name is empty")
    if len(name) > max_bytes:
        raise BadRequest(f"the topic's name has {len(name)} characters; at most {max_bytes} are allowed")
    if not _TOPIC.fullmatch(name):
        raise BadRequest(f"the topic's name {_shown(name)}: only A-Z a-z 0-9 . _ - are allowed")
    return name


def check_new_topic(name: str, max_bytes: int) -> str:
    """Check the name of a topic that a request may create or publish to, and return it. Stored topics with other names,
    from releases that allowed more, can be read, consumed and deleted."""
    check_topic(name, max_bytes)
    of, separator, _ = name.partition(SEPARATOR)
    if separator:
        raise BadRequest(f"{_shown(name)} is a subscription, which gets what is published to its topic: give {of!r}")
    if name in DOTS:
        raise BadRequest(f"the topic's name {name!r} is not allowed: clients and proxies remove . and .. from paths")
    return name


def check_limit(limit: int) -> int:
    if not 1 <= limit <= _MAX_LIMIT:
        raise BadRequest(f"limit: expected 1 to {_MAX_LIMIT}, not {limit}")
    return limit


def suggest(unknown: str, known: Iterable[str]) -> str:
    """End of an error text about an unknown name: `; did you mean 'delay'?`, or all known names, or nothing."""
    names = list(known)
    close = difflib.get_close_matches(unknown, names, 1, 0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there is {', '.join(sorted(names))}" if names else ""
