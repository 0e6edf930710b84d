"""Check that hour files are as they were written, and that all entries and names that their rows refer to exist. Jobs
run this check before they use the files.

A file with a known checksum is read once and compared with it: this covers every entry, event and body. If they differ,
and in copies without a checkpoint, each row and record is checked, to name the damaged place and not the first symptom.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hadelay.codec.checksums import crc32c
from hadelay.codec.formats import NAME_SIZE, nack_reason
from hadelay.errors import DamagedFile
from hadelay.model import NONE32, Event, hour_name
from hadelay.pipeline.archived import KIND, WithArchive, parts
from hadelay.pipeline.audit import problem_of
from hadelay.pipeline.hourfiles import (
    ROW,
    WAY_OUT,
    HourFiles,
    NameMap,
    Rows,
    Store,
    damage,
    find_damage,
    find_misfiled,
    rows,
)
from hadelay.pipeline.schema import Options
from hadelay.pipeline.tasks import Progress, each, silent

#: Files of an hour in the order of checking: entries (.idx) first, because they say where records (.log) are.
SUFFIXES = ("idx", "dsp", "log")
_CHUNK = 8 << 20
_ROWS = 1 << 17
_NO_NODE = 0xFF


def check(
    spark: Any,
    store: Store,
    hours: Sequence[HourFiles],
    options: Options,
    suffixes: Sequence[str] = SUFFIXES,
    progress: Progress = silent,
) -> None:
    """Check files of hours. Raises DamagedFile for the first damaged file. With onTorn=skip, no file is checked: jobs
    read all readable rows."""
    if options.on_torn == "skip":
        return
    asked = [(files, suffix) for files in sorted(hours) for suffix in suffixes]
    answers = each(spark, partial(_check_file, store, store.names()), asked, progress)
    found = [(files, *answer) for (files, _), answer in zip(asked, answers, strict=True) if answer is not None]
    if not found:
        return
    files, error, by_sum = found[0]
    if by_sum and sum(other is files and also for other, _, also in found) > 1:
        # Report the checkpoint if several files of an hour are sound except that they differ from its checksums.
        error = DamagedFile(store.where(files, "state.mdb"), error.offset, error.what)
    raise error


def _check_file(store: Store, names: NameMap, asked: tuple[HourFiles, str]) -> tuple[DamagedFile, bool] | None:
    """Check one file: (error, whether only the file's checksum shows it); None if the file is sound."""
    files, suffix = asked
    try:
        if files.archived:
            _check_archived(store, files, suffix)
        elif files.crcs is None or crc_of(store, files, suffix) != files.crcs[("log", "idx", "dsp").index(suffix)]:
            if (error := find_damage(store, files, suffix)) is not None:
                return error, False
            if files.crcs is not None:
                what = "every part verifies, but the file's checksum differs from the checkpoint's"
                said = f"hour {hour_name(files.hour)}: {what}; {WAY_OUT}"
                return DamagedFile(store.where(files, suffix), 0, said), True
            if (error := find_misfiled(store, files, suffix)) is not None:
                return error, False
            if suffix == "idx":
                # The `names` file of a copy may be older than the entries, whose numbers then have no names.
                check_references(store, files, names, "idx")
    except DamagedFile as error:
        return error, False
    return None


def _check_archived(store: Store, files: HourFiles, suffix: str) -> None:
    """Raise DamagedFile if Parquet files of an archived hour differ from its manifest. suffix: idx for the files of
    messages, dsp for the files of events. The files of messages include the bodies, so the suffix log
    needs no check."""
    if suffix not in KIND:
        return
    assert isinstance(store, WithArchive)
    at = 0
    for part in parts(store.archive, files.hour, KIND[suffix]):
        if problem := problem_of(store.archive, part, KIND[suffix], at, files.entries):
            what = f"{problem}; restore the file, or leave the hour out with onTorn=skip"
            raise DamagedFile(store.archive.path(part["path"]), 0, f"hour {hour_name(files.hour)}: {what}")
        at += part["rows"]


def crc_of(store: Store, files: HourFiles, suffix: str) -> int:
    """CRC-32C of the committed bytes of a file."""
    crc, length = 0, files.length(suffix)
    for at in range(0, length, _CHUNK):
        data = store.read(files, suffix, at, min(at + _CHUNK, length))
        crc = crc32c(np.ascontiguousarray(data).data, crc)
    return crc


class _Missing(NamedTuple):
    """Rows that refer to a missing name or entry, as a mask, and the error's text about them."""

    which: npt.NDArray[np.bool_]
    #: Error text, in which {} stands for the number that the row has in `values`.
    what: str
    values: npt.NDArray[np.integer]
    #: Whether the rows refer to a missing name; False if they refer to a missing entry.
    name: bool = True


def check_references(store: Store, files: HourFiles, names: NameMap, suffix: str) -> None:
    """Raise DamagedFile for the first entry (.idx) or event (.dsp) that refers to a missing name or entry."""
    count = files.entries if suffix == "idx" else files.events
    for at in range(0, count, _ROWS):
        found = rows(store, files, suffix, at, min(at + _ROWS, count))
        for missing in _of_index(found, names) if suffix == "idx" else _of_events(files, found, names):
            if not missing.which.any():
                continue
            n = int(missing.which.argmax())
            what = missing.what.format(missing.values[n])
            if not missing.name:
                raise damage(store, files, suffix, at + n, what)
            end = sum(NAME_SIZE + len(name.encode()) for known in names for name in known)
            row = f"{ROW[suffix].name} {at + n} of hour {hour_name(files.hour)}"
            raise DamagedFile(
                store.where(files, "names"), end, f"the file ends here, and {row} is of {what}; {WAY_OUT}"
            )


def _of_index(found: Rows, names: NameMap) -> Iterator[_Missing]:
    yield _Missing(found["topic"] >= len(names.topics), "topic number {}", found["topic"])


def _of_events(files: HourFiles, found: Rows, names: NameMap) -> Iterator[_Missing]:
    kinds, consumers, nodes = found["event"], found["consumer"], found["node"]
    yield _Missing((kinds == 0) | (kinds > max(Event)), "there is no event of kind {}", kinds, name=False)
    yield _Missing(found["index"] >= files.entries, "entry {} is not in the index", found["index"], name=False)
    unknown = (kinds < Event.MOVED) & (consumers != NONE32) & (consumers >= len(names.consumers))
    yield _Missing(unknown, "consumer number {}", consumers)
    yield _Missing((nodes != _NO_NODE) & (nodes >= len(names.nodes)), "node number {}", nodes)
    reasons = nack_reason(found["other_hour"])
    unknown = (kinds == Event.NACKED) & (reasons != NONE32) & (reasons >= len(names.reasons))
    yield _Missing(unknown, "reason number {}", reasons)


def log_bytes(store: Store, files: HourFiles) -> int:
    """Length of a .log up to the end of its last record: without a checkpoint, a .log may end in zeroes."""
    end = 0
    for at in range(0, files.entries, _ROWS):
        found = rows(store, files, "idx", at, min(at + _ROWS, files.entries))
        end = max(end, int((found["offset"] + found["size"]).max()))
    return end
