"""The report on what needs attention: topics and schedules as the leader examined them last, and members of the
cluster."""

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any
from urllib.parse import quote

import msgspec

from hadelay.api.attention import KINDS, Action, Attention, Kind, Row
from hadelay.api.text import format_instant
from hadelay.errors import NoLeader, OutcomeUnknown
from hadelay.model import HOUR_MS
from hadelay.rights import Rights
from hadelay.server.attention import Finding, Findings
from hadelay.server.link import Reply
from hadelay.server.node import Node
from hadelay.server.service.cluster import clock_problems, members_of
from hadelay.server.service.part import Service
from hadelay.words import span

#: Limit of report rows of one kind; rows beyond it are only counted.
MOST = 100
_DAY_MS = 24 * HOUR_MS
#: Thresholds for report rows: lag of a member in log entries; time in ms before a certificate ends; number of changes
#: of leader, and the time in ms within which they count; age of the last backup in ms.
_LAG, _CERTIFICATE_MS, _LEADERS, _LEADERS_MS, _BACKUP_MS = 10_000, 14 * _DAY_MS, 3, 1_800_000, 8 * _DAY_MS
#: Limit in ms: a token is reported in the last tenth of its lifetime, but at most this time before its end; and for a
#: day after.
_TOKEN_MS = 7 * _DAY_MS
#: Roles under which a member votes; "unknown" is the role of a voter that does not answer.
_VOTERS = ("leader", "follower", "unknown")
_OPEN = ("Open the topic", "/console/topics/{topic}", "hadelay topic get {topic}")
_READY = ("See what waits", "/console/messages?topic={topic}&state=ready", "hadelay msg list {topic} --state ready")
_CLUSTER = ("Open the cluster", "/console/cluster", "hadelay cluster status")
_QUORUM = ("Check the quorum", "/console/cluster#m", "hadelay check quorum")
#: Kind of a report row → two actions for it, each as (text, page of the console, command).
_ACTIONS: dict[Kind, tuple[tuple[str, str, str], tuple[str, str, str]]] = {
    "receiver": (_OPEN, ("Pause…", "/console/topics/{topic}#actions", "hadelay topic pause {topic}")),
    "group": (
        ("Open the group", "/console/topics/{topic}/group?q={quoted}", "hadelay topic group {topic} {word}"),
        ("Open its first message", "/console/messages/{message}", "hadelay trace {message}"),
    ),
    "idle": (_OPEN, _READY), "backlog": (_OPEN, _READY), "late": (_OPEN, _READY),
    "paused": (_OPEN, ("Resume…", "/console/topics/{topic}#actions", "hadelay topic resume {topic}")),
    "deaths": (
        ("Look at them", "/console/topics/{topic}/dead", "hadelay dead list {topic}"),
        ("Redrive…", "/console/topics/{topic}/dead#actions", "hadelay topic redrive {topic}"),
    ),
    "schedule": (("Open the schedule", "/console/schedules/{name}", "hadelay schedule get {name}"), _OPEN),
    "drained": (_CLUSTER, ("Undo…", "/console/cluster#actions", "hadelay cluster drain {name} --undo")),
    "leader": (("See past leaders", "/console/cluster#l", "hadelay cluster status"), _QUORUM),
    "member": (_CLUSTER, _QUORUM), "upgrade": (_CLUSTER, _QUORUM),
    "shards": (_CLUSTER, ("See the shard map", "/console/cluster", "hadelay shards list")),
    "certificate": (_CLUSTER, ("Make certificates", "/console/cluster#t", "hadelay cluster certs")),
    "token": (
        ("Open the tokens", "/console/access", "hadelay token list"),
        ("Create a token…", "/console/access#create", "hadelay token create"),
    ),
    "archive": (_CLUSTER, ("See the hours", "/console/cluster#f", "hadelay pipeline archive")),
    "backup": (("See the backups", "/console/cluster#b", "hadelay cluster status"),
               ("Make a backup", "/console/cluster#b", "hadelay backup create")),
}  # fmt: skip


