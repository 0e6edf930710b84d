"""The two modes of handing out: how offers of the dispatcher become leases and answers.

Commit mode (default): a grant is proposed, decided by apply, and only then answered. A grant is proposed as much ahead
of its time as grants take lately, so that it is committed when its messages fall due: lateness contains no commit. The
answer is deferred until they are due (grants.py), so nothing is handed out early. While two rounds of grants are on
their way, what falls due joins the next.

Interval mode (S2): messages are handed out at once and proposed within half an interval. While the oldest hand-out that
is not committed is an interval old, nothing more is handed out, so that a crash repeats at most the last 50 ms. After a
take-over everything that was due before is marked as redelivered, on suspicion.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from hadelay.codec.results import GrantResult
from hadelay.errors import HadelayError, OutcomeUnknown
from hadelay.handout.matching import Offer
from hadelay.handout.polls import DONE, Delivery, Poll
from hadelay.ledger.transitions import FLAG_WAS_DUE
from hadelay.server.delivery.grants import Grants

#: Pause after a grant that failed, in seconds.
_BACKOFF_S = 0.02
#: Limit of batches of grants that are being committed at the same time.
_MAX_ROUNDS = 2
#: Bit mask for message ids: keeps the hour and index of the message's first entry, and drops the group.
_ENTRY_OF_ID = np.uint64((1 << 56) - 1)


class Handout:
    """Turns the dispatcher's offers (messages chosen for a poll) into hand-outs; base class of the two modes, one
    object per term. No other part knows the mode."""

    #: Time before the due time at which messages are offered to polls, in ms.
    ahead_ms = 0

    def __init__(self, grants: Grants) -> None:
        self.grants, self.term = grants, grants.term
        #: No new proposals before this monotonic time.
        self.resting_until = 0.0

    def ready_at(self, mono: float) -> float:
        """Monotonic time at which offers may be made; `mono`: now; inf: not before another grant is decided."""
        raise NotImplementedError

    def hand_out(self, offers: list[Offer], now_ms: int) -> None:
        raise NotImplementedError


class CommitLatency:
    """Smoothed duration of recent grants, in ms; the formula is that of TCP's round-trip time (RFC 6298)."""

    def __init__(self, most_ms: int) -> None:
        """most_ms: maximum time by which grants are proposed before their messages are due; 0: grants are proposed when
        their messages are due."""
        self.most_ms = most_ms
        self.ms = 0
        self._smoothed = self._variation = 0.0

    @property
    def smoothed_ms(self) -> float:
        """Usual duration of a grant; 0 before the first one."""
        return self._smoothed

    def took(self, ms: float) -> None:
        """Update the latency with a grant that was decided `ms` after it was proposed. The estimate covers two grants,
        because the next grant may have to wait for this one."""
        if not self._smoothed:
            self._smoothed, self._variation = ms, ms / 2
        else:
            self._variation += (abs(ms - self._smoothed) - self._variation) / 4
            self._smoothed += (ms - self._smoothed) / 8
        self.ms = min(self.most_ms, int(2 * self._smoothed + 4 * self._variation))


class CommitHandout(Handout):
    def __init__(self, grants: Grants, latency: CommitLatency) -> None:
        super().__init__(grants)
        self._latency, self.ahead_ms = latency, latency.ms
        #: Offers (messages chosen for a poll) whose grants are not decided yet: one set per call of `hand_out`.
        self._rounds: list[set[Offer]] = []

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
        self.ahead_ms = self._latency.ms
        del grants.offers[offer.seq]
        for offers in self._rounds:
            offers.discard(offer)
        self._rounds = [offers for offers in self._rounds if offers]
        poll = grants.current(offer.poll)
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
        elif poll.phase != DONE:  # phase DONE of a poll: its consumer has hung up, so the granted leases run out unused
            delivery = first_time(self.term.number, offer, result, 0, self.term.now())
            self.grants.deferred.until_due(poll, delivery, partial(self.grants.deliver, poll))


