"""Deferred deliveries: messages granted ahead of their time wait here until the last of them is due."""

from collections.abc import Callable
from dataclasses import dataclass

from hadelay.deadlines import Deadlines
from hadelay.handout.polls import Delivery, Poll
from hadelay.server.delivery.term import Term


@dataclass(eq=False, slots=True)
class _Item:
    """A deferred delivery, or a callback that waits for earlier deliveries (`poll` is None)."""

    poll: Poll | None
    #: Called with the cluster time.
    go: Callable[[int], None]


class DeferredDeliveries:
    """Answers whose messages are leased and not due yet."""

    def __init__(self, term: Term) -> None:
        self._term, self._alarm = term, term.alarm(self._ring)
        self._waiting: Deadlines[_Item] = Deadlines()
        #: Due time of the delivery's last message.
        self._last_ms = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def polls(self) -> list[Poll]:
        return [item.poll for item in self._waiting if item.poll is not None]

    def until_due(self, poll: Poll, delivery: Delivery, release: Callable[[Delivery], None]) -> None:
        """Call release(delivery) when all messages of the delivery are due, at once if they are."""
        now_ms, due_ms = self._term.now(), int(delivery.rows["deliver_at_ms"].max())
        if due_ms <= now_ms:
            release(delivery._replace(now_ms=now_ms))
            return
        self._last_ms = max(self._last_ms, due_ms)
        self._waiting.set(_Item(poll, lambda now_ms: release(delivery._replace(now_ms=now_ms))), due_ms)
        self._arm()

    def when_released(self, done: Callable[[], None]) -> None:
        """done() as soon as all that is deferred now was released: at once if nothing is."""
        if self._waiting:
            self._waiting.set(_Item(None, lambda now_ms: done()), self._last_ms)
        else:
            done()

    def clock_changed(self) -> None:
        self._alarm.cancel()
        self._arm()

    def stop(self) -> None:
        """Forget the deliveries, and make the calls that wait for them."""
        for item in self._waiting.due(self._last_ms):
            if item.poll is None:
                item.go(0)

    def _arm(self) -> None:
        if (due_ms := self._waiting.next()) is not None:
            self._alarm.at(self._term.mono_at(due_ms))

    def _ring(self) -> None:
        now_ms = self._term.now()
        while items := self._waiting.due(now_ms, 1):
            items[0].go(now_ms)
        self._arm()
