"""The consumers that asked for messages of which topics, as this leader has seen them."""

from collections import OrderedDict

from hadelay.handout.polls import Poll

#: Limits of remembered pairs (consumer, topics), and of topic names in all pairs. The oldest pairs are forgotten first.
_MOST_ASKERS, _MOST_ASKED = 1_024, 1 << 16


class Askers:
    """Consumers and their topics, as this leader has seen them since it took over."""

    def __init__(self) -> None:
        #: (consumer, topics) → cluster time of the last receive, and node that relayed it; the oldest first.
        self._asked: OrderedDict[tuple[str, tuple[str, ...]], tuple[int, str]] = OrderedDict()
        self._names = 0

    def note(self, poll: Poll, now_ms: int) -> None:
        who = poll.consumer, poll.topics
        if who not in self._asked:
            self._names += len(poll.topics)
        self._asked[who] = now_ms, poll.node
        self._asked.move_to_end(who)
        while len(self._asked) > _MOST_ASKERS or (self._names > _MOST_ASKED and len(self._asked) > 1):
            (_, oldest), _ = self._asked.popitem(last=False)
            self._names -= len(oldest)

    def of(self, topic: str, most: int = 16) -> dict[str, tuple[int, str]]:
        """Consumer → (cluster time, node that relayed the receive or "") of the latest receives for a topic, the latest
        first."""
        found: dict[str, tuple[int, str]] = {}
        for (consumer, topics), asked in reversed(self._asked.items()):
            if topic in topics and len(found) < most:
                found.setdefault(consumer, asked)
        return found
