"""Objects that the parts of a RaftNode share: the peers, and `Ready`, which collects the effects of an event until
events.py carries them out."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from hadelay.errors import HadelayError
from hadelay.platform.network import Buffer, Network
from hadelay.platform.runtime import Runtime
from hadelay.raft.journal import Journal
from hadelay.raft.library import Core
from hadelay.raft.ports import Machine, Propose, RaftStats, RaftTuning
from hadelay.storage.snapshots import Manifest

#: Type of a method step(*args, now, ready), by which a part of the node handles an event. `now`: monotonic time in
#: seconds.
Step = Callable[..., None]


class Notice(Enum):
    """Message from one part of the Raft node to the others; the comments name the value that comes with each."""

    #: Notice that a peer's greeting was accepted; value: the peer.
    LINK_UP = auto()
    #: Notice that this node follows a new leader; no value.
    FOLLOWS = auto()
    #: Notice that entries may be sent to a peer again; value: the peer.
    PUMP = auto()
    #: Notice that the voters, or the nodes to link with, have changed; no value.
    MEMBERS = auto()
    #: Notice that this leader should hand leadership over to any other node; value: the reason, for the log.
    HAND_OVER = auto()
    #: Notice that an installed snapshot replaced this node's state; value: the snapshot's manifest.
    INSTALLED = auto()


@dataclass(slots=True)
class Ready:
    """Effects of one event. They are carried out at the end of the event, in the order of the fields. One object per
    node."""

    #: Frames to send, as (peer, frame, whether the frame is urgent, so overtakes frames that are not).
    sends: list[tuple[str, Buffer, bool]] = field(default_factory=list)
    #: Methods to call, as (step, args), once all records now queued in the journal are on disk.
    when_durable: list[tuple[Step, tuple[Any, ...]]] = field(default_factory=list)
    #: Whether the journal has a new record: write and sync the journal in this turn of the loop, then apply.
    sync: bool = False
    #: Whether PySyncObj got new acknowledgements, so that it can advance the commit index.
    advance: bool = False
    #: Whether there may be entries to apply, because the commit index or the synced index has advanced.
    apply: bool = False
    #: Timers to start, as (delay in seconds, method to call, args); delay 0 means the next turn of the loop.
    timers: list[tuple[float, Step, tuple[Any, ...]]] = field(default_factory=list)
    notices: list[tuple[Notice, Any]] = field(default_factory=list)
    #: Functions to call; mostly they are answers to callers of this node.
    answers: list[Callable[[], None]] = field(default_factory=list)

    def send(self, peer: str, frame: Buffer, urgent: bool = True) -> None:
        self.sends.append((peer, frame, urgent))

    def durable(self, step: Step, *args: Any) -> None:
        self.when_durable.append((step, args))

    def later(self, delay_s: float, step: Step, *args: Any) -> None:
        self.timers.append((delay_s, step, args))

    def notify(self, notice: Notice, about: Any = None) -> None:
        self.notices.append((notice, about))


#: Callback done(index, error, ready) of a read. Once all entries up to `index` are applied, everything committed before
#: the read began is applied.
ReadDone = Callable[[int, HadelayError | None, Ready], None]


@dataclass(eq=False)
class Peer:
    """State that a node keeps about another member."""

    name: str
    #: Whether a link exists and this node has accepted the peer's greeting.
    up: bool = False
    incarnation: int = 0
    boot: int = 0
    #: Whether the peer may vote and counts for majorities: its log has admitted its present incarnation.
    admitted: bool = False

    # Fields that only a leader uses; reset with each term. Index of the next entry to send to the peer, and of the last
    # entry known to be on the peer's disk.
    next: int = 0
    match: int = 0
    #: Highest index acknowledged by the peer that PySyncObj's commit rule already knows.
    counted: int = 0
    #: Whether to send one append frame at a time, because it is not known yet up to where the logs agree.
    probing: bool = True
    probe_sent: bool = False
    probe_prev: int = 0
    #: Unanswered append frames, as (index of the last entry, bytes), and their total bytes.
    in_flight: deque[tuple[int, int]] = field(default_factory=deque)
    in_flight_bytes: int = 0
    #: Monotonic time of the peer's last answer, and highest heartbeat round that the peer has answered.
    heard: float = float("-inf")
    round: int = 0
    #: Commit index last sent to the peer.
    sent_commit: int = 0
    #: Smoothed round trip time to the peer, in seconds.
    rtt: float = 0.0
    #: Snapshot that the peer is pulling from this node, and the time (monotonic) of its last request.
    manifest: Manifest | None = None
    pulled: float = 0.0
    #: Time (monotonic) at which the peer was found to have no entries; None: it has some, or has not answered yet.
    empty_since: float | None = None
    #: Last admission proposed for this peer, as (term of this leader, incarnation of the peer).
    admission: tuple[int, int] | None = None

    def begin(self, next: int, now: float) -> None:
        """Reset the fields that only a leader uses: at the start of a term, or for a new link or incarnation of the
        peer."""
        self.match = self.counted = self.round = self.sent_commit = 0
        self.heard, self.admission, self.empty_since = now, None, None
        self.probe(next)

    def probe(self, next: int) -> None:
        self.next = max(next, self.match + 1)
        self.probing, self.probe_sent = True, False
        self.in_flight.clear()
        self.in_flight_bytes = 0

    def sent(self, last: int, size: int) -> None:
        self.in_flight.append((last, size))
        self.in_flight_bytes += size
        self.next = last + 1

    def matched(self, index: int) -> None:
        """Note that the peer holds all entries up to `index`. `match` and `next` never decrease."""
        self.match = max(self.match, index)
        # An answer to one batch must not set `next` back while later batches are in flight (pysyncobj.md).
        self.next = max(self.next, self.match + 1)
        in_flight = self.in_flight
        while in_flight and in_flight[0][0] <= self.match:
            self.in_flight_bytes -= in_flight.popleft()[1]
        if self.probing and self.probe_sent and self.match >= self.probe_prev:
            self.probing = False


@dataclass(frozen=True, kw_only=True)
class Shared:
    core: Core
    journal: Journal
    network: Network
    runtime: Runtime
    machine: Machine
    config: RaftTuning
    stats: RaftStats
    propose: Propose
    #: event(step, *args): let the node run `step` as an event, for work that ended outside of the node's events.
    event: Callable[..., None]


class RaftPart:
    def __init__(self, shared: Shared) -> None:
        self._core, self._journal, self._network = shared.core, shared.journal, shared.network
        self._runtime, self._machine, self._config = shared.runtime, shared.machine, shared.config
        self._stats, self._propose, self._event = shared.stats, shared.propose, shared.event
