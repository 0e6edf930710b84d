"""Elections: deadlines, pre-votes, campaigns and votes.

A follower whose deadline passes sends a pre-vote first: "would you vote for me?" PySyncObj campaigns only after a
majority of yes, so a node that was cut off never deposes a healthy leader. A reset of the leader's link moves the
deadline near: a killed process is replaced in tens of milliseconds. A deadline may also pass because this process was
paused: so the node first reads the heartbeats that arrived meanwhile, and looks at the deadline a second time.
"""

import logging

from hadelay.raft import messages
from hadelay.raft.apply import Applier
from hadelay.raft.library import DISK
from hadelay.raft.membership import Membership
from hadelay.raft.part import Peer, RaftPart, Ready, Shared

log = logging.getLogger(__name__)

#: Pause, in seconds, between the end of the election timeout and the pre-vote: it lets the node read heartbeats that
#: arrived while its process was stalled.
_SECOND_LOOK_S = 0.004
_NEVER = float("-inf")
#: Pause before the own pre-vote of a node that agreed to another's, as a multiple of election_min_ms. It is shorter
#: than the shortest pause between two pre-votes of one node.
_GIVE_WAY = 0.2
#: Number of unapplied entries above which a node lets other nodes campaign first; and time, in seconds, for which it
#: does so.
_BACKLOG, _DRAIN_S = 500, 1.0


