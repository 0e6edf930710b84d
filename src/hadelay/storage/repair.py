"""What may be written over a damaged place: only bytes that verify as what has to stand there (architecture §3)."""

from __future__ import annotations

import numpy as np

from hadelay.core.formats import DISPATCH, INDEX
from hadelay.core.linking import DISPATCH_CRC, INDEX_CRC
from hadelay.errors import BadRequest
from hadelay.storage.records import check_record


def checked(suffix: str, offset: int, data: bytes) -> bytes:
    """`data`, or BadRequest: it is not whole and sound, or belongs elsewhere."""
    if suffix == ".log":
        what = check_record(data, len(data))
    else:
        dtype, crc = (INDEX, INDEX_CRC) if suffix == ".idx" else (DISPATCH, DISPATCH_CRC)
        if offset % dtype.itemsize or len(data) % dtype.itemsize or not data:
            raise BadRequest("a repair is of whole entries")
        rows = np.frombuffer(data, dtype)
        what = "an entry's CRC does not hold" if len(crc.bad(rows)) else None
        if suffix == ".idx" and (rows["index"] != np.arange(len(rows)) + offset // dtype.itemsize).any():
            what = "the entries belong elsewhere"
    if what:
        raise BadRequest(f"the peer's copy does not verify either: {what}")
    return data
