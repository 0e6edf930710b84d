"""Ready messages, waiting polls, and how they are brought together.

A topic has a *line* of polls that take any message, and one for each filter that polls ask for (handout/filters.py).
Each line has a *window*: at most 64 k places (hour << 32 | globalIndex) of messages that are due and not handed out.
When it is full the rest stays on disk and a low-water mark remembers the earliest second from which the index has to
be scanned again (handout/scans.py), so ten million overdue messages cost no memory. While a window has a mark nothing
is added to it but by that scan; so nothing is forgotten.

A message stands in every window that it fits; whoever takes it first *offers* it, the others drop it when they come to
it, and get it back if the offer comes to nothing. Apply would grant it only once in any case. So a window may hold what
is gone; it must not lack what is owed.

A topic with a catch-up rate has a second window per line, of what is *overdue*: it fell due before `split_ms`, which
follows the present at a distance of five to ten seconds. What is on time never waits behind the past (ledger/flow.py).

Topics take turns (deficit round robin): one that hands out large messages, or many, waits until the others had as
much; within a topic its lines do. Nothing here costs more because 10,000 polls are waiting.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from hadelay.handout.filters import Filter
from hadelay.handout.lines import PROPOSED, U32, Line, Offer, Part, Poll, TopicQueue, Window
from hadelay.ledger.flow import UNLIMITED, Room, flow_of
from hadelay.ledger.topics import Topic
from hadelay.model import NEVER_MS
from hadelay.settings.topic import TopicSettings

#: What one turn of a topic may hand out before the next one has its own, in bytes; a message also costs a fixed sum.
_QUANTUM = 64 * 1024
_MESSAGE_COST = 256
#: One answer is not larger than this, unless a single message is.
GRANT_BYTES = 4 << 20
#: All windows together. Beyond it a window is small while somebody polls it, and none otherwise.
_TOTAL = 1 << 19
_SMALL_WINDOW = 1_024
#: Different filters at once: of one topic, since each is asked about every message of it; and of all.
TOPIC_FILTERS = 256
MAX_FILTERS = 2_048
#: What all waiting polls may name together, a topic counting once for each of them; and how many names of topics that
#: are not there yet: each of those costs some 2 KiB.
MAX_NAMED, MAX_UNKNOWN = 1 << 20, 1 << 14
#: The line of a filter is kept so long after its last poll: whoever comes back needs no scan.
_LINGER_MS = 60_000
#: Overdue is what fell due longer ago than this when the line between past and present was drawn; it is drawn anew
#: when something twice as old is met.
OVERDUE_MS = 5_000
#: An answer is held back until the last message in it is due: those that are not due yet go together when no more than
#: this lies between them.
_TOGETHER_MS = 8
#: A window of which nothing is owed any more is looked through in pieces of up to this.
_BARREN = 4_096

#: (hour, indexes) → their INDEX rows, and which of them are still owed.
Look = Callable[[int, U32], tuple[NDArray[np.void], NDArray[np.bool_]]]
#: (hour, INDEX row) → the tags in its record; None if it cannot be read.
Tags = Callable[[int, np.void], Collection[str] | None]


class Ready:
    def __init__(
        self, window: int, topic_at: Callable[[int], Topic], number_of: Callable[[str], int | None], look: Look,
        tags: Tags,
    ) -> None:  # fmt: skip
        """topic_at: the topic of a number; number_of: that of a name, None if there is none."""
        self.window = window
        self.by_name: dict[str, TopicQueue] = {}
        self.by_number: dict[int, TopicQueue] = {}
        #: Polls waiting, the topics that they name, and places in all windows.
        self.waiting = self.named = 0
        self.size = 0
        #: What is offered, and neither granted nor refused yet → the windows that gave it up, or passed it over.
        self.flying: dict[int, tuple[Window, ...]] = {}
        #: Cluster time of the last look.
        self.now_ms = 0
        #: Called with a window that has a mark and has run low.
        self.on_low: Callable[[Window], None] = lambda window: None
        #: How often a topic that had a message for a poll was stopped by a limit, by its name.
        self.throttled: Counter[str] = Counter()
        #: Messages whose tags were read, and those that only seemed to match.
        self.checked = self.false_positives = 0
        self._topic_at, self._number_of, self._look, self._tags = topic_at, number_of, look, tags
        self._ring: deque[TopicQueue] = deque()
        #: How often messages were taken for somebody.
        self._served = 0
        #: When a topic that is out of tokens gets new ones.
        self._alarms: list[tuple[int, int, TopicQueue]] = []
        #: Topics at their concurrency.
        self._full: dict[TopicQueue, None] = {}
        self._filters = 0
        #: Lines of filters that no poll asks for → since when.
        self._idle: OrderedDict[Line, int] = OrderedDict()

    # topics

    def queue(self, number: int) -> TopicQueue:
        found = self.by_number.get(number)
        return found if found is not None else self._topic_named(self._topic_at(number).name)

    def _topic_named(self, name: str) -> TopicQueue:
        topic = self.by_name.get(name)
        if topic is None:
            topic = self.by_name[name] = TopicQueue(name)
        if topic.number is None and (number := self._number_of(name)) is not None:
            topic.number = number
            self.by_number[number] = topic
            self._configure(topic, self._topic_at(number).settings)
        return topic

    def configure(self, number: int) -> None:
        """The topic was made, or its settings changed."""
        self._configure(self.queue(number), self._topic_at(number).settings)

    def _configure(self, topic: TopicQueue, settings: TopicSettings) -> None:
        topic.flow = flow_of(settings, self.now_ms, topic.flow)
        if (settings.catch_up_rate is not None) != bool(topic.split_ms):
            self._split(topic, settings.catch_up_rate is not None)
        self._go_on(topic)

    def _split(self, topic: TopicQueue, on: bool) -> None:
        """Keep what is overdue apart from now on, or no longer."""
        topic.split_ms = self.now_ms - OVERDUE_MS if on else 0
        for line in topic.lines():
            if on:
                line.keep_apart(0)
            elif line.past is not None:
                self._close(line.past)
                line.keep_together()
            self._see_to(line)

    def _draw_again(self, topic: TopicQueue) -> None:
        """Something fell due long ago: what is overdue by now is the other windows' business."""
        before, topic.split_ms = topic.split_ms, self.now_ms - OVERDUE_MS
        for line in topic.lines():
            assert line.past is not None
            line.past.leave_out(before // 1000)
            self._see_to(line)

    def forget(self, number: int) -> None:
        """The topic was deleted: nothing of it is owed any more."""
        topic = self.by_number.get(number)
        if topic is not None:
            for window in topic.windows():
                self._empty(window)

    def _empty(self, window: Window) -> None:
        self.size -= len(window.places)
        window.places.clear()
        window.mark = window.missed = None

    def _close(self, window: Window) -> None:
        self._empty(window)
        window.closed = True

    # messages

    def room(self, window: Window) -> int:
        size = self.window
        if self.size >= _TOTAL:
            size = min(size, _SMALL_WINDOW) if window.line.waiters else 0
        return max(0, size - len(window.places))

    def is_low(self, window: Window) -> bool:
        """It has a mark, nobody scans for it yet, and three quarters of it are free."""
        if window.mark is None or window.scanning or not (window.line.waiters or window.line.filter is None):
            return False
        return len(window.places) * 4 <= self.room(window)

    def _see_to(self, line: Line) -> None:
        for window in line.windows:
            if window.mark is not None and self.is_low(window):
                self.on_low(window)

    def add(self, number: int, second: int, places: list[int]) -> None:
        """These, of one hour, fell due; what finds no room is left to a scan from the mark."""
        topic = self.by_number.get(number) or self.queue(number)
        for window, mine in self._shares(topic, places):
            self.put(window, second, mine)

    def put(self, window: Window, second: int, places: list[int]) -> None:
        if window.mark is not None:
            window.leave_out(second)
            return
        room = self.room(window)
        if len(places) > room and not window.line.topic.plain:
            self._drop_gone(window)
            room = self.room(window)
        self.refill(window, places[:room])
        if len(places) > room:
            window.leave_out(second)
            self._see_to(window.line)

    def _shares(self, topic: TopicQueue, places: list[int]) -> Iterator[tuple[Window, list[int]]]:
        """Which of these, of one hour, belong into which windows."""
        if topic.plain:
            yield topic.any.now, places
            return
        numbers = np.array(places, np.int64)
        rows, _ = self._look(places[0] >> 32, numbers.astype(np.uint32))
        tagged = rows["tag_mask"].any()
        for window in topic.windows():
            if tagged or window.line.filter is None:
                mine = window.pick(rows)
                if mine.all():
                    yield window, places
                elif mine.any():
                    yield window, numbers[mine].tolist()

    def leave_out(self, topic: TopicQueue, second: int) -> None:
        """Some of that second's messages stay on disk until there is room."""
        for line in topic.lines():
            for window in line.windows:
                window.leave_out(second)
            self._see_to(line)

    def refill(self, window: Window, places: list[int]) -> None:
        """A scan found these."""
        window.places.extend(places)
        self.size += len(places)
        self._activate(window.line)

    def again(self, number: int, places: list[int]) -> None:
        """These, of one hour, are owed after all."""
        for window, mine in self._shares(self.queue(number), places):
            self.refill(window, mine)

    def settle(self, offer: Offer, back: NDArray[np.bool_] | None = None) -> None:
        """It was decided. back: what waits again, first in line, in every window that gave it up."""
        at = len(offer.places)
        for window, places, _ in reversed(offer.parts):
            topic = window.line.topic
            topic.flying -= len(places)
            at -= len(places)
            if back is None:
                for place in places:
                    self.flying.pop(place, None)
                continue
            for n in reversed(range(len(places))):
                passed = self.flying.pop(places[n], ())
                if back[at + n]:
                    for each in passed:
                        if not each.closed:
                            self._return(each, [places[n]])
                            self._activate(each.line)
        self.landed()

    def unused(self, offer: Offer, refused: NDArray[np.bool_]) -> None:
        """Apply did not grant these: the limits do not count them."""
        at = 0
        for window, places, _ in offer.parts:
            flow = window.line.topic.flow
            if flow is not None:
                flow.take(-int(np.count_nonzero(refused[at : at + len(places)])), window.overdue, self.now_ms)
            at += len(places)

    def landed(self) -> bool:
        """Leases ended, or grants were decided: topics at their concurrency, if there are any, may go on."""
        full, self._full = self._full, {}
        for topic in full:
            self._go_on(topic)
        return bool(full)

    def unheld(self, window: Window, places: list[int]) -> NDArray[np.bool_]:
        """Which of these are neither in the window nor offered; the window gets those back with the others."""
        held, flying = set(window.places), self.flying
        for place in flying.keys() & places if flying else ():
            if window not in flying[place]:
                flying[place] += (window,)
        return np.fromiter((p not in held and p not in flying for p in places), np.bool_, len(places))

    def _drop_gone(self, window: Window) -> None:
        """The window is full: of what others took too, perhaps."""
        kept: list[int] = []
        places = np.array(window.places, np.int64)
        hours = places >> 32
        for hour in dict.fromkeys(hours.tolist()):
            mine = places[hours == hour]
            kept += mine[self._look(hour, mine.astype(np.uint32))[1]].tolist()
        self.size += len(kept) - len(window.places)
        window.places = deque(kept)

    def oldest(self, number: int) -> tuple[Window, int | None]:
        """The window with the topic's oldest ready messages, and the first place in it that is owed."""
        window = self.oldest_window(number)
        while window.places:
            some = list(islice(window.places, 64))
            some = [place for place in some if place >> 32 == some[0] >> 32]
            owed = self._look(some[0] >> 32, np.array(some, np.int64).astype(np.uint32))[1]
            gone = len(some) if not owed.any() else int(owed.argmax())
            for _ in range(gone):
                window.places.popleft()
            self.size -= gone
            if gone < len(some):
                return window, window.places[0]
        return window, None

    def oldest_window(self, number: int) -> Window:
        line = self.queue(number).any
        return line.now if line.past is None or not (line.past.places or line.past.mark is not None) else line.past

    # polls

    def has_room(self, poll: Poll) -> bool:
        """Those that wait do not name too many topics, and it may wait with them. Who names one topic is not shut out
        by others who name many: how many wait is bounded elsewhere."""
        unknown = len(self.by_name) - len(self.by_number)
        if unknown + len(poll.topics) > MAX_UNKNOWN:
            unknown += sum(name not in self.by_name and self._number_of(name) is None for name in poll.topics)
        few = len(poll.topics) == 1 or self.named + len(poll.topics) <= MAX_NAMED
        return few and unknown <= MAX_UNKNOWN

    def admits(self, poll: Poll) -> bool:
        """Its filter is known, or there is room for one more."""
        if poll.filter is None:
            return True
        topics = [self._topic_named(name) for name in poll.topics]
        new = [topic for topic in topics if poll.filter not in topic.filtered]
        while self._idle and self._filters + len(new) > MAX_FILTERS:
            self._end(next(iter(self._idle)))
        for topic in new:
            if len(topic.filtered) >= TOPIC_FILTERS:
                idle = next((line for line in self._idle if line.topic is topic), None)
                if idle is not None:
                    self._end(idle)
        fits = self._filters + len(new) <= MAX_FILTERS
        if not fits or any(len(topic.filtered) >= TOPIC_FILTERS for topic in new):
            self.throttled["filters"] += 1
            for topic in topics:
                self._forget_name(topic)
            return False
        return True

    def wait(self, poll: Poll) -> None:
        self.waiting += 1
        self.named += len(poll.topics)
        # Who was served longest ago comes first: while nobody waits there is no ring that remembers whose turn it is.
        for topic in sorted(map(self._topic_named, poll.topics), key=lambda topic: topic.served):
            line = topic.any if poll.filter is None else self._line(topic, poll.filter)
            line.waiters[poll] = None
            poll.lines.append(line)
            self._activate(line)
            self._see_to(line)

    def unwait(self, poll: Poll) -> None:
        self.waiting -= 1
        self.named -= len(poll.lines)
        for line in poll.lines:
            line.waiters.pop(poll, None)
            if not line.waiters:
                if line.filter is not None:
                    self._idle[line] = self.now_ms
                    if line.topic.number is None:
                        self._end(line)
                self._forget_name(line.topic)
        poll.lines = []

    def wait_again(self, poll: Poll) -> None:
        """Nothing of what it was offered was granted: it is the next one."""
        self.wait(poll)
        for line in poll.lines:
            line.waiters.move_to_end(poll, last=False)

    def polls(self) -> list[Poll]:
        lines = (line for topic in self.by_name.values() for line in topic.lines())
        return list(dict.fromkeys(poll for line in lines for poll in line.waiters))

    def _line(self, topic: TopicQueue, wanted: Filter) -> Line:
        line = topic.filtered.get(wanted)
        if line is None:
            self._filters += 1
            line = topic.filtered[wanted] = Line(topic, wanted, None if topic.number is None else 0)
        self._idle.pop(line, None)
        return line

    def _end(self, line: Line) -> None:
        """Nobody asked for this filter for long. What it gives up is in the window of those who take anything."""
        assert line.filter is not None
        del self._idle[line], line.topic.filtered[line.filter]
        self._filters -= 1
        for window in line.windows:
            self._close(window)

    def _forget_name(self, topic: TopicQueue) -> None:
        if topic.number is None and not topic.any.waiters and not topic.filtered:
            self.by_name.pop(topic.name, None)

    # time

    def tick(self, now_ms: int) -> None:
        self.now_ms = now_ms
        while self._alarms and self._alarms[0][0] <= now_ms:
            at, _, topic = heapq.heappop(self._alarms)
            if topic.again_ms == at:
                self._go_on(topic)
        while self._idle and next(iter(self._idle.values())) + _LINGER_MS <= now_ms:
            self._end(next(iter(self._idle)))

    def next_ms(self) -> int:
        """When a topic that waits for tokens gets some."""
        while self._alarms and self._alarms[0][2].again_ms != self._alarms[0][0]:
            heapq.heappop(self._alarms)
        return self._alarms[0][0] if self._alarms else NEVER_MS

    def _go_on(self, topic: TopicQueue) -> None:
        topic.cause, topic.again_ms = "", NEVER_MS
        for line in topic.lines():
            self._activate(line)

    def _stop(self, topic: TopicQueue, room: Room) -> None:
        """It has something for somebody, and a limit forbids it."""
        if topic.cause != room.cause:
            self.throttled[room.cause] += 1
        topic.cause = room.cause
        if room.cause == "concurrency":
            self._full[topic] = None
        if room.again_ms not in (NEVER_MS, topic.again_ms):
            heapq.heappush(self._alarms, (room.again_ms, id(topic), topic))
        topic.again_ms = room.again_ms

    # bringing them together

    def match(self, room: int, now_ms: int) -> list[Offer]:
        """Offers for as many waiting polls as there are messages for, of at most `room` messages together. now_ms: what
        falls due after it is handed out ahead of its time."""
        offers: list[Offer] = []
        ring = self._ring
        while ring and room > 0:
            topic = ring[0]
            topic.deficit += _QUANTUM
            idle = False
            while topic.deficit > 0 and room > 0 and not idle:
                line = self._next_line(topic)
                if line is None:
                    idle = True
                    break
                poll = next(iter(line.waiters))
                offer = self._offer(poll, line, room, now_ms)
                if offer is not None:
                    self.unwait(poll)
                    poll.phase = PROPOSED
                    room -= len(offer.places)
                    offers.append(offer)
            if idle:
                ring.popleft()
                topic.active, topic.deficit = False, 0
            else:
                ring.rotate(-1)
        return offers

    def _next_line(self, topic: TopicQueue) -> Line | None:
        """The next line of the topic that has a poll and something that may be handed out to it."""
        stopped: Room | None = None
        for _ in range(len(topic.turns)):
            line = topic.turns[0]
            if not line.waiters or not any(window.places for window in line.windows):
                topic.turns.popleft().queued = False
                continue
            topic.turns.rotate(-1)
            for window in line.windows:
                if window.places:
                    room = self._allowed(window)
                    if room.most > 0:
                        return line
                    if stopped is None or room.again_ms < stopped.again_ms:
                        stopped = room
        if stopped is not None:
            self._stop(topic, stopped)
        return None

    def _allowed(self, window: Window) -> Room:
        topic = window.line.topic
        if topic.flow is None or topic.number is None:
            return UNLIMITED
        leased = self._topic_at(topic.number).leased
        return topic.flow.room(leased + topic.flying, window.overdue, self.now_ms)

    def _offer(self, poll: Poll, first: Line, room: int, now_ms: int) -> Offer | None:
        """From the line whose turn it is, then from the poll's others, until the answer is full."""
        want, size, until_ms = min(poll.max, room), GRANT_BYTES, now_ms
        parts: list[Part] = []
        for line in (first, *(line for line in poll.lines if line is not first)):
            for window in line.windows:
                while want > 0 and size > 0 and window.places and (most := min(want, self._allowed(window).most)) > 0:
                    part, cost = self._take(window, most, size, until_ms, bool(parts))
                    if part.places:
                        if not parts:
                            until_ms = max(now_ms, int(part.rows["deliver_at_ms"].min()) + _TOGETHER_MS)
                        parts.append(part)
                        want -= len(part.places)
                        size -= cost
                    elif cost:
                        size = 0
        if not parts:
            return None
        places = parts[0].places if len(parts) == 1 else [place for part in parts for place in part.places]
        rows = parts[0].rows if len(parts) == 1 else np.concatenate([part.rows for part in parts])
        numbers = np.array(places, np.int64)
        return Offer(poll, parts, places, (numbers >> 32).astype(np.uint32), numbers.astype(np.uint32), rows)

    def _take(self, window: Window, want: int, size: int, until_ms: int, more: bool) -> tuple[Part, int]:
        """Up to `want` places of one hour off the window, their rows and bytes (1 if there are more, which do not fit);
        what is gone is dropped.
        until_ms: what is due later stays. more: the answer has something already, so nothing needs to fit that does
        not; else what is due first goes, and what is due with it."""
        topic, waiting = window.line.topic, window.places
        hour = waiting[0] >> 32
        count = max(want, window.barren)
        places: list[int] = []
        while len(places) < count and waiting and waiting[0] >> 32 == hour:
            places.append(waiting.popleft())
        self.size -= len(places)
        looked = len(places)
        if not topic.plain or not self.flying.keys().isdisjoint(places):
            places = self._not_flying(window, places)
        rows, owed = self._look(hour, np.array(places, np.int64).astype(np.uint32))
        if topic.split_ms and not window.overdue:
            owed = owed & self._on_time(topic, rows)
        passed: list[int] = []
        left = places
        later = self._later(rows, owed, until_ms, more)
        if window.line.filter is not None or not owed.all() or len(places) > want or later.any():
            chosen, passed = self._choose(window.line, hour, rows, owed & ~later, want)
            passed = sorted([*passed, *np.flatnonzero(owed & later).tolist()])
            left = [places[n] for n in chosen]
            self._return(window, [places[n] for n in passed])
            rows = rows[chosen]
        # The more was gone, the more is looked at next time: nothing is looked at twice for long.
        window.barren = 0 if left or passed else min(2 * looked, _BARREN)
        cost = int(rows["size"].sum(dtype=np.int64)) or int(more and bool(passed))
        if cost > size:
            fits = int(np.cumsum(rows["size"], dtype=np.int64).searchsorted(size, "right"))
            fits = max(fits, 0 if more else 1)
            self._return(window, left[fits:])
            left, rows = left[:fits], rows[:fits]
            cost = max(1, int(rows["size"].sum(dtype=np.int64)))
        if window.mark is not None and self.is_low(window):
            self.on_low(window)
        self._served += 1
        topic.served = self._served
        topic.deficit -= cost + _MESSAGE_COST * len(left)
        topic.flying += len(left)
        self.flying.update(dict.fromkeys(left, (window,)))
        if topic.flow is not None:
            topic.flow.take(len(left), window.overdue, self.now_ms)
        return Part(window, left, rows), cost

    def _later(self, rows: NDArray[np.void], owed: NDArray[np.bool_], until_ms: int, more: bool) -> NDArray[np.bool_]:
        """Which of these would hold the answer back for longer than the others in it are due."""
        due = rows["deliver_at_ms"]
        if not more and owed.any():
            until_ms = max(until_ms, int(due[owed].min()) + _TOGETHER_MS)
        return np.asarray(due > until_ms)

    def _return(self, window: Window, places: list[int]) -> None:
        window.places.extendleft(reversed(places))
        self.size += len(places)

    def _not_flying(self, window: Window, places: list[int]) -> list[int]:
        """Without those that are offered to somebody else, and each only once."""
        free = []
        for place in dict.fromkeys(places):
            passed = self.flying.get(place)
            if passed is None:
                free.append(place)
            elif window not in passed:
                self.flying[place] = (*passed, window)
        return free

    def _on_time(self, topic: TopicQueue, rows: NDArray[np.void]) -> NDArray[np.bool_]:
        due = rows["deliver_at_ms"]
        if len(due) and int(due.min()) < self.now_ms - 2 * OVERDUE_MS:
            self._draw_again(topic)
        return np.asarray(due >= topic.split_ms)

    def _choose(
        self, line: Line, hour: int, rows: NDArray[np.void], owed: NDArray[np.bool_], want: int
    ) -> tuple[list[int], list[int]]:
        """(the first `want` of those owed that the filter lets pass, what is left over for the next poll)"""
        waiting = np.flatnonzero(owed).tolist()
        if line.filter is None:
            return waiting[:want], waiting[want:]
        chosen: list[int] = []
        for at, n in enumerate(waiting):
            if len(chosen) == want:
                return chosen, waiting[at:]
            self.checked += 1
            if self.passes(line.filter, hour, rows[n]):
                chosen.append(n)
            else:
                self.false_positives += 1
        return chosen, []

    def passes(self, wanted: Filter | None, hour: int, row: np.void) -> bool:
        """By its record. One that cannot be read passes nowhere until it is mended."""
        if wanted is None:
            return True
        tags = self._tags(hour, row)
        return tags is not None and wanted.matches(tags)

    def _activate(self, line: Line) -> None:
        if not line.waiters or not any(window.places for window in line.windows):
            return
        topic = line.topic
        if not line.queued:
            line.queued = True
            topic.turns.append(line)
        if not topic.active:
            topic.active = True
            self._ring.append(topic)
