"""Appends to far hours, which are not mapped into memory: a buffer, and a writer for many hours at once.

Appends to far hours would open a thousand files per batch if written at once. The journal has the buffered messages, so
buffering costs no durability. The next checkpoint writes all of them; a read writes those of its hour.

Two years of hours get a dozen messages each between checkpoints, so the cost per hour matters. Hours with few entries
get temporary heads, rebuilt from the index for a whole batch at once; hours with many entries keep heads in the LRU.
"""

import mmap
from bisect import bisect_right
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hadelay.codec.checksums import crc32c
from hadelay.codec.formats import INDEX, INDEX_SIZE, RECORD_SIZE, SECONDS_PER_HOUR
from hadelay.codec.linking import INDEX_CRC, catch_up, chain, link, no_heads
from hadelay.platform.disk import Handles
from hadelay.storage.appends import Records
from hadelay.storage.heads import HeadsCache, bad_entry
from hadelay.storage.hourtable import IDX, LOG, HourTable, places

#: Memory, in bytes, of a buffered index row without the message's record.
ROW_COST = INDEX_SIZE + 4 + 4 + 8 + 4 + 4 + 2
#: Maximum number of hours, rows and bytes that the writer handles per pass, which takes a few milliseconds. The heads
#: (last entry and count of each second) of one pass take 0.9 MB.
_BATCH_HOURS, _BATCH_ROWS, _BATCH_BYTES = 32, 1024, 1 << 19
#: Maximum number of entries of an hour whose heads (last entry and count of each second) are not cached, because they
#: are rebuilt quickly.
_FEW_ENTRIES = 2048


def _memory(size: int) -> mmap.mmap:
    """Map memory whose pages are allocated on first use, and returned to the system as soon as it is freed."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _array(n: int, dtype: Any) -> npt.NDArray[Any]:
    return np.frombuffer(_memory(n * np.dtype(dtype).itemsize), dtype)


class Generation:
    """One part of the buffer: usually the messages that arrived between two checkpoints, in order of arrival; the
    messages of an hour are linked with one another. While the writer writes frozen generations to files, new messages
    go to a fresh generation."""

    def __init__(self, capacity: int, slots: int) -> None:
        """capacity: size limit of rows and records together, in bytes. slots: number of slots in the hour table."""
        self.n = 0
        self._capacity = capacity
        rows = capacity // (ROW_COST + RECORD_SIZE) + 1
        self._rows = _array(rows, INDEX)
        self._slots = _array(rows, np.uint32)
        self._previous = _array(rows, np.int32)
        # Offset of each row's record in the buffer of records; -1 if the record is in the .log already, or is that of
        # an earlier row.
        self._starts = _array(rows, np.int64)
        # Copy the columns that scans read: a scan of whole rows would miss the CPU's cache at each row.
        self._indexes, self._topics = _array(rows, np.uint32), _array(rows, np.uint32)
        self._seconds = _array(rows, np.uint16)
        self._arena, self._used = memoryview(_memory(capacity)), 0
        #: Position of the newest buffered row of each slot (hour); -1: none.
        self.tail = np.full(slots, -1, np.int32)

    @property
    def used_bytes(self) -> int:
        return self.n * ROW_COST + self._used

    def fits(self, rows: int, size: int) -> bool:
        return self.n + rows <= len(self._rows) and self._used + size <= self._capacity

    def cover(self, slots: int) -> None:
        if slots > len(self.tail):
            self.tail = np.append(self.tail, np.full(slots - len(self.tail), -1, np.int32))

    def numbers(self, n: int) -> npt.NDArray[np.int32]:
        return np.arange(self.n, self.n + n, dtype=np.int32)

    def add(
        self,
        slots: npt.NDArray[np.integer],
        previous: npt.NDArray[np.integer],
        rows: npt.NDArray[np.void],
        records: Records | None,
    ) -> None:
        """Append rows and their records. records: None if they are in the .log file already.

        previous: result of chaining the positions `numbers(len(rows))` by slot into `tail`.
        """
        first, end = self.n, self.n + len(rows)
        self._rows[first:end] = rows
        self._slots[first:end] = slots
        self._previous[first:end] = previous
        self._indexes[first:end], self._topics[first:end] = rows["index"], rows["topic"]
        self._seconds[first:end] = rows["second"]
        if records is None:
            self._starts[first:end] = -1
        else:
            sizes = records.sizes(rows)
            self._starts[first:end] = sizes.cumsum() - sizes + self._used
            if records.copies is not None:
                self._starts[first:end][records.copies] = -1
            size = len(records.blob)
            self._arena[self._used : self._used + size] = records.blob
            self._used += size
        self.n = end

    def of(self, slot: int, written: int) -> npt.NDArray[np.intp]:
        """Positions, ascending, of an hour's rows that are not in its file yet: globalIndex `written` and higher."""
        positions: list[int] = []
        at = int(self.tail[slot]) if slot < len(self.tail) else -1
        indexes = self._rows["index"]
        while at >= 0 and indexes[at] >= written:
            positions.append(at)
            at = int(self._previous[at])
        return np.array(positions[::-1], np.intp)

    def by_hour(self) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.uint32]]:
        """Order all rows by slot: returns (positions of the rows, slots of the rows)."""
        slots = self._slots[: self.n]
        if not self.n:
            return np.zeros(0, np.intp), slots
        span = slots - slots.min()
        order = (span.astype(np.uint16) if span.max() < 1 << 16 else span).argsort(kind="stable")
        return order, slots[order]

    def waiting(
        self, written: npt.NDArray[np.integer]
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint16], npt.NDArray[np.uint32]]:
        """List the rows that are not written to files yet: returns three arrays with slot, second and topic of each.
        written: number of written rows per slot."""
        columns = (self._slots[: self.n], self._seconds[: self.n], self._topics[: self.n])
        waits = self._indexes[: self.n] >= written[columns[0]]
        if waits.all():
            return columns
        slots, seconds, topics = columns
        return slots[waits], seconds[waits], topics[waits]

    def get(self, positions: npt.NDArray[np.integer]) -> tuple[npt.NDArray[np.void], list[int]]:
        """Return the buffered rows at these positions, and the offset of each row's record in the buffer of records."""
        return self._rows.take(positions), self._starts[positions].tolist()

    def records(self, starts: list[int], sizes: list[int]) -> bytes:
        arena = self._arena
        return b"".join([arena[at : at + size] for at, size in zip(starts, sizes, strict=True) if at >= 0])


