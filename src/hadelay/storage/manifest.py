"""A checkpoint as files, for a peer that is new or too far behind, or for a backup.

The source exports its tables into one file, in a thread; hour files and names are served as they are, up to the lengths
of the checkpoint (exports.py). The receiver pulls everything into `incoming/`, verifies it, builds its own tables and
marks the whole complete; switching is then a matter of renames (installer.py).

    export := { table_size u32 | key_size u32 | value_size u32 | table | key | value }*
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from hadelay.storage.tables import Backend, Put, scan_all

#: Name of the thread that checkpoints, exports and installs, one after the other.
LANE = "disk"
#: Size of the parts in which files are read and written, in bytes.
CHUNK = 1 << 20
_SIZES = struct.Struct("<III")


@dataclass(frozen=True)
class SnapshotFile:
    name: str
    length: int
    crc: int  # crc32c of those bytes


@dataclass(frozen=True)
class Manifest:
    """One durable checkpoint. Names are paths relative to a data directory, but for the export: `state-<index>`."""

    index: int
    term: int
    files: list[SnapshotFile]
    blob: bytes = b""


def rows_as_bytes(backend: Backend) -> Iterator[bytes]:
    """An export, in parts of about CHUNK bytes."""
    for table in backend.tables():
        part = bytearray()
        for key, value in scan_all(backend, table):
            part += _SIZES.pack(len(table), len(key), len(value)) + table + key + value
            if len(part) >= CHUNK:
                yield bytes(part)
                part.clear()
        if part:
            yield bytes(part)


def row_at(buffer: bytes, at: int) -> tuple[Put, int] | None:
    """(row, where the next one starts), None when it is not all there."""
    if len(buffer) - at < _SIZES.size:
        return None
    table_size, key_size, value_size = _SIZES.unpack_from(buffer, at)
    key_at = at + _SIZES.size + table_size
    value_at = key_at + key_size
    end = value_at + value_size
    if end > len(buffer):
        return None
    return (buffer[at + _SIZES.size : key_at], buffer[key_at:value_at], buffer[value_at:end]), end
