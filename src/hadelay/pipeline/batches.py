"""Hour files as Arrow record batches: numpy all the way, no row is ever a Python object.

A split is a range of rows of one hour. Filters are decided on the raw rows, so that only what is wanted is made into
columns. Metas, which are msgpack, are decoded once per distinct value of a batch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterator, Sequence
from datetime import datetime
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hadelay.codec import meta
from hadelay.codec.formats import INDEX, RECORD, RECORD_SIZE, handout_delay_ms, nack_reason
from hadelay.codec.records import check_record
from hadelay.errors import BadRequest, DamagedFile
from hadelay.model import DEAD_HOURS, NONE32, Event, decode_id
from hadelay.pipeline.hourfiles import HourFiles, Listing, Names, Rows, Store, damage, rows, usable
from hadelay.pipeline.schema import KINDS, Options, hour_int

Mask = npt.NDArray[np.bool_]

_ARROW = {
    "STRING": pa.string(),
    "INT": pa.int32(),
    "BIGINT": pa.int64(),
    "BOOLEAN": pa.bool_(),
    "TIMESTAMP": pa.timestamp("us", "UTC"),
    "BINARY": pa.binary(),
    "ARRAY<STRING>": pa.list_(pa.string()),
    "MAP<STRING,STRING>": pa.map_(pa.string(), pa.string()),
}
#: Bytes of records that one batch may be made from.
_BATCH_BYTES = 64 << 20
_EVENTS_AT_ONCE = 1 << 20
#: An element of Arrow's binary_view: bytes of a buffer, or, up to 12 of them, in the element itself.
_VIEW = np.dtype([("size", "<i4"), ("head", "V4"), ("buffer", "<i4"), ("offset", "<i4")])
_IN_VIEW = 12
#: An offset is an int32: data is given as buffers that start at each GiB.
_BUFFER_BITS = 30
_SHORT_VIEW = np.dtype([("size", "<i4"), ("data", "u1", _IN_VIEW)])
#: Where each field of a record's header is; and the two that say what follows it.
_AT = {name: int(field[1]) for name, field in (RECORD.fields or {}).items()}
_SIZES = np.dtype([("meta", "<u4"), ("body", "<u4")])
_ID_CHARS = np.frombuffer(b"0123456789ABCDEFGHJKMNPQRSTVWXYZ", np.uint8)
#: The 13 characters of an id: four bits, then three times 20.
_ID = np.dtype({"names": ["head", "a", "b", "c"], "formats": ["u1", "<u4", "<u4", "<u4"], "offsets": [0, 1, 5, 9]})
_EVENT_NAMES = [event.name.lower() for event in Event]  # they are numbered from 1
#: An entry's state is that of its last event, and events are numbered in the order in which they can follow each other.
_STATES = ("", "leased", "acked", "", "", "expired", "cancelled", "moved", "moved", "moved")
_STATE_NAMES = ("scheduled", "ready", "leased", "acked", "cancelled", "expired", "dead", "moved")
_IS_MOVE = np.isin(np.arange(256), (Event.MOVED, Event.DEAD, Event.REDRIVEN))
#: Columns of few values, which `read` gives as dictionaries if it is asked to.
CODED = frozenset(("topic", "state", "content_type", "event", "consumer", "node", "reason"))


class Filter(NamedTuple):
    """`column op value`; op: one of _OPERATORS, value: a tuple for "in"."""

    column: str
    op: str
    value: Any


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "gt": operator.gt,
    "ge": operator.ge,
    "lt": operator.lt,
    "le": operator.le,
}


class Split(NamedTuple):
    files: HourFiles
    start: int
    stop: int
    #: Unix ms at which a message that waits is scheduled or ready.
    as_of_ms: int


def schema(
    kind: str, columns: Sequence[str], *, as_codes: bool = False, required: Container[str] = ()
) -> pa.Schema:  # fmt: skip
    codes = pa.dictionary(pa.int32(), pa.string())
    types = {name: codes if as_codes and name in CODED else _ARROW[KINDS[kind][name].type] for name in columns}
    return pa.schema([pa.field(name, types[name], name not in required) for name in columns])


def splits(
    listing: Listing, options: Options, filters: Sequence[Filter] = (), *, even: bool = False
) -> list[Split]:  # fmt: skip
    """Of every hour that options and filters leave over, oldest first. even: an hour that has to be split is split into
    equal parts, an even number of them, so that none is left over to be read alone by one of two tasks (no more: each
    that needs `state` looks through all events). Else each part has split_rows but the last: archives name their files
    after these."""
    wanted = [f for f in filters if f.column in ("hour", "dead")]
    found = []
    for files in sorted(listing.hours):
        if not options.takes(files.hour) or not all(_holds(f, files.hour) for f in wanted):
            continue
        count = files.entries if options.kind == "messages" else files.events
        cuts = [*range(0, count, options.split_rows), count]
        if even and len(cuts) > 2:
            parts = len(cuts) // 2 * 2
            cuts = [count * n // parts for n in range(parts + 1)]
        found += [Split(files, start, stop, listing.as_of_ms) for start, stop in pairwise(cuts) if start < stop]
    return found


def _holds(f: Filter, hour: int) -> bool:
    value = hour_int(hour) if f.column == "hour" else hour >= DEAD_HOURS
    return value in f.value if f.op == "in" else bool(_OPERATORS[f.op](value, f.value))


def read(
    store: Store, options: Options, columns: Sequence[str], split: Split, filters: Sequence[Filter] = (),
    names: Names | None = None, *, as_codes: bool = False, required: Container[str] = (),
) -> Iterator[pa.RecordBatch]:  # fmt: skip
    """The split's rows that pass the filters. DamagedFile names file, hour and entry; with onTorn=skip such rows are
    left out. as_codes: columns of few values are dictionaries, which Parquet is written from quicker. required: columns
    that the schema says are never null."""
    names = names or store.names()
    target = schema(options.kind, columns, as_codes=as_codes, required=required)
    if options.topics:
        topics = tuple(name.strip() for name in options.topics.split(",") if name.strip())
        filters = [*filters, Filter("topic", "in", topics)]
    filters = [f for f in filters if f.column not in ("hour", "dead")]
    kind = _Messages if options.kind == "messages" else _Events
    whole = kind(store, options, split, names)
    needs_log = any(KINDS[options.kind][name].needs == "log" for name in columns)
    for start in range(split.start, split.stop, options.batch_rows):
        stop = min(start + options.batch_rows, split.stop)
        for batch in whole.batches(start, stop, filters, needs_log):
            found = [batch.column(name) for name in target.names]
            made = [
                pa.array(a, f.type) if isinstance(a, np.ndarray) else a if a.type == f.type else a.cast(f.type)
                for a, f in zip(found, target, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(made, schema=target)


# ---- rows with what they need


class _Batch:
    """Rows of one kind. `column` gives an array as long as `rows`."""

    def __init__(self, whole: _Whole, taken: Rows) -> None:
        self.whole, self.rows = whole, taken
        self.store, self.files, self.names = whole.store, whole.split.files, whole.names

    def column(self, name: str) -> Any:
        n = len(self.rows)
        if name == "hour":
            return np.full(n, hour_int(self.files.hour), np.int32)
        if name == "dead":
            return np.full(n, self.files.hour >= DEAD_HOURS)
        made = getattr(self, f"_{name}", None)
        return made() if made is not None else np.ascontiguousarray(self.rows[name])

    def _entry(self) -> Any:
        return self.rows["index"].astype(np.int64)


class _Whole:
    batch: type[_Batch]

    def __init__(self, store: Store, options: Options, split: Split, names: Names) -> None:
        self.store, self.options, self.split, self.names = store, options, split, names

    def batches(self, start: int, stop: int, filters: Sequence[Filter], needs_log: bool) -> Iterator[_Batch]:
        raise NotImplementedError

    def sound(self, suffix: str, start: int, stop: int) -> tuple[Rows, Mask | None]:
        """Rows [start, stop), and which of them can be used, if not all can and the others are to be left out."""
        skip = self.options.on_torn == "skip"
        return usable(self.store, self.split.files, suffix, start, stop, verify=self.options.verify, skip=skip)


class _MessageBatch(_Batch):
    whole: _Messages
    #: Where each row's record is in `log`, and its bytes; set if a column needs it.
    log: Any = None
    at: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]

    def _id(self) -> pa.Array:
        return ids(self.rows["first_id"])

    def _first_id(self) -> Any:
        return np.ascontiguousarray(self.rows["first_id"]).view(np.int64)

    def _tag_mask(self) -> Any:
        return np.ascontiguousarray(self.rows["tag_mask"]).view(np.int64)

    def _size(self) -> Any:
        return self.rows["size"].astype(np.int32)

    def _topic(self) -> pa.Array:
        return coded(self.names.topics, self.rows["topic"])

    def _deliver_at(self) -> pa.Array:
        return instants(self.rows["deliver_at_ms"])

    def _state(self) -> pa.Array:
        return coded(_STATE_NAMES, self.whole.states(self.rows))

    def _published_at(self) -> pa.Array:
        return instants(self._gathered("<i8", _AT["published_at_ms"]))

    def _cut(self, skip: npt.NDArray[np.int64] | int, sizes: npt.NDArray[np.int64]) -> pa.Array:
        """Of each record so many bytes, `skip` behind its header, as binaries. They are copied once, from views of the
        .log: several rows may share a record, and records need not rise."""
        if (skip + sizes > self.lengths - RECORD_SIZE).any():
            raise DamagedFile(self.store.where(self.files, "log"), 0, "a header's sizes do not fit; try verify=true")
        return binaries(self.log, self.at + (RECORD_SIZE + skip), sizes)

    def _body(self) -> pa.Array:
        return self._cut(*self._sizes)

    def _gathered(self, kind: npt.DTypeLike, skip: int = 0) -> npt.NDArray[Any]:
        """What is `skip` behind the start of each record."""
        kind = np.dtype(kind)
        plain = f"V{kind.itemsize}"  # as plain bytes: numpy would gather field by field
        where = np.ndarray(len(self.log) - skip - kind.itemsize + 1, plain, self.log, skip, strides=(1,))
        return where[self.at].view(kind)

    @cached_property
    def _sizes(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Of meta and body, as the headers say."""
        found = self._gathered(_SIZES, _AT["meta_size"])
        return found["meta"].astype(np.int64), found["body"].astype(np.int64)

    @cached_property
    def _metas(self) -> tuple[list[meta.Meta], pa.Array]:
        encoded = self._cut(0, self._sizes[0]).dictionary_encode()
        return [meta.unpack(data) for data in encoded.dictionary.to_pylist()], encoded.indices

    def _of_meta(self, get: Callable[[meta.Meta], Any], kind: pa.DataType) -> pa.Array:
        values, indices = self._metas
        return pa.array([get(value) for value in values], kind).take(indices)

    def _content_type(self) -> pa.Array:
        return self._of_meta(lambda m: m.ct, pa.string()).dictionary_encode()

    def _key(self) -> pa.Array:
        return self._of_meta(lambda m: m.key, pa.string())

    def _tags(self) -> pa.Array:
        return self._of_meta(lambda m: m.tags, _ARROW["ARRAY<STRING>"])

    def _meta(self) -> pa.Array:
        return self._of_meta(lambda m: list(m.meta.items()), _ARROW["MAP<STRING,STRING>"])


