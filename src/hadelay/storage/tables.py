"""Named tables of bytes to bytes: changes since the last checkpoint in memory, everything older behind a Backend.

The backend is written only by the checkpoint's one transaction. Were it written earlier, replay after a crash would see
keys that are not there yet at the entry being replayed, and lose a message over it (architecture §3).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hadelay.core.formats import HOUR_ROW

#: What a key and value in a dict cost besides their bytes, roughly.
_ROW_COST = 150

#: The checkpoint's own tables: {b"row": msgpack, b"core": bytes}, and hour u32 big-endian → HOUR_ROW, → core's bytes.
CHECKPOINT, HOURS, HOUR_STATES = b"checkpoint", b"hours", b"hour-states"
ROW, CORE = b"row", b"core"

Put = tuple[bytes, bytes, bytes | None]


class Backend(Protocol):
    """An ordered key-value store with named tables and one atomic, durable commit: LmdbBackend, and a simulated twin in
    hadelay.testing. `commit` may run in a thread while the loop reads; readers see either all of it or nothing. An
    error of the disk is an OSError."""

    def get(self, table: bytes, key: bytes) -> bytes | None: ...

    def scan(self, table: bytes, start: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        """Up to `limit` pairs with key ≥ start, ascending; none when there is no such table."""
        ...

    def tables(self) -> list[bytes]:
        """Names of the tables that hold something (or did), sorted."""
        ...

    def commit(self, dropped: Iterable[bytes], puts: Iterable[Put]) -> None:
        """Drop whole tables first, then put (table, key, value) or delete (value None). Durable when it returns."""
        ...

    def close(self) -> None: ...


def scan_all(backend: Backend, table: bytes) -> Iterator[tuple[bytes, bytes]]:
    start = b""
    while page := backend.scan(table, start, 4096):
        yield from page
        start = page[-1][0] + b"\0"


def hour_rows(backend: Backend) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.void]]:
    """(hours, their HOUR_ROW) of the last checkpoint, ascending."""
    found = list(scan_all(backend, HOURS))
    hours = np.array([int.from_bytes(key, "big") for key, _ in found], np.int64)
    return hours, np.frombuffer(b"".join(value for _, value in found), HOUR_ROW)


class Layer:
    """Changes between two checkpoints."""

    def __init__(self) -> None:
        self.rows: dict[bytes, dict[bytes, bytes | None]] = {}
        self.dropped: set[bytes] = set()
        self.bytes = 0

    def put(self, table: bytes, key: bytes, value: bytes | None) -> None:
        rows = self.rows.get(table)
        if rows is None:
            rows = self.rows[table] = {}
        rows[key] = value
        self.bytes += len(key) + len(value or b"") + _ROW_COST

    def drop(self, table: bytes) -> None:
        self.rows.pop(table, None)
        self.dropped.add(table)

    def puts(self) -> Iterator[Put]:
        for table in sorted(self.rows):
            rows = self.rows[table]
            for key in sorted(rows):  # in order: the backend's pages are then filled one after another
                yield table, key, rows[key]


class Tables:
    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._fresh = Layer()
        self._frozen: Layer | None = None

    @property
    def overlay_bytes(self) -> int:
        """What changed since the last checkpoint began, roughly as it lies in memory: a reason for a checkpoint."""
        return self._fresh.bytes

    def get(self, table: bytes, key: bytes) -> bytes | None:
        for layer in self._layers():
            rows = layer.rows.get(table)
            if rows is not None and key in rows:
                return rows[key]
            if table in layer.dropped:
                return None
        return self.backend.get(table, key)

    def put(self, table: bytes, key: bytes, value: bytes) -> None:
        self._fresh.put(table, key, value)

    def delete(self, table: bytes, key: bytes) -> None:
        self._fresh.put(table, key, None)

    def drop_table(self, table: bytes) -> None:
        self._fresh.drop(table)

    def scan(self, table: bytes, start: bytes = b"", limit: int = 1000) -> list[tuple[bytes, bytes]]:
        """Up to `limit` pairs with key ≥ start, ascending. Sorts the changed keys: not for hot paths."""
        changed: dict[bytes, bytes | None] = {}
        below = True
        for layer in self._layers():
            changed = layer.rows.get(table, {}) | changed
            if table in layer.dropped:
                below = False
                break
        keys = sorted(changed)
        keys = keys[bisect_left(keys, start) :]
        found: dict[bytes, bytes] = {}
        while below and len(found) < limit:
            page = self.backend.scan(table, start, limit)
            found.update((key, value) for key, value in page if key not in changed)
            if len(page) < limit:
                break
            start = page[-1][0] + b"\0"
        # Beyond the last key the backend was asked for, changed keys may not be mixed with unseen ones.
        end = max(found) if below and len(found) >= limit else None
        found.update((k, v) for k in keys if (v := changed[k]) is not None and (end is None or k <= end))
        return sorted(found.items())[:limit]

    def freeze(self) -> Layer:
        """What changed until now, for the backend; changes go to a new layer over it."""
        assert self._frozen is None, "one checkpoint at a time"
        self._frozen, self._fresh = self._fresh, Layer()
        return self._frozen

    def committed(self) -> None:
        """The backend has the frozen layer."""
        self._frozen = None

    def _layers(self) -> tuple[Layer, ...]:
        return (self._fresh,) if self._frozen is None else (self._fresh, self._frozen)
