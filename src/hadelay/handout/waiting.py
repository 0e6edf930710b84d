"""Waiting polls, by topic and filter."""

from hadelay.codec.meta import Filter
from hadelay.handout.deadlines import Deadlines
from hadelay.handout.polls import Poll
from hadelay.handout.queues import TopicTurn, WaitQueue
from hadelay.handout.windows import Windows

#: Limits of different filters, beyond which polls are refused: per topic, because every message is checked against
#: each; and of all topics.
TOPIC_FILTERS = 256
MAX_FILTERS = 2_048
#: Limits over all waiting polls: number of topics that they name, counted once per poll; and number of names of topics
#: that do not exist yet, which cost some 2 KiB each.
MAX_NAMED, MAX_UNKNOWN = 1 << 20, 1 << 14
#: Time in ms for which the queue of a filter is kept after its last poll, so that a returning consumer needs no scan.
_LINGER_MS = 60_000


class Waiting:
    def __init__(self, windows: Windows) -> None:
        #: Waiting poll → the queues in which the poll waits, one per topic.
        self.queues: dict[Poll, list[WaitQueue]] = {}
        #: Waiting polls by the monotonic time at which they time out.
        self.deadlines: Deadlines[Poll] = Deadlines()
        #: Number of topics that waiting polls name, counted once per poll.
        self.named = 0
        self._windows, self._turns = windows, windows.turns
        #: Number of queues with a filter, of all topics.
        self._filters = 0
        #: Queues of filters without a waiting poll → time in ms since which the queue is idle, the longest idle first.
        self.idle: dict[WaitQueue, int] = {}

    def problem(self, poll: Poll) -> str:
        """Reason to refuse the poll, "" if it may wait. A poll of one topic is never refused because other polls name
        many topics: the number of polls is limited elsewhere."""
        windows = self._windows
        unknown = len(windows.by_name) - len(windows.by_number)
        if unknown + len(poll.topics) > MAX_UNKNOWN:
            unknown += sum(name not in windows.by_name and windows.known_topic(name) is None for name in poll.topics)
        if unknown > MAX_UNKNOWN or (len(poll.topics) > 1 and self.named + len(poll.topics) > MAX_NAMED):
            return (
                f"waiting receives name too many topics: at most {MAX_NAMED}, or {MAX_UNKNOWN} unknown ones; use fewer"
            )
        if poll.filter is None or self._admits(poll.filter, poll):
            return ""
        return (
            f"waiting receives use too many different tag filters: at most {TOPIC_FILTERS} per topic and "
            f"{MAX_FILTERS} in all; use fewer filters, or topics instead of tags"
        )

    def _admits(self, wanted: Filter, poll: Poll) -> bool:
        """Whether all topics of the poll have a queue for its filter, or the limits allow new ones. Ends idle queues to
        make room."""
        topics = [self._windows.named(name) for name in poll.topics]
        new = [topic for topic in topics if wanted not in topic.filtered]
        while self.idle and self._filters + len(new) > MAX_FILTERS:
            self._end(next(iter(self.idle)))
        for topic in new:
            if len(topic.filtered) >= TOPIC_FILTERS:
                idle = next((queue for queue in self.idle if queue.topic is topic), None)
                if idle is not None:
                    self._end(idle)
        fits = self._filters + len(new) <= MAX_FILTERS
        if fits and all(len(topic.filtered) < TOPIC_FILTERS for topic in new):
            return True
        self._turns.throttled["filters"] += 1
        for topic in topics:
            self._forget_name(topic)
        return False

    def wait(self, poll: Poll, *, first: bool = False) -> None:
        """Add a poll. first: put the poll at the head of its queues, because its turn had come and its offer failed."""
        self.named += len(poll.topics)
        self.deadlines.set(poll, poll.deadline)
        queues = self.queues[poll] = []
        # Begin with the topic served longest ago: a topic without waiting polls takes no turns, so it has no place in
        # their order.
        topics = list(map(self._windows.named, poll.topics))
        for topic in topics if poll.listed else sorted(topics, key=lambda topic: topic.served):
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
                    self.idle[queue] = self._turns.now_ms
                    if queue.topic.number is None:
                        self._end(queue)
                self._forget_name(queue.topic)

    def polls(self) -> list[Poll]:
        queues = (queue for topic in self._windows.by_name.values() for queue in topic.queues())
        return list(dict.fromkeys(poll for queue in queues for poll in queue.waiters))

    def consumers(self, topic: str) -> set[str]:
        """Consumers with a waiting poll that names this topic."""
        turn = self._windows.by_name.get(topic)
        return set() if turn is None else {poll.consumer for queue in turn.queues() for poll in queue.waiters}

    def all_consumers(self) -> set[str]:
        """Consumers with a waiting poll."""
        return {poll.consumer for poll in self.queues}

    def end_idle(self) -> None:
        """Remove queues with a filter for which no poll has waited in the last minute."""
        while self.idle and next(iter(self.idle.values())) + _LINGER_MS <= self._turns.now_ms:
            self._end(next(iter(self.idle)))

    def _queue(self, topic: TopicTurn, wanted: Filter) -> WaitQueue:
        queue = topic.filtered.get(wanted)
        if queue is None:
            self._filters += 1
            queue = topic.filtered[wanted] = WaitQueue(topic, wanted, None if topic.number is None else 0)
        self.idle.pop(queue, None)
        return queue

    def _end(self, queue: WaitQueue) -> None:
        """Remove an idle queue with a filter. Its messages stay available: the topic's queue without a filter has them,
        too."""
        assert queue.filter is not None
        del self.idle[queue], queue.topic.filtered[queue.filter]
        self._filters -= 1
        for window in queue.windows:
            self._windows.close(window)

    def _forget_name(self, topic: TopicTurn) -> None:
        if topic.number is None and not topic.any.waiters and not topic.filtered:
            self._windows.by_name.pop(topic.name, None)
