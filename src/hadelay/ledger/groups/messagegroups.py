"""Message groups: at most n = `group_concurrency` messages of a group are handed out at once, in due order.

Rule G: per group, the unblocked messages are its leased ones and, of the waiting ones in order, the first n − leased.
All others are blocked, by a bit in HourState: neither the dispatcher nor GRANT takes them, except as a run (runs.py).
The order is (order_ms, id); order_ms is the due time at publish, reschedule, routing or redrive. With n = 1 a failed
message keeps its order: the group waits for the backoff; with n > 1 the order is the due time of the retry (ADR 224).

    group    {topic u32, floor u16, group u64} big-endian → blocked u32, lowest {order u64, id u64}, limit u8, count u8,
             count × {order u64, id u64, hour u32, index u32}: the unblocked messages ("heads") in order
    groupq   {key of `group`, order u64, id u64} big-endian → hour u32, index u32 of a blocked message
    groupof  id u64 big-endian → {key of `group`, order u64} of a pending message with a group, or of its dead letter

`lowest` is the first row of the group in `groupq`, or a position before it: a search begins there, and passes over no
deleted row. A topic without the setting has rows in `groupof` only: there a group is a label. The floor in the keys is
the topic's: after a purge or deletion nobody reads the old rows, which go as SWEEP ends their messages.
"""

import struct
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap

from hadelay.codec.formats import I64, Mask, Rows
from hadelay.ledger.hours.hourstate import is_in, rows_by_value
from hadelay.ledger.state import Ledger
from hadelay.ledger.topics.topics import TopicState
from hadelay.model import Event

GROUP, GROUPQ, GROUPOF = b"group", b"groupq", b"groupof"
GROUP_KEY = struct.Struct(">IHQ")
#: Layout of the position of a message in its group: order_ms (a due time that orders the group) and message id.
POSITION = struct.Struct(">QQ")
_ORDER = struct.Struct(">Q")
#: Layout of the first bytes of a group's key: number of the topic, and the topic's floor (its oldest valid generation).
_TOPIC = struct.Struct(">IH")
#: Layout of a key in table `groupof`: message id.
MESSAGE = struct.Struct(">Q")
#: Layout of a value in table `groupq`: hour and index of a blocked message's entry.
PLACE = struct.Struct("<II")
_GROUP = struct.Struct("<IQQBB")
_HEAD = struct.Struct("<QQII")
#: First bytes of a row of table `group` if the group has no blocked messages: their number, 0.
_NONE_BLOCKED = bytes(4)
#: Value of order_ms in a dead letter's row of `groupof`: a dead letter is in no group until it is redriven.
IDLE = (1 << 63) - 1
#: Bytes appended to a group's key to get a key above those of all the group's rows in `groupq`.
BEHIND = b"\xff" * (POSITION.size + 1)


class Head(NamedTuple):
    """An unblocked message of a group, and its present entry: the number `entry` of `hour`."""

    order_ms: int
    id: int
    hour: int
    entry: int


@dataclass(slots=True)
class Group:
    limit: int
    heads: list[Head] = field(default_factory=list)
    blocked: int = 0
    lowest: tuple[int, int] = (0, 0)

    def pack(self) -> bytes:
        head = _GROUP.pack(self.blocked, *self.lowest, self.limit, len(self.heads))
        return head + b"".join([_HEAD.pack(*each) for each in self.heads])


def unpack_group(stored: bytes) -> Group:
    blocked, order_ms, first_id, limit, count = _GROUP.unpack_from(stored)
    heads = [Head(*each) for each in _HEAD.iter_unpack(stored[_GROUP.size :])]
    assert len(heads) == count
    return Group(limit, heads, blocked, (order_ms, first_id))


