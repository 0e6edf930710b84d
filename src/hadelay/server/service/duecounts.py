"""Counts of messages by due time. They come from counts that storage keeps for each hour, so no message is read (ADR
86).

Storage counts the entries ever filed, per second and per {topic, minute}. The settled ones among them are looked up in
slices, each entry once per process, and subtracted. So a query costs only what is new since the last query. The seconds
of one topic are counted entry by entry, and so only for short ranges, and in the hours in which a range begins or ends
within a minute.
"""

from collections import OrderedDict
from collections.abc import Generator

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap

from hadelay.codec.formats import SECONDS_PER_HOUR, TOPIC
from hadelay.ledger.hours.hourstate import indexes_of, is_in
from hadelay.ledger.state import Ledger
from hadelay.model import DEAD_HOURS, HOUR_MS
from hadelay.server.checkpoints import Replica
from hadelay.storage.heads import count_topics
from hadelay.storage.headsfile import no_counters
from hadelay.storage.hours import DiskHourStore

#: Limits after which a count lets other tasks of the event loop run, each some milliseconds of work: settled index
#: entries that are looked up; and hours that are counted.
_SLICE, _HOURS = 8_192, 64
#: Number of index entries read after which other tasks of the event loop run; and number of entries that the fixed work
#: for one hour counts as.
_SMALL, _LOOK = 2_048, 256
#: Limit of hours whose counts of settled index entries are cached; beyond it, the hour used longest ago is dropped.
_REMEMBERED = 512
_MINUTE_MS = 60_000

#: (start of each bucket in ms, number of open messages in each bucket)
Counts = tuple[list[int], list[int]]


class _Settled:
    """Counts of settled index entries of one hour, per second and per {topic, minute}."""

    def __init__(self) -> None:
        self.counted = BitMap()
        self.seconds = np.zeros(SECONDS_PER_HOUR, np.int64)
        self.topics = no_counters()

    def look_up(self, ledger: Ledger, hour: int) -> int:
        """Count some more of the hour's settled entries. Returns their number; 0 if all settled entries are counted."""
        hour_state = ledger.hours.get(hour)
        if hour_state is None or len(hour_state.settled) == len(self.counted):
            return 0
        new = hour_state.settled - self.counted
        some = new[:_SLICE] if len(new) > _SLICE else new
        rows = ledger.store.entries(hour, indexes_of(some))
        self.seconds += np.bincount(rows["second"], minlength=SECONDS_PER_HOUR)
        self.topics = count_topics(self.topics, rows)
        self.counted |= some
        return len(some)

    def open(self, store: DiskHourStore, hour: int, topic: int | None) -> NDArray[np.int64]:
        """Numbers of open entries of the hour: per second of all topics, or per minute of the topic number `topic`."""
        if topic is None:
            return store.written_seconds(hour) - self.seconds
        counts = np.zeros(60, np.int64)
        for rows, sign in ((store.written_minutes(hour), 1), (self.topics, -1)):
            mine = rows[rows["topic"] == topic]
            counts[mine["minute"]] += sign * mine["count"].astype(np.int64)
        return counts


