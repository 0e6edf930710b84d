"""Sends this node's batches of commands: into its own log if it leads, else over the node link to the leader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hadelay.codec.entries import encode_entry
from hadelay.errors import HadelayError, NoLeader
from hadelay.raft.node import RaftNode
from hadelay.server.checkpoints import Replica
from hadelay.server.ledterm import LedTerm
from hadelay.server.peers import Peers


class Way(NamedTuple):
    """Destination of a batch that is sent now."""

    #: The term that this node leads; 0 when it does not lead.
    term: int
    #: The leader as far as this node knows; None when it knows no leader.
    to: str | None
    #: Whether this node leads, or has a link to the leader.
    ready: bool


class Outlet:
    """Sends this node's batches: into its own log if it leads, else over the node link to the leader."""

    def __init__(self, raft: RaftNode, replica: Replica, peers: Peers, led: LedTerm, timeout_s: float) -> None:
        """timeout_s: timeout of a batch sent to the leader."""
        self._raft, self._replica, self._clock, self._link = raft, replica, peers.clock, peers.link
        self._led, self._timeout_s = led, timeout_s

    def way(self) -> Way:
        raft, term = self._raft, self._led.number
        if term:
            return Way(term, raft.name, True)
        leader = raft.leader
        return Way(0, leader, leader not in (None, raft.name) and raft.membership.connected(leader))

    def slow(self) -> bool:
        """Whether this node's disk is slow, so that syncs of its journal overlap."""
        return self._raft.journal.slow

    def send(
        self, way: Way, commands: list[bytes], done: Callable[[Sequence[Any] | None, HadelayError | None], None]
    ) -> None:
        """Send commands as one batch; `done` gets a result per command. The error NoLeader means that nothing happened,
        and the batch may be sent again."""
        raft = self._raft
        if way.term:
            now_ms = self._clock.read(raft.runtime.monotonic())
            raft.propose(encode_entry(now_ms, commands, self._replica.ledger.level), done)
        elif way.to is None:
            done(None, NoLeader("no leader"))
        else:
            self._link.call(way.to, "submit", commands, self._timeout_s, done)
