"""The bytes on disk, as numpy dtypes and constants; docs/spec/on-disk-format.md says the same in words and hex.

All integers are little-endian. Layouts never change: a new meaning gets a new flag bit, a new layout a new
FORMAT_VERSION together with a feature level (version.py). Source of the linked index: S2.
"""

import numpy as np
from numpy.typing import NDArray

from hadelay.model import NONE32, Event

#: Version of all layouts in a data directory. A node refuses a directory with a higher version.
FORMAT_VERSION = 1

SECONDS_PER_HOUR = 3600

#: Arrays: rows of a layout (of INDEX unless a docstring says otherwise), a truth value per row, and numbers per row.
Rows = NDArray[np.void]
Mask = NDArray[np.bool_]
U32 = NDArray[np.uint32]
I64 = NDArray[np.int64]

#: Entry of `hours/<hour>.idx`; entry n is at offset n × 64.
INDEX = np.dtype(
    [
        ("offset", "<u8"),  # of the record in the hour's .log
        ("first_id", "<u8"),  # the message's id: where it was first filed
        ("deliver_at_ms", "<i8"),  # Unix ms, exact; `second` is where it is filed
        ("tag_mask", "<u8"),
        ("size", "<u4"),  # of the whole record, header included
        ("local", "<u4"),  # localIndex: how many entries of the same second stand before it
        ("index", "<u4"),  # globalIndex: n
        ("pre", "<u4"),  # preGlobalIndex: the entry before it in the same second, NONE32 for the first
        ("topic", "<u4"),
        ("attempt", "<u2"),  # hand-outs before this entry was filed
        ("flags", "<u2"),
        ("second", "<u2"),  # 0..3599, the second it is filed under; later than deliver_at for what came late
        ("generation", "<u2"),  # of the topic when this was filed: an older one was deleted with it (ledger/topics.py)
        ("crc", "<u4"),  # crc32c of the 60 bytes before
    ]
)
INDEX_SIZE = 64

#: Entry of `hours/<hour>.dsp`: an event of a message of that hour, whenever the event happened.
DISPATCH = np.dtype(
    [
        ("index", "<u4"),  # globalIndex of the message
        ("previous", "<u4"),  # number of the previous event of the same message, NONE32 for the first
        ("other_hour", "<u4"),  # hour that a moved message went to, NONE32 otherwise
        ("consumer", "<u4"),
        ("at_ms", "<i8"),  # cluster time
        ("attempt", "<u2"),
        ("event", "u1"),  # model.Event
        ("node", "u1"),
        ("crc", "<u4"),  # crc32c of the 28 bytes before
    ]
)
DISPATCH_SIZE = 32

#: In `other_hour` of a nacked event: the reason's number in the low bits (all ones: none), and above it the hand-out
#: delay in ms plus 1, 0 where it is not known. Below SETTLE_LEVEL there is the reason alone, or NONE32.
REASON_BITS = 14
NO_REASON = (1 << REASON_BITS) - 1
MAX_NACK_DELAY_MS = (1 << (32 - REASON_BITS)) - 3


def nack_reason(other: U32) -> U32:
    """Per `other_hour` of a nacked event: the number of its reason, NONE32 for none."""
    reasons: U32 = other & np.uint32(NO_REASON)
    return np.where(reasons == NO_REASON, np.uint32(NONE32), reasons)


def handout_delay_ms(events: Rows) -> I64:
    """Per DISPATCH row that acks or nacks: ms from the grant until the message was handed to the consumer; −1 where it
    is not known, and for every other event."""
    other = events["other_hour"].astype(np.int64)
    known = np.where((events["event"] == Event.ACKED) & (other != NONE32), other, -1)
    above = other >> REASON_BITS
    nacked = (events["event"] == Event.NACKED) & (other != NONE32) & (above > 0)
    found: I64 = np.where(nacked, above - 1, known)
    return found


#: The head of a record in `hours/<hour>.log`; meta and body follow it, and the next record follows them.
RECORD = np.dtype(
    [
        ("magic", "<u2"),
        ("version", "u1"),
        ("flags", "u1"),
        ("meta_size", "<u4"),
        ("body_size", "<u4"),
        ("topic", "<u4"),
        ("first_id", "<u8"),
        ("published_at_ms", "<i8"),
        ("deliver_at_ms", "<i8"),  # as first promised; a moved message's present one stands in its index entry
        ("payload_crc", "<u4"),  # crc32c of meta and body
        ("header_crc", "<u4"),  # masked crc32c of the 44 bytes before
    ]
)
RECORD_SIZE = 48
RECORD_CRC_AT = 44
RECORD_MAGIC = 0x4448  # "HD"
RECORD_VERSION = 1

#: Entry of the file `names`, followed by `size` bytes of UTF-8; and the kinds of names. REASON: reason of a failed
#: attempt.
NAME = np.dtype([("kind", "u1"), ("pad", "u1"), ("size", "<u2"), ("number", "<u4"), ("crc", "<u4")])
NAME_SIZE = 12
TOPIC, CONSUMER, NODE, REASON = 1, 2, 3, 4

#: Head of `hours/<hour>.heads`; 3600 HEAD and `counters` COUNTER follow. A cache: derived from .idx, and checked.
HEADS = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "<u4"),
        ("hour", "<u4"),  # hours since 1970 UTC
        ("entries", "<u4"),  # the heads are those after this many entries
        ("counted", "<u4"),  # and the counters after this many
        ("counters", "<u4"),
        ("crc", "<u4"),  # crc32c of the 24 bytes before and of all that follows
    ]
)
HEADS_MAGIC = 0x53484448  # "HDHS"
HEAD = np.dtype([("last", "<u4"), ("count", "<u4")])
#: Count of one topic's entries in one minute of the hour; only pairs that occur, in order of (topic, minute).
COUNTER = np.dtype([("topic", "<u4"), ("minute", "<u4"), ("count", "<u4")])

#: Row of a checkpoint for one hour: lengths of the hour's files at the applied index, and crc32c of exactly those
#: bytes.
HOUR_ROW = np.dtype(
    [
        ("log_bytes", "<u8"),
        ("entries", "<u4"),
        ("events", "<u4"),
        ("log_crc", "<u4"),
        ("idx_crc", "<u4"),
        ("dsp_crc", "<u4"),
        ("reserved", "<u4"),
    ]
)
