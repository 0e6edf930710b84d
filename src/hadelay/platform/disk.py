"""File system access. `SimDisk` in chaos.sim overrides all of it (power cuts, torn writes, full disks, failing syncs).

Modes do not depend on the umask (ADR 193). The group may list directories, and read hour files and `names`, for
pipelines. Only the owner may read other files, which may contain secrets.

Rules for callers: any subset of unsynced writes may vanish; a file's name is durable only after `sync_dir` of its
directory; a failed sync is final (stop the process: the page cache looks clean afterwards, so a retry proves nothing).
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Protocol

from hadelay.errors import DamagedFile, Overloaded

DIRECTORY, PRIVATE, SHARED = 0o750, 0o600, 0o640
_IOV_MAX = 1024
#: Number of files from which one syncfs is cheaper than a sync per file.
_MANY_FILES = 64
_libc = ctypes.CDLL(None, use_errno=True)
#: The system call sync_file_range exists on Linux only; elsewhere a no-op replaces it.
_sync_file_range = getattr(_libc, "sync_file_range", lambda *_: 0)
_SYNC_FILE_RANGE_WRITE = 2
#: Flag of preadv: read from memory only. 0 on systems without RWF_NOWAIT, where reads wait for the disk.
_RWF_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
#: Maximum size of one read-ahead of the kernel, in bytes.
_AHEAD = 128 << 10


def mode_of(path: str) -> int:
    """Permission bits of a new file: the group may read hour files and `names`; only the owner may read other files."""
    directory, name = os.path.split(path)
    shared = os.path.basename(directory) == "hours" or name.removesuffix(".new") == "names"
    return SHARED if shared else PRIVATE


def private(path: str, flags: int) -> int:
    """Opener of private files, for open(…, opener=private)."""
    return os.open(path, flags, PRIVATE)


class File:
    def __init__(self, path: str, fd: int) -> None:
        self.path, self.fd = path, fd

    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def pread(self, size: int, offset: int) -> bytes:
        """Read up to `size` bytes; fewer at the end of the file."""
        return os.pread(self.fd, size, offset)

    def pread_cached(self, size: int, offset: int) -> bytes | None:
        """Read `size` bytes if all are cached. None if a read would wait for the disk, or the file is shorter."""
        data = bytearray(size)
        try:
            read = os.preadv(self.fd, [data], offset, _RWF_NOWAIT)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:  # EAGAIN: some bytes are not cached, so the read would wait
                return None
            # Read without the flag: this file system is in memory, or does not support RWF_NOWAIT.
            read = os.preadv(self.fd, [data], offset)
        return bytes(data) if read == size else None

    def will_need(self, size: int, offset: int) -> None:
        """Start reading these bytes into memory. May block: call it in a thread."""
        for at in range(offset, offset + size, _AHEAD):
            os.posix_fadvise(self.fd, at, min(_AHEAD, offset + size - at), os.POSIX_FADV_WILLNEED)

    def pwrite(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        """Write all bytes, or raise OSError."""
        written = os.pwrite(self.fd, data, offset)
        if written < len(data):
            view = memoryview(data).cast("B")
            while written < len(view):
                written += os.pwrite(self.fd, view[written:], offset + written)

    def pwritev(self, parts: list[bytes | bytearray | memoryview], offset: int) -> int:
        """Write all parts, of any number, one after another; returns the number of bytes."""
        total = 0
        for i in range(0, len(parts), _IOV_MAX):
            chunk = parts[i : i + _IOV_MAX]
            want = sum(map(len, chunk))
            written = os.pwritev(self.fd, chunk, offset + total)
            if written < want:
                rest = b"".join(chunk)[written:]
                self.pwrite(rest, offset + total + written)
            total += want
        return total

    def allocate(self, size: int) -> None:
        """Make the file at least `size` bytes long, zero-filled, with its space reserved. OSError(ENOSPC) if full."""
        os.posix_fallocate(self.fd, 0, size)

    def truncate(self, size: int) -> None:
        os.ftruncate(self.fd, size)

    def sync(self) -> None:
        """Make written data durable (fdatasync). Blocks: call it in a thread (Runtime.in_thread)."""
        os.fdatasync(self.fd)

    def write_behind(self, size: int, offset: int) -> None:
        """Start writing these bytes to disk, without making them durable: the next sync of any file then has fewer
        bytes to wait for. Errors of this write are reported by the next sync."""
        _sync_file_range(self.fd, ctypes.c_int64(offset), ctypes.c_int64(size), _SYNC_FILE_RANGE_WRITE)

    def drop_cache(self) -> None:
        """Drop synced bytes from memory: the next read comes from the disk."""
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def map(self, length: int) -> memoryview:
        """Read-only view of the first `length` bytes, which must exist. Stays valid, and sees later writes, until
        every view of it is released; never truncate a mapped file."""
        return memoryview(mmap.mmap(self.fd, length, prot=mmap.PROT_READ))

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Lock(Protocol):
    def close(self) -> None: ...


class Disk:
    """A file system. private: give the group no access to new files, as for a backup, which contains all secrets."""

    def __init__(self, *, private: bool = False) -> None:
        self._mode_of = (lambda path: PRIVATE) if private else mode_of

    def open(self, path: str, *, create: bool = False) -> File:
        """Open a file for reading and writing. FileNotFoundError if it does not exist, unless `create`."""
        flags = os.O_RDWR | os.O_CLOEXEC
        try:
            return File(path, os.open(path, flags))
        except FileNotFoundError:
            if not create:
                raise
        mode = self._mode_of(path)
        fd = os.open(path, flags | os.O_CREAT, mode)
        _set_mode(fd, mode)
        return File(path, fd)

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def listdir(self, path: str) -> list[str]:
        return sorted(os.listdir(path))

    def sizes(self, path: str) -> dict[str, int]:
        with os.scandir(path) as found:
            return {e.name: e.stat().st_size for e in found if e.is_file()}

    def makedirs(self, path: str) -> None:
        """Create a directory and its parents, and make their names durable."""
        if os.path.isdir(path):
            return
        parent = os.path.dirname(os.path.abspath(path))
        self.makedirs(parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, DIRECTORY)
            _set_mode(path, DIRECTORY)
        self.sync_dir(parent)

    def protect(self, path: str, *, below: bool = True) -> int:
        """Give `path` the mode of new files; with `below`, also all files and directories below it. Skips files of
        other users. Returns the number of changed modes."""
        if not os.path.isdir(path):
            return _set_mode(path, self._mode_of(path))
        count = int(_set_mode(path, DIRECTORY))
        for directory, inner, files in os.walk(path) if below else ():
            count += sum(_set_mode(f"{directory}/{name}", DIRECTORY) for name in inner)
            count += sum(_set_mode(f"{directory}/{name}", self._mode_of(f"{directory}/{name}")) for name in files)
        return count

    def rename(self, old: str, new: str) -> None:
        """Rename a file; an existing `new` is replaced."""
        os.rename(old, new)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def sync_dir(self, path: str) -> None:
        with _opened(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
            os.fsync(fd)

    def sync_files(self, paths: Iterable[str], root: str) -> None:
        """Make all files and their names durable. Many files are synced by one syncfs of `root`."""
        paths = list(paths)
        if len(paths) < _MANY_FILES:
            for path in paths:
                with _opened(path, os.O_RDONLY) as fd:
                    os.fdatasync(fd)
            for directory in sorted({os.path.dirname(path) for path in paths}):
                self.sync_dir(directory)
            return
        with _opened(root, os.O_RDONLY | os.O_DIRECTORY) as fd:
            if _libc.syncfs(fd) != 0:
                # A failed sync may have lost any bytes, so ENOSPC is as fatal as EIO.
                why = os.strerror(ctypes.get_errno())
                raise OSError(errno.EIO, f"a sync of the file system failed: {why}", root)

    def free(self, path: str) -> tuple[int, int]:
        """(free bytes, total bytes) of the file system that contains `path`."""
        s = os.statvfs(path)
        return s.f_bavail * s.f_frsize, s.f_blocks * s.f_frsize

    def lock(self, path: str) -> Lock:
        """Lock `path` until the returned object is closed. BlockingIOError when another process has the lock."""
        file = open(path, "a", opener=private)  # noqa: SIM115 (open until closed)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise
        return file


@contextlib.contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


class ReadOnlyDisk(Disk):
    """Disk for programs that only read, perhaps files of another user."""

    def open(self, path: str, *, create: bool = False) -> File:
        return File(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC))

    def unlink(self, path: str) -> None:
        """Delete nothing: otherwise recovery would remove the files that the checkpoint does not name."""


def _set_mode(path: str | int, mode: int) -> bool:
    """Set the permission bits of a file. False if they were right already, another user owns the file, or the file
    system has none. setgid stays: new files in such a directory get the directory's group."""
    try:
        found = os.stat(path, follow_symlinks=not isinstance(path, str))
        now = stat.S_IMODE(found.st_mode)
        if now & 0o777 == mode or stat.S_ISLNK(found.st_mode):
            return False
        os.chmod(path, now & 0o7000 | mode)
    except (PermissionError, FileNotFoundError):
        return False
    except OSError as error:
        if error.errno in (errno.ENOTSUP, errno.EROFS):
            return False
        raise
    return True


