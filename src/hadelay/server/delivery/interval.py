"""Interval mode (S2): messages are handed out at once and proposed within half an interval.

While the oldest hand-out that is not committed is an interval old, nothing more is handed out, so that a crash repeats
at most the last 50 ms. After a take-over everything that was due before is marked as redelivered, on suspicion.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from hadelay.codec.results import GrantResult
from hadelay.errors import HadelayError
from hadelay.handout.matching import Offer
from hadelay.server.delivery.grants import BACKOFF_S, Grants, Handout, first_time

#: Hour and index of a message id's first entry: the id without its group.
_ENTRY_OF_ID = np.uint64((1 << 56) - 1)


class IntervalHandout(Handout):
    def __init__(self, grants: Grants, has_leader_lease: Callable[[], bool]) -> None:
        """has_leader_lease: no other node can be leading yet."""
        super().__init__(grants)
        config = self.term.config
        self._has_leader_lease, self._interval_s = has_leader_lease, config.dispatch.interval_ms / 1000
        # The leader before hands out what was due by then, as long as it may believe that it leads.
        self._suspect_ms = self.term.now() + config.raft.election_min_ms
        self._alarm, self.term.record = self.term.alarm(self._record), self._record
        #: Not proposed yet.
        self._unsent: list[tuple[Offer, bytes]] = []

    def ready_at(self, mono: float) -> float:
        if mono < self.resting_until:
            return self.resting_until
        if mono - next(iter(self.grants.handed_at.values()), mono) >= self._interval_s:
            return math.inf  # an interval's worth of hand-outs is not committed: no more until it is
        return mono if self._has_leader_lease() else mono + BACKOFF_S

    def hand_out(self, offers: list[Offer], now_ms: int) -> None:
        grants, number, mono = self.grants, self.term.number, self.term.runtime.monotonic()
        for offer in offers:
            if self._in_hands(offer):
                grants.core.matcher.settle(offer, None)
                grants.wait_on(offer.poll)
                self.resting_until = mono + self._interval_s / 2
                grants.turn_soon()
                continue
            self._unsent.append((offer, grants.grant(offer, now_ms, handed=True)))
            self.grants.handed_at[offer.seq] = mono
            # Half an interval leaves the other half for the commit, so that handing out does not stop in between.
            self._alarm.at(mono + self._interval_s / 2)
            expected = GrantResult(
                number, offer.seq, np.ones(len(offer.rows), np.bool_), offer.rows["attempt"] + np.uint16(1),
                now_ms + offer.poll.lease_ms,
            )  # fmt: skip
            grants.deliver(offer.poll, first_time(number, offer, expected, self._suspect_ms, now_ms))

    def _in_hands(self, offer: Offer) -> bool:
        """A message of the offer was handed out a moment ago as another entry, and was rolled forward or rescheduled
        since. That has to be recorded first: apply then counts the attempt, and the next hand-out is another one."""
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
            # The hand-out has to be recorded; meanwhile handing out stops by itself. If the grant was committed after
            # all, apply says that it exists.
            self._unsent.append((offer, command))
            self._alarm.at(self.term.runtime.monotonic() + BACKOFF_S)
            return
        grants = self.grants
        del grants.offers[offer.seq], grants.handed_at[offer.seq]
        granted = result.granted if isinstance(result, GrantResult) else np.ones(len(offer.entries), np.bool_)
        grants.core.matcher.settle(offer, granted)
        if grants.has_successor(offer.poll):
            grants.hand_out_again(grants.current(offer.poll), (self.term.number, offer.seq))
        grants.changed()
