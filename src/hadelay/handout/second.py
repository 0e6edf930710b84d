"""Messages of one loaded second, sorted by due time."""

import heapq
from collections import Counter

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap

from hadelay.codec.formats import SECONDS_PER_HOUR
from hadelay.ledger.hours.hourstate import bitmap, is_in
from hadelay.model import NEVER_MS

#: Minimum number of late rows (added in one call, after the first `take`) for which all rows are sorted again; fewer
#: rows go into a heap.
_BULK = 256


class Second:
    """Messages of one second: rows are added in any order, at any time; `take` returns them by due time."""

    def __init__(self, second: int, limit: int) -> None:
        """second: seconds since 1970. limit: largest number of rows kept, those due first; `overflow` counts the
        others."""
        self.second, self.limit = second, limit
        self.hour, self.start_ms = second // SECONDS_PER_HOUR, second * 1000
        #: True once all rows are added that the hour's index had for this second when loading began.
        self.loaded = False
        #: Number of rows beyond the limit, by topic number; a scan finds them later.
        self.overflow: Counter[int] = Counter()
        #: Indexes of the rows that are still to become ready, those beyond the limit included.
        self.coming = BitMap()
        #: Indexes of rows that will not become ready, because they were settled before they were due, or are blocked.
        self._dropped = BitMap()
        self.size = 0
        self.next_ms = NEVER_MS
        self._chunks: list[tuple[NDArray[np.int64], NDArray[np.uint32], NDArray[np.uint32]]] = []
        self._pending = 0
        self._started = False
        self._due = np.zeros(0, np.int64)
        self._indexes = np.zeros(0, np.uint32)
        self._topics = np.zeros(0, np.uint32)
        #: Heap of the rows that were filed after the others had been sorted: (deliver_at_ms, index, topic).
        self._late: list[tuple[int, int, int]] = []

    def add(self, rows: NDArray[np.void]) -> None:
        if not len(rows):
            return
        self.size += len(rows)
        self.coming |= bitmap(rows["index"])
        due = rows["deliver_at_ms"]
        self.next_ms = min(self.next_ms, int(due.min()))
        if self._started and len(rows) < _BULK:
            # A few late rows go into the heap: sorting all rows again would take longer.
            for item in zip(due.tolist(), rows["index"].tolist(), rows["topic"].tolist(), strict=True):
                heapq.heappush(self._late, item)
            return
        self._chunks.append((due.copy(), rows["index"].copy(), rows["topic"].copy()))
        self._pending += len(rows)
        if self._pending + len(self._due) > 2 * self.limit:
            self._sort()

    def take(self, now_ms: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Remove rows due at now_ms or earlier; returns (their indexes in the hour, topic numbers) by due time."""
        if self.next_ms > now_ms:
            return self._indexes[:0], self._topics[:0]
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
        bits = bitmap(indexes)
        self.coming -= bits
        if self._dropped.intersect(bits):
            ready = ~is_in(indexes, self._dropped)
            self._dropped -= bits
            return indexes[ready], topics[ready]
        return indexes, topics

    def drop(self, indexes: NDArray[np.uint32]) -> bool:
        """Let `take` never return these rows. Returns False if none of them is still to become ready."""
        gone = self.coming & bitmap(indexes)
        self.coming -= gone
        self._dropped |= gone
        return bool(gone)

    def restore(self, index: int) -> bool:
        """Let `take` return a row that was dropped. Returns False if it was not dropped, or if its due time has
        passed."""
        if index not in self._dropped:
            return False
        self._dropped.discard(index)
        self.coming.add(index)
        return True

    def forget(self, topic: int) -> None:
        self._sort()
        keep = self._topics != topic
        late = [item for item in self._late if item[2] == topic]
        gone = bitmap(self._indexes[~keep]) | BitMap([index for _, index, _ in late])
        self.coming -= gone
        self._dropped -= gone
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
        due, indexes, topics = map(np.concatenate, zip(*chunks, strict=True))
        # Sort by due time, then by index (the order of publishing). One combined key sorts several times faster than
        # two keys. Messages due before this second began count as due at its begin.
        order = ((np.maximum(due - self.start_ms, -1) << 32) | indexes).argsort()
        if len(order) > self.limit:
            self.overflow.update(topics[order[self.limit :]].tolist())
            self.size -= len(order) - self.limit
            order = order[: self.limit]
        self._due, self._indexes, self._topics = due[order], indexes[order], topics[order]
        self._look_ahead()
