"""Where appends to far hours wait: written as they come, they would open a thousand files per batch.

The journal has these messages already, so waiting costs no durability; it ends at the next checkpoint, or earlier for
an hour that is read. A generation is what arrived between two checkpoints: the frozen one is being written while the
fresh one takes arrivals. Rows lie in arrival order and are chained per hour, by the same linking as seconds are.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hadelay.core.formats import INDEX, INDEX_SIZE

#: Bytes kept per row besides its record.
ROW_COST = INDEX_SIZE + 4 + 4 + 8
_FIRST_CAPACITY = 4096


class Generation:
    def __init__(self, hours: int) -> None:
        """hours: how many slots there are."""
        self.n = 0
        self._rows = np.empty(_FIRST_CAPACITY, INDEX)
        self._slots = np.empty(_FIRST_CAPACITY, np.uint32)
        self._previous = np.empty(_FIRST_CAPACITY, np.int32)
        self._starts = np.empty(_FIRST_CAPACITY, np.int64)  # in the arena; -1: the hour has the record already
        self._arena = bytearray()
        #: Position of each slot's latest row, -1 for none.
        self.tail = np.full(hours, -1, np.int32)

    @property
    def bytes(self) -> int:
        return self.n * ROW_COST + len(self._arena)

    def cover(self, hours: int) -> None:
        if hours > len(self.tail):
            self.tail = np.append(self.tail, np.full(hours - len(self.tail), -1, np.int32))

    def add(
        self,
        slots: npt.NDArray[np.integer],
        previous: npt.NDArray[np.int32],
        rows: npt.NDArray[np.void],
        records: bytearray | None,
    ) -> None:
        """Take rows (copied) and their records, one after another in the order of rows; None: they have them already.

        previous: from chaining the positions `numbers(len(rows))` by slot into `tail`.
        """
        first, end = self.n, self.n + len(rows)
        self._grow(end)
        self._rows[first:end] = rows
        self._slots[first:end] = slots
        self._previous[first:end] = previous
        if records is None:
            self._starts[first:end] = -1
        else:
            sizes = rows["size"].astype(np.int64)
            self._starts[first:end] = sizes.cumsum() - sizes + len(self._arena)
            self._arena += records
        self.n = end

    def numbers(self, n: int) -> npt.NDArray[np.int32]:
        """The positions the next n rows will have."""
        return np.arange(self.n, self.n + n, dtype=np.int32)

    def _grow(self, n: int) -> None:
        capacity = len(self._rows)
        if n <= capacity:
            return
        while capacity < n:
            capacity *= 2
        for name in ("_rows", "_slots", "_previous", "_starts"):
            getattr(self, name).resize(capacity, refcheck=False)

    def holds(self, slot: int) -> bool:
        return bool(self.tail[slot] >= 0)

    def of(self, slot: int) -> npt.NDArray[np.int32]:
        """Positions of one hour's rows in order, found by walking back."""
        positions, at = [], int(self.tail[slot])
        while at >= 0:
            positions.append(at)
            at = int(self._previous[at])
        return np.array(positions[::-1], np.int32)

    def by_hour(self) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.uint32]]:
        """(positions ordered by slot, their slots) of everything here."""
        slots = self._slots[: self.n]
        if not self.n:
            return np.zeros(0, np.intp), slots
        span = slots - slots.min()
        order = (span.astype(np.uint16) if span.max() < 1 << 16 else span).argsort(kind="stable")
        return order, slots[order]

    def get(self, positions: npt.NDArray[np.integer]) -> tuple[npt.NDArray[np.void], list[int]]:
        """(rows, where each one's record starts in the arena)."""
        return self._rows.take(positions), self._starts[positions].tolist()

    def records(self, starts: list[int], sizes: list[int]) -> bytes:
        with memoryview(self._arena) as arena:
            return b"".join([arena[at : at + size] for at, size in zip(starts, sizes, strict=True) if at >= 0])

    def taken(self, slots: npt.NDArray[np.integer] | int) -> None:
        self.tail[slots] = -1
