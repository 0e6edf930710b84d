"""An hour that is about to run: its index and log mapped read-only (S2).

Appends are pwrite into allocated space, never stores through the mapping: a full disk under a written map is a SIGBUS,
a full disk under pwrite is an OSError. Both go through the page cache, so a read through the map sees them at once.
"""

from __future__ import annotations

import contextlib

import numpy as np
import numpy.typing as npt

from hadelay.codec.formats import INDEX, INDEX_SIZE
from hadelay.platform.disk import Disk, File

_PAGE = 4096
#: Space is allocated and mapped ahead by doubling, within these bounds: few remaps, little waste.
_STEP_MIN, _STEP_MAX = 64 << 10, 32 << 20


class Mapped:
    """One append-only file with a mapping that stays ahead of what is written."""

    def __init__(self, disk: Disk, path: str, length: int) -> None:
        self.file: File = disk.open(path, create=True)
        self.length = length
        self._mapped = 0
        self.view = memoryview(b"")
        self.reserve(length)

    def reserve(self, length: int) -> bool:
        """Allocate and map at least `length` bytes. True when the map changed: derived views must be made anew."""
        if length <= self._mapped:
            return False
        step = min(max(self._mapped, _STEP_MIN), _STEP_MAX)
        size = _pages(max(length, self._mapped + step))
        try:
            self.file.allocate(size)
        except OSError:
            size = _pages(length)  # a disk that is nearly full has no room for steps, but perhaps for this
            self.file.allocate(size)
        self.view = self.file.map(size)
        self._mapped = size
        return True

    def close(self) -> None:
        """Unmap, and give back the space behind the end unless somebody still reads through the map."""
        with contextlib.suppress(BufferError):
            self.view.release()
            self.file.truncate(self.length)
        self.file.close()


def _pages(length: int) -> int:
    return -(-length // _PAGE) * _PAGE


class NearHour:
    def __init__(self, disk: Disk, path: str, entries: int, log_bytes: int) -> None:
        """path: of the hour's files, without their suffix."""
        self.entries = entries
        self._idx = Mapped(disk, path + ".idx", entries * INDEX_SIZE)
        self._log = Mapped(disk, path + ".log", log_bytes)
        self._view_rows()

    def _view_rows(self) -> None:
        rows = np.frombuffer(self._idx.view, np.uint8).view(INDEX)
        rows.flags.writeable = False
        self._rows = rows

    def append(self, rows: npt.NDArray[np.void], records: bytearray | None) -> None:
        """Write linked and sealed rows, their records (if any) first."""
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
        """INDEX rows, zero-copy."""
        return self._rows[: self.entries]

    def words(self) -> memoryview:
        return self._idx.view[: self._idx.length].cast("I")

    def record(self, offset: int, size: int) -> bytes:
        return bytes(self._log.view[offset : offset + size])

    def cached_record(self, offset: int, size: int) -> bytes | None:
        """Not through the map: there, a page that is not in memory stops the whole process."""
        return self._log.file.pread_cached(size, offset)

    def overwrite(self, suffix: str, data: bytes, offset: int) -> None:
        """Repair only: the same bytes as were once written."""
        (self._idx if suffix == ".idx" else self._log).file.pwrite(data, offset)

    def close(self) -> None:
        del self._rows
        self._idx.close()
        self._log.close()
