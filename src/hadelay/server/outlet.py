"""Where a node's batches go: into the log when it leads, over the node link to the leader when another does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hadelay.codec.entries import encode_entry
from hadelay.errors import HadelayError, NoLeader
from hadelay.raft.node import RaftNode
from hadelay.server.clustertime import ClusterClock
from hadelay.server.link import Link
from hadelay.server.replica import Replica


class Outlet:
    """One per node."""

    def __init__(
        self,
        raft: RaftNode,
        replica: Replica,
        clock: ClusterClock,
        link: Link,
        leading: Callable[[], int],
        timeout_s: float,
    ) -> None:
        """leading: the term this node leads, 0 when it does not. timeout_s: of a batch sent to the leader."""
        self._raft, self._replica, self._clock, self._link = raft, replica, clock, link
        self.term, self._timeout_s = leading, timeout_s

    def ready(self) -> bool:
        """Somebody is there to take a batch now."""
        leader = self._raft.leader
        return bool(self.term()) or (
            leader is not None and leader != self._raft.name and self._raft.membership.connected(leader)
        )

    def to(self) -> str | None:
        """The node that gets a batch now, this one if it leads; None when nobody is known to lead."""
        return self._raft.name if self.term() else self._raft.leader

    def send(self, commands: list[bytes], done: Callable[[Sequence[Any] | None, HadelayError | None], None]) -> None:
        """`done` gets a result per command. Its NoLeader means: nothing happened, try again."""
        raft = self._raft
        if self.term():
            now_ms = self._clock.read(raft.runtime.monotonic())
            raft.propose(encode_entry(now_ms, commands, self._replica.ledger.level), done)
        elif raft.leader is None:
            done(None, NoLeader("no leader"))
        else:
            self._link.call(raft.leader, "submit", commands, self._timeout_s, done)
