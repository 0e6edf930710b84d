"""Hours that the cluster has deleted, read from their archive, beside those that it still has.

Rows are made from Parquet as they were in .idx and .dsp, as far as jobs need them: what an entry is (first id, topic,
deliver_at) and what happened to it (event, when, where it went). For bodies and metas the Parquet files are the better
source. A live hour is read from the store, whether it is archived or not: the archive is of hours that nothing is
appended to, so both say the same.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hadelay.codec.checksums import crc32c
from hadelay.codec.formats import DISPATCH, INDEX, NO_REASON, REASON_BITS
from hadelay.codec.linking import DISPATCH_CRC, INDEX_CRC
from hadelay.errors import DamagedFile, NotFound
from hadelay.model import NONE32, Event, hour_name
from hadelay.pipeline.hourfiles import Bytes, HourFiles, Listing, Names, Rows, Store
from hadelay.pipeline.schema import Options, hour_number
from hadelay.pipeline.stores import open_store
from hadelay.storage import manifests
from hadelay.storage.locations import Location, absolute
from hadelay.storage.manifests import Catalogue, Manifest, Part

#: What to say of an archive whose catalogue is missing.
LOST = (
    "the archive's catalogue is missing, so nobody knows which hours it should have: restore it, or make one of the "
    "hours that are there with `hadelay pipeline archive --new-catalogue`"
)
_CHUNK = 8 << 20
#: Limit of manifests that are read at the same time.
_READERS = 8
_DTYPE = {"idx": INDEX, "dsp": DISPATCH}
KIND = {"idx": "messages", "dsp": "events"}
_COLUMNS = {
    "idx": ["entry", "first_id", "topic", "deliver_at"],
    # Archives of versions before feature level 3 have no handout_delay_ms.
    "dsp": ["entry", "event", "at", "other_hour", "other_dead", "other_entry", "handout_delay_ms"],
}
_EVENTS = {event.name.lower(): int(event) for event in Event}


def open_hours(options: Options, archive: str) -> Store:
    """The store that the options name, with the hours of `archive` (a directory, if any) that it no longer has."""
    store = open_store(options)
    if not archive:
        return store
    topics: dict[str | None, int] = {name: number for number, name in enumerate(store.names().topics)}
    return WithArchive(store, absolute(archive), options.verify, options.on_torn == "skip", topics)


def file_crc(file: Any) -> int:
    crc = 0
    while data := file.read(_CHUNK):
        crc = crc32c(data, crc)
    return crc


def is_whole(archive: Location, part: Part) -> bool:
    """The file is there, has as many rows as it should, and the bytes it was written with. OSError from the store."""
    try:
        with archive.open(part["path"]) as file:
            whole = f"{file_crc(file):08x}" == part["crc32c"] and file.tell() == part["bytes"]
            return whole and bool(pq.read_metadata(file).num_rows == part["rows"])
    except (OSError, pa.ArrowInvalid):
        archive.size(part["path"])  # OSError when it is the store that does not answer
        return False


def read_manifest(archive: Location, hour: int, catalogue: Catalogue | None = None) -> Manifest:
    """NotFound when there is none that can be read, DamagedFile when the catalogue names another."""
    name = manifests.manifest_name(hour)
    try:
        data = archive.load(name)
        found = manifests.decode_manifest(data)
    except (FileNotFoundError, ValueError) as error:
        why = "" if isinstance(error, FileNotFoundError) else f" ({error})"
        where = archive.path(name)
        raise NotFound(f"{where}: no manifest that can be read{why}, so this hour is not archived") from None
    if catalogue is not None and hour in catalogue.hours and not catalogue.lists(hour, data):
        raise DamagedFile(archive.path(name), 0, f"hour {hour_name(hour)}: the catalogue names another manifest")
    return found


def parts(archive: str, hour: int, kind: str) -> list[Part]:
    """What the manifest says of the hour's files of that kind, in the order of their rows."""
    return manifests.of_kind(read_manifest(Location(archive), hour), kind)


