"""Replicated limits (command SETTINGS) that apply uses: nodes with different configuration files must act alike."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

_DAY_MS = 86_400_000
#: Maximum of max_delay_ms. An hour has 23 bits in a message id, enough until the year 2926.
MAX_DELAY_MS = 100 * 365 * _DAY_MS


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Replicated settings of the cluster. The attributes are the keys in SETTINGS and in checkpoints, in this order:
    append new ones, change no others."""

    #: Limit of delays in ms; a longer delay is refused, never shortened.
    max_delay_ms: int = 2 * 365 * _DAY_MS
    #: Minimum time in ms that an Idempotency-Key is remembered; the maximum is twice as long.
    idempotency_window_ms: int = 3_600_000
    #: Limit of idempotency keys; beyond it, the older half is forgotten early.
    idempotency_max_keys: int = 10_000_000
    auto_create_topics: bool = True
    max_topics: int = 100_000
    #: Limit of consumer names, which are never deleted; in the dispatch log, further consumers share a name.
    max_consumers: int = 100_000
    #: Limit of failure reasons, which are never deleted; in the dispatch log, further reasons share a name.
    max_reasons: int = 10_000
    #: Limit of request ids remembered per consumer, while their leases run; the oldest are dropped first.
    requests_per_consumer: int = 64
    max_lease_ms: int = _DAY_MS // 2

    def to_map(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_map(cls, value: Any) -> Settings:
        """Settings from a replicated map. ValueError, with a message for users, for unknown keys and invalid values."""
        if not isinstance(value, dict):
            raise ValueError("settings must be a map")
        for key, given in value.items():
            if key not in _DEFAULTS:
                raise ValueError(f"unknown setting {key!r}")
            if type(given) is not type(_DEFAULTS[key]) or (type(given) is int and not 0 < given < 2**53):
                raise ValueError(f"{key} cannot be {given!r}")
        if value.get("max_delay_ms", 0) > MAX_DELAY_MS:
            raise ValueError(f"max_delay_ms must be at most {MAX_DELAY_MS}")
        return cls(**value)


_DEFAULTS = Settings().to_map()
