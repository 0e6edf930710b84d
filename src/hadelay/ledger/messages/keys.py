"""Client keys: look-up of the last message with a key, and outcome of a publish while that message is pending.

    table `key`    topic number u32 · lives u16 (big-endian) · hash of the key, 16 bytes  →  id u64, start i64
    table `keyof`  id u64 (big-endian)  →  its key in `key`, to find the row when its hour goes

Pending is scheduled, ready, blocked or leased. `start` is when the first message of a chain was published of which each
replaced the one before: `max_wait` counts from there (debounce). A key is remembered as long as its message can be
asked for. Within one command rows are decided in order, as if they had come one by one.
"""

import struct
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import repeat

import numpy as np

from hadelay.codec.formats import I64, NODE, U32, Mask, Rows
from hadelay.codec.publishcommand import Publish
from hadelay.codec.results import PublishResult, RowCode
from hadelay.ledger.hours.lookup import EntryRef, find_entries, find_entry
from hadelay.ledger.hours.transitions import FLAG_KEYED, ID_KEY, PLACE, PLACE_VALUE, Leaving, settle
from hadelay.ledger.messages.copies import copies_of, is_copy, pending, published_id, waiting
from hadelay.ledger.state import Ledger
from hadelay.model import KEEP, REJECT, SEPARATOR, Event, State

KEY, KEYOF = b"key", b"keyof"
#: Layout of the first bytes of a key in table `key`: number of the topic, and number of its deletions (`lives`).
SCOPE = struct.Struct(">IH")
_VALUE = struct.Struct("<Qq")


def find_key(ledger: Ledger, topic: str, digest: bytes) -> int | None:
    """Id of the message published last under the client key of this hash (publishcommand.hash_client_key)."""
    key = key_of(ledger, topic, digest)
    stored = None if key is None else ledger.tables.get(KEY, key)
    return None if stored is None else int(_VALUE.unpack(stored)[0])


def key_of(ledger: Ledger, topic: str, digest: bytes) -> bytes | None:
    """Key in the table `key` of the client key with this hash; None if there never was such a topic."""
    found = ledger.known_topic(topic)
    return None if found is None else SCOPE.pack(found.number, found.lives) + digest


@dataclass(slots=True)
class Batch:
    """A PUBLISH command that is being applied: its result so far, and the rows still to be filed."""

    command: Publish
    result: PublishResult
    #: Mask of the command's rows that are still to be filed.
    take: Mask
    #: Due time of each row, in Unix ms.
    deliver_at_ms: I64
    #: Topic number for each topic name in the command; 0 for topics without rows to be filed.
    topics: U32 = field(init=False)
    #: Row → number of the batch that the message joins.
    joins: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.topics = np.zeros(len(self.command.topics), np.uint32)

    def refuse(self, wrong: Mask, code: RowCode) -> None:
        """Refuse the `wrong` rows with this code, unless they were answered or refused already."""
        self.result.codes[self.take & wrong] = code
        self.take &= ~wrong

    def refuse_rows(self, rows: list[int], code: RowCode) -> None:
        """Refuse these rows, like `refuse`. Call this once for all rows: the cost of a call grows with the size of the
        command."""
        if rows:
            wrong = np.zeros(len(self.take), np.bool_)
            wrong[rows] = True
            self.refuse(wrong, code)


def table_keys(ledger: Ledger, batch: Batch, rows: Rows) -> list[bytes]:
    """Key in the table `key` for each of these CLIENT_KEY_ROWs."""
    local = batch.command.rows["topic"][rows["row"]]
    scopes = np.zeros(len(rows), [("topic", ">u4"), ("lives", ">u2"), ("hash", "V16")])
    every = ledger.topics.all
    lives = np.array([every[n].lives if n < len(every) else 0 for n in batch.topics.tolist()], np.uint16)
    scopes["topic"], scopes["lives"], scopes["hash"] = batch.topics[local], lives[local], rows["hash"]
    raw, size = scopes.tobytes(), scopes.itemsize
    return [raw[n : n + size] for n in range(0, len(raw), size)]


