"""Polls that wait, what they are offered, and the lines and windows in which the two meet; handout/ready.py brings them
together."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hadelay.errors import HadelayError
from hadelay.handout.filters import Filter
from hadelay.ledger.flow import Flow
from hadelay.model import NEVER_MS

U32 = NDArray[np.uint32]

WAITING, PROPOSED, DONE = 0, 1, 2


class Delivery(NamedTuple):
    """What a consumer gets: a grant, or what is still held of it. Arrays run in parallel; all empty at a timeout."""

    term: int
    seq: int
    positions: NDArray[np.uint16]  # of each message in the grant: part of its lease token
    hours: U32
    indexes: U32
    attempts: NDArray[np.uint16]  # 1 for the first hand-out
    rows: NDArray[np.void]  # INDEX rows: offset, size, first_id, deliver_at_ms, topic
    until_ms: NDArray[np.int64]
    redelivered: NDArray[np.bool_]
    now_ms: int  # cluster time of the answer


@dataclass(eq=False, slots=True)
class Poll:
    """A waiting receive. `done` is called exactly once unless the poll is cancelled: with a Delivery, which is empty
    when nothing came within wait_ms, or with an error."""

    consumer: str
    request_id: bytes  # b"" for none
    topics: tuple[str, ...]
    max: int
    lease_ms: int
    wait_ms: int
    done: Callable[[Delivery | None, HadelayError | None], None]
    #: None: any message.
    filter: Filter | None = None
    #: The dispatcher's own: WAITING, PROPOSED or DONE, and the monotonic time at which it has waited long enough.
    phase: int = WAITING
    deadline: float = 0.0
    #: Where it waits, one per topic.
    lines: list[Line] = field(default_factory=list)


class Part(NamedTuple):
    """What an offer took from one window."""

    window: Window
    places: list[int]
    rows: NDArray[np.void]


@dataclass(eq=False, slots=True)
class Offer:
    """Messages taken out of their windows for one poll: the grant to propose."""

    poll: Poll
    parts: list[Part]
    places: list[int]
    hours: U32
    indexes: U32
    rows: NDArray[np.void]
    seq: int = 0
    #: Which round of proposals it belongs to.
    round: int = 0


class Window:
    """Places of messages that one line may take: all of them, or the overdue ones, or the others."""

    __slots__ = ("barren", "closed", "line", "mark", "missed", "overdue", "places", "scanning")

    def __init__(self, line: Line, *, overdue: bool, mark: int | None = None) -> None:
        self.line, self.overdue = line, overdue
        self.places: deque[int] = deque()
        #: Low-water mark: the earliest second of which something was left out of the window.
        self.mark = mark
        #: The same, for what was left out since the scan that is going on has begun.
        self.missed: int | None = None
        self.scanning = False
        #: How many places to look at next time, beyond those that are wanted: the last ones were all gone.
        self.barren = 0
        #: It is given up, and gets nothing back.
        self.closed = False

    def __repr__(self) -> str:
        return f"<Window of {self.line} ready={len(self.places)} mark={self.mark}>"

    @property
    def floor(self) -> int:
        """The first second that can have something for it."""
        return 0 if self.overdue else self.line.topic.split_ms // 1000

    def leave_out(self, second: int) -> None:
        """Something of `second` found no room."""
        self.mark = second if self.mark is None else min(self.mark, second)
        self.missed = second if self.missed is None else min(self.missed, second)

    def pick(self, rows: NDArray[np.void]) -> NDArray[np.bool_]:
        """Which of these INDEX rows of its topic belong here, by the index alone."""
        topic, wanted = self.line.topic, self.line.filter
        picked = np.ones(len(rows), np.bool_) if wanted is None else wanted.may(rows["tag_mask"])
        if topic.split_ms:
            picked &= (rows["deliver_at_ms"] < topic.split_ms) == self.overdue
        return picked


class Line:
    """The polls of one topic that ask for the same, and what is there for them."""

    __slots__ = ("filter", "now", "past", "queued", "topic", "waiters", "windows")

    def __init__(self, topic: TopicQueue, wanted: Filter | None, mark: int | None = None) -> None:
        """mark: 0 when the topic may owe something already."""
        self.topic, self.filter = topic, wanted
        self.waiters: OrderedDict[Poll, None] = OrderedDict()
        self.now = Window(self, overdue=False, mark=mark)
        #: Only if the topic has a catch-up rate.
        self.past: Window | None = None
        self.windows: tuple[Window, ...] = (self.now,)
        if topic.split_ms:
            self.keep_apart(mark)
        #: It stands in `topic.turns`.
        self.queued = False

    def __repr__(self) -> str:
        return f"<Line {self.topic.name} {self.filter} waiting={len(self.waiters)}>"

    def keep_apart(self, mark: int | None) -> None:
        """What is overdue, from what is on time."""
        self.past = Window(self, overdue=True, mark=mark)
        self.windows = (self.now, self.past)

    def keep_together(self) -> None:
        self.past = None
        self.windows = (self.now,)
        self.now.leave_out(0)


class TopicQueue:
    """One topic: its lines, its limits and its share."""

    __slots__ = (
        "active", "again_ms", "any", "cause", "deficit", "filtered", "flow", "flying", "name", "number", "served",
        "split_ms", "turns",
    )  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        #: None until the topic exists.
        self.number: int | None = None
        #: What fell due before this is overdue; 0 without a catch-up rate.
        self.split_ms = 0
        self.flow: Flow | None = None
        self.any = Line(self, None)
        self.filtered: dict[Filter, Line] = {}
        #: Lines that have both polls and messages.
        self.turns: deque[Line] = deque()
        self.active = False
        self.deficit = 0
        #: Which of all takes was its last.
        self.served = 0
        #: Offered, and neither granted nor refused yet.
        self.flying = 0
        #: Which limit stops it, "" if none does; and when to look again.
        self.cause = ""
        self.again_ms = NEVER_MS

    def __repr__(self) -> str:
        waiting = sum(len(line.waiters) for line in self.lines())
        return f"<TopicQueue {self.name} ready={len(self.any.now.places)} waiting={waiting} {self.cause}>"

    @property
    def plain(self) -> bool:
        """One window takes everything, as in most topics."""
        return not self.filtered and not self.split_ms

    def lines(self) -> Iterator[Line]:
        yield self.any
        yield from self.filtered.values()

    def windows(self) -> list[Window]:
        return [window for line in self.lines() for window in line.windows]
