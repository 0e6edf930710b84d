"""Admission: decides which nodes may vote. A node whose disk was lost or rewound may vote again once the log admits it.

A node that lost or rewound its disk may have forgotten promises. It becomes a new *incarnation*: it follows, but does
not vote, campaign or count until a leader has committed {node, incarnation} without it, and it holds all entries up to
that one. Founding members are admitted from the start.

A node cannot see that its disk is an old copy, but its peers can: they remember the (term, index) that each incarnation
has acknowledged, tell each other, and refuse a greeting that is behind. Peers that were all down meanwhile remember
nothing; but a founder with an empty log that meets a peer with entries must have lost its log.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, NamedTuple

from hadelay import version
from hadelay.errors import FatalError, HadelayError
from hadelay.members import JOINED
from hadelay.raft import messages
from hadelay.raft.journal import FIRST
from hadelay.raft.membership import Membership
from hadelay.raft.part import Notice, Peer, RaftPart, Ready, Shared
from hadelay.raft.ports import FOUNDING

log = logging.getLogger(__name__)

#: Interval, as a number of heartbeats, at which the leader sends high-water marks to the followers, and admits members.
_TELL_EVERY = 16


class HighWater(NamedTuple):
    """High-water mark of a node: the last entry that it acknowledged. boot: random number of the node's process."""

    incarnation: int
    boot: int
    term: int
    index: int  # type: ignore[assignment]  # tuple has a method of that name


