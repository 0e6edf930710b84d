"""A bounded set of open files: two years of hours have 50,000, and only the latest used stay open.

Once closed, it opens none: a list that goes on over a store which a snapshot has replaced would read the new store's
files, write to them what waited in the old one, and leave them open.
"""

from __future__ import annotations

from collections import OrderedDict

from hadelay.errors import Overloaded
from hadelay.platform.disk import Disk, File


def files_closed() -> Overloaded:
    """What whoever still looks gets: soon there are others here, or another node has them."""
    return Overloaded("this node's files are closed: it stops, or takes in a snapshot", retry_after_ms=1_000)


class Handles:
    def __init__(self, disk: Disk, limit: int = 128) -> None:
        self._disk, self._limit = disk, limit
        self._open: OrderedDict[str, File] = OrderedDict()
        self._closed = False

    def get(self, path: str, *, create: bool = False) -> File:
        """The open file; owned here, and closed when `limit` others were used since. FileNotFoundError."""
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

    def forget(self, path: str) -> None:
        file = self._open.pop(path, None)
        if file is not None:
            file.close()

    def close(self) -> None:
        self._closed = True
        while self._open:
            self._open.popitem()[1].close()
