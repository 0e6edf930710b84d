"""Counts per second, and lateness, of an hour's entries: for lateness, load and forecast.

An entry falls due at its due time unless it was cancelled or moved before its hand-out: a message that was carried to a
later hour, retried or redriven counts in its new hour. Entries of dead hours do not fall due.
"""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from hadelay.codec import durations
from hadelay.codec.durations import encode
from hadelay.codec.formats import handout_delay_ms
from hadelay.model import DEAD_HOURS, HOUR_MS, Event
from hadelay.pipeline.archived import open_hours
from hadelay.pipeline.check import check
from hadelay.pipeline.hourfiles import HourFiles, NameMap, Rows, Store, events_of, rows
from hadelay.pipeline.jobs import JobOptions
from hadelay.pipeline.schema import hour_int
from hadelay.pipeline.stores import listing, refuse_empty
from hadelay.pipeline.tasks import Progress, each

R = TypeVar("R")

_COUNTS = ("due", "waiting", "handed_out", "acked")
#: Layout of counts of a topic's messages in one second (Unix time). due and waiting count messages by due time,
#: handed_out and acked by the time of the event.
SECONDS = np.dtype([("topic", "<u4"), ("second", "<i8"), *((name, "<i8") for name in _COUNTS)])
#: Layout of a histogram of lateness: number of entries per topic, hour of the due time, and lateness bucket (`code`).
LATE = np.dtype([("topic", "<u4"), ("hour", "<u4"), ("code", "<u4"), ("count", "<i8"), ("max_ms", "<i8")])
_CODE_BITS, _HOUR_BITS = 14, 24


class Entries(NamedTuple):
    """Times and last events of the entries of an hour: columns with one value per entry."""

    topic: npt.NDArray[np.uint32]
    due_ms: npt.NDArray[np.int64]
    #: Type number of an entry's last event, which is the largest type number of its events; 0: no event.
    last: npt.NDArray[np.uint8]
    #: Time of the consumer's answer, or of the grant if not `measured`, in Unix ms; -1: never handed out.
    handed_out_ms: npt.NDArray[np.int64]
    acked_ms: npt.NDArray[np.int64]
    measured: npt.NDArray[np.bool_]


class Reading(NamedTuple):
    """Source and options of the hours that tasks read."""

    store: Store
    #: Whether to check the CRCs of rows.
    verify: bool
    #: Mask of the selected topics, as NameMap.topic_mask returns it; None: all topics.
    selected: npt.NDArray[np.bool_] | None


