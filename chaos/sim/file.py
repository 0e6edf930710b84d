"""An open file of a simulated disk, the death of its process, and the jobs of threads (see chaos/sim/disk.py)."""

from __future__ import annotations

import errno
import zlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from chaos.sim.inode import Inode, Op
from hadelay.platform.disk import File

if TYPE_CHECKING:
    from chaos.sim.disk import SimDisk


#: One place of so many is on the disk alone.
_COLD = 8


class SimCrash(BaseException):
    """The process dies at this I/O step. Not an Exception: nothing may handle it but the world."""


class InjectedFault(OSError):
    """An error that a simulated disk was made to raise. Any other OSError of a node is a bug of hadelay."""


def is_injected(error: BaseException | None) -> bool:
    """Whether `error`, or what caused it, is an InjectedFault."""
    while error is not None:
        if isinstance(error, InjectedFault):
            return True
        error = error.__cause__ or error.__context__
    return False


class Flight:
    """A thread's job between its start and its landing."""

    def __init__(self, disk: SimDisk) -> None:
        self.disk = disk
        self.stage = 0
        self.cost_s = 0.0
        #: What each sync reached, in order.
        self.syncs: list[Callable[[], None]] = []

    def end(self) -> float:
        """The job has run; returns the seconds until `land`."""
        self.disk.flight = None
        self.disk.flights.append(self)
        return self.cost_s

    def land(self) -> None:
        if self in self.disk.flights:
            self.disk.flights.remove(self)
            for settle in self.syncs:
                settle()

    def reach(self, syncs: int) -> None:
        """Crashed on the way: only the first `syncs` syncs happened, and nothing after them did."""
        for settle in self.syncs[:syncs]:
            settle()
        self.stage = syncs


class SimFile(File):
    def __init__(self, disk: SimDisk, path: str, inode: Inode) -> None:
        self.path, self._disk, self._inode, self._epoch = path, disk, inode, disk.epoch

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
            # The page cache calls them clean; the platter has some of them at most.
            inode.settle(op for op in ops if self._disk.random.random() < 0.5)
            for op in ops:
                op.durable = True
            inode.ops = []
            raise InjectedFault(errno.EIO, "simulated failure of fdatasync", self.path)
        self._disk.sync(lambda: inode.settle(ops))

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
