"""Histograms of what is due, against counting message by message; and what a second question costs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos.sim.disk import SimDisk
from hadelay.codec import commands
from hadelay.codec.commandtypes import Job
from hadelay.ledger.apply import apply_entry
from hadelay.ledger.state import Ledger
from hadelay.ledger.views.describe import describe
from hadelay.model import HOUR_MS
from hadelay.server.service import duecounts as counting
from hadelay.server.service.duecounts import DueCounts
from hadelay.storage import far
from hadelay.storage.heads import count_topics
from hadelay.storage.headsfile import no_counters
from hadelay.storage.hours import DiskHourStore
from tests.ledger.world import START_MS, World, draft
from tests.memory import MemoryNames, MemoryTables
from tests.scale import size


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


def drain(slices: Generator[None, None, list[str]]) -> list[str]:
    try:
        while True:
            next(slices)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def naive(
    world: World, ids: list[int], topic: str | None, step_ms: int, hours: int, start_ms: int, end_ms: int = 0
) -> list[tuple[int, int]]:
    end_ms = end_ms or START_MS + hours * HOUR_MS
    exact = {ms // HOUR_MS for ms in (start_ms, end_ms) if ms % 60_000}
    found: Counter[int] = Counter()
    for message_id in ids:
        view = describe(world.ledger, message_id, START_MS + world.now)
        if view is not None and view.state in ("scheduled", "ready", "leased") and topic in (None, view.topic):
            second = int(world.store.entries(view.hour, np.array([view.index]))["second"][0])
            at = view.hour * HOUR_MS + second * 1_000
            if topic is not None and step_ms % 60_000 == 0 and view.hour not in exact:
                at -= at % 60_000
            if start_ms <= at < end_ms:
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
    start=st.sampled_from([0, -1, 500, 59_999, 90_500, HOUR_MS, 2 * HOUR_MS + 1]),
    hours=st.sampled_from([2, 200]),
)
def test_counts_are_those_of_the_open_messages(steps: list[Any], few: int, start: int, hours: int) -> None:
    world = World()
    counts = DueCounts(SimpleNamespace(ledger=world.ledger, storage=SimpleNamespace(hours=Hours(world))))  # type: ignore[arg-type]
    ids = world.ids(draft(), draft("u", 90_000))
    before, counting._SLICE = counting._SLICE, few
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
            for topic, step_ms in ((None, 1_000), ("t", 60_000), ("u", 3 * 60_000), ("t", 1_000)):
                within = hours, START_MS + start
                assert due(world, counts, topic, step_ms, *within) == naive(world, ids, topic, step_ms, *within)
            if start % 60_000 == 0:
                numbers_of = {one: sum(n for _, n in due(world, counts, one, 60_000, *within)) for one in "tu"}
                largest = sorted((one for one in "tu" if numbers_of[one]), key=lambda one: -numbers_of[one])
                assert drain(counts.largest(within[1], START_MS + hours * HOUR_MS, 4)) == largest
    finally:
        counting._SLICE = before


def test_settled_entries_are_looked_up_once() -> None:
    world = World()
    read: list[int] = []
    hours = Hours(world)
    entries = world.store.entries

    def noted(hour: int, indexes: Any) -> Any:
        read.append(len(indexes))
        return entries(hour, indexes)

    counts = DueCounts(SimpleNamespace(ledger=world.ledger, storage=SimpleNamespace(hours=hours)))  # type: ignore[arg-type]
    ids = world.ids(*(draft(in_ms=HOUR_MS + n) for n in range(10)))
    world.cancel(*ids[:4])
    world.ledger.store = SimpleNamespace(entries=noted, count=world.store.count)  # type: ignore[assignment]
    assert due(world, counts, None, HOUR_MS) == [(START_MS + HOUR_MS, 6)]
    assert read == [4]
    assert due(world, counts, "t", HOUR_MS) == [(START_MS + HOUR_MS, 6)]
    assert read == [4]
    world.ledger.store, noting = world.store, world.ledger.store
    world.cancel(ids[5])
    world.ledger.store = noting
    assert due(world, counts, "t", HOUR_MS) == [(START_MS + HOUR_MS, 5)]
    assert read == [4, 1]


def test_entries_settled_while_another_hour_is_looked_up_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    counts = DueCounts(SimpleNamespace(ledger=world.ledger, storage=SimpleNamespace(hours=Hours(world))))  # type: ignore[arg-type]
    ids = world.ids(*(draft(in_ms=hour * HOUR_MS + n) for hour in (1, 2) for n in range(10)))
    world.cancel(ids[0], ids[10])
    monkeypatch.setattr(counting, "_SMALL", 1)
    slices = counts.count(None, START_MS, START_MS + 6 * HOUR_MS, 1_000)
    next(slices)
    next(slices)  # both hours are looked up
    world.cancel(*ids[1:4])
    assert sum(count for _, count in rest(slices)) == 15


class Filed:
    """The same commands over a real HourStore, which is never read but by counting."""

    def __init__(self, world: World) -> None:
        disk = SimDisk(random.Random(1))
        disk.makedirs("/hours")
        self.store = DiskHourStore(disk, "/hours", 0, far_buffer_bytes=1 << 12)
        self.ledger = Ledger(0, self.store, MemoryTables(), MemoryNames())
        self.ledger.level = world.ledger.level
        self.world, self.applied = world, 0
        self.counts = DueCounts(SimpleNamespace(ledger=self.ledger, storage=SimpleNamespace(hours=self.store)))  # type: ignore[arg-type]

    def catch_up(self) -> None:
        for entry in self.world.entries[self.applied :]:
            self.applied += 1
            apply_entry(self.ledger, self.applied, self.world.term, entry)

    def do(self, what: str, numbers: list[int]) -> None:
        """What a checkpoint, a reader, or an hour that is full does."""
        store = self.store
        if what == "sample":
            store.sample()
        elif what == "some":
            store.write_some()
        elif what == "spill":
            store.checksums()
        elif hours := store.hours():
            store.entries(hours[numbers[0] % len(hours)], slice(None))


@settings(deadline=None, max_examples=size(15, 40))
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(
                [
                    "publish",
                    "publish",
                    "publish",
                    "cancel",
                    "ack",
                    "nack",
                    "clock",
                    "retire",
                    "sample",
                    "some",
                    "spill",
                    "read",
                ]
            ),
            st.lists(st.integers(0, 20), min_size=1, max_size=8),
            st.sampled_from([0, 61_000, HOUR_MS, 5 * HOUR_MS, 30 * HOUR_MS]),
        ),
        max_size=20,
    ),
    batch=st.sampled_from([1, 3, 1_024]),
    slices=st.lists(st.sampled_from(["sample", "some", "spill", "read"]), max_size=6),
    few=st.sampled_from([1, 2_048]),
    ask=st.integers(1, 4),
    start=st.sampled_from([0, 1, 500, 90_500]),
    end=st.sampled_from([200 * HOUR_MS, 5 * HOUR_MS + 1, 5 * HOUR_MS + 1_200_000, 5 * HOUR_MS + 2_400_400]),
)
def test_unwritten_messages_are_counted_once_whenever_they_are_written(
    steps: list[Any], batch: int, slices: list[str], few: int, ask: int, start: int, end: int
) -> None:
    world = World()
    world.checking = False
    filed = Filed(world)
    world.one(commands.encode_topic_put("t", {"max_attempts": 2}))
    ids = world.ids(draft(in_ms=5 * HOUR_MS))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(far, "_BATCH_ROWS", batch)
        patched.setattr(far, "_BATCH_HOURS", batch)
        patched.setattr(counting, "_SMALL", few)
        for at, (what, numbers, delay) in enumerate(steps):
            some = [ids[-1 - n % len(ids)] for n in numbers]
            if what == "publish":
                ids += world.ids(*(draft("tu"[n % 2], delay + n * HOUR_MS // 3) for n in numbers))
            elif what == "cancel":
                world.cancel(*some)
            elif what == "clock":
                world.now += delay
                world.one(commands.encode_noop())
            elif what == "retire":
                for hour in world.store.hours():
                    world.maintain(Job.RETIRE, hour)
            elif what in ("ack", "nack"):
                if ready := [i for i in dict.fromkeys(some) if world.states(i) == ["ready"]]:
                    leases = world.lease(*ready)
                    world.ack(leases) if what == "ack" else world.nack(leases, delay)
            else:
                filed.do(what, numbers)
            filed.catch_up()
            if at % ask:
                continue
            for topic, step_ms in ((None, 1_000), ("t", 60_000), ("u", 3 * 60_000), (None, HOUR_MS)):
                counted = filed.counts.count(topic, START_MS + start, START_MS + end, step_ms)
                expected = naive(world, ids, topic, step_ms, 0, START_MS + start, START_MS + end)
                assert rest(between(counted, filed, slices)) == expected


def between(
    counted: Generator[None, None, counting.Counts], filed: Filed, slices: list[str]
) -> Generator[None, None, counting.Counts]:
    for what in slices:
        try:
            next(counted)
        except StopIteration as end:
            return end.value
        filed.do(what, [0])
        yield
    return (yield from counted)


def test_a_range_that_ends_within_a_second_counts_what_waits_like_what_is_written() -> None:
    """The second at 1 h 20 min begins at the end of the range, which begins half a second after a whole one."""
    world = World()
    filed = Filed(world)
    world.ids(draft(in_ms=5 * HOUR_MS + 1_199_000), draft(in_ms=5 * HOUR_MS + 1_200_000))
    filed.catch_up()
    asked = START_MS + 500, START_MS + 5 * HOUR_MS + 1_200_000, 1_000
    waiting = rest(filed.counts.count(None, *asked))
    filed.do("spill", [0])
    assert waiting == rest(filed.counts.count(None, *asked)) == [(START_MS + 5 * HOUR_MS + 1_198_500, 1)]
