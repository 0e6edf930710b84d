"""The two modes of handing out (commit and interval): how offers of the dispatcher become leases and answers.

Commit mode (default): a grant is proposed, decided by apply, and only then answered. A grant is proposed before its
messages are due, earlier by the recent duration of grants. So it is committed when they fall due, and their lateness
contains no commit. The answer is deferred until the messages are due (grants.py), so nothing is handed out early. While
two batches of grants are being committed, newly due messages wait for the next batch.

Interval mode (S2): messages are handed out at once and proposed within half an interval. While the oldest hand-out that
is not committed is an interval old, nothing more is handed out, so that a crash repeats at most the last 50 ms. Only
messages within bounds that the replicated state gives, by its cursor and its last time stamp, are handed out at once
(ledger/leases/suspects.py); all others as in commit mode. A new leader suspects that the messages within these bounds
were handed out, and marks only these as redelivered.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from hadelay.codec.formats import Mask
from hadelay.codec.results import GrantResult
from hadelay.errors import HadelayError, OutcomeUnknown
from hadelay.handout.matching import Offer
from hadelay.handout.polls import DONE, Delivery, Poll
from hadelay.ledger.hours.transitions import FLAG_WAS_DUE
from hadelay.ledger.leases import suspects
from hadelay.server.delivery.grants import Grants, Unrecorded

#: Pause before the next proposal after a grant that failed, in seconds.
_BACKOFF_S = 0.02
#: Limit of batches of grants that are committed at the same time; at the limit, no more offers are made.
_MAX_ROUNDS = 2
#: Bit mask of a message id: keeps hour and index of the message's first entry, drops the number of the Raft group.
_ENTRY_OF_ID = np.uint64((1 << 56) - 1)


class Handout:
    """Turns the dispatcher's offers (messages chosen for a poll) into hand-outs; base class of the two modes, one
    object per term. No other part knows the mode."""

    def __init__(self, grants: Grants) -> None:
        self.grants, self.term = grants, grants.term
        #: Monotonic time before which no grant is proposed: a pause after a failure.
        self.resting_until = 0.0

    @property
    def ahead_ms(self) -> int:
        """Time in ms by which messages are offered to polls before they are due; 0: once they are due."""
        return 0

    def ready_at(self, mono: float) -> float:
        """Monotonic time from which offers may be made; `mono`: at once; inf: not before another grant is decided."""
        raise NotImplementedError

    def hand_out(self, offers: list[Offer], now_ms: int) -> None:
        raise NotImplementedError


class CommitLatency:
    """Smoothed duration of recent commits of grants, in ms; the formula is that of TCP's round-trip time (RFC 6298)."""

    def __init__(self, most_ms: int) -> None:
        """most_ms: limit of the time by which grants are proposed before their messages are due; 0: grants are proposed
        when their messages are due."""
        self.most_ms = most_ms
        self.ms = 0
        self._smoothed = self._variation = 0.0

    @property
    def smoothed_ms(self) -> float:
        """Usual time from the proposal of a grant to its decision, in ms; 0 before the first grant."""
        return self._smoothed

    def took(self, ms: float) -> None:
        """Update the estimate with a grant that was decided `ms` after its proposal. The estimate covers two grants,
        because the next grant may have to wait for the one before."""
        if not self._smoothed:
            self._smoothed, self._variation = ms, ms / 2
        else:
            self._variation += (abs(ms - self._smoothed) - self._variation) / 4
            self._smoothed += (ms - self._smoothed) / 8
        self.ms = min(self.most_ms, int(2 * self._smoothed + 4 * self._variation))


class CommitHandout(Handout):
    def __init__(self, grants: Grants, latency: CommitLatency) -> None:
        super().__init__(grants)
        self._latency = latency
        #: Offers (messages chosen for a poll) whose grants are not decided yet: one set for each call of `hand_out`.
        self._rounds: list[set[Offer]] = []

    @property
    def ahead_ms(self) -> int:
        return self._latency.ms

    def ready_at(self, mono: float) -> float:
        if mono < self.resting_until:
            return self.resting_until
        return math.inf if len(self._rounds) >= _MAX_ROUNDS else mono

    def hand_out(self, offers: list[Offer], now_ms: int) -> None:
        if not offers:
            return
        mono = self.term.runtime.monotonic()
        self._rounds.append(set(offers))
        for offer in offers:
            command = self.grants.grant(offer, now_ms, handed=False)
            self.term.propose(command, partial(self._decided, offer, mono))

    def _decided(self, offer: Offer, proposed: float, result: Any, error: HadelayError | None) -> None:
        grants, mono = self.grants, self.term.runtime.monotonic()
        self._latency.took((mono - proposed) * 1000)
        del grants.offers[offer.seq]
        for offers in self._rounds:
            offers.discard(offer)
        self._rounds = [offers for offers in self._rounds if offers]
        poll = grants.decided(offer)
        granted = error is None and isinstance(result, GrantResult) and result.existing is None
        grants.core.matcher.settle(offer, result.granted if granted else None, self.term.now())
        if granted:
            self._granted(offer, result, poll)
        elif isinstance(result, GrantResult) and result.existing is not None:
            grants.hand_out_again(poll, result.existing)
        else:
            self.resting_until = mono + _BACKOFF_S
            if error is None or isinstance(error, OutcomeUnknown):
                grants.answer(poll, None, error or HadelayError(f"the grant was refused: {result}"))
            else:
                grants.wait_on(poll)
        grants.changed()

    def _granted(self, offer: Offer, result: GrantResult, poll: Poll) -> None:
        if not result.granted.any():
            self.grants.wait_on(poll)
        elif poll.phase != DONE:  # DONE: the consumer has hung up, so the granted leases end unused
            delivery = first_time(self.term.number, offer, result, self._suspected(offer), self.term.now())
            self.grants.deferred.until_due(poll, delivery, partial(self.grants.deliver, poll))

    def _suspected(self, offer: Offer) -> Mask:
        """Mask of the offer's messages that an earlier leader may have handed out without recording it."""
        return np.zeros(len(offer.rows), np.bool_)


