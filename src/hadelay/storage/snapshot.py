"""A checkpoint as files, for a peer that is new or too far behind (architecture §6).

The source exports its tables into one file, in a thread; hour files and names are served as they are, up to the lengths
of the checkpoint, and stay until the manifest is released. The receiver pulls everything into `incoming/`, verifies it,
builds its own tables and marks the whole complete; switching is then a matter of renames that are finished at the next
start if this one ends in between.

    export := { table_size u32 | key_size u32 | value_size u32 | table | key | value }*
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import msgpack

from hadelay.codec.checksums import crc32c
from hadelay.errors import DamagedFile, DiskFull, FatalError, HadelayError, is_disk_full
from hadelay.platform.disk import Disk, File, read_file
from hadelay.platform.runtime import Runtime
from hadelay.storage.hours import file_checksums
from hadelay.storage.tables import CHECKPOINT, ROW, Backend, Put, hour_rows, scan_all

if TYPE_CHECKING:
    from hadelay.storage.store import Storage

log = logging.getLogger(__name__)

_LANE = "disk"
#: After one that could not be made, for want of room say, the next export waits so long: each fills the disk up again,
#: where a checkpoint, and the journal, may need the room just then.
_PAUSE_S = 15.0
_SIZES = struct.Struct("<III")
_CHUNK = 1 << 20
#: Rows per commit while the receiver builds its tables.
_COMMIT_ROWS = 50_000
#: They take up to so many times what their export does.
_TABLES = 2
#: What a switch replaces.
_SWITCHED = ("hours", "names", "state.mdb")


@dataclass(frozen=True)
class SnapshotFile:
    name: str
    length: int
    crc: int  # crc32c of those bytes


@dataclass(frozen=True)
class Manifest:
    """One durable checkpoint. Names are paths relative to a data directory, but for the export: `state-<index>`."""

    index: int
    term: int
    files: list[SnapshotFile]
    blob: bytes = b""


class Exports:
    """The source's side. At most one export is current: that of the last durable checkpoint."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._directory = f"{storage.directory}/export"
        self._made: dict[int, Manifest] = {}
        self._users: dict[int, int] = {}
        self._pins: dict[int, object] = {}
        self._making = False
        #: Of the last one, and until when no other is made.
        self.failure: BaseException | None = None
        self._paused_until = 0.0

    def manifest(self) -> Manifest | None:
        """The last durable checkpoint as files, which stay until `release`. None: there is none yet, or its tables are
        being exported in the thread, or could not be (`failure`); ask again soon."""
        index, now = self._storage.applied_index, self._storage._runtime.monotonic()
        manifest = self._made.get(index)
        if manifest is not None:
            self._users[index] += 1
            return manifest
        if index and not self._making and not self._storage.checkpointing and now >= self._paused_until:
            self._make(index, self._storage.applied_term)
        return None

    def _make(self, index: int, term: int) -> None:
        storage, hours = self._storage, self._storage.hours
        self._making, self.failure = True, None
        pin = hours.pin()

        def finish(manifest: Manifest | None, error: BaseException | None) -> None:
            self._making = False
            if manifest is None:  # no snapshot this time: the disk may be full; the node itself is well
                log.error("snapshot_not_exported", extra={"index": index, "error": str(error)})
                self.failure, self._paused_until = error, storage._runtime.monotonic() + _PAUSE_S
                hours.unpin(pin)
                return
            self.forget_older()
            self._made[index], self._users[index], self._pins[index] = manifest, 0, pin

        # A checkpoint that begins meanwhile commits after this job: the thread's lane is in order.
        storage._runtime.in_thread(_LANE, lambda: self._export(index, term), finish)

    def _export(self, index: int, term: int) -> Manifest:
        disk, backend = self._storage.disk, self._storage.tables.backend
        disk.makedirs(self._directory)
        name = f"state-{index}"
        file = disk.open(f"{self._directory}/{name}", create=True)
        length, crc = 0, 0
        try:
            with closing(file):
                for part in _parts(backend):
                    file.pwrite(part, length)
                    length, crc = length + len(part), crc32c(part, crc)
                file.truncate(length)
        except Exception:  # of a disk that is full, a half must not take more
            disk.unlink(f"{self._directory}/{name}")
            raise
        row = msgpack.unpackb(backend.get(CHECKPOINT, ROW) or b"")
        assert row["index"] == index, "no checkpoint commits while its export is made"
        files = [SnapshotFile(name, length, crc)]
        if row["names_length"]:
            files.append(SnapshotFile("names", row["names_length"], row["names_crc"]))
        hours, rows = hour_rows(backend)
        files += [SnapshotFile(f"hours/{name}", *sums) for name, sums in file_checksums(hours, rows)]
        return Manifest(index, term, files)

    def release(self, manifest: Manifest) -> None:
        self._users[manifest.index] -= 1
        if not self._users[manifest.index] and manifest.index != self._storage.applied_index:
            self._drop(manifest.index)

    def forget_older(self) -> None:
        """There is a newer checkpoint. While an export stays, no file of a retired hour goes."""
        for index in [i for i, users in self._users.items() if not users and i != self._storage.applied_index]:
            self._drop(index)

    def _drop(self, index: int) -> None:
        del self._made[index], self._users[index]
        self._storage.hours.unpin(self._pins.pop(index))
        self._storage.disk.unlink(f"{self._directory}/state-{index}")

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Bytes of a manifest's file. FileNotFoundError when it was released."""
        where = self._directory if name.startswith("state-") else self._storage.directory
        if not (name == "names" or name.startswith(("state-", "hours/"))) or ".." in name:
            raise FileNotFoundError(name)
        return read_file(self._storage.disk, f"{where}/{name}", size, offset)


