"""Checks that a checkpoint has the whole state of a ledger. For tests and the simulator.

A checkpoint stores the hours that changed since the last one. A change that does not note its hour is lost with the
next restart, and only if nothing else changes the hour before the checkpoint: rarely enough to be seen by nobody.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from pyroaring import BitMap

from hadelay.ledger.checkpoint import dump_hour
from hadelay.ledger.state import Ledger

#: Attributes that a restart does not keep: parts that are given to the ledger, and what is counted since its start.
_NOT_KEPT = frozenset((
    "store", "tables", "names", "listener", "settings", "touched", "changes_members", "ttl_from", "unique_from",
    "callbacks", "topics_expired", "schedules_finished",
))  # fmt: skip


class Saved:
    """Hours of a ledger as its last checkpoint stored them."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self._hours = ledger, _dumped(ledger)

    def look(self, ledger: Ledger) -> None:
        """Call this before each checkpoint of the ledger. Raises AssertionError if an hour changed since the last call,
        and the checkpoint leaves it out. Another ledger, after a restart or from a snapshot, is only noted."""
        now = _dumped(ledger)
        changed = {hour for hour in now.keys() | self._hours.keys() if now.get(hour) != self._hours.get(hour)}
        lost = sorted(changed - ledger.touched) if ledger is self._ledger else []
        self._ledger, self._hours = ledger, now
        assert not lost, f"hours {lost} changed, and the next checkpoint leaves them out"


def _dumped(ledger: Ledger) -> dict[int, bytes]:
    return {hour: dump_hour(state, canonical=True) for hour, state in ledger.hours.items()}


def same(one: Any, other: Any, what: str) -> None:
    """Compare a state with the one that a restart makes of it, attribute by attribute. Raises AssertionError with the
    name of the first attribute that differs, also of one that no checkpoint knows."""
    assert type(one) is type(other), f"{what}: {one!r} became {other!r}"
    if isinstance(one, np.ndarray):
        assert np.array_equal(one, other), f"{what}: {one} became {other}"
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), f"{what}: {list(one)} became {list(other)}"
        for key in one:
            same(one[key], other[key], f"{what}[{key!r}]")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), f"{what}: {one} became {other}"
        for n, pair in enumerate(zip(one, other, strict=True)):
            same(*pair, f"{what}[{n}]")
    elif isinstance(one, BitMap) or not _attributes(one):
        assert one == other, f"{what}: {one!r} became {other!r}"
    else:
        for name in _attributes(one):
            same(getattr(one, name), getattr(other, name), f"{what}.{name}")


def _attributes(of: Any) -> list[str]:
    """Names of the attributes of a part of the ledger; none for values, which compare themselves."""
    if not type(of).__module__.startswith("hadelay.ledger") and type(of).__eq__ is not object.__eq__:  # type: ignore[comparison-overlap]
        return []
    names = [*getattr(of, "__slots__", ()), *getattr(of, "__dict__", ())]
    return [name for name in names if name not in _NOT_KEPT]
