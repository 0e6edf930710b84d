"""What the Raft adapter asks of the rest of the node: the state machine, and whoever can install a snapshot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from hadelay.errors import ConfigError, HadelayError
from hadelay.members import Members
from hadelay.raft.ready import Ready
from hadelay.storage.manifest import Manifest

#: done(result, error): exactly one of them is not None (a result may itself be None); called once, on the loop.
Done = Callable[[Any, HadelayError | None], None]
#: A command, and whom to tell what apply said of it, or why that is not known.
Propose = Callable[[bytes, Done], None]
#: done(error): None when it went well.
Finished = Callable[[HadelayError | None], None]
#: done(index, error, ready): everything committed anywhere before the read is at or before `index`.
ReadDone = Callable[[int, HadelayError | None, Ready], None]

#: The incarnation of the nodes a cluster was founded with: admitted from the first entry on. Later ones are larger.
FOUNDING = 1


class Installer(Protocol):
    """Takes in the files of one manifest, in a place of their own, until `finish` switches to them."""

    def have(self, name: str) -> int:
        """How many bytes of this file are already there from an earlier try (pulling goes on from there)."""
        ...

    def write(self, name: str, offset: int, data: bytes) -> None:
        """DiskFull: nothing of it is kept, and a later try may find room."""
        ...

    def finish(self, done: Finished) -> None:
        """Verify lengths and CRCs, sync, switch by rename, and reload the state machine from it; then `done`. After a
        FatalError the node must stop; after any other error it is what it was."""
        ...

    def abort(self) -> None:
        """The pull was given up (another manifest, or the node stops). What is there may be kept for the next try."""
        ...


class Machine(Protocol):
    """The replicated state machine, as Raft sees it. Everything is called on the loop; nothing may block."""

    def apply(self, index: int, term: int, command: bytes) -> Any:
        """Carry out one committed command. Never twice, in order, on every node. An exception stops the node."""
        ...

    def on_leader(self, term: int) -> None:
        """This node leads `term` and has applied everything committed before it (the no-op of the term is applied)."""
        ...

    def on_follower(self) -> None:
        """Leadership is over (also when `on_leader` was never reached)."""
        ...

    def incarnation(self, node: str) -> int | None:
        """The incarnation of `node` that a leader has committed last; None if the log never said."""
        ...

    def incarnation_command(self, node: str, incarnation: int) -> bytes:
        """An entry which, when applied, makes `incarnation(node)` answer `incarnation`."""
        ...

    def on_incarnation(self, incarnation: int) -> None:
        """A peer has shown that this disk was rewound: this node goes on as another incarnation. Note it durably."""
        ...

    def members(self) -> tuple[int, Members]:
        """What the log has said of the members as far as it is applied, and where; (0, ()) if it never did."""
        ...

    def members_in(self, command: bytes) -> Members | None:
        """The members that this entry, once it is in the log, puts in force; None for every other entry. Quick: each
        entry is asked about."""
        ...

    def members_command(self, members: Members) -> bytes:
        """An entry which, when it is in the log, puts these members in force."""
        ...

    def on_members(self) -> None:
        """The members in force, or whom this node has links with, may have changed."""
        ...

    def heartbeat_info(self) -> bytes:
        """Rides in every heartbeat of this leader (cluster time); at most 1 KiB."""
        ...

    def on_heartbeat_info(self, info: bytes) -> None: ...

    def on_message(self, peer: str, kind: int, payload: bytes) -> None:
        """A frame with a kind of 64 or above: the node's own traffic on the node link."""
        ...

    def on_link(self, peer: str, up: bool) -> None:
        """A link is there and its greeting is accepted, or it is gone."""
        ...

    def manifest(self) -> Manifest | None:
        """The last durable checkpoint; its files stay until `release(manifest)`. None: there is none yet."""
        ...

    def read_chunk(self, manifest: Manifest, name: str, offset: int, size: int) -> bytes: ...

    def release(self, manifest: Manifest) -> None: ...

    def install(self, manifest: Manifest) -> Installer:
        """DiskFull when there is no room for it."""
        ...


@dataclass(frozen=True, kw_only=True)
class RaftTuning:
    #: Silence after which a follower asks for votes, drawn anew from this range each time. The lower end is also how
    #: long a leader may go without a majority. Shorter: faster failover when a machine dies silently, more elections on
    #: a machine that stalls. (A killed process closes its links, and that is noticed at once.)
    election_min_ms: int = 200
    election_max_ms: int = 400
    #: A leader's sign of life; a fifth of election_min_ms survives four lost ones.
    heartbeat_ms: int = 40
    #: After a link to the leader was reset, followers campaign after a random part of this.
    reset_spread_ms: int = 60
    #: A leader whose oldest unfinished sync is older hands over.
    slow_sync_ms: int = 1_000
    #: Proposals pause for a planned transfer; they go on here when nobody took over.
    transfer_ms: int = 300
    #: Somebody acts on `has_leader_lease`: after a transfer that nobody took over, an election settles who leads.
    fence_failed_transfer: bool = False
    #: A proposal that has not been decided after this long is answered `OutcomeUnknown`.
    propose_timeout_ms: int = 5_000
    #: The same, once leadership was lost.
    deposed_timeout_ms: int = 1_000
    #: Waiting proposals beyond this are refused with `Overloaded`.
    max_waiting: int = 10_000
    max_entry_bytes: int = 4 << 20
    #: Entries per append frame, and unacknowledged per follower.
    append_bytes: int = 1 << 20
    window_bytes: int = 4 << 20
    #: Longest stretch of applying before the loop gets its turn.
    apply_slice_ms: float = 2.0
    #: Pulling a snapshot: bytes per request, and per second.
    chunk_bytes: int = 256 << 10
    pull_bytes_per_s: int = 64 << 20
    #: It goes on alone, whatever the log says of other members: a majority of them is gone for good.
    survivor: bool = False
    #: Kept below a checkpoint for followers that lag; beyond it they get files.
    journal_keep_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat_ms * 3 <= self.election_min_ms < self.election_max_ms:
            raise ConfigError(
                "raft: needs 3 × heartbeat_ms ≤ election_min_ms < election_max_ms, not "
                f"{self.heartbeat_ms}, {self.election_min_ms}, {self.election_max_ms}"
            )
        if not 0 < self.max_entry_bytes <= self.window_bytes <= 8 << 20:
            raise ConfigError("raft: needs max_entry_bytes ≤ window_bytes ≤ 8 MiB")


@dataclass
class RaftStats:
    """Counters for /metrics; only ever grow."""

    elections: int = 0
    leader_changes: int = 0
    proposals: int = 0
    syncs: int = 0
    sync_seconds: float = 0.0
    #: Upper bounds in seconds → how many syncs took no longer (the last: all).
    sync_buckets: dict[float, int] = field(default_factory=dict)
    snapshots_sent: int = 0
    snapshots_installed: int = 0
    snapshot_sent_bytes: int = 0
    snapshot_received_bytes: int = 0
