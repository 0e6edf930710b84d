"""Snapshots, sent as files: for a follower that needs entries which the leader's journal has no longer, and for a
follower without any entries, because copying files takes less time than applying an hour's entries.

The leader offers the manifest of its last durable checkpoint. The follower pulls the files in verified chunks, at most
pull_bytes_per_s, and resumes earlier attempts. Its state machine is unchanged until all files are there; then it
switches, and its journal begins anew behind the snapshot. Meanwhile it does not vote, campaign or apply.
"""

from __future__ import annotations

import logging
from collections import deque
from functools import partial

from google_crc32c import value as crc32c

from hadelay.errors import DamagedFile, DiskFull, FatalError, HadelayError
from hadelay.raft import messages
from hadelay.raft.apply import Applier
from hadelay.raft.journal import FIRST
from hadelay.raft.membership import Membership
from hadelay.raft.part import Notice, Peer, RaftPart, Ready, Shared
from hadelay.storage.snapshots import Installer, Manifest, SnapshotFile

log = logging.getLogger(__name__)

#: Timeout of pulling a snapshot, on the leader and on the follower, in seconds.
_PATIENCE_S = 15.0
#: Minimum number of entries in the last checkpoint for which an empty node gets a snapshot in place of the entries.
_MANY = 1_000
#: Time in seconds in which an empty node is offered snapshots. After it, or if a pull fails later, the node gets the
#: entries.
_EMPTY_S = 10.0
#: Delay before an unanswered snapshot offer is repeated, in seconds: a new node may not know the leader yet.
_OFFER_S = 2.0
#: Limit of complete files that a resumed pull skips in one turn of the event loop: a year of messages has 26,000 files.
_PASSED_AT_ONCE = 200


class _Pull:
    """A snapshot whose files this node is downloading from a peer."""

    def __init__(self, source: str, manifest: Manifest, installer: Installer, now: float) -> None:
        self.source, self.manifest, self.installer = source, manifest, installer
        self.files = deque(manifest.files)
        self.offset = installer.have(self.files[0].name) if self.files else 0
        #: Monotonic times: earliest time of this node's next request, and time of the peer's last answer.
        self.allowed = self.heard = now
        self.finishing = False


