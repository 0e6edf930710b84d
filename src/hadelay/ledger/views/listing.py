"""Lists the messages of one topic, or of many, in due order, a page at a time, without reading them all.

A page begins behind a key {due, id} and takes the next `limit` messages that fit. Hours are looked at in order; within
an hour, in the cheapest of three ways:

- second by second along their chains, as long as that is cheaper than to look at every entry: the usual way;
- one pass over the hour's index, in slices: when few of its entries are of these topics;
- the members of a bitmap: when few of its entries are in the states asked for.

So a page costs about what it returns, at most twice one pass over each hour it touches, and no more than BUDGET beyond
the hour that it is in; the rest is on the next page. A listing is a generator that yields after a slice.

Due is max(deliver_at, start of the second of the entry): a message that came late, or was carried into another hour,
is listed where the dispatcher finds it. (due, id) is a total order, and a message's key changes only when the message
is filed anew, so whatever happens to others, none is skipped or repeated. Dead letters come last, in the order in
which they will be dropped: their hours have the highest numbers.
"""

from collections.abc import Generator, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap

from hadelay.codec.formats import I64, INDEX, SECONDS_PER_HOUR, U32, Mask, Rows
from hadelay.codec.linking import INDEX_CRC
from hadelay.codec.meta import has_all
from hadelay.ledger.hours import retries
from hadelay.ledger.hours.chain import ChainWalk
from hadelay.ledger.hours.hourstate import indexes_of, is_in
from hadelay.ledger.hours.lookup import expired
from hadelay.ledger.messages import ttl
from hadelay.ledger.state import Ledger
from hadelay.model import DEAD_HOURS, HOUR_MS, PENDING, Event, Key, State

#: Limit of a page's search cost; beyond it, the page ends even if it is not full. Unit: the cost of looking at one
#: index entry, some 20 ns.
BUDGET = 3_000_000
#: Cost, in the unit of BUDGET, between two pauses (yields) of a listing for other work: one or two milliseconds.
_SLICE = 65_536
#: Number of entries that a pass over an index looks at in one go.
_ROWS = 16_384
_HOUR_COST = 64
#: Extra cost, in the unit of BUDGET, of an hour that is not mapped into memory: its heads are read from files.
_FAR_HOUR = _SLICE // 4
#: Cost, in the unit of BUDGET, of reading a single entry: of an hour mapped into memory (True), or from a file (False).
_STEP_COST = {True: 10, False: 1_024}
_SECOND_COST = 2_048
_STATES = tuple(State)
_CODE = {state: code for code, state in enumerate(_STATES)}
#: State code of an entry that its message has left for another entry.
_ELSEWHERE = len(_STATES)
#: Table: state code of an entry → whether a message in this state waits.
_WAITS = np.array([state in (State.SCHEDULED, State.READY, State.BLOCKED) for state in (*_STATES, None)])
_SETTLED = {Event.TTL_EXPIRED: State.EXPIRED, Event.CANCELLED: State.CANCELLED}
_IN_DEAD_HOURS = frozenset((State.DEAD,))

_LAST_ID = (1 << 64) - 1


def _first_ms(after: Key) -> int:
    """Earliest due time, in ms, that a message behind this key (due time, id) in a listing can have."""
    return after[0] + (after[1] == _LAST_ID)


class ListQuery(NamedTuple):
    #: Number of the topic; for a list over several topics, a mask by topic number, which ends in False.
    topics: int | Mask
    states: frozenset[State]
    #: Range of due times: only messages due in [from_ms, to_ms).
    from_ms: int
    to_ms: int
    #: Bits that a message's tag mask must have. Other messages may have them by chance: the caller checks the tags.
    tag_mask: int
    after: Key
    limit: int
    #: Whether to list also waiting messages of which an attempt failed, whatever `states` are.
    retrying: bool = False


class ListPage(NamedTuple):
    """Messages of a page as columns, in due order. `after`: key before the next page; None on the last page."""

    due_ms: I64
    hours: I64
    rows: Rows  # INDEX rows of the messages
    states: list[State]
    after: Key | None


