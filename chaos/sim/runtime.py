"""The simulated world: one thread, one seed and one queue of events run whole clusters without waiting.

Time passes only between events. Everything that happens on a node (timers, arriving frames, the end of a thread's
job) is an event owned by that node's `SimRuntime`; so a paused node (SIGSTOP) keeps its events for later and a
crashed one loses them all, as a process would.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import socket
import zlib
from asyncio import events
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Iterable
from contextvars import Context
from dataclasses import dataclass
from heapq import heappop as _pop
from heapq import heappush as _push
from typing import Any, cast

from chaos.sim.disk import SimDisk
from chaos.sim.file import Flight, SimCrash
from hadelay.platform.runtime import Brevity, Ended, Runtime

#: Maximum number of events at one simulated instant; more mean that a loop never sleeps.
_MAX_EVENTS_PER_INSTANT = 200_000
#: Delay, in seconds, from the end of a thread's job until the event loop gets its result.
_HANDOVER_S = 20e-6


class Livelock(AssertionError):
    """A node runs events without end at one simulated instant."""


class Event:
    """One scheduled call; also the Handle that `call_later` returns."""

    __slots__ = ("args", "fn", "owner")

    def __init__(self, owner: SimRuntime | None, fn: Callable[..., None] | None, args: tuple[Any, ...]) -> None:
        self.owner, self.fn, self.args = owner, fn, args

    def cancel(self) -> None:
        self.fn, self.args = None, ()


#: Entry of the event queue: (due time, number, event). Entries with one time run in the order of their numbers.
Entry = tuple[float, int, Event]


class SimWorld:
    """Simulated world: true time in seconds, event queue, and checksum `trace`, equal for equal runs."""

    def __init__(self, seed: int, *, epoch_ms: int = 1_790_000_000_000) -> None:
        self.seed = seed
        self.random = random.Random(f"world {seed}")
        self.now = 0.0
        #: True time of day at the start of the run, in Unix ms.
        self.epoch_ms = epoch_ms
        #: Number of events run so far.
        self.events = 0
        #: CRC over all frames and disk writes: equal for equal runs.
        self.trace = 0
        #: Function that is called with the runtime of a process when an injected crash ends the process at an I/O step.
        self.on_crash: Callable[[SimRuntime], None] = lambda runtime: None
        self._queue: list[Entry] = []
        self._seq = 0
        self._at_instant = 0

    def wall_ms(self) -> int:
        """True time of day, in Unix ms."""
        return self.epoch_ms + int(self.now * 1000)

    def record(self, data: bytes | bytearray | memoryview) -> None:
        self.trace = zlib.crc32(data, self.trace)

    def at(self, when: float, fn: Callable[..., None], *args: Any, owner: SimRuntime | None = None) -> Event:
        self._seq += 1
        event = Event(owner, fn, args)
        _push(self._queue, (when if when > self.now else self.now, self._seq, event))
        return event

    def after(self, delay_s: float, fn: Callable[..., None], *args: Any, owner: SimRuntime | None = None) -> Event:
        return self.at(self.now + delay_s, fn, *args, owner=owner)

    def run_as(self, owner: SimRuntime, fn: Callable[..., None], *args: Any, first: bool = False) -> None:
        """Run an event of the process `owner` now; but if the process is in another event, paused or stalled, keep this
        event for later. first: ahead of all other kept events."""
        if owner.busy:
            self._seq += 1
            owner.deferred.append((float("-inf") if first else self.now, self._seq, Event(owner, fn, args)))
        elif not owner.crashed:
            owner.ran = True
            try:
                fn(*args)
            except SimCrash:
                self.on_crash(owner)

    def put_back(self, entries: Iterable[Entry]) -> None:
        """Queue events of a resumed process again, with their old times: later events do not overtake them."""
        for entry in entries:
            _push(self._queue, entry)

    def run_until(self, when: float, stop: Callable[[], bool] | None = None) -> None:
        """Run the events until time `when`, or until stop() is true; after all events, set the time to `when`."""
        queue = self._queue
        while queue and queue[0][0] <= when:
            entry = _pop(queue)
            at, _, event = entry
            fn, owner = event.fn, event.owner
            if fn is None:
                continue
            if at > self.now:
                self.now, self._at_instant = at, 0
            self.events += 1
            self._at_instant += 1
            if self._at_instant > _MAX_EVENTS_PER_INSTANT:
                raise Livelock(f"{self._at_instant} events at t={self.now:.6f}, the last one {fn!r}")
            if owner is None:
                fn(*event.args)
            elif owner.busy:
                owner.deferred.append(entry)
            else:
                self.run_as(owner, fn, *event.args)
            if stop is not None and stop():
                return
        self.now = max(self.now, when)

    def run_for(self, seconds: float) -> None:
        self.run_until(self.now + seconds)


@dataclass(slots=True, eq=False)
class _Job:
    """A job for a thread of the process. on_loop: True if it runs on the event loop instead, as decided at its
    start. cost_s: time that the disk takes, in seconds."""

    fn: Callable[[], Any]
    done: Ended
    brief: bool
    on_loop: bool = False
    cost_s: float = 0.0


class SimRuntime(Runtime):
    """Runtime of one process. A restarted node gets a new Runtime; events of the old one are dropped.

    drift: how much faster than true time its monotonic clock runs (50e-6 = 50 ppm). wall_offset_ms: its wall clock's
    error, which does not grow: NTP keeps it. brief: brief jobs run on the loop while the disk is quick, as in the real
    runtime (ADR 16); nothing else happens on the node until such a job's syncs are over.
    """

    def __init__(
        self,
        world: SimWorld,
        name: str,
        disk: SimDisk | None = None,
        *,
        drift: float = 0.0,
        wall_offset_ms: int = 0,
        brief: bool = False,
    ) -> None:
        self.world, self.name, self.disk = world, name, disk
        self.drift, self.wall_offset_ms = drift, wall_offset_ms
        self.random = random.Random(f"{world.seed} {name} {world.now}")
        self.crashed = False
        self.paused = False
        #: True while a sync runs on the event loop.
        self._stalled = False
        #: True while the process is paused or stalled.
        self.busy = False
        #: Duration of each sync on the event loop, in seconds.
        self.stalls: list[float] = []
        #: Events that fell due while this node was paused or stalled.
        self.deferred: list[Entry] = []
        self.ran = True
        self._rate = 1.0 + drift
        self._brief = brief
        self._jobs: dict[str, deque[_Job]] = {}
        self._brevity: defaultdict[str, Brevity] = defaultdict(Brevity)
        self._last_s: dict[str, float] = {}
        # Each machine's monotonic clock starts at the machine's own start.
        self._monotonic_base = self.random.uniform(10.0, 1e6)

    def monotonic(self) -> float:
        return self._monotonic_base + self.world.now * self._rate

    def wall_ms(self) -> int:
        return self.world.epoch_ms + self.wall_offset_ms + int(self.world.now * 1000)

    def step_wall(self, delta_ms: int) -> None:
        self.wall_offset_ms += delta_ms

    def call_soon(self, fn: Callable[..., None], *args: Any) -> None:
        self.world.at(self.world.now, fn, *args, owner=self)

    def call_later(self, delay_s: float, fn: Callable[..., None], *args: Any) -> Event:
        return self.world.at(self.world.now + max(0.0, delay_s) / self._rate, fn, *args, owner=self)

    def in_thread(self, lane: str, fn: Callable[[], Any], done: Ended, *, brief: bool = False) -> None:
        """Run `fn` as a job of a thread: a moment later, in one instant. Its syncs become durable, and `done` is
        called, only after the time that the disk takes. So a sync covers exactly the writes before it, and a crash in
        between keeps only the first part of the job."""
        jobs = self._jobs.setdefault(lane, deque())
        jobs.append(_Job(fn, done, brief and self._brief))
        if len(jobs) == 1:
            self._start_next(lane)

    def join(self, lane: str) -> None:
        """Return at once: each job runs in one instant, so no job is under way while the event loop runs."""

    def last_s(self, lane: str) -> float:
        return self._last_s.get(lane, 0.0)

    def _start_next(self, lane: str) -> None:
        job = self._jobs[lane][0]
        job.on_loop = job.brief and not self._brevity[lane].needed
        delay_s = 0.0 if job.on_loop else self.world.random.uniform(5e-6, 100e-6)
        self.world.after(delay_s, self._run_job, lane, owner=self)

    def _run_job(self, lane: str) -> None:
        job = self._jobs[lane][0]
        result, error = None, None
        cost_s = 0.0
        flight = self.disk.begin() if self.disk is not None else None
        try:
            result = job.fn()
        except SimCrash:
            raise
        except Exception as e:
            error = e
        if flight is not None:
            cost_s = flight.end()
            flight.disk.busy_until = max(flight.disk.busy_until, self.world.now + cost_s)
        job.cost_s = cost_s
        if job.brief:
            self._brevity[lane].took(cost_s)
        if job.on_loop:
            self._stalled = self.busy = True
            self.stalls.append(cost_s)
        else:
            cost_s += _HANDOVER_S
        self.world.after(cost_s, self._job_over, lane, job, flight, result, error)

    def _job_over(self, lane: str, job: _Job, flight: Flight | None, result: Any, error: BaseException | None) -> None:
        """Finish a job: its syncs become durable even if the process is paused, as in a kernel. If the job ran on the
        event loop, its result comes before events that fell due meanwhile."""
        if flight is not None:
            error = flight.land() or error
        if job.on_loop:
            self._stalled, self.busy = False, self.paused
        self.world.run_as(self, self._finish_job, lane, result, error, first=job.on_loop)
        if job.on_loop:
            self._go_on()

    def _finish_job(self, lane: str, result: Any, error: BaseException | None) -> None:
        jobs = self._jobs[lane]
        job = jobs.popleft()
        self._last_s[lane] = job.cost_s
        if jobs:
            self._start_next(lane)
        job.done(result, error)

    def stirred(self) -> bool:
        """Whether an event of this process has run since the last call; otherwise the process's state is unchanged."""
        ran, self.ran = self.ran, False
        return ran

    def pause(self) -> None:
        """Stop running events, as SIGSTOP does."""
        self.paused = self.busy = True

    def resume(self) -> None:
        """Continue, as SIGCONT does: events that fell due meanwhile run now, in order."""
        self.paused, self.busy = False, self._stalled
        self._go_on()

    def _go_on(self) -> None:
        if not self.busy:
            deferred, self.deferred = self.deferred, []
            self.world.put_back(deferred)

    def crash(self) -> None:
        """End the process, as a crash does: none of its waiting events will run."""
        self.crashed, self.busy = True, False
        self.deferred.clear()
        self._jobs.clear()