def read_file(disk: Disk, path: str, size: int | None = None, offset: int = 0) -> bytes:
    """Read a whole file, or up to `size` bytes. FileNotFoundError if the file does not exist."""
    with contextlib.closing(disk.open(path)) as file:
        return file.pread(file.size() if size is None else size, offset)


def replace_file(disk: Disk, path: str, data: bytes) -> None:
    """Replace a file's content atomically; the file is durable on return."""
    with contextlib.closing(disk.open(f"{path}.new", create=True)) as file:
        file.truncate(0)
        file.pwrite(data, 0)
        file.sync()
    disk.rename(f"{path}.new", path)
    disk.sync_dir(os.path.dirname(path))


def files_closed() -> Overloaded:
    """The error for a read from a closed store. It is retryable: another node, or the reopened store, can answer."""
    return Overloaded("this node's files are closed: it stops or installs a snapshot; retry", retry_after_ms=1_000)


class Handles:
    """An LRU of open files: two years of hours have 50,000 files, too many to keep open.

    A closed LRU opens no file: a listing over a store that a snapshot has replaced would otherwise read the new store's
    files, and write the old store's messages to them."""

    def __init__(self, disk: Disk, limit: int = 128) -> None:
        self._disk, self._limit = disk, limit
        self._open: OrderedDict[str, File] = OrderedDict()
        self._closed = False

    def get(self, path: str, *, create: bool = False) -> File:
        """Return the file, opened if necessary. The cache owns the file, and closes it after `limit` other files were
        used. FileNotFoundError if the file does not exist."""
        file = self._open.get(path)
        if file is not None:
            self._open.move_to_end(path)
            return file
        if self._closed:
            raise files_closed()
        file = self._open[path] = self._disk.open(path, create=create)
        if len(self._open) > self._limit:
            self._open.popitem(last=False)[1].close()
        return file

    def read(self, path: str, size: int, offset: int) -> bytes:
        """Read `size` bytes of a file. DamagedFile if the file ends before."""
        data = self.get(path).pread(size, offset)
        if len(data) < size:
            raise DamagedFile(path, offset + len(data), "the file ends too early")
        return data

    def forget(self, path: str) -> None:
        file = self._open.pop(path, None)
        if file is not None:
            file.close()

    def close(self) -> None:
        self._closed = True
        while self._open:
            self._open.popitem()[1].close()
