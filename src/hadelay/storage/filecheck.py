"""Compares files at rest with their checksums, piece by piece, and finds the damaged entries and records.

The functions are generators, to be advanced in a thread: each yields the number of bytes of every piece that it has
read, so that the caller can limit the rate, and returns the damage.
"""

from collections.abc import Generator
from contextlib import closing
from typing import NamedTuple

import numpy as np

from hadelay.codec.checksums import crc32c
from hadelay.codec.formats import DISPATCH, INDEX
from hadelay.codec.linking import DISPATCH_CRC, INDEX_CRC
from hadelay.codec.records import check_record
from hadelay.errors import DamagedFile
from hadelay.platform.disk import Disk

#: Size of the pieces in which files are checked, in bytes; a multiple of the sizes of index entries and events.
PIECE = 256 << 10
#: Limit of damaged entries and records that one check of a file returns; later checks find further ones.
_MAX_FOUND = 1_000

Check = Generator[int, None, list[DamagedFile]]


class Expected(NamedTuple):
    """Length and CRC-32C of the written part of a file. entries: number of index entries of the file's hour."""

    path: str
    size: int
    crc: int
    entries: int = 0


def check_file(disk: Disk, expected: Expected) -> Check:
    """Check a file of an hour, or the file of names, piece by piece: yields the bytes read, and returns the damage. The
    damage of a single entry or record has the size of that entry or record."""
    path, size, crc, _ = expected
    found = 0
    with closing(disk.open(path)) as file:
        for at in range(0, size, PIECE):
            data = file.pread(min(PIECE, size - at), at)
            found = crc32c(data, found)
            yield len(data)
            if len(data) < min(PIECE, size - at):
                return [DamagedFile(path, at + len(data), "the file ends too early")]
    if found == crc:
        return []
    damaged = yield from _find(disk, expected)
    return damaged or [DamagedFile(path, 0, "the CRC of the whole file is wrong, but each of its entries verifies")]


def _find(disk: Disk, expected: Expected) -> Check:
    stem, dot, suffix = expected.path.rpartition(".")
    if suffix in ("idx", "dsp"):
        return (yield from _find_rows(disk, expected, suffix == "idx"))
    if suffix == "log" and dot:
        return (yield from _find_records(disk, expected, f"{stem}.idx"))
    return []


def _find_rows(disk: Disk, expected: Expected, index: bool) -> Check:
    dtype, crc = (INDEX, INDEX_CRC) if index else (DISPATCH, DISPATCH_CRC)
    found: list[DamagedFile] = []
    step = PIECE - PIECE % dtype.itemsize
    with closing(disk.open(expected.path)) as file:
        for at in range(0, expected.size, step):
            data = file.pread(min(step, expected.size - at), at)
            rows, first = np.frombuffer(data, dtype, len(data) // dtype.itemsize), at // dtype.itemsize
            bad = set(crc.bad(rows).tolist())
            if index:
                bad |= set((rows["index"] != np.arange(first, first + len(rows))).nonzero()[0].tolist())
            for row in sorted(bad):
                where = (first + row) * dtype.itemsize
                found.append(DamagedFile(expected.path, where, "the entry's CRC is wrong", size=dtype.itemsize))
            yield len(data)
            if len(found) >= _MAX_FOUND:
                break
    return found[:_MAX_FOUND]


def _find_records(disk: Disk, expected: Expected, index: str) -> Check:
    """Find the damaged records that the entries of an index name. A damaged entry leads to no record: repair the
    entries first."""
    found: list[DamagedFile] = []
    step = PIECE - PIECE % INDEX.itemsize
    with closing(disk.open(index)) as entries, closing(disk.open(expected.path)) as file:
        for at in range(0, expected.entries * INDEX.itemsize, step):
            data = entries.pread(min(step, expected.entries * INDEX.itemsize - at), at)
            rows = np.frombuffer(data, INDEX, len(data) // INDEX.itemsize)
            rows = np.delete(rows, INDEX_CRC.bad(rows))
            yield len(data)
            for offset, size in sorted(set(zip(rows["offset"].tolist(), rows["size"].tolist(), strict=True))):
                what = check_record(file.pread(size, offset), size) if offset + size <= expected.size else None
                if what:
                    found.append(DamagedFile(expected.path, offset, what, size=size))
                yield size
            if len(found) >= _MAX_FOUND:
                break
    return found[:_MAX_FOUND]