class SimLoop:
    """Part of an asyncio event loop that a node's coroutines use, on the simulated time of one process. Each callback
    is an event: a pause delays it, a crash drops it. Name look-ups fail."""

    def __init__(self, runtime: SimRuntime) -> None:
        self._runtime, self._disk = runtime, runtime.disk
        #: Coroutines of the tasks that have not ended.
        self._works: set[Coroutine[Any, Any, Any]] = set()

    def run(
        self, work: Coroutine[Any, Any, Any], done: Callable[[Any, BaseException | None], None]
    ) -> asyncio.Task[Any]:
        """Run the coroutine `work`; then done(result, error), with one of them None, unless cancelled."""
        self._works.add(work)
        task = self.create_task(work)

        def ended(task: asyncio.Task[Any]) -> None:
            self._works.discard(work)
            if not task.cancelled():
                error = task.exception()
                done(None if error is not None else task.result(), error)

        task.add_done_callback(ended)
        return task

    def close(self) -> None:
        """Close the coroutines that never started, after the process's end, so that Python does not warn of them."""
        for work in self._works:
            if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
                work.close()

    def _run(self, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None) -> None:
        events._set_running_loop(cast(Any, self))
        try:
            callback(*args) if context is None else context.run(callback, *args)
        finally:
            events._set_running_loop(None)
        if self._disk is not None and self._disk.crashing:
            raise SimCrash("the process crashes within a task, which swallowed the first SimCrash")

    # The methods below are those of asyncio.AbstractEventLoop that a node's coroutines need. A handle is only used to
    # cancel a call, so an Event serves as a handle.

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> Event:
        return self.call_later(0.0, callback, *args, context=context)

    def call_later(self, delay: float, callback: Any, *args: Any, context: Context | None = None) -> Event:
        return self._runtime.call_later(delay, self._run, callback, args, context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> Event:
        return self.call_later(when - self.time(), callback, *args, context=context)

    def time(self) -> float:
        return self._runtime.monotonic()

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=cast(Any, self))

    def create_task(self, coro: Any, **more: Any) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=cast(Any, self), **more)

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Ignore errors of waiting tasks that are dropped because their process has ended."""

    async def getaddrinfo(self, host: Any, port: Any, **more: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "the simulated world has no names")
