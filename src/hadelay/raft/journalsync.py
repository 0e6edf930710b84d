"""Making the Raft journal durable: write what is queued, sync it, and say so.

Each sync covers all that was queued when it began; `when_synced` and `on_synced` say when. A failed write or sync is
final: `on_fatal`, and never a second try (the page cache looks clean afterwards).
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

#: A sync of no more than this may run on the loop, on a disk that is quicker than a change of threads.
_BRIEF_BYTES = 64 << 10
#: How long after the last sync a mark is left that says so, once nothing else comes.
_MARK_DELAY_S = 0.05


@dataclass(frozen=True)
class JournalConfig:
    #: Pre-zeroed: a sync that does not have to allocate takes half the time. At least four times the largest entry.
    segment_bytes: int = 16 << 20
    #: Recent entries kept in memory, so that followers and apply need no disk: all that they take, and those that a
    #: leader made have their records, too.
    tail_bytes: int = 16 << 20


class JournalSync:
    #: The newest entry in the log, and the newest on disk.
    last_index: int
    synced_index: int

    def __init__(
        self, disk: Disk, directory: str, runtime: Runtime, segments: list[Segment], config: JournalConfig
    ) -> None:
        self.directory, self.config = directory, config
        self._disk, self._runtime = disk, runtime
        self._segments = segments
        self.on_fatal: Callable[[BaseException], None] = _raise
        #: Called after each sync, when what waited for it has been called.
        self.on_synced: Callable[[float], None] = lambda seconds: None
        #: Records queued, records durable, and how many were queued when term and vote last changed.
        self._appended = self._synced = self._voted = 0
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._dirty: list[Segment] = []
        self._garbage: list[Segment] = []
        self._names_changed = False
        self._syncing = False
        self.sync_started: float | None = None
        #: The newest entry that the running sync covers; lowered when it is cut off meanwhile.
        self._syncing_index = 0
        self._mark_timer: Handle | None = None
        #: Position up to which a mark says that all is durable, and up to which all is.
        self._marked = self._durable = (0, 0)
        self._spare: File | None = None
        self._spare_wanted = False
        #: False while no further segment could be reserved: the disk is full.
        self.has_space = True
        self.closed = False

    @property
    def all_synced(self) -> bool:
        return self._appended == self._synced

    @property
    def term_is_durable(self) -> bool:
        """Whether this disk has `term` and `voted_for`: before that, nothing may be answered in it."""
        return self._voted <= self._synced

    def when_synced(self, fn: Callable[[], None]) -> None:
        """Call `fn` when everything queued so far is durable: now, if it is."""
        if self._appended == self._synced:
            fn()
        else:
            self._waiting.append((self._appended, fn))

    def kick(self) -> None:
        """Write what is queued and start a sync, unless one is running: then it follows that one."""
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
                while waiting and waiting[0][0] <= self._synced:  # one of them may have synced more
                    waiting.popleft()[1]()
            except Exception as raised:  # nobody else hears of it, and what it was about is half done
                self.on_fatal(raised)
                return
            self.on_synced(self._runtime.monotonic() - started)
            if self._appended != self._synced:
                self.kick()
            elif self._mark_timer is None and not self.closed:
                self._mark_timer = self._runtime.call_later(_MARK_DELAY_S, self._leave_mark)

        self._runtime.in_thread("journal", sync, done, brief=brief)

    def _leave_mark(self) -> None:
        """Nothing came since the last sync: write down that it succeeded, for whoever finds damage later."""
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
        """Have the next segment ready, zeroed and synced, before it is needed. Tried again by the node's timer."""
        if self._spare is not None or self._spare_wanted or self.closed:
            return
        self._spare_wanted = True
        path = f"{self.directory}/{SPARE}"

        def done(file: File | None, error: BaseException | None) -> None:
            self._spare_wanted = False
            self.has_space = error is None
            if isinstance(error, OSError) and error.errno == errno.EIO:
                self.on_fatal(error)  # a disk whose sync failed may have lost what an earlier one said it has
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
        """Sync what is queued and say so, for the next start."""
        if self.closed:
            return
        self.closed = True
        if self._mark_timer is not None:
            self._mark_timer.cancel()
        self._runtime.join("journal")  # its file is not closed under a sync
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
