"""Reading for consumers and other askers, and having what is damaged mended before anybody sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from pathlib import PurePath
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from hadelay.core.formats import RECORD_SIZE
from hadelay.errors import DamagedFile
from hadelay.model import hour_from_name

if TYPE_CHECKING:
    from hadelay.server.node import Node

T = TypeVar("T")


async def read_records(node: Node, hours: NDArray[np.integer], rows: NDArray[np.void]) -> list[bytes]:
    """The record of each INDEX row, verified. DamagedFile when no live node has a good copy of one."""
    places = zip(hours.tolist(), rows["offset"].tolist(), rows["size"].tolist(), strict=True)
    found = []
    for hour, offset, size in places:
        try:
            found.append(node.storage.hours.record(hour, offset, size, verify=True))
        except DamagedFile as damage:
            found.append(await _mended(node, damage))
    return found


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
