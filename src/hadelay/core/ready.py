"""Ready messages, waiting polls, and how they are brought together.

Each topic has a *window*: at most 64 k places (hour << 32 | globalIndex) of messages that are due and not handed out.
When it is full the rest stays on disk and a low-water mark remembers the earliest second from which the index has to
be scanned again (core/backlog.py), so ten million overdue messages cost no memory. While a topic has a mark nothing
is added to its window but by that scan; so nothing is in the window twice, and nothing is forgotten.

Topics take turns (deficit round robin): one that hands out large messages, or many, waits until the others had as
much. Nothing here costs more because 10,000 polls are waiting.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hadelay.errors import HadelayError

U32 = NDArray[np.uint32]

#: What one turn of a topic may hand out before the next one has its own, in bytes; a message also costs a fixed sum.
_QUANTUM = 64 * 1024
_MESSAGE_COST = 256
#: One answer is not larger than this, unless a single message is.
GRANT_BYTES = 4 << 20
#: All windows together. Beyond it a topic gets a small window while somebody polls it, and none otherwise.
_TOTAL = 1 << 19
_SMALL_WINDOW = 1_024

WAITING, PROPOSED, DONE = 0, 1, 2


class Delivery(NamedTuple):
    """What a consumer gets: a grant, or what is still held of it. Arrays run in parallel; all empty at a timeout."""

    term: int
    seq: int
    positions: NDArray[np.uint16]  # of each message in the grant: part of its lease token
    hours: U32
    indexes: U32
    attempts: NDArray[np.uint16]  # 1 for the first hand-out
    rows: NDArray[np.void]  # INDEX rows: offset, size, first_id, deliver_at_ms, topic
    until_ms: NDArray[np.int64]
    redelivered: NDArray[np.bool_]
    now_ms: int  # cluster time of the answer


@dataclass(eq=False, slots=True)
class Poll:
    """A waiting receive. `done` is called exactly once unless the poll is cancelled: with a Delivery, which is empty
    when nothing came within wait_ms, or with an error."""

    consumer: str
    request_id: bytes  # b"" for none
    topics: tuple[str, ...]
    max: int
    lease_ms: int
    wait_ms: int
    done: Callable[[Delivery | None, HadelayError | None], None]
    #: The dispatcher's own: WAITING, PROPOSED or DONE, and the monotonic time at which it has waited long enough.
    phase: int = WAITING
    deadline: float = 0.0


@dataclass(eq=False, slots=True)
class Offer:
    """Messages taken out of their windows for one poll: the grant to propose."""

    poll: Poll
    places: list[int]
    hours: U32
    indexes: U32
    rows: NDArray[np.void]
    seq: int = 0
    #: Which round of proposals it belongs to.
    round: int = 0


class TopicQueue:
    """One topic's window and the polls that wait for it."""

    __slots__ = ("active", "deficit", "mark", "missed", "name", "number", "places", "scanning", "waiters")

    def __init__(self, name: str) -> None:
        self.name = name
        #: None until the topic exists.
        self.number: int | None = None
        self.places: deque[int] = deque()
        self.waiters: OrderedDict[Poll, None] = OrderedDict()
        #: Low-water mark: the earliest second of which something was left out of the window.
        self.mark: int | None = None
        #: The same, for what was left out since the scan that is going on has begun.
        self.missed: int | None = None
        self.scanning = False
        self.active = False
        self.deficit = 0

    def __repr__(self) -> str:
        return f"<TopicQueue {self.name} ready={len(self.places)} waiting={len(self.waiters)} mark={self.mark}>"

    def leave_out(self, second: int) -> None:
        """Something of `second` found no room."""
        self.mark = second if self.mark is None else min(self.mark, second)
        self.missed = second if self.missed is None else min(self.missed, second)


#: (hour, indexes) → their INDEX rows, and which of them are still owed.
Look = Callable[[int, U32], tuple[NDArray[np.void], NDArray[np.bool_]]]


