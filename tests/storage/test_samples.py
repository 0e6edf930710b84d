"""A checkpoint's sample: lengths and checksums as of its applied index, whatever else is filed, read, frozen or retired
until its messages are written, and whatever a full disk interrupts."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import NOW, events, messages

from chaos.sim.disk import SimDisk
from hadelay.model import DEAD_HOURS
from hadelay.storage.far import Sample
from hadelay.storage.hours import DiskHourStore
from tests.memory import MemoryHours

HOURS = [
    NOW - 1,
    NOW,
    NOW + 2,
    NOW + 3,
    *range(NOW + 40, NOW + 56),
    NOW + 17_000,
    DEAD_HOURS + NOW,
    DEAD_HOURS + NOW + 720,
]
Row = tuple[int, int, int, int, int, int]


def action(what: str, arg: st.SearchStrategy[Any], weight: int = 1) -> list[st.SearchStrategy[Any]]:
    return weight * [st.tuples(st.just(what), arg)]


lists, hour, nothing = st.lists(st.sampled_from(HOURS), min_size=1, max_size=12), st.sampled_from(HOURS), st.none()
actions = st.one_of(
    *action("file", lists, 8), *action("copy", lists), *action("again", hour), *action("event", hour),
    *action("read", hour, 3), *action("heads", hour), *action("retire", st.sampled_from(HOURS[4:8])),
    *action("sample", nothing, 3), *action("some", nothing), *action("freeze", nothing), *action("checksums", nothing),
    *action("read on a full disk", hour), *action("some on a full disk", hour),
    *action("clock", st.integers(NOW, NOW + 3)),
)  # fmt: skip


class Pair:
    """The store and its model, and the sample whose messages are being written."""

    def __init__(self, far_buffer_bytes: int, seed: int) -> None:
        self.disk = SimDisk(random.Random(1))
        self.disk.makedirs("/hours")
        self.store = DiskHourStore(self.disk, "/hours", 3, far_buffer_bytes=far_buffer_bytes)
        self.model = MemoryHours(3)
        self.store.set_clock(NOW)
        self.clock, self.seed, self.step = NOW, seed, 0
        self.sample: Sample | None = None
        self.expected: dict[int, Row] = {}

    def row_of(self, hour: int) -> Row:
        entries, events, log_bytes, crcs = self.model.sums(hour)
        return log_bytes, entries, events, *crcs

    def do(self, what: str, arg: int | list[int] | None) -> None:
        self.step += 1
        store, model = self.store, self.model
        if isinstance(arg, list):
            live = [hour for hour in arg if hour not in model.retired]
            if live:
                self.file(np.array(live, np.int64), copies=what == "copy")
        elif arg is None:
            self.write(what)
        elif what == "clock" and arg > self.clock:
            self.clock = arg
            store.set_clock(arg)
        elif model.count(arg):
            self.touch(what, arg)

    def file(self, hours: np.ndarray, *, copies: bool) -> None:
        sizes = [(self.seed + i * 7) % 90 for i in range(len(hours))]
        shared = [(self.seed + i) % 4 for i in range(len(hours))] if copies else None
        mine, theirs = (messages(hours, sizes=sizes, seed=self.seed + self.step, copies=shared) for _ in range(2))
        assert self.store.append(*mine).tolist() == self.model.append(*theirs).tolist()

    def touch(self, what: str, hour: int) -> None:
        store, model = self.store, self.model
        if what == "again":
            rows = model.entries(hour, slice(0, 3))
            store.append_again(hour, rows.copy())
            model.append_again(hour, rows.copy())
        elif what == "event":
            store.append_events(hour, events([0]))
            model.append_events(hour, events([0]))
        elif what == "read":
            assert store.entries(hour, slice(None)).tobytes() == model.entries(hour, slice(None)).tobytes()
        elif what == "heads":
            assert (store.heads(hour).last == model.heads(hour).last).all()
        elif what == "retire":
            store.retire(hour)
            model.retire(hour)
        else:
            self.disk.capacity = self.disk.used + self.seed % 7 * 64
            with suppress(OSError):
                if what.startswith("read"):
                    store.entries(hour, slice(None))
                elif self.sample is None:  # a checkpoint that finds no room ends the node
                    store.write_some()
            self.disk.capacity = 1 << 30

    def write(self, what: str) -> None:
        store = self.store
        if what == "sample" and self.sample is None:
            before = {hour: self.row_of(hour) for hour in self.model.hours()}
            self.sample = store.sample()
            self.expected = {hour: before[hour] for hour in self.sample.hours.tolist()}
        elif what == "some" and store.write_some():
            self.check()
        elif what == "freeze" and self.sample is None:
            store.freeze()
        elif what == "checksums":
            sums = store.checksums()
            assert len(sums) == sum(2 + bool(self.model.event_count(hour)) for hour in self.model.hours())

    def check(self) -> None:
        """The sample's messages are written."""
        if self.sample is not None:
            found = {
                hour: row.item()[:6] for hour, row in zip(self.sample.hours.tolist(), self.sample.rows, strict=True)
            }
            assert found == self.expected
            for path in self.store.committed(self.sample):
                self.disk.unlink(path)
        self.sample = None


@pytest.mark.parametrize("far_buffer_bytes", [1 << 9, 1 << 11, 1 << 12, 1 << 16])
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(actions, min_size=10, max_size=50), st.integers(0, 99))
def test_a_sample_is_of_its_index(far_buffer_bytes: int, steps: list[tuple], seed: int) -> None:
    small = {"_BATCH_ROWS": 3, "_BATCH_HOURS": 2, "_FEW_ENTRIES": 8}
    with patch.multiple("hadelay.storage.far", **small):
        pair = Pair(far_buffer_bytes, seed)
        for what, arg in steps:
            pair.do(what, arg)
        while not pair.store.write_some():
            pass
        pair.check()
        for hour in pair.model.hours():
            log_bytes, entries, events_, *crcs = pair.row_of(hour)
            pair.store.heads(hour)
            assert pair.store.sums(hour) == (entries, events_, log_bytes, tuple(crcs))
            assert pair.store.waiting()[0].tolist().count(hour) == 0
        assert pair.store.hours() == pair.model.hours()
