"""A timer that can be set again and again: the earliest time asked for wins."""

from __future__ import annotations

import math
from collections.abc import Callable

from hadelay.platform.runtime import Handle, Runtime


class Alarm:
    """Calls `ring` once, not before the time it was set to. Whoever is rung may set it again."""

    def __init__(self, runtime: Runtime, ring: Callable[[], None]) -> None:
        self._runtime, self._ring = runtime, ring
        self._at = math.inf
        self._handle: Handle | None = None

    def at(self, mono: float) -> None:
        """Ring at this monotonic time, or earlier if it is set to an earlier one."""
        if mono >= self._at:
            return
        self.cancel()
        self._at = mono
        # Loops with millisecond timers round to the nearest: up, or we would be rung before the time and spin.
        delay_ms = math.ceil((mono - self._runtime.monotonic()) * 1000.0)
        self._handle = self._runtime.call_later(max(0, delay_ms) / 1000.0, self._fire)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._handle, self._at = None, math.inf

    def _fire(self) -> None:
        self._handle, self._at = None, math.inf
        self._ring()
