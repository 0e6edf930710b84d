"""What a node asks of the world besides its disk and its peers: time, timers, and a thread for what blocks.

Everything between codec/ and http/ is written in callbacks over this interface, so that the same classes run on
uvloop (`AsyncioRuntime`) and, many nodes in one thread from one seed, in the simulator (`chaos.sim`).
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

#: Told of the end of what ran in a thread: its result, or its error.
Ended = Callable[[Any, BaseException | None], None]


class Handle(Protocol):
    def cancel(self) -> None: ...


class Runtime(Protocol):
    #: Only for jitter (elections): nothing that is replicated may depend on it.
    random: random.Random

    def monotonic(self) -> float:
        """Seconds; never steps."""
        ...

    def wall_ms(self) -> int:
        """The machine's wall clock in Unix ms; may be wrong, may step. See server/clustertime.py for who may ask."""
        ...

    def call_soon(self, fn: Callable[..., None], *args: Any) -> None: ...

    def call_later(self, delay_s: float, fn: Callable[..., None], *args: Any) -> Handle: ...

    def in_thread(self, lane: str, fn: Callable[[], Any], done: Ended, *, brief: bool = False) -> None:
        """Run `fn` off the loop, then `done(result, error)` on it. Jobs of one lane run one after another, in order.

        brief: it may run on the loop instead, while the lane's last jobs took less time than changing threads does.
        """
        ...

    def join(self, lane: str) -> None:
        """Block until the lane's thread is through with what it was given: before what it uses is closed."""
        ...


#: A brief job may run on the loop when the quickest of the lane's last so many took less than this (seconds). The
#: quickest tells what the disk can do: on a busy node most also wait for the interpreter, and would for ever.
_BRIEF_JOBS, _BRIEF_S = 8, 0.0005
#: One that took longer than this on the loop, as long as other things there do, sends its lane back to the thread.
_LONG_S = 0.005


class Brevity:
    """Whether a lane's brief jobs may run on the loop: how quick they were lately (ADR 16)."""

    __slots__ = ("needed", "quickest")

    def __init__(self) -> None:
        #: Jobs still to be seen in the thread before one runs on the loop, and the quickest of those seen.
        self.needed, self.quickest = _BRIEF_JOBS, math.inf

    def took(self, seconds: float) -> None:
        if not self.needed:  # it ran on the loop
            if seconds >= _LONG_S:
                self.needed, self.quickest = _BRIEF_JOBS, math.inf
            return
        self.needed -= 1
        self.quickest = min(self.quickest, seconds)
        if not self.needed and self.quickest >= _BRIEF_S:
            self.needed, self.quickest = _BRIEF_JOBS, math.inf


class _Lane(Brevity):
    """One thread, what waits for it, and how quick its brief jobs are lately."""

    __slots__ = ("deferred", "executor", "on_loop", "pending")

    def __init__(self, name: str) -> None:
        super().__init__()
        self.executor = ThreadPoolExecutor(1, thread_name_prefix=f"hadelay-{name}")
        #: In the thread.
        self.pending = 0
        #: A job is about to run on the loop; those that came after it wait here.
        self.on_loop = False
        self.deferred: list[Callable[[], None]] = []


class AsyncioRuntime:
    """The real one. Make it inside the running loop; `close` waits for the threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.random = random.Random()
        self.monotonic = time.monotonic
        self._lanes: dict[str, _Lane] = {}

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def call_soon(self, fn: Callable[..., None], *args: Any) -> None:
        self.loop.call_soon(fn, *args)

    def call_later(self, delay_s: float, fn: Callable[..., None], *args: Any) -> Handle:
        return self.loop.call_later(delay_s, fn, *args)

    def in_thread(self, lane: str, fn: Callable[[], Any], done: Ended, *, brief: bool = False) -> None:
        jobs = self._lanes.get(lane)
        if jobs is None:
            jobs = self._lanes[lane] = _Lane(lane)
        if jobs.on_loop:
            jobs.deferred.append(lambda: self.in_thread(lane, fn, done, brief=brief))
            return
        if brief and not jobs.needed and not jobs.pending:
            jobs.on_loop = True
            # What else is ready goes first: frames leave for other disks before this one is waited for.
            self.loop.call_soon(self._on_loop, jobs, fn, done)
            return
        jobs.pending += 1
        executor, took = jobs.executor, 0.0

        def timed() -> Any:
            nonlocal took
            started = time.monotonic()
            try:
                return fn()
            finally:
                took = time.monotonic() - started

        def ended(result: Any, error: BaseException | None) -> None:
            jobs.pending -= 1
            if brief:
                jobs.took(took)
            done(result, error)

        def finished(future: Future[Any]) -> None:
            error = future.exception()
            result = None if error else future.result()
            if not self.loop.is_closed():
                self.loop.call_soon_threadsafe(ended, result, error)

        executor.submit(timed).add_done_callback(finished)

    def join(self, lane: str) -> None:
        if lane in self._lanes:
            self._lanes[lane].executor.submit(lambda: None).result()

    def _on_loop(self, jobs: _Lane, fn: Callable[[], Any], done: Ended) -> None:
        result, error = None, None
        started = time.monotonic()
        try:
            result = fn()
        except Exception as raised:
            error = raised
        jobs.took(time.monotonic() - started)
        jobs.on_loop = False
        deferred, jobs.deferred = jobs.deferred, []
        for job in deferred:
            job()
        done(result, error)

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.executor.shutdown(wait=True)
