"""Scans of the index for owed messages, which are still to be delivered: after a change of leader, when a window of
ready messages runs low, after a repair, and by a sweep, which makes sure that no message was forgotten.

A scan starts at the oldest second that has open entries (apply counts them), walks that second's chain, and goes on to
the next such second: never whole hours. Scans are generators that yield their cost after every slice, so that ten
million overdue messages are scanned between other work. Messages that fall due now do not wait for scans.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.formats import SECONDS_PER_HOUR
from hadelay.handout.queues import Window, entries_of
from hadelay.handout.second import Second
from hadelay.handout.windows import Windows
from hadelay.ledger.hours.chain import ChainWalk, Damage
from hadelay.model import NEVER_MS, NONE32

#: Limit of rows in one slice of a scan, which takes two to three milliseconds.
SLICE = 8_192
#: Minimum cost of scanning a second, counted in rows.
_SECOND_COST = 128
#: Cost of comparing rows with one window, counted in rows: a fixed cost, plus one row per _ENTRIES_PER_ROW entries of
#: the window.
_WINDOW_COST, _ENTRIES_PER_ROW = 64, 8
#: Cost of reading a record to compare its tags with a filter, counted in rows.
_READ_COST = 64
#: Limit of slices that a new leader scans before its first hand-out, to find the messages that fell due while there
#: was no leader. The leader scans all later slices between hand-outs.
_HEAD_START = 8
#: Limit of rows of one second that a new leader's first scan keeps in memory; later scans find the others.
_CATCH_UP_ROWS = 1 << 18


class _Past:
    """Seconds (since 1970) before a take-over that are still to be scanned: from `at` up to `end` (exclusive)."""

    def __init__(self, at: int, end: int) -> None:
        self.at, self.end = at, end
        #: Walk over the index entries of the second `at`; None between two seconds.
        self.walk: ChainWalk | None = None

    def __contains__(self, second: int) -> bool:
        return self.at <= second < self.end

    def will_find(self, second: int, index: int) -> bool:
        """Whether the scan has yet to reach the index entry `index` of `second`."""
        return second in self and (second > self.at or self.walk is None or self.walk.will_reach(index))


class Scans:
    def __init__(self, windows: Windows, on_damage: Callable[[Damage], None]) -> None:
        self._windows, self._turns, self._owed = windows, windows.turns, windows.owed
        self._on_damage = on_damage
        #: First second (since 1970) that the preload has not loaded; scans leave it and later seconds alone.
        self.first_unloaded = 0
        #: Number of owed messages that were in no window until the sweep found them: a bug if it is not 0.
        self.swept = 0
        #: Unfinished scans, as generators; each step of a scan yields its cost, counted in rows.
        self.jobs: deque[Iterator[int]] = deque()
        #: Seconds that fell due before this leader's take-over and are still to be scanned: those before the dispatch
        #: cursor, and those from the cursor on.
        self._backlog, self._missed = _Past(0, 0), _Past(0, 0)
        #: Number of owed messages that this leader's scans found and that fell due in a second before its take-over.
        self.found = 0
        #: Owed messages found from the dispatch cursor on: due time (ms) of the first, and latest second of them all.
        self.first_ms, self.reached = NEVER_MS, 0
        self._head_start = 0
        # Cost of reading the last slice of an index, in rows; the scan yields it to `work`.
        self._cost = 0
        self._sweep: Iterator[int] | None = None
        windows.on_low = self.rescan

    def start(self, tick: int, second: int) -> None:
        """Begin to scan all seconds before `second`; the preload loads later ones. Seconds from `tick` on, which fell
        due without a leader, are scanned at once; then the backlog before `tick`, in the background."""
        tick = min(tick, second)
        self.first_unloaded = second
        self._backlog, self._missed = _Past(0, tick), _Past(tick, second)
        self._head_start = _HEAD_START * SLICE
        self.jobs.append(self._catching_up(self._missed))

    @property
    def first(self) -> bool:
        """Whether messages that fell due since the dispatch cursor go first (for at most _HEAD_START slices). While
        this is True, call `work`, and neither `advance` nor `match` of the dispatcher."""
        return self._head_start > 0 and self._missed.at < self._missed.end

    @property
    def caught_up(self) -> bool:
        """Whether all seconds before the take-over were scanned."""
        return self._missed.at >= self._missed.end and self._backlog.at >= self._backlog.end

    def misses(self, second: int) -> bool:
        """Whether `second` fell due without a leader, and is not scanned yet."""
        return second in self._missed

    def work(self) -> None:
        """Scan about one slice of one scan; unfinished scans take turns."""
        left = SLICE
        while self.jobs and left > 0:
            job = self.jobs.popleft()
            cost = next(job, 0)
            if cost:
                self.jobs.append(job)
            left -= max(cost, 1)
        self._head_start -= SLICE - left

    def rescan(self, window: Window) -> None:
        """Start a scan that refills a window, from the first second with messages that found no room in the window."""
        window.scanning = True
        self.jobs.append(self._rescanning(window))

    def recover(self, second: int) -> None:
        """Start a scan of a past second whose index was repaired, to find the messages that the damage had hidden."""
        self.jobs.append(self._recovering(second))

    def sweep(self) -> bool:
        """Search one slice for owed messages that were forgotten. Returns True after the last second."""
        if self._sweep is None:
            self._sweep = self._sweeping()
        if next(self._sweep, 0):
            return False
        self._sweep = None
        return True

    def will_find(self, second: int, index: int) -> bool:
        """Whether a new leader's first scan has yet to reach the index entry `index` of `second`."""
        return self._backlog.will_find(second, index) or self._missed.will_find(second, index)

    def _owed_rows(self, second: int, walk: ChainWalk | None = None) -> Iterator[NDArray[np.void]]:
        """INDEX rows of a second that are due and still to be delivered, up to SLICE rows at a time."""
        hour, slot = divmod(second, SECONDS_PER_HOUR)
        walk = walk or ChainWalk(self._owed.store, hour, slot)
        if self._owed.fewer(hour, walk.left):
            walk.left = 0
            yield from self._unblocked_rows(hour, slot)
        while not walk.done:
            rows = walk.step(SLICE)
            self._cost = max(len(rows), _SECOND_COST)
            if len(rows):
                rows = rows[rows["deliver_at_ms"] <= self._turns.now_ms]
            yield rows[self._owed.among(hour, rows)] if len(rows) else rows
        if walk.damage is not None:
            self._on_damage(walk.damage)

    def _unblocked_rows(self, hour: int, slot: int) -> Iterator[NDArray[np.void]]:
        """Yield the same rows as `_owed_rows`, but search the unblocked entries of the hour: the hour has fewer of them
        than the second has entries."""
        indexes = self._owed.unblocked(hour)
        for at in range(0, len(indexes), SLICE):
            rows, owed = self._owed.look(hour, indexes[at : at + SLICE])
            self._cost = max(len(rows), _SECOND_COST)
            yield rows[owed & (rows["second"] == slot) & (rows["deliver_at_ms"] <= self._turns.now_ms)]

    def _catching_up(self, past: _Past) -> Iterator[int]:
        while (second := self._owed.next_second(past.at, self._turns.now_ms)) is not None:
            if second >= past.end:
                break
            past.at = second
            found = Second(second, _CATCH_UP_ROWS)
            past.walk = ChainWalk(self._owed.store, found.hour, second % SECONDS_PER_HOUR)
            for rows in self._owed_rows(second, past.walk):
                found.add(rows)
                self.found += len(rows)
                if past is self._missed and len(rows):
                    self.first_ms, self.reached = min(self.first_ms, int(rows["deliver_at_ms"].min())), second
                yield self._cost
            past.walk = None
            # No yield below this line: other code must see either all of the following changes or none.
            past.at = second + 1
            self._windows.make_ready(found.hour, second, *found.take(self._turns.now_ms))
            self._windows.leave_out(second, found.overflow)
        past.at = past.end
        if past is self._missed:
            self.jobs.append(self._catching_up(self._backlog))

    def _rescanning(self, window: Window) -> Iterator[int]:
        topic = window.queue.topic
        try:
            while window.rescan_from is not None and (room := self._windows.room(window)) > 0:
                window.missed_since_scan = None
                second = self._next_scannable(max(window.rescan_from, window.floor))
                if second is None:
                    window.rescan_from = None
                    break
                window.rescan_from = second
                if second >= self.first_unloaded:
                    # Wait until the preload has loaded this second: its messages may be older than those in the window.
                    yield SLICE
                    continue
                found = Second(second, room)
                for rows in self._owed_rows(second):
                    rows = rows[rows["topic"] == topic.number]
                    rows = rows[window.pick(rows)] if len(rows) else rows
                    found.add(rows[self._windows.missing(window, entries_of(found.hour, rows["index"]))])
                    yield self._cost
                if window.rescan_from is None:
                    break  # the window was emptied or closed during the scan
                self._windows.refill(window, entries_of(found.hour, found.take(self._turns.now_ms)[0]))
                if not found.overflow:
                    # Begin the next scan at the first second whose messages found no room in the window during this
                    # scan.
                    missed = window.missed_since_scan
                    window.rescan_from = second + 1 if missed is None else min(missed, second + 1)
        finally:
            window.scanning = False

    def _next_scannable(self, second: int) -> int | None:
        """First second from `second` on that has begun and has unsettled entries; None without one. Leaves out the
        seconds that the first scan of a new leader (`_backlog` and `_missed`) has yet to reach."""
        found = self._owed.next_second(second, self._turns.now_ms)
        for past in (self._backlog, self._missed):
            if found is not None and found in past:
                found = self._owed.next_second(past.end, self._turns.now_ms)
        return found if found is not None and found * 1000 <= self._turns.now_ms else None

    def _recovering(self, second: int) -> Iterator[int]:
        while second in self._backlog or second in self._missed:
            yield SLICE
        for rows in self._owed_rows(second):
            yield from self._add_forgotten(second, rows)

    def _sweeping(self) -> Iterator[int]:
        at = 0
        while (second := self._next_scannable(at)) is not None:
            # Leave the last two seconds to the next sweep: their messages may still be on their way into windows.
            if second >= self.first_unloaded or second * 1000 + 2_000 > self._turns.now_ms:
                break
            at = second + 1
            for rows in self._owed_rows(second):
                self.swept += yield from self._add_forgotten(second, rows)

    def _add_forgotten(self, second: int, rows: NDArray[np.void]) -> Generator[int, None, int]:
        """Add each of the rows to the windows that lack it: the row is neither in the window, nor in an undecided
        offer, nor left on disk for a later scan. Returns the number added; yields the cost as scans do, because many
        topics with many filters take longer than a slice."""
        count, spent, hour = 0, self._cost, second // SECONDS_PER_HOUR
        # Sort key: by topic, then in the order of publishing
        by_topic = rows["topic"].astype(np.uint64) << np.uint64(32) | rows["index"]
        rows = rows.take(by_topic.argsort())
        owed = np.ones(len(rows), np.bool_)
        edges = np.flatnonzero(np.diff(rows["topic"], prepend=NONE32, append=NONE32)).tolist()
        for first, end in pairwise(edges):
            number = int(rows["topic"][first])
            for window in self._windows.topic(number).windows():
                if spent >= SLICE:
                    yield spent
                    # Other code ran during the `yield` and may have taken some of these messages.
                    spent, owed = _SECOND_COST, self._owed.among(hour, rows)
                spent += _WINDOW_COST + len(window.entries) // _ENTRIES_PER_ROW
                if window.closed or (window.rescan_from is not None and window.rescan_from <= second):
                    continue
                some = rows[first:end]
                some = some.take(np.flatnonzero(owed[first:end] & window.pick(some)))
                entries = entries_of(hour, some["index"])
                wanted = window.queue.filter
                missing = np.flatnonzero(self._windows.missing(window, entries)).tolist()
                spent += 0 if wanted is None else _READ_COST * len(missing)
                if lost := [entries[n] for n in missing if self._owed.passes(wanted, hour, some[n])]:
                    count += len(lost)
                    self._windows.put(window, second, lost)
                    if wanted is None:
                        self._windows.ready_counts[number] += len(lost)
        yield spent
        return count
