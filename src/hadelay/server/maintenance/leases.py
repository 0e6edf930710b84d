"""Leases that run out, on the leader: a heap of grants by the time of their earliest lease.

The heap only says when to look. Apply judges every position against the time of its entry, and what became of a grant
is noticed when the grant comes up: nothing here has to be told about acks and nacks, and of extensions only because
they may shorten.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

from hadelay.codec.commands import encode_expire
from hadelay.codec.results import ExpireResult
from hadelay.errors import HadelayError
from hadelay.ledger.state import Ledger
from hadelay.platform.runtime import Runtime
from hadelay.raft.ports import Propose
from hadelay.server.alarm import Alarm
from hadelay.server.clustertime import ClusterClock

Key = tuple[int, int]
#: Limit of grants named in one EXPIRE, and looked at in one go after a take-over.
_BATCH = 512
_RETRY_MS = 100
#: Heap entries beyond twice the grants at which those of grants that are over are dropped.
_STALE = 1_024


class LeaseExpiry:
    """One per term. Nothing expires before `not_before_ms`: after a take-over the clocks of those who hold leases
    have the skew bound to be right."""

    def __init__(
        self,
        ledger: Ledger,
        runtime: Runtime,
        clock: ClusterClock,
        propose: Propose,
        not_before_ms: int,
    ) -> None:
        self._ledger, self._runtime, self._clock, self._propose = ledger, runtime, clock, propose
        self._not_before_ms = not_before_ms
        self._heap: list[tuple[int, Key]] = []
        self._alarm = Alarm(runtime, self._ring)
        self._stopped = False
        #: One EXPIRE at a time: several in one entry would copy as many times what one may.
        self._proposed = False
        self._take_over(iter(list(ledger.grants)))

    def __len__(self) -> int:
        return len(self._heap)

    def stop(self) -> None:
        self._stopped = True
        self._alarm.cancel()

    def add(self, until_ms: int, key: Key) -> None:
        heapq.heappush(self._heap, (until_ms, key))
        if len(self._heap) > 2 * len(self._ledger.grants) + _STALE:
            first = {key: until for until, key in sorted(self._heap, reverse=True) if key in self._ledger.grants}
            self._heap = sorted((until, key) for key, until in first.items())
        self._arm()

    def _take_over(self, keys: Iterator[Key]) -> None:
        """Find the grants that earlier leaders gave, some hundred at a time."""
        if self._stopped:
            return
        for _ in range(_BATCH):
            key = next(keys, None)
            if key is None:
                return
            self._again(key)
        self._runtime.call_soon(self._take_over, keys)

    def _again(self, key: Key, not_before_ms: int = 0) -> None:
        grant = self._ledger.grants.get(key)
        if grant is not None:
            self.add(max(grant.next_until_ms(), not_before_ms), key)

    def _arm(self) -> None:
        if self._heap and not (self._stopped or self._proposed):
            mono = self._runtime.monotonic()
            at_ms = max(self._heap[0][0], self._not_before_ms)
            self._alarm.at(mono + self._clock.delay_s(at_ms, mono))

    def _ring(self) -> None:
        now = self._clock.read(self._runtime.monotonic())
        over: list[Key] = []
        while self._heap and self._heap[0][0] <= now >= self._not_before_ms and len(over) < _BATCH:
            key = heapq.heappop(self._heap)[1]
            grant = self._ledger.grants.get(key)
            if grant is None:
                continue
            until_ms = grant.next_until_ms()
            if until_ms <= now:
                over.append(key)
            else:
                heapq.heappush(self._heap, (until_ms, key))
        if over:
            self._proposed = True
            self._propose(encode_expire(over), lambda result, error: self._expired(over, result, error))
        self._arm()

    def _expired(self, keys: list[Key], result: Any, error: HadelayError | None) -> None:
        if self._stopped:
            return
        self._proposed = False
        if error is None and isinstance(result, ExpireResult):
            for key in result.held:
                self._again(key)
        else:
            for key in keys:
                self._again(key, self._clock.read(self._runtime.monotonic()) + _RETRY_MS)
        self._arm()
