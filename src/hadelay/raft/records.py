"""Bytes of a Raft journal segment (docs/spec/raft-journal.md): header, records, and the test for a torn write.

A segment is a file of zeroes, filled from the front: a header of 512 bytes, then records. A record has a header of 32
bytes, its payload, and one byte END, which is never zero: a write that stopped half-way leaves zeroes where END should
be. The same record bytes travel on the node link, so an entry is encoded once, by the leader.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from google_crc32c import value as crc32c

from hadelay.errors import WAY_OUT, DamagedFile

MAGIC = b"HDLRAFT\0"
VERSION = 1
SEGMENT_HEADER_BYTES = 512
#: Record header: length, payload crc, index, term, kind. The crc of these 28 bytes follows.
_HEAD = struct.Struct("<IIQQI")
_CRC = struct.Struct("<I")
_RECORD = struct.Struct("<IIQQII")
RECORD_HEADER_BYTES = _RECORD.size
END = b"\xe5"
#: Size of a record without its payload, in bytes.
RECORD_OVERHEAD = RECORD_HEADER_BYTES + len(END)
SECTOR = 512

ENTRY = int.from_bytes(b"ENTR", "little")
#: Record kind VOTE: `term` is the current term; the payload is this node's vote, empty for none; `index` is 0.
VOTE = int.from_bytes(b"VOTE", "little")
#: Record kind MARK: all bytes before offset `index` of segment number `term` are synced. No payload.
MARK = int.from_bytes(b"MARK", "little")
#: Record kind INSTALL: a snapshot of (`index`, `term`) is about to replace the state machine's files. No payload.
INSTALL = int.from_bytes(b"INST", "little")
#: Record kind ADMITTED: the log has admitted this incarnation of the node, so the node may vote. The journal has the
#: log entry of the admission. No payload.
ADMITTED = int.from_bytes(b"ADMT", "little")
_KINDS = frozenset((ENTRY, VOTE, MARK, INSTALL, ADMITTED))

#: Start of a segment header: magic, version, feature level, flags. The fields of SegmentHeader follow.
_SEGMENT = struct.Struct("<8sHHIQQQQQQQQI64s64s64sQ")
_RESET, _ADMITTED = 1, 2


class JournalRecord(NamedTuple):
    kind: int
    index: int  # type: ignore[assignment]  # tuple has a method of that name
    term: int
    payload: bytes
    offset: int
    #: Offset of the record's end, at which the next record begins.
    end: int


@dataclass(frozen=True)
class SegmentHeader:
    """Header of a journal segment. The fields are in the order of the bytes, except the flags."""

    #: Number of the segment; index of its first entry; term of the entry before its first entry.
    seq: int
    first_index: int
    prev_term: int
    #: Current term when the segment was begun.
    term: int
    incarnation: int
    #: Durable position (segment, offset): all bytes before it were synced when this segment was begun.
    durable: tuple[int, int]
    #: Index of the snapshot that was being installed when this segment was begun; 0: none.
    installing: int
    group: int
    cluster_id: str
    node: str
    #: Vote in the current term when the segment was begun; "" for none.
    vote: str
    #: Number of the segment that ends with the entry before `first_index`; 0 if there is none.
    previous: int = 0
    #: Whether earlier segments are void, because a snapshot replaced them.
    reset: bool = False
    admitted: bool = False
    feature: int = 1

    def encode(self) -> bytes:
        head = (MAGIC, VERSION, self.feature, _RESET * self.reset | _ADMITTED * self.admitted)
        numbers = (self.seq, self.first_index, self.prev_term, self.term, self.incarnation, *self.durable)
        texts = [text.encode() for text in (self.cluster_id, self.node, self.vote)]
        body = _SEGMENT.pack(*head, *numbers, self.installing, self.group, *texts, self.previous)
        body = body.ljust(SEGMENT_HEADER_BYTES - 5, b"\0")
        return body + _CRC.pack(crc32c(body)) + END


def decode_segment_header(data: bytes, path: str) -> SegmentHeader | None:
    """Decode a segment header. None if the header was not written completely: the file then has no records."""
    data = data[:SEGMENT_HEADER_BYTES].ljust(SEGMENT_HEADER_BYTES, b"\0")
    body = data[: SEGMENT_HEADER_BYTES - 5]
    if data[-1:] != END or crc32c(body) != _CRC.unpack_from(data, len(body))[0]:
        if data[-1] == 0:
            return None
        raise DamagedFile(path, 0, f"the segment header does not verify; {WAY_OUT}")
    magic, version, feature, flags, *numbers = _SEGMENT.unpack_from(body)
    if magic != MAGIC or version != VERSION:
        raise DamagedFile(path, 0, f"the journal has format {version}; this hadelay reads only format {VERSION}")
    *first, segment, offset, installing, group, cluster_id, node, vote, previous = numbers
    texts = (text.rstrip(b"\0").decode() for text in (cluster_id, node, vote))
    values: list[Any] = [*first, (segment, offset), installing, group, *texts, previous]
    values += [bool(flags & _RESET), bool(flags & _ADMITTED), feature]
    return SegmentHeader(*values)


def encode_record(kind: int, index: int, term: int, payload: bytes) -> bytes:
    head = _HEAD.pack(len(payload), crc32c(payload), index, term, kind)
    return b"".join((head, _CRC.pack(crc32c(head)), payload, END))


class Torn(Exception):
    """Error: the bytes at an offset are no whole record, because of a torn write or of damage (see `is_torn`)."""


def decode_record(data: bytes, offset: int) -> JournalRecord | None:
    """Decode the record at `offset`. None if no record was written there (zeros, or the end of `data`); Torn if the
    record is damaged."""
    header = data[offset : offset + RECORD_HEADER_BYTES]
    if len(header) < RECORD_HEADER_BYTES:
        if any(header):
            raise Torn
        return None
    length, payload_crc, index, term, kind, header_crc = _RECORD.unpack(header)
    if header_crc != crc32c(header[:28]) or kind not in _KINDS:
        if any(header):
            raise Torn
        return None
    end = offset + RECORD_OVERHEAD + length
    payload = data[offset + RECORD_HEADER_BYTES : end - 1]
    if data[end - 1 : end] != END or crc32c(payload) != payload_crc:
        raise Torn
    return JournalRecord(kind, index, term, payload, offset, end)


def decode_entries(data: bytes, offset: int) -> Iterator[tuple[bytes, int, int, memoryview]]:
    """Yield (command, index, term, record) for each entry in an APPEND frame. ValueError if an entry is damaged."""
    view, size = memoryview(data), len(data)
    unpack, overhead = _RECORD.unpack, RECORD_OVERHEAD
    while offset < size:
        header = data[offset : offset + 32]
        if len(header) < 32:
            raise ValueError("the frame ends within a record")
        length, payload_crc, index, term, kind, header_crc = unpack(header)
        end = offset + overhead + length
        command = data[offset + 32 : end - 1]
        if header_crc != crc32c(header[:28]) or kind != ENTRY or payload_crc != crc32c(command) or end > size:
            raise ValueError("a record is damaged")
        yield command, index, term, view[offset:end]
        offset = end


def marks(data: bytes, offset: int) -> Iterator[tuple[int, int]]:
    """Find all intact MARK records at or after `offset`, even between damaged bytes; yields the durable position
    (segment, offset) that each mark notes."""
    at = data.find(b"MARK", offset + 24)
    while at >= 0:
        try:
            record = decode_record(data, at - 24)
            if record is not None and record.kind == MARK:
                yield record.term, record.index
        except Torn:
            pass
        at = data.find(b"MARK", at + 1)


def is_torn(data: bytes, offset: int) -> bool:
    """Whether the bytes at `offset`, which are no intact record, look like a write that was cut off by a power cut.
    Such a write leaves zeroes: at the record's end, or in a whole sector within it. Other bytes are damage."""
    end = offset + RECORD_HEADER_BYTES
    header = data[offset:end]
    if len(header) == RECORD_HEADER_BYTES and _CRC.unpack_from(header, 28)[0] == crc32c(header[:28]):
        end += _RECORD.unpack(header)[0] + len(END)
        if data[end - 1 : end] in (b"", b"\0"):
            return True
    elif not data[end:].strip(b"\0"):
        return True
    sector = offset - offset % SECTOR
    while sector < end:
        if not any(data[max(sector, offset) : min(sector + SECTOR, end)]):
            return True
        sector += SECTOR
    return False
