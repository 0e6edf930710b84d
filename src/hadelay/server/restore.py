"""Restore: fill the directories of a node of a new cluster from a backup, as if the node had installed that snapshot.

Every founding member is restored from the same backup, whatever their number, so all journals begin behind the same
entry. The group's number changes, because it is part of every id and lease token: the lost cluster may have issued
more of them after the backup, and they must not be issued again (ADR 141).
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgpack

from hadelay.errors import ConfigError, DamagedFile, FatalError, HadelayError
from hadelay.ledger.checkpoint import for_new_cluster
from hadelay.ledger.schedules import schedules
from hadelay.platform.disk import Disk
from hadelay.platform.runtime import Runtime
from hadelay.raft.ports import FOUNDING
from hadelay.server.recover import Directories
from hadelay.settings.node import Config
from hadelay.storage.backup import Archive, Backup
from hadelay.storage.identity import write_identity
from hadelay.storage.lmdbtables import LmdbBackend
from hadelay.storage.snapshots import Installer, Manifest, SnapshotFile, clear, roll_forward
from hadelay.storage.tables import CHECKPOINT, CORE, ROW, Backend, scan_all

_CHUNK = 1 << 20
#: Names of files and directories that an unfinished restore leaves behind; the next restore accepts them.
_OURS = ("incoming", "lock")


def restore(
    config: Config,
    archive: Archive,
    backup: Backup,
    disk: Disk,
    runtime: Runtime,
    done: Callable[[HadelayError | None], None],
    *,
    shard: bool = False,
    backend: Callable[[str], Backend] = LmdbBackend,
    copied: Callable[[int], None] = lambda size: None,
) -> None:
    """Fill this node's empty directories from a backup, then call done(None) or done(error). shard: the cluster is one
    of several shards, even if the backup is from before its first shard map. Raises ConfigError, before
    writing, if the directories are not empty, or if the configuration has the lost cluster's id or group."""
    directories = Directories(config, disk, runtime, backend)
    data = directories.data
    _refuse(directories, backup)
    directories.make()

    def switch(switched: Callable[[HadelayError | None], None]) -> None:
        try:
            roll_forward(disk, data)
            _become(directories, backup, shard=shard)
        except Exception as error:
            switched(error if isinstance(error, HadelayError) else FatalError(f"{data}: {error}"))
        else:
            switched(None)

    def finished(error: HadelayError | None) -> None:
        locked.close()
        done(error)

    files = [SnapshotFile(name, known.length, known.crc) for name, known in backup.files.items()]
    with directories.lock() as locks:
        clear(disk, f"{data}/incoming/hours")
        clear(disk, f"{data}/incoming")
        installer = Installer(disk, data, runtime, backend, Manifest(backup.index, backup.term, files), switch)
        _fill(installer, archive, files, copied)
        locked = locks.pop_all()
    installer.finish(finished)


def _fill(installer: Installer, archive: Archive, files: list[SnapshotFile], copied: Callable[[int], None]) -> None:
    for file in files:
        installer.write(file.name, 0, b"")
        for at in range(0, file.length, _CHUNK):
            part = archive.files.read(file.name, file.length, at, min(_CHUNK, file.length - at))
            if not part:
                raise DamagedFile(f"{archive.where}/{file.name}", at, "the file is too short: hadelay backup verify")
            installer.write(file.name, at, part)
            copied(len(part))


def _refuse(directories: Directories, backup: Backup) -> None:
    disk, cluster, root = directories.disk, directories.config.cluster, directories.config.node.data_dir
    if cluster.id == backup.cluster_id or cluster.group == backup.group:
        raise ConfigError(
            f"this is a backup of cluster {backup.cluster_id!r}, group {backup.group}: a restored cluster needs "
            "another cluster.id and another cluster.group, because its message ids must differ: set both to new "
            "values, the same on every node"
        )
    if cluster.init:
        raise ConfigError(
            "cluster.init is true: remove it on every node; otherwise nodes that are not restored yet would found an "
            "empty cluster with the same id"
        )
    for directory in (directories.data, directories.journal):
        if disk.exists(directory) and any(name not in _OURS for name in disk.listdir(directory)):
            raise ConfigError(f"{directory} is not empty: restore into a new directory, or move this one away")
    for name in disk.listdir(root) if disk.exists(root) else ():
        if re.fullmatch(r"g\d+", name) and disk.exists(f"{root}/{name}/identity"):
            raise ConfigError(f"{root} holds a node's data ({name}): restore into a new directory, or move it away")


def _become(directories: Directories, backup: Backup, *, shard: bool) -> None:
    """Make the restored files this node's own. Its identity is written last: without it, no node starts from these
    files."""
    cluster, data = directories.config.cluster, directories.data
    tables = directories.backend(f"{data}/state.mdb")
    row = msgpack.unpackb(tables.get(CHECKPOINT, ROW) or b"") | {"cluster_id": cluster.id, "group": cluster.group}
    try:
        core = for_new_cluster(tables.get(CHECKPOINT, CORE) or b"", cluster.group, shard=shard)
    except ConfigError as error:
        raise ConfigError(
            f"{error.detail}: message ids of both would look alike. Choose another number, such as 129, on every node; "
            f"remove {directories.config.node.data_dir}, and restore again"
        ) from None
    paused = list(schedules.paused_by_restore(scan_all(tables, schedules.STATE)))
    tables.commit([], [*paused, (CHECKPOINT, ROW, msgpack.packb(row)), (CHECKPOINT, CORE, core)])
    tables.close()
    journal = directories.create_journal(FOUNDING)
    journal.vote(backup.term, None)
    journal.reset(backup.index, backup.term)
    journal.close()
    write_identity(directories.disk, data, directories.identity(FOUNDING, backup.feature_level))
