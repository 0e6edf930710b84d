"""Snapshots: a checkpoint as a set of files. Exports makes and serves them; Installer receives them.

The source exports its tables into one file, in a thread, and serves hour files and names up to the lengths of the
checkpoint. The receiver pulls all files into `incoming/`, verifies them, builds its own tables, marks `incoming/`
complete and switches by renaming.

    export := { table_size u32 | key_size u32 | value_size u32 | table | key | value }*
"""

import logging
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice

import msgpack

from hadelay.codec.checksums import crc32c
from hadelay.errors import DamagedFile, DiskFull, FatalError, HadelayError, is_disk_full
from hadelay.platform.disk import Disk, File, read_file
from hadelay.platform.runtime import Runtime
from hadelay.storage.hours import DiskHourStore, file_checksums
from hadelay.storage.tables import CHECKPOINT, ROW, Backend, Put, Tables, hour_rows, scan_all

log = logging.getLogger(__name__)

#: Name of the thread that runs checkpoints, exports and installations, one at a time.
LANE = "disk"
#: Size of one read or write of a snapshot's files, in bytes.
CHUNK = 1 << 20
_SIZES = struct.Struct("<III")
#: Pause, in seconds, after a failed export of a snapshot: each attempt may fill a disk whose space the journal needs.
_PAUSE_S = 15.0
#: Number of table rows per commit while the receiver of a snapshot builds its tables.
_COMMIT_ROWS = 50_000
#: Disk space to reserve for the receiver's table file, as a multiple of the size of the tables' export.
_TABLES = 2
#: Files and directories in the data directory that a received snapshot replaces.
_SWITCHED = ("hours", "names", "state.mdb")


@dataclass(frozen=True)
class SnapshotFile:
    name: str
    length: int
    crc: int  # CRC-32C of the file's first `length` bytes


@dataclass(frozen=True)
class Manifest:
    """Manifest of a snapshot: the files of one durable checkpoint, with names relative to the data directory; the
    export of the tables is named `state-<index>`."""

    index: int
    term: int
    files: list[SnapshotFile]
    blob: bytes = b""


def rows_as_bytes(backend: Backend) -> Iterator[bytes]:
    """Encode the rows of all tables for an export, in parts of about CHUNK bytes."""
    for table in backend.tables():
        part = bytearray()
        for key, value in scan_all(backend, table):
            part += _SIZES.pack(len(table), len(key), len(value)) + table + key + value
            if len(part) >= CHUNK:
                yield bytes(part)
                part.clear()
        if part:
            yield bytes(part)


def row_at(buffer: bytes, at: int) -> tuple[Put, int] | None:
    """Decode the export's row at offset `at`: returns (row, offset of the next row); None when the buffer ends within
    the row."""
    if len(buffer) - at < _SIZES.size:
        return None
    table_size, key_size, value_size = _SIZES.unpack_from(buffer, at)
    key_at = at + _SIZES.size + table_size
    value_at = key_at + key_size
    end = value_at + value_size
    if end > len(buffer):
        return None
    return (buffer[at + _SIZES.size : key_at], buffer[key_at:value_at], buffer[value_at:end]), end


