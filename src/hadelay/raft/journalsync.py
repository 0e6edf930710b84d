"""Writes and syncs the Raft journal.

Each sync covers the records queued when it began. On a slow disk, syncs of the newest segment overlap (ADR 260): a sync
then counts when it and all syncs that began before it have succeeded. A sync that changes file names or deletes files,
or that a `when_synced` callback waits for, runs alone. A failed write or sync is final (`on_fatal`), without a retry:
the page cache looks clean afterwards.
"""

from __future__ import annotations

import errno
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from hadelay.platform.disk import Disk, File
from hadelay.platform.runtime import Handle, Runtime
from hadelay.raft.records import MARK, RECORD_OVERHEAD, encode_record
from hadelay.raft.segment import SPARE, Segment, delete, zeroed

log = logging.getLogger(__name__)

#: Limit, in bytes, of a sync on the event loop; larger syncs, and all syncs on a slow disk, run in a thread.
_BRIEF_BYTES = 64 << 10
#: Delay, in seconds, between a sync and the MARK record that notes how far the sync reached. If another record is
#: written after the sync, no MARK is needed.
_MARK_DELAY_S = 0.05
#: Limit of syncs that run at the same time; further records wait until a sync has ended.
_MAX_SYNCS = 3
#: Syncs overlap while the last one took at least this number of seconds. On a faster disk, more syncs of fewer records
#: each would only cost processor time.
_SLOW_S = 0.002
_LANES = ("journal", "journal-2", "journal-3")


@dataclass(frozen=True)
class JournalConfig:
    #: Size of a segment file, in bytes; at least four times the largest entry. Files are filled with zeros in advance,
    #: because a sync that allocates nothing takes half the time.
    segment_bytes: int = 16 << 20
    #: Memory limit for recent entries, in bytes: these entries need not be read from disk for followers or for apply.
    tail_bytes: int = 16 << 20


@dataclass(eq=False, slots=True)
class _Sync:
    """A running sync, and the positions that are durable once this sync and all earlier ones have ended: the number of
    records since the start, the index of the newest entry (lowered if that entry is truncated), and the end of each
    segment in bytes."""

    lane: int
    started: float
    records: int
    index: int
    ends: list[tuple[Segment, int]]
    alone: bool
    #: Whether the sync's records are in the page cache; set by the sync's thread.
    written: bool = False
    ended: bool = False


