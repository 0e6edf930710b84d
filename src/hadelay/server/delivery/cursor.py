"""Replicating the tick of both wheels and the localIndex reached: every 50 ms while they change (S2).

The cursor mostly shares a Raft entry with the grants that made it change. In an idle cluster it does not change, and
nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hadelay.codec.commands import encode_cursor
from hadelay.errors import HadelayError
from hadelay.handout.dispatcher import Dispatcher
from hadelay.server.delivery.term import Term


class CursorKeeper:
    """One per term."""

    def __init__(self, term: Term, core: Dispatcher, settled: Callable[[], None]) -> None:
        """settled: a proposal was committed, or failed."""
        self._term, self._core, self._settled = term, core, settled
        self._alarm = term.alarm(self.send)
        self._sent = core.cursor
        self._sent_at = 0.0
        #: A proposal is on its way.
        self.busy = False

    @property
    def changed(self) -> bool:
        return self._core.cursor != self._sent

    def watch(self) -> None:
        """Propose the cursor now or soon, if it has changed."""
        if self.busy or self._core.cursor == self._sent:
            return
        at = self._sent_at + self._term.config.dispatch.interval_ms / 1000
        if at <= self._term.runtime.monotonic():
            self.send()
        else:
            self._alarm.at(at)

    def send(self) -> None:
        if self.busy:
            return
        cursor = self._core.cursor
        self.busy = True
        self._sent_at = self._term.runtime.monotonic()

        def done(_: Any, error: HadelayError | None) -> None:
            self.busy = False
            if error is None:
                self._sent = cursor
            self._settled()

        self._term.propose(encode_cursor(*cursor), done)
