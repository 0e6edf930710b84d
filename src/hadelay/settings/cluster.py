"""The limits apply decides by. They are replicated (SETTINGS), since two nodes whose files differ must still agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_DAY_MS = 86_400_000
#: No limit of delays is longer: hours have 23 bits of an id (hadelay.model.DEAD_HOURS), enough until the year 2926.
MAX_DELAY_MS = 100 * 365 * _DAY_MS


@dataclass(frozen=True, kw_only=True)
class Settings:
    #: A longer delay is refused, never clamped (S1).
    max_delay_ms: int = 2 * 365 * _DAY_MS
    #: An Idempotency-Key is remembered for at least this long, and at most twice as long.
    idempotency_window_ms: int = 3_600_000
    #: Beyond this many keys the older half is forgotten early.
    idempotency_max_keys: int = 10_000_000
    auto_create_topics: bool = True
    max_topics: int = 100_000
    #: Consumers beyond this many are written to the dispatch log without a name: names are never forgotten.
    max_consumers: int = 100_000
    #: The same of texts that say why an attempt failed.
    max_reasons: int = 10_000
    #: Request ids remembered per consumer, while their leases run; the oldest go first.
    requests_per_consumer: int = 64
    max_lease_ms: int = _DAY_MS // 2

    def to_map(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in _KEYS}

    @classmethod
    def from_map(cls, value: Any) -> Settings:
        """Raises ValueError in words for anything that is not a map of known keys and positive numbers."""
        if not isinstance(value, dict):
            raise ValueError("settings are a map")
        for key, given in value.items():
            if key not in _KEYS:
                raise ValueError(f"there is no setting {key!r}")
            if type(given) is not _TYPES[key] or (type(given) is int and not 0 < given < 2**53):
                raise ValueError(f"{key} cannot be {given!r}")
        if value.get("max_delay_ms", 0) > MAX_DELAY_MS:
            raise ValueError(f"max_delay_ms is at most {MAX_DELAY_MS}")
        return cls(**value)


#: Keys in SETTINGS and in checkpoints, which are the attributes. They and their order never change; new ones go to the
#: end.
_KEYS = (
    "max_delay_ms", "idempotency_window_ms", "idempotency_max_keys", "auto_create_topics", "max_topics",
    "max_consumers", "max_reasons", "requests_per_consumer", "max_lease_ms",
)  # fmt: skip
_TYPES = {key: type(value) for key, value in Settings().to_map().items()}
