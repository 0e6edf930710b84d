"""Writing the buffered messages of far hours: link, seal and append, many hours in one vectorised pass.

Two years of hours get a dozen messages each between checkpoints, so the cost per hour matters. Hours with few entries
get temporary heads, rebuilt from the index for a whole batch at once; hours with many entries keep heads in the LRU.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hadelay.codec.checksums import crc32c
from hadelay.codec.formats import INDEX, INDEX_SIZE, SECONDS_PER_HOUR
from hadelay.codec.linking import INDEX_CRC, catch_up, chain, link, no_heads
from hadelay.errors import DamagedFile
from hadelay.storage.far import Generation
from hadelay.storage.handles import Handles
from hadelay.storage.heads import HeadsCache, bad_entry
from hadelay.storage.hourtable import IDX, LOG, HourTable, places

#: Limits of hours, rows and bytes per pass: a few milliseconds. The dense heads of one pass take 0.9 MB.
_BATCH_HOURS, _BATCH_ROWS, _BATCH_BYTES = 32, 1024, 1 << 19
#: Number of entries up to which an hour's heads are rebuilt rather than kept.
_FEW_ENTRIES = 2048


class Sample(NamedTuple):
    """Changed hours of a checkpoint, at one applied index. rows: HOUR_ROW of `hours`, in slot order
    (storage/hourtable.py); gone: retired hours."""

    hours: npt.NDArray[np.int64]
    rows: npt.NDArray[np.void]
    gone: list[int]


class FarWriter:
    def __init__(
        self, table: HourTable, handles: Handles, heads: HeadsCache, path_of: Callable[[int], str], capacity: int
    ) -> None:
        """capacity: size limit of one generation, in bytes."""
        self._table, self._handles, self._heads, self._path_of = table, handles, heads, path_of
        self._capacity = capacity
        self.fresh = Generation(capacity, 0)
        self._frozen: Generation | None = None
        self._sample: Sample | None = None
        self._order, self._slots = np.zeros(0, np.intp), np.zeros(0, np.uint32)
        self._firsts: list[int] = []
        self._next = 0

    def freeze(self, sample: Sample | None) -> None:
        """Freeze the buffer for `write_some`, which also completes the sample's CRCs; start an empty buffer."""
        assert self._frozen is None, "one checkpoint at a time"
        if not self.fresh.n:
            return
        self._frozen, self._sample = self.fresh, sample
        self.fresh = Generation(self._capacity, self._table.size)
        self._order, self._slots = self._frozen.by_hour()
        self._firsts = [0, *(np.flatnonzero(np.diff(self._slots)) + 1).tolist(), len(self._order)]
        self._next = 0

    def write_some(self) -> bool:
        """Write the next few dozen hours, or a part of a big hour; True when the frozen buffer is written."""
        frozen = self._frozen
        if frozen is None:
            return True
        start, n = self._next, len(self._order)
        rows = min(_BATCH_ROWS, max(1, _BATCH_BYTES * n // frozen.used_bytes))
        hour = bisect_right(self._firsts, start) + _BATCH_HOURS - 1
        end = min(start + rows, self._firsts[hour] if hour < len(self._firsts) else n)
        self._write(frozen, self._order[start:end], self._slots[start:end])
        self._next = end
        if end == n:
            self._frozen = self._sample = None
        return end == n

    def write_rest(self) -> None:
        """Write the rest of the frozen buffer now."""
        while not self.write_some():
            pass

    def spill(self) -> None:
        """Write all buffered messages now."""
        self.write_rest()
        self.freeze(None)
        self.write_rest()

    def write_out(self, slot: int) -> None:
        """Write the buffered messages of one hour, in order of arrival."""
        table = self._table
        if table.written[slot] == table.entries[slot]:
            return
        for generation in (self._frozen, self.fresh):
            if generation is not None:
                positions = generation.of(slot, int(table.written[slot]))
                self._write(generation, positions, np.full(len(positions), slot, np.uint32))

    def waiting(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint16], npt.NDArray[np.uint32]]:
        """(slot, second, topic) of each buffered row."""
        generations = [generation for generation in (self._frozen, self.fresh) if generation is not None]
        found = [generation.waiting(self._table.written) for generation in generations]
        slots, seconds, topics = (np.concatenate(column) for column in zip(*found, strict=True))
        return slots, seconds, topics

    def _write(self, generation: Generation, positions: npt.NDArray[np.integer], slots: npt.NDArray[np.uint32]) -> None:
        """Link and write rows. positions: the next rows of some hours, ordered by slot; rows that `write_out` has
        written already are skipped."""
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
            # A full disk fails the write, but the node continues: drop the heads, which are ahead of the files.
            for hour in self._table.hours(touched).tolist():
                self._heads.forget(hour)
            raise
        finally:
            if generation is self._frozen and self._sample is not None:
                self._complete(self._sample, touched)

    def _link(
        self, slots: npt.NDArray[np.uint32], firsts: npt.NDArray[np.intp], counts: npt.NDArray[np.intp],
        rows: npt.NDArray[np.void],
    ) -> None:  # fmt: skip
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
        self, slots: npt.NDArray[np.uint32], written: npt.NDArray[np.uint32], counts: npt.NDArray[np.intp],
        rows: npt.NDArray[np.void],
    ) -> None:  # fmt: skip
        """Link hours without cached heads. Second s of the i-th hour has the key i × 3600 + s."""
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
                parts.append(self._handles.get(path).pread(entries * INDEX_SIZE, 0))
                if len(parts[-1]) < entries * INDEX_SIZE:
                    raise DamagedFile(path, len(parts[-1]), "the file ends too early")
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
        # Lengths change after both writes: a retry overwrites the bytes of a failed write.
        if records:
            table.log_crc[slot] = crc32c(records, int(table.log_crc[slot]))
            table.log_written[slot] = offset + len(records)
        table.idx_crc[slot] = crc32c(entries, int(table.idx_crc[slot]))
        table.written[slot] = written + len(entries) // INDEX_SIZE
        table.unsynced[slot] |= LOG | IDX if records else IDX

    def _complete(self, sample: Sample, slots: npt.NDArray[np.uint32]) -> None:
        """Copy the CRCs of hours whose last sampled row is now written into the sample; later rows are written by
        later calls."""
        table = self._table
        at = np.searchsorted(places(sample.hours), places(table.hours(slots)))
        whole = table.written[slots] == sample.rows["entries"][at]
        sample.rows["log_crc"][at[whole]] = table.log_crc[slots[whole]]
        sample.rows["idx_crc"][at[whole]] = table.idx_crc[slots[whole]]
