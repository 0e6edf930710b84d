"""Reads records and tables without blocking the event loop, and verifies them. Damaged bytes are repaired first.

Read-ahead (leader): a thread brings records that fall due soon into memory, in the order of the file. Nothing depends
on it: a record that is not in memory at its hand-out is read in a thread.

Repair: the files of all nodes are the same bytes, so damaged bytes are fetched from any live peer and written over the
damaged ones. A peer verifies what it serves; storage verifies again what it writes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Generator
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import PurePath
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.formats import INDEX_SIZE, RECORD_SIZE
from hadelay.codec.records import check_record
from hadelay.errors import BadRequest, DamagedFile, HadelayError
from hadelay.model import hour_from_name
from hadelay.platform.disk import Disk
from hadelay.platform.runtime import Runtime
from hadelay.server.checkpoints import Replica
from hadelay.server.link import Link, Reply
from hadelay.server.peers import Peers
from hadelay.storage.hourtable import FILES

T = TypeVar("T")
log = logging.getLogger(__name__)
#: Time in seconds by which records are read ahead of their due second: early enough for a slow disk, and late enough
#: that a small page cache still has the records when they are handed out.
AHEAD_S = 2.0
#: Limit of the gap between two records, in bytes, up to which they are read ahead as one span.
_GAP = 32 << 10
#: Size in bytes at which a joint read of adjacent records from memory is complete, so that it takes no further record.
_SPAN = 64 << 10
#: Number of records missing in memory after which a thread reads all remaining records from the disk.
_MISSES = 32
#: Names of the threads that read for hand-outs and for lists. There are two, because leases run while records are read
#: for a hand-out: these reads must not wait behind pages of lists.
HAND_OUTS, LISTS = "records", "lists"
#: Timeout of a request to another node for undamaged bytes, in seconds.
_FETCH_S = 2.0
_MAX_BYTES = 80 << 20
#: Offset, in a record, of the time at which the message was published.
_PUBLISHED_AT = 24


class Extent(NamedTuple):
    """Location of a record: offset and size in the .log file of its hour, in bytes."""

    hour: int
    offset: int
    size: int


class VerifiedReader:
    """Reads records, verifies them, and has damaged records repaired. One object per node."""

    def __init__(self, replica: Replica, runtime: Runtime, repairer: Repairer) -> None:
        self._replica, self._runtime, self._repairer = replica, runtime, repairer
        #: Counts of records read for hand-outs and lists: from "memory", or from "disk" in a thread.
        self.counts: Counter[str] = Counter()

    @property
    def repairs(self) -> int:
        """Number of index entries and records repaired since this process started."""
        return self._repairer.repaired

    async def records(self, hours: NDArray[np.integer], rows: NDArray[np.void]) -> list[bytes]:
        """The records of these INDEX rows, verified. DamagedFile if no live node has a good copy of one of them."""
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
        """Return the record if it is in memory and intact. Otherwise return None, and later call done(record), or
        done(None) if no live node has a good copy."""
        found = self._cached([extent])

        def verify() -> bytes | None:
            try:
                return self._verified(extent, found[0])
            except DamagedFile as damage:
                self.repair(damage, done)
                return None

        def fetched() -> None:
            if (record := verify()) is not None:
                done(record)

        if found[0] is not None:
            return verify()
        self._fetch([extent], found, fetched, HAND_OUTS)
        return None

    def verified(self, extents: list[Extent], lane: str, done: Callable[[list[bytes | None]], None]) -> None:
        """Read records without blocking the loop, then call done(records). Each record is verified, and repaired if it
        was damaged; it is None if no live node has a good copy."""
        found = self._cached(extents)
        damaged: set[int] = set()

        def repaired(at: int, record: bytes | None) -> None:
            found[at] = record
            damaged.discard(at)
            if not damaged:
                done(found)

        def verify() -> None:
            damages: dict[int, DamagedFile] = {}
            for at, extent in enumerate(extents):
                try:
                    found[at] = self._verified(extent, found[at])
                except DamagedFile as damage:
                    damages[at] = damage
            damaged.update(damages)
            for at, found_damage in damages.items():
                self.repair(found_damage, partial(repaired, at))
            if not damages:
                done(found)

        if None in found:
            self._fetch(extents, found, verify, lane)
        else:
            verify()

    async def sound(self, extents: list[Extent], lane: str) -> list[bytes | None]:
        """Read records as `verified` does, but as a coroutine."""
        future: asyncio.Future[list[bytes | None]] = asyncio.get_running_loop().create_future()
        self.verified(extents, lane, lambda found: None if future.done() else future.set_result(found))
        return await future

    async def read_off_loop(self, extents: list[Extent], lane: str = HAND_OUTS) -> list[bytes | None]:
        """Read records without blocking the loop and without verifying them. None stands for a record that cannot be
        read."""
        found = self._cached(extents)
        if None in found:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._fetch(extents, found, lambda: None if future.done() else future.set_result(None), lane)
            await future
        return found

    def _cached(self, extents: list[Extent]) -> list[bytes | None]:
        """Read those records that are in memory, adjacent records in one read; None stands for the others. They are not
        verified. Stops after `_MISSES` misses, because a miss costs the event loop more than a hit."""
        cached, misses, at = self._replica.storage.hours.cached_record, 0, 0
        found: list[bytes | None] = [None] * len(extents)
        while at < len(extents) and misses < _MISSES:
            hour, start, size = extents[at]
            last, end = at + 1, start + size
            while last < len(extents) and extents[last][:2] == (hour, end) and end - start < _SPAN:
                end += extents[last].size
                last += 1
            if (span := cached(hour, start, end - start)) is None:
                last, span = at + 1, cached(hour, start, size)
            misses += span is None
            if span is not None:
                found[at:last] = [span[at - start : at - start + size] for _, at, size in extents[at:last]]
            at = last
        self.counts["memory"] += len(found) - found.count(None)
        return found

    def _fetch(self, extents: list[Extent], found: list[bytes | None], done: Callable[[], None], lane: str) -> None:
        """In a thread, read the records that are None in `found`, in the order of the files, and add them to `found`;
        then call done(). A record that cannot be read stays None."""
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
                # The hour file was deleted, or the disk failed: `_verified` reads the record again and raises the error
                except OSError as error:
                    log.debug("record_not_read", extra={"path": name, "error": str(error)})

        self._runtime.in_thread(lane, read, lambda result, error: done())

    def _verified(self, extent: Extent, record: bytes | None) -> bytes:
        """Return `record` if intact, else read it again from disk. DamagedFile if it is damaged there, or if its hour
        is deleted."""
        if record is not None and not check_record(record, extent.size):
            return record
        hours = self._replica.storage.hours
        try:
            return hours.record(*extent, verify=True)
        except FileNotFoundError:
            path = f"{hours.path(extent.hour)}.log"
            raise DamagedFile(path, extent.offset, "the hour is past its retention", size=extent.size) from None

    async def repaired(self, read: Callable[[], T]) -> T:
        """The result of `read`, which is called again after each repair of damaged bytes. DamagedFile if a repair
        fails."""

        def once() -> Generator[None, None, T]:
            yield from ()
            return read()

        return await self.in_slices(once)

    async def in_slices(self, read: Callable[[], Generator[None, None, T]]) -> T:
        """The result of the generator that `read` returns. Other tasks of the event loop run after each of its slices.
        If it meets damaged bytes, they are repaired, and `read` is called again. DamagedFile if no live node has a good
        copy."""
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
        self.repair(damage, lambda data: None if future.done() else future.set_result(data))
        if (data := await future) is None:
            raise damage
        return data

    def repair(self, damage: DamagedFile, done: Callable[[bytes | None], None]) -> None:
        """Repair damaged bytes, then call done(bytes), or done(None) if no live node has a good copy."""
        path = PurePath(damage.path)
        self._repairer.repair(hour_from_name(path.stem), path.suffix, damage.offset, damage.size, done)


def extents_of(hours: NDArray[np.integer], rows: NDArray[np.void]) -> list[Extent]:
    columns = zip(hours.tolist(), rows["offset"].tolist(), rows["size"].tolist(), strict=True)
    return [Extent(*extent) for extent in columns]


def _read_file(disk: Disk, path: str, wanted: list[tuple[int, int, int]], found: list[bytes | None]) -> None:
    file = disk.open(path)
    try:
        # Announce all reads to the kernel first, so that the disk gets all requests at once.
        for offset, size, _ in wanted:
            file.will_need(size, offset)
        for offset, size, at in wanted:
            found[at] = file.pread(size, offset)
    finally:
        file.close()


def split_record(record: bytes) -> tuple[bytes, bytes]:
    """Split a verified record into (encoded meta of the message, body of the message)."""
    end = RECORD_SIZE + int.from_bytes(record[4:8], "little")
    return record[RECORD_SIZE:end], record[end:]


def published_ms(record: bytes) -> int:
    """Time at which the message of a verified record was published, in Unix ms."""
    return int.from_bytes(record[_PUBLISHED_AT : _PUBLISHED_AT + 8], "little")


class Repairer:
    """Fetches undamaged bytes from other nodes to repair damaged files here, and serves such bytes to others (link
    operation "bytes"). One object per node."""

    def __init__(self, name: str, replica: Replica, link: Link, peers: Peers) -> None:
        self._name, self._replica, self._link, self._peers = name, replica, link, peers
        #: Number of repairs since this process started.
        self.repaired = 0
        link.handlers["bytes"] = self._serve

    def repair(self, hour: int, suffix: str, offset: int, size: int, done: Callable[[bytes | None], None]) -> None:
        """Fetch undamaged bytes of a file from a live peer, and write them here; then call done(bytes), or done(None)
        if no live peer has a good copy."""
        peers = [name for name in self._peers.peers if name != self._name and self._peers.live(name)]
        self._ask(peers, (hour, suffix, offset, size), done)

    def repair_entry(self, hour: int, index: int, done: Callable[[], None]) -> None:
        """Repair an INDEX row, and its record if that is damaged, too. `done` is called only if both are intact
        afterwards."""

        def repaired(data: bytes | None) -> None:
            if data is not None:
                done()

        def row_repaired(data: bytes | None) -> None:
            store = self._replica.storage.hours  # use the present store: a snapshot may have replaced it meanwhile
            if data is None or not store.count(hour):
                return
            row = store.entries(hour, slice(index, index + 1))[0]
            try:
                store.record(hour, int(row["offset"]), int(row["size"]), verify=True)
            except DamagedFile as damage:
                self.repair(hour, ".log", damage.offset, damage.size, repaired)
            else:
                done()

        self.repair(hour, ".idx", index * INDEX_SIZE, INDEX_SIZE, row_repaired)

    def _ask(self, peers: list[str], where: tuple[int, str, int, int], done: Callable[[bytes | None], None]) -> None:
        if not peers:
            done(None)
            return
        peer, *others = peers
        hour, suffix, offset, size = where

        def answered(data: Any, error: HadelayError | None) -> None:
            if error is None and isinstance(data, bytes) and len(data) == size:
                try:
                    self._replica.storage.hours.repair(hour, suffix, offset, data)
                except (BadRequest, OSError):
                    pass
                else:
                    self.repaired += 1
                    log.warning("repaired", extra={"hour": hour, "file": suffix, "offset": offset, "source": peer})
                    done(data)
                    return
            self._ask(others, where, done)

        self._link.call(peer, "bytes", list(where), _FETCH_S, answered)

    def _serve(self, peer: str, payload: Any, reply: Reply) -> None:
        try:
            hour, suffix, offset, size = payload
            if suffix not in FILES or not 0 < size <= _MAX_BYTES:
                raise BadRequest("bytes: the file's name or the number of bytes is not allowed")
            store = self._replica.storage.hours
            data = store.read_file(hour, suffix, offset, size)
            store.check_repair(hour, suffix, offset, data)
            reply(data, None)
        except (BadRequest, DamagedFile, OSError, TypeError, ValueError) as error:
            reply(None, BadRequest(f"no good copy here: {error}"))


class ReadAhead:
    def __init__(self, disk: Disk, runtime: Runtime, path: Callable[[int], str]) -> None:
        """path: function that returns the path of an hour's files, without suffix."""
        self._disk, self._runtime, self._path = disk, runtime, path

    def index(self, hour: int) -> None:
        """Read the whole index of an hour, which has begun or begins soon, into the page cache: reading its linked
        lists touches all of it."""
        self._in_thread("index-ahead", hour, ".idx", lambda size: [(0, size)])

    def records(self, hour: int, rows: NDArray[np.void], in_s: float) -> None:
        """Read the records of INDEX rows into the page cache, shortly before they are due in `in_s` seconds."""
        if len(rows):
            starts, sizes = rows["offset"].astype(np.int64), rows["size"].astype(np.int64)
            self._runtime.call_later(max(0.0, in_s - AHEAD_S), self._records, hour, starts, starts + sizes)

    def _records(self, hour: int, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        self._in_thread("read-ahead", hour, ".log", lambda size: spans(starts, ends))

    def _in_thread(self, lane: str, hour: int, suffix: str, wanted: Callable[[int], list[tuple[int, int]]]) -> None:
        path = self._path(hour) + suffix

        def read() -> None:
            file = self._disk.open(path)
            try:
                for start, end in wanted(file.size()):
                    file.will_need(end - start, start)
            finally:
                file.close()

        def done(_: None, error: BaseException | None) -> None:
            # A missing file is no error: the hour file was deleted
            if error is not None and not isinstance(error, FileNotFoundError):
                log.debug("read_ahead_failed", extra={"path": path, "error": str(error)})

        self._runtime.in_thread(lane, read, done)


def spans(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Byte ranges (start, end) to read, ascending. Ranges with only a small gap between them are joined."""
    order = starts.argsort()
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    first = np.flatnonzero(np.append(True, starts[1:] > ends[:-1] + _GAP))
    last = np.append(first[1:], len(starts)) - 1
    return list(zip(starts[first].tolist(), ends[last].tolist(), strict=True))
