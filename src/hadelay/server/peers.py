"""Notes that nodes send each other once a second: wall clock, cluster time, HTTP address, version, applied index, free
space.

Notes may be lost, late or old, and no promise rests on one. Cluster time takes the median of the wall clocks;
`GET /v1/cluster` shows the rest; the leader refuses publishes (507) while any live node lacks space.

A note also says what the receiver's monotonic clock shows now if notes take no time: the reading in the receiver's last
note, plus the time since. The difference to the real reading is the round trip, so a delayed clock reading is known to
be old.
"""

import logging
import math
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from hadelay.platform.runtime import Runtime
from hadelay.server.clustertime import ClusterClock
from hadelay.server.link import Link, Reply

log = logging.getLogger(__name__)

_INTERVAL_S = 1.0
#: Interval of notes while the cluster has not agreed on a time, in seconds.
_IMPATIENT_S = 0.1
#: Time, in seconds, after the last note of a peer from which the peer no longer counts as live.
_LIVE_S = 3.0
#: Tolerance in seconds: a reading of this node's clock that a peer sends back is ignored if it is ahead of the clock by
#: more than this.
_DRIFTED_S = 0.01
#: Limit of the round trip of a wall clock reading, in seconds, beyond which the reading is ignored: it may be off by
#: half of its round trip.
_OLD_S = 10.0
#: Pause between two log lines about clock alarms, in seconds; also before the first line, so that a starting node hears
#: from the other nodes first.
_ALARMS_S = 5.0

#: Fields of a note: wall clock, cluster time, monotonic clock of the sender and of the receiver, HTTP address, version,
#: feature level, applied index, has space, is drained, end of its first certificate to expire (Unix s; 0 without one).
_NOTE = tuple[
    int,
    int | None,
    float,
    float | None,
    str,
    str,
    int,
    int,
    bool,
    bool,
    Annotated[float, Meta(ge=0, le=253_402_300_799)],
]


class PeerStatus(Struct):
    name: str
    http: str = ""
    version: str = ""
    feature_level: int = 0
    applied_index: int = 0
    #: False if the node has less free space than storage.min_free_bytes: the leader then refuses publishes.
    has_space: bool = True
    #: Whether the node is being drained, or is drained.
    drained: bool = False
    #: Unix time in s at which the first of the node's certificates expires; 0 without one.
    certificate_s: float = 0.0
    heard: float = -1e9


