"""Commit mode (default): a hand-out is a grant that is proposed, decided by apply, and only then answered.

A grant is proposed as much ahead of its time as grants take lately, so that it is committed when its messages fall due:
lateness contains no commit. The answer is deferred until they are due (deferred.py), so nothing is handed out early.
While two rounds of grants are on their way, what falls due joins the next.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from hadelay.codec.results import GrantResult
from hadelay.errors import HadelayError, OutcomeUnknown
from hadelay.handout.matching import Offer
from hadelay.handout.polls import DONE, Poll
from hadelay.server.delivery.grants import BACKOFF_S, Grants, Handout, first_time

#: Limit of rounds of grants on their way at once.
_MAX_ROUNDS = 2


class CommitLatency:
    """How long grants take lately: smoothed as TCP smooths its round trips (RFC 6298)."""

    def __init__(self, most_ms: int) -> None:
        """most_ms: upper limit of `ms`; 0: grants are proposed when they are due."""
        self.most_ms = most_ms
        self.ms = 0
        self._smoothed = self._variation = 0.0

    def took(self, ms: float) -> None:
        """A grant was decided that long after it was proposed. The next may have to wait for it, and takes as long."""
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
        #: Offers of each round that are not decided yet.
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
        """What apply made of a grant."""
        grants, mono = self.grants, self.term.runtime.monotonic()
        self._latency.took((mono - proposed) * 1000)
        self.ahead_ms = self._latency.ms
        del grants.offers[offer.seq]
        for offers in self._rounds:
            offers.discard(offer)
        self._rounds = [offers for offers in self._rounds if offers]
        poll = grants.current(offer.poll)
        granted = error is None and isinstance(result, GrantResult) and result.existing is None
        grants.core.matcher.settle(offer, result.granted if granted else None)
        if granted:
            self._granted(offer, result, poll)
        elif isinstance(result, GrantResult) and result.existing is not None:
            grants.hand_out_again(poll, result.existing)
        else:
            self.resting_until = mono + BACKOFF_S
            if error is None or isinstance(error, OutcomeUnknown):
                grants.answer(poll, None, error or HadelayError(f"the grant was refused: {result}"))
            else:
                grants.wait_on(poll)
        grants.changed()

    def _granted(self, offer: Offer, result: GrantResult, poll: Poll) -> None:
        if not result.granted.any():
            self.grants.wait_on(poll)
        elif poll.phase != DONE:  # else it hung up after the proposal: the lease has to run out
            delivery = first_time(self.term.number, offer, result, 0, self.term.now())
            self.grants.deferred.until_due(poll, delivery, partial(self.grants.deliver, poll))
