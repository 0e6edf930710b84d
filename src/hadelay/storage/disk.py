"""The door to the file system. Two implementations: `RealDisk` here, `SimDisk` in hadelay.testing (power cuts, torn
writes, full disks, failing syncs).

Rules for callers: what was not synced may vanish in any subset; a file's name is durable only after `sync_dir` of its
directory; an error of any sync is final (stop the process, never sync again: the page cache looks clean afterwards).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Iterable
from typing import Protocol


class File(Protocol):
    path: str

    def size(self) -> int: ...

    def pread(self, size: int, offset: int) -> bytes:
        """Up to `size` bytes: fewer at the end of the file."""
        ...

    def pwrite(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        """All of it, or OSError."""
        ...

    def pwritev(self, parts: list[bytes | bytearray | memoryview], offset: int) -> int:
        """All parts one after another; the number of bytes. Any number of parts."""
        ...

    def allocate(self, size: int) -> None:
        """Make the file at least `size` bytes long, zero-filled, with its space reserved. OSError(ENOSPC) if full."""
        ...

    def truncate(self, size: int) -> None: ...

    def sync(self) -> None:
        """fdatasync. Blocks: call it in a thread (Runtime.in_thread)."""
        ...

    def write_behind(self, size: int, offset: int) -> None:
        """Have these bytes written soon, which says nothing of when they are durable: of many that wait together, the
        next sync of any file may have to wait for all."""
        ...

    def drop_cache(self) -> None:
        """Have what was synced read from the disk the next time, and not from memory."""
        ...

    def map(self, length: int) -> memoryview:
        """Read-only view of the first `length` bytes, which must exist. Stays valid, and sees later writes, until
        every view of it is released; never truncate a mapped file."""
        ...

    def close(self) -> None: ...


class Lock(Protocol):
    def close(self) -> None: ...


class Disk(Protocol):
    def open(self, path: str, *, create: bool = False) -> File:
        """For reading and writing. FileNotFoundError unless it exists or `create`."""
        ...

    def exists(self, path: str) -> bool: ...

    def listdir(self, path: str) -> list[str]:
        """Sorted names."""
        ...

    def sizes(self, path: str) -> dict[str, int]:
        """Size in bytes of every file directly in a directory, by name."""
        ...

    def makedirs(self, path: str) -> None:
        """And make their names durable: whoever creates a directory rarely thinks of its parent."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Replaces `new`."""
        ...

    def unlink(self, path: str) -> None: ...

    def sync_dir(self, path: str) -> None: ...

    def sync_files(self, paths: Iterable[str], root: str) -> None:
        """Make every one durable, names included; one syncfs of `root` when there are many."""
        ...

    def free(self, path: str) -> tuple[int, int]:
        """(bytes free, bytes in all) of the file system below `path`."""
        ...

    def lock(self, path: str) -> Lock:
        """Hold `path` exclusively until the returned object is closed or gone. BlockingIOError when another has it."""
        ...


def read_file(disk: Disk, path: str, size: int | None = None, offset: int = 0) -> bytes:
    """All of a file, or up to `size` bytes of it. FileNotFoundError."""
    file = disk.open(path)
    try:
        return file.pread(file.size() if size is None else size, offset)
    finally:
        file.close()


def replace_file(disk: Disk, path: str, data: bytes) -> None:
    """Whole or not at all, and durable when it returns."""
    file = disk.open(f"{path}.new", create=True)
    try:
        file.truncate(0)
        file.pwrite(data, 0)
        file.sync()
    finally:
        file.close()
    disk.rename(f"{path}.new", path)
    disk.sync_dir(os.path.dirname(path))


_IOV_MAX = 1024
#: From here on one syncfs is cheaper than a sync per file.
_MANY_FILES = 64
_libc = ctypes.CDLL(None, use_errno=True)
#: Linux's own; elsewhere the system writes when it likes.
_sync_file_range = getattr(_libc, "sync_file_range", lambda *_: 0)
_SYNC_FILE_RANGE_WRITE = 2


class RealFile:
    def __init__(self, path: str, fd: int) -> None:
        self.path, self.fd = path, fd

    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def pread(self, size: int, offset: int) -> bytes:
        return os.pread(self.fd, size, offset)

    def pwrite(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        written = os.pwrite(self.fd, data, offset)
        if written < len(data):
            view = memoryview(data).cast("B")
            while written < len(view):
                written += os.pwrite(self.fd, view[written:], offset + written)

    def pwritev(self, parts: list[bytes | bytearray | memoryview], offset: int) -> int:
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
        os.posix_fallocate(self.fd, 0, size)

    def truncate(self, size: int) -> None:
        os.ftruncate(self.fd, size)

    def sync(self) -> None:
        os.fdatasync(self.fd)

    def write_behind(self, size: int, offset: int) -> None:
        # What fails is told by the next sync.
        _sync_file_range(self.fd, ctypes.c_int64(offset), ctypes.c_int64(size), _SYNC_FILE_RANGE_WRITE)

    def drop_cache(self) -> None:
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def map(self, length: int) -> memoryview:
        return memoryview(mmap.mmap(self.fd, length, prot=mmap.PROT_READ))

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class RealDisk:
    def open(self, path: str, *, create: bool = False) -> File:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        return RealFile(path, os.open(path, flags, 0o640))

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def listdir(self, path: str) -> list[str]:
        return sorted(os.listdir(path))

    def sizes(self, path: str) -> dict[str, int]:
        with os.scandir(path) as found:
            return {e.name: e.stat().st_size for e in found if e.is_file()}

    def makedirs(self, path: str) -> None:
        if os.path.isdir(path):
            return
        parent = os.path.dirname(os.path.abspath(path))
        self.makedirs(parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
        self.sync_dir(parent)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def sync_dir(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def sync_files(self, paths: Iterable[str], root: str) -> None:
        paths = list(paths)
        if len(paths) < _MANY_FILES:
            for path in paths:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fdatasync(fd)
                finally:
                    os.close(fd)
            for directory in sorted({os.path.dirname(path) for path in paths}):
                self.sync_dir(directory)
            return
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if _libc.syncfs(fd) != 0:
                # Whose bytes are lost nobody knows, so a full disk is no better here than a broken one.
                why = os.strerror(ctypes.get_errno())
                raise OSError(errno.EIO, f"a sync of the file system failed: {why}", root)
        finally:
            os.close(fd)

    def free(self, path: str) -> tuple[int, int]:
        s = os.statvfs(path)
        return s.f_bavail * s.f_frsize, s.f_blocks * s.f_frsize

    def lock(self, path: str) -> Lock:
        file = open(path, "a")  # noqa: SIM115 (held until closed)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise
        return file