class Snapshots(RaftPart):
    def __init__(self, shared: Shared, members: Membership, applier: Applier) -> None:
        super().__init__(shared)
        self._members, self._applier = members, applier
        self._pull: _Pull | None = None

    def _set_pull(self, pull: _Pull | None) -> None:
        self._pull, self._applier.installing = pull, pull is not None

    def offer(self, peer: Peer, now: float, ready: Ready, damage: DamagedFile | None = None) -> None:
        """Offer the last checkpoint to `peer`. damage: the error that makes the journal unreadable; then the checkpoint
        must contain the entries that `peer` needs, else this error is raised."""
        manifest = self._machine.manifest()
        if manifest is None or manifest.index < (peer.next if damage else self._journal.base_index):
            if manifest is not None:
                self._machine.release(manifest)
            if damage is not None:
                raise damage
            return  # no offer now: the next heartbeat tries again
        if damage is not None:
            log.error("journal_damaged", extra={"peer": peer.name, "error": str(damage)})
        self._offer(peer, manifest, now, ready)

    def offer_to_empty(self, peer: Peer, now: float, ready: Ready) -> bool:
        """Offer the last checkpoint to `peer`, which has no entries, although the journal has them all. Returns False
        if `peer` is to get the entries instead: the checkpoint has few of them, or its files were not available in
        time."""
        if self._machine.checkpointed < _MANY:
            return False
        if peer.empty_since is None:
            peer.empty_since = now
        if now - peer.empty_since >= _EMPTY_S:
            return False
        manifest = self._machine.manifest()
        if manifest is not None:  # without a manifest, the next heartbeat tries again
            self._offer(peer, manifest, now, ready)
        return True

    def _offer(self, peer: Peer, manifest: Manifest, now: float, ready: Ready) -> None:
        peer.manifest, peer.pulled = manifest, now
        files = [[file.name, file.length, file.crc] for file in manifest.files]
        log.info("snapshot_offered", extra={"peer": peer.name, "index": manifest.index, "files": len(files)})
        self._stats.snapshots_sent += 1
        what = manifest.index, manifest.term, manifest.blob, files
        ready.send(peer.name, messages.encode(messages.SNAPSHOT, self._core.term, *what), urgent=False)
        ready.later(_OFFER_S, self._check, peer, manifest, now)

    def _check(self, peer: Peer, manifest: Manifest, since: float, now: float, ready: Ready) -> None:
        if peer.manifest is not manifest:
            return
        if peer.pulled <= since:
            self.release(peer)
        else:
            ready.later(_PATIENCE_S, self._check, peer, manifest, peer.pulled)

    def release(self, peer: Peer) -> None:
        if peer.manifest is not None:
            manifest, peer.manifest = peer.manifest, None
            self._machine.release(manifest)
            if self._core.leads:
                # A peer that was offered a snapshot because it had no entries may still get the entries of the journal:
                # see offer_to_empty.
                least = 0 if peer.empty_since is None else FIRST[0]
                peer.probe(max(peer.match, least) + 1)

    def on_chunk(self, peer: Peer, ask: messages.Chunk, now: float, ready: Ready) -> None:
        manifest = peer.manifest
        if manifest is None or manifest.index != ask.index or not 0 < ask.size <= self._config.chunk_bytes * 4:
            return
        peer.pulled = now

        def send(chunk: bytes, error: BaseException | None, now: float, ready: Ready) -> None:
            if peer.manifest is not manifest:
                return
            if error is not None:
                log.error("snapshot_unreadable", extra={"file": ask.name, "offset": ask.offset, "error": str(error)})
                self.release(peer)
                return
            self._stats.snapshot_sent_bytes += len(chunk)
            frame = messages.encode(messages.CHUNK_REPLY, ask.index, ask.name, ask.offset, crc32c(chunk), chunk)
            ready.send(peer.name, frame, urgent=False)

        # Read the file in a thread: a leader's event loop must not wait for the disk.
        read = partial(self._machine.read_chunk, manifest, ask.name, ask.offset, ask.size)
        self._runtime.in_thread("snapshots", lambda: bytes(read()), partial(self._event, send))

    def on_done(self, peer: Peer, index: int, now: float, ready: Ready) -> None:
        """Handle SNAPSHOT_DONE: with an index, the peer has all entries up to it; with 0, the peer gave the snapshot
        up."""
        if peer.manifest is None:
            return
        self.release(peer)
        if index and self._core.leads:
            peer.probe(min(index, self._journal.last_index) + 1)
            ready.notify(Notice.PUMP, peer)

    def on_offer(self, peer: Peer, offer: messages.SnapshotOffer, now: float, ready: Ready) -> None:
        leads = offer.term == self._core.term and self._core.leader == peer.name
        pull = self._pull
        if not leads or (pull is not None and pull.finishing):
            return
        if pull is not None and pull.source != peer.name and now - pull.heard < _OFFER_S:
            # continue the pull of the former leader's snapshot: only its last file is missing, see leader_changed
            return
        self.give_up(ready, tell=False)
        if offer.index <= self._applier.applied:
            self._tell(peer.name, self._applier.applied, ready)
            return
        manifest = Manifest(offer.index, offer.last_term, [_file(file) for file in offer.files], offer.blob)
        try:
            installer = self._machine.install(manifest)
        except DiskFull as error:  # the disk has no room for the files: the leader repeats its offer later
            log.error("snapshot_failed", extra={"index": manifest.index, "error": str(error)})
            return
        log.info("snapshot_pull", extra={"source": peer.name, "index": manifest.index, "files": len(manifest.files)})
        pull = _Pull(peer.name, manifest, installer, now)
        self._set_pull(pull)
        ready.later(_PATIENCE_S, self._watch, pull)
        self._request(pull, now, ready)

    def leader_changed(self, ready: Ready) -> None:
        """End the pull of the former leader's snapshot, unless only its last file is missing: that of the tables. The
        next attempt can resume all other files, but not the tables, which differ in each snapshot: if leadership
        changes often, the tables would never be complete."""
        if self._pull is None or self._pull.finishing:
            return
        if len(self._pull.files) > 1:
            self.give_up(ready)
        else:
            ready.later(_OFFER_S, self._look, self._pull)

    def _look(self, pull: _Pull, now: float, ready: Ready) -> None:
        """End a pull from a former leader that no longer answers."""
        if pull is not self._pull or pull.finishing:
            return
        if now - pull.heard >= _OFFER_S:
            self.give_up(ready)
            ready.apply = True
        else:
            ready.later(_OFFER_S, self._look, pull)

    def release_old(self, now: float) -> None:
        """Called when this node becomes leader: release snapshots that it offered in an earlier term, unless the peers
        still pull them."""
        for peer in self._members.peers.values():
            if peer.manifest is not None and now - peer.pulled >= _OFFER_S:
                self.release(peer)

    def _tell(self, name: str, index: int, ready: Ready) -> None:
        ready.send(name, messages.encode(messages.SNAPSHOT_DONE, index), urgent=False)

    def _request(self, pull: _Pull, now: float, ready: Ready) -> None:
        """Request the next missing chunk; when all files are complete, begin the switch to the snapshot."""
        if pull is not self._pull or pull.finishing:
            return
        files, passed = pull.files, 0
        while files and pull.offset >= files[0].length:
            if passed == _PASSED_AT_ONCE:
                ready.later(0.0, self._request, pull)
                return
            passed += 1
            if not files[0].length and not self._take(pull, files[0].name, 0, b"", ready):
                return
            files.popleft()
            pull.offset = pull.installer.have(files[0].name) if files else 0
        if not files:
            # Note in the journal first, on disk, that a snapshot is being installed: after a crash, new files may stand
            # beside the old journal.
            pull.finishing = True
            self._journal.note_install(pull.manifest.index, pull.manifest.term)
            ready.durable(self._finish, pull)
            ready.sync = True
            return
        if now < pull.allowed:
            ready.later(pull.allowed - now, self._request, pull)
            return
        size = min(self._config.chunk_bytes, files[0].length - pull.offset)
        pull.allowed = max(pull.allowed, now - 0.1) + size / self._config.pull_bytes_per_s
        frame = messages.encode(messages.CHUNK, pull.manifest.index, files[0].name, pull.offset, size)
        ready.send(pull.source, frame, urgent=False)

    def on_chunk_reply(self, peer: Peer, reply: messages.ChunkReply, now: float, ready: Ready) -> None:
        pull = self._pull
        if pull is None or pull.source != peer.name or pull.manifest.index != reply.index or pull.finishing:
            return
        if not pull.files or pull.files[0].name != reply.name or pull.offset != reply.offset:
            return
        pull.heard = now
        self._stats.snapshot_received_bytes += len(reply.data)
        left = pull.files[0].length - pull.offset
        if not 0 < len(reply.data) <= left or crc32c(reply.data) != reply.crc:
            self.give_up(ready)
        elif self._take(pull, reply.name, reply.offset, reply.data, ready):
            pull.offset += len(reply.data)
            self._request(pull, now, ready)

    def _take(self, pull: _Pull, name: str, offset: int, chunk: bytes, ready: Ready) -> bool:
        try:
            pull.installer.write(name, offset, chunk)
        except DiskFull as error:
            self._failed(pull, error, ready)
            return False
        return True

    def _failed(self, pull: _Pull, error: HadelayError, ready: Ready) -> None:
        """End a pull that failed but may succeed later. A full disk is not reported to the leader: so the leader
        repeats its offer only after the timeout, when an operator may have made room."""
        log.error("snapshot_failed", extra={"index": pull.manifest.index, "error": str(error)})
        pull.finishing = False
        self.give_up(ready, tell=not isinstance(error, DiskFull))

    def _watch(self, pull: _Pull, now: float, ready: Ready) -> None:
        if pull is not self._pull or pull.finishing:
            return
        if now - pull.heard >= _PATIENCE_S:
            self.give_up(ready)
        else:
            ready.later(_PATIENCE_S, self._watch, pull)

    def link_lost(self, name: str, ready: Ready) -> None:
        if self._pull is not None and self._pull.source == name:
            self.give_up(ready, tell=False)

    def give_up(self, ready: Ready, tell: bool = True) -> None:
        """End the pull of a snapshot. This node's state is unchanged, and the next attempt resumes the pull."""
        pull = self._pull
        if pull is not None and not pull.finishing:
            self._set_pull(None)
            pull.installer.abort()
            if tell:
                self._tell(pull.source, 0, ready)

    def _finish(self, pull: _Pull, now: float, ready: Ready) -> None:
        pull.installer.finish(partial(self._event, self._installed, pull))

    def _installed(self, pull: _Pull, error: HadelayError | None, now: float, ready: Ready) -> None:
        if isinstance(error, FatalError):
            raise error
        if error is not None:
            self._failed(pull, error, ready)
            return
        ready.durable(self._switch, pull)
        ready.sync = True

    def _switch(self, pull: _Pull, now: float, ready: Ready) -> None:
        """Continue after the state machine has switched to the snapshot. Unless the journal has the snapshot's last
        entry, the journal begins anew after it."""
        journal, manifest = self._journal, pull.manifest
        here = journal.base_index <= manifest.index <= journal.last_index
        same = here and journal.term_at(manifest.index) == manifest.term
        if not same:
            journal.reset(manifest.index, manifest.term)
        self._core.jump(max(manifest.index, self._core.commit_index if same else 0))
        self._applier.jump(manifest.index, manifest.term)
        self._set_pull(None)
        self._stats.snapshots_installed += 1
        log.info("snapshot_installed", extra={"index": manifest.index})
        for name in {pull.source, self._core.leader or pull.source}:
            self._tell(name, manifest.index, ready)
        ready.notify(Notice.INSTALLED, manifest)


def _file(fields: object) -> SnapshotFile:
    if not isinstance(fields, list) or [type(field) for field in fields] != [str, int, int]:
        raise messages.BadFrame("snapshot offer: a file is not [name, length, crc]")
    name, length, crc = fields
    if name.startswith("/") or ".." in name.split("/") or length < 0:
        raise messages.BadFrame(f"snapshot offer: {name!r} is no valid file name, or its length is negative")
    return SnapshotFile(name, length, crc)
