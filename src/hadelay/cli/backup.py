"""`hadelay backup`: copy a running cluster into a directory or object store, and verify backups; `hadelay restore`."""

import asyncio
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hadelay import uris
from hadelay.cli.output import Printing, Remote, emit_json, note, progress, show, table
from hadelay.cli.remote import call
from hadelay.cli.serve import Settings
from hadelay.client.paths import reachable, segment
from hadelay.errors import BadRequest, ConfigError, DamagedFile, DiskFull, HadelayError, NoLeader, NotFound, Overloaded
from hadelay.pipeline.objects import Objects
from hadelay.platform.disk import Disk
from hadelay.settings.load import load
from hadelay.settings.node import Config
from hadelay.storage.backup import BLOCK, FORMAT, Archive, Backup, Contents, LocalBackups

#: Limit in bytes of one read of a snapshot's file.
_PART = 4 << 20
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
#: Errors of a node after which the backup is tried on another node.
_ELSEWHERE = (ConnectionError, TimeoutError, NoLeader, NotFound, Overloaded, DamagedFile)


def archive_at(where: str) -> Archive:
    """Open the backups in a directory or at a URI."""
    if wrong := uris.problem(where):
        raise BadRequest(wrong)
    where = where.removeprefix("file://")
    if "://" not in where:
        return Archive(LocalBackups(Disk(private=True), os.path.abspath(where)))
    try:
        from hadelay.storage.locations import Location
    except ImportError:
        raise ConfigError(f"{where}: object stores need pyarrow: pip install pyarrow") from None
    return Archive(Objects(Location(where)))


def create(directory: str, /, *, rate: str = "", keep: int = 2, remote: Remote = Remote()) -> None:
    """Copy the running cluster, from a follower if possible. A directory with backups gets only new data. Run the
    command again to continue an interrupted backup.

    Args:
        directory: Target directory, or a URI such as s3://bucket/backup.
        rate: Maximum bytes per second, such as 20MiB.
        keep: Number of backups to keep, this one included; older ones are deleted.
    """
    limit = _rate(rate)
    archive = archive_at(directory)
    archive.files.prepare()
    remote = _of_one_shard(remote)
    problem: Exception = ConnectionError("no server was given: use --servers")
    for url in _nodes(remote):
        try:
            done = Copying(archive, partial(call, replace(remote, servers=url)), limit).run(keep)
        except _ELSEWHERE as error:
            note(f"{url}: {error}")
            problem = error
            continue
        except OSError as error:  # the backup's own disk or object store failed: try no other node
            raise OSError(
                f"{archive.where}: {error}. No backup was added, and earlier backups are unchanged. Fix the cause and "
                "run the command again to continue"
            ) from error
        show({"directory": archive.where, **done, "node": url}, remote)
        return
    raise problem


def verify(directory: str, /, *, index: int | None = None, printing: Printing = Printing()) -> int:
    """Read every byte of a backup and compare checksums. Lists damaged files; exit code 1 if there are any.

    Args:
        directory: Directory of the backup, or its URI.
        index: Index of an older backup in the directory. Default: the newest.
    """
    archive = archive_at(directory)
    backup = archive.read(index)
    wrong: list[dict[str, Any]] = []
    with progress(backup.size, sizes=True) as update:
        for name, damages in archive.verify(backup):
            wrong += [{"file": damage.file, "offset": damage.offset, "what": damage.what} for damage in damages]
            update(advance=backup.files[name].length)
    if printing.output == "json":
        emit_json(summary(backup) | {"damaged": wrong})
    elif wrong:
        table(wrong, ("file", "offset", "what"))
    verdict = f"{len({row['file'] for row in wrong})} of {len(backup.files)} files are damaged"
    note(f"index {backup.index}, {backup.time}: {verdict if wrong else f'{len(backup.files)} files, none damaged'}")
    if wrong:
        note("A damaged backup cannot be restored. Back up the running cluster into another directory.")
    return 1 if wrong else 0


def summary(backup: Backup) -> dict[str, Any]:
    return {
        "cluster_id": backup.cluster_id, "group": backup.group, "index": backup.index, "time": backup.time,
        "files": len(backup.files), "bytes": backup.size,
    }  # fmt: skip


def _rate(text: str) -> float:
    if not text:
        return float("inf")
    found = re.fullmatch(r"(\d+)(|KiB|MiB|GiB)", text, re.ASCII)
    rate = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if rate < BLOCK:
        raise BadRequest(f"--rate {text}: expected bytes per second, such as 20MiB, at least {BLOCK >> 10}KiB")
    return rate


def _of_one_shard(remote: Remote) -> Remote:
    """Copy of `remote` whose requests name the shard that answered: --servers may have nodes of other shards, too.
    Returns `remote` itself if it names a shard, or if there is only one shard."""
    if remote.shard is not None:
        return remote
    found = call(remote, "GET", "/v1/shards", needs="cluster_id", query={"stale": True})
    if found["shard"] is None or len(found["current"]["shards"]) == 1:
        return remote
    count = len(found["current"]["shards"])
    note(f"This backs up shard {found['shard']}, one of {count}. Back up each into its own directory: --shard N")
    return replace(remote, shard=found["shard"])


def _nodes(remote: Remote) -> list[str]:
    """URLs of all nodes: followers by lag, the leader, then --servers, as advertised URLs may be unreachable."""
    members = call(remote, "GET", "/v1/cluster", needs="members")["members"]
    live = [member for member in members if member["http"] and member["role"] in ("leader", "follower")]
    live.sort(key=lambda member: (member["role"] == "leader", member["lag"]))
    return reachable((member["http"] for member in live), remote.addresses(), remote.token)