def over_hours(
    spark: Any, options: JobOptions, work: Callable[..., R], progress: Progress, hours: int = DEAD_HOURS
) -> tuple[int, list[R], NameMap]:
    """Run work(hours, as_of_ms, files) on each selected hour; returns (as_of_ms, results, names). hours: number of
    future hours to include."""
    store, source = open_hours(options.source, options.archive), options.source
    found = listing(store, source)
    refuse_empty(source, found, store.names())
    until = min(found.as_of_ms // HOUR_MS + hours + 1, DEAD_HOURS)
    asked = [files for files in found.hours if files.hour < until and source.takes(files.hour)]
    if options.check:
        check(spark, store, asked, source, ("idx", "dsp"))
    names = store.names()
    reading = Reading(store, source.verify, names.topic_mask(source.topics))
    results = each(spark, partial(work, reading, found.as_of_ms), asked, progress)
    return found.as_of_ms, results, names


def entries(reading: Reading, files: HourFiles) -> Entries:
    """Times and last events of the hour's entries of the selected topics."""
    store, verify, selected = reading
    index = rows(store, files, "idx", 0, files.entries, verify=verify)
    n = len(index)
    found = Entries(
        np.ascontiguousarray(index["topic"]),
        np.ascontiguousarray(index["deliver_at_ms"]),
        np.zeros(n, np.uint8),
        np.full(n, -1, np.int64),
        np.full(n, -1, np.int64),
        np.zeros(n, np.bool_),
    )
    never = np.iinfo(np.int64).max
    first, delay = np.full(n, never, np.int64), np.full(n, -1, np.int64)
    for at, events, _ in events_of(store, files, 0, n, verify=verify):
        kind = events["event"]
        np.maximum.at(found.last, at, kind)
        leased = kind == Event.LEASED
        np.minimum.at(first, at[leased], events["at_ms"][leased])
        acked = kind == Event.ACKED
        found.acked_ms[at[acked]] = events["at_ms"][acked]
        np.maximum.at(delay, at, handout_delay_ms(events))
    # Use the due time if the grant is earlier: a grant may be committed early, but its hand-out waits for the due time.
    out = first < never
    found.handed_out_ms[out] = np.maximum(first[out] + np.maximum(delay[out], 0), found.due_ms[out])
    found.measured[:] = out & (delay >= 0)
    if selected is None:
        return found
    mine = selected[np.minimum(found.topic, len(selected) - 1)]
    return Entries._make(column[mine] for column in found)


def per_second(reading: Reading, as_of_ms: int, files: HourFiles) -> Rows:
    """Counts per second of an hour's entries, as SECONDS rows."""
    found = entries(reading, files)
    out, acked = found.handed_out_ms >= 0, found.acked_ms >= 0
    waiting = ~out & np.isin(found.last, (0, Event.NACKED, Event.LEASE_EXPIRED))
    due = out | (waiting | (found.last == Event.TTL_EXPIRED)) & (found.due_ms <= as_of_ms)
    which = zip(_COUNTS, (due, waiting, out, acked), strict=True)
    times = {"handed_out": found.handed_out_ms, "acked": found.acked_ms}
    return merged([_counted(name, found.topic[some], times.get(name, found.due_ms)[some]) for name, some in which])


def _counted(name: str, topic: npt.NDArray[np.uint32], at_ms: npt.NDArray[np.int64]) -> Rows:
    """Count events per topic and second: SECONDS rows with the counts in the column `name`, zeros in the others."""
    if not len(topic):
        return np.zeros(0, SECONDS)
    second = at_ms // 1000
    base = int(second.min())
    width = int(second.max()) - base + 1
    key = topic.astype(np.int64) * width + (second - base)
    if (int(topic.max()) + 1) * width <= 4 * len(topic) + (1 << 20):  # few possible keys: count without a sort
        totals = np.bincount(key)
        keys = np.flatnonzero(totals)
        counts = totals[keys]
    else:
        keys, counts = np.unique(key, return_counts=True)
    found = np.zeros(len(keys), SECONDS)
    found["topic"], found["second"], found[name] = keys // width, keys % width + base, counts
    return found


def merged(parts: Sequence[Rows]) -> Rows:
    """Merge SECONDS rows into one row per second and topic, ascending."""
    return summed(np.concatenate([np.zeros(0, SECONDS), *parts]), ("second", "topic"))


def summed(found: Rows, by: tuple[str, ...]) -> Rows:
    """Add up SECONDS rows with equal values of the columns `by`; ascending."""
    if not len(found):
        return found
    found = found[np.lexsort([found[name] for name in reversed(by)])]
    new = np.zeros(len(found), np.bool_)
    new[0] = True
    for name in by:
        new[1:] |= found[name][1:] != found[name][:-1]
    firsts = np.flatnonzero(new)
    whole = found[firsts]
    for name in _COUNTS:
        whole[name] = np.add.reduceat(found[name], firsts)
    return whole


def dense(whole: Rows, name: str, first: int, last: int) -> npt.NDArray[np.int64]:
    """Counts in the column `name` for every second of [first, last], with zeros. whole: SECONDS rows, at most one per
    second."""
    found = np.zeros(last - first + 1, np.int64)
    inside = (whole["second"] >= first) & (whole["second"] <= last)
    found[whole["second"][inside] - first] = whole[name][inside]
    return found


def late(reading: Reading, as_of_ms: int, files: HourFiles) -> tuple[Rows, int, int]:
    """Measure the lateness of an hour's entries: (LATE rows, number of overdue entries never handed out, number of
    hand-outs timed by their grant)."""
    found = entries(reading, files)
    out = found.handed_out_ms >= 0
    overdue = int(np.count_nonzero((found.last == 0) & (found.due_ms <= as_of_ms)))
    late_ms = found.handed_out_ms[out] - found.due_ms[out]
    key = found.topic[out].astype(np.int64) << _HOUR_BITS | found.due_ms[out] // HOUR_MS
    return _late_rows(key, late_ms), overdue, int(np.count_nonzero(out & ~found.measured))


def _late_rows(key: npt.NDArray[np.int64], late_ms: npt.NDArray[np.int64]) -> Rows:
    keys, inverse, counts = np.unique(key << _CODE_BITS | encode(late_ms), return_inverse=True, return_counts=True)
    found = np.zeros(len(keys), LATE)
    found["topic"], found["hour"] = keys >> (_CODE_BITS + _HOUR_BITS), keys >> _CODE_BITS & ((1 << _HOUR_BITS) - 1)
    found["code"], found["count"] = keys & ((1 << _CODE_BITS) - 1), counts
    np.maximum.at(found["max_ms"], inverse, late_ms)
    return found


def quantiles(found: Rows, at: Sequence[float]) -> list[int]:
    """Quantiles of lateness, in ms, for these fractions; at most 0.8 % too high. found: LATE rows."""
    order = found[np.argsort(found["code"], kind="stable")]
    total = order["count"].cumsum()
    ranks = [max(1, -int(-q * int(total[-1]) // 1)) for q in at]
    codes = order["code"][np.searchsorted(total, ranks)].astype(np.int64)
    return list(np.minimum(durations.decode(codes), found["max_ms"].max()).tolist())


def instant(second: int) -> str:
    return f"{datetime.fromtimestamp(second, UTC):%Y-%m-%d %H:%M:%S}"


def by_hour(
    found: Rows, hours: npt.NDArray[np.integer], names: NameMap, describe: Callable[[Rows], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Make table rows with the values of `describe`: per hour, one row for all topics (topic: none), and one per topic.
    hours: hour of each row in `found`."""
    table = []
    for hour in np.unique(hours).tolist():
        of_hour = found[hours == hour]
        table.append({"hour": hour_int(hour), "topic": None} | describe(of_hour))
        for number in np.unique(of_hour["topic"]).tolist():
            some = of_hour[of_hour["topic"] == number]
            table.append({"hour": hour_int(hour), "topic": names.topic(number)} | describe(some))
    return table
