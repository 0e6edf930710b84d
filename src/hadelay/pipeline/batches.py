"""Convert hour files to Arrow record batches with numpy; no row becomes a Python object.

A message's meta, which is msgpack, is decoded once per distinct value of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hadelay.codec import meta
from hadelay.codec.formats import INDEX, RECORD, RECORD_SIZE, handout_delay_ms, nack_reason
from hadelay.codec.records import check_record
from hadelay.errors import DamagedFile
from hadelay.model import DEAD_HOURS, MOVES, NONE32, Event
from hadelay.pipeline.arrow import ARROW, Mask, Split, binaries, coded, hour_ints, ids, instants, without
from hadelay.pipeline.hourfiles import HourFiles, Listing, NameMap, Rows, Store, damage, events_of, rows, usable
from hadelay.pipeline.schema import KINDS, Options, hour_int

#: Columns with few different values; `read` returns them dictionary-encoded if as_codes is true.
CODED = frozenset(("topic", "subscription", "state", "content_type", "event", "consumer", "node", "reason", "schedule"))
#: Maximum size of the records per batch, in bytes.
_BATCH_BYTES = 64 << 20
#: Maximum gap, in bytes, between two records read in one piece: reading the gap is cheaper than another request.
_MAX_GAP = 1 << 20
#: Field of a record's header → offset of the field.
_AT = {name: int(field[1]) for name, field in (RECORD.fields or {}).items()}
#: Layout of two adjacent fields in a record's header: the sizes of meta and body.
_SIZES = np.dtype([("meta", "<u4"), ("body", "<u4")])
_STATE_NAMES = ("scheduled", "ready", "leased", "acked", "cancelled", "expired", "dead", "moved")
#: Type number of an entry's last event → state of the entry; "" if the entry waits. The events of an entry follow each
#: other in the order of their type numbers, so the last event has the largest number.
_STATES = ("", "leased", "acked", "", "", "expired", "cancelled", "moved", "moved", "moved", "moved")
_STATE_OF_EVENT = np.array([_STATE_NAMES.index(name) if name else -1 for name in _STATES], np.int8)
# Names of the event types. Type numbers start at 1, so the name of type n is at position n - 1.
_EVENT_NAMES = [event.name.lower() for event in Event]
_IS_MOVE = np.isin(np.arange(256), MOVES)


def schema(kind: str, columns: Sequence[str], *, as_codes: bool = False, required: Container[str] = ()) -> pa.Schema:
    codes = pa.dictionary(pa.int32(), pa.string())
    types = {name: codes if as_codes and name in CODED else ARROW[KINDS[kind][name].type] for name in columns}
    return pa.schema([pa.field(name, types[name], name not in required) for name in columns])


def splits(listing: Listing, options: Options, *, even: bool = False) -> list[Split]:
    """Split all hours that the options select into parts of up to split_rows rows, oldest hours first.

    even: split a large hour into an even number of equal parts, so that no part is left over to run alone on one of two
    cores. Not into more parts: for `state` each reads all events. Else only the last part is smaller; archives name
    their files after these parts."""
    found = []
    for files in sorted(listing.hours):
        if not options.takes(files.hour):
            continue
        count = files.entries if options.kind == "messages" else files.events
        cuts = [*range(0, count, options.split_rows), count]
        if even and len(cuts) > 2:
            parts = len(cuts) // 2 * 2
            cuts = [count * n // parts for n in range(parts + 1)]
        found += [Split(files, start, stop, listing.as_of_ms) for start, stop in pairwise(cuts) if start < stop]
    return found


def read(
    store: Store,
    options: Options,
    columns: Sequence[str],
    split: Split,
    *,
    as_codes: bool = False,
    required: Container[str] = (),
) -> Iterator[pa.RecordBatch]:
    """Read the selected topics' rows of a split as record batches. Raises DamagedFile with file, hour and entry; with
    onTorn=skip, damaged rows are omitted.

    as_codes: return columns of few values as dictionaries, which Parquet is written from faster. required: columns that
    are never null by the schema."""
    target = schema(options.kind, columns, as_codes=as_codes, required=required)
    reader = (_Messages if options.kind == "messages" else _Events)(store, options, split)
    needs_log = any(KINDS[options.kind][name].log for name in columns)
    for start in range(split.start, split.stop, options.batch_rows):
        for batch in reader.batches(start, min(start + options.batch_rows, split.stop), needs_log):
            found = [batch.column(name) for name in target.names]
            made = [
                pa.array(a, f.type) if isinstance(a, np.ndarray) else a if a.type == f.type else a.cast(f.type)
                for a, f in zip(found, target, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(made, schema=target)


class _Batch:
    """Some rows of one hour, and columns made from them."""

    def __init__(self, reader: _Reader, rows: Rows) -> None:
        self.reader, self.rows = reader, rows
        self.names: NameMap = reader.names

    def queue(self, half: int, numbers: npt.NDArray[np.uint32]) -> pa.DictionaryArray:
        """Column with the name that each topic number stands for. half: 0 for names of topics, 1 for subscriptions."""
        found = self.reader.halves[half]
        return coded(found.names, found.of_numbers(numbers))

    def column(self, name: str) -> Any:
        """Make a column of the batch: a numpy or Arrow array as long as `rows`."""
        make = self.reader.columns.get(name)
        return np.ascontiguousarray(self.rows[name]) if make is None else make(self)


class _Reader:
    #: Name of a column → function that makes the column. Columns without a function are fields of the rows.
    columns: ClassVar[dict[str, Callable[[Any], Any]]]

    def __init__(self, store: Store, options: Options, split: Split) -> None:
        self.store, self.options, self.split, self.files = store, options, split, split.files
        self.verify, self.skip = options.verify, options.on_torn == "skip"
        self.names: NameMap = store.names()
        self.halves = self.names.halves()
        self.selected = self.names.topic_mask(options.topics)

    def batches(self, start: int, stop: int, needs_log: bool) -> Iterator[_Batch]:
        """Read the selected rows among [start, stop), in batches."""
        raise NotImplementedError

    def of_topics(self, numbers: npt.NDArray[np.uint32]) -> Mask:
        """Mask of the rows whose topic number is selected."""
        assert self.selected is not None
        return np.asarray(self.selected[np.minimum(numbers, len(self.selected) - 1)])

    def usable(self, suffix: str, start: int, stop: int) -> tuple[Rows, Mask | None]:
        return usable(self.store, self.files, suffix, start, stop, verify=self.verify, skip=self.skip)


_COLUMNS: dict[str, Callable[[_Batch], Any]] = {
    "hour": lambda b: np.full(len(b.rows), hour_int(b.reader.files.hour), np.int32),
    "dead": lambda b: np.full(len(b.rows), b.reader.files.hour >= DEAD_HOURS),
    "entry": lambda b: b.rows["index"].astype(np.int64),
}


class _MessageBatch(_Batch):
    reader: _Messages
    #: Bytes of the .log; position of each row's record in them; record sizes. Set if a column needs the .log.
    log: Any = None
    at: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]

    def gathered(self, kind: npt.DTypeLike, skip: int) -> npt.NDArray[Any]:
        """Read a value of type `kind` at offset `skip` of each record."""
        kind = np.dtype(kind)
        plain = f"V{kind.itemsize}"  # copy values as plain bytes: numpy would copy field by field
        where = np.ndarray(len(self.log) - skip - kind.itemsize + 1, plain, self.log, skip, strides=(1,))
        return where[self.at].view(kind)

    @cached_property
    def sizes(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Size of each record's meta and body."""
        found = self.gathered(_SIZES, _AT["meta_size"])
        return found["meta"].astype(np.int64), found["body"].astype(np.int64)

    def pieces(self, skip: npt.NDArray[np.int64] | int, sizes: npt.NDArray[np.int64]) -> pa.Array:
        """Cut a piece out of each record: `sizes` bytes, from `skip` bytes behind its header. Rows may share a record,
        and records may be in any order."""
        if (skip + sizes > self.lengths - RECORD_SIZE).any():
            where = self.reader.store.where(self.reader.files, "log")
            raise DamagedFile(
                where, 0, "the sizes in a record's header exceed the record; read with verify=true to find the entry"
            )
        return binaries(self.log, self.at + (RECORD_SIZE + skip), sizes)

    @cached_property
    def metas(self) -> tuple[list[meta.Meta], pa.Array]:
        """Decode the metadata in the rows' records: (list of distinct metadata, index of each row's metadata in this
        list)."""
        encoded = self.pieces(0, self.sizes[0]).dictionary_encode()
        return [meta.unpack(data) for data in encoded.dictionary.to_pylist()], encoded.indices

    def of_meta(self, get: Callable[[meta.Meta], Any], kind: str = "STRING") -> pa.Array:
        values, indices = self.metas
        return pa.array([get(value) for value in values], ARROW[kind]).take(indices)

    def published(self) -> pa.Array:
        """Id that the publisher got, from each row's record; null where that id is the message's own id."""
        named = self.gathered("<u8", _AT["first_id"])
        return without(ids(named), named == self.rows["first_id"])


