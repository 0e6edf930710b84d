"""The node link: whole frames between named nodes. Raft uses the interface `Network`; platform/tcp.py implements it.

A link is one ordered connection per pair of nodes. Frames arrive whole, in order and once, or the link goes down, which
loses the frames in flight. `urgent` frames (heartbeats, votes, replies) overtake bulk frames that are still queued on
this side. docs/spec/node-link.md defines the bytes.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

Buffer = bytes | bytearray | memoryview
#: Maximum size of a frame, in bytes; a larger frame closes the link.
MAX_FRAME = 16 << 20


class Receiver(Protocol):
    """Callbacks of the network. All calls come on the event loop, one at a time, never from inside `send`."""

    def link_up(self, peer: str) -> None:
        """The link to `peer` is up. Never called twice without a `link_down` between."""
        ...

    def link_down(self, peer: str, reset: bool) -> None:
        """The link to `peer` is down. reset: True if the peer closed the connection (its process died); False after
        silence, or after this node's own `disconnect`."""
        ...

    def frame(self, peer: str, data: bytes) -> None:
        """A frame has arrived: a kind byte, then its body."""
        ...


class Network(Protocol):
    #: Number of node-link connections that were refused or dropped, by reason.
    refused: Counter[str]

    def start(self, receiver: Receiver) -> None:
        """Listen for connections, and keep dialling until every peer is linked."""
        ...

    def send(self, peer: str, frame: Buffer | Sequence[Buffer], urgent: bool = False) -> bool:
        """Queue one frame (parts are joined). False, without queueing, if there is no link or its buffer is full."""
        ...

    def disconnect(self, peer: str) -> None:
        """Drop the link (`link_down(peer, reset=False)` follows later); the network dials again."""
        ...

    def set_members(self, peers: Mapping[str, str]) -> None:
        """Replace the peers to link with, name → address; links to other nodes end."""
        ...

    def close(self) -> None: ...
