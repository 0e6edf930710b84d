"""Read every archived hour again: are its files what they were when they were archived, and is each hour still there.

For hours that the cluster has deleted nothing else can tell. Rows of archives that were written by 0.1.0 are checked,
too: there, names and entries may be missing that nobody looked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hadelay.model import hour_name
from hadelay.pipeline.archived import LOST, is_whole
from hadelay.pipeline.jobs import AuditOptions, JobSummary
from hadelay.pipeline.schema import hour_int
from hadelay.pipeline.tasks import Progress, each, silent
from hadelay.storage import manifests
from hadelay.storage.locations import Location, absolute
from hadelay.storage.manifests import Catalogue, Listed, Manifest, Part

KINDS = ("messages", "events")
#: Column with a row's number in its hour, and columns that every row needs.
_NEEDED = {"messages": ("entry", ("id", "topic")), "events": ("number", ("id", "topic", "event"))}
_ROWS = 1 << 17


def run(spark: Any, options: AuditOptions, progress: Progress = silent) -> JobSummary:
    where = absolute(options.out)
    location = Location(where)
    there, catalogue = manifests.manifest_hours(location), manifests.load_catalogue(location)
    hours = sorted(hour for hour in there | catalogue.hours.keys() if options.takes(hour))
    found = each(spark, partial(audit_hour, where, catalogue), hours, progress)
    lost = not catalogue.names and any(hour["version"] > 1 for hour in found)
    problem = f"{location.path('_catalogue')}: {LOST}" if lost else ""
    whole = [hour for hour in found if hour["status"] == "ok"]
    messages, events = (sum(hour[kind] for hour in whole) for kind in KINDS)
    summary = JobSummary("audit", messages=messages, events=events, hours=found, problem=problem)
    said = f"{len(whole):,} of {len(found):,} archived hours are ok: {messages:,} messages, {events:,} events"
    return summary.show(
        [hour for hour in found if hour["status"] != "ok"], "hour status version messages events detail",
        *filter(None, (said, problem)),
        failed=lost or any(hour["status"] in ("damaged", "missing") for hour in found),
    )  # fmt: skip


def audit_hour(where: str, catalogue: Catalogue, hour: int) -> dict[str, Any]:
    """OSError when the store does not answer."""
    location, listed = Location(where), catalogue.hours.get(hour)
    found: dict[str, Any] = {
        "hour": hour_int(hour), "status": "ok", "version": 0, "messages": 0, "events": 0, "bytes": 0, "detail": "",
    }  # fmt: skip
    name = manifests.manifest_name(hour)
    try:
        data = location.load(name)
    except FileNotFoundError:
        assert listed is not None
        found |= {"messages": listed["messages"], "events": listed["events"]}
        return found | {"status": "missing", "detail": f"{location.path(name)} is missing; the catalogue names it"}
    try:
        manifest = manifests.decode_manifest(data)
    except ValueError as error:
        return found | {"status": "damaged", "detail": f"{location.path(name)}: {error}"}
    found |= {"version": manifest["version"], "bytes": sum(part["bytes"] for part in manifest["files"])}
    found |= {kind: manifests.rows(manifest, kind) for kind in KINDS}
    problems = _of_manifest(location, manifest, hour, data, listed, catalogue)
    for kind in KINDS:
        problems += _of_files(location, manifest, hour, kind)
    if problems:
        more = f"; {len(problems) - 1} more" if len(problems) > 1 else ""
        return found | {"status": "damaged", "detail": f"{problems[0]}{more}"}
    return found | (
        {"status": "unfinished", "detail": "no catalogue names it yet"} if _is_new(listed, catalogue) else {}
    )


def _is_new(listed: Listed | None, catalogue: Catalogue) -> bool:
    return listed is None and bool(catalogue.names)


def _of_manifest(
    location: Location, manifest: Manifest, hour: int, data: bytes, listed: Listed | None, catalogue: Catalogue
) -> list[str]:  # fmt: skip
    found, name = [], location.path(manifests.manifest_name(hour))
    if listed is not None and not catalogue.lists(hour, data):
        found.append(f"{name} is not the one that the catalogue names")
    if manifest["hour"] != hour_int(hour):
        found.append(f"{name} is of hour {manifest['hour']}")
    source = manifests.source_of(manifest)
    rows = tuple(manifests.rows(manifest, kind) for kind in KINDS)
    if manifest["version"] > 1 and (source is None or rows != source[:2]):
        found.append(f"{name} names files of {rows[0]} messages and {rows[1]} events, and its source has others")
    return found


def _of_files(location: Location, manifest: Manifest, hour: int, kind: str) -> list[str]:
    found, at = [], 0
    parts = manifests.of_kind(manifest, kind)
    for part in parts:
        found += of_part(location, part, kind, at, manifests.rows(manifest, "messages"))
        at += part["rows"]
    directory, named = f"{kind}/hour={hour_name(hour)}", {part["path"] for part in parts}
    for name in location.list(directory) or ():
        if name[0] not in "._" and f"{directory}/{name}" not in named:
            where = location.path(f"{directory}/{name}")
            found.append(f"{where} is not in the manifest; who reads the directory counts its rows")
    return found


def of_part(location: Location, part: Part, kind: str, at: int, entries: int) -> list[str]:
    """at: rows of the hour in the files before it."""
    where = location.path(part["path"])
    size = location.size(part["path"])
    if size is None:
        return [f"{where} is missing"]
    if size != part["bytes"]:
        return [f"{where} has {size} bytes, not {part['bytes']}"]
    if not is_whole(location, part):
        return [f"{where}: the file's CRC is not {part['crc32c']}, as it was when the file was written"]
    try:
        with location.open(part["path"]) as file:
            return _of_rows(pq.ParquetFile(file), where, kind, at, entries)
    except (pa.ArrowInvalid, KeyError) as error:
        return [f"{where}: {error}"]


def _of_rows(file: Any, where: str, kind: str, at: int, entries: int) -> list[str]:
    number, needed = _NEEDED[kind]
    columns: Sequence[str] = (number, *needed, *(("entry",) if kind == "events" else ()))
    for batch in file.iter_batches(_ROWS, columns=list(columns)):
        numbers = np.asarray(batch.column(number))
        wrong = numbers != np.arange(at, at + len(numbers))
        if wrong.any():
            n = int(wrong.argmax())
            return [f"{where}: {number} {at + n} is {numbers[n]}"]
        for name in needed:
            if missing := batch.column(name).null_count:
                n = int(np.asarray(batch.column(name).is_null()).argmax())
                return [f"{where}: {missing} rows have no {name}, the first is {number} {at + n}"]
        if kind == "events" and (np.asarray(batch.column("entry")) >= entries).any():
            return [f"{where}: an event is of an entry that the hour does not have"]
        at += len(numbers)
    return []
