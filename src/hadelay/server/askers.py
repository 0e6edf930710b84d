"""Consumers and the topics that they ask for, as this leader has seen them since it took over."""

from __future__ import annotations

from collections import OrderedDict

#: Limits of pairs (consumer, topics), and of topic names in all pairs. The oldest pairs are forgotten first.
_MOST, _MOST_NAMES = 1_024, 1 << 16


class Askers:
    """In memory only; a receive costs one look-up, however many topics it names."""

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
        while len(self._asked) > _MOST or (self._names > _MOST_NAMES and len(self._asked) > 1):
            (_, oldest), _ = self._asked.popitem(last=False)
            self._names -= len(oldest)

    def of(self, topic: str, most: int = 16) -> list[tuple[str, int]]:
        """(consumer, cluster time) of the latest receives for a topic, the latest first."""
        found: dict[str, int] = {}
        for (consumer, topics), asked_ms in reversed(self._asked.items()):
            if topic in topics and len(found) < most:
                found.setdefault(consumer, asked_ms)
        return list(found.items())
