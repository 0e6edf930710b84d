"""State of the entries of one hour, as bitmaps. Hours without any event have no HourState."""

from array import array
from collections.abc import Iterator
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


def groups(column: NDArray[Any]) -> Iterator[tuple[int, slice | NDArray[np.intp]]]:
    """Yield (value, positions) for each distinct value of a column; positions of a single value are a slice."""
    if not len(column):
        return
    first = column[0]
    if len(column) == 1 or (column == first).all():
        yield int(first), slice(None)
        return
    for value in sorted(set(column.tolist())):
        yield value, (column == value).nonzero()[0]


class HourState:
    """State of one hour's index entries. An entry that is not in `settled` is open; leased entries are open, too."""

    __slots__ = (
        "blocked", "carried", "filled", "keyed", "late", "leased", "open_seconds", "others", "results", "retire_at",
        "returned", "settled", "settled_at_ms", "topics", "unfilled",
    )  # fmt: skip

    def __init__(self) -> None:
        #: Settled entries, whatever ended them.
        self.settled = BitMap()
        #: Settled entries that did not end with an ack, by what ended them: TTL_EXPIRED, CANCELLED, MOVED, DEAD.
        self.others: dict[Event, BitMap] = {}
        #: Entries ended by a late ack, when they were not leased: tells a repetition of such an ack from a lost lease.
        self.late = BitMap()
        #: Leased entries; derived from the held grants.
        self.leased = BitMap()
        #: Entries that wait behind their message group (ledger/messagegroups.py).
        self.blocked = BitMap()
        #: Entries of copies that fills made (ledger/fills.py); and, by topic with a running fill, entries that were
        #: acked since the fill began, which may still have to be copied.
        self.filled = BitMap()
        self.unfilled: dict[int, BitMap] = {}
        #: Number of open entries that are not blocked, in each second, u4[3600]; kept while the hour runs or has open
        #: entries.
        self.open_seconds: U32 | None = None
        #: Number of entries whose message was filed in another entry before; the table `place` points at such entries.
        self.returned = 0
        #: Number of entries whose message has a client key.
        self.keyed = 0
        #: Number of results of acks in an hour of dead letters (ledger/ackresults.py).
        self.results = 0
        #: When the last message of this hour ended, and topics of ended messages: decide when the hour is deleted.
        self.settled_at_ms = 0
        self.topics = BitMap()
        #: Numbers of the next entries for maintenance: `carried` for CARRY, `retire_at` for RETIRE and DROP_DEAD.
        self.carried = 0
        self.retire_at = 0

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
