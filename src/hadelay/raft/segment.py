"""Segment files of the Raft journal: created, appended to, read by index, recovered at the node's start, deleted as a
whole.

docs/spec/raft-journal.md describes recovery ("Reading it").
"""

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from hadelay.errors import WAY_OUT, DamagedFile
from hadelay.platform.disk import Disk, File
from hadelay.raft import records
from hadelay.storage.identity import Identity, refuse_strangers

SUFFIX = ".seg"
#: Names of two files: the spare segment (the next segment, filled with zeros), and a segment that is being created.
SPARE, NEW = "spare", "new"
#: Journal entry: (command, index, term, bytes of the record, or None if these are not in memory).
Entry = tuple[bytes, int, int, bytes | memoryview | None]
#: Distance, in bytes, between entries whose file offset is kept in memory: limit of the bytes that a read has to skip.
_PLACE_BYTES = 64 << 10


class Segment:
    """A segment file of the journal. `last_index` is first_index - 1 while the segment has no entry. Positions are byte
    offsets in the file."""

    def __init__(self, file: File, header: records.SegmentHeader) -> None:
        self.file, self.header = file, header
        self.first_index = header.first_index
        self.last_index = header.first_index - 1
        #: File offset of the next record: after the records in the file and those in `pending`.
        self.position = records.SEGMENT_HEADER_BYTES
        #: Number of bytes that are certainly in the file, so that it can be read up to there.
        self.written = 0
        #: Records to be written next, and their file offset.
        self.pending: list[bytes | bytearray | memoryview] = [header.encode()]
        self.pending_at = 0
        #: Further open files of this segment, for syncs that overlap: of two syncs of one open file, only one would
        #: report a failure of the disk.
        self._handles: dict[int, File] = {}
        #: Terms of the entries: (index, term) of each entry with which another term begins.
        self.terms: list[tuple[int, int]] = []
        #: File offsets of some entries, as (index, offset); a read begins at the nearest one before its entry.
        self.places: list[tuple[int, int]] = []
        #: Bytes of the file, as `scan` read them at the node's start.
        self.data = b""
        #: Result of `scan`: whether the bytes after the last intact record are damaged or a torn write.
        self.torn = False
        #: Whether the records of the file were read. If not, they are known to be synced, and the first read scans
        #: them.
        self.scanned = True

    def append(self, data: bytes | memoryview) -> None:
        self.pending.append(data)
        self.position += len(data)

    def note(self, index: int, term: int, offset: int) -> None:
        self.last_index = index
        if not self.terms or self.terms[-1][1] != term:
            self.terms.append((index, term))
        if not self.places or offset - self.places[-1][1] >= _PLACE_BYTES:
            self.places.append((index, offset))

    def take(self) -> tuple[list[bytes | bytearray | memoryview], int]:
        """Return the pending records, to be written now, and their file offset."""
        parts, offset = self.pending, self.pending_at
        self.pending, self.pending_at = [], self.position
        return parts, offset

    def write(self) -> None:
        """Write the pending records to the page cache."""
        parts, offset = self.take()
        if parts:
            self.file.pwritev(parts, offset)
            self.written = self.position

    def handle(self, disk: Disk, number: int) -> File:
        """Open file number `number` of the segment. Number 0 is open always; further ones are opened at the first
        call."""
        if number and number not in self._handles:
            self._handles[number] = disk.open(self.file.path)
        return self._handles[number] if number else self.file

    def close(self) -> None:
        for file in (self.file, *self._handles.values()):
            file.close()

    def _damaged(self, what: str, offset: int | None = None) -> DamagedFile:
        """Make a DamagedFile error for the file offset `offset`; by default, for the end of the records that verify."""
        return DamagedFile(self.file.path, self.position if offset is None else offset, f"{what}; {WAY_OUT}")

    def cap(self, last_index: int) -> None:
        """Drop entries beyond `last_index`, because a later segment replaces them."""
        self.last_index = min(self.last_index, last_index)
        self.terms = [t for t in self.terms if t[0] <= last_index]
        self.places = [p for p in self.places if p[0] <= last_index]

    def leave_unread(self, last_index: int) -> None:
        """Do not scan the segment at the start: a later segment shows that it is whole and ends with `last_index`."""
        self.pending, self.scanned, self.last_index = [], False, last_index
        self.position = self.written = self.pending_at = self.file.size()

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
        """Entries from `index` on: at least one, and more as long as their payloads fit into `max_bytes` together."""
        if not self.scanned:
            self._scan_now()
        offset = self.places[bisect_right(self.places, (index, 1 << 64)) - 1][1]
        entries: list[Entry] = []
        room = max_bytes
        data, base = b"", offset
        # Read only from the file: records that are not written yet are in the journal's memory.
        while index <= self.last_index and (offset < self.written or not entries):
            try:
                record = records.decode_record(data, offset - base)
            except records.Torn:
                record = None
            if record is None:
                if base == offset and len(data) >= self.written - offset:
                    raise self._damaged(f"entry {index} does not verify", offset)
                # `data` ends within a record: read again, from the beginning of that record, and twice as many bytes
                # each time.
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
        """Yield all intact records from the first one on, up to the first that is not intact; afterwards `position` is
        the end of the last record. Fills `terms` and `places` for a file of an earlier process."""
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
                    raise self._damaged(f"entry {record.index} follows {self.last_index}: not consecutive", offset)
                self.note(record.index, record.term, offset)
            yield record
            offset = record.end
        self.position = offset

    def refuse_damage(self, durable: tuple[int, int]) -> None:
        """After `scan`: raise DamagedFile unless the bytes after the last record were never synced.

        durable: furthest synced position that a *later* segment names; a later mark in this segment may name one, too.
        If neither shows that the bytes were synced, they must look like a write that a power cut stopped.
        """
        here = (self.header.seq, self.position)
        witness = max([durable, *records.marks(self.data, self.position)])
        if witness[0] > self.header.seq:
            raise self._damaged("the segment after this one is missing")
        if witness > here:
            raise self._damaged("a record that was synced does not verify")
        if self.torn and not records.is_torn(self.data, self.position):
            raise self._damaged("a record does not verify, although its write was not cut off")


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
        with suppress(OSError):
            file.truncate(0)  # free the allocated part: the disk may be full, and other files need the space
        file.close()
        raise
    return file


