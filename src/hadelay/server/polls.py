"""The polls a leader owes an answer: how long they wait, and which of them stand for the same request.

10,000 may wait. What happens to one of them costs nothing for the others: one heap of deadlines, one table of
requests, and no timer per poll.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from hadelay.errors import Conflict, HadelayError
from hadelay.handout.dispatcher import DONE, PROPOSED, WAITING, Delivery, Poll
from hadelay.handout.ready import Ready

#: Deadlines of polls that were answered are dropped when they are this many more than those that wait.
_STALE = 1_024


class Polls:
    """One per term."""

    def __init__(self, ready: Ready, monotonic: Callable[[], float]) -> None:
        self.ready, self._monotonic = ready, monotonic
        #: By {consumer, request_id}, while they wait or their grant is on its way.
        self._requests: dict[tuple[str, bytes], Poll] = {}
        #: A poll whose grant is on its way → the poll that took its place.
        self._successors: dict[Poll, Poll] = {}
        self._deadlines: list[tuple[float, int, Poll]] = []
        self._count = 0

    def wait(self, poll: Poll, *, first: bool = False) -> None:
        """It waits for messages; `first`: its turn had come already."""
        poll.phase = WAITING
        if first:
            self.ready.wait_again(poll)
        else:
            self.ready.wait(poll)
        self._count += 1
        heapq.heappush(self._deadlines, (poll.deadline, self._count, poll))
        if len(self._deadlines) > 2 * self.ready.waiting + _STALE:
            self._deadlines = [item for item in self._deadlines if item[2].phase == WAITING]
            heapq.heapify(self._deadlines)

    def take_late(self) -> list[Poll]:
        """Those that have waited long enough; they wait no more."""
        mono = self._monotonic()
        late: list[Poll] = []
        deadlines = self._deadlines
        while deadlines and (deadlines[0][0] <= mono or deadlines[0][2].phase != WAITING):
            poll = heapq.heappop(deadlines)[2]
            if poll.phase == WAITING:
                self.ready.unwait(poll)
                poll.phase = PROPOSED
                late.append(poll)
        return late

    def next_deadline(self) -> float | None:
        return self._deadlines[0][0] if self._deadlines else None

    def same_request(self, poll: Poll) -> Poll | None:
        """The one whose place `replace` would take."""
        before = self._requests.get((poll.consumer, poll.request_id))
        return before if before is not None and before.phase != DONE else None

    def replace(self, poll: Poll) -> bool:
        """Idempotent receive: the poll takes the place of one with the same request. True if that one's grant is on
        its way; the poll gets what becomes of it."""
        before = self.same_request(poll)
        self._requests[poll.consumer, poll.request_id] = poll
        if before is None:
            return False
        on_its_way = before.phase == PROPOSED
        if on_its_way:
            self.succeed(before, poll)
        else:
            self.ready.unwait(before)
        before.phase = DONE
        before.done(None, Conflict("another receive with the same consumer and request_id took this one's place"))
        return on_its_way

    def succeed(self, before: Poll, poll: Poll) -> None:
        """What becomes of `before` is for `poll`."""
        self._successors[before] = poll
        poll.phase = PROPOSED

    def has_successor(self, poll: Poll) -> bool:
        return poll in self._successors

    def current(self, poll: Poll) -> Poll:
        """The poll, or the one that took its place while its grant was on its way."""
        while poll in self._successors:
            poll = self._successors.pop(poll)
        return poll

    def cancel(self, poll: Poll) -> None:
        if poll.phase == WAITING:
            self.ready.unwait(poll)
        self._close(poll)

    def answer(self, poll: Poll, delivery: Delivery | None, error: HadelayError | None = None) -> None:
        if poll.phase != DONE:
            self._close(poll)
            poll.done(delivery, error)

    def _close(self, poll: Poll) -> None:
        poll.phase = DONE
        key = (poll.consumer, poll.request_id)
        if self._requests.get(key) is poll:
            del self._requests[key]
