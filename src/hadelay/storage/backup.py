"""Backups: files of one or more snapshots, with a manifest per snapshot (docs/spec/backup.md).

    BACKUP/  lock  manifest-<index>.json  state-<index>  names  hours/<hour>.{log,idx,dsp}

A backup is in a directory (Directory), or in parts in an object store (pipeline/objects.py).

Law 1: a manifest is written last, after a sync of all files that it names: a backup exists once its manifest does.
Law 2: `names` and hour files only grow, so all snapshots share them: a manifest says how long its prefix is. The next
       backup continues the files of an interrupted backup.
Law 3: bytes have the same offset as in the cluster, so copying them again can only repair.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import closing

import msgspec
import numpy as np
from msgspec import Struct

from hadelay import version
from hadelay.codec.checksums import crc32c
from hadelay.errors import ConfigError, DamagedFile, NotFound
from hadelay.platform.disk import Disk, read_file, replace_file
from hadelay.version import LAST_DEVELOPMENT

#: Format of a backup's manifest; development versions, from before the first release, wrote formats 1 and 2.
FORMAT = 3
#: Size, in bytes, of a block with its own CRC: damage is reported per block.
BLOCK = 64 << 10
_READ = 16 * BLOCK
_MANIFEST = re.compile(r"manifest-(\d+)\.json")
FILE = re.compile(r"names|state-\d+|hours/(dead-)?\d{10}\.(log|idx|dsp)")


class Contents(Struct):
    """Checksums of the first `length` bytes of a file: their CRC-32C, and that of each block (u32, little-endian)."""

    length: int
    crc: int
    blocks: bytes = b""

    @property
    def is_whole(self) -> bool:
        return self.length >= 0 and len(self.blocks) == -(-self.length // BLOCK) * 4


class Backup(Struct, omit_defaults=True):
    """Manifest of a backup."""

    format: int
    cluster_id: str
    group: int
    feature_level: int
    #: Raft index of the last entry in the backup.
    index: int
    term: int
    #: Cluster time of the backup, RFC 3339.
    time: str
    files: dict[str, Contents]
    #: Size, in bytes, of the parts in which files are stored; 0: files are stored whole.
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


class BackupDamage(Struct):
    file: str
    offset: int
    what: str


class LocalBackups:
    """Backups in a local directory; Objects (pipeline/objects.py) overrides all methods for an object store.

    Names are those of a manifest; `length` is the manifest's length of the file.
    """

    #: Size of parts (Backup.part) of the backups that this class writes.
    part = 0

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        #: Path or URI of the backups, for error messages.
        self.where = directory

    def prepare(self) -> None:
        """Prepare the directory for writing, and lock it against other backups while this process lives."""
        self._disk.makedirs(f"{self.where}/hours")
        self._disk.protect(self.where)
        try:
            self._lock = self._disk.lock(f"{self.where}/lock")
        except BlockingIOError:
            raise ConfigError(f"another backup is writing to {self.where}: wait for its end") from None

    def manifests(self) -> list[str]:
        """Names of the files in the directory: manifests and others."""
        return self._disk.listdir(self.where) if self._disk.exists(self.where) else []

    def load(self, name: str) -> bytes:
        """Read a manifest's bytes."""
        return read_file(self._disk, f"{self.where}/{name}")

    def size(self, name: str, length: int) -> int:
        """Number of bytes of the file that the backup location has already, at most `length`."""
        path = f"{self.where}/{name}"
        if not self._disk.exists(path):
            return 0
        with closing(self._disk.open(path)) as file:
            return min(file.size(), length)

    def read(self, name: str, length: int, offset: int, size: int) -> bytes:
        """Read up to 1 MiB of a stored file from an offset that is a multiple of 1 MiB; fewer bytes at the end of a
        short file."""
        return read_file(self._disk, f"{self.where}/{name}", size, offset)

    def fill(self, name: str, length: int, read: Callable[[int, int], bytes], *, anew: bool) -> None:
        """Store the file's first `length` bytes durably. read(offset, limit) returns them, 1 to `limit` bytes per call.
        Bytes that are already stored are kept unless `anew`."""
        with closing(self._disk.open(f"{self.where}/{name}", create=True)) as file:
            at = 0 if anew else min(file.size(), length)
            while at < length:
                data = read(at, length - at)
                file.pwrite(data, at)
                at += len(data)
            file.sync()
            file.drop_cache()  # drop the page cache, so that later reads verify what is on the disk

    def put(self, name: str, data: bytes, lengths: dict[str, int]) -> None:
        """Write a manifest atomically, after a sync of the files that it names."""
        for directory in (f"{self.where}/hours", self.where):
            self._disk.sync_dir(directory)
        replace_file(self._disk, f"{self.where}/{name}", data)

    def remove(self, name: str) -> None:
        """Remove a manifest."""
        self._disk.unlink(f"{self.where}/{name}")

    def keep(self, backups: list[dict[str, int]]) -> None:
        """Remove the files that no kept backup needs. backups: for each kept backup, file name → length."""
        # Sync the removed manifests first: a power loss must not bring back a manifest without its files
        self._disk.sync_dir(self.where)
        needed = {name for lengths in backups for name in lengths}
        for place in ("", "hours/"):
            for name in self._disk.sizes(f"{self.where}/{place}".rstrip("/")):
                if FILE.fullmatch(place + name) and place + name not in needed:
                    self._disk.unlink(f"{self.where}/{place}{name}")


