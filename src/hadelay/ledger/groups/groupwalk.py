"""Examines one message group: since when its blocked messages wait, and whether the right messages are blocked (Rule G
in ledger/groups/messagegroups.py).

The leader walks over the groups that have blocked messages, some at a time (server/delivery/groupwalk.py). Each step
costs the same, however many messages are blocked.
"""

from typing import NamedTuple

from hadelay.ledger.groups.messagegroups import (
    BEHIND,
    GROUP,
    GROUP_KEY,
    GROUPQ,
    PLACE,
    POSITION,
    Group,
    Head,
    is_live,
    unpack_group,
)
from hadelay.ledger.state import Ledger


class Wait(NamedTuple):
    """The wait of a group's blocked messages: since when, for which message, and whether Rule G is violated."""

    #: Time, in Unix ms, from which on the first blocked message is due but waits; in the future if it is not due yet.
    since_ms: int
    #: Violation of Rule G, in words: the wrong messages are blocked, which is a bug. "" if there is none.
    fault: str
    #: Number of blocked messages.
    blocked: int = 0
    #: First unblocked message of the group, for which the blocked ones wait. None only if the group violates Rule G.
    head: Head | None = None


def next_group(ledger: Ledger, start: bytes) -> tuple[bytes | None, bytes]:
    """Find the next group, by key from `start` on, that has blocked messages, or had some since the last checkpoint.
    Returns (key of the group, key at which to continue). The first key is None if the next rows belong to a purged or
    deleted topic; the second is empty at the end of the table."""
    row = ledger.tables.next_key(GROUPQ, start)
    if row is None:
        return None, b""
    key = row[: GROUP_KEY.size]
    if is_live(ledger, key):
        return key, key + BEHIND
    number, floor, _ = GROUP_KEY.unpack(key)
    live = ledger.topics[number].floor
    return None, GROUP_KEY.pack(number, live, 0) if floor < live else GROUP_KEY.pack(number + 1, 0, 0)


def wait_of(ledger: Ledger, key: bytes) -> Wait | None:
    """Describe the wait of the blocked messages of the group with this key; None if the group has no blocked
    messages."""
    stored = ledger.tables.get(GROUP, key) if is_live(ledger, key) else None
    group = None if stored is None else unpack_group(stored)
    if group is None or not group.blocked:
        return None
    found = ledger.tables.range(GROUPQ, key + POSITION.pack(*group.lowest), key + BEHIND, 1)
    if not found:
        return Wait(0, f"{group.blocked} messages count as blocked, and none is")
    row, place = found[0]
    first = Head(*POSITION.unpack_from(row, GROUP_KEY.size), *PLACE.unpack(place))
    # A blocked message that is due earlier than a leased one was published after that lease began. It waits since its
    # own due time or that of the first unblocked message, whichever is later.
    since_ms = max(first.order_ms, min((head.order_ms for head in group.heads), default=0))
    return Wait(since_ms, _fault(ledger, group, first), group.blocked, next(iter(group.heads), None))


def _fault(ledger: Ledger, group: Group, first: Head) -> str:
    """Describe how the group violates Rule G (which of its messages are blocked); "" if it does not. Checks the group's
    unblocked messages, and `first`, its first blocked message."""
    if len(group.heads) < group.limit:
        return f"{group.blocked} messages are blocked by {len(group.heads)}, although {group.limit} may be handed out"
    for head in (*group.heads, first):
        hour = ledger.hours.get(head.hour)
        if not ledger.store.count(head.hour) or (hour is not None and hour.ended(head.entry) is not None):
            return f"message {head.id:x} has ended and is still in the group"
        if (hour is not None and head.entry in hour.blocked) != (head is first):
            return f"message {head.id:x} is {'not ' if head is first else ''}blocked"
    return ""
