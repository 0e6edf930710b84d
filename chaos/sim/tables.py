"""Simulated stand-in for LmdbBackend: keeps tables in dicts, and appends one record per commit to a file of the
simulated disk, so that power cuts, torn writes and crashes affect commits like other writes.

A record: length u32, crc32 u32, then pickled (dropped, puts) (never read by anything but this class). A record that
does not verify ends the log: that commit never happened.
"""

import pickle
import posixpath
import struct
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from hadelay.platform.disk import Disk

_HEAD = struct.Struct("<II")


class SimBackend:
    """Backend (storage/tables.py) that stores its rows in a file of a SimDisk."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._tables: dict[bytes, dict[bytes, bytes]] = {}
        fresh = not disk.exists(path)
        self._file = disk.open(path, create=True)
        if fresh:
            disk.sync_dir(posixpath.dirname(path))
        self._end = 0
        self._replay(self._file.pread(self._file.size(), 0))

    def _replay(self, data: bytes) -> None:
        while self._end + _HEAD.size <= len(data):
            length, crc = _HEAD.unpack_from(data, self._end)
            body = data[self._end + _HEAD.size : self._end + _HEAD.size + length]
            if not length or len(body) < length or zlib.crc32(body) != crc:
                break
            self._apply(*pickle.loads(body))
            self._end += _HEAD.size + length

    def _apply(self, dropped: list[bytes], puts: list[tuple[bytes, bytes, bytes | None]]) -> None:
        for table in dropped:
            self._tables.pop(table, None)
        for table, key, value in puts:
            rows = self._tables.setdefault(table, {})
            if value is None:
                rows.pop(key, None)
            else:
                rows[key] = value

    def get(self, table: bytes, key: bytes) -> bytes | None:
        return self._tables.get(table, {}).get(key)

    def get_many(self, table: bytes, keys: Sequence[bytes]) -> list[bytes | None]:
        return [self.get(table, key) for key in keys]

    def scan(self, table: bytes, start: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        rows = self._tables.get(table, {})
        keys = sorted(rows)
        first = bisect_left(keys, start)
        return [(key, rows[key]) for key in keys[first : first + limit]]

    def tables(self) -> list[bytes]:
        return sorted(name for name, rows in self._tables.items() if rows)

    def commit(self, dropped: Iterable[bytes], puts: Iterable[tuple[bytes, bytes, bytes | None]]) -> None:
        change = (list(dropped), [(bytes(t), bytes(k), None if v is None else bytes(v)) for t, k, v in puts])
        body = pickle.dumps(change, protocol=4)
        record = _HEAD.pack(len(body), zlib.crc32(body)) + body
        self._file.pwrite(record, self._end)
        self._file.sync()
        self._end += len(record)
        self._apply(*change)

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        pass
