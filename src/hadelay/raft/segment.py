"""Segment files of the Raft journal: built, appended to, read by index, recovered at the start, deleted whole.

docs/spec/raft-journal.md describes recovery ("Reading it").
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace

from hadelay.errors import WAY_OUT, DamagedFile
from hadelay.platform.disk import Disk, File
from hadelay.raft import records
from hadelay.storage.identity import Identity, refuse_strangers

SUFFIX = ".seg"
#: File names of the next segment, zeroed and waiting, and of a segment that is being written.
SPARE, NEW = "spare", "new"
#: (command, index, term, bytes of the record if in memory)
Entry = tuple[bytes, int, int, bytes | memoryview | None]
#: Minimum distance of remembered offsets, in bytes: a read by index may have to skip as much.
_PLACE_BYTES = 64 << 10


class Segment:
    """`last_index` is first_index - 1 while the segment has no entry. Positions are byte offsets in the file."""

    def __init__(self, file: File, header: records.SegmentHeader) -> None:
        self.file, self.header = file, header
        self.first_index = header.first_index
        self.last_index = header.first_index - 1
        #: Position of the next record, behind those in `pending`.
        self.position = records.SEGMENT_HEADER_BYTES
        #: Bytes in the file.
        self.written = 0
        self.pending: list[bytes | bytearray | memoryview] = [header.encode()]
        #: (first index, term) of each run of one term; (index, offset) of an entry every _PLACE_BYTES.
        self.terms: list[tuple[int, int]] = []
        self.places: list[tuple[int, int]] = []
        #: Read at the start only: the whole file, and whether bytes that are no record follow the last record.
        self.data = b""
        self.torn = False
        #: False: known to be whole and synced, and not scanned before the first read.
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
        """Write the pending records to the page cache; returns the number of bytes."""
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
        """Drop entries beyond `last_index`, which a later segment replaces."""
        self.last_index = min(self.last_index, last_index)
        self.terms = [t for t in self.terms if t[0] <= last_index]
        self.places = [p for p in self.places if p[0] <= last_index]

    def leave_unread(self, last_index: int) -> None:
        """Do not scan at the start: a later segment says that this one is whole."""
        self.pending, self.scanned, self.last_index = [], False, last_index
        self.position = self.written = self.file.size()

    def _scan_now(self) -> None:
        last_index, self.last_index, self.scanned = self.last_index, self.first_index - 1, True
        for _ in self.scan():
            pass
        self.data = b""
        if self.last_index < last_index:
            raise self._damaged(f"entry {self.last_index + 1} does not verify")
        self.cap(last_index)

    def term_at(self, index: int) -> int:
        if not self.scanned:
            self._scan_now()
        return self.terms[bisect_right(self.terms, (index, 1 << 64)) - 1][1]

    def read(self, index: int, max_bytes: int) -> list[Entry]:
        """Entries from `index` on: at least one, and more while their payloads fit into `max_bytes`."""
        if not self.scanned:
            self._scan_now()
        offset = self.places[bisect_right(self.places, (index, 1 << 64)) - 1][1]
        entries: list[Entry] = []
        room = max_bytes
        data, base = b"", offset
        # Records that are not in the file yet are in the journal's tail.
        while index <= self.last_index and (offset < self.written or not entries):
            try:
                record = records.decode_record(data, offset - base)
            except records.Torn:
                record = None
            if record is None:
                if base == offset and len(data) >= self.written - offset:
                    raise self._damaged(f"entry {index} does not verify", offset)
                # The rest of `data` is the beginning of a record: read from there, and more each time.
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

    def scan(self) -> Iterator[records.JournalRecord]:
        """All records that verify, from the front; then `position` is their end. Fills `terms` and `places`, for a file
        of an earlier process."""
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
        """After `scan`: raise DamagedFile unless the bytes after the last record were never synced.

        durable: furthest synced position that a *later* segment names; a later mark in this segment may name one, too.
        If neither shows that the bytes were synced, they must look like a write that a power cut stopped.
        """
        if not self.scanned:
            raise self._damaged("the segment after this one is missing")
        here = (self.header.seq, self.position)
        witness = max([durable, *records.marks(self.data, self.position)])
        if witness > here:
            raise self._damaged("a record that was synced does not verify")
        if self.torn and not records.is_torn(self.data, self.position):
            raise self._damaged("a whole record does not verify")


def zeroed(disk: Disk, path: str, size: int) -> File:
    file = disk.open(path, create=True)
    try:
        file.truncate(0)
        file.allocate(size)
        zeroes = bytes(1 << 20)
        for offset in range(0, size, len(zeroes)):
            file.pwrite(zeroes[: size - offset], offset)
        file.sync()
    except BaseException:
        file.close()
        raise
    return file


def delete(disk: Disk, segment: Segment) -> None:
    segment.file.close()
    if disk.exists(segment.file.path):
        disk.unlink(segment.file.path)


def build(disk: Disk, directory: str, header: records.SegmentHeader, entries: list[Entry], size: int) -> Segment:
    """A new segment; content and name are durable on return."""
    room = records.SEGMENT_HEADER_BYTES + sum(len(entry[0]) + records.RECORD_OVERHEAD for entry in entries) + size
    file = zeroed(disk, f"{directory}/{NEW}", room if entries else size)
    segment = Segment(file, header)
    for command, index, term, record in entries:
        segment.note(index, term, segment.position)
        segment.append(record or records.encode_record(records.ENTRY, index, term, command))
    segment.write()
    file.sync()
    path = f"{directory}/{header.seq:016d}{SUFFIX}"
    disk.rename(file.path, path)
    file.path = path
    disk.sync_dir(directory)
    return segment


def _superseded(found: list[Segment]) -> tuple[list[Segment], list[Segment]]:
    """(segments that count, segments replaced by a later one that begins before them). A power cut may keep any of the
    replaced files, so they are put aside before the check for gaps."""
    counting: list[Segment] = []
    dropped: list[Segment] = []
    for segment in reversed(found):
        if counting and (counting[-1].header.reset or counting[-1].first_index <= segment.first_index):
            dropped.append(segment)
        else:
            counting.append(segment)
    return counting[::-1], dropped


def end_of(disk: Disk, directory: str) -> dict[str, object]:
    """Owner and last entry of a journal, as the node itself would find them. `disk` may ignore unlinks."""
    segments, state, _ = recover(disk, directory, None)
    last = segments[-1]
    term = last.term_at(last.last_index) if last.last_index >= last.first_index else last.header.prev_term
    for segment in segments:
        segment.file.close()
    return {
        "cluster": state.cluster_id, "group": state.group, "node": state.node, "incarnation": state.incarnation,
        "admitted": state.admitted, "term": state.term, "last_term": term, "last_index": last.last_index,
    }  # fmt: skip


def _find(disk: Disk, directory: str, owner: Identity | None) -> tuple[list[Segment], int]:
    """All segments with a whole header, and the number of the last segment file."""
    found: list[Segment] = []
    number = 0
    for name in disk.listdir(directory):  # segments come first: nothing is deleted before their owner is known
        if name in (SPARE, NEW):
            disk.unlink(f"{directory}/{name}")
        if not name.endswith(SUFFIX):
            continue
        number = int(name.removesuffix(SUFFIX))
        file = disk.open(f"{directory}/{name}")
        header = records.decode_segment_header(file.pread(records.SEGMENT_HEADER_BYTES, 0), file.path)
        if header is not None:
            if owner is not None:
                refuse_strangers(directory, Identity(header.cluster_id, header.group, header.node), owner)
            found.append(Segment(file, header))
    return found, number


def recover(disk: Disk, directory: str, owner: Identity | None) -> tuple[list[Segment], records.SegmentHeader, int]:
    """(segments that count, the newest header with term, vote and `durable` brought up to date, number of the last
    segment file). ConfigError for the journal of another than `owner`; None: any owner."""
    found, number = _find(disk, directory, owner)
    if not found:
        raise DamagedFile(directory, 0, f"no segment has a whole header; {WAY_OUT}")
    found, dropped = _superseded(found)
    kept: list[Segment] = []
    state, durable = found[0].header, (0, 0)
    for at, segment in enumerate(found):
        header = segment.header
        if kept:
            if kept[-1].header.seq != header.previous or kept[-1].last_index < header.first_index - 1:
                # A segment is missing in between: damage, unless no later byte was ever synced.
                later = [s.header.durable for s in found[at:]]
                later += [(r.term, r.index) for s in found[at:] for r in s.scan() if r.kind == records.MARK]
                kept[-1].refuse_damage(max(later))
                dropped += found[at:]
                break
            kept[-1].cap(header.first_index - 1)
        state, durable = header, max(durable, header.durable)
        kept.append(segment)
        if any(s.header.durable[0] > header.seq for s in found[at + 1 :]):
            segment.leave_unread(found[at + 1].first_index - 1)
            continue
        for record in segment.scan():
            if record.kind == records.VOTE:
                state = replace(state, term=record.term, vote=record.payload.decode())
            elif record.kind == records.INSTALL:
                state = replace(state, installing=record.index)
            elif record.kind == records.ADMITTED:
                state = replace(state, admitted=True)
            elif record.kind == records.MARK:
                durable = max(durable, (record.term, record.index))
    kept[-1].refuse_damage(durable)
    for segment in kept:
        segment.data = b""
    for segment in dropped:
        delete(disk, segment)
    return kept, replace(state, durable=durable), number
