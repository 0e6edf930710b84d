"""Offsets of a stream over hour files: how many rows of each hour were read. Needs no Spark.

    {"asOf": ms, "hours": {"2026112018": [rows, entries, events, log_bytes], …}, "gone": {"2026112010": ms}}

`rows` is the position; the other three say what was committed of the hour then, so that the rows between two offsets
are always the same, on any replica. A replica may be behind and list less: an offset never moves back. An offset keeps
a deleted hour for a day, because some replicas may still list it.
"""

from typing import Any

from hadelay.model import hour_from_name, hour_name
from hadelay.pipeline.arrow import Split
from hadelay.pipeline.hourfiles import HourFiles, Listing
from hadelay.pipeline.schema import Options

Offset = dict[str, Any]
_REMEMBERED_MS = 86_400_000


def advance(start: Offset, listing: Listing, options: Options, most: int | None = None) -> Offset:
    """The offset after all listed rows, or after the next `most` rows, oldest hours first; `start` itself if there are
    no new rows."""
    known: dict[str, list[int]] = start.get("hours", {})
    hours, left = dict(known), most
    for files in sorted(listing.hours):
        name = hour_name(files.hour)
        have = known[name][0] if name in known else 0
        new = (files.entries if options.kind == "messages" else files.events) - have
        new = new if left is None else min(new, left)
        if new > 0 and options.takes(files.hour):
            hours[name] = [have + new, files.entries, files.events, files.log_bytes]
            left = None if left is None else left - new
    if hours == known:
        return start
    as_of_ms = max(start.get("asOf", 0), listing.as_of_ms)
    missing = known.keys() - {hour_name(files.hour) for files in listing.hours}
    gone = {name: start["gone"].get(name, as_of_ms) for name in sorted(missing)}
    for name in [name for name, since_ms in gone.items() if as_of_ms - since_ms > _REMEMBERED_MS]:
        del hours[name], gone[name]
    return {"asOf": as_of_ms, "hours": hours, "gone": gone}


def between(start: Offset, end: Offset, options: Options) -> list[Split]:
    """Splits of the rows between two offsets."""
    known: dict[str, list[int]] = start.get("hours", {})
    found = []
    for name, (stop, entries, events, log_bytes) in end.get("hours", {}).items():
        files = HourFiles(hour_from_name(name), entries, events, log_bytes)
        first = known[name][0] if name in known else 0
        for at in range(first, stop, options.split_rows):
            found.append(Split(files, at, min(at + options.split_rows, stop), end["asOf"]))
    return found
