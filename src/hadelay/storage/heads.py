"""Heads of hours that are not mapped: an LRU in memory, `.heads` files behind it, the index behind those.

Two years of dense heads would be half a gigabyte. The file is a cache: when it is missing, bad or behind, the index
entries it has not seen are read, in one vectorised pass. It is written when an hour leaves the LRU and is worth it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import closing

import numpy as np
import numpy.typing as npt

from hadelay.codec.checksums import crc32c
from hadelay.codec.formats import COUNTER, FORMAT_VERSION, HEAD, HEADS, HEADS_MAGIC, INDEX_SIZE, SECONDS_PER_HOUR
from hadelay.codec.linking import INDEX_CRC, Heads, catch_up, no_heads
from hadelay.errors import DamagedFile
from hadelay.platform.disk import Disk, read_file

#: How far a `.heads` file may lag before it is written again: reading so many entries takes a millisecond.
WORTH_WRITING = 16_384
#: Up to here {topic, minute} are counted in an array, which is twenty times faster than by sorting.
_DENSE_KEYS = 1 << 18
#: Entries read at once while catching up: to read and verify so many takes two milliseconds.
_SCAN = 16_384

ReadRows = Callable[[int, int, int], npt.NDArray[np.void]]


class Derived:
    """What is derived from the first `entries` entries of one hour's index."""

    __slots__ = ("counted", "counters", "entries", "heads", "on_disk")

    def __init__(self) -> None:
        self.heads = no_heads()
        self.entries = 0
        self.counters = no_counters()
        self.counted = 0
        #: How many entries the `.heads` file covers.
        self.on_disk = 0


def encode_heads(hour: int, derived: Derived) -> bytes:
    heads = np.empty(SECONDS_PER_HOUR, HEAD)
    heads["last"], heads["count"] = derived.heads
    header = np.zeros(1, HEADS)
    header[0] = (
        HEADS_MAGIC, FORMAT_VERSION, hour, derived.entries, derived.counted, len(derived.counters), 0,
    )  # fmt: skip
    body = heads.tobytes() + derived.counters.tobytes()
    header["crc"] = crc32c(body, crc32c(header.tobytes()[:-4]))
    return header.tobytes() + body


def decode_heads(data: bytes, hour: int) -> Derived | None:
    """None unless every byte verifies."""
    if len(data) < HEADS.itemsize:
        return None
    header = np.frombuffer(data, HEADS, 1)[0]
    body = data[HEADS.itemsize :]
    whole = SECONDS_PER_HOUR * HEAD.itemsize + int(header["counters"]) * COUNTER.itemsize
    if (header["magic"], header["version"], header["hour"]) != (HEADS_MAGIC, FORMAT_VERSION, hour):
        return None
    if len(body) != whole or crc32c(body, crc32c(data[: HEADS.itemsize - 4])) != header["crc"]:
        return None
    derived = Derived()
    heads = np.frombuffer(body, HEAD, SECONDS_PER_HOUR)
    derived.heads = Heads(heads["last"].copy(), heads["count"].copy())
    derived.counters = np.frombuffer(body, COUNTER, offset=SECONDS_PER_HOUR * HEAD.itemsize).copy()
    derived.entries, derived.counted = int(header["entries"]), int(header["counted"])
    derived.on_disk = derived.entries
    return derived


def no_counters() -> npt.NDArray[np.void]:
    return np.zeros(0, COUNTER)