class Admission(RaftPart):
    def __init__(self, shared: Shared, members: Membership) -> None:
        super().__init__(shared)
        self._members = members
        self.boot = shared.runtime.random.getrandbits(62)
        self._start = (shared.journal.term, shared.journal.last_index)
        self._seen: dict[str, HighWater] = {}
        self._sent: dict[str, HighWater] = {}
        self._beats = 0
        #: Term and commit index at the leader's previous check for members to admit.
        self._mark = (0, 0)
        self._renewing = False

    def greet(self, peer: Peer, ready: Ready) -> None:
        own = self._journal.incarnation, self._journal.admitted, self.boot
        ready.send(peer.name, messages.encode(messages.GREETING, version.FEATURE_LEVEL, *own, *self._start))

    def on_greeting(self, peer: Peer, greeting: messages.Greeting, now: float, ready: Ready) -> None:
        if self._core.leads:
            self.remember(peer, self._core.term)
        journal = self._journal
        if greeting.index > FIRST[0] >= journal.last_index and journal.incarnation == FOUNDING and not journal.term:
            log.error("cluster_exists", extra={"peer": peer.name, "term": greeting.term, "index": greeting.index})
            self._renew(FOUNDING, ready)
            return
        seen = self._seen.get(peer.name)
        known = self._members.min_incarnation(peer.name)
        had = HighWater(known, 0, 0, 0)
        if greeting.incarnation < known or (seen is not None and self._is_rewound(seen, greeting)):
            had = seen or had
            log.warning(
                "rewound_peer", extra={"peer": peer.name, "incarnation": greeting.incarnation, "had": tuple(had)}
            )
            ready.send(peer.name, messages.encode(messages.REWOUND, max(known, had.incarnation), had.term, had.index))
            return
        if (peer.incarnation, peer.boot) != (greeting.incarnation, greeting.boot) or not peer.up:
            peer.incarnation, peer.boot = greeting.incarnation, greeting.boot
            peer.begin(journal.last_index + 1, now)
        peer.admitted = greeting.admitted
        ready.notify(Notice.LINK_UP, peer)

    @staticmethod
    def _is_rewound(seen: HighWater, now: messages.Greeting) -> bool:
        if now.incarnation != seen.incarnation:
            return now.incarnation < seen.incarnation
        # A restarted node with an earlier (term, index) has a rewound disk: otherwise a log never loses acknowledged
        # entries within a term, and a node never forgets a term.
        return now.boot != seen.boot and (now.term, now.index) < (seen.term, seen.index)

    def on_rewound(self, peer: Peer, incarnation: int, term: int, index: int, now: float, ready: Ready) -> None:
        """Handle a REWOUND frame: a peer remembers entries or terms that this node's disk has lost, so this node
        becomes a new incarnation."""
        journal = self._journal
        if incarnation == JOINED and journal.incarnation == FOUNDING and journal.last_index > FIRST[0]:
            # Refuse to join: the journal of a founding member may belong to another cluster with a similar log.
            raise FatalError(
                f"{self._members.name} is to join a cluster, but its directories hold the data of a founding member: "
                "start it with empty data and journal directories"
            )
        if incarnation >= journal.incarnation:
            log.error("disk_rewound", extra={"peer": peer.name, "term": term, "index": index})
            self._renew(incarnation, ready)

    def _renew(self, above: int, ready: Ready) -> None:
        if not self._renewing:
            self._renewing = True
            self._journal.admitted = False  # stop voting at once: votes that still wait for the disk must not be sent
            self._core.step_down()
            ready.durable(self._renewed, above)
            ready.sync = True

    def _renewed(self, above: int, now: float, ready: Ready) -> None:
        fresh = max(self._runtime.wall_ms(), above + 1)
        # Write the journal last: after a crash before this write, the next start finds two different incarnations, and
        # so puts the directories aside and joins with empty ones.
        self._machine.on_incarnation(fresh)
        self._journal.become(fresh)
        self._renewing = False
        for name in self._members.peers:
            # Reconnect to all peers: the greeting on a new connection tells them this node's new incarnation.
            ready.answers.append(partial(self._network.disconnect, name))

    def remember(self, peer: Peer, term: int) -> None:
        """Keep the last entry that a peer acknowledged in `term`, before the leader forgets the peer's progress."""
        if peer.match:
            self._raise(peer.name, HighWater(peer.incarnation, peer.boot, term, peer.match))

    def _raise(self, name: str, seen: HighWater) -> None:
        old = self._seen.get(name)
        if old is None or (old.incarnation, old.term, old.index) < (seen.incarnation, seen.term, seen.index):
            self._seen[name] = seen

    def tell(self, ready: Ready) -> None:
        """Send the followers each member's last acknowledged entry, so that they can detect a rewound disk."""
        own = self._journal.incarnation, self.boot, self._core.term, self._journal.synced_index
        self._seen[self._members.name] = HighWater(*own)
        if self._seen != self._sent:
            self._sent = dict(self._seen)
            frame = messages.encode(messages.SEEN, {name: list(seen) for name, seen in self._seen.items()})
            for peer in self._members.peers.values():
                if peer.up:
                    ready.send(peer.name, frame, urgent=False)

    def on_seen(self, peer: Peer, table: dict[str, Any], now: float, ready: Ready) -> None:
        for name, fields in table.items():
            numbers = isinstance(fields, list) and [type(field) for field in fields] == [int] * len(HighWater._fields)
            if not numbers or not all(0 <= field < messages.LIMIT for field in fields):
                raise messages.BadFrame("SEEN frame: a high-water mark is not [incarnation, boot, term, index]")
            if name in self._members.peers:
                self._raise(name, HighWater(*fields))

    def beat(self, ready: Ready) -> None:
        """Called by the leader at each heartbeat: every _TELL_EVERY heartbeats, admit members that have caught up."""
        self._beats += 1
        if self._beats % _TELL_EVERY:
            return
        core = self._core
        (term, enough), self._mark = self._mark, (core.term, core.commit_index)
        # Admit a member that has the entries which were committed at the previous check. Under load, no node has all
        # entries that are committed at this moment; and a node applies its admission only after all earlier entries.
        enough = max(enough if term == core.term else core.commit_index, core.no_op)
        for peer in self._members.peers.values():
            if peer.up:
                self.remember(peer, core.term)
                if not peer.admitted and peer.match >= enough and core.commit_index >= core.no_op:
                    self._admit(peer)
        self._members.beat(ready)
        self.tell(ready)

    def _admit(self, peer: Peer) -> None:
        if peer.admission == (self._core.term, peer.incarnation):
            return
        peer.admission = (self._core.term, peer.incarnation)
        log.info("admitting", extra={"peer": peer.name, "incarnation": peer.incarnation})

        def done(result: object, error: HadelayError | None) -> None:
            if error is not None:
                peer.admission = None

        self._propose(self._machine.incarnation_command(peer.name, peer.incarnation), done)

    def applied(self, ready: Ready) -> None:
        """Called after entries were applied. If one of them admits this node, the node notes that in its journal, and
        may vote from then on."""
        journal = self._journal
        if journal.admitted or self._renewing:
            return
        if self._machine.incarnation(self._members.name) == journal.incarnation:
            self._renewing = True
            journal.note_admitted()
            ready.durable(self._admitted)
            ready.sync = True

    def _admitted(self, now: float, ready: Ready) -> None:
        self._renewing = False
        log.info("admitted", extra={"incarnation": self._journal.incarnation})
        for peer in self._members.peers.values():
            self.greet(peer, ready)
