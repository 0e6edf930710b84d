"""Messages whose TTL is over, on the leader.

Table `ttl` is in the order of time. What was acked in time leaves a row in it, so whatever comes up is looked at first:
nothing is proposed unless a message waits and is over, or many rows have nothing to say any more.
"""

from __future__ import annotations

from typing import Any

from hadelay.codec.commands import encode_maintain
from hadelay.codec.commandtypes import Job
from hadelay.codec.results import JobResult
from hadelay.errors import HadelayError
from hadelay.ledger import ttl
from hadelay.ledger.state import Ledger
from hadelay.model import NEVER_MS
from hadelay.platform.runtime import Runtime
from hadelay.raft.ports import Propose
from hadelay.server.alarm import Alarm
from hadelay.server.clustertime import ClusterClock

#: Limit of rows of table `ttl` looked at in one go; count of rows that say nothing any more, which is worth a command.
_ROWS = 250
_SILENT_ROWS = 500
#: Pause between two looks, in ms: what falls due meanwhile expires together. Apply hands out none of it meanwhile.
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
