"""Every knob of a node, in one frozen tree: `config.http.max_body_bytes` is `max_body_bytes` under `[http]` in the
TOML file, `HADELAY_HTTP__MAX_BODY_BYTES` in the environment and `--set http.max_body_bytes=…` on the command line.

Units are in the names. In the three sources a `_ms` key also takes a duration ("15m", "2h30m", "7d") and a `_bytes`
key a size ("64MiB"); in Python they are plain ints. The text before a field is its documentation: docs/reference/
config.md is generated from it. Reading, and naming the line of a typo, is `configload`; `problems` below is the rest.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Literal

from msgspec import Struct, field

from hadelay import uris

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SECOND, MINUTE, HOUR, DAY = 1000, 60_000, 3_600_000, 86_400_000


class NodeConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who this node is and where it keeps things."""

    #: Its name in the cluster, in answers and in the dispatch log. Never reuse a name for another machine.
    name: str = "n1"
    #: Hours, names and state. Wants room: every message lies here until its hour is retired.
    data_dir: str = "hadelay-data"
    #: The Raft journal: small, and synced before every answer, so the fastest disk belongs here. Empty: in data_dir.
    journal_dir: str = ""


class ClusterConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the nodes of one cluster have in common."""

    #: Names the cluster in every file and handshake, so that a node never joins, or reads, another one's data.
    id: str = "hadelay"
    #: An empty data directory starts a cluster only when this is true. Remove it after the first start: a node that
    #: lost its disk must come back as a new incarnation, not as a founder.
    init: bool = False
    #: The group whose messages this process keeps: 8 bits of every id. One per cluster for now.
    group: int = 0
    #: Go on alone, whatever the log says of other members: to rescue what a copy of a directory holds when a majority
    #: of the disks is gone for good. For the command line, and that once: in a file it would make two clusters of one.
    survivor: bool = False


class HttpConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The API that producers and consumers talk to, and its limits (each is 413, 422 or 429 when exceeded)."""

    #: host:port to listen on. Port 0 takes a free one.
    listen: str = "127.0.0.1:8400"
    #: URL under which clients and other nodes reach this node; `receive` redirects to it. The other nodes must be able
    #: to resolve it; a client that cannot has its polls relayed. Empty: http://<listen>.
    advertise: str = ""
    #: Names that clients ask this node by, besides that of `advertise`: "queue.example.com", "*.internal". Requests
    #: under another name are refused: a web page may have made a browser send them (DNS rebinding). Addresses,
    #: localhost and the health routes always pass. Empty with security.tokens: every name passes.
    hosts: list[str] = field(default_factory=list)
    #: PEM file of this node's certificate, followed by those between it and its authority: HTTP becomes HTTPS. Read
    #: again when it changes.
    tls_cert: str = ""
    #: PEM file of the certificate's key, without a password.
    tls_key: str = ""
    #: PEM file of the authority whose certificates the other nodes show over HTTPS. Empty: those the system trusts.
    tls_ca: str = ""
    #: Largest payload of one message. Larger ones cost latency for everybody: keep files elsewhere and send names.
    max_body_bytes: int = MIB
    #: Largest request of POST /v1/messages:batch.
    max_batch_bytes: int = 16 * MIB
    #: Bodies on their way in, of all connections together, until their requests are answered; beyond: 503. Those that
    #: come in one piece do not count.
    max_reading_bytes: int = 64 * MIB
    #: Most messages in one batch.
    max_batch_items: int = 10_000
    #: Most messages one receive may ask for.
    max_receive: int = 1_000
    #: How many it gets when it does not say.
    default_receive: int = 10
    #: Longest time a receive may wait for a message.
    max_wait_ms: int = 60 * SECOND
    #: Longest lease a consumer may ask for. A message held by a dead consumer waits this long.
    max_lease_ms: int = 12 * HOUR
    #: The lease it gets when it does not say.
    default_lease_ms: int = 30 * SECOND
    #: Receives waiting on one node; each costs a connection and a few kilobytes.
    max_waiting: int = 10_000
    #: Longest topic name.
    max_topic_bytes: int = 128
    #: Longest client key.
    max_key_bytes: int = 256
    #: All `Hadelay-Meta-*` of one message together.
    max_meta_bytes: int = 4 * KIB
    #: Tags of one message. The more there are, the more messages are looked at in vain (ADR 70).
    max_tags: int = 16
    #: Longest tag.
    max_tag_bytes: int = 64
    #: Connections at once, TLS handshakes included; what comes beyond is answered 503 and closed, but for the health
    #: routes. Lowered at start to what the limit of open files leaves.
    max_connections: int = 16_000
    #: The same of one address, or of one /64 of IPv6. 0: no limit. A proxy in front is one address for all its users.
    max_connections_per_address: int = 0
    #: How long a connection may do nothing between two requests, and how long the head of one may take to arrive.
    idle_timeout_ms: int = 75 * SECOND
    #: How long a request may take to arrive, and a reader to take its answer.
    io_timeout_ms: int = 30 * SECOND
    #: How long a follower holds a poll while it knows no leader, before it answers 503.
    no_leader_wait_ms: int = 2 * SECOND


class RaftConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The link between nodes."""

    #: host:port on which the other nodes reach this one.
    listen: str = "127.0.0.1:8500"
    #: Every voting member, this one included: name = "host:port". Empty: a cluster of this node alone. Counts until the
    #: members are changed for the first time; a node that is to be added names the members there are, and itself.
    peers: dict[str, str] = field(default_factory=dict)
    #: PEM file of the certificate that this node shows to the others. It has to name the node: node.name is one of its
    #: DNS names, or its common name. Read again when it changes.
    tls_cert: str = ""
    #: PEM file of the certificate's key, without a password.
    tls_key: str = ""
    #: PEM file of the authority that every node's certificate is of. One per cluster: whoever it signs for is a node.
    tls_ca: str = ""
    #: A follower that heard nothing for between min and max (random) asks for an election. Short: quick fail-over;
    #: shorter than a pause of a busy machine: leaders deposed for nothing.
    election_min_ms: int = 300
    #: See election_min_ms. The spread between the two is what keeps candidates apart.
    election_max_ms: int = 600
    #: The leader says that it lives this often. At most a third of election_min_ms.
    heartbeat_ms: int = 50
    #: Largest Raft entry built by the publish batcher. Larger: fewer syncs; longer: heartbeats wait behind it.
    max_entry_bytes: int = MIB
    #: Sent to one follower and not yet answered. More hides latency, and costs memory when a follower is slow.
    max_inflight_bytes: int = 4 * MIB
    #: Size of one pre-allocated journal segment; whole segments are deleted after checkpoints.
    segment_bytes: int = 16 * MIB
    #: A leader whose oldest sync is older than this hands over: its disk is stuck.
    max_sync_ms: int = SECOND


class DispatchConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How due messages are handed out."""

    #: commit: a hand-out is answered after its grant is replicated; no fail-over repeats it. interval: handed out at
    #: once, replicated every interval_ms; faster by one round trip, and a crash may repeat the last interval.
    sync: Literal["commit", "interval"] = "commit"
    #: The most hand-outs a crash may repeat, in time (sync = "interval" only).
    interval_ms: int = 50
    #: A grant is proposed as much ahead of its time as grants take lately, at most this (sync = "commit", up to 100),
    #: and handed out when it is due. A message may be leased so much before its time. 0: proposed when it is due.
    max_ahead_ms: int = 50
    #: How far ahead the seconds' chains are walked. Longer smooths bursts, and keeps more ids in memory.
    preload_ms: int = 10 * SECOND
    #: Ids kept ready per topic; what is beyond them is found again by scanning the index.
    ready_window: int = 65_536
    #: How often the sweeper looks for messages owed and forgotten. It should never find one; a metric says so.
    sweep_ms: int = 10 * SECOND


class LimitsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds on what grows."""

    #: A longer delay is refused (422), never shortened.
    max_delay_ms: int = 730 * DAY
    #: How long an Idempotency-Key is remembered, at least.
    idempotency_window_ms: int = HOUR
    #: Keys remembered at once; beyond, the oldest go early and a metric says so. Each costs about 100 bytes of disk.
    idempotency_keys: int = 10_000_000
    #: Publishes waiting to be committed on this node; beyond: 503 with retry_after_ms.
    publish_queue_bytes: int = 64 * MIB
    #: How long a publish waits for its commit before it answers 504 (outcome unknown).
    commit_timeout_ms: int = 10 * SECOND
    #: A topic appears when it is first published to. false: only topics made by PUT exist, others are 404.
    auto_create_topics: bool = True
    #: Topics with series of their own in /metrics, the busiest first; all others are one, "(other)". Bounds what a
    #: million topic names cost whoever scrapes.
    metrics_topics: int = 1_000
    #: How far this node's wall clock may be off before it says so.
    max_clock_skew_ms: int = 250


class StorageConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checkpoints: what bounds recovery time, and what may lie in memory in between."""

    #: Appends to hours that are not near wait in memory up to this much, and changes of keys and places up to as much;
    #: then a checkpoint writes them, and what comes meanwhile takes as much again. More: fewer and larger writes when
    #: messages are spread over years.
    far_buffer_bytes: int = 32 * MIB
    #: Journal written since the last checkpoint that causes the next one, an entry counting as 8 KiB at least. Smaller:
    #: quicker restart, more writing.
    checkpoint_bytes: int = 64 * MIB
    #: A checkpoint is also made after this time, if anything changed. (All three bounds are up to 30 % lower on some
    #: nodes, so that they do not checkpoint in the same moment.)
    checkpoint_interval_ms: int = MINUTE
    #: Largest size of the LMDB map: address space, not memory or disk.
    map_bytes: int = 64 * GIB
    #: Publishing is refused (507) while less than this is free on either disk of any live node. What is left is the
    #: reserve of leases, acks and moves: consuming goes on.
    min_free_bytes: int = 512 * MIB


class RetentionConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long a settled message can still be asked for."""

    #: A settled hour's files are removed this long after its end. Not before two hours past.
    settled_ms: int = DAY
    #: What an hour still owes this long after its end moves to the running hour, so that the old one can go.
    carry_ms: int = DAY
    #: Directory that `hadelay pipeline archive` writes to, seen by every node: with it, an hour is deleted only when
    #: the archive holds all of it. Until then it stays, whatever its age. A URI (s3://, gs://, abfs://, hdfs://) needs
    #: the extra: pip install 'hadelay[archive]'.
    archive: str = ""


class WebhooksConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Calls that the leader makes. What is called, with which secrets and timeout, is the topic's to say."""

    #: Networks ("10.0.0.0/8") that may be called although they are not public. Empty: whoever may set a URL can make
    #: the nodes call nothing inside. `hadelay dev` allows loopback.
    allow: list[str] = field(default_factory=list)
    #: Calls at once, of all topics; where they want more, each topic gets an equal share. Each is a socket.
    max_calls: int = 1_024
    #: Calls at once to one host.
    host_calls: int = 256
    #: Calls at once for one topic; its own `concurrency` can only lower it.
    topic_calls: int = 64
    #: What the calls say they come from.
    user_agent: str = "hadelay"
    #: Who is told of messages that died in topics without an `alert` of their own. Empty: nobody.
    alert_url: str = ""
    #: Signs those calls, as a webhook's secret does.
    alert_secret: str = ""
    #: A topic's deaths are told at most this often: one call says how many there were since the last one.
    alert_interval_ms: int = MINUTE


class LogConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Log lines, on stderr."""

    #: auto: readable on a terminal, JSON elsewhere.
    format: Literal["auto", "json", "text"] = "auto"
    #: debug formats a line per command: for one node, for a while.
    level: Literal["debug", "info", "warning", "error"] = "info"


class SecurityConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What protects a node that others can reach."""

    #: Listen beyond loopback although TLS or tokens are missing. Whoever reaches the ports owns the data.
    insecure: bool = False
    #: Every request over HTTP shows a token, but for health and the description of the API. The same on every node.
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


