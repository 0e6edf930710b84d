"""Interface Machine, which Raft needs from the rest of the node; and Raft's settings and counters."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from hadelay.errors import ConfigError, HadelayError
from hadelay.members import Members
from hadelay.storage.snapshots import Installer, Manifest

#: Callback done(result, error) of a proposal: after a success, error is None (and result may be None); after a failure,
#: result is None. Called once, on the loop.
Done = Callable[[Any, HadelayError | None], None]
#: Function propose(command, done): `done` receives the result of apply, or the reason why the result is unknown.
Propose = Callable[[bytes, Done], None]
#: Callback done(error) at the end of an operation; error is None on success.
Finished = Callable[[HadelayError | None], None]

#: Incarnation number of the founding members of a cluster; the log need not admit it. A node whose disk was lost or
#: rewound gets a larger number.
FOUNDING = 1


class Machine(Protocol):
    """The replicated state machine, as Raft sees it. All methods are called on the loop and must not block."""

    def apply(self, index: int, term: int, command: bytes) -> Any:
        """Apply a committed command. On every node, each command is applied once, in the same order. An exception stops
        the node."""
        ...

    def on_leader(self, term: int) -> None:
        """Called when this node leads `term` and has applied the no-op entry that began the term."""
        ...

    def on_follower(self) -> None:
        """Called when this node stops leading, even if `on_leader` was never called for the term."""
        ...

    def incarnation(self, node: str) -> int | None:
        """Last committed incarnation of `node`; None if the log has none."""
        ...

    def incarnation_command(self, node: str, incarnation: int) -> bytes:
        """Encode an entry whose apply sets `incarnation(node)` to the given number."""
        ...

    def on_incarnation(self, incarnation: int) -> None:
        """Durably note a new incarnation of this node: a peer has shown that this disk was rewound."""
        ...

    def members(self) -> tuple[int, Members]:
        """Last applied list of members, as (index of its entry, members); (0, ()) if no list was applied."""
        ...

    def members_in(self, command: bytes) -> Members | None:
        """Members that `command` puts in force; None if it changes none. Called for every entry: must be fast."""
        ...

    def members_command(self, members: Members) -> bytes:
        """Encode an entry that puts these members in force once the entry is in the log."""
        ...

    def on_members(self) -> None:
        """Called when the members in force may have changed, or the nodes with which this node has links."""
        ...

    def heartbeat_info(self) -> bytes:
        """Payload of the heartbeats that this leader sends (cluster time), at most 1 KiB."""
        ...

    def on_heartbeat_info(self, info: bytes) -> None: ...

    def on_message(self, peer: str, kind: int, payload: bytes) -> None:
        """Handle a frame of the node's own traffic (kind ≥ 64), which is not Raft's."""
        ...

    def on_link(self, peer: str, up: bool) -> None:
        """Called when the link to a peer is up and its greeting accepted, or when the link is down."""
        ...

    @property
    def checkpointed(self) -> int:
        """Index of the last durable checkpoint; 0: there is none yet."""
        ...

    def manifest(self) -> Manifest | None:
        """The last durable checkpoint; None if there is none yet, or its files are being made. The files stay until
        `release(manifest)`."""
        ...

    def read_chunk(self, manifest: Manifest, name: str, offset: int, size: int) -> bytes: ...

    def release(self, manifest: Manifest) -> None: ...

    def install(self, manifest: Manifest) -> Installer:
        """Prepare to receive a snapshot. DiskFull when the disk has no room for its files; BadFrame when the manifest
        does not list the files of a snapshot."""
        ...


@dataclass(frozen=True, kw_only=True)
class RaftTuning:
    #: Range of the random election timeout: the silence after which a follower asks for votes. A leader without a
    #: majority steps down after the lower end. Shorter: faster failover when a machine dies silently, but more
    #: elections on a machine that stalls. (A killed process closes its links, which peers notice at once.)
    election_min_ms: int = 200
    election_max_ms: int = 400
    #: Interval of heartbeats; a fifth of election_min_ms survives four lost heartbeats.
    heartbeat_ms: int = 40
    #: Upper limit of the random delay before a campaign, after a reset of the link to the leader.
    reset_spread_ms: int = 60
    #: Age, in ms, of an unfinished sync of the journal at which the leader hands leadership over, because its disk is
    #: slow.
    slow_sync_ms: int = 1_000
    #: Timeout of a planned transfer, during which proposals wait.
    transfer_ms: int = 300
    #: Whether to force an election after a failed transfer of leadership. Set it if `has_leader_lease` is used: else
    #: the target of the transfer may still take over.
    fence_failed_transfer: bool = False
    #: Timeout of a proposal, after which it gets OutcomeUnknown; and limit of the time left to waiting proposals when
    #: this node loses leadership.
    propose_timeout_ms: int = 5_000
    deposed_timeout_ms: int = 1_000
    #: Limit of waiting proposals; beyond it, proposals are refused with Overloaded.
    max_waiting: int = 10_000
    max_entry_bytes: int = 4 << 20
    #: Limits: bytes per append frame; unacknowledged bytes per follower, at which it gets no more entries.
    append_bytes: int = 1 << 20
    window_bytes: int = 4 << 20
    #: Limit of the time, in ms, for which entries are applied in one turn of the event loop.
    apply_slice_ms: float = 2.0
    #: Limits of bytes per request, and of bytes per second, when a follower pulls a snapshot.
    chunk_bytes: int = 256 << 10
    pull_bytes_per_s: int = 64 << 20
    #: Whether to ignore the member list in the log and run with the configured members: for use after the permanent
    #: loss of a majority of the log's members.
    survivor: bool = False
    #: Bytes of journal, before the last checkpoint, that are kept for followers that lag; a follower further behind
    #: gets a snapshot.
    journal_keep_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat_ms * 3 <= self.election_min_ms < self.election_max_ms:
            raise ConfigError(
                "raft: needs 3 × heartbeat_ms ≤ election_min_ms < election_max_ms, not "
                f"{self.heartbeat_ms}, {self.election_min_ms}, {self.election_max_ms}"
            )
        if not 0 < self.max_entry_bytes <= self.window_bytes <= 8 << 20:
            raise ConfigError(
                f"raft: needs max_entry_bytes ≤ window_bytes ≤ 8 MiB, not {self.max_entry_bytes}, {self.window_bytes}"
            )


@dataclass
class RaftStats:
    """Raft's counters for the page /metrics."""

    elections: int = 0
    leader_changes: int = 0
    proposals: int = 0
    syncs: int = 0
    sync_seconds: float = 0.0
    #: Upper bound of a sync's duration in seconds → number of syncs in this bucket.
    sync_buckets: dict[float, int] = field(default_factory=dict)
    snapshots_sent: int = 0
    snapshots_installed: int = 0
    snapshot_sent_bytes: int = 0
    snapshot_received_bytes: int = 0
