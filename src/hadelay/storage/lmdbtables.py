"""LMDB backend of `Tables`. Only this module imports lmdb, and turns its errors into OSError or DamagedFile.

LMDB has no checksums, so the CRC32C of key and value follows every stored value.
"""

import ctypes
import errno
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import count, islice
from typing import Any, NamedTuple

import lmdb
import msgpack
import numpy as np
import numpy.typing as npt

from hadelay.codec.checksums import crc32c
from hadelay.errors import WAY_OUT, DamagedFile, is_disk_full
from hadelay.model import hour_name
from hadelay.platform.disk import PRIVATE
from hadelay.storage.tables import CHECKPOINT, CORE, HOUR_STATES, HOURS, ROW, Put, hour_rows, scan_all

#: Maximum number of named tables in the LMDB file; LMDB refuses to create further ones.
_MAX_TABLES = 64
_GIB = 1 << 30
#: Limit of table changes per transaction; further ones use redo lists (see `commit`). If each change is in a page of
#: its own, the changed pages take 16 MB of memory.
_AT_ONCE = 4_096
_REDO = b"redo"
_CRC_SIZE = 4
#: Number of bytes at the start of the ledger's encoded core (rowformats.Core) that contain the cluster time.
_CORE_HEAD = 4_096
#: Size of the values that `verify_some` reads in one transaction, in bytes.
_PIECE = 64 << 10
#: Free space, in bytes, below which a disk counts as full.
_LITTLE = 1 << 20
#: Function of glibc that returns freed memory to the system, also from inside the heap.
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: 0)
#: Program that reads the file at argv[1], all tables or those in argv[2:], and checks their numbers of entries.
_READ_ALL = """
import sys, lmdb
env = lmdb.open(sys.argv[1], max_dbs=64, subdir=False, readonly=True, lock=False)
wanted = [name.encode() for name in sys.argv[2:]]
with env.begin() as txn:
    for name in list(txn.cursor().iternext(values=False)):
        if not wanted or bytes(name) in wanted:
            db = env.open_db(bytes(name), txn=txn, create=False)
            assert sum(1 for _ in txn.cursor(db)) == txn.stat(db)["entries"]
"""


def _can_be_read(path: str, *tables: bytes) -> bool:
    """Whether LMDB can read these tables (default: all) of a file whose end may be missing. Free pages may be missing.
    The check runs in another process, because reading a missing or wrong page may raise a signal."""
    names = [table.decode() for table in tables]
    done = subprocess.run([sys.executable, "-c", _READ_ALL, path, *names], capture_output=True, check=False)
    return done.returncode == 0


class Checkpoint(NamedTuple):
    """Checkpoint as stored in the tables. row: its data, None before the first checkpoint. hours: ascending. rows:
    HOUR_ROW of each hour."""

    row: dict[str, Any] | None
    hours: npt.NDArray[np.int64]
    rows: npt.NDArray[np.void]
    #: Cluster time of the checkpoint, in Unix ms; 0 if the checkpoint does not have it.
    time_ms: int = 0


def read_checkpoint(path: str) -> Checkpoint:
    """Read the checkpoint of a file that may be damaged anywhere. Damage raises DamagedFile, and never ends the process
    by a signal."""
    if not _can_be_read(path, CHECKPOINT, HOURS, HOUR_STATES, _REDO):
        raise DamagedFile(path, 0, f"LMDB cannot read its tables; {WAY_OUT}")
    with closing(LmdbBackend(path, readonly=True)) as backend:
        row, core = backend.get(CHECKPOINT, ROW), backend.get(CHECKPOINT, CORE)
        hours, rows = hour_rows(backend)
        states = [int.from_bytes(key, "big") for key, _ in scan_all(backend, HOUR_STATES)]
    if missing := sorted(set(states) - set(hours.tolist())):
        raise DamagedFile(path, 0, f"hour {hour_name(missing[0])} has a state, but no file lengths; {WAY_OUT}")
    return Checkpoint(msgpack.unpackb(row) if row else None, hours, rows, _time_ms(core or b""))


def _time_ms(core: bytes) -> int:
    """Read the cluster time, which is among the first keys of the ledger's encoded core; 0 if it is not there."""
    unpacker = msgpack.Unpacker()
    unpacker.feed(core[:_CORE_HEAD])
    try:
        for _ in range(unpacker.read_map_header()):
            name, value = unpacker.unpack(), unpacker.unpack()
            if name == "now_ms":
                return int(value)
    except (ValueError, msgpack.UnpackException):
        pass
    return 0


