"""Arrow arrays from numpy arrays, and Parquet files."""

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hadelay.model import DEAD_HOURS
from hadelay.pipeline.hourfiles import HourFiles
from hadelay.pipeline.schema import hour_int
from hadelay.storage.locations import Location, absolute

Mask = npt.NDArray[np.bool_]

#: Spark type → Arrow type.
ARROW = {
    "STRING": pa.string(), "INT": pa.int32(), "BIGINT": pa.int64(), "BOOLEAN": pa.bool_(),
    "TIMESTAMP": pa.timestamp("us", "UTC"), "BINARY": pa.binary(), "ARRAY<STRING>": pa.list_(pa.string()),
    "MAP<STRING,STRING>": pa.map_(pa.string(), pa.string()),
}  # fmt: skip
#: Layout of an element of an Arrow binary_view: a reference to bytes, or up to 12 bytes themselves.
_VIEW = np.dtype([("size", "<i4"), ("head", "V4"), ("buffer", "<i4"), ("offset", "<i4")])
_IN_VIEW = 12
#: Number of bits of an offset into a buffer: offsets are int32, so a new buffer starts at each GiB of the data.
_BUFFER_BITS = 30
_SHORT_VIEW = np.dtype([("size", "<i4"), ("data", "u1", _IN_VIEW)])
_ID_CHARS = np.frombuffer(b"0123456789ABCDEFGHJKMNPQRSTVWXYZ", np.uint8)
#: Layout of the 13 characters of an id: one character for 4 bits, then three groups of four characters for 20 bits
#: each.
_ID = np.dtype({"names": ["head", "a", "b", "c"], "formats": ["u1", "<u4", "<u4", "<u4"], "offsets": [0, 1, 5, 9]})


class Split(NamedTuple):
    """A task's part of an hour: the rows [start, stop)."""

    files: HourFiles
    start: int
    stop: int
    #: Instant, in Unix ms, for which the states of pending messages are computed.
    as_of_ms: int


def ids(first_ids: npt.NDArray[np.uint64]) -> pa.Array:
    """Arrow array with the text of each message id, 13 characters."""
    n, numbers, four = len(first_ids), np.ascontiguousarray(first_ids).view(np.int64), _four_characters()
    chars = np.empty(n, _ID)
    chars["head"] = _ID_CHARS[numbers >> 60 & 0xF]
    for name, shift in (("a", 40), ("b", 20), ("c", 0)):
        chars[name] = four[numbers >> shift & 0xF_FFFF]
    offsets = np.arange(n + 1, dtype=np.int32) * 13
    return pa.StringArray.from_buffers(n, pa.py_buffer(offsets), pa.py_buffer(chars))


@cache
def _four_characters() -> npt.NDArray[np.uint32]:
    """Table: four characters of an id for each number of 20 bits."""
    shifts = np.arange(15, -1, -5)
    return np.asarray(_ID_CHARS[np.arange(1 << 20)[:, None] >> shifts & 31].view("<u4").ravel())


def binaries(data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> pa.Array:
    """Arrow array of pieces of `data`, which may overlap and may be in any order. Each piece is copied once."""
    views = np.zeros(len(starts), _VIEW)
    views["size"], views["buffer"], views["offset"] = sizes, starts >> _BUFFER_BITS, starts & (1 << _BUFFER_BITS) - 1
    short = np.flatnonzero((sizes > 0) & (sizes <= _IN_VIEW))
    if len(short):
        where = np.minimum(starts[short, None] + np.arange(_IN_VIEW), len(data) - 1)
        views.view(_SHORT_VIEW)["data"][short] = data[where]
    buffers = [pa.py_buffer(data[at:]) for at in range(0, len(data), 1 << _BUFFER_BITS)]
    viewed = pa.Array.from_buffers(pa.binary_view(), len(views), [None, pa.py_buffer(views), *buffers])
    return viewed.cast(pa.binary())


def coded(names: Sequence[str], numbers: npt.NDArray[np.integer]) -> pa.DictionaryArray:
    """Dictionary array with the name of each number; null for numbers without a name."""
    codes = numbers.astype(np.int32)
    unknown = codes.view(np.uint32) >= len(names)
    if not unknown.any():  # without a mask of nulls, pyarrow is faster
        return pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(names, pa.string()))
    codes[unknown] = 0
    return pa.DictionaryArray.from_arrays(pa.array(codes, mask=unknown), pa.array(names, pa.string()))


def named(names: Sequence[str], numbers: npt.NDArray[np.integer]) -> pa.Array:
    """Arrow array of strings with the name of each number; null for numbers without a name."""
    return coded(names, numbers).cast(pa.string())


def hour_ints(hours: npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
    """Each hour's number as yyyymmddHH; 0 if a damaged row has a number that is no hour."""
    values, inverse = np.unique(hours, return_inverse=True)
    shown = [hour_int(value) if value < 2 * DEAD_HOURS else 0 for value in values.tolist()]
    return np.array(shown, np.int32)[inverse]


def instants(ms: npt.NDArray[np.int64]) -> pa.Array:
    """Arrow timestamps from times in Unix ms."""
    return pa.array(ms * 1000).view(ARROW["TIMESTAMP"])


def write_parquet(out: str, name: str, tables: Iterable[pa.Table]) -> None:
    """Write tables to one Parquet file. out: directory or URI."""
    location, left = Location(absolute(out)), iter(tables)
    location.make("")
    first = next(left)
    with location.create(name) as file, pq.ParquetWriter(file, first.schema, compression="zstd") as writer:
        for table in chain([first], left):
            writer.write_table(table)


def without(values: pa.Array, missing: Mask) -> pa.Array:
    """Copy of an Arrow array with null where `missing` is true."""
    return values if not missing.any() else pc.if_else(pa.array(missing), None, values)
