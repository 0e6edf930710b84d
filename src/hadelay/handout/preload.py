"""Preload: loads messages 10 s before they are due, second by second, and moves them into windows when they are due.

The preload sleeps until the next second that has messages, so an idle cluster costs nothing. A second that has passed
may still grow, but apply reports what it grows by: a second is loaded up to its length at that time (the loading offset
of S1), and later entries come through `filed`. Seconds are counted since 1970: hour × 3600 + second of the hour.
"""

from collections import Counter, deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.formats import SECONDS_PER_HOUR
from hadelay.handout.deadlines import Deadlines
from hadelay.handout.scans import SLICE
from hadelay.handout.second import Second
from hadelay.handout.windows import Windows
from hadelay.ledger.hours.chain import ChainWalk, Damage
from hadelay.ledger.hours.hourstate import rows_by_value
from hadelay.model import DEAD_HOURS, HOUR_MS, NEVER_MS

#: Limit of messages loaded ahead of time; beyond it, messages are loaded only 1 s before their second begins.
PRELOAD_ROWS = 1 << 20
_LAST_MOMENT_MS = 1_000


class Prefetch(Protocol):
    """Interface of the part that reads files before they are needed (server/reading.py)."""

    def index(self, hour: int) -> None: ...

    def records(self, hour: int, rows: NDArray[np.void], in_s: float) -> None: ...


