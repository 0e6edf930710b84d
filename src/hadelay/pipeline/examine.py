"""Whether an hour's files are what they should be, before they become an archive that may be the only copy.

Each row has its own CRC and its own number, each event has its entry, each number of a topic, consumer, node or reason
has its name, and each record has an entry. What is wrong is named by file, hour and row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hadelay.core.checksums import crc32c
from hadelay.core.formats import DISPATCH, INDEX
from hadelay.core.linking import DISPATCH_CRC, INDEX_CRC
from hadelay.errors import DamagedFile
from hadelay.model import NONE32, Event, hour_name
from hadelay.pipeline.hourfiles import HourFiles, Names, Rows, Store, rows

_CHUNK = 8 << 20
_NO_NODE = 0xFF
_NAMES = "the file `names` is missing or cut off"

#: (which of the rows are wrong, what to say of the first of them)
Problem = tuple[np.ndarray, Callable[[np.void], str]]


def crc_of(store: Store, files: HourFiles, names: Names, suffix: str) -> int:
    """CRC-32C of the committed bytes of .log, .idx or .dsp. DamagedFile for a row that cannot be right."""
    size = {"log": 1, "idx": INDEX.itemsize, "dsp": DISPATCH.itemsize}[suffix]
    crc, count = 0, files.length(suffix) // size
    for at in range(0, count, _CHUNK // size):
        stop = min(at + _CHUNK // size, count)
        data = np.ascontiguousarray(store.read(files, suffix, at * size, stop * size))
        if suffix != "log":
            _check(store, files, suffix, at, data.view(INDEX if suffix == "idx" else DISPATCH), names)
        crc = crc32c(data.data, crc)
    return crc


def _check(store: Store, files: HourFiles, suffix: str, at: int, found: Rows, names: Names) -> None:
    wrong = np.zeros(len(found), np.bool_)
    wrong[(INDEX_CRC if suffix == "idx" else DISPATCH_CRC).bad(found)] = True
    problems: list[Problem] = [(wrong, lambda row: "the row's CRC does not hold")]
    problems += _of_index(found, at, names) if suffix == "idx" else _of_events(files, found, at, names)
    for bad, said in problems:
        if bad.any():
            n = int(bad.argmax())
            what = "entry" if suffix == "idx" else "event"
            raise DamagedFile(
                store.where(files, suffix), (at + n) * found.dtype.itemsize,
                f"hour {hour_name(files.hour)}, {what} {at + n}: {said(found[n])}", size=found.dtype.itemsize,
            )  # fmt: skip


def _of_index(found: Rows, at: int, names: Names) -> Sequence[Problem]:
    return [
        (found["index"] != np.arange(at, at + len(found)), lambda row: f"the row says that it is entry {row['index']}"),
        (found["topic"] >= len(names.topics), lambda row: f"topic number {row['topic']} has no name: {_NAMES}"),
    ]


def _of_events(files: HourFiles, found: Rows, at: int, names: Names) -> Sequence[Problem]:
    kinds, moved = found["event"], found["event"] >= Event.MOVED
    later = (found["previous"] != NONE32) & (found["previous"] >= np.arange(at, at + len(found)))
    consumers = ~moved & (found["consumer"] != NONE32) & (found["consumer"] >= len(names.consumers))
    reasons = (kinds == Event.NACKED) & (found["other_hour"] != NONE32) & (found["other_hour"] >= len(names.reasons))
    nodes = (found["node"] != _NO_NODE) & (found["node"] >= len(names.nodes))
    return [
        ((kinds == 0) | (kinds > max(Event)), lambda row: f"there is no event of kind {row['event']}"),
        (found["index"] >= files.entries, lambda row: f"entry {row['index']} is not in the index"),
        (later, lambda row: f"the row says that it follows event {row['previous']}"),
        (consumers, lambda row: f"consumer number {row['consumer']} has no name: {_NAMES}"),
        (nodes, lambda row: f"node number {row['node']} has no name: {_NAMES}"),
        (reasons, lambda row: f"reason number {row['other_hour']} has no name: {_NAMES}"),
    ]


def trimmed(store: Store, files: HourFiles) -> HourFiles:
    """The hour with the length of its .log, where no checkpoint names it: up to the end of the last record. DamagedFile
    for records that are in no entry: index rows are missing then."""
    step, pieces = _CHUNK // INDEX.itemsize, [np.zeros((0, 2), np.uint64)]
    for at in range(0, files.entries, step):
        found = rows(store, files, "idx", at, min(at + step, files.entries))
        pieces.append(np.stack([found["offset"], found["offset"] + found["size"]], axis=1))
    places = np.concatenate(pieces)
    places = places[places[:, 0].argsort(kind="stable")]
    ends = np.maximum.accumulate(np.r_[np.uint64(0), places[:, 1]])
    gaps = np.flatnonzero(places[:, 0] > ends[:-1])
    end = int(ends[gaps[0]] if len(gaps) else ends[-1])
    for at in range(end, files.log_bytes, _CHUNK):  # a file that was mapped ends in zeroes
        stop = min(at + _CHUNK, files.log_bytes)
        if len(gaps) or store.read(files, "log", at, stop).any():
            raise DamagedFile(
                store.where(files, "log"), end,
                f"hour {hour_name(files.hour)}: no entry has the record that begins here: rows of the .idx are missing",
            )  # fmt: skip
    return files._replace(log_bytes=min(end, files.log_bytes))
