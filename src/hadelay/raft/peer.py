"""What a node knows of one other member."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hadelay.storage.manifest import Manifest


@dataclass(eq=False)
class Peer:
    name: str
    #: Linked, and its greeting was accepted.
    up: bool = False
    incarnation: int = 0
    boot: int = 0
    #: Its log says that this incarnation was admitted: it votes, and counts.
    admitted: bool = False

    # The rest is a leader's view, begun anew with each term.
    #: The entry to send next, and the last one known to be on its disk.
    next: int = 0
    match: int = 0
    #: How much of `match` was passed on to the commit rule.
    counted: int = 0
    #: One append at a time, until it is known where the logs agree.
    probing: bool = True
    probe_sent: bool = False
    probe_prev: int = 0
    #: (last index, bytes) of appends without an answer.
    in_flight: deque[tuple[int, int]] = field(default_factory=deque)
    in_flight_bytes: int = 0
    #: When it last answered (monotonic), and which round.
    heard: float = float("-inf")
    round: int = 0
    #: The commit index it was told last.
    told_commit: int = 0
    #: Round trip, smoothed, in seconds.
    rtt: float = 0.0
    #: The files it is pulling from here.
    manifest: Manifest | None = None
    pulled: float = 0.0
    #: (term, incarnation) for which its admission was proposed.
    admission: tuple[int, int] | None = None

    def begin(self, next: int, now: float) -> None:
        """A term of this node's leadership begins, or this peer's link or incarnation does."""
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
        """It holds everything up to `index`; what it said before still holds."""
        self.match = max(self.match, index)
        # Rows 1 and 2: an answer to one batch never sets `next` back while others are on their way.
        self.next = max(self.next, self.match + 1)
        in_flight = self.in_flight
        while in_flight and in_flight[0][0] <= self.match:
            self.in_flight_bytes -= in_flight.popleft()[1]
        if self.probing and self.probe_sent and self.match >= self.probe_prev:
            self.probing = False
