"""Simulated disk in memory, with all failures that the rules in platform/disk.py allow a disk to have.

Each file has two contents: *live* is the page cache, which the process sees; *durable* is the platter, plus the list
of operations not yet synced. A process crash keeps live. A power cut rebuilds live from durable and any seeded subset
of those operations, a write possibly torn at sector boundaries. Names work alike: creations, renames and unlinks are
durable only after `sync_dir`.

Work done in a thread (SimRuntime.in_thread) is a *flight*: it runs at one instant, but its syncs become durable only
when it lands, in order, and a crash in between undoes what came after the last sync that was reached.
"""

import errno
import posixpath
import random
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from chaos.sim.file import Directory, Flight, InjectedFault, Inode, NameOp, Op, SimCrash, SimFile
from hadelay.platform.disk import Disk, mode_of

__all__ = ["SECTOR", "SimCrash", "SimDisk", "SimFile"]

SECTOR = 512
Node = TypeVar("Node", Inode, Directory)


class _Lock:
    """A lock on a file; it is released when this object is closed or garbage-collected, or its process ends."""

    def __init__(self) -> None:
        self.taken = True

    def close(self) -> None:
        self.taken = False


class SimDisk(Disk):
    """Simulated disk of one machine, which outlives the machine's processes.

    crash_in: the n-th next mutating step raises SimCrash (after possibly half a write). sync_delay_s: what one sync
    takes, with jitter; usual_sync_s: what it takes while no fault slows the disk down. fail_syncs: how many of the next
    syncs fail. capacity: bytes; beyond it ENOSPC.
    """

    def __init__(self, rng: random.Random, *, capacity: int = 1 << 30, record: Callable[[bytes], object] = len) -> None:
        self.random, self.capacity, self.record = rng, capacity, record
        self.epoch = 0
        self.sync_delay_s = self.usual_sync_s = 0.0004
        self.fail_syncs = 0
        self.crash_in = 0
        #: True while an injected crash ends the process.
        self.crashing = False
        self.bad_paths: set[str] = set()
        self.used = 0
        #: True time at which the last started sync ends.
        self.busy_until = 0.0
        self.steps = 0
        self.syncs = 0
        #: `failed_syncs`: number of failed syncs. `was_full`: number of writes refused because the disk was full.
        self.failed_syncs = self.was_full = 0
        #: Hook for tests, called with (step, path) before each step that changes the disk.
        self.watch: Callable[[str, str], None] | None = None
        self.flight: Flight | None = None
        self.flights: list[Flight] = []
        self._root = Directory()
        self._name_ops: list[NameOp] = []
        self._locks: dict[str, weakref.ref[_Lock]] = {}

    def step(self, epoch: int, what: str, path: str, torn: Callable[[], None] | None = None) -> None:
        """Called before every change of the disk; may crash the process. torn: for a write, function that writes half
        of the bytes before the crash."""
        if epoch != self.epoch:
            raise SimCrash(f"a process that has ended still tries to {what} {path}")
        self.steps += 1
        if self.watch is not None:
            self.watch(what, path)
        if self.crash_in:
            self.crash_in -= 1
            if not self.crash_in:
                self.crashing = True
                if torn is not None:
                    torn()
                raise SimCrash(f"injected crash at the step {what!r} of {path}")

    def read_faults(self, epoch: int, path: str) -> None:
        if epoch != self.epoch:
            raise SimCrash(f"a process that has ended still tries to read {path}")
        if path in self.bad_paths:
            raise InjectedFault(errno.EIO, "simulated read error", path)

    def charge(self, size: int, path: str) -> None:
        if size > 0 and self.used + size > self.capacity:
            self.was_full += 1
            raise InjectedFault(errno.ENOSPC, "simulated full disk", path)
        self.used += size

    @contextmanager
    def spared(self) -> Iterator[None]:
        """Inject no crash, failed sync or full disk meanwhile: for checks, whose reads may write buffered entries
        first. A fault would end the check, and the simulator would miss what the check notes."""
        faults = self.crash_in, self.fail_syncs, self.capacity
        self.crash_in, self.fail_syncs, self.capacity = 0, 0, 1 << 60
        try:
            yield
        finally:
            self.crash_in, self.fail_syncs, self.capacity = faults

    def sync_fails(self) -> bool:
        if not self.fail_syncs:
            return False
        self.fail_syncs -= 1
        self.failed_syncs += 1
        return True

    def flip_bit(self, path: str, offset: int, bit: int = 0) -> Callable[[], None]:
        """Flip a bit of a file, in its volatile and durable content. Returns a function that flips the bit back, unless
        the byte was overwritten."""
        inode = self._lookup(path)
        assert isinstance(inode, Inode)
        rotten = inode.live[offset] ^ 1 << bit

        def flip(content: bytearray) -> None:
            if offset < len(content):
                content[offset] ^= 1 << bit

        def undo() -> None:
            for content in (inode.live, inode.durable):
                if content[offset : offset + 1] == bytes([rotten]):
                    flip(content)

        flip(inode.live)
        flip(inode.durable)
        return undo

    def durable_sizes(self, directory: str) -> dict[str, int]:
        """Path → durable size, for all files below a directory."""
        files = self._files().items()
        return {path: min(f.size, len(f.durable)) for path, f in files if path.startswith(f"{directory}/")}

    def kill(self) -> None:
        """kill -9 of the process: the page cache stays, file handles and locks end, and the running jobs of threads
        stop after a random one of their syncs."""
        self.flight_crash()
        self.epoch += 1
        self.crash_in, self.crashing = 0, False
        self._locks.clear()
        for inode in self._all(Inode):
            inode.rebuild()

    def power_cut(self) -> None:
        """Power cut: each unsynced write and each unsynced change of a name survives or is lost, independently of
        others."""
        self.kill()
        chance = self.random.choice((0.0, 0.2, 0.5, 0.9, 1.0))
        for op in self._name_ops:
            if self.random.random() < chance:
                op.apply_durable()
        self._name_ops = []
        for directory in self._all(Directory, live=False):
            directory.live = dict(directory.durable)
        inodes = self._all(Inode, live=False)
        for inode in inodes:
            inode.ops = [kept for op in inode.ops for kept in self._survivors(op, chance)]
            inode.settle(inode.ops)
            inode.rebuild()
        self.used = sum(inode.size for inode in inodes)

    def _survivors(self, op: Op, chance: float) -> Iterator[Op]:
        if self.random.random() < chance:
            yield op
        # Tear the write: only some of its sectors reach the disk
        elif op.data is not None and self.random.random() < 0.5:
            start = op.offset
            while start < op.offset + len(op.data):
                end = min(op.offset + len(op.data), (start // SECTOR + 1) * SECTOR)
                if self.random.random() < 0.5:
                    yield Op(start, op.data[start - op.offset : end - op.offset], None, 0)
                start = end

    def wipe(self) -> None:
        self.kill()
        self.fail_syncs = self.used = 0
        self.bad_paths.clear()
        self._root, self._name_ops = Directory(), []

    def copy(self) -> dict[str, bytes]:
        """Copy all files as processes see them (synced or not), to compare disks or to restore an old state."""
        return {path: bytes(inode.live[: inode.size]) for path, inode in self._files().items()}

    def sync_everything(self) -> None:
        for op in self._name_ops:
            op.apply_durable()
        self._name_ops = []
        for inode in self._all(Inode):
            inode.settle(inode.ops)

    def begin(self) -> Flight:
        assert self.flight is None, "a thread's job started another one"
        self.flight = Flight(self)
        return self.flight

    def stage(self) -> int:
        return self.flight.stage if self.flight else 0

    def sync(self, settle: Callable[[], None]) -> None:
        self.syncs += 1
        if self.flight is None:
            settle()
            return
        self.flight.syncs.append(settle)
        self.flight.stage += 1
        self.flight.cost_s += self.sync_delay_s * self.random.uniform(0.5, 2.0)

    def flight_crash(self) -> None:
        """Stop each running job of a thread after a random number of its syncs, and undo its later changes."""
        if self.flight is not None:
            self.flight.end()
        for flight in self.flights:
            flight.reach(self.random.randint(0, len(flight.syncs)))
        if self.flights:
            self._undo()
        self.flights = []

    def _undo(self) -> None:
        def done(op: Op | NameOp) -> bool:
            return op.flight is None or op.stage <= op.flight.stage

        for inode in self._all(Inode):
            inode.ops = list(filter(done, inode.ops))
        if not all(map(done, self._name_ops)):
            self._name_ops = list(filter(done, self._name_ops))
            for directory in self._all(Directory) + self._all(Directory, live=False):
                directory.live = dict(directory.durable)
            for op in self._name_ops:
                op.apply_live()
            self._name_ops = [op for op in self._name_ops if not op.durable]

    def open(self, path: str, *, create: bool = False) -> SimFile:
        self.read_faults(self.epoch, path)
        directory, name = self._parent(path)
        node = directory.live.get(name)
        if isinstance(node, Directory):
            raise IsADirectoryError(path)
        if node is None:
            if not create:
                raise FileNotFoundError(errno.ENOENT, "no such file", path)
            self.step(self.epoch, "create", path)
            node = Inode(mode_of(path))
            self._rename_op([(directory, name, node)])
        return SimFile(self, path, node)

    def exists(self, path: str) -> bool:
        try:
            self._lookup(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def listdir(self, path: str) -> list[str]:
        return sorted(self._dir(path).live)

    def makedirs(self, path: str) -> None:
        directory = self._root
        for name in _names(path):
            node = directory.live.get(name)
            if node is None:
                self.step(self.epoch, "mkdir", path)
                node = Directory()
                NameOp([(directory, name, node)], None, 0).apply_durable()
                directory.live[name] = node
            if not isinstance(node, Directory):
                raise NotADirectoryError(path)
            directory = node

    def protect(self, path: str, *, below: bool = True) -> int:
        below_path = f"{path}/" if below else "\0"
        files = {name: f for name, f in self._files().items() if name == path or name.startswith(below_path)}
        wrong = [name for name, inode in files.items() if inode.mode != mode_of(name)]
        for name in wrong:
            files[name].mode = mode_of(name)
        return len(wrong)

    def modes(self) -> dict[str, int]:
        return {path: inode.mode for path, inode in self._files().items()}

    def rename(self, old: str, new: str) -> None:
        self.step(self.epoch, "rename", f"{old} → {new}")
        node = self._lookup(old)
        (source, a), (target, b) = self._parent(old), self._parent(new)
        replaced = target.live.get(b)
        if isinstance(replaced, Directory) and replaced.live:
            raise OSError(errno.ENOTEMPTY, "directory not empty", new)
        self._release(replaced)
        self._rename_op([(source, a, None), (target, b, node)])

    def unlink(self, path: str) -> None:
        self.step(self.epoch, "unlink", path)
        node = self._lookup(path)
        if isinstance(node, Directory):
            raise IsADirectoryError(path)
        directory, name = self._parent(path)
        self._release(node)
        self._rename_op([(directory, name, None)])

    def sync_dir(self, path: str) -> None:
        self.step(self.epoch, "sync_dir", path)
        directory = self._dir(path)
        ops = [op for op in self._name_ops if any(d is directory for d, _, _ in op.parts)]

        def settle() -> None:
            for op in ops:
                if not op.durable:
                    op.apply_durable()
            self._name_ops = [op for op in self._name_ops if not op.durable]

        self.sync(settle)

    def sizes(self, path: str) -> dict[str, int]:
        entries = self._dir(path).live
        return {name: node.size for name, node in sorted(entries.items()) if isinstance(node, Inode)}

    def sync_files(self, paths: Iterable[str], root: str) -> None:
        paths = list(paths)
        for path in paths:
            self.open(path).sync()
        for directory in dict.fromkeys(posixpath.dirname(path) for path in paths):
            self.sync_dir(directory)

    def free(self, path: str) -> tuple[int, int]:
        return max(0, self.capacity - self.used), self.capacity

    def lock(self, path: str) -> _Lock:
        reference = self._locks.get(path)
        holder = reference() if reference else None
        if holder is not None and holder.taken:
            raise BlockingIOError(errno.EAGAIN, "locked", path)
        lock = _Lock()
        self._locks[path] = weakref.ref(lock)
        return lock

    def _rename_op(self, parts: list[tuple[Directory, str, Inode | Directory | None]]) -> None:
        op = NameOp(parts, self.flight, self.stage())
        op.apply_live()
        self._name_ops.append(op)

    def _release(self, node: Inode | Directory | None) -> None:
        if isinstance(node, Inode):
            self.used -= node.size

    def _lookup(self, path: str) -> Inode | Directory:
        node: Inode | Directory = self._root
        for name in _names(path):
            if not isinstance(node, Directory):
                raise NotADirectoryError(path)
            child = node.live.get(name)
            if child is None:
                raise FileNotFoundError(errno.ENOENT, "no such file or directory", path)
            node = child
        return node

    def _dir(self, path: str) -> Directory:
        node = self._lookup(path)
        if not isinstance(node, Directory):
            raise NotADirectoryError(path)
        return node

    def _parent(self, path: str) -> tuple[Directory, str]:
        return self._dir(posixpath.dirname(path)), posixpath.basename(path)

    def _walk(self, directory: Directory, prefix: str, live: bool) -> Iterator[tuple[str, Inode | Directory]]:
        for name, node in sorted((directory.live if live else directory.durable).items()):
            yield f"{prefix}/{name}", node
            if isinstance(node, Directory):
                yield from self._walk(node, f"{prefix}/{name}", live)

    def _files(self) -> dict[str, Inode]:
        """Path → file, for all files under their present names, durable or not."""
        return {path: node for path, node in self._walk(self._root, "", True) if isinstance(node, Inode)}

    def _all(self, kind: type[Node], *, live: bool = True) -> list[Node]:
        """All files, or all directories (`kind`). live: those that have a name now; otherwise those that have a durable
        name."""
        nodes = [self._root, *(node for _, node in self._walk(self._root, "", live))]
        return [node for node in nodes if isinstance(node, kind)]


def _names(path: str) -> list[str]:
    return [name for name in path.split("/") if name not in ("", ".")]
