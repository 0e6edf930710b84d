"""Grants, which lease messages to polls, in one term of a leader: offers being committed, waiting polls, answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.commands import encode_extend, encode_grant
from hadelay.codec.commandtypes import MAX_SEQ, Grant
from hadelay.codec.formats import INDEX
from hadelay.codec.leasetokens import LEASE
from hadelay.codec.results import LeaseOutcome, LeaseResult
from hadelay.errors import Conflict, DamagedFile, HadelayError, NoLeader, OutcomeUnknown, Overloaded
from hadelay.handout.deadlines import Deadlines
from hadelay.handout.dispatcher import Dispatcher
from hadelay.handout.matching import Offer
from hadelay.handout.polls import DONE, PROPOSED, WAITING, Delivery, Poll
from hadelay.ledger.hours.hourstate import rows_by_value
from hadelay.ledger.leases.grantrows import OpenGrant
from hadelay.ledger.ports import HourStore
from hadelay.ledger.topics.topics import by_topic
from hadelay.server.delivery.cursor import CursorKeeper
from hadelay.server.delivery.term import Term

#: Repairs damaged bytes of a file, then calls the given function with these bytes; with None if no node has good ones.
Repair = Callable[[DamagedFile, Callable[[bytes | None], None]], None]
#: Error of a receive that repeats the request id of another receive but names other topics. Answering it could show the
#: consumer messages that it may not see.
_OTHER_TOPICS = "an unfinished receive of this consumer with this request_id names other topics: use a new request_id"


class Unrecorded(NamedTuple):
    """Interval mode: a hand-out whose grant is not committed yet."""

    #: Monotonic time of the hand-out.
    mono: float
    #: Second of the dispatch cursor at the hand-out, since 1970: no message of the hand-out is due before it.
    second: int


class Grants:
    def __init__(
        self,
        term: Term,
        core: Dispatcher,
        turn_soon: Callable[[], None],
        on_delivery: Callable[[Poll, Delivery], None],
        repair: Repair | None = None,
    ) -> None:
        """turn_soon: schedules a turn of the delivery loop. on_delivery: called when a poll gets messages. repair:
        repairs a damaged index entry."""
        self.term, self.core, self.ledger = term, core, term.ledger
        self.turn_soon, self._on_delivery, self._repair = turn_soon, on_delivery, repair
        self.waiting = core.waiting
        #: Open polls by {consumer, request_id}: polls that wait, and polls whose grant is under way, even if the
        #: consumer has hung up meanwhile.
        self._requests: dict[tuple[str, bytes], Poll] = {}
        #: Poll whose grant is under way → its repetition by the consumer, which gets the answer instead.
        self._successors: dict[Poll, Poll] = {}
        #: Deliveries that were granted ahead of their due time, and wait for it.
        self.deferred = DeferredDeliveries(term, self._check_quiet)
        self.cursor = CursorKeeper(term, core, self.changed, self._unrecorded_from)
        #: Number of the last grant that was proposed in this term.
        self.seq = 0
        #: Offers (messages chosen for a poll) whose grants are proposed but not decided yet, by number of the grant.
        self.offers: dict[int, Offer] = {}
        #: Interval mode: hand-outs whose grants are not committed yet, by the number of the grant, the oldest first.
        self.unrecorded: dict[int, Unrecorded] = {}
        #: Polls for which messages are granted, but whose answers wait until the leases of these messages are renewed.
        self._renewing: set[Poll] = set()
        #: Whether a planned transfer of leadership has stopped hand-outs; and the callback for the moment when the
        #: dispatch state is committed.
        self.holding = False
        self._quiet: Callable[[], None] | None = None
        self._cursor_tried = False

    def stop(self) -> None:
        """Answer every open poll with an error, because the leader's term is over."""
        asked = [*(offer.poll for offer in self.offers.values()), *self._renewing, *self.deferred.polls()]
        unanswered = [poll for poll in map(self.current, asked) if poll.phase == PROPOSED]
        self.deferred.stop()
        unknown = OutcomeUnknown("the leader changed; ask again with the same request_id")
        for poll in unanswered:
            self.answer(poll, None, unknown)
        for poll in self.waiting.polls():
            self.answer(poll, None, NoLeader("the leader changed; nothing was handed out", retry_after_ms=100))
        if self._quiet is not None:
            self._quiet()

    def _unrecorded_from(self) -> int | None:
        """Second that the dispatch cursor had at the oldest hand-out whose grant is not committed; None if all grants
        are committed."""
        return next((one.second for one in self.unrecorded.values()), None)

    def changed(self) -> None:
        """Continue after an offer or a proposal of the cursor was decided: finish a planned transfer, and schedule a
        turn of the loop."""
        self._check_quiet()
        self.turn_soon()

    def wait(self, poll: Poll, *, first: bool = False) -> None:
        """Let the poll wait for messages. first: put the poll at the head of its queues."""
        poll.phase = WAITING
        self.waiting.wait(poll, first=first)

    def is_repeated(self, poll: Poll) -> bool:
        """Handle an idempotent receive: a poll with the {consumer, request_id} of an earlier poll replaces that poll,
        or gets the messages that were granted to it. True if the caller has nothing left to do for the poll."""
        before = self._requests.get((poll.consumer, poll.request_id))
        if before is not None and self._names_others(poll, set(before.topics)):
            return True
        self._requests[poll.consumer, poll.request_id] = poll
        if before is not None and self._replace(before, poll):
            return True
        for offer in map(self.offers.__getitem__, self.unrecorded):
            if (offer.poll.consumer, offer.poll.request_id) == (poll.consumer, poll.request_id):
                # The messages of the earlier poll are handed out already, and their grant is about to be committed: the
                # result of that grant decides the answer to `poll`.
                if not self._names_others(poll, set(offer.poll.topics)):
                    self._succeed(offer.poll, poll)
                    assert self.term.record is not None, "only interval mode has hand-outs that are not recorded"
                    self.term.record()
                return True
        earlier = self.ledger.grant_for(poll.consumer, poll.request_id)
        if earlier is not None:
            self.hand_out_again(poll, earlier.key)
        return earlier is not None

    def _replace(self, before: Poll, poll: Poll) -> bool:
        """Replace the open poll `before` by its repetition `poll`. True if a grant for `before` is under way, whose
        messages `poll` then gets."""
        if before.phase == WAITING:
            self.waiting.unwait(before)
        on_its_way = before.phase == PROPOSED or (before.phase == DONE and self._is_offered(before))
        if on_its_way:
            self._succeed(before, poll)
        if before.phase != DONE:
            before.phase = DONE
            before.done(None, Conflict("a newer receive with the same consumer and request_id replaced this receive"))
        return on_its_way

    def _succeed(self, before: Poll, poll: Poll) -> None:
        self._successors[before] = poll
        poll.phase = PROPOSED

    def current(self, poll: Poll) -> Poll:
        """Return the poll, or the repetition that replaced it while its grant was under way."""
        while poll in self._successors:
            poll = self._successors.pop(poll)
        return poll

    def _names_others(self, poll: Poll, topics: set[str]) -> bool:
        """Refuse the poll, and return True, if it does not name all of `topics`: a client that guesses a request id
        must not consume from topics that it did not name."""
        if topics <= set(poll.topics):
            return False
        self.answer(poll, None, Conflict(_OTHER_TOPICS))
        return True

    def wait_on(self, poll: Poll) -> None:
        """Continue a poll whose grant has failed: the poll waits again, at the head of its queues, or gets an empty
        answer if its waiting time is over."""
        if poll.phase == DONE:
            return
        if poll.deadline <= self.term.runtime.monotonic():
            self.answer(poll, Delivery.empty(self.term.now()))
            return
        self.wait(poll, first=True)
        self.turn_soon()

    def answer_late_polls(self, mono: float) -> float | None:
        """Give an empty answer to each poll that has timed out at the monotonic time `mono`. Returns the
        monotonic time of the next timeout; None if no poll waits."""
        deadlines = self.waiting.deadlines
        if (deadline := deadlines.next()) is not None and deadline <= mono:
            late = deadlines.due(mono)
            for poll in late:
                self.waiting.unwait(poll)
                poll.phase = PROPOSED
            for poll in late:
                self.answer(poll, Delivery.empty(self.term.now()))
            deadline = deadlines.next()
        return deadline

    def cancel(self, poll: Poll) -> None:
        """Withdraw a poll whose consumer has hung up. If its grant is being committed, keep the poll open: a repetition
        of the receive can then get the messages, which otherwise nobody gets until their lease ends."""
        if poll.phase == PROPOSED and self._is_offered(poll):
            poll.phase = DONE
            return
        if poll.phase == WAITING:
            self.waiting.unwait(poll)
        self._close(poll)

    def _is_offered(self, poll: Poll) -> bool:
        """Whether the poll waits for the outcome of an offer, or would wait if its consumer had not hung up."""
        return any(self._last(offer.poll) is poll for offer in self.offers.values())

    def _last(self, poll: Poll) -> Poll:
        """The poll that `current` would return; unlike `current`, keeps the notes of which poll replaced which."""
        while poll in self._successors:
            poll = self._successors[poll]
        return poll

    def decided(self, offer: Offer) -> Poll:
        """Returns the poll to answer, now that the outcome of the offer's grant is known."""
        poll = self.current(offer.poll)
        if poll.phase == DONE:
            self._close(poll)
        return poll

    def answer(self, poll: Poll, delivery: Delivery | None, error: HadelayError | None = None) -> None:
        if poll.phase != DONE:
            self._close(poll)
            poll.done(delivery, error)

    def _close(self, poll: Poll) -> None:
        poll.phase = DONE
        key = (poll.consumer, poll.request_id)
        if self._requests.get(key) is poll:
            del self._requests[key]

    def grant(self, offer: Offer, now_ms: int, *, handed: bool) -> bytes:
        """Encode the command for a new grant of the offer. handed: whether the messages are handed out already."""
        offer.seq = self._next_seq()
        self.offers[offer.seq] = offer
        ahead_ms = max(0, int(offer.rows["deliver_at_ms"].max()) - now_ms)
        poll = offer.poll
        return encode_grant(
            Grant(
                self.term.number,
                offer.seq,
                poll.lease_ms,
                poll.consumer,
                poll.request_id,
                self.term.config.node.name,
                offer.hours,
                offer.indexes,
                handed,
                ahead_ms,
            )
        )

    def _next_seq(self) -> int:
        """The next free number for a grant. After MAX_SEQ, which a busy leader reaches in some days, numbers start from
        1 again. A lease token of the earlier grant with the same number matches no message of the new grant, because an
        entry is leased only once."""
        while True:
            self.seq = self.seq % MAX_SEQ + 1
            if self.seq not in self.offers and (self.term.number, self.seq) not in self.ledger.grants:
                return self.seq

    def deliver(self, poll: Poll, delivery: Delivery) -> None:
        """Hand out the messages of a grant for the first time."""
        poll = self.current(poll)
        if poll.phase != DONE:  # DONE: the consumer has hung up, so the granted leases end unused
            self._on_delivery(poll, delivery)
        self._answer(poll, delivery)

    def _answer(self, poll: Poll, delivery: Delivery) -> None:
        """Answer the poll, or the repeated poll that replaced it while the delivery was deferred."""
        poll = self.current(poll)
        if (int(delivery.until_ms.min()) - delivery.now_ms) * 2 < poll.lease_ms:
            # The commit took long or this process slept, so too little of the lease is left, and another consumer may
            # have the messages by now: renew the whole lease before answering.
            self.hand_out_again(poll, (delivery.term, delivery.seq), delivery)
        else:
            self.answer(poll, delivery)
        self._check_quiet()

    def hand_out_again(self, poll: Poll, key: tuple[int, int], first: Delivery | None = None) -> None:
        """Answer a poll from an existing grant: extend its leases, which also proves that this node still leads, and
        hand out the messages that are still leased. first: delivery of this grant that no poll has got yet."""
        grant = self.ledger.grants.get(key)
        if grant is None or poll.phase == DONE:
            self.wait_on(poll)
            return
        leased = by_topic(grant.rows["topic"][grant.rows["open"] == 1])
        if self._names_others(poll, {self.ledger.topics[number].name for number, _ in leased}):
            return
        poll.phase = PROPOSED
        try:
            delivery, leases = _again(grant, self.ledger.store, first)
        except DamagedFile as damage:
            if self._repair is None:
                self.answer(poll, None, damage)
            else:
                self._renewing.add(poll)
                self._repair(damage, partial(self._repaired, poll, key, damage))
            return
        self._renewing.add(poll)
        # The lease begins when its messages may be handed out, as in a new grant.
        ahead_ms = max(0, int(delivery.rows["deliver_at_ms"].max()) - self.term.now())
        command = encode_extend(self.term.config.node.name, leases, poll.lease_ms + ahead_ms)
        self.term.propose(command, partial(self._renewed, poll, delivery))

    def _repaired(self, asked: Poll, key: tuple[int, int], damage: DamagedFile, data: bytes | None) -> None:
        if self.term.over:
            return  # `stop` has already answered this poll
        self._renewing.discard(asked)
        poll = self.current(asked)
        if data is None:
            self.answer(poll, None, damage)
        else:
            self.hand_out_again(poll, key)
        self._check_quiet()

    def _renewed(self, asked: Poll, delivery: Delivery, result: Any, error: HadelayError | None) -> None:
        self._renewing.discard(asked)
        poll, now = self.current(asked), self.term.now()
        if error is not None or not isinstance(result, LeaseResult):
            self.answer(poll, None, error or Overloaded("the lease could not be renewed", retry_after_ms=100))
        elif not (renewed := result.outcomes == LeaseOutcome.DONE).any():
            self.wait_on(poll)
        elif (result.until_ms - now) * 2 < poll.lease_ms:
            late = "more than half of the renewed lease is over: receive again, or with a longer lease"
            self.answer(poll, None, Overloaded(late, retry_after_ms=1_000))
        else:
            left = delivery.only(renewed)
            left = left._replace(until_ms=np.full(len(left.rows), result.until_ms, np.int64), now_ms=now)
            self.deferred.until_due(poll, left, partial(self._answer, poll))
        self._check_quiet()

    def hold(self, done: Callable[[], None]) -> None:
        """Prepare a planned transfer of leadership: stop handing out, commit the dispatch state, then call done()."""
        self.holding, self._quiet = True, done
        # Propose the cursor together with the last grants: a proposal after them would take another commit.
        self._send_cursor()
        self._check_quiet()

    def resume(self) -> None:
        self.holding, self._quiet, self._cursor_tried = False, None, False
        self.turn_soon()

    def _check_quiet(self) -> None:
        if self._quiet is None or self.offers or self._renewing or self.deferred or self.cursor.busy:
            return
        if self._send_cursor():
            return
        quiet, self._quiet = self._quiet, None
        quiet()

    def _send_cursor(self) -> bool:
        """Propose the dispatch cursor if it has changed, at most once per planned transfer of leadership; returns
        whether it was proposed. The next leader looks for due messages from the cursor on: if the cursor is a little
        behind, its search takes longer, but nothing is lost."""
        if self.cursor.busy or self._cursor_tried or not self.cursor.changed:
            return False
        self._cursor_tried = True
        self.cursor.send()
        return True


