"""Applies committed entries, in slices, and answers proposals and reads.

An entry is applied once, in order, and only when this node's own disk has it, so a checkpoint is never ahead of the
journal. An error of `apply` stops the node. Each proposal is answered: with the result; with NoLeader if another entry
took its index; with OutcomeUnknown if the outcome is not known in time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from hadelay.errors import HadelayError, NoLeader, OutcomeUnknown
from hadelay.raft import messages
from hadelay.raft.library import NO_OP
from hadelay.raft.membership import Membership
from hadelay.raft.part import Peer, RaftPart, ReadDone, Ready, Shared
from hadelay.raft.ports import Done, Finished
from hadelay.raft.segment import Entry

_READ_BYTES = 1 << 20
Confirm = Callable[[ReadDone, float, Ready], None]


class _Waiter(NamedTuple):
    term: int
    done: Done
    deadline: float


class Applier(RaftPart):
    def __init__(self, shared: Shared, members: Membership) -> None:
        super().__init__(shared)
        self._members = members
        self.applied, self.applied_term = shared.journal.base_index, shared.journal.base_term
        #: Whether a snapshot is being installed; no entries are applied meanwhile.
        self.installing = False
        self._ready: deque[Entry] = deque()
        #: Waiting proposals by the index of their entry, in ascending order; their deadlines ascend, too.
        self.waiters: dict[int, _Waiter] = {}
        #: Waiting reads, as (index up to which entries must be applied before the read, monotonic deadline, done). The
        #: deadline counts only while no leader is known.
        self._reads: list[tuple[int, float, Finished]] = []
        self._scheduled = False

    def wait(self, index: int, term: int, done: Done, now: float, ready: Ready) -> None:
        before = self.waiters.pop(index, None)
        # A proposal still waiting at `index` is of an earlier term; its entry was replaced, so its outcome is unknown.
        if before is not None:
            error = OutcomeUnknown("leadership changed before this command was decided; it may or may not take effect")
            ready.answers.append(partial(before.done, None, error))
        self.waiters[index] = _Waiter(term, done, now + self._config.propose_timeout_ms / 1000)

    def jump(self, index: int, term: int) -> None:
        """Continue applying after `index`: from a checkpoint or snapshot, the state machine has all entries up to
        it."""
        self.applied, self.applied_term = index, term
        self._ready.clear()
        self.expire(float("inf"), upto=index)
        self._answer_reads()

    def run(self, now: float, ready: Ready) -> None:
        """Apply one slice of the committed entries; the rest follows in the next turns of the loop."""
        if self._scheduled or self.installing:
            return
        end, limit = now + self._config.apply_slice_ms / 1000, self._limit()
        while self.applied < limit:
            if not self._ready:
                self._ready.extend(self._journal.entries(self.applied + 1, _READ_BYTES))
            self._apply(self._ready.popleft(), now, ready)
            if self._runtime.monotonic() >= end:
                break
        # Drop the entries read ahead from the journal if the last of them is not committed: a new leader may still
        # truncate it.
        if self._ready and self._ready[-1][1] > limit:
            self._ready.clear()
        if self._reads:
            self._answer_reads()
        if self.applied < limit:
            self.soon(ready)

    def _limit(self) -> int:
        return min(self._core.commit_index, self._journal.synced_index)

    def soon(self, ready: Ready) -> None:
        """Schedule `run` for the next turn of the event loop, if an entry can be applied."""
        if not self._scheduled and self.applied < self._limit():
            self._scheduled = True
            ready.later(0.0, self._again)

    def _again(self, now: float, ready: Ready) -> None:
        self._scheduled = False
        ready.apply = True

    def _apply(self, entry: Entry, now: float, ready: Ready) -> None:
        command, index, term, _ = entry
        assert index == self.applied + 1, "entries are applied in order"
        result = None if command == NO_OP else self._machine.apply(index, term, command)
        self.applied, self.applied_term = index, term
        if self._members.appended_lists:
            self._members.applied(index, now, ready)
        waiter = self.waiters.pop(index, None)
        if waiter is None:
            return
        if waiter.term == term:
            waiter.done(result, None)
        else:
            what = "another leader was elected before this command was committed; the command had no effect"
            waiter.done(None, NoLeader(what, retry_after_ms=50))

    def deposed(self, now: float) -> None:
        """Called when this node loses leadership: shorten the deadlines of waiting proposals, which the next leader may
        still commit."""
        latest = now + self._config.deposed_timeout_ms / 1000
        self.waiters = {
            index: waiter._replace(deadline=min(waiter.deadline, latest)) for index, waiter in self.waiters.items()
        }

    def expire(self, now: float, upto: int | None = None) -> None:
        for index in list(self.waiters):
            waiter = self.waiters[index]
            if waiter.deadline > now or (upto is not None and index > upto):
                break
            del self.waiters[index]
            waiter.done(None, OutcomeUnknown("the command was not committed in time; it may or may not take effect"))

    def when_applied(self, index: int, done: Finished) -> None:
        if self.applied >= index:
            done(None)
        else:
            deadline = self._runtime.monotonic() + self._config.propose_timeout_ms / 1000
            self._reads.append((index, deadline, done))

    def _answer_reads(self) -> None:
        ready = [done for index, _, done in self._reads if index <= self.applied]
        self._reads = [read for read in self._reads if read[0] > self.applied]
        for done in ready:
            done(None)

    def expire_reads(self, now: float) -> None:
        """Called while no leader is known: refuse reads that wait too long, because their entries may never come."""
        late = [done for _, deadline, done in self._reads if deadline <= now]
        self._reads = [read for read in self._reads if read[1] > now]
        for done in late:
            done(NoLeader("no leader is known", retry_after_ms=100))

    def end(self, error: HadelayError) -> None:
        """Answer all waiting proposals and reads with an error, because the node stops."""
        waiters, self.waiters = self.waiters, {}
        reads, self._reads = self._reads, []
        for waiter in waiters.values():
            waiter.done(None, OutcomeUnknown("the node stopped; the command may or may not take effect"))
        for *_, done in reads:
            done(error)


class Reads(RaftPart):
    """Linearizable reads on any node (ReadIndex): one request to the leader for all waiting reads, without a log entry.

    The leader answers with its commit index once a majority has confirmed that it leads. The requesting node reads when
    it has applied up to that index.
    """

    def __init__(self, shared: Shared, members: Membership, applier: Applier, confirm: Confirm) -> None:
        """confirm(done, now, ready) runs on the leader: once a majority confirms that this node leads, it calls
        done(index, error, ready) with the commit index that a read must wait for. now: monotonic time of the event that
        is being handled; ready: collects what is to be done at the end of the event."""
        super().__init__(shared)
        self._members, self._applier, self._confirm = members, applier, confirm
        self._next: list[Finished] = []
        #: Number of a read request to the leader → reads that wait for the leader's answer.
        self._asked: dict[int, list[Finished]] = {}
        self._number = 0

    def read(self, done: Finished, now: float, ready: Ready) -> None:
        self._next.append(done)
        if len(self._next) == 1:
            ready.later(0.0, self._ask)

    def _ask(self, now: float, ready: Ready) -> None:
        waiting, self._next = self._next, []
        leader = self._core.leader
        if self._core.leads:
            self._confirm(partial(self._answer, waiting), now, ready)
        elif leader is None or not self._members.connected(leader):
            self._answer(waiting, 0, NoLeader("no leader is known", retry_after_ms=100), ready)
        else:
            self._number += 1
            self._asked[self._number] = waiting
            ready.send(leader, messages.encode(messages.READ, self._number))
            ready.later(self._config.propose_timeout_ms / 1000, self._expire, self._number)

    def _answer(self, waiting: list[Finished], index: int, error: HadelayError | None, ready: Ready) -> None:
        for done in waiting:
            if error is None:
                self._applier.when_applied(index, done)
            else:
                ready.answers.append(partial(done, error))

    def _expire(self, number: int, now: float, ready: Ready) -> None:
        waiting = self._asked.pop(number, [])
        self._answer(waiting, 0, NoLeader("the leader does not answer", retry_after_ms=100), ready)

    def leader_lost(self, now: float, ready: Ready) -> None:
        for number in list(self._asked):
            self._expire(number, now, ready)

    def on_read(self, peer: Peer, number: int, now: float, ready: Ready) -> None:
        def answer(index: int, error: HadelayError | None, ready: Ready) -> None:
            ready.send(peer.name, messages.encode(messages.READ_REPLY, number, error is None, index))

        if self._core.leads:
            self._confirm(answer, now, ready)
        else:
            answer(0, NoLeader(), ready)

    def on_reply(self, peer: Peer, number: int, led: bool, index: int, now: float, ready: Ready) -> None:
        error = None if led else NoLeader(f"{peer.name} does not lead (any more)", retry_after_ms=50)
        self._answer(self._asked.pop(number, []), index, error, ready)
