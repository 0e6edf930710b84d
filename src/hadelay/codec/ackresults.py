"""Results that an ack carries: JSON of the handler, in section 2 of a SETTLE (docs/spec/commands.md).

    section := {n u4}  n × RESULT_ROW  n × {48 bytes left free, JSON}                            little-endian

As in a PUBLISH, apply writes the record header into the free bytes, and the rest becomes a piece of a log file.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from google_crc32c import value as crc32c
from numpy.typing import NDArray

from hadelay.codec.formats import Rows
from hadelay.codec.publishcommand import GAP
from hadelay.codec.wire import Malformed, WireReader
from hadelay.model import MAX_RESULT

#: Layout of one result. lease: number of its lease in the command. size: bytes of JSON. crc: CRC-32C of the JSON.
RESULT_ROW = np.dtype([("lease", "<u4"), ("size", "<u4"), ("crc", "<u4")])

_COUNT = struct.Struct("<I")


class AckResults(NamedTuple):
    """Results of an ACK. blob: the records, their headers still free, in the order of `rows`."""

    rows: Rows
    blob: memoryview

    def records(self, numbers: NDArray[np.intp]) -> bytearray:
        """The records of the results with these numbers, one behind the other."""
        sizes = self.rows["size"].astype(np.int64) + len(GAP)
        ends = sizes.cumsum()[numbers]
        starts = ends - sizes[numbers]
        return bytearray().join(self.blob[at:end] for at, end in zip(starts.tolist(), ends.tolist(), strict=True))


def encode_results(results: Sequence[bytes | None]) -> bytes:
    """Encode the section. results: JSON per lease; None: the lease has no result. b"" if no lease has one."""
    given = [(n, result) for n, result in enumerate(results) if result is not None]
    if not given:
        return b""
    rows = np.array([(n, len(result), crc32c(result)) for n, result in given], RESULT_ROW)
    return b"".join([_COUNT.pack(len(given)), rows.tobytes(), *(GAP + result for _, result in given)])


def decode_results(data: memoryview, leases: int) -> AckResults:
    """Decode the section of an ACK of so many leases. Raises Malformed unless sizes and lease numbers are consistent:
    apply relies on that."""
    reader = WireReader(data)
    (count,) = reader.unpack(_COUNT)
    rows = reader.array(RESULT_ROW, count)
    at = rows["lease"].astype(np.int64)
    if not count or at[-1] >= leases or not (at[1:] > at[:-1]).all() or int(rows["size"].max()) > MAX_RESULT:
        raise Malformed("results are of leases in ascending order, and of limited size")
    blob = reader.take(int(rows["size"].sum(dtype=np.int64)) + len(GAP) * count)
    reader.end()
    return AckResults(rows, blob)
