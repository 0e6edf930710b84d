"""The way of a node's batches to the leader: into its own log, or over the node link."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hadelay.codec.entries import encode_entry
from hadelay.errors import HadelayError, NoLeader
from hadelay.raft.node import RaftNode
from hadelay.server.checkpoints import Replica
from hadelay.server.peers import Peers


class Outlet:
    """Sends a node's batches: into its own log when the node leads, else over the node link to the leader."""

    def __init__(
        self, raft: RaftNode, replica: Replica, peers: Peers, leading: Callable[[], int], timeout_s: float
    ) -> None:
        """leading: returns the term that this node leads, else 0. timeout_s: timeout of a batch sent to the leader."""
        self._raft, self._replica, self._clock, self._link = raft, replica, peers.clock, peers.link
        self.term, self._timeout_s = leading, timeout_s

    def ready(self) -> bool:
        """Whether this node leads or is connected to the leader."""
        leader = self._raft.leader
        return bool(self.term()) or (
            leader is not None and leader != self._raft.name and self._raft.membership.connected(leader)
        )

    def slow(self) -> bool:
        """Whether this node's disk is slow."""
        return self._raft.journal.slow

    def to(self) -> str | None:
        """The leader as far as this node knows; None when it knows none."""
        return self._raft.name if self.term() else self._raft.leader

    def send(self, commands: list[bytes], done: Callable[[Sequence[Any] | None, HadelayError | None], None]) -> None:
        """Send commands as one batch; `done` gets a result per command. The error NoLeader means that nothing happened,
        and the batch may be sent again."""
        raft = self._raft
        if self.term():
            now_ms = self._clock.read(raft.runtime.monotonic())
            raft.propose(encode_entry(now_ms, commands, self._replica.ledger.level), done)
        elif raft.leader is None:
            done(None, NoLeader("no leader"))
        else:
            self._link.call(raft.leader, "submit", commands, self._timeout_s, done)
