"""Closed hours to Parquet, with a manifest per hour that is written last, and a catalogue of all hours: what they name
is whole, and was read back (docs/spec/archive.md).

An hour is closed when it is over and everything in it is settled: nothing is appended to it then. Names follow from the
hour alone, files appear by rename, so that a task that runs twice, or a job that is run again, changes nothing.
"""

from __future__ import annotations

import re
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
from hadelay.errors import DamagedFile, NotFound
from hadelay.model import DEAD_HOURS, HOUR_MS, hour_name
from hadelay.pipeline import batches
from hadelay.pipeline.archived import LOST, is_whole
from hadelay.pipeline.arrow import Split
from hadelay.pipeline.check import check, check_references, crc_of, log_bytes
from hadelay.pipeline.hourfiles import WAY_OUT, HourFiles, Listing, Store
from hadelay.pipeline.jobs import ArchiveOptions, JobSummary
from hadelay.pipeline.lease import Busy, Lease, lease
from hadelay.pipeline.schema import KINDS, Options, hour_number
from hadelay.pipeline.session import plain
from hadelay.pipeline.stores import listing, open_store
from hadelay.pipeline.tasks import Progress, each, silent
from hadelay.storage import manifests
from hadelay.storage.locations import Location, absolute
from hadelay.storage.manifests import Listed, Manifest, Part, Source

#: Limit of large hours that are archived at the same time.
_HOURS_AT_ONCE = 8
_AGAIN = "run it again when that is mended, it does what is left"
#: A DamagedFile in words: path, offset, what.
_DAMAGE = re.compile(r"(.*?), offset (\d+): (.*)", re.S)
#: A row group is written when it has so many rows or bytes.
_GROUP_ROWS, _GROUP_BYTES = 1 << 18, 128 << 20
#: Columns of these are written as dictionaries, columns of _NUMBERS as differences, all others as they are: less work
#: than a dictionary of everything, and a smaller file.
_FEW_VALUES = [*sorted(batches.CODED), "tags.list.element", "meta.key_value.key", "meta.key_value.value"]
_NUMBERS = ("INT", "BIGINT", "TIMESTAMP")


def run(spark: Any, options: ArchiveOptions, progress: Progress = silent) -> JobSummary:
    """DamagedFile, at the end, when hours cannot be archived: all other hours are then."""
    options = replace(options, out=absolute(options.out))
    store = open_store(options.source)
    found = listing(store, options.source)
    asked = [files for files in found.hours if files.hour < DEAD_HOURS and options.source.takes(files.hour)]
    over = [files for files in asked if (files.hour + 1) * HOUR_MS <= found.as_of_ms]
    out = Location(options.out)
    out.make("_manifest")  # without any in it, it is still an archive
    out.make("_catalogue")
    _catalogue(out, set(), options.new_catalogue)
    # A task is an hour; of a large one it is a part, or it would be alone with its core.
    large = [spark is not None and max(f.entries, f.events) > options.source.split_rows for f in over]
    small = [files for files, is_large in zip(over, large, strict=True) if not is_large]
    work = partial(archive_hour, store, options, uuid.uuid4().hex[:8])
    hours = each(spark, work, small, progress)
    # The parts of several at once: while one waits for its last part, or its manifest, another has the executors.
    with ThreadPoolExecutor(_HOURS_AT_ONCE) as pool:
        wide = [files for files, is_large in zip(over, large, strict=True) if is_large]
        hours += pool.map(partial(work, spark=spark), wide)
    hours.sort(key=lambda hour: hour["hour"])
    done = {hour_number(hour["hour"]) for hour in hours if hour["status"] in ("archived", "unchanged")}
    _catalogue(out, done, anew=False)
    if damaged := [hour["detail"] for hour in hours if hour["status"] == "damaged"]:
        path, offset, what = _DAMAGE.fullmatch(damaged[0]).groups()  # type: ignore[union-attr]
        others = f"; {len(damaged) - 1} more hours are damaged" if len(damaged) > 1 else ""
        raise DamagedFile(path, int(offset), f"{what}; this hour is not archived{others}")
    said = [f"{len(done):,} of {len(hours):,} hours that are over are archived"]
    if busy := sum(hour["status"] == "busy" for hour in hours):
        said.append(f"another run writes {busy:,} of them: run it again when that one has ended")
    summary = JobSummary("archive", as_of_ms=found.as_of_ms, hours=hours)
    return summary.show(hours, "hour status messages events bytes detail", *said, failed=busy > 0)


