"""Snapshot: the files of one checkpoint, for a peer that is new or too far behind, or for a backup.

The source exports its tables into one file, in a thread, and serves hour files and names up to the lengths of the
checkpoint (exports.py). The receiver pulls all files into `incoming/`, verifies them, builds its own tables, marks
`incoming/` complete and switches by renaming (installer.py).

    export := { table_size u32 | key_size u32 | value_size u32 | table | key | value }*
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from hadelay.storage.tables import Backend, Put, scan_all

#: Name of the thread that runs checkpoints, exports and installs, one after the other.
LANE = "disk"
#: Size of one read or write, in bytes.
CHUNK = 1 << 20
_SIZES = struct.Struct("<III")


@dataclass(frozen=True)
class SnapshotFile:
    name: str
    length: int
    crc: int  # crc32c of those bytes


@dataclass(frozen=True)
class Manifest:
    """Files of one durable checkpoint. Names are relative to a data directory, except the export: `state-<index>`."""

    index: int
    term: int
    files: list[SnapshotFile]
    blob: bytes = b""


def rows_as_bytes(backend: Backend) -> Iterator[bytes]:
    """The export of all tables, in parts of about CHUNK bytes."""
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
    """(row at `at`, start of the next row); None when the buffer ends within the row."""
    if len(buffer) - at < _SIZES.size:
        return None
    table_size, key_size, value_size = _SIZES.unpack_from(buffer, at)
    key_at = at + _SIZES.size + table_size
    value_at = key_at + key_size
    end = value_at + value_size
    if end > len(buffer):
        return None
    return (buffer[at + _SIZES.size : key_at], buffer[key_at:value_at], buffer[value_at:end]), end
