"""Read deleted hours from their archive, beside the hours that the cluster still has.

Rows of .idx and .dsp are rebuilt from Parquet, as far as jobs need them: first id, topic and deliver_at of an entry;
kind, time and target of an event. A live hour is read from the store even if it is archived: nothing is appended to an
archived hour, so both are the same.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hadelay.codec.checksums import crc32c
from hadelay.codec.formats import NO_REASON, REASON_BITS
from hadelay.errors import Conflict, DamagedFile, NotFound
from hadelay.model import NONE32, SEPARATOR, Event, hour_name
from hadelay.pipeline.hourfiles import ROW, Bytes, HourFiles, Listing, NameMap, Rows, Store
from hadelay.pipeline.schema import Options, hour_number
from hadelay.pipeline.stores import open_store
from hadelay.storage import manifests
from hadelay.storage.locations import Location, absolute
from hadelay.storage.manifests import Catalogue, HourManifest, PartFile

#: Error text for an archive without a catalogue.
LOST = (
    "the archive's catalogue is missing, so missing hours would go unnoticed: restore it, or make a new one from the "
    "existing hours with `hadelay pipeline archive --new-catalogue`"
)
_CHUNK = 8 << 20
#: Limit of manifests that are read at the same time.
_READERS = 8
KIND = {"idx": "messages", "dsp": "events"}
_COLUMNS = {
    # Archives of earlier versions lack subscription and handout_delay_ms.
    "idx": ["entry", "first_id", "topic", "subscription", "deliver_at"],
    "dsp": ["entry", "event", "at", "other_hour", "other_dead", "other_entry", "handout_delay_ms"],
}
_EVENTS = {event.name.lower(): int(event) for event in Event}


def open_hours(options: Options, archive: str) -> Store:
    """Open the hour files that the options name, as a Store. archive: directory or URI of an archive, which adds the
    hours that the cluster has deleted; "" for none."""
    store = open_store(options)
    if not archive:
        return store
    topics = {name: number for number, name in enumerate(store.names().topics)}
    return WithArchive(store, Location(absolute(archive)), options.verify, options.on_torn == "skip", topics)


def difference(archive: Location, part: PartFile) -> str:
    """How a file differs from its manifest; "" if it does not. OSError if the store does not answer."""
    size, crc = archive.size(part["path"]), 0
    if size is None:
        return "the file is missing"
    if size != part["bytes"]:
        return f"the file has {size} bytes, not {part['bytes']}"
    try:
        with archive.open(part["path"]) as file:
            while data := file.read(_CHUNK):
                crc = crc32c(data, crc)
            if f"{crc:08x}" == part["crc32c"] and pq.read_metadata(file).num_rows == part["rows"]:
                return ""
    except (OSError, pa.ArrowInvalid):
        archive.size(part["path"])  # raises OSError if the store does not answer; else the file is damaged
    return f"the file's CRC is not {part['crc32c']}, as it was when the file was written"


def read_manifest(archive: Location, hour: int, catalogue: Catalogue | None = None) -> HourManifest:
    """Read the manifest of an hour. NotFound if it is missing or unreadable, DamagedFile if the catalogue names another
    manifest."""
    name = manifests.manifest_name(hour)
    try:
        data = archive.load(name)
        found = manifests.decode_manifest(data, hour)
    except (FileNotFoundError, ValueError) as error:
        why = "" if isinstance(error, FileNotFoundError) else f" ({error})"
        where = archive.path(name)
        raise NotFound(f"{where}: no manifest that can be read{why}, so this hour is not archived") from None
    if catalogue is not None and hour in catalogue.hours and not catalogue.lists(hour, data):
        raise DamagedFile(archive.path(name), 0, f"hour {hour_name(hour)}: the catalogue names another manifest")
    return found


def parts(archive: Location, hour: int, kind: str) -> Sequence[PartFile]:
    """Archived files of an hour with this kind of rows, in the order of the rows."""
    return manifests.of_kind(read_manifest(archive, hour), kind)


@dataclass(frozen=True)
class WithArchive:
    """A Store with the live hours of `store` and the archived hours of `archive`."""

    store: Store
    archive: Location
    #: Whether to compare each file with its manifest before use.
    verify: bool
    #: Whether to skip hours that the catalogue lists but that have no manifest.
    skip_torn: bool
    #: Number of each topic in the store. Numbers are never reused, so they are valid for archived hours, too.
    topics: dict[str, int]

    def list(self) -> Listing:
        found = self.store.list()
        live = {files.hour for files in found.hours}
        hours, catalogue = manifests.manifest_hours(self.archive) - live, manifests.load_catalogue(self.archive)
        if found.cluster and (other := catalogue.foreign(found.cluster)):
            raise Conflict(
                f"{self.archive.path('')} is an archive of cluster {other!r}, and the source is of {found.cluster!r}: "
                "name the archive of this cluster"
            )
        if not self.skip_torn and (lost := sorted(catalogue.hours.keys() - hours - live)):
            shown = ", ".join(map(hour_name, lost[:5])) + (", …" if len(lost) > 5 else "")
            raise NotFound(
                f"{self.archive.path('_manifest')}: the catalogue names {len(lost)} hours without a manifest: {shown}. "
                "Restore them; `hadelay pipeline archive --audit` says what is left; onTorn=skip leaves these hours out"
            )
        with ThreadPoolExecutor(_READERS) as pool:
            archived = pool.map(partial(_listed, self.archive, catalogue), sorted(hours))
            return found._replace(hours=sorted([*found.hours, *archived]))

    def names(self) -> NameMap:
        return self.store.names()

    def where(self, files: HourFiles, suffix: str) -> str:
        if not files.archived:
            return self.store.where(files, suffix)
        return self.archive.path(f"{KIND[suffix]}/hour={hour_name(files.hour)}")

    def read(self, files: HourFiles, suffix: str, start: int, stop: int) -> Bytes:
        if not files.archived:
            return self.store.read(files, suffix, start, stop)
        dtype, crc, _ = ROW[suffix]
        start, stop = start // dtype.itemsize, stop // dtype.itemsize
        found, at = np.zeros(stop - start, dtype), 0
        for part in parts(self.archive, files.hour, KIND[suffix]):
            first, last = max(start - at, 0), min(stop - at, part["rows"])
            if first < last:
                table = self._table(files, suffix, part).slice(first, last - first)
                into = found[at + first - start : at + last - start]
                _index(table, into, self.topics) if suffix == "idx" else _dispatch(table, into)
            at += part["rows"]
        if self.verify:
            crc.seal(found)
        return found.view(np.uint8)

    def _table(self, files: HourFiles, suffix: str, part: PartFile) -> Any:
        """Read the needed columns of an archived file. Raises DamagedFile, or OSError if the store does not answer."""
        path, hour = self.archive.path(part["path"]), f"hour {hour_name(files.hour)}"
        if self.verify and (problem := difference(self.archive, part)):
            raise DamagedFile(path, 0, f"{hour}: {problem}")
        try:
            with self.archive.open(part["path"]) as file:
                parquet = pq.ParquetFile(file)
                return parquet.read(columns=[n for n in _COLUMNS[suffix] if n in parquet.schema_arrow.names])
        except (OSError, pa.ArrowInvalid) as error:
            self.archive.size(part["path"])  # raises OSError if the store does not answer; else the file is damaged
            raise DamagedFile(path, 0, f"{hour}: {error}") from None


def _listed(location: Location, catalogue: Catalogue, hour: int) -> HourFiles:
    manifest = read_manifest(location, hour, catalogue)
    if manifest["version"] > 1 and not catalogue.names:
        raise NotFound(f"{location.path('_catalogue')}: {LOST}")
    entries, events = (manifests.rows(manifest, kind) for kind in ("messages", "events"))
    return HourFiles(hour, entries, events, 0, archived=True)


def _index(table: Any, rows: Rows, topics: dict[str, int]) -> None:
    """Fill `rows`, which are INDEX rows, with an archived table of messages."""
    rows["index"], rows["first_id"] = _numbers(table, "entry"), _numbers(table, "first_id")
    rows["deliver_at_ms"] = _numbers(table, "deliver_at") // 1000
    rows["topic"] = _coded(_queues(table), topics)
    rows["size"] = 1  # any size except 0, which readers would take for the end of the file


def _dispatch(table: Any, rows: Rows) -> None:
    """Fill `rows`, which are DISPATCH rows, with an archived table of events."""
    rows["index"], rows["at_ms"] = _numbers(table, "entry"), _numbers(table, "at") // 1000
    rows["event"] = _coded(table["event"], _EVENTS)
    rows["other_hour"] = rows["previous"] = NONE32
    moved = table["other_entry"].is_valid().to_numpy()
    rows["consumer"] = _numbers(table, "other_entry")
    shown = _numbers(table, "other_hour") * 2 + _numbers(table, "other_dead")
    values, inverse = np.unique(shown[moved], return_inverse=True)
    hours = np.array([hour_number(value // 2, bool(value % 2)) for value in values.tolist()], np.uint32)
    rows["other_hour"][moved] = hours[inverse] if len(hours) else 0
    if "handout_delay_ms" in table.column_names:
        known = table["handout_delay_ms"].is_valid().to_numpy()
        delays, nacked = _numbers(table, "handout_delay_ms"), rows["event"] == Event.NACKED
        # Give archived nacks NO_REASON: the reasons in an archive are not read.
        delays = np.where(nacked, (delays + 1) << REASON_BITS | NO_REASON, delays)
        rows["other_hour"][known] = delays[known]


def _numbers(table: Any, name: str) -> npt.NDArray[np.int64]:
    """Values of a column as integers; timestamps in µs, 0 for null."""
    column = table[name]
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("us", "UTC"))
    return np.asarray(pc.fill_null(column.cast(pa.int64()), 0))


def _queues(table: Any) -> Any:
    """Name of each message's queue: the topic, or topic~subscription."""
    if "subscription" not in table.column_names or table["subscription"].null_count == table.num_rows:
        return table["topic"]
    topic, own = (table[name].cast(pa.string()) for name in ("topic", "subscription"))
    return pc.coalesce(pc.binary_join_element_wise(topic, own, SEPARATOR), topic)


def _coded(column: Any, numbers: dict[str, int]) -> npt.NDArray[np.uint32]:
    """Number of each name in a column; NONE32 for null and for names without a number."""
    encoded = column.combine_chunks().dictionary_encode()
    known = np.array([numbers.get(value, NONE32) for value in encoded.dictionary.to_pylist()] + [NONE32], np.uint32)
    return np.asarray(known[pc.fill_null(encoded.indices, len(known) - 1).to_numpy(zero_copy_only=False)])
