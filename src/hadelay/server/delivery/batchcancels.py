"""Cancelled batches on the leader: finds their waiting members, and proposes step by step to cancel them.

Apply does not search, because the table `batchof` is too large: it has the members of all batches, settled ones too.
The ledger keeps only two counts of the search (BatchCounts), so the next leader begins the search anew.
"""

from collections.abc import Generator
from typing import Any

from hadelay.codec.batches import MAX_STEP, encode_step
from hadelay.codec.results import JobResult
from hadelay.errors import HadelayError
from hadelay.ledger.batches.members import BATCHOF, to_cancel
from hadelay.server.delivery.term import Term

Rows = list[tuple[bytes, bytes]]

#: Pauses after a step, and after a step that failed, in seconds: between steps, the log is free for commands whose
#: clients wait.
_PAUSE_S, _RETRY_S = 0.02, 0.5
#: Number of rows of table `batchof` that are read at once. A row names the members of batches among 256 index
#: entries.
_ROWS = 8


class BatchCancels:
    """Searches for waiting members of cancelled batches. One object per term; one search serves all batches that were
    cancelled before it began."""

    def __init__(self, term: Term) -> None:
        self._term, self._ledger = term, term.ledger
        self._idle = True
        #: Number of BATCH_CANCELs that were applied before the search began; the batches that they cancelled accept no
        #: more members.
        self._cancels = 0
        #: Key of table `batchof` from which the search continues, None at the end.
        self._start: bytes | None = b""
        #: Ids of the members that were found and that no BATCH_STEP has named yet.
        self._ids: list[int] = []
        #: The running read of table `batchof`; each turn of the event loop reads one slice.
        self._read: Generator[None, None, Rows] | None = None
        self._alarm = term.alarm(self._look)
        self.watch()

    def watch(self) -> None:
        """Begin a search if the entries just applied cancelled a batch. It may be called after every entry, because it
        costs little."""
        counts = self._ledger.batches
        if self._idle and counts.searched < counts.cancels:
            self._idle = False
            self._begin(0.0)

    def _begin(self, after_s: float) -> None:
        self._cancels, self._start, self._ids = self._ledger.batches.cancels, b"", []
        self._rest(after_s)

    def _rest(self, seconds: float) -> None:
        self._alarm.at(self._term.runtime.monotonic() + seconds)

    def _look(self) -> None:
        """Propose a step if enough ids were found for a step; otherwise read one more slice."""
        if len(self._ids) >= MAX_STEP or self._start is None:
            self._step()
            return
        if self._read is None:
            self._read = self._ledger.tables.range_slices(BATCHOF, self._start, None, _ROWS)
        try:
            next(self._read)
        except StopIteration as done:
            self._read = None
            self._found(done.value)
        else:
            self._rest(0.0)

    def _found(self, rows: Rows) -> None:
        self._start = rows[-1][0] + b"\0" if len(rows) == _ROWS else None
        for key, row in rows:
            self._ids += to_cancel(self._ledger, key, row)
        self._rest(0.0)

    def _step(self) -> None:
        ids, self._ids = self._ids[:MAX_STEP], self._ids[MAX_STEP:]
        last = self._start is None and not self._ids
        self._term.propose_behind(encode_step(self._cancels if last else 0, ids), self._stepped)

    def _stepped(self, result: Any, error: HadelayError | None) -> None:
        counts = self._ledger.batches
        if not isinstance(result, JobResult):
            self._begin(_RETRY_S)
        elif counts.searched >= self._cancels:
            self._idle = True
            self.watch()
        else:
            self._rest(_PAUSE_S)
