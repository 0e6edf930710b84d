"""Time, timers and threads of a node.

All packages between codec/ and http/ use callbacks over `Runtime`, so that the same classes run on uvloop and in the
simulator: its runtime (`chaos.sim.runtime`) overrides all methods and runs many nodes in one thread from one seed.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

#: Callback at the end of a job in a thread, with the job's result or error.
Ended = Callable[[Any, BaseException | None], None]


class Handle(Protocol):
    def cancel(self) -> None: ...


#: A lane (a job queue) runs brief jobs on the event loop once the quickest of _BRIEF_JOBS jobs, measured in the lane's
#: thread, took less than _BRIEF_S seconds. Only the quickest counts: on a busy node, the others also waited for the
#: interpreter.
_BRIEF_JOBS, _BRIEF_S = 8, 0.0005
#: Limit in seconds of a brief job on the event loop; after a longer job, the lane (job queue) uses its thread again.
_LONG_S = 0.005


class Brevity:
    """Decides from recent durations whether a lane (a job queue) runs brief jobs on the event loop (ADR 16)."""

    __slots__ = ("needed", "quickest")

    def __init__(self) -> None:
        #: needed: number of jobs still to be measured in the thread. quickest: shortest measured duration, in seconds.
        self.needed, self.quickest = _BRIEF_JOBS, math.inf

    def took(self, seconds: float) -> None:
        if not self.needed:  # the job ran on the event loop, so nothing is measured in the thread
            if seconds >= _LONG_S:
                self.needed, self.quickest = _BRIEF_JOBS, math.inf
            return
        self.needed -= 1
        self.quickest = min(self.quickest, seconds)
        if not self.needed and self.quickest >= _BRIEF_S:
            self.needed, self.quickest = _BRIEF_JOBS, math.inf


class _Lane(Brevity):
    """Lane: one thread, its queue of jobs, and the recent durations of its brief jobs."""

    __slots__ = ("deferred", "executor", "last_s", "on_loop", "pending")

    def __init__(self, name: str) -> None:
        super().__init__()
        self.executor = ThreadPoolExecutor(1, thread_name_prefix=f"hadelay-{name}")
        #: Number of jobs queued or running in the lane's thread.
        self.pending = 0
        #: Duration of the last job, in seconds.
        self.last_s = 0.0
        #: Whether a job of the lane is about to run on the event loop; the lane's later jobs wait for its end.
        self.on_loop = False
        self.deferred: list[Callable[[], None]] = []


class Runtime:
    """Runtime of a real (not simulated) node. Create it inside the running loop; `close` waits for the threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        #: Random numbers for jitter (elections) only; replicated data must not depend on them.
        self.random = random.Random()
        self._lanes: dict[str, _Lane] = {}

    monotonic = staticmethod(time.monotonic)

    def wall_ms(self) -> int:
        """The machine's wall clock in Unix ms; it may be wrong or step, which server/clustertime.py reports."""
        return time.time_ns() // 1_000_000

    def call_soon(self, fn: Callable[..., None], *args: Any) -> None:
        self.loop.call_soon(fn, *args)

    def call_later(self, delay_s: float, fn: Callable[..., None], *args: Any) -> Handle:
        return self.loop.call_later(delay_s, fn, *args)

    def in_thread(self, lane: str, fn: Callable[[], Any], done: Ended, *, brief: bool = False) -> None:
        """Run `fn` in a thread, then `done(result, error)` on the loop. Jobs of one lane run in order, one at a time.

        brief: `fn` may run on the loop while the lane's last jobs took less time than a change of threads.
        """
        jobs = self._lanes.get(lane)
        if jobs is None:
            jobs = self._lanes[lane] = _Lane(lane)
        if jobs.on_loop:
            jobs.deferred.append(lambda: self.in_thread(lane, fn, done, brief=brief))
            return
        if brief and not jobs.needed and not jobs.pending:
            jobs.on_loop = True
            # Run ready callbacks first: frames then leave for other nodes before this node waits for its disk.
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
            jobs.last_s = took
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
        """Block until the lane's thread has finished its jobs; call this before closing files that the jobs use."""
        if lane in self._lanes:
            self._lanes[lane].executor.submit(lambda: None).result()

    def last_s(self, lane: str) -> float:
        """Duration of the lane's last job in seconds; 0.0 before the first."""
        return self._lanes[lane].last_s if lane in self._lanes else 0.0

    def _on_loop(self, jobs: _Lane, fn: Callable[[], Any], done: Ended) -> None:
        result, error = None, None
        started = time.monotonic()
        try:
            result = fn()
        except Exception as raised:
            error = raised
        jobs.last_s = time.monotonic() - started
        jobs.took(jobs.last_s)
        jobs.on_loop = False
        deferred, jobs.deferred = jobs.deferred, []
        for job in deferred:
            job()
        done(result, error)

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.executor.shutdown(wait=True)
