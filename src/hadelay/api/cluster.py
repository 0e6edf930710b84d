"""The cluster, its members, health, tokens and audit trail, and the files of a node."""

from typing import Generic, Literal

from msgspec import field

from hadelay.api.base import At, DispatchSync, Document, Duration, Request


class Dispatch(Document, frozen=True):
    """The replicated dispatch cursor: all messages before this hour, second and localIndex were made ready."""

    hour: str
    second: int
    local_index: int
    sync: DispatchSync


class Member(Document, frozen=True):
    name: str
    http: str
    raft: str
    #: leader, follower, learner (does not vote yet), or unknown while the member is silent.
    role: str
    applied_index: str
    lag: int
    version: str
    #: Newest feature level of its program; 0 while the member is silent.
    feature_level: int
    clock_skew_ms: float | None


class Cluster(Document, Generic[At], frozen=True):
    cluster_id: str
    #: Feature level of the cluster: the newest that all members have.
    feature_level: int
    leader: str | None
    term: int
    applied_index: str
    #: Cluster time.
    time: At
    dispatch: Dispatch
    members: list[Member]


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
    #: host:port of the member's node link, as other members reach the member.
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
    #: The state that was checked, or what is wrong.
    detail: str = ""


class Health(Document, omit_defaults=False, frozen=True):
    status: Literal["ok", "failing"]
    checks: list[CheckOut] = field(default_factory=list)


class QuorumQuery(Request):
    #: The node that would stop; None: the node that answers.
    without: str | None = None


class Quorum(Document, frozen=True):
    """Voters left if the node `without` stopped, as the answering node sees them, and the number needed."""

    without: str
    left: list[str]
    members: int
    needed: int


class CreateToken(Request):
    #: Name for people. Two tokens may share a name, for example while one replaces the other.
    name: str
    scopes: list[str]
    #: Time from creation to expiry; None: valid until revoked.
    lifetime: Duration | None = None


class TokenOut(Document, frozen=True):
    id: str
    name: str
    scopes: list[str]
    created_at: str
    expires_at: str | None
    expired: bool
    #: The secret, only in the answer to its creation.
    token: str | None = None


class Tokens(Document, frozen=True):
    tokens: list[TokenOut]


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
    #: "done", or the reason of the refusal.
    outcome: str


class AuditTrail(Document, frozen=True):
    #: Oldest first.
    entries: list[AuditOut]


class HourFileOut(Document, frozen=True):
    entries: int
    bytes: str
    #: CRC-32C of these bytes, in hex.
    crc32c: str


class Hour(Document, frozen=True):
    hour: str
    sealed: bool
    mapped: bool
    log: HourFileOut
    idx: HourFileOut
    dsp: HourFileOut


class Hours(Document, frozen=True):
    """Hour files of one node at one applied index."""

    applied_index: str
    hours: list[Hour]


class SnapshotFileOut(Document, frozen=True):
    name: str
    bytes: str
    #: CRC-32C of these bytes, in hex.
    crc32c: str


class Snapshot(Document, frozen=True):
    """A checkpoint whose files stay unchanged until it is released, or was not read for a minute."""

    id: str
    cluster_id: str
    group: int
    index: str
    term: int
    feature_level: int
    #: Cluster time of the last entry of the hour.
    time: str
    files: list[SnapshotFileOut]


class Names(Document, frozen=True):
    """Numbers of names in the files."""

    topics: dict[str, int]
    consumers: dict[str, int]
    nodes: dict[str, int]
    #: Reasons of failed attempts.
    reasons: dict[str, int]