def _again(grant: OpenGrant, store: HourStore, first: Delivery | None) -> tuple[Delivery, NDArray[np.void]]:
    """Delivery of the messages of a grant that are still leased, and LEASE rows of these messages. first: the
    grant's first delivery, if no poll got it; its marks of redelivery stay. None: mark all messages as redelivered."""
    positions = np.flatnonzero(grant.rows["open"] == 1)
    leased = grant.rows[positions]
    rows = np.zeros(len(leased), INDEX)
    for hour, mine in rows_by_value(leased["hour"]):
        rows[mine] = store.entries(hour, leased["index"][mine])
    leases = np.zeros(len(leased), LEASE)
    leases["term"], leases["seq"], leases["pos"] = grant.term, grant.seq, positions
    leases["hour"], leases["index"] = leased["hour"], leased["index"]
    delivery = Delivery(
        grant.term,
        grant.seq,
        positions.astype(np.uint16),
        leased["hour"].copy(),
        leased["index"].copy(),
        leased["attempt"].copy(),
        rows,
        leased["until_ms"].copy(),
        np.ones(len(leased), np.bool_),
        0,
    )
    if first is not None:
        delivery.redelivered[:] = first.redelivered[np.isin(first.positions, positions)]
    return delivery, leases


@dataclass(eq=False, slots=True)
class _Item:
    """A deferred delivery; or, if `poll` is None, a callback that waits for earlier deliveries."""

    poll: Poll | None
    #: Function to call with the cluster time once the item is due.
    go: Callable[[int], None]


