"""What a node shows of itself: topics, hours, members, names, readiness. Reads only, from this node's own state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.formats import DISPATCH_SIZE, INDEX_SIZE
from hadelay.ledger.topics import Topic
from hadelay.model import DEAD_HOURS
from hadelay.raft.journal import FIRST
from hadelay.server.api import (
    Check,
    ClusterView,
    DispatchView,
    HourFile,
    HoursView,
    HourView,
    MemberView,
    TopicView,
)
from hadelay.server.peers import Peer

if TYPE_CHECKING:
    from hadelay.server.node import Node

#: Per topic number, from the leader's dispatcher: ready messages, cluster time at which the oldest fell due; and of
#: what was handed out in the last minutes: how many, and p50, p99 and maximum of their lateness in ms. A leader of
#: version 0.1.0 knows no maximum.
Reports = dict[int, tuple[int, ...]]
#: A follower further behind than this many entries is not ready to answer.
_MAX_LAG = 10_000


def topic(node: Node, found: Topic, reports: Reports) -> TopicView:
    count, oldest, *lateness = reports.get(found.number, (0, 0, 0, 0, 0, 0))
    # The leader may be ahead of what is applied here.
    count = min(count, found.waiting)
    return TopicView(
        found.name,
        found.config,
        scheduled=found.waiting - count,
        ready=count,
        leased=found.leased,
        dead=found.dead,
        oldest_ready_age_ms=max(0, node.clock.read(node.runtime.monotonic()) - oldest) if count else None,
        bytes=found.bytes,
        lateness=(lateness[0], lateness[1], lateness[2], lateness[-1]) if lateness[0] else None,
    )


def cluster(node: Node) -> ClusterView:
    hour, second, local = node.ledger.cursor
    leader = node.raft.leader
    skews = node.clock.skews(node.runtime.monotonic())
    members = []
    for name, address, votes, _ in node.raft.membership.members:
        peer = node.peers.peers.get(name) or Peer(name)
        live = name == node.name or node.peers.live(name)
        role = "learner" if not votes else "unknown" if not live else "leader" if name == leader else "follower"
        applied = node.raft.applied_index if name == node.name else peer.applied_index
        members.append(
            MemberView(
                name,
                node.config.advertise if name == node.name else peer.http,
                address,
                role,
                applied,
                max(0, node.raft.commit_index - applied),
                peer.version,
                skews.get(name),
                peer.feature_level,
            )
        )
    return ClusterView(
        node.config.cluster.id,
        leader,
        node.raft.term,
        node.raft.applied_index,
        node.clock.read(node.runtime.monotonic()),
        DispatchView(hour, second, local, node.config.dispatch.sync),
        members,
        node.ledger.level,
    )


def hours(node: Node) -> HoursView:
    """As of now, however long the reader takes to go through it."""
    store = node.storage.hours
    found, rows = store.rows()
    numbers = found.tolist()
    mapped = {hour for hour in numbers if store.mapped(hour)}
    return HoursView(node.raft.applied_index, _hours(numbers, rows, mapped, node.ledger.now_hour))


def _hours(numbers: list[int], rows: NDArray[np.void], mapped: set[int], running: int) -> Iterator[HourView]:
    for at, hour in enumerate(numbers):
        log_bytes, entries, events, log_crc, idx_crc, dsp_crc, _ = rows[at].item()
        files: dict[HourFile, tuple[int, int, int]] = {
            "log": (entries, log_bytes, log_crc),
            "idx": (entries, entries * INDEX_SIZE, idx_crc),
            "dsp": (events, events * DISPATCH_SIZE, dsp_crc if events else 0),
        }
        # Late messages are filed under the running hour, so an hour that is over gets no more entries.
        # A dead hour gets letters until its retention ends.
        sealed = hour < running or DEAD_HOURS <= hour < DEAD_HOURS + running
        yield HourView(hour, files, sealed, hour in mapped)


def ready_checks(node: Node) -> list[Check]:
    """Can this node serve: the conditions behind /readyz, each with how it stands, or with what is wrong."""
    raft, clock = node.raft, node.clock
    lag = raft.commit_index - raft.applied_index
    skew = clock.skews(node.runtime.monotonic()).get(node.name)
    alarms = ", ".join(sorted(clock.alarms))
    free = f"{node.checkpoints.free_bytes >> 20:,} MiB are free"
    checks = [
        ("leader", raft.leader is not None, f"{raft.leader} leads term {raft.term}", _without_a_leader(node)),
        (
            "clock",
            clock.ready,
            alarms or f"this node's wall clock is {skew or 0:+.0f} ms off",
            f"cluster time is not known: {alarms or 'no node has told it yet'}",
        ),
        ("applied", lag <= _MAX_LAG, f"{lag} entries to apply", f"{lag} entries behind what is committed"),
        # Whoever restarts node after node waits for this: until then the others are the majority, without a spare.
        (
            "admitted",
            raft.journal.admitted,
            f"incarnation {raft.journal.incarnation} votes",
            "a new incarnation, which neither votes nor counts yet",
        ),
        ("space", node.checkpoints.has_space(), free, f"{free}: less than storage.min_free_bytes"),
    ]
    if node.raft.gives_way:
        undo = "hadelay cluster drain --undo brings it back into traffic"
        checks.append(("drained", not node.leadership.drained, f"it leads all the same; {undo}", undo))
    return [Check(name, ok, stands if ok else wrong) for name, ok, stands, wrong in checks]


def _without_a_leader(node: Node) -> str:
    """Why there is no leader, as far as this node sees, and what to do when it has never held anything."""
    raft, peers = node.raft, node.raft.peers.values()
    away = sorted(peer.name for peer in peers if not peer.up)
    blank = sorted(peer.name for peer in peers if peer.up and not peer.admitted)
    rest = sorted(peer.name for peer in peers if peer.up and peer.admitted)
    seen = [
        f"{_names(names)} {what}"
        for names, what in (
            (away, "not connected"), (blank, "connected, but without data and without a vote"), (rest, "connected"),
        )
        if names
    ]  # fmt: skip
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
    """Members other than `without` that count, as far as this node sees: admitted, not far behind, and they follow a
    leader, or are linked and were heard of lately."""
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
