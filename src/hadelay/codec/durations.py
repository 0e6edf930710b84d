"""Durations as small integer codes, for counting: exact below 1,024 ms, at most 0.8 % too high above."""

import numpy as np

from hadelay.codec.formats import I64

#: Durations below EXACT_MS have a code each; longer ones keep 8 significant bits: STEPS codes per power of two.
EXACT_MS, STEPS = 1024, 128


def encode(ms: I64) -> I64:
    """Codes of durations in ms: codes grow with the duration and have less than 14 bits."""
    bits = np.frexp(ms.astype(np.float64))[1].astype(np.int64)
    shift = np.maximum(bits - 8, 0)
    return np.where(ms < EXACT_MS, ms, EXACT_MS + (shift - 3) * STEPS + (ms >> shift) - STEPS)


def decode(codes: I64) -> I64:
    """Largest duration in ms that `encode` maps to each of these codes."""
    shift, step = np.divmod(codes - EXACT_MS, STEPS)
    longer: I64 = ((step + STEPS + 1) << (np.maximum(shift, 0) + 3)) - 1
    return np.where(codes < EXACT_MS, codes, longer)
