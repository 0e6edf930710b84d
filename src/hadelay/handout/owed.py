"""What is owed: due, neither settled nor leased, and of a topic that still exists. The only place that asks index,
bitmaps and topics together.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.formats import INDEX
from hadelay.codec.linking import INDEX_CRC
from hadelay.ledger.views import HandoutView


class Owed:
    def __init__(self, view: HandoutView) -> None:
        self.view, self.store = view, view.store
        #: Told (hour, indexes) of entries in a window that do not verify any more.
        self.on_spoiled: Callable[[int, NDArray[np.uint32]], None] = lambda hour, indexes: None

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
            return rows, self.view.owed(hour, rows) & fine
        return rows, self.view.owed(hour, rows)