class DueCounts:
    """Counts open messages by due time. One object per node."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._settled: OrderedDict[int, _Settled] = OrderedDict()
        #: The ledger to which the counts in `_settled` belong; an installed snapshot replaces the ledger.
        self._ledger: Ledger | None = None
        #: Number of index entries read since other tasks of the event loop last ran.
        self._spent = 0

    def count(self, topic: str | None, from_ms: int, to_ms: int, step_ms: int) -> Generator[None, None, Counts]:
        """Count open messages due in [from_ms, to_ms); returns the non-empty buckets, ascending, and yields after each
        slice. A topic that does not exist has no buckets. step_ms: whole seconds. For one topic and a step that is no
        whole minute, each entry of the hours in the range is read. For one topic and a step of whole minutes, messages
        count at the start of their minute; those of the first and last hour at their second, if the ends of the range
        need that."""
        ledger, store = self._fresh(), self._replica.storage.hours
        if topic is not None and ledger.topic(topic) is None:
            return [], []
        number = None if topic is None else ledger.names.number(TOPIC, topic)
        fine = number is None or step_ms % _MINUTE_MS > 0
        buckets = _Buckets(from_ms, to_ms, step_ms)
        first, last = from_ms // HOUR_MS, min((to_ms - 1) // HOUR_MS, DEAD_HOURS - 1)
        hours = [hour for hour in store.hours() if first <= hour <= last]
        if number is not None:
            ends = {ms // HOUR_MS for ms in (from_ms, to_ms) if ms % _MINUTE_MS}
            for hour in hours if fine else ends.intersection(hours):
                buckets.add_hour(hour, (yield from _seconds(ledger, hour, number)))
            hours = [] if fine else [hour for hour in hours if hour not in ends]
        for start in range(0, len(hours), _HOURS):
            # In hours that have begun, apply counts open entries per second, so no settled entries have to be looked
            # up, unless message groups block some entries.
            some = [hour for hour in hours[start : start + _HOURS] if ledger.open_entries(hour)]
            running = (
                {}
                if number is not None
                else {
                    hour: state.open_seconds
                    for hour in some
                    if (state := ledger.hours.get(hour)) is not None
                    and state.open_seconds is not None
                    and not state.blocked
                }
            )
            stored = {hour: self._of(hour) for hour in some if hour not in running}
            for hour, settled in stored.items():
                while rows := store.derive_some(hour, topics=number is not None) or settled.look_up(ledger, hour):
                    if self._enough(rows):
                        yield
            # Do not yield until the counts of these hours are added: all counts have to be of the same moment.
            for hour, settled in stored.items():
                while settled.look_up(ledger, hour):
                    pass
                buckets.add_hour(hour, settled.open(store, hour, number))
            for hour, seconds in running.items():
                buckets.add_hour(hour, seconds)
            if stored:
                buckets.add_entries(*store.waiting(), list(stored), number)
            yield
        return buckets.filled()

    def largest(self, from_ms: int, to_ms: int, most: int) -> Generator[None, None, list[str]]:
        """Names of at most `most` topics: those with most open messages due in the minutes of [from_ms, to_ms), the
        largest first. Yields after each slice."""
        ledger, store = self._fresh(), self._replica.storage.hours
        first, last = from_ms // HOUR_MS, min((to_ms - 1) // HOUR_MS, DEAD_HOURS - 1)
        totals = np.zeros(len(ledger.topics.all) + 1, np.int64)
        for hour in [hour for hour in store.hours() if first <= hour <= last and ledger.open_entries(hour)]:
            settled = self._of(hour)
            while rows := store.derive_some(hour, topics=True) or settled.look_up(ledger, hour):
                if self._enough(rows):
                    yield
            begin, end = ((ms - hour * HOUR_MS) / _MINUTE_MS for ms in (from_ms, to_ms))
            for counters, sign in ((store.written_minutes(hour), 1), (settled.topics, -1)):
                some = counters[(counters["minute"] > begin - 1) & (counters["minute"] < end)]
                # Topics that were created meanwhile are counted together in the last element, which is not returned.
                numbers = np.minimum(some["topic"], len(totals) - 1)
                totals += sign * np.bincount(numbers, some["count"], len(totals)).astype(np.int64)
            if self._enough(0):
                yield
        at, seconds, topics = store.waiting()
        due_ms = at.astype(np.int64) * HOUR_MS + seconds.astype(np.int64) * 1000
        waiting = np.minimum(topics[(due_ms >= from_ms) & (due_ms < to_ms)], len(totals) - 1)
        totals += np.bincount(waiting, minlength=len(totals))
        best = np.argsort(-totals[:-1], kind="stable")[:most]
        return [ledger.topics[number].name for number in best.tolist() if totals[number] > 0]

    def _fresh(self) -> Ledger:
        """The node's present ledger. If a snapshot has replaced the ledger, forgets the counts of the earlier one."""
        ledger = self._replica.ledger
        if self._ledger is not ledger:
            self._ledger, self._settled = ledger, OrderedDict()
        return ledger

    def _of(self, hour: int) -> _Settled:
        settled = self._settled.setdefault(hour, _Settled())
        self._settled.move_to_end(hour)
        if len(self._settled) > _REMEMBERED:
            self._settled.popitem(last=False)
        return settled

    def _enough(self, rows: int) -> bool:
        """Whether the count should yield now, so that other tasks of the event loop run. rows: number of entries read
        since the last call."""
        self._spent += rows + _LOOK
        if self._spent < _SMALL:
            return False
        self._spent = 0
        return True


