"""Damaged bytes of the hour files are fetched from a peer, verified, and written over the damaged ones.

The files of all nodes are the same bytes, so any live peer's sound copy will do. A peer verifies what
it serves; storage verifies again what is written here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from hadelay.codec.formats import INDEX_SIZE
from hadelay.errors import BadRequest, DamagedFile, HadelayError
from hadelay.server.link import Link, Reply
from hadelay.server.peers import Peers
from hadelay.server.replica import Replica
from hadelay.storage.repair import check_repair

#: Timeout of a request for sound bytes, in seconds.
_FETCH_S = 2.0
_MAX_BYTES = 80 << 20
_SUFFIXES = (".log", ".idx", ".dsp")

log = logging.getLogger(__name__)


class Repairer:
    """One per node."""

    def __init__(self, name: str, replica: Replica, link: Link, peers: Peers) -> None:
        self._name, self._replica, self._link, self._peers = name, replica, link, peers
        #: Count of repairs.
        self.repaired = 0
        link.handlers["bytes"] = self._serve

    def repair(self, hour: int, suffix: str, offset: int, size: int, done: Callable[[bytes | None], None]) -> None:
        """done(the sound bytes, now on this disk too), or None: no live peer has a good copy."""
        peers = [name for name in self._peers.peers if name != self._name and self._peers.live(name)]
        self._ask(peers, (hour, suffix, offset, size), done)

    def repair_entry(self, hour: int, index: int, done: Callable[[], None]) -> None:
        """Repair an INDEX row, and its record if that is damaged as well. `done` is called only if both are sound."""

        def repaired(data: bytes | None) -> None:
            if data is not None:
                done()

        def row_repaired(data: bytes | None) -> None:
            store = self._replica.storage.hours  # a snapshot may have come meanwhile
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
                    said = {"hour": hour, "file": suffix, "offset": offset, "source": peer}
                    log.warning("repaired", extra=said)
                    done(data)
                    return
            self._ask(others, where, done)

        self._link.call(peer, "bytes", list(where), _FETCH_S, answered)

    def _serve(self, peer: str, payload: Any, reply: Reply) -> None:
        try:
            hour, suffix, offset, size = payload
            if suffix not in _SUFFIXES or not 0 < size <= _MAX_BYTES:
                raise BadRequest("no such bytes")
            store = self._replica.storage.hours
            data = store.read_file(hour, suffix[1:], offset, size)
            check_repair(suffix, offset, data, store.lengths(hour)[_SUFFIXES.index(suffix)], store.index_view(hour))
            reply(data, None)
        except (BadRequest, DamagedFile, OSError, TypeError, ValueError) as error:
            reply(None, BadRequest(f"no good copy here: {error}"))
