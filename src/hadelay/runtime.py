"""What a node asks of the world besides its disk and its peers: time, timers, and a thread for what blocks.

Everything between core/ and http/ is written in callbacks over this interface, so that the same classes run on
uvloop (`AsyncioRuntime`) and, many nodes in one thread from one seed, in the simulator (`hadelay.testing`).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol


class Handle(Protocol):
    def cancel(self) -> None: ...


class Runtime(Protocol):
    #: Only for jitter (elections): nothing that is replicated may depend on it.
    random: random.Random

    def monotonic(self) -> float:
        """Seconds; never steps."""
        ...

    def wall_ms(self) -> int:
        """The machine's wall clock in Unix ms; may be wrong, may step. See core/clustertime.py for who may ask."""
        ...

    def call_soon(self, fn: Callable[..., None], *args: Any) -> None: ...

    def call_later(self, delay_s: float, fn: Callable[..., None], *args: Any) -> Handle: ...

    def in_thread(
        self, lane: str, fn: Callable[[], Any], done: Callable[[Any, BaseException | None], None]
    ) -> None:
        """Run `fn` off the loop, then `done(result, error)` on it. Jobs of one lane run one after another, in order."""
        ...


class AsyncioRuntime:
    """The real one. Make it inside the running loop; `close` waits for the threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.random = random.Random()
        self.monotonic = time.monotonic
        self._lanes: dict[str, ThreadPoolExecutor] = {}

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def call_soon(self, fn: Callable[..., None], *args: Any) -> None:
        self.loop.call_soon(fn, *args)

    def call_later(self, delay_s: float, fn: Callable[..., None], *args: Any) -> Handle:
        return self.loop.call_later(delay_s, fn, *args)

    def in_thread(
        self, lane: str, fn: Callable[[], Any], done: Callable[[Any, BaseException | None], None]
    ) -> None:
        executor = self._lanes.get(lane)
        if executor is None:
            executor = self._lanes[lane] = ThreadPoolExecutor(1, thread_name_prefix=f"hadelay-{lane}")

        def finished(future: Future[Any]) -> None:
            error = future.exception()
            result = None if error else future.result()
            if not self.loop.is_closed():
                self.loop.call_soon_threadsafe(done, result, error)

        executor.submit(fn).add_done_callback(finished)

    def close(self) -> None:
        for executor in self._lanes.values():
            executor.shutdown(wait=True)
