"""The two wheels over the disk (S1, S2, S5): which hour comes next, and which second of the hours that are open.

The hour wheel knows the hours that have entries; the second wheel has one slot for each of an hour's 3600 seconds,
filled from the hour's heads. Slots in use also stand in a heap ("precise advance", S5), so an idle cluster sleeps
until exactly the next one, and 48 empty hours cost nothing. A second near enough becomes a `Second`: its messages in
the order of their milliseconds, sorted once.

Seconds are counted since 1970 here: hour × 3600 + second of the hour.
"""

from __future__ import annotations

import heapq
from collections import Counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.formats import SECONDS_PER_HOUR
from hadelay.model import NEVER_MS

#: So many late arrivals at once are worth a new sort; fewer go into the heap.
_BULK = 256


class SecondWheel:
    """3600 slots of one hour. A slot is waiting when the second has entries that were not loaded yet."""

    def __init__(self, hour: int, count: NDArray[np.uint32], from_second: int = 0) -> None:
        self.hour = hour
        slots = (np.flatnonzero(count[from_second:]) + from_second).tolist()
        self._heap: list[int] = slots  # ascending is a heap already
        self._waiting = bytearray(SECONDS_PER_HOUR)
        for slot in slots:
            self._waiting[slot] = 1

    def waits(self, slot: int) -> bool:
        return bool(self._waiting[slot])

    def mark(self, slot: int) -> None:
        """The slot has something to load."""
        if not self._waiting[slot]:
            self._waiting[slot] = 1
            heapq.heappush(self._heap, slot)

    def first(self) -> int | None:
        """The earliest waiting slot."""
        return self._heap[0] if self._heap else None

    def take(self) -> int:
        slot = heapq.heappop(self._heap)
        self._waiting[slot] = 0
        return slot


class HourWheel:
    """Hours that have entries and are not open yet."""

    def __init__(self) -> None:
        self._heap: list[int] = []
        self._known: set[int] = set()

    def add(self, hour: int) -> None:
        if hour not in self._known:
            self._known.add(hour)
            heapq.heappush(self._heap, hour)

    def first(self) -> int | None:
        return self._heap[0] if self._heap else None

    def take(self) -> int:
        """The hand reaches the earliest hour: its second wheel is set up now."""
        hour = heapq.heappop(self._heap)
        self._known.discard(hour)
        return hour


class Batch(NamedTuple):
    """Messages of one hour, filed under one second, in the order in which they fall due."""

    second: int
    indexes: NDArray[np.uint32]
    topics: NDArray[np.uint32]


class Second:
    """One loaded second. Rows come in any order, while it is walked and afterwards; `take` hands them out by ms."""

    def __init__(self, second: int, limit: int) -> None:
        """limit: rows kept; beyond it the earliest stay, and `overflow` counts the others by topic."""
        self.second = second
        self.limit = limit
        #: All rows that the heads had at loading time have been added.
        self.loaded = False
        #: How many rows of which topics were left out, to be found by a scan.
        self.overflow: Counter[int] = Counter()
        self.size = 0
        self.next_ms = NEVER_MS
        self._chunks: list[tuple[NDArray[np.int64], NDArray[np.uint32], NDArray[np.uint32]]] = []
        self._pending = 0
        self._started = False
        self._due = np.zeros(0, np.int64)
        self._indexes = np.zeros(0, np.uint32)
        self._topics = np.zeros(0, np.uint32)
        self._late: list[tuple[int, int, int]] = []  # (deliver_at_ms, index, topic): a small heap

    @property
    def hour(self) -> int:
        return self.second // SECONDS_PER_HOUR

    @property
    def start_ms(self) -> int:
        return self.second * 1000

    def add(self, rows: NDArray[np.void]) -> None:
        """INDEX rows of this second."""
        if not len(rows):
            return
        self.size += len(rows)
        due = rows["deliver_at_ms"]
        self.next_ms = min(self.next_ms, int(due.min()))
        if self._started and len(rows) < _BULK:
            # What was sorted stays sorted.
            for item in zip(due.tolist(), rows["index"].tolist(), rows["topic"].tolist(), strict=True):
                heapq.heappush(self._late, item)
            return
        self._chunks.append((due.copy(), rows["index"].copy(), rows["topic"].copy()))
        self._pending += len(rows)
        if self._pending + len(self._due) > 2 * self.limit:
            self._sort()

    def take(self, now_ms: int) -> Batch | None:
        """Remove and return what is due at now_ms."""
        if self.next_ms > now_ms:
            return None
        self._started = True
        if self._chunks:
            self._sort()
        count = int(self._due.searchsorted(now_ms, "right"))
        indexes, topics = self._indexes[:count], self._topics[:count]
        self._due, self._indexes, self._topics = self._due[count:], self._indexes[count:], self._topics[count:]
        late = self._late
        if late and late[0][0] <= now_ms:
            popped = []
            while late and late[0][0] <= now_ms:
                popped.append(heapq.heappop(late))
            indexes = np.append(indexes, np.array([item[1] for item in popped], np.uint32))
            topics = np.append(topics, np.array([item[2] for item in popped], np.uint32))
        self.size -= len(indexes)
        self._look_ahead()
        return Batch(self.second, indexes, topics)

    def forget(self, topic: int) -> None:
        """The topic was deleted."""
        self._sort()
        keep = self._topics != topic
        self._due, self._indexes, self._topics = self._due[keep], self._indexes[keep], self._topics[keep]
        self._late = [item for item in self._late if item[2] != topic]
        heapq.heapify(self._late)
        self.size = len(self._due) + len(self._late)
        self.overflow.pop(topic, None)
        self._look_ahead()

    def _look_ahead(self) -> None:
        self.next_ms = int(self._due[0]) if len(self._due) else NEVER_MS
        if self._late:
            self.next_ms = min(self.next_ms, self._late[0][0])

    def _sort(self) -> None:
        chunks = [(self._due, self._indexes, self._topics), *self._chunks]
        self._chunks, self._pending = [], 0
        due, indexes, topics = (np.concatenate(column) for column in zip(*chunks, strict=True))
        # By index within a millisecond: the order of publishing. One key of both sorts several times faster than two;
        # what was due before this second began is due at once, in any case.
        order = ((np.maximum(due - self.start_ms, -1) << 32) | indexes).argsort()
        if len(order) > self.limit:
            self.overflow.update(topics[order[self.limit :]].tolist())
            self.size -= len(order) - self.limit
            order = order[: self.limit]
        self._due, self._indexes, self._topics = due[order], indexes[order], topics[order]
        self._look_ahead()