class Change:
    """Changes some groups in memory: `read` loads them, `finish` writes them to the tables."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.tables = ledger, ledger.tables
        self.groups: dict[bytes, Group | None] = {}
        #: Keys of groups that have no row in the table `group`.
        self._without: set[bytes] = set()
        #: Entries (hour, index) that are just being filed. `finish` does not report these to the listener: `filed`
        #: (hours/transitions.py) does so later.
        self.new: set[tuple[int, int]] = set()
        #: Entries (hour, index) whose blocked bit changes, with the new value: True for blocked.
        self._switched: dict[tuple[int, int], bool] = {}
        #: Keys of groups whose first blocked message was removed, as an ordered set.
        self._lost_first: dict[bytes, None] = {}

    def read(self, keys: Iterable[bytes]) -> None:
        """Load the groups with these keys into `groups`, by one look-up."""
        unread = [key for key in dict.fromkeys(keys) if key not in self.groups]
        for key, stored in zip(unread, self.tables.get_many(GROUP, unread), strict=True):
            self.groups[key] = None if stored is None else unpack_group(stored)
            if stored is None:
                self._without.add(key)

    def finish(self) -> None:
        """Write the changed groups to their tables, update HourState.blocked, and report blocked and unblocked entries
        to the ledger's listener."""
        groups = [(key, group) for key, group in self.groups.items() if group is not None]
        kept = {key: group.pack() for key, group in groups if group.heads or group.blocked}
        self.tables.put_new(GROUP, {key: row for key, row in kept.items() if key in self._without})
        self.tables.put_many(GROUP, {key: row for key, row in kept.items() if key not in self._without})
        self.tables.delete_many(GROUP, [key for key, _ in groups if key not in kept and key not in self._without])
        ledger, changed = self.ledger, defaultdict[tuple[int, bool], list[int]](list)
        for (hour, entry), blocked in self._switched.items():
            bits = ledger.hour_state(hour).blocked
            if (entry in bits) != blocked:
                (bits.add if blocked else bits.discard)(entry)
                if (hour, entry) not in self.new:
                    changed[hour, blocked].append(entry)
        for (hour, blocked), entries in changed.items():
            self._tell(hour, ledger.store.entries(hour, np.array(entries, np.uint32)), blocked=blocked)

    def add(self, key: bytes, head: Head) -> None:
        """Add a waiting message to its group. If the group has no room, this message or a later one becomes blocked."""
        limit = self._topic(key).settings.group_concurrency
        group = self.groups[key]
        if group is None:
            if limit is None:
                return
            group = self.groups[key] = Group(limit)
        elif group.limit != limit:
            self.fill(key, group)
        if len(group.heads) >= group.limit and head[:2] < group.heads[-1][:2]:
            last = next((each for each in reversed(group.heads) if self._waits(each)), head)
            if head[:2] < last[:2]:
                group.heads.remove(last)
                insort(group.heads, head)
                head = last
        elif len(group.heads) < group.limit and not group.blocked:
            insort(group.heads, head)
            return
        self._block(key, group, head)
        if len(group.heads) < group.limit:
            self.fill(key, group)

    def fill(self, key: bytes, group: Group) -> None:
        """Unblock the first blocked messages of a group, or block its last unblocked waiting ones, to match the topic's
        limit."""
        group.limit = self._topic(key).settings.group_concurrency or group.limit
        while len(group.heads) > group.limit:
            last = next((each for each in reversed(group.heads) if self._waits(each)), None)
            if last is None:
                return
            group.heads.remove(last)
            self._block(key, group, last)
        room = min(group.limit - len(group.heads), group.blocked)
        if room <= 0:
            return
        # Read one row more than needed: the next search begins at that row.
        for row in self._first(key, group, min(room + 1, group.blocked))[:room]:
            self._let_go(key, group, row)

    def run_on(self, key: bytes, group: Group, wanted: list[tuple[int, int]]) -> int:
        """Unblock the first blocked messages of a group, as long as their entries (hour, entry) are those in `wanted`,
        in that order. Returns the number of unblocked messages."""
        rows = self._first(key, group, min(len(wanted) + 1, group.blocked))
        count = 0
        while count < min(len(rows), len(wanted)) and PLACE.unpack(rows[count][1]) == wanted[count]:
            self._let_go(key, group, rows[count])
            count += 1
        if count < len(rows):
            group.lowest = POSITION.unpack_from(rows[count][0], GROUP_KEY.size)
        return count

    def _let_go(self, key: bytes, group: Group, row: tuple[bytes, bytes]) -> None:
        """Unblock the message of this row of table `groupq`."""
        head = Head(*POSITION.unpack_from(row[0], GROUP_KEY.size), *PLACE.unpack(row[1]))
        insort(group.heads, head)
        self._unblock(key, group, head)
        self._switch(head, blocked=False)

    def _first(self, key: bytes, group: Group, limit: int) -> list[tuple[bytes, bytes]]:
        """Rows of the first blocked messages of a group, which has at least `limit` of them. The next search begins at
        the last of these rows."""
        rows = self.tables.range(GROUPQ, key + POSITION.pack(*group.lowest), key + BEHIND, limit)
        if rows:
            group.lowest = POSITION.unpack_from(rows[-1][0], GROUP_KEY.size)
        return rows

    def remove(self, key: bytes, head: Head, *, blocked: bool) -> None:
        """Remove a message, ended or filed anew, from its group; its bit in HourState.blocked is cleared."""
        group = self.groups[key]
        if group is None:
            return
        if blocked:
            self._unblock(key, group, head)
            if head[:2] == group.lowest:
                self._lost_first[key] = None
        else:
            group.heads = [each for each in group.heads if each.id != head.id]

    def removed(self) -> None:
        """Call this after messages left their groups. Finds the new first blocked message of each group that lost its
        first one, so that later searches do not pass over all rows that were deleted since the last checkpoint."""
        for key in self._lost_first:
            group = self.groups[key]
            if group is not None and group.blocked and is_live(self.ledger, key):
                self._first(key, group, 1)

    def _block(self, key: bytes, group: Group, head: Head) -> None:
        self.tables.put_new(GROUPQ, {key + POSITION.pack(*head[:2]): PLACE.pack(head.hour, head.entry)})
        group.lowest = min(group.lowest, head[:2]) if group.blocked else head[:2]
        group.blocked += 1
        self._topic(key).blocked += 1
        self._switch(head, blocked=True)

    def _unblock(self, key: bytes, group: Group, head: Head) -> None:
        self.tables.delete(GROUPQ, key + POSITION.pack(*head[:2]))
        group.blocked -= 1
        if is_live(self.ledger, key):
            self._topic(key).blocked -= 1

    def _switch(self, head: Head, *, blocked: bool) -> None:
        self._switched[head.hour, head.entry] = blocked

    def _tell(self, hour: int, rows: Rows, *, blocked: bool) -> None:
        """Count the entries (INDEX rows) that became blocked or unblocked, and tell the listener."""
        ledger, hour_state = self.ledger, self.ledger.hour_state(hour)
        if blocked:
            hour_state.drop_seconds(rows["second"])
            for n in range(len(rows)):
                ledger.listener.on_blocked(hour, rows[n : n + 1])
        else:
            if hour <= ledger.now_hour:
                hour_state.add_seconds(rows["second"])
            ledger.listener.on_unblocked(hour, rows)

    def _waits(self, head: Head) -> bool:
        hour_state = self.ledger.hours.get(head.hour)
        return hour_state is None or head.entry not in hour_state.leased

    def _topic(self, key: bytes) -> TopicState:
        return self.ledger.topics[GROUP_KEY.unpack(key)[0]]


