"""Checkpoints whose files somebody copies over HTTP, for backups (docs/spec/backup.md).

A copy is the manifest that a follower would get (storage.exports). While it is open, none of its files goes, not even
those of hours that are retired meanwhile; so it ends when it is released, or when nobody has read for a while.
"""

from __future__ import annotations

import asyncio

from hadelay.api.cluster import Snapshot, SnapshotFileOut
from hadelay.api.service import answered
from hadelay.api.text import format_instant
from hadelay.errors import NotFound, Overloaded
from hadelay.raft.node import RaftNode
from hadelay.server.checkpoints import Checkpoints
from hadelay.server.replica import Replica
from hadelay.storage.handles import files_closed
from hadelay.storage.manifest import Manifest
from hadelay.storage.store import Storage

#: A copy that nobody has read from for so long is over.
_PATIENCE_S = 60.0
#: Each holds an export of the tables, and the files of hours that are retired meanwhile.
_MOST = 4
_LOOK_S = 0.02


class _Copy:
    def __init__(self, storage: Storage, manifest: Manifest, now: float) -> None:
        self.storage, self.manifest, self.heard = storage, manifest, now
        self.lengths = {file.name: file.length for file in manifest.files}


class Copies:
    def __init__(self, replica: Replica, raft: RaftNode, checkpoints: Checkpoints) -> None:
        self._replica, self._raft, self._checkpoints, self._runtime = replica, raft, checkpoints, raft.runtime
        self._open: dict[str, _Copy] = {}
        self._looking = False

    async def open(self) -> Snapshot:
        """A checkpoint of everything that is applied here now, or of more."""
        runtime = self._runtime
        if sum(copy.storage is self._replica.storage for copy in self._open.values()) >= _MOST:
            raise Overloaded("others copy this node's files already: ask another node, or later", retry_after_ms=5_000)
        await self._checkpoint()
        while (manifest := self._replica.storage.manifest()) is None:
            await self._wait()
            if (failure := self._replica.storage.exports.failure) is not None:
                raise Overloaded(f"this node could not export its tables: {failure}: ask another", retry_after_ms=5_000)
        name = f"{manifest.index}-{runtime.random.getrandbits(32):08x}"
        ledger, storage = self._replica.ledger, self._replica.storage
        self._open[name] = _Copy(storage, manifest, runtime.monotonic())
        if not self._looking:
            self._looking = True
            runtime.call_later(_PATIENCE_S, self._look)
        identity = storage.identity
        files = [SnapshotFileOut(file.name, str(file.length), f"{file.crc:08x}") for file in manifest.files]
        return Snapshot(
            name, identity.cluster_id, identity.group, str(manifest.index), manifest.term, ledger.level,
            format_instant(ledger.now_ms), files,
        )  # fmt: skip

    def length(self, name: str, file: str) -> int:
        lengths = self._copy(name).lengths
        if file not in lengths:
            raise NotFound(f"this snapshot has no file {file[:64]!r}")
        return lengths[file]

    async def read(self, name: str, file: str, offset: int, size: int) -> bytes:
        """In a thread: the disk may have to look for it."""
        copy = self._copy(name)
        runtime = self._runtime
        try:
            data: bytes = await answered(
                lambda done: runtime.in_thread("copies", lambda: copy.storage.exports.read(file, offset, size), done)
            )
        except FileNotFoundError:
            raise _gone() from None
        copy.heard = runtime.monotonic()
        return data

    def release(self, name: str) -> None:
        copy = self._open.pop(name, None)
        # A node that installed another's snapshot meanwhile has other files now.
        if copy is not None and copy.storage is self._replica.storage:
            copy.storage.exports.release(copy.manifest)

    async def _checkpoint(self) -> None:
        replica, checkpoints = self._replica, self._checkpoints
        wanted = self._raft.applied_index
        if not replica.storage.applied_index:
            checkpoints.bytes_since += 1  # the first one, although nothing may have been published yet
        # What is left once nothing is to be written are entries that change nothing. The storage may become another
        # one, with what a snapshot brought.
        while replica.storage.checkpointing or (replica.storage.applied_index < wanted and checkpoints.bytes_since):
            checkpoints.begin()
            await self._wait()

    async def _wait(self) -> None:
        await asyncio.sleep(_LOOK_S)
        if self._raft.stopped:
            raise files_closed()

    def _copy(self, name: str) -> _Copy:
        copy = self._open.get(name)
        if copy is None or copy.storage is not self._replica.storage:
            raise _gone()
        copy.heard = self._runtime.monotonic()
        return copy

    def _look(self) -> None:
        now = self._runtime.monotonic()
        for name in [name for name, copy in self._open.items() if now - copy.heard >= _PATIENCE_S]:
            self.release(name)
        self._looking = bool(self._open) and not self._raft.stopped
        if self._looking:
            self._runtime.call_later(_PATIENCE_S / 4, self._look)


def _gone() -> NotFound:
    return NotFound("this snapshot is over: open another one; what was copied so far is a part of that, too")