class Copying:
    """Copies a snapshot of a node to the backup's location. ask: function that sends a request to the node. hidden:
    show no progress bar."""

    def __init__(self, archive: Archive, ask: Callable[..., Any], rate: float, *, hidden: bool = False) -> None:
        self.archive, self.ask, self.rate, self.hidden = archive, ask, rate, hidden
        self.part = int(min(_PART, max(rate, BLOCK)))
        self.began = self.allowed = time.monotonic()
        self.copied_bytes = self.copied_files = 0

    def run(self, keep: int) -> dict[str, Any]:
        snapshot = self.ask("POST", "/v1/snapshots", needs="files", timeout_s=600)
        url = f"/v1/snapshots/{snapshot['id']}"
        complete = False
        try:
            files = self._copy(url, snapshot)
            backup = Backup(
                FORMAT,
                snapshot["cluster_id"],
                snapshot["group"],
                snapshot["feature_level"],
                int(snapshot["index"]),
                snapshot["term"],
                snapshot["time"],
                files,
                self.archive.files.part,
            )
            self.archive.finish(backup, keep)
            complete = True
        finally:
            # If the release of the snapshot fails, the node releases it after a minute without reads.
            with suppress(HadelayError, OSError):
                self.ask("DELETE", url, query={"complete": complete})
        return summary(backup) | {
            "copied_files": self.copied_files,
            "copied_bytes": self.copied_bytes,
            "seconds": round(time.monotonic() - self.began, 1),
        }

    def _copy(self, url: str, snapshot: dict[str, Any]) -> dict[str, Contents]:
        archive, before = self.archive, self.archive.intact()
        theirs = (snapshot["cluster_id"], snapshot["group"])
        if before is not None and (before.cluster_id, before.group) != theirs:
            raise ConfigError(
                f"{archive.where} has backups of cluster {before.cluster_id!r}, group {before.group}, but this is "
                f"cluster {theirs[0]!r}, group {theirs[1]}: use another directory"
            )
        files = {file["name"]: (int(file["bytes"]), int(file["crc32c"], 16)) for file in snapshot["files"]}
        known = {name: archive.has(name, *file, before) for name, file in files.items()}
        missing = sum(length for name, (length, _) in files.items() if known[name] is None)
        with progress(missing, hidden=self.hidden, sizes=True) as update:
            for name, (length, crc) in files.items():
                if known[name] is None:
                    known[name] = archive.copy(name, length, crc, self._reader(f"{url}/{segment(name)}"))
                    self.copied_files += 1
                    update(advance=length)
        return {name: contents for name, contents in known.items() if contents is not None}

    def _reader(self, url: str) -> Callable[[int, int], bytes]:
        def read(offset: int, most: int) -> bytes:
            time.sleep(max(0.0, self.allowed - time.monotonic()))
            end = offset + min(self.part, most)
            part = {"Range": f"bytes={offset}-{end - 1}"}
            data: bytes = self.ask("GET", url, headers=part, timeout_s=60, decode=bytes) or b""
            if len(data) != end - offset:
                raise ConnectionError(f"{url}: received {len(data)} of {end - offset} bytes")
            self.copied_bytes += len(data)
            self.allowed = max(self.allowed, time.monotonic() - 1) + len(data) / self.rate
            return data

        return read


async def _restore(
    config: Config, archive: Archive, backup: Backup, copied: Callable[[int], None], *, shard: bool
) -> None:
    from hadelay.platform.runtime import Runtime
    from hadelay.server.restore import restore as fill

    loop = asyncio.get_running_loop()
    runtime = Runtime(loop)
    ended: asyncio.Future[HadelayError | None] = loop.create_future()
    try:
        fill(config, archive, backup, Disk(), runtime, ended.set_result, shard=shard, copied=copied)
        if (error := await ended) is not None:
            raise error
    finally:
        runtime.close()


def restore(
    backup: str,
    file: Path | None = None,
    /,
    *,
    data_dir: Path | None = None,
    index: int | None = None,
    shard: int | None = None,
    settings: Settings = (),
    printing: Printing = Printing(),
) -> None:
    """Create the data directory of a node of a new cluster from a backup. Repeat this for each node. The new cluster
    needs another id and another group than the old one.

    Args:
        backup: Directory or URI of the backup.
        file: TOML file of the node, as for serve.
        data_dir: Empty directory that replaces node.data_dir.
        index: Index of an older backup in the directory. Default: the newest.
        shard: Index of the shard, as for serve, 0 too. The shard creates no topics until `hadelay shards apply`.
        settings: KEY=VALUE that overrides the file, such as cluster.id=orders-2 and cluster.group=1. May be repeated.
    """
    named = () if data_dir is None else (f"node.data_dir={data_dir}",)
    config = load(None if file is None else str(file), os.environ, (*named, *settings), shard=shard or 0)
    archive = archive_at(backup)
    found = archive.read(index)
    try:
        with progress(found.size, sizes=True) as update:
            asyncio.run(_restore(config, archive, found, lambda size: update(advance=size), shard=shard is not None))
    except (OSError, DiskFull) as failed:
        raise OSError(
            f"{config.node.data_dir}: {failed}. Nothing was restored: fix the cause and run the command again"
        ) from failed
    done = {
        "node": config.node.name, "cluster_id": config.cluster.id, "group": config.cluster.group,
        "data_dir": config.node.data_dir,
    }  # fmt: skip
    show(summary(found) | done, printing)
    note("Restore all nodes, then start them with `hadelay serve`, without --init.")
