"""Checkpoints: which state they contain, and when a node makes them. Also checks the free disk space."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

from hadelay.api.service import Histogram
from hadelay.ledger import checkpoint
from hadelay.ledger.changedrows import TABLES
from hadelay.ledger.state import Ledger
from hadelay.platform.disk import Disk
from hadelay.raft.messages import BadFrame
from hadelay.raft.node import RaftNode
from hadelay.settings.node import Config
from hadelay.storage.snapshots import Manifest
from hadelay.storage.store import Storage
from hadelay.storage.tables import CHECKPOINT, CORE, Backend, scan_all

log = logging.getLogger(__name__)

#: Interval, in seconds, at which the free disk space and the age of the last checkpoint are checked.
_TICK_S = 1.0
#: Minimum size, in bytes, that an applied entry counts as towards the next checkpoint: replaying even a small entry
#: takes some time.
_ENTRY_BYTES = 8 << 10
#: Number of applied bytes after which the free disk space is checked again: under full load, a check per second is too
#: rare.
_SPACE_BYTES = 4 << 20
#: Limit of the difference of the nodes' checkpoint thresholds, as a fraction: if all nodes made checkpoints at the same
#: time, every commit would be slow.
_APART = 0.3
#: Bucket bounds of the histogram hadelay_checkpoint_duration_seconds.
_DURATIONS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
#: Divisor of storage.min_free_bytes: with less free space than the quotient, the log warns that the node will soon run
#: out of space and stop.
_LAST_PART = 8
#: Allowed names of a snapshot's files: state-… (the exported tables), names (the table of names), files of hours.
_SNAPSHOT_FILE = re.compile(r"state-\d{1,20}|names|hours/\w[\w.-]{0,63}", re.ASCII)
_REFUSES = "publishes are refused (507) until disk space is free; receives and plain acks still work"
#: Log text about the consequences of a full disk for a node.
ENDS = (
    "a node without room for what it has to write ends itself with exit code 70; nothing acknowledged is lost; its "
    "supervisor starts it again and again, and it serves once there is room: free some beside its directories, or "
    "enlarge the disk"
)


class Replica:
    """The state of a node: the ledger in memory, and the storage below it. An installed snapshot replaces both, so
    other parts of a node keep a reference to the Replica, not to its ledger or storage."""

    def __init__(self, storage: Storage) -> None:
        self.load(storage)

    def load(self, storage: Storage) -> None:
        self.storage = storage
        self.ledger = _empty(storage)
        if storage.core_blob:
            checkpoint.load(self.ledger, storage.core_blob, storage.core_rows(TABLES))

    def decode(self, tables: Backend) -> Ledger:
        """Decode the ledger from the tables of a received snapshot. Call it in a thread, because decoding 100,000
        topics takes seconds; `switch` then takes the ledger into use."""
        ledger = _empty(self.storage)
        core = tables.get(CHECKPOINT, CORE) or b""
        checkpoint.decode(ledger, core, {table: scan_all(tables, table) for table in TABLES})
        return ledger

    def switch(self, storage: Storage, ledger: Ledger) -> None:
        """Replace the state by an installed snapshot: its storage, and the ledger that was decoded from it."""
        ledger.store, ledger.tables, ledger.names = storage.hours, storage.tables, storage.names
        ledger.store.set_clock(ledger.now_hour)
        self.storage, self.ledger = storage, ledger


def _empty(storage: Storage) -> Ledger:
    return Ledger(storage.identity.group, storage.hours, storage.tables, storage.names)


class Checkpoints:
    """Starts a checkpoint when many bytes were applied or are buffered, or when the last checkpoint is old."""

    def __init__(
        self,
        config: Config,
        disk: Disk,
        replica: Replica,
        raft: RaftNode,
        on_space: Callable[[], None],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        """on_space: called when `has_space` has changed."""
        self._disk, self._replica, self._raft, self._runtime = disk, replica, raft, raft.runtime
        self._on_space, self._on_fatal = on_space, on_fatal
        self._directories = config.node.data_dir, config.journal_dir
        self.config = config.storage
        names = sorted({*config.members, raft.name})
        self._part = 1 - _APART * names.index(raft.name) / len(names)
        self.bytes_since = 0
        self._unchecked = 0
        self._last = raft.runtime.monotonic()
        self.has_space, self._ends_soon = True, False
        #: Free bytes on the disk of the data or of the journal, whichever has less, as of the last check.
        self.free_bytes = 0
        self.count = 0
        self.durations = Histogram.of(_DURATIONS_S)
        #: Monotonic time at which the last checkpoint was durable, or the process began.
        self.finished = self._last

    def start(self) -> None:
        """Check the free disk space and the age of the last checkpoint: immediately, then once a second."""
        if self._raft.stopped:
            return
        self._look_for_space()
        if self._runtime.monotonic() - self._last >= self.config.checkpoint_interval_ms / 1000 * self._part:
            self.begin()
        self._raft.call_later(_TICK_S, self.start)

    def applied(self, size: int) -> None:
        self.bytes_since += max(size, _ENTRY_BYTES)
        self._unchecked += size
        if self._unchecked >= _SPACE_BYTES:
            self._look_for_space()
        storage, config = self._replica.storage, self.config
        waiting = max(storage.hours.far_bytes, storage.tables.overlay_bytes)
        filled = max(self.bytes_since / config.checkpoint_bytes, waiting / config.far_buffer_bytes)
        if filled >= self._part and not storage.checkpointing:
            # Begin the checkpoint after apply has returned: until then, the entry that is being applied does not count
            # as applied.
            self._raft.call_later(0.0, self.begin)

    def begin(self, then: Callable[[], None] = lambda: None) -> None:
        """Start a checkpoint. then: called once the checkpoint is durable; but at once if nothing has changed since the
        last one, or if a checkpoint is under way."""
        raft, storage = self._raft, self._replica.storage
        if raft.stopped or storage.checkpointing or not self.bytes_since:
            then()
            return
        self.bytes_since = 0
        began = self._last = self._runtime.monotonic()
        core, slices = checkpoint.begin(self._replica.ledger)
        index, term = raft.applied_index, raft.applier.applied_term

        def done(error: BaseException | None) -> None:
            if raft.stopped:
                return
            if error is not None:
                self._on_fatal(error)
                return
            self.count += 1
            self.finished = self._runtime.monotonic()
            self.durations.observe(self.finished - began)
            raft.compact(index)
            then()

        storage.checkpoint(index, term, core, slices, done)

    def _look_for_space(self) -> None:
        self._unchecked = 0
        self.free_bytes = min(self._disk.free(directory)[0] for directory in self._directories)
        if self.has_space != (self.free_bytes >= self.config.min_free_bytes):
            self.has_space = not self.has_space
            log.log(
                logging.INFO if self.has_space else logging.WARNING,
                "space_enough" if self.has_space else "space_low",
                extra={"free_bytes": self.free_bytes, "min_free_bytes": self.config.min_free_bytes}
                | ({} if self.has_space else {"next": _REFUSES}),
            )
            self._on_space()
        ended_soon, self._ends_soon = self._ends_soon, self.free_bytes < self.config.min_free_bytes // _LAST_PART
        if self._ends_soon and not ended_soon:
            log.error("space_nearly_gone", extra={"free_bytes": self.free_bytes, "next": ENDS})


def check_files(manifest: Manifest) -> None:
    """Raise BadFrame unless the manifest lists the files of one snapshot from another node: one file of tables, the
    file `names`, and files of hours."""
    names = [file.name for file in manifest.files]
    states = sum(name.startswith("state-") for name in names)
    if states != 1 or len(set(names)) != len(names) or not all(map(_SNAPSHOT_FILE.fullmatch, names)):
        raise BadFrame("snapshot offer: the files are not the tables, the names and the hours of one snapshot")
