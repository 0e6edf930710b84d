"""What a leader does for the disk's sake: close hours nobody drains, forget hours that are over, settle what deleted
topics left behind. Each is a replicated command that works in slices; one at a time is under way. A cluster in which
nothing changes gets none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hadelay.config import RetentionConfig
from hadelay.core.commands import encode_carry, encode_retire, encode_sweep
from hadelay.core.results import Progress
from hadelay.core.state import DelayState
from hadelay.errors import HadelayError
from hadelay.model import HOUR_MS
from hadelay.runtime import Runtime
from hadelay.server.alarm import Alarm

_LOOK_S = 30.0
#: Between two slices: leaves the log to those who wait for an answer.
_PAUSE_S = 0.02
#: An hour goes when it is this many hours past, at the earliest: the running one's files are near ones until then.
_HOURS_PAST = 2


class Janitor:
    """One per term."""

    def __init__(
        self,
        state: DelayState,
        runtime: Runtime,
        now_ms: Callable[[], int],
        propose: Callable[[bytes, Callable[[Any, HadelayError | None], None]], None],
        retention: RetentionConfig,
    ) -> None:
        self._state, self._runtime, self._now_ms, self._propose = state, runtime, now_ms, propose
        self._retention = retention
        self._stopped = False
        self._alarm = Alarm(runtime, self._look)
        self._rest(1.0)

    def stop(self) -> None:
        self._stopped = True
        self._alarm.cancel()

    def _rest(self, seconds: float = _LOOK_S) -> None:
        if not self._stopped:
            self._alarm.at(self._runtime.monotonic() + seconds)

    def _look(self) -> None:
        command = self._next()
        if command is None:
            self._rest()
        else:
            self._propose(command, self._worked)

    def _worked(self, result: Any, error: HadelayError | None) -> None:
        # Whatever went wrong may be over at the next look; a refusal would only come back at once.
        self._rest(_PAUSE_S if isinstance(result, Progress) else _LOOK_S)

    def _next(self) -> bytes | None:
        if self._state.topics.doomed():
            return encode_sweep()
        now = self._now_ms()
        for hour in self._state.store.hours():
            past_ms = now - (hour + 1) * HOUR_MS
            if hour > now // HOUR_MS - _HOURS_PAST or past_ms < 0:
                return None
            if not self._state.open_entries(hour):
                if past_ms >= self._retention.settled_ms:
                    return encode_retire(hour)
            elif past_ms >= self._retention.carry_ms and self._can_carry(hour):
                return encode_carry(hour)
        return None

    def _can_carry(self, hour: int) -> bool:
        """There are entries that CARRY has not looked at. What is open besides is leased, and moves by itself."""
        hour_state = self._state.hours.get(hour)
        return hour_state is None or hour_state.carried < self._state.store.count(hour)
