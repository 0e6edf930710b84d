"""Closed hours to Parquet, with a manifest per hour that is written last: what has one is whole, and was read back.

    OUT/messages/hour=2026112018/part-0000000000-0001000000.parquet     bodies and metas too
    OUT/events/hour=2026112018/part-….parquet
    OUT/_manifest/2026112018.json

An hour is closed when it is over and everything in it is settled: nothing is appended to it then. Names follow from the
hour alone, files appear by rename, so that a task that runs twice, or a job that is run again, changes nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hadelay.core.checksums import crc32c
from hadelay.errors import BadRequest, DamagedFile
from hadelay.model import DEAD_HOURS, HOUR_MS, hour_name
from hadelay.pipeline import batches
from hadelay.pipeline.archived import MANIFEST_VERSION, Part, is_whole, read_manifest
from hadelay.pipeline.places import Place, absolute
from hadelay.pipeline.reconcile import each
from hadelay.pipeline.schema import KINDS, Options
from hadelay.pipeline.stores import HourFiles, Listing, Store, listing, open_store

_CHUNK = 8 << 20
#: A row group is written when it has so many rows or bytes.
_GROUP_ROWS, _GROUP_BYTES = 1 << 18, 128 << 20
#: Columns of these are written as dictionaries, columns of _NUMBERS as differences, all others as they are: less work
#: than a dictionary of everything, and a smaller file.
_FEW_VALUES = [*sorted(batches.CODED), "tags.list.element", "meta.key_value.key", "meta.key_value.value"]
_NUMBERS = ("INT", "BIGINT", "TIMESTAMP")


@dataclass(frozen=True)
class ArchiveOptions:
    source: Options
    #: Directory that every task can write to, or a URI of pyarrow.fs.
    out: str
    #: zstd level.
    level: int = 3

    def __post_init__(self) -> None:
        if not self.out:
            raise BadRequest("archive: out has to say where to")


@dataclass
class Summary:
    as_of_ms: int
    #: Per hour: hour, status (archived, unchanged, open), detail, messages, events, bytes.
    hours: list[dict[str, Any]] = field(default_factory=list)

    @property
    def archived(self) -> int:
        return sum(hour["status"] != "open" for hour in self.hours)


def run(spark: Any, options: ArchiveOptions) -> Summary:
    """spark: a session, or None to do it in this process."""
    options = replace(options, out=absolute(options.out))
    store = open_store(options.source)
    found = listing(store, options.source)
    asked = [files for files in found.hours if files.hour < DEAD_HOURS and options.source.takes(files.hour)]
    over = [files for files in asked if (files.hour + 1) * HOUR_MS <= found.as_of_ms]
    Place(options.out).make("_manifest")  # without any in it, it is still an archive
    # A task is an hour; of a large one it is a part, or it would be alone with its core.
    large = [max(files.entries, files.events) > options.source.split_rows for files in over]
    small = [files for files, is_large in zip(over, large, strict=True) if not is_large]
    hours = each(spark, partial(archive_hour, store, options), small)
    hours += [archive_hour(store, options, f, spark) for f, is_large in zip(over, large, strict=True) if is_large]
    return Summary(found.as_of_ms, sorted(hours, key=lambda told: told["hour"]))


def archive_hour(store: Store, options: ArchiveOptions, files: HourFiles, spark: Any = None) -> dict[str, Any]:
    """One hour, its parts as Spark tasks or here; what was done. DamagedFile when its bytes are not those that were
    written once, OSError from the disk or store: no manifest then, or the one that was there."""
    try:
        return _archive_hour(store, options, files, spark)
    except OSError as error:
        raise type(error)(
            f"hour {hour_name(files.hour)} was not archived, and nothing was deleted: {error}; run it again when that "
            "is mended, it does what is left"
        ) from error


def _archive_hour(store: Store, options: ArchiveOptions, files: HourFiles, spark: Any) -> dict[str, Any]:
    name, out = hour_name(files.hour), Place(options.out)
    told = {"hour": int(name), "messages": files.entries, "events": files.events}
    manifest = f"_manifest/{name}.json"
    known = read_manifest(out, manifest)
    if known and known["source"] == _source(files) and all(is_whole(out, part) for part in known["files"]):
        return told | {"status": "unchanged", "bytes": sum(part["bytes"] for part in known["files"])}
    looks = ("state", "log", "dsp", "idx") if files.crcs else ("state",)
    not_settled, *crcs = each(spark, partial(_look, store, files, options.source), looks)
    if not_settled:
        return told | {"status": "open", "detail": f"{not_settled} entries are not settled", "bytes": 0}
    log, dsp, idx = crcs or (None, None, None)
    if files.crcs != (log, idx, dsp):
        _verify(store, files, options.source)
    kinds = ("messages", "events")
    splits = [(kind, split) for kind in kinds for split in _splits(kind, files, options.source)]
    for kind in kinds:
        out.make(f"{kind}/hour={name}")
    parts = each(spark, partial(_write, store, options), splits)
    ours = {part["path"] for part in parts}
    for directory in (f"{kind}/hour={name}" for kind in kinds):
        for left in out.list(directory) or ():  # of another splitRows, or of a run that was ended
            if f"{directory}/{left}" not in ours and ".parquet" in left:
                out.remove(f"{directory}/{left}")
    body = {"version": MANIFEST_VERSION, "hour": int(name), "source": _source(files), "files": parts}
    with out.create(manifest) as file:
        file.write(json.dumps(body, indent=1).encode())
    return told | {"status": "archived", "bytes": sum(part["bytes"] for part in parts)}


def _source(files: HourFiles) -> dict[str, Any]:
    crcs = [f"{crc:08x}" for crc in files.crcs] if files.crcs else None
    return {"entries": files.entries, "events": files.events, "log_bytes": files.log_bytes, "crc32c_log_idx_dsp": crcs}


def _look(store: Store, files: HourFiles, options: Options, what: str) -> int:
    """state: how many entries are not settled. Else the CRC-32C of that file."""
    if what == "state":
        whole = replace(options, kind="messages", columns="state", body=False, topics="")
        waiting = batches.Filter("state", "in", ("scheduled", "ready", "leased"))
        split = batches.Split(files, 0, files.entries, 0)
        return sum(part.num_rows for part in batches.read(store, whole, ["state"], split, [waiting]))
    crc, length = 0, files.length(what)
    for at in range(0, length, _CHUNK):
        crc = crc32c(np.ascontiguousarray(store.read(files, what, at, min(at + _CHUNK, length))).data, crc)
    return crc


def _verify(store: Store, files: HourFiles, options: Options) -> None:
    """Row by row and record by record, where the files' checksums are not known, or to name what is wrong with them."""
    for kind, column in (("messages", "body"), ("events", "event")):
        strict = replace(options, kind=kind, columns=column, topics="", verify=True, on_torn="fail")
        for split in _splits(kind, files, strict):
            for _ in batches.read(store, strict, [column], split):
                pass
    if files.crcs:
        raise DamagedFile(store.where(files, "log"), 0, f"hour {hour_name(files.hour)}: its checksum is another one")


def _splits(kind: str, files: HourFiles, options: Options) -> list[batches.Split]:
    return batches.splits(Listing([files], 0), replace(options, kind=kind, columns="", body=False))


def _write(store: Store, options: ArchiveOptions, what: tuple[str, batches.Split]) -> Part:
    kind, split = what
    columns = [name for name in KINDS[kind] if name not in ("hour", "dead")]
    source = replace(options.source, kind=kind, columns="", topics="", verify=False, on_torn="fail")
    out, schema = Place(options.out), batches.schema(kind, columns, as_codes=True)
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
