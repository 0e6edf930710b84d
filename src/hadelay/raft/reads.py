"""Linearizable reads on any node (ReadIndex): one question to the leader for all reads that wait, no log entry.

The leader answers with its commit index once a majority has confirmed that it still leads; the asker reads when it has
applied that far itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hadelay.errors import HadelayError, NoLeader
from hadelay.raft import messages
from hadelay.raft.peer import Peer
from hadelay.raft.ports import Finished

if TYPE_CHECKING:
    from hadelay.raft.node import RaftNode


class Reads:
    def __init__(self, node: RaftNode) -> None:
        self.node = node
        self._next: list[Finished] = []
        #: Question number → those whom its answer helps.
        self._asked: dict[int, list[Finished]] = {}
        self._number = 0
        self._scheduled = False

    def read(self, done: Finished) -> None:
        self._next.append(done)
        if not self._scheduled:
            self._scheduled = True
            self.node.call_soon(self._ask)

    def _ask(self) -> None:
        self._scheduled = False
        waiting, self._next = self._next, []
        node = self.node
        leader = node.leader
        if node.is_leader:
            node.leader_role.read(lambda index, error: self._answer(waiting, index, error))
        elif leader is None or leader == node.name or not node.connected(leader):
            self._answer(waiting, 0, NoLeader("no leader is known", retry_after_ms=100))
        else:
            self._number += 1
            self._asked[self._number] = waiting
            node.network.send(leader, messages.encode(messages.READ, self._number), True)
            node.call_later(node.config.propose_timeout_ms / 1000, self._expire, self._number)

    def _answer(self, waiting: list[Finished], index: int, error: HadelayError | None) -> None:
        for done in waiting:
            if error is None:
                self.node.applier.when_applied(index, done)
            else:
                done(error)

    def _expire(self, number: int) -> None:
        self._answer(self._asked.pop(number, []), 0, NoLeader("the leader does not answer", retry_after_ms=100))

    def leader_lost(self) -> None:
        for number in list(self._asked):
            self._expire(number)

    def on_read(self, peer: Peer, data: bytes) -> None:
        (number,) = messages.decode(data, int)

        def answer(index: int, error: HadelayError | None) -> None:
            reply = messages.encode(messages.READ_REPLY, number, error is None, index)
            self.node.network.send(peer.name, reply, True)

        if self.node.is_leader:
            self.node.leader_role.read(answer)
        else:
            answer(0, NoLeader())

    def on_read_reply(self, peer: Peer, data: bytes) -> None:
        number, led, index = messages.decode(data, int, bool, int)
        error = None if led else NoLeader(f"{peer.name} does not lead (any more)", retry_after_ms=50)
        self._answer(self._asked.pop(number, []), index, error)
