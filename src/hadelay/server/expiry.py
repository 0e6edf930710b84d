"""What ends by itself, on the leader: leases that run out, and messages whose TTL is over.

Leases: a heap of grants by the time of their earliest lease. The heap only says when to look. Apply judges every
position against state.now, and what became of a grant is noticed when it comes up: nothing here has to be told about
acks and nacks, and of extensions only because they may shorten.

TTLs: table `ttl` is in the order of time already. What was acked in time leaves a row in it, so whatever comes up is
looked at first: nothing is proposed unless a message waits and is over, or many rows have nothing to say any more.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

from hadelay.codec.commands import encode_expire, encode_maintain
from hadelay.codec.commandtypes import Job
from hadelay.codec.results import ExpireResult, JobResult
from hadelay.errors import HadelayError
from hadelay.ledger import ttl
from hadelay.ledger.state import Ledger
from hadelay.model import NEVER_MS
from hadelay.platform.runtime import Runtime
from hadelay.raft.ports import Propose
from hadelay.server.alarm import Alarm
from hadelay.server.clustertime import ClusterClock

Key = tuple[int, int]
#: Grants named in one EXPIRE, and looked at in one go after a take-over.
_BATCH = 512
_RETRY_MS = 100
#: Entries of grants that are over are dropped when there are this many more than grants.
_STALE = 1_024


class Expiry:
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


#: Rows of table `ttl` looked at in one go; so many that say nothing any more are worth a command.
_ROWS = 250
_SILENT_ROWS = 500
#: Between two looks: what falls due meanwhile expires together. Apply hands out none of it, to the millisecond.
_PAUSE_MS = 100


class TtlExpiry:
    """One per term. `filed` takes every time that apply tells of (ledger.ports.Listener.on_ttl)."""

    def __init__(
        self,
        ledger: Ledger,
        runtime: Runtime,
        clock: ClusterClock,
        propose: Propose,
    ) -> None:
        self._ledger, self._runtime, self._clock, self._propose = ledger, runtime, clock, propose
        self._alarm = Alarm(runtime, self._look)
        self._stopped = False
        #: Rows before this one were looked at: nothing of them waits.
        self._start = b""
        self._silent = 0
        self._rest_until_ms = 0
        self._look_at(ttl.first_ms(ledger))

    def stop(self) -> None:
        self._stopped = True
        self._alarm.cancel()

    def filed(self, at_ms: int) -> None:
        """Unix ms, cluster time. It may be over: what was passed as leased waits again."""
        self._start = min(self._start, ttl.KEY.pack(at_ms, 0))
        self._look_at(at_ms)

    def _look_at(self, at_ms: int) -> None:
        if at_ms < NEVER_MS and not self._stopped:
            mono = self._runtime.monotonic()
            self._alarm.at(mono + self._clock.delay_s(max(at_ms, self._rest_until_ms), mono))

    def _now(self) -> int:
        return self._clock.read(self._runtime.monotonic())

    def _look(self) -> None:
        now = self._now()
        keys = ttl.due(self._ledger, now, self._start, _ROWS)
        self._silent += len(keys)
        if keys:
            self._rest_until_ms = now + _PAUSE_MS
        if self._silent >= _SILENT_ROWS or ttl.ends_something(self._ledger, keys):
            self._propose(encode_maintain(Job.TTL_EXPIRE), self._ended)
            return
        if keys:
            self._start = keys[-1] + b"\0"
        self._look_at(now if len(keys) == _ROWS else ttl.first_ms(self._ledger, self._start))

    def _ended(self, result: Any, error: HadelayError | None) -> None:
        if self._stopped:
            return
        self._start, self._silent = self._ledger.ttl_from, 0
        # A slice after a slice as long as there is more: a backlog goes as fast as the log takes it.
        if error is None and isinstance(result, JobResult) and not result.done:
            self._rest_until_ms = 0
        self._look_at(self._now())