def is_live(ledger: Ledger, key: bytes) -> bool:
    """Whether the topic was neither purged nor deleted since the group's row of this key was made."""
    number, floor, _ = GROUP_KEY.unpack(key)
    return bool(floor == ledger.topics[number].floor)


def _key(topic: TopicState, group: int) -> bytes:
    return GROUP_KEY.pack(topic.number, topic.floor, group)


def publish(ledger: Ledger, hours: int | I64, rows: Rows, at: NDArray[np.intp], groups: list[int]) -> Mask:
    """Put the new messages `at` (positions in the INDEX rows as they were appended) into these groups. Returns which of
    the rows are blocked."""
    numbers, ids, indexes = (rows[name][at].tolist() for name in ("topic", "first_id", "index"))
    due = rows["deliver_at_ms"][at].tolist()
    into = [hours] * len(at) if isinstance(hours, int) else hours[at].tolist()
    every = ledger.topics.all
    keys = [_key(every[number], group) for number, group in zip(numbers, groups, strict=True)]
    stored = [key + _ORDER.pack(order_ms) for key, order_ms in zip(keys, due, strict=True)]
    ledger.tables.put_new(GROUPOF, dict(zip(map(MESSAGE.pack, ids), stored, strict=True)))
    for number, count in Counter(numbers).items():
        every[number].group_rows += count
        every[number].grouped += count
    heads = zip(due, ids, into, indexes, strict=True)
    limits = {number: every[number].settings.group_concurrency for number in set(numbers)}
    if len(set(keys)) == len(keys) and all(limits.values()) and not any(ledger.tables.get_many(GROUP, keys)):
        # Block nothing: all groups are new, and each message is alone in its group.
        firsts = [_GROUP.pack(0, 0, 0, limits[number], 1) for number in numbers]
        groups_of = [first + _HEAD.pack(*head) for first, head in zip(firsts, heads, strict=True)]
        ledger.tables.put_new(GROUP, dict(zip(keys, groups_of, strict=True)))
        return np.zeros(len(rows), np.bool_)
    change = Change(ledger)
    change.new.update(zip(into, indexes, strict=True))
    change.read(keys)
    for key, head in zip(keys, heads, strict=True):
        change.add(key, Head(*head))
    change.finish()
    return _blocked(ledger, hours, rows)


