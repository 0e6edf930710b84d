"""Decides whether a run of `archive` may replace an archived hour, and sets files aside that no manifest names.

An archived hour may be the only copy. A run replaces it only by an hour of the same cluster that begins with the same
bytes; with `--force`, the replaced files are set aside, not removed.
"""

import re
from typing import Any, NamedTuple

from hadelay.codec.checksums import crc32c
from hadelay.errors import Conflict
from hadelay.model import hour_name
from hadelay.pipeline.archived import KIND
from hadelay.pipeline.check import crc_of
from hadelay.pipeline.hourfiles import HourFiles, Store
from hadelay.storage import manifests
from hadelay.storage.locations import Location
from hadelay.storage.manifests import Catalogue, HourManifest, PartFile, SourceFiles

_FORCE = "--force replaces the hour, and sets its files aside"
#: Name of a Parquet file that an interrupted run has not completed.
_INCOMPLETE = re.compile(r"\.part-\d{10}-\d{10}\.parquet\.[0-9a-f]{12}")


class Run(NamedTuple):
    """A run of the command `archive`. name: as in its leases on hours (pipeline/lease.py) and in the archive's
    directory _aside/. cluster: id of the cluster whose hours are archived, "" if unknown."""

    name: str
    cluster: str
    force: bool


def refuse_foreign(out: Location, catalogue: Catalogue, cluster: str) -> None:
    """Raise Conflict unless the archive is of this cluster, or has no known cluster. cluster: "" if unknown."""
    owners = set(catalogue.clusters)
    for hour in () if catalogue.names else manifests.manifest_hours(out):
        if (found := previous(out, hour)) is not None:
            owners |= {found.get("cluster", "")} - {""}
    if owners <= {cluster}:
        return
    theirs = " and ".join(map(repr, sorted(owners)))
    if not cluster:
        raise Conflict(
            f"{out.path('')} is an archive of cluster {theirs}, and the source does not tell its cluster: copy the "
            "node's file `identity` beside `names`. --force archives the source anyway"
        )
    raise Conflict(
        f"{out.path('')} is an archive of cluster {theirs}, and the source is of {cluster!r}: archive it into another "
        "directory. --force archives it into this one, and the archive belongs to the new cluster then"
    )


def previous(out: Location, hour: int) -> HourManifest | None:
    """Manifest of an hour that was archived before; None if there is none that can be read."""
    try:
        return manifests.decode_manifest(out.load(manifests.manifest_name(hour)), hour)
    except (FileNotFoundError, ValueError):
        return None


def not_extended(out: Location, store: Store, files: HourFiles, source: SourceFiles, cluster: str) -> str:
    """Reason why the source must not replace the archived rows of an hour; "" if it may, or if nothing of the hour is
    archived."""
    old = previous(out, files.hour)
    if old is None:  # a lost manifest: the catalogue still has the hour's counts
        listed = manifests.load_catalogue(out).hours.get(files.hour)
        counts = (listed["messages"], listed["events"]) if listed else (0, 0)
    else:
        counts = (manifests.rows(old, "messages"), manifests.rows(old, "events"))
        if cluster and old.get("cluster") not in ("", None, cluster):
            return f"it is archived from cluster {old['cluster']!r}; {_FORCE}"
    before = None if old is None else manifests.source_of(old)
    fewer_bytes = before is not None and source.log_bytes < before.log_bytes
    if source.entries < counts[0] or source.events < counts[1] or fewer_bytes:
        return (
            f"the archive has {counts[0]:,} messages and {counts[1]:,} events of it, the source {source.entries:,} "
            f"and {source.events:,}: it is an older copy or another cluster; {_FORCE}"
        )
    if before is None or before == source:
        return ""
    prefix = files._replace(entries=before.entries, events=before.events, log_bytes=before.log_bytes)
    for suffix, crc in zip(("log", "idx", "dsp"), before.crcs or (), strict=True):
        if crc_of(store, prefix, suffix) != crc:
            return (
                f"the first {prefix.length(suffix):,} bytes of {store.where(files, suffix)} differ from those that "
                f"were archived: it is another cluster, or damaged; {_FORCE}"
            )
    return ""


def set_aside(out: Location, hour: int, run: Run, source: SourceFiles) -> list[str]:
    """Move files that the hour's manifest does not name out of its directories; returns their new names. A forced run
    moves all files and the manifest, and so does a run that cannot compare its source with the manifest's."""
    old = previous(out, hour)
    keep = old is not None and manifests.source_of(old) is not None and not (run.force and _differs(old, source))
    named = {part["path"] for part in old["files"]} if keep and old else set()
    found = [] if keep or out.size(manifests.manifest_name(hour)) is None else [manifests.manifest_name(hour)]
    for name in _names(out, hour):
        if name.rpartition("/")[2][0] not in "._" and name not in named and out.size(name) is not None:
            found.append(name)
    moved = [f"_aside/{hour_name(hour)}.{run.name}/{name}" for name in found]
    for name, to in zip(found, moved, strict=True):
        out.move(name, to)
    return moved


def _differs(old: HourManifest, source: SourceFiles) -> bool:
    return manifests.source_of(old) != source


def tidy(out: Location, hour: int, parts: list[PartFile], aside: list[str]) -> str:
    """Remove what a new manifest made needless: files of the previous manifest, incomplete files of interrupted runs,
    and set-aside files with the bytes of a new file. Returns a text about the files that stay aside; "" for none."""
    ours = {part["path"]: part for part in parts}
    for name in _names(out, hour):
        base = name.rpartition("/")[2]
        if name not in ours and (base[0] not in "._" or _INCOMPLETE.fullmatch(base)) and out.size(name) is not None:
            out.remove(name)
    stay = []
    for name in aside:
        part: Any = ours.get("/".join(name.split("/")[2:]))
        if part and out.size(name) == part["bytes"] and f"{crc32c(out.load(name)):08x}" == part["crc32c"]:
            out.remove(name)
        else:
            stay.append(name)
    where = "/".join(stay[0].split("/")[:2]) if stay else ""
    return f"{len(stay)} files that no manifest of this source named are set aside in {where}" if stay else ""


def _names(out: Location, hour: int) -> list[str]:
    """Names of the files in an hour's directories."""
    directories = [f"{kind}/hour={hour_name(hour)}" for kind in KIND.values()]
    return [f"{directory}/{name}" for directory in directories for name in out.list(directory) or ()]
