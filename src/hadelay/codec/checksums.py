"""CRC32C of bytes, and of many fixed-length rows at once.

A CRC is affine over GF(2): the XOR of the CRCs of two rows depends only on the bytes in which the rows differ, by one
table entry per (position, byte). So a batch needs one call for its first row, and a gather and an XOR reduction over
the columns that are not the same in all rows: 90 µs for 1,000 index entries.
"""

from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from hadelay.codec.formats import U32, Rows

_U32 = 0xFFFF_FFFF
#: Below this number of rows, one CRC call per row is faster than look-ups in a table of CRCs.
_FEW = 96
#: Number of rows per step: temporary arrays of this size stay in the CPU cache.
_MANY = 1024
_NONE = np.zeros(0, np.intp)


def crc32c(data: bytes | bytearray | memoryview, crc: int = 0) -> int:
    """CRC32C of any bytes, continuing from `crc`, without copying them."""
    if type(data) is bytes:
        return int(google_crc32c.extend(crc, data))
    if not len(data):
        return crc
    array = np.frombuffer(data, np.uint8)
    array.flags.writeable = False  # the C function takes only immutable bytes
    return int(google_crc32c.extend(crc, array))


def masked(crc: int) -> int:
    """Mask a CRC before it is stored in a row: rotate it and add a constant, as LevelDB's log does. Without the mask,
    all rows that end with their own CRC would have the same CRC, and files of such rows too."""
    return ((crc >> 15 | crc << 17) + 0xA282_EAD8) & _U32


class RowCrc:
    """Checksums of rows whose last four bytes are the masked CRC32C of the `covered` bytes before them."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        assert dtype.names is not None
        assert dtype.names[-1].endswith("crc")
        self.covered = covered = dtype.itemsize - 4
        zeroes = google_crc32c.value(bytes(covered))
        #: Table by (position, byte value): CRC of a row whose other bytes are zero, XOR the CRC of a row of zeroes.
        table = np.zeros((covered, 256), np.uint32)
        every = np.arange(256)
        for position in range(covered):
            row = bytearray(covered)
            # CRCs are linear, so the table entry of a byte is the XOR of the entries of the byte's bits.
            for bit in range(8):
                row[position] = 1 << bit
                table[position, every >> bit & 1 == 1] ^= np.uint32(google_crc32c.value(bytes(row)) ^ zeroes)
        self._table = table.ravel()

    def of(self, rows: Rows) -> U32:
        """The masked CRC of each row. rows: C-contiguous."""
        n, covered = len(rows), self.covered
        if n < _FEW:
            data, step, value = rows.tobytes(), covered + 4, google_crc32c.value
            return np.array([masked(value(data[i : i + covered])) for i in range(0, n * step, step)], np.uint32)
        crcs = np.empty(n, np.uint32)
        for at in range(0, n, _MANY):
            crcs[at : at + _MANY] = self._of_some(rows[at : at + _MANY])
        return (crcs >> np.uint32(15) | crcs << np.uint32(17)) + np.uint32(0xA282_EAD8)

    def _of_some(self, rows: Rows) -> U32:
        n, covered = len(rows), self.covered
        words = rows.view(np.uint64).reshape(n, -1)
        differs = np.bitwise_or.reduce(words ^ words[0], axis=0).view(np.uint8)[:covered]
        columns = np.flatnonzero(differs)
        places = rows.view(np.uint8).reshape(n, covered + 4).T[columns] + (columns * 256)[:, None]
        parts: U32 = np.bitwise_xor.reduce(self._table.take(places, mode="clip"), axis=0)
        parts ^= parts[0] ^ np.uint32(google_crc32c.value(rows[0].tobytes()[:covered]))
        return parts

    def seal(self, rows: Rows) -> None:
        """Write the masked CRC of each row into the row's last four bytes."""
        rows[rows.dtype.names[-1]] = self.of(rows)  # type: ignore[index]

    def bad(self, rows: Rows) -> NDArray[np.intp]:
        """Positions of the rows whose stored CRC does not match their bytes."""
        if len(rows) < _FEW:
            data, covered, value = rows.tobytes(), self.covered, google_crc32c.value
            step = covered + 4
            ends = range(covered, len(data), step)
            wrong = [
                end // step
                for end in ends
                if masked(value(data[end - covered : end])) != int.from_bytes(data[end : end + 4], "little")
            ]
            return np.array(wrong, np.intp) if wrong else _NONE
        return np.flatnonzero(self.of(rows) != rows[rows.dtype.names[-1]])  # type: ignore[index]