def _blocked(ledger: Ledger, hours: int | I64, rows: Rows) -> Mask:
    found = np.zeros(len(rows), np.bool_)
    for hour, where in [(hours, slice(None))] if isinstance(hours, int) else rows_by_value(hours):
        hour_state = ledger.hours.get(hour)
        if hour_state is not None and hour_state.blocked:
            found[where] = is_in(rows["index"][where], hour_state.blocked)
    return found


def leave(ledger: Ledger, hour: int, rows: Rows, blocked: BitMap, event: Event) -> None:
    """Take ended entries (INDEX or LEASED rows) of one hour out of their groups, and unblock the next messages of these
    groups. A moved message comes back by `rejoin`. blocked: bitmap of those entries that were blocked."""
    names = rows.dtype.names or ()
    ids = (rows if "first_id" in names else ledger.store.entries(hour, rows["index"]))["first_id"].tolist()
    found = ledger.tables.get_many(GROUPOF, [MESSAGE.pack(first_id) for first_id in ids])
    every = zip(ids, rows["index"].tolist(), found, strict=True)
    mine = [(first_id, index, stored) for first_id, index, stored in every if stored is not None]
    keys = [stored[: GROUP_KEY.size] for _, _, stored in mine]
    if event is not Event.MOVED:
        _end(ledger, keys, [first_id for first_id, _, _ in mine], event)
        if all(map(_is_single, ledger.tables.get_many(GROUP, keys))):
            ledger.tables.delete_many(GROUP, keys)
            return
    change = Change(ledger)
    change.read(keys)
    for first_id, index, stored in mine:
        key, (order_ms,) = stored[: GROUP_KEY.size], _ORDER.unpack_from(stored, GROUP_KEY.size)
        change.remove(key, Head(order_ms, first_id, hour, index), blocked=index in blocked)
    change.removed()
    if event is not Event.MOVED:
        for key, group in change.groups.items():
            if group is not None and is_live(ledger, key):
                change.fill(key, group)
    change.finish()


