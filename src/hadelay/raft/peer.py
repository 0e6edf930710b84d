"""State that a node keeps of one other member."""

from collections import deque
from dataclasses import dataclass, field

from hadelay.storage.snapshots import Manifest


@dataclass(eq=False)
class Peer:
    name: str
    #: Whether a link exists and this node has accepted the peer's greeting.
    up: bool = False
    incarnation: int = 0
    boot: int = 0
    #: Whether the peer's log has admitted its incarnation, so that the peer votes and counts.
    admitted: bool = False

    # A leader's view, reset with each term.
    #: Index of the next entry to send, and of the last entry known to be on the peer's disk.
    next: int = 0
    match: int = 0
    #: The part of `match` passed on to the commit rule.
    counted: int = 0
    #: Send one append at a time until the logs are known to agree.
    probing: bool = True
    probe_sent: bool = False
    probe_prev: int = 0
    #: (last index, bytes) of unanswered appends.
    in_flight: deque[tuple[int, int]] = field(default_factory=deque)
    in_flight_bytes: int = 0
    #: Time (monotonic) and heartbeat round of the last answer.
    heard: float = float("-inf")
    round: int = 0
    #: Commit index last sent to the peer.
    told_commit: int = 0
    #: Smoothed round trip in seconds.
    rtt: float = 0.0
    #: Snapshot that the peer is pulling from this node, and the time (monotonic) of its last request.
    manifest: Manifest | None = None
    pulled: float = 0.0
    #: (term, incarnation) of the last proposed admission.
    admission: tuple[int, int] | None = None

    def begin(self, next: int, now: float) -> None:
        """Reset the leader's view: a term of this node begins, or a link or an incarnation of the peer."""
        self.match = self.counted = self.round = self.told_commit = 0
        self.heard, self.admission = now, None
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
        """The peer holds everything up to `index`; answers may arrive late, so nothing is lowered."""
        self.match = max(self.match, index)
        # An answer to one batch must not set `next` back while later batches are in flight (pysyncobj.md).
        self.next = max(self.next, self.match + 1)
        in_flight = self.in_flight
        while in_flight and in_flight[0][0] <= self.match:
            self.in_flight_bytes -= in_flight.popleft()[1]
        if self.probing and self.probe_sent and self.match >= self.probe_prev:
            self.probing = False