_MESSAGE_COLUMNS: dict[str, Callable[[_MessageBatch], Any]] = {
    **_COLUMNS,
    "id": lambda b: ids(b.rows["first_id"]),
    "first_id": lambda b: b.rows["first_id"].astype(np.int64),
    "published_id": lambda b: b.published(),
    "topic": lambda b: b.queue(0, b.rows["topic"]),
    "subscription": lambda b: b.queue(1, b.rows["topic"]),
    "deliver_at": lambda b: instants(b.rows["deliver_at_ms"]),
    "tag_mask": lambda b: b.rows["tag_mask"].astype(np.int64),
    "size": lambda b: b.rows["size"].astype(np.int32),
    "state": lambda b: coded(_STATE_NAMES, b.reader.states(b.rows)),
    "published_at": lambda b: instants(b.gathered("<i8", _AT["published_at_ms"])),
    "content_type": lambda b: b.of_meta(lambda m: m.ct).dictionary_encode(),
    "key": lambda b: b.of_meta(lambda m: m.key),
    "tags": lambda b: b.of_meta(lambda m: m.tags, "ARRAY<STRING>"),
    "meta": lambda b: b.of_meta(lambda m: list(m.meta.items()), "MAP<STRING,STRING>"),
    "group": lambda b: b.of_meta(lambda m: m.group),
    "batch": lambda b: b.of_meta(lambda m: m.batch),
    "schedule": lambda b: b.of_meta(lambda m: m.sch).dictionary_encode(),
    "occurrence": lambda b: b.of_meta(lambda m: m.oc * 1000 if m.sch else None, "TIMESTAMP"),
    "forward": lambda b: b.of_meta(lambda m: list(m.fw.items()) or None, "MAP<STRING,STRING>"),
    "on_success": lambda b: b.of_meta(lambda m: m.os),
    "on_failure": lambda b: b.of_meta(lambda m: m.of),
    "body": lambda b: b.pieces(*b.sizes),
}


