"""Walks the linked list of one second's index entries, from the last entry back. Loading due messages, a new leader and
scans find the messages of a second by such walks. A step costs some 60 ns.

The walk checks every link. A link always points to an *older* entry, so a walk ends by construction and a cycle shows
as a link forward; and every entry must have its own number, its second, the next smaller localIndex and a CRC that
fits. The first entry that does not ends the walk: the entries found so far are good, those behind the damage are out
of reach until the entry is repaired.
"""

from typing import Any, NamedTuple

import numpy as np

from hadelay.codec.formats import INDEX, INDEX_SIZE, SECONDS_PER_HOUR, Rows
from hadelay.codec.linking import INDEX_CRC
from hadelay.ledger.ports import HourStore
from hadelay.model import NONE32

#: Limits of a walk of an hour that is not mapped into memory: entries in one file read, and entries in one slice.
_BLOCK = 64
_UNMAPPED_SLICE = 1_024
_STRIDE = INDEX_SIZE // 4
_PRE = INDEX.fields["pre"][1] // 4  # type: ignore[index]
NO_ROWS = np.zeros(0, INDEX)

#: Value of Damage.second if the damage was found without a walk over a second's entries.
NO_SECOND = 0xFFFF


class Damage(NamedTuple):
    """Damaged index: the chain of `second` (0..3599) breaks at entry `at`; `lost` entries cannot be reached."""

    hour: int
    second: int
    at: int
    lost: int
    what: str


class ChainWalk:
    """Walk over the index entries of one second, newest first, in slices of any size. Entries filed after the start of
    the walk are not part of it: apply reports them to its listener."""

    def __init__(self, store: HourStore, hour: int, second: int) -> None:
        assert 0 <= second < SECONDS_PER_HOUR
        heads = store.heads(hour)
        self.store, self.hour, self.second = store, hour, second
        self.left = int(heads.count[second])
        self.damage: Damage | None = None
        self._next = int(heads.last[second])
        if self.left and self._next >= store.count(hour):
            self._break(self._next, "the head points beyond the index")

    @property
    def done(self) -> bool:
        return self.left == 0 or self.damage is not None

    def will_reach(self, index: int) -> bool:
        """Whether the walk has still to return this entry of its second."""
        return not self.done and index <= self._next

    def step(self, limit: int) -> Rows:
        """The next INDEX rows of the walk, newest first, at most `limit`, all verified; none when the walk is done."""
        if not self.store.count(self.hour):
            self.left = 0  # the hour was deleted since the last slice: all its messages were settled
        if self.done:
            return NO_ROWS
        if not self.store.mapped(self.hour):
            limit = min(limit, _UNMAPPED_SLICE)
        indexes = self._follow(min(limit, self.left))
        rows = self.store.entries(self.hour, np.array(indexes, np.int64), verify=False)
        good = self._verified(rows, indexes)
        if good < len(rows):
            self._break(indexes[good], "the entry does not verify (number, second, localIndex or CRC)", good)
            return rows[:good]
        self.left -= len(rows)
        if self.left and self._next >= indexes[-1]:
            self._break(indexes[-1], f"its link {self._next:#x} does not lead back")
        elif not self.left and self._next != NONE32:
            # As many entries were found as the second's head counts, so the last entry must be the end of the chain.
            self._break(indexes[-1], "the chain goes on behind its first entry")
        return rows

    def _follow(self, limit: int) -> list[int]:
        # This loop runs once per message, so for speed it uses only a list and a typed memoryview.
        at = self._next
        found = [at]
        append = found.append
        base, view = self._view(at)
        for _ in range(limit - 1):
            before = view[(at - base) * _STRIDE + _PRE]
            if before >= at:  # end of the chain (NONE32), or a damaged link to a later entry
                self._next = before
                return found
            append(before)
            at = before
            if at < base:
                base, view = self._view(at)
        self._next = view[(at - base) * _STRIDE + _PRE]
        return found

    def _view(self, at: int) -> tuple[int, memoryview]:
        """(first entry's number, 32-bit words) of an index part with entry `at`; of the whole index if it is mapped."""
        if self.store.mapped(self.hour):
            return 0, self.store.pre_view(self.hour)
        base = max(0, at - _BLOCK + 1)
        rows = self.store.entries(self.hour, slice(base, at + 1), verify=False)
        words: Any = np.ascontiguousarray(rows).view(np.uint32)
        return base, memoryview(words)

    def _verified(self, rows: Rows, indexes: list[int]) -> int:
        """Number of undamaged rows before the first damaged one."""
        fine = (rows["index"] == np.array(indexes, np.uint32)) & (rows["second"] == self.second)
        fine &= rows["local"] == np.arange(self.left - 1, self.left - 1 - len(rows), -1)
        fine[INDEX_CRC.bad(rows)] = False
        return len(rows) if fine.all() else int(fine.argmin())

    def _break(self, index: int, what: str, good: int = 0) -> None:
        self.damage = Damage(self.hour, self.second, index, self.left - good, what)
