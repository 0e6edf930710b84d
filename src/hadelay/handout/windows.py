"""Windows of ready messages: filled by the wheel and by scans, bounded by low-water marks.

When a window is full the rest stays on disk, and `rescan_from` remembers the earliest second from which the index has
to be scanned again (handout/scans.py): ten million overdue messages cost no memory. While a window has that mark only
a scan adds to it, so nothing is forgotten.

A message stands in every window that it fits; whoever takes it first offers it, the others drop it when they come to
it, and get it back if the offer comes to nothing. Apply would grant it only once in any case. So a window may hold
messages that are gone, but must not lack one that is owed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from hadelay.handout.owed import Owed
from hadelay.handout.queues import TopicTurn, WaitQueue, Window
from hadelay.handout.turns import Turns

#: Limit of entries in all windows. Beyond it a window is small while somebody polls it, and empty otherwise.
_TOTAL = 1 << 19
_SMALL_WINDOW = 1_024
#: A message is overdue if it fell due longer ago than this when the line between past and present was drawn. The line
#: is drawn anew when a message twice as old is met.
OVERDUE_MS = 5_000


class Windows:
    def __init__(self, limit: int, owed: Owed, turns: Turns) -> None:
        """limit: of entries in one window."""
        self.limit = limit
        #: Count of entries in all windows.
        self.size = 0
        #: Called with a window that has a mark and has run low.
        self.on_low: Callable[[Window], None] = lambda window: None
        self._owed, self._turns = owed, turns

    # bounds

    def room(self, window: Window) -> int:
        limit = self.limit
        if self.size >= _TOTAL:
            limit = min(limit, _SMALL_WINDOW) if window.queue.waiters else 0
        return max(0, limit - len(window.entries))

    def rescan_if_low(self, window: Window) -> None:
        """Ask for a scan if messages were left out, no scan runs yet, and three quarters of the window are free."""
        if window.rescan_from is None or window.scanning or not (window.queue.waiters or window.queue.filter is None):
            return
        if len(window.entries) * 4 <= self.room(window):
            self.on_low(window)

    def rescan_low(self, queue: WaitQueue) -> None:
        for window in queue.windows:
            self.rescan_if_low(window)

    def leave_out(self, topic: TopicTurn, second: int) -> None:
        """Some of that second's messages stay on disk until there is room."""
        for queue in topic.queues():
            for window in queue.windows:
                window.leave_out(second)
            self.rescan_low(queue)

    def clear(self, window: Window) -> None:
        self.size -= len(window.entries)
        window.entries.clear()
        window.rescan_from = window.missed_since_scan = None

    def close(self, window: Window) -> None:
        self.clear(window)
        window.closed = True

    # the line between past and present

    def separate(self, topic: TopicTurn, on: bool) -> None:
        """Keep overdue messages apart from now on, or no longer."""
        topic.overdue_before_ms = self._turns.now_ms - OVERDUE_MS if on else 0
        for queue in topic.queues():
            if on:
                queue.keep_apart(0)
            else:
                self.close(queue.windows[1])
                queue.keep_together()
            self.rescan_low(queue)

    def on_time(self, topic: TopicTurn, rows: NDArray[np.void]) -> NDArray[np.bool_]:
        """Which of these are not overdue. Draw the line anew if one of them is far beyond it."""
        due = rows["deliver_at_ms"]
        if len(due) and int(due.min()) < self._turns.now_ms - 2 * OVERDUE_MS:
            before, topic.overdue_before_ms = topic.overdue_before_ms, self._turns.now_ms - OVERDUE_MS
            for queue in topic.queues():
                queue.windows[1].leave_out(before // 1000)
                self.rescan_low(queue)
        return np.asarray(due >= topic.overdue_before_ms)

    # messages

    def add(self, topic: TopicTurn, second: int, entries: list[int]) -> None:
        """These, of one hour, fell due; what finds no room is left to a scan."""
        for window, mine in self._shares(topic, entries):
            self.put(window, second, mine)

    def put(self, window: Window, second: int, entries: list[int]) -> None:
        if window.rescan_from is not None:
            window.leave_out(second)
            return
        room = self.room(window)
        if len(entries) > room and not window.queue.topic.plain:
            self._drop_gone(window)
            room = self.room(window)
        self.refill(window, entries[:room])
        if len(entries) > room:
            window.leave_out(second)
            self.rescan_low(window.queue)

    def again(self, topic: TopicTurn, entries: list[int]) -> None:
        """These, of one hour, are owed after all."""
        for window, mine in self._shares(topic, entries):
            self.refill(window, mine)

    def _shares(self, topic: TopicTurn, entries: list[int]) -> Iterator[tuple[Window, list[int]]]:
        """Which of these, of one hour, belong into which windows."""
        if topic.plain:
            yield topic.any.now, entries
            return
        numbers = np.array(entries, np.int64)
        rows, _ = self._owed.look(entries[0] >> 32, numbers.astype(np.uint32))
        tagged = rows["tag_mask"].any()
        for window in topic.windows():
            if tagged or window.queue.filter is None:
                mine = window.pick(rows)
                if mine.all():
                    yield window, entries
                elif mine.any():
                    yield window, numbers[mine].tolist()

    def refill(self, window: Window, entries: list[int]) -> None:
        """A scan found these."""
        window.entries.extend(entries)
        self.size += len(entries)
        self._turns.activate(window.queue)

    def give_back(self, window: Window, entries: list[int]) -> None:
        """These are the first in line again."""
        window.entries.extendleft(reversed(entries))
        self.size += len(entries)

    def _drop_gone(self, window: Window) -> None:
        """The window is full, perhaps of messages that other windows gave up too."""
        kept: list[int] = []
        entries = np.array(window.entries, np.int64)
        hours = entries >> 32
        for hour in dict.fromkeys(hours.tolist()):
            mine = entries[hours == hour]
            kept += mine[self._owed.look(hour, mine.astype(np.uint32))[1]].tolist()
        self.size += len(kept) - len(window.entries)
        window.entries = deque(kept)

    # the oldest message

    def oldest(self, topic: TopicTurn) -> tuple[Window, int | None]:
        """The window with the topic's oldest ready messages, and the first entry in it that is owed."""
        window = self.oldest_window(topic)
        while window.entries:
            some = list(islice(window.entries, 64))
            some = [entry for entry in some if entry >> 32 == some[0] >> 32]
            owed = self._owed.look(some[0] >> 32, np.array(some, np.int64).astype(np.uint32))[1]
            gone = len(some) if not owed.any() else int(owed.argmax())
            for _ in range(gone):
                window.entries.popleft()
            self.size -= gone
            if gone < len(some):
                return window, window.entries[0]
        return window, None

    @staticmethod
    def oldest_window(topic: TopicTurn) -> Window:
        past = topic.any.windows[-1]
        return past if past.entries or past.rescan_from is not None else topic.any.now
