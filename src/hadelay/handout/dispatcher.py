"""The dispatcher decides which ready messages to offer to which waiting receives (polls), and when to decide next.
Callers pass the time and the changes made by apply. It runs on the leader only; a new leader rebuilds its whole state.

    preload (a Second, 10 s ahead) → due: windows of its topic → a poll → Offer (server/delivery proposes the offer as
    a grant; apply decides)

Law 1: a message is offered only when cluster time has reached its deliver_at_ms, to the millisecond.
Law 2: what is owed is in exactly one place: not loaded yet, in a Second, in a window, in flight, or behind a mark.
Law 3: the past never delays the present: a take-over resumes at the dispatch cursor, and scans what is overdue before
       the cursor beside all other work.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap

from hadelay.codec.formats import SECONDS_PER_HOUR
from hadelay.handout.deadlines import Deadlines
from hadelay.handout.matching import Matcher, Offer
from hadelay.handout.owed import Owed
from hadelay.handout.preload import Prefetch, Preload
from hadelay.handout.queues import split
from hadelay.handout.scans import SLICE, Scans
from hadelay.handout.turns import Turns
from hadelay.handout.waiting import Waiting
from hadelay.handout.windows import Windows
from hadelay.ledger.hours.chain import NO_SECOND, ChainWalk, Damage
from hadelay.ledger.hours.hourstate import bitmap, is_in, rows_by_value
from hadelay.ledger.ports import LedgerListener
from hadelay.ledger.topics.topics import by_topic
from hadelay.model import DEAD_HOURS, NONE32, Event

if TYPE_CHECKING:
    from hadelay.ledger.leases.grantrows import OpenGrant
    from hadelay.ledger.state import Ledger
    from hadelay.ledger.topics.topics import TopicState

#: Limit of messages in offers that are neither granted nor refused yet; at the limit, no more messages are offered.
OFFERED = 1 << 16


class TakeOver(NamedTuple):
    """Record of how a new leader resumed hand-outs."""

    #: Replicated dispatch cursor at which the new leader resumed: hour, second of the hour, localIndex.
    hour: int
    second: int
    local: int
    #: Number of messages that fell due before the take-over and were still to be delivered, as far as the new leader
    #: found them.
    overdue: int
    #: Number of messages that were leased by grants of earlier leaders.
    leases: int
    #: Lateness in ms of the first message owed in the cursor's second or later; 0 without any.
    lag_ms: int


class Dispatcher(LedgerListener):
    """Decides which messages to offer to which polls. Each leader makes its own dispatcher."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        preload_ms: int,
        window: int,
        wake: Callable[[], None],
        on_damage: Callable[[Damage], None],
        on_lease: Callable[[OpenGrant], None],
        watch: Callable[[TopicState], None],
        on_ttl: Callable[[int], None],
        on_agenda: Callable[[int], None],
        read_ahead: Prefetch | None,
    ) -> None:
        """Callbacks. wake: asks for an early `advance`, because something changed. on_lease: a grant was applied or
        extended, even if its proposer timed out. watch: a topic was created, changed or deleted, or got dead letters.
        on_ttl, on_agenda: see ledger.ports.LedgerListener."""
        self.ledger, self.store = ledger, ledger.store
        self.turns = Turns(ledger.topics)
        self._owed = Owed(ledger, self._spoiled)
        self.windows = Windows(self._owed, self.turns, ledger.topics, ledger.known_topic, window)
        self.waiting = Waiting(self.windows)
        self.matcher = Matcher(self.windows, self.waiting)
        self.scans = Scans(self.windows, self._damaged)
        self._preload = Preload(self.windows, preload_ms, self._damaged, read_ahead)
        #: Cluster time in ms before which no message is handed out: the previous leader's dispatch cursor.
        self.resume_ms = 0
        #: Cluster time in ms by which the caller has to call `advance` again, as the last `advance` returned it.
        self._next_ms = 0
        #: Ordered set of the seconds, as (hour, second of the hour), whose linked lists of index entries are damaged.
        self._damages: dict[tuple[int, int], None] = {}
        #: Seconds (since 1970) whose index was repaired before the second was over; each is scanned after its end.
        self._repaired: Deadlines[int] = Deadlines()
        #: Damaged index entries: hour → entry numbers, as an ordered set.
        self._bad_entries: dict[int, dict[int, None]] = {}
        self._leased: dict[int, BitMap] = {}
        #: State at the take-over: the replicated dispatch cursor, and the number of leases of earlier leaders.
        self._resumed_at, self._inherited = (0, 0, 0), 0
        self.wake, self._on_damage, self._on_lease, self._watch, self._on_ttl = wake, on_damage, on_lease, watch, on_ttl
        self._on_agenda = on_agenda

    def start(self, now_ms: int) -> None:
        """Begin as the new leader at cluster time now_ms, when all committed entries are applied. Clock alignment: if
        the previous leader's dispatch cursor is ahead of the clock, hand out nothing until the clock reaches the
        cursor. If the cursor is behind the clock, resume at the cursor: messages that fell due since then come at once.
        Scans find messages owed from before the cursor in the background; the preload loads from the present on."""
        hour, second, local = self._resumed_at = self.ledger.cursor
        at = self._preload.reached = hour * SECONDS_PER_HOUR + second
        self.resume_ms = at * 1000
        self.turns.began_ms = now_ms
        self.turns.tick(now_ms)
        self._preload.start()
        self._leased = {hour: state.leased.copy() for hour, state in self.ledger.hours.items() if state.leased}
        self._inherited = sum(map(len, self._leased.values()))
        # Leave a large second, all of whose messages the previous leader made ready, to the background scan.
        whole = local >= SLICE and local >= int(self.store.heads(hour).count[second])
        self.scans.start(at + whole, now_ms // 1000)

    @property
    def cursor(self) -> tuple[int, int, int]:
        """The dispatch cursor: (hour, latest second of the hour with messages made ready, localIndex).

        The localIndex is the number of the second's entries, less those that are still to become ready: so it counts
        the entries that are settled, leased, blocked or ready, whichever leader made them ready. As long as this leader
        does not know the number, the result is the replicated cursor."""
        at = max(self._preload.reached, self.scans.reached)
        hour, second = divmod(at, SECONDS_PER_HOUR)
        left = self._preload.to_come(at)
        if left is None or self.scans.misses(at) or not self.store.mapped(hour):
            return self.ledger.cursor
        return hour, second, int(self.store.heads(hour).count[second]) - left

    def recount(self) -> int | None:
        """Count the entries of the cursor's second that are settled, leased, blocked or due: this number should be the
        cursor's localIndex. None if they cannot be counted now: the second is not loaded or scanned completely, has
        more than SLICE entries, or has entries that an unfinished partial purge cancelled: the localIndex counts only
        those of them that were not loaded before the purge."""
        at = max(self._preload.reached, self.scans.reached)
        hour, second = divmod(at, SECONDS_PER_HOUR)
        unknown = self._preload.to_come(at) is None or self._preload.spilled(at) or self.scans.misses(at)
        if self.busy or unknown or self._damages or not self.store.mapped(hour):
            return None
        walk = ChainWalk(self.store, hour, second)
        if walk.left > SLICE:
            return None
        rows = walk.step(SLICE)
        later = rows[rows["deliver_at_ms"] > self.turns.now_ms]
        if self.ledger.topics.marked(later).any():
            return None
        waits = self.ledger.topics.alive(later)
        if (state := self.ledger.hours.get(hour)) is not None:
            waits &= ~is_in(later["index"], state.settled | state.blocked, state.leased)
        return None if walk.damage is not None else len(rows) - int(waits.sum())

    @property
    def took_over(self) -> TakeOver | None:
        """How this leader resumed; None until all messages that were owed at the take-over are found."""
        if not self.scans.caught_up or self._preload.late:
            return None
        first_ms = min(self._preload.first_ms, self.scans.first_ms)
        return TakeOver(*self._resumed_at, self.scans.found, self._inherited, max(0, self.turns.began_ms - first_ms))

    def advance(self, now_ms: int) -> int:
        """Make messages ready that are due at now_ms. Returns the time (ms) for the next call, NEVER_MS for none."""
        if now_ms < self.resume_ms:
            self._next_ms = self.resume_ms
            return self._next_ms
        self.turns.tick(max(now_ms, self.turns.now_ms))
        if self.waiting.idle:
            self.waiting.end_idle()
        next_ms = self._preload.advance()
        self.scans.first_unloaded = self._preload.first_second
        for at in self._repaired.due(self.turns.now_ms):
            self.scans.recover(at)
        repaired_ms = self._repaired.next()
        self._next_ms = next_ms if repaired_ms is None else min(next_ms, int(repaired_ms))
        return self._next_ms

    @property
    def busy(self) -> bool:
        """Whether loading or scanning is unfinished: the caller then calls `work` soon, and `advance` after that."""
        return bool(self._preload.loading or self.scans.jobs)

    def work(self) -> None:
        """Do two or three milliseconds of work: load some messages of a second, or continue the scans."""
        if self._preload.loading:
            self._preload.work()
        if self.scans.jobs and not self._preload.late:
            self.scans.work()

    def on_filed(self, hours: int | NDArray[np.int64], rows: NDArray[np.void]) -> None:
        # Ask for an early `advance` only if the next one is too late for these entries; most entries are due much
        # later.
        if self._preload.filed(hours, rows) < self._next_ms:
            self.wake()

    def on_granted(self, grant: OpenGrant) -> None:
        self._note_leased(grant)
        self._on_lease(grant)
        for number, count in by_topic(grant.rows["topic"][grant.rows["open"] == 1]):
            self.windows.ready_counts[number] -= count

    def on_extended(self, grant: OpenGrant) -> None:
        self._on_lease(grant)  # report the new end of the lease: an EXTEND may also shorten a lease

    def on_settled(self, hour: int, indexes: NDArray[np.uint32], event: Event) -> None:
        if self.turns.leases_ended():
            self.wake()
        leased = self._leased.get(hour)
        bits = bitmap(indexes)
        if leased is not None and leased.intersect(bits):
            leased -= bits
            if not leased:
                del self._leased[hour]
            return
        if not self._preload.has_seen(hour):
            return
        # These messages were settled without ever being leased: the preload has to drop those that are not due yet. The
        # others may be in windows, which drop settled entries when they come to them.
        rows = self.store.entries(hour, indexes, verify=False)
        due = rows["deliver_at_ms"] <= self.turns.now_ms
        self.windows.ready_counts.subtract(rows["topic"][due & self.ledger.topics.alive(rows)].tolist())
        if not due.all():
            self._preload.drop(hour, rows[~due])

    def on_blocked(self, hour: int, row: NDArray[np.void]) -> None:
        at = hour * SECONDS_PER_HOUR + int(row["second"][0])
        if self._preload.blocked(at, row) or not self._preload.has_seen(hour):
            return
        if row["deliver_at_ms"][0] <= self.turns.now_ms and not self.scans.will_find(at, int(row["index"][0])):
            self.windows.ready_counts[int(row["topic"][0])] -= 1

    def on_unblocked(self, hour: int, rows: NDArray[np.void]) -> None:
        self.wake()
        self._preload.unblocked(hour, rows, self.scans.will_find)

    def on_topic(self, topic: TopicState) -> None:
        self.windows.configure(topic.number)
        self.wake()
        self._watch(topic)

    def on_purged(self, topic: TopicState) -> None:
        self.windows.forget(topic.number)
        self._preload.forget(topic.number)

    def on_dead(self, topic: TopicState) -> None:
        self._watch(topic)

    def on_ttl(self, at_ms: int) -> None:
        self._on_ttl(at_ms)

    def on_agenda(self, next_ms: int) -> None:
        self._on_agenda(next_ms)

    def _note_leased(self, grant: OpenGrant) -> None:
        rows = grant.rows[grant.rows["open"] == 1]
        for hour, mine in rows_by_value(rows["hour"]):
            leased = self._leased.setdefault(hour, BitMap())
            leased |= bitmap(rows["index"][mine])

    def oldest_ready_ms(self, numbers: Collection[int]) -> dict[int, int]:
        """Due time (ms) of the oldest ready message of each topic; rounded to seconds if not in memory."""
        found: dict[int, int] = {}
        firsts: dict[int, dict[int, int]] = {}
        for number in numbers:
            window = self.windows.oldest_window(self.windows.topic(number))
            hour, index = divmod(window.entries[0], 1 << 32) if window.entries else (DEAD_HOURS, 0)
            if hour < DEAD_HOURS and (window.rescan_from is None or hour <= window.rescan_from // SECONDS_PER_HOUR):
                firsts.setdefault(hour, {})[number] = index
        # A topic's first entry in memory is mostly its oldest undelivered message: look up all these entries at once.
        for hour, indexes in firsts.items():
            rows, owed = self._owed.look(hour, np.array(list(indexes.values()), np.uint32))
            due = zip(indexes, rows["deliver_at_ms"].tolist(), owed.tolist(), strict=True)
            found |= {number: at_ms for number, at_ms, is_owed in due if is_owed}
        return found | {number: self._oldest_ready_ms(number) for number in numbers if number not in found}

    def _oldest_ready_ms(self, number: int) -> int:
        window, entry = self.windows.oldest(self.windows.topic(number))
        if self.scans.jobs:
            self.wake()  # `oldest` may have started a scan, for which `work` has to be called
        if entry is not None and (window.rescan_from is None or entry >> 32 <= window.rescan_from // SECONDS_PER_HOUR):
            row = self.store.entries(entry >> 32, np.array([entry & NONE32]), verify=False)
            return int(row["deliver_at_ms"][0])
        return self.turns.now_ms if window.rescan_from is None else window.rescan_from * 1000

    def match(self, now_ms: int) -> list[Offer]:
        """Make offers of ready messages to waiting polls. The caller proposes each offer as a grant, then calls
        `matcher.settle`. now_ms: cluster time, perhaps earlier than at the last `advance`."""
        if self.turns.now_ms < self.resume_ms:
            return []
        offers = self.matcher.match(OFFERED + self.matcher.rests.size - len(self.windows.in_flight), now_ms)
        if self.matcher.unfinished:
            self.wake()
        return offers

    def _damaged(self, damage: Damage) -> None:
        key = damage.hour, damage.second
        if key not in self._damages:
            self._damages[key] = None
            self._on_damage(damage)

    def _spoiled(self, hour: int, indexes: NDArray[np.uint32]) -> None:
        self._bad_entries.setdefault(hour, {}).update(dict.fromkeys(indexes.tolist()))
        for index in indexes.tolist():
            self._on_damage(Damage(hour, NO_SECOND, index, 1, "the entry or its record does not verify"))

    def repaired(self, hour: int) -> None:
        """Make repaired entries of the hour ready; load or scan again the seconds whose linked lists were damaged."""
        if bad := self._bad_entries.pop(hour, None):
            rows, owed = self._owed.look(hour, np.array(list(bad), np.uint32))
            rows = rows[owed]
            for number, entries in split(hour, rows["index"], rows["topic"]) if len(rows) else ():
                first = hour * SECONDS_PER_HOUR + int(rows["second"].min())
                self.windows.add(self.windows.topic(number), first, entries)
        for key in [key for key in self._damages if key[0] == hour]:
            del self._damages[key]
            at = hour * SECONDS_PER_HOUR + key[1]
            if at * 1000 + 1000 <= self.turns.now_ms:
                self.scans.recover(at)
            elif at * 1000 <= self.turns.now_ms:
                self._repaired.set(at, at * 1000 + 1000)
            else:
                self._preload.load(at)
        self.wake()
