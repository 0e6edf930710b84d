"""`hadelay pipeline …`: jobs on the hour files, which need `hadelay[spark]`. pipeline/jobs.py declares the options of
most jobs."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from cyclopts import Parameter

from hadelay.cli.output import Format, Printing, Remote, Topic, emit_json, note, option, progress, show, table, takes
from hadelay.errors import ConfigError
from hadelay.pipeline import jobs
from hadelay.pipeline.schema import Options

__all__ = ["Format"]  # keep Format imported: resolving the annotations inherited from Printing needs it


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Running(Printing):
    """Options of every pipeline job."""

    endpoint: Annotated[str, Parameter(env_var="HADELAY_SERVERS")] = ""
    "URLs of nodes, separated by commas."
    token: Annotated[str, Parameter(env_var="HADELAY_TOKEN")] = ""
    "Token for the nodes."
    master: str = "local[*]"
    "Spark master, as for spark-submit; none: run in this process, without Spark and Java."
    driver_memory: str = "2g"
    "Memory of a local Spark."

    def spark(self, **settings: str) -> Any:
        """Start the Spark session; None with --master none."""
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
        """Progress bar of a job in this process; yields bar(done, total). Hidden with Spark, which has its own bar."""
        with progress(None, hidden=self.master != "none" or self.output == "json") as update:
            yield lambda done, total: update(completed=done, total=total)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SourceOptions(Running):
    """Options of jobs that read hour files."""

    verify: Annotated[bool, Parameter(negative="--no-verify")] = True
    "Compare every file with its checksum before reading. Archiving always does."

    def options(self, given: dict[str, Any]) -> Options:
        """Remove the data source's options from `given` (the options of a command), and return them as Options."""
        read = {name: given.pop(name) for name in Options.__dataclass_fields__ if name in given}
        # Only with onTorn=skip must the data source check each row's checksum: without it, the job checks whole files.
        verify = self.verify and read.get("on_torn") == "skip"
        endpoint = "" if read.get("path") else self.endpoint
        return Options(endpoint=endpoint, token=self.token, verify=verify, **read)


#: Names of the Spark data source's options that every job has.
_READ = ("path", "hour_from", "hour_to", "on_torn", "as_of")


