"""Files of this node: hours, snapshots for backups, and the table of names whose numbers are in the files.

A snapshot (docs/spec/backup.md) is the manifest that a follower would get (Exports). While it is open, none of
its files is deleted, not even those of hours that are retired meanwhile; so it ends when it is released, or when nobody
has read from it for a while.
"""

import asyncio
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hadelay.api.cluster import Hour, HourFileOut, Names, Patrol, Snapshot, SnapshotFileOut
from hadelay.api.service import HourFile, answered
from hadelay.api.text import format_instant
from hadelay.codec.formats import DISPATCH_SIZE, INDEX_SIZE
from hadelay.errors import NotFound, Overloaded
from hadelay.model import DEAD_HOURS, hour_name
from hadelay.platform.disk import files_closed
from hadelay.server.logbook import BackupSeen
from hadelay.server.node import Node
from hadelay.server.service.part import Service
from hadelay.storage.hours import DiskHourStore
from hadelay.storage.snapshots import Manifest
from hadelay.storage.store import Storage

#: Time in seconds after the last read of an open snapshot at which the snapshot is closed.
_PATIENCE_S = 60.0
#: Limit of open snapshots, beyond which requests to open one are refused: each of them keeps an export of the tables,
#: and the files of hours that are retired meanwhile.
_MOST = 4
_LOOK_S = 0.02


class _Open:
    def __init__(self, storage: Storage, manifest: Manifest, now: float, backup: BackupSeen) -> None:
        self.storage, self.manifest, self.read_at, self.backup = storage, manifest, now, backup
        self.lengths = {file.name: file.length for file in manifest.files}


