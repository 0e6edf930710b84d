"""Options of the jobs, as the command line documents them, and what a job reports. Imports neither pyarrow nor pyspark.

`option` gives a field its help text: cli/pipeline.py makes the commands of these classes. Every job has a module of its
name with `run(spark, options, progress)`; spark: a session, or None to do the work in this process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from hadelay.errors import BadRequest
from hadelay.pipeline.schema import Options, within

#: Members of summary.json and of -o json, by job.
FACTS = {
    "archive": "as_of_ms hours",
    "audit": "messages events hours problem",
    # overdue: due before as_of and not handed out. hot: the hottest seconds. backlog, wait_s, clear_at: what waits at
    # `threshold` per second. jitter_s: null when an hour is not enough. catch_up_rate: null when nothing is overdue.
    "forecast": "as_of_ms threshold coming overdue hot_seconds hot table backlog wait_s clear_at jitter_s "
    "catch_up_rate advice",
    # overdue: in no percentile. not_measured: the time of the grant counts. Quantiles are exact below 1,024 ms, and at
    # most 0.8 % too high above; max_ms is exact.
    "lateness": "as_of_ms handed_out overdue not_measured overall table",
    "load": "as_of_ms due handed_out acked table",
    "reconcile": "as_of_ms engine hours messages verdicts table offending failed",
    "replay": "looked_at fit outcomes",
    "tail": "batches rows",
}
#: Verdicts of `reconcile`. orphan is not a message's: an event of an entry that is not there.
VERDICTS = (
    "ok", "pending", "undelivered", "duplicate", "early", "late", "orphan", "unacked", "cancelled", "expired", "dead",
    "gone",
)  # fmt: skip


class JobSummary(dict[str, Any]):
    """What a job found: members of summary.json, which are attributes too. A terminal shows `shown` and `notes`."""

    def __init__(self, job: str, **facts: Any) -> None:
        assert " ".join(facts) == FACTS[job], f"{job} reports {list(facts)}"
        super().__init__(facts)
        self.shown: Iterable[Mapping[str, Any]] = ()
        self.columns: tuple[str, ...] = ()
        self.notes: list[str] = []
        #: The command ends with 1.
        self.failed = False

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def show(self, rows: Iterable[Mapping[str, Any]], columns: str, *notes: str, failed: bool = False) -> JobSummary:
        """columns: names, separated by spaces."""
        self.shown, self.columns, self.failed = rows, tuple(columns.split()), failed
        self.notes += notes
        return self

    def write(self, out: str, report: str = "") -> None:
        """summary.json, and report.html if there is a report, each whole or not at all. out: a directory or URI; empty:
        nothing is written."""
        if not out:
            return
        from hadelay.storage.locations import Location, absolute

        location = Location(absolute(out))
        location.make("")
        location.write("summary.json", json.dumps(self, indent=1).encode())
        if report:
            location.write("report.html", report.encode())
            self.notes.append(f"report: {out}/report.html")


def option(default: Any, help: str) -> Any:
    """A field that is an option of the command."""
    return field(default=default, metadata={"help": help})


def required(help: str) -> Any:
    return field(metadata={"help": help})


_ARCHIVE = "Directory that `archive` wrote: hours that are deleted are read from there."


@dataclass(frozen=True)
class ReconcileOptions:
    """A verdict for every message: was it delivered, once, and on time. Ends with 1 when something was lost."""

    source: Options
    out: str = option("", "Directory for summary.json and offending.parquet: messages that are not as they should be.")
    archive: str = option("", _ARCHIVE)
    engine: str = option("fast", "fast is the only one: `exact` has become an oracle of the tests.")
    late_ms: int = option(1_000, "Handed out later than this after deliver_at is late.")
    grace_ms: int = option(60_000, "What is overdue for less is pending.")
    fail_on: str = option("undelivered,orphan,early", "Verdicts with which the command ends with 1.")
    #: Compare every file with its checksum before its hour is judged.
    check: bool = True

    def __post_init__(self) -> None:
        if self.engine != "fast":
            raise BadRequest(f"engine {self.engine!r}: leave it out. The SQL engine ended after 0.1.0: both agreed")
        if unknown := self.failing - set(VERDICTS):
            raise BadRequest(f"fail_on: {', '.join(sorted(unknown))}: no such verdict; there are {', '.join(VERDICTS)}")

    @property
    def failing(self) -> set[str]:
        return {name.strip() for name in self.fail_on.split(",") if name.strip()}


@dataclass(frozen=True)
class ArchiveOptions:
    """Write closed hours to Parquet, with a manifest each, and a catalogue of all. Run again, it writes what is new."""

    source: Options
    out: str = required("Directory that all workers see, or a URI such as s3://bucket/archive.")
    level: int = option(3, "Of zstd.")
    new_catalogue: bool = option(False, "Make the catalogue of the hours that are there, when it was lost.")

    def __post_init__(self) -> None:
        if not self.out:
            raise BadRequest("archive: out has to say where to")


@dataclass(frozen=True)
class AuditOptions:
    """Read every archived hour again. hour_from, hour_to: first and last hour, as yyyymmddHH; 0: all."""

    out: str
    hour_from: int = 0
    hour_to: int = 0

    def __post_init__(self) -> None:
        if not self.out:
            raise BadRequest("archive: out has to say where the archive is")

    def takes(self, hour: int) -> bool:
        return within(hour, self.hour_from, self.hour_to)


@dataclass(frozen=True)
class JobOptions:
    """Of lateness, load and forecast."""

    source: Options
    out: str = option("", "Directory for summary.json and report.html, a page with plots that needs nothing else.")
    archive: str = option("", _ARCHIVE)
    #: Compare the files that are read with their checksums first.
    check: bool = True


@dataclass(frozen=True)
class ForecastOptions(JobOptions):
    """Seconds to come in which more falls due than can be taken, and what would help."""

    archive: str = ""
    threshold: int = option(5_000, "Messages per second that consumers, or the cluster, can take.")
    hours: int = option(24, "How far to look ahead.")
    fail: bool = option(False, "End with 1 when there are such seconds.")

    def __post_init__(self) -> None:
        if self.threshold < 1 or not 1 <= self.hours <= 24 * 31:
            raise BadRequest("forecast: threshold is at least 1, hours 1 to 744")


@dataclass(frozen=True)
class ReplayOptions:
    """Make dead letters due again that fit: of an outage, say, by reason and time of death. Needs no Spark."""

    #: URLs of nodes, separated by commas.
    endpoint: str
    topic: str
    token: str = ""
    reason: str = option("", "Regular expression, found in the last reason to fail; lease_expired: its lease ran out.")
    died_from: str = option("", "RFC 3339: died then or later.")
    died_to: str = option("", "Died before.")
    tags: str = option("", "Have all of these, separated by commas.")
    limit: int = option(0, "At most so many; 0: all that fit.")
    rate: float = option(0.0, "Per second; 0: as fast as it goes.")
    dry_run: bool = option(False, "Only count them.")

    def __post_init__(self) -> None:
        try:
            re.compile(self.reason)
        except re.error as error:
            raise BadRequest(f"reason: {self.reason!r} is no regular expression: {error}") from None
        self.died()
        if self.limit < 0 or self.rate < 0:
            raise BadRequest("replay: limit and rate are 0 or more")

    def died(self) -> tuple[datetime | None, datetime | None]:
        """[from, to)."""
        return _instant("died_from", self.died_from), _instant("died_to", self.died_to)


def _instant(name: str, text: str) -> datetime | None:
    try:
        at = datetime.fromisoformat(text) if text else None
    except ValueError:
        at = None
    if text and (at is None or at.tzinfo is None):
        raise BadRequest(f"{name}: {text!r} is no time with a zone, such as 2026-11-20T18:00:00Z")
    return at


@dataclass(frozen=True)
class TailOptions:
    """Write what is filed to Parquet, as it is: each row once, also when it is ended and run again."""

    source: Options
    out: str = required("Directory that all workers see, or a URI of a file system that Spark has (s3a://, hdfs://).")
    checkpoint: str = option("", "Where it remembers how far it is: OUT/_checkpoint without it.")
    every: float = option(
        0.0, "Seconds between looks; goes on until it is ended (Ctrl-C). 0: read what is there, and end."
    )

    def __post_init__(self) -> None:
        if not self.out:
            raise BadRequest("tail: out has to say where to")
        if self.every < 0:
            raise BadRequest("tail: every is 0 or more")
        if "hour" not in self.source.projection():
            raise BadRequest("tail: the columns have to include hour, by which the files are partitioned")
