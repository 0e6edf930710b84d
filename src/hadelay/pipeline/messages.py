"""Rows of .idx and .log as messages. Metas, which are msgpack, are decoded once per distinct value of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hadelay.codec import meta
from hadelay.codec.formats import RECORD, RECORD_SIZE
from hadelay.codec.records import check_record
from hadelay.errors import DamagedFile
from hadelay.model import DEAD_HOURS
from hadelay.pipeline.arrow import ARROW, RowBatch, Whole, binaries, coded, ids, instants
from hadelay.pipeline.hourfiles import HourFiles, Rows, Store, damage

#: Bytes of records that one batch may be made from.
_BATCH_BYTES = 64 << 20
_EVENTS_AT_ONCE = 1 << 20
#: Where each field of a record's header is; and the two that say what follows it.
_AT = {name: int(field[1]) for name, field in (RECORD.fields or {}).items()}
_SIZES = np.dtype([("meta", "<u4"), ("body", "<u4")])
#: An entry's state is that of its last event, and events are numbered in the order in which they can follow each other.
_STATES = ("", "leased", "acked", "", "", "expired", "cancelled", "moved", "moved", "moved")
_STATE_NAMES = ("scheduled", "ready", "leased", "acked", "cancelled", "expired", "dead", "moved")


class _MessageBatch(RowBatch):
    whole: Messages
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
        return self._of_meta(lambda m: m.tags, ARROW["ARRAY<STRING>"])

    def _meta(self) -> pa.Array:
        return self._of_meta(lambda m: list(m.meta.items()), ARROW["MAP<STRING,STRING>"])


class Messages(Whole):
    def batches(self, start: int, stop: int, needs_log: bool) -> Iterator[_MessageBatch]:
        found, keep = self.sound("idx", start, stop)
        if self.wanted is not None:
            asked = self.of_topics(found["topic"])
            keep = asked if keep is None else keep & asked
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
