"""Loading what falls due soon: hour wheel → second wheel → a Second, 10 s ahead → windows.

Nothing assumes that a second that has passed no longer grows; but what it grows by comes from apply (the loading offset
of S1: a second is loaded up to its length, later entries are told by `filed`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap

from hadelay.codec.formats import SECONDS_PER_HOUR
from hadelay.handout.owed import Owed
from hadelay.handout.queues import split
from hadelay.handout.scans import SLICE
from hadelay.handout.waiting import Waiting
from hadelay.handout.wheel import HourWheel, Second, SecondWheel
from hadelay.handout.windows import Windows
from hadelay.ledger.chain import ChainWalk, Damage
from hadelay.ledger.hourstate import bitmap, groups, indexes_of
from hadelay.model import DEAD_HOURS, HOUR_MS, NEVER_MS

#: Limit of messages in loaded seconds. Beyond it a second is loaded only when it is the next one to run.
PRELOAD_ROWS = 1 << 20
_LAST_MOMENT_MS = 1_000


class Preload:
    def __init__(
        self, owed: Owed, windows: Windows, waiting: Waiting, counts: Counter[int], preload_ms: int,
        on_damage: Callable[[Damage], None], on_open: Callable[[int], None],
        on_load: Callable[[int, NDArray[np.void], int], None],
    ) -> None:  # fmt: skip
        """counts: of ready messages, by topic number. on_open: the chains of that hour are walked from now on. on_load:
        these INDEX rows of the hour were loaded, so many ms before their second begins."""
        self._owed, self._store, self._windows, self._waiting = owed, owed.store, windows, waiting
        self._counts, self._preload_ms = counts, preload_ms
        self._on_damage, self._on_open, self._on_load = on_damage, on_open, on_load
        #: Cluster time up to which messages were made ready.
        self.tick_ms = 0
        #: (second since 1970, how many of its messages were made ready): the cursor.
        self.reached = (0, 0)
        #: The same, of what this leader made ready: it may have begun in the middle of a second.
        self._counted = (0, 0)
        self._hours = HourWheel()
        self._wheels: dict[int, SecondWheel] = {}
        self._seconds: dict[int, Second] = {}
        #: Seconds that are being loaded: call `work` soon.
        self.loading: deque[tuple[Second, ChainWalk]] = deque()
        #: Seconds of which not everything fitted into memory.
        self._spilled: dict[int, Counter[int]] = {}
        #: Entries of open hours that were settled before they were due; some of them are loaded.
        self._gone: dict[int, BitMap] = {}

    def start(self, now_ms: int) -> None:
        self.tick_ms = now_ms
        at = now_ms // 1000
        for known in self._store.hours():
            if known == at // SECONDS_PER_HOUR:
                self._open(known, at % SECONDS_PER_HOUR)
            elif at // SECONDS_PER_HOUR < known < DEAD_HOURS:
                self._hours.add(known)

    def advance(self, tick_ms: int) -> None:
        """Make ready what is due by then."""
        self.tick_ms = tick_ms
        self._open_hours()
        self._load_seconds()
        for second in [s for s in self._seconds.values() if s.loaded and s.next_ms <= self.tick_ms]:
            self._run(second)
        if self._spilled:
            self._leave_spilled()

    @property
    def first_second(self) -> int:
        """The earliest second that is not loaded yet."""
        waiting = self._first_waiting()
        first = NEVER_MS if waiting is None else waiting[1]
        return min([first, *(second.second for second, _ in self.loading)])

    def next_ms(self) -> int:
        """When to look again, NEVER_MS if nothing is coming."""
        times = [second.next_ms for second in self._seconds.values() if second.loaded]
        times += [at * 1000 + 1000 for at in self._spilled]
        if (waiting := self._first_waiting()) is not None:
            times.append(max(waiting[1] * 1000 - self._preload_ms, self.tick_ms + 1))
        if (hour := self._hours.first()) is not None:
            times.append(hour * HOUR_MS - self._preload_ms)
        return min(times, default=NEVER_MS)

    # loading

    @property
    def late(self) -> bool:
        """A second is still being loaded that has begun already."""
        return bool(self.loading) and self.loading[0][0].start_ms <= self.tick_ms

    def _open_hours(self) -> None:
        horizon = (self.tick_ms + self._preload_ms) // HOUR_MS
        while (hour := self._hours.first()) is not None and hour <= horizon:
            self._open(self._hours.take(), 0)
        running = self.tick_ms // HOUR_MS
        for hour in [h for h, wheel in self._wheels.items() if h < running and wheel.first() is None]:
            del self._wheels[hour]
            self._gone.pop(hour, None)

    def _open(self, hour: int, from_second: int) -> None:
        if hour not in self._wheels:
            self._on_open(hour)
            self._wheels[hour] = SecondWheel(hour, self._store.heads(hour).count, from_second)

    def _first_waiting(self) -> tuple[SecondWheel, int] | None:
        """The earliest second that is not loaded; hours are few and open in order."""
        for hour in sorted(self._wheels):
            wheel = self._wheels[hour]
            if (slot := wheel.first()) is not None:
                return wheel, hour * SECONDS_PER_HOUR + slot
        return None

    def _load_seconds(self) -> None:
        budget = SLICE
        while (waiting := self._first_waiting()) is not None:
            wheel, at = waiting
            ahead = at * 1000 - self.tick_ms
            rows = sum(second.size for second in self._seconds.values())
            if ahead > self._preload_ms or (rows > PRELOAD_ROWS and ahead > _LAST_MOMENT_MS):
                break
            if len(self.loading) > self._preload_ms // 1000:
                break
            walk = ChainWalk(self._store, wheel.hour, wheel.take())
            second = self._seconds[at] = Second(at, PRELOAD_ROWS)
            self.loading.append((second, walk))
            budget -= walk.left
            if budget >= 0 and len(self.loading) == 1:
                self.work()  # small, and nothing to interleave with

    def work(self) -> None:
        """Load a slice of a second."""
        second, walk = self.loading[0]
        rows = walk.step(SLICE)
        if len(rows):
            owed = rows[self._owed.view.owed(walk.hour, rows)]
            second.add(owed)
            self._on_load(walk.hour, owed, second.start_ms - self.tick_ms)
        if walk.done:
            self.loading.popleft()
            second.loaded = True
            if second.next_ms == NEVER_MS:
                del self._seconds[second.second]
            if walk.damage is not None:
                self._on_damage(walk.damage)

    # running

    def _run(self, second: Second) -> None:
        batch = second.take(self.tick_ms)
        if batch is not None:
            indexes, topics = batch.indexes, batch.topics
            gone = self._gone.get(second.hour)
            if gone and gone.intersect(bits := bitmap(indexes)):
                owed = ~np.isin(indexes, indexes_of(gone & bits))
                indexes, topics = indexes[owed], topics[owed]
            if len(indexes):
                self._make_ready(second.hour, second.second, indexes, topics)
        if second.overflow:
            self._spilled.setdefault(second.second, Counter()).update(second.overflow)
            second.overflow = Counter()
        if second.next_ms == NEVER_MS:
            del self._seconds[second.second]

    def _make_ready(self, hour: int, second: int, indexes: NDArray[np.uint32], topics: NDArray[np.uint32]) -> None:
        for number, entries in split(hour, indexes, topics):
            self._counts[number] += len(entries)
            self._windows.add(self._waiting.topic(number), second, entries)
        counted, local = self._counted
        if second >= counted:
            self._counted = (second, len(indexes) + (local if second == counted else 0))
            self.reached = max(self.reached, self._counted)

    def _leave_spilled(self) -> None:
        """A second of which not everything fitted has passed: the rest is due, and behind its topics' marks now."""
        for at in [at for at in self._spilled if at * 1000 + 1000 <= self.tick_ms]:
            for number, count in self._spilled.pop(at).items():
                self._counts[number] += count
                self._windows.leave_out(self._waiting.topic(number), at)

    # told by apply

    def filed(self, hours: int | NDArray[np.int64], rows: NDArray[np.void]) -> None:
        for hour, mine in [(hours, slice(None))] if isinstance(hours, int) else groups(hours):
            if self._turns(hour):
                self._file(hour, rows[mine])

    def _turns(self, hour: int) -> bool:
        """The hour has a second wheel, or is late to get one. Of any other hour it is enough to know that it exists."""
        if hour in self._wheels or hour < self.tick_ms // HOUR_MS:
            return True
        if hour < DEAD_HOURS:
            self._hours.add(hour)
        return False

    def _file(self, hour: int, rows: NDArray[np.void]) -> None:
        wheel = self._wheels.get(hour)
        if wheel is None:
            wheel = self._wheels[hour] = SecondWheel(hour, np.zeros(SECONDS_PER_HOUR, np.uint32))
        far = rows["second"] > (self.tick_ms + self._preload_ms) // 1000 - hour * SECONDS_PER_HOUR
        if far.any():
            for slot in np.unique(rows["second"][far]).tolist():
                wheel.mark(slot)
            rows = rows[~far]
        for slot, mine in groups(rows["second"]):
            self._file_second(wheel, slot, rows[mine])

    def _file_second(self, wheel: SecondWheel, slot: int, rows: NDArray[np.void]) -> None:
        if wheel.waits(slot):
            return  # a walk will find them: the second is loaded up to its length at that time
        at = wheel.hour * SECONDS_PER_HOUR + slot
        # A second that the tick has not reached goes by the wheel, even its overdue messages: no message is ever made
        # ready of a second that scans would take for the future.
        later = rows["deliver_at_ms"] > self.tick_ms
        if at * 1000 <= self.tick_ms and not later.all():
            now = rows[~later]
            self._make_ready(wheel.hour, at, now["index"], now["topic"])
            rows = rows[later]
        if len(rows):
            second = self._seconds.get(at)
            if second is None:
                second = self._seconds[at] = Second(at, PRELOAD_ROWS)
                second.loaded = True
            second.add(rows)

    def has_seen(self, hour: int) -> bool:
        """Entries of the hour may be loaded, or ready."""
        return hour <= self.tick_ms // HOUR_MS or hour in self._wheels

    def drop(self, hour: int, indexes: NDArray[np.uint32]) -> None:
        """These entries were settled before they were due."""
        if hour in self._wheels:
            gone = self._gone.setdefault(hour, BitMap())
            gone |= bitmap(indexes)

    def forget(self, topic: int) -> None:
        """The topic was purged or deleted."""
        for second in self._seconds.values():
            second.forget(topic)

    def load_again(self, at: int) -> None:
        """The second was loaded in part: its chain was broken, and is repaired now."""
        second = self._seconds[at] = Second(at, PRELOAD_ROWS)
        self.loading.append((second, ChainWalk(self._store, second.hour, at % SECONDS_PER_HOUR)))