def _is_single(group: bytes | None) -> bool:
    """Whether this row of table `group` belongs to a group with exactly one message."""
    return group is not None and len(group) == _GROUP.size + _HEAD.size and group.startswith(_NONE_BLOCKED)


def _end(ledger: Ledger, keys: list[bytes], first_ids: list[int], event: Event) -> None:
    """Subtract messages that end from their topics' counts of messages with a group, and delete their rows of
    `groupof`. The row of a dead letter stays for a redrive, and that of a transferred message until `rejoin`. keys:
    keys of the messages' groups."""
    for (number, floor), count in Counter(map(_TOPIC.unpack_from, keys)).items():
        topic = ledger.topics[number]
        topic.group_rows -= count
        topic.grouped -= count * (floor == topic.floor)
    messages = map(MESSAGE.pack, first_ids)
    if event in (Event.DEAD, Event.TRANSFERRED):
        ledger.grouped_dead += len(first_ids)
        idle = _ORDER.pack(IDLE)
        ledger.tables.put_many(GROUPOF, {message: key + idle for message, key in zip(messages, keys, strict=True)})
    else:
        ledger.tables.delete_many(GROUPOF, messages)


def rejoin(ledger: Ledger, hours: int | I64, rows: Rows, *, keep: bool = False, retry: bool = False) -> Mask | None:
    """Put messages that were filed anew (INDEX rows), also redriven ones, into their groups again; returns a mask of
    the blocked rows. The position in the group (order_ms) becomes the new due time. keep: the old position stays.
    retry: the old position stays if the topic's group_concurrency is 1."""
    every, ids = ledger.topics.all, rows["first_id"].tolist()
    found = ledger.tables.get_many(GROUPOF, [MESSAGE.pack(first_id) for first_id in ids])
    at = [n for n, stored in enumerate(found) if stored is not None]
    if not at:
        return None
    change = Change(ledger)
    due, indexes, numbers = (rows[name].tolist() for name in ("deliver_at_ms", "index", "topic"))
    into = [hours] * len(rows) if isinstance(hours, int) else hours.tolist()
    change.new.update((into[n], indexes[n]) for n in at)
    for n in at:
        stored, topic = found[n] or b"", every[numbers[n]]
        *_, group = GROUP_KEY.unpack_from(stored)
        (order_ms,) = _ORDER.unpack_from(stored, GROUP_KEY.size)
        if order_ms == IDLE:
            ledger.grouped_dead -= 1
            topic.group_rows += 1
            topic.grouped += 1
        if order_ms == IDLE or not (keep or (retry and topic.settings.group_concurrency == 1)):
            order_ms = due[n]
        key = _key(topic, group)
        ledger.tables.put(GROUPOF, MESSAGE.pack(ids[n]), key + _ORDER.pack(order_ms))
        change.read([key])
        change.add(key, Head(order_ms, ids[n], into[n], indexes[n]))
    change.finish()
    return _blocked(ledger, hours, rows)


def forget(ledger: Ledger, first_ids: list[int]) -> None:
    """Delete the rows of `groupof` for dead letters that are being deleted."""
    keys = [MESSAGE.pack(first_id) for first_id in first_ids]
    for key, stored in zip(keys, ledger.tables.get_many(GROUPOF, keys), strict=True):
        if stored is not None:
            ledger.tables.delete(GROUPOF, key)
            ledger.grouped_dead -= 1


def find_group(ledger: Ledger, topic: TopicState, group: int) -> Group | None:
    stored = ledger.tables.get(GROUP, _key(topic, group))
    return None if stored is None else unpack_group(stored)


def groups_of(ledger: Ledger, first_ids: list[int]) -> list[int | None]:
    """Hash (64 bits) of each pending message's group; None for a message without a group."""
    found = ledger.tables.get_many(GROUPOF, [MESSAGE.pack(first_id) for first_id in first_ids])
    return [None if stored is None else GROUP_KEY.unpack_from(stored)[2] for stored in found]
