"""Audit an archive: read every archived hour again and compare it with its manifest and with the catalogue.

Only the audit finds damage of hours that the cluster has deleted. Rows are checked, too: archives of 0.1.0 may lack
names and entries.
"""

from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hadelay.errors import NotFound
from hadelay.model import hour_name
from hadelay.pipeline.archived import KIND, LOST, difference
from hadelay.pipeline.jobs import AuditOptions, JobSummary
from hadelay.pipeline.schema import hour_int, within
from hadelay.pipeline.tasks import Progress, each, silent
from hadelay.storage import manifests
from hadelay.storage.locations import Location, absolute
from hadelay.storage.manifests import Catalogue, HourManifest, PartFile

#: Kind of rows → (column with the row's number in its hour, columns that are never null).
_NEEDED = {"messages": ("entry", ["id", "topic"]), "events": ("number", ["id", "topic", "event"])}
_ROWS = 1 << 17


def run(spark: Any, options: AuditOptions, progress: Progress = silent) -> JobSummary:
    where = absolute(options.out)
    location = Location(where)
    there, catalogue = manifests.manifest_hours(location), manifests.load_catalogue(location)
    kinds = {kind: location.list(kind) or [] for kind in KIND.values()}
    stored = {hour for names in kinds.values() for name in names if (hour := _hour_of(name)) is not None}
    known = sorted(there | catalogue.hours.keys() | stored)
    hours = [hour for hour in known if within(hour, options.hour_from, options.hour_to)]
    if (options.hour_from or options.hour_to) and not hours:
        extent = f"the first is {hour_name(known[0])}, the last {hour_name(known[-1])}" if known else "there are none"
        raise NotFound(f"--hour-from, --hour-to: no archived hour is in this range; {extent}")
    found = each(spark, partial(audit_hour, where, catalogue), hours, progress)
    lost = not catalogue.names and any(hour["version"] > 1 for hour in found)
    problems = [f"{location.path('_catalogue')}: {LOST}"] if lost else []
    foreign = [f"{kind}/{name}" for kind, names in kinds.items() for name in names if _is_foreign(name)]
    if foreign:
        problems.append(f"{location.path(foreign[0])} is no hour, and readers of the directory count its rows: move it")
    problem = "; ".join(problems)
    whole = [hour for hour in found if hour["status"] == "ok"]
    messages, events = (sum(hour[kind] for hour in whole) for kind in KIND.values())
    summary = JobSummary("audit", messages=messages, events=events, hours=found, problem=problem)
    said = f"{len(whole):,} of {len(found):,} archived hours are ok: {messages:,} messages, {events:,} events"
    return summary.show(
        [hour for hour in found if hour["status"] != "ok"],
        "hour status version messages events detail",
        *filter(None, (said, problem)),
        failed=bool(problem) or any(hour["status"] in ("damaged", "missing") for hour in found),
    )


def audit_hour(where: str, catalogue: Catalogue, hour: int) -> dict[str, Any]:
    """Audit one hour; returns its row of the summary. OSError when the store does not answer."""
    location, name, listed = Location(where), manifests.manifest_name(hour), catalogue.hours.get(hour)
    found: dict[str, Any] = {
        "hour": hour_int(hour), "status": "ok", "version": 0, "messages": 0, "events": 0, "bytes": 0, "detail": "",
    }  # fmt: skip
    try:
        data = location.load(name)
        manifest = manifests.decode_manifest(data, hour)
    except FileNotFoundError:
        if listed is None:
            return found | _without_manifest(location, hour)
        found |= {"messages": listed["messages"], "events": listed["events"]}
        return found | {"status": "missing", "detail": f"{location.path(name)} is missing; the catalogue names it"}
    except ValueError as error:
        return found | {"status": "damaged", "detail": f"{location.path(name)}: {error}"}
    found |= {"version": manifest["version"], "bytes": sum(part["bytes"] for part in manifest["files"])}
    found |= {kind: manifests.rows(manifest, kind) for kind in KIND.values()}
    problems = [f"{location.path(name)} {problem}" for problem in _of_manifest(manifest)]
    if listed is not None and not catalogue.lists(hour, data):
        problems.insert(0, f"{location.path(name)} is not the one that the catalogue names")
    for kind in KIND.values():
        problems += _of_files(location, manifest, hour, kind)
    if problems:
        more = f"; {len(problems) - 1} more" if len(problems) > 1 else ""
        return found | {"status": "damaged", "detail": f"{problems[0]}{more}"}
    if listed is None and catalogue.names:
        return found | {"status": "unfinished", "detail": "no catalogue names it yet"}
    return found


