"""(signatures; implementation follows)"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Backend(Protocol):
    """An ordered key-value store with named tables and one atomic, durable commit. LmdbBackend here; a simulated twin
    (dicts, loses uncommitted ones at a power cut) in hadelay.testing. `commit` may run in a thread while the loop
    reads, and readers then see either all of it or nothing."""

    def get(self, table: bytes, key: bytes) -> bytes | None: ...

    def scan(self, table: bytes, start: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        """Up to `limit` pairs with key ≥ start, ascending."""
        ...

    def commit(self, dropped: Iterable[bytes], puts: Iterable[tuple[bytes, bytes, bytes | None]]) -> None:
        """Drop whole tables first, then put (table, key, value) or delete (value None). Durable when it returns."""
        ...

    def close(self) -> None: ...


class Tables:
    """Changes since the last checkpoint over a Backend; written only by the checkpoint's transaction."""

    #: What the overlay holds, roughly; a reason for a checkpoint.
    overlay_bytes: int

    def get(self, table: bytes, key: bytes) -> bytes | None:
        raise NotImplementedError

    def put(self, table: bytes, key: bytes, value: bytes) -> None:
        raise NotImplementedError

    def delete(self, table: bytes, key: bytes) -> None:
        raise NotImplementedError

    def drop_table(self, table: bytes) -> None:
        raise NotImplementedError

    def scan(self, table: bytes, start: bytes = b"", limit: int = 1000) -> list[tuple[bytes, bytes]]:
        raise NotImplementedError
