"""The command TOPIC_EXPIRY: which topics with `expires_after` are in use, and which end.

body := rows × USE          little-endian
"""

import numpy as np

from hadelay.codec.formats import Rows
from hadelay.codec.wire import Malformed, WireReader

#: Layout of a row. `lives` and `used_ms`: values that the topic must have, or the row changes nothing. `ends`: 1 if the
#: topic ends; 0 if it is in use, and then `used_ms` does not matter.
USE = np.dtype([("topic", "<u4"), ("lives", "<u2"), ("ends", "<u2"), ("used_ms", "<i8")])
#: Limit of rows in one command.
MAX_ROWS = 500


def expiry_body(rows: list[tuple[int, int, int, int]]) -> bytes:
    """rows: fields of USE, in their order."""
    return np.array(rows, USE).tobytes()


def decode_expiry(reader: WireReader) -> Rows:
    count, rest = divmod(len(reader.view) - reader.at, USE.itemsize)
    rows = reader.array(USE, count)
    if rest or not 0 < count <= MAX_ROWS or int(rows["ends"].max()) > 1:
        raise Malformed(f"a TOPIC_EXPIRY has 1 to {MAX_ROWS} rows, each with `ends` 0 or 1")
    return rows