def _hour_of(name: str) -> int | None:
    return manifests.hour_of(name.removeprefix("hour=")) if name.startswith("hour=") else None


def _is_foreign(name: str) -> bool:
    return name[0] not in "._" and _hour_of(name) is None


def _without_manifest(location: Location, hour: int) -> dict[str, Any]:
    """Judge an hour that has directories, but neither a manifest nor a row in the catalogue."""
    name = hour_name(hour)
    names = [
        f"{kind}/hour={name}/{file}" for kind in KIND.values() for file in location.list(f"{kind}/hour={name}") or ()
    ]
    files = [file for file in names if file.rpartition("/")[2][0] not in "._"]
    if any(lease.startswith(f"{name}.") for lease in location.list("_lease") or ()):
        return {"status": "unfinished", "detail": "a run of archive writes it, or was interrupted"}
    if not files:
        return {"status": "unfinished", "detail": "a run of archive was interrupted before it wrote a file"}
    what = "has no manifest; readers of the directory count its rows: archive the hour again, or move the file away"
    return {"status": "damaged", "detail": f"{location.path(files[0])} {what}"}


def _of_manifest(manifest: HourManifest) -> list[str]:
    """Describe each contradiction within an hour's manifest."""
    found = []
    source = manifests.source_of(manifest)
    rows = tuple(manifests.rows(manifest, kind) for kind in KIND.values())
    if manifest["version"] > 1 and (source is None or rows != source[:2]):
        found.append(f"names files of {rows[0]} messages and {rows[1]} events, and its source has others")
    return found


def _of_files(location: Location, manifest: HourManifest, hour: int, kind: str) -> list[str]:
    """Describe an hour's damaged files, and files that its manifest does not name."""
    found, at = [], 0
    parts = manifests.of_kind(manifest, kind)
    for part in parts:
        if problem := problem_of(location, part, kind, at, manifests.rows(manifest, "messages")):
            found.append(f"{location.path(part['path'])}: {problem}")
        at += part["rows"]
    directory, named = f"{kind}/hour={hour_name(hour)}", {part["path"] for part in parts}
    for name in location.list(directory) or ():
        if name[0] not in "._" and f"{directory}/{name}" not in named:
            where = location.path(f"{directory}/{name}")
            found.append(f"{where} is not in the manifest; readers of the directory count its rows")
    return found


def problem_of(location: Location, part: PartFile, kind: str, at: int, entries: int) -> str:
    """Describe what is wrong with an archived file: it differs from its manifest, or has wrong rows. at: number of the
    file's first row in its hour. entries: number of the hour's entries."""
    if problem := difference(location, part):
        return problem
    try:
        with location.open(part["path"]) as file:
            return _of_rows(pq.ParquetFile(file), kind, at, entries)
    except (pa.ArrowInvalid, KeyError) as error:
        return str(error)


def _of_rows(file: Any, kind: str, at: int, entries: int) -> str:
    number, needed = _NEEDED[kind]
    for batch in file.iter_batches(_ROWS, columns=list({number, "entry", *needed})):
        numbers = np.asarray(batch.column(number))
        wrong = numbers != np.arange(at, at + len(numbers))
        if wrong.any():
            n = int(wrong.argmax())
            return f"{number} {at + n} is {numbers[n]}"
        for name in needed:
            if missing := batch.column(name).null_count:
                n = int(np.asarray(batch.column(name).is_null()).argmax())
                return f"{missing} rows have no {name}, the first is {number} {at + n}"
        if kind == "events" and (np.asarray(batch.column("entry")) >= entries).any():
            return "an event is of an entry that the hour does not have"
        at += len(numbers)
    return ""
