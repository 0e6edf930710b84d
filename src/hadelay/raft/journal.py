"""The Raft journal: log entries, current term and vote of this node, on its own disk.

Law 1: nothing is answered before it is synced. `append` and `vote` only queue; journalsync.py writes and syncs.
Law 2: files are only appended to, and deleted whole from the front. To cut the end, or to begin behind a snapshot, a
new segment names its first index, which voids later entries of earlier segments.

`term_at` also answers for `base_index`, the entry before the first one kept.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from hadelay.errors import FatalError
from hadelay.platform.disk import Disk
from hadelay.platform.runtime import Runtime
from hadelay.raft import records
from hadelay.raft.journalsync import JournalConfig as JournalConfig
from hadelay.raft.journalsync import JournalSync
from hadelay.raft.ports import FOUNDING
from hadelay.raft.segment import SUFFIX, Entry, Segment, build, delete, recover
from hadelay.storage.identity import Identity

log = logging.getLogger(__name__)

#: (index, term) of the imaginary entry before the first entry of a new journal; stands for the empty state machine.
FIRST = (1, 0)
#: Memory that Python needs for an entry in addition to its bytes, in bytes.
_ENTRY_BYTES = 220
_DEFAULTS = JournalConfig()


def _cost(entry: Entry) -> int:
    return _ENTRY_BYTES + len(entry[0]) + (0 if entry[3] is None else len(entry[3]))


class Journal(JournalSync):
    def __init__(
        self, disk: Disk, directory: str, runtime: Runtime, segments: list[Segment], number: int, config: JournalConfig
    ) -> None:
        """Used by `Journal.create` and `Journal.open` only; call those instead."""
        super().__init__(disk, directory, runtime, segments, config)
        #: Number of the newest segment file that was ever created.
        self._number = number
        #: The newest entries of the journal, up to last_index, kept in memory.
        self._tail: list[Entry] = []
        self._tail_bytes = 0
        self._look_at(segments[-1].header)

    def _look_at(self, newest: records.SegmentHeader) -> None:
        self.identity = newest
        self.term, self.voted_for = newest.term, newest.vote or None
        self.incarnation, self.installing = newest.incarnation, newest.installing
        #: Whether the log has admitted this incarnation of the node, so that it votes and counts for majorities.
        self.admitted = newest.admitted
        self._find_ends()
        self.synced_index = self.last_index

    def _find_ends(self) -> None:
        first, last = self._segments[0], self._segments[-1]
        self.base_index, self.base_term = first.first_index - 1, first.header.prev_term
        self.last_index = last.last_index
        self.last_term = last.terms[-1][1] if last.terms else last.header.prev_term

    @staticmethod
    def exists(disk: Disk, directory: str) -> bool:
        return disk.exists(directory) and any(name.endswith(SUFFIX) for name in disk.listdir(directory))

    @classmethod
    def create(
        cls, disk: Disk, directory: str, runtime: Runtime, owner: Identity, config: JournalConfig = _DEFAULTS
    ) -> Journal:
        """Create an empty journal and sync it. FatalError if the directory already holds a journal.

        owner.incarnation: FOUNDING for a member of a cluster that begins now. A node that lost its disk gets a larger
        number than it ever had (wall-clock ms), and has to be admitted.
        """
        if cls.exists(disk, directory):
            raise FatalError(f"{directory} already holds a journal: a new journal needs an empty directory")
        disk.makedirs(directory)
        (before, prev_term), founder = FIRST, owner.incarnation == FOUNDING
        header = records.SegmentHeader(
            seq=1,
            first_index=before + 1,
            prev_term=prev_term,
            term=0,
            incarnation=owner.incarnation,
            durable=(0, 0),
            installing=0,
            group=owner.group,
            cluster_id=owner.cluster_id,
            node=owner.node,
            vote="",
            admitted=founder,
        )
        segment = build(disk, directory, header, [], config.segment_bytes)
        return cls(disk, directory, runtime, [segment], 1, config)

    @classmethod
    def open(
        cls, disk: Disk, directory: str, runtime: Runtime, owner: Identity, config: JournalConfig = _DEFAULTS
    ) -> Journal:
        """Open a journal, and cut off a torn end. DamagedFile if it is damaged, ConfigError if it belongs to another
        node.

        Records that the previous process may not have synced are written into a new segment and synced here: after a
        failed sync, the page cache looks clean. Blocks: nothing else runs yet.
        """
        segments, header, number = recover(disk, directory, owner)
        journal = cls(disk, directory, runtime, segments, number, config)
        journal._look_at(header)
        journal._begin_anew(header.durable)
        return journal

    def _begin_anew(self, durable: tuple[int, int]) -> None:
        """Begin a new segment with a copy of the entries after the position `durable`, which may be unsynced."""
        first = self.last_index + 1
        for segment in reversed(self._segments):
            if (segment.header.seq, segment.position) <= durable:
                break
            synced = [index for index, offset in segment.places if (segment.header.seq, offset) < durable]
            first = synced[-1] if synced else segment.first_index
            if synced:
                break
        entries: list[Entry] = []
        while first + len(entries) <= self.last_index:
            entries += self.entries(first + len(entries), 1 << 62)
        self._adopt(first, self.term_at(first - 1), entries)

    def _header(
        self, first: int, prev_term: int, durable: tuple[int, int], *, reset: bool = False
    ) -> records.SegmentHeader:
        last = self._segments[-1].header.seq if self._segments else 0
        return replace(
            self.identity,
            seq=self._number,
            previous=last,
            first_index=first,
            prev_term=prev_term,
            term=self.term,
            vote=self.voted_for or "",
            incarnation=self.incarnation,
            installing=self.installing,
            durable=durable,
            reset=reset,
        )

    def _adopt(self, first: int, prev_term: int, entries: list[Entry], *, reset: bool = False) -> None:
        """Replace the journal's entries from index `first` on by `entries`, in a new segment; durable on return."""
        assert not self._running, "no sync runs meanwhile: files are deleted here"
        self._number += 1
        self._supersede(first, reset=reset)
        header = self._header(first, prev_term, (self._number, 0), reset=reset)
        segment = build(self._disk, self.directory, header, entries, self.config.segment_bytes)
        self._segments.append(segment)
        self.identity = header
        self._durable = self._marked = (self._number, segment.position)
        self._find_ends()
        self.synced_index = self.last_index
        for old in self._garbage:
            delete(self._disk, old)
        self._garbage.clear()

    @property
    def size_bytes(self) -> int:
        """Size of all segments, in bytes."""
        return sum(segment.position for segment in self._segments)

    @property
    def room(self) -> int:
        """Number of bytes that fit even on a full disk: the rest of the newest segment, plus the spare segment."""
        rest = self.config.segment_bytes - self._segments[-1].position
        return rest if self._spare is None else rest + self.config.segment_bytes - records.SEGMENT_HEADER_BYTES

    def term_at(self, index: int) -> int:
        """Term of the entry at `index`, which is between base_index and last_index."""
        tail = self._tail
        first = self.last_index + 1 - len(tail)
        if index >= first and tail:
            return tail[index - first][2]
        if index == self.base_index:
            return self.base_term
        return self._segment_of(index).term_at(index)

    def entries(self, index: int, max_bytes: int) -> list[Entry]:
        """Entries from `index` on: at least one, and more as long as their commands fit into `max_bytes` together."""
        tail = self._tail
        start = index - (self.last_index + 1 - len(tail))
        if start < 0:
            return self._segment_of(index).read(index, max_bytes)
        room, end = max_bytes, start
        for entry in tail[start:] if start else tail:
            room -= len(entry[0])
            if room < 0 and end > start:
                break
            end += 1
        return tail[start:end]

    def _segment_of(self, index: int) -> Segment:
        for segment in reversed(self._segments):
            if segment.first_index <= index:
                return segment
        raise FatalError(f"entry {index} was requested, but the journal begins after entry {self.base_index}")

    def append(self, command: bytes, index: int, term: int, record: bytes | memoryview | None = None) -> None:
        """Queue the next entry for writing. record: the entry's encoded bytes, if another node sent the entry."""
        assert index == self.last_index + 1, "entries are appended in order"
        encoded = None
        if record is None:
            record = encoded = records.encode_record(records.ENTRY, index, term, command)
        segment = self._segment_for(len(record))
        segment.note(index, term, segment.position)
        segment.append(record)
        self._appended += 1
        self.last_index, self.last_term = index, term
        self._tail.append((command, index, term, encoded))
        self._tail_bytes += _cost(self._tail[-1])
        if self._tail_bytes > self.config.tail_bytes:
            self._shorten_tail()

    def vote(self, term: int, voted_for: str | None) -> None:
        """Queue a record of the current term and of this node's vote in this term."""
        self.term, self.voted_for = term, voted_for
        self._append_record(records.VOTE, 0, term, (voted_for or "").encode())
        self._voted = self._appended

    def note_install(self, index: int, term: int) -> None:
        """Queue an INSTALL record, which notes that a snapshot will be installed: after a crash, the state machine may
        be ahead of this journal."""
        self.installing = index
        self._append_record(records.INSTALL, index, term, b"")

    def note_admitted(self) -> None:
        """Queue an ADMITTED record: the log has admitted this incarnation of the node, so the node may vote from now
        on. This journal has the log entry of the admission."""
        self.identity = replace(self.identity, admitted=True)  # headers of later segments contain the admission, too
        self._append_record(records.ADMITTED, 0, self.term, b"")
        self.when_synced(self._set_admitted)

    def _set_admitted(self) -> None:
        self.admitted = True

    def _append_record(self, kind: int, index: int, term: int, payload: bytes) -> None:
        record = records.encode_record(kind, index, term, payload)
        self._segment_for(len(record)).append(record)
        self._appended += 1

    def _segment_for(self, size: int) -> Segment:
        """Return the newest segment; begin a new one if the newest has no room for `size` bytes."""
        segment = self._segments[-1]
        if segment.position + size + records.RECORD_OVERHEAD > self.config.segment_bytes:
            segment = self._roll(self.last_index + 1, self.last_term)
        if not self._dirty or self._dirty[-1] is not segment:
            self._dirty.append(segment)
        if self._durable > self._marked and not segment.pending:
            self._mark(segment)
        return segment

    def _roll(self, first_index: int, prev_term: int) -> Segment:
        self._number += 1
        path = f"{self.directory}/{self._number:016d}{SUFFIX}"
        try:
            if self._spare is None:
                file = self._disk.open(path, create=True)
                file.allocate(self.config.segment_bytes)
            else:
                file, self._spare = self._spare, None
                self._disk.rename(file.path, path)
                file.path = path
        except OSError as error:
            self.on_fatal(error)
            raise
        segment = Segment(file, self._header(first_index, prev_term, self._durable))
        self._segments.append(segment)
        self._names_changed = True
        self.want_spare()
        return segment

    def truncate(self, index: int) -> None:
        """Cut off the entries from `index` on, which conflict with the leader's log. Begins a new segment, which is
        cheap as cuts are rare."""
        assert self.base_index < index <= self.last_index
        term = self.term_at(index - 1)
        drop = min(len(self._tail), self.last_index + 1 - index)
        if drop:
            self._tail_bytes -= sum(map(_cost, self._tail[-drop:]))
            del self._tail[-drop:]
        self._supersede(index)
        self.last_index, self.last_term = index - 1, term
        self.synced_index = min(self.synced_index, index - 1)
        for sync in self._running:
            sync.index = min(sync.index, index - 1)
        self._dirty.append(self._roll(index, term))
        self._appended += 1

    def _supersede(self, index: int, reset: bool = False) -> None:
        while self._segments and (reset or self._segments[-1].first_index >= index):
            self._garbage.append(self._segments.pop())
        if self._segments:
            self._segments[-1].cap(index - 1)

    def _shorten_tail(self) -> None:
        """Drop the oldest entries from memory, down to tail_bytes / 2; entries that are not on disk yet stay."""
        first, drop = self.last_index + 1 - len(self._tail), 0
        while drop < len(self._tail) and self._tail_bytes > self.config.tail_bytes // 2:
            if first + drop > self.synced_index:
                break
            self._tail_bytes -= _cost(self._tail[drop])
            drop += 1
        del self._tail[:drop]

    def compact(self, index: int, keep_bytes: int) -> None:
        """Delete whole segments of entries up to `index`; at least `keep_bytes` stay."""
        size, gone = self.size_bytes, list[Segment]()
        while len(self._segments) > 1 and self._segments[0].last_index <= index:
            (first, then), size = self._segments[:2], size - self._segments[0].position
            # Keep the segment `first` until `then` is durable: `then` may void the last entries of `first`, and a power
            # cut that removes `then` makes these entries valid again.
            needed = then.first_index > index + 1 or then.header.seq > self._durable[0]
            if size < keep_bytes or needed or self._in_use(first):
                break
            gone.append(self._segments.pop(0))
        if gone:
            first = self._segments[0]
            self.base_index, self.base_term = first.first_index - 1, first.header.prev_term
            self._runtime.in_thread("journal", lambda: self._unlink(gone), self._unlinked)

    def _unlink(self, segments: list[Segment]) -> None:
        for segment in segments:
            delete(self._disk, segment)
            # Sync each deletion: else a power cut could bring an older segment back and leave a gap.
            self._disk.sync_dir(self.directory)

    def _unlinked(self, _: object, error: BaseException | None) -> None:
        if error is not None and not self.closed:
            self.on_fatal(error)

    def reset(self, index: int, term: int) -> None:
        """Begin the journal anew after a snapshot's last entry. Blocks for a sync; no other operation may run."""
        self.installing = 0
        self._tail, self._tail_bytes = [], 0
        self._dirty.clear()
        self._adopt(index + 1, term, [], reset=True)

    def become(self, incarnation: int) -> None:
        """Continue as a new incarnation of this node, after this disk was rewound. Blocks for a sync."""
        self.incarnation, self.admitted, self.identity = incarnation, False, replace(self.identity, admitted=False)
        self._write_all()
        self._adopt(self.last_index + 1, self.last_term, [])
