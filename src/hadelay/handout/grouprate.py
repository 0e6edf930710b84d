"""The setting group_rate: two hand-outs of a message group are at least an interval of 1 / group_rate apart.

The leader counts, per topic. A group has one token, which it spends with a hand-out and gets back an interval later: a
bucket of one token is what makes "at most n per second" true for every second, not only on average. The interval counts
from the hand-out itself (the grant is committed and its messages are due), not from the offer; until then the group
gets no other offer. A new leader does not know the last hand-outs of groups, so it begins with empty buckets: it hands
out nothing of the topic for an interval.

The next message of such a group *rests*: it leaves its windows, in a heap, until its group has a token (rests.py).
"""

import heapq
import math

from hadelay.codec.commandtypes import MAX_AHEAD_MS

#: Limit of groups whose tokens are remembered. At the limit, hand-outs of the topic stop until the first of these
#: groups has its token again.
_REMEMBERED = 1 << 18


class GroupRate:
    """Tokens of the message groups of one topic, and the messages that wait until their group has a token. Times are
    cluster time in ms."""

    __slots__ = ("_free_ms", "again_ms", "busy", "interval_ms", "resting")

    def __init__(self, rate: float, began_ms: int) -> None:
        """rate: tokens per second. began_ms: time from which this leader knows all hand-outs."""
        self.interval_ms = _interval_ms(rate)
        #: Time until which hand-outs of the topic stop, on the dispatcher's clock, which is up to MAX_AHEAD_MS ahead of
        #: cluster time.
        self.again_ms = began_ms + self.interval_ms + MAX_AHEAD_MS
        #: Group → time when it has its token again; nearly in the order of these times.
        self._free_ms: dict[int, int] = {}
        #: Groups with a message in an offer that is neither granted nor refused yet.
        self.busy: set[int] = set()
        #: Index entries of messages that wait until their group has a token: heap of (time of the next check, entry).
        self.resting: list[tuple[int, int]] = []

    def change(self, rate: float | None, now_ms: int) -> bool:
        """Use this rate from now on; None: no rate. Returns whether the rate has changed; if so, the caller has
        to check all waiting messages again now."""
        interval_ms = 0 if rate is None else _interval_ms(rate)
        if interval_ms == self.interval_ms:
            return False
        self.interval_ms = interval_ms
        self.again_ms = now_ms + interval_ms + MAX_AHEAD_MS if interval_ms else 0
        self._free_ms.clear()
        self.resting = sorted((0, entry) for _, entry in self.resting)
        return True

    def free_ms(self, group: int, now_ms: int) -> int:
        """Time at which the group has its token again. While an offer of the group is undecided, that time is unknown:
        the result is one interval from now, and the caller checks again then."""
        return now_ms + self.interval_ms if group in self.busy else self._free_ms.get(group, 0)

    def rest(self, entry: int, until_ms: int) -> None:
        heapq.heappush(self.resting, (until_ms, entry))

    def woken(self, now_ms: int) -> list[int]:
        """Remove and return the entries that had to wait until now_ms or earlier, in the order of these times."""
        found = []
        while self.resting and self.resting[0][0] <= now_ms:
            found.append(heapq.heappop(self.resting)[1])
        return found

    def stop_until(self, at_ms: int) -> None:
        """Stop hand-outs of the topic until cluster time is at_ms."""
        self.again_ms = max(self.again_ms, at_ms + MAX_AHEAD_MS)

    def decided(self, group: int, handed_ms: int | None) -> None:
        """Note that the offer of the group was decided. handed_ms: time of the hand-out; None: the message was not
        handed out."""
        self.busy.discard(group)
        if handed_ms is None or not self.interval_ms:
            return
        known = self._free_ms
        known.pop(group, None)
        # Both ends of an interval are rounded down to ms: add 1 ms, so that no interval is too short.
        known[group] = handed_ms + self.interval_ms + 1
        while (first := next(iter(known))) != group and known[first] <= handed_ms:
            del known[first]
        if len(known) >= _REMEMBERED:
            self.stop_until(known[first])


def changed(before: GroupRate | None, rate: float | None, began_ms: int, now_ms: int) -> tuple[GroupRate | None, bool]:
    """Apply new or changed settings of a topic. Returns (the topic's GroupRate, None if it never had a rate; whether
    to check its waiting messages again now). began_ms: time from which on this leader knows all hand-outs."""
    if before is None:
        return (None if rate is None else GroupRate(rate, began_ms)), False
    return before, before.change(rate, now_ms)


def _interval_ms(rate: float) -> int:
    return math.ceil(1000 / rate)