class Sample(NamedTuple):
    """List of the hours that a checkpoint has to store, as of one applied index. rows: HOUR_ROW of each hour in
    `hours`, in slot order. gone: retired hours."""

    hours: npt.NDArray[np.int64]
    rows: npt.NDArray[np.void]
    gone: list[int]


class Frozen:
    """A part of the buffer (a Generation) that takes no more messages, and is written hour by hour."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.order, self.slots = generation.by_hour()
        self.firsts = [0, *(np.flatnonzero(np.diff(self.slots)) + 1).tolist(), len(self.order)]
        #: Number of rows written so far: the first ones of `order`, which has the rows hour by hour.
        self.written = 0

    def take(self) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.uint32]]:
        """Choose the rows to write next, of a few dozen hours or of a part of a big hour: (positions, slots)."""
        start, n = self.written, len(self.order)
        rows = min(_BATCH_ROWS, max(1, _BATCH_BYTES * n // self.generation.used_bytes))
        hour = bisect_right(self.firsts, start) + _BATCH_HOURS - 1
        end = min(start + rows, self.firsts[hour] if hour < len(self.firsts) else n)
        return self.order[start:end], self.slots[start:end]


class FarWriter:
    def __init__(
        self,
        table: HourTable,
        handles: Handles,
        heads: HeadsCache,
        path_of: Callable[[int], str],
        usual: int,
        capacity: int,
    ) -> None:
        """usual: size of the buffer, in bytes, at which a checkpoint begins. capacity: maximum size of the buffer."""
        self._table, self._handles, self._heads, self._path_of = table, handles, heads, path_of
        self._usual, self._capacity = usual, capacity
        self.fresh = Generation(capacity, 0)
        #: Frozen generations, oldest first.
        self._frozen: list[Frozen] = []
        #: Last frozen generation that `write_some` has to write; None: none.
        self._awaited: Frozen | None = None
        self._sample: Sample | None = None

    def freeze(self, sample: Sample | None) -> None:
        """Freeze the buffer, and start an empty one for new messages. `write_some` then writes what is frozen, and
        fills in the CRCs in the checkpoint's `sample`. Messages that an earlier sample still waits for are written
        now."""
        if self._sample is not None:
            self.write_rest()
        self._set_aside()
        if self._frozen:
            self._awaited, self._sample = self._frozen[-1], sample

    @property
    def waiting_bytes(self) -> int:
        """Bytes of messages in memory that no call of `freeze` has asked to be written: those in the buffer, and those
        in generations that an append froze."""
        waiting = self.fresh.used_bytes
        if self._awaited is None:
            for frozen in self._frozen:
                waiting += frozen.generation.used_bytes
        return waiting

    def _set_aside(self) -> None:
        if self.fresh.n:
            self._frozen.append(Frozen(self.fresh))
            self.fresh = Generation(self._capacity, self._table.size)

    def write_some(self) -> bool:
        """Write the frozen messages of the next few dozen hours, or a part of those of a big hour. Returns True once
        everything is written that the last `freeze` froze."""
        if self._awaited is not None:
            self._write_slice()
        return self._awaited is None

    def _write_slice(self) -> None:
        frozen = self._frozen[0]
        positions, slots = frozen.take()
        self._write(frozen.generation, positions, slots)
        frozen.written += len(positions)
        if frozen.written == len(frozen.order):
            del self._frozen[0]
            if frozen is self._awaited:
                self._awaited = self._sample = None

    def write_rest(self) -> None:
        while self._frozen:
            self._write_slice()

    def spill(self) -> None:
        """Write all buffered messages now."""
        self.write_rest()
        self._set_aside()
        self.write_rest()

    def keep_up(self, rows: int, size: int) -> None:
        """If checkpoints are late, write twice as much of the buffer as is about to be appended: `rows` rows with
        records of `size` bytes. Otherwise the buffer would fill up, and a single append would have to write all of it:
        for seconds, this node would answer nobody."""
        if self.fresh.used_bytes >= self._usual and not self._frozen:
            self._set_aside()
        elif not self._frozen or (self._awaited is not None and self.fresh.used_bytes < self._usual):
            return
        frozen = self._frozen[0]
        share = max(rows / frozen.generation.n, (rows * ROW_COST + size) / frozen.generation.used_bytes)
        until = frozen.written + 2 * share * frozen.generation.n
        while self._frozen and self._frozen[0] is frozen and frozen.written < until:
            self._write_slice()

    def write_out(self, slot: int) -> None:
        """Write the buffered messages of one hour, in order of arrival."""
        table = self._table
        if table.written[slot] == table.entries[slot]:
            return
        for generation in self._generations():
            positions = generation.of(slot, int(table.written[slot]))
            self._write(generation, positions, np.full(len(positions), slot, np.uint32))

    def _generations(self) -> list[Generation]:
        return [*(frozen.generation for frozen in self._frozen), self.fresh]

    def waiting(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint16], npt.NDArray[np.uint32]]:
        """List all buffered rows: returns three arrays with slot, second and topic of each."""
        found = [generation.waiting(self._table.written) for generation in self._generations()]
        slots, seconds, topics = (np.concatenate(column) for column in zip(*found, strict=True))
        return slots, seconds, topics

    def _write(self, generation: Generation, positions: npt.NDArray[np.integer], slots: npt.NDArray[np.uint32]) -> None:
        """Link rows to earlier entries, and write them. positions: positions of the rows in the buffer, ordered by
        slot. Rows that `write_out` has written already are skipped."""
        rows, starts = generation.get(positions)
        waiting = rows["index"] >= self._table.written[slots]
        if not waiting.all():
            rows, slots = rows[waiting], slots[waiting]
            starts = [start for start, waits in zip(starts, waiting.tolist(), strict=True) if waits]
        if not len(rows):
            return
        touched, firsts, counts = np.unique(slots, return_index=True, return_counts=True)
        try:
            self._link(touched, firsts, counts, rows)
            INDEX_CRC.seal(rows)
            sizes, offsets, entries = rows["size"].tolist(), rows["offset"].tolist(), rows.view(np.uint8).data
            for slot, first, count in zip(touched.tolist(), firsts.tolist(), counts.tolist(), strict=True):
                end = first + count
                records = generation.records(starts[first:end], sizes[first:end])
                at = next((o for o, s in zip(offsets[first:end], starts[first:end], strict=True) if s >= 0), 0)
                self._append(slot, entries[first * INDEX_SIZE : end * INDEX_SIZE], records, at)
        except BaseException:
            # Drop the cached heads (last entry of each second), which are ahead of the files: the node continues after
            # a write to a full disk failed.
            for hour in self._table.hours(touched).tolist():
                self._heads.forget(hour)
            raise
        finally:
            if generation is not self.fresh and self._sample is not None:
                self._complete(self._sample, touched)

    def _link(
        self,
        slots: npt.NDArray[np.uint32],
        firsts: npt.NDArray[np.intp],
        counts: npt.NDArray[np.intp],
        rows: npt.NDArray[np.void],
    ) -> None:
        written = self._table.written[slots]
        small = written <= _FEW_ENTRIES
        for i, slot in enumerate(slots.tolist()):
            hour = self._table.hour(slot)
            if small[i] and not self._heads.cached(hour):
                continue
            small[i] = False
            derived = self._heads.get(hour, int(written[i]))
            part = rows[firsts[i] : firsts[i] + counts[i]]
            link(part, derived.heads)
            derived.entries += len(part)
        if small.any():
            chosen = np.repeat(small, counts)
            part = rows[chosen]
            self._link_small(slots[small], written[small], counts[small], part)
            rows[chosen] = part

    def _link_small(
        self,
        slots: npt.NDArray[np.uint32],
        written: npt.NDArray[np.uint32],
        counts: npt.NDArray[np.intp],
        rows: npt.NDArray[np.void],
    ) -> None:
        """Link rows of hours without cached heads (last entry of each second) to earlier entries; second s of the i-th
        hour has the key i × 3600 + s."""
        firsts = np.arange(len(slots)) * SECONDS_PER_HOUR
        last, count = no_heads(len(slots))
        before = self._read(slots, written)
        if len(before):
            catch_up(np.repeat(firsts, written) + before["second"], before["index"], last, count)
        keys = np.repeat(firsts, counts) + rows["second"]
        rows["local"], rows["pre"] = chain(keys, rows["index"], last, count)

    def _read(self, slots: npt.NDArray[np.uint32], written: npt.NDArray[np.uint32]) -> npt.NDArray[np.void]:
        parts = []
        for slot, entries in zip(slots.tolist(), written.tolist(), strict=True):
            if entries:
                path = self._path_of(self._table.hour(slot)) + ".idx"
                parts.append(self._handles.read(path, entries * INDEX_SIZE, 0))
        rows = np.frombuffer(b"".join(parts), INDEX)
        if len(bad := INDEX_CRC.bad(rows)):
            ends = np.cumsum(written)
            at = int(np.searchsorted(ends, bad[0], "right"))
            path = self._path_of(self._table.hour(int(slots[at]))) + ".idx"
            raise bad_entry(path, int(bad[0]) - int(ends[at]) + int(written[at]))
        return rows

    def _append(self, slot: int, entries: memoryview, records: bytes, offset: int) -> None:
        table, path = self._table, self._path_of(self._table.hour(slot))
        written = int(table.written[slot])
        if records:
            self._handles.get(path + ".log", create=True).pwrite(records, offset)
        self._handles.get(path + ".idx", create=True).pwrite(entries, written * INDEX_SIZE)
        # Update the lengths only after both writes: a retry then overwrites the bytes of a failed write.
        if records:
            table.log_crc[slot] = crc32c(records, int(table.log_crc[slot]))
            table.log_written[slot] = offset + len(records)
        table.idx_crc[slot] = crc32c(entries, int(table.idx_crc[slot]))
        table.written[slot] = written + len(entries) // INDEX_SIZE
        table.unsynced[slot] |= LOG | IDX if records else IDX

    def _complete(self, sample: Sample, slots: npt.NDArray[np.uint32]) -> None:
        """Copy the CRCs of hours into the checkpoint's `sample`: of each hour whose last row in the sample has just
        been written."""
        table = self._table
        at = np.searchsorted(places(sample.hours), places(table.hours(slots)))
        whole = table.written[slots] == sample.rows["entries"][at]
        sample.rows["log_crc"][at[whole]] = table.log_crc[slots[whole]]
        sample.rows["idx_crc"][at[whole]] = table.idx_crc[slots[whole]]