class IntervalHandout(Handout):
    def __init__(self, grants: Grants, has_leader_lease: Callable[[], bool]) -> None:
        """has_leader_lease: whether no other node can be leading yet."""
        super().__init__(grants)
        config = self.term.config
        self._has_leader_lease, self._interval_s = has_leader_lease, config.dispatch.interval_ms / 1000
        # The previous leader may hand out messages that are due by this time, as long as it believes that it leads.
        self._suspect_ms = self.term.now() + config.raft.election_min_ms
        self._alarm, self.term.record = self.term.alarm(self._record), self._record
        #: Hand-outs that are not proposed yet.
        self._unsent: list[tuple[Offer, bytes]] = []

    def ready_at(self, mono: float) -> float:
        if mono < self.resting_until:
            return self.resting_until
        if mono - next(iter(self.grants.handed_at.values()), mono) >= self._interval_s:
            return math.inf  # no more hand-outs until those of the last interval are committed
        return mono if self._has_leader_lease() else mono + _BACKOFF_S

    def hand_out(self, offers: list[Offer], now_ms: int) -> None:
        grants, number, mono = self.grants, self.term.number, self.term.runtime.monotonic()
        for offer in offers:
            if self._in_hands(offer):
                grants.core.matcher.settle(offer, None, now_ms)
                grants.wait_on(offer.poll)
                self.resting_until = mono + self._interval_s / 2
                grants.turn_soon()
                continue
            self._unsent.append((offer, grants.grant(offer, now_ms, handed=True)))
            self.grants.handed_at[offer.seq] = mono
            # Propose hand-outs after half an interval, so that they are committed when the interval ends.
            self._alarm.at(mono + self._interval_s / 2)
            expected = GrantResult(
                number, offer.seq, np.ones(len(offer.rows), np.bool_), offer.rows["attempt"] + np.uint16(1),
                now_ms + offer.poll.lease_ms,
            )  # fmt: skip
            grants.deliver(offer.poll, first_time(number, offer, expected, self._suspect_ms, now_ms))

    def _in_hands(self, offer: Offer) -> bool:
        """Whether a message of the offer was handed out a moment ago, and then moved to a new entry by a reschedule or
        by rolling forward. The earlier hand-out has to be recorded first, so that the next one counts as another
        attempt."""
        if not self.grants.handed_at:
            return False
        ids = offer.rows["first_id"]
        own = offer.hours.astype(np.uint64) << np.uint64(32) | offer.indexes
        moved = ids[ids & _ENTRY_OF_ID != own]
        return bool(len(moved)) and any(
            np.isin(moved, self.grants.offers[seq].rows["first_id"]).any() for seq in self.grants.handed_at
        )

    def _record(self) -> None:
        self._alarm.cancel()
        unsent, self._unsent = self._unsent, []
        for offer, command in unsent:
            self.term.propose(command, partial(self._recorded, offer, command))

    def _recorded(self, offer: Offer, command: bytes, result: Any, error: HadelayError | None) -> None:
        if error is not None:
            # Propose the grant again, because the hand-out has to be recorded; while a grant waits here, no further
            # messages are handed out. If the first proposal was committed after all, apply reports that the grant
            # exists.
            self._unsent.append((offer, command))
            self._alarm.at(self.term.runtime.monotonic() + _BACKOFF_S)
            return
        grants = self.grants
        del grants.offers[offer.seq], grants.handed_at[offer.seq]
        granted = result.granted if isinstance(result, GrantResult) else np.ones(len(offer.entries), np.bool_)
        grants.core.matcher.settle(offer, granted, self.term.now())
        if grants.has_successor(offer.poll):
            grants.hand_out_again(grants.current(offer.poll), (self.term.number, offer.seq))
        grants.changed()


def first_time(term: int, offer: Offer, result: GrantResult, suspect_ms: int, now_ms: int) -> Delivery:
    """Delivery of the messages of an offer that apply granted. suspect_ms (interval mode; else 0): messages due by this
    time, or due before they were rescheduled, count as redelivered: a failed leader may have handed them out."""
    count, rows = len(offer.rows), offer.rows
    suspect = (rows["deliver_at_ms"] <= suspect_ms) | (rows["flags"] & FLAG_WAS_DUE != 0) & bool(suspect_ms)
    delivery = Delivery(
        term, offer.seq, np.arange(count, dtype=np.uint16), offer.hours, offer.indexes, result.attempts, rows,
        np.full(count, result.until_ms, np.int64), (result.attempts > 1) | suspect, now_ms,
    )  # fmt: skip
    return delivery if result.granted.all() else delivery.only(result.granted)