def listing(ledger: Ledger, query: ListQuery, now_ms: int, budget: int = BUDGET) -> Generator[None, None, ListPage]:
    """Collect the next page. now_ms: cluster time of the request. Raises DamagedFile if a matching entry is damaged.

    Each message is shown as it was at some moment between the first slice and the last.
    """
    spent = slice_spent = 0
    after = max(query.after, (query.from_ms - 1, _LAST_ID))
    look = _Look(ledger, query, now_ms)
    for hour in look.hours(after):
        slice_spent += 0 if ledger.store.mapped(hour) else _FAR_HOUR
        for cost, reached in look.hour(hour, after):
            spent += cost
            slice_spent += cost
            if reached is not None:
                after = max(after, reached)
                if look.full or spent > budget:
                    return look.page(after)
            if slice_spent >= _SLICE:
                slice_spent = 0
                yield
    return look.page(None)


class _Look:
    def __init__(self, ledger: Ledger, query: ListQuery, now_ms: int) -> None:
        self.ledger, self.query, self.now_ms, self.store = ledger, query, now_ms, ledger.store
        self.wanted = np.zeros(len(_STATES) + 1, np.bool_)
        self.wanted[[_CODE[s] for s in query.states]] = True
        only_ready = query.states == {State.READY} and not query.retrying
        self.to_ms = min(query.to_ms, now_ms + 1) if only_ready else query.to_ms
        #: Whether the query wants cancelled or expired messages, and some of them are not marked as settled in the
        #: bitmaps yet.
        one = query.topics
        purged = not isinstance(one, int) or ledger.topics[one].tombstoned > 0
        self.unswept_wanted = State.CANCELLED in query.states and purged
        self.unswept_wanted |= State.EXPIRED in query.states and bool(ttl.due(ledger, now_ms, ledger.ttl_from, 1))
        #: Messages found so far, as (due, hours, codes, rows): at least the first `limit` + 1, if there are so many.
        self._found: list[tuple[I64, I64, NDArray[np.uint8], Rows]] = []
        self._size = 0
        #: Upper bound in ms: messages due later than this cannot be on the page.
        self._bound_ms = 1 << 62

    @property
    def full(self) -> bool:
        return self._size >= self.query.limit

    def page(self, reached: Key | None) -> ListPage:
        """Make the page from the messages found. reached: key up to which the search is complete; None: to the end."""
        if not self._size:
            return ListPage(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, INDEX), [], reached)
        self._cut()
        (due, hours, codes, rows), limit = self._found[0], self.query.limit
        if len(rows) > limit or (len(rows) == limit and reached is not None):
            reached = int(due[limit - 1]), int(rows["first_id"][limit - 1])
        states = [_STATES[code] for code in codes[:limit].tolist()]
        return ListPage(due[:limit], hours[:limit], rows[:limit], states, reached)

    def _add(self, hour: int, due: I64, codes: NDArray[np.uint8], rows: Rows) -> None:
        if len(rows):
            self._size += len(rows)
            self._found.append((due, np.full(len(rows), hour), codes, rows))
            if self._size > 4 * self.query.limit:
                self._cut()

    def _cut(self) -> None:
        """Sort the messages found, and keep the first `limit` and one more."""
        due, hours, codes, rows = (np.concatenate(column) for column in zip(*self._found, strict=True))
        order = np.lexsort((rows["first_id"], due))
        # Drop repeated rows: if the chain of a second is damaged, `_pass` finds rows that `_walk` had found already.
        again = (np.diff(due[order]) == 0) & (np.diff(rows["first_id"][order]) == 0)
        order = np.delete(order, np.flatnonzero(again) + 1)[: self.query.limit + 1]
        self._found = [(due[order], hours[order], codes[order], rows[order])]
        self._size = len(order)
        if self._size > self.query.limit:
            self._bound_ms = int(due[order[-1]])

    def hours(self, after: Key) -> Iterator[int]:
        first, last = _first_ms(after) // HOUR_MS, min((self.to_ms - 1) // HOUR_MS, DEAD_HOURS - 1)
        if self.query.states & _IN_DEAD_HOURS:
            return (h for h in self.store.hours() if h >= first and (h <= last or h >= DEAD_HOURS))
        return (h for h in self.store.hours() if first <= h <= last)

    def hour(self, hour: int, after: Key) -> Iterator[tuple[int, Key | None]]:
        """Search an hour. Yields after each slice: (cost, key up to which all was searched; None if unchanged)."""
        end: Key = (hour * HOUR_MS + HOUR_MS - 1, _LAST_ID)
        count, bits = self.store.count(hour), self._bits(hour)
        few = sum(map(len, bits)) if bits is not None else count
        if few:
            step = _STEP_COST[self.store.mapped(hour)]
            reached = after
            for cost, so_far in self._walk(hour, min(count, few * step), after, step):
                reached = so_far or reached
                yield cost, so_far
            if reached < end and bits is not None and few * step < count:
                members = indexes_of(BitMap.union(BitMap(), *bits))
                yield from self._pass(hour, count, reached, members, step)
            elif reached < end:
                yield from self._pass(hour, count, reached, None, 1)
        yield _HOUR_COST, end

    def _walk(self, hour: int, worth: int, after: Key, step: int) -> Iterator[tuple[int, Key | None]]:
        """Search an hour second by second, to its end or until the cost exceeds `worth`, that of a full pass."""
        start_ms = hour * HOUR_MS
        used, hour_state = self.store.heads(hour).count, self.ledger.hours.get(hour)
        counts = None if hour_state is None or hour_state.blocked else hour_state.open_seconds
        if self.query.states <= PENDING and counts is not None:
            used = counts
        first, last = max(0, (_first_ms(after) - start_ms) // 1000), SECONDS_PER_HOUR
        if hour < DEAD_HOURS:
            last = min(last, -(-(self.to_ms - start_ms) // 1000))
        spent = 0
        for second in (np.flatnonzero(used[first:last]) + first).tolist():
            walk = ChainWalk(self.store, hour, second)
            cost = _SECOND_COST + walk.left * step
            if spent + cost > worth:
                return
            spent += cost
            yield _SECOND_COST, None
            while not walk.done:
                if not self.store.count(hour):
                    return  # the hour was deleted meanwhile: its messages are gone
                yield self._take(hour, walk.step(max(1, _SLICE // step)), after) * step, None
            if walk.damage is not None:
                return  # a pass over the index finds the messages behind the damage
            yield 0, (start_ms + second * 1000 + 999, _LAST_ID)
        yield 0, (start_ms + HOUR_MS - 1, _LAST_ID)

    def _pass(self, hour: int, count: int, after: Key, members: U32 | None, step: int) -> Iterator[tuple[int, None]]:
        """Search the whole index of an hour, or only the entries `members`."""
        store = self.store
        size = max(1, _ROWS // step)
        for at in range(0, count if members is None else len(members), size):
            if store.count(hour) < count:
                return  # the hour was deleted meanwhile: its messages are gone
            end = min(at + size, count)
            indexes = np.arange(at, end, dtype=np.uint32) if members is None else members[at : at + size]
            if members is None and store.mapped(hour):
                rows = store.index_view(hour)[at:end]
            else:
                rows = store.entries(hour, slice(at, end) if members is None else indexes, verify=False)
            yield self._take(hour, rows, after, indexes) * step, None

    def _take(self, hour: int, rows: Rows, after: Key, indexes: U32 | None = None) -> int:
        """Keep the rows that fit the query; returns how many rows were looked at. Filters by columns before it copies
        rows, because most rows do not fit. indexes: entry numbers of rows that are not verified yet."""
        query = self.query
        # A topic that was created since the mask was made has a number beyond the mask: take the last element, False.
        of = query.topics
        fits = rows["topic"] == of if isinstance(of, int) else of.take(rows["topic"], mode="clip")
        if query.tag_mask:
            fits &= has_all(rows["tag_mask"], query.tag_mask)
        at = np.flatnonzero(fits)
        if not len(at):
            return len(rows)
        due, filed = rows["deliver_at_ms"][at], hour * HOUR_MS + rows["second"][at] * np.int64(1000)
        key = due = np.maximum(due, filed)
        if hour >= DEAD_HOURS:
            key, due = filed, rows["deliver_at_ms"][at]
        fits = (due >= query.from_ms) & (due < self.to_ms) & (key >= after[0]) & (key <= self._bound_ms)
        at, key = at[fits], key[fits]
        some = rows.take(at)
        fits = (key > after[0]) | (some["first_id"] > np.uint64(after[1]))
        codes = states_of(self.ledger, hour, some, self.now_ms)
        fits &= self.wanted[codes] | (_WAITS[codes] & retries.failed(some) if self.query.retrying else False)
        at, some, key, codes = at[fits], some[fits], key[fits], codes[fits]
        if indexes is not None and len(some) and len(bad := INDEX_CRC.bad(some)):
            self.store.entries(hour, indexes[at[bad]])  # raises DamagedFile, with the damaged entry
        self._add(hour, key, codes, some)
        return len(rows)

    def _bits(self, hour: int) -> list[BitMap] | None:
        """Bitmaps that together contain all entries which may be in the wanted states, and perhaps more; None if any
        entry of the hour may be."""
        hour_state, states = self.ledger.hours.get(hour), self.query.states
        waiting = _IN_DEAD_HOURS if hour >= DEAD_HOURS else PENDING
        open_wanted = bool(states & waiting) or self.unswept_wanted
        if hour_state is None:
            return None if open_wanted else []
        others = hour_state.others
        bits = [others[event] for event, state in _SETTLED.items() if state in states and event in others]
        if open_wanted and states & waiting == {State.LEASED} and not self.unswept_wanted:
            bits.append(hour_state.leased)
        elif open_wanted and states & waiting == {State.BLOCKED} and not self.unswept_wanted:
            bits.append(hour_state.blocked)
        elif open_wanted:
            bits.append(hour_state.settled.flip(0, self.store.count(hour)))
        if self.query.retrying:
            bits.append(hour_state.retrying)
        if State.ACKED in states:
            bits.append(hour_state.settled - BitMap.union(BitMap(), *others.values()))
        return bits


def states_of(ledger: Ledger, hour: int, rows: Rows, now_ms: int) -> NDArray[np.uint8]:
    """States of INDEX rows, as indexes into `tuple(State)`; _ELSEWHERE for entries that their message has left, and for
    purged dead letters."""
    codes = np.where(rows["deliver_at_ms"] <= now_ms, _CODE[State.READY], _CODE[State.SCHEDULED]).astype(np.uint8)
    codes[~ledger.topics.owed(rows)] = _CODE[State.CANCELLED]
    ended = np.flatnonzero(expired(ledger, rows, now_ms) & (codes == _CODE[State.READY]))
    codes[ended] = _CODE[State.EXPIRED]
    if hour >= DEAD_HOURS:
        # A dead letter's deliver_at_ms is the time of its death; purged dead letters no longer count.
        marks = np.array([ledger.topics[number].dead_mark_ms for number in rows["topic"].tolist()])
        codes[:] = np.where(rows["deliver_at_ms"] > marks, _CODE[State.DEAD], _ELSEWHERE)
    hour_state = ledger.hours.get(hour)
    if hour_state is None:
        return codes
    indexes = rows["index"]
    if hour_state.blocked:
        waits = (codes == _CODE[State.READY]) | (codes == _CODE[State.SCHEDULED])
        codes[waits & is_in(indexes, hour_state.blocked)] = _CODE[State.BLOCKED]
    codes[is_in(indexes, hour_state.leased)] = _CODE[State.LEASED]
    settled = is_in(indexes, hour_state.settled)
    if settled.any():
        codes[settled] = _CODE[State.ACKED]
        for event, bits in hour_state.others.items():
            codes[is_in(indexes, bits)] = _CODE[_SETTLED[event]] if event in _SETTLED else _ELSEWHERE
    return codes
