"""Metrics as values: docs/reference/metrics.md lists the families, and http/metrics.py writes them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from msgspec import Struct


class Histogram(Struct):
    """Counts per bucket (not cumulative); one more bucket than bounds, for what is above the last."""

    bounds: Sequence[float]
    counts: list[int]
    sum: float = 0.0

    @classmethod
    def of(cls, bounds: Sequence[float]) -> Histogram:
        return cls(bounds, [0] * (len(bounds) + 1))

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Family(NamedTuple):
    """One metric: name, kind and help are public."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


#: What a family shows: one number, a number per values of its labels, or a histogram.
Values = float | Mapping[tuple[str, ...], float] | Histogram
#: Read at scrape time. Counters are of this process, but for those of messages: they are the cluster's.
Measured = list[tuple[Family, Values]]
