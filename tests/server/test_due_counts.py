"""Histograms of what is due, against counting message by message; and what a second question costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hadelay.core import commands
from hadelay.model import HOUR_MS
from hadelay.server import counting
from hadelay.server.counting import DueCounts
from hadelay.storage.heads import count_topics, no_counters
from tests.core.world import START_MS, World, draft


class Hours:
    """The part of HourStore that counting asks, over hours in memory."""

    def __init__(self, world: World) -> None:
        self._store = world.store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def derive_some(self, hour: int, *, topics: bool = False) -> int:
        return 0

    def waiting(self) -> Any:
        return np.zeros(0, np.int64), np.zeros(0, np.uint16), np.zeros(0, np.uint32)

    def written(self, hour: int) -> int:
        return self._store.count(hour)  # type: ignore[no-any-return]

    def written_seconds(self, hour: int) -> Any:
        return self._store.heads(hour).count

    def written_minutes(self, hour: int) -> Any:
        return count_topics(no_counters(), self._store.entries(hour, slice(None)))


def due(
    world: World, counts: DueCounts, topic: str | None, step_ms: int, hours: int = 6, start_ms: int = START_MS
) -> list[tuple[int, int]]:
    return rest(counts.count(topic, start_ms, START_MS + hours * HOUR_MS, step_ms))


def rest(slices: Generator[None, None, counting.Counts]) -> list[tuple[int, int]]:
    try:
        while True:
            next(slices)
    except StopIteration as end:
        return list(zip(*end.value, strict=True))


def naive(
    world: World, ids: list[int], topic: str | None, step_ms: int, hours: int, start_ms: int
) -> list[tuple[int, int]]:
    unit = 1_000 if topic is None else 60_000
    found: Counter[int] = Counter()
    for message_id in ids:
        view = world.state.describe(message_id, START_MS + world.now)
        if view is not None and view.state in ("scheduled", "ready", "leased") and topic in (None, view.topic):
            second = int(world.store.entries(view.hour, np.array([view.index]))["second"][0])
            at = view.hour * HOUR_MS + second * 1_000
            at -= at % unit
            if start_ms <= at < START_MS + hours * HOUR_MS:
                found[start_ms + (at - start_ms) // step_ms * step_ms] += 1
    return sorted(found.items())


@settings(deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["publish", "cancel", "ack", "nack", "clock"]),
            st.lists(st.integers(0, 20), min_size=1, max_size=8),
            st.sampled_from([0, 900, 61_000, HOUR_MS, 2 * HOUR_MS]),
        ),
        max_size=12,
    ),
    few=st.sampled_from([1, 8_192]),
    fold=st.sampled_from([0, 5, 4_096]),
    forget=st.sampled_from([5, 65_536]),
    start=st.sampled_from([0, -1, 500, 59_999, 90_500, HOUR_MS, 2 * HOUR_MS + 1]),
    hours=st.sampled_from([2, 200]),
)
def test_counts_are_those_of_the_open_messages(
    steps: list[Any], few: int, fold: int, forget: int, start: int, hours: int
) -> None:
    world = World()
    counts = DueCounts(SimpleNamespace(state=world.state, storage=SimpleNamespace(hours=Hours(world))))  # type: ignore[arg-type]
    ids = world.ids(draft(), draft("u", 90_000))
    before = counting._SLICE, counting._FOLD, counting._FORGET
    counting._SLICE, counting._FOLD, counting._FORGET = few, fold, forget
    try:
        for what, numbers, delay in steps:
            some = [ids[-1 - n % len(ids)] for n in numbers]
            if what == "publish":
                ids += world.ids(*(draft("tu"[n % 2], n * delay // 4) for n in numbers))
            elif what == "cancel":
                world.cancel(*some)
            elif what == "clock":
                world.now += delay
                world.one(commands.encode_noop())
            elif ready := [i for i in dict.fromkeys(some) if world.states(i) == ["ready"]]:
                leases = world.lease(*ready)
                world.ack(leases) if what == "ack" else world.nack(leases, delay)
            for topic, step_ms in ((None, 1_000), ("t", 60_000), ("u", 3 * 60_000)):
                within = hours, START_MS + start
                assert due(world, counts, topic, step_ms, *within) == naive(world, ids, topic, step_ms, *within)
    finally:
        counting._SLICE, counting._FOLD, counting._FORGET = before


def test_what_is_settled_is_looked_up_once() -> None:
    world = World()
    read: list[int] = []
    hours = Hours(world)
    entries = world.store.entries

    def noted(hour: int, indexes: Any) -> Any:
        read.append(len(indexes))
        return entries(hour, indexes)

    counts = DueCounts(SimpleNamespace(state=world.state, storage=SimpleNamespace(hours=hours)))  # type: ignore[arg-type]
    ids = world.ids(*(draft(in_ms=HOUR_MS + n) for n in range(10)))
    world.cancel(*ids[:4])
    world.state.store = SimpleNamespace(entries=noted, count=world.store.count)  # type: ignore[assignment]
    assert due(world, counts, None, HOUR_MS) == [(START_MS + HOUR_MS, 6)]
    assert read == [4]
    assert due(world, counts, "t", HOUR_MS) == [(START_MS + HOUR_MS, 6)]
    assert read == [4]
    world.state.store, noting = world.store, world.state.store
    world.cancel(ids[5])  # apply tells
    world.state.store = noting
    assert due(world, counts, "t", HOUR_MS) == [(START_MS + HOUR_MS, 5)]
    assert read == [4]


def test_what_is_forgotten_while_another_hour_is_looked_up_is_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    counts = DueCounts(SimpleNamespace(state=world.state, storage=SimpleNamespace(hours=Hours(world))))  # type: ignore[arg-type]
    ids = world.ids(*(draft(in_ms=hour * HOUR_MS + n) for hour in (1, 2) for n in range(10)))
    world.cancel(ids[0], ids[10])
    monkeypatch.setattr(counting, "_SMALL", 1)
    monkeypatch.setattr(counting, "_FORGET", 2)
    slices = counts.count(None, START_MS, START_MS + 6 * HOUR_MS, 1_000)
    next(slices)
    next(slices)  # both hours are looked up, and told of from here on
    world.cancel(*ids[1:4])  # more than is remembered
    assert sum(count for _, count in rest(slices)) == 15
