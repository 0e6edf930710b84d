"""Archive the hours that are over as Parquet files, with a manifest per hour, written last, and a catalogue of all
hours (docs/spec/archive.md). Every file in a manifest was read back and verified.

An hour is closed when it is over and all its entries are settled: nothing is appended to it any more. File names depend
on the hour alone, and files appear by rename, so a repeated task or run changes nothing.
"""

import io
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hadelay.codec.checksums import crc32c
from hadelay.errors import Conflict, DamagedFile, NotFound
from hadelay.model import DEAD_HOURS, HOUR_MS, hour_name
from hadelay.pipeline import batches
from hadelay.pipeline.archived import LOST, difference
from hadelay.pipeline.arrow import Split
from hadelay.pipeline.check import check, check_references, crc_of, log_bytes
from hadelay.pipeline.hourfiles import WAY_OUT, HourFiles, Listing, Store
from hadelay.pipeline.jobs import ArchiveOptions, JobSummary
from hadelay.pipeline.lease import Busy, lease
from hadelay.pipeline.replacing import Run, not_extended, previous, refuse_foreign, set_aside, tidy
from hadelay.pipeline.schema import KINDS, Options, hour_number
from hadelay.pipeline.session import error_of, plain
from hadelay.pipeline.stores import listing, open_store, refuse_empty
from hadelay.pipeline.tasks import Progress, each, silent
from hadelay.storage import manifests
from hadelay.storage.locations import Location, absolute
from hadelay.storage.manifests import Listed, PartFile, SourceFiles

#: Limit of large hours that are archived at the same time.
_HOURS_AT_ONCE = 8
#: Minimum time, in ms, from the end of an hour to a warning that some of its messages are not settled.
OPEN_MS = 2 * HOUR_MS
_AGAIN = "fix the cause and run it again: it continues with the remaining hours"
#: Limits of a Parquet row group, in rows and in bytes.
_GROUP_ROWS, _GROUP_BYTES = 1 << 18, 128 << 20
#: Columns written with Parquet's dictionary encoding; those of the types in _NUMBERS are delta-encoded, others plain.
#: Dictionaries for all columns would take longer, and make larger files.
_MAPS = [f"{name}.key_value.{part}" for name in ("meta", "forward") for part in ("key", "value")]
_FEW_VALUES = [*sorted(batches.CODED), "tags.list.element", *_MAPS]
_NUMBERS = ("INT", "BIGINT", "TIMESTAMP")


def run(spark: Any, options: ArchiveOptions, progress: Progress = silent) -> JobSummary:
    """Archive the selected hours that are over. If some fail, DamagedFile is raised after all others are archived."""
    options = replace(options, out=absolute(options.out))
    store = open_store(options.source)
    found = listing(store, options.source)
    refuse_empty(options.source, found, store.names())
    asked = [files for files in found.hours if files.hour < DEAD_HOURS and options.source.takes(files.hour)]
    over = [files for files in asked if (files.hour + 1) * HOUR_MS <= found.as_of_ms]
    out = Location(options.out)
    run = Run(uuid.uuid4().hex[:8], found.cluster, options.force)
    if not run.force and out.list("_manifest") is not None:
        known = manifests.load_catalogue(out)
        refuse_foreign(out, known, run.cluster)
        if not known.clusters:
            _refuse_unlike(out, store, over)
    out.make("_manifest")  # create both directories of an archive, even if no hour is archived
    out.make("_catalogue")
    _catalogue(out, set(), run, options.new_catalogue)
    # Run one task per hour, but several tasks for a large hour: a single task would keep one core busy for long.
    large = [f for f in over if spark is not None and max(f.entries, f.events) > options.source.split_rows]
    work = partial(archive_hour, store, options, run)
    hours = each(spark, work, [files for files in over if files not in large], progress)
    # Archive several large hours at a time: while one hour waits for its last part or its manifest, others use the
    # executors.
    with ThreadPoolExecutor(_HOURS_AT_ONCE) as pool:
        hours += pool.map(partial(work, spark=spark), large)
    hours.sort(key=lambda hour: hour["hour"])
    done = {hour_number(hour["hour"]) for hour in hours if hour["status"] in ("archived", "unchanged")}
    _catalogue(out, done, run)
    if damaged := [hour["detail"] for hour in hours if hour["status"] == "damaged"]:
        others = f"; {len(damaged) - 1} more hours are damaged" if len(damaged) > 1 else ""
        raise error_of(DamagedFile, f"{damaged[0]}; this hour is not archived{others}")
    said = [f"{len(done):,} of {len(hours):,} hours that are over are archived"]
    if busy := sum(hour["status"] == "busy" for hour in hours):
        said.append(f"another run writes {busy:,} of them: run it again when that one has ended")
    if refused := sum(hour["status"] == "refused" for hour in hours):
        said.append(f"{refused:,} of them are refused, because the archive has more or something else: see the details")
    said += _still_open(hours, found.as_of_ms)
    summary = JobSummary("archive", as_of_ms=found.as_of_ms, hours=hours)
    return summary.show(hours, "hour status messages events bytes detail", *said, failed=busy + refused > 0)


