"""A timer that can be set again; the earliest time wins."""

from __future__ import annotations

import math
from collections.abc import Callable

from hadelay.platform.runtime import Handle, Runtime


class Alarm:
    """Calls `ring` once, not before the time that the alarm was set to. `ring` may set the alarm again."""

    def __init__(self, runtime: Runtime, ring: Callable[[], None]) -> None:
        self._runtime, self._ring = runtime, ring
        self._at = math.inf
        self._handle: Handle | None = None

    def at(self, mono: float) -> None:
        """Ring at this monotonic time, or earlier if the alarm is set to an earlier time."""
        if mono >= self._at:
            return
        self.cancel()
        self._at = mono
        # Rounded up: loops with millisecond timers round to the nearest, and would ring before the time.
        delay_ms = math.ceil((mono - self._runtime.monotonic()) * 1000.0)
        self._handle = self._runtime.call_later(max(0, delay_ms) / 1000.0, self._fire)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._handle, self._at = None, math.inf

    def _fire(self) -> None:
        self._handle, self._at = None, math.inf
        self._ring()
