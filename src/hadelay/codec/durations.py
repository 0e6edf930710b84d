"""Durations as codes that can be counted: exact to the millisecond below 1,024 ms, at most 0.8 % too high above."""

import numpy as np

from hadelay.codec.formats import I64

#: Durations have codes of their own below this, and 8 significant bits above.
EXACT_MS, STEPS = 1024, 128


def encode(ms: I64) -> I64:
    """A code per duration, which grows with it; of less than 14 bits."""
    bits = np.frexp(ms.astype(np.float64))[1].astype(np.int64)
    shift = np.maximum(bits - 8, 0)
    return np.where(ms < EXACT_MS, ms, EXACT_MS + (shift - 3) * STEPS + (ms >> shift) - STEPS)


def decode(codes: I64) -> I64:
    """Per code the largest duration in ms that has it."""
    shift, step = np.divmod(codes - EXACT_MS, STEPS)
    longer: I64 = ((step + STEPS + 1) << (np.maximum(shift, 0) + 3)) - 1
    return np.where(codes < EXACT_MS, codes, longer)