class IntervalHandout(CommitHandout):
    """Interval mode: hands out a message before its grant is committed if, after a crash, a new leader would mark it as
    redelivered. All other messages are handed out as in commit mode."""

    def __init__(self, grants: Grants, latency: CommitLatency, has_leader_lease: Callable[[], bool]) -> None:
        """has_leader_lease: whether it is certain that no other node leads yet."""
        super().__init__(grants, latency)
        self._has_leader_lease = has_leader_lease
        self._interval_s = self.term.config.dispatch.interval_ms / 1000
        self._suspects = suspects.after_term(self.term.ledger)
        self._alarm, self.term.record = self.term.alarm(self._record), self._record
        #: Hand-outs whose grants are not proposed yet.
        self._unsent: list[tuple[Offer, bytes]] = []

    @property
    def ahead_ms(self) -> int:
        return 0

    def ready_at(self, mono: float) -> float:
        if mono < self.resting_until:
            return self.resting_until
        oldest = next(iter(self.grants.unrecorded.values()), None)
        if oldest is not None and mono - oldest.mono >= self._interval_s:
            return math.inf  # no more hand-outs until the grants of the last interval are committed
        return super().ready_at(mono) if self._has_leader_lease() else mono + _BACKOFF_S

    def hand_out(self, offers: list[Offer], now_ms: int) -> None:
        grants, number, mono = self.grants, self.term.number, self.term.runtime.monotonic()
        granted_first: list[Offer] = []
        second = grants.cursor.second
        for offer in offers:
            if self._in_hands(offer):
                grants.core.matcher.settle(offer, None, now_ms)
                grants.wait_on(offer.poll)
                self.resting_until = mono + self._interval_s / 2
                grants.turn_soon()
                continue
            if not suspects.goes_ahead(self.term.ledger, second, offer.rows["deliver_at_ms"]):
                granted_first.append(offer)
                continue
            self._unsent.append((offer, grants.grant(offer, now_ms, handed=True)))
            grants.unrecorded[offer.seq] = Unrecorded(mono, second)
            # Propose the grants after half an interval, so that they are committed when the interval ends.
            self._alarm.at(mono + self._interval_s / 2)
            expected = GrantResult(
                number,
                offer.seq,
                np.ones(len(offer.rows), np.bool_),
                offer.rows["attempt"] + np.uint16(1),
                now_ms + offer.poll.lease_ms,
            )
            grants.deliver(offer.poll, first_time(number, offer, expected, self._suspected(offer), now_ms))
        super().hand_out(granted_first, now_ms)

    def _suspected(self, offer: Offer) -> Mask:
        was_due = offer.rows["flags"] & FLAG_WAS_DUE != 0
        return np.asarray(was_due | suspects.within(self._suspects, offer.rows["deliver_at_ms"]))

    def _in_hands(self, offer: Offer) -> bool:
        """Whether a message of the offer was handed out a moment ago, and was then moved to a new entry by a reschedule
        or by roll forward. Then the grant of the earlier hand-out has to be committed first, so that the next hand-out
        counts as another attempt."""
        if not self.grants.unrecorded:
            return False
        ids = offer.rows["first_id"]
        own = offer.hours.astype(np.uint64) << np.uint64(32) | offer.indexes
        moved = ids[ids & _ENTRY_OF_ID != own]
        return bool(len(moved)) and any(
            np.isin(moved, self.grants.offers[seq].rows["first_id"]).any() for seq in self.grants.unrecorded
        )

    def _record(self) -> None:
        self._alarm.cancel()
        unsent, self._unsent = self._unsent, []
        for offer, command in unsent:
            self.term.propose(command, partial(self._recorded, offer, command))

    def _recorded(self, offer: Offer, command: bytes, result: Any, error: HadelayError | None) -> None:
        if error is not None:
            # Propose the grant again, because the hand-out has to be recorded. Hand-outs stop until it is committed. If
            # the first proposal was committed after all, apply reports that the grant exists.
            self._unsent.append((offer, command))
            self._alarm.at(self.term.runtime.monotonic() + _BACKOFF_S)
            return
        grants = self.grants
        del grants.offers[offer.seq], grants.unrecorded[offer.seq]
        granted = result.granted if isinstance(result, GrantResult) else np.ones(len(offer.entries), np.bool_)
        grants.core.matcher.settle(offer, granted, self.term.now())
        # The messages were handed out before: only a repeated poll, whose consumer got no answer, still waits for them.
        grants.hand_out_again(grants.decided(offer), (self.term.number, offer.seq))
        grants.changed()


def first_time(term: int, offer: Offer, result: GrantResult, suspected: Mask, now_ms: int) -> Delivery:
    """Make the delivery of the messages of an offer that apply granted. suspected: mask of messages that an earlier
    leader may have handed out; these are marked as redelivered."""
    count, rows = len(offer.rows), offer.rows
    delivery = Delivery(
        term,
        offer.seq,
        np.arange(count, dtype=np.uint16),
        offer.hours,
        offer.indexes,
        result.attempts,
        rows,
        np.full(count, result.until_ms, np.int64),
        (result.attempts > 1) | suspected,
        now_ms,
    )
    return delivery if result.granted.all() else delivery.only(result.granted)
