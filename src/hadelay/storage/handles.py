"""A bounded set of open files: two years of hours have 50,000, and only the latest used stay open."""

from __future__ import annotations

from collections import OrderedDict

from hadelay.storage.disk import Disk, File


class Handles:
    def __init__(self, disk: Disk, limit: int = 128) -> None:
        self._disk, self._limit = disk, limit
        self._open: OrderedDict[str, File] = OrderedDict()

    def get(self, path: str, *, create: bool = False) -> File:
        """The open file; owned here, and closed when `limit` others were used since. FileNotFoundError."""
        file = self._open.get(path)
        if file is not None:
            self._open.move_to_end(path)
            return file
        file = self._open[path] = self._disk.open(path, create=create)
        if len(self._open) > self._limit:
            self._open.popitem(last=False)[1].close()
        return file

    def forget(self, path: str) -> None:
        file = self._open.pop(path, None)
        if file is not None:
            file.close()

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()
