"""Token buckets and what a topic's limits leave, told the time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hadelay.ledger.limits.flow import PLENTY, TokenBucket, limits_of, publish_bucket
from hadelay.model import NEVER_MS
from hadelay.settings.topic import TopicSettings


@pytest.mark.parametrize(
    ("rate", "depth", "after_100_ms", "after_a_minute", "next_ms"),
    [
        (5.0, 1, 0, 1, 200),
        (10.0, 1, 1, 1, 100),
        (1_000.0, 100, 100, 100, 20),
        (0.1, 1, 0, 1, 10_000),
        (1e-300, 1, 0, 0, 365 * 86_400_000),
    ],
)
def test_a_bucket(rate: float, depth: int, after_100_ms: int, after_a_minute: int, next_ms: int) -> None:
    bucket = TokenBucket(rate, 0.1, 0)
    assert bucket.depth == depth
    assert bucket.available(0) == 0
    assert bucket.available(100) == after_100_ms
    assert bucket.available(60_000) == after_a_minute
    assert bucket.next_ms() == next_ms


@given(
    rate=st.floats(0.01, 100_000),
    depth_s=st.sampled_from([0.1, 1.0]),
    steps=st.lists(st.tuples(st.integers(0, 3_000), st.integers(0, 500)), max_size=30),
)
def test_never_more_than_the_rate_and_one_depth(rate: float, depth_s: float, steps: list[tuple[int, int]]) -> None:
    bucket, now_ms, taken = TokenBucket(rate, depth_s, 0), 0, 0
    for wait_ms, want in steps:
        now_ms += wait_ms
        count = min(want, bucket.available(now_ms))
        bucket.take(count, now_ms)
        taken += count
        assert taken <= rate * now_ms / 1000 + 1e-6
        assert bucket.available(bucket.next_ms()) >= 1, "whoever is told to come then finds something"


def test_unused_tokens_return_up_to_the_depth() -> None:
    bucket = TokenBucket(10.0, 0.5, 0)
    bucket.take(5, 1_000)
    assert bucket.available(1_000) == 0
    bucket.take(-3, 1_000)
    assert bucket.available(1_000) == 3
    assert bucket.available(5_000) == 5


def test_a_second_of_publishes_may_come_at_once() -> None:
    bucket = publish_bucket(500.0, 0)
    assert bucket.available(10_000) == 500
    bucket.take(500, 10_000)
    assert bucket.available(10_100) == 50


def test_the_strictest_limit_holds() -> None:
    flow = limits_of(TopicSettings(rate=100.0, catch_up_rate=10.0, concurrency=8), 0)
    assert flow is not None
    assert flow.allowance(0, False, 0) == (0, "rate", 20)
    assert flow.allowance(0, False, 1_000) == (8, "concurrency", NEVER_MS)
    assert flow.allowance(0, True, 1_000) == (1, "catch_up_rate", 100)
    assert flow.allowance(8, False, 1_000)[0] == 0
    flow.take(8, False, 1_000)
    assert flow.allowance(0, False, 1_000)[:2] == (2, "rate")


def test_new_settings_are_no_burst() -> None:
    before = limits_of(TopicSettings(rate=10.0), 0)
    assert before is not None
    before.take(1, False, 1_000)
    same = limits_of(TopicSettings(rate=10.0, concurrency=5), 1_000, before)
    assert same is not None
    assert same.allowance(0, False, 1_099)[0] == 0
    assert same.allowance(0, False, 1_100)[0] == 1
    faster = limits_of(TopicSettings(rate=1_000.0), 2_000, same)
    assert faster is not None
    assert faster.allowance(0, False, 2_000)[0] == 0


def test_most_topics_have_no_limits() -> None:
    assert limits_of(TopicSettings(publish_rate=1.0, max_messages=1), 0) is None
    paused = limits_of(TopicSettings(paused=True), 0)
    assert paused is not None
    assert paused.allowance(0, False, 1 << 40) == (0, "paused", NEVER_MS)
    assert PLENTY > 1 << 20
