"""Reads untrusted bytes: every decoder of the core returns a value or raises Malformed, and nothing else."""

import struct
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

#: Limit of the names of topics, consumers and nodes, in bytes: a name is encoded behind its length, which is one byte.
MAX_NAME = 255
#: Head of each encoded command: the command's number, and the size of its body.
COMMAND = struct.Struct("<BI")


class Malformed(ValueError):
    """Raised for bytes that do not have the expected layout."""


def cut_name(name: str) -> str:
    """The name, cut to MAX_NAME bytes: 64 characters, as a token's name may have, can be 256 bytes."""
    return name.encode()[:MAX_NAME].decode(errors="ignore")


def pack_name(name: str) -> bytes:
    raw = name.encode()
    assert len(raw) <= MAX_NAME, name
    return bytes([len(raw)]) + raw


def frame(kind: int, *parts: bytes) -> bytes:
    """Encode a command from the parts of its body."""
    return b"".join((COMMAND.pack(kind, sum(map(len, parts))), *parts))


class WireReader:
    """Reads encoded bytes from front to back; the returned arrays are views of these bytes, not copies."""

    __slots__ = ("at", "view")

    def __init__(self, view: memoryview) -> None:
        self.view, self.at = view, 0

    def take(self, size: int) -> memoryview:
        end = self.at + size
        if end > len(self.view):
            raise self._short(size)
        part = self.view[self.at : end]
        self.at = end
        return part

    def _short(self, size: int) -> Malformed:
        return Malformed(f"expected {size} bytes at offset {self.at}, found only {len(self.view) - self.at}")

    def unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        at = self.at
        self.at = at + layout.size
        if self.at > len(self.view):
            self.at = at
            raise self._short(layout.size)
        return layout.unpack_from(self.view, at)

    def text(self, size: int) -> str:
        if not size:
            return ""
        try:
            return str(self.take(size), "utf-8")
        except UnicodeDecodeError as error:
            raise Malformed("a name is not UTF-8") from error

    def name(self) -> str:
        return self.text(self.take(1)[0])

    def array(self, dtype: DTypeLike, count: int) -> NDArray[Any]:
        dtype = np.dtype(dtype)
        size = count * dtype.itemsize
        if self.at + size > len(self.view):
            raise self._short(size)
        rows = np.frombuffer(self.view, dtype, count, self.at)
        self.at += size
        return rows

    def named(self) -> str:
        """Read a name that is not empty."""
        name = self.name()
        if not name:
            raise Malformed("a name must not be empty")
        return name

    def rest(self) -> memoryview:
        return self.take(len(self.view) - self.at)

    def end(self) -> None:
        if self.at != len(self.view):
            raise Malformed(f"{len(self.view) - self.at} unexpected bytes at the end")
