"""Data directory of one Raft group, and the checkpoint, which sets the content of all its files at one applied index.

    directory/  identity  lock  names  state.mdb  hours/<hour>.{log,idx,dsp,heads}  [export/  incoming/]

A checkpoint samples the changes at one applied index and writes buffered messages of far hours, in slices on the loop.
A thread then syncs the files and commits one transaction: applied index, file lengths, core's state, table changes.
Recovery cuts all files back to the last committed checkpoint, and reads only their sizes: the journal replays the later
entries, and appending them again gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from hadelay.codec.formats import FORMAT_VERSION, HOUR_ROW
from hadelay.errors import WAY_OUT, DamagedFile, FatalError, HadelayError
from hadelay.model import hour_from_name
from hadelay.platform.disk import Disk, files_closed
from hadelay.platform.runtime import Runtime
from hadelay.storage.far import Sample
from hadelay.storage.hours import DiskHourStore, file_checksums
from hadelay.storage.identity import Identity, check_identity, lock_directory, write_identity
from hadelay.storage.lmdbtables import LmdbBackend
from hadelay.storage.names import NameTable
from hadelay.storage.snapshots import LANE, Exports, Installer, Manifest, clear, roll_forward
from hadelay.storage.sortedkeys import pieces
from hadelay.storage.tables import CHECKPOINT, CORE, HOUR_STATES, HOURS, ROW, Backend, Put, Tables, hour_rows, scan_all

#: Minimum and maximum pause between two slices of a checkpoint, in seconds.
_LEAST_PAUSE_S, _PAUSE_S = 0.001, 0.01

Done = Callable[[BaseException | None], None]


class Storage:
    """Files and tables of one Raft group; all methods are called on the event loop.

    applied_index, applied_term: position of the last durable checkpoint; replay starts after it.
    core_blob: core's state in that checkpoint; b"" for a new directory.
    """

    def __init__(
        self,
        disk: Disk,
        directory: str,
        runtime: Runtime,
        identity: Identity,
        *,
        backend: Callable[[str], Backend] = LmdbBackend,
        far_buffer_bytes: int = 32 << 20,
    ) -> None:
        """Lock the directory, check its identity (ConfigError), recover to its last checkpoint (DamagedFile).

        backend: function that opens the tables at a path.
        """
        self.disk, self.directory, self._runtime = disk, directory, runtime
        self._backend, self._far_bytes = backend, far_buffer_bytes
        disk.makedirs(directory)
        self.checkpointing = self._closed = False
        #: Function that switches to a received snapshot when the running checkpoint ends; None: no switch waits.
        self._switch: Callable[[], None] | None = None
        with ExitStack() as undo:
            self._lock = lock_directory(disk, directory)
            undo.callback(self._lock.close)
            self.identity = check_identity(disk, directory, identity)
            roll_forward(disk, directory)
            disk.makedirs(f"{directory}/hours")
            self.tables = Tables(backend(f"{directory}/state.mdb"))
            undo.callback(self.tables.backend.close)
            disk.sync_dir(directory)
            self._recover()
            undo.pop_all()
        self.exports = Exports(disk, directory, runtime, self.hours, self.tables, self.applied_index)

    def _recover(self) -> None:
        disk, directory, get = self.disk, self.directory, self.tables.backend.get
        row = msgpack.unpackb(get(CHECKPOINT, ROW) or _row(self.identity))
        if (row["cluster_id"], row["group"]) != (self.identity.cluster_id, self.identity.group):
            raise DamagedFile(f"{directory}/state.mdb", 0, f"the checkpoint is of another cluster or group; {WAY_OUT}")
        self.applied_index, self.applied_term = row["index"], row["term"]
        self.core_blob = get(CHECKPOINT, CORE) or b""
        hours, rows = hour_rows(self.tables.backend)
        _cut_hours(disk, f"{directory}/hours", hours, rows)
        names = f"{directory}/names"
        _cut_file(disk, names, disk.sizes(directory).get("names", 0), row["names_length"])
        self.names = NameTable(disk, names, row["names_length"], row["names_crc"])
        group = self.identity.group
        self.hours = DiskHourStore(disk, f"{directory}/hours", group, far_buffer_bytes=self._far_bytes)
        self.hours.load(hours, rows)
        clear(disk, f"{directory}/export")

    def core_rows(self, tables: Iterable[bytes]) -> dict[bytes, Iterator[tuple[bytes, bytes]]]:
        """Rows of these tables of the ledger in the last checkpoint: table → iterator of (key, value), in the order of
        the keys. The iterator reads each row only when the row is asked for."""
        return {table: scan_all(self.tables.backend, table) for table in tables}

    def checkpoint(
        self, applied_index: int, applied_term: int, core_blob: bytes, slices: Iterable[Sequence[Put]], done: Done
    ) -> None:
        """Make the current state durable, then call `done(None)`; `done(error)` is final: the node must stop.

        applied_index: at most the last index that this node's journal has synced. slices: core's rows that changed,
        encoded when they are asked for, each slice in a turn of the event loop. Only one checkpoint runs at a time.
        """
        assert not self.checkpointing, "one checkpoint at a time"
        self.checkpointing = True
        try:
            sample = self.hours.sample()
        except Exception as error:  # such as a full disk, because `sample` may write buffered messages to files
            done(error)
            return
        layer, rows = self.tables.freeze(), dict[tuple[bytes, bytes], bytes | None]()
        row = _row(self.identity, applied_index, applied_term, self.names.length, self.names.crc)

        def puts() -> Iterator[Put]:
            yield CHECKPOINT, ROW, row
            yield CHECKPOINT, CORE, core_blob
            yield from _hour_puts(sample)
            for piece in pieces(rows):
                yield from ((*at, rows[at]) for at in piece)
            yield from layer.puts()

        def written(error: BaseException | None) -> None:
            if error is not None:
                done(error)
                return
            paths = self.hours.unsynced() + ([self.names.path] if self.names.unsynced else [])
            self.names.unsynced = False
            self._runtime.in_thread(LANE, lambda: self._make_durable(paths, layer.dropped, puts()), finish)

        def finish(_: Any, error: BaseException | None) -> None:
            if self._closed:
                return
            if error is None:
                self.tables.committed()
                self.applied_index, self.applied_term = applied_index, applied_term
                self.checkpointing = False
                self.exports.forget_older(applied_index)
                self._remove(self.hours.committed(sample))
            done(error)
            if error is None and self._switch is not None:
                self._switch()

        self._write_frozen(iter(slices), rows, written)

    def _write_frozen(
        self, slices: Iterator[Sequence[Put]], rows: dict[tuple[bytes, bytes], bytes | None], then: Done
    ) -> None:
        """Collect core's rows and write buffered messages, in slices, then call `then`. A pause is as long as the slice
        before it. This is a method, because a nested function that calls itself is a reference cycle, and would keep
        data for long."""
        if self._closed:
            then(files_closed())
            return
        began = self._runtime.monotonic()
        try:
            if (some := next(slices, None)) is not None:
                rows |= {(table, key): value for table, key, value in some}
            written = some is None and self.hours.write_some()
        # Report the error: the event loop would only log it, and the checkpoint would never end
        except Exception as error:
            then(error)
            return
        if written:
            then(None)
        else:
            pause_s = min(max(self._runtime.monotonic() - began, _LEAST_PAUSE_S), _PAUSE_S)
            self._runtime.call_later(pause_s, self._write_frozen, slices, rows, then)

    def _make_durable(self, paths: list[str], dropped: set[bytes], puts: Iterator[Put]) -> None:
        if paths:
            self.disk.sync_files(paths, self.directory)
        self.tables.backend.commit(sorted(dropped), puts)

    def _remove(self, paths: list[str]) -> None:
        # Remove files in a thread, because removing a large file is slow. Recovery removes the files that are left
        # after a failure.
        def unlink() -> None:
            for path in paths:
                self.disk.unlink(path)

        if paths:
            self._runtime.in_thread(LANE, unlink, lambda *_: None)

    def write_out(self, done: Done) -> None:
        """Write the buffered messages in slices, so that a later call of `checksums` has little left to write."""

        def rest(error: BaseException | None) -> None:
            if error is not None:
                done(error)
                return
            self.hours.freeze()
            self._write_frozen(iter(()), {}, done)

        # Finish what a checkpoint is writing, before the messages that came after its sample are frozen.
        self._write_frozen(iter(()), {}, rest)

    def set_identity(self, *, incarnation: int | None = None, feature_level: int | None = None) -> None:
        """Durably change the incarnation or the feature level in the identity file."""
        self.identity = replace(
            self.identity,
            incarnation=self.identity.incarnation if incarnation is None else incarnation,
            feature_level=self.identity.feature_level if feature_level is None else feature_level,
        )
        write_identity(self.disk, self.directory, self.identity)

    def manifest(self) -> Manifest | None:
        """Manifest of the last durable checkpoint, whose files are kept until `exports.release`. None, so that the
        caller asks again soon, if no checkpoint exists yet, or its export is running or failed (`exports.failure`)."""
        return self.exports.manifest(self.applied_term, self.checkpointing)

    def install(
        self, manifest: Manifest, installed: Callable[[], None], read: Callable[[Backend], None] = lambda tables: None
    ) -> Installer:
        """Make the Installer of another node's snapshot. Its `finish` calls read(tables of the snapshot) in a thread,
        closes this object and calls `installed`; `reopen` then returns the new Storage. If this object is already
        closed, nothing is switched."""

        def switch(switched: Callable[[HadelayError | None], None]) -> None:
            if self._closed:
                return
            # Wait for the end of a running checkpoint: it writes the files that the snapshot replaces
            if self.checkpointing:
                self._switch = lambda: switch(switched)
                return
            try:
                self.close()
                installed()
            except Exception as error:  # this object may be half closed, so the node has to stop
                switched(FatalError(f"switching to a snapshot failed: {error}"))
            else:
                switched(None)

        return Installer(self.disk, self.directory, self._runtime, self._backend, manifest, switch, read=read)

    def reopen(self) -> Storage:
        """Open the same directory as a new Storage, after `close`."""
        return Storage(
            self.disk,
            self.directory,
            self._runtime,
            self.identity,
            backend=self._backend,
            far_buffer_bytes=self._far_bytes,
        )

    def close(self) -> None:
        """Close without a checkpoint: the journal has the later changes. Waits for the end of a checkpoint that a
        thread is writing."""
        self._closed = True
        self.tables.backend.interrupt()
        self._runtime.join(LANE)
        self.hours.close()
        self.tables.close()
        self._lock.close()


def _row(identity: Identity, index: int = 0, term: int = 0, names_length: int = 0, names_crc: int = 0) -> bytes:
    owner = {"format_version": FORMAT_VERSION, "cluster_id": identity.cluster_id, "group": identity.group}
    position = {"index": index, "term": term, "names_length": names_length, "names_crc": names_crc}
    return msgpack.packb(owner | position)  # type: ignore[no-any-return]


def _hour_puts(sample: Sample) -> Iterator[Put]:
    data, size = sample.rows.tobytes(), HOUR_ROW.itemsize
    for hour in sample.gone:
        yield HOURS, hour.to_bytes(4, "big"), None
        yield HOUR_STATES, hour.to_bytes(4, "big"), None
    for n, hour in enumerate(sample.hours.tolist()):
        yield HOURS, hour.to_bytes(4, "big"), data[n * size : (n + 1) * size]


def _cut_hours(disk: Disk, directory: str, hours: npt.NDArray[np.int64], rows: npt.NDArray[np.void]) -> None:
    """Cut every hour file to the length in its HOUR_ROW; remove files of hours without a HOUR_ROW."""
    sizes = disk.sizes(directory)
    known = set(hours.tolist())
    for name, (length, _) in file_checksums(hours, rows):
        size = sizes.pop(name, 0)
        _cut_file(disk, f"{directory}/{name}", size, length)
        if size > length and name.endswith(".idx"):
            # Remove the .heads file, too: it may be ahead of the cut index.
            sizes[name.removesuffix("idx") + "heads"] = 0
    for name in sizes:
        stem, _, suffix = name.partition(".")
        if suffix == "heads" and sizes[name] and hour_from_name(stem) in known:
            continue
        path = f"{directory}/{name}"
        if disk.exists(path):
            disk.unlink(path)


def _cut_file(disk: Disk, path: str, size: int, length: int) -> None:
    if size < length:
        raise DamagedFile(path, size, f"the file ends here; the checkpoint says {length} bytes; {WAY_OUT}")
    if size > length:
        file = disk.open(path)
        file.truncate(length)
        file.close()