class DeferredDeliveries:
    """Answers to polls with messages granted ahead of their due time; each waits until its last message is due."""

    def __init__(self, term: Term, released: Callable[[], None]) -> None:
        """released: called when the last waiting delivery or callback was released."""
        self._term, self._alarm, self._released = term, term.alarm(self._ring), released
        self._waiting: Deadlines[_Item] = Deadlines()
        #: Latest due time of the deliveries deferred so far, in Unix ms.
        self._last_ms = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def polls(self) -> list[Poll]:
        return [item.poll for item in self._waiting if item.poll is not None]

    def until_due(self, poll: Poll, delivery: Delivery, release: Callable[[Delivery], None]) -> None:
        """Call release(delivery) when all messages of the delivery are due; at once if all are due already."""
        now_ms, due_ms = self._term.now(), int(delivery.rows["deliver_at_ms"].max())
        if due_ms <= now_ms:
            release(delivery._replace(now_ms=now_ms))
            return
        self._last_ms = max(self._last_ms, due_ms)
        self._waiting.set(_Item(poll, lambda now_ms: release(delivery._replace(now_ms=now_ms))), due_ms)
        self._arm()

    def when_released(self, done: Callable[[], None]) -> None:
        """Call done() once all presently deferred deliveries are released; at once if there are none."""
        if self._waiting:
            self._waiting.set(_Item(None, lambda now_ms: done()), self._last_ms)
        else:
            done()

    def clock_changed(self) -> None:
        self._alarm.cancel()
        self._arm()

    def stop(self) -> None:
        """Drop the deferred deliveries, and run the callbacks that wait for the release of deliveries."""
        for item in self._waiting.due(self._last_ms):
            if item.poll is None:
                item.go(0)

    def _arm(self) -> None:
        if (due_ms := self._waiting.next()) is not None:
            self._alarm.at(self._term.mono_at(due_ms))

    def _ring(self) -> None:
        now_ms = self._term.now()
        while items := self._waiting.due(now_ms, 1):
            items[0].go(now_ms)
        self._arm()
        if not self._waiting:
            self._released()
