"""HTTP API types about the cluster: members, health, tokens, audit trail, and the files of a node."""

from typing import Generic, Literal

from msgspec import field

from hadelay.api.base import At, DispatchSync, Document, Duration, Request


class Dispatch(Document, frozen=True):
    """Replicated dispatch cursor: hour, second, and number of that second's messages made ready so far."""

    hour: str
    second: int
    local_index: int
    sync: DispatchSync


class Member(Document, frozen=True):
    name: str
    http: str
    raft: str
    #: Role of the member: leader, follower, learner (does not vote yet), or unknown while the member is silent.
    role: str
    applied_index: str
    lag: int
    version: str
    #: Newest feature level of the member's program; 0 while the member is silent.
    feature_level: int
    clock_skew_ms: float | None
    #: Whether the member's disk has the free space that storage.min_free_bytes demands; omitted while the member is
    #: silent. If it is false for a live member, publishes are refused (507).
    has_space: bool | None = None
    #: Whether the member is drained: it takes no publishes and no receives. Omitted if false.
    drained: bool = False


class TookOver(Document, frozen=True):
    """Record of how a new leader resumed hand-outs."""

    #: Replicated dispatch cursor at which the new leader resumed: hour, second, and number within the second
    #: (localIndex).
    hour: str
    second: int
    local_index: int
    #: Number of messages that fell due before the take-over and were still to be delivered, as far as the leader found
    #: them.
    overdue: int
    #: Number of messages that were leased by grants of earlier leaders.
    leases: int
    #: Lateness of the first message in the dispatch cursor's second or later that was still to be delivered; 0 if there
    #: was none.
    lag_ms: int


class Term(Document, Generic[At], frozen=True):
    """A Raft term that has or had a leader."""

    term: int
    leader: str
    #: Cluster time at which the leader took over, or at which the answering node first heard of this leader.
    since: At
    #: Why leadership changed, in words for people; None: the answering node does not know.
    why: str | None
    #: How the leader resumed hand-outs. None: it still looks for overdue messages, or the answering node does not know.
    took_over: TookOver | None = None


class BackupOut(Document, Generic[At], frozen=True):
    """A snapshot that a member kept for a backup."""

    #: Member whose files were copied.
    node: str
    #: Cluster time at which the backup began.
    at: At
    #: Size of all files of the backup.
    bytes: str
    #: Number of bytes that were read from the member: files that an earlier backup has are not read again.
    read_bytes: str
    #: State of the backup. complete: its reader reported that it had copied all files. incomplete: its reader released
    #: the snapshot without this report, or stopped reading.
    outcome: Literal["running", "complete", "incomplete"]


class Cluster(Document, Generic[At], frozen=True):
    cluster_id: str
    #: Feature level of the cluster: the newest level that all members support.
    feature_level: int
    leader: str | None
    term: int
    applied_index: str
    #: Cluster time of the answer.
    time: At
    dispatch: Dispatch
    members: list[Member]
    #: Terms that began since the answering node started, as far as it knows; the newest first, at most 20.
    terms: list[Term[At]] = field(default_factory=list)
    #: Backups since the answering node started, as far as it knows; the newest first, at most 5.
    backups: list[BackupOut[At]] = field(default_factory=list)


class Transfer(Request):
    to: str | None = None


class Transferred(Document, frozen=True):
    leader: str


class Drain(Request):
    node: str
    undo: bool = False


class Drained(Document, frozen=True):
    node: str
    drained: bool


class AddMember(Request):
    name: str
    #: host:port at which the other nodes reach the new member for Raft.
    raft: str


class AddedMember(Document, frozen=True):
    name: str
    raft: str
    role: str


class ReadyQuery(Request):
    verbose: str | None = None
    exclude: str | None = None


class CheckOut(Document, omit_defaults=False, frozen=True):
    name: str
    ok: bool
    #: Result of the check in words: the state found, or the problem.
    detail: str = ""


class Health(Document, omit_defaults=False, frozen=True):
    status: Literal["ok", "failing"]
    checks: list[CheckOut] = field(default_factory=list)


class QuorumQuery(Request):
    #: Name of the node that is to stop; None: the node that answers. The answer tells whether a majority is left.
    without: str | None = None


class Quorum(Document, frozen=True):
    """Voting members left if the node `without` stopped, as seen by the answering node, and how many a majority
    needs."""

    without: str
    left: list[str]
    members: int
    needed: int


