"""Access to hour files in a store: listings, rows, and the places of damage.

Rows have checksums of their own, but a row that was removed, doubled or swapped with another one still verifies. Such
damage is found by references: entry n contains its number n, an event names the previous event of its message, and the
records of a .log follow each other without gaps.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import msgpack
import numpy as np
import numpy.typing as npt

from hadelay.codec.checksums import RowCrc
from hadelay.codec.formats import DISPATCH, DISPATCH_SIZE, INDEX, INDEX_SIZE, RECORD_SIZE, RESULT_ATTEMPT
from hadelay.codec.linking import DISPATCH_CRC, INDEX_CRC, group
from hadelay.codec.records import check_record, decode_record
from hadelay.errors import BadRequest, DamagedFile
from hadelay.model import DEAD_HOURS, NONE32, SEPARATOR, Event, hour_name, proves_record
from hadelay.storage.names import KINDS, decode_names

Rows = npt.NDArray[np.void]
Bytes = npt.NDArray[np.uint8]
WAY_OUT = "copy it from another node, or leave it out with onTorn=skip"
#: Limit of events that are read at a time.
_EVENTS_AT_ONCE = 1 << 20
#: Maximum number of rows, and of bytes, that are checked in one step.
_ROWS_AT_ONCE, _BYTES_AT_ONCE = 1 << 16, 8 << 20


class RowKind(NamedTuple):
    dtype: np.dtype[Any]
    crc: RowCrc
    #: Name of a row of this kind in error messages: entry or event.
    name: str


ROW = {"idx": RowKind(INDEX, INDEX_CRC, "entry"), "dsp": RowKind(DISPATCH, DISPATCH_CRC, "event")}


class HourFiles(NamedTuple):
    """Sizes and checksums of an hour's files. Only the committed part of each file counts."""

    hour: int
    entries: int
    events: int
    log_bytes: int
    #: CRC-32C of the committed .log, .idx and .dsp; None without a checkpoint.
    crcs: tuple[int, int, int] | None = None
    #: True if the hour is read from an archive.
    archived: bool = False

    def length(self, suffix: str) -> int:
        """Length, in bytes, of the committed part of the file with this suffix."""
        return {"log": self.log_bytes, "idx": self.entries * INDEX_SIZE, "dsp": self.events * DISPATCH_SIZE}[suffix]


class Listing(NamedTuple):
    hours: list[HourFiles]
    #: Time at which the hours were listed, in Unix ms. The listing has everything that was committed before.
    as_of_ms: int
    #: Id of the cluster; "" if the source does not tell it.
    cluster: str = ""

    def encode(self) -> str:
        return base64.b64encode(zlib.compress(msgpack.packb(tuple(self)))).decode()

    @classmethod
    def decode(cls, text: str) -> Listing:
        """Decode a listing that `encode` made. BadRequest for other text."""
        try:
            hours, as_of_ms, *cluster = msgpack.unpackb(zlib.decompress(base64.b64decode(text)), use_list=False)
            return cls([HourFiles(*hour) for hour in hours], as_of_ms, *cluster)
        except (ValueError, TypeError, zlib.error):
            raise BadRequest("option listing: the value was not made by Listing.encode") from None


class NameMap(NamedTuple):
    """Names of topics, consumers, nodes and reasons; a name's position is its number. `topics` has the queues of
    subscriptions, too, such as orders~billing."""

    topics: list[str]
    consumers: list[str]
    nodes: list[str]
    reasons: list[str]

    def topic(self, number: int) -> str | None:
        return self.topics[number] if 0 <= number < len(self.topics) else None

    def topic_mask(self, topics: str) -> npt.NDArray[np.bool_] | None:
        """Mask of the selected topics by topic number; the last element is for numbers without a name. None: all topics
        are selected. topics: names separated by commas; the name of a topic selects its subscriptions, too."""
        selected = {name.strip() for name in topics.split(",")}
        found = [name in selected or name.partition(SEPARATOR)[0] in selected for name in self.topics]
        return np.array([*found, False]) if topics else None

    def halves(self) -> tuple[Half, Half]:
        """Split each topic number's name: (topics, subscriptions), both by topic number."""
        parts = [name.partition(SEPARATOR) for name in self.topics]
        return Half.of(of for of, _, _ in parts), Half.of(own for _, _, own in parts)

    @classmethod
    def decode(cls, data: bytes, path: str, *, tolerant: bool = False) -> NameMap:
        """Decode a file `names`. Raises DamagedFile for a damaged name; tolerant: ignore the damaged name and all later
        ones."""
        found: dict[int, list[str]] = {kind: [] for kind in KINDS}
        try:
            for name in decode_names(data, path):
                known = found.get(name.kind)
                if known is None or name.number != len(known):
                    raise DamagedFile(path, name.offset, f"{name.name!r} has number {name.number}, out of order")
                known.append(name.name)
        except DamagedFile as error:
            if not tolerant:
                raise DamagedFile(path, error.offset, f"{error.what}; {WAY_OUT}") from None
        return cls(*found.values())


