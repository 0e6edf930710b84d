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

#: Types of arrays: rows of a layout (INDEX unless a docstring names another), a boolean per row, a number per row.
Rows = NDArray[np.void]
Mask = NDArray[np.bool_]
U32 = NDArray[np.uint32]
I64 = NDArray[np.int64]

#: Entry of `hours/<hour>.idx`; entry n is at offset n × 64.
INDEX = np.dtype(
    [
        ("offset", "<u8"),  # offset of the message's record in the hour's .log;
        ("first_id", "<u8"),  # id of the message, made from the number of its first index entry;
        ("deliver_at_ms", "<i8"),  # due time in Unix ms; if the entry was added late, its `second` is later than this
        ("tag_mask", "<u8"),
        ("size", "<u4"),  # size of the record in bytes, header included;
        ("local", "<u4"),  # localIndex: number of earlier entries of the same second;
        ("index", "<u4"),  # globalIndex: number of this entry in the hour;
        ("pre", "<u4"),  # preGlobalIndex: number of the previous entry of the same second, NONE32 if none
        ("topic", "<u4"),
        ("attempt", "<u2"),  # number of hand-outs of the message before this entry was added
        ("flags", "<u2"),
        ("second", "<u2"),  # second of the hour, 0..3599; later than deliver_at_ms if the entry was added late;
        ("generation", "<u2"),  # generation of the topic when the entry was added; each deletion raises the generation;
        ("crc", "<u4"),  # crc32c of the entry's first 60 bytes
    ]
)
INDEX_SIZE = 64
#: Value of `attempt` in entries that hold results of acks instead of messages (ledger/leases/ackresults.py).
RESULT_ATTEMPT = 0xFFFF

#: Entry of `hours/<hour>.dsp`: an event (lease, ack, …), possibly after the hour, of a message in the hour's .idx.
DISPATCH = np.dtype(
    [
        ("index", "<u4"),  # number of the message's entry in the .idx file (globalIndex);
        ("previous", "<u4"),  # number of the previous event of the same entry, NONE32 for the first;
        ("other_hour", "<u4"),  # new hour of a moved message; ack: hand-out delay in ms; nack: see REASON_BITS
        ("consumer", "<u4"),
        ("at_ms", "<i8"),  # cluster time of the event
        ("attempt", "<u2"),
        ("event", "u1"),  # kind of the event: a value of model.Event
        ("node", "u1"),
        ("crc", "<u4"),  # crc32c of the event's first 28 bytes
    ]
)
DISPATCH_SIZE = 32

#: Bits of `other_hour` in a nacked event: the lowest REASON_BITS hold the reason's number (all ones: no reason), the
#: higher bits the hand-out delay in ms plus 1 (0: unknown).
REASON_BITS = 14
NO_REASON = (1 << REASON_BITS) - 1
MAX_NACK_DELAY_MS = (1 << (32 - REASON_BITS)) - 3


def nack_reason(other: U32) -> U32:
    """For each `other_hour` of a nacked event: number of the nack's reason, NONE32 for none."""
    reasons: U32 = other & np.uint32(NO_REASON)
    return np.where(reasons == NO_REASON, np.uint32(NONE32), reasons)


def handout_delay_ms(events: Rows) -> I64:
    """For each DISPATCH row of an ack or nack: ms from the grant until the message was handed to the consumer; −1 if
    that is unknown, and for all other events."""
    other = events["other_hour"].astype(np.int64)
    known = np.where((events["event"] == Event.ACKED) & (other != NONE32), other, -1)
    above = other >> REASON_BITS
    nacked = (events["event"] == Event.NACKED) & (other != NONE32) & (above > 0)
    found: I64 = np.where(nacked, above - 1, known)
    return found


#: Header of a record in `hours/<hour>.log`. The record's meta and body follow this header; then the next record begins.
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
        ("deliver_at_ms", "<i8"),  # first due time, Unix ms; a moved message's current due time is in its index entry;
        ("payload_crc", "<u4"),  # crc32c of meta and body;
        ("header_crc", "<u4"),  # masked crc32c of this header's first 44 bytes
    ]
)
RECORD_SIZE = 48
RECORD_CRC_AT = 44
RECORD_MAGIC = 0x4448  # the characters "HD", with which every record begins
RECORD_VERSION = 1

#: Entry of the file `names`, followed by the name in UTF-8, `size` bytes. `kind`: TOPIC, CONSUMER, NODE, or REASON (the
#: reason of a failed attempt).
NAME = np.dtype([("kind", "u1"), ("pad", "u1"), ("size", "<u2"), ("number", "<u4"), ("crc", "<u4")])
NAME_SIZE = 12
TOPIC, CONSUMER, NODE, REASON = 1, 2, 3, 4

#: Header of the file `hours/<hour>.heads`, a cache of data in .idx. After the header: 3600 HEAD rows, one per second,
#: and `counters` COUNTER rows.
HEADS = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "<u4"),
        ("hour", "<u4"),  # number of the hour since 1970 UTC;
        ("entries", "<u4"),  # number of index entries that the heads include;
        ("counted", "<u4"),  # number of index entries that the counters include
        ("counters", "<u4"),
        ("crc", "<u4"),  # crc32c of this header's first 24 bytes and of all rows that follow
    ]
)
HEADS_MAGIC = 0x53484448  # the characters "HDHS", with which the file begins
HEAD = np.dtype([("last", "<u4"), ("count", "<u4")])
#: Row of a .heads file: count of a topic's entries in one minute; sorted by (topic, minute), no zero counts.
COUNTER = np.dtype([("topic", "<u4"), ("minute", "<u4"), ("count", "<u4")])

#: Row of a checkpoint for one hour: lengths of the hour's files at the applied index, and CRC32C of the files up to
#: these lengths.
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
