"""What a topic's backoff makes of a failed attempt."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hadelay.ledger.leases.settling import Backoff, waits_ms
from hadelay.settings.topic import Exponential

S, M = 1_000, 60_000


@pytest.mark.parametrize(
    ("backoff", "expected"),
    [
        # Nothing said: at once.
        ((), [0, 0, 0]),
        # A list: one wait per failed attempt, the last one repeats.
        ((10 * S, M, 10 * M), [10 * S, M, 10 * M, 10 * M, 10 * M]),
        ((5 * S,), [5 * S, 5 * S]),
        # Doubled each time, up to a longest.
        (Exponential(S, 10 * S, jitter=0), [S, 2 * S, 4 * S, 8 * S, 10 * S, 10 * S]),
        (Exponential(100, 10 * S, 1.5, 0), [100, 150, 225, 337, 506]),
        (Exponential(S, 10 * S, 1, 0), [S, S, S]),
        (Exponential(S, S, 100, 0), [S, S]),
    ],
)
def test_waits(backoff: Backoff, expected: list[int]) -> None:
    attempts = np.arange(1, len(expected) + 1, dtype=np.uint16)
    assert waits_ms(backoff, attempts, np.zeros(len(expected), np.uint64)).tolist() == expected


def test_attempts_without_end_wait_the_longest_time() -> None:
    for backoff in ((S, M), Exponential(S, M), Exponential(1, M, 1.001, 0)):
        wait = waits_ms(backoff, np.array([65_534], np.uint16), np.array([7], np.uint64))
        assert M <= wait[0] <= 1.15 * M


@given(
    st.integers(1, 10**6), st.integers(0, 10**9), st.floats(1, 100), st.floats(0, 1), st.integers(1, 65_534),
    st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20),
)  # fmt: skip
def test_jitter_lengthens_by_its_part_at_most_and_is_a_matter_of_id_and_attempt(
    least: int, more: int, factor: float, jitter: float, attempt: int, ids: list[int]
) -> None:
    attempts, numbers = np.full(len(ids), attempt, np.uint16), np.array(ids, np.uint64)
    plain = waits_ms(Exponential(least, least + more, factor, 0), attempts, numbers)
    some = waits_ms(Exponential(least, least + more, factor, jitter), attempts, numbers)
    assert (some >= plain).all()
    assert (some <= plain * (1 + jitter) + 1 + plain / 2**20).all()
    one_by_one = [
        waits_ms(Exponential(least, least + more, factor, jitter), attempts[:1], numbers[n : n + 1])[0]
        for n in range(len(ids))
    ]
    assert some.tolist() == one_by_one


def test_jitter_spreads_what_failed_together() -> None:
    ids = np.arange(10_000, dtype=np.uint64)
    waits = waits_ms(Exponential(10 * S, M, 2, 1), np.ones(10_000, np.uint16), ids)
    counts = np.histogram(waits, 10, (10 * S, 20 * S))[0]
    assert counts.min() > 850
    assert counts.max() < 1_150
    again = waits_ms(Exponential(10 * S, M, 2, 1), np.full(10_000, 2, np.uint16), ids)
    assert abs(np.corrcoef(waits, again)[0, 1]) < 0.05
