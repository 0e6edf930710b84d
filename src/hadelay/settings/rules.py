"""Validation of a node's configuration beyond types: ranges, addresses, and relations between keys."""

import ipaddress
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from urllib.parse import urlsplit

from hadelay import uris
from hadelay.settings.node import DAY, GIB, HOUR, KIB, MIB, Config
from hadelay.webhooks import new_secret_problem

_NAME = r"[A-Za-z0-9._-]{1,64}", "1 to 64 of A-Z a-z 0-9 . _ -"
#: Rules for texts: key → (pattern, description of a valid text). The pattern applies to the value, to each text of a
#: list, or to each name in a table.
_TEXTS: dict[str, tuple[str, str]] = {
    "node.name": _NAME,
    "node.data_dir": (r"[\s\S]+", "the path of a directory"),
    "cluster.id": _NAME,
    "http.advertise": (r"(https?://[^/\s]+)?", "a URL without a path, such as http://10.0.0.1:8400"),
    "http.hosts": (r"[A-Za-z0-9_.*-]+", 'a name without a port, such as "queue.example.com" or "*.internal"'),
    "raft.peers": _NAME,
    "webhooks.alert_url": (r"(https?://[^\s@/]+(/\S*)?)?", "a URL such as https://alerts.example.com/hadelay"),
    "webhooks.user_agent": ("[ -~]*", "printable ASCII: the value is sent as a header"),
}
#: Ranges of numbers by key: (minimum, maximum); all other numbers must be positive.
_RANGES: dict[str, tuple[int, int]] = {
    "cluster.group": (0, 255), "http.max_body_bytes": (1, 64 * MIB), "http.max_batch_bytes": (1, 256 * MIB),
    "http.max_batch_items": (1, 100_000), "http.max_receive": (1, 10_000),
    "http.max_connections_per_address": (0, 1 << 20), "http.max_tags": (0, 64), "http.max_meta_bytes": (0, 64 * KIB),
    "http.max_key_bytes": (1, KIB), "http.max_tag_bytes": (1, KIB), "raft.max_entry_bytes": (4 * KIB, 4 * MIB),
    "raft.segment_bytes": (8 * MIB, GIB), "raft.heartbeat_ms": (0, 10_000), "raft.election_max_ms": (0, 1 << 62),
    "webhooks.max_calls": (1, 60_000), "webhooks.topic_calls": (1, 10_000), "limits.metrics_topics": (0, 100_000),
    "limits.max_delay_ms": (1, 36_500 * DAY), "dispatch.interval_ms": (1, 10_000),
    "dispatch.ready_window": (1_000, 1_000_000), "retention.settled_ms": (2 * HOUR, 3650 * DAY),
    "retention.carry_ms": (2 * HOUR, 3650 * DAY), "storage.min_free_bytes": (0, 1 << 50),
    "storage.patrol_bytes": (0, 1 << 40),
}  # fmt: skip


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port` or `[v6]:port`. ValueError with a message for users."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f'expected "host:port", such as "127.0.0.1:8400", not {address!r}')
    return host, int(port)


def is_loopback(address: str) -> bool:
    return _is_loopback(split_address(address)[0])


def _is_loopback(host: str) -> bool:
    address = _ip(host)
    return host.lower().rstrip(".") == "localhost" if address is None else address.is_loopback


def is_wildcard(host: str) -> bool:
    """Whether a host means all interfaces, such as 0.0.0.0 and ::, so that no machine can be reached by it."""
    address = _ip(host)
    return host in ("0", "*") if address is None else address.is_unspecified


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that a host is; None if the host is a name. An IPv4 address mapped into IPv6 counts as the IPv4
    address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def problems(config: Config) -> Iterator[tuple[str, str]]:
    """Check a configuration: yields (key, problem with the expected value) for every invalid key."""
    yield from _numbers(config)
    yield from _texts(config)
    wrong = list(_addresses(config))
    yield from wrong or _reachable(config)
    yield from _peers(config)
    yield from _certificates(config)
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


def _texts(config: Config) -> Iterator[tuple[str, str]]:
    for key, (pattern, expected) in _TEXTS.items():
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name)
        for text in value if isinstance(value, list | dict) else [value]:
            if not re.fullmatch(pattern, text):
                yield f"{key}.{text}" if isinstance(value, dict) else key, f"{text!r}: expected {expected}"
    if not re.fullmatch(r"([0-9a-f]{64})?", config.security.bootstrap_token_hash):
        yield "security.bootstrap_token_hash", "expected 64 hex digits: `hadelay token bootstrap` prints them"
    if (secret := config.webhooks.alert_secret) and (wrong := new_secret_problem(secret)):
        yield "webhooks.alert_secret", wrong
    for network in config.webhooks.allow:
        try:
            ipaddress.ip_network(network)
        except ValueError as error:
            yield "webhooks.allow", f'{error}: expected networks such as "10.0.0.0/8"'


def _addresses(config: Config) -> Iterator[tuple[str, str]]:
    named = [("http.listen", config.http.listen), ("raft.listen", config.raft.listen)]
    named += [("http.aws_listen", config.http.aws_listen)] if config.http.aws_listen else []
    named += [(f"raft.peers.{name}", address) for name, address in config.raft.peers.items()]
    for key, address in named:
        try:
            exposed = not is_loopback(address) and key.endswith(".listen")
        except ValueError as error:
            yield key, str(error)
            continue
        if exposed and not config.security.insecure and (missing := _unprotected(config, key)):
            reached = f"other machines can reach {address}, and nothing protects it: listen on 127.0.0.1"
            yield key, f"{reached}, set {missing}, or accept the risk with insecure = true under [security]"


def _reachable(config: Config) -> Iterator[tuple[str, str]]:
    """Check that the addresses given to clients and other nodes lead to this node, also from other machines."""
    http, peers, members = config.http, config.raft.peers, config.members
    try:
        wrong = advertise_problem(config.advertise, members, http.listen)
    except ValueError as error:
        yield "http.advertise", f"{config.advertise!r}: {error}"
        return
    if wrong:
        said = f"clients and other nodes look for this node at {config.advertise}, and {wrong}"
        key = "http.advertise" if http.advertise else "http.listen"
        yield key, f"{said}: set http.advertise to a URL such as {urlsplit(config.advertise).scheme}://10.0.0.1:8400"
    for name, problem in link_problems(members):
        yield f"raft.peers.{name}" if peers else "raft.listen", problem


def _apart(members: Mapping[str, str]) -> str | None:
    """Name of a member whose address shows that it is on a machine of its own (neither loopback nor a wildcard); None
    if there is none. members: name → host:port of the node link."""
    hosts = {name: split_address(address)[0] for name, address in members.items()}
    return next((name for name, host in hosts.items() if not _is_loopback(host) and not is_wildcard(host)), None)


def advertise_problem(url: str, members: Mapping[str, str], listen: str = "") -> str:
    """Explain why clients and other members do not find the node that advertises this URL; "" if they do. members: name
    → host:port of the node link. ValueError if `url` is not a URL."""
    host = urlsplit(url).hostname or ""
    if is_wildcard(host):
        return "that names no machine"
    others = _apart(members) or (listen and not is_loopback(listen))
    return "other machines reach themselves there" if len(members) > 1 and _is_loopback(host) and others else ""


def link_problems(members: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Names of the members to whose node link other members cannot connect, with the problem. members: name →
    host:port."""
    apart = _apart(members)
    for name, address in members.items():
        host = split_address(address)[0]
        if is_wildcard(host):
            yield name, f'{host} names no machine: other nodes find {name} by raft.peers.{name} = "10.0.0.1:8500"'
        elif len(members) > 1 and apart and _is_loopback(host):
            yield name, f"{host}: other machines, such as that of {apart}, reach themselves there and not {name}"


def _peers(config: Config) -> Iterator[tuple[str, str]]:
    peers = config.raft.peers
    if peers and config.node.name not in peers:
        yield "raft.peers", f"lists every member, but not this node ({config.node.name}): add it"
    if config.cluster.survivor and len(config.members) > 1:
        yield "cluster.survivor", "needs a cluster of this node alone: --set raft.peers=NAME=HOST:PORT of this node"
    if len(set(peers.values())) < len(peers):
        yield "raft.peers", "two members have the same address"


def _unprotected(config: Config, key: str) -> str:
    """Settings that would protect an address that other machines can reach, and are missing; "" if none are."""
    if key == "raft.listen":
        return "" if config.raft.tls_cert else "tls_cert, tls_key and tls_ca under [raft]"
    needed = [] if config.http.tls_cert else ["tls_cert and tls_key under [http]"]
    needed += [] if config.security.tokens else ["tokens = true under [security]"]
    return ", ".join(needed)


def _certificates(config: Config) -> Iterator[tuple[str, str]]:
    pair, ca = ("tls_cert", "tls_key"), ("tls_ca",)
    for section, needed, goes_with in (("http", pair, ()), ("raft", (*pair, *ca), ()), ("webhooks", pair, ca)):
        part = getattr(config, section)
        given = [name for name in (*needed, *goes_with) if getattr(part, name)]
        missing = [name for name in needed if name not in given]
        if given and missing:
            yield f"{section}.{given[0]}", f"needs {' and '.join(missing)}"
    if config.http.tls_cert and config.http.advertise.startswith("http:"):
        yield "http.advertise", f"{config.http.advertise}: this node serves HTTPS (tls_cert): use https://…"


def _archive(where: str) -> Iterator[tuple[str, str]]:
    if wrong := uris.problem(where):
        yield "retention.archive", wrong
    elif uris.is_uri(where) and not where.startswith("file://") and find_spec("pyarrow") is None:
        yield "retention.archive", f"{where}: a node needs pyarrow to read the archive: pip install 'hadelay[archive]'"


def _relations(config: Config) -> Iterator[tuple[str, str]]:
    raft, http = config.raft, config.http
    if http.aws_listen and not http.aws:
        yield "http.aws_listen", "needs http.aws = true"
    if 0 < raft.election_max_ms < raft.election_min_ms * 5 // 4:
        yield "raft.election_max_ms", f"is {raft.election_max_ms}; must be at least 1.25 × election_min_ms"
    if raft.heartbeat_ms * 3 > raft.election_min_ms:
        yield "raft.heartbeat_ms", f"is {raft.heartbeat_ms}; must be at most a third of election_min_ms"
    if http.default_lease_ms > http.max_lease_ms:
        yield "http.default_lease_ms", "is longer than max_lease_ms"
    if http.default_receive > http.max_receive:
        yield "http.default_receive", "is more than max_receive"
    if http.max_batch_bytes < http.max_body_bytes:
        yield "http.max_batch_bytes", "is smaller than max_body_bytes"
