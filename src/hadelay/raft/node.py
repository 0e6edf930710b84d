"""RaftNode: one member of one group, and the only face that the rest of hadelay sees of Raft."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hadelay.raft.network import Buffer, Network
from hadelay.raft.ports import Done, Finished, Machine, RaftConfig, RaftStats
from hadelay.runtime import Runtime


class RaftNode:
    """Construct, `set_applied` to what the checkpoint holds, then `start`. Everything happens on the loop."""

    #: This node's name.
    name: str
    stats: RaftStats

    def __init__(
        self,
        name: str,
        peers: Mapping[str, str] | list[str],
        group: int,
        cluster_id: str,
        journal: object,
        network: Network,
        runtime: Runtime,
        machine: Machine,
        config: RaftConfig,
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        """`peers`: the names of the *other* members (a mapping's addresses are the network's business).

        `journal`: an opened `hadelay.raft.journal.Journal`. `on_fatal` is called at most once; the node does nothing any
        more afterwards, and the process has to end.
        """
        raise NotImplementedError

    def set_applied(self, index: int, term: int) -> None:
        """Before `start`: the machine already holds everything up to this entry (1, 0 when it is empty)."""
        raise NotImplementedError

    def start(self) -> None: ...

    def stop(self) -> None:
        """No more timers, frames or callbacks; what still waits is answered `OutcomeUnknown` now. Closes the journal."""

    # -- what it knows ------------------------------------------------------------------------------------------------
    @property
    def is_leader(self) -> bool:
        """What this node believes: another may have been elected. Only committed entries are proof."""
        raise NotImplementedError

    @property
    def leader(self) -> str | None:
        raise NotImplementedError

    @property
    def term(self) -> int:
        raise NotImplementedError

    @property
    def commit_index(self) -> int:
        raise NotImplementedError

    @property
    def applied_index(self) -> int:
        raise NotImplementedError

    @property
    def applied_term(self) -> int:
        raise NotImplementedError

    @property
    def last_index(self) -> int:
        raise NotImplementedError

    @property
    def synced_index(self) -> int:
        """The last entry on this node's own disk. Nothing beyond it is ever applied here."""
        raise NotImplementedError

    def status(self) -> dict[str, object]:
        """For /v1/cluster: role, term, leader, indexes, and per peer {up, match, incarnation, admitted, lag}."""
        raise NotImplementedError

    # -- what it does -------------------------------------------------------------------------------------------------
    def propose(self, command: bytes, done: Done) -> None:
        """One call, one entry of 2 bytes to max_entry_bytes. done(result of apply, None) once applied here, else an error:

        NoLeader (nothing happened), Overloaded, TooLarge, DiskFull (nothing happened), OutcomeUnknown.
        """
        raise NotImplementedError

    def read_index(self, done: Finished) -> None:
        """done(None) when this node has applied everything that was committed anywhere before this call (any node)."""
        raise NotImplementedError

    def transfer(self, to: str | None, done: Finished) -> None:
        """Hand leadership to `to` (None: whoever is furthest). Proposals wait meanwhile, at most transfer_ms."""
        raise NotImplementedError

    def compact(self, index: int, term: int) -> None:
        """A checkpoint of everything up to `index` is durable: whole segments before it may go."""
        raise NotImplementedError

    def send(self, peer: str, kind: int, payload: Buffer) -> bool:
        """The node's own traffic, `kind` 64 to 255. False, and nothing sent, when the peer is not linked or too slow."""
        raise NotImplementedError

    def connected(self, peer: str) -> bool:
        raise NotImplementedError


