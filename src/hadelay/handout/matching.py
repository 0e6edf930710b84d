"""Matches ready messages with waiting polls, and makes offers of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hadelay.handout.polls import PROPOSED, U32, Poll
from hadelay.handout.queues import WaitQueue, Window, entries_of
from hadelay.handout.rests import Rests
from hadelay.handout.waiting import Waiting
from hadelay.handout.windows import Windows
from hadelay.ledger.groups.runs import next_of
from hadelay.ledger.hours.hourstate import rows_by_value
from hadelay.model import MAX_RUN

#: Size limit of one answer to a poll, in bytes. A message that is larger is answered alone.
GRANT_BYTES = 4 << 20
#: Limit of the time in ms between the first and the last due time of messages that are offered together ahead of time.
_TOGETHER_MS = 4
#: Limit of index entries checked at once, to skip a long run of entries that need no delivery any more.
_MAX_AHEAD = 4_096
#: Limit of records that one turn reads to compare their tags with filters: some 10 ms of work. The next turn reads on;
#: polls without a filter do not have to wait for it.
_READS = 512


class OfferPart(NamedTuple):
    window: Window
    entries: list[int]
    rows: NDArray[np.void]


@dataclass(slots=True)
class _Room:
    """Numbers of messages and of bytes that still fit into an offer."""

    want: int
    size: int


@dataclass(eq=False, slots=True)
class Offer:
    """Ready messages taken for one poll; the leader proposes them as a grant."""

    poll: Poll
    parts: list[OfferPart]
    entries: list[int]
    hours: U32
    indexes: U32
    rows: NDArray[np.void]
    seq: int = 0


class Matcher:
    def __init__(self, windows: Windows, waiting: Waiting) -> None:
        self._windows, self._waiting, self._turns, self._owed = windows, waiting, windows.turns, windows.owed
        self.rests = Rests(windows, windows.owed.ledger)
        #: Number of messages whose tag mask matched a filter, and number of these whose tags did not match it.
        self.checked = self.false_positives = 0
        self._reads_left = 0

    @property
    def unfinished(self) -> bool:
        """Whether the last `match` read so many records that polls with filters have to wait: call it again soon."""
        return self._reads_left <= 0

    def match(self, room: int, now_ms: int) -> list[Offer]:
        """Make offers to waiting polls, of at most `room` messages altogether. now_ms: cluster time. Messages that are
        due a little later are offered ahead of time, and handed out when they are due."""
        offers: list[Offer] = []
        self._reads_left = _READS
        self.rests.release(now_ms)

        def offer(queue: WaitQueue, room: int) -> int | None:
            if self._waits(queue):
                return None
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

    def _waits(self, queue: WaitQueue) -> bool:
        return queue.filter is not None and self.unfinished

    def settle(self, offer: Offer, granted: NDArray[np.bool_] | None, now_ms: int) -> None:
        """Finish an offer. granted: mask of the offer's messages that were granted; None: none, or unknown.
        Messages not granted that still need delivery return to the head of the windows that they were taken from."""
        if granted is None or not granted.all():
            self._give_back(offer, granted)
        for window, entries, _ in offer.parts:
            window.queue.topic.in_flight -= len(entries)
        for entry in offer.entries:
            self._windows.in_flight.pop(entry, None)
        self.rests.decided(offer.entries, granted, max(now_ms, int(offer.rows["deliver_at_ms"].max())))
        self._turns.leases_ended()

    def _give_back(self, offer: Offer, granted: NDArray[np.bool_] | None) -> None:
        owed = np.ones(len(offer.entries), np.bool_)
        if granted is not None:
            owed &= ~granted
            refused = np.flatnonzero(owed)
            for hour, some in rows_by_value(offer.hours[refused]):
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
        """Offer messages of the queue `first`, then of the poll's other queues; if the poll ranks its topics, of all
        its queues in their order. None if there are no messages."""
        want, size, until_ms = min(poll.max, room), GRANT_BYTES, now_ms
        parts: list[OfferPart] = []
        queues = self._waiting.queues[poll]
        for queue in queues if poll.listed else (first, *(queue for queue in queues if queue is not first)):
            for window in queue.windows:
                while want > 0 and size > 0 and window.entries and not self._waits(queue):
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
        if poll.group_max > 1:
            left = _Room(want, size)
            parts += [more for part in parts for more in self._runs(part, poll, left, until_ms)]
        entries = parts[0].entries if len(parts) == 1 else [entry for part in parts for entry in part.entries]
        rows = parts[0].rows if len(parts) == 1 else np.concatenate([part.rows for part in parts])
        numbers = np.array(entries, np.int64)
        return Offer(poll, parts, entries, (numbers >> 32).astype(np.uint32), numbers.astype(np.uint32), rows)

    def _take(self, window: Window, want: int, size: int, until_ms: int, more: bool) -> tuple[OfferPart, int]:
        """Take up to `want` messages of one hour from the head of the window; drop entries that need no delivery any
        more. Messages due after until_ms stay in the window. more: whether the offer has messages already. If it has
        none, the message due first is taken whatever its size and due time, together with messages due up to
        _TOGETHER_MS after it. Returns (messages, their bytes). If nothing more fits into the offer, no messages are
        returned, and bytes above 0."""
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
        if topic.group_rate is not None:
            owed = owed & ~self.rests.hold(window, entries, rows, owed & ~later)
        if window.queue.filter is not None or not owed.all() or len(entries) > want or later.any():
            chosen, rest = self._choose(window.queue, hour, rows, owed & ~later, want)
            rest = sorted([*rest, *np.flatnonzero(owed & later).tolist()])
            left = [entries[n] for n in chosen]
            self._windows.give_back(window, [entries[n] for n in rest])
            rows = rows[chosen]
        # If no checked entry needs delivery any more, check twice as many next time, to skip long runs of settled ones.
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
        self.rests.offer(topic, left)
        return OfferPart(window, left, rows), cost

    def _runs(self, part: OfferPart, poll: Poll, left: _Room, until_ms: int) -> Iterator[OfferPart]:
        """Yield blocked messages that continue the runs of offered messages (ledger/groups/runs.py), if the consumer
        asks for several of one group. No window has them, so after a refused grant they return to no window."""
        window = part.window
        number, ledger = window.queue.topic.number, self._owed.ledger
        queue = window.queue
        if number is None or queue.topic.group_rate is not None or queue.filter is not None or left.want <= 0:
            return
        if ledger.topics[number].settings.group_concurrency != 1:
            return
        most = min(poll.group_max, MAX_RUN) - 1
        for follow in next_of(ledger, part.rows["first_id"].tolist(), min(most, left.want)):
            if left.want <= 0 or left.size <= 0:
                return
            allowed = self._turns.allowed(window).most
            for hour, some in groupby(follow[: max(0, min(left.want, allowed))], itemgetter(0)):
                indexes = np.array([index for _, index in some], np.uint32)
                rows, owed = self._owed.look(hour, indexes, blocked=True)
                entries = entries_of(hour, indexes)
                sizes = np.cumsum(rows["size"], dtype=np.int64)
                fits = owed & (rows["deliver_at_ms"] <= until_ms) & (sizes <= left.size)
                if not self._windows.in_flight.keys().isdisjoint(entries):
                    fits &= [entry not in self._windows.in_flight for entry in entries]
                count = len(fits) if fits.all() else int(fits.argmin())
                if count:
                    cost = int(sizes[count - 1])
                    self._turns.charge(window, count, cost)
                    self._windows.in_flight.update(dict.fromkeys(entries[:count], ()))
                    left.want, left.size = left.want - count, left.size - cost
                    yield OfferPart(window, entries[:count], rows[:count])
                if count < len(entries):
                    break

    def _choose(
        self, queue: WaitQueue, hour: int, rows: NDArray[np.void], owed: NDArray[np.bool_], want: int
    ) -> tuple[list[int], list[int]]:
        """Positions in `rows`: of at most `want` owed rows that match the filter; of the owed rows not looked at."""
        waiting = np.flatnonzero(owed).tolist()
        if queue.filter is None:
            return waiting[:want], waiting[want:]
        chosen: list[int] = []
        for at, n in enumerate(waiting):
            if len(chosen) == want or self.unfinished:
                return chosen, waiting[at:]
            self.checked += 1
            self._reads_left -= 1
            if self._owed.passes(queue.filter, hour, rows[n]):
                chosen.append(n)
            else:
                self.false_positives += 1
        return chosen, []