def count_topics(counters: npt.NDArray[np.void], rows: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """COUNTER rows with those of INDEX `rows` added."""
    keys = rows["topic"].astype(np.int64) << 6 | rows["second"] // 60
    if len(keys) and keys.max() < _DENSE_KEYS:
        counts = np.bincount(keys)
        keys = np.flatnonzero(counts)
        counts = counts[keys]
    else:
        keys, counts = np.unique(keys, return_counts=True)
    keys = np.concatenate([counters["topic"].astype(np.int64) << 6 | counters["minute"], keys])
    pairs, inverse = np.unique(keys, return_inverse=True)
    merged = np.empty(len(pairs), COUNTER)
    merged["topic"], merged["minute"] = pairs >> 6, pairs & 63
    merged["count"] = np.bincount(inverse, np.concatenate([counters["count"], counts]), len(pairs))
    return merged


def bad_entry(path: str, index: int) -> DamagedFile:
    """Entry `index` of this .idx file does not verify."""
    return DamagedFile(path, index * INDEX_SIZE, "the entry's CRC does not hold", size=INDEX_SIZE)


class HeadsCache:
    def __init__(self, disk: Disk, path_of: Callable[[int], str], read_rows: ReadRows, limit: int = 512) -> None:
        """path_of: an hour's files without suffix. read_rows(hour, first, end): INDEX rows that are written."""
        self._disk, self._path_of, self._read, self._limit = disk, path_of, read_rows, limit
        self._known: OrderedDict[int, Derived] = OrderedDict()
        self._held: dict[int, Derived] = {}
        self.worth_writing = WORTH_WRITING

    def hold(self, hour: int, entries: int) -> Derived:
        """As `get`, and keep it until `release`: an hour that is mapped."""
        derived = self._held[hour] = self.get(hour, entries)
        self._known.pop(hour, None)
        return derived

    def release(self, hour: int) -> None:
        self._known[hour] = self._held.pop(hour)

    def cached(self, hour: int) -> bool:
        return hour in self._known or hour in self._held

    def get(self, hour: int, entries: int) -> Derived:
        """Heads after exactly the first `entries` entries, all written. Live: whoever links further moves them on and
        sets `entries`."""
        derived = self._held.get(hour) or self._latest(hour, entries)
        while derived.entries < entries:
            self._scan(hour, derived, entries)
        return derived

    def topic_minutes(self, hour: int, entries: int) -> npt.NDArray[np.void]:
        derived = self.get(hour, entries)
        while derived.counted < entries:
            self._count(hour, derived, entries)
        return derived.counters

    def derive_some(self, hour: int, entries: int, *, topics: bool) -> int:
        """One slice of what `get` (topics: `topic_minutes`) has to do; how many rows it was, 0 when nothing is left."""
        derived = self._held.get(hour) or self._latest(hour, entries)
        before = derived.entries + derived.counted
        if derived.entries < entries:
            self._scan(hour, derived, entries)
        elif topics and derived.counted < entries:
            self._count(hour, derived, entries)
        return derived.entries + derived.counted - before

    def _scan(self, hour: int, derived: Derived, entries: int) -> None:
        rows = self._sound(hour, derived.entries, min(entries, derived.entries + _SCAN))
        catch_up(rows["second"], rows["index"], *derived.heads)
        derived.entries += len(rows)

    def _count(self, hour: int, derived: Derived, entries: int) -> None:
        rows = self._sound(hour, derived.counted, min(entries, derived.counted + _SCAN))
        derived.counters = count_topics(derived.counters, rows)
        derived.counted += len(rows)

    def _sound(self, hour: int, first: int, end: int) -> npt.NDArray[np.void]:
        """These INDEX rows. DamagedFile when one does not verify: its second or topic may be wrong, and what is linked
        after it would be, too."""
        rows = self._read(hour, first, end)
        if len(bad := INDEX_CRC.bad(rows)):
            raise bad_entry(self._path_of(hour) + ".idx", first + int(bad[0]))
        return rows

    def _latest(self, hour: int, entries: int) -> Derived:
        derived = self._known.get(hour)
        if derived is None:
            derived = self._known[hour] = self._load(hour, entries)
            if len(self._known) > self._limit:
                self._evict(*self._known.popitem(last=False))
        self._known.move_to_end(hour)
        return derived

    def forget(self, hour: int) -> None:
        self._known.pop(hour, None)
        self._held.pop(hour, None)

    def close(self) -> None:
        """Write no more files: those there may be another store's now."""
        self.worth_writing = 1 << 62

    def save(self, limit: int) -> None:
        """Write up to `limit` files that lag far behind: part of every checkpoint, never synced."""
        everything = (self._held | self._known).items()
        late = [(hour, one) for hour, one in everything if one.entries >= one.on_disk + self.worth_writing]
        for hour, derived in late[:limit]:
            self._evict(hour, derived)

    def _load(self, hour: int, entries: int) -> Derived:
        path = self._path_of(hour) + ".heads"
        try:
            derived = decode_heads(read_file(self._disk, path), hour)
        except FileNotFoundError:
            return Derived()
        ahead = derived is not None and max(derived.entries, derived.counted) > entries
        return Derived() if derived is None or ahead else derived

    def _evict(self, hour: int, derived: Derived) -> None:
        if derived.entries < derived.on_disk + self.worth_writing:
            return
        data = encode_heads(hour, derived)
        try:
            file = self._disk.open(self._path_of(hour) + ".heads", create=True)
            with closing(file):
                file.pwrite(data, 0)
                file.truncate(len(data))
        except OSError:
            return  # the disk is full: without it, or with half of it, the index is read
        derived.on_disk = derived.entries