class AttentionService(Service):
    def __init__(self, node: Node) -> None:
        super().__init__(node)
        node.link.handlers["attention"] = lambda peer, globs, reply: node.attention.ask(
            partial(self._found, Rights(f"read:{glob}" for glob in globs), reply)
        )

    async def report(self, rights: Rights) -> Attention[str]:
        """Report the problems that a token with these rights may see. Without a leader, the report has only the
        members, as this node sees them. Raises NoLeader if the leader does not answer; or, without a leader, if
        the token may not read the cluster."""
        try:
            wait_s = self._node.config.http.no_leader_wait_ms / 1000
            rows, more = await self._ask_leader("attention", sorted(rights.globs["read"]), wait_s)
        except (NoLeader, OutcomeUnknown) as error:
            if self._node.raft.leader is not None or not rights.may("read", None):
                raise NoLeader(error.detail, retry_after_ms=200) from None
            rows, more = _page(Findings(), Findings(), cluster_findings(self._node), rights)
        shown = [_row(row) for row in msgspec.convert(rows, list[Finding])]
        return Attention(self._node.config.cluster.id, format_instant(self._node.now_ms()), shown, dict(more))

    def _found(self, rights: Rights, reply: Reply, found: tuple[Findings, Findings] | None, error: Any) -> None:
        if found is None:
            reply(None, error)
        else:
            reply(_page(*found, cluster_findings(self._node), rights), None)


def counts_of(node: Node) -> dict[str, float] | None:
    """Number of report rows per kind, on the leader; None on other nodes, and before the leader has examined all
    topics."""
    if node.attention.topics is None:
        return None
    counts = node.attention.topics.counts + node.attention.schedules.counts
    counts.update(row.kind for row in cluster_findings(node))
    return {kind: counts[kind] for kind in KINDS}


def _page(topics: Findings, schedules: Findings, cluster: Iterable[Finding], rights: Rights) -> list[Any]:
    """Returns [report rows that these rights may see, the worst first, at most MOST of a kind; kind → number of rows
    left out]."""
    whole = rights.may("read", None)
    kept = [*cluster] if whole else []
    for rows in (*topics.rows.values(), *schedules.rows.values()):
        kept += rows if whole else [row for row in rows if rights.may("read", row.topic)]
    counts = Counter(row.kind for row in kept)
    if whole:
        counts |= topics.counts + schedules.counts
    kept.sort(key=lambda row: (row.severity != "bad", KINDS.index(row.kind), -row.number, row.name))
    shown = Counter[Kind]()
    rows = list[Finding]()
    for row in kept:
        shown[row.kind] += 1
        if shown[row.kind] <= MOST:
            rows.append(row)
    return [msgspec.to_builtins(rows), {kind: count - MOST for kind, count in counts.items() if count > MOST}]


def _row(found: Finding) -> Row[str]:
    names = {
        "topic": found.topic, "name": found.name, "quoted": quote(found.name, safe=""), "word": shlex.quote(found.name),
        "message": found.message,
    }  # fmt: skip
    actions = [
        Action(text, href.format(**names), command.format(**names)) for text, href, command in _ACTIONS[found.kind]
    ]
    since = format_instant(found.since_ms) if found.since_ms else None
    return Row(
        found.kind,
        found.severity,  # type: ignore[arg-type]
        found.what,  # type: ignore[arg-type]
        found.name,
        found.sentence,
        found.number,
        since,
        actions,
        found.topic,
        found.message,
    )


def cluster_findings(node: Node) -> list[Finding]:
    """Report rows about the cluster and its members, as this node sees them."""
    return [*_members(node), *_leaders(node), *_shards(node), *_ends(node), *_copies(node)]


def _about(node: Node, kind: Kind, severity: str, sentence: str, number: int = 1, since_ms: int = 0) -> Finding:
    return Finding(kind, severity, "cluster", node.config.cluster.id, "", sentence, number, since_ms)


def _members(node: Node) -> Iterator[Finding]:
    now_ms, mono, members = node.now_ms(), node.runtime.monotonic(), members_of(node)
    for member in members:
        heard_s = 0.0 if member.name == node.name else node.peers.peers[member.name].heard
        of = partial(Finding, what="node", name=member.name, topic="")
        if member.role == "unknown":
            words = f"{member.name} does not answer: start it, or read in its log why it ended."
            since_ms = now_ms - round((mono - heard_s) * 1000) if heard_s > 0 else 0
            yield of("member", "bad", sentence=words, number=1, since_ms=since_ms)
        elif member.lag > _LAG:
            words = f"{member.name} is {member.lag:,} entries behind."
            yield of("member", "warn", sentence=words, number=member.lag)
        if member.drained:
            yield _drained(node, member.name)
        if (peer := node.raft.peers.get(member.name)) is not None and peer.up and not peer.admitted:
            words = f"{member.name} lost its disk, or is new, and does not vote yet."
            yield of("member", "warn", sentence=words, number=1)
    if full := [member.name for member in members if member.has_space is False]:
        words = f"Too little disk space on {', '.join(full)}: every node refuses publishes until space is freed there."
        yield _about(node, "member", "bad", words, len(full))
    silent, voters = (sum(member.role in roles for member in members) for roles in (("unknown",), _VOTERS))
    if node.raft.leader is not None and silent and voters - silent == voters // 2 + 1:
        yield _about(node, "member", "bad", "If one more member fails, the cluster stops.", silent)
    for problem in clock_problems(node):
        yield _about(node, "member", "warn", f"{problem[0].upper()}{problem[1:]}.")
    if len({member.feature_level for member in members if member.role != "unknown"}) > 1:
        yield _about(node, "upgrade", "warn", "Members run different releases: an upgrade is under way.")


