"""Writing and syncing of the Raft journal.

Each sync covers the records queued when it began, and then calls `when_synced` callbacks and `on_synced`. A failed
write or sync is final (`on_fatal`), without a retry: the page cache looks clean afterwards.
"""

from __future__ import annotations

import errno
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from hadelay.platform.disk import Disk, File
from hadelay.platform.runtime import Handle, Runtime
from hadelay.raft.records import MARK, RECORD_OVERHEAD, encode_record
from hadelay.raft.segment import SPARE, Segment, delete, zeroed

log = logging.getLogger(__name__)

#: Limit of bytes of a sync on the loop itself, on a disk that is faster than a change of threads.
_BRIEF_BYTES = 64 << 10
#: Delay of the mark that records the last sync, in seconds, when no further record comes.
_MARK_DELAY_S = 0.05


@dataclass(frozen=True)
class JournalConfig:
    #: Size of a segment, pre-zeroed: a sync without allocation takes half the time. At least four times the largest
    #: entry.
    segment_bytes: int = 16 << 20
    #: Memory for recent entries, which followers and apply then need not read from disk.
    tail_bytes: int = 16 << 20


class JournalSync:
    #: Index of the newest entry in the log, and of the newest on disk.
    last_index: int
    synced_index: int

    def __init__(
        self, disk: Disk, directory: str, runtime: Runtime, segments: list[Segment], config: JournalConfig
    ) -> None:
        self.directory, self.config = directory, config
        self._disk, self._runtime = disk, runtime
        self._segments = segments
        self.on_fatal: Callable[[BaseException], None] = _raise
        #: on_synced(seconds): called after each sync and its `when_synced` callbacks.
        self.on_synced: Callable[[float], None] = lambda seconds: None
        #: Number of records queued, of records durable, and of records queued when term and vote last changed.
        self._appended = self._synced = self._voted = 0
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._dirty: list[Segment] = []
        self._garbage: list[Segment] = []
        self._names_changed = False
        self._syncing = False
        self.sync_started: float | None = None
        #: Newest entry that the running sync covers; lowered when the entry is cut off meanwhile.
        self._syncing_index = 0
        self._mark_timer: Handle | None = None
        #: Durable position recorded by the last mark, and the current one.
        self._marked = self._durable = (0, 0)
        self._spare: File | None = None
        self._spare_wanted = False
        #: False when no further segment could be reserved, because the disk is full.
        self.has_space = True
        self.closed = False

    @property
    def all_synced(self) -> bool:
        return self._appended == self._synced

    @property
    def term_is_durable(self) -> bool:
        """Whether `term` and `voted_for` are on disk. Before that, this node must not answer in this term."""
        return self._voted <= self._synced

    def when_synced(self, fn: Callable[[], None]) -> None:
        """Call `fn` once everything queued so far is durable; at once if it is."""
        if self._appended == self._synced:
            fn()
        else:
            self._waiting.append((self._appended, fn))

    def kick(self) -> None:
        """Write the queued records and start a sync. While a sync is running, the next one follows it."""
        if self._syncing or self._appended == self._synced or self.closed:
            return
        dirty, self._dirty = self._dirty, []
        dirty = [segment for segment in dirty if segment not in self._garbage]
        garbage, self._garbage = self._garbage, []
        names_changed, self._names_changed = self._names_changed, False
        try:
            written = sum([segment.write() for segment in dirty])
        except OSError as error:
            self.on_fatal(error)
            return
        if self._mark_timer is not None:
            self._mark_timer.cancel()
            self._mark_timer = None
        self._syncing = True
        self._syncing_index = self.last_index
        self.sync_started = started = self._runtime.monotonic()
        appended = self._appended
        newest = self._segments[-1]
        position = (newest.header.seq, newest.written)
        files = [segment.file for segment in dirty]
        brief = not (names_changed or garbage) and written <= _BRIEF_BYTES

        def sync() -> None:
            for file in files:
                file.sync()
            if names_changed:
                self._disk.sync_dir(self.directory)
            for segment in garbage:
                delete(self._disk, segment)

        def done(_: object, error: BaseException | None) -> None:
            if self.closed:
                return
            if error is not None:
                self.on_fatal(error)
                return
            self._syncing, self.sync_started = False, None
            self._synced, self._durable = appended, position
            self.synced_index = self._syncing_index
            waiting = self._waiting
            try:
                while waiting and waiting[0][0] <= self._synced:  # a callback may have synced more
                    waiting.popleft()[1]()
            except Exception as raised:  # no caller would see the error, and the callback's work is half done
                self.on_fatal(raised)
                return
            self.on_synced(self._runtime.monotonic() - started)
            if self._appended != self._synced:
                self.kick()
            elif self._mark_timer is None and not self.closed:
                self._mark_timer = self._runtime.call_later(_MARK_DELAY_S, self._leave_mark)

        self._runtime.in_thread("journal", sync, done, brief=brief)

    def _leave_mark(self) -> None:
        """Record that the last sync succeeded, which tells later damage from a torn write."""
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
        """Prepare the next segment, zeroed and synced. The node's timer retries."""
        if self._spare is not None or self._spare_wanted or self.closed:
            return
        self._spare_wanted = True
        path = f"{self.directory}/{SPARE}"

        def done(file: File | None, error: BaseException | None) -> None:
            self._spare_wanted = False
            self.has_space = error is None
            if isinstance(error, OSError) and error.errno == errno.EIO:
                self.on_fatal(error)  # after a failed sync, the disk may have lost earlier synced bytes, too
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
            self._durable = (segment.header.seq, segment.written)
        self._dirty.clear()
        self._synced = self._appended
        self.synced_index = self.last_index

    def close(self) -> None:
        """Sync the queued records and mark the sync, for the next start."""
        if self.closed:
            return
        self.closed = True
        if self._mark_timer is not None:
            self._mark_timer.cancel()
        self._runtime.join("journal")  # a file must not be closed during its sync
        try:
            if not self._syncing:
                self._write_all()
                newest = self._segments[-1]
                if self._durable > self._marked and newest.position + RECORD_OVERHEAD <= self.config.segment_bytes:
                    self._mark(newest)
                    newest.write()
                newest.file.sync()
        finally:
            for segment in self._segments:
                segment.file.close()
            if self._spare is not None:
                self._spare.close()


def _raise(error: BaseException) -> None:
    raise error