@dataclass(frozen=True)
class WithArchive:
    """A Store."""

    store: Store
    archive: str
    #: Compare each file with its manifest before it is used.
    verify: bool
    #: Leave out hours that the catalogue names and that have no manifest.
    skip_torn: bool
    #: Numbers of the store's topics: they are never taken back, so it has those of every archived hour.
    topics: dict[str | None, int]

    @property
    def max_gap(self) -> int:
        return self.store.max_gap

    def list(self) -> Listing:
        found = self.store.list()
        live = {files.hour for files in found.hours}
        location = Location(self.archive)
        hours, catalogue = manifests.manifest_hours(location) - live, manifests.load_catalogue(location)
        if not self.skip_torn and (lost := sorted(catalogue.hours.keys() - hours - live)):
            shown = ", ".join(map(hour_name, lost[:5])) + (", …" if len(lost) > 5 else "")
            raise NotFound(
                f"{location.path('_manifest')}: the catalogue names {len(lost)} hours without a manifest: {shown}. "
                "Restore them; `hadelay pipeline archive --audit` says what is left; onTorn=skip leaves these hours out"
            )
        with ThreadPoolExecutor(_READERS) as pool:
            found_there = pool.map(lambda hour: self._files(location, hour, catalogue), sorted(hours))
            return found._replace(hours=sorted([*found.hours, *found_there]))

    def _files(self, location: Location, hour: int, catalogue: Catalogue) -> HourFiles:
        manifest = read_manifest(location, hour, catalogue)
        if manifest["version"] > 1 and not catalogue.names:
            raise NotFound(f"{location.path('_catalogue')}: {LOST}")
        entries, events = manifests.rows(manifest, "messages"), manifests.rows(manifest, "events")
        return HourFiles(hour, entries, events, 0, archived=True)

    def names(self) -> Names:
        return self.store.names()

    def where(self, files: HourFiles, suffix: str) -> str:
        if not files.archived:
            return self.store.where(files, suffix)
        return Location(self.archive).path(f"{KIND[suffix]}/hour={hour_name(files.hour)}")

    def read(self, files: HourFiles, suffix: str, start: int, stop: int) -> Bytes:
        if not files.archived:
            return self.store.read(files, suffix, start, stop)
        size = _DTYPE[suffix].itemsize
        return self._rows(files, suffix, start // size, stop // size).view(np.uint8)

    def _rows(self, files: HourFiles, suffix: str, start: int, stop: int) -> Rows:
        found, at = np.zeros(stop - start, _DTYPE[suffix]), 0
        for part in parts(self.archive, files.hour, KIND[suffix]):
            first, last = max(start - at, 0), min(stop - at, part["rows"])
            if first < last:
                location = Location(self.archive)
                path = location.path(part["path"])
                if self.verify and not is_whole(location, part):
                    raise DamagedFile(path, 0, f"hour {hour_name(files.hour)}: it is not as its manifest says")
                try:
                    with location.open(part["path"]) as file:
                        parquet = pq.ParquetFile(file)
                        columns = [name for name in _COLUMNS[suffix] if name in parquet.schema_arrow.names]
                        table = parquet.read(columns=columns).slice(first, last - first)
                except (OSError, pa.ArrowInvalid) as error:
                    location.size(part["path"])
                    raise DamagedFile(path, 0, f"hour {hour_name(files.hour)}: {error}") from None
                into = found[at + first - start : at + last - start]
                (self._index if suffix == "idx" else _dispatch)(table, into)
            at += part["rows"]
        if self.verify:
            (INDEX_CRC if suffix == "idx" else DISPATCH_CRC).seal(found)
        return found

    def _index(self, table: Any, rows: Rows) -> None:
        rows["index"], rows["first_id"] = _numbers(table, "entry"), _numbers(table, "first_id")
        rows["deliver_at_ms"] = _numbers(table, "deliver_at") // 1000
        rows["topic"] = _coded(table, "topic", self.topics)
        rows["size"] = 1  # 0 would be the end of a file


def _dispatch(table: Any, rows: Rows) -> None:
    rows["index"], rows["at_ms"] = _numbers(table, "entry"), _numbers(table, "at") // 1000
    rows["event"] = _coded(table, "event", _EVENTS)
    rows["other_hour"] = rows["previous"] = NONE32
    moved = table["other_entry"].is_valid().to_numpy()
    rows["consumer"] = _numbers(table, "other_entry")
    shown = _numbers(table, "other_hour") * 2 + _numbers(table, "other_dead")
    values, inverse = np.unique(shown[moved], return_inverse=True)
    hours = np.array([hour_number(value // 2, bool(value % 2)) for value in values.tolist()], np.uint32)
    rows["other_hour"][moved] = hours[inverse] if len(hours) else 0
    if "handout_delay_ms" in table.column_names:
        known = table["handout_delay_ms"].is_valid().to_numpy()
        delays = _numbers(table, "handout_delay_ms")
        nacked = rows["event"] == Event.NACKED
        rows["other_hour"][known & ~nacked] = delays[known & ~nacked]
        # Reasons are not read from archives.
        rows["other_hour"][known & nacked] = (delays[known & nacked] + 1) << REASON_BITS | NO_REASON


def _numbers(table: Any, name: str) -> npt.NDArray[np.int64]:
    """0 where there is none."""
    column = table[name].combine_chunks()
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("us", "UTC")).view(pa.int64())
    column = column.cast(pa.int64())
    return np.asarray((pc.fill_null(column, 0) if column.null_count else column).to_numpy(zero_copy_only=False))


def _coded(table: Any, name: str, numbers: dict[Any, int]) -> npt.NDArray[np.uint32]:
    """The number of each name; NONE32 where it has none."""
    encoded = table[name].combine_chunks().dictionary_encode()
    known = np.array([numbers.get(value, NONE32) for value in encoded.dictionary.to_pylist()] + [NONE32], np.uint32)
    return np.asarray(known[pc.fill_null(encoded.indices, len(known) - 1).to_numpy(zero_copy_only=False)])
