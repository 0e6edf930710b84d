"""Reading records for consumers, and having the damaged ones mended before anybody sees them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hadelay.core.formats import RECORD_SIZE
from hadelay.errors import DamagedFile

if TYPE_CHECKING:
    from hadelay.server.node import Node


async def read_records(node: Node, hours: NDArray[np.integer], rows: NDArray[np.void]) -> list[bytes]:
    """The record of each INDEX row, verified. DamagedFile when no live node has a good copy of one."""
    places = zip(hours.tolist(), rows["offset"].tolist(), rows["size"].tolist(), strict=True)
    found = []
    for hour, offset, size in places:
        try:
            found.append(node.storage.hours.record(hour, offset, size, verify=True))
        except DamagedFile as damage:
            found.append(await _mended(node, hour, offset, size, damage))
    return found


async def _mended(node: Node, hour: int, offset: int, size: int, damage: DamagedFile) -> bytes:
    future: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()

    def mended(data: bytes | None) -> None:
        if not future.done():
            future.set_result(data)

    node.mender.mend(hour, ".log", offset, size, mended)
    data = await future
    if data is None:
        raise damage
    return data


def split_record(record: bytes) -> tuple[bytes, bytes]:
    """(meta, body) of a verified record."""
    end = RECORD_SIZE + int.from_bytes(record[4:8], "little")
    return record[RECORD_SIZE:end], record[end:]
