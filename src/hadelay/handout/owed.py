"""What is owed: due, neither settled nor leased, and of a topic that still exists. The only place that asks index,
bitmaps and topics together.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.formats import INDEX, SECONDS_PER_HOUR
from hadelay.codec.linking import INDEX_CRC
from hadelay.ledger.hourstate import bitmap, indexes_of
from hadelay.ledger.lookup import expired
from hadelay.model import DEAD_HOURS, HOUR_MS

if TYPE_CHECKING:
    from hadelay.ledger.state import DelayState

#: Below this many, asking the bitmaps one by one is quicker than making a bitmap.
_FEW = 64


class Owed:
    def __init__(self, state: DelayState) -> None:
        self.state, self.store = state, state.store
        #: Told (hour, indexes) of entries in a window that do not verify any more.
        self.on_spoiled: Callable[[int, NDArray[np.uint32]], None] = lambda hour, indexes: None

    def mask(self, hour: int, rows: NDArray[np.void]) -> NDArray[np.bool_]:
        """Which of these INDEX rows are neither settled nor leased, nor of a deleted topic, nor past their TTL."""
        owed = self.state.topics.owed(rows) & ~expired(self.state, rows, self.state.now_ms)
        hour_state = self.state.hours.get(hour)
        if hour_state is None:
            return owed if self.store.count(hour) else np.zeros(len(rows), np.bool_)
        settled, leased = hour_state.settled, hour_state.leased
        indexes = rows["index"]
        if len(indexes) < _FEW:
            taken = [i in settled or i in leased for i in indexes.tolist()]
            return owed & ~np.array(taken, np.bool_) if any(taken) else owed
        bits = bitmap(indexes)
        gone = (bits & settled) | (bits & leased)
        return owed & ~np.isin(indexes, indexes_of(gone)) if gone else owed

    def look(self, hour: int, indexes: NDArray[np.uint32]) -> tuple[NDArray[np.void], NDArray[np.bool_]]:
        if not self.store.count(hour):
            # Retired: everything was settled, or carried away, while it stood in a window.
            return np.zeros(len(indexes), INDEX), np.zeros(len(indexes), np.bool_)
        rows = self.store.entries(hour, indexes, verify=False)
        bad = INDEX_CRC.bad(rows)
        if len(bad):
            # It was good when its second was loaded. Proposing it would make apply read it, and stop.
            self.on_spoiled(hour, indexes[bad])
            fine = np.ones(len(rows), np.bool_)
            fine[bad] = False
            rows = rows.copy()
            rows["topic"][bad] = 0
            return rows, self.mask(hour, rows) & fine
        return rows, self.mask(hour, rows)

    def next_second(self, second: int, now_ms: int) -> int | None:
        """The first second from this one on that has something open, of hours that have begun."""
        hour, slot = divmod(second, SECONDS_PER_HOUR)
        found = self._open_second(hour, slot)
        if found is not None:
            return found
        later = [h for h, s in self.state.hours.items() if h > hour and s.open_seconds is not None]
        if now_ms // HOUR_MS > self.state.now_hour:
            # Hours that began while nothing was committed: apply has not counted them yet.
            hours = self.store.hours()
            first = max(hour, self.state.now_hour) + 1
            later += hours[bisect_left(hours, first) : bisect_right(hours, min(now_ms // HOUR_MS, DEAD_HOURS - 1))]
        return next((at for h in sorted(set(later)) if (at := self._open_second(h, 0)) is not None), None)

    def _open_second(self, hour: int, slot: int) -> int | None:
        hour_state = self.state.hours.get(hour)
        counts = hour_state.open_seconds if hour_state is not None else None
        if counts is None:
            if hour <= self.state.now_hour or not self.store.count(hour):
                return None
            counts = self.store.heads(hour).count
        used = counts[slot:] > 0
        at = int(used.argmax())
        return hour * SECONDS_PER_HOUR + slot + at if used[at] else None
