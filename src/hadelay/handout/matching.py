"""Matching: ready messages for waiting polls, as offers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hadelay.handout.polls import PROPOSED, U32, Poll
from hadelay.handout.queues import WaitQueue, Window
from hadelay.handout.waiting import Waiting
from hadelay.handout.windows import Windows
from hadelay.ledger.hourstate import groups

#: Size limit of one answer, in bytes, unless a single message is larger.
GRANT_BYTES = 4 << 20
#: Limit, in ms, of the time between the first and the last due time in an answer with messages that are not due yet:
#: the answer waits until its last message is due.
_TOGETHER_MS = 8
#: Limit of entries that are looked at in one go, after earlier looks found only entries that are not owed any more.
_MAX_AHEAD = 4_096


class OfferPart(NamedTuple):
    """Messages of an offer from one window."""

    window: Window
    entries: list[int]
    rows: NDArray[np.void]


@dataclass(eq=False, slots=True)
class Offer:
    """Messages taken out of their windows for one poll, to be proposed as a grant."""

    poll: Poll
    parts: list[OfferPart]
    entries: list[int]
    hours: U32
    indexes: U32
    rows: NDArray[np.void]
    seq: int = 0
    #: Number of the round of proposals that the offer belongs to.
    round: int = 0


class Matcher:
    def __init__(self, windows: Windows, waiting: Waiting) -> None:
        self._windows, self._waiting, self._turns, self._owed = windows, waiting, windows.turns, windows.owed
        #: Number of messages whose tags were read, and number of those whose tags did not match although their masks
        #: did.
        self.checked = self.false_positives = 0

    def match(self, room: int, now_ms: int) -> list[Offer]:
        """Make offers to waiting polls, of at most `room` messages together. now_ms: cluster time; messages due later
        are offered ahead of time, and handed out when due."""
        offers: list[Offer] = []

        def offer(queue: WaitQueue, room: int) -> int:
            poll = next(iter(queue.waiters))
            made = self._offer(poll, queue, room, now_ms)
            if made is None:
                return 0
            self._waiting.unwait(poll)
            poll.phase = PROPOSED
            offers.append(made)
            return len(made.entries)

        self._turns.serve(room, offer)
        return offers

    def settle(self, offer: Offer, granted: NDArray[np.bool_] | None) -> None:
        """Finish an offer that apply has decided, or that was not proposed (granted is None). Entries that were not
        granted and are still owed return to the head of every window that gave them up."""
        if granted is None or not granted.all():
            self._give_back(offer, granted)
        for window, entries, _ in offer.parts:
            window.queue.topic.in_flight -= len(entries)
        for entry in offer.entries:
            self._windows.in_flight.pop(entry, None)
        self._turns.leases_ended()

    def _give_back(self, offer: Offer, granted: NDArray[np.bool_] | None) -> None:
        owed = np.ones(len(offer.entries), np.bool_)
        if granted is not None:
            owed &= ~granted
            refused = np.flatnonzero(owed)
            for hour, some in groups(offer.hours[refused]):
                mine = refused[some]
                owed[mine] = self._owed.look(hour, offer.indexes[mine])[1]
        at = len(offer.entries)
        for window, entries, _ in reversed(offer.parts):
            at -= len(entries)
            if granted is not None:
                self._turns.refund(window, len(entries) - int(granted[at : at + len(entries)].sum()))
            for n in reversed(range(len(entries))):
                for each in self._windows.in_flight.pop(entries[n], ()) if owed[at + n] else ():
                    if not each.closed:
                        self._windows.give_back(each, [entries[n]])
                        self._turns.activate(each.queue)

    def _offer(self, poll: Poll, first: WaitQueue, room: int, now_ms: int) -> Offer | None:
        """Make an offer for a poll, from the queue `first`, whose turn it is, then from the poll's other queues; None
        if empty."""
        want, size, until_ms = min(poll.max, room), GRANT_BYTES, now_ms
        parts: list[OfferPart] = []
        for queue in (first, *(queue for queue in self._waiting.queues[poll] if queue is not first)):
            for window in queue.windows:
                while want > 0 and size > 0 and window.entries:
                    if (most := min(want, self._turns.allowed(window).most)) <= 0:
                        break
                    part, cost = self._take(window, most, size, until_ms, bool(parts))
                    if part.entries:
                        if not parts:
                            until_ms = max(now_ms, int(part.rows["deliver_at_ms"].min()) + _TOGETHER_MS)
                        parts.append(part)
                        want -= len(part.entries)
                        size -= cost
                    elif cost:
                        size = 0
        if not parts:
            return None
        entries = parts[0].entries if len(parts) == 1 else [entry for part in parts for entry in part.entries]
        rows = parts[0].rows if len(parts) == 1 else np.concatenate([part.rows for part in parts])
        numbers = np.array(entries, np.int64)
        return Offer(poll, parts, entries, (numbers >> 32).astype(np.uint32), numbers.astype(np.uint32), rows)

    def _take(self, window: Window, want: int, size: int, until_ms: int, more: bool) -> tuple[OfferPart, int]:
        """Take up to `want` owed entries of one hour out of the window, and drop entries that are not owed any more.
        Returns the entries and their size in bytes; a size of 1 without entries means that none fits. until_ms:
        messages due later stay in the window. more: the answer has messages already. Without `more`, the message that
        is due first is taken whatever its size and due time, with messages due up to _TOGETHER_MS after it."""
        topic, waiting = window.queue.topic, window.entries
        hour = waiting[0] >> 32
        count = max(want, window.scan_ahead)
        entries: list[int] = []
        while len(entries) < count and waiting and waiting[0] >> 32 == hour:
            entries.append(waiting.popleft())
        self._windows.size -= len(entries)
        looked = len(entries)
        if not topic.plain or not self._windows.in_flight.keys().isdisjoint(entries):
            entries = self._windows.take_free(window, entries)
        rows, owed = self._owed.look(hour, np.array(entries, np.int64).astype(np.uint32))
        if topic.overdue_before_ms and not window.overdue:
            owed = owed & self._windows.on_time(topic, rows)
        rest: list[int] = []
        left = entries
        due = rows["deliver_at_ms"]
        if not more and owed.any():
            until_ms = max(until_ms, int(due[owed].min()) + _TOGETHER_MS)
        later = due > until_ms
        if window.queue.filter is not None or not owed.all() or len(entries) > want or later.any():
            chosen, rest = self._choose(window.queue, hour, rows, owed & ~later, want)
            rest = sorted([*rest, *np.flatnonzero(owed & later).tolist()])
            left = [entries[n] for n in chosen]
            self._windows.give_back(window, [entries[n] for n in rest])
            rows = rows[chosen]
        # If none of the entries is owed any more, look at twice as many next time, to skip long runs of such entries
        # quickly.
        window.scan_ahead = 0 if left or rest else min(2 * looked, _MAX_AHEAD)
        cost = int(rows["size"].sum(dtype=np.int64)) or int(more and bool(rest))
        if cost > size:
            fits = int(np.cumsum(rows["size"], dtype=np.int64).searchsorted(size, "right"))
            fits = max(fits, 0 if more else 1)
            self._windows.give_back(window, left[fits:])
            left, rows = left[:fits], rows[:fits]
            cost = max(1, int(rows["size"].sum(dtype=np.int64)))
        self._windows.rescan_if_low(window)
        self._turns.charge(window, len(left), cost)
        self._windows.in_flight.update(dict.fromkeys(left, (window,)))
        return OfferPart(window, left, rows), cost

    def _choose(
        self, queue: WaitQueue, hour: int, rows: NDArray[np.void], owed: NDArray[np.bool_], want: int
    ) -> tuple[list[int], list[int]]:
        """Positions of the first `want` owed rows that pass the filter, and of the owed rows after them, not yet
        checked."""
        waiting = np.flatnonzero(owed).tolist()
        if queue.filter is None:
            return waiting[:want], waiting[want:]
        chosen: list[int] = []
        for at, n in enumerate(waiting):
            if len(chosen) == want:
                return chosen, waiting[at:]
            self.checked += 1
            if self._owed.passes(queue.filter, hour, rows[n]):
                chosen.append(n)
            else:
                self.false_positives += 1
        return chosen, []