class _Messages(_Whole):
    def batches(self, start: int, stop: int, filters: Sequence[Filter], needs_log: bool) -> Iterator[_MessageBatch]:
        found, keep = self.sound("idx", start, stop)
        for f in filters:
            mask = self._mask(f, found)
            keep = mask if keep is None else keep & mask
        if keep is not None and not keep.all():
            found = found[keep]
        if not len(found):
            return
        if not needs_log:
            yield _MessageBatch(self, found)
            return
        # Bodies may be large: so many rows at a time that their records stay small.
        lengths = found["size"].astype(np.int64)
        cuts = np.flatnonzero(np.diff(lengths.cumsum() // _BATCH_BYTES)) + 1
        for start, stop in pairwise((0, *cuts.tolist(), len(found))):
            part = self._with_records(_MessageBatch(self, found[start:stop]), lengths[start:stop])
            if len(part.rows):
                yield part

    def _mask(self, f: Filter, found: Rows) -> Mask:
        if f.column == "topic":
            return _in(found["topic"], _numbers(self.names.topics, f))
        if f.column == "state":
            wanted = f.value if f.op == "in" else (f.value,)
            return _in(self.states(found), [_STATE_NAMES.index(value) for value in wanted if value in _STATE_NAMES])
        if f.column == "deliver_at":
            return _compare(found["deliver_at_ms"] * 1000, f, micros)
        if f.column == "id":
            return _in(found["first_id"], _ids_of(f))
        column = found["first_id"].view(np.int64) if f.column == "first_id" else found["index"].astype(np.int64)
        return _compare(column, f, int)

    @cached_property
    def _codes(self) -> npt.NDArray[np.uint8]:
        """Of each entry of the split: the largest event, which is the last."""
        split = self.split
        codes = np.zeros(split.stop - split.start, np.uint8)
        for at in range(0, split.files.events, _EVENTS_AT_ONCE):
            end = min(at + _EVENTS_AT_ONCE, split.files.events)
            events, good = self.sound("dsp", at, end)
            entries = events["index"] - np.uint32(split.start)  # what is before it becomes large
            mine = entries < len(codes) if good is None else (entries < len(codes)) & good
            kinds, entries = events["event"][mine], entries[mine]
            known = kinds < len(_STATES)
            np.maximum.at(codes, entries[known], kinds[known])
        return codes

    def states(self, found: Rows) -> npt.NDArray[np.int8]:
        """Positions in _STATE_NAMES."""
        codes = self._codes[found["index"].astype(np.int64) - self.split.start]
        if self.split.files.hour >= DEAD_HOURS:
            waiting = np.full(len(found), _STATE_NAMES.index("dead"), np.int8)
        else:
            waiting = (found["deliver_at_ms"] <= self.split.as_of_ms).astype(np.int8)
        table = np.array([_STATE_NAMES.index(name) if name else -1 for name in _STATES], np.int8)
        states = table[codes]
        return np.where(states < 0, waiting, states)

    def _with_records(self, batch: _MessageBatch, lengths: npt.NDArray[np.int64]) -> _MessageBatch:
        store, files, skip = self.store, self.split.files, self.options.on_torn == "skip"
        offsets = batch.rows["offset"].astype(np.int64)
        if len(beyond := np.flatnonzero((offsets + lengths > files.log_bytes) | (lengths < RECORD_SIZE))):
            if not skip:
                raise damage(store, files, "idx", int(batch.rows["index"][beyond[0]]), "its record is not in the .log")
            batch.rows = np.delete(batch.rows, beyond)
            offsets, lengths = np.delete(offsets, beyond), np.delete(lengths, beyond)
        if not len(batch.rows):
            return batch
        batch.log, batch.at = _records(store, files, offsets, offsets + lengths)
        batch.lengths = lengths
        if self.options.verify:
            bad = []
            for n, (at, size) in enumerate(zip(batch.at.tolist(), lengths.tolist(), strict=True)):
                if (what := check_record(batch.log[at : at + size].tobytes(), size)) is not None:
                    if not skip:
                        raise damage(store, files, "idx", int(batch.rows["index"][n]), what)
                    bad.append(n)
            batch.rows, batch.at = np.delete(batch.rows, bad), np.delete(batch.at, bad)
            batch.lengths = np.delete(lengths, bad)
        return batch


def _records(
    store: Store, files: HourFiles, offsets: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """(bytes, where each record starts in them), read in as few pieces as the store likes."""
    starts = offsets
    if (starts[1:] < starts[:-1]).any():  # as a rule they rise
        order = offsets.argsort(kind="stable")
        starts, ends = offsets[order], ends[order]
    ends = np.maximum.accumulate(ends)
    cuts = np.flatnonzero(starts[1:] - ends[:-1] > store.max_gap) + 1
    firsts, lasts = starts[np.r_[0, cuts]], ends[np.r_[cuts - 1, len(ends) - 1]]
    pieces = [store.read(files, "log", a, b) for a, b in zip(firsts.tolist(), lasts.tolist(), strict=True)]
    if len(pieces) == 1:
        return pieces[0], offsets - firsts[0]
    bases = np.cumsum([0, *(lasts - firsts)[:-1]]) - firsts
    where = np.searchsorted(firsts, offsets, "right") - 1
    return np.concatenate(pieces), offsets + bases[where]


class _EventBatch(_Batch):
    whole: _Events

    def _number(self) -> Any:
        return self.numbers

    numbers: npt.NDArray[np.int64]

    def _event(self) -> pa.Array:
        return coded(_EVENT_NAMES, self.rows["event"] - np.uint8(1))  # 0 becomes large

    def _at(self) -> pa.Array:
        return instants(self.rows["at_ms"])

    def _attempt(self) -> Any:
        return self.rows["attempt"].astype(np.int32)

    def _consumer(self) -> pa.Array:
        return coded(self.names.consumers, np.where(self._moved, NONE32, self.rows["consumer"]))

    def _node(self) -> pa.Array:
        return coded(self.names.nodes, self.rows["node"])

    @cached_property
    def _moved(self) -> Mask:
        return np.asarray(_IS_MOVE[self.rows["event"]])

    def _other_hour(self) -> pa.Array:
        shown = np.zeros(len(self.rows), np.int32)
        values, inverse = np.unique(self.rows["other_hour"][self._moved], return_inverse=True)
        shown[self._moved] = np.array([_shown(int(value)) for value in values], np.int32)[inverse]
        return pa.array(shown, mask=~self._moved)

    def _other_dead(self) -> pa.Array:
        return pa.array(self.rows["other_hour"] >= DEAD_HOURS, mask=~self._moved)

    def _other_entry(self) -> pa.Array:
        return pa.array(self.rows["consumer"].astype(np.int64), mask=~self._moved)

    def _reason(self) -> pa.Array:
        nacked = self.rows["event"] == Event.NACKED
        return coded(self.names.reasons, np.where(nacked, nack_reason(self.rows["other_hour"]), NONE32))

    def _handout_delay_ms(self) -> pa.Array:
        delays = handout_delay_ms(self.rows)
        return pa.array(delays, mask=delays < 0)

    def _previous(self) -> pa.Array:
        return pa.array(self.rows["previous"].astype(np.int64), mask=self.rows["previous"] == NONE32)

    @cached_property
    def _entries(self) -> _Entries:
        return self.whole.entries_of(self.rows)

    def _id(self) -> pa.Array:
        return without(ids(self._entries.field("first_id")), self._entries.missing)

    def _first_id(self) -> pa.Array:
        return pa.array(self._entries.field("first_id").view(np.int64), mask=self._entries.missing)

    def _topic(self) -> pa.Array:
        return coded(self.names.topics, np.where(self._entries.missing, NONE32, self._entries.field("topic")))

    def _deliver_at(self) -> pa.Array:
        return without(instants(self._entries.field("deliver_at_ms")), self._entries.missing)


class _Entries(NamedTuple):
    """Of events: INDEX rows, which of them each is of, and which are of none: those have any."""

    rows: Rows
    at: npt.NDArray[np.int64]
    missing: Mask

    def field(self, name: str) -> npt.NDArray[Any]:
        return np.asarray(self.rows[name][self.at])


class _Events(_Whole):
    def batches(self, start: int, stop: int, filters: Sequence[Filter], needs_log: bool) -> Iterator[_EventBatch]:
        found, keep = self.sound("dsp", start, stop)
        kind = self.options.kind
        if kind != "events":
            leased = found["event"] == Event.LEASED
            leased = leased if kind == "dispatches" else ~leased
            keep = leased if keep is None else keep & leased
        numbers = np.arange(start, stop, dtype=np.int64)
        if keep is not None:
            found, numbers = found[keep], numbers[keep]
        for f in filters:
            mask = self._mask(f, found)
            found, numbers = found[mask], numbers[mask]
        if len(found):
            batch = _EventBatch(self, found)
            batch.numbers = numbers
            yield batch

    def _mask(self, f: Filter, found: Rows) -> Mask:
        if f.column == "event":
            wanted = f.value if f.op == "in" else (f.value,)
            return _in(found["event"], [event for event in Event if event.name.lower() in wanted])
        if f.column == "at":
            return _compare(found["at_ms"] * 1000, f, micros)
        if f.column == "entry":
            return _compare(found["index"].astype(np.int64), f, int)
        entries = self.entries_of(found)
        if f.column == "topic":
            mask = _in(entries.field("topic"), _numbers(self.names.topics, f))
        elif f.column == "id":
            mask = _in(entries.field("first_id"), _ids_of(f))
        elif f.column == "first_id":
            mask = _compare(entries.field("first_id").view(np.int64), f, int)
        else:
            mask = _compare(entries.field("deliver_at_ms") * 1000, f, micros)
        return mask & ~entries.missing

    def entries_of(self, found: Rows) -> _Entries:
        files = self.split.files
        at = found["index"].astype(np.int64)
        missing = at >= files.entries
        if missing.all():
            return _Entries(np.zeros(1, INDEX), np.zeros_like(at), missing)
        if missing.any():
            at[missing] = at[~missing][0]
        first, last = int(at.min()), int(at.max())
        return _Entries(rows(self.store, files, "idx", first, last + 1), at - first, missing)


# ---- values


def ids(first_ids: npt.NDArray[np.uint64]) -> pa.Array:
    """The 13 characters of each."""
    n, numbers, four = len(first_ids), np.ascontiguousarray(first_ids).view(np.int64), _four_characters()
    chars = np.empty(n, _ID)
    chars["head"] = _ID_CHARS[numbers >> 60 & 0xF]
    for name, shift in (("a", 40), ("b", 20), ("c", 0)):
        chars[name] = four[numbers >> shift & 0xF_FFFF]
    offsets = np.arange(n + 1, dtype=np.int32) * 13
    return pa.StringArray.from_buffers(n, pa.py_buffer(offsets), pa.py_buffer(chars))


@cache
def _four_characters() -> npt.NDArray[np.uint32]:
    """Of each number of 20 bits."""
    shifts = np.arange(15, -1, -5)
    return np.asarray(_ID_CHARS[np.arange(1 << 20)[:, None] >> shifts & 31].view("<u4").ravel())


def binaries(
    data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> pa.Array:  # fmt: skip
    """These pieces of data, which may overlap, in any order: copied once, from views of them."""
    views = np.zeros(len(starts), _VIEW)
    views["size"], views["buffer"], views["offset"] = sizes, starts >> _BUFFER_BITS, starts & (1 << _BUFFER_BITS) - 1
    short = np.flatnonzero((sizes > 0) & (sizes <= _IN_VIEW))
    if len(short):
        where = np.minimum(starts[short, None] + np.arange(_IN_VIEW), len(data) - 1)
        views.view(_SHORT_VIEW)["data"][short] = data[where]
    buffers = [pa.py_buffer(data[at:]) for at in range(0, len(data), 1 << _BUFFER_BITS)]
    viewed = pa.Array.from_buffers(pa.binary_view(), len(views), [None, pa.py_buffer(views), *buffers])
    return viewed.cast(pa.binary())


def coded(names: Sequence[str], numbers: npt.NDArray[np.integer]) -> pa.DictionaryArray:
    """The name of each number, null where there is none."""
    codes = numbers.astype(np.int32)
    unknown = codes.view(np.uint32) >= len(names)
    if not unknown.any():  # as a rule: without a mask it takes half as long
        return pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(names, pa.string()))
    codes[unknown] = 0
    return pa.DictionaryArray.from_arrays(pa.array(codes, mask=unknown), pa.array(names, pa.string()))


def named(names: Sequence[str], numbers: npt.NDArray[np.integer]) -> pa.Array:
    return coded(names, numbers).cast(pa.string())


def instants(ms: npt.NDArray[np.int64]) -> pa.Array:
    return pa.array(ms * 1000).view(_ARROW["TIMESTAMP"])


def micros(value: Any) -> int:
    """Unix µs of a datetime with a zone."""
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise BadRequest(f"a time with a zone is expected, not {value!r}")
    delta = value - datetime.fromtimestamp(0, value.tzinfo)
    return (delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds


def _shown(hour: int) -> int:
    return hour_int(hour) if hour < 2 * DEAD_HOURS else 0  # none: masked, or damage


def without(values: pa.Array, missing: Mask) -> pa.Array:
    return values if not missing.any() else pc.if_else(pa.array(missing), None, values)


def _in(column: npt.NDArray[Any], values: Sequence[int]) -> Mask:
    return np.asarray(column == values[0]) if len(values) == 1 else np.isin(column, np.array(values, column.dtype))


def _compare(column: npt.NDArray[np.int64], f: Filter, convert: Callable[[Any], int]) -> Mask:
    if f.op == "in":
        return np.isin(column, [convert(value) for value in f.value])
    return np.asarray(_OPERATORS[f.op](column, convert(f.value)))


def _numbers(names: Sequence[str], f: Filter) -> list[int]:
    wanted = f.value if f.op == "in" else (f.value,)
    return [n for n, name in enumerate(names) if name in wanted]


def _ids_of(f: Filter) -> list[int]:
    found = []
    for text in f.value if f.op == "in" else (f.value,):
        try:
            found.append(decode_id(text))
        except ValueError:
            continue  # no message has it
    return found