class Preload:
    def __init__(
        self, windows: Windows, preload_ms: int, on_damage: Callable[[Damage], None], read_ahead: Prefetch | None
    ) -> None:
        self._windows, self._turns = windows, windows.turns
        self._owed, self._store = windows.owed, windows.owed.store
        self._preload_ms, self._on_damage, self._read_ahead = preload_ms, on_damage, read_ahead
        #: The earliest second with index entries that was not loaded at the last `advance`; NEVER_MS: none.
        self.first_second = 0
        #: Latest second with messages made ready, by this leader or an earlier one.
        self.reached = 0
        #: Due time (ms) of the first message that this leader made ready.
        self.first_ms = NEVER_MS
        #: Future hours that have index entries, and of which no second is loaded yet.
        self._hours: Deadlines[int] = Deadlines()
        #: Hours whose seconds are being loaded.
        self._open: set[int] = set()
        #: Seconds that have index entries and are not loaded yet, in hours that are being loaded.
        self._unloaded: Deadlines[int] = Deadlines()
        self._seconds: dict[int, Second] = {}
        #: Seconds that are being loaded, with the walks over their index entries; `work` continues the first walk.
        self.loading: deque[tuple[Second, ChainWalk]] = deque()
        #: Seconds that have more messages than fitted into memory.
        self._spilled: dict[int, Second] = {}

    def start(self) -> None:
        hour, second = divmod(self._turns.now_ms // 1000, SECONDS_PER_HOUR)
        for known in self._store.hours():
            if known == hour:
                self._open_hour(hour, second)
            elif hour < known < DEAD_HOURS:
                self._hours.set(known, known)

    def advance(self) -> int:
        """Make due messages ready. Returns the time in ms for the next call, NEVER_MS if no message is coming."""
        now_ms = self._turns.now_ms
        for hour in self._hours.due((now_ms + self._preload_ms) // HOUR_MS):
            self._open_hour(hour, 0)
        first = self._load_seconds()
        self.first_second = min(first, min(second.second for second, _ in self.loading)) if self.loading else first
        next_ms = max(first * 1000 - self._preload_ms, now_ms + 1)
        for second in list(self._seconds.values()):
            if second.loaded:
                if second.next_ms <= now_ms:
                    self._run(second)
                next_ms = min(next_ms, second.next_ms)
        if self._spilled:
            next_ms = min(next_ms, self._leave_spilled())
        if (hour_next := self._hours.next()) is not None:
            next_ms = min(next_ms, int(hour_next) * HOUR_MS - self._preload_ms)
        return min(next_ms, NEVER_MS)

    @property
    def late(self) -> bool:
        """Whether a second that has begun already is still being loaded."""
        return bool(self.loading) and self.loading[0][0].start_ms <= self._turns.now_ms

    def _open_hour(self, hour: int, from_second: int) -> None:
        if hour in self._open:
            return
        # The ledger's clock stands still while no entry is applied. So set the store's clock here: else, after an idle
        # night, the store would not have mapped the files of this hour yet.
        self._store.set_clock(max(self._owed.ledger.now_hour, self._turns.now_ms // HOUR_MS))
        if self._read_ahead is not None:
            self._read_ahead.index(hour)
        first = min(self.first_second, self._turns.now_ms // 1000, *self._seconds, *self._unloaded) // SECONDS_PER_HOUR
        self._open = {known for known in self._open if known >= first} | {hour}
        for slot in (np.flatnonzero(self._store.heads(hour).count[from_second:]) + from_second).tolist():
            at = hour * SECONDS_PER_HOUR + slot
            self._unloaded.set(at, at)

    def _load_seconds(self) -> int:
        """Begin to load the seconds that fall due next. Returns the earliest second whose loading has not begun yet;
        NEVER_MS if there is none."""
        budget = SLICE
        while (first := self._unloaded.next()) is not None:
            ahead = int(first) * 1000 - self._turns.now_ms
            if ahead > self._preload_ms or len(self.loading) > self._preload_ms // 1000:
                return int(first)
            if ahead > _LAST_MOMENT_MS and sum(second.size for second in self._seconds.values()) > PRELOAD_ROWS:
                return int(first)
            (at,) = self._unloaded.due(first)
            walk = self.load(at)
            budget -= walk.left
            if budget >= 0 and len(self.loading) == 1:
                self.work()  # a small second, and no other one is being loaded: load it at once
        return NEVER_MS

    def load(self, at: int) -> ChainWalk:
        """Begin to load the messages of a second; also used after a repair of the second's index."""
        second = self._seconds[at] = Second(at, PRELOAD_ROWS)
        walk = ChainWalk(self._store, second.hour, at % SECONDS_PER_HOUR)
        self.loading.append((second, walk))
        return walk

    def work(self) -> None:
        """Load up to SLICE entries of the second whose loading began first."""
        second, walk = self.loading[0]
        rows = walk.step(SLICE)
        if len(rows):
            owed = rows[self._owed.among(walk.hour, rows)]
            second.add(owed)
            if self._read_ahead is not None:
                self._read_ahead.records(walk.hour, owed, (second.start_ms - self._turns.now_ms) / 1000)
        if walk.done:
            self.loading.popleft()
            second.loaded = True
            self._drop_if_empty(second)
            if walk.damage is not None:
                self._on_damage(walk.damage)

    def _run(self, second: Second) -> None:
        self.first_ms = min(self.first_ms, second.next_ms)
        indexes, topics = second.take(self._turns.now_ms)
        if len(indexes):
            self._make_ready(second.hour, second.second, indexes, topics)
        self._drop_if_empty(second)

    def _drop_if_empty(self, second: Second) -> None:
        """Drop a loaded second without messages in memory; if some found no room there, note the second for scans."""
        if second.overflow:
            self._spilled[second.second] = second
        elif second.next_ms == NEVER_MS:
            del self._seconds[second.second]

    def _make_ready(self, hour: int, second: int, indexes: NDArray[np.uint32], topics: NDArray[np.uint32]) -> None:
        self._windows.make_ready(hour, second, indexes, topics)
        self.reached = max(self.reached, second)

    def _leave_spilled(self) -> int:
        """Leave messages that found no room in memory to scans of the index, once their second is over. Returns the end
        (ms) of the next second with such messages, or NEVER_MS."""
        for at in [at for at in self._spilled if at * 1000 + 1000 <= self._turns.now_ms]:
            second = self._spilled.pop(at)
            self._windows.leave_out(at, second.overflow)
            second.overflow = Counter()
            self._drop_if_empty(second)
        return min(self._spilled) * 1000 + 1000 if self._spilled else NEVER_MS

    def filed(self, hours: int | NDArray[np.int64], rows: NDArray[np.void]) -> int:
        """Take index entries that apply has just added. Returns the time (ms) by which they need an `advance`."""
        next_ms = NEVER_MS
        for hour, mine in [(hours, slice(None))] if isinstance(hours, int) else rows_by_value(hours):
            if hour in self._open or hour < self._turns.now_ms // HOUR_MS:
                next_ms = min(next_ms, self._file(hour, rows[mine]))
            elif hour < DEAD_HOURS:
                self._hours.set(hour, hour)
                next_ms = min(next_ms, hour * HOUR_MS - self._preload_ms)
        return next_ms

    def _file(self, hour: int, rows: NDArray[np.void]) -> int:
        self._open.add(hour)
        first = hour * SECONDS_PER_HOUR
        far = rows["second"] > (self._turns.now_ms + self._preload_ms) // 1000 - first
        if far.any():
            slots = np.unique(rows["second"][far]).tolist()
            for slot in slots:
                self._unloaded.set(first + slot, first + slot)
            if far.all():
                return int((first + slots[0]) * 1000 - self._preload_ms)
            rows = rows[~far]
        for slot, mine in rows_by_value(rows["second"]):
            # Skip new entries of a second that is not loaded yet: loading will find them in the index.
            if first + slot not in self._unloaded:
                self._file_second(hour, first + slot, rows[mine])
        return 0

    def _file_second(self, hour: int, at: int, rows: NDArray[np.void]) -> None:
        # Make an overdue entry ready only once the second that lists it has begun: scans ignore later seconds.
        later = rows["deliver_at_ms"] > self._turns.now_ms
        if at * 1000 <= self._turns.now_ms and not later.all():
            now = rows[~later]
            self._make_ready(hour, at, now["index"], now["topic"])
            rows = rows[later]
        if len(rows):
            second = self._seconds.get(at)
            if second is None:
                second = self._seconds[at] = Second(at, PRELOAD_ROWS)
                second.loaded = True
            second.add(rows)

    def has_seen(self, hour: int) -> bool:
        """Whether entries of the hour may have been loaded or made ready already."""
        return hour < self._turns.now_ms // HOUR_MS or hour in self._open

    def to_come(self, at: int) -> int | None:
        """Number of messages of the second `at` that are still to become ready; None as long as that is unknown. Purged
        messages that found no room in memory count until their second is over."""
        if at * 1000 > self._turns.now_ms or at in self._unloaded:
            return None
        second = self._seconds.get(at)
        if second is None:
            return 0
        return len(second.coming) + sum(walk.left for loading, walk in self.loading if loading is second)

    def spilled(self, at: int) -> bool:
        """Whether messages of the second `at` found no room in memory."""
        return at in self._seconds and bool(self._seconds[at].overflow)

    def drop(self, hour: int, rows: NDArray[np.void]) -> None:
        """Never make these entries of the hour ready (INDEX rows): they were settled before they were due."""
        for at, second in self._seconds.items():
            if second.hour == hour:
                second.drop(rows["index"][rows["second"] == at % SECONDS_PER_HOUR])

    def blocked(self, at: int, row: NDArray[np.void]) -> bool:
        """Never make this blocked entry (one INDEX row) of the second `at` ready. False if no loaded second has it."""
        second = self._seconds.get(at)
        return second is not None and second.drop(row["index"])

    def unblocked(self, hour: int, rows: NDArray[np.void], found_later: Callable[[int, int], bool]) -> None:
        """Make entries of an hour (INDEX rows), which were blocked until now, ready when they are due.
        found_later(second, index): whether a scan will find the entry."""
        first = hour * SECONDS_PER_HOUR
        here: list[int] = []
        for n, (slot, index) in enumerate(zip(rows["second"].tolist(), rows["index"].tolist(), strict=True)):
            at = first + slot
            if found_later(at, index):
                continue
            second = self._seconds.get(at)
            if second is not None and second.restore(index):
                continue
            if not self._will_load(at, index):
                here.append(n)
        if here:
            self.filed(hour, rows[here])

    def _will_load(self, at: int, index: int) -> bool:
        return any(second.second == at and walk.will_reach(index) for second, walk in self.loading)

    def forget(self, topic: int) -> None:
        for second in list(self._seconds.values()):
            second.forget(topic)
            if second.loaded:
                self._drop_if_empty(second)
