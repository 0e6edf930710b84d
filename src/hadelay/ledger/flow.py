"""Token buckets that are told the time, and the limits of one topic on hand-outs.

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
#: Depth of a hand-out bucket, in seconds at its rate: a pause between two polls, or two commits, may be caught up with.
HAND_OUT_DEPTH_S = 0.1
#: Depth of a publish bucket, in seconds: a batch of as many messages as may be published in a second is not refused.
PUBLISH_DEPTH_S = 1.0
#: Least time between two wake-ups that wait for tokens; up to 50 messages/s each message has a wake-up.
_WAKE_NS = 20 * _MS
#: Longest interval of a rate: one message a year.
_LONGEST_NS = 365 * 86_400 * _SECOND
#: No limit.
PLENTY = 1 << 30


class TokenBucket:
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
        """Spend tokens; a negative count gives tokens back."""
        oldest = now_ms * _MS - self.depth * self.interval_ns
        self.spent_ns = max(self.spent_ns, oldest) + count * self.interval_ns

    def next_ms(self) -> int:
        """When enough tokens for the next wake-up are there, in ms."""
        count = min(self.depth, max(1, _WAKE_NS // self.interval_ns))
        return -(-(self.spent_ns + count * self.interval_ns) // _MS)


def publish_bucket(rate: float, spent_ns: int) -> TokenBucket:
    return TokenBucket(rate, PUBLISH_DEPTH_S, spent_ns)


class Allowance(NamedTuple):
    """Limit of messages that may be handed out now, the setting that limits, and when the limit changes (NEVER_MS: not
    by time alone)."""

    most: int
    cause: str = ""
    again_ms: int = NEVER_MS


UNLIMITED = Allowance(PLENTY)


class HandoutLimits:
    """Limits on the hand-outs of one topic, as the leader counts them."""

    __slots__ = ("catch_up", "concurrency", "paused", "rate")
    rate: TokenBucket | None
    catch_up: TokenBucket | None

    def __init__(self, settings: TopicSettings, now_ms: int, before: HandoutLimits | None = None) -> None:
        """before: limits in force until now, whose hand-outs count on."""
        self.paused, self.concurrency = settings.paused, settings.concurrency
        self.rate = _bucket(settings.rate, now_ms, before.rate if before else None)
        self.catch_up = _bucket(settings.catch_up_rate, now_ms, before.catch_up if before else None)

    def allowance(self, held: int, overdue: bool, now_ms: int) -> Allowance:
        """held: messages leased, or offered and not refused yet. overdue: the catch-up rate counts, too."""
        if self.paused:
            return Allowance(0, "paused")
        least = UNLIMITED
        if self.concurrency is not None:
            least = Allowance(max(0, self.concurrency - held), "concurrency")
        for cause, bucket in (("rate", self.rate), ("catch_up_rate", self.catch_up if overdue else None)):
            if bucket is not None and (count := bucket.available(now_ms)) < least.most:
                least = Allowance(count, cause, bucket.next_ms())
        return least

    def take(self, count: int, overdue: bool, now_ms: int) -> None:
        """Count messages that are offered; negative: that were refused."""
        for bucket in (self.rate, self.catch_up if overdue else None):
            if bucket is not None:
                bucket.take(count, now_ms)


def _bucket(rate: float | None, now_ms: int, before: TokenBucket | None) -> TokenBucket | None:
    """An empty bucket, so that neither a take-over nor a new setting is a burst, or one that goes on at its rate."""
    if rate is None:
        return None
    bucket = TokenBucket(rate, HAND_OUT_DEPTH_S, now_ms * _MS)
    if before is not None and before.interval_ns == bucket.interval_ns:
        bucket.spent_ns = before.spent_ns
    return bucket


def is_limited(settings: TopicSettings) -> bool:
    """The topic is paused, or has a limit that may hold its messages back when they are due."""
    return settings.paused or (settings.rate, settings.catch_up_rate, settings.concurrency) != (None, None, None)


def limits_of(settings: TopicSettings, now_ms: int, before: HandoutLimits | None = None) -> HandoutLimits | None:
    """Limits of a topic; None for a topic without limits, as most are."""
    return HandoutLimits(settings, now_ms, before) if is_limited(settings) else None