def _parts(backend: Backend) -> Iterator[bytes]:
    for table in backend.tables():
        part = bytearray()
        for key, value in scan_all(backend, table):
            part += _SIZES.pack(len(table), len(key), len(value)) + table + key + value
            if len(part) >= _CHUNK:
                yield bytes(part)
                part.clear()
        if part:
            yield bytes(part)


class Installer:
    """The receiver's side: one manifest on its way in. What an earlier try has pulled is kept, as far as it is still
    asked for: hour files only grow, so the beginning of an older one is the beginning of the newer one.

    What a disk has no room for, or did not take, is not kept: a disk that is full would stay full of it, and what is
    left behind a failed sync looks as if it were durable. DiskFull says so, also before anything is pulled."""

    def __init__(
        self, disk: Disk, directory: str, runtime: Runtime, backend: Callable[[str], Backend], manifest: Manifest,
        switch: Callable[[Callable[[HadelayError | None], None]], None],
    ) -> None:  # fmt: skip
        self._disk, self._runtime, self._backend, self._switch = disk, runtime, backend, switch
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
            raise DiskFull(f"a snapshot takes {missing:,} bytes more, and {free:,} are free at {directory}")

    def have(self, name: str) -> int:
        """How many bytes of this file are already there."""
        path = f"{self._incoming}/{name}"
        if not self._disk.exists(path):
            return 0
        return min(self._file(name).size(), self._files[name].length)

    def write(self, name: str, offset: int, data: bytes) -> None:
        """KeyError for a name that is not in the manifest."""
        assert offset + len(data) <= self._files[name].length
        with self._or_nothing():
            file = self._file(name)
            file.pwrite(data, offset)
            file.write_behind(len(data), offset)

    def finish(self, done: Callable[[HadelayError | None], None]) -> None:
        """Verify, sync, switch, then `done(None)`; `done(error)` when a file is not what the manifest says: it is
        thrown away, and the next try pulls it anew. DiskFull: all is; FatalError: nobody knows what this disk has."""

        def finished(_: object, error: BaseException | None) -> None:
            if error is None:
                self._switch(done)
            else:
                done(error if isinstance(error, HadelayError) else FatalError(f"installing a snapshot: {error}"))

        self.abort()
        self._runtime.in_thread(_LANE, self._complete, finished)

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
                raise DiskFull(f"a snapshot does not fit: {error}") from error
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
            disk.unlink(f"{incoming}/{self._state}")
            disk.sync_files([f"{incoming}/{name}" for name in self._files if name != self._state], incoming)
            disk.sync_dir(f"{incoming}/hours")
            disk.sync_dir(incoming)
            disk.open(f"{incoming}/complete", create=True).close()
        disk.sync_dir(incoming)

    def _verify(self, file: SnapshotFile) -> None:
        path, crc = f"{self._incoming}/{file.name}", 0
        handle = self._disk.open(path, create=True)
        handle.truncate(min(handle.size(), file.length))
        for at in range(0, file.length, _CHUNK):
            crc = crc32c(handle.pread(min(_CHUNK, file.length - at), at), crc)
        size = handle.size()
        handle.close()
        if crc != file.crc or size != file.length:
            self._disk.unlink(path)
            raise DamagedFile(path, 0, "what was pulled is not what the manifest says")

    def _rows(self) -> Iterator[Put]:
        handle = self._disk.open(f"{self._incoming}/{self._state}")
        buffer, at = b"", 0
        while more := handle.pread(_CHUNK, at):
            at += len(more)
            buffer += more
            position = 0
            while (row := _row_at(buffer, position)) is not None:
                put, position = row
                yield put
            buffer = buffer[position:]
        handle.close()


def _row_at(buffer: bytes, at: int) -> tuple[Put, int] | None:
    """(row, where the next one starts), None when it is not all there."""
    if len(buffer) - at < _SIZES.size:
        return None
    table_size, key_size, value_size = _SIZES.unpack_from(buffer, at)
    key_at = at + _SIZES.size + table_size
    value_at = key_at + key_size
    end = value_at + value_size
    if end > len(buffer):
        return None
    return (buffer[at + _SIZES.size : key_at], buffer[key_at:value_at], buffer[value_at:end]), end


def roll_forward(disk: Disk, directory: str) -> None:
    """Finish a switch to `incoming/`, if one was decided: every step may be the one after which the power fails, and
    of renames that are not synced any may be lost."""
    incoming, outgoing = f"{directory}/incoming", f"{directory}/outgoing"
    if disk.exists(f"{incoming}/complete"):
        if disk.exists(f"{incoming}/hours") and disk.exists(f"{directory}/hours"):
            disk.makedirs(outgoing)
            clear(disk, f"{outgoing}/hours")
            disk.rename(f"{directory}/hours", f"{outgoing}/hours")
            _sync_dirs(disk, outgoing, directory)
        for name in _SWITCHED:
            if disk.exists(f"{incoming}/{name}"):
                disk.rename(f"{incoming}/{name}", f"{directory}/{name}")
        _sync_dirs(disk, incoming, directory)
        disk.unlink(f"{incoming}/complete")
        disk.sync_dir(incoming)
    clear(disk, f"{outgoing}/hours")


def _sync_dirs(disk: Disk, *paths: str) -> None:
    for path in paths:
        disk.sync_dir(path)


def clear(disk: Disk, directory: str) -> None:
    """Remove the files of a directory, if it is one."""
    if disk.exists(directory):
        for name in disk.sizes(directory):
            disk.unlink(f"{directory}/{name}")
