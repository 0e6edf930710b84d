"""Files of this node: hours, snapshots for backups, and the names whose numbers are in the files."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hadelay.api.cluster import Hour, HourFileOut, Names, Snapshot
from hadelay.api.service import HOUR_FILES, HourFile, answered
from hadelay.codec.formats import DISPATCH_SIZE, INDEX_SIZE
from hadelay.errors import NotFound
from hadelay.model import DEAD_HOURS, hour_name
from hadelay.server.copies import Copies
from hadelay.server.node import Node
from hadelay.server.service.part import Door
from hadelay.storage.hours import HourStore


class Files(Door):
    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._copies = Copies(node.replica, node.raft, node.checkpoints)

    async def hours(self) -> tuple[int, Iterator[Hour]]:
        """(applied index, hours at this index: ascending, dead ones last). The iterator can be read once."""
        # What waits for far hours is written first, in slices: the checksums would do it in one go otherwise.
        await answered(self._node.storage.write_out)
        return self._node.raft.applied_index, hours_of(self._node.storage.hours, self._node.ledger.now_hour)

    async def hour_file_length(self, hour: int, file: HourFile) -> int:
        """Committed bytes. Raises NotFound."""
        store = self._node.storage.hours
        if not store.count(hour):
            raise NotFound("that hour has no messages, or is past its retention")
        return store.lengths(hour)[HOUR_FILES.index(file)]

    async def read_hour_file(self, hour: int, file: HourFile, offset: int, length: int) -> bytes:
        """Exactly `length` bytes, within hour_file_length."""
        return self._node.storage.hours.read_file(hour, file, offset, length)

    async def open_snapshot(self) -> Snapshot:
        """Snapshot of everything committed before the call. Raises Overloaded."""
        await self._confirm()
        return await self._copies.open()

    async def snapshot_file_length(self, snapshot: str, file: str) -> int:
        """Bytes. Raises NotFound, also of a snapshot that was released."""
        return self._copies.length(snapshot, file)

    async def read_snapshot(self, snapshot: str, file: str, offset: int, length: int) -> bytes:
        """Exactly `length` bytes, within snapshot_file_length."""
        return await self._copies.read(snapshot, file, offset, length)

    async def release_snapshot(self, snapshot: str) -> None:
        self._copies.release(snapshot)

    async def names(self) -> Names:
        await self._confirm()
        return Names(*self._node.storage.names.all())


def hours_of(store: HourStore, running: int) -> Iterator[Hour]:
    """As of now, however long the reader takes to go through it."""
    found, rows = store.rows()
    numbers = found.tolist()
    return _hours(numbers, rows, {hour for hour in numbers if store.mapped(hour)}, running)


def _hours(numbers: list[int], rows: NDArray[np.void], mapped: set[int], running: int) -> Iterator[Hour]:
    for at, hour in enumerate(numbers):
        log_bytes, entries, events, log_crc, idx_crc, dsp_crc, _ = rows[at].item()
        # Late messages are filed under the running hour, so an hour that is over gets no more entries.
        # A dead hour gets letters until its retention ends.
        sealed = hour < running or DEAD_HOURS <= hour < DEAD_HOURS + running
        yield Hour(
            hour_name(hour),
            sealed,
            hour in mapped,
            HourFileOut(entries, str(log_bytes), f"{log_crc:08x}"),
            HourFileOut(entries, str(entries * INDEX_SIZE), f"{idx_crc:08x}"),
            HourFileOut(events, str(events * DISPATCH_SIZE), f"{dsp_crc if events else 0:08x}"),
        )
