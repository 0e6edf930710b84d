"""How late a topic's messages were, over the last minutes."""

from __future__ import annotations

import numpy as np
import pytest

from hadelay.codec.formats import INDEX
from hadelay.handout.polls import Delivery
from hadelay.server.delivery.lateness import RECENT_MINUTES, LatenessCounts

NOW = 1_800_000_000_000


def handed(lateness: LatenessCounts, late_ms: list[int], *, topics: list[int] | None = None, now: int = NOW) -> None:
    rows = np.zeros(len(late_ms), INDEX)
    rows["deliver_at_ms"] = now - np.array(late_ms, np.int64)
    rows["topic"] = topics or [1] * len(late_ms)
    lateness.count(Delivery.empty(now)._replace(rows=rows))


S, H = 1_000, 3_600_000


def test_each_topic_by_itself() -> None:
    lateness = LatenessCounts()
    handed(lateness, [3, 700, 4], topics=[1, 2, 1])
    assert lateness.recent(NOW) == {1: (2, 3, 4, 4), 2: (1, 700, 700, 700)}
    assert lateness.recent(NOW, [2, 3]) == {2: (1, 700, 700, 700)}
    assert sum(lateness.counts) == 3
    assert lateness.max_ms(NOW) == 700


@pytest.mark.parametrize("late_ms", [0, 1, 999, 65 * S, 5 * H, 7 * 24 * H, 10**11])
def test_every_figure_of_one_message_is_its_own_lateness(late_ms: int) -> None:
    lateness = LatenessCounts()
    handed(lateness, [late_ms])
    assert lateness.recent(NOW) == {1: (1, late_ms, late_ms, late_ms)}
    assert lateness.max_ms(NOW) == late_ms


@pytest.mark.parametrize(
    ("late_ms", "p50", "p99"),
    [
        ([0] * 100, 0, 0),
        ([3] * 98 + [400] * 2, 3, 400),
        ([3] * 40 + [30] * 60, 30, 30),
        ([5 * S, 65 * S], 5 * S, 65 * S),
        ([10 * S] * 50 + [5 * H] * 50, 10 * S, 5 * H),
        ([S] * 99 + [5 * H], S, S),
    ],
)
def test_quantiles_are_of_the_nearest_rank(late_ms: list[int], p50: int, p99: int) -> None:
    lateness = LatenessCounts()
    for one in late_ms:
        handed(lateness, [one])
    handed(lateness, [7] * 5, topics=[2] * 5)
    count, half, nearly_all, largest = lateness.recent(NOW)[1]
    assert (count, largest) == (len(late_ms), max(late_ms))
    assert p50 <= half <= 1.008 * p50
    assert p99 <= nearly_all <= 1.008 * p99


def test_the_histogram_tells_hours_and_days_apart() -> None:
    lateness = LatenessCounts()
    for late_ms in (65 * S, 5 * H, 20 * H, 3 * 24 * H, 6 * 24 * H, 8 * 24 * H):
        handed(lateness, [late_ms])
    assert [count for count in lateness.counts if count] == [1] * 6


def test_old_minutes_are_forgotten() -> None:
    lateness = LatenessCounts()
    handed(lateness, [1])
    minute = 60_000
    assert lateness.recent(NOW + (RECENT_MINUTES - 1) * minute)[1][0] == 1
    handed(lateness, [1], now=NOW + 2 * minute)
    assert lateness.recent(NOW + (RECENT_MINUTES - 1) * minute)[1][0] == 2
    assert lateness.recent(NOW + RECENT_MINUTES * minute)[1][0] == 1
    assert lateness.recent(NOW + 20 * minute) == {}
    assert sum(lateness.counts) == 2


def test_an_empty_answer_counts_nothing() -> None:
    lateness = LatenessCounts()
    lateness.count(Delivery.empty(NOW))
    assert lateness.recent(NOW) == {}
