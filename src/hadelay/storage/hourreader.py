"""Reads the hour files of one Raft group: without copies from hours mapped into memory, else with pread.

Reads verify CRCs, except views of a whole index, whose callers verify the rows that they pick.
"""

import numpy as np
import numpy.typing as npt

from hadelay.codec.formats import DISPATCH, DISPATCH_SIZE, INDEX, INDEX_SIZE
from hadelay.codec.linking import DISPATCH_CRC, INDEX_CRC, Heads
from hadelay.codec.records import check_record, decode_record
from hadelay.errors import BadRequest, DamagedFile
from hadelay.model import DEAD_HOURS, hour_name, proves_record
from hadelay.platform.disk import Disk, File, Handles
from hadelay.storage.far import FarWriter
from hadelay.storage.filecheck import Expected
from hadelay.storage.heads import HeadsCache, bad_entry
from hadelay.storage.hourtable import FILES, HourTable
from hadelay.storage.near import NearHour

Rows = npt.NDArray[np.void]
#: Maximum span of rows that is read in one piece: this number of rows, or this number per wanted row, whichever is
#: larger. Wanted rows in a longer span are read one by one.
_SPAN_ROWS, _SPAN_PER_ROW = 1024, 16


class HourReader:
    """Base of DiskHourStore: the methods that read hour files and change nothing."""

    def __init__(self, disk: Disk, directory: str, far_usual: int, far_capacity: int) -> None:
        self._disk, self._directory = disk, directory
        self._days: dict[int, str] = {}
        self._table = HourTable()
        self._handles = Handles(disk)
        self._near: dict[int, NearHour] = {}
        self._heads = HeadsCache(disk, self.path, self._read_rows)
        self._far = FarWriter(self._table, self._handles, self._heads, self.path, far_usual, far_capacity)

    def path(self, hour: int) -> str:
        n = (hour - DEAD_HOURS if hour >= DEAD_HOURS else hour) % 24
        start = self._days.get(hour - n)
        if start is None:  # cache paths: formatting dates is slow, and a checkpoint builds tens of thousands of paths
            start = self._days[hour - n] = f"{self._directory}/{hour_name(hour - n)[:-2]}"
        return f"{start}{n:02}"

    def count(self, hour: int) -> int:
        """Number of index entries of an hour at the applied index of the Raft log, buffered entries included."""
        slot = self._table.find(hour)
        return int(self._table.entries[slot]) if slot >= 0 else 0

    def counts(self, hours: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
        """Number of index entries of each of these hours at the applied index of the Raft log; 0 for unknown hours."""
        return self._table.entries_of(hours)

    def event_count(self, hour: int) -> int:
        slot = self._table.find(hour)
        return int(self._table.events[slot]) if slot >= 0 else 0

    def sums(self, hour: int) -> tuple[int, int, int, tuple[int, int, int]] | None:
        """Lengths and checksums of an hour's files at the applied index: (number of index entries, number of events,
        bytes of .log, CRC-32C of .log, .idx and .dsp). None while messages of the hour are buffered."""
        slot, table = self._table.find(hour), self._table
        if slot < 0 or table.written[slot] < table.entries[slot] or table.log_written[slot] < table.log_bytes[slot]:
            return None
        log_bytes, entries, events, log_crc, idx_crc, dsp_crc, _ = table.rows(np.array([slot]))[0].item()
        return entries, events, log_bytes, (log_crc, idx_crc, dsp_crc)

    def hours(self) -> list[int]:
        """Hours that have entries and are not retired, ascending; hours of dead letters last."""
        return sorted(self._table.hours(np.flatnonzero(self._table.entries)).tolist())

    def lengths(self, hour: int) -> tuple[int, int, int]:
        """Lengths, in bytes, of an hour's .log, .idx and .dsp files at the applied index."""
        slot = self._table.find(hour)
        log_bytes = int(self._table.log_bytes[slot]) if slot >= 0 else 0
        return log_bytes, self.count(hour) * INDEX_SIZE, self.event_count(hour) * DISPATCH_SIZE

    def totals(self) -> tuple[int, int, int, int]:
        """Number of hours that are not retired, and bytes of their .log, .idx and .dsp files at the applied index."""
        table = self._table
        entries, events = int(table.entries.sum(dtype=np.int64)), int(table.events.sum(dtype=np.int64))
        log_bytes = int(table.log_bytes.sum())
        return int(np.count_nonzero(table.entries)), log_bytes, entries * INDEX_SIZE, events * DISPATCH_SIZE

    def written_file(self, hour: int, suffix: str) -> Expected | None:
        """Length and CRC-32C of an hour's ".log", ".idx" or ".dsp" file, without buffered data; None if the hour has no
        such file."""
        slot, table = self._table.find(hour), self._table
        if slot < 0 or not table.entries[slot]:
            return None
        if suffix == ".log":
            size, crc = int(table.log_written[slot]), table.log_crc[slot]
        elif suffix == ".idx":
            size, crc = int(table.written[slot]) * INDEX_SIZE, table.idx_crc[slot]
        else:
            size, crc = int(table.events[slot]) * DISPATCH_SIZE, table.dsp_crc[slot]
        return Expected(self.path(hour) + suffix, size, int(crc), self.written(hour)) if size else None

    def mapped(self, hour: int) -> bool:
        return hour in self._near

    def entries(self, hour: int, indexes: npt.NDArray[np.integer] | slice, *, verify: bool = True) -> Rows:
        """Copy these INDEX rows of an hour, verified. Raises IndexError for a row that the hour does not have, and
        DamagedFile for a wrong CRC."""
        near = self._near.get(hour)
        if near is not None:
            rows = near.rows()[indexes].copy() if isinstance(indexes, slice) else near.rows().take(indexes)
        else:
            rows = self._far_entries(hour, indexes)
        if verify and len(rows) and len(bad := INDEX_CRC.bad(rows)):
            at = int(np.arange(self.count(hour))[indexes][bad[0]])
            raise bad_entry(self.path(hour) + ".idx", at)
        return rows

    def index_view(self, hour: int) -> Rows:
        """All INDEX rows of an hour, not verified: a read-only view of a mapped hour, else a copy from disk."""
        near = self._near.get(hour)
        return near.rows() if near is not None else self._far_entries(hour, slice(None))

    def pre_view(self, hour: int) -> memoryview:
        """An hour's index as a memoryview of u4, to follow links between entries: the number of the entry before entry
        n in the same second (preGlobalIndex) is `view[n * 16 + 11]`."""
        near = self._near.get(hour)
        return near.words() if near is not None else self._far_entries(hour, slice(None)).view(np.uint32).data

    def heads(self, hour: int) -> Heads:
        """Get an hour's heads: last entry and number of entries of each second. If the hour is mapped into memory,
        appends change the returned object."""
        self._write_out(hour)
        return self._heads.get(hour, self.count(hour)).heads

    # The following methods count entries in files, settled ones included. They do not write buffered messages first,
    # because callers ask for all hours; `waiting` returns the buffered entries.

    def written(self, hour: int) -> int:
        """Number of entries in the hour's .idx file."""
        slot = self._table.find(hour)
        return min(int(self._table.written[slot]), int(self._table.entries[slot])) if slot >= 0 else 0

    def written_seconds(self, hour: int) -> npt.NDArray[np.uint32]:
        """Entries in the .idx per second of the hour, u4[3600]. The array is live: appends change it."""
        return self._heads.get(hour, self.written(hour)).heads.count

    def written_minutes(self, hour: int) -> Rows:
        """Number of entries in the hour's .idx file per topic and minute, as COUNTER rows."""
        return self._heads.topic_minutes(hour, self.written(hour))

    def derive_some(self, hour: int, *, topics: bool = False) -> int:
        """Bring an hour's counts per second, and with `topics` also those per topic and minute, up to date by one slice
        of work. Returns the number of rows read; 0 when all is done."""
        return self._heads.derive_some(hour, self.written(hour), topics=topics)

    def waiting(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint16], npt.NDArray[np.uint32]]:
        """List the buffered entries: three arrays with hour, second and topic of each."""
        slots, seconds, topics = self._far.waiting()
        return self._table.hours(np.arange(self._table.size))[slots], seconds, topics

    def record(self, hour: int, offset: int, size: int, *, verify: bool = False) -> bytes:
        """Read one record of an hour's .log file, header included. verify: check its CRCs; DamagedFile when a CRC is
        wrong."""
        near = self._near.get(hour)
        if near is not None:
            data = near.record(offset, size)
        else:
            data = self._log_with(hour, offset + size).pread(size, offset)
        if verify and (what := check_record(data, size)):
            raise DamagedFile(self.path(hour) + ".log", offset, what, size=size)
        return data

    def cached_record(self, hour: int, offset: int, size: int) -> bytes | None:
        """Read a record without verifying it, but only from memory. Returns None if the read would wait for the disk,
        or if the hour is retired."""
        near = self._near.get(hour)
        if near is not None:
            return near.cached_record(offset, size)
        if not self.count(hour):
            return None
        return self._log_with(hour, offset + size).pread_cached(size, offset)

    def _log_with(self, hour: int, end: int) -> File:
        """The .log file of an hour that is not mapped; buffered messages before offset `end` are written first."""
        slot = self._table.find(hour)
        if slot < 0 or end > self._table.log_written[slot]:
            self._write_out(hour)
        return self._handles.get(self.path(hour) + ".log")

    def read_file(self, hour: int, suffix: str, offset: int, size: int) -> bytes:
        """Bytes of the hour's ".log", ".idx" or ".dsp" file, cut at the applied length."""
        self._write_out(hour)
        size = min(size, self.length(hour, suffix) - offset)
        return self._handles.get(self.path(hour) + suffix).pread(size, offset) if size > 0 else b""

    def check_repair(self, hour: int, suffix: str, offset: int, data: bytes) -> None:
        """Check bytes before they repair a file: raises BadRequest unless `data` is the original record, or whole
        entries, for this offset."""
        length = self.length(hour, suffix)
        if not data or offset < 0 or offset + len(data) > length:
            raise BadRequest(f"a repair must lie within the file: offset {offset}, {len(data)} bytes of {length}")
        if suffix == ".log":
            what = _bad_record(hour, offset, data, self.index_view(hour))
        else:
            what = _bad_entries(suffix, offset, data)
        if what:
            raise BadRequest(f"the repair at offset {offset} is not the original data: {what}")

    def length(self, hour: int, suffix: str) -> int:
        """Length, in bytes, of a .log, .idx or .dsp file at the applied index."""
        return self.lengths(hour)[list(FILES).index(suffix)]

    def _far_entries(self, hour: int, indexes: npt.NDArray[np.integer] | slice) -> Rows:
        n = self.count(hour)
        if isinstance(indexes, slice):
            first, end, step = indexes.indices(n)
            self._write_out(hour, end)
            return self._read_rows(hour, first, max(first, end))[::step]
        if not len(indexes):
            return np.zeros(0, INDEX)
        first, last = int(indexes.min()), int(indexes.max())
        if first < 0 or last >= n:
            raise IndexError(f"entry out of range: hour {hour_name(hour)} has {n} entries")
        self._write_out(hour, last + 1)
        if last - first < max(_SPAN_ROWS, _SPAN_PER_ROW * len(indexes)):
            return self._read_rows(hour, first, last + 1).take(indexes - first)
        file = self._handles.get(self.path(hour) + ".idx")
        data = b"".join([file.pread(INDEX_SIZE, index * INDEX_SIZE) for index in indexes.tolist()])
        return np.frombuffer(data, INDEX)

    def _read_rows(self, hour: int, first: int, end: int) -> Rows:
        near = self._near.get(hour)
        if near is not None:
            return near.rows()[first:end]
        if first >= end:
            return np.zeros(0, INDEX)
        data = self._handles.read(self.path(hour) + ".idx", (end - first) * INDEX_SIZE, first * INDEX_SIZE)
        return np.frombuffer(data, INDEX)

    def _write_out(self, hour: int, end: int | None = None) -> None:
        """Write the hour's buffered entries if any entry before number `end` is among them. Writing always would turn
        each read of one message into a write."""
        slot = self._table.find(hour)
        if slot >= 0 and (end is None or end > self._table.written[slot]):
            self._far.write_out(slot)

    def events(self, hour: int, numbers: npt.NDArray[np.integer] | slice = slice(None), *, verify: bool = True) -> Rows:
        """Copy these DISPATCH rows of an hour; a slice must have step 1. Raises DamagedFile for a wrong CRC."""
        n = self.event_count(hour)
        if isinstance(numbers, slice):
            first, end, _ = numbers.indices(n)
        else:
            first, end = (int(numbers.min()), int(numbers.max()) + 1) if len(numbers) else (0, 0)
        if end <= first:
            return np.zeros(0, DISPATCH)
        if first < 0 or end > n:
            raise IndexError(f"event out of range: hour {hour_name(hour)} has {n} events")
        path = self.path(hour) + ".dsp"
        data = self._handles.read(path, (end - first) * DISPATCH_SIZE, first * DISPATCH_SIZE)
        rows: Rows = np.frombuffer(data, DISPATCH)
        if not isinstance(numbers, slice):
            rows = rows.take(numbers - first)
        if verify and len(bad := DISPATCH_CRC.bad(rows)):
            at = first + int(bad[0]) if isinstance(numbers, slice) else int(numbers[bad[0]])
            raise DamagedFile(path, at * DISPATCH_SIZE, "the event's CRC is wrong", size=DISPATCH_SIZE)
        return rows


def _bad_record(hour: int, offset: int, data: bytes, entries: Rows) -> str | None:
    what = check_record(data, len(data))
    if what:
        return what
    there = entries[entries["offset"] == offset]
    # Only an intact index entry proves that a record is the original: a damaged entry has to be repaired before its
    # record.
    first = decode_record(data).first_id
    ids, indexes = there["first_id"].tolist(), there["index"].tolist()
    proven = any(proves_record(i, first, hour, index) for i, index in zip(ids, indexes, strict=True))
    return None if proven else "no index entry points to this record"


def _bad_entries(suffix: str, offset: int, data: bytes) -> str | None:
    dtype, crc = (INDEX, INDEX_CRC) if suffix == ".idx" else (DISPATCH, DISPATCH_CRC)
    if offset % dtype.itemsize or len(data) % dtype.itemsize:
        return "a repair consists of whole entries"
    rows = np.frombuffer(data, dtype)
    if len(crc.bad(rows)):
        return "an entry's CRC is wrong"
    numbers = np.arange(len(rows)) + offset // dtype.itemsize
    return "the entries belong to another offset" if suffix == ".idx" and (rows["index"] != numbers).any() else None
