"""Backups in an object store, where files cannot grow: each file is stored in parts of 8 MiB (docs/spec/backup.md).

    hours/2026112018.log/000000000000-000008388608   hours/2026112018.log/000008388608-000009000000

A part's name contains its byte range, so a part never changes: a file that has grown gets another last part, and the
earlier backup keeps its own. No lock is needed, because writers of the same part write the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from hadelay.errors import ConfigError
from hadelay.storage.backup import FILE, LocalBackups

if TYPE_CHECKING:
    from hadelay.storage.locations import Location

PART = 8 << 20
#: Age, in ms, at which parts that no backup needs are removed; younger parts may belong to a running backup.
_LEFT_MS = 24 * 3_600_000


class Objects(LocalBackups):
    part = PART

    def __init__(self, location: Location) -> None:
        self._location, self.where = location, location.path("").rstrip("/")
        #: Cache of the part that was read last: (name, bytes).
        self._last = ("", b"")

    @cached_property
    def _listed(self) -> dict[str, tuple[int, int]]:
        """File name → (size in bytes, time of modification), from the last listing and from later writes."""
        return self._location.walk()

    def prepare(self) -> None:
        self._listed = self._location.walk()

    def manifests(self) -> list[str]:
        return sorted(name for name in self._listed if "/" not in name)

    def load(self, name: str) -> bytes:
        return self._location.load(name)

    def size(self, name: str, length: int) -> int:
        return next((start for part, start, end in _parts(name, length) if not self._has(part, end - start)), length)

    def _has(self, part: str, size: int) -> bool:
        return part in self._listed and self._listed[part][0] == size

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
        self._last = ("", b"")
        for part, start, end in _parts(name, length):
            if self._has(part, end - start) and not anew:
                continue
            data = bytearray()
            while start + len(data) < end:
                data += read(start + len(data), end - start - len(data))
            self._location.put(part, bytes(data))
            self._listed[part] = end - start, 0

    def put(self, name: str, data: bytes, lengths: dict[str, int]) -> None:
        self.prepare()
        gone = [file for file, length in lengths.items() if self.size(file, length) < length]
        if gone:
            raise ConfigError(
                f"{self.where}: parts of {gone[0]} were removed meanwhile: run one backup at a time, and repeat it"
            )
        self._location.write(name, data)
        self.prepare()

    def remove(self, name: str) -> None:
        self._location.remove(name)
        self._listed.pop(name, None)

    def keep(self, backups: list[dict[str, int]]) -> None:
        needed = {part for files in backups for name, length in files.items() for part, _, _ in _parts(name, length)}
        # Take the present time from the newest file, the manifest just written: the store's clock may differ from ours.
        now = max(modified for _, modified in self._listed.values())
        for name, (_, modified) in list(self._listed.items()):
            if FILE.fullmatch(name.rpartition("/")[0]) and name not in needed and modified < now - _LEFT_MS:
                self.remove(name)


def _part(name: str, start: int, end: int) -> str:
    return f"{name}/{start:012}-{end:012}"


def _parts(name: str, length: int) -> Iterator[tuple[str, int, int]]:
    """Parts that a file is stored in: (name of the part, offset of its first byte, offset of its end)."""
    for start in range(0, length, PART):
        end = min(start + PART, length)
        yield _part(name, start, end), start, end
