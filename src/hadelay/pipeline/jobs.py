"""Options of the jobs, with the help texts of the command line, and job summaries. Imports neither pyarrow nor pyspark.

cli/pipeline.py makes commands from these classes: fields with a help text (`schema.option`) are options. Every job has
a module of its name with `run(spark, options, progress)`; spark: a session, or None to run in this process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from hadelay.errors import BadRequest
from hadelay.pipeline.schema import Options, option

#: Job → members of its summary.json, which -o json also prints.
FACTS = {
    "archive": "as_of_ms hours",
    "audit": "messages events hours problem",
    # Members of `forecast`. of_schedules: number of messages in `coming` that schedules publish. overdue: number of
    # messages due and not handed out. hot: busiest seconds. backlog, wait_s, clear_at: longest queue, longest wait, and
    # time at which the queue is empty, if consumers take `threshold` messages per second. jitter_s: null if more than
    # an hour is needed. catch_up_rate: null if no message is overdue.
    "forecast": "as_of_ms threshold coming of_schedules overdue hot_seconds hot table backlog wait_s clear_at jitter_s "
    "catch_up_rate advice",
    # Members of `lateness`. overdue: number of messages due and not handed out, excluded from percentiles.
    # not_measured: number of hand-outs timed by their grant. Percentiles are exact below 1,024 ms, and at most 0.8 %
    # too high above; max_ms is exact.
    "lateness": "as_of_ms handed_out overdue not_measured overall table",
    "load": "as_of_ms due handed_out acked table",
    "reconcile": "as_of_ms engine hours messages verdicts table offending failed",
    "replay": "looked_at fit outcomes",
    "tail": "batches rows",
}
#: Verdicts of the job `reconcile` on a message. orphan: an event whose entry, and so the message, is missing.
VERDICTS = (
    "ok", "pending", "undelivered", "duplicate", "early", "late", "orphan", "unacked", "cancelled", "expired", "dead",
    "gone",
)  # fmt: skip


class JobSummary(dict[str, Any]):
    """Result of a job: members of summary.json, also as attributes; `shown` (a table) and `notes` for a terminal."""

    def __init__(self, job: str, **facts: Any) -> None:
        assert " ".join(facts) == FACTS[job], f"{job} reports {list(facts)}"
        super().__init__(facts)
        self.shown: Iterable[Mapping[str, Any]] = ()
        self.columns: tuple[str, ...] = ()
        self.notes: list[str] = []
        #: Whether the job failed; if so, the command exits with code 1.
        self.failed = False

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def show(self, rows: Iterable[Mapping[str, Any]], columns: str, *notes: str, failed: bool = False) -> JobSummary:
        """Set the rows, the columns (names separated by spaces) and the notes that a terminal shows."""
        self.shown, self.columns, self.failed = rows, tuple(columns.split()), failed
        self.notes += notes
        return self

    def write(self, out: str, report: str = "") -> None:
        """Write summary.json, and report.html for a report, atomically. out: directory or URI; empty: do nothing."""
        if not out:
            return
        from hadelay.storage.locations import Location, absolute

        location = Location(absolute(out))
        location.make("")
        location.write("summary.json", json.dumps(self, indent=1).encode())
        if report:
            location.write("report.html", report.encode())
            self.notes.append(f"report: {out}/report.html")


def required(help: str) -> Any:
    return field(metadata={"help": help})


@dataclass(frozen=True)
class JobOptions:
    """Options of the jobs `lateness` and `load`."""

    source: Options
    out: str = option("", "Directory for summary.json and report.html, a self-contained page with plots.")
    archive: str = option("", "Directory of `archive`, to read deleted hours from.")
    #: Whether to compare files with their checksums before reading them.
    check: bool = True


@dataclass(frozen=True)
class ReconcileOptions(JobOptions):
    """Check that every due message was delivered, once and on time. Exit code 1 if a message was lost."""

    out: str = option("", "Directory for summary.json, report.html and offending.parquet, the messages with problems.")
    engine: str = option("fast", "Always fast; the engine `exact` was removed.")
    late_ms: int = option(1_000, "Limit of lateness: later hand-outs count as late.")
    grace_ms: int = option(60_000, "Messages overdue for less count as pending.")
    fail_on: str = option("undelivered,orphan,early", "Verdicts that make the exit code 1.")

    def __post_init__(self) -> None:
        if self.engine != "fast":
            raise BadRequest(f"engine {self.engine!r}: leave it out. The SQL engine was removed after 0.1.0")
        if unknown := self.failing - set(VERDICTS):
            raise BadRequest(
                f"fail_on: {', '.join(sorted(unknown))}: no such verdict; choose from {', '.join(VERDICTS)}"
            )

    @property
    def failing(self) -> set[str]:
        return {name.strip() for name in self.fail_on.split(",") if name.strip()}


@dataclass(frozen=True)
class ArchiveOptions:
    """Write closed hours to Parquet, with a manifest per hour and a catalogue of all. Later runs add new hours."""

    source: Options
    out: str = required("Directory that all workers see, or a URI such as s3://bucket/archive.")
    level: int = option(3, "Compression level of zstd.")
    new_catalogue: bool = option(False, "Rebuild a lost catalogue from the existing hours.")
    force: bool = option(
        False, "Archive also another cluster, or an hour of which the archive has more; its files are set aside."
    )

    def __post_init__(self) -> None:
        if not self.out:
            raise BadRequest("archive: out is missing: name the target directory or URI")


@dataclass(frozen=True)
class AuditOptions:
    """Read every archived hour again. hour_from, hour_to: first and last hour, as yyyymmddHH; 0: all."""

    out: str
    hour_from: int = 0
    hour_to: int = 0

    def __post_init__(self) -> None:
        if not self.out:
            raise BadRequest("archive: out is missing: name the archive's directory or URI")


@dataclass(frozen=True)
class ForecastOptions(JobOptions):
    """Predict the seconds in which more messages fall due than consumers can take, with advice."""

    archive: str = ""
    threshold: int = option(5_000, "Messages per second that consumers, or the cluster, can take.")
    hours: int = option(24, "Hours to look ahead.")
    fail: bool = option(False, "Exit code 1 if there are such seconds.")

    def __post_init__(self) -> None:
        if self.threshold < 1 or not 1 <= self.hours <= 24 * 31:
            raise BadRequest("forecast: threshold must be at least 1, and hours between 1 and 744")


@dataclass(frozen=True)
class ReplayOptions:
    """Make dead letters due again that match a filter, for example those of an outage. Needs no Spark."""

    #: URLs of nodes, separated by commas.
    endpoint: str
    topic: str
    token: str = ""
    reason: str = option("", "Regular expression for the reason of the last failure; lease_expired: the lease expired.")
    died_from: str = option("", "Earliest time of death, RFC 3339.")
    died_to: str = option("", "End of the times of death, exclusive, RFC 3339.")
    tags: str = option("", "Only letters with all of these tags, separated by commas.")
    limit: int = option(0, "Limit of redriven letters; 0: all matching ones.")
    rate: float = option(0.0, "Messages per second; 0: no limit.")
    dry_run: bool = option(False, "Only count the matching letters.")

    def __post_init__(self) -> None:
        try:
            re.compile(self.reason)
        except re.error as error:
            raise BadRequest(f"reason: {self.reason!r} is not a regular expression: {error}") from None
        self.died()
        if self.limit < 0 or self.rate < 0:
            raise BadRequest("replay: limit and rate must be 0 or more")

    def died(self) -> tuple[datetime | None, datetime | None]:
        """Range of the time of death of the letters to redrive, as (from, to); `to` is exclusive."""
        return _instant("died_from", self.died_from), _instant("died_to", self.died_to)


def _instant(name: str, text: str) -> datetime | None:
    try:
        at = datetime.fromisoformat(text) if text else None
    except ValueError:
        at = None
    if text and (at is None or at.tzinfo is None):
        raise BadRequest(f"{name}: {text!r} is not a time with a zone; write for example 2026-11-20T18:00:00Z")
    return at


@dataclass(frozen=True)
class TailOptions:
    """Stream new entries or events to Parquet. Each row is written once, also across restarts."""

    source: Options
    out: str = required("Directory that all workers see, or a URI of a file system that Spark has (s3a://, hdfs://).")
    checkpoint: str = option("", "Directory of the stream's position. Default: OUT/_checkpoint.")
    every: float = option(0.0, "Seconds between reads, until Ctrl-C; 0: read once.")

    def __post_init__(self) -> None:
        if not self.out:
            raise BadRequest("tail: out is missing: name the target directory or URI")
        if self.every < 0:
            raise BadRequest("tail: every must be 0 or more")
        if "hour" not in self.source.projection():
            raise BadRequest("tail: the columns must include hour, which partitions the files")
