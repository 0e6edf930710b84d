"""State of console sessions that all nodes share, in memory only: the keys that sign sessions, and the closed sessions
(ADR 300).

Nodes tell each other over the node link. Notes may be lost while a link is down; the next note has everything.
"""

import secrets
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from hadelay.server.link import Link, Reply

#: Size of a key in bytes; limit of the number of keys (beyond it, the smallest keys stay); and limit of closed sessions
#: (the latest stay).
KEY_BYTES, KEYS, CLOSED = 32, 16, 1_000

_Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
_Session = Annotated[str, Meta(max_length=64)]
_NOTE = tuple[Annotated[list[_Key], Meta(max_length=KEYS)], Annotated[list[_Session], Meta(max_length=CLOSED)]]


class SharedSessions:
    """Session keys and closed sessions, which nodes exchange over the node link. peers: returns the names of the other
    nodes."""

    def __init__(self, link: Link, peers: Callable[[], Iterable[str]]) -> None:
        self._link, self._peers = link, peers
        #: Keys of all nodes, sorted. The first one signs new sessions; sessions signed with any of them are accepted.
        self.keys: list[bytes] = []
        #: Names of sessions that users closed before their end.
        self.closed: dict[str, None] = {}
        link.handlers["sessions"] = self._hear

    def begin(self) -> None:
        """Add a random key of this node, so that there is at least one key to sign sessions with."""
        self._take([secrets.token_bytes(KEY_BYTES)], ())

    def close(self, session: str) -> None:
        self._take((), (session,))

    def link_up(self, peer: str) -> None:
        if self.keys:
            self._link.note(peer, "sessions", [self.keys, list(self.closed)])

    def _hear(self, peer: str, payload: Any, reply: Reply) -> None:
        self._take(*msgspec.convert(payload, _NOTE))

    def _take(self, keys: Iterable[bytes], closed: Iterable[str]) -> None:
        kept, more = sorted({*self.keys, *keys})[:KEYS], [one for one in closed if one not in self.closed]
        if kept == self.keys and not more:
            return
        self.keys = kept
        self.closed |= dict.fromkeys(more)
        while len(self.closed) > CLOSED:
            del self.closed[next(iter(self.closed))]
        for peer in self._peers():
            self.link_up(peer)
