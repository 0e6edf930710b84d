"""Backups: the files of one or more snapshots, and a manifest per snapshot (docs/spec/backup.md).

    BACKUP/  lock  manifest-<index>.json  state-<index>  names  hours/<hour>.{log,idx,dsp}

In a directory (Directory), or in parts in an object store (pipeline/objects.py).

Law 1: a manifest is written last, when everything it names is synced: without it there is no backup.
Law 2: `names` and hour files only grow, so all snapshots share them: each is the beginning of the file, as long as its
       manifest says. What an interrupted backup has copied is a beginning, too, and is gone on with.
Law 3: bytes are written where the cluster has them and nowhere else, so copying again can only repair.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec
import numpy as np
from msgspec import Struct

from hadelay.codec.checksums import crc32c
from hadelay.errors import ConfigError, DamagedFile, NotFound
from hadelay.platform.disk import Disk, read_file, replace_file
from hadelay.version import FEATURE_LEVEL

#: The highest that is known: 1 in a directory, 2 in parts.
FORMAT = 2
#: Bytes that share a CRC: how exactly damage is found.
BLOCK = 64 << 10
_READ = 16 * BLOCK
_MANIFEST = re.compile(r"manifest-(\d+)\.json")
FILE = re.compile(r"names|state-\d+|hours/(dead-)?\d{10}\.(log|idx|dsp)")


class Contents(Struct):
    """What a file begins with: so many bytes, the CRC-32C of all of them, and of each block (u32, little-endian)."""

    length: int
    crc: int
    blocks: bytes = b""

    @property
    def is_whole(self) -> bool:
        return self.length >= 0 and len(self.blocks) == -(-self.length // BLOCK) * 4


class Backup(Struct, omit_defaults=True):
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
    #: Bytes of the parts that files are in; 0: they are whole.
    part: int = 0

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


class Files(Protocol):
    """Where backups lie. Names are those of a manifest; a file of length n is what begins with these n bytes."""

    #: For messages.
    where: str
    format: int
    #: Backup.part of what is written here, and can be read.
    part: int

    def prepare(self) -> None:
        """To be written to."""
        ...

    def manifests(self) -> list[str]:
        """Among other names."""
        ...

    def load(self, name: str) -> bytes:
        """A manifest."""
        ...

    def size(self, name: str, length: int) -> int:
        """Of the first `length` bytes, so many are there."""
        ...

    def read(self, name: str, length: int, offset: int, size: int) -> bytes:
        """Up to 1 MiB from a multiple of that; fewer where the file ends too early."""
        ...

    def fill(self, name: str, length: int, read: Callable[[int, int], bytes], *, anew: bool) -> None:
        """Make these bytes be there, by read(offset, most): up to so many, at least one. What is there is trusted
        unless `anew`. Durable when it returns."""
        ...

    def put(self, name: str, data: bytes, lengths: dict[str, int]) -> None:
        """Write a manifest, whole or not at all, behind the files that it names."""
        ...

    def remove(self, name: str) -> None:
        """A manifest."""
        ...

    def keep(self, backups: list[dict[str, int]]) -> None:
        """name → length of every backup that stays; files that none of them needs go."""
        ...


class Directory:
    """Of this machine."""

    format, part = 1, 0

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk, self.where = disk, directory

    def prepare(self) -> None:
        """Make it, and keep other backups out of it while this process lives."""
        self._disk.makedirs(f"{self.where}/hours")
        self._disk.protect(self.where)
        try:
            self._lock = self._disk.lock(f"{self.where}/lock")
        except BlockingIOError:
            raise ConfigError(f"{self.where}: another backup into it is under way") from None

    def manifests(self) -> list[str]:
        return self._disk.listdir(self.where) if self._disk.exists(self.where) else []

    def load(self, name: str) -> bytes:
        return read_file(self._disk, f"{self.where}/{name}")

    def size(self, name: str, length: int) -> int:
        path = f"{self.where}/{name}"
        if not self._disk.exists(path):
            return 0
        file = self._disk.open(path)
        try:
            return min(file.size(), length)
        finally:
            file.close()

    def read(self, name: str, length: int, offset: int, size: int) -> bytes:
        return read_file(self._disk, f"{self.where}/{name}", size, offset)

    def fill(self, name: str, length: int, read: Callable[[int, int], bytes], *, anew: bool) -> None:
        file = self._disk.open(f"{self.where}/{name}", create=True)
        try:
            at = 0 if anew else min(file.size(), length)
            while at < length:
                data = read(at, length - at)
                file.pwrite(data, at)
                at += len(data)
            file.sync()
            file.drop_cache()  # read back is the disk, which may have failed a sync of an earlier try
        finally:
            file.close()

    def put(self, name: str, data: bytes, lengths: dict[str, int]) -> None:
        for directory in (f"{self.where}/hours", self.where):
            self._disk.sync_dir(directory)
        replace_file(self._disk, f"{self.where}/{name}", data)

    def remove(self, name: str) -> None:
        self._disk.unlink(f"{self.where}/{name}")

    def keep(self, backups: list[dict[str, int]]) -> None:
        self._disk.sync_dir(self.where)  # a power cut must not bring back a manifest without its files
        needed = {name for lengths in backups for name in lengths}
        for place in ("", "hours/"):
            for name in self._disk.sizes(f"{self.where}/{place}".rstrip("/")):
                if FILE.fullmatch(place + name) and place + name not in needed:
                    self._disk.unlink(f"{self.where}/{place}{name}")


class Archive:
    """One place with backups."""

    def __init__(self, files: Files) -> None:
        self.files, self.where = files, files.where

    # what is there

    def indexes(self) -> list[int]:
        found = (_MANIFEST.fullmatch(name) for name in self.files.manifests())
        return sorted(int(match[1]) for match in found if match)

    def read(self, index: int | None = None) -> Backup:
        """The newest, or that one. DamagedFile when its bytes do not verify."""
        indexes = self.indexes()
        if not indexes:
            raise NotFound(f"{self.where}: no backup in it (no manifest: perhaps it was interrupted)")
        if index is not None and index not in indexes:
            raise NotFound(f"{self.where}: no backup of index {index}; there are {', '.join(map(str, indexes))}")
        name = _manifest(indexes[-1] if index is None else index)
        path = f"{self.where}/{name}"
        data = self.files.load(name)
        try:
            sealed = msgspec.json.decode(data, type=_Sealed)
            if crc32c(bytes(sealed.backup)) != int(sealed.crc32c, 16):
                raise ValueError
            backup = msgspec.json.decode(sealed.backup, type=Backup)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise DamagedFile(path, 0, "the manifest does not verify; an older one may") from None
        if backup.format > FORMAT or backup.feature_level > FEATURE_LEVEL:
            raise ConfigError(f"{path}: a newer hadelay made it: use that one")
        if backup.part != self.files.part:
            raise ConfigError(
                f"{path}: its files are in parts of {backup.part:,} bytes, and not here (of {self.files.part:,}, 0: "
                "whole): what was made in an object store is read from one"
            )
        if not all(map(FILE.fullmatch, backup.files)) or backup.state not in backup.files:
            raise DamagedFile(path, 0, "the manifest names files that no backup has")
        if not all(known.is_whole for known in backup.files.values()):
            raise DamagedFile(path, 0, "the manifest has a file whose blocks are not as long as it")
        return backup

    def intact(self, index: int | None = None) -> Backup | None:
        """`read`; None when there is none, or it does not verify."""
        try:
            return self.read(index)
        except (NotFound, DamagedFile):
            return None

    def verify(self, backup: Backup) -> Iterator[tuple[str, list[Damage]]]:
        """Every file of it, and what is wrong there."""
        for name, known in backup.files.items():
            size = self.files.size(name, known.length)
            if size < known.length:
                yield name, [Damage(name, size, f"the file ends here, and had {known.length:,} bytes")]
                continue
            found = np.frombuffer(self.contents(name, known.length).blocks, "<u4")
            wrong = np.flatnonzero(found != np.frombuffer(known.blocks, "<u4")) * BLOCK
            what = "not as backed up, from here to {:,}"
            yield name, [Damage(name, at, what.format(min(at + BLOCK, known.length))) for at in wrong.tolist()]

    def contents(self, name: str, length: int) -> Contents:
        """Of the first `length` bytes that are there; of less if there is less."""
        crc, blocks = 0, []
        for at in range(0, length, _READ):
            data = self.files.read(name, length, at, min(_READ, length - at))
            crc = crc32c(data, crc)
            blocks += [crc32c(data[start : start + BLOCK]) for start in range(0, len(data), BLOCK)]
        return Contents(length, crc, np.array(blocks, "<u4").tobytes())

    # adding to it

    def has(self, name: str, length: int, crc: int, before: Backup | None) -> Contents | None:
        """The file is unchanged since that backup: nothing is to be copied."""
        known = before.files.get(name) if before else None
        if known is None or (known.length, known.crc) != (length, crc) or self.files.size(name, length) < length:
            return None
        return known

    def copy(self, name: str, length: int, crc: int, read: Callable[[int, int], bytes]) -> Contents:
        """Files.fill, and read it back: if what was there does not verify, anew."""
        if not FILE.fullmatch(name):
            raise ConfigError(f"the node names a file {name!r}, which no snapshot has")
        for anew in (False, True):
            self.files.fill(name, length, read, anew=anew)
            found = self.contents(name, length)
            if found.crc == crc:
                return found
        path = f"{self.where}/{name}"
        raise DamagedFile(path, 0, "what the node sent is not what its manifest says, twice: try another node")

    def finish(self, backup: Backup, keep: int) -> None:
        """From now on it is a backup. The `keep` newest stay, with all they need; other files go."""
        data = msgspec.json.encode(backup)
        sealed = msgspec.json.encode(_Sealed(f"{crc32c(data):08x}", msgspec.Raw(data)))
        self.files.put(_manifest(backup.index), sealed, _lengths(backup))
        kept: list[Backup] = []
        for n, index in enumerate(reversed(self.indexes())):
            found = self.intact(index) if n < max(keep, 1) else None
            if found is None:
                self.files.remove(_manifest(index))
            else:
                kept.append(found)
        self.files.keep([_lengths(found) for found in kept])


def _manifest(index: int) -> str:
    return f"manifest-{index}.json"


def _lengths(backup: Backup) -> dict[str, int]:
    return {name: known.length for name, known in backup.files.items()}