class ReleaseQuery(Request):
    #: Whether the reader copied all files that it needed from the snapshot. The list of backups in `GET /v1/cluster`
    #: shows it.
    complete: bool = False


class CreateToken(Request):
    #: Name of the token, for people. Two tokens may share a name, for example while one replaces the other.
    name: str
    scopes: list[str]
    #: Time from the token's creation to its expiry; None: valid until revoked.
    lifetime: Duration | None = None
    #: Whether the token also gets a secret access key, for AWS SDKs (SQS, EventBridge Scheduler).
    aws: bool = False
    #: To create a token here that another shard has already: the SHA-256 of the token, in hex. The answer does not show
    #: the token's secret.
    hash: str | None = None
    #: With `hash`: the secret access key of that token, in hex, if the token has one.
    aws_key: str | None = None


class TokensQuery(Request):
    #: Whether the list has the hash and the secret access key of each token, to create the token in another shard. The
    #: list is then of one shard.
    hashes: bool = False
    #: With several shards: leave out the tokens of shards that do not answer, and name these shards in `missing`.
    partial: bool = False


class TokenOut(Document, frozen=True):
    id: str
    name: str
    scopes: list[str]
    created_at: str
    expires_at: str | None
    expired: bool
    #: Whether AWS SDKs can sign with the token: their access key id is the token's id.
    aws: bool
    #: Secret of the token, and its secret access key for AWS SDKs. Only the answer that creates the token has them.
    token: str | None = None
    aws_secret: str | None = None
    #: Shards that answered, but do not know the token: create the token there with its hash.
    missing: tuple[int, ...] = ()
    #: SHA-256 of the token, and its secret access key, if it has one, in hex. Sent only if the query asks for `hashes`.
    hash: str | None = None
    aws_key: str | None = None


class Tokens(Document, frozen=True):
    tokens: list[TokenOut]
    #: Shards that do not answer, whose tokens are left out.
    missing: tuple[int, ...] = ()


class AuditQuery(Request):
    after: int = 0
    limit: int = 100


class AuditOut(Document, frozen=True):
    number: int
    at: str
    node: str
    token_id: str
    token: str
    action: str
    target: str
    #: Outcome of the request: "done", or the reason of the refusal.
    outcome: str


class AuditTrail(Document, frozen=True):
    #: Audited requests, oldest first.
    entries: list[AuditOut]


class HourFileOut(Document, frozen=True):
    entries: int
    bytes: str
    #: CRC-32C of the file's first `bytes` bytes, in hex.
    crc32c: str


class Hour(Document, frozen=True):
    hour: str
    sealed: bool
    mapped: bool
    log: HourFileOut
    idx: HourFileOut
    dsp: HourFileOut


class Hours(Document, frozen=True):
    """Lengths and checksums of a node's hour files, all at one applied index of the Raft log."""

    applied_index: str
    hours: list[Hour]


class Patrol(Document, frozen=True):
    """What a node found when it compared its files with their checksums."""

    node: str
    #: Number of rounds that ended since the node's process began. Each round compares all files.
    rounds: int
    #: Value that `rounds` must reach for the comparison that the last POST requested to be complete.
    wanted: int
    #: Time at which the last round ended; null before the first.
    checked_at: str | None
    #: Number of damaged entries and records that were repaired from other nodes, including those found by reads of
    #: messages.
    repaired: int
    #: Paths of files whose damage could not be repaired.
    damaged: list[str]


class SnapshotFileOut(Document, frozen=True):
    name: str
    bytes: str
    #: CRC-32C of the file's first `bytes` bytes, in hex.
    crc32c: str


class Snapshot(Document, frozen=True):
    """A node's checkpoint for a reader to copy. Its files stay until the reader releases it, or reads nothing for a
    minute."""

    id: str
    cluster_id: str
    group: int
    index: str
    term: int
    feature_level: int
    #: Cluster time at which the snapshot was opened.
    time: str
    files: list[SnapshotFileOut]


class Names(Document, frozen=True):
    """Names (topics, consumers, nodes, failure reasons) → the numbers that hour files have in place of them."""

    topics: dict[str, int]
    consumers: dict[str, int]
    nodes: dict[str, int]
    reasons: dict[str, int]
