"""Where hour files are damaged: the first entry, event or record that is not as it was written.

Rows carry checksums of their own, but a row that was removed, doubled or swapped with another verifies wherever it
stands. Its place is told by what refers to it: entry n says that it is entry n, an event names the one before it of the
same message, and the records of a .log follow each other without a gap.
Nothing here opens a file: `locate` is given what reads one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hadelay.codec.formats import DISPATCH, DISPATCH_SIZE, INDEX, INDEX_SIZE, RECORD_SIZE
from hadelay.codec.linking import DISPATCH_CRC, INDEX_CRC, group
from hadelay.codec.records import check_record, decode_record
from hadelay.model import NONE32

Rows = npt.NDArray[np.void]
#: (suffix, start, stop) → those bytes of the file.
Read = Callable[[str, int, int], npt.NDArray[np.uint8]]
#: Rows that are looked at together.
_AT_ONCE = 1 << 16
_LOG_AT_ONCE = 8 << 20


class Flaw(NamedTuple):
    """suffix: the file, idx, dsp or log; number: of the entry or event; offset and size: in bytes."""

    suffix: str
    number: int
    offset: int
    size: int
    what: str


def locate(suffix: str, read: Read, entries: int, events: int, log_bytes: int, *, promised: bool) -> Flaw | None:
    """The first flaw of that file, or of the .idx that a .log is read by; None if all of it verifies by itself.
    entries, events, log_bytes: what is there. promised: the .log has to have so many bytes; else it may end in zeroes,
    and what is behind its end is not known."""
    if suffix == "dsp":
        return in_events(read("dsp", 0, events * DISPATCH_SIZE).view(DISPATCH))
    index = read("idx", 0, entries * INDEX_SIZE).view(INDEX)
    flaw = in_index(index, log_bytes if promised else None)
    if flaw is not None or suffix == "idx":
        return flaw
    return in_records(index, lambda start, stop: read("log", start, min(stop, log_bytes)).tobytes(), log_bytes)


def in_rows(found: Rows, suffix: str, first: int = 0, *, crc: bool = True) -> npt.NDArray[np.intp]:
    """Positions of the rows that cannot stand there. found: rows `first`, `first` + 1, … of the file. crc: compare
    their checksums too."""
    bad = np.zeros(0, np.intp)
    if suffix == "idx":
        bad = np.flatnonzero(found["index"] != np.arange(first, first + len(found), dtype=np.uint32))
    if crc:
        check = INDEX_CRC if suffix == "idx" else DISPATCH_CRC
        bad = np.union1d(bad, check.bad(np.ascontiguousarray(found)))
    return bad


def in_index(found: Rows, log_bytes: int | None = None) -> Flaw | None:
    """The first entry of an .idx that is damaged. log_bytes: how long the .log is, if that is known to be right."""
    for at in range(0, len(found), _AT_ONCE):
        some = found[at : at + _AT_ONCE]
        if len(bad := in_rows(some, "idx", at)):
            n = int(bad[0])
            own = int(some["index"][n])
            sound = not len(INDEX_CRC.bad(np.ascontiguousarray(some[n : n + 1])))
            return _entry(at + n, f"entry {own} stands here" if sound else "the entry's CRC is wrong")
        if log_bytes is not None:
            ends = some["offset"] + some["size"]
            if len(beyond := np.flatnonzero((ends > log_bytes) | (ends < some["offset"]))):
                return _entry(at + int(beyond[0]), f"its record lies behind the end of the .log, {log_bytes} bytes")
    if len(wrong := np.flatnonzero(found["pre"] != _before(found["second"]))):
        return _entry(int(wrong[0]), "the entry before it in its second is another one")
    return None


def in_events(found: Rows) -> Flaw | None:
    """The first event of a .dsp that is damaged, as far as the events themselves tell."""
    for at in range(0, len(found), _AT_ONCE):
        if len(bad := in_rows(found[at : at + _AT_ONCE], "dsp", at)):
            return _event(at + int(bad[0]), "the event's CRC is wrong")
    before = _before(found["index"])
    if not len(wrong := np.flatnonzero(found["previous"] != before)):
        return None
    said, n = found["previous"][wrong], len(found)
    # An event whose predecessor is not where it says accuses that place; else one of its own message came in between.
    there = np.minimum(said, n - 1)
    own = (said == NONE32) | ((said < n) & (found["index"][there] == found["index"][wrong]) & (said < wrong))
    blamed = np.where(own, wrong, np.minimum(said, wrong))
    return _event(int(blamed.min()), "the events around it do not follow each other: one is missing, or out of place")


def in_records(index: Rows, read: Callable[[int, int], bytes], log_bytes: int) -> Flaw | None:
    """The first record of a .log that is damaged, or that no entry names. index: all of the .idx, which is sound; read:
    bytes [start, stop) of the .log, up to log_bytes."""
    order = np.argsort(index["offset"], kind="stable")
    offsets, sizes = index["offset"][order].astype(np.int64), index["size"][order].astype(np.int64)
    end, start, data = 0, 0, b""
    for n, at, size in zip(order.tolist(), offsets.tolist(), sizes.tolist(), strict=True):
        if at + size <= end:  # of a message that returned to waiting within its hour
            continue
        if at != end:
            return _gap(len(index), end, at)
        if at + size > start + len(data):
            start, data = at, read(at, max(at + size, at + _LOG_AT_ONCE))
        record = data[at - start : at - start + size]
        what = check_record(record, size)
        if what is None and (first := decode_record(record).first_id) != int(index["first_id"][n]):
            what = f"the record of another message stands here, {first:x}"
        if what is not None:
            return Flaw("log", n, at, size, f"entry {n}: {what}")
        end = at + size
    if end < log_bytes and any(read(end, end + RECORD_SIZE)):
        return _gap(len(index), end, log_bytes)
    return None


def _gap(entries: int, end: int, start: int) -> Flaw:
    return Flaw(
        "idx", entries, entries * INDEX_SIZE, INDEX_SIZE,
        f"bytes {end} to {start} of the .log belong to no entry: the .idx has lost what named them",
    )  # fmt: skip


def _before(keys: npt.NDArray[np.integer]) -> npt.NDArray[np.uint32]:
    """Of each row the position of the last one before it with the same key, NONE32 for the first."""
    found = np.full(len(keys), NONE32, np.uint32)
    if len(keys):
        order, firsts, _ = group(np.ascontiguousarray(keys))
        found[order[1:]] = order[:-1]
        found[order[firsts]] = NONE32
    return found


def _entry(number: int, what: str) -> Flaw:
    return Flaw("idx", number, number * INDEX_SIZE, INDEX_SIZE, f"entry {number}: {what}")


def _event(number: int, what: str) -> Flaw:
    return Flaw("dsp", number, number * DISPATCH_SIZE, DISPATCH_SIZE, f"event {number}: {what}")
