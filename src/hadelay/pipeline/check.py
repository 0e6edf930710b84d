"""Are the files of hours those that were written, and is all there that they refer to? Asked before a job judges,
counts or copies them.

A file whose checksum the listing knows is read once and compared with that: this covers every entry, event and body.
Where it differs, and in copies without a checkpoint, which know none, each row and record is looked at, so that what is
named is the damaged place and not the first that noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hadelay.codec.checksums import crc32c
from hadelay.codec.formats import NAME_SIZE, nack_reason
from hadelay.errors import DamagedFile
from hadelay.model import NONE32, Event, hour_name
from hadelay.pipeline.archived import KIND, WithArchive, read_manifest
from hadelay.pipeline.audit import of_part
from hadelay.pipeline.hourfiles import ROW, WAY_OUT, HourFiles, Names, Rows, Store, flaw_of, rows
from hadelay.pipeline.schema import Options
from hadelay.pipeline.tasks import Progress, each, silent
from hadelay.storage import manifests
from hadelay.storage.locations import Location

#: In this order: the entries say where records are.
SUFFIXES = ("idx", "dsp", "log")
_CHUNK = 8 << 20
_ROWS = 1 << 17
_NO_NODE = 0xFF


class Found(NamedTuple):
    """A DamagedFile, as it comes from a task. all_verifies: only the file's checksum says that it is one."""

    path: str
    offset: int
    what: str
    size: int
    all_verifies: bool = False


def check(
    spark: Any, store: Store, hours: Sequence[HourFiles], options: Options, suffixes: Sequence[str] = SUFFIXES,
    progress: Progress = silent,
) -> None:  # fmt: skip
    """DamagedFile for the first of these files that is not as it was written; nothing with onTorn=skip, which asks for
    what can be read. A task per file."""
    if options.on_torn == "skip":
        return
    names = store.names()
    asked = [(files, suffix) for files in sorted(hours) for suffix in suffixes]
    answers = each(spark, partial(_check_file, store, names), asked, progress)
    told = [(files, found) for (files, _), found in zip(asked, answers, strict=True) if found is not None]
    if not told:
        return
    files, found = told[0]
    if found.all_verifies and sum(other is files and f.all_verifies for other, f in told) > 1:
        found = found._replace(path=store.where(files, "state.mdb"))  # not all of them are wrong, but what they all fit
    raise DamagedFile(found.path, found.offset, found.what, size=found.size)


def _check_file(store: Store, names: Names, asked: tuple[HourFiles, str]) -> Found | None:
    files, suffix = asked
    if files.archived:
        return _check_archived(store, files, suffix)
    try:
        found = check_file(store, files, suffix)
        if found is None and files.crcs is None and suffix == "idx":
            says_all(store, files, names, "idx")  # a copy without a checkpoint, whose `names` may have lost their end
    except DamagedFile as error:  # shorter than the listing says, or without a name
        what = str(error).partition(": ")[2]
        return Found(error.path, error.offset, what, error.size)
    return found


def check_file(store: Store, files: HourFiles, suffix: str) -> Found | None:
    """What is wrong with that file of the hour; None if nothing is. DamagedFile where it ends too early."""
    if files.crcs is not None and crc_of(store, files, suffix) == files.crc(suffix):
        return None
    hour = f"hour {hour_name(files.hour)}"
    if (flaw := flaw_of(store, files, suffix)) is not None:
        return Found(store.where(files, flaw.suffix), flaw.offset, f"{hour}, {flaw.what}; {WAY_OUT}", flaw.size)
    if files.crcs is None:
        return None
    what = f"{hour}: all that is in it verifies, and its checksum is another one than the checkpoint's; {WAY_OUT}"
    return Found(store.where(files, suffix), 0, what, 0, all_verifies=True)


