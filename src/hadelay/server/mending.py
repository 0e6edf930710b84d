"""Damaged bytes of the hour files are fetched from a peer, verified, and written over the damaged place.

The files of all nodes are the same bytes, so any live peer's sound copy will do. What a peer serves
it has verified; what is written here is verified again by storage.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hadelay.errors import BadRequest, DamagedFile, HadelayError
from hadelay.server.link import Reply
from hadelay.storage.repair import check_repair

if TYPE_CHECKING:
    from hadelay.server.node import Node

_FETCH_S = 2.0
_MAX_BYTES = 80 << 20
_SUFFIXES = (".log", ".idx", ".dsp")

log = logging.getLogger(__name__)


class Mender:
    """One per node."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.repaired = 0
        node.link.handlers["bytes"] = self._serve

    def mend(self, hour: int, suffix: str, offset: int, size: int, done: Callable[[bytes | None], None]) -> None:
        """done(the sound bytes, now on this disk too), or None: no live peer has a good copy."""
        node = self.node
        peers = [name for name in node.peers.peers if name != node.name and node.peers.live(name)]
        self._ask(peers, (hour, suffix, offset, size), done)

    def _ask(self, peers: list[str], place: tuple[int, str, int, int], done: Callable[[bytes | None], None]) -> None:
        if not peers:
            done(None)
            return
        peer, *others = peers
        hour, suffix, offset, size = place

        def answered(data: Any, error: HadelayError | None) -> None:
            if error is None and isinstance(data, bytes) and len(data) == size:
                try:
                    self.node.storage.hours.repair(hour, suffix, offset, data)
                except (BadRequest, OSError):
                    pass
                else:
                    self.repaired += 1
                    said = {"hour": hour, "file": suffix, "offset": offset, "source": peer}
                    log.warning("repaired", extra=said)
                    done(data)
                    return
            self._ask(others, place, done)

        self.node.link.call(peer, "bytes", list(place), _FETCH_S, answered)

    def _serve(self, peer: str, payload: Any, reply: Reply) -> None:
        try:
            hour, suffix, offset, size = payload
            if suffix not in _SUFFIXES or not 0 < size <= _MAX_BYTES:
                raise BadRequest("no such bytes")
            store = self.node.storage.hours
            data = store.read_file(hour, suffix[1:], offset, size)
            check_repair(suffix, offset, data, store.lengths(hour)[_SUFFIXES.index(suffix)], store.index_view(hour))
            reply(data, None)
        except (BadRequest, DamagedFile, OSError, TypeError, ValueError) as error:
            reply(None, BadRequest(f"no good copy here: {error}"))
