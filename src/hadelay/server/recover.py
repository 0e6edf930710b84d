"""Opening a node's directories: as a founder, as the same node, or as a new incarnation that the cluster must admit.

    data_dir/g<group>/      hours, index, names, checkpoint (storage.store)
    journal_dir/g<group>/   the Raft journal (raft.journal); journal_dir is data_dir/raft unless the configuration says

Both carry cluster, group, node and incarnation. One without the other, or of different incarnations, means that a disk
was lost, exchanged or restored from a copy: such a node may have forgotten a promise. It starts empty, as a new
incarnation, which neither votes nor counts until a majority of the others has admitted it. The old directories are
renamed, never deleted. The same happens after bytes of the hour files did not verify while an entry was applied
(`damaged` names them). A cluster of one node has no other copy, so it refuses to start.

Directories of a first start without `init` hold nothing, and become a founder's once `init` is set.
"""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import PurePath

import structlog

from hadelay.errors import ConfigError, is_disk_full
from hadelay.platform.disk import Disk
from hadelay.platform.network import Network
from hadelay.platform.runtime import Runtime
from hadelay.raft.journal import FIRST, Journal, JournalConfig
from hadelay.raft.ports import FOUNDING
from hadelay.server.memberchanges import MemberChanges
from hadelay.server.node import Node
from hadelay.settings.node import Config
from hadelay.storage.identity import Identity, lock_directory, noted_damage, read_identity, refuse_strangers
from hadelay.storage.lmdbtables import LmdbBackend
from hadelay.storage.store import Storage
from hadelay.storage.tables import Backend
from hadelay.version import FIRST_LEVEL

log = structlog.get_logger("hadelay")


def open_node(
    config: Config,
    disk: Disk,
    network: Network,
    runtime: Runtime,
    on_fatal: Callable[[BaseException], None],
    *,
    backend: Callable[[str], Backend] = LmdbBackend,
) -> Node:
    """Recover a node from its directories; returns the node, not yet started. ConfigError for directories of another
    node, DamagedFile for bytes that do not verify. backend: function that opens the table store at a path."""
    directories = Directories(config, disk, runtime, backend)
    with _in_words(config, disk):
        directories.make()
        with directories.lock() as locks:
            journal, storage = directories.open()
            node = Node(config, disk, network, runtime, on_fatal, storage=storage, journal=journal)
            MemberChanges(node)
            node.locks = locks.pop_all()
        return node


@contextmanager
def _in_words(config: Config, disk: Disk) -> Iterator[None]:
    """Context manager: if a disk error keeps a node from starting, add to the OSError what the operator can do."""
    try:
        yield
    except OSError as error:
        kept = sorted({config.node.data_dir, config.journal_dir})
        if is_disk_full(error):
            free = ", ".join(f"{_free(disk, directory):,} bytes are free at {directory}" for directory in kept)
            todo = (
                "where the disk is full, free some or enlarge it (delete nothing that is the node's), and start again"
            )
            text = f"{free}. A node writes a little when it starts: {todo}"
        elif error.errno in (errno.EACCES, errno.EPERM):
            text = f"user {os.geteuid()}, as whom this runs, has to own {' and '.join(kept)} and everything in them"
        elif error.errno == errno.EROFS:
            text = (
                "the kernel mounts a disk read-only after a disk error (see dmesg); with systemd's "
                "ProtectSystem=strict, name the directory in StateDirectory= or ReadWritePaths="
            )
        else:
            raise
        raise OSError(error.errno, f"{error.strerror}: {text}", error.filename) from error


def _free(disk: Disk, directory: str) -> int:
    """Free bytes on the disk of a directory, which need not exist yet."""
    at = PurePath(directory)
    return disk.free(next((str(path) for path in (at, *at.parents) if disk.exists(str(path))), directory))[0]


