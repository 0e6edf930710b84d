"""Keys of a node: `config.http.max_body_bytes` is `max_body_bytes` under `[http]` in the TOML file,
`HADELAY_HTTP__MAX_BODY_BYTES` in the environment and `--set http.max_body_bytes=…` on the command line.

Names end with the unit. A `_ms` key also takes a duration ("15m", "2h30m", "7d") and a `_bytes` key a size ("64MiB");
in Python the values are ints. The comment before a field is its documentation in docs/reference/config.md. Sections
inherit constants (tuning.py), which are not keys. load.py reads the sources, rules.py validates the values.
"""

from typing import Literal

import msgspec
from msgspec import Struct, field

from hadelay.settings import tuning

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SECOND, MINUTE, HOUR, DAY = 1000, 60_000, 3_600_000, 86_400_000


class NodeConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Name and directories of this node."""

    #: Name of the node in the cluster, in answers and in the dispatch log. Names must be unique; never reuse the name
    #: of another machine.
    name: str = "n1"
    #: Directory of the message files, the names and the state. Choose a large disk: a message stays here until the
    #: files of its hour are deleted.
    data_dir: str = "hadelay-data"
    #: Directory of the Raft journal, which is small and synced before every answer. Set it to use a faster disk.
    #: Empty: in data_dir.
    journal_dir: str = ""


class ClusterConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings shared by the nodes of a cluster."""

    #: Name of the cluster in every file and handshake: a node never joins another cluster or reads its data. Change it
    #: if you run more than one cluster.
    id: str = "hadelay"
    #: An empty data directory starts a cluster only when this is true. Set it for the first start, then remove it: a
    #: node that lost its disk must come back as a new incarnation, not as a founder.
    init: bool = False
    #: Number of this cluster's group, 8 bits of every message id. Change it for a cluster restored from a backup, so
    #: that its ids differ from the old cluster's.
    group: int = 0
    #: Run alone, without the other members that the log names: to rescue the data of a copied directory after the
    #: permanent loss of a majority of disks. Use it once, on the command line: in a file it could split the cluster in
    #: two.
    survivor: bool = False


