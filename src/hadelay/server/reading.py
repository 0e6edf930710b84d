"""Reading records and tables for consumers and other askers; what is damaged is repaired before anybody sees it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Generator
from itertools import groupby
from operator import itemgetter
from pathlib import PurePath
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.formats import RECORD_SIZE
from hadelay.codec.records import check_record
from hadelay.errors import DamagedFile
from hadelay.model import hour_from_name
from hadelay.platform.disk import Disk
from hadelay.platform.runtime import Runtime
from hadelay.server.repair import Repairer
from hadelay.server.replica import Replica

T = TypeVar("T")
log = logging.getLogger(__name__)
#: Limit of records looked for in memory in vain before the rest is left to the thread.
_MISSES = 32
#: Names of threads that read: leases run while a hand-out is read, so it does not wait behind the pages of lists.
HAND_OUTS, LISTS = "records", "lists"


class Extent(NamedTuple):
    """Where a record is: offset and size in the .log of its hour, in bytes."""

    hour: int
    offset: int
    size: int


class Reader:
    """One per node."""

    def __init__(self, replica: Replica, runtime: Runtime, repairer: Repairer) -> None:
        self._replica, self._runtime, self._repairer = replica, runtime, repairer
        #: Counts of records read for hand-outs and lists: from "memory", or from "disk" in a thread.
        self.counts: Counter[str] = Counter()

    async def records(self, hours: NDArray[np.integer], rows: NDArray[np.void]) -> list[bytes]:
        """The record of each INDEX row, verified. DamagedFile when no live node has a good copy of one."""
        extents = extents_of(hours, rows)
        found = await self.read_off_loop(extents)
        records = []
        for extent, record in zip(extents, found, strict=True):
            try:
                records.append(self._verified(extent, record))
            except DamagedFile as damage:
                records.append(await self._repair(damage))
        return records

    def record(self, extent: Extent, done: Callable[[bytes | None], None]) -> bytes | None:
        """The record if it is in memory and sound. Else None, and done(record) later; done(None) when no live node has
        a good copy."""
        found = self._cached([extent])

        def verify() -> bytes | None:
            try:
                return self._verified(extent, found[0])
            except DamagedFile as damage:
                self._start_repair(damage, done)
                return None

        def fetched() -> None:
            if (record := verify()) is not None:
                done(record)

        if found[0] is not None:
            return verify()
        self._fetch([extent], found, fetched, HAND_OUTS)
        return None

    async def read_off_loop(self, extents: list[Extent], lane: str = HAND_OUTS) -> list[bytes | None]:
        """The records, not verified, without the loop waiting for the disk: afterwards they are in memory. None for
        those that cannot be read."""
        found = self._cached(extents)
        if None in found:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._fetch(extents, found, lambda: None if future.done() else future.set_result(None), lane)
            await future
        return found

    def _cached(self, extents: list[Extent]) -> list[bytes | None]:
        """The records that are in memory, not verified; None for the others. After `_MISSES` of those the rest is not
        looked for: a miss costs the loop more than a hit."""
        hours, misses = self._replica.storage.hours, 0
        found: list[bytes | None] = [None] * len(extents)
        for at, extent in enumerate(extents):
            found[at] = hours.cached_record(*extent)
            misses += found[at] is None
            if misses == _MISSES:
                break
        self.counts["memory"] += len(found) - found.count(None)
        return found

    def _fetch(self, extents: list[Extent], found: list[bytes | None], done: Callable[[], None], lane: str) -> None:
        """Read in a thread, in the order of the files, what `found` lacks; then done(). What cannot be read stays
        None."""
        disk, path = self._replica.storage.disk, self._replica.storage.hours.path
        wanted = sorted(
            (f"{path(extent.hour)}.log", extent.offset, extent.size, at)
            for at, extent in enumerate(extents)
            if found[at] is None
        )
        self.counts["disk"] += len(wanted)

        def read() -> None:
            for name, group in groupby(wanted, itemgetter(0)):
                some = list(group)
                try:
                    _read_file(disk, name, [item[1:] for item in some], found)
                except OSError as error:  # retired meanwhile, or a disk that fails: the loop finds out as before
                    log.debug("record_not_read", extra={"path": name, "error": str(error)})

        self._runtime.in_thread(lane, read, lambda result, error: done())

    def _verified(self, extent: Extent, record: bytes | None) -> bytes:
        """`record` if it is sound, else as it is read now. DamagedFile, also for a record whose hour was retired."""
        if record is not None and not check_record(record, extent.size):
            return record
        hours = self._replica.storage.hours
        try:
            return hours.record(*extent, verify=True)
        except FileNotFoundError:
            path = f"{hours.path(extent.hour)}.log"
            raise DamagedFile(path, extent.offset, "the hour is past its retention", size=extent.size) from None

    async def repaired(self, read: Callable[[], T]) -> T:
        """What `read` returns, once everything that it meets is sound. DamagedFile when that cannot be had."""

        def once() -> Generator[None, None, T]:
            yield from ()
            return read()

        return await self.in_slices(once)

    async def in_slices(self, read: Callable[[], Generator[None, None, T]]) -> T:
        """What the generator returns; others have their turn after each of its slices. Damage is repaired, and then all
        is read again. DamagedFile when no live node has a good copy."""
        repaired: set[tuple[str, int]] = set()
        while True:
            slices = read()
            try:
                while True:
                    next(slices)
                    await asyncio.sleep(0)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            except DamagedFile as damage:
                where = damage.path, damage.offset
                if not damage.size or where in repaired:
                    raise
                repaired.add(where)
                await self._repair(damage)

    async def _repair(self, damage: DamagedFile) -> bytes:
        future: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        self._start_repair(damage, lambda data: None if future.done() else future.set_result(data))
        if (data := await future) is None:
            raise damage
        return data

    def _start_repair(self, damage: DamagedFile, done: Callable[[bytes | None], None]) -> None:
        path = PurePath(damage.path)
        self._repairer.repair(hour_from_name(path.stem), path.suffix, damage.offset, damage.size, done)


def extents_of(hours: NDArray[np.integer], rows: NDArray[np.void]) -> list[Extent]:
    columns = zip(hours.tolist(), rows["offset"].tolist(), rows["size"].tolist(), strict=True)
    return [Extent(*extent) for extent in columns]


def _read_file(disk: Disk, path: str, wanted: list[tuple[int, int, int]], found: list[bytes | None]) -> None:
    file = disk.open(path)
    try:
        for offset, size, _ in wanted:  # first, so that the disk has them all to do at once
            file.will_need(size, offset)
        for offset, size, at in wanted:
            found[at] = file.pread(size, offset)
    finally:
        file.close()


def split_record(record: bytes) -> tuple[bytes, bytes]:
    """(meta, body) of a verified record."""
    end = RECORD_SIZE + int.from_bytes(record[4:8], "little")
    return record[RECORD_SIZE:end], record[end:]
