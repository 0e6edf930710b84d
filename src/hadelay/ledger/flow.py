"""Flow: how fast, and how much at once. A token bucket that is told the time, and what the limits of one topic leave
to be handed out now.

A bucket is one number, the time up to which its tokens are spent (GCRA): a token appears every `interval_ns`, at most
`depth` of them wait. Whole nanoseconds, so that apply may use it: the same on every node. Intervals are rounded up: a
rate is never exceeded, but by the depth, once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from hadelay.model import NEVER_MS
from hadelay.settings.topic import TopicSettings

_MS, _SECOND = 1_000_000, 1_000_000_000
#: Tokens that may wait, as time: what a pause between two polls, or between two commits, may catch up with.
HAND_OUT_DEPTH_S = 0.1
#: A batch of as many messages as may be published in a second is not refused.
PUBLISH_DEPTH_S = 1.0
#: Who waits for tokens is not woken more often than this; up to 50 messages/s that is for every single one.
_WAKE_NS = 20 * _MS
#: No rate is lower than one message a year.
_LONGEST_NS = 365 * 86_400 * _SECOND
#: No limit.
PLENTY = 1 << 30


class Bucket:
    """Tokens at a rate. `spent_ns`: its whole state; the time at which it was empty, if nothing was taken since."""

    __slots__ = ("depth", "interval_ns", "spent_ns")

    def __init__(self, rate: float, depth_s: float, spent_ns: int) -> None:
        """rate: per second, more than 0."""
        self.interval_ns = max(1, math.ceil(min(_SECOND / rate, _LONGEST_NS)))
        self.depth = max(1, int(rate * depth_s))
        self.spent_ns = spent_ns

    def available(self, now_ms: int) -> int:
        return max(0, min(self.depth, (now_ms * _MS - self.spent_ns) // self.interval_ns))

    def take(self, count: int, now_ms: int) -> None:
        """Negative: they were not used."""
        oldest = now_ms * _MS - self.depth * self.interval_ns
        self.spent_ns = max(self.spent_ns, oldest) + count * self.interval_ns

    def next_ms(self) -> int:
        """When to come again for more."""
        count = min(self.depth, max(1, _WAKE_NS // self.interval_ns))
        return -(-(self.spent_ns + count * self.interval_ns) // _MS)


def empty_bucket(rate: float | None, now_ms: int) -> Bucket | None:
    return None if rate is None else Bucket(rate, HAND_OUT_DEPTH_S, now_ms * _MS)


def publish_bucket(rate: float, spent_ns: int) -> Bucket:
    return Bucket(rate, PUBLISH_DEPTH_S, spent_ns)


class Room(NamedTuple):
    """How many may be handed out, which limit says so, and when it says otherwise (NEVER_MS: not by time alone)."""

    most: int
    cause: str = ""
    again_ms: int = NEVER_MS


UNLIMITED = Room(PLENTY)


class Flow:
    """One topic's limits on hand-outs, as its leader keeps them. Buckets begin empty, so that neither a take-over nor a
    new setting is a burst."""

    __slots__ = ("catch_up", "concurrency", "paused", "rate")

    def __init__(self, settings: TopicSettings, now_ms: int, before: Flow | None = None) -> None:
        """before: what was in force until now; what it let go counts on."""
        self.paused, self.concurrency = settings.paused, settings.concurrency
        self.rate, self.catch_up = empty_bucket(settings.rate, now_ms), empty_bucket(settings.catch_up_rate, now_ms)
        if before is not None:
            for new, old in ((self.rate, before.rate), (self.catch_up, before.catch_up)):
                if new is not None and old is not None and new.interval_ns == old.interval_ns:
                    new.spent_ns = old.spent_ns

    def room(self, held: int, overdue: bool, now_ms: int) -> Room:
        """held: leased, or offered and not refused yet. overdue: of messages that the catch-up rate is for."""
        if self.paused:
            return Room(0, "paused")
        room = UNLIMITED
        if self.concurrency is not None:
            room = Room(max(0, self.concurrency - held), "concurrency")
        for cause, bucket in (("rate", self.rate), ("catch_up_rate", self.catch_up if overdue else None)):
            if bucket is not None and (count := bucket.available(now_ms)) < room.most:
                room = Room(count, cause, bucket.next_ms())
        return room

    def take(self, count: int, overdue: bool, now_ms: int) -> None:
        """So many are offered; negative: they were refused."""
        for bucket in (self.rate, self.catch_up if overdue else None):
            if bucket is not None:
                bucket.take(count, now_ms)


def is_limited(settings: TopicSettings) -> bool:
    """The topic is paused, or has a limit that may hold its messages back when they are due."""
    return settings.paused or (settings.rate, settings.catch_up_rate, settings.concurrency) != (None, None, None)


def flow_of(settings: TopicSettings, now_ms: int, before: Flow | None = None) -> Flow | None:
    """None for a topic without limits, as most are."""
    return Flow(settings, now_ms, before) if is_limited(settings) else None