class LmdbBackend:
    """One LMDB file, synced on every commit. The map is read-only: a bug elsewhere cannot overwrite it, and a full disk
    is an error instead of a signal.

    map_bytes: size limit of the file, in bytes of address space.
    """

    def __init__(self, path: str, *, map_bytes: int = 64 * _GIB, readonly: bool = False) -> None:
        self.path = path
        self._interrupted = False
        with _as_os_error(path):
            self._env = lmdb.open(
                path,
                map_size=map_bytes,
                max_dbs=_MAX_TABLES,
                subdir=False,
                readonly=readonly,
                lock=not readonly,
                sync=True,
                metasync=True,
                writemap=False,
                map_async=False,
                readahead=False,
                mode=PRIVATE,
            )
            size, whole = os.path.getsize(path), (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
            if size < whole:
                if not _can_be_read(path):
                    self._env.close()
                    raise DamagedFile(path, size, f"the file has lost its end; {WAY_OUT}")
                if not readonly:
                    # Extend the truncated file with zeroes: LMDB reports an error for pages of zeroes, but a read past
                    # the end kills the process by a signal. The list of free pages may also have been in the
                    # missing end.
                    os.truncate(path, whole)
            with self._env.begin() as txn:
                names = [bytes(key) for key in txn.cursor().iternext(values=False)]
            try:
                self._tables: dict[bytes, Any] = {name: self._env.open_db(name, create=False) for name in names}
            except (lmdb.NotFoundError, lmdb.IncompatibleError) as error:
                raise DamagedFile(path, 0, f"LMDB lists a table and cannot open it; {WAY_OUT}") from error
            if readonly and self.scan(_REDO, b"", 1):
                raise DamagedFile(path, 0, "the last commit of the tables is not fully applied: start the node once")
            self._sort_in()

    def get(self, table: bytes, key: bytes) -> bytes | None:
        db = self._tables.get(table)
        if db is None:
            return None
        try:
            with self._env.begin(db) as txn:
                data = txn.get(key)
        except lmdb.Error as error:  # the context manager _as_os_error would double the cost of a look-up
            raise _os_error(error, self.path) from error
        return None if data is None else self._verified(key, data)

    def get_many(self, table: bytes, keys: Sequence[bytes]) -> list[bytes | None]:
        db = self._tables.get(table)
        if db is None:
            return [None] * len(keys)
        with _as_os_error(self.path), self._env.begin(db) as txn:
            found = list(map(txn.get, keys))
        return [None if data is None else self._verified(key, data) for key, data in zip(keys, found, strict=True)]

    def forget_readers(self) -> None:
        """Release the read transactions of processes that ended during one: LMDB keeps old pages for such
        transactions."""
        self._env.reader_check()

    def _verified(self, key: bytes, data: bytes) -> bytes:
        value = data[:-_CRC_SIZE]
        if not _verifies(key, data):
            with open(self.path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
                at = max(0, whole.find(data))
            raise DamagedFile(self.path, at, f"the table value of key {key[:32]!r} does not verify; {WAY_OUT}")
        return value

    def scan(self, table: bytes, start: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        db, found = self._tables.get(table), []
        if db is None:
            return []
        with _as_os_error(self.path), self._env.begin(db) as txn, txn.cursor() as cursor:
            if cursor.set_range(start):
                for key, data in cursor:
                    found.append((key, self._verified(key, data)))
                    if len(found) >= limit:
                        break
        return found

    def tables(self) -> list[bytes]:
        return sorted(self._tables.keys() - {_REDO})

    def commit(self, dropped: Iterable[bytes], puts: Iterable[Put]) -> None:
        """Commit all changes in one transaction. It stores changes beyond the first few thousand as redo lists, and
        further small transactions then apply these lists. This limits the memory for changed pages: with hash keys,
        each change is in another page."""
        tables = dict(self._tables)
        puts = iter(puts)
        with _as_os_error(self.path), self._env.begin(write=True) as txn:
            for table in dropped:
                db = tables.pop(table, None)
                if db is not None:
                    txn.drop(db, delete=True)
            self._put(txn, tables, islice(puts, _AT_ONCE))
            for number in count():
                rest = list(islice(puts, _AT_ONCE))
                if not rest:
                    break
                self._put(txn, tables, [(_REDO, number.to_bytes(4, "big"), msgpack.packb(rest))])
        self._tables = tables
        self._sort_in()
        _malloc_trim(0)

    def _put(self, txn: Any, tables: dict[bytes, Any], puts: Iterable[Put]) -> None:
        last: bytes | None = None
        db: Any = None
        put = txn.put
        for table, key, value in puts:
            if table != last:
                last, db = table, tables.get(table)
                if db is None:
                    db = tables[table] = self._env.open_db(table, txn=txn)
            if value is None:
                txn.delete(key, b"", db)
            else:
                put(key, value + crc32c(key + value).to_bytes(_CRC_SIZE, "little"), True, True, False, db)

    def _sort_in(self) -> None:
        """Apply the redo lists of the last commit; after a crash or an interruption, the next open does this."""
        while not self._interrupted and (lists := self.scan(_REDO, b"", 1)):
            tables = dict(self._tables)
            with _as_os_error(self.path), self._env.begin(write=True) as txn:
                self._put(txn, tables, [*msgpack.unpackb(lists[0][1]), (_REDO, lists[0][0], None)])
            self._tables = tables

    def interrupt(self) -> None:
        self._interrupted = True

    def close(self) -> None:
        """Close the file. No thread may be in `commit` or a read: LMDB would end that thread's transaction."""
        self._env.close()


def _verifies(key: bytes, data: bytes) -> bool:
    return crc32c(data[:-_CRC_SIZE], crc32c(key)).to_bytes(_CRC_SIZE, "little") == data[-_CRC_SIZE:]


def verify_some(path: str) -> Generator[int, None, None]:
    """Verify all values of a file that a node may have open, in pieces of about _PIECE bytes; yields the size of each
    piece. Raises DamagedFile. Reading a damaged page may end the process by a signal."""
    with (
        _as_os_error(path),
        closing(lmdb.open(path, max_dbs=_MAX_TABLES, subdir=False, readonly=True, readahead=False)) as env,
    ):
        with env.begin() as txn:
            tables = [bytes(key) for key in txn.cursor().iternext(values=False)]
        for table in tables:
            start: bytes | None = b""
            while start is not None:
                try:
                    # A transaction per piece: LMDB frees no old pages during a long one, so the file would grow.
                    size, start = _verify_piece(env, path, table, start)
                except lmdb.NotFoundError:  # another process has dropped the table meanwhile
                    break
                yield size


def _verify_piece(env: Any, path: str, table: bytes, start: bytes) -> tuple[int, bytes | None]:
    """Verify about _PIECE bytes of a table's values, from the key `start` on. Returns (number of verified bytes, key of
    the next piece; None after the last piece)."""
    db, size = env.open_db(table, create=False), 0
    with env.begin(db) as txn, txn.cursor() as cursor:
        if not cursor.set_range(start):
            return 0, None
        for key, data in cursor:
            size += len(key) + len(data)
            if not _verifies(key, data):
                raise DamagedFile(path, 0, f"the value of key {key[:32]!r} in table {table!r} does not verify")
            if size >= _PIECE:
                return size, key + b"\0"
    return size, None


@contextmanager
def _as_os_error(path: str) -> Iterator[None]:
    try:
        yield
    except lmdb.Error as error:
        raise _os_error(error, path) from error


def _os_error(error: Exception, path: str) -> OSError | DamagedFile:
    if isinstance(error, lmdb.CorruptedError | lmdb.InvalidError | lmdb.PageNotFoundError):
        return DamagedFile(path, 0, f"LMDB: {error}; {WAY_OUT}")
    if isinstance(error, lmdb.MapFullError):
        return OSError(errno.ENOSPC, "the tables have reached storage.map_bytes: raise this setting", path)
    full = isinstance(error, lmdb.DiskError) or _is_full(os.path.dirname(path))
    return OSError(errno.ENOSPC if full else errno.EIO, f"LMDB: {error}", path)


def _is_full(directory: str) -> bool:
    """Test whether the disk of `directory` is full. LMDB's errors do not tell: a short write looks like a failed write,
    and a quota appears only in the error's text."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, _LITTLE)
    except OSError as error:
        return is_disk_full(error)
    return False
