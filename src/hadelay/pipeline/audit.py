"""Read every archived hour again: are its files what they were when they were archived, and is each hour still there.

For hours that the cluster has deleted nothing else can tell. Rows of archives that were written by 0.1.0 are checked,
too: there, names and entries may be missing that nobody looked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hadelay.errors import BadRequest
from hadelay.model import hour_name
from hadelay.pipeline.archived import LOST, is_whole
from hadelay.pipeline.places import Place, absolute
from hadelay.pipeline.schema import hour_int
from hadelay.pipeline.tasks import Progress, each, silent
from hadelay.storage import manifests
from hadelay.storage.manifests import Catalogue, Listed, Manifest, Part

KINDS = ("messages", "events")
#: Column with a row's number in its hour, and columns that every row needs.
_NEEDED = {"messages": ("entry", ("id", "topic")), "events": ("number", ("id", "topic", "event"))}
_ROWS = 1 << 17


@dataclass(frozen=True)
class AuditOptions:
    #: Directory or URI that `archive` wrote.
    out: str
    #: First and last hour, as yyyymmddHH; 0: all.
    hour_from: int = 0
    hour_to: int = 0

    def __post_init__(self) -> None:
        if not self.out:
            raise BadRequest("archive: out has to say where the archive is")

    def takes(self, hour: int) -> bool:
        shown = hour_int(hour)
        return shown >= self.hour_from and (not self.hour_to or shown <= self.hour_to)


@dataclass
class Summary:
    #: Of hours that are ok: how many messages and events they have.
    messages: int = 0
    events: int = 0
    #: Per hour: hour; status (ok, damaged, missing, or unfinished: written by a run that has not ended); version of the
    #: manifest; messages, events, bytes; detail: what is wrong with it.
    hours: list[dict[str, Any]] = field(default_factory=list)
    #: What is wrong with the archive as a whole.
    problem: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.problem) or any(hour["status"] in ("damaged", "missing") for hour in self.hours)


def run(spark: Any, options: AuditOptions, progress: Progress = silent) -> Summary:
    """spark: a session, or None to do it in this process; only then progress is told, in hours."""
    where = absolute(options.out)
    place = Place(where)
    there, catalogue = manifests.manifest_hours(place), manifests.load_catalogue(place)
    hours = sorted(hour for hour in there | catalogue.hours.keys() if options.takes(hour))
    work = partial(audit_hour, where, catalogue)
    found = each(spark, work, hours, progress)
    summary = Summary(hours=found)
    if not catalogue.names and any(hour["version"] > 1 for hour in found):
        summary.problem = f"{place.path('_catalogue')}: {LOST}"
    whole = [hour for hour in found if hour["status"] == "ok"]
    summary.messages, summary.events = (sum(hour[kind] for hour in whole) for kind in KINDS)
    return summary


def audit_hour(where: str, catalogue: Catalogue, hour: int) -> dict[str, Any]:
    """OSError when the store does not answer."""
    place, listed = Place(where), catalogue.hours.get(hour)
    found: dict[str, Any] = {
        "hour": hour_int(hour), "status": "ok", "version": 0, "messages": 0, "events": 0, "bytes": 0, "detail": "",
    }  # fmt: skip
    name = manifests.manifest_name(hour)
    try:
        data = place.load(name)
    except FileNotFoundError:
        assert listed is not None
        found |= {"messages": listed["messages"], "events": listed["events"]}
        return found | {"status": "missing", "detail": f"{place.path(name)} is missing; the catalogue names it"}
    try:
        manifest = manifests.decode_manifest(data)
    except ValueError as error:
        return found | {"status": "damaged", "detail": f"{place.path(name)}: {error}"}
    found |= {"version": manifest["version"], "bytes": sum(part["bytes"] for part in manifest["files"])}
    found |= {kind: manifests.rows(manifest, kind) for kind in KINDS}
    problems = _of_manifest(place, manifest, hour, data, listed, catalogue)
    for kind in KINDS:
        problems += _of_files(place, manifest, hour, kind)
    if problems:
        more = f"; {len(problems) - 1} more" if len(problems) > 1 else ""
        return found | {"status": "damaged", "detail": f"{problems[0]}{more}"}
    return found | (
        {"status": "unfinished", "detail": "no catalogue names it yet"} if _is_new(listed, catalogue) else {}
    )


def _is_new(listed: Listed | None, catalogue: Catalogue) -> bool:
    return listed is None and bool(catalogue.names)


def _of_manifest(
    place: Place, manifest: Manifest, hour: int, data: bytes, listed: Listed | None, catalogue: Catalogue
) -> list[str]:  # fmt: skip
    found, name = [], place.path(manifests.manifest_name(hour))
    if listed is not None and not catalogue.lists(hour, data):
        found.append(f"{name} is not the one that the catalogue names")
    if manifest["hour"] != hour_int(hour):
        found.append(f"{name} is of hour {manifest['hour']}")
    source = manifests.source_of(manifest)
    rows = tuple(manifests.rows(manifest, kind) for kind in KINDS)
    if manifest["version"] > 1 and (source is None or rows != source[:2]):
        found.append(f"{name} names files of {rows[0]} messages and {rows[1]} events, and its source has others")
    return found


def _of_files(place: Place, manifest: Manifest, hour: int, kind: str) -> list[str]:
    found, at = [], 0
    parts = manifests.of_kind(manifest, kind)
    for part in parts:
        found += of_part(place, part, kind, at, manifests.rows(manifest, "messages"))
        at += part["rows"]
    directory, named = f"{kind}/hour={hour_name(hour)}", {part["path"] for part in parts}
    for name in place.list(directory) or ():
        if name[0] not in "._" and f"{directory}/{name}" not in named:
            where = place.path(f"{directory}/{name}")
            found.append(f"{where} is not in the manifest; who reads the directory counts its rows")
    return found


def of_part(place: Place, part: Part, kind: str, at: int, entries: int) -> list[str]:
    """at: rows of the hour in the files before it."""
    where = place.path(part["path"])
    size = place.size(part["path"])
    if size is None:
        return [f"{where} is missing"]
    if size != part["bytes"]:
        return [f"{where} has {size} bytes, not {part['bytes']}"]
    if not is_whole(place, part):
        return [f"{where}: the file's CRC is not {part['crc32c']}, as it was when the file was written"]
    try:
        with place.open(part["path"]) as file:
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
