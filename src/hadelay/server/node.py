"""A node: constructs and connects the node's parts, and implements the interface that Raft calls (raft.ports.Machine).

Callbacks over Runtime, Disk and Network: the simulator runs this very class. `server.service` adds the async methods
that HTTP calls, `process` the real world.
"""

import logging
import struct
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from hadelay import version
from hadelay.codec.commands import encode_incarnation, encode_members
from hadelay.codec.entries import encode_entry, members_in
from hadelay.errors import DamagedFile
from hadelay.ledger.apply import apply_entry
from hadelay.ledger.messages.publish import retry_after_ms
from hadelay.ledger.state import Ledger
from hadelay.members import Member, Members
from hadelay.platform.disk import Disk
from hadelay.platform.network import Network
from hadelay.platform.runtime import Runtime
from hadelay.raft.journal import FIRST, Journal
from hadelay.raft.node import RaftNode
from hadelay.raft.ports import RaftTuning
from hadelay.server.attention import Attention
from hadelay.server.checkpoints import Checkpoints, Replica, check_files
from hadelay.server.clustertime import ClusterClock
from hadelay.server.delivery.loop import DeliveryLoop
from hadelay.server.groupcommit import GroupCommit
from hadelay.server.guard import Guard
from hadelay.server.leadership import Leadership
from hadelay.server.ledterm import LedTerm
from hadelay.server.link import Link
from hadelay.server.logbook import Logbook
from hadelay.server.outlet import Outlet
from hadelay.server.patrol import Patrol
from hadelay.server.peers import Peers, PeerStatus
from hadelay.server.publishing import Publishing
from hadelay.server.reading import ReadAhead, Repairer, VerifiedReader
from hadelay.server.refusals import Refusals
from hadelay.server.sessions import SharedSessions
from hadelay.settings.node import Config
from hadelay.storage.identity import note_damage
from hadelay.storage.snapshots import Installer, Manifest
from hadelay.storage.store import Storage

log = logging.getLogger(__name__)

#: Payload of a heartbeat: cluster time, and the term of the leader.
_TIME = struct.Struct("<qQ")


