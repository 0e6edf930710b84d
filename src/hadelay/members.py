"""Members of the cluster: a replicated list, changed by one entry at a time (ADR 150)."""

from typing import NamedTuple


class Member(NamedTuple):
    name: str
    #: host:port of the member's node link.
    address: str
    #: False: a learner, which gets every entry without a vote, and becomes a voter when it has caught up.
    voter: bool = True
    #: Added while the cluster ran, so never a founder: its disk has to begin as a new incarnation.
    joined: bool = False


#: Members in the order of their names; never empty, and always with a voter.
Members = tuple[Member, ...]

#: Limit of members.
MAX_MEMBERS = 64
#: Smallest incarnation of a node that was added: above that of the founders.
JOINED = 2


def is_whole(members: Members) -> bool:
    """The list has a voter, is in order, and no name or address stands in it twice."""
    names = [member.name for member in members]
    addresses = {member.address for member in members}
    return (
        0 < len(names) <= MAX_MEMBERS
        and names == sorted(set(names))
        and len(addresses) == len(names)
        and all(names)
        and any(member.voter for member in members)
    )
