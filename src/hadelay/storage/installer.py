"""Installing a snapshot: receive the files of a checkpoint, verify them and switch to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import islice

from hadelay.codec.checksums import crc32c
from hadelay.errors import DamagedFile, DiskFull, FatalError, HadelayError, is_disk_full
from hadelay.platform.disk import Disk, File
from hadelay.platform.runtime import Runtime
from hadelay.storage.manifest import CHUNK, LANE, Manifest, SnapshotFile, row_at
from hadelay.storage.tables import Backend, Put

#: Number of rows per commit while the receiver builds its tables.
_COMMIT_ROWS = 50_000
#: Maximum size of the tables, as a multiple of the size of their export.
_TABLES = 2
#: Names of the directory entries that a switch replaces.
_SWITCHED = ("hours", "names", "state.mdb")


class Installer:
    """Receives the files of one manifest. Files that an earlier attempt has pulled are continued: hour files only grow,
    so the older content is a prefix of the newer one.

    A full disk (DiskFull, also raised before the first pull) or a failed sync discards all files: they would keep the
    disk full, or look durable without being so."""

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
            raise DiskFull(f"a snapshot needs {missing:,} more bytes; {directory} has {free:,} free bytes")

    def have(self, name: str) -> int:
        """Number of bytes of this file that are already received."""
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
        for at in range(0, file.length, CHUNK):
            crc = crc32c(handle.pread(min(CHUNK, file.length - at), at), crc)
        size = handle.size()
        handle.close()
        if crc != file.crc or size != file.length:
            self._disk.unlink(path)
            raise DamagedFile(path, 0, "the received file does not match the snapshot's manifest")

    def _rows(self) -> Iterator[Put]:
        handle = self._disk.open(f"{self._incoming}/{self._state}")
        buffer, at = b"", 0
        while more := handle.pread(CHUNK, at):
            at += len(more)
            buffer += more
            position = 0
            while (row := row_at(buffer, position)) is not None:
                put, position = row
                yield put
            buffer = buffer[position:]
        handle.close()


def roll_forward(disk: Disk, directory: str) -> None:
    """Finish a switch to `incoming/` if `incoming/complete` exists. Safe to repeat after a power loss at any step,
    which may undo any rename that was not synced."""
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
    """Remove the files of a directory, if the directory exists."""
    if disk.exists(directory):
        for name in disk.sizes(directory):
            disk.unlink(f"{directory}/{name}")