def _check_archived(store: Store, files: HourFiles, suffix: str) -> Found | None:
    """The hour's Parquet files, as its manifest has them: of messages as .idx, of events as .dsp; bodies are in one of
    these."""
    if suffix not in KIND:
        return None
    assert isinstance(store, WithArchive)
    location = Location(store.archive)
    manifest, at = read_manifest(location, files.hour), 0
    for part in manifests.of_kind(manifest, KIND[suffix]):
        if problems := of_part(location, part, KIND[suffix], at, files.entries):
            where = location.path(part["path"])
            what = problems[0].removeprefix(where).lstrip(": ")
            way_out = "restore the file, or leave the hour out with onTorn=skip"
            return Found(where, 0, f"hour {hour_name(files.hour)}: the file {what}; {way_out}", 0)
        at += part["rows"]
    return None


def crc_of(store: Store, files: HourFiles, suffix: str) -> int:
    """CRC-32C of what is committed of that file."""
    crc, length = 0, files.length(suffix)
    for at in range(0, length, _CHUNK):
        data = store.read(files, suffix, at, min(at + _CHUNK, length))
        crc = crc32c(np.ascontiguousarray(data).data, crc)
    return crc


# ---- what rows refer to


class _Lack(NamedTuple):
    """bad: rows that lack something. said: of one of them. names: it is a name."""

    bad: npt.NDArray[np.bool_]
    said: Callable[[Any], str]
    names: bool = True


def says_all(store: Store, files: HourFiles, names: Names, suffix: str) -> None:
    """DamagedFile for the first entry (idx) or event (dsp) that refers to what is not there."""
    count = files.entries if suffix == "idx" else files.events
    for at in range(0, count, _ROWS):
        found = rows(store, files, suffix, at, min(at + _ROWS, count))
        for lack in _of_index(found, names) if suffix == "idx" else _of_events(files, found, names):
            if lack.bad.any():
                n = int(lack.bad.argmax())
                raise _damage(store, files, names, suffix, at + n, lack.said(found[n]), of_names=lack.names)


def _damage(
    store: Store, files: HourFiles, names: Names, suffix: str, number: int, said: str, *, of_names: bool
) -> DamagedFile:  # fmt: skip
    hour, row = f"hour {hour_name(files.hour)}", f"{ROW[suffix][2]} {number}"
    if of_names:
        end = sum(NAME_SIZE + len(name.encode()) for known in astuple(names) for name in known)
        what = f"the file ends here, and {row} of {hour} is of {said}; {WAY_OUT}"
        return DamagedFile(store.where(files, "names"), end, what)
    size = ROW[suffix][0].itemsize
    return DamagedFile(store.where(files, suffix), number * size, f"{hour}, {row}: {said}", size=size)


def _of_index(found: Rows, names: Names) -> list[_Lack]:
    return [_Lack(found["topic"] >= len(names.topics), lambda row: f"topic number {row['topic']}")]


def _of_events(files: HourFiles, found: Rows, names: Names) -> list[_Lack]:
    kinds, moved = found["event"], found["event"] >= Event.MOVED
    consumers = ~moved & (found["consumer"] != NONE32) & (found["consumer"] >= len(names.consumers))
    reason = nack_reason(found["other_hour"])
    reasons = (kinds == Event.NACKED) & (reason != NONE32) & (reason >= len(names.reasons))
    nodes = (found["node"] != _NO_NODE) & (found["node"] >= len(names.nodes))
    unknown = (kinds == 0) | (kinds > max(Event))
    return [
        _Lack(unknown, lambda row: f"there is no event of kind {row['event']}", names=False),
        _Lack(found["index"] >= files.entries, lambda row: f"entry {row['index']} is not in the index", names=False),
        _Lack(consumers, lambda row: f"consumer number {row['consumer']}"),
        _Lack(nodes, lambda row: f"node number {row['node']}"),
        _Lack(reasons, lambda row: f"reason number {nack_reason(row['other_hour'])}"),
    ]


def log_bytes(store: Store, files: HourFiles) -> int:
    """Where the last record ends: a .log that no checkpoint measures may end in zeroes."""
    end = 0
    for at in range(0, files.entries, _ROWS):
        found = rows(store, files, "idx", at, min(at + _ROWS, files.entries))
        end = max(end, int((found["offset"] + found["size"]).max()))
    return end