class Archive:
    """The backups in one location, each with a manifest."""

    def __init__(self, files: LocalBackups) -> None:
        self.files, self.where = files, files.where

    def indexes(self) -> list[int]:
        found = (_MANIFEST.fullmatch(name) for name in self.files.manifests())
        return sorted(int(match[1]) for match in found if match)

    def read(self, index: int | None = None) -> Backup:
        """Read the manifest of the newest backup, or of the backup at Raft index `index`. DamagedFile if its bytes do
        not verify."""
        indexes = self.indexes()
        if not indexes:
            raise NotFound(f"{self.where}: no backup in it (no manifest; a backup may have been interrupted)")
        if index is not None and index not in indexes:
            raise NotFound(f"{self.where}: no backup of index {index}; choose one of {', '.join(map(str, indexes))}")
        name = _manifest(indexes[-1] if index is None else index)
        path = f"{self.where}/{name}"
        data = self.files.load(name)
        try:
            sealed = msgspec.json.decode(data, type=_Sealed)
            if crc32c(bytes(sealed.backup)) != int(sealed.crc32c, 16):
                raise ValueError
            backup = msgspec.json.decode(sealed.backup, type=Backup)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise DamagedFile(path, 0, "the manifest does not verify; choose an older backup") from None
        if backup.format < FORMAT:
            raise ConfigError(
                f"{path}: a development version of hadelay, from before the first release, wrote this backup: the last "
                f"version that reads it is commit {LAST_DEVELOPMENT} of hadelay's repository"
            )
        if backup.format > FORMAT or backup.feature_level > version.FEATURE_LEVEL:
            raise ConfigError(f"{path}: a newer hadelay wrote this backup: use that version")
        if backup.part != self.files.part:
            raise ConfigError(
                f"{path}: a backup in parts of {backup.part:,} bytes (0: whole files), but this location uses parts of "
                f"{self.files.part:,}: read a backup where it was written, an object store or a directory"
            )
        if not all(map(FILE.fullmatch, backup.files)) or backup.state not in backup.files:
            raise DamagedFile(path, 0, "the manifest's list of files is not valid")
        if not all(known.is_whole for known in backup.files.values()):
            raise DamagedFile(path, 0, "the manifest has a file whose number of block CRCs does not match its length")
        return backup

    def intact(self, index: int | None = None) -> Backup | None:
        """Read a manifest like `read`; None for a missing or damaged manifest."""
        try:
            return self.read(index)
        except (NotFound, DamagedFile):
            return None

    def verify(self, backup: Backup) -> Iterator[tuple[str, list[BackupDamage]]]:
        """Verify a backup: yields (name, damage) for every file of the backup."""
        for name, known in backup.files.items():
            size = self.files.size(name, known.length)
            if size < known.length:
                yield name, [BackupDamage(name, size, f"the file ends here; the manifest says {known.length:,} bytes")]
                continue
            found = np.frombuffer(self.contents(name, known.length).blocks, "<u4")
            wrong = np.flatnonzero(found != np.frombuffer(known.blocks, "<u4")) * BLOCK
            what = "the bytes from here to {:,} have changed since the backup"
            yield name, [BackupDamage(name, at, what.format(min(at + BLOCK, known.length))) for at in wrong.tolist()]

    def contents(self, name: str, length: int) -> Contents:
        """Compute length and CRCs of a stored file's first `length` bytes, or of all bytes if the file is shorter."""
        crc, blocks = 0, []
        for at in range(0, length, _READ):
            data = self.files.read(name, length, at, min(_READ, length - at))
            crc = crc32c(data, crc)
            blocks += [crc32c(data[start : start + BLOCK]) for start in range(0, len(data), BLOCK)]
        return Contents(length, crc, np.array(blocks, "<u4").tobytes())

    def has(self, name: str, length: int, crc: int, before: Backup | None) -> Contents | None:
        """Length and CRCs of a file that the backup `before` already has unchanged, so that no copy is needed; else
        None."""
        known = before.files.get(name) if before else None
        if known is None or (known.length, known.crc) != (length, crc) or self.files.size(name, length) < length:
            return None
        return known

    def copy(self, name: str, length: int, crc: int, read: Callable[[int, int], bytes]) -> Contents:
        """Store a file and verify it by reading it back; if stored bytes are wrong, copy the whole file once more."""
        if not FILE.fullmatch(name):
            raise ConfigError(f"the node's snapshot lists a file {name!r}, which is not a snapshot file")
        for anew in (False, True):
            self.files.fill(name, length, read, anew=anew)
            found = self.contents(name, length)
            if found.crc == crc:
                return found
        path = f"{self.where}/{name}"
        raise DamagedFile(path, 0, "the node sent bytes that differ from its manifest, twice: try another node")

    def finish(self, backup: Backup, keep: int) -> None:
        """Write the manifest, then remove all but the `keep` newest backups and the files that only they need."""
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
