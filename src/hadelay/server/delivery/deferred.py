"""Deferred deliveries: messages granted ahead of their time wait here until the last of them is due."""

from __future__ import annotations

from collections.abc import Callable

from hadelay.deadlines import Deadlines
from hadelay.handout.polls import Delivery, Poll
from hadelay.platform.runtime import Runtime
from hadelay.server.alarm import Alarm
from hadelay.server.clustertime import ClusterClock


class _Item:
    """A deferred delivery, or a call that waits for those before it (`poll` is None)."""

    def __init__(self, poll: Poll | None, go: Callable[[int], None]) -> None:
        """go(cluster time)"""
        self.poll, self.go = poll, go


class DeferredDeliveries:
    """Answers whose messages are leased and not due yet."""

    def __init__(self, runtime: Runtime, clock: ClusterClock) -> None:
        self._runtime, self._clock = runtime, clock
        self._alarm = Alarm(runtime, self._ring)
        self._waiting: Deadlines[_Item] = Deadlines()
        #: When the last of them is due.
        self._last_ms = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def polls(self) -> list[Poll]:
        return [item.poll for item in self._waiting if item.poll is not None]

    def until_due(self, poll: Poll, delivery: Delivery, release: Callable[[Delivery], None]) -> None:
        """release(delivery, of that time) when all of it is due: now, if it is."""
        now_ms = self._clock.read(self._runtime.monotonic())
        due_ms = int(delivery.rows["deliver_at_ms"].max())
        if due_ms <= now_ms:
            release(delivery._replace(now_ms=now_ms))
            return
        self._last_ms = max(self._last_ms, due_ms)
        self._waiting.set(_Item(poll, lambda now_ms: release(delivery._replace(now_ms=now_ms))), due_ms)
        self._set()

    def when_released(self, done: Callable[[], None]) -> None:
        """done() as soon as all that is deferred now was released: at once if nothing is."""
        if self._waiting:
            self._waiting.set(_Item(None, lambda now_ms: done()), self._last_ms)
        else:
            done()

    def clock_changed(self) -> None:
        self._alarm.cancel()
        self._set()

    def stop(self) -> None:
        """Forget the deliveries."""
        self._alarm.cancel()
        for item in self._waiting.due(self._last_ms):
            if item.poll is None:
                item.go(0)

    def _set(self) -> None:
        if (due_ms := self._waiting.next()) is not None:
            mono = self._runtime.monotonic()
            self._alarm.at(mono + self._clock.delay_s(int(due_ms), mono))

    def _ring(self) -> None:
        now_ms = self._clock.read(self._runtime.monotonic())
        while items := self._waiting.due(now_ms, 1):
            items[0].go(now_ms)
        self._set()
