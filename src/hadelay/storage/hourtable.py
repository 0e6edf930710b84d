"""What is known of every hour, in columns: two years are 17,520 rows of 58 bytes, looked up and changed vectorised.

A row's place (its slot) is place(hour) − base: dead hours lie between the others, so that both are dense. Columns grow
at either end as hours appear.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hadelay.codec.formats import HOUR_ROW
from hadelay.model import DEAD_HOURS, NONE32

#: Bits of `unsynced`: which files of the hour hold bytes that no sync has covered yet.
LOG, IDX, DSP = 1, 2, 4
_MARGIN = 256

_COLUMNS: dict[str, type[np.generic]] = {
    "entries": np.uint32,  # applied
    "log_bytes": np.int64,  # applied
    "events": np.uint32,
    "written": np.uint32,  # entries that stand in .idx; the others wait in the far buffer
    "log_written": np.int64,  # bytes of the records that stand in .log
    "log_crc": np.uint32,  # of what is written
    "idx_crc": np.uint32,
    "dsp_crc": np.uint32,
    "changed": np.bool_,  # since the last sample for a checkpoint
    "unsynced": np.uint8,
}


def place(hour: int) -> int:
    return 2 * hour if hour < DEAD_HOURS else 2 * (hour - DEAD_HOURS) + 1


def places(hours: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.where(hours < DEAD_HOURS, 2 * hours, 2 * (hours - DEAD_HOURS) + 1)


class HourTable:
    entries: npt.NDArray[np.uint32]
    log_bytes: npt.NDArray[np.int64]
    events: npt.NDArray[np.uint32]
    written: npt.NDArray[np.uint32]
    log_written: npt.NDArray[np.int64]
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
        """There are surely slots for these two hours, and for those between them."""
        low, high = place(first), place(last)
        return self.base <= low and high < self.base + self.size and not (low ^ high) & 1

    def cover(self, hours: npt.NDArray[np.int64]) -> None:
        """Make room for these hours. Slots move when one lies below base: see `moves`."""
        wanted = places(hours)
        first, last = int(wanted.min()), int(wanted.max())
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

    def moves(self, hours: npt.NDArray[np.int64]) -> bool:
        """Covering these hours moves the slots there are."""
        return bool(self.size) and int(places(hours).min()) < self.base

    def slots(self, hours: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Of hours that are covered."""
        return places(hours) - self.base

    def hours(self, slots: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        numbers = slots.astype(np.int64) + self.base
        return numbers // 2 + (numbers & 1) * DEAD_HOURS

    def hour(self, slot: int) -> int:
        half, dead = divmod(slot + self.base, 2)
        return half + dead * DEAD_HOURS

    def find(self, hour: int) -> int:
        """The slot of an hour, or -1."""
        slot = place(hour) - self.base
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
        self.cover(hours)
        slots = self.slots(hours)
        for name in ("log_bytes", "entries", "events", "log_crc", "idx_crc", "dsp_crc"):
            getattr(self, name)[slots] = rows[name]
        self.written[slots], self.log_written[slots] = rows["entries"], rows["log_bytes"]

    def take(self, column: str, hours: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """A column's values for many hours; 0 for hours that are not known."""
        slots = self.slots(hours)
        known = (slots >= 0) & (slots < self.size)
        values = np.zeros(len(hours), _COLUMNS[column])
        values[known] = getattr(self, column)[slots[known]]
        return values
