"""Turns of topics: shares hand-outs fairly between the topics, and applies the limits of each topic.

Topics take turns (deficit round robin): a topic that hands out large messages, or many, waits until the others handed
out as much. The queues of a topic take turns, too. The cost does not depend on the number of waiting polls.
"""

from collections import Counter, deque
from collections.abc import Callable

from hadelay.handout.deadlines import Deadlines
from hadelay.handout.queues import TopicTurn, WaitQueue, Window
from hadelay.ledger.limits.flow import UNLIMITED, Allowance
from hadelay.ledger.topics.topics import TopicBook
from hadelay.model import NEVER_MS

#: Number of bytes that a topic may hand out per turn.
_QUANTUM = 64 * 1024
#: Number of bytes that each message costs its topic's turn, beyond the message's own size.
_MESSAGE_COST = 256


class Turns:
    def __init__(self, topics: TopicBook) -> None:
        #: Cluster time in ms of the last `tick`; messages due later are not ready yet.
        self.now_ms = 0
        #: Cluster time in ms from which on this leader knows all hand-outs, because it made them.
        self.began_ms = 0
        #: Name of a limit → number of times that the limit stopped a topic that had messages for a poll.
        self.throttled: Counter[str] = Counter()
        self._topics = topics
        self._ring: deque[TopicTurn] = deque()
        #: Counter over all topics, raised each time that a topic hands out messages; see TopicTurn.served.
        self._served = 0
        #: Topics that wait for tokens of their rate limits.
        self._refills: Deadlines[TopicTurn] = Deadlines()
        #: Topics with messages that wait until the rate limit of their message group allows more (handout/rests.py).
        self.rests: Deadlines[TopicTurn] = Deadlines()
        #: Topics that have reached their concurrency, the limit of leased messages.
        self._full: dict[TopicTurn, None] = {}

    def tick(self, now_ms: int) -> None:
        self.now_ms = now_ms
        for topic in self._refills.due(now_ms):
            self.go_on(topic)

    def next_ms(self, ahead_ms: int) -> int:
        """Time in ms at which the next topic or message group that waits for tokens of its rate limit gets them;
        NEVER_MS if none waits. ahead_ms: `now_ms` minus cluster time; tokens of groups are counted in cluster time."""
        at_ms, group_ms = self._refills.next(), self.rests.next()
        at_ms = NEVER_MS if at_ms is None else at_ms
        return int(at_ms if group_ms is None else min(at_ms, group_ms + ahead_ms))

    def activate(self, queue: WaitQueue) -> None:
        """Let the queue take turns if it has polls and messages."""
        if not queue.can_go:
            return
        topic = queue.topic
        if not queue.in_turn:
            queue.in_turn = True
            topic.turns.append(queue)
        if not topic.active:
            topic.active = True
            self._ring.append(topic)

    def go_on(self, topic: TopicTurn) -> None:
        """Let a topic take turns again: one of its limits may allow more now."""
        topic.cause = ""
        self._refills.discard(topic)
        for queue in topic.queues():
            self.activate(queue)

    def leases_ended(self) -> bool:
        """Resume topics that were stopped by their concurrency, because leases or offers have ended. Returns whether
        any was resumed."""
        full, self._full = self._full, {}
        for topic in full:
            self.go_on(topic)
        return bool(full)

    def serve(self, room: int, offer: Callable[[WaitQueue, int], int | None]) -> None:
        """Let topics take turns until no message is left or `room` messages are handed out. offer(queue, room) serves
        the queue's first poll and returns the number of messages; None: the topic's turn has to wait for the next
        call."""
        ring, later = self._ring, deque[TopicTurn]()
        while ring and room > 0:
            topic = ring[0]
            topic.deficit += _QUANTUM
            while topic.deficit > 0 and room > 0:
                if (queue := self._next_queue(topic)) is None:
                    topic.active, topic.deficit = False, 0
                    ring.popleft()
                    break
                if (made := offer(queue, room)) is None:
                    topic.deficit -= _QUANTUM
                    later.append(ring.popleft())
                    break
                room -= made
            else:
                ring.rotate(-1)
        later.rotate(-1)  # the first topic in `later` used up the limit for which the others wait: it goes last
        ring.extend(later)

    def _next_queue(self, topic: TopicTurn) -> WaitQueue | None:
        """The topic's next queue that has a poll and messages that the limits allow; None without one."""
        stopped: Allowance | None = None
        for _ in range(len(topic.turns)):
            queue = topic.turns[0]
            if not queue.can_go:
                topic.turns.popleft().in_turn = False
                continue
            topic.turns.rotate(-1)
            for window in queue.windows:
                if window.entries:
                    allowance = self.allowed(window)
                    if allowance.most > 0:
                        return queue
                    if stopped is None or allowance.again_ms < stopped.again_ms:
                        stopped = allowance
        if stopped is not None:
            self._stop(topic, stopped)
        return None

    def _stop(self, topic: TopicTurn, allowance: Allowance) -> None:
        """Note the limit that keeps the topic from handing out messages for which a poll waits."""
        if topic.cause != allowance.cause:
            self.throttled[allowance.cause] += 1
        topic.cause = allowance.cause
        if allowance.cause == "concurrency":
            self._full[topic] = None
        if allowance.again_ms < NEVER_MS:
            self._refills.set(topic, allowance.again_ms)
        else:
            self._refills.discard(topic)

    def allowed(self, window: Window) -> Allowance:
        topic = window.queue.topic
        if topic.group_rate is not None and topic.group_rate.again_ms > self.now_ms:
            return Allowance(0, "group_rate", topic.group_rate.again_ms)
        if topic.limits is None or topic.number is None:
            return UNLIMITED
        return topic.limits.allowance(self._topics[topic.number].leased + topic.in_flight, window.overdue, self.now_ms)

    def charge(self, window: Window, count: int, size: int) -> None:
        """Charge `count` messages from the window to the limits and the turn of their topic. size: bytes of all these
        messages."""
        topic = window.queue.topic
        self._served += 1
        topic.served = self._served
        topic.deficit -= size + _MESSAGE_COST * count
        topic.in_flight += count
        if topic.limits is not None:
            topic.limits.take(count, window.overdue, self.now_ms)

    def refund(self, window: Window, count: int) -> None:
        """Give rate-limit tokens back for messages that `charge` counted and that were not granted."""
        if window.queue.topic.limits is not None:
            window.queue.topic.limits.take(-count, window.overdue, self.now_ms)
