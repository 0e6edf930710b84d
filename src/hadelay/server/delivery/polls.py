"""The polls a leader owes an answer, and which of them stand for the same request."""

from __future__ import annotations

from hadelay.errors import Conflict, HadelayError
from hadelay.handout.polls import DONE, PROPOSED, WAITING, Delivery, Poll
from hadelay.handout.waiting import Waiting


class Polls:
    """One per term."""

    def __init__(self, waiting: Waiting) -> None:
        self.waiting = waiting
        #: By {consumer, request_id}, while they wait or their grant is on its way.
        self._requests: dict[tuple[str, bytes], Poll] = {}
        #: A poll whose grant is on its way → the poll that took its place.
        self._successors: dict[Poll, Poll] = {}

    def wait(self, poll: Poll, *, first: bool = False) -> None:
        """The poll waits for messages; `first`: its turn had come already."""
        poll.phase = WAITING
        self.waiting.wait(poll, first=first)

    def take_late(self, mono: float) -> list[Poll]:
        """Polls that have waited long enough; they wait no more."""
        late = self.waiting.deadlines.due(mono)
        for poll in late:
            self.waiting.unwait(poll)
            poll.phase = PROPOSED
        return late

    def same_request(self, poll: Poll) -> Poll | None:
        """The poll whose place `replace` would take."""
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
            self.waiting.unwait(before)
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
            self.waiting.unwait(poll)
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
