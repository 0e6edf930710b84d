"""State of one term of a leader: time, timers and proposals of all parts that work only while this node leads."""

import logging
import math
from collections.abc import Callable

from hadelay.ledger.state import Ledger
from hadelay.platform.runtime import Handle, Runtime
from hadelay.raft.ports import Done, Propose
from hadelay.server.clustertime import ClusterClock
from hadelay.settings.node import Config

log = logging.getLogger(__name__)

#: Pause in seconds before an alarm calls `ring` again after a disk error.
_AGAIN_S = 0.5


class Alarm:
    """Timer that calls `ring` once, at the earliest of the times that were set. If `ring` fails with a disk error, such
    as a full disk when a read has to write buffered entries first, `ring` is called again after _AGAIN_S."""

    def __init__(self, runtime: Runtime, ring: Callable[[], None]) -> None:
        self._runtime, self._ring = runtime, ring
        self._at = math.inf
        self._handle: Handle | None = None

    def at(self, mono: float) -> None:
        """Ring at this monotonic time, unless the alarm is set to an earlier time already."""
        if mono >= self._at:
            return
        self.cancel()
        self._at = mono
        # Round the delay up: an event loop with timers of whole milliseconds rounds to the nearest, and would ring too
        # early.
        delay_ms = math.ceil((mono - self._runtime.monotonic()) * 1000.0)
        self._handle = self._runtime.call_later(max(0, delay_ms) / 1000.0, self._fire)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._handle, self._at = None, math.inf

    def _fire(self) -> None:
        self._handle, self._at = None, math.inf
        try:
            self._ring()
        except OSError as error:
            log.warning("disk_failed", extra={"error": str(error), "again_in_s": _AGAIN_S})
            self.at(self._runtime.monotonic() + _AGAIN_S)


class Term:
    def __init__(
        self, number: int, ledger: Ledger, runtime: Runtime, clock: ClusterClock, config: Config, propose: Propose
    ) -> None:
        self.number, self.ledger, self.runtime, self.clock = number, ledger, runtime, clock
        self.config, self._propose = config, propose
        self.over = False
        #: Function that proposes the grants of hand-outs that are not proposed yet, in interval mode; None in commit
        #: mode.
        self.record: Callable[[], None] | None = None
        self._alarms: list[Alarm] = []

    def stop(self) -> None:
        self.over = True
        for alarm in self._alarms:
            alarm.cancel()

    def now(self) -> int:
        """Cluster time, in Unix ms."""
        return self.clock.read(self.runtime.monotonic())

    def mono_at(self, cluster_ms: float) -> float:
        """The monotonic time at which cluster time reaches cluster_ms."""
        mono = self.runtime.monotonic()
        return mono + self.clock.delay_s(int(cluster_ms), mono)

    def alarm(self, ring: Callable[[], None]) -> Alarm:
        """Make a timer that is cancelled when the term ends."""
        alarm = Alarm(self.runtime, ring)
        self._alarms.append(alarm)
        return alarm

    def propose(self, command: bytes, done: Done) -> None:
        """Propose a command; `done` is not called after the term has ended."""
        self._propose(command, lambda result, error: None if self.over else done(result, error))

    def propose_behind(self, command: bytes, done: Done) -> None:
        """Propose a maintenance command after the grants of all hand-outs. Apply then knows which messages consumers
        have, so it neither expires these messages nor retires their hour."""
        if self.record is not None:
            self.record()
        self.propose(command, done)
