"""Keys of a node: `config.http.max_body_bytes` is `max_body_bytes` under `[http]` in the TOML file,
`HADELAY_HTTP__MAX_BODY_BYTES` in the environment and `--set http.max_body_bytes=…` on the command line.

Units are in the names. In the three sources a `_ms` key also takes a duration ("15m", "2h30m", "7d") and a `_bytes`
key a size ("64MiB"); in Python they are plain ints. The text before a field is its documentation: docs/reference/
config.md is generated from it. Sections inherit constants (tuning.py), which are no keys. load.py reads the sources,
rules.py says what is wrong.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct, field

from hadelay.settings import tuning

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SECOND, MINUTE, HOUR, DAY = 1000, 60_000, 3_600_000, 86_400_000


class NodeConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who this node is and where it keeps things."""

    #: Name in the cluster, in answers and in the dispatch log. Each node needs its own; never reuse the name of another
    #: machine.
    name: str = "n1"
    #: Directory of hours, names and state. Name a disk with room: every message lies here until its hour is retired.
    data_dir: str = "hadelay-data"
    #: Directory of the Raft journal, which is small and synced before every answer. Name one where a faster disk is
    #: there. Empty: in data_dir.
    journal_dir: str = ""


class ClusterConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the nodes of one cluster have in common."""

    #: Name of the cluster in every file and handshake, so that a node never joins, or reads, another one's data. Change
    #: it where you run more than one cluster.
    id: str = "hadelay"
    #: An empty data directory starts a cluster only when this is true. Set it for the first start, then remove it: a
    #: node that lost its disk must come back as a new incarnation, not as a founder.
    init: bool = False
    #: Group whose messages this process keeps: 8 bits of every id. Change it for a cluster restored from a backup, so
    #: that its ids differ from the old cluster's.
    group: int = 0
    #: Go on alone, whatever the log says of other members: to rescue what a copy of a directory holds when a majority
    #: of the disks is gone for good. For the command line, and that once: in a file it would make two clusters of one.
    survivor: bool = False


class HttpConfig(tuning.Http, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The API that producers and consumers talk to, and its limits (each is 413, 422 or 429 when exceeded)."""

    #: host:port to listen on; port 0 takes a free one. Change it to serve other machines.
    listen: str = "127.0.0.1:8400"
    #: URL under which clients and other nodes reach this node; `receive` redirects to it. Set it where that is not
    #: http://<listen>. Nodes must be able to resolve it; polls of a client that cannot are relayed.
    advertise: str = ""
    #: Names that clients ask this node by, besides that of `advertise`: "queue.example.com", "*.internal". Requests
    #: under another name are refused: a web page may have made a browser send them (DNS rebinding). Addresses,
    #: localhost and the health routes always pass. Empty with security.tokens: every name passes.
    hosts: list[str] = field(default_factory=list)
    #: PEM file of this node's certificate, followed by those between it and its authority. Set it to serve HTTPS. The
    #: node reads it again when it changes.
    tls_cert: str = ""
    #: PEM file of the certificate's key, without a password. Goes with tls_cert.
    tls_key: str = ""
    #: PEM file of the authority whose certificates the other nodes show over HTTPS. Set it for an authority of your
    #: own. Empty: those the system trusts.
    tls_ca: str = ""
    #: Largest payload of one message. Raise it for larger ones, which cost latency for everybody: rather keep files
    #: elsewhere and send their names.
    max_body_bytes: int = MIB
    #: Largest request of POST /v1/messages:batch. Raise it for producers whose batches are refused (413).
    max_batch_bytes: int = 16 * MIB
    #: Longest lease a consumer may ask for. Raise it for work that takes longer; a dead consumer holds its messages so
    #: long.
    max_lease_ms: int = 12 * HOUR
    #: Lease of consumers that ask for none, of topics that set none. Change it to what most handlers take.
    default_lease_ms: int = 30 * SECOND
    #: Concurrent connections, TLS handshakes included; more are answered 503 and closed, but for the health routes.
    #: Raise it with the limit of open files, which lowers it at start.
    max_connections: int = 16_000
    #: Concurrent connections of one address, or of one /64 of IPv6. 0: no limit. Set it where strangers connect without
    #: a proxy; a proxy is one address for all its users.
    max_connections_per_address: int = 0
    #: How long a connection may do nothing between two requests, and how long the head of a request may take. Raise it
    #: above the idle timeout of a load balancer in front.
    idle_timeout_ms: int = 75 * SECOND


