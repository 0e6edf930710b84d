"""What lateness, load and forecast have in common: an hour's entries counted per second, and their lateness.

An entry falls due when its time has come, unless it was cancelled or moved before it was handed out: what was carried
to a later hour, retried or redriven is counted where it then was. Dead hours hold nothing that falls due.
"""

from __future__ import annotations

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
from hadelay.pipeline.hourfiles import HourFiles, Names, Rows, Store, rows
from hadelay.pipeline.jobs import JobOptions
from hadelay.pipeline.schema import hour_int
from hadelay.pipeline.stores import listing
from hadelay.pipeline.tasks import Progress, each

R = TypeVar("R")

_EVENTS_AT_ONCE = 1 << 20
#: Counts of one topic in one second (of Unix time): of entries by when they are due, of events by when they happened.
SECONDS = np.dtype(
    [
        ("topic", "<u4"), ("second", "<i8"),
        ("due", "<i8"), ("waiting", "<i8"), ("handed_out", "<i8"), ("acked", "<i8"),
    ]
)  # fmt: skip
#: How many of a topic's entries that fell due in an hour were handed out so late. code: `decode` says how late.
LATE = np.dtype([("topic", "<u4"), ("hour", "<u4"), ("code", "<u4"), ("count", "<i8"), ("max_ms", "<i8")])
_CODE_BITS, _HOUR_BITS = 14, 24


class Entries(NamedTuple):
    """Of one hour, per entry. last: the largest event, which is the last; 0 for none. handed_out_ms: when the answer to
    the consumer was written, or where that is not known (`measured`) when it was granted; -1 for never."""

    topic: npt.NDArray[np.uint32]
    due_ms: npt.NDArray[np.int64]
    last: npt.NDArray[np.uint8]
    handed_out_ms: npt.NDArray[np.int64]
    acked_ms: npt.NDArray[np.int64]
    measured: npt.NDArray[np.bool_]


def wanted(options: JobOptions, names: Names) -> npt.NDArray[np.bool_] | None:
    """Which topic numbers are asked for; None: all."""
    topics = {name.strip() for name in options.source.topics.split(",")}
    return np.array([name in topics for name in names.topics], np.bool_) if options.source.topics else None