class JournalSync:
    #: Indexes of the newest entry in the log, and of the newest entry on disk.
    last_index: int
    synced_index: int

    def __init__(
        self, disk: Disk, directory: str, runtime: Runtime, segments: list[Segment], config: JournalConfig
    ) -> None:
        self.directory, self.config = directory, config
        self._disk, self._runtime = disk, runtime
        self._segments = segments
        self.on_fatal: Callable[[BaseException], None] = _raise
        #: Callback on_synced(seconds since the sync began), called when a sync counts: the sync and all earlier ones
        #: have ended. `when_synced` callbacks are called before.
        self.on_synced: Callable[[float], None] = lambda seconds: None
        #: Callback, called before each call of `on_synced`. If the callback queues records, the next sync covers them.
        self.between_syncs: Callable[[], None] = lambda: None
        #: Numbers of journal records since the start: queued; durable; and queued up to the last record of a term or
        #: vote, which has to be durable before this node answers.
        self._appended = self._synced = self._voted = 0
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._dirty: list[Segment] = []
        self._garbage: list[Segment] = []
        self._names_changed = False
        #: The syncs that run, in the order of their begin.
        self._running: deque[_Sync] = deque()
        self._mark_timer: Handle | None = None
        #: Durable position (segment, offset) in the last MARK record, and the present durable position.
        self._marked = self._durable = (0, 0)
        self._spare: File | None = None
        self._spare_wanted = False
        #: False when no further segment could be reserved, because the disk is full.
        self.has_space = True
        self.closed = False

    @property
    def sync_started(self) -> float | None:
        """Monotonic time at which the oldest running sync began; None if none runs."""
        return self._running[0].started if self._running else None

    @property
    def slow(self) -> bool:
        """Whether the disk is slow, judged by the last sync. On a slow disk, syncs overlap."""
        return self._runtime.last_s(_LANES[0]) >= _SLOW_S

    @property
    def all_synced(self) -> bool:
        return self._appended == self._synced

    @property
    def term_is_durable(self) -> bool:
        """Whether `term` and `voted_for` are on disk. Until they are, this node must not answer in this term."""
        return self._voted <= self._synced

    def when_synced(self, fn: Callable[[], None]) -> None:
        """Call `fn` once all records queued so far are durable and no sync runs, at once if that is so already."""
        if self._appended == self._synced:
            fn()
        else:
            self._waiting.append((self._appended, fn))

    def kick(self) -> None:
        """Write the queued records and start a sync. If the sync may not overlap others, it starts after the running
        ones."""
        begun = self._running[-1].records if self._running else self._synced
        if begun == self._appended or self.closed or (self._running and not self._may_overlap()):
            return
        lane = 0
        if self._running:
            lane = min({0, 1, 2} - {sync.lane for sync in self._running})
            try:
                self._segments[-1].handle(self._disk, lane)
            except OSError:
                return  # no further file can be opened: this sync begins after the running ones
        dirty, self._dirty = self._dirty, []
        garbage, self._garbage = self._garbage, []
        names_changed, self._names_changed = self._names_changed, False
        if self._mark_timer is not None:
            self._mark_timer.cancel()
            self._mark_timer = None
        alone = names_changed or bool(garbage) or len(dirty) != 1
        sync = _Sync(lane, self._runtime.monotonic(), self._appended, self.last_index, [], alone)
        writes = []
        size = 0
        for segment in dirty:
            if segment not in garbage:
                sync.ends.append((segment, segment.position))
                size += segment.position - segment.pending_at
                writes.append((segment.handle(self._disk, lane), *segment.take()))
        self._running.append(sync)

        def work() -> None:
            for file, parts, offset in writes:
                if parts:
                    file.pwritev(parts, offset)
                sync.written = True
                file.sync()
            if names_changed:
                self._disk.sync_dir(self.directory)
            for segment in garbage:
                delete(self._disk, segment)

        self._runtime.in_thread(
            _LANES[lane], work, partial(self._ended, sync), brief=not alone and size <= _BRIEF_BYTES
        )

    def _may_overlap(self) -> bool:
        """Whether the queued records may be synced while other syncs run. This needs a slow disk; no caller that waits
        for a moment without syncs; running syncs of the newest segment only, so that no name changes; and all records
        before written, so that a killed process leaves no gap."""
        newest, room = self._segments[-1], len(self._running) < _MAX_SYNCS
        other = any(sync.alone or not sync.written or sync.ends[0][0] is not newest for sync in self._running)
        return self.slow and room and not (self._waiting or other)

    def _ended(self, sync: _Sync, _: object, error: BaseException | None) -> None:
        if self.closed:
            return
        if error is not None:
            self.on_fatal(error)
            return
        sync.ended = True
        try:
            while self._running and self._running[0].ended and not self.closed:
                self._count(self._running.popleft())
        # Stop the node: no caller would get the error, and a callback has ended half-way
        except Exception as raised:
            self.on_fatal(raised)
            return
        if self._appended != self._synced:
            self.kick()
        elif self._mark_timer is None and not self.closed:
            self._mark_timer = self._runtime.call_later(_MARK_DELAY_S, self._leave_mark)

    def _count(self, sync: _Sync) -> None:
        for segment, end in sync.ends:
            segment.written = end
            self._durable = (segment.header.seq, end)
        self._synced, self.synced_index = sync.records, sync.index
        waiting = self._waiting
        # Re-read `_synced`: a callback may have synced more records
        while waiting and waiting[0][0] <= self._synced:
            waiting.popleft()[1]()
        self.between_syncs()
        self.on_synced(self._runtime.monotonic() - sync.started)

    def _in_use(self, segment: Segment) -> bool:
        """Whether records of the segment wait for a sync that has begun or will begin."""
        return segment in self._dirty or any(segment is one for sync in self._running for one, _ in sync.ends)

    def _leave_mark(self) -> None:
        """Write a MARK record, which says how far the last sync reached. Recovery uses marks to tell damage from a torn
        write."""
        self._mark_timer = None
        if self._appended != self._synced or self._durable <= self._marked or self.closed:
            return
        segment = self._segments[-1]
        if segment.position + RECORD_OVERHEAD <= self.config.segment_bytes:
            self._mark(segment)
            try:
                segment.write()
            except OSError as error:
                self.on_fatal(error)

    def _mark(self, segment: Segment) -> None:
        number, offset = self._marked = self._durable
        segment.append(encode_record(MARK, offset, number, b""))

    def want_spare(self) -> None:
        """Prepare the spare segment, filled with zeros and synced, in a thread. If that fails, the node's timer retries
        it."""
        if self._spare is not None or self._spare_wanted or self.closed:
            return
        self._spare_wanted = True
        path = f"{self.directory}/{SPARE}"

        def done(file: File | None, error: BaseException | None) -> None:
            self._spare_wanted = False
            self.has_space = error is None
            if isinstance(error, OSError) and error.errno == errno.EIO:
                self.on_fatal(error)  # stop the node: a failed sync may also have lost bytes synced earlier
            elif error is not None:
                log.warning("journal_no_space", extra={"directory": self.directory, "error": str(error)})
            elif self.closed and file is not None:
                file.close()
            else:
                self._spare = file

        self._runtime.in_thread("journal-spare", lambda: zeroed(self._disk, path, self.config.segment_bytes), done)

    def _write_all(self) -> None:
        for segment in self._dirty:
            segment.write()
            segment.file.sync()
        if self._dirty:
            self._disk.sync_dir(self.directory)  # make the names of new segments durable
            self._durable = (self._dirty[-1].header.seq, self._dirty[-1].written)
        self._dirty.clear()
        self._synced = self._appended
        self.synced_index = self.last_index

    def close(self) -> None:
        """Sync the queued records, and write a MARK record: the next start then knows that the sync succeeded."""
        if self.closed:
            return
        self.closed = True
        if self._mark_timer is not None:
            self._mark_timer.cancel()
        for lane in _LANES:  # wait for running syncs: no file may be closed during a sync of it
            self._runtime.join(lane)
        try:
            if not self._running:
                self._write_all()
                newest = self._segments[-1]
                if self._durable > self._marked and newest.position + RECORD_OVERHEAD <= self.config.segment_bytes:
                    self._mark(newest)
                    newest.write()
                newest.file.sync()
        finally:
            for segment in self._segments:
                segment.close()
            if self._spare is not None:
                self._spare.close()


def _raise(error: BaseException) -> None:
    raise error
