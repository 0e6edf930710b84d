"""Arrays of numpy as Arrow's, and what batches of messages and of events have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hadelay.model import DEAD_HOURS
from hadelay.pipeline.hourfiles import HourFiles, Names, Rows, Store, usable
from hadelay.pipeline.schema import Options, hour_int

Mask = npt.NDArray[np.bool_]

#: Arrow's type of each of Spark's.
ARROW = {
    "STRING": pa.string(), "INT": pa.int32(), "BIGINT": pa.int64(), "BOOLEAN": pa.bool_(),
    "TIMESTAMP": pa.timestamp("us", "UTC"), "BINARY": pa.binary(), "ARRAY<STRING>": pa.list_(pa.string()),
    "MAP<STRING,STRING>": pa.map_(pa.string(), pa.string()),
}  # fmt: skip
#: An element of Arrow's binary_view: bytes of a buffer, or, up to 12 of them, in the element itself.
_VIEW = np.dtype([("size", "<i4"), ("head", "V4"), ("buffer", "<i4"), ("offset", "<i4")])
_IN_VIEW = 12
#: An offset is an int32: data is given as buffers that start at each GiB.
_BUFFER_BITS = 30
_SHORT_VIEW = np.dtype([("size", "<i4"), ("data", "u1", _IN_VIEW)])
_ID_CHARS = np.frombuffer(b"0123456789ABCDEFGHJKMNPQRSTVWXYZ", np.uint8)
#: The 13 characters of an id: four bits, then three times 20.
_ID = np.dtype({"names": ["head", "a", "b", "c"], "formats": ["u1", "<u4", "<u4", "<u4"], "offsets": [0, 1, 5, 9]})


class Split(NamedTuple):
    files: HourFiles
    start: int
    stop: int
    #: Unix ms at which a message that waits is scheduled or ready.
    as_of_ms: int


class RowBatch:
    """Rows of one kind. `column` gives an array as long as `rows`."""

    def __init__(self, whole: Whole, taken: Rows) -> None:
        self.whole, self.rows = whole, taken
        self.store, self.files, self.names = whole.store, whole.split.files, whole.names

    def column(self, name: str) -> Any:
        n = len(self.rows)
        if name == "hour":
            return np.full(n, hour_int(self.files.hour), np.int32)
        if name == "dead":
            return np.full(n, self.files.hour >= DEAD_HOURS)
        made = getattr(self, f"_{name}", None)
        return made() if made is not None else np.ascontiguousarray(self.rows[name])

    def _entry(self) -> Any:
        return self.rows["index"].astype(np.int64)


class Whole:
    """Makes batches of a split."""

    def __init__(self, store: Store, options: Options, split: Split, names: Names) -> None:
        self.store, self.options, self.split, self.names = store, options, split, names

    def batches(self, start: int, stop: int, needs_log: bool) -> Iterator[RowBatch]:
        """Rows [start, stop) of the topics asked for."""
        raise NotImplementedError

    @cached_property
    def wanted(self) -> Mask | None:
        """Which topic numbers are asked for, and none for those without a name; None: all."""
        topics = {name.strip() for name in self.options.topics.split(",") if name.strip()}
        return np.array([*(name in topics for name in self.names.topics), False]) if self.options.topics else None

    def of_topics(self, numbers: npt.NDArray[np.uint32]) -> Mask:
        assert self.wanted is not None
        return np.asarray(self.wanted[np.minimum(numbers, len(self.wanted) - 1)])

    def sound(self, suffix: str, start: int, stop: int) -> tuple[Rows, Mask | None]:
        """Rows [start, stop), and which of them can be used, if not all can and the others are to be left out."""
        skip = self.options.on_torn == "skip"
        return usable(self.store, self.split.files, suffix, start, stop, verify=self.options.verify, skip=skip)


def ids(first_ids: npt.NDArray[np.uint64]) -> pa.Array:
    """The 13 characters of each."""
    n, numbers, four = len(first_ids), np.ascontiguousarray(first_ids).view(np.int64), _four_characters()
    chars = np.empty(n, _ID)
    chars["head"] = _ID_CHARS[numbers >> 60 & 0xF]
    for name, shift in (("a", 40), ("b", 20), ("c", 0)):
        chars[name] = four[numbers >> shift & 0xF_FFFF]
    offsets = np.arange(n + 1, dtype=np.int32) * 13
    return pa.StringArray.from_buffers(n, pa.py_buffer(offsets), pa.py_buffer(chars))


@cache
def _four_characters() -> npt.NDArray[np.uint32]:
    """Of each number of 20 bits."""
    shifts = np.arange(15, -1, -5)
    return np.asarray(_ID_CHARS[np.arange(1 << 20)[:, None] >> shifts & 31].view("<u4").ravel())


def binaries(
    data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> pa.Array:  # fmt: skip
    """These pieces of data, which may overlap, in any order: copied once, from views of them."""
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
    """The name of each number, null where there is none."""
    codes = numbers.astype(np.int32)
    unknown = codes.view(np.uint32) >= len(names)
    if not unknown.any():  # as a rule: without a mask it takes half as long
        return pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(names, pa.string()))
    codes[unknown] = 0
    return pa.DictionaryArray.from_arrays(pa.array(codes, mask=unknown), pa.array(names, pa.string()))


def named(names: Sequence[str], numbers: npt.NDArray[np.integer]) -> pa.Array:
    return coded(names, numbers).cast(pa.string())


def instants(ms: npt.NDArray[np.int64]) -> pa.Array:
    return pa.array(ms * 1000).view(ARROW["TIMESTAMP"])


def without(values: pa.Array, missing: Mask) -> pa.Array:
    return values if not missing.any() else pc.if_else(pa.array(missing), None, values)
