"""Replicating the tick of both wheels and the localIndex reached: every 50 ms while they change (S2).

The cursor mostly rides in the entry of the grants that made it change. In an idle cluster it does not change, and
nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hadelay.codec.commands import encode_cursor
from hadelay.errors import HadelayError
from hadelay.handout.dispatcher import Dispatcher
from hadelay.platform.runtime import Runtime
from hadelay.raft.ports import Propose
from hadelay.server.alarm import Alarm


class CursorKeeper:
    """One per term."""

    def __init__(
        self, core: Dispatcher, runtime: Runtime, propose: Propose, interval_s: float, settled: Callable[[], None]
    ) -> None:
        """settled: a proposal was committed, or failed."""
        self._core, self._runtime, self._propose, self._interval_s = core, runtime, propose, interval_s
        self._settled = settled
        self._alarm = Alarm(runtime, self.send)
        self._sent = core.cursor
        self._sent_at = 0.0
        self.busy = False

    def stop(self) -> None:
        self._alarm.cancel()

    @property
    def changed(self) -> bool:
        return self._core.cursor != self._sent

    def watch(self) -> None:
        """Propose the cursor now or soon, if it has changed."""
        if self.busy or not self.changed:
            return
        at = self._sent_at + self._interval_s
        if at <= self._runtime.monotonic():
            self.send()
        else:
            self._alarm.at(at)

    def send(self) -> None:
        if self.busy:
            return
        cursor = self._core.cursor
        self.busy = True
        self._sent_at = self._runtime.monotonic()

        def done(_: Any, error: HadelayError | None) -> None:
            self.busy = False
            if error is None:
                self._sent = cursor
            self._settled()

        self._propose(encode_cursor(*cursor), done)
