"""What parts of a node that do not apply may see of the ledger. Answers hold until the next apply."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

import numpy as np

from hadelay.codec.formats import SECONDS_PER_HOUR, Mask, Rows
from hadelay.ledger.grants import HeldGrant
from hadelay.ledger.hourstate import bitmap, indexes_of
from hadelay.ledger.lookup import expired
from hadelay.ledger.ports import HourReader
from hadelay.ledger.state import Ledger
from hadelay.ledger.topics import Topic
from hadelay.model import DEAD_HOURS, HOUR_MS

#: Below this many rows a loop over the bitmaps is quicker than a new bitmap.
_FEW = 64


class HandoutView:
    """What the leader's hand-out may ask."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.store: HourReader = ledger.store

    @property
    def cursor(self) -> tuple[int, int, int]:
        return self._ledger.cursor

    def held_grants(self) -> Iterable[HeldGrant]:
        return self._ledger.grants.values()

    def topic(self, number: int) -> Topic:
        return self._ledger.topics[number]

    def topic_number(self, name: str) -> int | None:
        """Number of the topic of that name, deleted or not."""
        topic = self._ledger.known_topic(name)
        return None if topic is None else topic.number

    def alive(self, rows: Rows) -> Mask:
        """Which of these INDEX rows belong to topics that were neither deleted nor purged since they were filed."""
        return self._ledger.topics.alive(rows)

    def owed(self, hour: int, rows: Rows) -> Mask:
        """Which of these INDEX rows are neither settled, leased, cancelled with their topic, nor past their TTL."""
        owed = self._ledger.topics.owed(rows) & ~expired(self._ledger, rows, self._ledger.now_ms)
        hour_state = self._ledger.hours.get(hour)
        if hour_state is None:
            return owed if self.store.count(hour) else np.zeros(len(rows), np.bool_)
        settled, leased = hour_state.settled, hour_state.leased
        indexes = rows["index"]
        if len(indexes) < _FEW:
            taken = [i in settled or i in leased for i in indexes.tolist()]
            return owed & ~np.array(taken, np.bool_) if any(taken) else owed
        bits = bitmap(indexes)
        gone = (bits & settled) | (bits & leased)
        return owed & ~np.isin(indexes, indexes_of(gone)) if gone else owed

    def next_second(self, second: int, now_ms: int) -> int | None:
        """The first second from this one on that has something open, of hours that have begun."""
        hour, slot = divmod(second, SECONDS_PER_HOUR)
        found = self._open_second(hour, slot)
        if found is not None:
            return found
        later = [h for h, s in self._ledger.hours.items() if h > hour and s.open_seconds is not None]
        if now_ms // HOUR_MS > self._ledger.now_hour:
            # Hours that began while nothing was committed: apply has not counted them yet.
            hours = self.store.hours()
            first = max(hour, self._ledger.now_hour) + 1
            later += hours[bisect_left(hours, first) : bisect_right(hours, min(now_ms // HOUR_MS, DEAD_HOURS - 1))]
        return next((at for h in sorted(set(later)) if (at := self._open_second(h, 0)) is not None), None)

    def _open_second(self, hour: int, slot: int) -> int | None:
        hour_state = self._ledger.hours.get(hour)
        counts = hour_state.open_seconds if hour_state is not None else None
        if counts is None:
            if hour <= self._ledger.now_hour or not self.store.count(hour):
                return None
            counts = self.store.heads(hour).count
        used = counts[slot:] > 0
        at = int(used.argmax())
        return hour * SECONDS_PER_HOUR + slot + at if used[at] else None


class MaintenanceView:
    """What the maintenance jobs may ask: is there work, and where. Never per message."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def hours(self) -> list[int]:
        """Hours that have entries, in ascending order; hours of dead letters come last."""
        return self._ledger.store.hours()

    def open_entries(self, hour: int) -> int:
        return self._ledger.open_entries(hour)

    def sums(self, hour: int) -> tuple[int, int, int, tuple[int, int, int]] | None:
        return self._ledger.store.sums(hour)

    def kept_until_ms(self, hour: int, default_ms: int) -> int:
        """When the longest retention of the topics ends whose messages were settled in this hour. default_ms: the
        retention of topics without a setting."""
        ledger, last_ms, kept_ms = self._ledger, (hour + 1) * HOUR_MS, 0
        if (hour_state := ledger.hours.get(hour)) is not None:
            last_ms = max(last_ms, hour_state.settled_at_ms)
            configs = (ledger.topics[number].config for number in hour_state.topics)
            kept_ms = max((config.get("retention_ms", default_ms) for config in configs), default=0)
        return last_ms + kept_ms

    def can_roll_forward(self, hour: int) -> bool:
        """Whether CARRY has not yet looked at all entries. Entries still open besides those are leased."""
        hour_state = self._ledger.hours.get(hour)
        return hour_state is None or hour_state.carried < self._ledger.store.count(hour)

    def must_sweep(self) -> bool:
        return self._ledger.topics.to_sweep()

    def topics_with_work(self) -> list[Topic]:
        """Topics that a SWEEP or a redrive has to go on with, by number."""
        topics = self._ledger.topics
        return [topics[number] for number in sorted(topics.with_work)]
