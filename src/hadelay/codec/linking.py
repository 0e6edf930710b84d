"""The linked index: each index entry has its position in its second, and the number of the second's previous entry.

A batch is grouped by key with one stable sort; then each entry gets the rank within its group and the number of the
entry before it, continuing from the heads {last, count} that the key had before. Keys are seconds of one hour, or (slot
× 3600 + second) over several hours, or hours alone in the buffer of far hours.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.checksums import RowCrc
from hadelay.codec.formats import DISPATCH, I64, INDEX, RECORD, SECONDS_PER_HOUR, U32, Rows
from hadelay.model import NONE32

Numbers = NDArray[np.integer]
INDEX_CRC, DISPATCH_CRC, RECORD_CRC = RowCrc(INDEX), RowCrc(DISPATCH), RowCrc(RECORD)

#: Number of rows below which a Python loop links rows faster than numpy does.
_FEW = 12


class Heads(NamedTuple):
    """Heads of an hour's linked lists of index entries, one list per second. last: number (globalIndex) of the second's
    last entry, NONE32 for none. count: number of the second's entries."""

    last: U32
    count: U32  # type: ignore[assignment]  # shadows tuple.count, which nobody needs


class Groups(NamedTuple):
    """Rows grouped by key. order: stable sort by key. Group g: order[firsts[g] : firsts[g] + sizes[g]]."""

    order: NDArray[np.intp]
    firsts: NDArray[np.intp]
    sizes: NDArray[np.intp]


def no_heads(hours: int = 1) -> Heads:
    """Heads of empty lists for a number of hours: 3600 seconds per hour, one hour after another."""
    n = hours * SECONDS_PER_HOUR
    return Heads(np.full(n, NONE32, np.uint32), np.zeros(n, np.uint32))


def group(keys: Numbers) -> Groups:
    """Group rows by key. keys: at least one; u2 keys sort 25 times faster (radix sort) than wider keys."""
    order = keys.argsort(kind="stable")
    ordered = keys[order]
    new = np.empty(len(keys), np.bool_)
    new[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=new[1:])
    firsts = np.flatnonzero(new)
    sizes = np.empty_like(firsts)
    np.subtract(firsts[1:], firsts[:-1], out=sizes[:-1])
    sizes[-1] = len(keys) - firsts[-1]
    return Groups(order, firsts, sizes)


def chain(
    keys: Numbers, numbers: Numbers, last: Numbers, count: Numbers, groups: Groups | None = None
) -> tuple[Numbers, Numbers]:
    """Link rows with equal keys; returns (rank, previous) of each row. rank: number of earlier rows with the row's key.
    previous: number of the latest earlier row with the row's key.

    numbers: what the rows are called, in the dtype of `last`. last, count: per key, continued in place.
    """
    if len(keys) == 1:
        key = int(keys[0])
        own, before = count[key : key + 1].copy(), last[key : key + 1].copy()
        last[key] = numbers[0]
        count[key] += 1
        return own, before
    order, firsts, sizes = groups or group(keys)
    heads = keys[order[firsts]]
    named = numbers[order]
    previous_sorted = np.empty_like(named)
    previous_sorted[1:] = named[:-1]
    previous_sorted[firsts] = last[heads]
    rank_sorted = np.arange(len(keys)) + np.repeat(count[heads] - firsts, sizes)
    last[heads] = named[firsts + sizes - 1]
    count[heads] += sizes.astype(count.dtype)
    rank, previous = np.empty(len(keys), count.dtype), np.empty_like(named)
    rank[order], previous[order] = rank_sorted, previous_sorted
    return rank, previous


def place(keys: Numbers, sizes: I64, ends: I64, groups: Groups | None = None) -> I64:
    """Offset at which each record is appended to its file. keys: number of each record's file. sizes: bytes of each
    record. ends: length of each file by its number, updated in place."""
    if len(keys) == 1:
        key = int(keys[0])
        start = ends[key : key + 1].copy()
        ends[key] += sizes[0]
        return start
    order, firsts, counts = groups or group(keys)
    ordered = sizes[order]
    before = ordered.cumsum() - ordered
    heads = keys[order[firsts]]
    starts = np.empty_like(before)
    starts[order] = before + np.repeat(ends[heads] - before[firsts], counts)
    ends[heads] += np.add.reduceat(ordered, firsts)
    return starts


def link(rows: Rows, heads: Heads) -> None:
    """Link new INDEX rows of one hour, whose `second` and `index` are set: set `local` and `pre`, update the heads."""
    last, count = heads
    if len(rows) < _FEW:
        for row, second, index in zip(rows, rows["second"].tolist(), rows["index"].tolist(), strict=True):
            row["local"], row["pre"] = count[second], last[second]
            last[second] = index
            count[second] += 1
        return
    rows["local"], rows["pre"] = chain(rows["second"], rows["index"], last, count)


def catch_up(keys: Numbers, indexes: U32, last: U32, count: U32) -> None:
    """Update heads of linked lists for entries that are linked already: after the heads were rebuilt, or read from a
    cached copy that lacks the newest entries."""
    # Keep the highest index of each key. Compare index + 1: NONE32 (no entry) wraps to 0, the lowest.
    ends = last + np.uint32(1)
    np.maximum.at(ends, keys, indexes + np.uint32(1))
    np.subtract(ends, np.uint32(1), out=last)
    count += np.bincount(keys, minlength=len(count)).astype(np.uint32)
