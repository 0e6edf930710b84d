"""Lateness of hand-outs; the part of it that the cluster itself causes; and the delay of the leader's answers."""

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hadelay.api.service import Histogram
from hadelay.codec.durations import decode, encode
from hadelay.codec.formats import U32, Rows
from hadelay.codec.settlement import leases_in, with_delays
from hadelay.handout.polls import Delivery
from hadelay.ledger.state import Ledger
from hadelay.ledger.topics.topics import by_topic
from hadelay.model import NONE32

#: Bucket bounds of the histogram hadelay_delivery_lateness_seconds, in ms.
LATENESS_BUCKETS_MS = (
    1, 2, 5, 10, 15, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 30_000, 60_000, 120_000, 300_000, 600_000,
    1_800_000, *(hours * 3_600_000 for hours in (1, 3, 6, 12, 24, 48, 96, 168)),
)  # fmt: skip
_BOUNDS = np.array(LATENESS_BUCKETS_MS)
#: Bucket bounds of the histogram hadelay_delivery_delay_seconds.
_DELAYS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
#: Bucket bounds of the histogram hadelay_handout_delay_seconds.
_HANDOUT_DELAYS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
#: Tolerance, as a number of grants: ended grants are forgotten once more grants are remembered than 2 × (grants with
#: open leases) + this number.
_SPARE = 1_024
#: Number of minutes, the present minute included, over which a topic's recent lateness is computed.
RECENT_MINUTES = 5

Counts = NDArray[np.int64]


class Late(NamedTuple):
    """Number of messages that were handed out, and quantiles of their lateness in ms. Quantiles are of the nearest rank
    and at most 0.8 % too high; the maximum is exact."""

    messages: int
    p50_ms: int
    p99_ms: int
    max_ms: int


class _Counted:
    """Lateness of one topic in one minute: number of messages per lateness (rounded to a code), and the maximum in
    ms."""

    __slots__ = ("by_code", "max_ms")

    def __init__(self) -> None:
        self.by_code = Counter[int]()
        self.max_ms = 0

    def add(self, codes: list[int], max_ms: int) -> None:
        self.max_ms = max(self.max_ms, max_ms)
        self.by_code.update(codes)


class LatenessCounts:
    """Lateness of hand-outs after deliver_at: a histogram since the process began, and counts of each topic over the
    last minutes. A node that takes over starts with empty counts."""

    def __init__(self) -> None:
        #: Number of messages per bucket of lateness, not cumulative; the last bucket is above the last bound.
        self.counts = [0] * (len(_BOUNDS) + 1)
        self.sum_ms = 0
        #: minute → topic number → lateness counts of the topic in the minute
        self._minutes: dict[int, dict[int, _Counted]] = {}

    def count(self, delivery: Delivery) -> None:
        late = np.maximum(delivery.now_ms - delivery.rows["deliver_at_ms"], 0)
        self.sum_ms += int(late.sum())
        for bucket in _BOUNDS.searchsorted(late).tolist():
            self.counts[bucket] += 1
        topics, minute, codes = delivery.rows["topic"], self._minute(delivery.now_ms), encode(late)
        for number, count in by_topic(topics) if len(topics) else ():
            mine = slice(None) if count == len(topics) else topics == number
            minute.setdefault(number, _Counted()).add(codes[mine].tolist(), int(late[mine].max()))

    def topics(self, now_ms: int) -> dict[int, None]:
        """Numbers of the topics with hand-outs in the last minutes."""
        self._minute(now_ms)
        return dict.fromkeys(chain.from_iterable(self._minutes.values()))

    def recent(self, now_ms: int, numbers: Iterable[int] | None = None) -> dict[int, Late]:
        """Lateness over the last minutes, by topic number. numbers: the topics; None: all topics with hand-outs."""
        self._minute(now_ms)
        minutes = list(self._minutes.values())
        wanted = self.topics(now_ms) if numbers is None else numbers
        parts = {number: [minute[number] for minute in minutes if number in minute] for number in wanted}
        parts = {number: found for number, found in parts.items() if found}
        if not parts:
            return {}
        codes = [one.by_code for found in parts.values() for one in found]
        owners = np.repeat(np.arange(len(parts)), [sum(len(one.by_code) for one in found) for found in parts.values()])
        code = np.fromiter(chain.from_iterable(codes), np.int64, len(owners))
        count = np.fromiter(chain.from_iterable(one.values() for one in codes), np.int64, len(owners))
        largest = np.array([max(one.max_ms for one in found) for found in parts.values()])
        columns = _ranked(owners, code, count, largest)
        return {number: Late(*row) for number, row in zip(parts, zip(*columns, strict=True), strict=True)}

    def max_ms(self, now_ms: int) -> int:
        """Largest lateness of the last minutes, in ms; 0 if nothing was handed out in that time."""
        self._minute(now_ms)
        return max((one.max_ms for minute in self._minutes.values() for one in minute.values()), default=0)

    def _minute(self, now_ms: int) -> dict[int, _Counted]:
        now = now_ms // 60_000
        if now not in self._minutes:
            self._minutes = {at: topics for at, topics in self._minutes.items() if at > now - RECENT_MINUTES}
            self._minutes[now] = {}
        return self._minutes[now]


