"""Changes of the members while the cluster runs, and what the leader refuses (ADR 150).

A node is added as a learner, which gets all entries but does not vote; the leader makes the learner a voter once it has
caught up (raft.membership). So adding a node never costs the quorum, and a removal is refused if it would.
"""

import re
from typing import Any

from hadelay.errors import BadRequest, Conflict, HadelayError, LimitReached, NoLeader, NotFound, Overloaded
from hadelay.members import MAX_MEMBERS, Member, Members
from hadelay.raft.ports import Done
from hadelay.server.link import Reply
from hadelay.server.node import Node
from hadelay.settings.rules import is_loopback, split_address
from hadelay.version import MEMBERS_LEVEL

#: Allowed names of nodes. Names of dots only are refused, because names are part of request paths.
_NAME = re.compile(r"(?!\.+\Z)[A-Za-z0-9._-]{1,64}")
_ADDRESS = re.compile(r"[!-~]{1,255}")
_UNSPECIFIED = ("0.0.0.0", "::")
#: Timeout of a member change forwarded to another node, in seconds; equals the commit timeout.
CHANGE_S = 10.0


class MemberChanges:
    """Changes of members, one object per node. Serves the link operation "members": [add or remove, name, address]."""

    def __init__(self, node: Node) -> None:
        self._node, self._raft, self._peers = node, node.raft, node.peers
        node.link.handlers["members"] = self._on_change

    def _on_change(self, peer: str, payload: Any, reply: Reply) -> None:
        op, name, address = payload
        if op not in ("add", "remove") or not all(isinstance(text, str) for text in payload):
            raise ValueError('members: a change must be ["add" or "remove", name, address]')
        self._change(op, name, address, reply)

    def _change(self, op: str, name: str, address: str, done: Done) -> None:
        """Add a node at an address, or remove one. done(None, None) once the change is committed. Leader only: a leader
        that is to be removed hands over, and answers with NoLeader, so that the caller asks its successor."""
        if not self._node.leading:
            done(None, NoLeader("this node does not lead", retry_after_ms=50))
            return
        if op == "remove" and self._was_removed(name):
            done(None, None)  # the answer to an earlier request may have been lost
            return
        try:
            members = self._added(name, address) if op == "add" else self._removed(name)
        except HadelayError as refused:
            done(None, refused)
            return
        goes = op == "remove" and name == self._raft.name
        error = None if goes else self._raft.membership.refusal(members)
        if error is not None:
            done(None, error)
        elif self._node.ledger.level < MEMBERS_LEVEL:
            done(None, self._too_old())
        elif goes:
            gone = NoLeader(f"{name} led, and handed over before its removal: ask the new leader", retry_after_ms=50)
            self._node.leadership.transfer(None, lambda error: done(None, error or gone), "it is removed")
        else:
            self._raft.membership.propose(members, lambda result, error: done(None, error))

    def _too_old(self) -> HadelayError:
        """The error when the feature level is too low for member changes: a node is old or absent, or the leader is
        about to raise the level."""
        for peer in self._peers.peers.values():
            if not self._peers.live(peer.name) or peer.feature_level < MEMBERS_LEVEL:
                text = f"the first member change needs every node running and upgraded: {peer.name} is not"
                return Conflict(text)
        return Overloaded("the feature level is being raised: try again", retry_after_ms=500)

    def _settled(self) -> Members:
        members = self._raft.membership.members
        for member in members:
            if not member.voter:
                raise Conflict(f"learner {member.name} is still catching up: wait until it votes, or remove it")
        return members

    def _added(self, name: str, address: str) -> Members:
        if not _NAME.fullmatch(name) or name in (".", ".."):
            raise BadRequest(f"{name!r}: a node's name is 1 to 64 of A-Z a-z 0-9 . _ -, and not . or ..")
        try:
            host, port = split_address(address)
        except ValueError as error:
            raise BadRequest(f"raft: {error}") from None
        if not port or host in _UNSPECIFIED or not _ADDRESS.fullmatch(address):
            raise BadRequest(f"raft: other nodes cannot reach {address!r}: give the node's host:port in the network")
        for member in self._raft.membership.members:
            if member.name == name:
                raise Conflict(f"{name} is a member already, at {member.address}")
            if member.address == address:
                raise Conflict(f"{address} is the address of {member.name}")
            if member.name == self._raft.name and self._unreachable(member.address, address):
                raise Conflict(
                    f"{name} could not reach {member.name} at {member.address}: restart {member.name} with an address "
                    "that others can reach under raft.listen and [raft.peers]"
                )
        members = self._settled()
        if len(members) >= MAX_MEMBERS:
            raise LimitReached(f"a cluster has at most {MAX_MEMBERS} members")
        return tuple(sorted([*members, Member(name, address, voter=False, joined=True)]))

    @staticmethod
    def _unreachable(mine: str, theirs: str) -> bool:
        return split_address(mine)[0] in _UNSPECIFIED or (is_loopback(mine) and not is_loopback(theirs))

    def _was_removed(self, name: str) -> bool:
        """Whether the list without the node `name` is committed, and the node once was a member, as far as this node
        knows: the log remembers added nodes, and the configuration file has founders."""
        membership = self._raft.membership
        known = name in self._node.ledger.incarnations or name in self._node.config.members
        return known and membership.committed and name not in membership.names

    def _removed(self, name: str) -> Members:
        members = self._raft.membership.members
        found = next((member for member in members if member.name == name), None)
        if found is None and not self._raft.membership.committed:
            raise Overloaded("another member change is under way: try again later", retry_after_ms=500)
        if found is None:
            raise NotFound(f"there is no node {name!r}; there are {', '.join(member.name for member in members)}")
        rest = tuple(member for member in members if member is not found)
        if not found.voter:
            return rest
        self._settled()
        left = [member.name for member in rest if member.voter]
        if not left:
            raise Conflict(f"{name} is the only voter; removing it would stop the cluster")
        needed = len(left) // 2 + 1
        there = [other for other in left if other == self._raft.name or self._raft.replication.hears(other)]
        if len(there) < needed:
            away = ", ".join(sorted({*left} - {*there}))
            raise Conflict(
                f"removing {name} would stop the cluster: of {', '.join(left)} at least {needed} must answer and vote, "
                f"and only {len(there)} can; bring {away} back first, or remove a node that is gone for good"
            )
        return rest
