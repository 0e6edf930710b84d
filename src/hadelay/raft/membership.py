"""Voters and learners of the cluster. The log contains the list of members; a list is in force as soon as its entry is
in the log (ADR 150).

Single-server changes (Ongaro's thesis, chapter 4): one change at a time, of one voter, so that old and new majorities
have a node in common. A leader begins a change only when an entry of its own term and the previous change are
committed. Cutting an entry off undoes its change. Without an entry, the members are those of the configuration file.

A node links with all nodes that may matter: members in force, members in the last applied list (a removed node learns
of its removal), and members that a peer has named (this node's log may lag behind a leader among them).

A survivor (RaftTuning.survivor) uses its configuration file only: the majority of the members is lost for good, and the
data of this node is to be backed up.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any

from hadelay.errors import Conflict, HadelayError, NoLeader, Overloaded
from hadelay.members import JOINED, Member, Members, is_whole
from hadelay.raft import messages
from hadelay.raft.part import Notice, Peer, RaftPart, Ready, Shared
from hadelay.raft.ports import FOUNDING, Done

log = logging.getLogger(__name__)

_READ_BYTES = 1 << 20
#: Member list, as (index of its log entry, members); index 0: the list in the configuration file.
Configuration = tuple[int, Members]


class Membership(RaftPart):
    def __init__(self, shared: Shared, given: Members, handing_over: Callable[[], bool]) -> None:
        """given: the members in the configuration file. handing_over: whether a transfer of leadership is running."""
        super().__init__(shared)
        self.name, self._given, self._handing_over = shared.journal.identity.node, given, handing_over
        #: Peers by name. The dict is never changed: when a node is added, a new dict replaces it.
        self.peers = {member.name: Peer(member.name) for member in given if member.name != self.name}
        self.applied_list: Configuration = (0, given)
        #: Member lists in the log that are not applied yet, as (index of the entry, members) in ascending order.
        self.appended_lists: list[Configuration] = []
        self._heard: Configuration = (0, ())
        #: Whether no leader was seen since the start; if so, the configuration file may be newer than the log.
        self.no_leader_seen = True
        #: Term and commit index when the leader last checked whether learners have caught up.
        self._mark = (0, 0)
        self._derive()

    def _derive(self) -> None:
        self.index, self.members = self.appended_lists[-1] if self.appended_lists else self.applied_list
        if self._config.survivor:
            self.members = self._given
        voters = [member.name for member in self.members if member.voter]
        self.voters = frozenset(voters)
        #: Voters besides this node, in the order of their names.
        self.others = [name for name in voters if name != self.name]
        self.sole_voter = not self.others
        self.majority = len(voters) // 2 + 1
        self.votes = self.name in self.voters
        #: Whether this node may lead: a voter, or a node that has not applied its removal. Such a node may be the only
        #: one with the removal's entry, and so the only possible leader.
        self.electable = self.votes or any(m.voter and m.name == self.name for m in self.applied_list[1])
        self.names = [member.name for member in self.members]
        #: Names of the members that were added after the cluster was founded.
        self.joined = frozenset(member.name for member in self.members if member.joined)

    @property
    def committed(self) -> bool:
        return self.index <= self._core.commit_index

    def connected(self, name: str) -> bool:
        peer = self.peers.get(name)
        return peer is not None and peer.up

    def agreed(self, peers: Iterable[Peer]) -> bool:
        """Whether `peers` and this node together are a majority of the voters. Nodes that are not admitted yet do not
        count."""
        mine = self._journal.admitted and self.votes
        return mine + sum(peer.admitted and peer.name in self.voters for peer in peers) >= self.majority

    def min_incarnation(self, name: str) -> int:
        """Smallest incarnation accepted from the node `name`. A member added later is never a founder, even before its
        entry is applied: a founder's log could be the log of another cluster."""
        known = self._machine.incarnation(name) or FOUNDING
        return max(known, JOINED) if name in self.joined else known

    def electorates(self, index: int) -> list[frozenset[str]]:
        """Possible voter sets for the entry at `index`, which is applied next; a majority of one of these sets
        committed the entry. The sets are the voters of the member list in force at `index`, and of each later list in
        the log. For tests."""
        lists = [self.applied_list, *self.appended_lists]
        at = max((n for n, (since, _) in enumerate(lists) if since <= index), default=0)
        return [frozenset(m.name for m in members if m.voter) for _, members in lists[at:]]

    @property
    def heard(self) -> bool:
        return self._heard[0] > self.index

    def linked(self) -> dict[str, str]:
        """All nodes with which this node has links: name → address."""
        if self._config.survivor:
            return {}
        lists = [self.applied_list, *self.appended_lists, *([self._heard] if self.heard else [])]
        if self.no_leader_seen or self.name not in self.names:
            # Link with the nodes in the configuration file, too: through them, a removed node can return.
            lists.insert(0, (0, self._given))
        found = {member.name: member.address for _, members in lists for member in members}
        found.pop(self.name, None)
        return dict(sorted(found.items()))

    def leader_seen(self, now: float, ready: Ready) -> None:
        """Called when a leader is seen: the leader knows all members, so the configuration file no longer counts."""
        if self.no_leader_seen:
            self.no_leader_seen = False
            self._reconfigure(now, ready)

    def load(self, applied: int, now: float, ready: Ready) -> None:
        """Read the member lists before the node starts: the list that was applied, and the lists in later entries of
        the journal."""
        self._take_applied()
        index = applied + 1
        while index <= self._journal.last_index:
            for command, at, _, _ in self._journal.entries(index, _READ_BYTES):
                members = self._machine.members_in(command)
                if members is not None:
                    self.appended_lists.append((at, members))
                index = at + 1
        self._derive()
        if self.index and {m[:2] for m in self.members} != {m[:2] for m in self._given}:
            names = ", ".join(f"{m.name} at {m.address}" for m in self.members)
            log.warning("members_differ_from_file", extra={"members": names, "index": self.index})
        if self.index:
            self._reconfigure(now, ready)

    def _take_applied(self) -> None:
        index, members = self._machine.members()
        if members:
            self.applied_list = (index, members)

    def appended(self, index: int, members: Members, now: float, ready: Ready) -> None:
        """Called when an entry that changes the members was appended to the log."""
        self.appended_lists.append((index, members))
        self._changed(now, ready)

    def truncated(self, index: int, now: float, ready: Ready) -> None:
        """Called when the log's entries from `index` on were cut off: undo their member changes."""
        before = len(self.appended_lists)
        self.appended_lists = [change for change in self.appended_lists if change[0] < index]
        if len(self.appended_lists) != before:
            self._changed(now, ready)

    def applied(self, index: int, now: float, ready: Ready) -> None:
        if self.appended_lists[0][0] == index:
            self.applied_list = self.appended_lists.pop(0)
            self._changed(now, ready)
            for peer in self.peers.values():
                self.tell(peer, ready)

    def installed(self, index: int, now: float, ready: Ready) -> None:
        """Called when a snapshot replaced all entries up to `index`: take the members from the state machine."""
        self._take_applied()
        last = self._journal.last_index
        self.appended_lists = [change for change in self.appended_lists if index < change[0] <= last]
        self._changed(now, ready)

    def _changed(self, now: float, ready: Ready) -> None:
        before, was = self.index, self.name in self.names
        self._derive()
        if self.index != before:
            voters = " ".join(m.name for m in self.members if m.voter)
            learners = " ".join(m.name for m in self.members if not m.voter)
            log.info("members", extra={"index": self.index, "voters": voters, "learners": learners})
        if was and self.name not in self.names:
            log.warning("removed", extra={"index": self.index})
        self._reconfigure(now, ready)

    def _reconfigure(self, now: float, ready: Ready) -> None:
        """Apply a change of voters or linked nodes. Voters change at once, links in the next turn of the loop."""
        added = self._core.set_voters(self.others, self.votes)
        new = [name for name in self.linked() if name not in self.peers]
        if new:
            self.peers = {name: self.peers.get(name) or Peer(name) for name in sorted({*self.peers, *new})}
            for name in new:
                self.peers[name].begin(self._journal.last_index + 1, now)
        for name in added:
            if name in self.peers:
                self.peers[name].counted = 0
        ready.notify(Notice.MEMBERS)

    def tell(self, peer: Peer, ready: Ready) -> None:
        """Send a peer the last applied member list, unless that is the list in the configuration file."""
        index, members = self.applied_list
        if index and peer.up:
            rows = [[m.name, m.address] for m in members]
            ready.send(peer.name, messages.encode(messages.MEMBERS, index, rows), urgent=False)

    def on_members(self, peer: Peer, index: int, rows: list[Any], now: float, ready: Ready) -> None:
        for row in rows:
            if not isinstance(row, list) or [type(field) for field in row] != [str, str]:
                raise messages.BadFrame("members: a member is not [name, address]")
        members = tuple(Member(name, address) for name, address in rows)
        if not is_whole(members):
            raise messages.BadFrame(
                "members: the list is not sorted, names a member or an address twice, or lacks a voter"
            )
        if index > max(self.index, self._heard[0]):
            self._heard = (index, members)
            self._reconfigure(now, ready)

    def refusal(self, members: Members) -> HadelayError | None:
        """Return the error that forbids this node to propose this member list now; None if the node may propose the
        list."""
        if self._config.survivor:
            return Conflict(
                "this node runs alone, because a majority of its cluster is lost: back it up, and restore the backup "
                "into a new cluster"
            )
        if not self._core.leads:
            return NoLeader("this node does not lead", retry_after_ms=50)
        if self._handing_over():
            return Overloaded("leadership is being handed over", retry_after_ms=500)
        if self._core.commit_index < self._core.no_op:
            return Overloaded("this leader is new and has not committed an entry yet: try again", retry_after_ms=200)
        if not self.committed:
            return Overloaded("another member change is under way: try again later", retry_after_ms=500)
        voters = frozenset(member.name for member in members if member.voter)
        if not is_whole(members) or len(voters ^ self.voters) > 1 or self.name not in voters:
            return Conflict("only one voter may change at a time, and not the leader itself")
        behind = sorted(voters - {self.name} - self._caught_up())
        needed = len(voters) // 2 + 1
        if len(voters) - len(behind) < needed:
            text = (
                f"of {', '.join(sorted(voters))} at least {needed} must have caught up with the leader; wait for "
                f"{', '.join(behind)}"
            )
            return Overloaded(text, retry_after_ms=500)
        return None

    def _caught_up(self) -> set[str]:
        """Names of admitted peers with an entry of this leader's term on disk. A founder without any entry may return
        from a power cut as a new incarnation, which does not vote, so the member list must not depend on its vote."""
        return {peer.name for peer in self.peers.values() if peer.admitted and peer.match >= self._core.no_op}

    def propose(self, members: Members, done: Done) -> None:
        error = self.refusal(members)
        if error is not None:
            done(None, error)
        else:
            self._propose(self._machine.members_command(members), done)

    def beat(self, ready: Ready) -> None:
        """Called by the leader every few heartbeats: if a learner has caught up, propose to make it a voter."""
        if not self.votes and self.committed:
            ready.notify(Notice.HAND_OVER, "removed")
        mark, self._mark = self._mark, (self._core.term, self._core.commit_index)
        if mark[0] != self._core.term or all(member.voter for member in self.members):
            return
        for member in self.members:
            peer = self.peers.get(member.name)
            if member.voter or peer is None or not (peer.up and peer.admitted and peer.match >= mark[1]):
                continue
            if peer.incarnation != self.min_incarnation(peer.name):
                continue
            promoted = tuple(m._replace(voter=True) if m is member else m for m in self.members)
            if self.refusal(promoted) is None:
                log.info("promoting", extra={"peer": peer.name, "incarnation": peer.incarnation})
                # If the proposal fails, a later heartbeat repeats it.
                self.propose(promoted, lambda result, error: None)
            return
