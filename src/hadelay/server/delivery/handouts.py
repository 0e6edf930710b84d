"""When the leader's answers reached their consumers: the hand-out delay of each lease, for the settlement that follows.

A grant's time in the log is that of its proposal; its consumer has the message when the answer is written. The leader
keeps that moment for the leases that are held, and puts the difference into the ACK or NACK (SETTLE, ADR 206). A leader
that takes over knows none of them, so those hand-outs stay unknown.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hadelay.api.metrics import Histogram
from hadelay.codec.commands import encode_settle
from hadelay.codec.entries import leases_in
from hadelay.ledger.state import Ledger
from hadelay.model import NONE32
from hadelay.version import SETTLE_LEVEL

#: Upper bounds of hadelay_handout_delay_seconds.
_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
#: Grants remembered beyond those that are held, before the others are forgotten.
_SPARE = 1_024


class Handouts:
    """Of one term of a leader, but for the histogram."""

    def __init__(self) -> None:
        self.delays = Histogram.of(_BOUNDS_S)
        #: (term, seq) → per position, when its answer was written in cluster time; 0: not yet.
        self._at: dict[tuple[int, int], NDArray[np.int64]] = {}

    def forget(self) -> None:
        self._at.clear()

    def answered(
        self, ledger: Ledger, key: tuple[int, int], positions: NDArray[np.integer], due_ms: int, now_ms: int
    ) -> None:
        """These positions of the grant `key` were handed to its consumer. due_ms: when the last of them was due."""
        size = int(positions.max()) + 1
        known = self._at.get(key)
        if known is None or len(known) < size:
            self._at[key] = np.zeros(size, np.int64)
            if known is not None:
                self._at[key][: len(known)] = known
        self._at[key][positions] = now_ms
        grant = ledger.grants.get(key)
        if grant is not None:
            # What was granted ahead of its time was held back until it was due.
            waited_ms = max(0, now_ms - max(grant.granted_at_ms, due_ms))
            for _ in range(len(positions)):
                self.delays.observe(waited_ms / 1000)
        if len(self._at) > 2 * len(ledger.grants) + _SPARE:
            self._at = {key: at for key, at in self._at.items() if key in ledger.grants}

    def settling(self, ledger: Ledger, command: bytes) -> bytes:
        """An ACK or NACK as a SETTLE with what is known of its leases; every other command as it is."""
        if ledger.level < SETTLE_LEVEL or not self._at:
            return command
        leases = leases_in(command)
        if leases is None or not len(leases):
            return command
        delays = np.full(len(leases), NONE32, np.uint32)
        terms, seqs, positions = leases["term"].tolist(), leases["seq"].tolist(), leases["pos"].tolist()
        for n, key in enumerate(zip(terms, seqs, strict=True)):
            at, grant = self._at.get(key), ledger.grants.get(key)
            if at is not None and positions[n] < len(at) and at[positions[n]]:
                # Interval mode hands out first: the grant may not be applied yet.
                delay_ms = 0 if grant is None else int(at[positions[n]]) - grant.granted_at_ms
                delays[n] = min(max(0, delay_ms), NONE32 - 1)
        return command if (delays == NONE32).all() else encode_settle(command, delays)
