"""What follows from one event of a Raft node: its parts write it into a `Ready`, and `RaftNode` carries it out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from hadelay.platform.network import Buffer

#: step(*args, now, ready): a part handles an event. `now` is monotonic, in seconds.
Step = Callable[..., None]


class Notice(Enum):
    """What one part lets the others know, with what the notice is about."""

    #: A peer: its greeting was accepted.
    LINK_UP = auto()
    #: The name of a peer: end the link.
    DROP_LINK = auto()
    #: None: this node follows another leader than before.
    FOLLOWS = auto()
    #: A peer that may be sent entries again.
    PUMP = auto()
    #: None: other voters count, or other nodes are to be linked.
    MEMBERS = auto()
    #: A reason, for the log: any other node is a better leader.
    HAND_OVER = auto()
    #: The manifest whose files took the place of this node's state.
    INSTALLED = auto()


@dataclass(slots=True)
class Ready:
    """What follows from one event, carried out at its end in the order of the fields. One object per node."""

    #: (peer, frame, urgent)
    sends: list[tuple[str, Buffer, bool]] = field(default_factory=list)
    #: Steps for when everything is on disk that the journal has queued by then: (step, args).
    when_durable: list[tuple[Step, tuple[Any, ...]]] = field(default_factory=list)
    #: Something was queued in the journal: write and sync this turn, then apply.
    sync: bool = False
    #: The library was told what disks have: let the library move its commit index.
    advance: bool = False
    #: Commit or durable index moved.
    apply: bool = False
    #: (seconds from now, step, args); 0: when the loop comes round.
    timers: list[tuple[float, Step, tuple[Any, ...]]] = field(default_factory=list)
    notices: list[tuple[Notice, Any]] = field(default_factory=list)
    #: Calls that answer those who asked this node.
    answers: list[Callable[[], None]] = field(default_factory=list)

    def send(self, peer: str, frame: Buffer, urgent: bool = True) -> None:
        self.sends.append((peer, frame, urgent))

    def durable(self, step: Step, *args: Any) -> None:
        self.when_durable.append((step, args))

    def later(self, delay_s: float, step: Step, *args: Any) -> None:
        self.timers.append((delay_s, step, args))

    def notify(self, notice: Notice, about: Any = None) -> None:
        self.notices.append((notice, about))
