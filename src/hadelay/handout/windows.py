"""All windows of ready messages, of all topics: filled by the preload and by scans, and limited in size.

When a window is full the rest stays on disk, and `rescan_from` remembers the earliest second from which the index has
to be scanned again (handout/scans.py): ten million overdue messages cost no memory. While a window has that mark only
a scan adds to it, so nothing is forgotten.

A message stands in every window that it fits. The first window that takes it offers it; the others drop it when they
come to it, and get it back if the offer fails. Apply would grant it only once in any case. So a window may hold
messages that are gone, but must not lack one that is owed.
"""

from collections import Counter, deque
from collections.abc import Callable
from itertools import groupby, islice

import numpy as np
from numpy.typing import NDArray

from hadelay.handout import grouprate
from hadelay.handout.owed import Owed
from hadelay.handout.queues import TopicTurn, WaitQueue, Window, split
from hadelay.handout.turns import Turns
from hadelay.ledger.limits.flow import limits_of
from hadelay.ledger.topics.topics import TopicBook, TopicState

#: Limit of messages in all windows together; beyond it, windows with waiting polls get SMALL_WINDOW each, others none.
TOTAL = 1 << 19
SMALL_WINDOW = 1_024
#: Lateness in ms from which a message counts as overdue, for topics with a catch-up rate. The bound `overdue_before_ms`
#: is set to the present minus this lateness, and set anew when a message twice as late arrives.
OVERDUE_MS = 5_000