def _still_open(hours: list[dict[str, Any]], as_of_ms: int) -> list[str]:
    """Warning of hours whose messages are not settled long after the hour's end; [] if there are none."""
    late = (as_of_ms - OPEN_MS) // HOUR_MS
    waiting = [hour for hour in hours if hour["status"] == "open" and hour_number(hour["hour"]) < late]
    if not waiting:
        return []
    return [
        f"{len(waiting):,} hours ended more than {OPEN_MS // HOUR_MS} hours ago and are still open; no open hour is "
        f"archived or deleted. The oldest is {waiting[0]['hour']}: {waiting[0]['detail']}. Let consumers take these "
        "messages, or cancel them; `hadelay pipeline reconcile --out DIR` lists them"
    ]


def _refuse_unlike(out: Location, store: Store, over: list[HourFiles]) -> None:
    """Raise Conflict if an archive that does not tell its cluster has an hour with rows that the source lacks: the
    archive may be of another cluster, and this run would record the source's cluster in it."""
    for files in over:
        source = SourceFiles(*files[1:5])
        if problem := not_extended(out, store, files, source, "") if files.crcs else "":
            what = f"{out.path('')} does not tell its cluster, and may be of another: hour {hour_name(files.hour)}"
            raise Conflict(f"{what}: {problem}")


def _catalogue(out: Location, done: set[int], run: Run, anew: bool = False) -> None:
    """Add hours to the archive's catalogue: the hours in `done`, and archived hours that the catalogue lacks after an
    interrupted run or an old version. anew: make a catalogue even if an archive with hours has none."""
    there, known = manifests.manifest_hours(out), manifests.load_catalogue(out)
    added: dict[int, Listed] = {}
    for hour in sorted(done | (there - known.hours.keys())):
        data = out.load(manifests.manifest_name(hour))
        if known.lists(hour, data):
            continue
        try:
            added[hour] = known.row(hour, data)
            proven = manifests.decode_manifest(data, hour)["version"] > 1
        except ValueError:
            continue  # skip an unreadable manifest: the audit reports it
        if proven and not known.names and not anew:
            raise NotFound(f"{out.path('_catalogue')}: {LOST}")
    if not added and len(known.names) == 1 and (not run.cluster or known.clusters == {run.cluster}):
        return
    name, data = known.encode(added, run.cluster)
    try:
        out.write(name, data)
        for merged in known.names:
            with suppress(FileNotFoundError):  # another run may have removed the file already
                out.remove(merged)
    except OSError as error:
        said = f"the archive's catalogue was not written, and nothing was deleted: {error}; {_AGAIN}"
        raise type(error)(said) from error


def archive_hour(
    store: Store, options: ArchiveOptions, run: Run, files: HourFiles, spark: Any = None
) -> dict[str, Any]:
    """Archive an hour in this process, or its parts as Spark tasks. Returns the hour's row of the summary, with status
    `damaged` if the hour's files are not as they were written, and `refused` if the archive has more rows of the hour
    than the source, or different ones. OSError from the disk or store; no manifest is written then."""
    hour = {"hour": int(hour_name(files.hour)), "messages": files.entries, "events": files.events, "bytes": 0}
    try:
        return hour | _archive_hour(store, options, run, files, spark)
    except Busy as busy:
        return hour | {"status": "busy", "detail": str(busy)}
    except Conflict as refused:
        return hour | {"status": "refused", "detail": str(refused)}
    except Exception as raised:
        error = plain(raised)
        if isinstance(error, DamagedFile):
            return hour | {"status": "damaged", "detail": str(error).replace(WAY_OUT, "copy it from another node")}
        if not isinstance(error, OSError):
            raise
        raise type(error)(
            f"hour {hour_name(files.hour)} was not archived, and nothing was deleted: {error}; {_AGAIN}"
        ) from raised


def _archive_hour(store: Store, options: ArchiveOptions, run: Run, files: HourFiles, spark: Any) -> dict[str, Any]:
    out = Location(options.out)
    if files.crcs is not None and (done := _unchanged(out, files.hour, SourceFiles(*files[1:5]))):
        return done
    source = _checked(store, options.source, files, spark)
    if isinstance(source, int):
        return {"status": "open", "detail": f"{source} entries are not settled"}
    with lease(out, files.hour, run.name) as claim:
        files = files._replace(log_bytes=source.log_bytes)
        # Another run may have archived the hour before this run got the lease.
        if done := _unchanged(out, files.hour, source):
            return done
        if not run.force and (problem := not_extended(out, store, files, source, run.cluster)):
            raise Conflict(problem)
        aside = set_aside(out, files.hour, run, source)
        parts = _write_hour(store, options, files, spark)
        claim.check()
        out.write(
            manifests.manifest_name(files.hour), manifests.encode_manifest(files.hour, source, parts, run.cluster)
        )
        detail = tidy(out, files.hour, parts, aside)
    return {"status": "archived", "bytes": sum(part["bytes"] for part in parts)} | (
        {"detail": detail} if detail else {}
    )