_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
#: key → smallest, largest value that makes sense; a key with a unit and no entry has to be positive.
_RANGES: dict[str, tuple[int, int]] = {
    "cluster.group": (0, 255),
    "http.max_body_bytes": (1, 64 * MIB),
    "http.max_batch_bytes": (1, 256 * MIB),
    "http.max_batch_items": (1, 100_000),
    "http.max_receive": (1, 10_000),
    "http.max_connections_per_address": (0, 1 << 20),
    "http.max_tags": (0, 64),
    "http.max_meta_bytes": (0, 64 * KIB),
    "http.max_key_bytes": (1, KIB),
    "http.max_tag_bytes": (1, KIB),
    "raft.max_entry_bytes": (4 * KIB, 4 * MIB),
    "raft.segment_bytes": (8 * MIB, GIB),
    "raft.heartbeat_ms": (5, 10_000),
    "webhooks.max_calls": (1, 60_000),
    "webhooks.topic_calls": (1, 10_000),
    "limits.metrics_topics": (0, 100_000),
    "limits.max_delay_ms": (1, 36_500 * DAY),
    "dispatch.interval_ms": (1, 10_000),
    "dispatch.ready_window": (1_000, 1_000_000),
    "retention.settled_ms": (2 * HOUR, 3650 * DAY),
    "retention.carry_ms": (2 * HOUR, 3650 * DAY),
    "storage.min_free_bytes": (0, 1 << 50),
}


