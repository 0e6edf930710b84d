"""Backoff: the wait of failed messages before the next hand-out, for whole columns at once.

Every node computes the same milliseconds. So the waits of an exponential backoff are a table made by multiplication
(IEEE 754 defines the result; nothing defines that of `pow`), and the jitter is a hash of message id and attempt.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.formats import I64
from hadelay.settings.topic import Exponential

Backoff = tuple[int, ...] | Exponential

#: Highest INDEX.attempt (ledger/transitions.py).
_MAX_STEPS = 65_534
#: Unit of the jitter: 1 / _PARTS of the wait.
_PARTS = 1 << 20


def waits_ms(backoff: Backoff, attempts: NDArray[np.uint16], ids: NDArray[np.uint64]) -> I64:
    """The wait before the retry that follows each of these failed attempts (from 1), in ms."""
    steps = _steps(backoff)
    waits: I64 = steps[np.minimum(attempts.astype(np.int64), len(steps)) - 1]
    parts = round(backoff.jitter * _PARTS) if isinstance(backoff, Exponential) else 0
    if not parts:
        return waits
    spread = waits * parts // _PARTS
    some: I64 = (_mixed(ids, attempts) % (spread.astype(np.uint64) + np.uint64(1))).astype(np.int64)
    return waits + some if isinstance(backoff, Exponential) and backoff.longer else waits - some


@lru_cache(maxsize=1024)
def _steps(backoff: Backoff) -> I64:
    """The wait after attempt 1, 2, …; the last one repeats."""
    if not isinstance(backoff, Exponential):
        return np.array(backoff or (0,), np.int64)
    waits: list[int] = []
    wait = float(backoff.min_ms)
    while wait < backoff.max_ms and len(waits) < _MAX_STEPS and (backoff.factor > 1 or not waits):
        waits.append(int(wait))
        wait *= backoff.factor
    return np.array([*waits, min(int(wait), backoff.max_ms)], np.int64)


def _mixed(ids: NDArray[np.uint64], attempts: NDArray[np.uint16]) -> NDArray[np.uint64]:
    """SplitMix64 of both: neighbours get unrelated waits."""
    x: NDArray[np.uint64] = (attempts.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x += ids.astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x
