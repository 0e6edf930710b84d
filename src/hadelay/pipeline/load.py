"""Job: count messages due, handed out and acked, per hour and topic, with the busiest second; optionally per second."""

from typing import Any

import pyarrow as pa

from hadelay.pipeline import page, timing
from hadelay.pipeline.arrow import instants, named, write_parquet
from hadelay.pipeline.hourfiles import Rows
from hadelay.pipeline.jobs import JobOptions, JobSummary
from hadelay.pipeline.tasks import Progress, silent

_COUNTS = ("due", "handed_out", "acked")


def run(spark: Any, options: JobOptions, progress: Progress = silent) -> JobSummary:
    """Count the messages. With `out`, also write the counts per second to seconds.parquet."""
    as_of_ms, parts, names = timing.over_hours(spark, options, timing.per_second, progress)
    found = timing.merged(parts)
    due, handed_out, acked = (int(found[name].sum()) for name in _COUNTS)
    table = timing.by_hour(found, found["second"] // 3600, names, _counts)
    summary = JobSummary("load", as_of_ms=as_of_ms, due=due, handed_out=handed_out, acked=acked, table=table)
    if options.out:
        columns = {"second": instants(found["second"] * 1000), "topic": named(names.topics, found["topic"])}
        columns |= {name: pa.array(found[name]) for name in _COUNTS}
        write_parquet(options.out, "seconds.parquet", [pa.table(columns)])
        summary.write(options.out, report(summary, timing.summed(found, ("second",))))
    said = f"{due:,} messages fell due, {handed_out:,} were handed out, {acked:,} acked"
    return summary.show(table, "hour topic due handed_out acked peak_due peak_due_at", said)


def _counts(found: Rows) -> dict[str, Any]:
    seconds = timing.summed(found, ("second",))
    figures: dict[str, Any] = {name: int(seconds[name].sum()) for name in _COUNTS}
    for name in ("due", "handed_out"):
        at = int(seconds[name].argmax())
        figures[f"peak_{name}"] = peak = int(seconds[name][at])
        figures[f"peak_{name}_at"] = timing.instant(int(seconds["second"][at])) if peak else None
    return figures


def report(summary: JobSummary, whole: Rows) -> str:
    if not len(whole):
        return page.page("Load", "Nothing fell due in these hours.", [])
    first, last = int(whole["second"][0]), int(whole["second"][-1])
    lines = {name.replace("_", " "): timing.dense(whole, name, first, last) for name in ("due", "handed_out")}
    hours = [row for row in summary.table if row["topic"] is None]
    busiest = max(hours, key=lambda row: row["peak_due"])
    lead = (
        f"{summary.due:,} messages fell due, {summary.handed_out:,} were handed out and {summary.acked:,} acked. "
        f"The busiest second had {busiest['peak_due']:,} due: {busiest['peak_due_at']} UTC."
    )
    topics = sorted((row for row in summary.table if row["topic"] is not None), key=lambda row: -row["due"])
    parts = [
        page.section(
            "Second by second",
            "The busiest second of each stretch (UTC).",
            page.plot(lambda at: timing.instant(first + at)[5:], lines, unit="messages/s"),
        ),
        page.section(
            "Hour by hour",
            "Times are UTC.",
            page.table(hours, ("hour", *_COUNTS, "peak_due", "peak_due_at", "peak_handed_out", "peak_handed_out_at")),
        ),
        page.section(
            "Topics",
            "By how much was due.",
            page.table(topics, ("topic", "hour", *_COUNTS, "peak_due", "peak_handed_out")),
        ),
    ]
    return page.page("Load", lead, parts)
