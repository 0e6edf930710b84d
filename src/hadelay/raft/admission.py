"""Incarnations: who may vote and count.

A node that lost or rewound its disk may have promised what it no longer knows. So it is a new *incarnation*: it
follows, but neither votes, campaigns nor counts, until a leader has committed {node, incarnation} without it and it
holds everything up to that entry. Founding members are admitted from the start.

A node cannot see by itself that its disk is an old copy. Its peers can: they remember (term, index) that each
incarnation once answered for, tell each other, and refuse a greeting that falls short of it. And when all of them were
down meanwhile, a founder whose log is empty knows by the first peer that comes with entries that it founds nothing.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from hadelay.errors import FatalError
from hadelay.members import JOINED
from hadelay.raft import messages
from hadelay.raft.journal import FIRST
from hadelay.raft.peer import Peer
from hadelay.raft.ports import FOUNDING
from hadelay.version import FEATURE_LEVEL

if TYPE_CHECKING:
    from hadelay.errors import HadelayError
    from hadelay.raft.node import RaftNode

log = logging.getLogger(__name__)

#: How often a leader tells what it remembers, and proposes an admission again, in signs of life.
_TELL_EVERY = 16


class Seen(NamedTuple):
    """What a node has answered for: in `term`, everything up to `index`. `boot` numbers its process."""

    incarnation: int
    boot: int
    term: int
    index: int  # type: ignore[assignment]  # tuple has a method of that name


class Admission:
    def __init__(self, node: RaftNode) -> None:
        self.node = node
        self.boot = node.runtime.random.getrandbits(62)
        self._start = (node.journal.term, node.journal.last_index)
        self._seen: dict[str, Seen] = {}
        self._told: dict[str, Seen] = {}
        self._beats = 0
        self._renewing = False

    # -- greetings
    def greet(self, peer: Peer) -> None:
        node, journal = self.node, self.node.journal
        frame = messages.encode(
            messages.GREETING,
            FEATURE_LEVEL,
            journal.incarnation,
            journal.admitted,
            self.boot,
            *self._start,
        )
        node.network.send(peer.name, frame, True)

    def on_greeting(self, peer: Peer, data: bytes) -> None:
        node = self.node
        _, incarnation, admitted, boot, term, index = messages.decode(data, int, int, bool, int, int, int)
        self.remember(peer)
        journal = node.journal
        if index > FIRST[0] >= journal.last_index and journal.incarnation == FOUNDING and not journal.term:
            log.error("cluster_exists", extra={"peer": peer.name, "term": term, "index": index})
            self._renew(FOUNDING)
            return
        seen = self._seen.get(peer.name)
        known = self.least(peer.name)
        had = Seen(known, 0, 0, 0)
        if incarnation < known or (seen is not None and self._is_rewound(seen, incarnation, boot, term, index)):
            had = seen or had
            log.warning("rewound_peer", extra={"peer": peer.name, "incarnation": incarnation, "had": tuple(had)})
            frame = messages.encode(messages.REWOUND, max(known, had.incarnation), had.term, had.index)
            node.network.send(peer.name, frame, True)
            return
        if (peer.incarnation, peer.boot) != (incarnation, boot) or not peer.up:
            peer.incarnation, peer.boot = incarnation, boot
            peer.begin(node.journal.last_index + 1, node.runtime.monotonic())
        peer.admitted = admitted
        node.link_ready(peer)

    def least(self, name: str) -> int:
        """The incarnation below which it is somebody that was. Who is added is no founder, from the moment that the log
        says so: before that is applied the log of another cluster could be taken for a beginning of this one's."""
        node = self.node
        known = node.machine.incarnation(name) or FOUNDING
        return max(known, JOINED) if name in node.membership.joined else known

    @staticmethod
    def _is_rewound(seen: Seen, incarnation: int, boot: int, term: int, index: int) -> bool:
        if incarnation != seen.incarnation:
            return incarnation < seen.incarnation
        # Within one term a log never loses what it answered for, and a term is never forgotten.
        return boot != seen.boot and (term < seen.term or (term == seen.term and index < seen.index))

    def on_rewound(self, peer: Peer, data: bytes) -> None:
        """A peer remembers more of this node than its disk does: go on as somebody new."""
        incarnation, term, index = messages.decode(data, int, int, int)
        journal = self.node.journal
        if incarnation == JOINED and journal.incarnation == FOUNDING and journal.last_index > FIRST[0]:
            # Another cluster's log may look just like a beginning of this one's.
            raise FatalError(
                f"{self.node.name} is to join a cluster, and its directories are those of a founder: start it with "
                "empty ones (journal too)"
            )
        if incarnation >= journal.incarnation:
            log.error("disk_rewound", extra={"peer": peer.name, "term": term, "index": index})
            self._renew(incarnation)

    def _renew(self, incarnation: int) -> None:
        """Become somebody new, above that incarnation."""
        node, journal = self.node, self.node.journal
        if self._renewing:
            return
        self._renewing = True
        node.core.step_down()

        def renew() -> None:
            fresh = max(node.runtime.wall_ms(), incarnation + 1)
            node.machine.on_incarnation(fresh)  # first: a crash in between leaves two that differ, a lost disk
            journal.become(fresh)
            self._renewing = False
            for name in node.peers:
                node.network.disconnect(name)  # to be greeted anew

        journal.when_synced(renew)
        node.flush_soon()

    # -- memory
    def remember(self, peer: Peer) -> None:
        """Before a leader's view of a peer is forgotten."""
        if self.node.leader_role.active and peer.match:
            self._raise(peer.name, Seen(peer.incarnation, peer.boot, self.node.leader_role.term, peer.match))

    def _raise(self, name: str, seen: Seen) -> None:
        old = self._seen.get(name)
        if old is None or (old.incarnation, old.term, old.index) < (seen.incarnation, seen.term, seen.index):
            self._seen[name] = seen

    def tell(self) -> None:
        """Leader: let the followers know what each member has answered for, so that any of them can refuse a rewind."""
        node, journal = self.node, self.node.journal
        self._seen[node.name] = Seen(journal.incarnation, self.boot, node.term, journal.synced_index)
        if self._seen != self._told:
            self._told = dict(self._seen)
            frame = messages.encode(messages.SEEN, {name: list(seen) for name, seen in self._seen.items()})
            for peer in node.peers.values():
                if peer.up:
                    node.network.send(peer.name, frame)

    def on_seen(self, peer: Peer, data: bytes) -> None:
        (table,) = messages.decode(data, dict)
        for name, fields in table.items():
            numbers = isinstance(fields, list) and [type(field) for field in fields] == [int] * len(Seen._fields)
            if not numbers or not all(0 <= field < messages.LIMIT for field in fields):
                raise messages.BadFrame("seen: a member is not [incarnation, boot, term, index]")
            if name in self.node.peers:
                self._raise(name, Seen(*fields))

    # -- admitting
    def beat(self) -> None:
        """Leader, at each sign of life: admit members that have caught up."""
        self._beats += 1
        if self._beats % _TELL_EVERY:
            return
        node = self.node
        for peer in node.peers.values():
            if peer.up:
                self.remember(peer)
                if not peer.admitted and peer.match >= node.core.raftCommitIndex >= node.leader_role.no_op:
                    self._admit(peer)
        node.membership.beat()
        self.tell()

    def _admit(self, peer: Peer) -> None:
        if peer.admission == (self.node.term, peer.incarnation):
            return
        peer.admission = (self.node.term, peer.incarnation)
        log.info("admitting", extra={"peer": peer.name, "incarnation": peer.incarnation})

        def done(result: object, error: HadelayError | None) -> None:
            if error is not None:
                peer.admission = None

        self.node.propose(self.node.machine.incarnation_command(peer.name, peer.incarnation), done)

    def applied(self) -> None:
        """The log may have admitted this node."""
        node, journal = self.node, self.node.journal
        if journal.admitted or self._renewing or node.machine.incarnation(node.name) != journal.incarnation:
            return
        self._renewing = True

        def admitted() -> None:
            self._renewing = False
            log.info("admitted", extra={"incarnation": journal.incarnation})
            for peer in node.peers.values():
                self.greet(peer)

        journal.note_admitted()
        journal.when_synced(admitted)
        node.flush_soon()