def _drained(node: Node, name: str) -> Finding:
    """Report row of a drained node; it names the person who drained it, if the audit trail has that."""
    entries = (one for one in reversed(node.ledger.audit.entries) if one.action == "cluster.drain")
    entry = next((one for one in entries if one.target == name), None)
    by = f" by {entry.token}" if entry is not None and entry.token else ""
    words = f"{name} is drained{by}: it takes no publishes and no receives."
    return Finding("drained", "warn", "node", name, "", words, 1, 0 if entry is None else entry.at_ms)


def _leaders(node: Node) -> Iterator[Finding]:
    if node.raft.leader is None:
        words = "No leader is known: nothing is accepted and nothing is handed out until a majority of members answers."
        yield _about(node, "leader", "bad", words)
    since_ms = node.now_ms() - _LEADERS_MS
    # The first leader of a cluster does not count as a change of leader.
    recent = [(row, why) for row, why in node.logbook.terms() if row.since_ms >= since_ms and row.term > 1]
    if len(recent) >= _LEADERS:
        why = f" The last one: {recent[0][1]}." if recent[0][1] else ""
        words = f"The leader changed {len(recent)} times in the last 30 minutes.{why}"
        yield _about(node, "leader", "warn", words, len(recent), recent[-1][0].since_ms)


def _ends(node: Node) -> Iterator[Finding]:
    """Report rows of certificates and tokens that end soon, or have ended."""
    wall_ms, now_ms = node.runtime.wall_ms(), node.now_ms()
    for name, peer in node.peers.peers.items():
        end_s = node.certificate_s() if name == node.name else peer.certificate_s
        left_ms = end_s * 1000 - wall_ms
        if end_s and left_ms < _CERTIFICATE_MS:
            words = f"A certificate of {name} {_ending(left_ms)}."
            yield Finding("certificate", "bad", "node", name, "", words, int(left_ms // _DAY_MS))
    for token in node.ledger.tokens.values():
        if token.expires_at_ms is None:
            continue
        left_ms = token.expires_at_ms - now_ms
        if -_DAY_MS < left_ms < min(_TOKEN_MS, (token.expires_at_ms - token.created_at_ms) // 10):
            words = f"Token {token.name} ({token.id}) {_ending(left_ms)}."
            yield _about(node, "token", "bad" if left_ms < 0 else "warn", words, int(left_ms // _DAY_MS))


def _ending(left_ms: float) -> str:
    return f"expired {span(-left_ms)} ago" if left_ms < 0 else f"ends in {span(left_ms)}"


def _shards(node: Node) -> Iterator[Finding]:
    """Report rows of a shard that is suspended, and of a change of the shard map that is under way or was not
    finished."""
    known, index = node.ledger.shards, node.ledger.shards.index_of(node.ledger.group)
    name = "This cluster" if index is None else f"Shard {index}"
    if known.suspended:
        words = f"{name} was restored and creates no topics: run hadelay shards apply --at N=URL at another shard."
        yield _about(node, "shards", "bad", words)
    if known.prepared is not None:
        words = (
            f"{name} waits for the end of a change of the shard map, to version {known.prepared.version}: new names "
        )
        words += "that change owner are refused until then. If nobody makes one, run hadelay shards apply."
        yield _about(node, "shards", "warn", words)


def _copies(node: Node) -> Iterator[Finding]:
    """Report rows about the archive and about backups."""
    if stays := node.delivery.unarchived:
        yield _about(node, "archive", "warn", f"Past hours stay on the disk until they are archived: {stays}.")
    ended = [row for row in node.logbook.backups() if row.outcome != "running"]
    if not ended:
        return
    last, now_ms = ended[0], node.now_ms()
    if last.outcome == "incomplete":
        words = f"The last backup, of {last.node}, was not completed."
        yield _about(node, "backup", "warn", words, 1, last.at_ms)
    elif (age_ms := now_ms - last.at_ms) > _BACKUP_MS:
        words = f"The last backup is {span(age_ms)} old."
        yield _about(node, "backup", "warn", words, age_ms // _DAY_MS, last.at_ms)
