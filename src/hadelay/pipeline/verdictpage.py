"""HTML report of the job `reconcile`: verdicts by hour and by topic, and the first messages with problems."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from hadelay.pipeline import page
from hadelay.pipeline.jobs import VERDICTS, JobSummary

#: Verdict → its meaning, for readers who do not know hadelay.
_MEANINGS = {
    "ok": "handed out once, in time, and acked",
    "pending": "waits for its due time, or is overdue for less than the grace",
    "undelivered": "due, and never handed out",
    "duplicate": "handed out more often than its retries explain",
    "early": "handed out before its due time",
    "late": "handed out later than the limit, and acked",
    "orphan": "an event whose message is missing",
    "unacked": "handed out, and neither acked nor returned",
    "cancelled": "cancelled by its publisher",
    "expired": "not taken before the end of its TTL",
    "dead": "failed too often: a dead letter",
    "gone": "moved to an hour that is deleted by now, so it is settled",
}
assert tuple(_MEANINGS) == VERDICTS
#: Columns of the table of messages with problems.
_MESSAGES = ("verdict", "id", "topic", "hour", "deliver_at", "hand_outs", "late_ms")


def report(summary: JobSummary, said: str, problems: Sequence[str], first: Sequence[Mapping[str, Any]]) -> str:
    """Make the page. said: result in a sentence. problems: verdicts that tell of a problem. first: rows of the first
    messages with problems."""
    bad = f" {summary.offending:,} have a problem." if summary.offending else " None has a problem."
    totals = [
        {"verdict": name, "messages": count, "share": f"{100 * count / max(summary.messages, 1):.2f} %"}
        | {"meaning": _MEANINGS[name]}
        for name, count in summary.verdicts.items()
        if count
    ]
    parts = [
        page.section(
            "Verdicts",
            "Each message that is due has one verdict, the worst that applies.",
            page.table(totals, ("verdict", "messages", "share", "meaning")),
        )
    ]
    if summary.table:
        parts += [_hours(summary, problems), _topics(summary, problems)]
    if first:
        more = summary.offending - len(first)
        note = f"The first {len(first):,}; offending.parquet has {more:,} more." if more else "All of them."
        parts.append(page.section("Messages with problems", note, page.table(first, _MESSAGES), bad=True))
    return page.page("Reconciliation", f"{said}.{bad}", parts)


def _hours(summary: JobSummary, problems: Sequence[str]) -> str:
    rows = _by(summary, "hour", problems)
    lines = {name: [row[key] for row in rows] for name, key in (("messages", "messages"), ("problems", "problems"))}
    return page.section(
        "Hour by hour",
        "Hours are those in which messages were first filed, in UTC.",
        page.plot(lambda at: page.cell("hour", rows[at]["hour"]), lines, unit="messages per hour", log=True),
        page.table(rows, _columns("hour", rows)),
    )


def _topics(summary: JobSummary, problems: Sequence[str]) -> str:
    rows = sorted(_by(summary, "topic", problems), key=lambda row: (-row["problems"], -row["messages"]))
    return page.section("Topics", "Topics with most problems first.", page.table(rows, _columns("topic", rows)))


def _by(summary: JobSummary, key: str, problems: Sequence[str]) -> list[dict[str, Any]]:
    """Rows with the number of messages, of problems, and of each verdict, per value of `key`."""
    found: dict[Any, Counter[str]] = defaultdict(Counter)
    for row in summary.table:
        found[row[key]][row["verdict"]] += row["count"]
    return [
        {key: value, "messages": counts.total() - counts["orphan"], "problems": sum(counts[name] for name in problems)}
        | counts
        for value, counts in found.items()
    ]


def _columns(key: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the columns of a table: the key, the two counts that all rows have, and each verdict that occurs in a
    row."""
    return [key, "messages", "problems", *(name for name in VERDICTS if any(row.get(name) for row in rows))]
