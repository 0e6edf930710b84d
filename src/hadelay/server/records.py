"""Reading for consumers and other askers, and having what is damaged mended before anybody sees it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator
from itertools import groupby
from operator import itemgetter
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.formats import RECORD_SIZE
from hadelay.codec.records import check_record
from hadelay.errors import DamagedFile
from hadelay.model import hour_from_name
from hadelay.platform.disk import Disk

if TYPE_CHECKING:
    from hadelay.server.node import Node

T = TypeVar("T")
log = logging.getLogger(__name__)
#: Records looked for in memory in vain before the rest is left to the thread.
_MISSES = 32
#: Threads that read: leases run while a hand-out is read, so it does not wait behind the pages of lists.
HAND_OUTS, LISTS = "records", "lists"


class Place(NamedTuple):
    """Where a record is."""

    hour: int
    offset: int
    size: int


async def read_records(node: Node, hours: NDArray[np.integer], rows: NDArray[np.void]) -> list[bytes]:
    """The record of each INDEX row, verified. DamagedFile when no live node has a good copy of one."""
    places = places_of(hours, rows)
    found = await read_off_loop(node, places)
    records = []
    for place, record in zip(places, found, strict=True):
        try:
            records.append(verified(node, place, record))
        except DamagedFile as damage:
            records.append(await _mended(node, damage))
    return records


def places_of(hours: NDArray[np.integer], rows: NDArray[np.void]) -> list[Place]:
    return [Place(*place) for place in zip(hours.tolist(), rows["offset"].tolist(), rows["size"].tolist(), strict=True)]


async def read_off_loop(node: Node, places: list[Place], lane: str = HAND_OUTS) -> list[bytes | None]:
    """The records, not verified, without the loop waiting for the disk: afterwards they are in memory. None for those
    that cannot be read."""
    found = read_cached(node, places)
    if None in found:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        fetch(node, places, found, lambda: None if future.done() else future.set_result(None), lane)
        await future
    return found


def read_cached(node: Node, places: list[Place]) -> list[bytes | None]:
    """The records that are in memory, not verified; None for those that are on the disk alone. After some of these the
    rest is not looked for: a miss costs the loop more than a hit."""
    hours, misses = node.storage.hours, 0
    found: list[bytes | None] = [None] * len(places)
    for at, place in enumerate(places):
        found[at] = hours.cached_record(*place)
        misses += found[at] is None
        if misses == _MISSES:
            break
    node.records_read["memory"] += len(found) - found.count(None)
    return found


def fetch(
    node: Node, places: list[Place], found: list[bytes | None], done: Callable[[], None], lane: str = HAND_OUTS
) -> None:
    """Read in a thread, in the order of the files, what `found` lacks; then done(). What cannot be read stays None."""
    disk, path = node.storage.disk, node.storage.hours.path
    wanted = sorted(
        (f"{path(place.hour)}.log", place.offset, place.size, at)
        for at, place in enumerate(places)
        if found[at] is None
    )
    node.records_read["disk"] += len(wanted)

    def read() -> None:
        for name, group in groupby(wanted, itemgetter(0)):
            some = list(group)
            try:
                _read_file(disk, name, [item[1:] for item in some], found)
            except OSError as error:  # retired meanwhile, or a disk that fails: the loop finds out as before
                log.debug("record_not_read", extra={"path": name, "error": str(error)})

    node.runtime.in_thread(lane, read, lambda result, error: done())


def _read_file(disk: Disk, path: str, wanted: list[tuple[int, int, int]], found: list[bytes | None]) -> None:
    file = disk.open(path)
    try:
        for offset, size, _ in wanted:  # first, so that the disk has them all to do at once
            file.will_need(size, offset)
        for offset, size, at in wanted:
            found[at] = file.pread(size, offset)
    finally:
        file.close()


def verified(node: Node, place: Place, record: bytes | None) -> bytes:
    """`record` if it is sound, else as it is read now. DamagedFile."""
    if record is None or check_record(record, place.size):
        return node.storage.hours.record(*place, verify=True)
    return record


async def read_mended(node: Node, read: Callable[[], T]) -> T:
    """What `read` gives, once everything that it meets is sound. DamagedFile when that cannot be had."""
    places: set[tuple[str, int]] = set()
    while True:
        try:
            return read()
        except DamagedFile as damage:
            await _mended_once(node, damage, places)


async def read_in_slices(node: Node, read: Callable[[], Generator[None, None, T]]) -> T:
    """What the generator returns; others have their turn after each of its slices. Damage as in `read_mended`: it is
    mended, and then all is read again."""
    places: set[tuple[str, int]] = set()
    while True:
        slices = read()
        try:
            while True:
                next(slices)
                await asyncio.sleep(0)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        except DamagedFile as damage:
            await _mended_once(node, damage, places)


async def _mended_once(node: Node, damage: DamagedFile, places: set[tuple[str, int]]) -> None:
    place = damage.path, damage.offset
    if not damage.size or place in places:
        raise damage
    places.add(place)
    await _mended(node, damage)


async def _mended(node: Node, damage: DamagedFile) -> bytes:
    path = PurePath(damage.path)
    future: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()

    def mended(data: bytes | None) -> None:
        if not future.done():
            future.set_result(data)

    node.mender.mend(hour_from_name(path.stem), path.suffix, damage.offset, damage.size, mended)
    data = await future
    if data is None:
        raise damage
    return data


def split_record(record: bytes) -> tuple[bytes, bytes]:
    """(meta, body) of a verified record."""
    end = RECORD_SIZE + int.from_bytes(record[4:8], "little")
    return record[RECORD_SIZE:end], record[end:]
