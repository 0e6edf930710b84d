"""Owed messages: due, neither settled nor leased, and of an existing topic. Only this module decides which messages are
owed."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable

import numpy as np

from hadelay.codec.formats import INDEX, RECORD_SIZE, SECONDS_PER_HOUR, U32, Mask, Rows
from hadelay.codec.linking import INDEX_CRC
from hadelay.codec.meta import Filter, unpack
from hadelay.errors import DamagedFile
from hadelay.ledger.hours.hourstate import indexes_of, is_in
from hadelay.ledger.hours.lookup import expired
from hadelay.ledger.state import Ledger
from hadelay.model import DEAD_HOURS, HOUR_MS


class Owed:
    def __init__(self, ledger: Ledger, on_spoiled: Callable[[int, U32], None]) -> None:
        """on_spoiled(hour, indexes): called with index entries that are damaged, or whose records are damaged."""
        self.ledger, self.store, self._on_spoiled = ledger, ledger.store, on_spoiled

    def look(self, hour: int, indexes: U32, *, blocked: bool = False) -> tuple[Rows, Mask]:
        """INDEX rows of these entries of an hour, and a mask of the entries that are still owed (to be delivered).
        blocked: whether the mask includes blocked entries."""
        if not self.store.count(hour):
            # The hour's files are deleted, so all its entries are settled, even if windows still have some of them.
            return np.zeros(len(indexes), INDEX), np.zeros(len(indexes), np.bool_)
        rows = self.store.entries(hour, indexes, verify=False)
        bad = INDEX_CRC.bad(rows)
        if len(bad):
            # Do not offer damaged entries: apply would read them for a grant, and would stop the node.
            self._on_spoiled(hour, indexes[bad])
            rows = rows.copy()
            rows["topic"][bad] = 0
        owed = self.among(hour, rows, blocked=blocked)
        owed[bad] = False
        return rows, owed

    def among(self, hour: int, rows: Rows, *, blocked: bool = False) -> Mask:
        """Mask of the INDEX rows that are to be delivered: not settled, leased, blocked or expired, and not cancelled
        with their topic. blocked: whether blocked rows are in the mask, too."""
        owed = self.ledger.topics.owed(rows) & ~expired(self.ledger, rows, self.ledger.now_ms)
        hour_state = self.ledger.hours.get(hour)
        if hour_state is None:
            return owed if self.store.count(hour) else np.zeros(len(rows), np.bool_)
        if hour_state.blocked and not blocked:
            owed = owed & ~is_in(rows["index"], hour_state.blocked)
        return owed & ~is_in(rows["index"], hour_state.settled, hour_state.leased)

    def fewer(self, hour: int, count: int) -> bool:
        """Whether the hour has blocked index entries, and fewer than `count` other open ones: faster to search."""
        found = self.ledger.hours.get(hour)
        if found is None or not found.blocked:
            return False
        return self.ledger.open_entries(hour) - len(found.blocked) < count

    def unblocked(self, hour: int) -> U32:
        """Numbers of the hour's index entries that are neither settled, leased nor blocked."""
        found = self.ledger.hours[hour]
        return indexes_of((found.settled | found.leased | found.blocked).flip(0, self.store.count(hour)))

    def next_second(self, second: int, now_ms: int) -> int | None:
        """First second (since 1970), from `second` on, that has begun and has unsettled entries; None if there is
        none."""
        hour, slot = divmod(second, SECONDS_PER_HOUR)
        found = self._open_second(hour, slot)
        if found is not None:
            return found
        later = [h for h, s in self.ledger.hours.items() if h > hour and s.open_seconds is not None]
        if now_ms // HOUR_MS > self.ledger.now_hour:
            # Also search hours that began after the last log entry. The ledger's counts of unsettled entries lack these
            # hours: it begins to count an hour when it applies the first entry of that hour.
            hours = self.store.hours()
            first = max(hour, self.ledger.now_hour) + 1
            later += hours[bisect_left(hours, first) : bisect_right(hours, min(now_ms // HOUR_MS, DEAD_HOURS - 1))]
        return next((at for h in sorted(set(later)) if (at := self._open_second(h, 0)) is not None), None)

    def _open_second(self, hour: int, slot: int) -> int | None:
        hour_state = self.ledger.hours.get(hour)
        counts = hour_state.open_seconds if hour_state is not None else None
        if counts is None:
            if hour <= self.ledger.now_hour or not self.store.count(hour):
                return None
            counts = self.store.heads(hour).count
        used = counts[slot:] > 0
        at = int(used.argmax())
        return hour * SECONDS_PER_HOUR + slot + at if used[at] else None

    def passes(self, wanted: Filter | None, hour: int, row: np.void) -> bool:
        """Whether the tags in a message's record match the filter. Reports a damaged record, which never matches."""
        if wanted is None:
            return True
        try:
            record = self.store.record(hour, int(row["offset"]), int(row["size"]), verify=True)
        except DamagedFile:
            self._on_spoiled(hour, row["index"].reshape(1))
            return False
        meta_size = int.from_bytes(record[4:8], "little")
        return wanted.matches(unpack(record[RECORD_SIZE : RECORD_SIZE + meta_size]).tags)
