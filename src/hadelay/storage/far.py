"""Where appends to far hours wait: written as they come, they would open a thousand files per batch.

The journal has these messages already, so waiting costs no durability; it ends at the next checkpoint, or earlier for
an hour that is read. A generation is what arrived between two checkpoints: the frozen one is being written while the
fresh one takes arrivals. Rows lie in arrival order and are chained per hour, by the same linking as seconds are.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from hadelay.codec.formats import INDEX, INDEX_SIZE, RECORD_SIZE

#: Bytes kept per row besides its record.
ROW_COST = INDEX_SIZE + 4 + 4 + 8 + 4 + 4 + 2


def _memory(size: int) -> mmap.mmap:
    """Private pages that cost nothing until touched and go back to the system at once, whatever the heap looks like."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _array(n: int, dtype: Any) -> npt.NDArray[Any]:
    return np.frombuffer(_memory(n * np.dtype(dtype).itemsize), dtype)


class Generation:
    def __init__(self, capacity: int, slots: int) -> None:
        """capacity: bytes, rows and records together, after which nothing fits. slots: hours there are."""
        self.n = 0
        self._capacity = capacity
        rows = capacity // (ROW_COST + RECORD_SIZE) + 1
        self._rows = _array(rows, INDEX)
        self._slots = _array(rows, np.uint32)
        self._previous = _array(rows, np.int32)
        self._starts = _array(rows, np.int64)  # in the arena; -1: the hour has the record already
        # What is asked of all rows again and again, once more: a look at a row is a look at memory.
        self._indexes, self._topics = _array(rows, np.uint32), _array(rows, np.uint32)
        self._seconds = _array(rows, np.uint16)
        self._arena, self._used = memoryview(_memory(capacity)), 0
        #: Position of each slot's latest row, -1 for none.
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
        """The positions the next n rows will have."""
        return np.arange(self.n, self.n + n, dtype=np.int32)

    def add(
        self,
        slots: npt.NDArray[np.integer],
        previous: npt.NDArray[np.integer],
        rows: npt.NDArray[np.void],
        records: bytearray | None,
    ) -> None:
        """Take rows and their records, one after another in the order of rows; None: their hour has them already.

        previous: from chaining the positions `numbers(len(rows))` by slot into `tail`.
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
        """Positions of one hour's rows from globalIndex `written` on, in order: found by walking back."""
        positions: list[int] = []
        at = int(self.tail[slot]) if slot < len(self.tail) else -1
        indexes = self._rows["index"]
        while at >= 0 and indexes[at] >= written:
            positions.append(at)
            at = int(self._previous[at])
        return np.array(positions[::-1], np.intp)

    def by_hour(self) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.uint32]]:
        """(positions ordered by slot, their slots) of everything here."""
        slots = self._slots[: self.n]
        if not self.n:
            return np.zeros(0, np.intp), slots
        span = slots - slots.min()
        order = (span.astype(np.uint16) if span.max() < 1 << 16 else span).argsort(kind="stable")
        return order, slots[order]

    def waiting(
        self, written: npt.NDArray[np.integer]
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint16], npt.NDArray[np.uint32]]:
        """(slot, second, topic) of each row that is not written yet. written: rows of each slot that are."""
        columns = (self._slots[: self.n], self._seconds[: self.n], self._topics[: self.n])
        waits = self._indexes[: self.n] >= written[columns[0]]
        if waits.all():
            return columns
        slots, seconds, topics = columns
        return slots[waits], seconds[waits], topics[waits]

    def get(self, positions: npt.NDArray[np.integer]) -> tuple[npt.NDArray[np.void], list[int]]:
        """(rows, where each one's record starts in the arena)."""
        return self._rows.take(positions), self._starts[positions].tolist()

    def records(self, starts: list[int], sizes: list[int]) -> bytes:
        arena = self._arena
        return b"".join([arena[at : at + size] for at, size in zip(starts, sizes, strict=True) if at >= 0])
