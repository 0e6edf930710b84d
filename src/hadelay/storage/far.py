"""Buffer of appends to far hours, which would open a thousand files per batch if written at once.

The journal has the buffered messages, so buffering costs no durability. The next checkpoint writes all of them; a read
writes those of its hour. A generation holds the arrivals between two checkpoints: the frozen generation is written
while the fresh generation takes arrivals. Rows are in arrival order and chained per hour.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from hadelay.codec.formats import INDEX, INDEX_SIZE, RECORD_SIZE

#: Size of a buffered row without its record, in bytes.
ROW_COST = INDEX_SIZE + 4 + 4 + 8 + 4 + 4 + 2


def _memory(size: int) -> mmap.mmap:
    """Anonymous pages: allocated on first use, and returned to the system at once when freed."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _array(n: int, dtype: Any) -> npt.NDArray[Any]:
    return np.frombuffer(_memory(n * np.dtype(dtype).itemsize), dtype)


class Generation:
    def __init__(self, capacity: int, slots: int) -> None:
        """capacity: size limit of rows and records together, in bytes. slots: number of slots in the hour table."""
        self.n = 0
        self._capacity = capacity
        rows = capacity // (ROW_COST + RECORD_SIZE) + 1
        self._rows = _array(rows, INDEX)
        self._slots = _array(rows, np.uint32)
        self._previous = _array(rows, np.int32)
        self._starts = _array(rows, np.int64)  # in the arena; -1: the record is already in the hour's log
        # Copies of columns that scans read: a scan of the wide rows would miss the cache at each row.
        self._indexes, self._topics = _array(rows, np.uint32), _array(rows, np.uint32)
        self._seconds = _array(rows, np.uint16)
        self._arena, self._used = memoryview(_memory(capacity)), 0
        #: Position of each slot's latest row; -1 for none.
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
        """Positions of the next n rows."""
        return np.arange(self.n, self.n + n, dtype=np.int32)

    def add(
        self,
        slots: npt.NDArray[np.integer],
        previous: npt.NDArray[np.integer],
        rows: npt.NDArray[np.void],
        records: bytearray | None,
    ) -> None:
        """Append rows and their records, concatenated in the order of rows; None: the records are already in the log.

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
            sizes = rows["size"].astype(np.int64)
            self._starts[first:end] = sizes.cumsum() - sizes + self._used
            self._arena[self._used : self._used + len(records)] = records
            self._used += len(records)
        self.n = end

    def of(self, slot: int, written: int) -> npt.NDArray[np.intp]:
        """Positions of one hour's rows from globalIndex `written` on, ascending."""
        positions: list[int] = []
        at = int(self.tail[slot]) if slot < len(self.tail) else -1
        indexes = self._rows["index"]
        while at >= 0 and indexes[at] >= written:
            positions.append(at)
            at = int(self._previous[at])
        return np.array(positions[::-1], np.intp)

    def by_hour(self) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.uint32]]:
        """(positions ordered by slot, their slots) of all rows."""
        slots = self._slots[: self.n]
        if not self.n:
            return np.zeros(0, np.intp), slots
        span = slots - slots.min()
        order = (span.astype(np.uint16) if span.max() < 1 << 16 else span).argsort(kind="stable")
        return order, slots[order]

    def waiting(
        self, written: npt.NDArray[np.integer]
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint16], npt.NDArray[np.uint32]]:
        """(slot, second, topic) of each row that is not written yet. written: number of written rows per slot."""
        columns = (self._slots[: self.n], self._seconds[: self.n], self._topics[: self.n])
        waits = self._indexes[: self.n] >= written[columns[0]]
        if waits.all():
            return columns
        slots, seconds, topics = columns
        return slots[waits], seconds[waits], topics[waits]

    def get(self, positions: npt.NDArray[np.integer]) -> tuple[npt.NDArray[np.void], list[int]]:
        """(rows, start of each row's record in the arena)."""
        return self._rows.take(positions), self._starts[positions].tolist()

    def records(self, starts: list[int], sizes: list[int]) -> bytes:
        arena = self._arena
        return b"".join([arena[at : at + size] for at, size in zip(starts, sizes, strict=True) if at >= 0])
