"""What a simulated disk is made of: files with two contents, directories with two sets of names, and the operations
that lie between the two (see chaos/sim/disk.py)."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chaos.sim.file import Flight


class Buffer(bytearray):
    """A bytearray that can be weakly referenced: views of an outgrown one are kept up to date while they live."""

    __slots__ = ("__weakref__",)


@dataclass(slots=True, eq=False)
class Op:
    """One unsynced change of a file: a write, or a new size when `data` is None."""

    offset: int
    data: bytes | None
    flight: Flight | None
    stage: int
    durable: bool = False


class Inode:
    __slots__ = ("durable", "live", "mirrors", "mode", "ops", "size")

    def __init__(self, mode: int) -> None:
        self.mode = mode
        self.live, self.durable = Buffer(), bytearray()
        self.size = 0
        self.ops: list[Op] = []
        self.mirrors: list[weakref.ref[Buffer]] = []

    def reserve(self, size: int) -> None:
        if size <= len(self.live):
            return
        grow = max(size, 2 * len(self.live), 4096) - len(self.live)
        try:
            self.live.extend(bytes(grow))
        except BufferError:  # mapped: start a larger buffer, and keep writing to the old one too
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
        """Make these operations durable."""
        for op in ops:
            if not op.durable:
                op.durable = True
                apply(self.durable, op)
        self.ops = [op for op in self.ops if not op.durable]

    def rebuild(self) -> None:
        """live = durable + ops, in fresh buffers (the old ones belong to a dead process)."""
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
    """One atomic change of names: a rename has two parts."""

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
