"""`hadelay pipeline …`: jobs on the hour files. They need `hadelay[spark]`, and say so."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from hadelay.cli.output import Format, Printing, Remote, Topic, emit_json, note, progress, show, table
from hadelay.errors import ConfigError

__all__ = ["Format"]  # the fields of Printing are looked up here

Engine = Literal["fast", "exact"]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Running(Printing):
    """Options of every job."""

    endpoint: Annotated[str, Parameter(env_var="HADELAY_SERVERS")] = ""
    "URLs of nodes, separated by commas."
    token: Annotated[str, Parameter(env_var="HADELAY_TOKEN")] = ""
    "For them."
    master: str = "local[*]"
    "Where Spark runs, as spark-submit has it; none: in this process, without Spark and Java."
    driver_memory: str = "2g"
    "For a local Spark."

    def spark(self, **settings: str) -> Any:
        """None if it is to be done without."""
        from hadelay.pipeline.session import INSTALL, session

        if self.master != "none":
            shown = sys.stderr.isatty() and self.output != "json"
            bar = {"spark.ui.showConsoleProgress": str(shown).lower()}
            return session(self.master, self.driver_memory, **bar, **settings)
        try:
            import pyarrow  # noqa: F401
        except ImportError:
            raise ConfigError(f"the pipeline needs pyarrow: {INSTALL}") from None
        return None

    @contextlib.contextmanager
    def bar(self) -> Iterator[Callable[[int, int], None]]:
        """bar(done, total), for a job in this process, while somebody watches; Spark has a bar of its own."""
        with progress(None, hidden=self.master != "none" or self.output == "json") as update:
            yield lambda done, total: update(completed=done, total=total)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Source(Running):
    """Options of jobs that read hours."""

    path: str = ""
    "Instead of --endpoint: a node's data directory, or a copy of one, also by a URI such as s3://bucket/n1."
    hour_from: int = 0
    "First hour, as yyyymmddHH."
    hour_to: int = 0
    "Last hour."
    on_torn: Literal["fail", "skip"] = "fail"
    "What to do about files that are shorter than they should be."
    verify: Annotated[bool, Parameter(negative="--no-verify")] = True
    "Compare every file that is read with its checksum first. Archiving always does."
    as_of: int = 0
    "Unix ms at which what waits is judged; 0: of the last checkpoint, or the nodes' time."

    def options(self) -> Any:
        from hadelay.pipeline.schema import Options

        return Options(
            path=self.path, endpoint="" if self.path else self.endpoint, token=self.token,
            hour_from=self.hour_from, hour_to=self.hour_to, on_torn=self.on_torn, as_of=self.as_of,
            # Whole files are compared with their checksums by the job itself.
            verify=self.verify and self.on_torn == "skip",
        )  # fmt: skip


def reconcile(
    *, out: str = "", archive: str = "", engine: Engine = "fast", late_ms: int = 1_000, grace_ms: int = 60_000,
    fail_on: str = "undelivered,orphan,early", source: Source = Source(),
) -> int:  # fmt: skip
    """A verdict for every message: was it delivered, once, and on time. Ends with 1 when something was lost.

    Parameters
    ----------
    out
        Directory for summary.json and offending.parquet: the messages that are not as they should be.
    archive
        Directory that `archive` wrote: hours that are deleted are read from there.
    engine
        fast: an hour per task. exact: one SQL query over everything, to prove the other.
    late_ms
        Handed out later than this is late.
    grace_ms
        What is overdue for less is pending.
    fail_on
        Verdicts with which the command ends with 1.
    """
    options, spark = source.options(), source.spark()
    from hadelay.pipeline.reconcile import ReconcileOptions, run

    failing = tuple(name.strip() for name in fail_on.split(",") if name.strip())
    wanted = ReconcileOptions(options, engine, late_ms, grace_ms, out, archive, source.verify, failing)
    with source.bar() as bar:
        summary = run(spark, wanted, bar)
    _tell(summary, summary.table, source, ("hour", "topic", "verdict", "count"))
    said = ", ".join(f"{count:,} {name}" for name, count in summary.verdicts.items() if count)
    note(f"{summary.messages:,} messages of {summary.hours:,} hours: {said or 'nothing to judge'}")
    return 1 if summary.failed else 0


def archive(
    *, out: str, audit: bool = False, level: int = 3, new_catalogue: bool = False, source: Source = Source()
) -> int:  # fmt: skip
    """Write closed hours to Parquet, with a manifest each, and a catalogue of all. Run again, it writes what is new.

    Parameters
    ----------
    out
        Directory that all workers see, or a URI such as s3://bucket/archive.
    audit
        Write nothing: read every archived hour again, and end with 1 if one is damaged or missing. Needs no cluster.
    level
        Of zstd.
    new_catalogue
        Make the catalogue of the hours that are there, when it was lost.
    """
    if audit:
        return _audit(out, source)
    options, spark = source.options(), source.spark()
    from hadelay.pipeline.archive import ArchiveOptions, run

    with source.bar() as bar:
        summary = run(spark, ArchiveOptions(options, out, level, new_catalogue), bar)
    _tell(summary, summary.hours, source, ("hour", "status", "messages", "events", "bytes", "detail"))
    note(f"{summary.archived:,} of {len(summary.hours):,} hours that are over are archived")
    if summary.busy:
        note(f"another run writes {summary.busy:,} of them: run it again when that one has ended")
    return 1 if summary.busy else 0


def _audit(out: str, source: Source) -> int:
    spark = source.spark()
    from hadelay.pipeline.audit import AuditOptions, run

    with source.bar() as bar:
        summary = run(spark, AuditOptions(out, source.hour_from, source.hour_to), bar)
    wrong = [told for told in summary.hours if told["status"] != "ok"]
    _tell(summary, wrong, source, ("hour", "status", "version", "messages", "events", "detail"))
    counted = f"{summary.messages:,} messages, {summary.events:,} events"
    note(f"{len(summary.hours) - len(wrong):,} of {len(summary.hours):,} archived hours are ok: {counted}")
    if summary.problem:
        note(summary.problem)
    return 1 if summary.failed else 0


def tail(
    *, out: str, kind: Literal["messages", "events", "dispatches", "settlements"] = "messages", columns: str = "",
    body: bool = False, topics: str = "", checkpoint: str = "", every: float = 0.0, max_rows: int = 0,
    source: Source = Source(),
) -> int:  # fmt: skip
    """Write what is filed to Parquet, as it is: each row once, also when it is ended and run again.

    Parameters
    ----------
    out
        Directory that all workers see, or a URI of a file system that this Spark has (s3a://, hdfs://).
    kind
        messages: an entry for each time one is filed; state is as it was then. events: what happens to them.
    columns
        Only these, separated by commas; hour among them.
    body
        Bodies too.
    topics
        Only these, separated by commas.
    checkpoint
        Where it remembers how far it is: OUT/_checkpoint without it.
    every
        Seconds between looks; goes on until it is ended (Ctrl-C). 0: read what is there, and end.
    max_rows
        At once, about; 0: all.
    """
    chosen = replace(
        source.options(), kind=kind, columns=columns, body=body, topics=topics, max_rows_per_trigger=max_rows,
        verify=source.verify,
    )  # fmt: skip
    from hadelay.pipeline.tail import Summary, TailOptions, run

    options, told = TailOptions(chosen, out, checkpoint, every), Summary()

    def progress(summary: Summary) -> None:
        told.batches, told.rows = summary.batches, summary.rows
        if every:
            note(f"{summary.rows:,} rows")

    with contextlib.suppress(KeyboardInterrupt):
        run(source.spark(), options, progress)
    if source.output == "json":
        emit_json(asdict(told))
    note(f"{told.rows:,} rows in {told.batches:,} micro-batches")
    return 0


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Counting(Source):
    """Options of lateness, load and forecast."""

    topics: str = ""
    "Only these, separated by commas."
    out: str = ""
    "Directory for summary.json and report.html, a page with plots that needs nothing else."

    def options(self) -> Any:
        return replace(super().options(), topics=self.topics)


def lateness(*, archive: str = "", source: Counting = Counting()) -> int:
    """How late messages were handed out: p50, p90, p99, p99.9 and the worst, per hour and topic.

    Parameters
    ----------
    archive
        Directory that `archive` wrote: hours that are deleted are read from there.
    """
    options, spark = source.options(), source.spark()
    from hadelay.pipeline.lateness import run
    from hadelay.pipeline.timing import JobOptions

    summary = run(spark, JobOptions(options, source.out, archive, source.verify))
    _report(summary, source, ("hour", "topic", "count", "p50_ms", "p90_ms", "p99_ms", "p999_ms", "max_ms"))
    waits = f"; {summary.overdue:,} are overdue and were not" if summary.overdue else ""
    note(f"{summary.handed_out:,} messages were handed out{waits}")
    return 0


def load(*, archive: str = "", source: Counting = Counting()) -> int:
    """How much fell due, was handed out and acked: per hour and topic, with the busiest second.

    Parameters
    ----------
    archive
        Directory that `archive` wrote: hours that are deleted are read from there.
    """
    options, spark = source.options(), source.spark()
    from hadelay.pipeline.load import run
    from hadelay.pipeline.timing import JobOptions

    summary = run(spark, JobOptions(options, source.out, archive, source.verify))
    _report(summary, source, ("hour", "topic", "due", "handed_out", "acked", "peak_due", "peak_due_at"))
    note(f"{summary.due:,} messages fell due, {summary.handed_out:,} were handed out, {summary.acked:,} acked")
    return 0


def forecast(*, threshold: int = 5_000, hours: int = 24, fail: bool = False, source: Counting = Counting()) -> int:
    """Seconds to come in which more falls due than can be taken, and what would help.

    Parameters
    ----------
    threshold
        Messages per second that consumers, or the cluster, can take.
    hours
        How far to look ahead.
    fail
        End with 1 when there are such seconds.
    """
    options, spark = source.options(), source.spark()
    from hadelay.pipeline.forecast import ForecastOptions, run

    summary = run(spark, ForecastOptions(options, source.out, check=source.verify, threshold=threshold, hours=hours))
    _report(summary, source, ("hour", "messages", "peak", "peak_at", "hot_seconds"))
    for line in summary.advice:
        note(line)
    return 1 if fail and summary.hot_seconds else 0


def _report(summary: Any, source: Counting, columns: tuple[str, ...]) -> None:
    _tell(summary, summary.table, source, columns)
    if source.out:
        note(f"report: {source.out}/report.html")


def _tell(summary: Any, rows: list[dict[str, Any]], printing: Printing, columns: tuple[str, ...]) -> None:
    """All of it as JSON, or these rows of it. Hours are names, not amounts."""
    if printing.output == "json":
        emit_json(asdict(summary))
    else:
        table([{**row, "hour": str(row.get("hour"))} for row in rows], columns)


def schedule(
    file: str, /, *, key: str, topic: str = "", columns: str = "", rejected: str = "", prefix: str = "",
    format: Literal["", "csv", "parquet"] = "", timeout: int = 300, running: Running = Running(),
) -> int:  # fmt: skip
    """Publish the rows of a table, each once, also when it is run again within the hour.

    Ends with 1 if one is rejected.

    Parameters
    ----------
    file
        CSV with a header, or Parquet; a file or a directory. Columns named as a message's are taken: topic, body,
        deliver_at or delay, key, tags, ttl, meta … By a URI, too: s3:// with --master none, else one that Spark has.
    key
        Column that identifies a row: the same value again is the same message.
    topic
        For a table without that column.
    columns
        Where names differ: deliver_at=due,body=payload.
    rejected
        Directory for rows that are rejected, with the reason: FILE.rejected here, without it.
    prefix
        Put before each key: what tells this job's keys from another's. Its topic, or the file's name, without it.
    format
        If the file's name does not say it.
    timeout
        Seconds for which what may succeed later is tried again.
    """
    spark = running.spark()
    from hadelay.pipeline.schedule import ScheduleOptions, count, run
    from hadelay.pipeline.schema import WriteOptions

    prefix = prefix or f"{topic or Path(file).name}:"
    write = WriteOptions(
        running.endpoint,
        running.token,
        topic,
        key,
        prefix,
        rejected or f"{Path(file).name}.rejected",
        timeout=timeout,
    )
    options = ScheduleOptions(write, file, format, columns)
    total = count(options) if spark is None else 0  # Spark has a bar of its own
    with progress(total, hidden=total == 0) as update:
        done = run(spark, options, lambda published: update(completed=published.rows))
    _tell(done, [asdict(done)], running, ("rows", "published", "duplicates", "rejected"))
    for reason, number in list(done.reasons.items())[:5]:
        note(f"{number:,} rejected: {reason}")
    if done.aside:
        note(f"rejected rows: {', '.join(done.aside[:3])}")
    return 1 if done.rejected else 0


def replay(
    topic: Topic, /, *, reason: str = "", died_from: str = "", died_to: str = "", tags: str = "", limit: int = 0,
    rate: float = 0.0, dry_run: bool = False, remote: Remote = Remote(),
) -> int:  # fmt: skip
    """Make dead letters due again that fit: of an outage, say, by reason and time of death. Needs no Spark.

    Parameters
    ----------
    reason
        Regular expression, found in the reason of the last failure; of a lease that ran out that is lease_expired.
    died_from
        RFC 3339: died then or later.
    died_to
        Died before.
    tags
        Have all of these, separated by commas.
    limit
        At most so many; 0: all that fit.
    rate
        Per second; 0: as fast as it goes.
    dry_run
        Only count them.
    """
    from hadelay.pipeline.replay import ReplayOptions, run

    options = ReplayOptions(
        ",".join(remote.addresses()), topic, "", reason, died_from, died_to, tags, limit, rate, dry_run
    )
    summary = run(None, options)
    show(asdict(summary), remote)
    return 0 if dry_run or summary.outcomes.get("redriven", 0) == summary.fit else 1


def doctor(*, printing: Printing = Printing()) -> int:
    """Java, versions, a job of one row; and what to do about what is missing. Ends with 1 when something is."""
    from hadelay.pipeline.session import doctor as examine

    checks = examine()
    show(checks, printing, ("check", "ok", "detail"))
    return 0 if all(check["ok"] for check in checks) else 1


def pack(file: str, /, *, printing: Printing = Printing()) -> int:
    """Write what executors need to FILE, for `spark-submit --archives`. Needs no Spark, and asks nobody.

    Parameters
    ----------
    file
        A .zip.
    """
    from hadelay.pipeline.pack import pack as write

    done = write(file)
    show(asdict(done), printing)
    return 0
