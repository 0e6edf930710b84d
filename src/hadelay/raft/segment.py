"""One segment file of the Raft journal: appended to by the newest, read by index, deleted whole."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from hadelay.errors import WAY_OUT, DamagedFile
from hadelay.platform.disk import File
from hadelay.raft import records

#: (command, index, term, the record's bytes where they are at hand)
Entry = tuple[bytes, int, int, bytes | memoryview | None]
#: Distance between two places whose index is remembered: what a read by index may have to skip.
_PLACE_BYTES = 64 << 10


class Segment:
    """`last_index` is first_index - 1 while it holds no entry. Positions are byte offsets in the file."""

    def __init__(self, file: File, header: records.SegmentHeader) -> None:
        self.file, self.header = file, header
        self.first_index = header.first_index
        self.last_index = header.first_index - 1
        #: Where the next record goes, counting those in `pending`.
        self.position = records.SEGMENT_HEADER_BYTES
        #: Bytes in the file.
        self.written = 0
        self.pending: list[bytes | bytearray | memoryview] = [header.encode()]
        #: (first index, term) of each stretch of one term; (index, offset) now and then.
        self.terms: list[tuple[int, int]] = []
        self.places: list[tuple[int, int]] = []
        #: Start-up only: the whole file, and whether it ends in something that is no record.
        self.data = b""
        self.torn = False
        #: False: known to be whole and synced, and not looked into before it is read.
        self.scanned = True

    def append(self, data: bytes | memoryview) -> None:
        self.pending.append(data)
        self.position += len(data)

    def note(self, index: int, term: int, offset: int) -> None:
        """An entry begins at `offset`."""
        self.last_index = index
        if not self.terms or self.terms[-1][1] != term:
            self.terms.append((index, term))
        if not self.places or offset - self.places[-1][1] >= _PLACE_BYTES:
            self.places.append((index, offset))

    def write(self) -> int:
        """Hand what is pending to the file system, and say how many bytes that was; nothing is durable yet."""
        size = self.position - self.written
        if self.pending:
            self.file.pwritev(self.pending, self.written)
            self.pending = []
            self.written = self.position
        return size

    def _damaged(self, what: str, offset: int | None = None) -> DamagedFile:
        """DamagedFile at `offset`; default: where the records that verify end."""
        return DamagedFile(self.file.path, self.position if offset is None else offset, f"{what}; {WAY_OUT}")

    def cap(self, last_index: int) -> None:
        """Entries beyond `last_index` are void: a later segment says otherwise."""
        self.last_index = min(self.last_index, last_index)
        self.terms = [t for t in self.terms if t[0] <= last_index]
        self.places = [p for p in self.places if p[0] <= last_index]

    def leave_unread(self, last_index: int) -> None:
        """At start-up, of a segment that later ones vouch for."""
        self.pending, self.scanned, self.last_index = [], False, last_index
        self.position = self.written = self.file.size()

    def _look(self) -> None:
        last_index, self.last_index, self.scanned = self.last_index, self.first_index - 1, True
        for _ in self.scan():
            pass
        self.data = b""
        if self.last_index < last_index:
            raise self._damaged(f"entry {self.last_index + 1} does not verify")
        self.cap(last_index)

    def term_at(self, index: int) -> int:
        if not self.scanned:
            self._look()
        return self.terms[bisect_right(self.terms, (index, 1 << 64)) - 1][1]

    def read(self, index: int, max_bytes: int) -> list[Entry]:
        """Entries from `index` on: at least one, and then while their payloads fit into `max_bytes`."""
        if not self.scanned:
            self._look()
        offset = self.places[bisect_right(self.places, (index, 1 << 64)) - 1][1]
        entries: list[Entry] = []
        room = max_bytes
        data, base = b"", offset
        # What is not in the file yet is in the journal's tail.
        while index <= self.last_index and (offset < self.written or not entries):
            try:
                record = records.decode_record(data, offset - base)
            except records.Torn:
                record = None
            if record is None:
                if base == offset and len(data) >= self.written - offset:
                    raise self._damaged(f"entry {index} does not verify", offset)
                # The rest of this piece is the beginning of a record: read on from there, and further each time.
                size = len(data) * 2 if base == offset else _PLACE_BYTES
                base, data = offset, self.file.pread(max(size, _PLACE_BYTES), offset)
                continue
            offset = base + record.end
            if record.kind == records.ENTRY and record.index >= index:
                if entries and len(record.payload) > room:
                    break
                room -= len(record.payload)
                entries.append((record.payload, record.index, record.term, data[record.offset : record.end]))
                index = record.index + 1
        return entries

    def scan(self) -> Iterator[records.Record]:
        """Every record that verifies, from the front; then `position` is where they stop.

        Of what an earlier process wrote: `pending` is empty, `terms` and `places` are filled.
        """
        self.pending = []
        self.data = self.file.pread(self.file.size(), 0)
        self.written = len(self.data)
        offset = records.SEGMENT_HEADER_BYTES
        while True:
            try:
                record = records.decode_record(self.data, offset)
            except records.Torn:
                self.torn = True
                break
            if record is None:
                break
            if record.kind == records.ENTRY:
                if record.index != self.last_index + 1:
                    raise self._damaged(f"entry {record.index} follows {self.last_index}", offset)
                self.note(record.index, record.term, offset)
            yield record
            offset = record.end
        self.position = offset

    def refuse_damage(self, durable: tuple[int, int]) -> None:
        """After `scan`: raise DamagedFile unless what follows its last record was never synced.

        `durable`: the furthest synced position that any *later* segment names. A mark further on in this one may name
        one, too. Without such a witness the bytes themselves have to look like a write that a power cut stopped.
        """
        if not self.scanned:
            raise self._damaged("the segment after this one is missing")
        here = (self.header.seq, self.position)
        witness = max([durable, *records.marks(self.data, self.position)])
        if witness > here:
            raise self._damaged("a record that was synced does not verify")
        if self.torn and not records.is_torn(self.data, self.position):
            raise self._damaged("a whole record does not verify")