class Windows:
    def __init__(
        self, owed: Owed, turns: Turns, topics: TopicBook, known_topic: Callable[[str], TopicState | None], limit: int
    ) -> None:
        """known_topic: finds a topic by its name, deleted or not. limit: largest number of messages in one window."""
        self.owed, self.turns, self._topics, self.known_topic, self.limit = owed, turns, topics, known_topic, limit
        self.by_name: dict[str, TopicTurn] = {}
        self.by_number: dict[int, TopicTurn] = {}
        #: Number of messages that are due, not leased and not settled, by topic number.
        self.ready_counts: Counter[int] = Counter()
        #: Number of messages in all windows.
        self.size = 0
        #: Entry in an undecided offer, or without a token of its group → windows that may get the entry back later.
        self.in_flight: dict[int, tuple[Window, ...]] = {}
        #: Callback that starts a scan for a window with few messages left and more messages on disk.
        self.on_low: Callable[[Window], None] = lambda window: None

    def topic(self, number: int) -> TopicTurn:
        return self.by_number.get(number) or self.named(self._topics[number].name)

    def named(self, name: str) -> TopicTurn:
        topic = self.by_name.get(name)
        if topic is None:
            topic = self.by_name[name] = TopicTurn(name)
        if topic.number is None and (known := self.known_topic(name)) is not None:
            topic.number = known.number
            self.by_number[known.number] = topic
            self.configure(known.number)
        return topic

    def configure(self, number: int) -> None:
        """Use the settings of a topic that was made or changed."""
        topic, settings = self.topic(number), self._topics[number].settings
        turns = self.turns
        topic.limits = limits_of(settings, turns.now_ms, topic.limits)
        topic.group_rate, wakes = grouprate.changed(topic.group_rate, settings.group_rate, turns.began_ms, turns.now_ms)
        if wakes:
            turns.rests.set(topic, 0)
        if (settings.catch_up_rate is not None) != bool(topic.overdue_before_ms):
            self._separate(topic, settings.catch_up_rate is not None)
        self.turns.go_on(topic)

    def forget(self, number: int) -> None:
        """Empty the windows of a topic that was purged or deleted."""
        self.ready_counts[number] = 0
        for window in self.by_number[number].windows() if number in self.by_number else ():
            self._clear(window)

    def room(self, window: Window) -> int:
        limit = self.limit
        if self.size >= TOTAL:
            limit = min(limit, SMALL_WINDOW) if window.queue.waiters else 0
        return max(0, limit - len(window.entries))

    def rescan_if_low(self, window: Window) -> None:
        """Ask for a scan if the window had no room for some messages and is at most a fifth full now."""
        if window.rescan_from is None or window.scanning or not (window.queue.waiters or window.queue.filter is None):
            return
        if len(window.entries) * 4 <= self.room(window):
            self.on_low(window)

    def rescan_low(self, queue: WaitQueue) -> None:
        for window in queue.windows:
            self.rescan_if_low(window)

    def _clear(self, window: Window) -> None:
        self.size -= len(window.entries)
        window.entries.clear()
        window.rescan_from = window.missed_since_scan = None

    def close(self, window: Window) -> None:
        self._clear(window)
        window.closed = True

    def _separate(self, topic: TopicTurn, on: bool) -> None:
        """Keep a topic's overdue messages in windows of their own (`on`), or with its other messages (not `on`)."""
        topic.overdue_before_ms = self.turns.now_ms - OVERDUE_MS if on else 0
        for queue in topic.queues():
            if on:
                queue.windows = (queue.now, Window(queue, overdue=True, rescan_from=0))
            else:
                self.close(queue.windows[1])
                queue.windows = (queue.now,)
                queue.now.leave_out(0)
            self.rescan_low(queue)

    def on_time(self, topic: TopicTurn, rows: NDArray[np.void]) -> NDArray[np.bool_]:
        """Mask of rows due at `overdue_before_ms` or later (not overdue). Raises that bound if a row is very late."""
        due = rows["deliver_at_ms"]
        if len(due) and int(due.min()) < self.turns.now_ms - 2 * OVERDUE_MS:
            before, topic.overdue_before_ms = topic.overdue_before_ms, self.turns.now_ms - OVERDUE_MS
            for queue in topic.queues():
                queue.windows[1].leave_out(before // 1000)
                self.rescan_low(queue)
        return np.asarray(due >= topic.overdue_before_ms)

    def make_ready(self, hour: int, second: int, indexes: NDArray[np.uint32], topics: NDArray[np.uint32]) -> None:
        """Put due entries of an hour into their topics' windows. second: the second (since 1970) under which
        the index lists the entries."""
        for number, entries in split(hour, indexes, topics) if len(topics) else ():
            self.ready_counts[number] += len(entries)
            self.add(self.topic(number), second, entries)

    def leave_out(self, second: int, counts: Counter[int]) -> None:
        """Note that due messages of a second stay on disk, because memory has no room. counts: topic number → number of
        messages."""
        for number, count in counts.items():
            self.ready_counts[number] += count
            for queue in self.topic(number).queues():
                for window in queue.windows:
                    window.leave_out(second)
                self.rescan_low(queue)

    def add(self, topic: TopicTurn, second: int, entries: list[int]) -> None:
        """Put entries of one hour into the windows that accept them; entries without room are left to scans."""
        if topic.plain:
            self.put(topic.any.now, second, entries)
            return
        numbers = np.array(entries, np.int64)
        rows, _ = self.owed.look(entries[0] >> 32, numbers.astype(np.uint32))
        tagged = rows["tag_mask"].any()
        for window in topic.windows():
            if tagged or window.queue.filter is None:
                mine = window.pick(rows)
                if mine.any():
                    self.put(window, second, numbers[mine].tolist())

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

    def refill(self, window: Window, entries: list[int]) -> None:
        window.entries.extend(entries)
        self.size += len(entries)
        self.turns.activate(window.queue)

    def give_back(self, window: Window, entries: list[int]) -> None:
        """Put entries that were taken from the window back at its head."""
        window.entries.extendleft(reversed(entries))
        self.size += len(entries)

    def take_free(self, window: Window, entries: list[int]) -> list[int]:
        """The entries that are in no undecided offer, each of them once. The window gets the other entries later if
        their offers fail."""
        free = []
        for entry in dict.fromkeys(entries):
            if entry in self.in_flight:
                self._skip(window, entry)
            else:
                free.append(entry)
        return free

    def missing(self, window: Window, entries: list[int]) -> NDArray[np.bool_]:
        """Mask of entries neither in the window nor offered; offered entries enter the window if their offer fails."""
        ready, in_flight = set(window.entries), self.in_flight
        for entry in in_flight.keys() & entries if in_flight else ():
            self._skip(window, entry)
        return np.fromiter((entry not in ready and entry not in in_flight for entry in entries), bool, len(entries))

    def _skip(self, window: Window, entry: int) -> None:
        if window not in self.in_flight[entry]:
            self.in_flight[entry] += (window,)

    def _drop_gone(self, window: Window) -> None:
        """Drop entries that need no delivery any more: other windows may have handed them out."""
        kept: list[int] = []
        entries = np.array(window.entries, np.int64)
        hours = entries >> 32
        for hour in dict.fromkeys(hours.tolist()):
            mine = entries[hours == hour]
            kept += mine[self.owed.look(hour, mine.astype(np.uint32))[1]].tolist()
        self.size += len(kept) - len(window.entries)
        window.entries = deque(kept)

    def oldest(self, topic: TopicTurn) -> tuple[Window, int | None]:
        """The window with the topic's oldest ready messages, and its first entry that still needs delivery."""
        window = self.oldest_window(topic)
        while window.entries:
            hour, first = next(groupby(islice(window.entries, 64), lambda entry: entry >> 32))
            some = list(first)
            owed = self.owed.look(hour, np.array(some, np.int64).astype(np.uint32))[1]
            gone = len(some) if not owed.any() else int(owed.argmax())
            for _ in range(gone):
                window.entries.popleft()
            self.size -= gone
            if gone < len(some):
                return window, window.entries[0]
        # Ask for a scan now: if a limit stops the topic, a poll may wait here, and would later find this window empty.
        self.rescan_if_low(window)
        return window, None

    @staticmethod
    def oldest_window(topic: TopicTurn) -> Window:
        past = topic.any.windows[-1]
        return past if past.entries or past.rescan_from is not None else topic.any.now
