"""Checks that a checkpoint has the whole state of a ledger. For tests and the simulator.

A checkpoint stores the rows that changed since the last one. A change that does not note its row is lost with the next
restart, and only if nothing else changes the row before the checkpoint: rarely enough to be seen by nobody.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from pyroaring import BitMap

from hadelay.ledger import checkpoint
from hadelay.ledger.changedrows import HOURS, TABLES
from hadelay.ledger.checkpoint import load_hour
from hadelay.ledger.state import Ledger
from hadelay.storage.store import Storage

#: Attributes that a restart does not keep: parts that the ledger gets from outside, and counts since the start of the
#: process.
_NOT_KEPT = frozenset((
    "store", "tables", "names", "listener", "settings", "changes", "_changes", "changes_members", "by", "ttl_from",
    "unique_from", "batchend_from", "callbacks", "topics_expired", "schedules_finished",
))  # fmt: skip


class Saved:
    """Rows of a ledger as its last checkpoint stored them."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self._rows = ledger, dumped(ledger)

    def look(self, ledger: Ledger) -> None:
        """Call this before each checkpoint of the ledger. Raises AssertionError if a row changed since the last call,
        and the checkpoint leaves it out. For another ledger, after a restart or from a snapshot, nothing is checked."""
        now = dumped(ledger)
        changed = {key for key in now.keys() | self._rows.keys() if now.get(key) != self._rows.get(key)}
        lost = changed - {(table, key) for table, key, _ in checkpoint.noted(ledger)} if ledger is self._ledger else ()
        self._ledger, self._rows = ledger, now
        text = ", ".join(f"{table.decode()} {key.hex()}" for table, key in sorted(lost))
        assert not lost, f"{text} changed, and the next checkpoint leaves them out"


class Sliced:
    """Check that a checkpoint has the state in which it began: the checkpoint begins before an entry is applied, and
    `look` encodes its rows after the entry."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self._rows = ledger, dumped(ledger)
        self._noted = {table: ledger.changes.keys(table) for table in TABLES}
        for table, keys in zip(TABLES, checkpoint._keys(ledger), strict=True):
            self._note(table, keys)
        _, self._slices = checkpoint.begin(ledger)

    def _note(self, table: bytes, keys: Iterable[Any]) -> None:
        for key in list(keys):
            self._ledger.changes.note(table, key)

    def look(self) -> None:
        """Encode the rows of the checkpoint. Raises AssertionError if a row has its state after the entry: then apply
        changed the row before it noted the change."""
        found = {(table, key): value for some in self._slices for table, key, value in some if value is not None}
        found |= _canonical(found)
        for table, keys in self._noted.items():
            self._note(table, keys)
        differ = {at for at in found.keys() | self._rows.keys() if found.get(at) != self._rows.get(at)}
        text = ", ".join(f"{table.decode()} {key.hex()}" for table, key in sorted(differ))
        assert not differ, f"{text}: encoded in a later state than that in which the checkpoint began"


def dumped(ledger: Ledger) -> dict[tuple[bytes, bytes], bytes]:
    """All rows of a ledger: (table, key) → value."""
    return {(table, key): value for table, rows in checkpoint.dump(ledger)[1].items() for key, value in rows}


def stored(storage: Storage) -> dict[tuple[bytes, bytes], bytes]:
    """The rows of the last durable checkpoint, in the form of `dumped`."""
    found = {(table, key): value for table, rows in storage.core_rows(TABLES).items() for key, value in rows}
    return found | _canonical(found)


def _canonical(rows: dict[tuple[bytes, bytes], bytes]) -> dict[tuple[bytes, bytes], bytes]:
    """The rows with states of hours, encoded in the form that `dumped` uses, so that both can be compared."""
    return {at: checkpoint.dump_hour(load_hour(rows[at]), canonical=True) for at in rows if at[0] == HOURS}


def same(one: Any, other: Any, what: str) -> None:
    """Compare a ledger's state with the state that a restart restores, attribute by attribute. Raises AssertionError
    with the name of the first attribute that differs, also of one that no checkpoint knows."""
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
    """Names of the attributes of an object of the ledger; [] for values, which are compared with `==`."""
    if not type(of).__module__.startswith("hadelay.ledger") and type(of).__eq__ is not object.__eq__:  # type: ignore[comparison-overlap]
        return []
    names = [*getattr(of, "__slots__", ()), *getattr(of, "__dict__", ())]
    return [name for name in names if name not in _NOT_KEPT]
