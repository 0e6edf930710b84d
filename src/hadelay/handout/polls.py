"""Polls: receive requests that wait on the leader, with their tag filters and answers; and the consumers that asked."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.formats import INDEX
from hadelay.codec.meta import Filter
from hadelay.errors import HadelayError

U32 = NDArray[np.uint32]

#: Phases of a poll: it waits for messages; its grant is proposed, or its waiting time is over; it is answered.
WAITING, PROPOSED, DONE = 0, 1, 2
#: Limits of the remembered consumers: number of pairs (consumer, topics), and number of topic names in all pairs.
#: Beyond them, the oldest pairs are forgotten.
_MOST_ASKERS, _MOST_ASKED = 1_024, 1 << 16


class Delivery(NamedTuple):
    """Answer to a poll: the messages of a grant, or those messages of an earlier grant that are still leased. Each
    array has one value per message; after a timeout, all arrays are empty."""

    term: int
    seq: int
    positions: NDArray[np.uint16]  # position of each message in the grant, a part of its lease token
    hours: U32
    indexes: U32
    attempts: NDArray[np.uint16]
    rows: NDArray[np.void]  # INDEX rows of the messages: offset, size, first_id, deliver_at_ms, topic
    until_ms: NDArray[np.int64]
    redelivered: NDArray[np.bool_]
    now_ms: int  # cluster time of the answer

    @classmethod
    def empty(cls, now_ms: int) -> Delivery:
        u2, u4 = np.zeros(0, np.uint16), np.zeros(0, np.uint32)
        rows, times, no_flags = np.zeros(0, INDEX), np.zeros(0, np.int64), np.zeros(0, np.bool_)
        return cls(0, 0, u2, u4, u4, u2, rows, times, no_flags, now_ms)

    def only(self, some: NDArray[np.bool_]) -> Delivery:
        names = ("positions", "hours", "indexes", "attempts", "rows", "until_ms", "redelivered")
        return self._replace(**{name: getattr(self, name)[some] for name in names})


@dataclass(eq=False, slots=True)
class Poll:
    """A waiting receive. `done` is called exactly once unless the poll is cancelled: with a Delivery, which is empty
    when nothing came within wait_ms, or with an error."""

    consumer: str
    request_id: bytes  # idempotency id of the receive, b"" without one
    topics: tuple[str, ...]
    max: int
    lease_ms: int
    wait_ms: int
    done: Callable[[Delivery | None, HadelayError | None], None]
    #: Tag filter; None: every message matches.
    filter: Filter | None = None
    #: Whether the order of `topics` is a priority: messages of earlier topics go first. Otherwise topics take turns.
    listed: bool = False
    #: Limit of messages of one message group in an answer, for topics that hand out one message of a group at a time
    #: (ledger/groups/runs.py).
    group_max: int = 1
    #: Name of the node that relayed the receive to this leader; "": the consumer asked the leader itself.
    node: str = ""
    #: Set by the leader: phase (WAITING, PROPOSED or DONE), and the monotonic time at which the poll times out.
    phase: int = WAITING
    deadline: float = 0.0


class Askers:
    """Consumers, and the topics from which they asked for messages, since this leader took over."""

    def __init__(self) -> None:
        #: (consumer, topics) → cluster time of the last receive, and node that relayed it; the oldest first.
        self._asked: OrderedDict[tuple[str, tuple[str, ...]], tuple[int, str]] = OrderedDict()
        self._names = 0
        #: Cluster time, in Unix ms, of the latest receive that was forgotten; 0 if none was forgotten.
        self.forgotten_ms = 0

    def note(self, poll: Poll, now_ms: int) -> None:
        who = poll.consumer, poll.topics
        if who not in self._asked:
            self._names += len(poll.topics)
        self._asked[who] = now_ms, poll.node
        self._asked.move_to_end(who)
        while len(self._asked) > _MOST_ASKERS or (self._names > _MOST_ASKED and len(self._asked) > 1):
            (_, oldest), (self.forgotten_ms, _) = self._asked.popitem(last=False)
            self._names -= len(oldest)

    def latest(self) -> dict[str, int]:
        """Topic → cluster time of the last receive for it."""
        return {topic: at_ms for (_, topics), (at_ms, _) in self._asked.items() for topic in topics}

    def all(self) -> dict[str, tuple[int, str, list[str]]]:
        """Consumer → (cluster time, node that relayed it or "") of its latest receive, and all topics that it asked
        for; the latest first."""
        found: dict[str, tuple[int, str, list[str]]] = {}
        for (consumer, topics), asked in reversed(self._asked.items()):
            found.setdefault(consumer, (*asked, []))[2].extend(topics)
        return found

    def of(self, topic: str, most: int = 16) -> dict[str, tuple[int, str]]:
        """Consumer → (cluster time, node that relayed the receive or "") of the latest receives for a topic, the latest
        first."""
        found: dict[str, tuple[int, str]] = {}
        for (consumer, topics), asked in reversed(self._asked.items()):
            if topic in topics and len(found) < most:
                found.setdefault(consumer, asked)
        return found
