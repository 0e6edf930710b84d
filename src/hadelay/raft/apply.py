"""Applying what is committed, in slices, and answering those who proposed it.

An entry is applied once, in order, and only when this node's own disk has it, so a checkpoint never knows more than the
journal beside it. Whatever `apply` raises stops the node. Whoever proposed is always answered: with the result; with
NoLeader if another entry took the place; with OutcomeUnknown if nothing is known in time.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from hadelay.errors import HadelayError, NoLeader, OutcomeUnknown
from hadelay.raft.library import NO_OP
from hadelay.raft.ports import Done, Finished
from hadelay.raft.segment import Entry

if TYPE_CHECKING:
    from hadelay.raft.node import RaftNode

_READ_BYTES = 1 << 20


class _Waiter(NamedTuple):
    term: int
    done: Done
    deadline: float


class Applier:
    def __init__(self, node: RaftNode) -> None:
        self.node = node
        self.applied, self.applied_term = node.journal.base_index, node.journal.base_term
        self._ready: deque[Entry] = deque()
        #: In the order of their indexes, and so of their deadlines.
        self._waiters: dict[int, _Waiter] = {}
        self._reads: list[tuple[int, Finished]] = []
        self._running = self._scheduled = False

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    def wait(self, index: int, term: int, done: Done, deadline: float) -> None:
        before = self._waiters.pop(index, None)
        if before is not None:  # of an earlier term, and cut off since: the next entry takes its place
            self.node.call_soon(before.done, None, OutcomeUnknown("not decided while this node led"))
        self._waiters[index] = _Waiter(term, done, deadline)

    def jump(self, index: int, term: int) -> None:
        """The state machine holds everything up to `index` by other means (checkpoint, snapshot)."""
        self.applied, self.applied_term = index, term
        self._ready.clear()
        self.expire(float("inf"), upto=index)
        self._answer_reads()

    def run(self) -> None:
        """Apply what may be applied: at most a slice now, the rest when the loop comes round."""
        node = self.node
        if self._running or self._scheduled or node.snapshots.installing:
            return
        self._running = True
        monotonic = node.runtime.monotonic
        end = monotonic() + node.config.apply_slice_ms / 1000
        limit = min(node.core.raftCommitIndex, node.journal.synced_index)
        try:
            while self.applied < limit:
                if not self._ready:
                    self._ready.extend(node.journal.entries(self.applied + 1, _READ_BYTES))
                self._apply(self._ready.popleft())
                if monotonic() >= end:
                    break
                limit = min(node.core.raftCommitIndex, node.journal.synced_index)
            # Entries read ahead may still be cut off by another leader: keep none that are not committed.
            if self._ready and self._ready[-1][1] > limit:
                self._ready.clear()
        finally:
            self._running = False
        self._answer_reads()
        node.applied()
        if self.applied < limit and not node.stopped:
            self.soon()

    def soon(self) -> None:
        """`run`, when the loop comes round."""
        if not self._scheduled:
            self._scheduled = True
            self.node.call_soon(self._again)

    def _again(self) -> None:
        self._scheduled = False
        self.run()

    def _apply(self, entry: Entry) -> None:
        command, index, term, _ = entry
        assert index == self.applied + 1, "entries are applied in order"
        result = None if command == NO_OP else self.node.machine.apply(index, term, command)
        self.applied, self.applied_term = index, term
        self.node.membership.applied(index)
        waiter = self._waiters.pop(index, None)
        if waiter is None:
            return
        if waiter.term == term:
            waiter.done(result, None)
        else:
            waiter.done(None, NoLeader("another leader was elected before this was committed", retry_after_ms=50))

    # -- those who wait
    def deposed(self) -> None:
        """What was proposed here may still be committed by the next leader: wait for that, but not for long."""
        latest = self.node.runtime.monotonic() + self.node.config.deposed_timeout_ms / 1000
        self._waiters = {
            index: waiter._replace(deadline=min(waiter.deadline, latest)) for index, waiter in self._waiters.items()
        }

    def expire(self, now: float, upto: int | None = None) -> None:
        for index in list(self._waiters):
            waiter = self._waiters[index]
            if waiter.deadline > now or (upto is not None and index > upto):
                break
            del self._waiters[index]
            waiter.done(None, OutcomeUnknown("not decided in time; it may or may not have happened"))

    def when_applied(self, index: int, done: Finished) -> None:
        if self.applied >= index:
            done(None)
        else:
            self._reads.append((index, done))

    def _answer_reads(self) -> None:
        if self._reads:
            ready = [done for index, done in self._reads if index <= self.applied]
            self._reads = [read for read in self._reads if read[0] > self.applied]
            for done in ready:
                done(None)

    def end(self, error: HadelayError) -> None:
        """The node stops: nobody waits any more."""
        waiters, self._waiters = self._waiters, {}
        reads, self._reads = self._reads, []
        for waiter in waiters.values():
            waiter.done(None, OutcomeUnknown("the node stopped; it may or may not have happened"))
        for _, done in reads:
            done(error)
