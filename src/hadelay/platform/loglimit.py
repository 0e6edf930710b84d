"""Bounded logging of events that clients can cause: a flood of requests must not become a flood of lines."""

from collections.abc import Callable

#: Minimum time between two log lines about one key, in seconds.
INTERVAL_S = 10.0
#: Limit of keys with log lines of their own; all further keys share one line.
_MAX_KEYS = 16
_OTHERS = "others"


class LogLimit:
    """Decides which events to log: one per key in INTERVAL_S, and at most 17 lines in that time, whatever keys clients
    make up. `monotonic`: clock in seconds."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        #: Key → (time of the next log line, number of events since the last line).
        self._keys: dict[str, tuple[float, int]] = {}

    def count(self, key: str) -> int:
        """Count an event. Returns how many events a log line should report now, with this event; 0: log nothing."""
        now = self._monotonic()
        if key not in self._keys:
            self._make_room(now)
            if len(self._keys) >= _MAX_KEYS:
                key = _OTHERS
        until, unreported = self._keys.get(key, (now, 0))
        if now < until:
            self._keys[key] = until, unreported + 1
            return 0
        self._keys[key] = now + INTERVAL_S, 0
        return unreported + 1

    def _make_room(self, now: float) -> None:
        """Forget keys without a log line for INTERVAL_S; only the metrics count their last unreported events."""
        if len(self._keys) >= _MAX_KEYS:
            for key in [key for key, (until, _) in self._keys.items() if until <= now and key != _OTHERS]:
                del self._keys[key]