class RaftConfig(tuning.Raft, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The link between nodes."""

    #: host:port on which the other nodes reach this one. Change it for a cluster of several machines.
    listen: str = "127.0.0.1:8500"
    #: Every voting member, this one included: name = "host:port". Empty: a cluster of this node alone. Counts until the
    #: members are changed for the first time; a node that is to be added names the members there are, and itself.
    peers: dict[str, str] = field(default_factory=dict)
    #: PEM file of the certificate that this node shows to the others: set it where they are on other machines. It names
    #: the node: node.name is one of its DNS names, or its common name. The node reads it again when it changes.
    tls_cert: str = ""
    #: PEM file of the certificate's key, without a password. Goes with tls_cert.
    tls_key: str = ""
    #: PEM file of the authority of every node's certificate. One per cluster: whoever it signs for is a node.
    tls_ca: str = ""
    #: A follower that heard nothing for between this and twice this time (random) asks for an election. Raise it where
    #: machines or links pause for longer, and leaders change for nothing; lower it for a quicker fail-over.
    election_min_ms: int = 300


class DispatchConfig(tuning.Dispatch, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How due messages are handed out."""

    #: commit: a hand-out is answered after its grant is replicated; no fail-over repeats it. interval: handed out at
    #: once, replicated every interval_ms. Choose interval where one round trip matters more than a repeated hand-out.
    sync: Literal["commit", "interval"] = "commit"
    #: The most hand-outs a crash may repeat, in time (sync = "interval" only). Lower it to repeat fewer.
    interval_ms: int = 50
    #: A grant is proposed as much ahead of its time as grants take lately, at most this (sync = "commit", up to 100),
    #: and handed out when it is due: a message may be leased so much before its time. Raise it where nodes are far
    #: apart and lateness shows it. 0: proposed when it is due.
    max_ahead_ms: int = 50


class LimitsConfig(tuning.Limits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds on what grows."""

    #: Longest delay; a longer one is refused (422), never shortened. Raise it for messages further ahead.
    max_delay_ms: int = 730 * DAY
    #: How long an Idempotency-Key is remembered, at least. Raise it for producers that retry for longer.
    idempotency_window_ms: int = HOUR
    #: Keys remembered at once; beyond, the oldest go early and a metric says so. Raise it for more publishes with a key
    #: within the window; each costs about 100 bytes of disk.
    idempotency_keys: int = 10_000_000
    #: How long a publish waits for its commit before it answers 504 (outcome unknown). Lower it for clients that give
    #: up earlier.
    commit_timeout_ms: int = 10 * SECOND
    #: A topic appears when it is first published to. Set it to false where a misspelt name should be refused: only
    #: topics made by PUT exist then, others are 404.
    auto_create_topics: bool = True


class StorageConfig(tuning.Storage, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Disk space."""

    #: Largest size of the LMDB map: address space, not memory or disk. Lower it where address space is limited.
    map_bytes: int = 64 * GIB
    #: Publishing is refused (507) while less than this is free on either disk of any live node. What is left is the
    #: reserve of leases, acks and moves: consuming goes on. Raise it where other programs fill the same disk.
    min_free_bytes: int = 512 * MIB


class RetentionConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long a settled message can still be asked for."""

    #: A settled hour's files are removed this long after its end; two hours at least. Raise it to ask for messages
    #: longer, lower it to save disk.
    settled_ms: int = DAY
    #: What an hour still owes this long after its end moves to the running hour, so that the old hour can go. Lower it
    #: where a few late messages keep large hours on the disk.
    carry_ms: int = DAY
    #: Directory that `hadelay pipeline archive` writes to, seen by every node. Set it to delete an hour only when the
    #: archive holds all of it; until then it stays, whatever its age. A URI (s3://, gs://, abfs://, hdfs://) needs the
    #: extra: pip install 'hadelay[archive]'.
    archive: str = ""


class WebhooksConfig(tuning.Webhooks, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Calls that the leader makes. What is called, with which secrets and timeout, is the topic's to say."""

    #: Networks ("10.0.0.0/8") that may be called although they are not public: add those of your receivers. Empty:
    #: whoever may set a URL can make the nodes call nothing inside. `hadelay dev` allows loopback.
    allow: list[str] = field(default_factory=list)
    #: Concurrent calls of all topics; where they want more, each topic gets an equal share. Raise it for slow
    #: receivers: each call is a socket.
    max_calls: int = 1_024
    #: Concurrent calls for one topic; its own `concurrency` can only lower it. Raise it for a topic with many calls.
    topic_calls: int = 64
    #: URL to notify of messages that died in topics without an `alert` of their own. Empty: nobody is told.
    alert_url: str = ""
    #: Signs those calls, as a webhook's secret does. Set it where the receiver checks signatures.
    alert_secret: str = ""
    #: Shortest time between two alerts of a topic: a call says how many died since the last. Raise it for fewer calls.
    alert_interval_ms: int = MINUTE


class LogConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Log lines, on stderr."""

    #: auto: readable on a terminal, JSON elsewhere. Set it where that guess is wrong.
    format: Literal["auto", "json", "text"] = "auto"
    #: debug writes a line per command: choose it for one node, for a while.
    level: Literal["debug", "info", "warning", "error"] = "info"


class SecurityConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What protects a node that others can reach."""

    #: Listen beyond loopback although TLS or tokens are missing. Set it only where the network itself protects the
    #: ports: whoever reaches them owns the data.
    insecure: bool = False
    #: Every request over HTTP shows a token, but for health and the description of the API. Set it, on every node,
    #: where others can reach the API.
    tokens: bool = False
    #: SHA-256, in hex, of the token that makes the first one with the scope admin: `hadelay token bootstrap` makes
    #: both. It is good for nothing else, and spent while there is such a token; so it may stay, for the day when the
    #: last one is lost.
    bootstrap_token_hash: str = ""


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole tree. `Config()` is a single node on loopback."""

    node: NodeConfig = NodeConfig()
    cluster: ClusterConfig = ClusterConfig()
    http: HttpConfig = field(default_factory=HttpConfig)
    raft: RaftConfig = field(default_factory=RaftConfig)
    dispatch: DispatchConfig = DispatchConfig()
    limits: LimitsConfig = LimitsConfig()
    storage: StorageConfig = StorageConfig()
    retention: RetentionConfig = RetentionConfig()
    webhooks: WebhooksConfig = field(default_factory=WebhooksConfig)
    log: LogConfig = LogConfig()
    security: SecurityConfig = SecurityConfig()

    @property
    def journal_dir(self) -> str:
        return self.node.journal_dir or f"{self.node.data_dir}/raft"

    @property
    def advertise(self) -> str:
        return self.http.advertise or f"http{'s' if self.http.tls_cert else ''}://{self.http.listen}"

    @property
    def members(self) -> dict[str, str]:
        """Every voting member's node-link address, by name; never empty."""
        return self.raft.peers or {self.node.name: self.raft.listen}


def keys() -> dict[str, type]:
    """Every key and its type, `http.listen: str`, retired ones included. `raft.peers` is a table of its own."""
    return {
        f"{section.name}.{leaf.name}": leaf.type
        for section in msgspec.structs.fields(Config)
        for leaf in msgspec.structs.fields(section.type)
    }


#: Keys of earlier releases that are constants now.
RETIRED = frozenset(
    f"{section.name}.{name}"
    for section in msgspec.structs.fields(Config)
    for name in getattr(section.type.__base__, "__struct_fields__", ())
)
