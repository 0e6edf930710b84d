"""Replication of the dispatch cursor, the position up to which due messages were found, in one term of a leader."""

from collections.abc import Callable
from typing import Any

from hadelay.codec.commands import encode_cursor
from hadelay.codec.formats import SECONDS_PER_HOUR
from hadelay.errors import HadelayError
from hadelay.handout.dispatcher import Dispatcher
from hadelay.raft.ports import Done
from hadelay.server.delivery.term import Term


class CursorKeeper:
    """Replicates the dispatch cursor within dispatch.interval_ms of each change. One object per term.

    The cursor rides in the next Raft entry that is written anyway, mostly that of the grants that followed its change.
    It gets an entry of its own only if the interval ends without one. In an idle cluster nothing is written.

    In interval mode the replicated cursor bounds what a new leader marks as redelivered (ledger/leases/suspects.py). So
    it passes no second with a hand-out that is not recorded."""

    def __init__(
        self, term: Term, core: Dispatcher, settled: Callable[[], None], unrecorded: Callable[[], int | None]
    ) -> None:
        """settled: called when a proposal of the cursor was committed or has failed. unrecorded: returns the second
        that the cursor had at the oldest hand-out whose grant is not committed; None if all grants are."""
        self._term, self._core, self._settled, self._unrecorded = term, core, settled, unrecorded
        self._alarm = term.alarm(self.send)
        #: The cursor as of the last turn of the delivery loop, as last proposed, and as last committed.
        self._seen = self._proposed = self._sent = core.cursor
        #: True while a proposal of the cursor is under way.
        self.busy = False

    @property
    def changed(self) -> bool:
        """Whether the cursor of the last turn of the delivery loop may be replicated: it is ahead of the cursor
        committed last, and passes no hand-out whose grant is not committed."""
        if self._seen <= self._sent:
            return False
        bound = self._unrecorded()
        return bound is None or _second(self._seen) <= bound

    @property
    def second(self) -> int:
        """Second of the cursor, since 1970; no earlier than that of any proposed cursor."""
        return _second(max(self._core.cursor, self._proposed))

    def watch(self) -> None:
        """Called after each turn of the delivery loop, which alone moves the cursor: if the cursor has changed, propose
        it at the end of the interval, unless a batch of commands takes it into the log before."""
        self._seen = self._core.cursor
        if not self.busy and self.changed:
            self._alarm.at(self._term.runtime.monotonic() + self._term.config.dispatch.interval_ms / 1000)

    def ride(self) -> tuple[bytes, Done] | None:
        """The cursor as a command to write with the batch that closes now; None if the cursor has not changed, or a
        proposal of it is under way."""
        return None if self.busy or not self.changed else self._command()

    def send(self) -> None:
        """Propose the cursor in a batch of its own if it has changed and no proposal of it is under way."""
        if (riding := self.ride()) is not None:
            self._term.propose(*riding)

    def _command(self) -> tuple[bytes, Done]:
        cursor = self._seen
        self.busy, self._proposed = True, max(cursor, self._proposed)
        self._alarm.cancel()

        def done(_: Any, error: HadelayError | None) -> None:
            if self._term.over:
                return
            self.busy = False
            if error is None:
                self._sent = cursor
            self._settled()

        return encode_cursor(*cursor), done


def _second(cursor: tuple[int, int, int]) -> int:
    return cursor[0] * SECONDS_PER_HOUR + cursor[1]
