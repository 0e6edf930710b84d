"""Linearizable reads on any node (ReadIndex): one request to the leader for all waiting reads, without a log entry.

The leader answers with its commit index once a majority has confirmed that it leads. The requesting node reads when it
has applied up to that index.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hadelay.errors import HadelayError, NoLeader
from hadelay.raft import messages
from hadelay.raft.membership import Membership
from hadelay.raft.part import Part, Shared
from hadelay.raft.peer import Peer
from hadelay.raft.ports import Finished, ReadDone
from hadelay.raft.ready import Ready

#: confirm(done, now, ready), on the leader: done(index, error, ready) gets the index that a read must have applied.
Confirm = Callable[[ReadDone, float, Ready], None]


class Reads(Part):
    def __init__(
        self, shared: Shared, members: Membership, confirm: Confirm, when_applied: Callable[[int, Finished], None]
    ) -> None:
        super().__init__(shared)
        self._members, self._confirm, self._when_applied = members, confirm, when_applied
        self._next: list[Finished] = []
        #: Number of a request → the reads that wait for it.
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
                self._when_applied(index, done)
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
