"""Putting together what a consumer gets, and how late it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from hadelay.core.dispatch import LATENESS_BUCKETS_MS, Delivery, Offer
from hadelay.core.formats import INDEX
from hadelay.core.held import HeldGrant
from hadelay.core.lifecycle import FLAG_WAS_DUE
from hadelay.core.ports import HourStore
from hadelay.core.results import GrantResult
from hadelay.core.tokens import LEASE
from hadelay.core.topics import by_topic
from hadelay.server.api import Histogram

_BOUNDS = np.array(LATENESS_BUCKETS_MS)
#: Where each bucket begins and ends.
_LOWS = np.array((0, *LATENESS_BUCKETS_MS))
_HIGHS = np.array((*LATENESS_BUCKETS_MS, LATENESS_BUCKETS_MS[-1]))
#: Upper bounds of hadelay_delivery_delay_seconds.
_DELAYS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
#: How far back a topic's lateness goes, this minute included.
RECENT_MINUTES = 5

Counts = NDArray[np.int64]


def empty(now_ms: int) -> Delivery:
    """Nothing came in time."""
    u4 = np.zeros(0, np.uint32)
    return Delivery(
        0, 0, np.zeros(0, np.uint16), u4, u4, np.zeros(0, np.uint16), np.zeros(0, INDEX), np.zeros(0, np.int64),
        np.zeros(0, np.bool_), now_ms,
    )  # fmt: skip


def first_time(term: int, offer: Offer, result: GrantResult, suspect_ms: int, now_ms: int) -> Delivery:
    """What apply granted of an offer. suspect_ms: whatever was due by then may have been handed out before, by a
    leader that fell before it could say so (interval mode; else 0), as may what was due before it was rescheduled."""
    granted = result.granted
    if granted.all():
        positions = np.arange(len(granted), dtype=np.uint16)
        hours, indexes, rows, attempts = offer.hours, offer.indexes, offer.rows, result.attempts
    else:
        positions = np.flatnonzero(granted).astype(np.uint16)
        hours, indexes, rows = offer.hours[granted], offer.indexes[granted], offer.rows[granted]
        attempts = result.attempts[granted]
    suspect = (rows["deliver_at_ms"] <= suspect_ms) | (rows["flags"] & FLAG_WAS_DUE != 0) & bool(suspect_ms)
    return Delivery(
        term,
        offer.seq,
        positions,
        hours,
        indexes,
        attempts,
        rows,
        np.full(len(positions), result.until_ms, np.int64),
        (attempts > 1) | suspect,
        now_ms,
    )


def again(grant: HeldGrant, store: HourStore) -> tuple[Delivery, NDArray[np.void]]:
    """What is still held of a grant, and the LEASE rows that name it."""
    positions = np.flatnonzero(grant.rows["open"] == 1)
    held = grant.rows[positions]
    rows = np.zeros(len(held), INDEX)
    for hour in np.unique(held["hour"]).tolist():
        mine = held["hour"] == hour
        rows[mine] = store.entries(hour, held["index"][mine])
    leases = np.zeros(len(held), LEASE)
    leases["term"], leases["seq"], leases["pos"] = grant.term, grant.seq, positions
    leases["hour"], leases["index"] = held["hour"], held["index"]
    delivery = Delivery(
        grant.term,
        grant.seq,
        positions.astype(np.uint16),
        held["hour"].copy(),
        held["index"].copy(),
        held["attempt"].copy(),
        rows,
        held["until_ms"].copy(),
        np.ones(len(held), np.bool_),
        0,
    )
    return delivery, leases


def still_held(delivery: Delivery, held: NDArray[np.bool_], until_ms: int, now_ms: int) -> Delivery:
    """Those of a delivery whose leases were extended."""
    names = ("positions", "hours", "indexes", "attempts", "rows", "redelivered")
    until = np.full(np.count_nonzero(held), until_ms, np.int64)
    return delivery._replace(**{name: getattr(delivery, name)[held] for name in names}, until_ms=until, now_ms=now_ms)


class Lateness:
    """Histograms of how long after its deliver_at a message was handed out: of all since the process began, and of each
    topic over the last minutes. A node that takes over begins anew."""

    def __init__(self) -> None:
        #: Not cumulative; one more bucket than bounds, for what is above the last.
        self.counts = [0] * (len(_BOUNDS) + 1)
        self.sum_ms = 0
        #: minute → topic number → counts
        self._minutes: dict[int, dict[int, Counts]] = {}

    def count(self, delivery: Delivery) -> None:
        late = np.maximum(delivery.now_ms - delivery.rows["deliver_at_ms"], 0)
        self.sum_ms += int(late.sum())
        buckets = _BOUNDS.searchsorted(late)
        for bucket in buckets.tolist():
            self.counts[bucket] += 1
        topics, minute = delivery.rows["topic"], self._minute(delivery.now_ms)
        for number, _ in by_topic(topics) if len(topics) else ():
            counts = minute.setdefault(number, np.zeros(len(self.counts), np.int64))
            counts += np.bincount(buckets[topics == number], minlength=len(counts))

    def recent(self, now_ms: int, numbers: Iterable[int] | None = None) -> dict[int, tuple[int, float, float]]:
        """Per topic number (of these, or of all): messages of the last minutes, p50 and p99 of their lateness in ms."""
        self._minute(now_ms)
        minutes = list(self._minutes.values())
        sums: dict[int, Counts] = {}
        for number in dict.fromkeys(chain.from_iterable(minutes)) if numbers is None else numbers:
            counts = [minute[number] for minute in minutes if number in minute]
            if counts:
                sums[number] = sum(counts[1:], counts[0])
        if not sums:
            return {}
        table = np.stack(list(sums.values()))
        columns = table.sum(axis=1), _quantiles(table, 0.5), _quantiles(table, 0.99)
        return dict(zip(sums, zip(*(column.tolist() for column in columns), strict=True), strict=True))

    def _minute(self, now_ms: int) -> dict[int, Counts]:
        now = now_ms // 60_000
        if now not in self._minutes:
            self._minutes = {at: topics for at, topics in self._minutes.items() if at > now - RECENT_MINUTES}
            self._minutes[now] = {}
        return self._minutes[now]


class Delays:
    """The cluster's own part of the lateness: how long a message was due while a receive waited for it. Lateness alone
    cannot say whether a message was late because the cluster was slow or because nobody asked for it."""

    def __init__(self) -> None:
        self.histogram = Histogram.of(_DELAYS_S)

    def count(self, delivery: Delivery, waited_ms: float, is_limited: Callable[[int], bool]) -> None:
        """waited_ms: how long the receive waited. is_limited(topic number): a limit may have held its messages back.

        Only first attempts count: a later one was leased to somebody else for a part of the time since it was due."""
        rows = delivery.rows[delivery.attempts == 1]
        limited = {number for number in set(rows["topic"].tolist()) if is_limited(number)}
        late_ms = np.clip(delivery.now_ms - rows["deliver_at_ms"], 0, max(0.0, waited_ms)).tolist()
        for number, ms in zip(rows["topic"].tolist(), late_ms, strict=True):
            if number not in limited:
                self.histogram.observe(ms / 1000)


def _quantiles(counts: Counts, part: float) -> NDArray[np.float64]:
    """Of each row: within its bucket by linear interpolation, as Prometheus has it; beyond the last bound, that bound.
    No row is all zeros."""
    below = counts.cumsum(axis=1)
    ranks = part * below[:, -1]
    buckets = (below < ranks[:, None]).sum(axis=1)
    rows = np.arange(len(counts))
    inside = counts[rows, buckets]
    low, high = _LOWS[buckets], _HIGHS[buckets]
    found: NDArray[np.float64] = low + (high - low) * (ranks - below[rows, buckets] + inside) / inside
    return found.round(1)
