"""Rows of .dsp as events, with what .idx says of their entries."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hadelay.codec.formats import INDEX, handout_delay_ms, nack_reason
from hadelay.model import DEAD_HOURS, NONE32, Event
from hadelay.pipeline.arrow import Mask, RowBatch, Whole, coded, ids, instants, without
from hadelay.pipeline.hourfiles import Rows, rows
from hadelay.pipeline.schema import hour_int

_EVENT_NAMES = [event.name.lower() for event in Event]  # they are numbered from 1
_IS_MOVE = np.isin(np.arange(256), (Event.MOVED, Event.DEAD, Event.REDRIVEN))


class _EventBatch(RowBatch):
    whole: Events

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


class Events(Whole):
    def batches(self, start: int, stop: int, needs_log: bool) -> Iterator[_EventBatch]:
        found, keep = self.sound("dsp", start, stop)
        kind = self.options.kind
        if kind != "events":
            leased = found["event"] == Event.LEASED
            leased = leased if kind == "dispatches" else ~leased
            keep = leased if keep is None else keep & leased
        numbers = np.arange(start, stop, dtype=np.int64)
        if keep is not None:
            found, numbers = found[keep], numbers[keep]
        if self.wanted is not None:
            entries = self.entries_of(found)
            asked = self.of_topics(entries.field("topic")) & ~entries.missing
            found, numbers = found[asked], numbers[asked]
        if len(found):
            batch = _EventBatch(self, found)
            batch.numbers = numbers
            yield batch

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


def _shown(hour: int) -> int:
    return hour_int(hour) if hour < 2 * DEAD_HOURS else 0  # none: masked, or damage
