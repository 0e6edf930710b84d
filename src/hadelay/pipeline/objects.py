"""Backups in an object store, where nothing can be appended to: files are in parts of 8 MiB (docs/spec/backup.md).

    hours/2026112018.log/000000000000-000008388608   hours/2026112018.log/000008388608-000009000000

A part's name says which bytes it has, so it is never written with others: a file that has grown gets another last part,
and the earlier backup keeps its own. No lock is needed: whoever writes the same part writes the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from hadelay.errors import ConfigError
from hadelay.storage.backup import FILE

if TYPE_CHECKING:
    from hadelay.storage.locations import Location

PART = 8 << 20
#: What no backup needs may be one that is under way, until it is so old.
_LEFT_MS = 24 * 3_600_000


class Objects:
    """Files (storage/backup.py)."""

    format, part = 2, PART

    def __init__(self, location: Location) -> None:
        self._location, self.where = location, location.path("").rstrip("/")
        #: name → (bytes, modified at), as last listed, and with what was written since.
        self._there: dict[str, tuple[int, int]] | None = None
        #: The part that was read last: (name, its bytes).
        self._last = ("", b"")

    def prepare(self) -> None:
        self._there = self._location.walk()

    def manifests(self) -> list[str]:
        return sorted(name for name in self._listed() if "/" not in name)

    def load(self, name: str) -> bytes:
        with self._location.open(name) as file:
            return bytes(file.read())

    def size(self, name: str, length: int) -> int:
        listed = self._listed()
        for part, start, end in _parts(name, length):
            if listed.get(part, (-1, 0))[0] != end - start:
                return start
        return length

    def read(self, name: str, length: int, offset: int, size: int) -> bytes:
        start = offset // PART * PART
        part = _part(name, start, min(start + PART, length))
        if part != self._last[0]:
            try:
                self._last = part, self.load(part)
            except FileNotFoundError:
                self._last = part, b""
        return self._last[1][offset - start : offset - start + size]

    def fill(self, name: str, length: int, read: Callable[[int, int], bytes], *, anew: bool) -> None:
        listed, self._last = self._listed(), ("", b"")
        for part, start, end in _parts(name, length):
            if not anew and listed.get(part, (-1, 0))[0] == end - start:
                continue
            data = bytearray()
            while start + len(data) < end:
                data += read(start + len(data), end - start - len(data))
            self._location.put(part, bytes(data))
            listed[part] = end - start, 0

    def put(self, name: str, data: bytes, lengths: dict[str, int]) -> None:
        self.prepare()
        gone = [file for file, length in lengths.items() if self.size(file, length) < length]
        if gone:
            raise ConfigError(
                f"{self.where}: parts of {gone[0]} were removed meanwhile: one backup at a time; run it again"
            )
        with self._location.create(name) as file:
            file.write(data)
        self.prepare()

    def remove(self, name: str) -> None:
        self._location.remove(name)
        self._listed().pop(name, None)

    def keep(self, backups: list[dict[str, int]]) -> None:
        needed = {part for files in backups for name, length in files.items() for part, _, _ in _parts(name, length)}
        listed = self._listed()
        now = max(modified for _, modified in listed.values())  # by the store's clock: the manifest was written last
        for name, (_, modified) in list(listed.items()):
            if FILE.fullmatch(name.rpartition("/")[0]) and name not in needed and modified < now - _LEFT_MS:
                self.remove(name)

    def _listed(self) -> dict[str, tuple[int, int]]:
        if self._there is None:
            self.prepare()
        assert self._there is not None
        return self._there


def _part(name: str, start: int, end: int) -> str:
    return f"{name}/{start:012}-{end:012}"


def _parts(name: str, length: int) -> Iterator[tuple[str, int, int]]:
    """(its object's name, first byte, last byte + 1) of each."""
    for start in range(0, length, PART):
        end = min(start + PART, length)
        yield _part(name, start, end), start, end
