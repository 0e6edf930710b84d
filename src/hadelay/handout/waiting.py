"""Waiting polls, by topic and filter."""

from __future__ import annotations

from hadelay.deadlines import Deadlines
from hadelay.handout.filters import Filter
from hadelay.handout.polls import Poll
from hadelay.handout.queues import TopicTurn, WaitQueue
from hadelay.handout.turns import Turns
from hadelay.handout.windows import Windows
from hadelay.ledger.flow import flow_of
from hadelay.ledger.views import HandoutView

#: Limits of different filters at once: of one topic, since each is asked about every message of it; and of all.
TOPIC_FILTERS = 256
MAX_FILTERS = 2_048
#: Limits of what all waiting polls name together, a topic counting once for each of them; and of names of topics that
#: are not there yet: each of those costs some 2 KiB.
MAX_NAMED, MAX_UNKNOWN = 1 << 20, 1 << 14
#: The queue of a filter is kept this long after its last poll: a consumer that comes back needs no scan.
_LINGER_MS = 60_000


class Waiting:
    def __init__(self, windows: Windows, turns: Turns, view: HandoutView) -> None:
        self.by_name: dict[str, TopicTurn] = {}
        self.by_number: dict[int, TopicTurn] = {}
        #: Waiting polls, and the queues in which each stands: one per topic.
        self.queues: dict[Poll, list[WaitQueue]] = {}
        #: Waiting polls by the monotonic time at which they time out.
        self.deadlines: Deadlines[Poll] = Deadlines()
        #: Count of topics that waiting polls name.
        self.named = 0
        self._windows, self._turns, self._view = windows, turns, view
        self._filters = 0
        #: Queues of filters that no poll asks for → since when, the longest first.
        self._idle: dict[WaitQueue, int] = {}

    # topics

    def topic(self, number: int) -> TopicTurn:
        return self.by_number.get(number) or self._named(self._view.topic(number).name)

    def _named(self, name: str) -> TopicTurn:
        topic = self.by_name.get(name)
        if topic is None:
            topic = self.by_name[name] = TopicTurn(name)
        if topic.number is None and (number := self._view.topic_number(name)) is not None:
            topic.number = number
            self.by_number[number] = topic
            self.configure(number)
        return topic

    def configure(self, number: int) -> None:
        """The topic was made, or its settings changed."""
        topic, settings = self.topic(number), self._view.topic(number).settings
        topic.flow = flow_of(settings, self._turns.now_ms, topic.flow)
        if (settings.catch_up_rate is not None) != bool(topic.overdue_before_ms):
            self._windows.separate(topic, settings.catch_up_rate is not None)
        self._turns.go_on(topic)

    def forget(self, number: int) -> None:
        """The topic was purged or deleted: nothing of it is owed any more."""
        for window in self.by_number[number].windows() if number in self.by_number else ():
            self._windows.clear(window)

    # polls

    def has_room(self, poll: Poll) -> bool:
        """Waiting polls do not name too many topics, and this one may wait with them. A poll that names one topic is
        not shut out by others that name many: the count of polls is limited elsewhere."""
        unknown = len(self.by_name) - len(self.by_number)
        if unknown + len(poll.topics) > MAX_UNKNOWN:
            unknown += sum(name not in self.by_name and self._view.topic_number(name) is None for name in poll.topics)
        few = len(poll.topics) == 1 or self.named + len(poll.topics) <= MAX_NAMED
        return few and unknown <= MAX_UNKNOWN

    def admits(self, poll: Poll) -> bool:
        """The poll's filter is known, or there is room for one more."""
        if poll.filter is None:
            return True
        topics = [self._named(name) for name in poll.topics]
        new = [topic for topic in topics if poll.filter not in topic.filtered]
        while self._idle and self._filters + len(new) > MAX_FILTERS:
            self._end(next(iter(self._idle)))
        for topic in new:
            if len(topic.filtered) >= TOPIC_FILTERS:
                idle = next((queue for queue in self._idle if queue.topic is topic), None)
                if idle is not None:
                    self._end(idle)
        fits = self._filters + len(new) <= MAX_FILTERS
        if not fits or any(len(topic.filtered) >= TOPIC_FILTERS for topic in new):
            self._turns.throttled["filters"] += 1
            for topic in topics:
                self._forget_name(topic)
            return False
        return True

    def wait(self, poll: Poll, *, first: bool = False) -> None:
        """first: the poll's turn had come already; nothing of what it was offered was granted."""
        self.named += len(poll.topics)
        self.deadlines.set(poll, poll.deadline)
        queues = self.queues[poll] = []
        # The topic that was served longest ago comes first: while nobody waits, no ring remembers whose turn it is.
        for topic in sorted(map(self._named, poll.topics), key=lambda topic: topic.served):
            queue = topic.any if poll.filter is None else self._queue(topic, poll.filter)
            queue.waiters[poll] = None
            queues.append(queue)
            self._turns.activate(queue)
            self._windows.rescan_low(queue)
        for queue in queues if first else ():
            queue.waiters.move_to_end(poll, last=False)

    def unwait(self, poll: Poll) -> None:
        self.named -= len(poll.topics)
        self.deadlines.discard(poll)
        for queue in self.queues.pop(poll):
            queue.waiters.pop(poll, None)
            if not queue.waiters:
                if queue.filter is not None:
                    self._idle[queue] = self._turns.now_ms
                    if queue.topic.number is None:
                        self._end(queue)
                self._forget_name(queue.topic)

    def polls(self) -> list[Poll]:
        """In the order of their topics and queues."""
        queues = (queue for topic in self.by_name.values() for queue in topic.queues())
        return list(dict.fromkeys(poll for queue in queues for poll in queue.waiters))

    def tick(self, now_ms: int) -> None:
        while self._idle and next(iter(self._idle.values())) + _LINGER_MS <= now_ms:
            self._end(next(iter(self._idle)))

    def _queue(self, topic: TopicTurn, wanted: Filter) -> WaitQueue:
        queue = topic.filtered.get(wanted)
        if queue is None:
            self._filters += 1
            queue = topic.filtered[wanted] = WaitQueue(topic, wanted, None if topic.number is None else 0)
        self._idle.pop(queue, None)
        return queue

    def _end(self, queue: WaitQueue) -> None:
        """Nobody asked for this filter for long. Its messages are in the window of polls that take any message, too."""
        assert queue.filter is not None
        del self._idle[queue], queue.topic.filtered[queue.filter]
        self._filters -= 1
        for window in queue.windows:
            self._windows.close(window)

    def _forget_name(self, topic: TopicTurn) -> None:
        if topic.number is None and not topic.any.waiters and not topic.filtered:
            self.by_name.pop(topic.name, None)
