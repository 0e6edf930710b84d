"""Services for the cluster, its members, and the health of this node as this node sees itself."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from hadelay.api.cluster import BackupOut, CheckOut, Cluster, Dispatch, Member, Quorum, Term, TookOver
from hadelay.api.service import Actor, Leader, answered
from hadelay.api.text import format_instant
from hadelay.codec import commands
from hadelay.errors import BadRequest, HadelayError, NoLeader, NotFound, Overloaded
from hadelay.model import hour_name
from hadelay.raft.journal import FIRST
from hadelay.server.leadership import TRANSFER_S
from hadelay.server.logbook import TermSeen
from hadelay.server.memberchanges import CHANGE_S
from hadelay.server.node import Node
from hadelay.server.peers import PeerStatus
from hadelay.server.service.part import Service, once_begun

#: Time in seconds for which a change of the members is retried that was refused for a temporary reason.
_CHANGE_S = 5.0
#: Limit of committed entries that a node has not applied yet; a node with more of them does not count as ready.
_MAX_LAG = 10_000


class Clusters(Service):
    def __init__(self, node: Node) -> None:
        super().__init__(node)
        #: Event that is set for a moment at each sign of life of a leader, to wake requests that wait for a leader.
        self._sign = asyncio.Event()
        node.leadership.on_sign = self._wake

    def _wake(self) -> None:
        self._sign.set()
        self._sign.clear()

    def urls(self) -> set[str]:
        """URLs that the members of this cluster advertise to clients."""
        node, peers = self._node, self._node.peers.peers
        found = {peers[name].http for name in node.raft.membership.names if name in peers}
        return found - {""} | {node.config.advertise}

    async def find_leader(self) -> Leader:
        """The known leader. If none is known, wait for one up to http.no_leader_wait_ms, then raise NoLeader."""
        if (gone := drained(self._node)) is not None:
            raise gone  # do not wait for a leader on a drained node: its consumers have to poll another node
        return await self._find_leader()

    async def _find_leader(self, term: int = 0) -> Leader:
        """The known leader of `term` or of a later term; waits for one as `find_leader` does."""
        node = self._node
        deadline = node.runtime.monotonic() + node.config.http.no_leader_wait_ms / 1000
        while True:
            name = node.raft.leader if node.raft.term >= term else None
            if name == node.name and node.leading:
                return Leader(name, node.config.advertise, True)
            peer = node.peers.peers.get(name or "")
            if name is not None and name != node.name and peer is not None and peer.http:
                return Leader(name, peer.http, False)
            left_s = deadline - node.runtime.monotonic()
            if left_s <= 0:
                raise NoLeader(
                    "no majority can be reached (/readyz of the nodes says why); try again, or another node",
                    retry_after_ms=500,
                )
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._sign.wait()

    async def view(self, *, stale: bool) -> Cluster[str]:
        await self._confirm(stale)
        node = self._node
        hour, second, local = node.ledger.cursor
        cursor = Dispatch(hour_name(hour), second, local, node.config.dispatch.sync)
        return Cluster(
            node.config.cluster.id,
            node.ledger.level,
            node.raft.leader,
            node.raft.term,
            str(node.raft.applied_index),
            format_instant(self._node.now_ms()),
            cursor,
            members_of(node),
            self._terms(),
            self._backups(),
        )

    def _terms(self) -> list[Term[str]]:
        return [
            Term(row.term, row.leader, format_instant(row.since_ms), why or None, _took_over(row))
            for row, why in self._node.logbook.terms()
        ]

    def _backups(self) -> list[BackupOut[str]]:
        return [
            BackupOut(row.node, format_instant(row.at_ms), str(row.bytes), str(row.read_bytes), row.outcome)
            for row in self._node.logbook.backups()
        ]

    async def transfer(self, to: str | None, by: Actor) -> str:
        """Hand leadership to `to`, or to the most advanced follower; returns the name of the new leader."""
        node = self._node
        await self._judge(lambda: self._no_node(to, BadRequest))
        if to == node.raft.leader and to is not None:
            return to
        await self._administer(by, "cluster.transfer", to or "", commands.encode_noop())
        term = node.raft.term
        await self._ask_leader("transfer", to, TRANSFER_S)
        with once_begun():
            # Wait for a later term: this node may not have heard of the new leader yet
            return (await self._find_leader(term + 1)).name

    async def drain(self, node: str, undo: bool, by: Actor) -> None:
        """Drain `node` until it restarts: hand its leadership over, refuse publishes and polls. undo: end the drain."""
        mine = self._node
        await self._judge(lambda: self._no_node(node))
        await self._administer(by, "cluster.undrain" if undo else "cluster.drain", node, commands.encode_noop())
        if node == mine.name:
            await answered(mine.leadership.drain, not undo)
        else:
            await answered(lambda done: mine.link.call(node, "drain", not undo, _CHANGE_S, done))

    async def add_member(self, name: str, raft: str, by: Actor) -> None:
        """Add a learner, which becomes a voter by itself. Raises Conflict with the reason."""
        await self._administer(by, "members.add", f"{name} {raft}", commands.encode_noop())
        await self._change("add", name, raft)

    async def remove_member(self, name: str, by: Actor) -> None:
        """Remove a member; a leader hands leadership over first. Raises NotFound, or Conflict with the reason."""
        await self._administer(by, "members.remove", name, commands.encode_noop())
        await self._change("remove", name, "")

    async def _change(self, op: str, name: str, raft: str) -> None:
        """Change the members; retry while the obstacle may be temporary, such as a new leader or another change."""
        node = self._node
        deadline = node.runtime.monotonic() + _CHANGE_S
        while True:
            try:
                await self._ask_leader("members", [op, name, raft], CHANGE_S)
                return
            except HadelayError as error:
                passes = error.retryable and error.outcome_known
                if not passes or node.runtime.monotonic() >= deadline:
                    raise
            await asyncio.sleep(0.1)

    def livez(self) -> list[CheckOut]:
        """Conditions of /livez: whether this process should go on running. None depends on a quorum, because a
        partition would then restart every node."""
        return [CheckOut("loop", True)]

    def readyz(self) -> list[CheckOut]:
        return ready_checks(self._node)

    async def quorum(self, without: str) -> Quorum:
        """The voters that are left without the member `without`, and the number that a majority needs, as this node
        sees it now. Raises NotFound for an unknown member."""
        await self._judge(lambda: self._no_node(without))
        membership = self._node.raft.membership
        return Quorum(without, others_left(self._node, without), len(membership.voters), membership.majority)

    def _no_node(self, name: str | None, error: type[HadelayError] = NotFound) -> HadelayError | None:
        """Error if no member has this name, else None. name: None stands for any member."""
        names = [member.name for member in self._node.raft.membership.members]
        return (
            None if name is None or name in names else error(f"there is no node {name!r}; there are {', '.join(names)}")
        )


def members_of(node: Node) -> list[Member]:
    """Describe the members of the cluster, as this node sees them."""
    leader, skews, members = node.raft.leader, node.clock.skews(node.runtime.monotonic()), []
    for name, address, votes, _ in node.raft.membership.members:
        peer, here = node.peers.peers.get(name) or PeerStatus(name), name == node.name
        live = here or node.peers.live(name)
        role = "learner" if not votes else "unknown" if not live else "leader" if name == leader else "follower"
        http, applied = (node.config.advertise, node.raft.applied_index) if here else (peer.http, peer.applied_index)
        lag = max(0, node.raft.commit_index - applied)
        space = node.checkpoints.has_space if here else peer.has_space if live else None
        drained = node.raft.elections.draining if here else live and peer.drained
        members.append(
            Member(
                name,
                http,
                address,
                role,
                str(applied),
                lag,
                peer.version,
                peer.feature_level,
                skews.get(name),
                space,
                drained,
            )
        )
    return members


def drained(node: Node) -> Overloaded | None:
    return (
        Overloaded(f"{node.name} is drained: ask another node", retry_after_ms=0) if node.leadership.drained else None
    )


def ready_checks(node: Node) -> list[CheckOut]:
    """The conditions of /readyz: each with its present state if it is met, else with the problem."""
    raft, clock = node.raft, node.clock
    lag = raft.commit_index - raft.applied_index
    skew = clock.skews(node.runtime.monotonic()).get(node.name)
    alarms = "; ".join(clock_problems(node))
    free = f"{node.checkpoints.free_bytes >> 20:,} MiB are free"
    checks = [
        ("leader", raft.leader is not None, f"{raft.leader} leads term {raft.term}", _without_a_leader(node)),
        (
            "clock",
            clock.ready,
            alarms or f"this node's wall clock is {skew or 0:+.0f} ms off",
            f"cluster time is not known: {alarms or 'no node has reported it yet'}",
        ),
        (
            "applied",
            lag <= _MAX_LAG,
            f"{lag} entries to apply" if lag else "every entry is applied",
            f"{lag} entries behind what is committed",
        ),
        # A rolling restart waits until the restarted node is admitted: before that, no other node may be missing.
        (
            "admitted",
            raft.journal.admitted,
            f"this node votes (incarnation {raft.journal.incarnation})",
            "this node lost its disk, or is new: it neither votes nor counts yet",
        ),
        ("space", node.checkpoints.has_space, free, f"{free}: less than storage.min_free_bytes"),
    ]
    if node.raft.elections.draining:
        undo = "hadelay cluster drain --undo brings it back into traffic"
        checks.append(("drained", not node.leadership.drained, f"it leads all the same; {undo}", undo))
    return [CheckOut(name, ok, stands if ok else wrong) for name, ok, stands, wrong in checks]


#: Name of a cluster clock's alarm (ClusterClock.alarms) → its description. Alarms that name a node are not in it.
_CLOCK_PROBLEMS = {
    "no_majority": "the wall clocks of a majority do not agree, or are not known",
    "behind_checkpoint": "the wall clocks are behind the time that the cluster has reached",
}


def clock_problems(node: Node) -> list[str]:
    """Describe the problems of the wall clocks in words; "" while the clocks of a majority agree."""
    skews, found = node.clock.skews(node.runtime.monotonic()), list[str]()
    for alarm in sorted(node.clock.alarms):
        kind, _, name = alarm.partition(":")
        words = f"the wall clock of {name} is {skews.get(name, 0):+,.0f} ms off cluster time"
        found.append(_CLOCK_PROBLEMS.get(kind, words))
    return found


def _without_a_leader(node: Node) -> str:
    """Reason in words why this node knows no leader; if its directories are empty, also what to do."""
    raft, peers = node.raft, node.raft.peers.values()
    away = sorted(peer.name for peer in peers if not peer.up)
    blank = sorted(peer.name for peer in peers if peer.up and not peer.admitted)
    rest = sorted(peer.name for peer in peers if peer.up and peer.admitted)
    seen = [
        f"{_names(names)} {what}"
        for names, what in (
            (away, "not connected"),
            (blank, "connected, but without data and without a vote"),
            (rest, "connected"),
        )
        if names
    ]
    others = "; ".join(seen) or "there are no other members"
    if raft.journal.admitted or (raft.journal.last_index, raft.journal.term) != FIRST:
        return f"no majority can be reached: {others}"
    return (
        "the data directory is empty, and this node may not found a cluster. Very first start: stop all nodes and "
        "start each once with --init (or cluster.init = true). Otherwise the node waits for members that hold data: "
        f"{others}"
    )


def _names(names: list[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last} are" if most else f"{last} is"


def others_left(node: Node, without: str) -> list[str]:
    """The voters, without the node `without`, that are admitted, in contact, and at most _MAX_LAG entries behind, as
    far as this node sees."""
    raft, peers = node.raft, node.peers

    def fresh(applied_index: int) -> bool:
        return raft.commit_index - applied_index <= _MAX_LAG

    voters = raft.membership.voters
    left = [node.name] if raft.leader and raft.journal.admitted and fresh(raft.applied_index) else []
    left += [
        name
        for name, peer in raft.peers.items()
        if peer.up and peer.admitted and peers.live(name) and fresh(peers.peers[name].applied_index)
    ]
    return sorted(name for name in left if name != without and name in voters)


def _took_over(row: TermSeen) -> TookOver | None:
    if row.took_over is None:
        return None
    hour, *rest = row.took_over
    return TookOver(hour_name(hour), *rest)
