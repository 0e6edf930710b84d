"""Time zones from the pinned package tzdata: the system's files differ from machine to machine, and are never read."""

import zoneinfo
from datetime import UTC, datetime
from functools import lru_cache

import tzdata  # type: ignore[import-untyped]

from hadelay.errors import BadRequest

# Remove the system's directories, which zoneinfo reads first, from its search path before the first zone is loaded.
zoneinfo.reset_tzpath(())

#: IANA version of the data, such as 2026f; a later version is greater as text.
VERSION: str = tzdata.IANA_VERSION
#: Limit of a zone's name, in characters; the longest that exists has 32.
_MAX_NAME = 64
_DAY_MS = 86_400_000


class UnknownZone(BadRequest):
    """Raised for a name that no time zone in this node's data has."""


@lru_cache(1_024)
def zone(name: str) -> zoneinfo.ZoneInfo:
    """The zone of an IANA name. Raises UnknownZone."""
    try:
        if len(name) > _MAX_NAME or not name.isascii():
            raise ValueError(name)
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        raise UnknownZone(
            f"timezone: {name[:_MAX_NAME]!r} is not in this node's IANA data {VERSION}; names are like Europe/Vienna"
        ) from None


def offset_ms(name: str, at_ms: int) -> int:
    """Offset of a zone's local time from UTC at a time, in ms."""
    found = datetime.fromtimestamp(at_ms // 1_000, zone(name)).utcoffset()
    assert found is not None, "zones of the package have offsets"
    return int(found.total_seconds()) * 1_000


def next_change(name: str, after_ms: int) -> int | None:
    """Time of the zone's next change of offset after `after_ms`, searched up to the end of the following year; None if
    none is found."""
    year = datetime.fromtimestamp(after_ms // 1_000, UTC).year
    found = (at_ms for one in (year, year + 1) for at_ms in _changes(name, one) if at_ms > after_ms)
    return next(found, None)


@lru_cache(4_096)
def _changes(name: str, year: int) -> tuple[int, ...]:
    """Times of one year at which the zone's offset changes, in Unix ms."""
    begin, end = (int(datetime(one, 1, 1, tzinfo=UTC).timestamp()) * 1_000 for one in (year, year + 1))
    found = []
    for low in range(begin, end, _DAY_MS):
        high, before = low + _DAY_MS, offset_ms(name, low)
        if before == offset_ms(name, high):
            continue
        while high - low > 1_000:
            middle = (low + high) // 2_000 * 1_000
            low, high = (middle, high) if offset_ms(name, middle) == before else (low, middle)
        found.append(high)
    return tuple(found)
