"""Taking in a checkpoint as files: the receiver's side of a snapshot, and the switch to it."""

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

#: Rows per commit while the receiver builds its tables.
_COMMIT_ROWS = 50_000
#: Size of the tables, at most, as a multiple of the size of their export.
_TABLES = 2
#: Names of what a switch replaces.
_SWITCHED = ("hours", "names", "state.mdb")


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
            raise DamagedFile(path, 0, "what was pulled is not what the manifest says")

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
