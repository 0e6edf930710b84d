"""State of the entries of one hour, as bitmaps. Hours without any event have no HourState."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap

from hadelay.codec.formats import SECONDS_PER_HOUR, U32, Mask
from hadelay.model import Event

#: Below this number of indexes, a Python loop is faster than a new bitmap.
_FEW = 64


def bitmap(indexes: U32) -> BitMap:
    # pyroaring reads an array.array five times faster than a numpy array.
    return BitMap(array("I", indexes.tobytes()))


def indexes_of(bits: BitMap) -> U32:
    return np.frombuffer(bits.to_array(), np.uint32)


_NONE = BitMap()


def is_in(indexes: U32, bits: BitMap, others: BitMap = _NONE) -> Mask:
    """Which of these indexes are in at least one of the two bitmaps."""
    if len(indexes) < _FEW:
        return np.array([index in bits or index in others for index in indexes.tolist()], np.bool_)
    wanted = bitmap(indexes)
    found = (wanted & bits) | (wanted & others)
    return np.isin(indexes, indexes_of(found)) if found else np.zeros(len(indexes), np.bool_)


#: Limit of distinct values in a column up to which `rows_by_value` compares the column with each value; beyond, it
#: sorts.
_DISTINCT = 8


def rows_by_value(column: NDArray[Any]) -> Iterator[tuple[int, slice | NDArray[np.intp]]]:
    """Yield (value, positions) for each distinct value of a column; positions of a single value are a slice."""
    if not len(column):
        return
    first = column[0]
    if len(column) == 1 or (column == first).all():
        yield int(first), slice(None)
        return
    values = sorted(set(column.tolist()))
    if len(values) <= _DISTINCT:
        yield from ((value, (column == value).nonzero()[0]) for value in values)
        return
    order = column.argsort(kind="stable")
    ends = np.flatnonzero(np.diff(column[order])) + 1
    yield from zip(values, np.split(order, ends), strict=True)


@dataclass(slots=True, eq=False)
class HourState:
    """State of one hour's index entries. An entry that is not in `settled` is open; leased entries are open, too.
    The fields are a row of a checkpoint, in this order (ledger/rowformats.py)."""

    #: Settled entries, whatever ended them.
    settled: BitMap = field(default_factory=BitMap)
    #: Entries that a late ack ended, that is, while they were not leased. A repetition of such an ack is answered with
    #: "already acked" instead of "lease lost".
    late: BitMap = field(default_factory=BitMap)
    #: Settled entries that did not end with an ack, by what ended them: TTL_EXPIRED, CANCELLED, MOVED, DEAD.
    others: dict[Event, BitMap] = field(default_factory=dict)
    #: Leased entries; derived from the open grants, so not stored in checkpoints.
    leased: BitMap = field(default_factory=BitMap, init=False)
    #: Number of open entries that are not blocked, in each second, u4[3600]; kept while the hour runs or has open
    #: entries.
    open_seconds: U32 | None = None
    #: Number of entries whose message was filed in another entry before; the table `place` points at such entries.
    returned: int = 0
    #: Numbers of the entries at which maintenance continues: `carried` for CARRY, `retire_at` for RETIRE and DROP_DEAD.
    carried: int = 0
    retire_at: int = 0
    #: Number of entries whose message has a client key.
    keyed: int = 0
    #: Time in Unix ms at which the last message of this hour was settled.
    settled_at_ms: int = 0
    #: Numbers of the topics of settled messages. The hour is kept for the longest retention of these topics.
    topics: BitMap = field(default_factory=BitMap)
    #: Entries that wait behind their message group (ledger/groups/messagegroups.py).
    blocked: BitMap = field(default_factory=BitMap)
    #: Waiting entries of messages of which an attempt failed (ledger/hours/retries.py).
    retrying: BitMap = field(default_factory=BitMap)
    #: Number of results of acks in an hour of dead letters (ledger/leases/ackresults.py).
    results: int = 0
    #: Entries of copies that fills made (ledger/messages/fills.py).
    filled: BitMap = field(default_factory=BitMap)
    #: By topic with a running fill: entries that were acked since the fill began, which may still have to be copied.
    unfilled: dict[int, BitMap] = field(default_factory=dict)
    #: Number of rows of the table `batchof` of this hour (ledger/batches/members.py).
    batched: int = 0

    def ended(self, index: int) -> Event | None:
        """Event that ended this entry; None while the entry is open."""
        if index not in self.settled:
            return None
        for event, bits in self.others.items():
            if index in bits:
                return event
        return Event.ACKED

    def settle(self, bits: BitMap, event: Event) -> None:
        self.settled |= bits
        if event is not Event.ACKED:
            kept = self.others.setdefault(event, BitMap())
            kept |= bits

    def add_seconds(self, seconds: NDArray[np.uint16]) -> None:
        if self.open_seconds is None:
            self.open_seconds = np.zeros(SECONDS_PER_HOUR, np.uint32)
        if len(seconds) == 1:
            self.open_seconds[seconds[0]] += 1
        else:
            np.add.at(self.open_seconds, seconds, np.uint32(1))

    def drop_seconds(self, seconds: NDArray[np.uint16]) -> None:
        if self.open_seconds is None:
            return
        if len(seconds) == 1:
            self.open_seconds[seconds[0]] -= 1
        else:
            np.subtract.at(self.open_seconds, seconds, np.uint32(1))