def _takes(kind: Any, *read: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Decorator: adds to a job's command the fields of `kind` with help texts, and the data source's options `read`."""
    types = get_type_hints(kind) | get_type_hints(Options)
    shown = [field for field in fields(kind) if "help" in field.metadata]
    shown += [Options.__dataclass_fields__[name] for name in read]
    options = [
        option(field.name, field.metadata.get("kind") or types[field.name], field.default, field.metadata["help"])
        for field in shown
    ]
    return takes(options, kind.__doc__ or "")


def _run(name: str, options: Any, source: Running) -> int:
    spark = source.spark()
    with source.bar() as bar:
        summary: jobs.JobSummary = import_module(f"hadelay.pipeline.{name}").run(spark, options, bar)
    return _tell(summary, source)


def _tell(summary: jobs.JobSummary, printing: Printing) -> int:
    """Print a job's summary as JSON, or as a table that shows hours as text, without thousands separators; returns the
    exit code."""
    if printing.output == "json":
        emit_json(dict(summary))
    elif summary.columns:
        table([{**row, "hour": str(row.get("hour"))} for row in summary.shown], summary.columns)
    for text in summary.notes:
        note(text)
    return int(summary.failed)


@_takes(jobs.ReconcileOptions, *_READ, "topics")
def reconcile(*, source: SourceOptions = SourceOptions(), **given: Any) -> int:
    return _run("reconcile", jobs.ReconcileOptions(source.options(given), check=source.verify, **given), source)


@_takes(jobs.ArchiveOptions, *_READ)
def archive(*, audit: bool = False, source: SourceOptions = SourceOptions(), **given: Any) -> int:
    """Write closed hours to Parquet, with a manifest per hour and a catalogue of all. Later runs add new hours.

    Args:
        audit: Instead, read all archived hours; exit code 1 if one is damaged or missing. Needs no cluster.
    """
    if audit:
        first, last = (given.get(name, 0) for name in ("hour_from", "hour_to"))
        return _run("audit", jobs.AuditOptions(given["out"], first, last), source)
    return _run("archive", jobs.ArchiveOptions(source.options(given), **given), source)


@_takes(jobs.JobOptions, *_READ, "topics")
def lateness(*, source: SourceOptions = SourceOptions(), **given: Any) -> int:
    """Report how late messages were handed out: p50, p90, p99, p99.9 and maximum, per hour and topic."""
    return _run("lateness", jobs.JobOptions(source.options(given), check=source.verify, **given), source)


@_takes(jobs.JobOptions, *_READ, "topics")
def load(*, source: SourceOptions = SourceOptions(), **given: Any) -> int:
    """Count the messages that fell due, were handed out and acked, per hour and topic, with the busiest second."""
    return _run("load", jobs.JobOptions(source.options(given), check=source.verify, **given), source)


@_takes(jobs.ForecastOptions, *_READ, "topics")
def forecast(*, source: SourceOptions = SourceOptions(), **given: Any) -> int:
    return _run("forecast", jobs.ForecastOptions(source.options(given), check=source.verify, **given), source)


@_takes(jobs.TailOptions, *_READ, "kind", "columns", "body", "topics")
def tail(*, max_rows: int = 0, source: SourceOptions = SourceOptions(), **given: Any) -> int:
    """Stream new entries or events to Parquet. Each row is written once, also across restarts.

    Args:
        max_rows: Approximate number of rows per micro-batch; 0: no limit.
    """
    read = replace(source.options(given), max_rows_per_trigger=max_rows, verify=source.verify)
    options = jobs.TailOptions(read, **given)
    spark = source.spark()
    from hadelay.pipeline.tail import run

    total = jobs.JobSummary("tail", batches=0, rows=0)

    def progress(summary: jobs.JobSummary) -> None:
        total.update(summary)
        if options.every:
            note(f"{summary.rows:,} rows")

    with contextlib.suppress(KeyboardInterrupt):
        run(spark, options, progress)
    total.notes.append(f"{total.rows:,} rows in {total.batches:,} micro-batches")
    return _tell(total, source)


def schedule(
    file: str,
    /,
    *,
    key: str,
    topic: str = "",
    columns: str = "",
    rejected: str = "",
    prefix: str = "",
    format: Literal["", "csv", "parquet"] = "",
    timeout: int = 300,
    running: Running = Running(),
) -> int:
    """Publish the rows of a table. Each row is published once, also if the command runs again within the hour.

    Columns are named like a message's fields: topic, body, deliver_at or delay, key, tags, ttl, meta …

    Exit code 1 if a row is rejected.

    Args:
        file: CSV with a header, or Parquet; a file, directory or URI: s3:// with --master none, else as Spark has it.
        key: Column that identifies a row: rows with the same value are the same message.
        topic: Topic of a table without that column.
        columns: Other names of columns: deliver_at=due,body=payload.
        rejected: Directory for rejected rows, with reasons. Default: FILE.rejected.
        prefix: Prefix of each key, to separate the keys of jobs. Default: the topic, or the file's name.
        format: Format of a file whose name does not tell it.
        timeout: Limit of retries after temporary errors, in seconds.
    """
    spark = running.spark()
    from hadelay.pipeline.schedule import ScheduleOptions, count, run
    from hadelay.pipeline.schema import WriteOptions

    prefix = prefix or f"{topic or Path(file).name}:"
    rejected = rejected or f"{Path(file).name}.rejected"
    write = WriteOptions(running.endpoint, running.token, topic, key, prefix, rejected, timeout=timeout)
    options = ScheduleOptions(write, file, format, columns)
    total = count(options) if spark is None else 0  # no bar with Spark, which shows a bar of its own
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
    """Check Java, versions, and a job of one row, with advice. Exit code 1 if a check fails."""
    from hadelay.pipeline.session import doctor as examine

    checks = examine()
    show(checks, printing, ("check", "ok", "detail"))
    return 0 if all(check["ok"] for check in checks) else 1


def pack(file: str, /, *, printing: Printing = Printing()) -> int:
    """Write the packages that executors need to FILE, for `spark-submit --archives`. Needs neither Spark nor a cluster.

    Args:
        file: Path of the .zip file.
    """
    from hadelay.pipeline.pack import pack as write

    done = write(file)
    show(asdict(done), printing)
    return 0