class Half(NamedTuple):
    """Names for topic numbers, which stand for queues: the names of the queues' topics, or of their subscriptions."""

    #: Distinct names of the topics, or of the subscriptions, of the hour.
    names: list[str]
    #: Topic number → position in `names` of its topic's or subscription's name; NONE32 if the topic number has no such
    #: name. The last element stands for unknown topic numbers.
    at: npt.NDArray[np.uint32]

    @classmethod
    def of(cls, names: Iterable[str]) -> Half:
        """names: the topic's or subscription's name for each topic number; "" if the number has none."""
        per_number = list(names)
        known = {name: at for at, name in enumerate(dict.fromkeys(filter(None, per_number)))}
        return cls(list(known), np.array([*(known.get(name, NONE32) for name in per_number), NONE32], np.uint32))

    def of_numbers(self, numbers: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
        """Position in `names` for each topic number."""
        return np.asarray(self.at[np.minimum(numbers, len(self.at) - 1)])


class Store(Protocol):
    """Read access to hour files, locally or remotely. Spark tasks get pickled copies."""

    def list(self) -> Listing: ...

    def names(self) -> NameMap:
        """All names that rows of the last listing refer to, by number; perhaps more."""
        ...

    def read(self, files: HourFiles, suffix: str, start: int, stop: int) -> Bytes:
        """Read the bytes [start, stop) of a .log, .idx or .dsp file. Raises DamagedFile if the file is shorter."""
        ...

    def where(self, files: HourFiles, suffix: str) -> str:
        """Path of a file, for error messages; suffix may also be `names` or `state.mdb`, which belong to no hour."""
        ...


def rows(store: Store, files: HourFiles, suffix: str, start: int, stop: int, *, verify: bool = False) -> Rows:
    """Read the INDEX or DISPATCH rows [start, stop). Raises DamagedFile, with file, hour and number, if an entry has
    the number of another entry, or, with verify, if the CRC of a row is wrong."""
    return usable(store, files, suffix, start, stop, verify=verify)[0]


def usable(
    store: Store, files: HourFiles, suffix: str, start: int, stop: int, *, verify: bool = False, skip: bool = False
) -> tuple[Rows, npt.NDArray[np.bool_] | None]:
    """Read the rows [start, stop): (rows, mask of usable rows; None: all). Without skip, a damaged row raises
    DamagedFile, as in `rows`."""
    dtype = ROW[suffix].dtype
    found = store.read(files, suffix, start * dtype.itemsize, stop * dtype.itemsize).view(dtype)
    bad = _bad(found, suffix, start, crc=verify)
    # Hours of dead letters also have entries for results of acks, which are no messages: leave them out.
    messages: npt.NDArray[np.bool_] = np.ones(len(found), np.bool_)
    if suffix == "idx" and files.hour >= DEAD_HOURS:
        messages = found["attempt"] != RESULT_ATTEMPT
    if not len(bad):
        return found, None if messages.all() else messages
    if not skip:
        raise _bad_row(store, files, suffix, found, start, int(bad[0]))
    messages[bad] = False
    return found, messages


def events_of(
    store: Store, files: HourFiles, first: int, last: int, *, verify: bool = False, skip: bool = False
) -> Iterator[tuple[npt.NDArray[np.intp], Rows, npt.NDArray[np.uint32]]]:
    """Read the usable events of the entries [first, last). Yields pieces: (number of each event's entry, counted from
    `first`; the events; numbers of missing entries that events refer to)."""
    for start in range(0, files.events, _EVENTS_AT_ONCE):
        stop = min(start + _EVENTS_AT_ONCE, files.events)
        events, good = usable(store, files, "dsp", start, stop, verify=verify, skip=skip)
        events = events if good is None else events[good]
        entries = np.ascontiguousarray(events["index"])
        at = entries - np.uint32(first)  # the difference is unsigned: entry numbers below `first` become very large
        if at.max(initial=0) >= last - first:
            mine = at < last - first
            events, at = events[mine], at[mine]
        yield at.astype(np.intp), events, entries[entries >= files.entries]


def _bad(found: Rows, suffix: str, start: int, *, crc: bool = True) -> npt.NDArray[np.intp]:
    """Positions of the damaged rows in `found`, whose first row is row `start` of the file. crc: check CRCs, too."""
    bad = np.zeros(0, np.intp)
    if suffix == "idx":
        bad = np.flatnonzero(found["index"] != np.arange(start, start + len(found), dtype=np.uint32))
    return np.union1d(bad, ROW[suffix].crc.bad(np.ascontiguousarray(found))) if crc else bad


def _bad_row(store: Store, files: HourFiles, suffix: str, found: Rows, start: int, at: int) -> DamagedFile:
    _, crc, name = ROW[suffix]
    wrong = len(crc.bad(np.ascontiguousarray(found[at : at + 1])))
    what = f"the {name}'s CRC is wrong" if wrong else f"{name} {found['index'][at]} is at this position"
    return damage(store, files, suffix, start + at, what)


def damage(store: Store, files: HourFiles, suffix: str, number: int, what: str) -> DamagedFile:
    """Make the error for damage at an entry (.idx) or event (.dsp) with this number."""
    size, name = ROW[suffix].dtype.itemsize, ROW[suffix].name
    said = f"hour {hour_name(files.hour)}, {name} {number}: {what}; {WAY_OUT}"
    return DamagedFile(store.where(files, suffix), number * size, said, size=size)


def find_damage(store: Store, files: HourFiles, suffix: str) -> DamagedFile | None:
    """Find the first damage of a file; for a .log, also of the .idx, whose entries refer to the records. None if
    everything verifies. Without checksums from a checkpoint, the .log may end in zeroes, and bytes behind its end are
    unknown."""
    if suffix == "dsp":
        return _in_events(store, files)
    index = store.read(files, "idx", 0, files.length("idx")).view(INDEX)
    found = _in_index(store, files, index)
    return _in_records(store, files, index) if found is None and suffix == "log" else found


def _in_index(store: Store, files: HourFiles, index: Rows) -> DamagedFile | None:
    for at in range(0, len(index), _ROWS_AT_ONCE):
        some = index[at : at + _ROWS_AT_ONCE]
        if len(bad := _bad(some, "idx", at)):
            return _bad_row(store, files, "idx", some, at, int(bad[0]))
        ends = some["offset"] + some["size"]
        if files.crcs and len(beyond := np.flatnonzero((ends > files.log_bytes) | (ends < some["offset"]))):
            what = f"its record lies behind the end of the .log, {files.log_bytes} bytes"
            return damage(store, files, "idx", at + int(beyond[0]), what)
    if len(wrong := np.flatnonzero(index["pre"] != _before(index["second"]))):
        return damage(store, files, "idx", int(wrong[0]), "the entry before it in its second is another one")
    return None


def _in_events(store: Store, files: HourFiles) -> DamagedFile | None:
    found = store.read(files, "dsp", 0, files.length("dsp")).view(DISPATCH)
    for at in range(0, len(found), _ROWS_AT_ONCE):
        some = found[at : at + _ROWS_AT_ONCE]
        if len(bad := _bad(some, "dsp", at)):
            return _bad_row(store, files, "dsp", some, at, int(bad[0]))
    if not len(wrong := np.flatnonzero(found["previous"] != _before(found["index"]))):
        return None
    said, n = found["previous"][wrong], len(found)
    # If the field `previous` of this event is NONE32 or the number of an earlier event of the same message, an event in
    # between is missing: report this event. Else report the smaller of this event's number and `previous`.
    there = np.minimum(said, n - 1)
    own = (said == NONE32) | ((said < n) & (found["index"][there] == found["index"][wrong]) & (said < wrong))
    blamed = int(np.where(own, wrong, np.minimum(said, wrong)).min())
    what = "the events around it do not follow each other: one is missing, or out of place"
    return damage(store, files, "dsp", blamed, what)


def find_misfiled(store: Store, files: HourFiles, suffix: str) -> DamagedFile | None:
    """Find the first row with a right checksum that cannot be of this hour, in a copy without a checkpoint: an entry
    that is filed under an earlier time than its due time, an event that ends a lease which its entry never had, or an
    event that is older than the event in front of it."""
    index = store.read(files, "idx", 0, files.length("idx")).view(INDEX)
    if suffix == "idx" and files.hour < DEAD_HOURS:
        early = index["deliver_at_ms"] // 1000 > np.int64(files.hour) * 3600 + index["second"]
        if early.any():
            n = int(early.argmax())
            due = np.datetime64(int(index["deliver_at_ms"][n]), "ms")
            return damage(store, files, "idx", n, f"it is due at {due}, and filed earlier: it is of another hour")
    return _misfiled_event(store, files, index) if suffix == "dsp" else None


def _misfiled_event(store: Store, files: HourFiles, index: Rows) -> DamagedFile | None:
    events = store.read(files, "dsp", 0, files.length("dsp")).view(DISPATCH)
    ends = np.isin(events["event"], (Event.ACKED, Event.NACKED, Event.LEASE_EXPIRED))
    some = np.flatnonzero(ends & (events["previous"] == NONE32) & (events["index"] < len(index)))
    # Leave out messages that were handed out before this entry: a late ack settles them without a lease of its own
    of = index[events["index"][some]]
    if len(wrong := some[(of["attempt"] == 0) & (of["flags"] >> 6 == 0)]):
        n = int(wrong[0])
        kind, entry = Event(int(events["event"][n])).name.lower(), events["index"][n]
        return damage(store, files, "dsp", n, f"{kind}: entry {entry} was never leased: the .idx is of another copy")
    if len(back := np.flatnonzero(np.diff(events["at_ms"]) < 0)):
        n = int(back[0]) + 1
        at, before = (np.datetime64(int(events["at_ms"][n - step]), "ms") for step in (0, 1))
        what = f"its time is {at}, and the event before it is of {before}: events are in the order of their times"
        return damage(store, files, "dsp", n, f"{what}, so one of the two is of another copy")
    return None


def _in_records(store: Store, files: HourFiles, index: Rows) -> DamagedFile | None:
    """Find the first damaged record of a .log, or bytes that belong to no entry. index: rows of a sound .idx."""
    order = np.argsort(index["offset"], kind="stable")
    offsets, sizes = index["offset"][order].astype(np.int64), index["size"][order].astype(np.int64)
    end, start, data = 0, 0, b""
    for n, at, size in zip(order.tolist(), offsets.tolist(), sizes.tolist(), strict=True):
        if at + size <= end:  # skip a record that an earlier entry shares
            continue
        if at != end:
            return _gap(store, files, end, at)
        if at + size > start + len(data):
            start, data = at, _log(store, files, at, max(at + size, at + _BYTES_AT_ONCE))
        record = data[at - start : at - start + size]
        what = check_record(record, size)
        first = decode_record(record).first_id if what is None else 0
        if what is None and not proves_record(int(index["first_id"][n]), first, files.hour, n):
            what = f"the record of another message stands here, {first:x}"
        if what is not None:
            said = f"hour {hour_name(files.hour)}, entry {n}: {what}; {WAY_OUT}"
            return DamagedFile(store.where(files, "log"), at, said, size=size)
        end = at + size
    if end < files.log_bytes and any(_log(store, files, end, end + RECORD_SIZE)):
        return _gap(store, files, end, files.log_bytes)
    return None


def _log(store: Store, files: HourFiles, start: int, stop: int) -> bytes:
    return store.read(files, "log", start, min(stop, files.log_bytes)).tobytes()


def _gap(store: Store, files: HourFiles, end: int, start: int) -> DamagedFile:
    what = f"bytes {end} to {start} of the .log belong to no entry: the .idx has lost entries"
    return damage(store, files, "idx", files.entries, what)


def _before(keys: npt.NDArray[np.integer]) -> npt.NDArray[np.uint32]:
    """For each row, the position of the previous row with the same key; NONE32 if there is none."""
    found = np.full(len(keys), NONE32, np.uint32)
    if len(keys):
        order, firsts, _ = group(np.ascontiguousarray(keys))
        found[order[1:]] = order[:-1]
        found[order[firsts]] = NONE32
    return found
