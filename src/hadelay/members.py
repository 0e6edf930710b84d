"""Who belongs to the cluster: a replicated list, changed by one entry at a time (ADR 150)."""

from __future__ import annotations

from typing import NamedTuple


class Member(NamedTuple):
    name: str
    #: host:port of its node link.
    address: str
    #: It votes and counts. Else it learns: it gets every entry, and becomes a voter when it has caught up.
    voter: bool = True
    #: It was added while the cluster ran, so it was never a founder: its disk has to begin as a new incarnation.
    joined: bool = False


#: In the order of their names; never empty, and never without a voter.
Members = tuple[Member, ...]

#: More would not fit into the numbers of nodes in a dispatch log, long before.
MAX_MEMBERS = 64
#: What the incarnation of a node that was added has to be at least: above that of the founders.
JOINED = 2


def is_whole(members: Members) -> bool:
    names = [member.name for member in members]
    addresses = {member.address for member in members}
    return (
        0 < len(names) <= MAX_MEMBERS
        and names == sorted(set(names))
        and len(addresses) == len(names)
        and all(names)
        and any(member.voter for member in members)
    )