class Peers:
    """Exchanges notes with the other nodes and keeps their status. `me()` gives this node's own status."""

    def __init__(
        self,
        names: list[str],
        runtime: Runtime,
        link: Link,
        clock: ClusterClock,
        me: Callable[[], PeerStatus],
    ) -> None:
        self.runtime, self.link, self.clock, self.me = runtime, link, clock, me
        #: Called after each note of a peer, because the note may have made the cluster clock ready.
        self.changed: Callable[[], None] = lambda: None
        self.peers = {name: PeerStatus(name) for name in names}
        #: Names of the nodes whose wall clocks count for cluster time: the voters.
        self.voters = frozenset(names)
        #: Names of live nodes (this node included) whose disk has too little free space, according to their last notes.
        self.full: list[str] = []
        #: Per linked peer: difference of its monotonic clock to this node's clock, too low by the time that its last
        #: note took.
        self._ahead: dict[str, float] = {}
        #: The clock alarms that were logged last, and the monotonic time at which they were logged.
        self._alarms: list[str] = []
        self._alarms_logged = runtime.monotonic()
        link.handlers["hello"] = self._hear

    def start(self) -> None:
        """Send notes to all peers now, and from now on once a second."""
        self.tell()
        self._changed()
        self.runtime.call_later(_INTERVAL_S if self.clock.ready else _IMPATIENT_S, self.start)

    def set_members(self, names: Iterable[str], voters: Iterable[str]) -> None:
        """Set the nodes that exchange notes, this node included, and which of them vote."""
        self.peers = {name: self.peers.get(name) or PeerStatus(name) for name in names}
        self.voters = frozenset(voters)
        self._look_for_space()

    def live(self, name: str) -> bool:
        peer = self.peers.get(name)
        return peer is not None and self.runtime.monotonic() - peer.heard < _LIVE_S

    def common_level(self) -> int:
        """The highest feature level that every member knows; 0 while a member is away, because it may return with an
        older program."""
        return min(peer.feature_level if self.live(name) else 0 for name, peer in self.peers.items())

    def greet(self, name: str) -> None:
        """Send a note to a peer whose link came up, and forget the peer's clock: the peer may have restarted with
        another clock."""
        self._ahead.pop(name, None)
        self._send(name)

    def tell(self) -> None:
        """Send a note to every peer now."""
        mono = self.runtime.monotonic()
        me = self.me()
        me.heard = mono
        self.peers[me.name] = me
        self._look_for_space()
        if me.name in self.voters:
            self.clock.observe_wall(me.name, self.runtime.wall_ms(), mono)
        for name in self.peers:
            if name != me.name:
                self._send(name)

    def have_space(self) -> bool:
        """Whether every live node has room for more messages."""
        return not self.full

    def no_space(self, what: str = "new messages") -> str:
        """Reason in words why the leader refuses publishes, and acks with results; "" while all live nodes have
        space."""
        if not self.full:
            return ""
        where = ", ".join(self.full)
        return f"too little disk space for {what} on {where}: free space there; receives and plain acks still work"

    def _look_for_space(self) -> None:
        self.full = [name for name, peer in self.peers.items() if not peer.has_space and self.live(name)]

    def _send(self, name: str) -> None:
        me = self.me()
        mono = self.runtime.monotonic()
        now = self.clock.read(mono) if self.clock.ready else None
        yours = mono + self._ahead[name] if name in self._ahead else None
        facts = me.http, me.version, me.feature_level, me.applied_index, me.has_space, me.drained, me.certificate_s
        self.link.note(name, "hello", [self.runtime.wall_ms(), now, mono, yours, *facts])

    def _hear(self, name: str, payload: Any, reply: Reply) -> None:
        wall_ms, now_ms, theirs, yours, http, version, level, applied, has_space, drained, certificate_s = (
            msgspec.convert(payload, _NOTE)
        )
        if name not in self.peers:
            return  # ignore the note: its sender is no longer a member
        if not all(map(math.isfinite, (theirs, yours or 0.0, certificate_s))):
            raise ValueError("note: a time is not a finite number")
        mono = self.runtime.monotonic()
        self._ahead[name] = theirs - mono
        self.peers[name] = PeerStatus(name, http, version, level, applied, has_space, drained, certificate_s, mono)
        self._look_for_space()
        # Ignore a returned clock reading that is ahead of this node's clock: it is from before a restart of this
        # machine.
        if yours is not None and -_DRIFTED_S < mono - yours < _OLD_S and name in self.voters:
            self.clock.observe_wall(name, wall_ms, mono, now_ms, max(0.0, mono - yours))
        if now_ms is None and self.clock.ready:
            self._send(name)  # send a note at once: the sender of this note does not know cluster time yet
        self._changed()

    def _changed(self) -> None:
        self._log_alarms()
        self.changed()

    def _log_alarms(self) -> None:
        """Log clock alarms when they change; but limit the log lines, because a clock near its bound changes them each
        second."""
        alarms, mono = sorted(self.clock.alarms), self.runtime.monotonic()
        if alarms == self._alarms or mono < self._alarms_logged + _ALARMS_S:
            return
        skews = {name: round(ms) for name, ms in sorted(self.clock.skews(mono).items())}
        if alarms:
            log.warning("clock_alarm", extra={"alarms": alarms, "skews_ms": skews})
        else:
            log.info("clock_fine", extra={"skews_ms": skews})
        self._alarms, self._alarms_logged = alarms, mono
