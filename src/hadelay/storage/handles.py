"""An LRU of open files: two years of hours have 50,000 files, too many to keep open.

A closed LRU opens no file: a listing over a store that a snapshot has replaced would otherwise read the new store's
files, and write the old store's messages to them.
"""

from collections import OrderedDict

from hadelay.errors import DamagedFile, Overloaded
from hadelay.platform.disk import Disk, File


def files_closed() -> Overloaded:
    """The error of a read from a closed store; another node, or the reopened store, can answer."""
    return Overloaded("this node's files are closed: it stops or installs a snapshot; retry", retry_after_ms=1_000)


class Handles:
    def __init__(self, disk: Disk, limit: int = 128) -> None:
        self._disk, self._limit = disk, limit
        self._open: OrderedDict[str, File] = OrderedDict()
        self._closed = False

    def get(self, path: str, *, create: bool = False) -> File:
        """The open file, which the LRU owns and closes after `limit` other files were used. FileNotFoundError."""
        file = self._open.get(path)
        if file is not None:
            self._open.move_to_end(path)
            return file
        if self._closed:
            raise files_closed()
        file = self._open[path] = self._disk.open(path, create=create)
        if len(self._open) > self._limit:
            self._open.popitem(last=False)[1].close()
        return file

    def read(self, path: str, size: int, offset: int) -> bytes:
        """`size` bytes of a file. DamagedFile when the file ends too early."""
        data = self.get(path).pread(size, offset)
        if len(data) < size:
            raise DamagedFile(path, offset + len(data), "the file ends too early")
        return data

    def forget(self, path: str) -> None:
        file = self._open.pop(path, None)
        if file is not None:
            file.close()

    def close(self) -> None:
        self._closed = True
        while self._open:
            self._open.popitem()[1].close()
