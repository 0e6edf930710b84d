"""Who votes and who only learns: a list in the log, in force from the moment it is there (ADR 150).

Single-server changes (Ongaro's thesis, chapter 4): one change at a time, of one voter, so that every majority before it
has a node in common with every majority after it. A leader begins one only when an entry of its own term is committed,
and the change before is. An entry that is cut off takes its change with it. Until the log has ever said anything, the
members are those of the configuration file.

Frames go to everybody who may matter: members in force, those that are applied (one that is removed learns of it), and
those a peer told of, which this node's log does not know yet: without them it could not follow a leader among them.

A survivor goes by its file for good: a majority of the others is gone, and what it holds is to be backed up.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from hadelay.errors import Conflict, HadelayError, NoLeader, Overloaded
from hadelay.members import Member, Members, is_whole
from hadelay.raft import messages
from hadelay.raft.peer import Peer
from hadelay.raft.ports import Done

if TYPE_CHECKING:
    from hadelay.raft.node import RaftNode

log = logging.getLogger(__name__)

_READ_BYTES = 1 << 20
#: A list of members, and the index of the entry that says so; 0 for the configuration file.
Configuration = tuple[int, Members]


class Membership:
    def __init__(self, node: RaftNode, given: Members) -> None:
        self.node = node
        self._given = given
        self.applied_list: Configuration = (0, given)
        #: In the log and not applied yet, by index.
        self.appended_lists: list[Configuration] = []
        self._heard: Configuration = (0, ())
        #: Since the start no leader was heard of: all that the log names may be gone, and the file may know better.
        self.astray = True
        #: Term and commit index at the last look at the learners.
        self._mark = (0, 0)
        self._derive()

    def _derive(self) -> None:
        self.index, self.members = self.appended_lists[-1] if self.appended_lists else self.applied_list
        if self.node.config.survivor:
            self.members = self._given
        voters = [member.name for member in self.members if member.voter]
        was = any(member.voter and member.name == self.node.name for member in self.applied_list[1])
        #: Never iterated: `others` is.
        self.voters = frozenset(voters)
        self.others = [name for name in voters if name != self.node.name]
        self.majority = len(voters) // 2 + 1
        self.votes = self.node.name in self.voters
        #: A node whose removal is not applied here may be the only one that has it, and so the only one that can lead.
        self.stands = self.votes or was
        self.names = [member.name for member in self.members]
        #: Who was added, and so is no founder.
        self.joined = frozenset(member.name for member in self.members if member.joined)

    @property
    def committed(self) -> bool:
        return bool(self.index <= self.node.core.raftCommitIndex)

    def electorates(self, index: int) -> list[frozenset[str]]:
        """The voters that the entry at `index`, which is applied next, may have been committed by: of the list in force
        there, and of those that came after it. For tests."""
        lists = [self.applied_list, *self.appended_lists]
        at = max((n for n, (since, _) in enumerate(lists) if since <= index), default=0)
        return [frozenset(m.name for m in members if m.voter) for _, members in lists[at:]]

    @property
    def heard(self) -> bool:
        return self._heard[0] > self.index

    def linked(self) -> dict[str, str]:
        """Name → address of everybody that frames are exchanged with."""
        if self.node.config.survivor:
            return {}
        lists = [self.applied_list, *self.appended_lists, *([self._heard] if self.heard else [])]
        if self.astray or self.node.name not in self.names:
            # Or it was removed, and is to come back: by whom the file may know, too.
            lists.insert(0, (0, self._given))
        found = {member.name: member.address for _, members in lists for member in members}
        found.pop(self.node.name, None)
        return dict(sorted(found.items()))

    def arrived(self) -> None:
        """There is a leader, who knows all the others."""
        if self.astray:
            self.astray = False
            self.node.reconfigured()

    # -- what the log says
    def load(self) -> None:
        """Before the start: what is applied, and what the journal has beyond it."""
        node, journal = self.node, self.node.journal
        self._take_applied()
        index = node.applier.applied + 1
        while index <= journal.last_index:
            for command, at, _, _ in journal.entries(index, _READ_BYTES):
                members = node.machine.members_in(command)
                if members is not None:
                    self.appended_lists.append((at, members))
                index = at + 1
        self._derive()
        if self.index and {m[:2] for m in self.members} != {m[:2] for m in self._given}:
            names = ", ".join(f"{m.name} at {m.address}" for m in self.members)
            log.warning("members_differ_from_file", extra={"members": names, "index": self.index})
        if self.index:
            self.node.reconfigured()

    def _take_applied(self) -> None:
        index, members = self.node.machine.members()
        if members:
            self.applied_list = (index, members)

    def appended(self, index: int, members: Members) -> None:
        self.appended_lists.append((index, members))
        self._changed()

    def truncated(self, index: int) -> None:
        """Entries from `index` on were cut off, and what they put in force with them."""
        before = len(self.appended_lists)
        self.appended_lists = [change for change in self.appended_lists if change[0] < index]
        if len(self.appended_lists) != before:
            self._changed()

    def applied(self, index: int) -> None:
        if self.appended_lists and self.appended_lists[0][0] == index:
            self.applied_list = self.appended_lists.pop(0)
            self._changed()
            for peer in self.node.peers.values():
                self.tell(peer)

    def installed(self, index: int) -> None:
        """A snapshot took the place of everything up to `index`."""
        self._take_applied()
        self.appended_lists = [
            change for change in self.appended_lists if index < change[0] <= self.node.journal.last_index
        ]
        self._changed()

    def _changed(self) -> None:
        before, was = self.index, self.node.name in self.names
        self._derive()
        if self.index != before:
            voters = " ".join(m.name for m in self.members if m.voter)
            learners = " ".join(m.name for m in self.members if not m.voter)
            log.info("members", extra={"index": self.index, "voters": voters, "learners": learners})
        if was and self.node.name not in self.names:
            log.warning("removed", extra={"index": self.index})
        self.node.reconfigured()

    # -- what peers say
    def tell(self, peer: Peer) -> None:
        """Whom this node knows as members, once the log has said it."""
        index, members = self.applied_list
        if index and peer.up:
            frame = messages.encode(messages.MEMBERS, index, [[m.name, m.address] for m in members])
            self.node.network.send(peer.name, frame)

    def on_members(self, peer: Peer, data: bytes) -> None:
        index, rows = messages.decode(data, int, list)
        for row in rows:
            if not isinstance(row, list) or [type(field) for field in row] != [str, str]:
                raise messages.BadFrame("members: a member is not [name, address]")
        members = tuple(Member(name, address) for name, address in rows)
        if not is_whole(members):
            raise messages.BadFrame("members: not a list in the order of their names")
        if index > max(self.index, self._heard[0]):
            self._heard = (index, members)
            self.node.reconfigured()

    # -- changing it
    def refusal(self, members: Members) -> HadelayError | None:
        """Why a leader must not propose this list, or not now."""
        node = self.node
        if node.config.survivor:
            return Conflict("this is what is left of a cluster: back it up, and restore that into a new one")
        if not node.is_leader:
            return NoLeader("this node does not lead", retry_after_ms=50)
        if node.transfers.under_way:
            return Overloaded("leadership is being handed over", retry_after_ms=500)
        if node.core.raftCommitIndex < node.leader_role.no_op:
            return Overloaded("this leader is new, and has committed nothing yet", retry_after_ms=200)
        if not self.committed:
            return Overloaded("another change of the members is under way", retry_after_ms=500)
        voters = frozenset(member.name for member in members if member.voter)
        if not is_whole(members) or len(voters ^ self.voters) > 1 or node.name not in voters:
            return Conflict("members are changed one at a time, and never the leader itself")
        behind = sorted(voters - {node.name} - self._caught_up())
        needed = len(voters) // 2 + 1
        if len(voters) - len(behind) < needed:
            text = (
                f"of {', '.join(sorted(voters))} at least {needed} must have caught up with the leader; wait for "
                f"{', '.join(behind)}"
            )
            return Overloaded(text, retry_after_ms=500)
        return None

    def _caught_up(self) -> set[str]:
        """Peers whose disk holds an entry of this leader's term. A founder that never got an entry may come back from a
        power cut as a new incarnation, which does not vote: a list that needs its vote could elect nobody."""
        first = self.node.leader_role.no_op
        return {peer.name for peer in self.node.peers.values() if peer.admitted and peer.match >= first}

    def propose(self, members: Members, done: Done) -> None:
        error = self.refusal(members)
        if error is not None:
            done(None, error)
        else:
            self.node.propose(self.node.machine.members_command(members), done)

    def beat(self) -> None:
        """Leader, now and then: a learner that has everything of the last look becomes a voter."""
        node = self.node
        if not self.votes and self.committed:
            node.transfers.give_away("removed")
        mark, self._mark = self._mark, (node.term, int(node.core.raftCommitIndex))
        if mark[0] != node.term or all(member.voter for member in self.members):
            return
        for member in self.members:
            peer = node.peers.get(member.name)
            if member.voter or peer is None or not (peer.up and peer.admitted and peer.match >= mark[1]):
                continue
            if peer.incarnation != node.admission.least(peer.name):
                continue
            promoted = tuple(m._replace(voter=True) if m is member else m for m in self.members)
            if self.refusal(promoted) is None:
                log.info("promoting", extra={"peer": peer.name, "incarnation": peer.incarnation})
                self.propose(promoted, _tried_again)
            return


def _tried_again(result: Any, error: HadelayError | None) -> None:
    """By the next look, or the next leader's."""
