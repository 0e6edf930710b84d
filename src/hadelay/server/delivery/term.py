"""One term of a leader: the time, the timers and the proposals of everything that works only while this node leads."""

from __future__ import annotations

from collections.abc import Callable

from hadelay.ledger.state import Ledger
from hadelay.platform.runtime import Runtime
from hadelay.raft.ports import Done, Propose
from hadelay.server.alarm import Alarm
from hadelay.server.clustertime import ClusterClock
from hadelay.settings.node import Config


class Term:
    def __init__(
        self, number: int, ledger: Ledger, runtime: Runtime, clock: ClusterClock, config: Config, propose: Propose
    ) -> None:
        self.number, self.ledger, self.runtime, self.clock = number, ledger, runtime, clock
        self.config, self._propose = config, propose
        self.over = False
        #: Propose what was handed out and not proposed yet (interval mode).
        self.record: Callable[[], None] = lambda: None
        self._alarms: list[Alarm] = []

    def stop(self) -> None:
        self.over = True
        for alarm in self._alarms:
            alarm.cancel()

    def now(self) -> int:
        """Cluster time, in Unix ms."""
        return self.clock.read(self.runtime.monotonic())

    def mono_at(self, cluster_ms: float) -> float:
        """The monotonic time at which cluster time reaches this."""
        mono = self.runtime.monotonic()
        return mono + self.clock.delay_s(int(cluster_ms), mono)

    def alarm(self, ring: Callable[[], None]) -> Alarm:
        """A timer that is cancelled when the term ends."""
        alarm = Alarm(self.runtime, ring)
        self._alarms.append(alarm)
        return alarm

    def propose(self, command: bytes, done: Done) -> None:
        """done is not called any more when the term is over."""
        self._propose(command, lambda result, error: None if self.over else done(result, error))

    def propose_behind(self, command: bytes, done: Done) -> None:
        """Propose maintenance after the hand-outs that are not proposed yet: apply then knows which messages consumers
        have, and neither expires them nor retires their hour."""
        self.record()
        self.propose(command, done)