def _catalogue(out: Location, done: set[int], anew: bool) -> None:
    """Write a catalogue with the hours that were done, and those whose manifest is in none: of a run that was
    interrupted, or of a version without catalogues. anew: also where the catalogue is missing."""
    there, known = manifests.manifest_hours(out), manifests.load_catalogue(out)
    added: dict[int, Listed] = {}
    for hour in sorted(done | (there - known.hours.keys())):
        data = out.load(manifests.manifest_name(hour))
        if known.lists(hour, data):
            continue
        try:
            added[hour] = known.row(data)
            proven = manifests.decode_manifest(data)["version"] > 1
        except ValueError:
            continue  # it proves nothing: the audit names it
        if proven and not known.names and not anew:
            raise NotFound(f"{out.path('_catalogue')}: {LOST}")
    if not added and len(known.names) == 1:
        return
    name, data = known.encode(added)
    try:
        out.write(name, data)
        for merged in known.names:
            with suppress(FileNotFoundError):  # another run has merged it, too
                out.remove(merged)
    except OSError as error:
        said = f"the archive's catalogue was not written, and nothing was deleted: {error}; {_AGAIN}"
        raise type(error)(said) from error


def archive_hour(
    store: Store, options: ArchiveOptions, run: str, files: HourFiles, spark: Any = None
) -> dict[str, Any]:  # fmt: skip
    """One hour, its parts as Spark tasks or here; what was done. run: names the run in its leases. Bytes that are not
    those that were written once make it `damaged`. OSError from the disk or store: no manifest then, or the one that
    was there."""
    hour = {"hour": int(hour_name(files.hour)), "messages": files.entries, "events": files.events, "bytes": 0}
    try:
        return hour | _archive_hour(store, options, run, files, spark)
    except Busy as busy:
        return hour | {"status": "busy", "detail": str(busy)}
    except Exception as raised:
        error = plain(raised)
        if isinstance(error, DamagedFile):
            return hour | {"status": "damaged", "detail": str(error).replace(WAY_OUT, "copy it from another node")}
        if not isinstance(error, OSError):
            raise
        raise type(error)(
            f"hour {hour_name(files.hour)} was not archived, and nothing was deleted: {error}; {_AGAIN}"
        ) from raised


def _archive_hour(store: Store, options: ArchiveOptions, run: str, files: HourFiles, spark: Any) -> dict[str, Any]:
    out, known = Location(options.out), _known(Location(options.out), files.hour)
    if files.crcs is not None and _is_archived(out, known, Source(*files[1:5])):
        return _unchanged(known)
    source = _checked(store, options.source, files, spark)
    if isinstance(source, int):
        return {"status": "open", "detail": f"{source} entries are not settled"}
    files = files._replace(log_bytes=source.log_bytes)
    with lease(out, files.hour, run) as held:
        known = _known(out, files.hour)  # another run may have written it meanwhile
        if _is_archived(out, known, source):
            return _unchanged(known)
        return _write_hour(store, options, files, source, spark, held)


def _write_hour(
    store: Store, options: ArchiveOptions, files: HourFiles, source: Source, spark: Any, held: Lease
) -> dict[str, Any]:  # fmt: skip
    out, kinds = Location(options.out), ("messages", "events")
    splits = [(kind, split) for kind in kinds for split in _splits(kind, files, options.source)]
    for kind in kinds:
        out.make(f"{kind}/hour={hour_name(files.hour)}")
    parts = each(spark, partial(_write, store, options), splits)
    held.check()
    out.write(manifests.manifest_name(files.hour), manifests.encode_manifest(files.hour, source, parts))
    ours = {part["path"] for part in parts}
    for directory in (f"{kind}/hour={hour_name(files.hour)}" for kind in kinds):
        for left in out.list(directory) or ():  # of another splitRows, or of a run that was ended
            if f"{directory}/{left}" not in ours and ".parquet" in left:
                out.remove(f"{directory}/{left}")
    return {"status": "archived", "bytes": sum(part["bytes"] for part in parts)}


def _known(out: Location, hour: int) -> Manifest | None:
    """The hour's manifest, if there is one that proves what it says."""
    try:
        found = manifests.decode_manifest(out.load(manifests.manifest_name(hour)))
    except (FileNotFoundError, ValueError):
        return None
    return found if found["version"] == manifests.VERSION else None


