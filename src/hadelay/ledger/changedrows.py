"""Rows of the ledger that changed since the last checkpoint, encoded in slices, as they were when a checkpoint began.

Everything that grows with use is a row of a table: a topic, a grant, a job, a token, an entry of the audit trail, the
state of an hour. A checkpoint writes the rows that changed since the one before it. Encoding all of them at once would
hold the event loop: `begin` only sets them apart, and slices encode them while entries go on being applied. A row that
changes before its turn is encoded first (copy on write), so every row is written as it was at the beginning (ADR 266).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

#: Tables of the ledger's rows in a checkpoint, and their keys, big-endian: number of a topic (u32), term and seq of a
#: grant (u64 each), number of a bulk job (u32), id of a token (text), number of an audit entry (u64), hour (u32),
#: number of a batch (u64, all bits inverted).
TOPICS, GRANTS, JOBS, TOKENS, AUDIT, HOURS = b"topic", b"grant", b"job", b"token", b"audit", b"hour-states"
BATCHST = b"batchst"
TABLES = (TOPICS, GRANTS, JOBS, TOKENS, AUDIT, HOURS, BATCHST)
#: Limits of the rows and bytes in one slice of a checkpoint.
SLICE_ROWS, SLICE_BYTES = 256, 256 << 10

#: Key of a row in memory: a number or a text; for a grant, (term, seq).
Key = Any
#: Change of a row: (table, key in the table, new value); value None deletes the row.
Row = tuple[bytes, bytes, bytes | None]
Encode = Callable[[bytes, Key], Row]


class HasRow:
    """Base of an object that is stored as a row of a checkpoint. Its methods call `before_change` before they change
    the object."""

    __slots__ = ("before_change",)
    before_change: Callable[[], None]

    def __new__(cls, *_: object, **__: object) -> Self:
        made = super().__new__(cls)
        object.__setattr__(made, "before_change", _ignored)
        return made

    def watch(self, before_change: Callable[[], None]) -> None:
        """From now on, call this function before each change of the object."""
        object.__setattr__(self, "before_change", before_change)


class Watched(HasRow):
    """Base of an object that is stored as a row of a checkpoint, and whose attributes other modules assign: each
    assignment calls `before_change`. A method that changes a list or an array in place has to call it first."""

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> None:
        self.before_change()
        object.__setattr__(self, name, value)


def _ignored() -> None:
    """Stands for `before_change` of an object that has no row in a checkpoint: does nothing."""


def _empty() -> dict[bytes, dict[Key, None]]:
    return {table: {} for table in TABLES}


class ChangedRows:
    """Keys of the rows that changed since the last checkpoint. They are in dicts instead of sets, because the order of
    a dict is the same in every process."""

    def __init__(self) -> None:
        self._changed = _empty()
        #: Keys of the rows that the running checkpoint still has to encode.
        self._waiting: dict[bytes, dict[Key, None]] = {}
        #: Encoded rows that the running checkpoint has not returned yet.
        self._encoded: list[Row] = []
        self._encode: Encode | None = None
        #: Keys of grants made since the last checkpoint. Most of them end before the next checkpoint, which then skips
        #: them.
        self._new: set[Key] = set()

    def note(self, table: bytes, key: Key) -> None:
        """Call this before a row is made, changed or deleted."""
        changed = self._changed[table]
        if key not in changed:
            changed[key] = None
            waiting = self._waiting.get(table)
            if waiting and key in waiting and self._encode is not None:
                del waiting[key]
                self._encoded.append(self._encode(table, key))

    def note_new(self, key: Key) -> None:
        """Call this in place of `note` before a grant is made."""
        if key not in self._changed[GRANTS]:  # a key noted before may be in a checkpoint: its end deletes the row
            self._new.add(key)
        self.note(GRANTS, key)

    def note_gone(self, key: Key) -> None:
        """Call this in place of `note` before a grant is deleted: a grant that no checkpoint contains needs no row."""
        if key in self._new:
            self._new.remove(key)
            del self._changed[GRANTS][key]
        else:
            self.note(GRANTS, key)

    def begin(self, encode: Encode) -> Iterator[Sequence[Row]]:
        """Begin a checkpoint of the rows that changed. Returns slices of encoded rows, made when they are asked for;
        they must be used up before the next checkpoint begins. encode: encodes a row in its present state."""
        assert not any(self._waiting.values()), "one checkpoint at a time"
        self._waiting, self._encode, self._encoded = self._changed, encode, []
        self._changed, self._new = _empty(), set()
        return self._slices(encode)

    def _slices(self, encode: Encode) -> Iterator[Sequence[Row]]:
        for table, waiting in self._waiting.items():
            while waiting:
                size = 0
                while waiting and len(self._encoded) < SLICE_ROWS and size < SLICE_BYTES:
                    row = encode(table, waiting.popitem()[0])
                    size += len(row[2] or b"")
                    self._encoded.append(row)
                yield self._taken()
        self._encode = None
        if self._encoded:
            yield self._taken()

    def _taken(self) -> Sequence[Row]:
        taken, self._encoded = self._encoded, []
        return taken

    def clear(self) -> None:
        """Forget all noted changes: call this when the ledger was just loaded from a checkpoint, and so equals it."""
        self._changed, self._waiting, self._encoded, self._new = _empty(), {}, [], set()

    def keys(self, table: bytes) -> list[Key]:
        """Keys of the rows that the next checkpoint writes."""
        return list(self._changed[table])
