"""When to campaign: deadlines, the question before a campaign, and planned transfers.

A follower whose deadline passes asks first (pre-vote): would you vote for me? Only a majority of yes lets the library
campaign, so a node that comes back from a cut never deposes a healthy leader. A reset of the leader's link brings the
deadline near: a killed process is replaced in tens of milliseconds. A deadline that passes because this node itself
slept is looked at twice, so that the leader's signs of life, which are waiting to be read, count.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from hadelay.errors import HadelayError, NoLeader, Overloaded
from hadelay.raft import messages
from hadelay.raft.library import DISK
from hadelay.raft.peer import Peer
from hadelay.raft.ports import Done, Finished

if TYPE_CHECKING:
    from hadelay.raft.node import RaftNode

log = logging.getLogger(__name__)

#: Between a deadline and acting on it: one round of the loop, with its reads, comes in between.
_SECOND_LOOK_S = 0.004
_NEVER = float("-inf")
#: A node with more entries than this still to apply would lead, but serve nobody, until it has: others go first ...
_BACKLOG = 500
#: ... for so long.
_GIVE_WAY_S = 1.0


class Elections:
    def __init__(self, node: RaftNode) -> None:
        self.node = node
        #: When the leader gave its last sign of life; never, once its link was reset.
        self._heard = _NEVER
        self._deadline = 0.0
        self._timer_at: float | None = None
        #: The term asked about, and who said yes.
        self._asking: tuple[int, set[str]] | None = None
        #: Term of the running campaign, and the voters counted in it: the library counts one voter twice.
        self._votes: tuple[int, set[str]] = (0, set())
        #: The term of a campaign that the leader asked for; 0 during any other. Voters need not miss the leader then.
        self._called = 0
        #: Since when this node would have campaigned, and gives way.
        self._waiting_since: float | None = None

    # -- deadlines
    def start(self) -> None:
        self._postpone()
        self._arm()

    def least_timeout(self) -> float:
        """Seconds without a leader's sign after which there is none. Grows where the network is slow."""
        return max(self.node.config.election_min_ms, 10 * self.node.follower.rtt_ms) / 1000

    def _postpone(self) -> None:
        config = self.node.config
        spread = config.election_max_ms / config.election_min_ms
        timeout = self.least_timeout() * self.node.runtime.random.uniform(1.0, spread)
        self._deadline = self.node.runtime.monotonic() + timeout

    def heard_leader(self) -> None:
        self._heard = self.node.runtime.monotonic()
        self._asking = self._waiting_since = None
        self._postpone()

    def leader_lost(self) -> None:
        """The leader's process closed its link: most likely it is dead."""
        node = self.node
        self._heard = _NEVER
        soon = node.runtime.random.uniform(0.0, node.config.reset_spread_ms / 1000)
        self._deadline = min(self._deadline, node.runtime.monotonic() + soon)
        self._arm()

    def _arm(self) -> None:
        """One timer at a time, moved only to an earlier time: a later deadline is seen when it fires."""
        node = self.node
        if self._timer_at is None or self._timer_at > self._deadline:
            self._timer_at = self._deadline
            node.call_later(max(0.0, self._deadline - node.runtime.monotonic()), self._fire, self._deadline)

    def _fire(self, at: float) -> None:
        if at != self._timer_at:
            return
        self._timer_at = None
        node = self.node
        if node.is_leader:
            self._postpone()
        elif node.runtime.monotonic() >= self._deadline:
            node.call_later(_SECOND_LOOK_S, self._look_again, self._deadline)
            return
        self._arm()

    def _look_again(self, deadline: float) -> None:
        if deadline == self._deadline and not self.node.is_leader:
            self._ask()
        self._arm()

    # -- asking
    @property
    def may_vote(self) -> bool:
        """A new incarnation neither votes nor campaigns, nor does a node whose state is being replaced.

        Whether its own log says that it is a voter does not matter: the candidate's log, which is no older, may."""
        return self.node.journal.admitted and not self.node.snapshots.installing

    @property
    def eligible(self) -> bool:
        """For office: it may vote, and its log says that its vote counts, or that it is about to be removed."""
        return self.may_vote and self.node.membership.stands

    def _leaderless(self) -> bool:
        node = self.node
        if node.is_leader:
            return False
        return node.runtime.monotonic() - self._heard >= self.least_timeout()

    def _ask(self) -> None:
        node, config = self.node, self.node.config
        if node.core.leader is not None:
            node.core.step_down()
        if node.alone and self.eligible:
            self._postpone()
            self._campaign()
            return
        # Asking disturbs nobody: again soon, and not in step with the others.
        again = config.election_min_ms / 1000 * node.runtime.random.uniform(0.25, 1.0)
        self._deadline = node.runtime.monotonic() + again
        if not self.eligible or self._gives_way():
            return
        term = node.term + 1
        self._asking = (term, set())
        frame = messages.encode(messages.PRE_VOTE, term, node.journal.last_index, node.journal.last_term)
        for name in node.membership.others:
            if node.connected(name):
                node.network.send(name, frame, True)

    def _gives_way(self) -> bool:
        node = self.node
        if node.last_index - node.applied_index <= _BACKLOG and not node.gives_way:
            return False
        now = node.runtime.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        return now - self._waiting_since < _GIVE_WAY_S

    def on_pre_vote(self, peer: Peer, data: bytes) -> None:
        node = self.node
        term, index, last_term = messages.decode(data, int, int, int)
        journal = node.journal
        yes = (
            self.may_vote
            and term > node.term
            and (last_term, index) >= (journal.last_term, journal.last_index)
            and self._leaderless()
        )
        node.network.send(peer.name, messages.encode(messages.PRE_VOTE_REPLY, term, yes, node.term), True)

    def on_pre_vote_reply(self, peer: Peer, data: bytes) -> None:
        node = self.node
        asked, yes, term = messages.decode(data, int, bool, int)
        if term > node.term and not node.is_leader:
            node.core.step_down(term)
            node.flush_soon()
        elif yes and not node.is_leader and self._asking is not None and self._asking[0] == asked == node.term + 1:
            self._asking[1].add(peer.name)
            if node.agreed(node.peers[name] for name in sorted(self._asking[1]) if name in node.peers):
                self._campaign()

    # -- campaigning
    def _campaign(self, *, called: bool = False) -> None:
        self._asking = None
        self._called = self.node.term + 1 if called else 0
        self._postpone()
        self.node.stats.elections += 1
        log.info("campaign", extra={"term": self.node.term + 1})
        self.node.core.campaign()
        self.node.flush_soon()

    def send_vote_request(self, name: str, term: int, last_index: int, last_term: int) -> None:
        """From the library, which already counts this node's vote: it must be on disk, and so must the log it shows."""
        node = self.node
        frame = messages.encode(messages.VOTE, term, last_index, last_term, self._called == term)

        def leave() -> None:
            if node.term != term or node.is_leader:
                return
            if name == DISK:
                node.core.voted(DISK, term)
                node.flush_soon()
            elif node.connected(name):
                node.network.send(name, frame, True)

        # Not from inside the library's tick, even when the disk is quick.
        node.journal.when_synced(leave)

    def on_vote(self, peer: Peer, data: bytes) -> None:
        node = self.node
        term, index, last_term, called = messages.decode(data, int, int, int, bool)
        if not self.may_vote or not peer.admitted or (term > node.term and not called and not self._leaderless()):
            return
        before = node.term, node.journal.voted_for
        node.core.vote_requested(peer.name, term, index, last_term)
        if (node.term, node.journal.voted_for) != before:
            if node.journal.voted_for == peer.name:
                self._postpone()
            self._asking = None
            node.flush_soon()

    def send_vote(self, name: str, term: int) -> None:
        node = self.node
        frame = messages.encode(messages.VOTE_REPLY, term)

        def leave() -> None:
            if node.term == term and node.connected(name):
                node.network.send(name, frame, True)

        node.journal.when_synced(leave)

    def on_vote_reply(self, peer: Peer, data: bytes) -> None:
        (term,) = messages.decode(data, int)
        if self._votes[0] != term:
            self._votes = (term, set())
        if peer.admitted and peer.name in self.node.membership.voters and peer.name not in self._votes[1]:
            self._votes[1].add(peer.name)
            self.node.core.voted(peer.name, term)
            self.node.flush_soon()

    def on_timeout_now(self, peer: Peer, data: bytes) -> None:
        """The leader asks this node to take over."""
        (term,) = messages.decode(data, int)
        node = self.node
        if term == node.term and node.core.leader == peer.name and self.eligible:
            self._campaign(called=True)


