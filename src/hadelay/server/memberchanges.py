"""Changes of the cluster's members while it runs, and reasons for which the leader refuses them (ADR 150).

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
from hadelay.settings.rules import advertise_problem, is_wildcard, link_problems, split_address

#: Pattern of allowed names of nodes. A name of dots only is refused, because names are part of request paths.
_NAME = re.compile(r"(?!\.+\Z)[A-Za-z0-9._-]{1,64}")
_ADDRESS = re.compile(r"[!-~]{1,255}")
#: Timeout of a member change forwarded to another node, in seconds; equals the commit timeout.
CHANGE_S = 10.0
#: Time in seconds for which a new leader may not have heard of nodes that run: the interval of their notes, plus the
#: time that they need to connect.
_FRESH_S = 3.0


class MemberChanges:
    """Changes the cluster's members; one object per node. Serves the link operation "members": [add or remove, name,
    address]."""

    def __init__(self, node: Node) -> None:
        self._node, self._raft, self._peers = node, node.raft, node.peers
        #: Monotonic time since which this node leads.
        self._leads_since = 0.0
        node.leadership.parts.append(self)
        node.link.handlers["members"] = self._on_change

    def on_leader(self, term: int) -> None:
        self._leads_since = self._node.runtime.monotonic()

    def on_follower(self) -> None:
        """Nothing to do: `_change` checks each time whether this node leads."""

    def _on_change(self, peer: str, payload: Any, reply: Reply) -> None:
        op, name, address = payload
        if op not in ("add", "remove") or not all(isinstance(text, str) for text in payload):
            raise ValueError('members: a change must be ["add" or "remove", name, address]')
        self._change(op, name, address, reply)

    def _change(self, op: str, name: str, address: str, done: Done) -> None:
        """Add a node at an address, or remove one. done(None, None) once the change is committed. Leader only: a leader
        that is to be removed hands over, and answers with NoLeader, so that the caller asks its successor."""

        def judged(refused: HadelayError | None) -> None:
            if refused is not None:
                done(None, refused)
            elif op == "remove" and self._was_removed(name):
                # The node is removed already. Confirm that: another leader may have been elected, and may have added
                # the node again.
                self._raft.read_index(lambda error: done(None, error))
            else:
                self._begin(op, name, address, done)

        refused = self._refusal(op, name, address)
        if refused is None or refused.retryable:
            judged(refused)
        else:
            self._node.leadership.confirm(lambda: self._refusal(op, name, address), judged)

    def _refusal(self, op: str, name: str, address: str) -> HadelayError | None:
        """Reason why this node refuses the change, as far as it knows the state of the cluster; None if it accepts
        it."""
        if not self._node.leading:
            return NoLeader("this node does not lead", retry_after_ms=50)
        if op == "remove" and self._was_removed(name):
            # no refusal: the node is removed already, and the answer to an earlier request may have been lost
            return None
        try:
            members = self._added(name, address) if op == "add" else self._removed(name)
        except HadelayError as refused:
            return refused
        return None if self._leaves(op, name) else self._raft.membership.refusal(members)

    def _begin(self, op: str, name: str, address: str, done: Done) -> None:
        if self._leaves(op, name):
            gone = NoLeader(f"{name} led, and handed over before its removal: ask the new leader", retry_after_ms=50)
            self._node.leadership.transfer(None, lambda error: done(None, error or gone), "it is removed")
        else:
            members = self._added(name, address) if op == "add" else self._removed(name)
            self._raft.membership.propose(members, lambda result, error: done(None, error))

    def _leaves(self, op: str, name: str) -> bool:
        """Whether the change removes this leader itself."""
        return op == "remove" and name == self._raft.name

    def _fresh(self, away: list[str]) -> Overloaded | None:
        """Error for a new leader, which cannot know yet whether nodes that it has not heard of are away; None for an
        older leader."""
        if self._node.runtime.monotonic() - self._leads_since >= _FRESH_S:
            return None
        return Overloaded(
            f"this leader is new and has not heard of {', '.join(away)} yet: try again", retry_after_ms=500
        )

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
        if not port or is_wildcard(host) or not _ADDRESS.fullmatch(address):
            raise BadRequest(f"raft: other nodes cannot reach {address!r}: give the node's host:port in the network")
        for member in self._raft.membership.members:
            if member.name == name:
                raise Conflict(f"{name} is a member already, at {member.address}")
            if member.address == address:
                raise Conflict(f"{address} is the address of {member.name}")
        self._check_reachable(name, address)
        members = self._settled()
        if len(members) >= MAX_MEMBERS:
            raise LimitReached(f"a cluster has at most {MAX_MEMBERS} members")
        return tuple(sorted([*members, Member(name, address, voter=False, joined=True)]))

    def _check_reachable(self, name: str, address: str) -> None:
        """Raise Conflict if, with the new member, some member or client could not reach a member: the same checks by
        which a node refuses to start, as far as this node knows the addresses."""
        addresses = {member.name: member.address for member in self._raft.membership.members} | {name: address}
        for wrong, problem in link_problems(addresses):
            if wrong == name:
                raise Conflict(f"raft: {problem}; give {name}'s address in the network of the other members")
            raise Conflict(
                f"{name} could not reach {wrong} at {addresses[wrong]}: restart {wrong} with an address that others "
                "can reach under raft.listen and [raft.peers]"
            )
        urls = {peer.name: peer.http for peer in self._peers.peers.values()}
        for member, url in (urls | {self._raft.name: self._node.config.advertise}).items():
            if member in addresses and (problem := advertise_problem(url, addresses)):
                raise Conflict(
                    f"clients that ask {name} would be sent to {member} at {url}, and {problem}: restart {member} with "
                    "http.advertise set to a URL that others can reach, then add the member"
                )

    def _was_removed(self, name: str) -> bool:
        """Whether the node `name` was a member once and its removal is committed, as far as this node knows: the log
        remembers added nodes, and the configuration file names the founders."""
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
            missing = sorted({*left} - {*there})
            if (fresh := self._fresh(missing)) is not None:
                raise fresh
            away = ", ".join(missing)
            raise Conflict(
                f"removing {name} would stop the cluster: of {', '.join(left)} at least {needed} must answer and vote, "
                f"and only {len(there)} can; bring {away} back first, or remove a node that is gone for good"
            )
        return rest
