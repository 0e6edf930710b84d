"""`hadelay pipeline …`: jobs on the hour files. They need `hadelay[spark]`, and say so. The options of most jobs are
declared once, in pipeline/jobs.py: `_command` makes a command of them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from cyclopts import Parameter

from hadelay.cli.output import Format, Option, Printing, Remote, Topic, emit_json, note, progress, show, table, takes
from hadelay.errors import ConfigError
from hadelay.pipeline import jobs
from hadelay.pipeline.schema import Options

__all__ = ["Format"]  # the fields of Printing are looked up here


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

    def options(self) -> Options:
        return Options(
            path=self.path, endpoint="" if self.path else self.endpoint, token=self.token,
            hour_from=self.hour_from, hour_to=self.hour_to, on_torn=self.on_torn, as_of=self.as_of,
            # Whole files are compared with their checksums by the job itself.
            verify=self.verify and self.on_torn == "skip",
        )  # fmt: skip


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Counting(Source):
    """Options of lateness, load and forecast."""

    topics: str = ""
    "Only these, separated by commas."

    def options(self) -> Options:
        return replace(super().options(), topics=self.topics)


def _takes(kind: Any) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """The command takes the fields of `kind` that have a help text, as keywords."""
    types = get_type_hints(kind)
    options = [
        Option(field.name, types[field.name], field.default, field.metadata["help"])
        for field in fields(kind)
        if "help" in field.metadata
    ]
    return takes(options, kind.__doc__ or "")


def _run(name: str, options: Any, source: Running) -> int:
    spark = source.spark()
    with source.bar() as bar:
        summary: jobs.JobSummary = import_module(f"hadelay.pipeline.{name}").run(spark, options, bar)
    return _tell(summary, source)


def _tell(summary: jobs.JobSummary, printing: Printing) -> int:
    """All of it as JSON, or its rows. Hours are names, not amounts."""
    if printing.output == "json":
        emit_json(dict(summary))
    elif summary.columns:
        table([{**row, "hour": str(row.get("hour"))} for row in summary.shown], summary.columns)
    for text in summary.notes:
        note(text)
    return int(summary.failed)


@_takes(jobs.ReconcileOptions)
def reconcile(*, source: Source = Source(), **given: Any) -> int:
    return _run("reconcile", jobs.ReconcileOptions(source.options(), check=source.verify, **given), source)


@_takes(jobs.ArchiveOptions)
def archive(*, audit: bool = False, source: Source = Source(), **given: Any) -> int:
    """Write closed hours to Parquet, with a manifest each, and a catalogue of all. Run again, it writes what is new.

    Parameters
    ----------
    audit
        Write nothing: read every archived hour again, and end with 1 if one is damaged or missing. Needs no cluster.
    """
    if audit:
        return _run("audit", jobs.AuditOptions(given["out"], source.hour_from, source.hour_to), source)
    return _run("archive", jobs.ArchiveOptions(source.options(), **given), source)


@_takes(jobs.JobOptions)
def lateness(*, source: Counting = Counting(), **given: Any) -> int:
    """How late messages were handed out: p50, p90, p99, p99.9 and the worst, per hour and topic."""
    return _run("lateness", jobs.JobOptions(source.options(), check=source.verify, **given), source)


@_takes(jobs.JobOptions)
def load(*, source: Counting = Counting(), **given: Any) -> int:
    """How much fell due, was handed out and acked: per hour and topic, with the busiest second."""
    return _run("load", jobs.JobOptions(source.options(), check=source.verify, **given), source)


@_takes(jobs.ForecastOptions)
def forecast(*, source: Counting = Counting(), **given: Any) -> int:
    return _run("forecast", jobs.ForecastOptions(source.options(), check=source.verify, **given), source)


@_takes(jobs.TailOptions)
def tail(
    *, kind: Literal["messages", "events", "dispatches", "settlements"] = "messages", columns: str = "",
    body: bool = False, topics: str = "", max_rows: int = 0, source: Source = Source(), **given: Any,
) -> int:  # fmt: skip
    """Write what is filed to Parquet, as it is: each row once, also when it is ended and run again.

    Parameters
    ----------
    kind
        messages: an entry for each time one is filed; state is as it was then. events: what happens to them.
    columns
        Only these, separated by commas; hour among them.
    body
        Bodies too.
    topics
        Only these, separated by commas.
    max_rows
        At once, about; 0: all.
    """
    chosen = replace(
        source.options(), kind=kind, columns=columns, body=body, topics=topics, max_rows_per_trigger=max_rows,
        verify=source.verify,
    )  # fmt: skip
    options = jobs.TailOptions(chosen, **given)
    spark = source.spark()
    from hadelay.pipeline.tail import run

    told = jobs.JobSummary("tail", batches=0, rows=0)

    def progress(summary: jobs.JobSummary) -> None:
        told.update(summary)
        if options.every:
            note(f"{summary.rows:,} rows")

    with contextlib.suppress(KeyboardInterrupt):
        run(spark, options, progress)
    told.notes.append(f"{told.rows:,} rows in {told.batches:,} micro-batches")
    return _tell(told, source)


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
    rejected = rejected or f"{Path(file).name}.rejected"
    write = WriteOptions(running.endpoint, running.token, topic, key, prefix, rejected, timeout=timeout)
    options = ScheduleOptions(write, file, format, columns)
    total = count(options) if spark is None else 0  # Spark has a bar of its own
    with progress(total, hidden=total == 0) as update:
        done = run(spark, options, lambda published: update(completed=published.rows))
    if running.output == "json":
        emit_json(asdict(done))
    else:
        table([asdict(done)], ("rows", "published", "duplicates", "rejected"))
    for reason, number in list(done.reasons.items())[:5]:
        note(f"{number:,} rejected: {reason}")
    if done.aside:
        note(f"rejected rows: {', '.join(done.aside[:3])}")
    return 1 if done.rejected else 0


@_takes(jobs.ReplayOptions)
def replay(topic: Topic, /, *, remote: Remote = Remote(), **given: Any) -> int:
    from hadelay.pipeline.replay import run

    summary = run(None, jobs.ReplayOptions(",".join(remote.addresses()), topic, remote.token, **given))
    show(dict(summary), remote)
    return int(summary.failed)


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