class Node:
    """One member of a Raft group. recover.open_node constructs it from disk; after that, call `start`, and later
    `stop`."""

    def __init__(
        self,
        config: Config,
        disk: Disk,
        network: Network,
        runtime: Runtime,
        on_fatal: Callable[[BaseException], None],
        *,
        storage: Storage,
        journal: Journal,
    ) -> None:
        self.config, self.disk, self.runtime = config, disk, runtime
        self.name = config.node.name
        #: Locks that keep other processes out of this node's directories.
        self.locks = ExitStack()
        #: Returns the Unix time in s at which the first of this node's certificates expires; 0 without certificates.
        self.certificate_s: Callable[[], float] = lambda: 0.0
        self.replica = Replica(storage)
        self.clock = ClusterClock(
            self.name, config.members, floor_ms=self.ledger.now_ms, skew_ms=config.limits.max_clock_skew_ms
        )
        members = tuple(Member(name, address) for name, address in sorted(config.members.items()))
        self.raft = RaftNode(journal, network, runtime, self, raft_config(config), members=members, on_fatal=on_fatal)
        self.raft.set_applied(*(storage.applied_index, storage.applied_term) if storage.applied_index else FIRST)
        self.link = Link(runtime, self.raft.send)
        self.peers = Peers(list(config.members), runtime, self.link, self.clock, self._me)
        self.logbook = Logbook(runtime, self.raft, self.link, self.clock)
        self.sessions = SharedSessions(self.link, lambda: self.raft.peers)
        self.checkpoints = Checkpoints(config, disk, self.replica, self.raft, self.peers.tell, on_fatal)
        self.repairer = Repairer(self.name, self.replica, self.link, self.peers)
        self.reader = VerifiedReader(self.replica, runtime, self.repairer)
        self._led = LedTerm()
        self.group_commit = self._make_group_commit()
        journal.between_syncs = self.group_commit.between_syncs
        self.delivery = self._make_delivery()
        self.group_commit.rider = self.delivery.riding_cursor
        self.patrol = Patrol(
            disk, self.replica, runtime, self.reader, self.delivery.repaired, config.storage.patrol_bytes
        )
        self.leadership = Leadership(
            config, self.replica, self.raft, self.peers, self.group_commit, self.delivery, led=self._led
        )
        self.attention = Attention(runtime, self.clock, self.replica, self.delivery)
        self.leadership.parts += (self.logbook, self.attention)
        self.peers.changed = self.leadership.clock_changed
        self.guard = Guard(config.webhooks.allow)
        self.publishing = Publishing(
            self.leadership, self.group_commit, self.delivery, self.peers, self.replica,
            guard=self.guard, max_queue_bytes=config.limits.publish_queue_bytes,
        )  # fmt: skip

    def _make_group_commit(self) -> GroupCommit:
        config, commit_timeout_s = self.config, self.config.limits.commit_timeout_ms / 1000
        return GroupCommit(
            self.name,
            self.runtime,
            Outlet(self.raft, self.replica, self.peers, self._led, commit_timeout_s),
            Refusals(self.runtime.monotonic, self._retry_after_ms),
            max_entry_bytes=config.raft.max_entry_bytes,
            leaderless_wait_s=config.http.no_leader_wait_ms / 1000,
            commit_timeout_s=commit_timeout_s,
        )

    def _make_delivery(self) -> DeliveryLoop:
        return DeliveryLoop(
            ledger=self.ledger,
            runtime=self.runtime,
            clock=self.clock,
            propose=self.group_commit.propose_as_leader,
            config=self.config,
            on_damage=self._damaged,
            has_leader_lease=self.raft.has_leader_lease,
            has_space=self.peers.have_space,
            read_ahead=ReadAhead(self.disk, self.runtime, self._hour_path),
            reader=self.reader,
            on_take_over=self.logbook.took_over,
        )

    def _retry_after_ms(self, topic: str) -> int:
        """Time in ms until the topic's publish rate admits another message."""
        return retry_after_ms(self.ledger.topic(topic), self.now_ms())

    def _hour_path(self, hour: int) -> str:
        return self.storage.hours.path(hour)

    def __repr__(self) -> str:
        return f"<Node {self.name} {'leads' if self.leading else 'follows'} term {self.raft.term} {self.ledger!r}>"

    @property
    def ledger(self) -> Ledger:
        return self.replica.ledger

    @property
    def storage(self) -> Storage:
        return self.replica.storage

    @property
    def leading(self) -> int:
        """The term that this node leads and in which it may propose; 0 when it does not lead."""
        return self.leadership.leading

    def now_ms(self) -> int:
        """Cluster time, Unix ms."""
        return self.clock.read(self.runtime.monotonic())

    def start(self) -> None:
        self.raft.start()
        self.peers.start()
        self.checkpoints.start()
        self.patrol.start()

    def stop(self) -> None:
        """Stop at once, without a checkpoint: everything acknowledged is in the journal."""
        self.patrol.stop()
        self.leadership.stop()
        self.raft.stop()
        self.storage.close()
        self.locks.close()

    def _damaged(self, hour: int, index: int, what: str) -> None:
        """Repair a damaged index entry and its record; afterwards the dispatcher reads the linked list of the entry
        again."""
        self.repairer.repair_entry(hour, index, lambda: self.delivery.repaired(hour))

    def _me(self) -> PeerStatus:
        has_space = self.checkpoints.has_space
        return PeerStatus(
            self.name, self.config.advertise, version.VERSION, version.FEATURE_LEVEL, self.raft.applied_index,
            has_space, self.raft.elections.draining, self.certificate_s(),
        )  # fmt: skip

    def apply(self, index: int, term: int, command: bytes) -> Any:
        ledger, storage = self.replica.ledger, self.replica.storage
        try:
            results = apply_entry(ledger, index, term, command)
        except DamagedFile as damage:
            # Record the damage on disk: the next start then begins with empty directories and learns from the other
            # nodes. The Raft entry may be half applied, and a replay would read the same damaged bytes.
            note_damage(self.disk, storage.directory, str(damage))
            raise
        self.clock.raise_floor(ledger.now_ms)
        if ledger.level > storage.identity.feature_level:
            # Write the new feature level into the identity file: a program of an older version then refuses the
            # directory.
            storage.set_identity(feature_level=ledger.level)
        self.checkpoints.applied(len(command))
        return results

    def on_leader(self, term: int) -> None:
        self.leadership.on_leader(term)

    def on_follower(self) -> None:
        self.leadership.on_follower()

    def incarnation(self, node: str) -> int | None:
        return self.ledger.incarnations.get(node)

    def incarnation_command(self, node: str, incarnation: int) -> bytes:
        return encode_entry(self.now_ms(), [encode_incarnation(node, incarnation)])

    def on_incarnation(self, incarnation: int) -> None:
        self.storage.set_identity(incarnation=incarnation)

    def members(self) -> tuple[int, Members]:
        return self.ledger.members_index, self.ledger.members

    members_in = staticmethod(members_in)

    def members_command(self, members: Members) -> bytes:
        return encode_entry(self.now_ms(), [encode_members(members)], self.ledger.level)

    def on_members(self) -> None:
        membership = self.raft.membership
        voters = [member.name for member in membership.members if member.voter]
        self.clock.set_voters(voters)
        self.peers.set_members(sorted({self.raft.name, *membership.linked()}), voters)

    def heartbeat_info(self) -> bytes:
        return _TIME.pack(self.now_ms(), self.raft.term) if self.clock.ready else b""

    def on_heartbeat_info(self, info: bytes) -> None:
        if len(info) == _TIME.size:
            now_ms, _ = _TIME.unpack(info)
            self.clock.observe_leader(self.raft.leader or "", now_ms, self.runtime.monotonic())
        self.logbook.leader_heard()
        self.leadership.leader_seen()

    def on_message(self, peer: str, kind: int, payload: bytes) -> None:
        self.link.on_message(peer, kind, payload)

    def on_link(self, peer: str, up: bool) -> None:
        log.info("link_up" if up else "link_down", extra={"peer": peer})
        if up:
            self.peers.greet(peer)
            self.logbook.link_up(peer)
            self.sessions.link_up(peer)
            self.leadership.leader_seen()
        else:
            self.link.link_down(peer)

    @property
    def checkpointed(self) -> int:
        return self.storage.exports.index

    def manifest(self) -> Manifest | None:
        return self.storage.manifest()

    def read_chunk(self, manifest: Manifest, name: str, offset: int, size: int) -> bytes:
        return self.storage.exports.read(name, offset, size)

    def release(self, manifest: Manifest) -> None:
        self.storage.exports.release(manifest)

    def install(self, manifest: Manifest) -> Installer:
        check_files(manifest)
        decoded: list[Ledger] = []
        return self.storage.install(
            manifest,
            lambda: self.installed(decoded[-1]),
            lambda tables: decoded.append(self.replica.decode(tables)),
        )

    def installed(self, ledger: Ledger) -> None:
        """Continue with the state of an installed snapshot. ledger: the ledger that was decoded from it. Only a
        follower installs snapshots, so this node has no waiting proposals."""
        self.checkpoints.bytes_since = 0
        self.leadership.stop()
        try:
            self.replica.switch(self.storage.reopen(), ledger)
        except Exception as error:  # a disk error, for example: the node has no state to continue with, and stops
            self.raft.fatal(error)
            return
        self.delivery.ledger = self.ledger
        self.clock.raise_floor(self.ledger.now_ms)


def raft_config(config: Config) -> RaftTuning:
    raft = config.raft
    return RaftTuning(
        election_min_ms=raft.election_min_ms,
        election_max_ms=raft.election_max_ms or 4 * raft.election_min_ms // 3,
        heartbeat_ms=raft.heartbeat_ms or raft.election_min_ms // 6,
        slow_sync_ms=raft.max_sync_ms,
        # The size limit of a Raft entry is larger than that of a batch (config.raft.max_entry_bytes), because one
        # single publish may be larger than a batch.
        max_entry_bytes=min(4 << 20, raft.segment_bytes // 4),
        window_bytes=raft.max_inflight_bytes,
        survivor=config.cluster.survivor,
        fence_failed_transfer=config.dispatch.sync == "interval",
    )
