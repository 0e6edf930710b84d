"""Records of one append to the hour logs, and the parts of them that go to single hours."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hadelay.codec.formats import I64, RECORD_MAGIC, RECORD_SIZE, RECORD_VERSION, Mask, Rows
from hadelay.codec.linking import RECORD_CRC

#: Limit of rows that are appended at once. Only an append with copies for subscriptions can have more, and is split.
_MOST_ROWS = 1 << 16
#: Number of records below which a loop is faster than numpy.
_FEW = 32


class Records(NamedTuple):
    """Records of one append, concatenated in the order of its rows."""

    blob: bytearray
    #: RECORD rows, one per record, to be completed and written over the first bytes of each record; None for complete
    #: records.
    headers: Rows | None = None
    #: Which rows share the record of the row before them (copies for subscriptions); None: no row does.
    copies: Mask | None = None

    def sizes(self, rows: Rows) -> I64:
        """Number of bytes that each row adds to the log: 0 for a row that shares the record of the row before it."""
        sizes = rows["size"].astype(np.int64)
        if self.copies is not None:
            sizes[self.copies] = 0
        return sizes

    def share(self, rows: Rows) -> None:
        """Give each row without a record of its own the offset of the record that it shares."""
        if self.copies is not None:
            own = ~self.copies
            rows["offset"] = rows["offset"][own][own.cumsum() - 1]

    def write_headers(self, rows: Rows, starts: I64) -> None:
        """Complete the headers, if there are any, and write each at the start of its record. starts: offset in `blob`
        of each row's record."""
        blob, headers, copies = self
        if headers is None:
            return
        own = slice(None) if copies is None else ~copies
        headers["magic"], headers["version"] = RECORD_MAGIC, RECORD_VERSION
        headers["first_id"] = rows["first_id"][own]
        RECORD_CRC.seal(headers)
        # View the blob as overlapping 48-byte elements, one at every byte offset: one assignment then writes all.
        anywhere = np.ndarray((len(blob) - RECORD_SIZE + 1,), f"V{RECORD_SIZE}", blob, 0, (1,))
        anywhere[starts[own]] = headers.view(f"V{RECORD_SIZE}")

    def parts(self, rows: Rows) -> Iterator[tuple[int, int, "Records"]]:
        """Split an append that is too large for the buffer of far hours: yields (start, end, records) of its parts. No
        part begins with a row that shares the record of the row before it."""
        copies = self.copies
        if copies is None or len(rows) <= _MOST_ROWS:
            yield 0, len(rows), self
            return
        sizes, firsts, start = self.sizes(rows), np.flatnonzero(~copies), 0
        ends = sizes.cumsum()
        while start < len(rows):
            end = start + _MOST_ROWS
            end = len(rows) if end >= len(rows) else int(firsts[firsts.searchsorted(end, "right") - 1])
            yield start, end, self.part(ends, sizes, np.arange(start, end))
            start = end

    def part(self, ends: I64, sizes: I64, chosen: npt.NDArray[np.intp]) -> "Records":
        """The records of the chosen rows. ends, sizes: end and size of each row's record in `blob`. chosen: rows in
        ascending order; copies stand together with the rows whose records they share."""
        blob, headers, copies = self
        if copies is None:
            return Records(_cut(blob, ends, sizes, chosen), None if headers is None else headers.take(chosen))
        part = copies[chosen]
        own = (~copies).cumsum() - 1
        kept = None if headers is None else headers.take(own[chosen[~part]])
        return Records(_cut(blob, ends, sizes, chosen), kept, part)


def _cut(blob: bytearray, ends: I64, sizes: I64, chosen: npt.NDArray[np.intp]) -> bytearray:
    """Join the records of the chosen rows. blob: all records. chosen: ascending."""
    if len(chosen) < _FEW:
        spans = zip(ends[chosen].tolist(), sizes[chosen].tolist(), strict=True)
        with memoryview(blob) as view:
            return bytearray().join([view[end - size : end] for end, size in spans])
    breaks = np.flatnonzero(chosen[1:] - chosen[:-1] != 1)
    firsts, lasts = chosen[np.append(0, breaks + 1)], chosen[np.append(breaks, -1)]
    starts = ends[firsts] - sizes[firsts]
    with memoryview(blob) as view:
        return bytearray().join([view[at:end] for at, end in zip(starts.tolist(), ends[lasts].tolist(), strict=True)])
