"""Heads of an hour: last entry and number of entries of each second. They are cached in memory and in `.heads` files,
and can be rebuilt from the index.

Two years of dense heads would take half a gigabyte. A `.heads` file is a cache: if the file is missing, damaged or
behind, one vectorised pass reads the remaining index entries. Checkpoints and evictions rewrite files that lag far.
"""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import closing

import numpy as np
import numpy.typing as npt

from hadelay.codec.formats import COUNTER, INDEX_SIZE
from hadelay.codec.linking import INDEX_CRC, catch_up
from hadelay.errors import DamagedFile
from hadelay.platform.disk import Disk, read_file
from hadelay.storage.headsfile import Derived, decode_heads, encode_heads

#: Number of entries that a `.heads` file may lag behind the index before it is written again. If there are more hours
#: than the cache holds, each checkpoint reads the missing entries of every hour: this many entries take half a
#: millisecond. Writing a file takes a tenth of a millisecond.
WORTH_WRITING = 4_096
#: Limit of the keys (topic and minute as one number) up to which entries are counted in an array: twenty times faster
#: than by sorting, unless rows are few.
_DENSE_KEYS = 1 << 18
#: Number of index entries read per slice of work, when heads are brought up to date; a slice takes two milliseconds.
_SCAN = 16_384

ReadRows = Callable[[int, int, int], npt.NDArray[np.void]]


def count_topics(counters: npt.NDArray[np.void], rows: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """Count INDEX rows by topic and minute; returns COUNTER rows with these counts added to those in `counters`."""
    keys = rows["topic"].astype(np.int64) << 6 | rows["second"] // 60
    if len(keys) and keys.max() < min(_DENSE_KEYS, 64 * len(keys)):
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
    """Make the error for an index entry with a wrong CRC. path: the .idx file; index: number of the entry."""
    return DamagedFile(path, index * INDEX_SIZE, "the entry's CRC is wrong", size=INDEX_SIZE)


class HeadsCache:
    def __init__(self, disk: Disk, path_of: Callable[[int], str], read_rows: ReadRows, limit: int = 512) -> None:
        """path_of(hour): path of the hour's files without suffix. read_rows(hour, first, end): rows of the .idx
        file."""
        self._disk, self._path_of, self._read, self._limit = disk, path_of, read_rows, limit
        self._known: OrderedDict[int, Derived] = OrderedDict()
        self._kept: dict[int, Derived] = {}
        self.worth_writing = WORTH_WRITING

    def hold(self, hour: int, entries: int) -> Derived:
        """Get an hour's heads like `get`, and keep them in memory until `release`. Called for hours whose files are
        mapped into memory."""
        derived = self._kept[hour] = self.get(hour, entries)
        self._known.pop(hour, None)
        return derived

    def release(self, hour: int) -> None:
        self._known[hour] = self._kept.pop(hour)

    def cached(self, hour: int) -> bool:
        return hour in self._known or hour in self._kept

    def get(self, hour: int, entries: int) -> Derived:
        """Get an hour's heads as of its first `entries` entries, all of which are in the file. The object is live: a
        caller that links further entries updates the object's heads and `entries`."""
        derived = self._kept.get(hour) or self._latest(hour, entries)
        while derived.entries < entries:
            self._scan(hour, derived, entries)
        return derived

    def topic_minutes(self, hour: int, entries: int) -> npt.NDArray[np.void]:
        derived = self.get(hour, entries)
        while derived.counted < entries:
            self._count(hour, derived, entries)
        return derived.counters

    def derive_some(self, hour: int, entries: int, *, topics: bool) -> int:
        """Bring an hour's heads, and with `topics` also its counts per topic and minute, up to date by one slice of
        work. Returns the number of rows read; 0 when all is done."""
        derived = self._kept.get(hour) or self._latest(hour, entries)
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
        """Read INDEX rows and verify them. Raises DamagedFile for a wrong CRC: with a wrong second or topic, all later
        links would be wrong, too."""
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
        self._kept.pop(hour, None)

    def close(self) -> None:
        """Stop writing `.heads` files: the directory may belong to another store now."""
        self.worth_writing = 1 << 62

    def save(self, limit: int) -> None:
        """Write `.heads` files that lag far behind the index, at most `limit` of them, without a sync. Every checkpoint
        calls this."""
        everything = (self._kept | self._known).items()
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
            return  # the disk is full: without the file, the next load of these heads reads the index
        derived.on_disk = derived.entries
