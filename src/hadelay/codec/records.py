"""Records of the delay log (.log files): header, meta, body."""

import struct
from typing import Any, NamedTuple

from hadelay.codec.checksums import crc32c, masked
from hadelay.codec.formats import RECORD_CRC_AT, RECORD_MAGIC, RECORD_SIZE, RECORD_VERSION

_HEADER = struct.Struct("<HBBIIIQqqII")


class Record(NamedTuple):
    """Record of a delay log: the header's fields in the order of formats.RECORD, then meta and body."""

    magic: int
    version: int
    flags: int
    meta_size: int
    body_size: int
    topic: int
    first_id: int
    published_at_ms: int
    deliver_at_ms: int
    payload_crc: int
    header_crc: int
    meta: bytes
    body: bytes

    @property
    def size(self) -> int:
        return RECORD_SIZE + self.meta_size + self.body_size


def decode_record(data: bytes) -> Record:
    """Decode the record at the start of `data`. Its header must have been checked (`check_record`)."""
    header: tuple[Any, ...] = _HEADER.unpack_from(data)
    body_at = RECORD_SIZE + header[3]
    return Record._make((*header, data[RECORD_SIZE:body_at], data[body_at : body_at + header[4]]))


def check_header(data: bytes) -> str | None:
    """Describe what is wrong with the header of a record; None if the header is valid."""
    if len(data) < RECORD_SIZE:
        return "the record's header is cut off"
    return _header_problem(data, _HEADER.unpack_from(data))


def _header_problem(data: bytes, header: tuple[Any, ...]) -> str | None:
    if masked(crc32c(data[:RECORD_CRC_AT])) != header[-1] or header[0] != RECORD_MAGIC:
        return "the record's header CRC is wrong"
    return f"the record has version {header[1]}, newer than this program" if header[1] > RECORD_VERSION else None


def check_record(data: bytes, size: int | None = None) -> str | None:
    """Describe what is wrong with the record at the start of `data`; None for a valid one. size: its size in bytes."""
    if len(data) < RECORD_SIZE:
        return "the record's header is cut off"
    header = _HEADER.unpack_from(data)
    if what := _header_problem(data, header):
        return what
    whole = RECORD_SIZE + header[3] + header[4]
    if len(data) < whole or (size is not None and size != whole):
        return "the record is cut off"
    return None if crc32c(data[RECORD_SIZE:whole]) == header[9] else "the record's payload CRC is wrong"
