"""Metrics as values: docs/reference/metrics.md lists the families, and http/metrics.py writes them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from msgspec import Struct


class Histogram(Struct):
    """Counts per bucket, not cumulative; the last bucket is for values above the last bound."""

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
    """One metric; its name, kind and help text are public."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


#: Value of a family: one number, a number per tuple of label values, or a histogram.
Values = float | Mapping[tuple[str, ...], float] | Histogram
#: Values at scrape time. Counters count since the process began, except counters of messages, which the cluster keeps.
Measured = list[tuple[Family, Values]]