def over_hours(
    spark: Any, options: JobOptions, work: Callable[..., R], progress: Progress, hours: int = DEAD_HOURS
) -> tuple[int, list[R], Names]:  # fmt: skip
    """(as_of_ms, work(store, verify, as_of_ms, files) of each hour that the options take, names). hours: those that
    begin later than so many hours from now are left out."""
    store, source = open_hours(options.source, options.archive), options.source
    found = listing(store, source)
    until = min(found.as_of_ms // HOUR_MS + hours + 1, DEAD_HOURS)
    asked = [files for files in found.hours if files.hour < until and source.takes(files.hour)]
    if options.check:
        check(spark, store, asked, source, ("idx", "dsp"))
    results = each(spark, partial(work, store, source.verify, found.as_of_ms), asked, progress)
    return found.as_of_ms, results, store.names()


def entries(store: Store, verify: bool, files: HourFiles) -> Entries:
    index = rows(store, files, "idx", 0, files.entries, verify=verify)
    n = len(index)
    found = Entries(
        np.ascontiguousarray(index["topic"]), np.ascontiguousarray(index["deliver_at_ms"]), np.zeros(n, np.uint8),
        np.full(n, -1, np.int64), np.full(n, -1, np.int64), np.zeros(n, np.bool_),
    )  # fmt: skip
    never = np.iinfo(np.int64).max
    first, delay = np.full(n, never, np.int64), np.full(n, -1, np.int64)
    for start in range(0, files.events, _EVENTS_AT_ONCE):
        events = rows(store, files, "dsp", start, min(start + _EVENTS_AT_ONCE, files.events), verify=verify)
        at = events["index"].astype(np.int64)
        if at.max(initial=0) >= n:  # orphans are reconcile's business
            events, at = events[at < n], at[at < n]
        kind = events["event"]
        np.maximum.at(found.last, at, kind)
        leased = kind == Event.LEASED
        np.minimum.at(first, at[leased], events["at_ms"][leased])
        acked = kind == Event.ACKED
        found.acked_ms[at[acked]] = events["at_ms"][acked]
        np.maximum.at(delay, at, handout_delay_ms(events))
    # A grant may be committed before its messages are due; they are held back until then.
    out = first < never
    found.handed_out_ms[out] = np.maximum(first[out] + np.maximum(delay[out], 0), found.due_ms[out])
    found.measured[:] = out & (delay >= 0)
    return found


def per_second(store: Store, verify: bool, as_of_ms: int, files: HourFiles) -> Rows:
    """SECONDS of one hour's entries."""
    found = entries(store, verify, files)
    out, acked = found.handed_out_ms >= 0, found.acked_ms >= 0
    waiting = ~out & ((found.last == 0) | (found.last == Event.NACKED) | (found.last == Event.LEASE_EXPIRED))
    due = out | (waiting | (found.last == Event.TTL_EXPIRED)) & (found.due_ms <= as_of_ms)
    parts = [
        _counted("due", found.topic[due], found.due_ms[due]),
        _counted("waiting", found.topic[waiting], found.due_ms[waiting]),
        _counted("handed_out", found.topic[out], found.handed_out_ms[out]),
        _counted("acked", found.topic[acked], found.acked_ms[acked]),
    ]
    return merged(parts)


def _counted(name: str, topic: npt.NDArray[np.uint32], at_ms: npt.NDArray[np.int64]) -> Rows:
    if not len(topic):
        return np.zeros(0, SECONDS)
    second = at_ms // 1000
    base = int(second.min())
    width = int(second.max()) - base + 1
    key = topic.astype(np.int64) * width + (second - base)
    if (int(topic.max()) + 1) * width <= 4 * len(topic) + (1 << 20):
        totals = np.bincount(key)
        keys = np.flatnonzero(totals)
        counts = totals[keys]
    else:
        keys, counts = np.unique(key, return_counts=True)
    found = np.zeros(len(keys), SECONDS)
    found["topic"], found["second"], found[name] = keys // width, keys % width + base, counts
    return found


def merged(parts: Sequence[Rows], wanted: npt.NDArray[np.bool_] | None = None) -> Rows:
    """SECONDS with one row per topic and second, in the order of seconds. wanted: of `wanted`."""
    found = np.concatenate([np.zeros(0, SECONDS), *parts])
    if wanted is not None:
        found = found[np.isin(found["topic"], np.flatnonzero(wanted))]
    return summed(found, ("second", "topic"))


def summed(found: Rows, by: tuple[str, ...]) -> Rows:
    """Rows that agree in `by` as one, in that order; the counts of SECONDS are added up."""
    if not len(found):
        return found
    found = found[np.lexsort([found[name] for name in reversed(by)])]
    new = np.zeros(len(found), np.bool_)
    new[0] = True
    for name in by:
        new[1:] |= found[name][1:] != found[name][:-1]
    firsts = np.flatnonzero(new)
    whole = found[firsts]
    for name in ("due", "waiting", "handed_out", "acked"):
        whole[name] = np.add.reduceat(found[name], firsts)
    return whole


# ---- lateness


def late(store: Store, verify: bool, as_of_ms: int, files: HourFiles) -> tuple[Rows, int, int]:
    """(LATE of one hour's entries by the hour they were due in, entries that are overdue and were never handed out,
    those that were handed out at a time that is not known)."""
    found = entries(store, verify, files)
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


def decode(code: int) -> int:
    """The largest lateness in ms that has this code: at most 0.8 % more than the smallest."""
    return int(durations.decode(np.array(code)))


def quantiles(found: Rows, at: Sequence[float]) -> list[int]:
    """Of LATE rows: the lateness in ms that so many parts of the entries did not exceed."""
    order = found[np.argsort(found["code"], kind="stable")]
    total = order["count"].cumsum()
    largest = int(found["max_ms"].max(initial=0))
    ranks = [max(1, -int(-q * int(total[-1]) // 1)) for q in at]
    return [min(decode(int(order["code"][np.searchsorted(total, rank)])), largest) for rank in ranks]


# ---- telling


def instant(second: int) -> str:
    return f"{datetime.fromtimestamp(second, UTC):%Y-%m-%d %H:%M:%S}"


def by_hour(
    found: Rows, hours: npt.NDArray[np.integer], names: Names, told: Callable[[Rows], dict[str, Any]]
) -> list[dict[str, Any]]:
    """What `told` says of each hour's rows, all of them (topic: none), then topic by topic. hours: of each row."""
    table = []
    for hour in np.unique(hours).tolist():
        of_hour = found[hours == hour]
        numbers = np.unique(of_hour["topic"])
        parts = [of_hour, *(of_hour[of_hour["topic"] == number] for number in numbers)]
        for topic, some in zip((None, *topic_names(names, numbers)), parts, strict=True):
            table.append({"hour": hour_int(hour), "topic": topic} | told(some))
    return table


def topic_names(names: Names, numbers: npt.NDArray[np.integer]) -> list[str | None]:
    return [names.topics[n] if n < len(names.topics) else None for n in numbers.tolist()]
