"""Token buckets that read no clock (callers pass the time), and the limits on hand-outs of one topic.

A bucket is one number, the time up to which its tokens are spent (GCRA): a token appears every `interval_ns`, at most
`depth` of them wait. Times are whole nanoseconds, so that every node computes the same, and apply may use a bucket.
Intervals are rounded up, so a rate is exceeded at most once, by the depth.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from hadelay.model import NEVER_MS
from hadelay.settings.topic import TopicSettings

_MS, _SECOND = 1_000_000, 1_000_000_000
#: Depth of a hand-out bucket, in seconds at its rate: a topic may make up for a short pause between polls or commits.
HAND_OUT_DEPTH_S = 0.1
#: Depth of a publish bucket, in seconds at its rate: one batch may have the messages of a second.
PUBLISH_DEPTH_S = 1.0
#: Minimum time, in ns, between two wake-ups of a topic that waits for tokens; above 50 messages/s, messages share one
#: wake-up.
_WAKE_NS = 20 * _MS
#: Limit of the interval between two tokens, in ns: one message a year.
_LONGEST_NS = 365 * 86_400 * _SECOND
#: Number of messages that stands for "no limit".
PLENTY = 1 << 30


class TokenBucket:
    """Token bucket for a rate. `spent_ns` is its whole state: the time up to which the tokens are spent."""

    __slots__ = ("depth", "interval_ns", "spent_ns")

    def __init__(self, rate: float, depth_s: float, spent_ns: int) -> None:
        """rate: tokens per second, more than 0. depth_s: largest number of tokens, in seconds at this rate."""
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
        """Time in ms at which enough tokens for the next wake-up are available."""
        count = min(self.depth, max(1, _WAKE_NS // self.interval_ns))
        return -(-(self.spent_ns + count * self.interval_ns) // _MS)


def publish_bucket(rate: float, spent_ns: int) -> TokenBucket:
    return TokenBucket(rate, PUBLISH_DEPTH_S, spent_ns)


class Allowance(NamedTuple):
    """Number of messages that may be handed out now; name of the limit that decides; and time, in ms, at which its
    tokens allow more (NEVER_MS if time alone does not)."""

    most: int
    cause: str = ""
    again_ms: int = NEVER_MS


UNLIMITED = Allowance(PLENTY)


class HandoutLimits:
    """Limits on the hand-outs of one topic, and the leader's counts for these limits."""

    __slots__ = ("catch_up", "concurrency", "paused", "rate")
    rate: TokenBucket | None
    catch_up: TokenBucket | None

    def __init__(self, settings: TopicSettings, now_ms: int, before: HandoutLimits | None = None) -> None:
        """before: limits in force until now; their counts of hand-outs continue where the rates are the same."""
        self.paused, self.concurrency = settings.paused, settings.concurrency
        self.rate = _bucket(settings.rate, now_ms, before.rate if before else None)
        self.catch_up = _bucket(settings.catch_up_rate, now_ms, before.catch_up if before else None)

    def allowance(self, taken: int, overdue: bool, now_ms: int) -> Allowance:
        """Number of messages that may be handed out. taken: number of messages that are leased or offered. overdue:
        whether the messages are late, so that the catch-up rate applies, too."""
        if self.paused:
            return Allowance(0, "paused")
        least = UNLIMITED
        if self.concurrency is not None:
            least = Allowance(max(0, self.concurrency - taken), "concurrency")
        for cause, bucket in (("rate", self.rate), ("catch_up_rate", self.catch_up if overdue else None)):
            if bucket is not None and (count := bucket.available(now_ms)) < least.most:
                least = Allowance(count, cause, bucket.next_ms())
        return least

    def take(self, count: int, overdue: bool, now_ms: int) -> None:
        """Take tokens for `count` offered messages; a negative count returns tokens of refused messages."""
        for bucket in (self.rate, self.catch_up if overdue else None):
            if bucket is not None:
                bucket.take(count, now_ms)


def _bucket(rate: float | None, now_ms: int, before: TokenBucket | None) -> TokenBucket | None:
    """Bucket for a rate; None without a rate. The bucket starts empty, so that a take-over or a new setting causes no
    burst; with an unchanged rate the old bucket continues."""
    if rate is None:
        return None
    bucket = TokenBucket(rate, HAND_OUT_DEPTH_S, now_ms * _MS)
    if before is not None and before.interval_ns == bucket.interval_ns:
        bucket.spent_ns = before.spent_ns
    return bucket


def is_limited(settings: TopicSettings) -> bool:
    """Whether the topic is paused, or has a limit that may hold its messages back when they are due."""
    return settings.paused or (settings.rate, settings.catch_up_rate, settings.concurrency) != (None, None, None)


def limits_of(settings: TopicSettings, now_ms: int, before: HandoutLimits | None = None) -> HandoutLimits | None:
    """Limits of a topic; None for a topic without limits, as most are."""
    return HandoutLimits(settings, now_ms, before) if is_limited(settings) else None
