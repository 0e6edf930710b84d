"""Parts of a simulated disk (chaos/sim/disk.py): files with a volatile and a durable content, directories with volatile
and durable names, unsynced operations, open files, and jobs of threads."""

from __future__ import annotations

import errno
import random
import weakref
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from hadelay.platform.disk import File

#: One read in this many misses the page cache, and has to wait for the disk.
_COLD = 8


class SimCrash(BaseException):
    """Crash of a process at an I/O step. It is a BaseException, because only the simulated world may handle it."""


class InjectedFault(OSError):
    """Error injected into a simulated disk. Any other OSError of a node is a bug of hadelay."""


def is_injected(error: BaseException | None) -> bool:
    """Whether `error`, or one of its causes, is an InjectedFault."""
    while error is not None:
        if isinstance(error, InjectedFault):
            return True
        error = error.__cause__ or error.__context__
    return False


class Faults(Protocol):
    """Interface of a simulated disk to its files: each operation of a file asks the disk whether to inject a fault."""

    epoch: int
    random: random.Random
    #: Job of a thread whose code runs now.
    flight: Flight | None
    #: Jobs whose code has run, but whose syncs are not done.
    flights: list[Flight]
    record: Callable[[bytes], object]
    #: True time at which the last started sync ends.
    busy_until: float

    def read_faults(self, epoch: int, path: str) -> None: ...

    def step(self, epoch: int, what: str, path: str, torn: Callable[[], None] | None = None) -> None: ...

    def charge(self, size: int, path: str) -> None: ...

    def stage(self) -> int: ...

    def sync_fails(self) -> bool: ...

    def sync(self, settle: Callable[[], None]) -> None: ...


class Flight:
    """A job of a thread, from its start until the event loop gets its result."""

    def __init__(self, disk: Faults) -> None:
        self.disk = disk
        self.stage = 0
        self.cost_s = 0.0
        #: For each sync of the job, in order: function that makes the changes before this sync durable.
        self.syncs: list[Callable[[], None]] = []

    def end(self) -> float:
        """Called when the job's code has run. Returns the seconds until its last sync is done; then `land` makes the
        changes durable."""
        self.disk.flight = None
        self.disk.flights.append(self)
        return self.cost_s

    def land(self) -> InjectedFault | None:
        """Called when the disk has done the job's syncs: makes the changes before them durable. Returns the error of a
        sync that failed because another sync of the same file failed meanwhile."""
        if self in self.disk.flights:
            self.disk.flights.remove(self)
            return self._settle(len(self.syncs))
        return None

    def reach(self, syncs: int) -> None:
        """Called when the process crashes during the job: its first `syncs` syncs are durable, later changes are
        lost."""
        self._settle(syncs)
        self.stage = syncs

    def _settle(self, syncs: int) -> InjectedFault | None:
        error = None
        for settle in self.syncs[:syncs]:
            try:
                settle()
            except InjectedFault as raised:
                error = raised
        return error


class Buffer(bytearray):
    """Bytearray that allows weak references: views of a buffer that was replaced by a larger one are kept up to date as
    long as they exist."""

    __slots__ = ("__weakref__",)


@dataclass(slots=True, eq=False)
class Op:
    """One unsynced change of a file: a write, or a new size if `data` is None."""

    offset: int
    data: bytes | None
    flight: Flight | None
    stage: int
    durable: bool = False


class Inode:
    __slots__ = ("durable", "failures", "live", "mirrors", "mode", "ops", "size")

    def __init__(self, mode: int) -> None:
        self.mode = mode
        self.live, self.durable = Buffer(), bytearray()
        self.size = 0
        self.ops: list[Op] = []
        #: Number of failed syncs. Each open file reports each failure once, as Linux does.
        self.failures = 0
        self.mirrors: list[weakref.ref[Buffer]] = []

    def reserve(self, size: int) -> None:
        if size <= len(self.live):
            return
        grow = max(size, 2 * len(self.live), 4096) - len(self.live)
        try:
            self.live.extend(bytes(grow))
        # a mapped buffer cannot grow: copy it into a larger one, and keep the old buffer up to date
        except BufferError:
            old = self.live
            self.live = Buffer(len(old) + grow)
            self.live[: len(old)] = old
            self.mirrors.append(weakref.ref(old))

    def write(self, data: bytes, offset: int) -> None:
        end = offset + len(data)
        if end > len(self.live):
            self.reserve(end)
        self.live[offset:end] = data
        if end > self.size:
            self.size = end
        if self.mirrors:
            self._write_mirrors(data, offset)

    def _write_mirrors(self, data: bytes, offset: int) -> None:
        alive = [(ref, buffer) for ref in self.mirrors if (buffer := ref()) is not None]
        self.mirrors = [ref for ref, _ in alive]
        for _, buffer in alive:
            part = data[: max(0, len(buffer) - offset)]
            buffer[offset : offset + len(part)] = part

    def resize(self, size: int) -> None:
        if size < self.size:
            self.assert_not_mapped()
            self.live[size : self.size] = bytes(self.size - size)
        self.reserve(size)
        self.size = size

    def assert_not_mapped(self) -> None:
        try:
            self.live.append(0)
            self.live.pop()
            mapped = any(ref() is not None for ref in self.mirrors)
        except BufferError:
            mapped = True
        assert not mapped, "a mapped file was truncated: SIGBUS for whoever reads the map"

    def settle(self, ops: Iterable[Op]) -> None:
        """Make the given unsynced operations on this file durable."""
        for op in ops:
            if not op.durable:
                op.durable = True
                apply(self.durable, op)
        self.ops = [op for op in self.ops if not op.durable]

    def rebuild(self) -> None:
        """Rebuild the volatile content from the durable content and the unsynced operations, in a new buffer, as the
        old buffer belongs to a dead process."""
        self.live = Buffer(self.durable)
        for op in self.ops:
            apply(self.live, op)
        self.size = len(self.live)
        self.mirrors = []


