"""Job: find the coming seconds in which more messages fall due than consumers can take, and give advice.

Published messages count, and those that schedules will publish. Consumers that take `threshold` messages per second
need more time for a busier second: the forecast computes how late that makes messages, and the jitter that avoids it.
Jitter is a random time that the publisher adds to deliver_at.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hadelay.pipeline import occurrences, page, timing
from hadelay.pipeline.hourfiles import NameMap, Rows
from hadelay.pipeline.jobs import ForecastOptions, JobSummary
from hadelay.pipeline.schema import hour_int
from hadelay.pipeline.tasks import Progress, silent

Counts = npt.NDArray[np.int64]
#: Maximum number of seconds with too many messages that are listed, busiest first.
_LISTED = 100
_MAX_JITTER_S = 3600
#: Length, in seconds, of the near future whose load must leave room for overdue messages.
_NEAR_S = 600


class DrainTime(NamedTuple):
    #: Maximum number of messages that wait at the same time.
    backlog: int
    #: Longest wait of a message, in seconds.
    wait_s: float
    #: First second from which on no message waits; None: not within the forecast.
    clear: int | None


def run(spark: Any, options: ForecastOptions, progress: Progress = silent) -> JobSummary:
    # Read past hours, too: their waiting messages are overdue.
    as_of_ms, parts, names = timing.over_hours(spark, options, timing.per_second, progress, options.hours)
    now = -(-as_of_ms // 1000)
    found = timing.merged(parts)
    found = found[(found["waiting"] > 0) & (found["second"] < now + options.hours * 3600)]
    planned, names, missing = occurrences.coming(options.source, names, now, now + options.hours * 3600)
    found = timing.merged([found, planned])
    overdue = int(found["waiting"][found["second"] < now].sum())
    found = found[found["second"] >= now]
    whole = timing.summed(found, ("second",))
    counts = timing.dense(whole, "waiting", now, now + options.hours * 3600 - 1)
    hot = np.flatnonzero(counts > options.threshold)
    drained = drain(counts, options.threshold, overdue)
    room = options.threshold - float(counts[:_NEAR_S].mean())
    clear_at = None if drained.clear is None else timing.instant(now + drained.clear)
    table = _hours(whole, options.threshold)
    summary = JobSummary(
        "forecast",
        as_of_ms=as_of_ms,
        threshold=options.threshold,
        coming=int(counts.sum()),
        of_schedules=int(planned["waiting"].sum()),
        overdue=overdue,
        hot_seconds=len(hot),
        hot=_hottest(found, names, counts, hot, now),
        table=table,
        backlog=drained.backlog,
        wait_s=round(drained.wait_s, 1),
        clear_at=clear_at,
        jitter_s=jitter(counts, options.threshold),
        catch_up_rate=max(0, int(room)) if overdue else None,
        advice=[],
    )
    summary["advice"] = [*_advice(summary), *([f"Not all is known: {missing}."] if missing else [])]
    summary.write(options.out, options.out and report(summary, counts, now))
    columns, failed = "hour messages peak peak_at hot_seconds", options.fail and len(hot) > 0
    return summary.show(table, columns, *summary.advice, failed=failed)


def _hottest(found: Rows, names: NameMap, counts: Counts, hot: npt.NDArray[np.intp], now: int) -> list[dict[str, Any]]:
    """List the busiest seconds: second (UTC), number of messages, and the three largest topics. hot: seconds as offsets
    from `now`."""
    rows = []
    for at in hot[np.argsort(-counts[hot], kind="stable")][:_LISTED].tolist():
        some = found[found["second"] == now + at]
        some = some[np.argsort(-some["waiting"], kind="stable")][:3]
        topics = {names.topic(row["topic"]): int(row["waiting"]) for row in some}
        rows.append({"second": timing.instant(now + at), "messages": int(counts[at]), "topics": topics})
    return rows


def _hours(whole: Rows, threshold: int) -> list[dict[str, Any]]:
    found = []
    hours = whole["second"] // 3600
    for hour in np.unique(hours).tolist():
        some = whole[hours == hour]
        at = int(some["waiting"].argmax())
        figures: dict[str, Any] = {"hour": hour_int(hour), "messages": int(some["waiting"].sum())}
        figures |= {"peak": int(some["waiting"][at]), "peak_at": timing.instant(int(some["second"][at]))}
        found.append(figures | {"hot_seconds": int((some["waiting"] > threshold).sum())})
    return found


def drain(counts: Counts, rate: int, waiting: int = 0) -> DrainTime:
    """Simulate the backlog if consumers take `rate` messages per second, oldest first. counts: messages due in each
    second. waiting: messages due before."""
    # Lindley's formula for a queue: the backlog is the sum of (due - rate) minus the minimum of this sum so far.
    total = waiting + np.cumsum(counts - rate)
    backlog = total - np.minimum.accumulate(np.minimum(total, 0))
    worst = max(int(backlog.max()), waiting)
    waits = np.flatnonzero(backlog > 0)
    clear = 0 if not len(waits) else int(waits[-1]) + 1
    return DrainTime(worst, worst / rate, clear if clear < len(counts) else None)


def jitter(counts: Counts, threshold: int) -> int | None:
    """Smallest jitter in seconds, evenly spread, with which no second has more than `threshold` messages; 0 if none is
    needed, None if an hour is too short."""
    if int(counts.max()) <= threshold:
        return 0
    total = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])

    def fits(seconds: int) -> bool:
        # With a jitter of J seconds, a second gets 1/J of the messages due in the J seconds up to it.
        most = int((total[seconds:] - total[:-seconds]).max()) if seconds < len(total) else int(total[-1])
        return most <= threshold * seconds

    low, high = 1, 2
    while not fits(high):
        if high >= _MAX_JITTER_S:
            return None
        low, high = high, min(2 * high, _MAX_JITTER_S)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _advice(summary: JobSummary) -> list[str]:
    said = []
    rate = f"{summary.threshold:,} per second"
    if not summary.hot_seconds:
        said.append(f"No second has more than {summary.threshold:,} messages: nothing has to be done.")
    else:
        names = [name or "?" for name in dict.fromkeys(name for row in summary.hot[:10] for name in row["topics"])]
        said.append(
            f"{summary.hot_seconds:,} seconds have more than {summary.threshold:,} messages. Taken at {rate}, up to "
            f"{summary.backlog:,} wait, and the longest for {summary.wait_s:,.1f} s"
            + (f", until {summary.clear_at} UTC." if summary.clear_at else "; they do not clear within these hours.")
        )
        if summary.jitter_s is None:
            said.append(
                "No jitter of up to an hour is enough: take more per second, or publish for other times. "
                f"Most of it is of {', '.join(names[:3])}."
            )
        else:
            said.append(
                f"Spread it: a random part of {summary.jitter_s:,} s added to deliver_at, where {', '.join(names[:3])} "
                f"are published, leaves no second above {rate}."
            )
    if summary.catch_up_rate:
        clears = summary.overdue / summary.catch_up_rate
        said.append(
            f"{summary.overdue:,} are overdue. A catch_up_rate of {summary.catch_up_rate:,} clears them in "
            f"{clears:,.0f} s, and makes nothing else late."
        )
    elif summary.catch_up_rate is not None:
        said.append(f"{summary.overdue:,} are overdue, and the next ten minutes leave no room for them at {rate}.")
    return said


def report(summary: JobSummary, counts: Counts, first: int) -> str:
    lead = " ".join(summary.advice)
    rows = [row | {"topics": ", ".join(f"{n or '?'} {c:,}" for n, c in row["topics"].items())} for row in summary.hot]
    parts = [
        page.section(
            "What is coming",
            f"{summary.coming:,} messages known by now, {summary.of_schedules:,} of them of "
            "schedules; the busiest second of each stretch (UTC).",
            page.plot(
                lambda at: timing.instant(first + at)[5:], {"due": counts}, unit="messages/s", limit=summary.threshold
            ),
        ),
        page.section(
            "Hour by hour",
            "Times are UTC.",
            page.table(summary.table, ("hour", "messages", "peak", "peak_at", "hot_seconds")),
        ),
    ]
    if rows:
        parts.append(
            page.section(
                "Hot seconds",
                f"More than {summary.threshold:,}; the hottest first.",
                page.table(rows, ("second", "messages", "topics")),
            )
        )
    return page.page("Forecast", lead, parts)
