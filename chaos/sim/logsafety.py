"""Checks of promise I13 (safety of Raft's log) and other promises of Raft, on messages between nodes and on every
running process.

Used by the whole cluster (chaos/sim/cluster.py), by Raft alone (chaos/sim/raftsim.py) and by the small clusters of
tests/raft. What left a node counts, not what the node says of itself: a vote that was sent has to be on its disk after
any crash, and an entry that a leader counts for a follower has to be in that follower's journal.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from chaos.sim.network import SimNet, SimNetwork
from hadelay.raft import messages
from hadelay.raft.journal import Journal
from hadelay.raft.node import RaftNode

#: Tolerance of timers, in seconds: quartz clocks drift by 50 ppm, so a timer may fire this much early.
_TOLERANCE_S = 1e-3
_NEVER = float("-inf")
#: Key in `LogSafety.at_send` for the first positive APPEND_REPLY of a node in a Raft term.
FIRST_ANSWER = -messages.APPEND_REPLY


class Decide(Protocol):
    """Function that counts a checked case of a promise, and notes a violation by node `who` if it is broken."""

    def __call__(self, promise: str, broken: bool, text: str, *, who: str) -> None: ...


@dataclass
class _Heard:
    """What a process last received from leaders, and the pre-votes that it got."""

    leader: str = ""
    term: int = 0
    at: float = _NEVER
    #: Raft term in which the leader asked this process to start an election.
    called: int = 0
    #: Term → peers that agreed to a pre-vote of this process for that term.
    agreed: dict[int, set[str]] = field(default_factory=dict)


class LogSafety:
    """Checks of Raft's promises. quiet_s: time after a heartbeat in which a follower must not request votes
    (RaftTuning.election_min_ms)."""

    def __init__(self, net: SimNet, decide: Decide, *, quiet_s: float) -> None:
        self.world, self.decide, self.quiet_s = net.world, decide, quiet_s
        net.observer = self
        #: Term → name of the term's leader.
        self.leaders: dict[int, str] = {}
        #: (node, kind of frame) → function that is called once, when the node next sends such a frame.
        self.at_send: dict[tuple[str, int], Callable[[], None]] = {}
        self._heard: dict[SimNetwork, _Heard] = {}
        self._commit: dict[RaftNode, int] = {}
        self._applied: dict[RaftNode, int] = {}
        #: Newest vote that each node sent: (term, candidate).
        self._promised: dict[str, tuple[int, str]] = {}
        #: Newest term in which each node reported to a leader that entries are on its disk.
        self._answered: dict[str, int] = {}
        #: Nodes whose disks were replaced and lost their data.
        self._wiped: set[str] = set()

    def sent(self, process: SimNetwork, peer: str, data: bytes) -> None:
        kind = data[0]
        if kind == messages.PRE_VOTE:
            self._campaign(process, kind, messages.decode(data, int, int, int)[0])
        elif kind == messages.VOTE:
            term = messages.decode(data, int, int, int, bool)[0]
            self._campaign(process, kind, term)
            self._asked_before(process, term)
        elif kind == messages.VOTE_REPLY:
            self._vote(process.name, messages.decode(data, int)[0], peer)
        elif kind == messages.APPEND_REPLY and (reply := messages.decode_append_reply(data)).status == messages.OK:
            kind = FIRST_ANSWER if reply.term > self._answered.get(process.name, 0) else kind
            self._answered[process.name] = max(self._answered.get(process.name, 0), reply.term)
        if self.at_send and (then := self.at_send.pop((process.name, kind), None)) is not None:
            self.world.at(self.world.now, then)

    def arrives(self, process: SimNetwork, peer: str, data: bytes) -> None:
        """Called before the process handles a frame."""
        if data[0] == messages.PRE_VOTE_REPLY:
            term, yes, _ = messages.decode(data, int, bool, int)
            if yes:
                self._heard.setdefault(process, _Heard()).agreed.setdefault(term, set()).add(peer)

    def received(self, process: SimNetwork, peer: str, data: bytes) -> None:
        heard = self._heard.setdefault(process, _Heard())
        if data[0] == messages.APPEND and getattr(process.receiver, "leader", None) == peer:
            heard.leader, heard.at, heard.term = peer, self.world.now, messages.decode_append(data).term
        elif data[0] == messages.TIMEOUT_NOW:
            heard.called = messages.decode(data, int)[0] + 1
        elif data[0] == messages.APPEND_REPLY:
            self._counted(process, peer)

    def was_reset(self, process: SimNetwork, peer: str) -> None:
        heard = self._heard.get(process)
        if heard is not None and peer == heard.leader:
            heard.at = _NEVER

    def _campaign(self, process: SimNetwork, kind: int, term: int) -> None:
        """Check that no node requests votes soon after a leader's heartbeat, unless the leader asked the node to take
        over the leadership, or the connection to the leader was closed."""
        heard = self._heard.get(process, _Heard())
        called = kind == messages.VOTE and term == heard.called
        silent_s = self.world.now - heard.at
        broken = term > heard.term and not called and silent_s < self.quiet_s - _TOLERANCE_S
        text = f"{process.name} asks for votes in term {term}, {silent_s * 1000:.0f} ms after a heartbeat of "
        self.decide("campaigns", broken, f"{text}{heard.leader}, leader of term {heard.term}", who=process.name)

    def _asked_before(self, process: SimNetwork, term: int) -> None:
        """Check that a node requests votes in a term only if a majority agreed to a pre-vote of this term, unless the
        leader asked the node to take over."""
        heard, raft = self._heard.get(process, _Heard()), process.receiver
        if isinstance(raft, RaftNode) and term != heard.called:
            agreed = heard.agreed.get(term, set())
            broken = len((agreed | {process.name}) & raft.membership.voters) < raft.membership.majority
            text = f"{process.name} asks for votes in term {term}, and only {sorted(agreed)} agreed to that"
            self.decide("campaigns, pre-votes", broken, text, who=process.name)

    def _vote(self, name: str, term: int, candidate: str) -> None:
        before = self._promised.get(name, (0, ""))
        broken = before[0] == term and before[1] != candidate
        text = f"{name} voted for {before[1]} and for {candidate} in term {term}"
        self.decide("I13 log safety, votes", broken, text, who=name)
        self._promised[name] = max(before, (term, candidate))

    def reopened(self, name: str, journal: Journal) -> None:
        """Check, after a node read its journal from disk, that the journal has the votes that the node sent, and the
        terms in which it answered."""
        if name in self._answered:
            text = f"{name} answered a leader of term {self._answered[name]}; its disk is in term {journal.term}"
            self.decide("I13 log safety, term on disk", journal.term < self._answered[name], text, who=name)
        if name in self._promised:
            term, candidate = self._promised[name]
            broken = journal.term < term or (journal.term == term and journal.voted_for != candidate)
            text = f"{name} voted for {candidate} in term {term}; its disk says {journal.voted_for} in {journal.term}"
            self.decide("I13 log safety, vote on disk", broken, text, who=name)

    def wiped(self, name: str) -> None:
        """Note that the node's disk was replaced by an empty disk."""
        self._promised.pop(name, None)
        self._answered.pop(name, None)
        self._wiped.add(name)

    def look(self, nodes: Mapping[str, RaftNode]) -> None:
        """Check Raft's promises at one instant. nodes: running nodes that may have changed since the last call."""
        for name, raft in nodes.items():
            if raft.is_leader:
                first = self.leaders.setdefault(raft.term, name)
                text = f"{name} and {first} both lead term {raft.term}"
                self.decide("I13 log safety, leaders", first != name, text, who=name)
            before, at, last = self._commit.get(raft, 0), raft.commit_index, raft.last_index
            text = f"the commit index of {name} went back"
            self.decide("I13 log safety, commit index back", at < before, text, who=name)
            text = f"the commit index of {name} is {at}, and its log ends at {last}"
            self.decide("I13 log safety, commit index ahead", at > last, text, who=name)
            self._commit[raft] = at
            self._look_at_applied(name, raft)
            text = f"{name} applied what its own disk does not have"
            self.decide("I14 durability, applied", raft.applied_index > raft.journal.synced_index, text, who=name)

    def _look_at_applied(self, name: str, raft: RaftNode) -> None:
        """Check that the journal has the entry that was applied last, also if a snapshot brought it."""
        at, journal = raft.applied_index, raft.journal
        if at != self._applied.get(raft) and journal.base_index < at <= journal.last_index:
            self._applied[raft] = at
            applied, kept = raft.applier.applied_term, journal.term_at(at)
            text = f"{name} applied entry {at} of term {applied}; its journal has one of term {kept}"
            self.decide("I13 log safety, applied entry", applied != kept, text, who=name)

    def _counted(self, process: SimNetwork, peer: str) -> None:
        """Check that each entry that a leader counts for a follower is on the follower's disk with the same content,
        unless a newer leader has overwritten it."""
        there = process.net.nodes.get(peer)
        leader, follower = process.receiver, there.receiver if there is not None else None
        if not isinstance(leader, RaftNode) or not isinstance(follower, RaftNode) or not leader.is_leader:
            return
        if peer not in leader.peers or follower.term != leader.term or peer in self._wiped:
            return
        at, journal = leader.peers[peer].counted, follower.journal
        if at <= max(journal.base_index, leader.journal.base_index) or follower.applier.installing:
            return
        broken = at > journal.synced_index or journal.term_at(at) != leader.journal.term_at(at)
        text = f"{leader.name} counts entry {at} as stored by {peer}, whose log does not have it"
        self.decide("what leaders count", broken, text, who=peer)
