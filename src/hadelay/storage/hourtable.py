"""Table of all hours, kept in numpy columns: two years are 17,520 rows of 58 bytes.

The slot of an hour is place(hour) − base: live hours have even places and dead hours odd ones, so both are dense.
Columns grow at either end as hours appear.
"""

import numpy as np
import numpy.typing as npt

from hadelay.codec.formats import HOUR_ROW
from hadelay.model import DEAD_HOURS, NONE32

#: Bits of the column `unsynced`: one for each of an hour's files, set while the file has unsynced bytes.
LOG, IDX, DSP = 1, 2, 4
#: Suffix of a file → its bit in the column `unsynced`.
FILES = {".log": LOG, ".idx": IDX, ".dsp": DSP}
_MARGIN = 256
#: Columns of the table that a checkpoint stores in HOUR_ROWs.
_IN_CHECKPOINT = ("log_bytes", "entries", "events", "log_crc", "idx_crc", "dsp_crc")


def place(hour: int) -> int:
    return 2 * hour if hour < DEAD_HOURS else 2 * (hour - DEAD_HOURS) + 1


def places(hours: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.where(hours < DEAD_HOURS, 2 * hours, 2 * (hours - DEAD_HOURS) + 1)


class HourTable:
    def __init__(self) -> None:
        self.base, self.size = 0, 0
        #: Columns, per hour, at the applied index: number of index entries, bytes of records, number of events.
        self.entries, self.log_bytes = np.zeros(0, np.uint32), np.zeros(0, np.int64)
        self.events = np.zeros(0, np.uint32)
        #: Columns, per hour, of what its files have: number of entries in .idx (later ones are buffered), bytes in
        #: .log, CRC of the written bytes of each file.
        self.written, self.log_written = np.zeros(0, np.uint32), np.zeros(0, np.int64)
        self.log_crc, self.idx_crc, self.dsp_crc = (np.zeros(0, np.uint32) for _ in range(3))
        #: Columns per hour: whether the hour has changed since the last checkpoint's sample; and which of its files
        #: have unsynced bytes, a bit for each file.
        self.changed, self.unsynced = np.zeros(0, np.bool_), np.zeros(0, np.uint8)
        self._columns = [name for name, column in vars(self).items() if isinstance(column, np.ndarray)]

    def covers(self, first: int, last: int) -> bool:
        """Whether the table has slots for all hours from `first` to `last`."""
        low, high = place(first), place(last)
        return self.base <= low and high < self.base + self.size and not (low ^ high) & 1

    def cover(self, hours: npt.NDArray[np.int64]) -> None:
        """Add slots (rows of this table) for these hours. Existing slots move if an hour lies before the first slot
        (see `moves`)."""
        wanted = places(hours)
        first, last = int(wanted.min()), int(wanted.max())
        base = min(first, self.base) if self.size else first
        end = max(last + 1 + _MARGIN, self.base + self.size if self.size else 0)
        if self.size and end > self.base + self.size:
            end = max(end, self.base + self.size + self.size // 2)
        shift, size = self.base - base if self.size else 0, end - base
        for name in self._columns:
            old = getattr(self, name)
            column = np.zeros(size, old.dtype)
            column[shift : shift + self.size] = old
            setattr(self, name, column)
        self.base, self.size = base, size

    def moves(self, hours: npt.NDArray[np.int64]) -> bool:
        """Whether calling `cover` with these hours would move the slots (rows of this table) of other hours."""
        return bool(self.size) and int(places(hours).min()) < self.base

    def slots(self, hours: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Slots (rows of this table) of these hours; undefined for an hour without a slot."""
        return places(hours) - self.base

    def hours(self, slots: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        numbers = slots.astype(np.int64) + self.base
        return numbers // 2 + (numbers & 1) * DEAD_HOURS

    def hour(self, slot: int) -> int:
        half, dead = divmod(slot + self.base, 2)
        return half + dead * DEAD_HOURS

    def find(self, hour: int) -> int:
        """Slot (row of this table) of an hour; -1 if it has none."""
        # The formula of `place`, without its call, for speed: this method runs about ten times per message.
        slot = (2 * hour if hour < DEAD_HOURS else 2 * (hour - DEAD_HOURS) + 1) - self.base
        return slot if 0 <= slot < self.size else -1

    def clear(self, slot: int) -> None:
        """Set the table's columns to 0 for a retired hour, except `unsynced`: a running checkpoint may still sync its
        files."""
        for name in self._columns:
            if name != "unsynced":
                getattr(self, name)[slot] = 0
        # Set `written` above all entry numbers: rows of the hour that are still buffered then count as written.
        self.written[slot] = NONE32

    def rows(self, slots: npt.NDArray[np.intp]) -> npt.NDArray[np.void]:
        """Make the HOUR_ROW of each slot; its CRCs cover the written bytes."""
        rows = np.zeros(len(slots), HOUR_ROW)
        for name in _IN_CHECKPOINT:
            rows[name] = getattr(self, name)[slots]
        return rows

    def load(self, hours: npt.NDArray[np.int64], rows: npt.NDArray[np.void]) -> None:
        """Load the hours of a checkpoint from their HOUR_ROWs."""
        if not len(hours):
            return
        self.cover(hours)
        slots = self.slots(hours)
        for name in _IN_CHECKPOINT:
            getattr(self, name)[slots] = rows[name]
        self.written[slots], self.log_written[slots] = rows["entries"], rows["log_bytes"]

    def entries_of(self, hours: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
        """Number of index entries of each hour at the applied index of the Raft log; 0 for unknown hours."""
        slots = self.slots(hours)
        known = (slots >= 0) & (slots < self.size)
        values = np.zeros(len(hours), np.uint32)
        values[known] = self.entries[slots[known]]
        return values