class Transfers:
    """Handing leadership over: proposals wait, the target gets the rest of the log, and is told to campaign."""

    def __init__(self, node: RaftNode) -> None:
        self.node = node
        self._target: Peer | None = None
        self._told = False
        self._done: Finished | None = None
        self._held: list[tuple[bytes, Done]] = []
        self._attempt = 0
        #: Who was told and did not take over in time, and the round of then: it may campaign yet, and get all votes.
        self._doubt: tuple[Peer, int] | None = None

    @property
    def under_way(self) -> bool:
        return self._target is not None

    @property
    def in_doubt(self) -> bool:
        """Until it answers what it was sent later: then it has read that it is to take over, and has not."""
        return self._doubt is not None and self._doubt[0].round <= self._doubt[1]

    def begin(self, to: str | None, done: Finished) -> None:
        node = self.node
        if not node.is_leader:
            done(NoLeader("this node does not lead"))
        elif self.under_way or self.in_doubt:
            done(Overloaded("a transfer is already under way", retry_after_ms=node.config.transfer_ms))
        else:
            voters = node.membership.voters
            fit = [p for p in node.peers.values() if p.up and p.admitted and p.name in voters and to in (None, p.name)]
            if not fit:
                done(Overloaded(f"{to or 'no follower'} is not connected, or not a voting member", retry_after_ms=500))
                return
            self._target, self._told = max(fit, key=lambda peer: peer.match), False
            self._done = done
            self._attempt += 1
            node.call_later(node.config.transfer_ms / 1000, self._give_up, self._attempt)
            self.progress()

    def give_away(self, why: str) -> None:
        """Anybody else is better than this leader."""
        if not self.under_way:
            log.warning(f"{why}_hand_over", extra={"term": self.node.term})
            self.begin(None, lambda error: self.node.core.step_down() if error and self.node.is_leader else None)

    def hold(self, command: bytes, done: Done) -> None:
        if len(self._held) >= self.node.config.max_waiting:
            done(None, Overloaded("too many proposals wait for a transfer to end", retry_after_ms=300))
        else:
            self._held.append((command, done))

    def progress(self) -> None:
        """The target may have caught up."""
        node, target = self.node, self._target
        if target is not None and not self._told and target.match == node.journal.last_index:
            self._told = True
            node.network.send(target.name, messages.encode(messages.TIMEOUT_NOW, node.term), True)

    def _give_up(self, attempt: int) -> None:
        if attempt == self._attempt and self.under_way:
            name = self._target.name if self._target else ""
            if self._target is not None and self._told and self.node.config.by_the_clock:
                self._doubt = self._target, self.node.leader_role.round
                self.node.call_later(self.node.config.transfer_ms / 1000, self._settle, attempt)
            self._end(Overloaded(f"{name} did not take over in time", retry_after_ms=1_000))

    def _settle(self, attempt: int) -> None:
        """Another election makes sure: in that term it is too late for what was told in this one."""
        if attempt == self._attempt and self.in_doubt and self.node.is_leader:
            self.node.core.step_down()

    def deposed(self) -> None:
        self._doubt = None
        self._end(None)

    def _end(self, error: HadelayError | None) -> None:
        if not self.under_way:
            return
        done, self._done, self._target = self._done, None, None
        held, self._held = self._held, []
        for command, answer in held:
            self.node.propose(command, answer)
        if done is not None:
            done(error)
