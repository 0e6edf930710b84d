"""Read-ahead (leader): a thread brings records that fall due soon into memory, in the order of the file.

Nothing depends on read-ahead: a record that is not in memory at its hand-out is read in a thread (reading.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hadelay.platform.disk import Disk
from hadelay.platform.runtime import Runtime

log = logging.getLogger(__name__)

#: Time from the read to the records' second: early enough for a slow disk, and late enough that a small
#: page cache still has them when they are handed out.
AHEAD_S = 2.0
#: Limit of the gap between two records that are read as one span, in bytes.
_GAP = 32 << 10


class ReadAhead:
    def __init__(self, disk: Disk, runtime: Runtime, path: Callable[[int], str]) -> None:
        """path: gives the path of an hour's files, without suffix."""
        self._disk, self._runtime, self._path = disk, runtime, path

    def index(self, hour: int) -> None:
        """Read the index of an hour that begins soon or is running: walks along its chains touch all of it."""
        self._in_thread("index-ahead", hour, ".idx", lambda size: [(0, size)])

    def records(self, hour: int, rows: NDArray[np.void], in_s: float) -> None:
        """Read the records of INDEX rows whose second begins in `in_s` seconds."""
        if len(rows):
            starts, sizes = rows["offset"].astype(np.int64), rows["size"].astype(np.int64)
            self._runtime.call_later(max(0.0, in_s - AHEAD_S), self._records, hour, starts, starts + sizes)

    def _records(self, hour: int, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        self._in_thread("read-ahead", hour, ".log", lambda size: spans(starts, ends))

    def _in_thread(self, lane: str, hour: int, suffix: str, wanted: Callable[[int], list[tuple[int, int]]]) -> None:
        path = self._path(hour) + suffix

        def read() -> None:
            file = self._disk.open(path)
            try:
                for start, end in wanted(file.size()):
                    file.will_need(end - start, start)
            finally:
                file.close()

        def done(_: None, error: BaseException | None) -> None:
            if error is not None and not isinstance(error, FileNotFoundError):  # retired meanwhile
                log.debug("read_ahead_failed", extra={"path": path, "error": str(error)})

        self._runtime.in_thread(lane, read, done)


def spans(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> list[tuple[int, int]]:
    """(start, end) of what to read, ascending; near neighbours are joined."""
    order = starts.argsort()
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    first = np.flatnonzero(np.append(True, starts[1:] > ends[:-1] + _GAP))
    last = np.append(first[1:], len(starts)) - 1
    return list(zip(starts[first].tolist(), ends[last].tolist(), strict=True))