class Decision:
    """Decides about rows of a batch with client keys, before anything is filed; `finish` carries the decisions out.

    Between the two, rows may still be refused: `batch.take` says in the end which were filed.
    """

    def __init__(self, ledger: Ledger, batch: Batch) -> None:
        """Removes rows from `batch.take` that an existing message answers or forbids; limits due times by max_wait."""
        self.ledger, self.batch, self.result = ledger, batch, batch.result
        #: Key of the table `key` → last row of this command with that key.
        self._last: dict[bytes, int] = {}
        #: Rows to be filed, with their keys of the table `key`: (row, key), in order.
        self._filed: list[tuple[int, bytes]] = []
        #: Rows answered by an earlier row of this command: (row, earlier row).
        self._same: list[tuple[int, int]] = []
        #: Replacements: (replacing row, replaced row of this command or None, id of the replaced earlier message or 0).
        self._replaced: list[tuple[int, int | None, int]] = []
        #: Row → time at which its chain of replacements began, that is, the first replaced message was published.
        self._starts: dict[int, int] = {}
        take, deliver_at_ms, rows = batch.take, batch.deliver_at_ms, batch.command.named
        at, keys = rows["row"], table_keys(ledger, batch, rows)
        stored = ledger.tables.get_many(KEY, keys)
        if not any(stored) and len(set(keys)) == len(keys):
            self._filed = list(zip(at.tolist(), keys, strict=True))  # no key is known, and none occurs twice
        else:
            columns = zip(at.tolist(), keys, stored, rows["mode"].tolist(), take[at].tolist(), strict=True)
            for row, key, known, mode, taken in columns:
                if taken:
                    self._decide(row, key, known, mode)
        waits = rows["max_wait_ms"].tolist()
        if any(waits):
            for row, max_wait_ms in zip(at.tolist(), waits, strict=True):
                if max_wait_ms > 0 and take[row]:
                    latest = max(self._starts.get(row, ledger.now_ms) + max_wait_ms, ledger.now_ms)
                    deliver_at_ms[row] = min(deliver_at_ms[row], latest)

    def _decide(self, row: int, key: bytes, stored: bytes | None, mode: int) -> None:
        earlier, known, leased, start = self._last.get(key), None, False, self.ledger.now_ms
        if earlier is not None:
            start = self._starts.get(earlier, start)
        elif stored is not None:
            first_id, since = _VALUE.unpack(stored)
            place, leased = _pending(self.ledger, first_id)
            if place is not None:
                known, start = (first_id, int(place.rows["deliver_at_ms"][0])), since
        if earlier is not None or known is not None:
            if mode == KEEP:
                self._give_way(row, earlier, known, RowCode.OK)
                return
            if mode == REJECT or leased:
                self._give_way(row, earlier, known, RowCode.KEY_PENDING if mode == REJECT else RowCode.KEY_LEASED)
                return
            self._replaced.append((row, earlier, 0 if known is None else known[0]))
            self._starts[row] = start
        self._last[key] = row
        self._filed.append((row, key))

    def _give_way(self, row: int, earlier: int | None, known: tuple[int, int] | None, code: RowCode) -> None:
        """Do not file the row: answer with the pending message that has its key (code OK), or refuse the row. known:
        (id, deliver_at_ms) of a message from before this command."""
        self.batch.take[row] = False
        self.result.codes[row] = code
        if known is None:
            assert earlier is not None
            self._same.append((row, earlier))
        elif code:
            self.result.note_others(row, known[0])
        else:
            self.result.ids[row], self.result.deliver_at_ms[row] = known
            self.result.duplicate[row] = True

    def replaced(self) -> dict[int, int | set[int]]:
        """Row that replaces a message → the replaced row of this command, or numbers of the topics in whose queues the
        replaced earlier message waits."""
        return {row: self._queues(first_id) if before is None else before for row, before, first_id in self._replaced}

    def _queues(self, first_id: int) -> set[int]:
        return {int(place.rows["topic"][0]) for place in waiting(self.ledger, first_id)}

    def finish(self) -> None:
        """Carry out the decisions once the rows of `take` are filed: answers, cancelled messages, stored keys."""
        take, result, ledger = self.batch.take.tolist(), self.result, self.ledger
        for row, earlier in self._same:
            if not take[earlier]:
                result.codes[row] = result.codes[earlier]
            elif result.codes[row]:
                result.note_others(row, result.ids[earlier])
            else:
                result.ids[row], result.deliver_at_ms[row] = result.ids[earlier], result.deliver_at_ms[earlier]
                result.duplicate[row] = True
        over: list[EntryRef] = []
        for row, before, first_id in self._replaced:
            if take[row] and (before is None or take[before]):
                old = first_id if before is None else int(result.ids[before])
                result.note_others(row, old)
                over += waiting(ledger, old)
        if over:
            node = ledger.number_of(NODE, self.batch.command.node)
            for hour in dict.fromkeys(place.hour for place in over):
                rows = np.concatenate([place.rows for place in over if place.hour == hour])
                settle(ledger, Leaving(hour, rows, node=node), Event.CANCELLED)
        every = result.ids.tolist()
        filed = [one for one in self._filed if take[one[0]]]
        ids, keys = [every[row] for row, _ in filed], [key for _, key in filed]
        starts = [self._starts.get(row, ledger.now_ms) for row, _ in filed] if self._starts else repeat(ledger.now_ms)
        # If a client key occurs twice in the command, the later row counts.
        ledger.tables.put_many(KEY, dict(zip(keys, map(_VALUE.pack, ids, starts), strict=True)))
        ledger.tables.put_many(KEYOF, dict(zip(map(ID_KEY.pack, ids), keys, strict=True)))


