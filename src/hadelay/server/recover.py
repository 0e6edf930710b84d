"""Opening a node's directories: as a founder, as who it was, or as a new incarnation that the cluster has to admit.

    data_dir/g<group>/      hours, index, names, checkpoint (storage.store)
    journal_dir/g<group>/   the Raft journal (raft.journal); journal_dir is data_dir/raft unless the configuration says

Both carry cluster, group, node and incarnation. One without the other, or of different incarnations, means that a disk
was lost, exchanged or put back from a copy: such a node may have promised what it no longer knows. It starts empty, as
a new incarnation, which neither votes nor counts until a majority without it has admitted it (architecture §6). What
was found is put aside under another name, never deleted. Bytes of the hour files that did not verify while an entry
was applied (`damaged` names them) make it such a node, too. A cluster of one has nobody to learn from: it refuses.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import structlog

from hadelay.config import Config
from hadelay.errors import ConfigError
from hadelay.raft.journal import FIRST, Journal, JournalConfig
from hadelay.raft.network import Network
from hadelay.raft.ports import FOUNDING
from hadelay.runtime import Runtime
from hadelay.server.node import Node
from hadelay.storage.disk import Disk
from hadelay.storage.identity import Identity, lock_directory, noted_damage, read_identity, refuse_strangers
from hadelay.storage.lmdbtables import LmdbBackend
from hadelay.storage.store import Storage
from hadelay.storage.tables import Backend

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
    """A recovered node, not yet started. ConfigError in words for directories that are not this node's, DamagedFile
    for bytes that do not verify. `backend` makes the table store at a path."""
    data = f"{config.node.data_dir}/g{config.cluster.group}"
    journal_dir = f"{config.journal_dir}/g{config.cluster.group}"
    disk.makedirs(data)
    disk.makedirs(journal_dir)
    with _full_disk_in_words(config, disk):
        # Beside the directories, which may be put aside, and before anything in them is touched.
        locks = [lock_directory(disk, directory, f"{directory}.lock") for directory in sorted({data, journal_dir})]
        try:
            node = _open(config, disk, network, runtime, on_fatal, data, journal_dir, backend)
        except BaseException:
            for lock in locks:
                lock.close()
            raise
        node.locks = locks
        return node


@contextmanager
def _full_disk_in_words(config: Config, disk: Disk) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        kept = sorted({config.node.data_dir, config.journal_dir})
        free = ", ".join(f"{disk.free(directory)[0]:,} bytes are free at {directory}" for directory in kept)
        todo = "where the disk is full, free some or enlarge it (delete nothing that is the node's), and start again"
        text = f"{error.strerror}: {free}. A node writes a little when it starts: {todo}"
        raise OSError(errno.ENOSPC, text, error.filename) from error


def _open(
    config: Config,
    disk: Disk,
    network: Network,
    runtime: Runtime,
    on_fatal: Callable[[BaseException], None],
    data: str,
    journal_dir: str,
    backend: Callable[[str], Backend],
) -> Node:
    incarnation, journal = _who_am_i(config, disk, runtime, data, journal_dir)
    # The journal first: one that holds nothing yet has promised nothing, so dying in between does no harm.
    journal = journal or _create_journal(config, disk, runtime, journal_dir, incarnation)
    storage = _open_storage(config, disk, runtime, data, incarnation, backend)
    if not _of_one_time(journal, storage):
        journal.close()
        storage.close()
        incarnation = _start_over(config, disk, runtime, data, journal_dir, journal_dir)
        journal = _create_journal(config, disk, runtime, journal_dir, incarnation)
        storage = _open_storage(config, disk, runtime, data, incarnation, backend)
    return Node(config, disk, network, runtime, on_fatal, storage=storage, journal=journal)


def _open_storage(
    config: Config, disk: Disk, runtime: Runtime, data: str, incarnation: int, backend: Callable[[str], Backend]
) -> Storage:
    identity = _identity(config, incarnation)
    far_buffer_bytes = config.storage.far_buffer_bytes
    return Storage(disk, data, runtime, identity, backend=backend, far_buffer_bytes=far_buffer_bytes)


def _identity(config: Config, incarnation: int) -> Identity:
    return Identity(config.cluster.id, config.cluster.group, config.node.name, incarnation)


def _who_am_i(config: Config, disk: Disk, runtime: Runtime, data: str, journal_dir: str) -> tuple[int, Journal | None]:
    """This node's incarnation, and its journal if it has one. Puts aside what can't be trusted."""
    identity = read_identity(disk, data)
    if identity is not None:
        refuse_strangers(data, identity, _identity(config, identity.incarnation))
    has_journal = Journal.exists(disk, journal_dir)
    if identity is None and not has_journal:
        if config.cluster.init:
            return FOUNDING, None
        if len(config.members) == 1:
            raise ConfigError(
                f"{config.node.data_dir} is empty: start once with cluster.init = true (serve --init) to found a "
                "cluster, or name the directory that holds it"
            )
        return _new_incarnation(runtime), None
    damage = noted_damage(disk, data)
    if damage is not None:
        return _start_over(config, disk, runtime, data, journal_dir, f"a part of {data} ({damage})"), None
    if has_journal:
        journal = Journal.open(disk, journal_dir, runtime, config=_settings(config), **_owner(config))
        new = (journal.last_index, journal.term) == FIRST
        if journal.incarnation == identity.incarnation if identity is not None else new:
            return journal.incarnation, journal
        journal.close()
    lost = data if identity is None else journal_dir
    return _start_over(config, disk, runtime, data, journal_dir, lost), None


def _start_over(config: Config, disk: Disk, runtime: Runtime, data: str, journal_dir: str, lost: str) -> int:
    """Put both directories aside and become a new incarnation. ConfigError where there is nobody to learn from."""
    if len(config.members) == 1:
        raise ConfigError(
            f"{lost} is lost or of another time, and there is no other node to learn from: put back {data} and "
            f"{journal_dir} as they were at one time"
        )
    aside = _new_incarnation(runtime)
    for directory in (data, journal_dir):
        disk.rename(directory, f"{directory}.lost-{aside}")
        disk.sync_dir(directory.rpartition("/")[0])
        disk.makedirs(directory)
    log.warning("lost_disk", node=config.node.name, lost=lost, kept=f".lost-{aside}", incarnation=aside)
    return aside


def _of_one_time(journal: Journal, storage: Storage) -> bool:
    """False: one of them was put back from an older copy, or lost its end. A checkpoint never goes beyond what the
    journal has synced, and the journal is never cut beyond the checkpoint."""
    index, term = (storage.applied_index, storage.applied_term) if storage.applied_index else FIRST
    if journal.installing >= index > journal.last_index:
        return True  # a snapshot was installed, and the journal's new beginning is still to be written
    return journal.base_index <= index <= journal.last_index and journal.term_at(index) == term


def _new_incarnation(runtime: Runtime) -> int:
    """Above every earlier one: they were taken from earlier times."""
    return max(FOUNDING + 1, runtime.wall_ms())


def _create_journal(config: Config, disk: Disk, runtime: Runtime, directory: str, incarnation: int) -> Journal:
    return Journal.create(disk, directory, runtime, incarnation=incarnation, config=_settings(config), **_owner(config))


def _settings(config: Config) -> JournalConfig:
    return JournalConfig(segment_bytes=config.raft.segment_bytes)


def _owner(config: Config) -> dict[str, Any]:
    return {"cluster_id": config.cluster.id, "group": config.cluster.group, "node": config.node.name}
