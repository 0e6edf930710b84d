"""How late a topic's messages were, over the last minutes."""

from __future__ import annotations

import numpy as np
import pytest

from hadelay.core.formats import INDEX
from hadelay.server.deliveries import RECENT_MINUTES, Lateness, empty

NOW = 1_800_000_000_000


def handed(lateness: Lateness, late_ms: list[int], *, topics: list[int] | None = None, now: int = NOW) -> None:
    rows = np.zeros(len(late_ms), INDEX)
    rows["deliver_at_ms"] = now - np.array(late_ms, np.int64)
    rows["topic"] = topics or [1] * len(late_ms)
    lateness.count(empty(now)._replace(rows=rows))


def test_each_topic_by_itself() -> None:
    lateness = Lateness()
    handed(lateness, [3, 700, 4], topics=[1, 2, 1])
    recent = lateness.recent(NOW)
    assert {number: count for number, (count, _, _) in recent.items()} == {1: 2, 2: 1}
    assert 2 <= recent[1][1] <= recent[1][2] <= 5
    assert 500 < recent[2][1] <= 1_000
    assert sum(lateness.counts) == 3


@pytest.mark.parametrize(
    ("late_ms", "p50", "p99"),
    [
        ([0] * 100, (0, 1), (0, 1)),
        ([3] * 98 + [400] * 2, (2, 5), (250, 500)),
        ([3] * 40 + [30] * 60, (25, 50), (25, 50)),
        ([10**9], (600_000, 600_000), (600_000, 600_000)),
    ],
)
def test_quantiles_lie_in_the_right_bucket(late_ms: list[int], p50: tuple[int, int], p99: tuple[int, int]) -> None:
    lateness = Lateness()
    handed(lateness, late_ms)
    _, half, nearly_all = lateness.recent(NOW)[1]
    assert p50[0] <= half <= p50[1]
    assert p99[0] <= nearly_all <= p99[1]


def test_old_minutes_are_forgotten() -> None:
    lateness = Lateness()
    handed(lateness, [1])
    minute = 60_000
    assert lateness.recent(NOW + (RECENT_MINUTES - 1) * minute)[1][0] == 1
    handed(lateness, [1], now=NOW + 2 * minute)
    assert lateness.recent(NOW + (RECENT_MINUTES - 1) * minute)[1][0] == 2
    assert lateness.recent(NOW + RECENT_MINUTES * minute)[1][0] == 1
    assert lateness.recent(NOW + 20 * minute) == {}
    assert sum(lateness.counts) == 2


def test_an_empty_answer_counts_nothing() -> None:
    lateness = Lateness()
    lateness.count(empty(NOW))
    assert lateness.recent(NOW) == {}
