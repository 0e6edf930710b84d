"""Messages whose group has no token of its rate (grouprate.py) leave their windows, and come back when the group has a
token. In between, the code says that they rest."""

import numpy as np

from hadelay.codec.formats import Mask, Rows
from hadelay.handout.grouprate import GroupRate
from hadelay.handout.queues import TopicTurn, Window
from hadelay.handout.windows import SMALL_WINDOW, TOTAL, Windows
from hadelay.ledger.groups.messagegroups import groups_of
from hadelay.ledger.state import Ledger

#: Limit of messages that one turn takes out of their windows because their groups have no token: some 10 ms of work.
#: The topic continues in the next turn.
_AT_ONCE = 2_048


class Rests:
    """Takes messages whose group has no token out of their windows, and puts them back later. Until then, they count as
    `in_flight` and in the windows' size, so that no scan adds them again, and memory stays bounded."""

    def __init__(self, windows: Windows, ledger: Ledger) -> None:
        self._windows, self._turns, self._ledger = windows, windows.turns, ledger
        self._now_ms = self._count = 0
        #: Number of messages, of all topics, that are out of their windows until their groups have tokens.
        self.size = 0
        #: Index entry that `hold` let pass because its group has a token → that group.
        self._free: dict[int, int] = {}
        #: Index entry in an undecided offer → rate of the entry's topic, and the entry's group.
        self._offered: dict[int, tuple[GroupRate, int]] = {}

    def release(self, now_ms: int) -> None:
        """Begin a turn: put messages whose groups have a token by now back at the head of their windows."""
        self._now_ms, self._count = now_ms, 0
        for topic in self._turns.rests.due(now_ms):
            rate = topic.group_rate
            for entry in reversed(rate.woken(now_ms)) if rate is not None else ():
                self._windows.size -= 1
                self.size -= 1
                for window in self._windows.in_flight.pop(entry, ()):
                    if not window.closed:
                        self._windows.give_back(window, [entry])
            self._await(topic)
            for queue in topic.queues():
                self._turns.activate(queue)

    def hold(self, window: Window, entries: list[int], rows: Rows, wanted: Mask) -> Mask:
        """Put aside those wanted rows whose groups have no token until they have one; returns a mask of these rows. If
        a group has a token, only its first row may use the token."""
        rests, topic, now_ms = np.zeros(len(rows), np.bool_), window.queue.topic, self._now_ms
        rate, at = topic.group_rate, np.flatnonzero(wanted)
        self._free.clear()
        if rate is None or not rate.interval_ms:
            return rests
        due, used = rows["deliver_at_ms"].tolist(), set[int]()
        for n, group in zip(at.tolist(), groups_of(self._ledger, rows["first_id"][at].tolist()), strict=True):
            if group is None:
                continue
            free_ms = now_ms + rate.interval_ms if group in used else rate.free_ms(group, now_ms)
            if free_ms <= max(now_ms, due[n]):
                used.add(group)
                self._free[entries[n]] = group
                continue
            rests[n] = True
            rate.rest(entries[n], free_ms)
            self._windows.in_flight[entries[n]] = (window,)
        count = int(rests.sum())
        self._windows.size += count
        self.size += count
        self._count += count
        if self._count >= _AT_ONCE:
            rate.again_ms = max(rate.again_ms, self._turns.now_ms + 1)
        if len(rate.resting) >= (self._windows.limit if self._windows.size < TOTAL else SMALL_WINDOW):
            rate.stop_until(rate.resting[0][0])
        self._await(topic)
        return rests

    def offer(self, topic: TopicTurn, entries: list[int]) -> None:
        """Note that entries of a topic were offered: their groups get no other offer until `decided`."""
        rate = topic.group_rate
        for entry in entries if rate is not None else ():
            if rate is not None and (group := self._free.get(entry)) is not None:
                rate.busy.add(group)
                self._offered[entry] = rate, group

    def decided(self, entries: list[int], granted: Mask | None, handed_ms: int) -> None:
        """Note that an offer was decided. granted: mask of the granted messages; None: each may have been granted,
        because the grant may be committed late. handed_ms: time of the hand-out."""
        for n, entry in enumerate(entries if self._offered else ()):
            rate, group = self._offered.pop(entry, (None, 0))
            if rate is not None:
                rate.decided(group, handed_ms if granted is None or granted[n] else None)

    def _await(self, topic: TopicTurn) -> None:
        if topic.group_rate is not None and topic.group_rate.resting:
            self._turns.rests.set(topic, topic.group_rate.resting[0][0])
