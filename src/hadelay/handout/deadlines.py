"""A priority queue of keys by time, for lease ends, deferred deliveries, poll timeouts and rate limits."""

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

K = TypeVar("K")

#: Limit of stale items (replaced or discarded) in the heap, beyond one for each current key; above it, the heap is
#: rebuilt.
_SPARE = 1_024


class Deadlines(Generic[K]):
    """Heap of keys by time, on any clock. Keys with equal times come out in the order in which they were set. Stale
    items (replaced or discarded) are dropped when they reach the top, or all at once when they outnumber the current
    items."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, K]] = []
        #: Current heap item of each key: (time, sequence number, key).
        self._live: dict[K, tuple[float, int, K]] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, key: object) -> bool:
        return key in self._live

    def __iter__(self) -> Iterator[K]:
        return iter(self._live)

    def set(self, key: K, at: float) -> None:
        """Set the time of a key, in place of the time that was set before."""
        known = self._live.get(key)
        if known is not None and known[0] == at:
            return
        self._count += 1
        item = self._live[key] = at, self._count, key
        heapq.heappush(self._heap, item)
        if len(self._heap) > 2 * len(self._live) + _SPARE:
            self._heap = list(self._live.values())
            heapq.heapify(self._heap)

    def discard(self, key: K) -> None:
        self._live.pop(key, None)

    def due(self, now: float, limit: int | None = None) -> list[K]:
        """Remove and return the keys whose time has come, the earliest first."""
        found: list[K] = []
        heap, live = self._heap, self._live
        while heap and heap[0][0] <= now and len(found) != limit:
            item = heapq.heappop(heap)
            if live.get(item[2]) is item:
                del live[item[2]]
                found.append(item[2])
        return found

    def next(self) -> float | None:
        """The earliest time of all keys; None without keys."""
        heap = self._heap
        while heap and self._live.get(heap[0][2]) is not heap[0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None
