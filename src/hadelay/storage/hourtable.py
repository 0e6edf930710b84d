"""What is known of every hour, in columns: two years are 17,520 rows of 50 bytes, looked up and changed vectorised.

A row's place (its slot) is hour − base. Columns grow at either end as hours appear.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hadelay.core.formats import HOUR_ROW
from hadelay.model import NONE32

#: Bits of `unsynced`: which files of the hour hold bytes that no sync has covered yet.
LOG, IDX, DSP = 1, 2, 4
_MARGIN = 256

_COLUMNS: dict[str, type[np.generic]] = {
    "entries": np.uint32,  # applied
    "log_bytes": np.int64,  # applied
    "events": np.uint32,
    "written": np.uint32,  # entries that stand in .idx; the others wait in the far buffer
    "log_crc": np.uint32,  # of what is written
    "idx_crc": np.uint32,
    "dsp_crc": np.uint32,
    "changed": np.bool_,  # since the last sample for a checkpoint
    "unsynced": np.uint8,
}


class HourTable:
    entries: npt.NDArray[np.uint32]
    log_bytes: npt.NDArray[np.int64]
    events: npt.NDArray[np.uint32]
    written: npt.NDArray[np.uint32]
    log_crc: npt.NDArray[np.uint32]
    idx_crc: npt.NDArray[np.uint32]
    dsp_crc: npt.NDArray[np.uint32]
    changed: npt.NDArray[np.bool_]
    unsynced: npt.NDArray[np.uint8]

    def __init__(self) -> None:
        self.base, self.size = 0, 0
        for name, kind in _COLUMNS.items():
            setattr(self, name, np.zeros(0, kind))

    def covers(self, first: int, last: int) -> bool:
        return self.base <= first and last < self.base + self.size

    def cover(self, first: int, last: int) -> None:
        """Make room for hours first..last. Slots move when `first` is below base."""
        base = min(first, self.base) if self.size else first
        end = max(last + 1 + _MARGIN, self.base + self.size if self.size else 0)
        if self.size and end > self.base + self.size:
            end = max(end, self.base + self.size + self.size // 2)
        shift, size = self.base - base if self.size else 0, end - base
        for name, kind in _COLUMNS.items():
            column = np.zeros(size, kind)
            column[shift : shift + self.size] = getattr(self, name)
            setattr(self, name, column)
        self.base, self.size = base, size

    def find(self, hour: int) -> int:
        """The slot of an hour, or -1."""
        slot = hour - self.base
        return slot if 0 <= slot < self.size else -1

    def clear(self, slot: int) -> None:
        """Forget a retired hour, but not what is to be synced: a checkpoint under way may still name its files."""
        for name in _COLUMNS:
            if name != "unsynced":
                getattr(self, name)[slot] = 0
        self.written[slot] = NONE32  # nothing of it waits, whatever the far buffer still has

    def rows(self, slots: npt.NDArray[np.intp]) -> npt.NDArray[np.void]:
        """HOUR_ROW of each slot; the CRCs are those of what is written."""
        rows = np.zeros(len(slots), HOUR_ROW)
        for name in ("log_bytes", "entries", "events", "log_crc", "idx_crc", "dsp_crc"):
            rows[name] = getattr(self, name)[slots]
        return rows

    def load(self, hours: npt.NDArray[np.int64], rows: npt.NDArray[np.void]) -> None:
        """Set what a checkpoint says."""
        if not len(hours):
            return
        self.cover(int(hours.min()), int(hours.max()))
        slots = hours - self.base
        for name in ("log_bytes", "entries", "events", "log_crc", "idx_crc", "dsp_crc"):
            getattr(self, name)[slots] = rows[name]
        self.written[slots] = rows["entries"]

    def take(self, column: str, hours: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """A column's values for many hours; 0 for hours that are not known."""
        slots = hours - self.base
        known = (slots >= 0) & (slots < self.size)
        values = np.zeros(len(hours), _COLUMNS[column])
        values[known] = getattr(self, column)[slots[known]]
        return values
