"""Serving a checkpoint as files: the source of a snapshot."""

from __future__ import annotations

import logging
from contextlib import closing

import msgpack

from hadelay.codec.checksums import crc32c
from hadelay.platform.disk import Disk, read_file
from hadelay.platform.runtime import Runtime
from hadelay.storage.hours import HourStore, file_checksums
from hadelay.storage.manifest import LANE, Manifest, SnapshotFile, rows_as_bytes
from hadelay.storage.tables import CHECKPOINT, ROW, Tables, hour_rows

log = logging.getLogger(__name__)

#: Pause after a failed export, in seconds: each attempt may fill a disk whose space the journal needs.
_PAUSE_S = 15.0


class _Export:
    """An export on disk, its number of users, and the pin that keeps its hour files."""

    def __init__(self, manifest: Manifest, pin: object) -> None:
        self.manifest, self.pin, self.users = manifest, pin, 0


class Exports:
    """Exports of checkpoints; only the last durable checkpoint, at `index`, gets a new export."""

    def __init__(
        self, disk: Disk, directory: str, runtime: Runtime, hours: HourStore, tables: Tables, index: int
    ) -> None:
        self._disk, self._root, self._directory = disk, directory, f"{directory}/export"
        self._runtime, self._hours, self._tables = runtime, hours, tables
        self._index = index
        self._made: dict[int, _Export] = {}
        self._making = False
        #: Error of the last export, and the end of the pause after it.
        self.failure: BaseException | None = None
        self._paused_until = 0.0

    def manifest(self, term: int, checkpointing: bool) -> Manifest | None:
        """See Storage.manifest. term: term of the last durable checkpoint. checkpointing: a checkpoint is running."""
        made = self._made.get(self._index)
        if made is not None:
            made.users += 1
            return made.manifest
        if self._index and not (self._making or checkpointing) and self._runtime.monotonic() >= self._paused_until:
            self._make(self._index, term)
        return None

    def _make(self, index: int, term: int) -> None:
        self._making, self.failure = True, None
        pin = self._hours.pin()

        def finish(manifest: Manifest | None, error: BaseException | None) -> None:
            self._making = False
            if manifest is None:  # the disk may be full; the node can continue without a snapshot
                log.error("snapshot_not_exported", extra={"index": index, "error": str(error)})
                self.failure, self._paused_until = error, self._runtime.monotonic() + _PAUSE_S
                self._hours.unpin(pin)
                return
            self.forget_older(self._index)
            self._made[index] = _Export(manifest, pin)

        # A checkpoint that begins meanwhile commits later: the lane runs its jobs in order.
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
        except Exception:  # a partial export must not occupy a full disk
            disk.unlink(f"{self._directory}/{name}")
            raise
        row = msgpack.unpackb(self._tables.backend.get(CHECKPOINT, ROW) or b"")
        assert row["index"] == index, "no checkpoint commits while its export is made"
        files = [SnapshotFile(name, length, crc)]
        if row["names_length"]:
            files.append(SnapshotFile("names", row["names_length"], row["names_crc"]))
        files += [
            SnapshotFile(f"hours/{name}", *sums) for name, sums in file_checksums(*hour_rows(self._tables.backend))
        ]
        return Manifest(index, term, files)

    def release(self, manifest: Manifest) -> None:
        self._made[manifest.index].users -= 1
        self.forget_older(self._index)

    def forget_older(self, index: int) -> None:
        """Remove unused exports older than `index`, the last durable checkpoint. An export pins all hour files."""
        self._index = index
        for older in [i for i, made in self._made.items() if not made.users and i != index]:
            self._hours.unpin(self._made.pop(older).pin)
            self._disk.unlink(f"{self._directory}/state-{older}")

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Bytes of a manifest's file. FileNotFoundError after the manifest's release."""
        where = self._directory if name.startswith("state-") else self._root
        if not (name == "names" or name.startswith(("state-", "hours/"))) or ".." in name:
            raise FileNotFoundError(name)
        return read_file(self._disk, f"{where}/{name}", size, offset)