class _Messages(_Reader):
    columns = _MESSAGE_COLUMNS

    def batches(self, start: int, stop: int, needs_log: bool) -> Iterator[_MessageBatch]:
        found, keep = self.usable("idx", start, stop)
        if self.selected is not None:
            selected = self.of_topics(found["topic"])
            keep = selected if keep is None else keep & selected
        if keep is not None and not keep.all():
            found = found[keep]
        if not needs_log:
            if len(found):
                yield _MessageBatch(self, found)
            return
        # Cut the rows into batches by the bytes of their records: bodies may be large.
        lengths = found["size"].astype(np.int64)
        cuts = np.flatnonzero(np.diff(lengths.cumsum() // _BATCH_BYTES)) + 1
        for first, last in pairwise((0, *cuts.tolist(), len(found))):
            batch = self._with_records(found[first:last], lengths[first:last])
            if len(batch.rows):
                yield batch

    @cached_property
    def _last_events(self) -> npt.NDArray[np.uint8]:
        """Type number of the last event of each entry in the split (a part of an hour); 0: no event."""
        (files, start, stop, _), last = self.split, np.zeros(self.split.stop - self.split.start, np.uint8)
        for at, events, _ in events_of(self.store, files, start, stop, verify=self.verify, skip=self.skip):
            known = events["event"] < len(_STATES)
            np.maximum.at(last, at[known], events["event"][known])
        return last

    def states(self, found: Rows) -> npt.NDArray[np.int8]:
        """State of each row, as a position in _STATE_NAMES."""
        if self.files.hour >= DEAD_HOURS:
            waiting = np.full(len(found), _STATE_NAMES.index("dead"), np.int8)
        else:
            waiting = (found["deliver_at_ms"] <= self.split.as_of_ms).astype(np.int8)
        states = _STATE_OF_EVENT[self._last_events[found["index"].astype(np.int64) - self.split.start]]
        return np.where(states < 0, waiting, states)

    def _with_records(self, rows: Rows, lengths: npt.NDArray[np.int64]) -> _MessageBatch:
        """Read the rows' records. A row whose record is missing or damaged raises DamagedFile, or is omitted with
        onTorn=skip."""
        offsets = rows["offset"].astype(np.int64)
        good = (offsets + lengths <= self.files.log_bytes) & (lengths >= RECORD_SIZE)
        if not good.all():
            self._refuse(rows[good.argmin()], "its record is not in the .log")
            rows, lengths, offsets = rows[good], lengths[good], offsets[good]
        batch = _MessageBatch(self, rows)
        if not len(rows):
            return batch
        batch.log, batch.at = _records(self.store, self.files, offsets, offsets + lengths)
        batch.lengths = lengths
        if self.verify:
            good = np.ones(len(rows), np.bool_)
            for n, (at, size) in enumerate(zip(batch.at.tolist(), lengths.tolist(), strict=True)):
                if (what := check_record(batch.log[at : at + size].tobytes(), size)) is not None:
                    self._refuse(rows[n], what)
                    good[n] = False
            batch.rows, batch.at, batch.lengths = rows[good], batch.at[good], lengths[good]
        return batch

    def _refuse(self, row: np.void, what: str) -> None:
        if not self.skip:
            raise damage(self.store, self.files, "idx", int(row["index"]), what)


def _records(
    store: Store, files: HourFiles, offsets: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Read records from the .log in few pieces: (bytes, position of each record in these bytes)."""
    starts = offsets
    if (starts[1:] < starts[:-1]).any():  # sort only if needed: records are usually in the order of their offsets
        order = offsets.argsort(kind="stable")
        starts, ends = offsets[order], ends[order]
    ends = np.maximum.accumulate(ends)
    cuts = np.flatnonzero(starts[1:] - ends[:-1] > _MAX_GAP) + 1
    firsts, lasts = starts[np.r_[0, cuts]], ends[np.r_[cuts - 1, len(ends) - 1]]
    pieces = [store.read(files, "log", a, b) for a, b in zip(firsts.tolist(), lasts.tolist(), strict=True)]
    if len(pieces) == 1:
        return pieces[0], offsets - firsts[0]
    bases = np.cumsum([0, *(lasts - firsts)[:-1]]) - firsts
    where = np.searchsorted(firsts, offsets, "right") - 1
    return np.concatenate(pieces), offsets + bases[where]


class _EventBatch(_Batch):
    reader: _Events
    #: Number of each event: its position in the .dsp file.
    numbers: npt.NDArray[np.int64]

    @cached_property
    def moved(self) -> Mask:
        """Mask of the events that move a message to a new entry."""
        return np.asarray(_IS_MOVE[self.rows["event"]])

    @cached_property
    def entries(self) -> tuple[Rows, npt.NDArray[np.int64], Mask]:
        """Read the events' entries: (INDEX rows, at least one; position of each event's entry in these rows; mask of
        events whose entry is missing)."""
        files = self.reader.files
        at = self.rows["index"].astype(np.int64)
        missing = at >= files.entries
        if missing.all():
            return np.zeros(1, INDEX), np.zeros_like(at), missing
        if missing.any():
            at[missing] = at[~missing][0]
        first, last = int(at.min()), int(at.max())
        return rows(self.reader.store, files, "idx", first, last + 1), at - first, missing

    def of_entry(self, name: str) -> npt.NDArray[Any]:
        """A field of each event's entry; undefined where the entry is missing."""
        index, at, _ = self.entries
        return np.asarray(index[name][at])

    @cached_property
    def topics(self) -> npt.NDArray[np.uint32]:
        """Topic number of each event's entry; NONE32 where the entry is missing."""
        return np.where(self.entries[2], np.uint32(NONE32), self.of_entry("topic"))

    def known(self, values: pa.Array) -> pa.Array:
        """Copy of an Arrow array with null for events whose entry is missing."""
        return without(values, self.entries[2])


_EVENT_COLUMNS: dict[str, Callable[[_EventBatch], Any]] = {
    **_COLUMNS,
    "number": lambda b: b.numbers,
    # The invalid type number 0 wraps around to 255, which has no name and becomes null.
    "event": lambda b: coded(_EVENT_NAMES, b.rows["event"] - np.uint8(1)),
    "at": lambda b: instants(b.rows["at_ms"]),
    "consumer": lambda b: coded(b.names.consumers, np.where(b.moved, NONE32, b.rows["consumer"])),
    "node": lambda b: coded(b.names.nodes, b.rows["node"]),
    "other_hour": lambda b: pa.array(hour_ints(np.where(b.moved, b.rows["other_hour"], 0)), mask=~b.moved),
    "other_dead": lambda b: pa.array(b.rows["other_hour"] >= DEAD_HOURS, mask=~b.moved),
    "other_entry": lambda b: pa.array(b.rows["consumer"].astype(np.int64), mask=~b.moved),
    "reason": lambda b: coded(
        b.names.reasons, np.where(b.rows["event"] == Event.NACKED, nack_reason(b.rows["other_hour"]), NONE32)
    ),
    "handout_delay_ms": lambda b: _some(handout_delay_ms(b.rows), -1),
    "previous": lambda b: _some(b.rows["previous"].astype(np.int64), NONE32),
    "id": lambda b: b.known(ids(b.of_entry("first_id"))),
    "first_id": lambda b: b.known(pa.array(b.of_entry("first_id").view(np.int64))),
    "topic": lambda b: b.queue(0, b.topics),
    "subscription": lambda b: b.queue(1, b.topics),
    "deliver_at": lambda b: b.known(instants(b.of_entry("deliver_at_ms"))),
}


def _some(values: npt.NDArray[np.int64], none: int) -> pa.Array:
    """Arrow array of the values, with null for the value `none`."""
    return pa.array(values, mask=values == none)


class _Events(_Reader):
    columns = _EVENT_COLUMNS

    def batches(self, start: int, stop: int, needs_log: bool) -> Iterator[_EventBatch]:
        found, keep = self.usable("dsp", start, stop)
        numbers = np.arange(start, stop, dtype=np.int64)
        if (kind := self.options.kind) != "events":
            wanted = (found["event"] == Event.LEASED) == (kind == "dispatches")
            keep = wanted if keep is None else keep & wanted
        batch = self._batch(found, numbers, keep)
        if self.selected is not None:
            selected = self.of_topics(batch.of_entry("topic")) & ~batch.entries[2]
            batch = self._batch(batch.rows, batch.numbers, selected)
        if len(batch.rows):
            yield batch

    def _batch(self, found: Rows, numbers: npt.NDArray[np.int64], keep: Mask | None) -> _EventBatch:
        batch = _EventBatch(self, found if keep is None else found[keep])
        batch.numbers = numbers if keep is None else numbers[keep]
        return batch