def _pending(ledger: Ledger, message_id: int) -> tuple[EntryRef | None, bool]:
    """Entry of the message, or of its first pending copy for a subscription (None if none is pending); and whether the
    message or a copy is leased."""
    found = pending(ledger, message_id)
    return (found[0][0] if found else None), any(state is State.LEASED for _, state in found)


def has_key(ledger: Ledger, first_id: int) -> bool:
    """Whether this message is still the one that was published last under its client key."""
    key = ledger.tables.get(KEYOF, ID_KEY.pack(first_id))
    stored = None if key is None else ledger.tables.get(KEY, key)
    return stored is not None and int(_VALUE.unpack(stored)[0]) == first_id


def take_again(ledger: Ledger, first_id: int, with_it: Collection[int]) -> bool:
    """Restore the client key of a dead letter, or of the message of which a dead letter is a copy. first_id: id of the
    published message. False if another message, pending or in `with_it` (redriven too), has the key."""
    key = ledger.tables.get(KEYOF, ID_KEY.pack(first_id))
    if key is None:
        return True
    stored = ledger.tables.get(KEY, key)
    other = first_id if stored is None else int(_VALUE.unpack(stored)[0])
    if other != first_id and (other in with_it or _pending(ledger, other)[0] is not None):
        return False
    ledger.tables.put(KEY, key, _VALUE.pack(first_id, ledger.now_ms))
    return True


def forget_keys(ledger: Ledger, hour: int, rows: Rows) -> int:
    """Forget the client keys of messages whose present entry is among these INDEX rows of an hour to be deleted;
    returns the number of rows with a key. To be called while the messages' rows in the table `place` still exist."""
    keyed = rows[rows["flags"] & FLAG_KEYED != 0]
    columns = zip(*(keyed[name].tolist() for name in ("first_id", "index", "topic")), strict=True)
    for first_id, index, topic in columns:
        place = ledger.tables.get(PLACE, ID_KEY.pack(first_id))
        if place is None or place.startswith(PLACE_VALUE.pack(hour, index)):  # the message's present entry is this row
            leave_key(ledger, ledger.topics[topic].name, first_id, hour)
    return len(keyed)


def leave_key(ledger: Ledger, topic: str, first_id: int, hour: int | None = None) -> None:
    """Forget the client key of a message that is routed to another topic (hour None), or is deleted with its hour. If
    the message has copies for subscriptions, the key is forgotten with the last copy, or when the message itself is
    routed."""
    published = first_id
    if topic.partition(SEPARATOR)[0] in ledger.topics.subscriptions:
        published = published_id(ledger, first_id) or 0
        # Do nothing if the published message is in the same hour: the call for that message decides about the key.
        if hour is not None and published != first_id and find_entries(ledger, [published])[0][0] == hour:
            return
        if (hour is not None or published != first_id) and _has_others(ledger, published, first_id, hour):
            return
    forget_key(ledger, published)


def _has_others(ledger: Ledger, published: int, leaving: int, hour: int | None) -> bool:
    """Whether the published message, or a copy of it, still has the client key and stays. leaving: the message that is
    routed or deleted; hour: the hour that is deleted with all its messages; None: only `leaving` is routed or
    deleted."""
    ids = [one for one in (published, *copies_of(ledger, published)) if one != leaving]
    hours, _ = find_entries(ledger, ids)
    staying = [one for one, at in zip(ids, hours.tolist(), strict=True) if at >= 0 and at != hour]
    # Stop at the first such message: each look-up reads the index.
    places = (place for one in staying if (place := find_entry(ledger, one)) is not None)
    return any(int(place.rows["flags"][0]) & FLAG_KEYED and is_copy(ledger, place) for place in places)


def forget_key(ledger: Ledger, first_id: int) -> None:
    message = ID_KEY.pack(first_id)
    key = ledger.tables.get(KEYOF, message)
    if key is None:
        return
    ledger.tables.delete(KEYOF, message)
    stored = ledger.tables.get(KEY, key)
    if stored is not None and _VALUE.unpack(stored)[0] == first_id:
        ledger.tables.delete(KEY, key)
