"""Interfaces of the state machine to its files, tables and dictionary, and to the listener for its changes."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.formats import I64, U32, Rows
from hadelay.codec.linking import Heads
from hadelay.ledger.leases.grantrows import OpenGrant
from hadelay.ledger.topics.topics import TopicState
from hadelay.model import Event


class HourStore(Protocol):
    """The part of storage.hours.HourStore that the ledger uses; the docstrings are there."""

    def count(self, hour: int) -> int: ...

    def counts(self, hours: I64) -> U32: ...

    def hours(self) -> list[int]: ...

    def entries(self, hour: int, indexes: NDArray[np.integer] | slice, *, verify: bool = True) -> Rows: ...

    def mapped(self, hour: int) -> bool: ...

    def index_view(self, hour: int) -> Rows: ...

    def pre_view(self, hour: int) -> memoryview: ...

    def heads(self, hour: int) -> Heads: ...

    def record(self, hour: int, offset: int, size: int, *, verify: bool = False) -> bytes: ...

    def events(self, hour: int, numbers: NDArray[np.integer] | slice = ..., *, verify: bool = True) -> Rows: ...

    def event_count(self, hour: int) -> int: ...

    def sums(self, hour: int) -> tuple[int, int, int, tuple[int, int, int]] | None: ...

    def set_clock(self, now_hour: int) -> None: ...

    # The following methods change files: only apply calls them.

    def append(
        self,
        hours: int | I64,
        rows: Rows,
        blob: bytearray,
        headers: Rows | None = None,
        copies: NDArray[np.bool_] | None = None,
    ) -> U32: ...

    def append_again(self, hour: int, rows: Rows) -> int: ...

    def append_events(self, hour: int, rows: Rows) -> int: ...

    def retire(self, hour: int) -> None: ...


class TableStore(Protocol):
    def get(self, table: bytes, key: bytes) -> bytes | None: ...

    def get_many(self, table: bytes, keys: Sequence[bytes]) -> list[bytes | None]: ...

    def put(self, table: bytes, key: bytes, value: bytes) -> None: ...

    def put_many(self, table: bytes, rows: Mapping[bytes, bytes]) -> None: ...

    def put_new(self, table: bytes, rows: Mapping[bytes, bytes]) -> None: ...

    def delete(self, table: bytes, key: bytes) -> None: ...

    def delete_many(self, table: bytes, keys: Iterable[bytes]) -> None: ...

    def drop_table(self, table: bytes) -> None: ...

    def next_key(self, table: bytes, start: bytes) -> bytes | None: ...

    def range(
        self, table: bytes, start: bytes = b"", end: bytes | None = None, limit: int = 1000
    ) -> list[tuple[bytes, bytes]]: ...

    def range_slices(
        self, table: bytes, start: bytes, end: bytes | None, limit: int
    ) -> Generator[None, None, list[tuple[bytes, bytes]]]: ...


class NameStore(Protocol):
    def number(self, kind: int, name: str) -> int: ...

    def name(self, kind: int, number: int) -> str: ...

    def register(self, kind: int, name: str) -> int: ...


class LedgerListener:
    """Methods that apply calls right after each change. They must not change the ledger, nor keep the arrays that they
    get. The leader's listener is handout/dispatcher.py; a follower's is this class, which does nothing.

    An entry can be handed out from `on_filed` until `on_granted` or `on_settled` names it. A message that comes back
    from a lease (nack, expiry) or is moved has a *new* entry: first `on_settled` of the old one with Event.MOVED, then
    `on_filed` of the new one.
    """

    def on_filed(self, hours: int | I64, rows: Rows) -> None:
        """Entries were filed. rows: complete INDEX rows. hours: the hour of all rows, or the hour of each row."""

    def on_granted(self, grant: OpenGrant) -> None:
        """A grant was applied. Its messages with grant.rows["open"] == 1 are leased."""

    def on_extended(self, grant: OpenGrant) -> None: ...

    def on_settled(self, hour: int, indexes: U32, event: Event) -> None:
        """These entries were settled as ACKED, TTL_EXPIRED, CANCELLED, MOVED or DEAD."""

    def on_blocked(self, hour: int, row: Rows) -> None:
        """This waiting entry (one INDEX row) has to wait behind its group. `on_filed` and `on_settled` do not name
        entries that are blocked."""

    def on_unblocked(self, hour: int, rows: Rows) -> None:
        """These blocked entries (INDEX rows) may be handed out from now on."""

    def on_topic(self, topic: TopicState) -> None:
        """The topic was created, changed or deleted, or has work for maintenance (TopicBook.with_work)."""

    def on_purged(self, topic: TopicState) -> None:
        """Waiting entries of generations before topic.floor are cancelled; `on_settled` names them later."""

    def on_dead(self, topic: TopicState) -> None:
        """Messages of the topic died. An alert is due while topic.settled[Event.DEAD] exceeds topic.alerted."""

    def on_agenda(self, next_ms: int) -> None:
        """A schedule's next occurrence is at this time; 0: the leader has to compute it."""

    def on_ttl(self, at_ms: int) -> None:
        """The TTL of a message ends at at_ms, so that TTL_EXPIRE has work from then on."""