class HttpConfig(tuning.Http, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP API for producers and consumers, and its limits (413, 422 or 429 when exceeded)."""

    #: host:port to listen on; port 0 takes a free port. Change it to serve other machines.
    listen: str = "127.0.0.1:8400"
    #: URL at which clients and other nodes reach this node; `receive` redirects to it. Set it if this URL is not
    #: http://<listen>: always with a wildcard such as 0.0.0.0 there. Nodes must be able to resolve the host; a node
    #: relays polls of clients that cannot.
    advertise: str = ""
    #: Host names of this node, besides the one in `advertise`: "queue.example.com", "*.internal". Requests for other
    #: host names are refused, as protection against web pages that misuse a browser (DNS rebinding). Addresses,
    #: localhost and the health routes are always accepted. Empty with security.tokens: all names are accepted.
    hosts: list[str] = field(default_factory=list)
    #: PEM file of this node's certificate and intermediates, reloaded on changes. Set it to serve HTTPS.
    tls_cert: str = ""
    #: PEM file of the certificate's key, without a password. Required with tls_cert.
    tls_key: str = ""
    #: PEM file of the certificate authority (CA) of the other nodes' HTTPS certificates. Set it for your own CA.
    #: Empty: the system's CAs.
    tls_ca: str = ""
    #: Serve the console, pages for a browser, at /console/. Set it to false to serve the API alone.
    console: bool = True
    #: Serve the endpoints for AWS SDKs, SQS at /aws/sqs. Set it for applications that use such an SDK. Default of
    #: `hadelay dev`: true.
    aws: bool = False
    #: Another host:port, which serves only the endpoints for AWS SDKs and the health routes. Set it if such
    #: applications may not reach the API. Needs `aws`.
    aws_listen: str = ""
    #: Size limit of a message's payload. Raise it for larger payloads, which delay all clients; better, store files
    #: elsewhere and send their names.
    max_body_bytes: int = MIB
    #: Size limit of a POST /v1/messages:batch. Raise it for producers whose batches are refused (413).
    max_batch_bytes: int = 16 * MIB
    #: Maximum duration of a lease. Raise it for longer work; a crashed consumer's messages stay leased for that time.
    max_lease_ms: int = 12 * HOUR
    #: Duration of a lease if neither consumer nor topic sets it. Change it to the duration of most handlers.
    default_lease_ms: int = 30 * SECOND
    #: Limit of concurrent connections, TLS handshakes included; further ones get 503, except for the health routes.
    #: Raise it with the limit of open files, which lowers it at start.
    max_connections: int = 16_000
    #: Limit of concurrent connections per address, or per /64 of IPv6. 0: no limit. Set it if unknown clients connect
    #: without a proxy; a proxy counts as one address.
    max_connections_per_address: int = 0
    #: Timeout of an idle connection, and of receiving the head of a request. Raise it above the idle timeout of a load
    #: balancer in front.
    idle_timeout_ms: int = 75 * SECOND


class RaftSettings(tuning.Raft, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The link between the nodes of a cluster."""

    #: host:port at which the other nodes reach this node. Change it for a cluster of several machines.
    listen: str = "127.0.0.1:8500"
    #: All voting members, this node included: name = "host:port". Empty: a cluster of this node alone. Used until the
    #: first change of members; on a node to be added, list the existing members and the node itself.
    peers: dict[str, str] = field(default_factory=dict)
    #: PEM file of this node's certificate for the other nodes: set it for nodes on several machines. node.name must be
    #: one of its DNS names, or its common name. The node loads changes by itself.
    tls_cert: str = ""
    #: PEM file of the certificate's key, without a password. Required with tls_cert.
    tls_key: str = ""
    #: PEM file of the certificate authority (CA) of all nodes. Use a CA for this cluster alone: every certificate that
    #: it signs is accepted as a node.
    tls_ca: str = ""
    #: Minimum election timeout; a follower waits a random time between this and 4/3 of this for its leader. Raise it if
    #: pauses of machines or links cause needless elections; lower it for a quicker fail-over.
    election_min_ms: int = 300


class DispatchConfig(tuning.DispatchSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hand-out of due messages."""

    #: commit: a hand-out waits until its grant is replicated, and a fail-over never repeats it. interval: messages that
    #: fall due now are handed out at once, and grants replicated every interval_ms; a backlog waits for its grants.
    #: Choose interval if a round trip costs more than a repeated hand-out.
    sync: Literal["commit", "interval"] = "commit"
    #: Interval at which grants are replicated with sync = "interval"; a crash repeats the hand-outs of up to this time.
    interval_ms: int = 50
    #: Maximum time that a grant is proposed before its messages are due (sync = "commit"; at most 100 ms). The actual
    #: time is the recent duration of grants; messages are handed out when due. Raise it if nodes are far apart and
    #: messages are late. 0: propose when due.
    max_ahead_ms: int = 50


class LimitsConfig(tuning.Limits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of delays, idempotency keys and waiting times."""

    #: Maximum delay; a longer delay is refused (422), never shortened. Raise it for messages further ahead.
    max_delay_ms: int = 730 * DAY
    #: Minimum time that an Idempotency-Key is remembered. Raise it for producers that retry for longer.
    idempotency_window_ms: int = HOUR
    #: Limit of remembered idempotency keys; beyond it, the oldest are forgotten early and a metric counts them. Raise
    #: it for more publishes with a key within the window; a key costs about 100 bytes of disk. Keys with `unique_for`
    #: count too, are never forgotten early, and take at most half: beyond that, such publishes get 429.
    idempotency_keys: int = 10_000_000
    #: Timeout of a publish's commit (504, outcome unknown). Lower it for clients that give up earlier.
    commit_timeout_ms: int = 10 * SECOND
    #: Create a topic on its first publish. Set it to false to refuse misspelt names: then only PUT creates topics, and
    #: publishes to others get 404.
    auto_create_topics: bool = True


class StorageConfig(tuning.StorageSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Use of the disk, and the checks of the files on it."""

    #: Size limit of the LMDB file, in address space, not memory or disk. Lower it if address space is limited.
    map_bytes: int = 64 * GIB
    #: Minimum free disk space; with less on a disk of any live node, publishes are refused (507). The reserve lets
    #: leases, acks and moves continue. Raise it if other programs fill the same disk.
    min_free_bytes: int = 512 * MIB
    #: Limit of bytes per second that the patrol reads. The patrol compares all files at rest with their checksums, in
    #: rounds, and repairs damaged bytes from other nodes. Raise it if a round of all data takes too long
    #: (hadelay_patrol_age_seconds). 0: no patrol.
    patrol_bytes: int = MIB


class RetentionConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Retention of settled messages."""

    #: Retention of a settled hour's files after the hour's end, at least two hours. Raise it to query messages for
    #: longer, lower it to save disk space.
    settled_ms: int = DAY
    #: Time after an hour's end when its unsettled messages move to the current hour, so that its files can be deleted.
    #: Lower it if a few late messages keep large hours on disk.
    carry_ms: int = DAY
    #: Directory of `hadelay pipeline archive`, visible to every node. If set, an hour is deleted only once the archive
    #: is proven to contain it, whatever its age. A URI (s3://, gs://, abfs://, hdfs://) needs an extra: pip install
    #: 'hadelay[archive]'.
    archive: str = ""


class WebhooksConfig(tuning.WebhookSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Webhook calls, made by the leader. Topic settings have URLs, secrets and timeouts."""

    #: Private networks ("10.0.0.0/8") that webhooks may call: add those of your receivers. Empty: only public
    #: addresses, so that users who set URLs cannot reach your network. `hadelay dev` allows loopback.
    allow: list[str] = field(default_factory=list)
    #: Limit of concurrent webhook calls (sockets) for all topics, shared equally at the limit. Raise it for slow
    #: receivers.
    max_calls: int = 1_024
    #: Limit of concurrent webhook calls per topic; the topic's `concurrency` can only lower it. Raise it for busy
    #: topics.
    topic_calls: int = 64
    #: URL to notify of dead letters in topics without their own `alert`. Empty: no notification.
    alert_url: str = ""
    #: Secret that signs the notifications to alert_url: whsec_ and base64 of 24 to 64 bytes. Set it if the receiver
    #: checks signatures.
    alert_secret: str = ""
    #: PEM files of the client certificate, with its chain, and its key, shown to receivers of topics' webhooks over
    #: https that ask for one. Set both if your receivers authenticate their callers by mutual TLS.
    tls_cert: str = ""
    tls_key: str = ""
    #: PEM file of a CA of receivers of webhooks, trusted besides the system's CAs. Set it if their certificates are
    #: from your own CA.
    tls_ca: str = ""
    #: Minimum time between two alerts of a topic; an alert counts new dead letters. Raise it for fewer calls.
    alert_interval_ms: int = MINUTE


class LogConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Log lines, on stderr."""

    #: Format of the log lines; auto: text on a terminal, JSON elsewhere.
    format: Literal["auto", "json", "text"] = "auto"
    #: Lowest level that is logged; debug writes a line per command: use it for one node, for a short time.
    level: Literal["debug", "info", "warning", "error"] = "info"


class SecurityConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Protection of a node that other machines can reach."""

    #: Listen beyond loopback without TLS or tokens. Set it only if the network protects the ports: everyone who reaches
    #: them can read and change all data.
    insecure: bool = False
    #: Require a token for HTTP requests, except for health routes and the API description. Set it on every node if
    #: other machines can reach the API.
    tokens: bool = False
    #: SHA-256, in hex, of the bootstrap token, from `hadelay token bootstrap`. This token can only create a token with
    #: the scope admin, and only while none exists; so the hash can stay, in case the last admin token is lost.
    bootstrap_token_hash: str = ""


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All sections. `Config()` is a single node on loopback."""

    node: NodeConfig = NodeConfig()
    cluster: ClusterConfig = ClusterConfig()
    http: HttpConfig = field(default_factory=HttpConfig)
    raft: RaftSettings = field(default_factory=RaftSettings)
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
        """Node-link addresses of all voting members, by name; never empty."""
        return self.raft.peers or {self.node.name: self.raft.listen}


def keys() -> dict[str, type]:
    """All keys and their types, `http.listen: str`, retired keys included. `raft.peers` is one key, a table."""
    return {
        f"{section.name}.{leaf.name}": leaf.type
        for section in msgspec.structs.fields(Config)
        for leaf in msgspec.structs.fields(section.type)
    }


#: Keys of earlier releases that are constants now (settings/tuning.py): still accepted, with a warning.
RETIRED = frozenset(
    f"{section.name}.{name}"
    for section in msgspec.structs.fields(Config)
    for name in getattr(section.type.__base__, "__struct_fields__", ())
)
