"""Client keys: the message published last under a key of its topic, and what a publish does when that is pending.

    table `key`    topic number u32 · lives u16 (big-endian) · hash of the key, 16 bytes  →  id u64, start i64
    table `keyof`  id u64 (big-endian)  →  its key in `key`, to find the row when its hour goes

Pending is scheduled, ready or leased. `start` is when the first message of a chain was published of which each replaced
the one before: `max_wait` counts from there (debounce). A key is remembered as long as its message can be asked for.
Within one command rows are decided in order, as if they had come one by one.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.formats import NODE
from hadelay.codec.publishcommand import Publish
from hadelay.codec.results import PublishResult, RowCode
from hadelay.ledger.lookup import EntryRef, cancel_entries, find_entry, state_of
from hadelay.ledger.state import Ledger
from hadelay.ledger.transitions import FLAG_KEYED, PLACE, PLACE_KEY, PLACE_VALUE
from hadelay.model import KEEP, PENDING, REJECT, State

KEY, KEYOF = b"key", b"keyof"
_SCOPE = struct.Struct(">IH")
_VALUE = struct.Struct("<Qq")


def find_key(ledger: Ledger, topic: str, digest: bytes) -> int | None:
    """Id of the message published last under the key that `digest` stands for (drafts.hash_client_key)."""
    found = ledger.known_topic(topic)
    if found is None:
        return None
    stored = ledger.tables.get(KEY, _SCOPE.pack(found.number, found.lives) + digest)
    return None if stored is None else int(_VALUE.unpack(stored)[0])


class Decision:
    """What becomes of the rows that have a client key. Made before anything is filed; `finish` carries it out.

    Between the two, rows may still be refused: `take` says in the end which were filed.
    """

    def __init__(
        self, ledger: Ledger, command: Publish, topics: NDArray[np.uint32], deliver_at_ms: NDArray[np.int64],
        take: NDArray[np.bool_], result: PublishResult,
    ) -> None:  # fmt: skip
        """Takes out of `take` what is answered by another message, and pulls deliver_at_ms in to max_wait."""
        self.ledger, self.node, self.take, self.result = ledger, command.node, take, result
        #: What is filed last under each key of `key`: its row.
        self._last: dict[bytes, int] = {}
        #: (row, key), in order.
        self._filed: list[tuple[int, bytes]] = []
        #: (row, the row of this command that answers for it).
        self._same: list[tuple[int, int]] = []
        #: (row, the row it replaces, or the id).
        self._replaced: list[tuple[int, int | None, int]] = []
        #: When the chain of a row began, if it goes on with one.
        self._starts: dict[int, int] = {}
        rows = command.client_keys
        at = rows["row"]
        numbers = topics[command.rows["topic"][at]]
        scopes = np.zeros(len(rows), [("topic", ">u4"), ("lives", ">u2"), ("hash", "V16")])
        every = ledger.topics.all
        lives = np.array([every[n].lives if n < len(every) else 0 for n in topics.tolist()], np.uint16)
        scopes["topic"], scopes["lives"], scopes["hash"] = numbers, lives[command.rows["topic"][at]], rows["hash"]
        raw, size = scopes.tobytes(), scopes.itemsize
        keys = [raw[n : n + size] for n in range(0, len(raw), size)]
        stored = ledger.tables.get_many(KEY, keys)
        if not any(stored) and len(set(keys)) == len(keys):
            self._filed = list(zip(at.tolist(), keys, strict=True))  # all are new: nothing to decide
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
        earlier = self._last.get(key)
        if stored is not None or earlier is not None:
            place, leased, start = None, False, self.ledger.now_ms
            if earlier is not None:
                start = self._starts.get(earlier, start)
            else:
                assert stored is not None
                first_id, since = _VALUE.unpack(stored)
                place, leased = _pending(self.ledger, first_id)
                start = start if place is None else since
            if earlier is not None or place is not None:
                if mode == KEEP:
                    self._answer(row, earlier, place)
                    return
                if mode == REJECT or leased:
                    self._refuse(row, earlier, place, RowCode.KEY_PENDING if mode == REJECT else RowCode.KEY_LEASED)
                    return
                self._replaced.append((row, earlier, _id_of(place)))
                self._starts[row] = start
        self._last[key] = row
        self._filed.append((row, key))

    def _answer(self, row: int, earlier: int | None, place: EntryRef | None) -> None:
        """By the message that is there."""
        self.take[row] = False
        if earlier is not None:
            self._same.append((row, earlier))
            return
        assert place is not None
        self.result.ids[row] = place.rows["first_id"][0]
        self.result.deliver_at_ms[row] = place.rows["deliver_at_ms"][0]
        self.result.duplicate[row] = True

    def _refuse(self, row: int, earlier: int | None, place: EntryRef | None, code: RowCode) -> None:
        self.take[row] = False
        self.result.codes[row] = code
        if earlier is not None:
            self._same.append((row, earlier))
        else:
            self._note(row, _id_of(place))

    def _note(self, row: int, other: int) -> None:
        if self.result.others is None:
            self.result.others = np.zeros(len(self.take), np.uint64)
        self.result.others[row] = other

    def replacing(self) -> set[int]:
        """Rows that take the place of another message."""
        return {row for row, _, _ in self._replaced}

    def finish(self) -> None:
        """The rows of `take` are filed: answer for the others, cancel what was replaced, and keep the keys."""
        take, result, ledger = self.take.tolist(), self.result, self.ledger
        for row, earlier in self._same:
            if not take[earlier]:
                result.codes[row] = result.codes[earlier]
            elif result.codes[row]:
                self._note(row, int(result.ids[earlier]))
            else:
                result.ids[row], result.deliver_at_ms[row] = result.ids[earlier], result.deliver_at_ms[earlier]
                result.duplicate[row] = True
        over: list[EntryRef] = []
        for row, before, first_id in self._replaced:
            if take[row] and (before is None or take[before]):
                old = first_id if before is None else int(result.ids[before])
                place = find_entry(ledger, old)
                assert place is not None, "it was pending when this was decided"
                self._note(row, old)
                over.append(place)
        if over:
            node = ledger.number_of(NODE, self.node)
            for hour in dict.fromkeys(place.hour for place in over):
                rows = np.concatenate([place.rows for place in over if place.hour == hour])
                cancel_entries(ledger, hour, rows, node)
        every = result.ids.tolist()
        filed = [one for one in self._filed if take[one[0]]]
        ids, keys = [every[row] for row, _ in filed], [key for _, key in filed]
        starts = [self._starts.get(row, ledger.now_ms) for row, _ in filed] if self._starts else repeat(ledger.now_ms)
        # A key that is there twice: the later one counts.
        ledger.tables.put_many(KEY, dict(zip(keys, map(_VALUE.pack, ids, starts), strict=True)))
        ledger.tables.put_many(KEYOF, dict(zip(map(PLACE_KEY.pack, ids), keys, strict=True)))


def _pending(ledger: Ledger, message_id: int) -> tuple[EntryRef | None, bool]:
    """(where it is, if it is pending; whether it is leased)"""
    place = find_entry(ledger, message_id)
    phase = None if place is None else state_of(ledger, place, ledger.now_ms)
    return (place if phase in PENDING else None), phase is State.LEASED


def take_again(ledger: Ledger, first_id: int, with_it: Collection[int]) -> bool:
    """A dead letter comes back: it has its client key again. False if another message with that key is pending, or is
    `with_it`: comes back by the same command."""
    key = ledger.tables.get(KEYOF, PLACE_KEY.pack(first_id))
    if key is None:
        return True
    stored = ledger.tables.get(KEY, key)
    other = first_id if stored is None else int(_VALUE.unpack(stored)[0])
    if other != first_id and (other in with_it or _pending(ledger, other)[0] is not None):
        return False
    ledger.tables.put(KEY, key, _VALUE.pack(first_id, ledger.now_ms))
    return True


def _id_of(place: EntryRef | None) -> int:
    return 0 if place is None else int(place.rows["first_id"][0])


def forget_keys(ledger: Ledger, hour: int, rows: NDArray[np.void]) -> int:
    """The hour of these INDEX rows goes. Forget the keys of messages whose last entry is among them; returns how many
    rows have the flag. Before their places are forgotten."""
    keyed = rows[rows["flags"] & FLAG_KEYED != 0]
    for first_id, index in zip(keyed["first_id"].tolist(), keyed["index"].tolist(), strict=True):
        place = ledger.tables.get(PLACE, PLACE_KEY.pack(first_id))
        if place is None or place.startswith(PLACE_VALUE.pack(hour, index)):  # else it went on from here
            forget_key(ledger, first_id)
    return len(keyed)


def forget_key(ledger: Ledger, first_id: int) -> None:
    """Nobody finds this message by its key any more."""
    message = PLACE_KEY.pack(first_id)
    key = ledger.tables.get(KEYOF, message)
    if key is None:
        return
    ledger.tables.delete(KEYOF, message)
    stored = ledger.tables.get(KEY, key)
    if stored is not None and _VALUE.unpack(stored)[0] == first_id:
        ledger.tables.delete(KEY, key)