class Directories:
    def __init__(self, config: Config, disk: Disk, runtime: Runtime, backend: Callable[[str], Backend]) -> None:
        self.config, self.disk, self.runtime, self.backend = config, disk, runtime, backend
        self.data = f"{config.node.data_dir}/g{config.cluster.group}"
        self.journal = f"{config.journal_dir}/g{config.cluster.group}"

    def make(self) -> None:
        """Create the directories, and remove access rights of other users that an earlier version or a copy gave."""
        corrected = 0
        for directory in sorted({self.data, self.journal}):
            self.disk.makedirs(directory)
            parent, _, group = directory.rpartition("/")
            corrected += self.disk.protect(parent, below=False)
            for name in self.disk.listdir(parent):
                # Protect the group's directory, its lock file, and directories of the group that were put aside earlier
                if name.partition(".")[0] == group:
                    corrected += self.disk.protect(f"{parent}/{name}")
        if corrected:
            log.info("modes_corrected", node=self.config.node.name, files=corrected)

    def lock(self) -> ExitStack:
        """Lock both directories. The locks are files beside the directories, because the directories may be renamed."""
        with ExitStack() as locks:
            for directory in sorted({self.data, self.journal}):
                locks.enter_context(closing(lock_directory(self.disk, directory, f"{directory}.lock")))
            return locks.pop_all()

    def identity(self, incarnation: int, feature_level: int = FIRST_LEVEL) -> Identity:
        cluster = self.config.cluster
        return Identity(
            cluster.id, cluster.group, self.config.node.name, incarnation=incarnation, feature_level=feature_level
        )

    def create_journal(self, incarnation: int) -> Journal:
        owner, settings = self.identity(incarnation), _settings(self.config)
        return Journal.create(self.disk, self.journal, self.runtime, owner, settings)

    def open(self) -> tuple[Journal, Storage]:
        journal, storage = self._open(*self._who_am_i())
        if not _of_one_time(journal, storage):
            journal.close()
            storage.close()
            journal, storage = self._open(self._start_over(self.journal))
        if self.config.cluster.init and self._is_blank(journal, storage):
            journal.close()
            storage.close()
            self._put_aside(f"empty-{journal.incarnation}")
            journal, storage = self._open(FOUNDING)
        return journal, storage

    def _open(self, incarnation: int, journal: Journal | None = None) -> tuple[Journal, Storage]:
        # Create the journal before the storage: after a crash between the two there is an empty journal only, which
        # does no harm.
        journal = journal or self.create_journal(incarnation)
        return journal, Storage(
            self.disk,
            self.data,
            self.runtime,
            self.identity(incarnation),
            backend=self.backend,
            far_buffer_bytes=self.config.storage.far_buffer_bytes,
        )

    def _is_blank(self, journal: Journal, storage: Storage) -> bool:
        """Whether the directories are those of a node that was started without `init` and never joined: it has never
        voted and has no data, and no directories beside them were put aside after the loss of a disk."""
        promised = journal.admitted or journal.voted_for or journal.installing or storage.applied_index
        return not (promised or self._put_aside_before()) and (journal.last_index, journal.term) == FIRST

    def _put_aside_before(self) -> list[str]:
        """Directories that were put aside after the loss of a disk, and lie beside this node's own directories."""
        siblings = (path.rpartition("/") for path in sorted({self.data, self.journal}))
        return [
            f"{parent}/{name}"
            for parent, _, own in siblings
            for name in self.disk.listdir(parent)
            if name.startswith(f"{own}.lost-")
        ]

    def _who_am_i(self) -> tuple[int, Journal | None]:
        """Incarnation of this node; and its journal, None if there is none. Directories that cannot be trusted are put
        aside."""
        config, disk = self.config, self.disk
        identity = read_identity(disk, self.data)
        if identity is not None:
            refuse_strangers(self.data, identity, self.identity(identity.incarnation))
        has_journal = Journal.exists(disk, self.journal)
        if identity is None and not has_journal:
            alone = len(config.members) == 1
            # Directories that were put aside show that an earlier start found a lost disk, and then ended: this node is
            # no founder.
            lost = [] if alone else self._put_aside_before()
            if config.cluster.init and not lost:
                return FOUNDING, None
            if config.cluster.init:
                log.warning("init_ignored", node=config.node.name, found=lost)
            if alone:
                raise ConfigError(
                    f"{config.node.data_dir} is empty: start once with cluster.init = true (serve --init) to found a "
                    "cluster, or name the directory that holds it"
                )
            return self._new_incarnation(), None
        damage = noted_damage(disk, self.data)
        if damage is not None:
            return self._start_over(f"a part of {self.data} ({damage})"), None
        if has_journal:
            journal = Journal.open(disk, self.journal, self.runtime, self.identity(FOUNDING), _settings(config))
            new = (journal.last_index, journal.term) == FIRST
            if journal.incarnation == identity.incarnation if identity is not None else new:
                return journal.incarnation, journal
            journal.close()
        return self._start_over(self.data if identity is None else self.journal), None

    def _start_over(self, lost: str) -> int:
        """Put the data and journal directories aside, and return the number for a new incarnation. ConfigError in a
        cluster of one node, where no other node has the data."""
        if len(self.config.members) == 1:
            raise ConfigError(
                f"{lost} is lost, damaged or an old copy, and no other node holds the data: put back {self.data} "
                f"and {self.journal} as they were at one time"
            )
        aside = self._new_incarnation()
        self._put_aside(f"lost-{aside}")
        log.warning("lost_disk", node=self.config.node.name, lost=lost, kept=f".lost-{aside}", incarnation=aside)
        return aside

    def _put_aside(self, suffix: str) -> None:
        """Rename the data and journal directories by appending `suffix`, and create empty ones."""
        # an earlier start that was interrupted may have used this suffix: take another one
        while any(self.disk.exists(f"{directory}.{suffix}") for directory in (self.data, self.journal)):
            suffix += "-again"
        for directory in (self.data, self.journal):
            self.disk.rename(directory, f"{directory}.{suffix}")
            self.disk.sync_dir(directory.rpartition("/")[0])
            self.disk.makedirs(directory)

    def _new_incarnation(self) -> int:
        """Number for a new incarnation of this node, from the wall clock, so that it is higher than every earlier
        number."""
        return max(FOUNDING + 1, self.runtime.wall_ms())


def _of_one_time(journal: Journal, storage: Storage) -> bool:
    """Whether journal and storage are of the same time: a checkpoint never goes beyond the synced journal, and the
    journal is never cut beyond the checkpoint. If not, one of the two was restored from an old copy, or lost its newest
    part."""
    index, term = (storage.applied_index, storage.applied_term) if storage.applied_index else FIRST
    if journal.installing >= index > journal.last_index:
        # Both are of the same time: a snapshot was installed, and only the reset of the journal is missing
        return True
    return journal.base_index <= index <= journal.last_index and journal.term_at(index) == term


def _settings(config: Config) -> JournalConfig:
    return JournalConfig(segment_bytes=config.raft.segment_bytes)
