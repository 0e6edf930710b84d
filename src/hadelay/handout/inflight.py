"""What is in flight: messages that are offered, and neither granted nor refused yet."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hadelay.handout.queues import Window


class InFlight(dict[int, tuple[Window, ...]]):
    """Entry number → the windows that gave the entry up, or skipped it. They get it back if the offer fails."""

    def add(self, window: Window, entries: list[int]) -> None:
        self.update(dict.fromkeys(entries, (window,)))

    def free(self, window: Window, entries: list[int]) -> list[int]:
        """Those that nobody else is offered, each once; the window has skipped the others."""
        free = []
        for entry in dict.fromkeys(entries):
            if entry in self:
                self._skip(window, entry)
            else:
                free.append(entry)
        return free

    def missing(self, window: Window, entries: list[int]) -> NDArray[np.bool_]:
        """Which of these are neither in the window nor in flight; the window has skipped the latter."""
        ready = set(window.entries)
        for entry in self.keys() & entries if self else ():
            self._skip(window, entry)
        return np.fromiter((entry not in ready and entry not in self for entry in entries), np.bool_, len(entries))

    def _skip(self, window: Window, entry: int) -> None:
        if window not in self[entry]:
            self[entry] += (window,)