def apply(content: bytearray, op: Op) -> None:
    if op.data is None:
        if op.offset < len(content):
            del content[op.offset :]
        else:
            content.extend(bytes(op.offset - len(content)))
        return
    end = op.offset + len(op.data)
    if end > len(content):
        content.extend(bytes(end - len(content)))
    content[op.offset : end] = op.data


@dataclass(slots=True, eq=False)
class Directory:
    live: dict[str, Inode | Directory] = field(default_factory=dict)
    durable: dict[str, Inode | Directory] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class NameOp:
    """An atomic, not yet durable change of names in directories; a rename changes two names."""

    parts: list[tuple[Directory, str, Inode | Directory | None]]
    flight: Flight | None
    stage: int
    durable: bool = False

    def apply_live(self) -> None:
        self._apply([directory.live for directory, _, _ in self.parts])

    def apply_durable(self) -> None:
        self.durable = True
        self._apply([directory.durable for directory, _, _ in self.parts])

    def _apply(self, directories: list[dict[str, Inode | Directory]]) -> None:
        for entries, (_, name, node) in zip(directories, self.parts, strict=True):
            if node is None:
                entries.pop(name, None)
            else:
                entries[name] = node


class SimFile(File):
    def __init__(self, disk: Faults, path: str, inode: Inode) -> None:
        self.path, self._disk, self._inode, self._epoch = path, disk, inode, disk.epoch
        self._seen = inode.failures

    def size(self) -> int:
        return self._inode.size

    def pread(self, size: int, offset: int) -> bytes:
        self._disk.read_faults(self._epoch, self.path)
        return bytes(self._inode.live[offset : min(offset + size, self._inode.size)])

    def pread_cached(self, size: int, offset: int) -> bytes | None:
        cold = not zlib.crc32(f"{self.path} {offset}".encode()) % _COLD
        data = b"" if cold else self.pread(size, offset)
        return data if len(data) == size else None

    def will_need(self, size: int, offset: int) -> None:
        pass

    def pwrite(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        data = bytes(data)
        disk = self._disk
        disk.step(self._epoch, "pwrite", self.path, partial(self._torn, data, offset))
        grown = offset + len(data) - self._inode.size
        if grown > 0:
            disk.charge(grown, self.path)
        self._write(data, offset)

    def pwritev(self, parts: list[bytes | bytearray | memoryview], offset: int) -> int:
        data = b"".join(parts)
        self.pwrite(data, offset)
        return len(data)

    def _write(self, data: bytes, offset: int) -> None:
        disk, inode = self._disk, self._inode
        disk.record(data)
        inode.ops.append(Op(offset, data, disk.flight, disk.stage()))
        inode.write(data, offset)

    def _torn(self, data: bytes, offset: int) -> None:
        self._write(data[: self._disk.random.randrange(len(data) + 1)], offset)

    def allocate(self, size: int) -> None:
        if size > self._inode.size:
            self._resize(size, "allocate")

    def truncate(self, size: int) -> None:
        self._resize(size, "truncate")

    def _resize(self, size: int, what: str) -> None:
        self._disk.step(self._epoch, what, self.path)
        self._disk.charge(size - self._inode.size, self.path)
        self._inode.ops.append(Op(size, None, self._disk.flight, self._disk.stage()))
        self._inode.resize(size)

    def sync(self) -> None:
        self._disk.step(self._epoch, "sync", self.path)
        inode, ops = self._inode, list(self._inode.ops)
        if self._disk.sync_fails():
            # After a failed sync, the pages of these changes count as clean in the page cache, but the disk may lack
            # some of the changes.
            inode.settle(op for op in ops if self._disk.random.random() < 0.5)
            for op in ops:
                op.durable = True
            inode.ops = []
            inode.failures += 1

        def settle() -> None:
            inode.settle(ops)
            if self._seen < inode.failures:
                self._seen = inode.failures
                raise InjectedFault(errno.EIO, "simulated failure of fdatasync", self.path)

        if self._seen < inode.failures:
            settle()
        self._disk.sync(settle)

    def write_behind(self, size: int, offset: int) -> None:
        pass

    def drop_cache(self) -> None:
        self._inode.assert_not_mapped()
        self._inode.rebuild()

    def map(self, length: int) -> memoryview:
        assert length <= self._inode.size, f"{self.path}: mapping {length} of {self._inode.size} bytes"
        return memoryview(self._inode.live)[:length].toreadonly()

    def close(self) -> None:
        pass
