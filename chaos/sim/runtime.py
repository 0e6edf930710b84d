"""One thread, one seed, one queue of events: the world in which whole clusters run without waiting.

Time passes only between events. Everything that happens on a node (timers, arriving frames, the end of a thread's
job) is an event owned by that node's `SimRuntime`; so a paused node (SIGSTOP) keeps its events for later and a
crashed one loses them all, as a process would.
"""

from __future__ import annotations

import random
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop as _pop
from heapq import heappush as _push
from typing import Any

from chaos.sim.disk import SimCrash, SimDisk
from hadelay.platform.runtime import Brevity, Ended

#: More events than this at one instant is a loop that never sleeps.
_MAX_EVENTS_PER_INSTANT = 200_000


class Livelock(AssertionError):
    """A node keeps itself busy without time passing."""


class Event:
    """One scheduled call; also the Handle that `call_later` gives."""

    __slots__ = ("args", "fn", "owner")

    def __init__(self, owner: SimRuntime | None, fn: Callable[..., None] | None, args: tuple[Any, ...]) -> None:
        self.owner, self.fn, self.args = owner, fn, args

    def cancel(self) -> None:
        self.fn, self.args = None, ()


#: Time due, number, event. Entries of one time run in the order of their numbers.
Entry = tuple[float, int, Event]


class SimWorld:
    """True time (seconds since the start), the event queue, and the trace that proves two runs equal."""

    def __init__(self, seed: int, *, epoch_ms: int = 1_790_000_000_000) -> None:
        self.seed = seed
        self.random = random.Random(f"world {seed}")
        self.now = 0.0
        #: The true wall clock at now = 0.
        self.epoch_ms = epoch_ms
        #: How many ran so far.
        self.events = 0
        #: CRC over everything that crossed a seam (frames, disk writes): equal for equal runs.
        self.trace = 0
        #: Told when a crash-at-I/O hook fires inside a node: (runtime) -> None.
        self.on_crash: Callable[[SimRuntime], None] = lambda runtime: None
        self._queue: list[Entry] = []
        self._seq = 0
        self._at_instant = 0

    def wall_ms(self) -> int:
        """The true time of day."""
        return self.epoch_ms + int(self.now * 1000)

    def record(self, data: bytes | bytearray | memoryview) -> None:
        self.trace = zlib.crc32(data, self.trace)

    def at(self, when: float, fn: Callable[..., None], *args: Any, owner: SimRuntime | None = None) -> Event:
        return self.add(when, Event(owner, fn, args))

    def after(self, delay_s: float, fn: Callable[..., None], *args: Any, owner: SimRuntime | None = None) -> Event:
        return self.add(self.now + delay_s, Event(owner, fn, args))

    def add(self, when: float, event: Event) -> Event:
        self._seq += 1
        _push(self._queue, (when if when > self.now else self.now, self._seq, event))
        return event

    def add_first(self, event: Event) -> None:
        """Run `event` next, before everything else that is due."""
        self._seq += 1
        _push(self._queue, (float("-inf"), self._seq, event))

    def put_back(self, entries: Iterable[Entry]) -> None:
        """Queue held entries again, with their old times: no event that was added later overtakes them."""
        for entry in entries:
            _push(self._queue, entry)

    def run_until(self, when: float, stop: Callable[[], bool] | None = None) -> None:
        """Run events up to `when` (or until `stop()` holds), then set the time to it."""
        queue = self._queue
        while queue and queue[0][0] <= when:
            entry = _pop(queue)
            if (fn := entry[2].fn) is not None:
                self._run_one(entry, fn)
                if stop is not None and stop():
                    return
        self.now = max(self.now, when)

    def run_for(self, seconds: float) -> None:
        self.run_until(self.now + seconds)

    def _run_one(self, entry: Entry, fn: Callable[..., None]) -> None:
        at, _, event = entry
        if at > self.now:
            self.now, self._at_instant = at, 0
        self.events += 1
        self._at_instant += 1
        if self._at_instant > _MAX_EVENTS_PER_INSTANT:
            raise Livelock(f"{self._at_instant} events at t={self.now:.6f}, the last one {fn!r}")
        owner = event.owner
        if owner is None:
            fn(*event.args)
            return
        if owner.crashed:
            return
        if owner.paused or owner.stalled:
            owner.held.append(entry)
            return
        owner.ran = True
        try:
            fn(*event.args)
        except SimCrash:
            self.on_crash(owner)


