"""Reading records for consumers and readers, and mending the damaged ones from a peer (architecture §3).

A record that does not verify is fetched from the other nodes, whose files are the same bytes; a copy that verifies is
written over the damaged place, and the reader never knows. Only when no live peer has a good copy does the reader hear
of it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hadelay.core.formats import RECORD_SIZE
from hadelay.errors import BadRequest, DamagedFile, HadelayError
from hadelay.server.link import Reply

if TYPE_CHECKING:
    from hadelay.server.node import Node

_FETCH_S = 2.0


class Records:
    def __init__(self, node: Node) -> None:
        self.node = node
        self.repaired = 0
        node.link.handlers["record"] = self._serve

    async def read(self, hours: NDArray[np.integer], rows: NDArray[np.void]) -> list[bytes]:
        """The record of each INDEX row, verified. DamagedFile when nobody has a good copy of one."""
        record = self.node.storage.hours.record
        places = zip(hours.tolist(), rows["offset"].tolist(), rows["size"].tolist(), strict=True)
        found = []
        for hour, offset, size in places:
            try:
                found.append(record(hour, offset, size, verify=True))
            except DamagedFile as damage:
                found.append(await self._mend(hour, offset, size, damage))
        return found

    async def _mend(self, hour: int, offset: int, size: int, damage: DamagedFile) -> bytes:
        node = self.node
        for name in node.peers.peers:
            if name == node.name or not node.peers.live(name):
                continue
            data = await self._fetch(name, hour, offset, size)
            if data is None:
                continue
            try:
                node.storage.hours.repair(hour, ".log", offset, data)
            except BadRequest:
                continue
            self.repaired += 1
            node.log("record_repaired", file=damage.path, offset=offset, source=name)
            return data
        raise damage

    async def _fetch(self, peer: str, hour: int, offset: int, size: int) -> bytes | None:
        future: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()

        def done(data: Any, error: HadelayError | None) -> None:
            if not future.done():
                future.set_result(data if error is None else None)

        self.node.link.call(peer, "record", [hour, offset, size], _FETCH_S, done)
        return await future

    def _serve(self, peer: str, payload: Any, reply: Reply) -> None:
        hour, offset, size = payload
        try:
            reply(self.node.storage.hours.record(hour, offset, size, verify=True), None)
        except (HadelayError, OSError, KeyError) as error:
            reply(None, BadRequest(f"no good copy here: {error}"))


def split_record(record: bytes) -> tuple[bytes, bytes]:
    """(meta, body) of a verified record."""
    end = RECORD_SIZE + int.from_bytes(record[4:8], "little")
    return record[RECORD_SIZE:end], record[end:]
