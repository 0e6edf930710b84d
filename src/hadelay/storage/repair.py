"""Check of a repair: only bytes that verify as the original ones may overwrite damaged bytes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hadelay.codec.formats import DISPATCH, INDEX
from hadelay.codec.linking import DISPATCH_CRC, INDEX_CRC
from hadelay.codec.records import check_record, decode_record
from hadelay.errors import BadRequest


def check_repair(suffix: str, offset: int, data: bytes, length: int, entries: npt.NDArray[np.void]) -> None:
    """BadRequest unless `data` is a whole record, or whole entries, of `offset` in a file of `length` applied bytes.

    entries: INDEX rows of the hour, not verified.
    """
    if not data or offset < 0 or offset + len(data) > length:
        raise BadRequest(f"a repair must lie within the file: offset {offset}, {len(data)} bytes of {length}")
    what = _bad_record(offset, data, entries) if suffix == ".log" else _bad_entries(suffix, offset, data)
    if what:
        raise BadRequest(f"the repair at offset {offset} is not the original data: {what}")


def _bad_record(offset: int, data: bytes, entries: npt.NDArray[np.void]) -> str | None:
    what = check_record(data, len(data))
    if what:
        return what
    there = entries["first_id"][entries["offset"] == offset]
    # Without an entry that points here, the entry must be repaired first.
    return None if decode_record(data).first_id in there else "no index entry points to this record"


def _bad_entries(suffix: str, offset: int, data: bytes) -> str | None:
    dtype, crc = (INDEX, INDEX_CRC) if suffix == ".idx" else (DISPATCH, DISPATCH_CRC)
    if offset % dtype.itemsize or len(data) % dtype.itemsize:
        return "a repair consists of whole entries"
    rows = np.frombuffer(data, dtype)
    if len(crc.bad(rows)):
        return "an entry's CRC is wrong"
    numbers = np.arange(len(rows)) + offset // dtype.itemsize
    return "the entries belong to another offset" if suffix == ".idx" and (rows["index"] != numbers).any() else None
