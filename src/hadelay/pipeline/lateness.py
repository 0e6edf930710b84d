"""Job: lateness of hand-outs as p50, p90, p99, p99.9 and maximum, per topic and hour.

Only an entry's first hand-out counts; a retry has its own due time, and counts by it. A message is handed out when the
leader has written the answer to its consumer. If the log does not say when that was, the time of the grant counts, and
`not_measured`: hand-outs that were never settled.
"""

from typing import Any

import numpy as np

from hadelay.codec import durations
from hadelay.pipeline import page, timing
from hadelay.pipeline.hourfiles import Rows
from hadelay.pipeline.jobs import JobOptions, JobSummary
from hadelay.pipeline.tasks import Progress, silent

_QUANTILES = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99, "p999_ms": 0.999}
#: Limits of lateness, in ms; the report shows the share of messages within each.
_WITHIN = (10, 20, 50, 100, 200, 500, 1_000, 5_000, 60_000)


def run(spark: Any, options: JobOptions, progress: Progress = silent) -> JobSummary:
    as_of_ms, parts, names = timing.over_hours(spark, options, timing.late, progress)
    found = np.concatenate([np.zeros(0, timing.LATE), *(rows for rows, _, _ in parts)])
    table = timing.by_hour(found, found["hour"], names, _spread)
    overall = _spread(found)
    summary = JobSummary(
        "lateness",
        as_of_ms=as_of_ms,
        handed_out=overall.pop("count"),
        overdue=sum(one[1] for one in parts),
        not_measured=sum(one[2] for one in parts),
        overall=overall,
        table=table,
    )
    summary.write(options.out, options.out and report(summary, found))
    waits = f"; {summary.overdue:,} are overdue and were not" if summary.overdue else ""
    said = f"{summary.handed_out:,} messages were handed out{waits}"
    return summary.show(table, "hour topic count p50_ms p90_ms p99_ms p999_ms max_ms", said)


def _spread(found: Rows) -> dict[str, int]:
    figures = {"count": int(found["count"].sum())}
    if len(found):
        figures |= zip(_QUANTILES, timing.quantiles(found, list(_QUANTILES.values())), strict=True)
        figures["max_ms"] = int(found["max_ms"].max())
    return figures


def report(summary: JobSummary, found: Rows) -> str:
    if not summary.overall:
        return page.page("Lateness", "Nothing was handed out in these hours.", [])
    said = summary.overall
    hours = [row for row in summary.table if row["topic"] is None]
    lead = (
        f"Of {summary.handed_out:,} messages, half were handed out within {_time(said['p50_ms'])} of the time they "
        f"were due, 99 of 100 within {_time(said['p99_ms'])}, and the latest {_time(said['max_ms'])} after it."
    )
    parts = []
    if summary.overdue:
        text = f"{summary.overdue:,} messages are due and were not handed out yet: no figure below knows of them."
        parts.append(page.section("Still waiting", text, bad=True))
    if summary.not_measured:
        text = (
            f"Of {summary.not_measured:,} messages the log says when they were granted, not when they were handed out."
        )
        parts.append(page.section("Not measured", text))
    lines = {name: [row[f"{name}_ms"] for row in hours] for name in ("p50", "p99", "max")}
    late = durations.decode(found["code"].astype(np.int64))
    shares = [
        {"within": _time(ms), "percent": round(100 * int(found["count"][late <= ms].sum()) / summary.handed_out, 3)}
        for ms in _WITHIN
    ]
    worst = sorted((row for row in summary.table if row["topic"] is not None), key=lambda r: -r["p99_ms"])
    parts += [
        page.section(
            "Hour by hour",
            "By the hour (UTC) in which messages were due. Each line up is ten times as late.",
            page.plot(lambda at: f"{hours[at]['hour'] % 100:02}:00", lines, unit="ms", log=True),
        ),
        page.section("How many, how soon", "Share of messages handed out.", page.table(shares, ("within", "percent"))),
        page.section(
            "Topics and hours",
            "The latest first, by p99. Times are milliseconds.",
            page.table(worst, ("topic", "hour", "count", *_QUANTILES, "max_ms")),
        ),
    ]
    return page.page("Lateness", lead, parts)


def _time(ms: int) -> str:
    for size, unit in ((3_600_000, "h"), (60_000, "min"), (1_000, "s")):
        if ms >= size:
            return f"{ms / size:.3g} {unit}"
    return f"{ms} ms"
