"""Members of the cluster: a replicated list, changed by one entry at a time (ADR 150)."""

from typing import NamedTuple


class Member(NamedTuple):
    name: str
    #: host:port of the member's node link, on which the members exchange Raft messages.
    address: str
    #: Whether the member votes. A learner (False) gets every entry without a vote until it has caught up.
    voter: bool = True
    #: Whether the member was added to a running cluster. Such a member is no founder: it votes only once the log has
    #: admitted its disk's incarnation (raft/admission.py).
    joined: bool = False


#: Members in the order of their names; never empty, and always with a voter.
Members = tuple[Member, ...]

#: Limit of the number of members of a cluster.
MAX_MEMBERS = 64
#: Smallest incarnation (a number that rises when a node's disk is lost) of an added node; founders begin lower.
JOINED = 2


def is_whole(members: Members) -> bool:
    """Whether a list of members is valid: it has a voter, is sorted by name, and has no name or address twice."""
    names = [member.name for member in members]
    addresses = {member.address for member in members}
    return (
        0 < len(names) <= MAX_MEMBERS
        and names == sorted(set(names))
        and len(addresses) == len(names)
        and all(names)
        and any(member.voter for member in members)
    )
