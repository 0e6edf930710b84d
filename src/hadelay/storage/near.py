"""Near hour: the previous, current or one of the next two hours, with index and log mapped read-only (S2 in
docs/explanation/architecture.md).

Appends use pwrite into allocated space: on a full disk, a store through the map raises SIGBUS, but pwrite an OSError.
Reads through the map see a pwrite at once, because both use the page cache.
"""

import contextlib

import numpy as np
import numpy.typing as npt

from hadelay.codec.formats import INDEX, INDEX_SIZE
from hadelay.platform.disk import Disk, File

_PAGE = 4096
#: Minimum and maximum size, in bytes, by which a file is allocated ahead of its data. The size doubles each time, so
#: that there are few remaps and little waste.
_STEP_MIN, _STEP_MAX = 64 << 10, 32 << 20


class Mapped:
    """One append-only file with a mapping that extends beyond the written bytes."""

    def __init__(self, disk: Disk, path: str, length: int) -> None:
        self.file: File = disk.open(path, create=True)
        self.length = length
        self._mapped = 0
        self.view = memoryview(b"")
        self.reserve(length)

    def reserve(self, length: int) -> bool:
        """Allocate and map at least `length` bytes. Returns True if the map changed: views of the old map are stale."""
        if length <= self._mapped:
            return False
        step = min(max(self._mapped, _STEP_MIN), _STEP_MAX)
        size = _pages(max(length, self._mapped + step))
        try:
            self.file.allocate(size)
        except OSError:
            size = _pages(length)  # the disk is too full to allocate ahead: allocate no more than needed
            self.file.allocate(size)
        self.view = self.file.map(size)
        self._mapped = size
        return True

    def close(self) -> None:
        """Close the file: unmap it, and free the space allocated beyond the data, unless a reader still uses the
        map."""
        with contextlib.suppress(BufferError):
            self.view.release()
            self.file.truncate(self.length)
        self.file.close()


def _pages(length: int) -> int:
    return -(-length // _PAGE) * _PAGE


class NearHour:
    def __init__(self, disk: Disk, path: str, entries: int, log_bytes: int) -> None:
        self.entries = entries
        self._idx = Mapped(disk, path + ".idx", entries * INDEX_SIZE)
        self._log = Mapped(disk, path + ".log", log_bytes)
        self._view_rows()

    def _view_rows(self) -> None:
        rows = np.frombuffer(self._idx.view, np.uint8).view(INDEX)
        rows.flags.writeable = False
        self._rows = rows

    def append(self, rows: npt.NDArray[np.void], records: bytearray | None) -> None:
        """Append records (if any) to the .log file, then rows, which have links and CRCs already, to the .idx file."""
        log, idx = self._log, self._idx
        if records:
            log.reserve(log.length + len(records))
            log.file.pwrite(records, log.length)
            log.length += len(records)
        if idx.reserve(idx.length + rows.nbytes):
            self._view_rows()
        idx.file.pwrite(rows.view(np.uint8).data, idx.length)
        idx.length += rows.nbytes
        self.entries += len(rows)

    def rows(self) -> npt.NDArray[np.void]:
        """All INDEX rows of the hour, as a view without a copy."""
        return self._rows[: self.entries]

    def words(self) -> memoryview:
        return self._idx.view[: self._idx.length].cast("I")

    def record(self, offset: int, size: int) -> bytes:
        return bytes(self._log.view[offset : offset + size])

    def cached_record(self, offset: int, size: int) -> bytes | None:
        """Read a record if it is in memory, else return None. Reads the file, not the map: a missing page of the map
        would block the whole process."""
        return self._log.file.pread_cached(size, offset)

    def overwrite(self, suffix: str, data: bytes, offset: int) -> None:
        """Repair a file: overwrite damaged bytes with those written originally."""
        (self._idx if suffix == ".idx" else self._log).file.pwrite(data, offset)

    def close(self) -> None:
        del self._rows
        self._idx.close()
        self._log.close()
