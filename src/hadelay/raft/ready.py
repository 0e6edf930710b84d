"""Effects of one event of a Raft node: parts write them into a `Ready`, and events.py carries them out."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from hadelay.platform.network import Buffer

#: step(*args, now, ready): a part handles an event. `now` is monotonic, in seconds.
Step = Callable[..., None]


class Notice(Enum):
    """Message of one part to the others, with a value."""

    #: A peer's greeting was accepted; value: the peer.
    LINK_UP = auto()
    #: This node follows a new leader.
    FOLLOWS = auto()
    #: Entries may be sent to a peer again; value: the peer.
    PUMP = auto()
    #: The voters, or the nodes to link with, have changed.
    MEMBERS = auto()
    #: Any other node is a better leader; value: the reason, for the log.
    HAND_OVER = auto()
    #: Files replaced this node's state; value: their manifest.
    INSTALLED = auto()


@dataclass(slots=True)
class Ready:
    """Effects of one event, carried out at its end in the order of the fields. One object per node."""

    #: (peer, frame, urgent)
    sends: list[tuple[str, Buffer, bool]] = field(default_factory=list)
    #: (step, args): called once everything queued in the journal is on disk.
    when_durable: list[tuple[Step, tuple[Any, ...]]] = field(default_factory=list)
    #: The journal has a new record: write and sync in this turn of the loop, then apply.
    sync: bool = False
    #: The library got new acknowledgements: let it advance the commit index.
    advance: bool = False
    #: The commit index or the synced index has advanced.
    apply: bool = False
    #: (delay in seconds, step, args); 0: the next turn of the loop.
    timers: list[tuple[float, Step, tuple[Any, ...]]] = field(default_factory=list)
    notices: list[tuple[Notice, Any]] = field(default_factory=list)
    #: Answers to callers of this node.
    answers: list[Callable[[], None]] = field(default_factory=list)

    def send(self, peer: str, frame: Buffer, urgent: bool = True) -> None:
        self.sends.append((peer, frame, urgent))

    def durable(self, step: Step, *args: Any) -> None:
        self.when_durable.append((step, args))

    def later(self, delay_s: float, step: Step, *args: Any) -> None:
        self.timers.append((delay_s, step, args))

    def notify(self, notice: Notice, about: Any = None) -> None:
        self.notices.append((notice, about))
