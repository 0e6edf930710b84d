"""The consumers that asked for messages of which topics, as this leader has seen them."""

from collections import OrderedDict

#: Limits of remembered pairs (consumer, topics), and of topic names in all pairs. The oldest pairs are forgotten first.
_MOST_ASKERS, _MOST_ASKED = 1_024, 1 << 16


class Askers:
    """Consumers and their topics, as this leader has seen them since it took over."""

    def __init__(self) -> None:
        #: (consumer, topics) → cluster time of the last receive, the oldest first.
        self._asked: OrderedDict[tuple[str, tuple[str, ...]], int] = OrderedDict()
        self._names = 0

    def note(self, consumer: str, topics: tuple[str, ...], now_ms: int) -> None:
        who = consumer, topics
        if who not in self._asked:
            self._names += len(topics)
        self._asked[who] = now_ms
        self._asked.move_to_end(who)
        while len(self._asked) > _MOST_ASKERS or (self._names > _MOST_ASKED and len(self._asked) > 1):
            (_, oldest), _ = self._asked.popitem(last=False)
            self._names -= len(oldest)

    def of(self, topic: str, most: int = 16) -> list[tuple[str, int]]:
        """(consumer, cluster time) of the latest receives for a topic, the latest first."""
        found: dict[str, int] = {}
        for (consumer, topics), asked_ms in reversed(self._asked.items()):
            if topic in topics and len(found) < most:
                found.setdefault(consumer, asked_ms)
        return list(found.items())
