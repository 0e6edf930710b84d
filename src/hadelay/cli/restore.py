"""`hadelay restore`: create a node's data directory of a new cluster from a backup."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from hadelay.cli.backup import archive_at, summary
from hadelay.cli.output import Printing, note, progress, show
from hadelay.cli.serve import Settings
from hadelay.errors import DiskFull, HadelayError
from hadelay.platform.disk import Disk
from hadelay.settings.load import load
from hadelay.settings.node import Config
from hadelay.storage.backup import Archive, Backup


async def _restore(
    config: Config, archive: Archive, backup: Backup, copied: Callable[[int], None]
) -> HadelayError | None:
    from hadelay.platform.runtime import Runtime
    from hadelay.server.restore import restore as fill

    loop = asyncio.get_running_loop()
    runtime = Runtime(loop)
    ended: asyncio.Future[HadelayError | None] = loop.create_future()
    try:
        fill(config, archive, backup, Disk(), runtime, ended.set_result, copied=copied)
        return await ended
    finally:
        runtime.close()


def restore(
    backup: str, file: Path | None = None, /, *, data_dir: Path | None = None, index: int | None = None,
    settings: Settings = (), printing: Printing = Printing(),
) -> None:  # fmt: skip
    """Create the data directory of a node of a new cluster from a backup. Repeat this for each node. The new cluster
    needs another id and another group than the old one.

    Args:
        backup: Directory or URI of the backup.
        file: TOML file of the node, as for serve.
        data_dir: Empty directory that replaces node.data_dir.
        index: Index of an older backup in the directory. Default: the newest.
        settings: KEY=VALUE that overrides the file, such as cluster.id=orders-2 and cluster.group=1. May be repeated.
    """
    named = () if data_dir is None else (f"node.data_dir={data_dir}",)
    config = load(None if file is None else str(file), os.environ, (*named, *settings))
    archive = archive_at(backup)
    found = archive.read(index)
    try:
        with progress(found.size, sizes=True) as update:
            error = asyncio.run(_restore(config, archive, found, lambda size: update(advance=size)))
        if error is not None:
            raise error
    except (OSError, DiskFull) as failed:
        raise OSError(
            f"{config.node.data_dir}: {failed}. Nothing was restored: fix the cause and run the command again"
        ) from failed
    done = summary(found) | {
        "node": config.node.name,
        "cluster_id": config.cluster.id,
        "group": config.cluster.group,
        "data_dir": config.node.data_dir,
    }
    show(done, printing)
    note("Restore all nodes, then start them with `hadelay serve`, without --init.")
