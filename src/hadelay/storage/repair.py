"""What may be written over a damaged place: only bytes that verify as what has to stand there."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hadelay.codec.formats import DISPATCH, INDEX
from hadelay.codec.linking import DISPATCH_CRC, INDEX_CRC
from hadelay.codec.records import check_record, decode_record
from hadelay.errors import BadRequest


def check_repair(suffix: str, offset: int, data: bytes, length: int, entries: npt.NDArray[np.void]) -> None:
    """BadRequest unless `data` is whole, sound, and belongs at `offset` of a file of `length` applied bytes.

    entries: the hour's INDEX rows, not verified.
    """
    if not data or offset < 0 or offset + len(data) > length:
        raise BadRequest("a repair lies within the file")
    what = _bad_record(offset, data, entries) if suffix == ".log" else _bad_entries(suffix, offset, data)
    if what:
        raise BadRequest(f"not what has to stand there: {what}")


def _bad_record(offset: int, data: bytes, entries: npt.NDArray[np.void]) -> str | None:
    what = check_record(data, len(data))
    if what:
        return what
    there = entries["first_id"][entries["offset"] == offset]
    # Without an entry that points here, the entry is what has to be mended first.
    return None if decode_record(data).first_id in there else "it is not the record of this place"


def _bad_entries(suffix: str, offset: int, data: bytes) -> str | None:
    dtype, crc = (INDEX, INDEX_CRC) if suffix == ".idx" else (DISPATCH, DISPATCH_CRC)
    if offset % dtype.itemsize or len(data) % dtype.itemsize:
        return "a repair is of whole entries"
    rows = np.frombuffer(data, dtype)
    if len(crc.bad(rows)):
        return "an entry's CRC does not hold"
    numbers = np.arange(len(rows)) + offset // dtype.itemsize
    return "the entries belong elsewhere" if suffix == ".idx" and (rows["index"] != numbers).any() else None
