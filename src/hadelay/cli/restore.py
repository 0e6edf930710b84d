"""`hadelay restore`: the directory of a node of a new cluster, from a backup."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from hadelay.cli.backup import archive_at, summary
from hadelay.cli.output import Printing, note, progress, show
from hadelay.cli.serve import Settings
from hadelay.errors import DiskFull, HadelayError
from hadelay.platform.disk import RealDisk
from hadelay.settings.load import load
from hadelay.settings.node import Config
from hadelay.storage.backup import Archive, Backup


async def _restore(
    config: Config, archive: Archive, backup: Backup, copied: Callable[[int], None]
) -> HadelayError | None:
    from hadelay.platform.runtime import AsyncioRuntime
    from hadelay.server.restore import restore as fill

    loop = asyncio.get_running_loop()
    runtime = AsyncioRuntime(loop)
    ended: asyncio.Future[HadelayError | None] = loop.create_future()
    try:
        fill(config, archive, backup, RealDisk(), runtime, ended.set_result, copied=copied)
        return await ended
    finally:
        runtime.close()


def restore(
    backup: str, file: Path | None = None, /, *, data_dir: Path | None = None, index: int | None = None,
    settings: Settings = (), printing: Printing = Printing(),
) -> None:  # fmt: skip
    """Make the directory of one founding node of a new cluster from a backup; the same for each of its nodes. The
    cluster needs an id and a group that the old one did not have.

    Parameters
    ----------
    backup
        Directory of `hadelay backup`, or its URI.
    file
        The node's TOML file, as for serve.
    data_dir
        Instead of node.data_dir. It has to be empty.
    index
        Of an older backup in it; without it, the newest.
    settings
        KEY=VALUE, over the file, such as cluster.id=orders-2 and cluster.group=1. May be repeated.
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
            f"{config.node.data_dir}: {failed}. Nothing is restored there: when that is mended, run it again"
        ) from failed
    done = summary(found) | {
        "node": config.node.name,
        "cluster_id": config.cluster.id,
        "group": config.cluster.group,
        "data_dir": config.node.data_dir,
    }
    show(done, printing)
    note("When every node is restored, start them with `hadelay serve`, without --init.")
