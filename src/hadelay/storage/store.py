"""(signatures; implementation follows)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hadelay.runtime import Runtime
from hadelay.storage.disk import Disk
from hadelay.storage.hours import HourStore
from hadelay.storage.names import Names
from hadelay.storage.tables import Backend, Tables


class Storage:
    """One group's data directory: hours, names, tables and the checkpoint that ties them to an applied index.

    directory/ identity  lock  names  state.mdb  hours/…
    """

    hours: HourStore
    tables: Tables
    names: Names
    #: Of the last durable checkpoint: where replay starts after it.
    applied_index: int
    applied_term: int
    #: What core gave to that checkpoint: b"" for a new directory.
    core_blob: bytes

    def __init__(
        self,
        disk: Disk,
        directory: str,
        runtime: Runtime,
        identity: Any,  # storage.identity.Identity(cluster_id, group, node)
        *,
        backend: Callable[[str], Backend] | None = None,  # path of state.mdb → Backend; LmdbBackend by default
        far_buffer_bytes: int = 64 << 20,
    ) -> None:
        """Lock, check identity, recover to the last checkpoint (cut what came after it). DamagedFile, ConfigError."""
        raise NotImplementedError

    def hour_blobs(self) -> dict[int, bytes]:
        """What core gave per hour to the checkpoints so far."""
        raise NotImplementedError

    def checkpoint(
        self,
        applied_index: int,
        applied_term: int,
        core_blob: bytes,
        hour_blobs: dict[int, bytes],
        done: Callable[[BaseException | None], None],
    ) -> None:
        """Sample now, write in slices, sync in a thread, commit; then `done`. One at a time (assert).

        hour_blobs: only hours whose blob changed since the last call (b"" forgets one)."""
        raise NotImplementedError

    @property
    def checkpointing(self) -> bool:
        raise NotImplementedError

    def manifest(self) -> dict[str, Any]:
        """{applied, term, files: [{name, length, crc}]} of the last durable checkpoint; names are relative paths."""
        raise NotImplementedError

    def read_chunk(self, name: str, offset: int, size: int) -> bytes:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
