"""What is owed: due, neither settled nor leased, and of a topic that still exists. The only place that asks index,
bitmaps, topics and tags together.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.formats import INDEX, RECORD_SIZE
from hadelay.codec.linking import INDEX_CRC
from hadelay.codec.meta import unpack
from hadelay.errors import DamagedFile
from hadelay.handout.filters import Filter
from hadelay.ledger.views import HandoutView


class Owed:
    def __init__(self, view: HandoutView, on_spoiled: Callable[[int, NDArray[np.uint32]], None]) -> None:
        """on_spoiled(hour, indexes): these entries do not verify any more, or their records."""
        self.view, self.store, self._on_spoiled = view, view.store, on_spoiled

    def look(self, hour: int, indexes: NDArray[np.uint32]) -> tuple[NDArray[np.void], NDArray[np.bool_]]:
        """INDEX rows of these entries, and which of them are still owed."""
        if not self.store.count(hour):
            # Retired: every entry was settled, or rolled forward, while it stood in a window.
            return np.zeros(len(indexes), INDEX), np.zeros(len(indexes), np.bool_)
        rows = self.store.entries(hour, indexes, verify=False)
        bad = INDEX_CRC.bad(rows)
        if len(bad):
            # The entry was good when its second was loaded. A grant would make apply read it, and stop.
            self._on_spoiled(hour, indexes[bad])
            rows = rows.copy()
            rows["topic"][bad] = 0
        owed = self.view.owed(hour, rows)
        owed[bad] = False
        return rows, owed

    def passes(self, wanted: Filter | None, hour: int, row: np.void) -> bool:
        """By the tags in the record. A damaged record is reported, and passes nowhere until it is repaired."""
        if wanted is None:
            return True
        try:
            record = self.store.record(hour, int(row["offset"]), int(row["size"]), verify=True)
        except DamagedFile:
            self._on_spoiled(hour, row["index"].reshape(1))
            return False
        meta_size = int.from_bytes(record[4:8], "little")
        return wanted.matches(unpack(record[RECORD_SIZE : RECORD_SIZE + meta_size]).tags)