class Files(Service):
    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._open: dict[str, _Open] = {}
        #: Number of snapshots that are just being opened, which takes a while; they count towards the limit of open
        #: ones.
        self._opening = 0
        self._looking = False

    async def hours(self) -> tuple[int, Iterator[Hour]]:
        """Returns (applied index, hours at this index). The hours are in ascending order, those of dead letters last;
        the iterator can be read once."""
        # Write buffered entries to the hour files in slices first: computing the checksums would write all of them at
        # once.
        await answered(self._node.storage.write_out)
        return self._node.raft.applied_index, hours_of(self._node.storage.hours, self._node.ledger.now_hour)

    async def hour_file_length(self, hour: int, file: HourFile) -> int:
        """Number of committed bytes in a file of the hour. Raises NotFound."""
        store = self._node.storage.hours
        if not store.count(hour):
            raise NotFound("the hour has no messages, or is past its retention")
        return store.length(hour, f".{file}")

    async def read_hour_file(self, hour: int, file: HourFile, offset: int, length: int) -> bytes:
        """Read exactly `length` bytes of a file of the hour. The range has to be within the length that
        hour_file_length returned."""
        return self._node.storage.hours.read_file(hour, f".{file}", offset, length)

    def patrol(self, *, now: bool = False) -> Patrol:
        """Results of the checks that compare this node's files with their checksums. now: begin a new check of all
        files."""
        patrol = self._node.patrol
        if now:
            patrol.check_now()
        checked_at = format_instant(patrol.finished_ms) if patrol.rounds else None
        return Patrol(
            self._node.name, patrol.rounds, patrol.wanted, checked_at, patrol.repaired, sorted(patrol.damaged)
        )

    async def names(self) -> Names:
        await self._confirm()
        return Names(*self._node.storage.names.all())

    async def open_snapshot(self) -> Snapshot:
        """Open a snapshot that has everything committed before the call, and perhaps later entries. Raises
        Overloaded."""
        await self._confirm()
        if self._opening + sum(one.storage is self._node.storage for one in self._open.values()) >= _MOST:
            raise Overloaded(
                "too many snapshots are open on this node: ask another, or try later", retry_after_ms=5_000
            )
        self._opening += 1
        try:
            return await self._opened()
        finally:
            self._opening -= 1

    async def _opened(self) -> Snapshot:
        node = self._node
        await self._checkpoint()
        while (manifest := node.storage.manifest()) is None:
            await self._wait()
            if (failure := node.storage.exports.failure) is not None:
                raise Overloaded(f"this node cannot export its tables ({failure}): ask another", retry_after_ms=5_000)
        name = f"{manifest.index}-{node.runtime.random.getrandbits(32):08x}"
        row = node.logbook.backup_began(name, node.now_ms(), sum(file.length for file in manifest.files))
        self._open[name] = _Open(node.storage, manifest, node.runtime.monotonic(), row)
        if not self._looking:
            self._looking = True
            node.runtime.call_later(_PATIENCE_S, self._look)
        identity = node.storage.identity
        files = [SnapshotFileOut(file.name, str(file.length), f"{file.crc:08x}") for file in manifest.files]
        return Snapshot(
            name,
            identity.cluster_id,
            identity.group,
            str(manifest.index),
            manifest.term,
            node.ledger.level,
            format_instant(node.ledger.now_ms),
            files,
        )

    async def snapshot_file_length(self, snapshot: str, file: str) -> int:
        """Size in bytes of a file of an open snapshot. Raises NotFound, also if the snapshot is closed."""
        lengths = self._found(snapshot).lengths
        if file not in lengths:
            raise NotFound(f"this snapshot has no file {file[:64]!r}")
        return lengths[file]

    async def read_snapshot(self, snapshot: str, file: str, offset: int, length: int) -> bytes:
        """Read exactly `length` bytes of a snapshot's file at `offset`, in a thread. The range must lie within the
        size that `snapshot_file_length` returned."""
        found, runtime = self._found(snapshot), self._node.runtime
        try:
            data: bytes = await answered(
                lambda done: runtime.in_thread("copies", lambda: found.storage.exports.read(file, offset, length), done)
            )
        except FileNotFoundError:
            raise _over() from None
        found.read_at = runtime.monotonic()
        found.backup.read_bytes += len(data)
        return data

    async def release_snapshot(self, snapshot: str, *, complete: bool = False) -> None:
        """Close a snapshot. complete: whether the reader has read all that it wanted; the list of backups shows
        that."""
        self._node.logbook.backup_ended(snapshot, complete=complete)
        self._release(snapshot)

    def _release(self, name: str) -> None:
        snapshot = self._open.pop(name, None)
        # Release only files of the present storage: an installed snapshot replaces it, and the node then has other
        # files.
        if snapshot is not None and snapshot.storage is self._node.storage:
            snapshot.storage.exports.release(snapshot.manifest)

    async def _checkpoint(self) -> None:
        node, checkpoints = self._node, self._node.checkpoints
        wanted = node.raft.applied_index
        if not node.storage.applied_index:
            checkpoints.bytes_since += 1  # an empty node without a checkpoint makes one, too.
        # Stop when nothing is left to write. An installed snapshot may replace the storage meanwhile.
        while node.storage.checkpointing or (node.storage.applied_index < wanted and checkpoints.bytes_since):
            checkpoints.begin()
            await self._wait()

    async def _wait(self) -> None:
        await asyncio.sleep(_LOOK_S)
        if self._node.raft.stopped:
            raise files_closed()

    def _found(self, name: str) -> _Open:
        snapshot = self._open.get(name)
        if snapshot is None or snapshot.storage is not self._node.storage:
            raise _over()
        snapshot.read_at = self._node.runtime.monotonic()
        return snapshot

    def _look(self) -> None:
        now = self._node.runtime.monotonic()
        for name in [name for name, snapshot in self._open.items() if now - snapshot.read_at >= _PATIENCE_S]:
            self._node.logbook.backup_ended(name, complete=False)
            self._release(name)
        self._looking = bool(self._open) and not self._node.raft.stopped
        if self._looking:
            self._node.runtime.call_later(_PATIENCE_S / 4, self._look)


def _over() -> NotFound:
    return NotFound("this snapshot was closed: open another one")


def hours_of(store: DiskHourStore, running: int) -> Iterator[Hour]:
    """The hours of `store` as they are at the time of the call, even if the caller iterates over them slowly."""
    found, rows = store.rows()
    numbers = found.tolist()
    return _hours(numbers, rows, {hour for hour in numbers if store.mapped(hour)}, running)


def _hours(numbers: list[int], rows: NDArray[np.void], mapped: set[int], running: int) -> Iterator[Hour]:
    for at, hour in enumerate(numbers):
        log_bytes, entries, events, log_crc, idx_crc, dsp_crc, _ = rows[at].item()
        # A past hour gets no more entries, because messages published after their due time are stored in the current
        # hour. But an hour of dead letters gets more letters until its retention ends.
        sealed = hour < running or DEAD_HOURS <= hour < DEAD_HOURS + running
        yield Hour(
            hour_name(hour),
            sealed,
            hour in mapped,
            HourFileOut(entries, str(log_bytes), f"{log_crc:08x}"),
            HourFileOut(entries, str(entries * INDEX_SIZE), f"{idx_crc:08x}"),
            HourFileOut(events, str(events * DISPATCH_SIZE), f"{dsp_crc if events else 0:08x}"),
        )
