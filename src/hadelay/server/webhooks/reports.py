"""Outcomes of calls, proposed as acks and nacks, many to a command.

While one round is being committed, the next one gathers. A report is repeated until it is answered or its lease is
over: group commit takes it to the leader, so calls that were under way when this node lost the lead are settled too.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from hadelay.codec.commands import encode_ack, encode_nack
from hadelay.codec.leasetokens import LEASE
from hadelay.codec.results import LeaseOutcome, LeaseResult
from hadelay.errors import HadelayError
from hadelay.platform.runtime import Runtime
from hadelay.raft.ports import Propose

#: {term, seq, position, hour, index}: a LEASE row.
Lease = tuple[int, int, int, int, int]
#: (delay as encode_nack takes it, reason); None: ack.
Verdict = tuple[int, str] | None
#: Leases in one command.
_MOST = 1_000
_AGAIN_S = 0.05


class Reports:
    def __init__(self, node: str, runtime: Runtime, propose: Propose) -> None:
        self.node, self.runtime, self.propose = node, runtime, propose
        #: (lease, its end in monotonic seconds) by verdict.
        self._waiting: dict[Verdict, list[tuple[Lease, float]]] = {}
        self._in_flight = 0
        self._resting = False
        #: Count of leases lost before their outcome was committed: those messages are called again.
        self.lost = 0

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._in_flight)

    def add(self, lease: Lease, ends: float, verdict: Verdict) -> None:
        self._waiting.setdefault(verdict, []).append((lease, ends))
        self._flush()

    def _flush(self) -> None:
        if self._in_flight or self._resting or not self._waiting:
            return
        now = self.runtime.monotonic()
        waiting, self._waiting = self._waiting, {}
        for verdict, told in waiting.items():
            held = [one for one in told if one[1] > now]
            self.lost += len(told) - len(held)
            for start in range(0, len(held), _MOST):
                part = held[start : start + _MOST]
                rows = np.array([lease for lease, _ in part], LEASE)
                command = encode_ack(self.node, rows) if verdict is None else encode_nack(self.node, rows, *verdict)
                self._in_flight += 1
                self.propose(command, partial(self._told, verdict, part))

    def _told(self, verdict: Verdict, part: list[tuple[Lease, float]], result: Any, error: HadelayError | None) -> None:
        self._in_flight -= 1
        if error is not None or not isinstance(result, LeaseResult):
            # Proposing twice is harmless: a lease that was settled the first time says so.
            self._waiting.setdefault(verdict, []).extend(part)
            self._resting = True
            self.runtime.call_later(_AGAIN_S, self._rested)
            return
        self.lost += int(np.count_nonzero(result.outcomes == LeaseOutcome.LEASE_LOST))
        again = np.flatnonzero(result.outcomes == LeaseOutcome.AGAIN).tolist()
        if again:
            self._waiting.setdefault(verdict, []).extend(part[n] for n in again)
        self._flush()

    def _rested(self) -> None:
        self._resting = False
        self._flush()