def split_address(address: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port`. Raises ValueError in words."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f'expected "host:port", such as "127.0.0.1:8400", not {address!r}')
    return host, int(port)


def is_loopback(address: str) -> bool:
    host = split_address(address)[0]
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def problems(config: Config) -> Iterator[tuple[str, str]]:
    """(key, what is wrong and what it should be) for everything that types alone do not catch."""
    yield from _numbers(config)
    for key, name in (("node.name", config.node.name), ("cluster.id", config.cluster.id)):
        if not _NAME.fullmatch(name):
            yield key, f"{name!r}: expected 1 to 64 of A-Z a-z 0-9 . _ -"
    if not config.node.data_dir:
        yield "node.data_dir", "must not be empty"
    yield from _addresses(config)
    yield from _certificates(config)
    if not re.fullmatch(r"([0-9a-f]{64})?", config.security.bootstrap_token_hash):
        yield "security.bootstrap_token_hash", "expected 64 hex digits: `hadelay token bootstrap` prints them"
    yield from _webhooks(config.webhooks)
    yield from _archive(config.retention.archive)
    yield from _relations(config)


def _numbers(config: Config) -> Iterator[tuple[str, str]]:
    for section in config.__struct_fields__:
        part = getattr(config, section)
        for name in part.__struct_fields__:
            value, key = getattr(part, name), f"{section}.{name}"
            if isinstance(value, bool) or not isinstance(value, int):
                continue
            low, high = _RANGES.get(key, (1, 1 << 62))
            if not low <= value <= high:
                bound = f"at least {low:,}" if value < low else f"at most {high:,}"
                yield key, f"is {value:,}; must be {bound}"


def _addresses(config: Config) -> Iterator[tuple[str, str]]:
    named = [("http.listen", config.http.listen), ("raft.listen", config.raft.listen)]
    named += [(f"raft.peers.{name}", address) for name, address in config.raft.peers.items()]
    for key, address in named:
        try:
            exposed = not is_loopback(address) and key.endswith(".listen")
        except ValueError as error:
            yield key, str(error)
            continue
        if exposed and not config.security.insecure and (missing := _unprotected(config, key)):
            yield (
                key,
                (
                    f"{address} can be reached from other machines, and nothing protects it: listen on 127.0.0.1, "
                    f"set {missing}, or accept that with insecure = true under [security]"
                ),
            )
    if config.http.advertise and not re.fullmatch(r"https?://[^/\s]+", config.http.advertise):
        yield (
            "http.advertise",
            f"{config.http.advertise!r}: expected a URL without a path, such as http://10.0.0.1:8400",
        )
    for name in config.http.hosts:
        if not re.fullmatch(r"[A-Za-z0-9_.*-]+", name):
            yield "http.hosts", f'{name!r}: expected a name without a port, such as "queue.example.com" or "*.internal"'
    peers = config.raft.peers
    if peers and config.node.name not in peers:
        yield "raft.peers", f"lists every member, but not this node ({config.node.name}): add it"
    for name in peers:
        if not _NAME.fullmatch(name):
            yield f"raft.peers.{name}", "a node's name is 1 to 64 of A-Z a-z 0-9 . _ -"
    if config.cluster.survivor and len(config.members) > 1:
        yield "cluster.survivor", "goes on alone: --set raft.peers=NAME=HOST:PORT of this node, and of no other"
    if len(set(peers.values())) < len(peers):
        yield "raft.peers", "two members have the same address"


def _unprotected(config: Config, key: str) -> str:
    """What an address that others can reach still needs."""
    if key == "raft.listen":
        return "" if config.raft.tls_cert else "tls_cert, tls_key and tls_ca under [raft]"
    needed = [] if config.http.tls_cert else ["tls_cert and tls_key under [http]"]
    needed += [] if config.security.tokens else ["tokens = true under [security]"]
    return ", ".join(needed)


def _certificates(config: Config) -> Iterator[tuple[str, str]]:
    for section, needed in (("http", ("tls_cert", "tls_key")), ("raft", ("tls_cert", "tls_key", "tls_ca"))):
        part = getattr(config, section)
        given = [name for name in needed if getattr(part, name)]
        missing = [name for name in needed if name not in given]
        if given and missing:
            yield f"{section}.{given[0]}", f"goes with {' and '.join(missing)}"
    if config.http.tls_cert and config.http.advertise.startswith("http:"):
        yield "http.advertise", f"{config.http.advertise}: this node has a tls_cert, so it is https://…"


def _webhooks(webhooks: WebhooksConfig) -> Iterator[tuple[str, str]]:
    for network in webhooks.allow:
        try:
            ipaddress.ip_network(network)
        except ValueError as error:
            yield "webhooks.allow", f'{error}: expected networks such as "10.0.0.0/8"'
    if webhooks.alert_url and not re.fullmatch(r"https?://[^\s@/]+(/\S*)?", webhooks.alert_url):
        yield "webhooks.alert_url", f"{webhooks.alert_url!r}: expected a URL such as https://alerts.example.com/hadelay"
    if not webhooks.user_agent.isprintable() or not webhooks.user_agent.isascii():
        yield "webhooks.user_agent", "is sent as a header: printable ASCII only"


def _archive(where: str) -> Iterator[tuple[str, str]]:
    if wrong := uris.problem(where):
        yield "retention.archive", wrong
    elif uris.is_uri(where) and not where.startswith("file://") and find_spec("pyarrow") is None:
        yield "retention.archive", f"{where}: a node reads it with pyarrow: pip install 'hadelay[archive]'"


def _relations(config: Config) -> Iterator[tuple[str, str]]:
    raft, http = config.raft, config.http
    if raft.election_max_ms < raft.election_min_ms * 5 // 4:
        yield "raft.election_max_ms", f"is {raft.election_max_ms}; must be at least 1.25 × election_min_ms"
    if raft.heartbeat_ms * 3 > raft.election_min_ms:
        yield "raft.heartbeat_ms", f"is {raft.heartbeat_ms}; must be at most a third of election_min_ms"
    if http.default_lease_ms > http.max_lease_ms:
        yield "http.default_lease_ms", "is longer than max_lease_ms"
    if http.default_receive > http.max_receive:
        yield "http.default_receive", "is more than max_receive"
    if http.max_batch_bytes < http.max_body_bytes:
        yield "http.max_batch_bytes", "is smaller than max_body_bytes"