def _is_archived(out: Location, known: Manifest | None, source: Source) -> bool:
    return known is not None and manifests.source_of(known) == source and all(is_whole(out, p) for p in known["files"])


def _unchanged(known: Manifest | None) -> dict[str, Any]:
    assert known is not None
    return {"status": "unchanged", "bytes": sum(part["bytes"] for part in known["files"])}


def _not_settled(store: Store, options: Options, files: HourFiles) -> int:
    """How many entries."""
    whole = replace(options, kind="messages", columns="state", body=False, topics="")
    states = batches.read(store, whole, ["state"], Split(files, 0, files.entries, 0))
    waiting = pa.array(("scheduled", "ready", "leased"))
    return sum(pc.sum(pc.is_in(part.column("state"), waiting)).as_py() for part in states)


def _checked(store: Store, options: Options, files: HourFiles, spark: Any) -> Source | int:
    """The source, when its files are as they were written and say all that an archive needs; or how many entries are
    not settled. DamagedFile."""
    strict = replace(options, on_torn="fail")
    # Rows first: what state an entry is in can be said of rows that are right.
    check(spark, store, [files], strict, ("idx", "dsp"))
    each(spark, partial(check_references, store, files, store.names()), ("idx", "dsp"))
    (not_settled,) = each(spark, partial(_not_settled, store, options), [files])
    if not_settled:
        return int(not_settled)
    check(spark, store, [files], strict, ("log",))
    if files.crcs is not None:
        return Source(*files[1:5])
    files = files._replace(log_bytes=log_bytes(store, files))
    log, idx, dsp = each(spark, partial(crc_of, store, files), ("log", "idx", "dsp"))
    return Source(files.entries, files.events, files.log_bytes, (log, idx, dsp))


def _splits(kind: str, files: HourFiles, options: Options) -> list[Split]:
    return batches.splits(Listing([files], 0), replace(options, kind=kind, columns="", body=False))


def _write(store: Store, options: ArchiveOptions, what: tuple[str, Split]) -> Part:
    kind, split = what
    columns = [name for name in KINDS[kind] if name not in ("hour", "dead")]
    source = replace(options.source, kind=kind, columns="", topics="", verify=False, on_torn="fail")
    out, schema = Location(options.out), batches.schema(kind, columns, as_codes=True)
    encodings = {name: "DELTA_BINARY_PACKED" for name in columns if KINDS[kind][name].type in _NUMBERS}
    path = f"{kind}/hour={hour_name(split.files.hour)}/part-{split.start:010}-{split.stop:010}.parquet"
    waiting: list[pa.RecordBatch] = []
    with out.create(path) as file:
        sink = _Sink(file)
        with pq.ParquetWriter(
            sink, schema, compression="zstd", compression_level=options.level, store_schema=False,
            use_dictionary=_FEW_VALUES, column_encoding=encodings,
            write_statistics=[name for name in columns if name != "body"],
        ) as writer:  # fmt: skip
            for batch in batches.read(store, source, columns, split, as_codes=True):
                _has_names(store, split, batch)
                waiting.append(batch)
                if sum(b.num_rows for b in waiting) >= _GROUP_ROWS or sum(b.nbytes for b in waiting) >= _GROUP_BYTES:
                    writer.write_table(pa.Table.from_batches(waiting, schema).unify_dictionaries())
                    waiting.clear()
            if waiting:
                writer.write_table(pa.Table.from_batches(waiting, schema).unify_dictionaries())
    part: Part = {"path": path, "rows": split.stop - split.start, "bytes": sink.size, "crc32c": f"{sink.crc:08x}"}
    if not is_whole(out, part):
        raise OSError(f"{out.path(path)}: it does not read back as it was written")
    return part


def _has_names(store: Store, split: Split, batch: pa.RecordBatch) -> None:
    for name in ("topic", "event", "id"):
        if name in batch.schema.names and (missing := batch.column(name).null_count):
            raise DamagedFile(
                store.where(split.files, "idx"), 0,
                f"hour {hour_name(split.files.hour)}: {missing} rows lost their {name} after the check",
            )  # fmt: skip


class _Sink:
    """A file, and the CRC of what was written to it."""

    closed = False

    def __init__(self, file: Any) -> None:
        self.file, self.size, self.crc = file, 0, 0

    def write(self, data: Any) -> int:
        self.crc = crc32c(data, self.crc)
        self.size += len(data)
        self.file.write(data)
        return len(data)

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> None:
        self.closed = True

    def tell(self) -> int:
        return self.size