class Delays:
    """The cluster's own part of the lateness: the time for which a message was due while a receive waited for it. (The
    lateness itself is also large when no consumer asks.)"""

    def __init__(self) -> None:
        self.histogram = Histogram.of(_DELAYS_S)

    def count(self, delivery: Delivery, waited_ms: float, is_limited: Callable[[int], bool]) -> None:
        """Count the delays of a delivery's messages. waited_ms: time that the receive waited. is_limited(topic number):
        whether a limit may have delayed the topic's messages. Only first attempts count: before a later attempt, the
        message was leased for a part of the time."""
        numbers = delivery.rows["topic"].tolist()
        limited = {number for number in set(numbers) if is_limited(number)}
        # Most deliveries have few messages, for which this loop is cheaper than one numpy operation.
        now_ms, due, attempts = delivery.now_ms, delivery.rows["deliver_at_ms"].tolist(), delivery.attempts.tolist()
        rows = zip(numbers, due, attempts, strict=True)
        delays = [now_ms - at for number, at, attempt in rows if attempt == 1 and number not in limited]
        for delay_ms, times in Counter(delays).items():  # count equal delays together: they are frequent
            self.histogram.observe(max(0.0, min(delay_ms, waited_ms)) / 1000, times)


class HandoutDelays:
    """Measures the hand-out delay of each lease: the time until the leader's answer was written to the consumer. The
    command that settles the lease contains the delay.

    A grant's time in the log is that of its proposal; its consumer has the message when the answer is written. The
    leader keeps that moment for the open leases, and puts the difference into the settlement (SETTLE,
    ADR 206). A leader that takes over knows none of them, so those hand-outs stay unknown."""

    def __init__(self) -> None:
        #: Histogram of hand-out delays over all terms that this node led.
        self.histogram = Histogram.of(_HANDOUT_DELAYS_S)
        #: (term, number) of a grant → for each of its messages, cluster time at which the answer was written; 0: not
        #: written yet.
        self._at: dict[tuple[int, int], list[int]] = {}

    def forget(self) -> None:
        self._at.clear()

    def answered(
        self, ledger: Ledger, key: tuple[int, int], positions: NDArray[np.integer], due_ms: int, now_ms: int
    ) -> None:
        """Note that the messages at `positions` of the grant `key` were handed out. due_ms: latest due time of these
        messages."""
        known = self._at.setdefault(key, [])
        known.extend([0] * (int(positions.max()) + 1 - len(known)))
        for position in positions.tolist():
            known[position] = now_ms
        grant = ledger.grants.get(key)
        if grant is not None:
            # A message that was granted ahead of its due time counts as handed out at its due time.
            waited_ms = max(0, now_ms - max(grant.granted_at_ms, due_ms))
            self.histogram.observe(waited_ms / 1000, len(positions))
        if len(self._at) > 2 * len(ledger.grants) + _SPARE:
            self._at = {key: at for key, at in self._at.items() if key in ledger.grants}

    def delays_of(self, ledger: Ledger, leases: Rows) -> U32 | None:
        """Hand-out delay in ms of each lease (LEASE rows), NONE32 for an unknown one; None if all are unknown."""
        if not self._at:
            return None
        delays: list[int] = []
        seen, at, grant, grants = (0, 0), list[int](), None, ledger.grants
        columns = leases["term"].tolist(), leases["seq"].tolist(), leases["pos"].tolist()
        for term, seq, position in zip(*columns, strict=True):
            if (key := (term, seq)) != seen:  # look up a grant once for its adjacent leases
                seen, at, grant = key, self._at.get(key, []), grants.get(key)
            if position >= len(at) or not at[position]:
                delays.append(NONE32)
            elif grant is None:  # interval mode hands out a message before its grant is committed
                delays.append(0)
            else:
                delays.append(min(max(0, at[position] - grant.granted_at_ms), NONE32 - 1))
        return np.array(delays, np.uint32) if min(delays, default=NONE32) < NONE32 else None

    def settling(self, ledger: Ledger, command: bytes) -> bytes:
        """If the command is a SETTLE from another node, add the hand-out delays, which only this leader knows, so that
        all replicas record them. Returns the command; any other command is unchanged."""
        leases = leases_in(command)
        delays = None if leases is None else self.delays_of(ledger, leases)
        return command if delays is None else with_delays(command, delays)


def _ranked(owners: Counts, code: Counts, count: Counts, largest: Counts) -> list[list[int]]:
    """Quantiles of the lateness of several topics. owners: position (0, 1, 2, …) of the topic to which each count
    belongs. Returns columns with a value per topic: number of messages, p50, p99, and maximum. Quantiles are of the
    nearest rank."""
    order = np.lexsort((code, owners))
    sums = count[order].cumsum()
    ends = sums[np.searchsorted(owners, np.arange(len(largest)), "right") - 1]
    starts = np.concatenate([[0], ends[:-1]])
    found = [(ends - starts).tolist()]
    for part in (0.5, 0.99):
        ranks = starts + np.maximum(np.ceil(part * (ends - starts)), 1)
        found.append(np.minimum(decode(code[order][sums.searchsorted(ranks)]), largest).tolist())
    return [*found, largest.tolist()]