class Ready:
    def __init__(self, window: int, name_of: Callable[[int], str]) -> None:
        """name_of: a topic number's name."""
        self.window = window
        self.by_name: dict[str, TopicQueue] = {}
        self.by_number: dict[int, TopicQueue] = {}
        #: Polls waiting, and places in all windows.
        self.waiting = 0
        self.size = 0
        #: Called with a queue that has a mark and has run low.
        self.on_low: Callable[[TopicQueue], None] = lambda queue: None
        self._name_of = name_of
        self._ring: deque[TopicQueue] = deque()

    # messages

    def queue(self, number: int) -> TopicQueue:
        queue = self.by_number.get(number)
        if queue is None:
            queue = self._queue_named(self._name_of(number))
            queue.number = number
            self.by_number[number] = queue
        return queue

    def room(self, queue: TopicQueue) -> int:
        window = self.window
        if self.size >= _TOTAL:
            window = min(window, _SMALL_WINDOW) if queue.waiters else 0
        return max(0, window - len(queue.places))

    def is_low(self, queue: TopicQueue) -> bool:
        """It has a mark, nobody scans for it yet, and three quarters of its window are free."""
        return queue.mark is not None and not queue.scanning and len(queue.places) * 4 <= self.room(queue)

    def add(self, number: int, second: int, places: list[int]) -> None:
        """These fell due; what finds no room is left to a scan from the mark."""
        queue = self.by_number.get(number) or self.queue(number)
        if queue.mark is not None:
            queue.leave_out(second)
            return
        room = self.room(queue)
        self.refill(queue, places[:room])
        if len(places) > room:
            self.leave_out(queue, second)

    def leave_out(self, queue: TopicQueue, second: int) -> None:
        """Some of that second's messages stay on disk until there is room."""
        queue.leave_out(second)
        if self.is_low(queue):
            self.on_low(queue)

    def refill(self, queue: TopicQueue, places: list[int]) -> None:
        """A scan found these."""
        queue.places.extend(places)
        self.size += len(places)
        self._activate(queue)

    def put_back(self, offer: Offer) -> None:
        """The proposal failed: first in line again."""
        for place, number in zip(reversed(offer.places), offer.rows["topic"][::-1].tolist(), strict=True):
            queue = self.queue(number)
            queue.places.appendleft(place)
            self._activate(queue)
        self.size += len(offer.places)

    def forget(self, number: int) -> None:
        """The topic was deleted: nothing of it is owed any more."""
        queue = self.by_number.get(number)
        if queue is not None:
            self.size -= len(queue.places)
            queue.places.clear()
            queue.mark = queue.missed = None

    # polls

    def wait(self, poll: Poll) -> None:
        self.waiting += 1
        for name in poll.topics:
            queue = self._queue_named(name)
            queue.waiters[poll] = None
            self._activate(queue)
            if queue.mark is not None and self.is_low(queue):
                self.on_low(queue)

    def unwait(self, poll: Poll) -> None:
        self.waiting -= 1
        for name in poll.topics:
            queue = self.by_name.get(name)
            if queue is not None:
                queue.waiters.pop(poll, None)
                if queue.number is None and not queue.waiters:
                    del self.by_name[name]

    def wait_again(self, poll: Poll) -> None:
        """Nothing of what it was offered was granted: it is the next one."""
        self.wait(poll)
        for name in poll.topics:
            self.by_name[name].waiters.move_to_end(poll, last=False)

    def polls(self) -> list[Poll]:
        return list(dict.fromkeys(poll for queue in self.by_name.values() for poll in queue.waiters))

    # bringing them together

    def match(self, look: Look, room: int) -> list[Offer]:
        """Offers for as many waiting polls as there are messages for, of at most `room` messages together."""
        offers: list[Offer] = []
        ring = self._ring
        while ring and room > 0:
            queue = ring[0]
            queue.deficit += _QUANTUM
            while queue.deficit > 0 and room > 0 and queue.places and queue.waiters:
                poll = next(iter(queue.waiters))
                offer = self._offer(poll, queue, look, room)
                if offer is not None:
                    self.unwait(poll)
                    poll.phase = PROPOSED
                    room -= len(offer.places)
                    offers.append(offer)
            if not queue.places or not queue.waiters:
                ring.popleft()
                queue.active, queue.deficit = False, 0
            else:
                ring.rotate(-1)
        return offers

    def _offer(self, poll: Poll, first: TopicQueue, look: Look, room: int) -> Offer | None:
        """From the topic whose turn it is, then from the poll's others, until the answer is full."""
        want, size = min(poll.max, room), GRANT_BYTES
        taken: list[tuple[list[int], NDArray[np.void]]] = []
        for name in (first.name, *(name for name in poll.topics if name != first.name)):
            queue = self.by_name[name]
            while want > 0 and size > 0 and queue.places:
                places, rows, cost = self._take(queue, want, size, look, bool(taken))
                if places:
                    taken.append((places, rows))
                    want -= len(places)
                    size -= cost
                elif cost:
                    size = 0
        if not taken:
            return None
        if len(taken) == 1:
            places, rows = taken[0]
        else:
            places = [place for part, _ in taken for place in part]
            rows = np.concatenate([part for _, part in taken])
        numbers = np.array(places, np.int64)
        return Offer(poll, places, (numbers >> 32).astype(np.uint32), numbers.astype(np.uint32), rows)

    def _take(
        self, queue: TopicQueue, want: int, size: int, look: Look, more: bool
    ) -> tuple[list[int], NDArray[np.void], int]:
        """Up to `want` places of one hour off the window, their rows and bytes; those that are settled are dropped.
        more: the answer has something already, so nothing needs to fit that does not."""
        window = queue.places
        hour = window[0] >> 32
        places: list[int] = []
        while len(places) < want and window and window[0] >> 32 == hour:
            places.append(window.popleft())
        self.size -= len(places)
        if queue.mark is not None and self.is_low(queue):
            self.on_low(queue)
        rows, owed = look(hour, np.array(places, np.int64).astype(np.uint32))
        if not owed.all():
            places = [place for place, is_owed in zip(places, owed.tolist(), strict=True) if is_owed]
            rows = rows[owed]
        cost = int(rows["size"].sum(dtype=np.int64))
        if cost > size:
            fits = int(np.cumsum(rows["size"], dtype=np.int64).searchsorted(size, "right"))
            fits = max(fits, 0 if more else 1)
            window.extendleft(reversed(places[fits:]))
            self.size += len(places) - fits
            places, rows = places[:fits], rows[:fits]
            cost = max(1, int(rows["size"].sum(dtype=np.int64)))
        queue.deficit -= cost + _MESSAGE_COST * len(places)
        return places, rows, cost

    def _queue_named(self, name: str) -> TopicQueue:
        queue = self.by_name.get(name)
        if queue is None:
            queue = self.by_name[name] = TopicQueue(name)
        return queue

    def _activate(self, queue: TopicQueue) -> None:
        if not queue.active and queue.places and queue.waiters:
            queue.active = True
            self._ring.append(queue)
