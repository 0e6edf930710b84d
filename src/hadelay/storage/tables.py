"""Named tables of bytes to bytes: changes since the last checkpoint in memory, older rows in a Backend.

Only the checkpoint's transaction writes to the backend. After an earlier write and a crash, replay would see keys of
later entries, and lose a message.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from hadelay.codec.formats import HOUR_ROW
from hadelay.platform.disk import files_closed
from hadelay.storage.sortedkeys import SortedKeys, pieces

#: Approximate memory, in bytes, of a dict entry without its key and value.
_ROW_COST = 150
#: Limit of the keys that `range` reads in one step (page); the next step continues.
_MAX_PAGE = 1_024

#: Names of tables that store a checkpoint. CHECKPOINT: rows b"row" (msgpack) and b"core" (the ledger's bytes). HOURS:
#: hour (u32 big-endian) → HOUR_ROW. HOUR_STATES: hour → the ledger's state of the hour.
CHECKPOINT, HOURS, HOUR_STATES = b"checkpoint", b"hours", b"hour-states"
ROW, CORE = b"row", b"core"

Put = tuple[bytes, bytes, bytes | None]


class Backend(Protocol):
    """Ordered key-value store with named tables and an atomic, durable commit. LmdbBackend implements it; chaos.sim has
    a simulated one. `commit` may run in a thread during reads, which see all of a commit or nothing. Disk errors are
    raised as OSError."""

    def get(self, table: bytes, key: bytes) -> bytes | None: ...

    def get_many(self, table: bytes, keys: Sequence[bytes]) -> list[bytes | None]: ...

    def scan(self, table: bytes, start: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        """Read up to `limit` (key, value) pairs of a table, ascending from key `start`; empty for an unknown table."""
        ...

    def tables(self) -> list[bytes]:
        """Names of all tables, sorted, empty ones included."""
        ...

    def commit(self, dropped: Iterable[bytes], puts: Iterable[Put]) -> None:
        """Delete whole tables, then put (table, key, value), or delete the key if value is None. Durable on return."""
        ...

    def interrupt(self) -> None:
        """Make a commit that runs in a thread end soon, either durable or without effect. Only `close` may follow."""
        ...

    def close(self) -> None: ...


class _Closed:
    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise files_closed()

    get = get_many = scan = tables = commit = _refuse

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        pass


def scan_all(backend: Backend, table: bytes) -> Iterator[tuple[bytes, bytes]]:
    start = b""
    while page := backend.scan(table, start, 4096):
        yield from page
        start = page[-1][0] + b"\0"


def hour_rows(backend: Backend) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.void]]:
    """Read the hours of the last checkpoint, ascending, and the HOUR_ROW of each."""
    found = list(scan_all(backend, HOURS))
    hours = np.array([int.from_bytes(key, "big") for key, _ in found], np.int64)
    return hours, np.frombuffer(b"".join(value for _, value in found), HOUR_ROW)


class Layer:
    """Table changes between two checkpoints, in memory. ordered: tables whose keys are kept sorted from the first
    change on."""

    def __init__(self, ordered: Iterable[bytes] = ()) -> None:
        self.rows: dict[bytes, dict[bytes, bytes | None]] = {}
        self.dropped: set[bytes] = set()
        self.bytes = 0
        #: Ordered keys of each table that was scanned in this layer or the layer before.
        self._orders = {table: SortedKeys() for table in ordered}
        #: Names of the tables scanned in this layer; the next layer keeps their keys sorted from its start on.
        self.scanned: set[bytes] = set()
        #: Keys of each table that neither an older layer nor the backend has: if such a key is deleted, nothing has to
        #: be written.
        self._new: dict[bytes, set[bytes]] = {}

    def put(self, table: bytes, key: bytes, value: bytes | None) -> None:
        rows = self.rows.setdefault(table, {})
        if key in rows:
            self.bytes -= len(rows[key] or b"")
        else:
            self.bytes += len(key) + _ROW_COST
            if self._orders and table in self._orders:
                self._orders[table].add(key)
        rows[key] = value
        self.bytes += len(value or b"")

    def put_many(self, table: bytes, rows: Mapping[bytes, bytes]) -> None:
        mine = self.rows.setdefault(table, {})
        if table in self._orders or any(map(mine.__contains__, rows)):
            for key, value in rows.items():
                self.put(table, key, value)
            return
        mine.update(rows)
        self.bytes += sum(map(len, rows)) + sum(map(len, rows.values())) + _ROW_COST * len(rows)

    def put_new(self, table: bytes, rows: Mapping[bytes, bytes]) -> None:
        known = self.rows.get(table, {})
        self._new.setdefault(table, set()).update([key for key in rows if key not in known])
        self.put_many(table, rows)

    def delete_many(self, table: bytes, keys: Iterable[bytes]) -> None:
        new, order = self._new.get(table, ()), self._orders.get(table)
        for key in keys:
            if key not in new:
                self.put(table, key, None)
                continue
            self._new[table].remove(key)
            self.bytes -= len(key) + len(self.rows[table].pop(key) or b"") + _ROW_COST
            if order is not None:
                order.remove(key)

    def drop(self, table: bytes) -> None:
        self.rows.pop(table, None)
        self._new.pop(table, None)
        if table in self._orders:
            self._orders[table] = SortedKeys()
        self.dropped.add(table)

    def page(self, table: bytes, start: bytes, limit: int) -> list[tuple[bytes, bytes | None]]:
        """Read up to `limit` changes of a table, ascending from key `start`."""
        self.scanned.add(table)
        rows = self.rows.get(table)
        if not rows:
            return []
        order = self._orders.get(table)
        if order is None:
            order = self._orders[table] = SortedKeys(rows)
        return [(key, rows[key]) for key in order.page(start, limit)]

    def puts(self) -> Iterator[Put]:
        for table in sorted(self.rows):
            rows = self.rows[table]
            for piece in pieces(rows):  # keys in ascending order, because neighbouring keys share a page of the backend
                yield from ((table, key, rows[key]) for key in piece)


class Tables:
    def __init__(self, backend: Backend) -> None:
        self.backend: Backend = backend
        self._fresh = Layer()
        self._frozen: Layer | None = None

    @property
    def overlay_bytes(self) -> int:
        """Approximate memory, in bytes, of the changes since the last checkpoint began; too many start a checkpoint."""
        return self._fresh.bytes

    def get(self, table: bytes, key: bytes) -> bytes | None:
        for layer in self._layers():
            rows = layer.rows.get(table)
            if rows is not None and key in rows:
                return rows[key]
            if table in layer.dropped:
                return None
        return self.backend.get(table, key)

    def get_many(self, table: bytes, keys: Sequence[bytes]) -> list[bytes | None]:
        layers = self._layers()
        if any(table in layer.dropped or table in layer.rows for layer in layers[1:]) or table in layers[0].dropped:
            return [self.get(table, key) for key in keys]
        rows = layers[0].rows.get(table, {})
        found = [rows.get(key) for key in keys]
        unknown = [n for n, value in enumerate(found) if value is None and keys[n] not in rows]
        below = self.backend.get_many(table, [keys[n] for n in unknown]) if unknown else []
        for n, value in zip(unknown, below, strict=True):
            found[n] = value
        return found

    def put(self, table: bytes, key: bytes, value: bytes) -> None:
        self._fresh.put(table, key, value)

    def put_many(self, table: bytes, rows: Mapping[bytes, bytes]) -> None:
        self._fresh.put_many(table, rows)

    def put_new(self, table: bytes, rows: Mapping[bytes, bytes]) -> None:
        """Put rows that the table lacks; a row that is deleted before the next checkpoint is not written (ADR 240)."""
        self._fresh.put_new(table, rows)

    def delete(self, table: bytes, key: bytes) -> None:
        self._fresh.delete_many(table, (key,))

    def delete_many(self, table: bytes, keys: Iterable[bytes]) -> None:
        self._fresh.delete_many(table, keys)

    def drop_table(self, table: bytes) -> None:
        self._fresh.drop(table)

    def range(
        self, table: bytes, start: bytes = b"", end: bytes | None = None, limit: int = 1000
    ) -> list[tuple[bytes, bytes]]:
        """Up to `limit` pairs with start ≤ key < end, ascending. Each call skips keys deleted since the last checkpoint
        one by one, so a caller that consumes a table has to start after the last consumed key."""
        slices = self.range_slices(table, start, end, limit)
        while True:
            try:
                next(slices)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]

    def range_slices(
        self, table: bytes, start: bytes, end: bytes | None, limit: int
    ) -> Generator[None, None, list[tuple[bytes, bytes]]]:
        """`range` as a generator that yields after each slice, of some milliseconds, and returns the pairs. The table
        may change between slices; a pair may then be gone when it is returned."""
        found: list[tuple[bytes, bytes]] = []
        size = min(limit, _MAX_PAGE)
        while True:
            pages = [source(start, size) for source in self._sources(table)]
            # A page with `size` rows may lack further keys of its source (backend or layer): use only keys up to the
            # lowest last key of such pages.
            known = min((page[-1][0] for page in pages if len(page) == size), default=None)
            rows = dict(row for page in reversed(pages) for row in page)
            for key, value in sorted(rows.items()):
                if known is not None and key > known:
                    break
                if end is not None and key >= end:
                    return found
                if value is not None:
                    found.append((key, value))
                    if len(found) == limit:
                        return found
            if known is None:
                return found
            start = known + b"\0"
            # Read larger pages next, to skip long runs of deleted keys quickly
            size = min(4 * size, _MAX_PAGE)
            yield

    def next_key(self, table: bytes, start: bytes) -> bytes | None:
        """The first key ≥ start, even if it was deleted since the last checkpoint. The cost does not depend on the
        number of deleted keys."""
        return min((page[0][0] for source in self._sources(table) if (page := source(start, 1))), default=None)

    def _sources(self, table: bytes) -> list[Callable[[bytes, int], Sequence[tuple[bytes, bytes | None]]]]:
        sources: list[Callable[[bytes, int], Sequence[tuple[bytes, bytes | None]]]] = []
        for layer in self._layers():
            sources.append(partial(layer.page, table))
            if table in layer.dropped:
                return sources
        return [*sources, partial(self.backend.scan, table)]

    def freeze(self) -> Layer:
        """Freeze the changes made so far, and return them for the backend; later changes are kept separately."""
        assert self._frozen is None, "one checkpoint at a time"
        # Keep tables sorted that were scanned since the last checkpoint: sorting a table at its first scan would take
        # milliseconds.
        self._frozen, self._fresh = self._fresh, Layer(sorted(self._fresh.scanned))
        return self._frozen

    def committed(self) -> None:
        """Drop the frozen changes, which the backend has committed."""
        self._frozen = None

    def close(self) -> None:
        self.backend.close()
        self.backend = _Closed()

    def _layers(self) -> tuple[Layer, ...]:
        return (self._fresh,) if self._frozen is None else (self._fresh, self._frozen)