def _seconds(ledger: Ledger, hour: int, topic: int) -> Generator[None, None, NDArray[np.int64]]:
    """Count the topic's open entries of an hour per second, by reading each entry of the hour."""
    store, counts, start = ledger.store, np.zeros(SECONDS_PER_HOUR, np.int64), 0
    while start < store.count(hour) and ledger.open_entries(hour):
        part = slice(start, start + _SLICE)
        rows = store.index_view(hour)[part] if store.mapped(hour) else store.entries(hour, part, verify=False)
        mine, hour_state = rows[rows["topic"] == topic], ledger.hours.get(hour)
        if hour_state is not None and len(mine):
            mine = mine[~is_in(mine["index"], hour_state.settled)]
        counts += np.bincount(mine["second"], minlength=SECONDS_PER_HOUR)
        start += _SLICE
        yield
    return counts


class _Buckets:
    """Number of messages in each step of a time range. A message counts at the start of its second or minute."""

    def __init__(self, from_ms: int, to_ms: int, step_ms: int) -> None:
        self.from_ms, self.step_s = from_ms, step_ms // 1000
        # First second of the range, and second before which the range ends. Both are rounded up: a second that begins
        # before the range is not counted.
        self.first_s, self.end_s = (-(-ms // 1000) for ms in (from_ms, to_ms))
        self.counts = np.zeros(-(-(to_ms - from_ms) // step_ms), np.int64)

    def add_hour(self, hour: int, counts: NDArray[np.integer]) -> None:
        """Add the counts of an hour. counts: number of messages per second or per minute of the hour."""
        part_s, step_s, at_s = SECONDS_PER_HOUR // len(counts), self.step_s, hour * SECONDS_PER_HOUR - self.first_s
        begin = max(0, -(at_s // part_s))
        end = min(len(counts), -((hour * SECONDS_PER_HOUR - self.end_s) // part_s))
        if begin >= end:
            return
        first, last = ((at_s + part * part_s) // step_s for part in (begin, end - 1))
        # For each bucket, the position in `counts` of the first second (or minute) that belongs to the bucket.
        starts = -((at_s - np.arange(first, last + 1) * step_s) // part_s)
        starts[0] = begin
        self.counts[first : last + 1] += np.add.reduceat(counts[:end], starts, dtype=np.int64)

    def add_entries(
        self,
        at: NDArray[np.int64],
        seconds: NDArray[np.integer],
        topics: NDArray[np.integer],
        hours: list[int],
        topic: int | None,
    ) -> None:
        """Add entries to the buckets. at: hour of each entry. Skips entries of hours that are not in `hours`, and of
        other topics than `topic`; topic None: of any topic."""
        lowest, highest = min(hours), max(hours)
        wanted = np.zeros(highest - lowest + 3, np.bool_)
        wanted[np.array(hours) - lowest + 1] = True
        # Entries of hours that are not wanted are not counted. The first and the last element of `wanted`, which are
        # False, stand for all hours below `lowest` and above `highest`.
        chosen = wanted.take(at - (lowest - 1), mode="clip")
        if topic is not None:
            chosen &= topics == topic
        part_s = 1 if topic is None else 60
        at_s = at[chosen] * SECONDS_PER_HOUR + seconds[chosen] // part_s * part_s
        at_s = at_s[(at_s >= self.first_s) & (at_s < self.end_s)] - self.first_s
        self.counts += np.bincount(at_s // self.step_s, minlength=len(self.counts))

    def filled(self) -> Counts:
        at = np.flatnonzero(self.counts > 0)
        return (self.from_ms + at * self.step_s * 1000).tolist(), self.counts[at].tolist()
