"""Granting ahead of time (commit mode): a grant is proposed so early that it is committed when its messages fall due.

Then lateness no longer contains a commit. Nothing is handed out early: what is granted is held back here until cluster
time has reached the last deliver_at of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from hadelay.handout.dispatcher import Delivery, Poll
from hadelay.platform.runtime import Runtime
from hadelay.server.alarm import Alarm
from hadelay.server.clustertime import ClusterClock

Release = Callable[[Delivery], None]


class Lead:
    """How long grants take lately, from what the last ones took: smoothed as TCP smooths its round trips (RFC 6298)."""

    def __init__(self, most_ms: int) -> None:
        """most_ms: never more than this; 0: grants are proposed when they are due."""
        self.most_ms = most_ms
        self.ms = 0
        self._smoothed = self._variation = 0.0

    def took(self, ms: float) -> None:
        """A grant was decided that long after it was proposed. The next may have to wait for it, and takes as long."""
        if not self._smoothed:
            self._smoothed, self._variation = ms, ms / 2
        else:
            self._variation += (abs(ms - self._smoothed) - self._variation) / 4
            self._smoothed += (ms - self._smoothed) / 8
        self.ms = min(self.most_ms, int(2 * self._smoothed + 4 * self._variation))


class HeldBack:
    """Answers whose messages are leased and not due yet."""

    def __init__(self, runtime: Runtime, clock: ClusterClock) -> None:
        self._runtime, self._clock = runtime, clock
        self._alarm = Alarm(runtime, self._ring)
        self._waiting: list[tuple[int, int, Poll, Delivery, Release]] = []
        self._count = 0
        #: (due, count) of the last of those that somebody waits for.
        self._after: list[tuple[tuple[int, int], Callable[[], None]]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def polls(self) -> list[Poll]:
        return [poll for _, _, poll, _, _ in self._waiting]

    def until_due(self, poll: Poll, delivery: Delivery, release: Release) -> None:
        """release(delivery, of that time) when all of it is due: now, if it is."""
        now_ms = self._clock.read(self._runtime.monotonic())
        due_ms = int(delivery.rows["deliver_at_ms"].max())
        if due_ms <= now_ms:
            release(delivery._replace(now_ms=now_ms))
            return
        self._count += 1
        heapq.heappush(self._waiting, (due_ms, self._count, poll, delivery, release))
        self._set()

    def when_released(self, done: Callable[[], None]) -> None:
        """done() as soon as all that is held back now was released: at once if that is nothing."""
        if self._waiting:
            self._after.append((max(item[:2] for item in self._waiting), done))
        else:
            done()

    def clock_changed(self) -> None:
        self._alarm.cancel()
        self._set()

    def stop(self) -> None:
        self._alarm.cancel()
        self._waiting.clear()
        self._tell()

    def _set(self) -> None:
        if self._waiting:
            mono = self._runtime.monotonic()
            self._alarm.at(mono + self._clock.delay_s(self._waiting[0][0], mono))

    def _ring(self) -> None:
        now_ms = self._clock.read(self._runtime.monotonic())
        while self._waiting and self._waiting[0][0] <= now_ms:
            _, _, _, delivery, release = heapq.heappop(self._waiting)
            release(delivery._replace(now_ms=now_ms))
        self._set()
        self._tell()

    def _tell(self) -> None:
        if self._after:
            first = self._waiting[0][:2] if self._waiting else None
            over = [done for last, done in self._after if first is None or last < first]
            self._after = [item for item in self._after if not (first is None or item[0] < first)]
            for done in over:
                done()