class Elections(RaftPart):
    def __init__(self, shared: Shared, members: Membership, applier: Applier) -> None:
        super().__init__(shared)
        self._members, self._applier, self._random = members, applier, shared.runtime.random
        #: Whether this node is draining, that is, gives up leadership; a draining node lets other nodes campaign first.
        self.draining = False
        #: Round trip time, in ms, within which the fastest majority of voters answers the leader.
        self.rtt_ms = 0
        #: Monotonic time of the leader's last heartbeat; _NEVER after a reset of the link to it.
        self._heard = _NEVER
        self._deadline = 0.0
        self._timer_at: float | None = None
        #: Pre-vote that this node runs: its term, and the peers that agreed. None: it runs no pre-vote.
        self._asking: tuple[int, set[str]] | None = None
        #: Term of this node's last campaign, and the nodes that voted for it so far. Without them, PySyncObj would
        #: count a repeated vote twice.
        self._votes: tuple[int, set[str]] = (0, set())
        #: Term of a campaign that the leader requested from this node, 0 without one: voters grant such a campaign
        #: although they still hear the leader.
        self._called = 0
        #: Monotonic time since which this node lets other nodes campaign first; None: it does not.
        self._waiting_since: float | None = None
        #: Leader that this node followed last, or this node if it led later; "": none since its start.
        self.followed = ""
        #: Cause of the last campaign: (leader followed before, whether that leader asked for the campaign, seconds
        #: since it was heard; infinite after a reset of its link).
        self.cause = ("", False, 0.0)

    def start(self, now: float, ready: Ready) -> None:
        self._postpone(now)
        self._arm(now, ready)

    def least_timeout(self) -> float:
        """Shortest election timeout in seconds; it grows with the round trip time to the other nodes."""
        return max(self._config.election_min_ms, 10 * self.rtt_ms) / 1000

    def _postpone(self, now: float) -> None:
        spread = self._config.election_max_ms / self._config.election_min_ms
        self._deadline = now + self.least_timeout() * self._random.uniform(1.0, spread)

    def heard_leader(self, now: float) -> None:
        self._heard = now
        self._asking = self._waiting_since = None
        self._postpone(now)

    def leader_lost(self, now: float, ready: Ready) -> None:
        """Bring the election deadline forward: the leader's process closed its link, so it is probably dead."""
        self._heard = _NEVER
        self._deadline = min(self._deadline, now + self._random.uniform(0.0, self._config.reset_spread_ms / 1000))
        self._arm(now, ready)

    def _arm(self, now: float, ready: Ready) -> None:
        """Start the election timer, unless a timer for an earlier time runs: that one starts again if it fires too
        early."""
        if self._timer_at is None or self._timer_at > self._deadline:
            self._timer_at = self._deadline
            ready.later(max(0.0, self._deadline - now), self._fire, self._deadline)

    def _fire(self, at: float, now: float, ready: Ready) -> None:
        if at != self._timer_at:
            return
        self._timer_at = None
        if self._core.leads:
            self._postpone(now)
        elif now >= self._deadline:
            ready.later(_SECOND_LOOK_S, self._look_again, self._deadline)
            return
        self._arm(now, ready)

    def _look_again(self, deadline: float, now: float, ready: Ready) -> None:
        if deadline == self._deadline and not self._core.leads:
            self._ask(now, ready)
        self._arm(now, ready)

    @property
    def may_vote(self) -> bool:
        """Whether this node may vote: the log has admitted its incarnation, and no snapshot is replacing its state. Its
        own log need not list it as a voter: the candidate's log is no older, and may list it."""
        return self._journal.admitted and not self._applier.installing

    @property
    def eligible(self) -> bool:
        """Whether this node may lead: it may vote, and its log says that it is a voter, or is about to be removed."""
        return self.may_vote and self._members.electable

    def _leaderless(self, now: float) -> bool:
        return not self._core.leads and now - self._heard >= self.least_timeout()

    def _ask(self, now: float, ready: Ready) -> None:
        core, members = self._core, self._members
        if core.leader is not None:
            core.step_down()
        if members.sole_voter and self.eligible:
            self._postpone(now)
            self.campaign(now, ready)
            return
        # Repeat the pre-vote soon: a pre-vote disturbs no other node. The random delay keeps nodes out of step.
        self._deadline = now + self._config.election_min_ms / 1000 * self._random.uniform(0.25, 1.0)
        if not self.eligible or self._lets_others_go_first(now):
            return
        self._asking = (core.term + 1, set())
        frame = messages.encode(messages.PRE_VOTE, core.term + 1, self._journal.last_index, self._journal.last_term)
        for name in members.others:
            if members.connected(name):
                ready.send(name, frame)

    def _lets_others_go_first(self, now: float) -> bool:
        if self._journal.last_index - self._applier.applied <= _BACKLOG and not self.draining:
            return False
        if self._waiting_since is None:
            self._waiting_since = now
        return now - self._waiting_since < _DRAIN_S

    def on_pre_vote(self, peer: Peer, term: int, index: int, last_term: int, now: float, ready: Ready) -> None:
        yes = (
            self.may_vote
            and term > self._core.term
            and (last_term, index) >= (self._journal.last_term, self._journal.last_index)
            and self._leaderless(now)
        )
        # Two candidates would split the votes. So a node that agrees to another node's pre-vote delays its own; if two
        # nodes ask each other, the node with the smaller name goes first.
        if yes and (self._asking is None or peer.name < self._members.name):
            self._asking = None
            self._deadline = max(self._deadline, now + self._config.election_min_ms / 1000 * _GIVE_WAY)
        ready.send(peer.name, messages.encode(messages.PRE_VOTE_REPLY, term, yes, self._core.term))

    def on_pre_vote_reply(self, peer: Peer, asked: int, yes: bool, term: int, now: float, ready: Ready) -> None:
        core, peers = self._core, self._members.peers
        if term > core.term and not core.leads:
            core.step_down(term)
            ready.sync = True
        elif yes and not core.leads and self._asking is not None and self._asking[0] == asked == core.term + 1:
            self._asking[1].add(peer.name)
            if self._members.agreed(peers[name] for name in sorted(self._asking[1]) if name in peers):
                self.campaign(now, ready)

    def campaign(self, now: float, ready: Ready, *, called: bool = False) -> None:
        self._asking = None
        self.cause = self.followed, called, now - self._heard
        self._called = self._core.term + 1 if called else 0
        self._postpone(now)
        self._stats.elections += 1
        log.info("campaign", extra={"term": self._core.term + 1})
        self._core.campaign()
        ready.sync = True

    def ask_vote(self, name: str, term: int, last_index: int, last_term: int, ready: Ready) -> None:
        """Request the vote of `name` as soon as this node's log, and its vote for itself, are on disk."""
        frame = messages.encode(messages.VOTE, term, last_index, last_term, self._called == term)
        ready.durable(self._send_vote_request, name, term, frame)

    def _send_vote_request(self, name: str, term: int, frame: bytes, now: float, ready: Ready) -> None:
        if self._core.term != term or self._core.leads:
            return
        if name == DISK:
            self._core.voted(DISK, term)
            ready.sync = True
        elif self._members.connected(name):
            ready.send(name, frame)

    def on_vote(self, peer: Peer, vote: messages.Vote, now: float, ready: Ready) -> None:
        core, journal = self._core, self._journal
        late = vote.term > core.term and not vote.called and not self._leaderless(now)
        if not self.may_vote or not peer.admitted or late:
            return
        before = core.term, journal.voted_for
        core.vote_requested(peer.name, vote.term, vote.last_index, vote.last_term)
        if (core.term, journal.voted_for) != before:
            if journal.voted_for == peer.name:
                self._postpone(now)
            self._asking = None
            ready.sync = True

    def vote(self, name: str, term: int, ready: Ready) -> None:
        ready.durable(self._send_vote, name, term)

    def _send_vote(self, name: str, term: int, now: float, ready: Ready) -> None:
        if self._core.term == term and self._journal.admitted and self._members.connected(name):
            ready.send(name, messages.encode(messages.VOTE_REPLY, term))

    def on_vote_reply(self, peer: Peer, term: int, now: float, ready: Ready) -> None:
        if self._votes[0] != term:
            self._votes = (term, set())
        if peer.admitted and peer.name in self._members.voters and peer.name not in self._votes[1]:
            self._votes[1].add(peer.name)
            self._core.voted(peer.name, term)
            ready.sync = True

    def on_timeout_now(self, peer: Peer, term: int, now: float, ready: Ready) -> None:
        """Campaign at once, because the leader asked this node to take over."""
        if term == self._core.term and self._core.leader == peer.name and self.eligible:
            self.campaign(now, ready, called=True)
