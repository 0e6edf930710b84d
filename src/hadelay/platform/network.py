"""The node link: whole frames between named nodes. `Network` is what Raft asks for; `platform/tcp.py` is the real one.

A link is one ordered connection per pair of nodes. Frames arrive whole, in order and once, or the link goes down;
what was on its way when it went down is lost. `urgent` frames (heartbeats, votes, replies) may overtake others that
still wait on this side, so that they never stand behind bulk. docs/spec/node-link.md has the bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

Buffer = bytes | bytearray | memoryview
#: The largest frame either side may send; a longer one closes the link.
MAX_FRAME = 16 << 20


class Receiver(Protocol):
    """Who is told about links. All calls come on the loop, one at a time, never from inside `send`."""

    def link_up(self, peer: str) -> None:
        """Frames can be sent to `peer` and will arrive from it. Never twice without a `link_down` between."""
        ...

    def link_down(self, peer: str, reset: bool) -> None:
        """`reset`: the other side closed or refused (its process died), rather than silence or our own `disconnect`."""
        ...

    def frame(self, peer: str, data: bytes) -> None:
        """One frame as it was sent: a kind byte, then its body."""
        ...


class Network(Protocol):
    #: Connections that were refused or broken off, by reason.
    refused: Counter[str]

    def start(self, receiver: Receiver) -> None:
        """Listen, and keep dialling until every peer is linked."""
        ...

    def send(self, peer: str, frame: Buffer | Sequence[Buffer], urgent: bool = False) -> bool:
        """Queue one frame (parts are joined). False, and nothing sent, without a link or when its buffer is full."""
        ...

    def disconnect(self, peer: str) -> None:
        """Drop the link now (`link_down(peer, reset=False)` follows later); dialling starts again by itself."""
        ...

    def set_members(self, peers: Mapping[str, str]) -> None:
        """From now on these are linked, name → address, and nobody else: links to others end."""
        ...

    def close(self) -> None: ...
