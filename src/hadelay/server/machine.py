"""The Raft port: what this node does with entries, terms, members, messages and snapshots (raft.ports.Machine)."""

from __future__ import annotations

import logging
import struct
from typing import Any

from hadelay.codec.commands import encode_incarnation, encode_members
from hadelay.codec.entries import encode_entry, members_in
from hadelay.errors import DamagedFile
from hadelay.ledger.apply import apply_entry
from hadelay.members import Members
from hadelay.platform.disk import Disk
from hadelay.platform.runtime import Runtime
from hadelay.raft.node import RaftNode
from hadelay.raft.ports import Installer
from hadelay.server.checkpoints import Checkpoints
from hadelay.server.clustertime import ClusterClock
from hadelay.server.leadership import Leadership
from hadelay.server.link import Link
from hadelay.server.peers import Peers
from hadelay.server.replica import Replica
from hadelay.storage.identity import note_damage
from hadelay.storage.manifest import Manifest

log = logging.getLogger(__name__)

#: Cluster time, and the term of the leader who says it.
_TIME = struct.Struct("<qQ")


class Machine:
    """Implements raft.ports.Machine. The node connects the parts below `__init__` before Raft starts."""

    raft: RaftNode
    link: Link
    peers: Peers
    leadership: Leadership
    checkpoints: Checkpoints

    def __init__(self, disk: Disk, runtime: Runtime, replica: Replica, clock: ClusterClock) -> None:
        self._disk, self._runtime, self._replica, self._clock = disk, runtime, replica, clock

    def _now_ms(self) -> int:
        return self._clock.read(self._runtime.monotonic())

    def apply(self, index: int, term: int, command: bytes) -> Any:
        ledger, storage = self._replica.ledger, self._replica.storage
        try:
            results = apply_entry(ledger, index, term, command)
        except DamagedFile as damage:
            # Half an entry may be applied by now, and a replay would meet the same bytes again: the next start begins
            # anew, from the other nodes.
            note_damage(self._disk, storage.directory, str(damage))
            raise
        self._clock.raise_floor(ledger.now_ms)
        if ledger.level > storage.identity.feature_level:
            # An older program refuses the directory in words from now on.
            storage.set_identity(feature_level=ledger.level)
        self.checkpoints.applied(len(command))
        return results

    def on_leader(self, term: int) -> None:
        self.leadership.on_leader(term)

    def on_follower(self) -> None:
        self.leadership.on_follower()

    # incarnations and members

    def incarnation(self, node: str) -> int | None:
        return self._replica.ledger.incarnations.get(node)

    def incarnation_command(self, node: str, incarnation: int) -> bytes:
        return encode_entry(self._now_ms(), [encode_incarnation(node, incarnation)])

    def on_incarnation(self, incarnation: int) -> None:
        self._replica.storage.set_identity(incarnation=incarnation)

    def members(self) -> tuple[int, Members]:
        return self._replica.ledger.members_index, self._replica.ledger.members

    def members_in(self, command: bytes) -> Members | None:
        return members_in(command)

    def members_command(self, members: Members) -> bytes:
        return encode_entry(self._now_ms(), [encode_members(members)], self._replica.ledger.level)

    def on_members(self) -> None:
        membership = self.raft.membership
        voters = [member.name for member in membership.members if member.voter]
        self._clock.set_voters(voters)
        self.peers.set_members(sorted({self.raft.name, *membership.linked()}), voters)

    # messages

    def heartbeat_info(self) -> bytes:
        return _TIME.pack(self._now_ms(), self.raft.term) if self._clock.ready else b""

    def on_heartbeat_info(self, info: bytes) -> None:
        if len(info) == _TIME.size:
            now_ms, _ = _TIME.unpack(info)
            self._clock.observe_leader(self.raft.leader or "", now_ms, self._runtime.monotonic())
        self.leadership.leader_seen()

    def on_message(self, peer: str, kind: int, payload: bytes) -> None:
        self.link.on_message(peer, kind, payload)

    def on_link(self, peer: str, up: bool) -> None:
        log.info("link_up" if up else "link_down", extra={"peer": peer})
        if up:
            self.peers.greet(peer)
            self.leadership.leader_seen()
        else:
            self.link.link_down(peer)

    # snapshots

    def manifest(self) -> Manifest | None:
        return self._replica.storage.manifest()

    def read_chunk(self, manifest: Manifest, name: str, offset: int, size: int) -> bytes:
        return self._replica.storage.exports.read(name, offset, size)

    def release(self, manifest: Manifest) -> None:
        self._replica.storage.exports.release(manifest)

    def install(self, manifest: Manifest) -> Installer:
        return self._replica.storage.install(manifest, self.installed)

    def installed(self) -> None:
        """A snapshot was installed: go on from its state. Only a follower installs, so nothing waits here."""
        self.checkpoints.bytes_since = 0
        self.leadership.stop()
        try:
            self._replica.load(self._replica.storage.reopen())
        except Exception as error:  # of its disk, say: there is no state to go on with
            self.raft.fatal(error)
            return
        self.leadership.dispatcher.ledger = self._replica.ledger
        self._clock.raise_floor(self._replica.ledger.now_ms)
