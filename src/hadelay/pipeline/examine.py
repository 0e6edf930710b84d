"""Whether an hour says all that an archive of it needs: each event has its entry, each number its name.

Bytes that are not those that were written are found by check.py. Here rows are as they were written, and what they
refer to may be missing: in a copy without the end of `names`, say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hadelay.codec.formats import NAME_SIZE, nack_reason
from hadelay.errors import DamagedFile
from hadelay.model import NONE32, Event, hour_name
from hadelay.pipeline.hourfiles import ROW, HourFiles, Names, Rows, Store, rows

_ROWS = 1 << 17
_NO_NODE = 0xFF


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
        return DamagedFile(store.where(files, "names"), end, f"the file ends here, and {row} of {hour} is of {said}")
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