@dataclass(slots=True, eq=False)
class _Job:
    """What a lane is to do. on_loop: decided when it begins."""

    fn: Callable[[], Any]
    done: Ended
    brief: bool
    on_loop: bool = False


class SimRuntime:
    """The Runtime of one process. A restarted node gets a new one; the old one's events die with it.

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
        #: A sync runs on the loop.
        self.stalled = False
        #: Seconds that each such sync held the loop up.
        self.stalls: list[float] = []
        #: Entries that fell due while this node was paused or stalled.
        self.held: list[Entry] = []
        self.ran = True
        self._rate = 1.0 + drift
        self._brief = brief
        self._lanes: dict[str, deque[_Job]] = {}
        self._brevity: defaultdict[str, Brevity] = defaultdict(Brevity)
        # Every machine counts from its own start.
        self._monotonic_base = self.random.uniform(10.0, 1e6)

    def monotonic(self) -> float:
        return self._monotonic_base + self.world.now * self._rate

    def wall_ms(self) -> int:
        return self.world.epoch_ms + self.wall_offset_ms + int(self.world.now * 1000)

    def step_wall(self, delta_ms: int) -> None:
        self.wall_offset_ms += delta_ms

    def call_soon(self, fn: Callable[..., None], *args: Any) -> None:
        self.world.add(self.world.now, Event(self, fn, args))

    def call_later(self, delay_s: float, fn: Callable[..., None], *args: Any) -> Event:
        return self.world.add(self.world.now + max(0.0, delay_s) / self._rate, Event(self, fn, args))

    def in_thread(self, lane: str, fn: Callable[[], Any], done: Ended, *, brief: bool = False) -> None:
        """`fn` runs a moment later, at one instant; what it synced becomes durable, and `done` is called, when the
        disk has taken its time. So a sync covers exactly what was written before it began, and a crash in between
        keeps a prefix of the job (SimDisk.begin)."""
        jobs = self._lanes.setdefault(lane, deque())
        jobs.append(_Job(fn, done, brief and self._brief))
        if len(jobs) == 1:
            self._start_next(lane)

    def join(self, lane: str) -> None:
        """A job runs at one instant: none is ever under way while the loop does something else."""

    def _start_next(self, lane: str) -> None:
        job = self._lanes[lane][0]
        job.on_loop = job.brief and not self._brevity[lane].needed
        delay_s = 0.0 if job.on_loop else self.world.random.uniform(5e-6, 100e-6)
        self.world.after(delay_s, self._run_job, lane, owner=self)

    def _run_job(self, lane: str) -> None:
        job = self._lanes[lane][0]
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
            # The kernel finishes a sync even if the process is stopped meanwhile: no owner.
            self.world.after(cost_s, flight.land)
        if job.brief:
            self._brevity[lane].took(cost_s)
        if job.on_loop:
            self.stalled = True
            self.stalls.append(cost_s)
            self.world.after(cost_s, self._return_to_loop, lane, result, error)
        else:
            self.world.after(cost_s + 20e-6, self._finish_job, lane, result, error, owner=self)

    def _return_to_loop(self, lane: str, result: Any, error: BaseException | None) -> None:
        """A job that ran on the loop is over: its end comes first, and then what fell due meanwhile."""
        if not self.crashed:
            self.stalled = False
            self.world.add_first(Event(self, self._finish_job, (lane, result, error)))
            self._go_on()

    def _finish_job(self, lane: str, result: Any, error: BaseException | None) -> None:
        jobs = self._lanes[lane]
        job = jobs.popleft()
        if jobs:
            self._start_next(lane)
        job.done(result, error)

    def stirred(self) -> bool:
        """Whether any of its events ran since this was asked last: while none does, its state stays what it is."""
        ran, self.ran = self.ran, False
        return ran

    def pause(self) -> None:
        """SIGSTOP."""
        self.paused = True

    def resume(self) -> None:
        """SIGCONT: what fell due meanwhile happens now, in order."""
        self.paused = False
        self._go_on()

    def _go_on(self) -> None:
        if self.paused or self.stalled:
            return
        held, self.held = self.held, []
        self.world.put_back(held)

    def crash(self) -> None:
        """The process is gone: none of its events ever runs."""
        self.crashed = True
        self.held.clear()
        self._lanes.clear()