def _write_hour(store: Store, options: ArchiveOptions, files: HourFiles, spark: Any) -> list[PartFile]:
    out, splits = Location(options.out), list[tuple[str, Split]]()
    directories = {kind: f"{kind}/hour={hour_name(files.hour)}" for kind in ("messages", "events")}
    for kind, directory in directories.items():
        out.make(directory)
        given = replace(options.source, kind=kind, columns="", body=False)
        splits += [(kind, split) for split in batches.splits(Listing([files], 0), given)]
    return each(spark, partial(_write, store, options), splits)


def _unchanged(out: Location, hour: int, source: SourceFiles) -> dict[str, Any] | None:
    """Result for an hour that was archived before from the same source files, if all its Parquet files are intact; else
    None."""
    known = previous(out, hour)
    if known is None:
        return None
    if known["version"] != manifests.VERSION or manifests.source_of(known) != source:
        return None
    if any(difference(out, part) for part in known["files"]):
        return None
    return {"status": "unchanged", "bytes": sum(part["bytes"] for part in known["files"])}


def _checked(store: Store, options: Options, files: HourFiles, spark: Any) -> SourceFiles | int:
    """Check an hour before archiving; returns its source files, or the number of entries that are not settled, if there
    are any. Raises DamagedFile if files are not as they were written, or refer to a missing name or entry."""
    strict = replace(options, on_torn="fail")
    # Verify the rows first: the state of an entry can be read only from undamaged rows.
    check(spark, store, [files], strict, ("idx", "dsp"))
    each(spark, partial(check_references, store, files, store.names()), ("idx", "dsp"))
    (not_settled,) = each(spark, partial(_not_settled, store, options), [files])
    if not_settled:
        return not_settled
    check(spark, store, [files], strict, ("log",))
    if files.crcs is not None:
        return SourceFiles(*files[1:5])
    files = files._replace(log_bytes=log_bytes(store, files))
    log, idx, dsp = each(spark, partial(crc_of, store, files), ("log", "idx", "dsp"))
    return SourceFiles(files.entries, files.events, files.log_bytes, (log, idx, dsp))


def _not_settled(store: Store, options: Options, files: HourFiles) -> int:
    whole = replace(options, kind="messages", columns="state", body=False, topics="")
    states = batches.read(store, whole, ["state"], Split(files, 0, files.entries, 0))
    waiting = pa.array(("scheduled", "ready", "leased"))
    return sum(int(pc.sum(pc.is_in(part.column("state"), waiting)).as_py()) for part in states)


def _write(store: Store, options: ArchiveOptions, what: tuple[str, Split]) -> PartFile:
    """Write one Parquet file. what: (kind of rows, range of rows)."""
    kind, split = what
    columns = [name for name in KINDS[kind] if name not in ("hour", "dead")]
    source = replace(options.source, kind=kind, columns="", topics="", verify=False, on_torn="fail")
    out, schema = Location(options.out), batches.schema(kind, columns, as_codes=True)
    encodings = {name: "DELTA_BINARY_PACKED" for name in columns if KINDS[kind][name].type in _NUMBERS}
    path = f"{kind}/hour={hour_name(split.files.hour)}/part-{split.start:010}-{split.stop:010}.parquet"
    group: list[pa.RecordBatch] = []
    with out.create(path) as file:
        sink = _Sink(file)
        with pq.ParquetWriter(
            sink,
            schema,
            compression="zstd",
            compression_level=options.level,
            store_schema=False,
            use_dictionary=_FEW_VALUES,
            column_encoding=encodings,
            write_statistics=[name for name in columns if name != "body"],
        ) as writer:
            for batch in batches.read(store, source, columns, split, as_codes=True):
                _check_names(store, split, batch)
                group.append(batch)
                if sum(b.num_rows for b in group) >= _GROUP_ROWS or sum(b.nbytes for b in group) >= _GROUP_BYTES:
                    writer.write_table(pa.Table.from_batches(group, schema).unify_dictionaries())
                    group.clear()
            if group:
                writer.write_table(pa.Table.from_batches(group, schema).unify_dictionaries())
    part: PartFile = {"path": path, "rows": split.stop - split.start, "bytes": sink.size, "crc32c": f"{sink.crc:08x}"}
    if difference(out, part):
        raise OSError(f"{out.path(path)}: the file differs from what was just written to it")
    return part


def _check_names(store: Store, split: Split, batch: pa.RecordBatch) -> None:
    for name in ("topic", "event", "id"):
        if name in batch.schema.names and (missing := batch.column(name).null_count):
            what = f"hour {hour_name(split.files.hour)}: {missing} rows lost their {name} after the check"
            raise DamagedFile(store.where(split.files, "idx"), 0, what)


class _Sink(io.RawIOBase):
    """Writes to a file, and computes the size and CRC-32C of what was written."""

    def __init__(self, file: Any) -> None:
        self.file, self.size, self.crc = file, 0, 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.crc = crc32c(data, self.crc)
        self.size += len(data)
        self.file.write(data)
        return len(data)

    def tell(self) -> int:
        return self.size
