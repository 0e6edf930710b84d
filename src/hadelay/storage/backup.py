"""Backups: a directory of the files of one or more snapshots, and a manifest per snapshot (docs/spec/backup.md).

    BACKUP/  lock  manifest-<index>.json  state-<index>  names  hours/<hour>.{log,idx,dsp}

Law 1: a manifest is written last, when everything it names is synced: without it there is no backup.
Law 2: `names` and hour files only grow, so all snapshots share them: each is the beginning of the file, as long as its
       manifest says. What an interrupted backup has copied is a beginning, too, and is gone on with.
Law 3: bytes are written where the cluster has them and nowhere else, so copying again can only repair.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
from msgspec import Struct

from hadelay.core.checksums import crc32c
from hadelay.core.formats import FEATURE_LEVEL
from hadelay.errors import ConfigError, DamagedFile, NotFound
from hadelay.storage.disk import Disk

FORMAT = 1
#: Bytes that share a CRC: how exactly damage is found.
BLOCK = 64 << 10
_READ = 16 * BLOCK
_MANIFEST = re.compile(r"manifest-(\d+)\.json")
_FILE = re.compile(r"names|state-\d+|hours/(dead-)?\d{10}\.(log|idx|dsp)")


class Contents(Struct):
    """What a file begins with: so many bytes, the CRC-32C of all of them, and of each block (u32, little-endian)."""

    length: int
    crc: int
    blocks: bytes = b""


class Backup(Struct):
    """A manifest."""

    format: int
    cluster_id: str
    group: int
    feature_level: int
    #: Of the last entry that is in it.
    index: int
    term: int
    #: RFC 3339, cluster time.
    time: str
    files: dict[str, Contents]

    @property
    def state(self) -> str:
        return f"state-{self.index}"

    @property
    def size(self) -> int:
        return sum(file.length for file in self.files.values())


class _Sealed(Struct):
    crc32c: str
    backup: msgspec.Raw


class Damage(Struct):
    file: str
    offset: int
    what: str


class Archive:
    """One directory of backups."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk, self.directory = disk, directory

    def prepare(self) -> None:
        """Make the directory, and keep other backups out of it while this process lives."""
        self._disk.makedirs(f"{self.directory}/hours")
        try:
            self._lock = self._disk.lock(f"{self.directory}/lock")
        except BlockingIOError:
            raise ConfigError(f"{self.directory}: another backup into it is under way") from None

    # what is there

    def indexes(self) -> list[int]:
        if not self._disk.exists(self.directory):
            return []
        found = (_MANIFEST.fullmatch(name) for name in self._disk.listdir(self.directory))
        return sorted(int(match[1]) for match in found if match)

    def read(self, index: int | None = None) -> Backup:
        """The newest, or that one. DamagedFile when its bytes do not verify."""
        indexes = self.indexes()
        if not indexes:
            raise NotFound(f"{self.directory}: no backup in it (no manifest: perhaps it was interrupted)")
        if index is not None and index not in indexes:
            raise NotFound(f"{self.directory}: no backup of index {index}; there are {', '.join(map(str, indexes))}")
        path = self._manifest(indexes[-1] if index is None else index)
        file = self._disk.open(path)
        data = file.pread(file.size(), 0)
        file.close()
        try:
            sealed = msgspec.json.decode(data, type=_Sealed)
            if crc32c(bytes(sealed.backup)) != int(sealed.crc32c, 16):
                raise ValueError
            backup = msgspec.json.decode(sealed.backup, type=Backup)
        except (msgspec.MsgspecError, ValueError):
            raise DamagedFile(path, 0, "the manifest does not verify; an older one may") from None
        if backup.format > FORMAT or backup.feature_level > FEATURE_LEVEL:
            raise ConfigError(f"{path}: a newer hadelay made it: use that one")
        if not all(map(_FILE.fullmatch, backup.files)) or backup.state not in backup.files:
            raise DamagedFile(path, 0, "the manifest names files that no backup has")
        return backup

    def intact(self, index: int | None = None) -> Backup | None:
        """`read`; None when there is none, or it does not verify."""
        try:
            return self.read(index)
        except (NotFound, DamagedFile):
            return None

    def load(self, name: str, offset: int, size: int) -> bytes:
        file = self._disk.open(f"{self.directory}/{name}")
        try:
            return file.pread(size, offset)
        finally:
            file.close()

    def verify(self, backup: Backup) -> Iterator[tuple[str, list[Damage]]]:
        """Every file of it, and what is wrong there."""
        for name, known in backup.files.items():
            size = self._size(name)
            if size < known.length:
                yield name, [Damage(name, size, f"the file ends here, and had {known.length:,} bytes")]
                continue
            found = np.frombuffer(self.contents(name, known.length).blocks, "<u4")
            wrong = np.flatnonzero(found != np.frombuffer(known.blocks, "<u4")) * BLOCK
            what = "not as backed up, from here to {:,}"
            yield name, [Damage(name, at, what.format(min(at + BLOCK, known.length))) for at in wrong.tolist()]

    def contents(self, name: str, length: int) -> Contents:
        """Of the first `length` bytes on the disk; of less if there is less."""
        if not length:
            return Contents(0, 0)
        crc, blocks = 0, []
        file = self._disk.open(f"{self.directory}/{name}")
        try:
            for at in range(0, length, _READ):
                data = file.pread(min(_READ, length - at), at)
                crc = crc32c(data, crc)
                blocks += [crc32c(data[start : start + BLOCK]) for start in range(0, len(data), BLOCK)]
        finally:
            file.close()
        return Contents(length, crc, np.array(blocks, "<u4").tobytes())

    # adding to it

    def has(self, name: str, length: int, crc: int, before: Backup | None) -> Contents | None:
        """The file is unchanged since that backup: nothing is to be copied."""
        known = before.files.get(name) if before else None
        if known is None or (known.length, known.crc) != (length, crc) or self._size(name) < length:
            return None
        return known

    def copy(self, name: str, length: int, crc: int, read: Callable[[int, int], bytes]) -> Contents:
        """Make the file begin with these bytes, by read(offset, most): up to so many, at least one. Begins where an
        earlier copy ended; if that does not verify, anew. Synced when it returns."""
        if not _FILE.fullmatch(name):
            raise ConfigError(f"the node names a file {name!r}, which no snapshot has")
        path = f"{self.directory}/{name}"
        file = self._disk.open(path, create=True)
        try:
            for at in (min(file.size(), length), 0):
                while at < length:
                    data = read(at, length - at)
                    file.pwrite(data, at)
                    at += len(data)
                found = self.contents(name, length)
                if found.crc == crc:
                    file.sync()
                    return found
        finally:
            file.close()
        raise DamagedFile(path, 0, "what the node sent is not what its manifest says, twice: try another node")

    def finish(self, backup: Backup, keep: int) -> None:
        """From now on it is a backup. The `keep` newest stay, with all they need; other files go."""
        disk = self._disk
        for directory in (f"{self.directory}/hours", self.directory):
            disk.sync_dir(directory)
        data = msgspec.json.encode(backup)
        path = self._manifest(backup.index)
        file = disk.open(f"{path}.new", create=True)
        file.truncate(0)
        file.pwrite(msgspec.json.encode(_Sealed(f"{crc32c(data):08x}", msgspec.Raw(data))), 0)
        file.sync()
        file.close()
        disk.rename(f"{path}.new", path)
        disk.sync_dir(self.directory)
        self._prune(keep)

    def _prune(self, keep: int) -> None:
        needed: set[str] = set()
        for n, index in enumerate(reversed(self.indexes())):
            backup = self.intact(index) if n < max(keep, 1) else None
            if backup is None:
                self._disk.unlink(self._manifest(index))
            else:
                needed.update(backup.files)
        for place in ("", "hours/"):
            for name in self._disk.sizes(f"{self.directory}/{place}".rstrip("/")):
                if _FILE.fullmatch(place + name) and place + name not in needed:
                    self._disk.unlink(f"{self.directory}/{place}{name}")

    def _manifest(self, index: int) -> str:
        return f"{self.directory}/manifest-{index}.json"

    def _size(self, name: str) -> int:
        path = f"{self.directory}/{name}"
        if not self._disk.exists(path):
            return 0
        file = self._disk.open(path)
        try:
            return file.size()
        finally:
            file.close()
