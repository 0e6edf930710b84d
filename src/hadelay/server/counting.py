"""How many messages fall due when: from the heads of the hours, without reading a message (S2's 3600 seconds)."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hadelay.core.hourstate import indexes_of
from hadelay.core.ports import TOPIC
from hadelay.model import DEAD_HOURS, HOUR_MS

if TYPE_CHECKING:
    from hadelay.server.node import Node


def due_counts(node: Node, topic: str | None, from_ms: int, to_ms: int, step_ms: int) -> list[tuple[int, int]]:
    """(start of bucket, open messages) of the non-empty buckets of [from_ms, to_ms). NotFound is not raised here: a
    topic without messages has no buckets."""
    buckets: Counter[int] = Counter()
    unit_ms = 1_000 if topic is None else 60_000
    number = None
    if topic is not None:
        found = node.state.topic(topic)
        if found is None:
            return []
        number = node.state.names.number(TOPIC, topic)
    for hour in node.storage.hours.hours():
        if hour >= DEAD_HOURS:
            break
        start = hour * HOUR_MS
        if start + HOUR_MS <= from_ms or start >= to_ms or not node.state.open_entries(hour):
            continue
        counts = _open_seconds(node, hour) if number is None else _open_minutes(node, hour, number)
        for place in np.flatnonzero(counts).tolist():
            at = start + place * unit_ms
            if from_ms <= at < to_ms:
                buckets[from_ms + (at - from_ms) // step_ms * step_ms] += int(counts[place])
    return sorted(buckets.items())


def _open_seconds(node: Node, hour: int) -> NDArray[np.int64]:
    hour_state = node.state.hours.get(hour)
    if hour_state is not None and hour_state.open_seconds is not None:
        return hour_state.open_seconds.astype(np.int64)
    counts = node.storage.hours.heads(hour).count.astype(np.int64)
    if hour_state is not None and hour_state.settled:
        rows = node.storage.hours.entries(hour, indexes_of(hour_state.settled))
        counts -= np.bincount(rows["second"], minlength=len(counts))
    return counts


def _open_minutes(node: Node, hour: int, topic: int) -> NDArray[np.int64]:
    counts = np.zeros(60, np.int64)
    rows = node.storage.hours.topic_minutes(hour)
    rows = rows[rows["topic"] == topic]
    counts[rows["minute"]] = rows["count"]
    hour_state = node.state.hours.get(hour)
    if hour_state is not None and hour_state.settled:
        settled = node.storage.hours.entries(hour, indexes_of(hour_state.settled))
        settled = settled[settled["topic"] == topic]
        counts -= np.bincount(settled["second"] // 60, minlength=60)
    return counts
