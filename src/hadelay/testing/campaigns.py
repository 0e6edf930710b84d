"""Whether nodes campaign when they should not: nobody asks for votes within `election_min` of a heartbeat.

Read off the frames of the node link alone: what a node was sent by the leader that it follows, and what it asks of the
others. Two things excuse it, as in raft/election.py: the leader asked this node to take over, or closed its link.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hadelay.raft import messages
from hadelay.raft.network import Receiver

#: Crystals drift by 50 ppm, and a timer may be this much early.
_TOLERANCE_S = 1e-3


@dataclass
class Campaigns:
    """What one process heard and asked.

    on_ask(fault): called for each request for a vote; fault says why there should have been none, or is empty.
    """

    name: str
    on_ask: Callable[[str], None]
    #: Seconds that a heartbeat keeps its receiver from campaigning.
    quiet_s: float
    #: The last heartbeat: from whom, of which term, and when.
    leader: str = ""
    term: int = 0
    heard: float = field(default=float("-inf"))
    #: The term in which this process was told to take over.
    called: int = 0

    def received(self, now: float, peer: str, data: bytes, receiver: Receiver) -> None:
        """After `receiver` handled the frame."""
        if data[0] == messages.APPEND and getattr(receiver, "leader", None) == peer:
            self.leader, self.heard, self.term = peer, now, messages.decode_append(data).term
        elif data[0] == messages.TIMEOUT_NOW:
            self.called = messages.decode(data, int)[0] + 1

    def reset(self, peer: str) -> None:
        """The link to `peer` was closed at its other end."""
        if peer == self.leader:
            self.heard = float("-inf")

    def sent(self, now: float, data: bytes) -> None:
        if data[0] == messages.PRE_VOTE:
            term = messages.decode(data, int, int, int)[0]
        elif data[0] == messages.VOTE:
            term = messages.decode(data, int, int, int, bool)[0]
        else:
            return
        called = data[0] == messages.VOTE and term == self.called
        silent_s = now - self.heard
        fault = ""
        if term > self.term and not called and silent_s < self.quiet_s - _TOLERANCE_S:
            fault = (
                f"{self.name} asks for votes in term {term}, {silent_s * 1000:.0f} ms after a heartbeat of "
                f"{self.leader}, leader of term {self.term}"
            )
        self.on_ask(fault)