class Exports:
    """Exports checkpoints as snapshot files. Only the last durable checkpoint, at `index`, can be exported."""

    def __init__(
        self, disk: Disk, directory: str, runtime: Runtime, hours: DiskHourStore, tables: Tables, index: int
    ) -> None:
        self._disk, self._root, self._directory = disk, directory, f"{directory}/export"
        self._runtime, self._hours, self._tables = runtime, hours, tables
        self.index = index
        #: Manifests of the exports on disk, by Raft index of the checkpoint.
        self._made: dict[int, Manifest] = {}
        #: Number of callers that use each export, by the same index; an unused export may be removed.
        self._users: Counter[int] = Counter()
        self._making = False
        #: Error of the last failed export.
        self.failure: BaseException | None = None
        #: Time (monotonic, in seconds) before which no export begins, after a failed one.
        self._paused_until = 0.0

    def manifest(self, term: int, checkpointing: bool) -> Manifest | None:
        """Return the manifest of the last durable checkpoint, or start its export and return None. term: Raft term of
        the checkpoint. checkpointing: whether a checkpoint is running."""
        made = self._made.get(self.index)
        if made is not None:
            self._users[self.index] += 1
            return made
        if self.index and not (self._making or checkpointing) and self._runtime.monotonic() >= self._paused_until:
            self._make(self.index, term)
        return None

    def _make(self, index: int, term: int) -> None:
        self._making, self.failure = True, None
        self._hours.pins += 1

        def finish(manifest: Manifest | None, error: BaseException | None) -> None:
            self._making = False
            if manifest is None:  # the export failed: the node goes on without a snapshot
                log.error("snapshot_not_exported", extra={"index": index, "error": str(error)})
                self.failure, self._paused_until = error, self._runtime.monotonic() + _PAUSE_S
                self._hours.pins -= 1
                return
            self.forget_older(self.index)
            self._made[index] = manifest

        # Run the export in the checkpoints' thread, so that a checkpoint that begins meanwhile commits after the
        # export.
        self._runtime.in_thread(LANE, lambda: self._export(index, term), finish)

    def _export(self, index: int, term: int) -> Manifest:
        disk, name = self._disk, f"state-{index}"
        disk.makedirs(self._directory)
        file = disk.open(f"{self._directory}/{name}", create=True)
        length, crc = 0, 0
        try:
            with closing(file):
                for part in rows_as_bytes(self._tables.backend):
                    file.pwrite(part, length)
                    length, crc = length + len(part), crc32c(part, crc)
                file.truncate(length)
        except Exception:  # remove the partial export: those of repeated attempts would fill the disk
            disk.unlink(f"{self._directory}/{name}")
            raise
        row = msgpack.unpackb(self._tables.backend.get(CHECKPOINT, ROW) or b"")
        assert row["index"] == index, "no checkpoint commits while its export is made"
        files = [
            SnapshotFile(f"hours/{name}", *sums) for name, sums in file_checksums(*hour_rows(self._tables.backend))
        ]
        if row["names_length"]:
            files.append(SnapshotFile("names", row["names_length"], row["names_crc"]))
        # List the tables last: unlike the other files, they differ in each snapshot, so an attempt that is interrupted
        # would have pulled them in vain.
        files.append(SnapshotFile(name, length, crc))
        return Manifest(index, term, files)

    def release(self, manifest: Manifest) -> None:
        self._users[manifest.index] -= 1
        self.forget_older(self.index)

    def forget_older(self, index: int) -> None:
        """Remove unused exports older than `index`, the last durable checkpoint: each keeps hour files from removal."""
        self.index = index
        for older in [i for i in self._made if not self._users[i] and i != index]:
            del self._made[older], self._users[older]
            self._hours.pins -= 1
            self._disk.unlink(f"{self._directory}/state-{older}")

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Read bytes of a file in a manifest. Raises FileNotFoundError once the manifest is released."""
        where = self._directory if name.startswith("state-") else self._root
        if not (name == "names" or name.startswith(("state-", "hours/"))) or ".." in name:
            raise FileNotFoundError(name)
        return read_file(self._disk, f"{where}/{name}", size, offset)


class Installer:
    """Receives the files of one manifest. Files that an earlier attempt has pulled are continued: hour files only grow,
    so the older content is a prefix of the newer one.

    A full disk (DiskFull, also raised before the first pull) or a failed sync discards all files: they would keep the
    disk full, or look durable without being so."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        runtime: Runtime,
        backend: Callable[[str], Backend],
        manifest: Manifest,
        switch: Callable[[Callable[[HadelayError | None], None]], None],
        *,
        read: Callable[[Backend], None] = lambda tables: None,
    ) -> None:
        """switch: called when the files are complete. read: called before that, in a thread, with the snapshot's
        tables."""
        self._disk, self._runtime, self._backend, self._switch, self._read = disk, runtime, backend, switch, read
        self._incoming = f"{directory}/incoming"
        self._files = {file.name: file for file in manifest.files}
        self._state = next(name for name in self._files if name.startswith("state-"))
        self._open: dict[str, File] = {}
        with self._or_nothing():
            disk.makedirs(f"{self._incoming}/hours")
        missing = sum(file.length for file in manifest.files) + _TABLES * self._files[self._state].length
        for place in ("", "hours/"):
            for name, size in disk.sizes(f"{self._incoming}/{place}".rstrip("/")).items():
                if place + name in self._files:
                    missing -= min(size, self._files[place + name].length)
                else:
                    disk.unlink(f"{self._incoming}/{place}{name}")
        free, _ = disk.free(self._incoming)
        if free < missing:
            self._clear()
            raise DiskFull(f"a snapshot needs {missing:,} more bytes; {directory} has {free:,} free bytes")

    def have(self, name: str) -> int:
        """Number of bytes of the file `name` that are already received."""
        path = f"{self._incoming}/{name}"
        if not self._disk.exists(path):
            return 0
        return min(self._file(name).size(), self._files[name].length)

    def write(self, name: str, offset: int, data: bytes) -> None:
        """Write received bytes. KeyError for a name that is not in the manifest."""
        assert offset + len(data) <= self._files[name].length
        with self._or_nothing():
            file = self._file(name)
            file.pwrite(data, offset)
            file.write_behind(len(data), offset)

    def finish(self, done: Callable[[HadelayError | None], None]) -> None:
        """Verify, sync and switch, then `done(None)`. `done(error)`: DamagedFile when a file does not match the
        manifest (the next attempt pulls the file again), DiskFull, or FatalError when the disk's state is unknown."""

        def finished(_: object, error: BaseException | None) -> None:
            if error is None:
                self._switch(done)
            else:
                done(error if isinstance(error, HadelayError) else FatalError(f"installing a snapshot failed: {error}"))

        self.abort()
        self._runtime.in_thread(LANE, self._complete, finished)

    def abort(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def _file(self, name: str) -> File:
        file = self._open.get(name)
        if file is None:
            if len(self._open) >= 64:
                self.abort()
            file = self._open[name] = self._disk.open(f"{self._incoming}/{name}", create=True)
        return file

    @contextmanager
    def _or_nothing(self, *, syncs: bool = False) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            full = is_disk_full(error)
            if full or syncs:
                self._clear()
            if full:
                raise DiskFull(f"the disk or the tables are too small for the snapshot: {error}") from error
            raise

    def _clear(self) -> None:
        self.abort()
        with suppress(OSError):
            clear(self._disk, f"{self._incoming}/hours")
            clear(self._disk, self._incoming)

    def _complete(self) -> None:
        disk, incoming = self._disk, self._incoming
        with self._or_nothing(syncs=True):
            for file in self._files.values():
                self._verify(file)
            with closing(self._backend(f"{incoming}/state.mdb")) as backend:
                rows = self._rows()
                while batch := list(islice(rows, _COMMIT_ROWS)):
                    backend.commit([], batch)
                self._read(backend)
            disk.unlink(f"{incoming}/{self._state}")
            disk.sync_files([f"{incoming}/{name}" for name in self._files if name != self._state], incoming)
            disk.sync_dir(f"{incoming}/hours")
            disk.sync_dir(incoming)
            disk.open(f"{incoming}/complete", create=True).close()
        disk.sync_dir(incoming)

    def _verify(self, file: SnapshotFile) -> None:
        path, crc = f"{self._incoming}/{file.name}", 0
        with closing(self._disk.open(path, create=True)) as handle:
            handle.truncate(min(handle.size(), file.length))
            for at in range(0, file.length, CHUNK):
                crc = crc32c(handle.pread(min(CHUNK, file.length - at), at), crc)
            size = handle.size()
        if crc != file.crc or size != file.length:
            self._disk.unlink(path)
            raise DamagedFile(path, 0, "the received file does not match the snapshot's manifest")

    def _rows(self) -> Iterator[Put]:
        buffer, at = b"", 0
        with closing(self._disk.open(f"{self._incoming}/{self._state}")) as handle:
            while more := handle.pread(CHUNK, at):
                at += len(more)
                buffer += more
                position = 0
                while (row := row_at(buffer, position)) is not None:
                    put, position = row
                    yield put
                buffer = buffer[position:]


def roll_forward(disk: Disk, directory: str) -> None:
    """Finish an interrupted switch to a received snapshot in `incoming/`, if `incoming/complete` exists. Safe to repeat
    after a power loss at any step, which may undo renames that were not synced."""
    incoming, outgoing = f"{directory}/incoming", f"{directory}/outgoing"
    if disk.exists(f"{incoming}/complete"):
        if disk.exists(f"{incoming}/hours") and disk.exists(f"{directory}/hours"):
            disk.makedirs(outgoing)
            clear(disk, f"{outgoing}/hours")
            disk.rename(f"{directory}/hours", f"{outgoing}/hours")
            disk.sync_dir(outgoing)
            disk.sync_dir(directory)
        for name in _SWITCHED:
            if disk.exists(f"{incoming}/{name}"):
                disk.rename(f"{incoming}/{name}", f"{directory}/{name}")
        disk.sync_dir(incoming)
        disk.sync_dir(directory)
        disk.unlink(f"{incoming}/complete")
        disk.sync_dir(incoming)
    clear(disk, f"{outgoing}/hours")


def clear(disk: Disk, directory: str) -> None:
    """Remove the files of a directory, if the directory exists."""
    if disk.exists(directory):
        for name in disk.sizes(directory):
            disk.unlink(f"{directory}/{name}")