def delete(disk: Disk, segment: Segment) -> None:
    segment.close()
    if disk.exists(segment.file.path):
        disk.unlink(segment.file.path)


def build(disk: Disk, directory: str, header: records.SegmentHeader, entries: list[Entry], size: int) -> Segment:
    """Create a segment file with these entries; its content and name are durable on return."""
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
    """Split segments into (valid, replaced). A later segment replaces all segments whose first entry it contains or
    precedes. A power cut may keep any of the replaced files, so they are set aside before the check for gaps."""
    counting: list[Segment] = []
    dropped: list[Segment] = []
    for segment in reversed(found):
        later = counting[-1] if counting else None
        # If `later` names no previous segment, all segments before it are left over from a compaction
        alone = later is not None and (later.header.reset or not later.header.previous)
        if later is not None and (alone or later.first_index <= segment.first_index):
            dropped.append(segment)
        else:
            counting.append(segment)
    return counting[::-1], dropped


def end_of(disk: Disk, directory: str) -> dict[str, object]:
    """Find the node that owns a journal, and the journal's last entry. The journal is recovered as at the start of a
    node; to change nothing, pass a `disk` that ignores deletions."""
    segments, state, _ = recover(disk, directory, None)
    last = segments[-1]
    term = last.term_at(last.last_index) if last.last_index >= last.first_index else last.header.prev_term
    for segment in segments:
        segment.close()
    return {
        "cluster": state.cluster_id, "group": state.group, "node": state.node, "incarnation": state.incarnation,
        "admitted": state.admitted, "term": state.term, "last_term": term, "last_index": last.last_index,
    }  # fmt: skip


def _find(disk: Disk, directory: str, owner: Identity | None) -> tuple[list[Segment], list[str], int]:
    """Find all segments with a whole header; returns these segments, the paths of segment files of zeroes only, and the
    number in the last segment file's name."""
    found: list[Segment] = []
    blank: list[str] = []
    number = 0
    # Names of segment files sort before those of spare files, so the owner is checked before anything is deleted
    for name in disk.listdir(directory):
        if name in (SPARE, NEW):
            disk.unlink(f"{directory}/{name}")
        if not name.endswith(SUFFIX):
            continue
        number = int(name.removesuffix(SUFFIX))
        file = disk.open(f"{directory}/{name}")
        header = records.decode_segment_header(file.pread(records.SEGMENT_HEADER_BYTES, 0), file.path)
        if header is None:
            if not file.pread(file.size(), 0).strip(b"\0"):
                blank.append(file.path)
            file.close()
            continue
        if owner is not None:
            refuse_strangers(directory, Identity(header.cluster_id, header.group, header.node), owner)
        found.append(Segment(file, header))
    return found, blank, number


def _read(found: list[Segment]) -> tuple[list[Segment], records.SegmentHeader]:
    """Read segments, up to the first that does not continue the segment before it. Returns (segments before that one,
    newest header, with the current term, vote and `durable`)."""
    kept: list[Segment] = []
    state, durable = found[0].header, (0, 0)
    for at, segment in enumerate(found):
        header = segment.header
        if kept:
            if kept[-1].header.seq != header.previous or kept[-1].last_index < header.first_index - 1:
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
    return kept, replace(state, durable=durable)


def recover(disk: Disk, directory: str, owner: Identity | None) -> tuple[list[Segment], records.SegmentHeader, int]:
    """Recover a journal's segments. Returns (valid segments, newest header with current term, vote and `durable`,
    number of the last segment file). ConfigError if another node than `owner` owns the journal; None: any owner."""
    whole, blank, number = _find(disk, directory, owner)
    if not whole:
        raise DamagedFile(directory, 0, f"no segment has a whole header; {WAY_OUT}")
    absent: list[Segment] = []
    durable = (0, 0)
    while True:
        found, dropped = _superseded([Segment(segment.file, segment.header) for segment in whole])
        kept, state = _read(found)
        durable = max(durable, state.durable)
        behind = found[len(kept) :]
        if not behind:
            break
        # A segment is missing. That is damage if any byte of the later segments was ever synced. Otherwise the later
        # segments count as absent, and the segments that they replaced count again.
        marks = [(r.term, r.index) for s in behind for r in s.scan() if r.kind == records.MARK]
        durable = max([durable, *(s.header.durable for s in behind), *marks])
        absent += behind
        gone = {segment.header.seq for segment in behind}
        whole = [segment for segment in whole if segment.header.seq not in gone]
    kept[-1].refuse_damage(durable)
    for segment in kept:
        segment.data = b""
    for segment in dropped + absent:
        delete(disk, segment)
    for path in blank:  # the segment was begun, but its process ended before anything was written to it
        disk.unlink(path)
    return kept, replace(state, durable=durable), number
