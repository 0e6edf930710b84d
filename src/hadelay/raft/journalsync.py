"""Writing and syncing of the Raft journal.

Each sync covers the records queued when it began, and then calls `when_synced` callbacks, `between_syncs` and
`on_synced`. A failed write or sync is final (`on_fatal`), without a retry: the page cache looks clean afterwards.
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

#: Limit, in bytes, of a sync on the event loop; larger syncs, and all syncs on a slow disk, run in a thread.
_BRIEF_BYTES = 64 << 10
#: Delay, in seconds, after which a MARK record notes how far the last sync reached, unless another record follows the
#: sync.
_MARK_DELAY_S = 0.05


@dataclass(frozen=True)
class JournalConfig:
    #: Size of a segment file, in bytes, at least four times the largest entry. The file is filled with zeros ahead: a
    #: sync without allocation takes half the time.
    segment_bytes: int = 16 << 20
    #: Memory limit for recent entries, in bytes: these entries need not be read from disk for followers or for apply.
    tail_bytes: int = 16 << 20


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
        #: on_synced(seconds): called after each sync and its `when_synced` callbacks.
        self.on_synced: Callable[[float], None] = lambda seconds: None
        #: Callback at the end of each sync, before `on_synced`; the next sync covers the records that the callback
        #: queues.
        self.between_syncs: Callable[[], None] = lambda: None
        #: Counts of journal records: queued since the start; durable; and queued when the last term or vote was
        #: recorded.
        self._appended = self._synced = self._voted = 0
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._dirty: list[Segment] = []
        self._garbage: list[Segment] = []
        self._names_changed = False
        self._syncing = False
        self.sync_started: float | None = None
        #: Index of the newest entry that the running sync covers; lowered if the entry is cut off during the sync.
        self._syncing_index = 0
        self._mark_timer: Handle | None = None
        #: Durable position (segment, offset) in the last MARK record, and the present durable position.
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
        """Call `fn` once all records queued so far are durable, at once if they already are."""
        if self._appended == self._synced:
            fn()
        else:
            self._waiting.append((self._appended, fn))

    def kick(self) -> None:
        """Write the queued records and start a sync. If a sync is running, the new sync starts after its end."""
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
                # Re-read `_synced`: a callback may have synced more records
                while waiting and waiting[0][0] <= self._synced:
                    waiting.popleft()[1]()
                self.between_syncs()
            # Stop the node: no caller would see the error, and a callback has ended half-way
            except Exception as raised:
                self.on_fatal(raised)
                return
            self.on_synced(self._runtime.monotonic() - started)
            if self._appended != self._synced:
                self.kick()
            elif self._mark_timer is None and not self.closed:
                self._mark_timer = self._runtime.call_later(_MARK_DELAY_S, self._leave_mark)

        self._runtime.in_thread("journal", sync, done, brief=brief)

    def _leave_mark(self) -> None:
        """Write a mark: a record that the last sync succeeded. Recovery uses it to tell damage from a torn write."""
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
        """Prepare the spare segment, zeroed and synced, in a thread. A failure is retried by the node's timer."""
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
            self._durable = (segment.header.seq, segment.written)
        self._dirty.clear()
        self._synced = self._appended
        self.synced_index = self.last_index

    def close(self) -> None:
        """Sync the queued records, and write a mark record for the next start: the sync succeeded."""
        if self.closed:
            return
        self.closed = True
        if self._mark_timer is not None:
            self._mark_timer.cancel()
        self._runtime.join("journal")  # wait for the sync: a file must not be closed during a sync of the file
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
