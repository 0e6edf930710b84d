"""How many messages fall due when: from the heads of the hours, without reading a message (S2's 3600 seconds).

What was ever filed is counted per second, and per {topic, minute}, by storage; what of that is settled is counted here,
once per entry. The first question about an hour, after a load or a restart, looks up what is settled of it, in slices;
from then on apply tells what else is. So the others cost next to nothing, however many messages are pending.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap

from hadelay.codec.formats import SECONDS_PER_HOUR, TOPIC
from hadelay.ledger.hourstate import bitmap, indexes_of
from hadelay.model import DEAD_HOURS, HOUR_MS, NONE32
from hadelay.storage.heads import count_topics, no_counters

if TYPE_CHECKING:
    from hadelay.ledger.state import Ledger
    from hadelay.server.node import Node

#: Settled entries looked up in one go, and hours counted in one go: some milliseconds.
_SLICE, _HOURS = 8_192, 64
#: Less than this is not worth a turn of the others; a look at an hour costs as much as so many entries.
_SMALL, _LOOK = 2_048, 256
#: Hours of which the settled are remembered, as many as storage remembers heads of.
_REMEMBERED = 512
#: What apply told is counted by hour when it is so much. Much more, and nobody asks: it is forgotten, and looked up.
_FOLD, _FORGET = 4_096, 65_536
_TOLD = np.dtype([("hour", "<u4"), ("index", "<u4"), ("topic", "<u4"), ("second", "<u2")])
#: An hour that is none: what it says is counted.
_COUNTED = NONE32

#: (start of each bucket in ms, open messages)
Counts = tuple[list[int], list[int]]


class _Settled:
    """Settled entries of one hour, as far as they were counted."""

    def __init__(self) -> None:
        self.counted = BitMap()
        self.seconds = np.zeros(SECONDS_PER_HOUR, np.int64)
        self.topics = no_counters()
        #: The latest `_before` of the hour, and what it was made of.
        self.before: tuple[object, object, NDArray[np.int64]] | None = None
        self.before_of_topic: tuple[object, object, int, NDArray[np.int64]] | None = None
        #: Everything was looked up: what else is settled, apply tells.
        self.complete = False

    def add(self, rows: NDArray[np.void], bits: BitMap) -> None:
        """Rows with `second` and `topic`, and their indexes as a bitmap."""
        self.seconds = self.seconds + np.bincount(rows["second"], minlength=SECONDS_PER_HOUR)
        self.topics = count_topics(self.topics, rows)
        self.counted |= bits


class DueCounts:
    """One per node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._settled: OrderedDict[int, _Settled] = OrderedDict()
        #: Who tells; another one after a snapshot.
        self._ledger: Ledger | None = None
        #: Settled since its hour was complete, and not counted there yet: _TOLD rows, the first `_n`.
        self._told = np.empty(_FORGET, _TOLD)
        self._n = 0
        self._folding = False
        #: What was looked up since the others had their turn: a few entries of each of many hours add up.
        self._spent = 0

    def count(self, topic: str | None, from_ms: int, to_ms: int, step_ms: int) -> Generator[None, None, Counts]:
        """The non-empty buckets of [from_ms, to_ms), ascending; yields after a slice. A topic that is not there has
        none. step_ms: of whole seconds; for a topic, of whole minutes."""
        ledger, store = self._node.ledger, self._node.storage.hours
        number = None
        self._listen()
        if topic is not None:
            if ledger.topic(topic) is None:
                return [], []
            number = ledger.names.number(TOPIC, topic)
        buckets = np.zeros(-(-(to_ms - from_ms) // step_ms), np.int64)
        if self._n >= _FOLD and not self._folding:
            yield from self._fold()
        first, last = from_ms // HOUR_MS, min((to_ms - 1) // HOUR_MS, DEAD_HOURS - 1)
        hours = [hour for hour in store.hours() if first <= hour <= last]
        for start in range(0, len(hours), _HOURS):
            if start:
                yield
            some = [hour for hour in hours[start : start + _HOURS] if ledger.open_entries(hour)]
            settled: dict[int, _Settled] = {}
            # Again, should what was told of one have been forgotten while another one was looked up.
            while not settled or not all(known.complete for known in settled.values()):
                settled.clear()
                for hour in some:
                    if number is None and self._running(hour) is not None:
                        continue
                    while rows := store.derive_some(hour, topics=number is not None):
                        if self._enough(rows):
                            yield
                    settled[hour] = yield from self._settle(hour)
                if not settled:
                    break
            # From here to the end of the round all is of one moment.
            for hour in some:
                before = self._before(hour, settled[hour], number) if hour in settled else self._running(hour)
                if before is not None:
                    _add_hour(buckets, before, hour * HOUR_MS - from_ms, to_ms - from_ms, step_ms)
            if not settled:
                continue
            lowest, highest, told = min(settled), max(settled), self._told[: self._n]
            wanted = np.zeros(highest - lowest + 3, np.bool_)
            wanted[[hour - lowest + 1 for hour in settled]] = True
            for at, seconds, topics, sign in (
                (*store.waiting(), 1),
                (told["hour"], told["second"], told["topic"], -1),
            ):
                at = at.astype(np.int64, copy=False)
                # Those below the lowest and above the highest look at places of their own.
                chosen = wanted[at.clip(lowest - 1, highest + 1) - (lowest - 1)]
                if number is not None:
                    chosen &= topics == number
                    seconds = seconds // 60 * 60
                if not chosen.all():
                    at, seconds = at[chosen], seconds[chosen]
                # Whole seconds from here on: those from the first that does not begin before `from_ms`.
                first_s, end_s = (-(-ms // 1000) for ms in (from_ms, to_ms))
                at_s = at * SECONDS_PER_HOUR + seconds - first_s
                inside = (at_s >= 0) & (at_s < end_s - first_s)
                if not inside.all():
                    at_s = at_s[inside]
                buckets += sign * np.bincount(at_s // (step_ms // 1000), minlength=len(buckets))
        yield
        at = np.flatnonzero(buckets > 0)
        return (from_ms + at * step_ms).tolist(), buckets[at].tolist()

    def _enough(self, rows: int) -> bool:
        """Whether it is the others' turn, after a look at so many entries."""
        self._spent += rows + _LOOK
        if self._spent < _SMALL:
            return False
        self._spent = 0
        return True

    def _running(self, hour: int) -> NDArray[np.int64] | None:
        """Open entries before each second, as apply counts them from the time the hour begins; None for the others."""
        hour_state = self._node.ledger.hours.get(hour)
        seconds = hour_state.open_seconds if hour_state is not None else None
        return None if seconds is None else _sums(seconds)

    def _listen(self) -> None:
        if self._ledger is self._node.ledger:
            return
        self._settled.clear()
        self._forget()
        self._ledger = self._node.ledger
        self._ledger.on_settled = self._tell

    def _tell(self, hour: int, rows: NDArray[np.void]) -> None:
        """Apply: these are settled now."""
        known = self._settled.get(hour)
        if known is None or not known.complete:
            return
        first, self._n = self._n, self._n + len(rows)
        if self._n > _FORGET:
            self._forget()
            return
        told = self._told[first : self._n]
        told["hour"], told["index"], told["topic"], told["second"] = hour, rows["index"], rows["topic"], rows["second"]

    def _forget(self) -> None:
        """What is not counted has to be looked up."""
        self._told, self._n = np.empty(_FORGET, _TOLD), 0
        for known in self._settled.values():
            known.complete = False

    def _fold(self) -> Generator[None, None, None]:
        """Count what apply told, hour by hour."""
        self._folding, told, n = True, self._told, self._n
        hours = told["hour"][:n]
        try:
            while len(left := hours[hours != _COUNTED]):
                hour = int(left[0])
                rows = told[:n][hours == hour]
                self._settled[hour].add(rows, bitmap(rows["index"]))
                hours[hours == hour] = _COUNTED
                if self._enough(len(rows)):
                    yield
                if told is not self._told:
                    return  # forgotten meanwhile
            rest = told[n : self._n].copy()
            self._n = len(rest)
            told[: self._n] = rest
        finally:
            self._folding = False

    def _settle(self, hour: int) -> Generator[None, None, _Settled]:
        """What is settled of the hour, but for what apply told since."""
        ledger = self._node.ledger
        known = self._settled.get(hour)
        if known is None:
            known = self._settled[hour] = _Settled()
        self._settled.move_to_end(hour)
        if len(self._settled) > _REMEMBERED:
            oldest, dropped = self._settled.popitem(last=False)
            dropped.complete = False
            hours = self._told["hour"][: self._n]
            hours[hours == oldest] = _COUNTED
        while not known.complete:
            # Anew after each slice: another question may have counted meanwhile.
            hour_state = ledger.hours.get(hour)
            new = hour_state.settled - known.counted if hour_state is not None and ledger.store.count(hour) else None
            if not new:
                known.complete = True
                break
            some = new[:_SLICE] if len(new) > _SLICE else new
            known.add(ledger.store.entries(hour, indexes_of(some)), some)
            if self._enough(len(some)):
                yield
        return known

    def _before(self, hour: int, settled: _Settled, topic: int | None) -> NDArray[np.int64]:
        """How many, written and open but for what apply told, are before each second; for one topic, each minute."""
        store = self._node.storage.hours
        if topic is None:
            written, known = store.written(hour), settled.before
            if known is None or known[0] != written or known[1] is not settled.seconds:
                sums = _sums(store.written_seconds(hour) - settled.seconds)
                settled.before = known = written, settled.seconds, sums
            return known[-1]
        counters, of_topic = store.written_minutes(hour), settled.before_of_topic
        if of_topic is None or of_topic[0] is not counters or of_topic[1] is not settled.topics or of_topic[2] != topic:
            counts = np.zeros(60, np.int64)
            for rows, sign in ((counters, 1), (settled.topics, -1)):
                mine = rows[rows["topic"] == topic]
                counts[mine["minute"]] += sign * mine["count"].astype(np.int64)
            settled.before_of_topic = of_topic = counters, settled.topics, topic, _sums(counts)
        return of_topic[-1]


def _sums(counts: NDArray[np.integer]) -> NDArray[np.int64]:
    """Of the first 0, 1, 2, … of them."""
    before = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=before[1:])
    return before


def _add_hour(buckets: NDArray[np.int64], before: NDArray[np.int64], start_ms: int, end_ms: int, step_ms: int) -> None:
    """Add an hour, of which `before` has the sums of equal parts, to the buckets of `step_ms` each up to `end_ms`; the
    hour begins at `start_ms`, and the first bucket at 0."""
    parts = len(before) - 1
    part_ms = HOUR_MS // parts
    end = min(parts, -(-(end_ms - start_ms) // part_ms))
    first = max(start_ms // step_ms, 0)
    # Which part each bucket begins with: `step_ms` is a whole number of parts.
    at = -(-(first * step_ms - start_ms) // part_ms)
    sums = before[at + step_ms // part_ms : end : step_ms // part_ms]
    # What falls into a bucket is what came before its end, less what came before its start.
    buckets[first] -= before[max(at, 0)]
    buckets[first : first + len(sums)] += sums
    buckets[first + 1 : first + 1 + len(sums)] -= sums
    buckets[first + len(sums)] += before[end]
