"""A clock that tests move: an event loop and a runtime whose time is the machine's plus an offset."""

import asyncio
import time
from collections.abc import Callable

from hadelay.client import Delay
from hadelay.client.wire import seconds_of
from hadelay.platform.runtime import Runtime


class ShiftedLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers go by the shifted time."""

    def __init__(self) -> None:
        super().__init__()
        self.offset_s = 0.0

    def time(self) -> float:
        return super().time() + self.offset_s


class ShiftedRuntime(Runtime):
    """The runtime of a node on a ShiftedLoop: all its clocks are shifted alike, as by a long sleep of the process."""

    loop: ShiftedLoop

    def __init__(self, loop: ShiftedLoop) -> None:
        super().__init__(loop)
        self.monotonic = loop.time

    def wall_ms(self) -> int:
        return super().wall_ms() + int(self.loop.offset_s * 1000)


class Clock:
    """The time of a node in a test."""

    def __init__(self, loop: ShiftedLoop, settled: Callable[[], None]) -> None:
        self._loop, self._settled = loop, settled

    def now(self) -> float:
        """The node's time, in Unix seconds."""
        return time.time() + self._loop.offset_s

    def advance(self, by: Delay) -> None:
        """Move the time forward by "3d", seconds or a timedelta, at once. What falls due can be received then. Leases
        that are not extended meanwhile run out."""
        seconds = seconds_of(by)

        def shift() -> None:
            self._loop.offset_s += seconds

        self._loop.call_soon_threadsafe(shift)
        self._settled()
