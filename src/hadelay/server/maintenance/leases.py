"""Expiry of leases, on the leader: grants by the time of their earliest lease.

The time only says when to look: apply judges every lease against the time of its Raft entry, and acks and nacks are
noticed when the grant's time comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hadelay.codec.commands import encode_expire
from hadelay.codec.results import ExpireResult
from hadelay.deadlines import Deadlines
from hadelay.errors import HadelayError
from hadelay.server.delivery.term import Term

Key = tuple[int, int]
#: Limit of grants named in one EXPIRE, and looked at in one go after a take-over.
_BATCH = 512
_RETRY_MS = 100
#: Limit of remembered grants beyond twice the held ones; then those that are over are dropped.
_STALE = 1_024


class LeaseExpiry:
    """One per term. Nothing expires before `not_before_ms`: after a take-over, consumers' leases count by the clock of
    the previous leader, which may be behind by the skew bound."""

    def __init__(self, term: Term, not_before_ms: int) -> None:
        self._term, self._ledger, self._not_before_ms = term, term.ledger, not_before_ms
        self._leases: Deadlines[Key] = Deadlines()
        self._alarm = term.alarm(self._ring)
        #: An EXPIRE is on its way. One at a time: several in one entry would copy as many times the limit of one.
        self._proposed = False
        self._take_over(iter(list(self._ledger.grants)))

    def __len__(self) -> int:
        return len(self._leases)

    def add(self, until_ms: int, key: Key) -> None:
        self._leases.set(key, until_ms)
        if len(self._leases) > 2 * len(self._ledger.grants) + _STALE:
            for over in [known for known in self._leases if known not in self._ledger.grants]:
                self._leases.discard(over)
        self._arm()

    def _take_over(self, keys: Iterator[Key]) -> None:
        """Add the grants of earlier leaders, some hundred at a time."""
        if self._term.over:
            return
        for _ in range(_BATCH):
            key = next(keys, None)
            if key is None:
                return
            self._again(key)
        self._term.runtime.call_soon(self._take_over, keys)

    def _again(self, key: Key, not_before_ms: int = 0) -> None:
        grant = self._ledger.grants.get(key)
        if grant is not None:
            self.add(max(grant.next_until_ms(), not_before_ms), key)

    def _arm(self) -> None:
        if (until_ms := self._leases.next()) is not None and not self._proposed:
            self._alarm.at(self._term.mono_at(max(until_ms, self._not_before_ms)))

    def _ring(self) -> None:
        now = self._term.now()
        over: list[Key] = []
        for key in self._leases.due(now, _BATCH) if now >= self._not_before_ms else ():
            grant = self._ledger.grants.get(key)
            if grant is not None and grant.next_until_ms() > now:
                self._leases.set(key, grant.next_until_ms())
            elif grant is not None:
                over.append(key)
        if over:
            self._proposed = True
            self._term.propose(encode_expire(over), lambda result, error: self._expired(over, result, error))
        self._arm()

    def _expired(self, keys: list[Key], result: Any, error: HadelayError | None) -> None:
        self._proposed = False
        if error is None and isinstance(result, ExpireResult):
            for key in result.held:
                self._again(key)
        else:
            for key in keys:
                self._again(key, self._term.now() + _RETRY_MS)
        self._arm()
