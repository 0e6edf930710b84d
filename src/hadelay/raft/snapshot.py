"""Catching up by files: for a follower that needs entries which the leader's journal no longer has.

The leader offers the manifest of its last durable checkpoint; the follower pulls the files in chunks, verified, resumed
where an earlier try ended, no faster than pull_bytes_per_s. Its state machine is untouched until all is there; then it
switches, and its journal begins anew behind the snapshot. Meanwhile it neither votes, campaigns nor applies.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

from google_crc32c import value as crc32c

from hadelay.errors import DamagedFile, DiskFull, FatalError, HadelayError
from hadelay.raft import messages
from hadelay.raft.peer import Peer
from hadelay.raft.ports import Installer
from hadelay.storage.manifest import Manifest, SnapshotFile

if TYPE_CHECKING:
    from hadelay.raft.node import RaftNode

log = logging.getLogger(__name__)

#: Without a sign from the other side for this long, a pull is given up.
_PATIENCE_S = 15.0
#: And an offer is made again after this: a node that has just started may not know yet who leads, and ignores it.
_OFFER_S = 2.0


class _Pull:
    """One manifest being pulled from one peer."""

    def __init__(self, source: str, manifest: Manifest, installer: Installer, now: float) -> None:
        self.source, self.manifest, self.installer = source, manifest, installer
        self.files = deque(manifest.files)
        self.offset = installer.have(self.files[0].name) if self.files else 0
        #: When the next request may leave, and when the last answer came.
        self.allowed = self.heard = now
        self.finishing = False


class Snapshots:
    def __init__(self, node: RaftNode) -> None:
        self.node = node
        self._pull: _Pull | None = None

    @property
    def installing(self) -> bool:
        return self._pull is not None

    # -- the leader's side
    def offer(self, peer: Peer, damage: DamagedFile | None = None) -> None:
        """`damage`: why the journal can't give what `peer` needs, if it is that. Then a checkpoint has to hold it."""
        node = self.node
        manifest = node.machine.manifest()
        if manifest is None or manifest.index < (peer.next if damage else node.journal.base_index):
            if manifest is not None:
                node.machine.release(manifest)
            if damage is not None:
                raise damage
            return  # tried again at the next sign of life
        if damage is not None:
            log.error("journal_damaged", extra={"peer": peer.name, "error": str(damage)})
        peer.manifest = manifest
        files = [[file.name, file.length, file.crc] for file in manifest.files]
        frame = messages.encode(messages.SNAPSHOT, node.term, manifest.index, manifest.term, manifest.blob, files)
        log.info("snapshot_offered", extra={"peer": peer.name, "index": manifest.index, "files": len(files)})
        node.stats.snapshots_sent += 1
        node.network.send(peer.name, frame)
        peer.pulled = node.runtime.monotonic()
        node.call_later(_OFFER_S, self._check, peer, manifest, peer.pulled)

    def _check(self, peer: Peer, manifest: Manifest, since: float) -> None:
        if peer.manifest is not manifest:
            return
        if peer.pulled <= since:
            self.release(peer)
        else:
            self.node.call_later(_PATIENCE_S, self._check, peer, manifest, peer.pulled)

    def release(self, peer: Peer) -> None:
        if peer.manifest is not None:
            manifest, peer.manifest = peer.manifest, None
            self.node.machine.release(manifest)
            if self.node.leader_role.active:
                peer.probe(peer.match + 1)

    def on_chunk(self, peer: Peer, data: bytes) -> None:
        index, name, offset, size = messages.decode(data, int, str, int, int)
        node, manifest = self.node, peer.manifest
        if manifest is None or manifest.index != index or not 0 < size <= node.config.chunk_bytes * 4 or offset < 0:
            return
        peer.pulled = node.runtime.monotonic()

        def read(chunk: bytes, error: BaseException | None) -> None:
            if peer.manifest is not manifest:
                return
            if error is not None:
                log.error("snapshot_unreadable", extra={"file": name, "offset": offset, "error": str(error)})
                self.release(peer)
                return
            node.stats.snapshot_sent_bytes += len(chunk)
            node.network.send(
                peer.name, messages.encode(messages.CHUNK_REPLY, index, name, offset, crc32c(chunk), chunk)
            )

        # In a thread: the disk may have to look for it, and this node leads.
        node.in_thread("snapshots", lambda: bytes(node.machine.read_chunk(manifest, name, offset, size)), read)

    def on_done(self, peer: Peer, data: bytes) -> None:
        """It holds the snapshot (and so everything up to its index), or gave up (0)."""
        (index,) = messages.decode(data, int)
        if peer.manifest is None:
            return
        self.release(peer)
        if index and self.node.leader_role.active:
            peer.probe(index + 1)
            self.node.leader_role.send_entries(peer)

    # -- the follower's side
    def on_snapshot(self, peer: Peer, data: bytes) -> None:
        node = self.node
        term, index, last_term, blob, files = messages.decode(data, int, int, int, bytes, list)
        if term != node.term or node.core.leader != peer.name or (self._pull is not None and self._pull.finishing):
            return
        self._give_up(tell=False)
        if index <= node.applier.applied:
            self._tell(peer.name, node.applier.applied)
            return
        manifest = Manifest(index, last_term, [_file(file) for file in files], blob)
        try:
            installer = node.machine.install(manifest)
        except DiskFull as error:  # it is offered again
            log.error("snapshot_failed", extra={"index": index, "error": str(error)})
            return
        log.info("snapshot_pull", extra={"source": peer.name, "index": index, "files": len(files)})
        self._pull = pull = _Pull(peer.name, manifest, installer, node.runtime.monotonic())
        node.call_later(_PATIENCE_S, self._watch, pull)
        self._request(pull)

    def _tell(self, name: str, index: int) -> None:
        self.node.network.send(name, messages.encode(messages.SNAPSHOT_DONE, index))

    def _request(self, pull: _Pull) -> None:
        """Ask for what is missing next; when nothing is, switch."""
        if pull is not self._pull or pull.finishing:
            return
        node, files = self.node, pull.files
        while files and pull.offset >= files[0].length:
            if not files[0].length and not self._take(pull, files[0].name, 0, b""):
                return
            files.popleft()
            pull.offset = pull.installer.have(files[0].name) if files else 0
        if not files:
            self._finish(pull)
            return
        now = node.runtime.monotonic()
        if now < pull.allowed:
            node.call_later(pull.allowed - now, self._request, pull)
            return
        size = min(node.config.chunk_bytes, files[0].length - pull.offset)
        pull.allowed = max(pull.allowed, now - 0.1) + size / node.config.pull_bytes_per_s
        frame = messages.encode(messages.CHUNK, pull.manifest.index, files[0].name, pull.offset, size)
        node.network.send(pull.source, frame)

    def on_chunk_reply(self, peer: Peer, data: bytes) -> None:
        index, name, offset, crc, chunk = messages.decode(data, int, str, int, int, bytes)
        pull = self._pull
        if pull is None or pull.source != peer.name or pull.manifest.index != index or pull.finishing:
            return
        if not pull.files or pull.files[0].name != name or pull.offset != offset:
            return
        pull.heard = self.node.runtime.monotonic()
        self.node.stats.snapshot_received_bytes += len(chunk)
        if not chunk or crc32c(chunk) != crc:
            self._give_up()
            return
        if self._take(pull, name, offset, chunk):
            pull.offset += len(chunk)
            self._request(pull)

    def _take(self, pull: _Pull, name: str, offset: int, chunk: bytes) -> bool:
        try:
            pull.installer.write(name, offset, chunk)
        except DiskFull as error:
            self._failed(pull, error)
            return False
        return True

    def _failed(self, pull: _Pull, error: HadelayError) -> None:
        """It may work the next time. The leader is not told of a disk that is full: it offers the files again when it
        has not heard for a while, which is soon enough for somebody to have made room."""
        log.error("snapshot_failed", extra={"index": pull.manifest.index, "error": str(error)})
        pull.finishing = False
        self._give_up(tell=not isinstance(error, DiskFull))

    def _watch(self, pull: _Pull) -> None:
        if pull is not self._pull or pull.finishing:
            return
        if self.node.runtime.monotonic() - pull.heard >= _PATIENCE_S:
            self._give_up()
        else:
            self.node.call_later(_PATIENCE_S, self._watch, pull)

    def new_leader(self) -> None:
        """Who no longer leads has released the files, and answers no more; the next leader offers its own."""
        self._give_up(tell=False)

    def link_lost(self, name: str) -> None:
        if self._pull is not None and self._pull.source == name:
            self._give_up(tell=False)

    def _give_up(self, tell: bool = True) -> None:
        """Nothing has been switched yet, so this node is what it was; the next try resumes."""
        pull = self._pull
        if pull is not None and not pull.finishing:
            self._pull = None
            pull.installer.abort()
            if tell:
                self._tell(pull.source, 0)

    def _finish(self, pull: _Pull) -> None:
        """The intention first, on disk: a crash may leave the new files with the old journal."""
        node, manifest = self.node, pull.manifest
        pull.finishing = True

        def installed(error: HadelayError | None) -> None:
            if isinstance(error, FatalError):
                node.fatal(error)
                return
            if error is not None:
                self._failed(pull, error)
                return
            node.journal.when_synced(switched)
            node.flush_soon()

        def switched() -> None:
            if node.stopped:
                return
            if node.journal.last_index >= manifest.index and node.journal.base_index <= manifest.index:
                same = node.journal.term_at(manifest.index) == manifest.term
            else:
                same = False
            if not same:
                node.journal.reset(manifest.index, manifest.term)
            node.core.jump(max(manifest.index, node.core.raftCommitIndex if same else 0))
            node.applier.jump(manifest.index, manifest.term)
            node.membership.installed(manifest.index)
            node.follower.reset()
            self._pull = None
            node.stats.snapshots_installed += 1
            log.info("snapshot_installed", extra={"index": manifest.index})
            self._tell(pull.source, manifest.index)
            node.admission.applied()

        node.journal.note_install(manifest.index, manifest.term)
        node.journal.when_synced(lambda: pull.installer.finish(lambda error: node._guarded(installed, error)))
        node.flush_soon()


def _file(fields: object) -> SnapshotFile:
    if not isinstance(fields, list) or [type(field) for field in fields] != [str, int, int]:
        raise messages.BadFrame("a manifest names files as [name, length, crc]")
    name, length, crc = fields
    if name.startswith("/") or ".." in name.split("/") or length < 0:
        raise messages.BadFrame(f"a manifest names the file {name!r}")
    return SnapshotFile(name, length, crc)
