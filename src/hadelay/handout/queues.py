"""Hand-outs of one topic: queues of waiting polls, their windows of ready messages, and the topic's turn.

A topic has a queue of polls that take any message, and one for each filter that polls ask for (handout/polls.py).
Each queue has a window of ready messages. A topic with a catch-up rate has a second window per queue, for *overdue*
messages: those that fell due before `overdue_before_ms`. Messages on time never wait behind the past
(ledger/limits/flow.py).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.meta import Filter
from hadelay.handout.grouprate import GroupRate
from hadelay.handout.polls import Poll
from hadelay.ledger.limits.flow import HandoutLimits


class Window:
    """Ready messages that one queue may take, as entry numbers: hour << 32 | index."""

    __slots__ = ("closed", "entries", "missed_since_scan", "overdue", "queue", "rescan_from", "scan_ahead", "scanning")

    def __init__(self, queue: WaitQueue, *, overdue: bool, rescan_from: int | None = None) -> None:
        self.queue, self.overdue = queue, overdue
        self.entries: deque[int] = deque()
        #: Low-water mark: earliest second (since 1970) with a message that did not fit into the window; or None.
        self.rescan_from = rescan_from
        #: Earliest second with a message that did not fit into the window since its running scan began; or None.
        self.missed_since_scan: int | None = None
        self.scanning = False
        #: Minimum number of entries to check for the next offer. It doubles each time that no checked entry needs
        #: delivery, and is 0 otherwise.
        self.scan_ahead = 0
        #: True once the window is no longer used: entries of failed offers do not return to this window.
        self.closed = False

    @property
    def floor(self) -> int:
        """Earliest second (since 1970) whose messages this window takes; 0 for a window of overdue messages."""
        return 0 if self.overdue else self.queue.topic.overdue_before_ms // 1000

    def leave_out(self, second: int) -> None:
        """Note that a message of `second` found no room in the window."""
        self.rescan_from = second if self.rescan_from is None else min(self.rescan_from, second)
        self.missed_since_scan = second if self.missed_since_scan is None else min(self.missed_since_scan, second)

    def pick(self, rows: NDArray[np.void]) -> NDArray[np.bool_]:
        """Mask of the INDEX rows that this window accepts. Only tag masks are compared, so the tags of some rows may
        not match."""
        topic, wanted = self.queue.topic, self.queue.filter
        picked = np.ones(len(rows), np.bool_) if wanted is None else wanted.may(rows["tag_mask"])
        if topic.overdue_before_ms:
            picked &= (rows["deliver_at_ms"] < topic.overdue_before_ms) == self.overdue
        return picked


class WaitQueue:
    """Polls of one topic that ask for the same messages, and the windows that have these messages."""

    __slots__ = ("filter", "in_turn", "now", "topic", "waiters", "windows")

    def __init__(self, topic: TopicTurn, wanted: Filter | None, rescan_from: int | None = None) -> None:
        """rescan_from: second from which on a scan has to fill the new windows (0, because the topic may have ready
        messages); None: no scan is needed."""
        self.topic, self.filter = topic, wanted
        self.waiters: OrderedDict[Poll, None] = OrderedDict()
        self.now = Window(self, overdue=False, rescan_from=rescan_from)
        self.windows: tuple[Window, ...] = (self.now,)
        if topic.overdue_before_ms:
            self.windows = (self.now, Window(self, overdue=True, rescan_from=rescan_from))
        self.in_turn = False

    @property
    def can_go(self) -> bool:
        """Whether the queue has polls, and messages that may fit them."""
        return bool(self.waiters and (self.now.entries or self.windows[-1].entries))


class TopicTurn:
    """One topic: its queues, its limits and its share of the hand-outs."""

    __slots__ = (
        "active", "any", "cause", "deficit", "filtered", "group_rate", "in_flight", "limits", "name", "number",
        "overdue_before_ms", "served", "turns",
    )  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        #: Number of the topic; None until the topic exists.
        self.number: int | None = None
        #: Messages due before this time count as overdue; 0 if the topic has no catch-up rate.
        self.overdue_before_ms = 0
        self.limits: HandoutLimits | None = None
        self.group_rate: GroupRate | None = None
        self.any = WaitQueue(self, None)
        self.filtered: dict[Filter, WaitQueue] = {}
        #: Queues of the topic that have both polls and messages; they take turns.
        self.turns: deque[WaitQueue] = deque()
        self.active = False
        self.deficit = 0
        #: Serial number of the topic's latest hand-out, counted over all topics: a lower number is longer ago.
        self.served = 0
        #: Number of the topic's messages that were offered, and neither granted nor refused yet.
        self.in_flight = 0
        #: Name of the limit that stops hand-outs of the topic, "" without one.
        self.cause = ""

    @property
    def plain(self) -> bool:
        """Whether one window takes all messages of the topic, as in most topics: the topic has neither filters nor a
        catch-up rate."""
        return not self.filtered and not self.overdue_before_ms

    def queues(self) -> Iterator[WaitQueue]:
        yield self.any
        yield from self.filtered.values()

    def windows(self) -> list[Window]:
        return [window for queue in self.queues() for window in queue.windows]


def entries_of(hour: int, indexes: NDArray[np.uint32]) -> list[int]:
    entries: Any = indexes.astype(np.int64) + (hour << 32)
    return entries.tolist()  # type: ignore[no-any-return]


def split(hour: int, indexes: NDArray[np.uint32], topics: NDArray[np.uint32]) -> Iterator[tuple[int, list[int]]]:
    """Group entries of an hour by topic: yields (topic number, entries), the entries in their given order."""
    first = int(topics[0])
    if len(topics) == 1 or (topics == first).all():
        yield first, entries_of(hour, indexes)
        return
    order = topics.argsort(kind="stable")
    ordered = topics[order]
    edges = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    for part in np.split(order, edges):
        yield int(topics[part[0]]), entries_of(hour, indexes[part])
