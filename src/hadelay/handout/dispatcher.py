"""The dispatcher decides which ready messages to offer to which waiting receives (polls), and when to decide next.
Callers pass the time and the changes made by apply. It runs on the leader only; a new leader rebuilds its whole state.

    preload (a Second, 10 s ahead) → due: windows of its topic → a poll → Offer (server/delivery proposes the offer as
    a grant; apply decides)

Law 1: a message is offered only when cluster time has reached its deliver_at_ms, to the millisecond.
Law 2: what is owed is in exactly one place: not loaded yet, in a Second, in a window, in flight, or behind a mark.
Law 3: the past never delays the present: a take-over scans what is overdue beside the preload.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap

from hadelay.codec.formats import SECONDS_PER_HOUR
from hadelay.deadlines import Deadlines
from hadelay.handout.matching import Matcher, Offer
from hadelay.handout.owed import Owed
from hadelay.handout.preload import Prefetch, Preload
from hadelay.handout.queues import split
from hadelay.handout.scans import Scans
from hadelay.handout.turns import Turns
from hadelay.handout.waiting import Waiting
from hadelay.handout.windows import Windows
from hadelay.ledger.chain import NO_SECOND, Damage
from hadelay.ledger.hourstate import bitmap, groups
from hadelay.ledger.ports import LedgerListener
from hadelay.ledger.topics import by_topic
from hadelay.model import DEAD_HOURS, NONE32, Event

if TYPE_CHECKING:
    from hadelay.ledger.grants import HeldGrant
    from hadelay.ledger.state import Ledger
    from hadelay.ledger.topics import TopicState

#: Limit of messages offered and not yet granted.
OFFERED = 1 << 16


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
        on_lease: Callable[[HeldGrant], None],
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
        #: Cluster time in ms before which no message is handed out: the time that the previous leader reached.
        self.resume_ms = 0
        #: Seconds whose list of index entries is damaged, as reported: (hour, second of the hour), an ordered set.
        self._damages: dict[tuple[int, int], None] = {}
        #: Seconds (since 1970) whose index was repaired before the second was over; each is scanned after its end.
        self._repaired: Deadlines[int] = Deadlines()
        #: Damaged index entries: hour → entry numbers, as an ordered set.
        self._bad_entries: dict[int, dict[int, None]] = {}
        self._leased: dict[int, BitMap] = {}
        self.wake, self._on_damage, self._on_lease, self._watch, self._on_ttl = wake, on_damage, on_lease, watch, on_ttl
        self._on_agenda = on_agenda

    def start(self, now_ms: int) -> None:
        """Begin as the new leader at cluster time now_ms, when all committed entries are applied. Clock alignment (S2):
        if the previous leader's dispatch cursor is ahead of the clock, hand out nothing until the clock reaches the
        cursor. Scan for messages that fell due before, oldest first, while the preload loads from the present on."""
        hour, second, local = self.ledger.cursor
        self._preload.reached = (hour * SECONDS_PER_HOUR + second, local)
        self.resume_ms = self._preload.reached[0] * 1000
        self.turns.began_ms = now_ms
        self.turns.tick(now_ms)
        self._preload.start()
        for held in self.ledger.grants.values():
            self._note_leased(held)
        self.scans.start(now_ms // 1000)

    @property
    def cursor(self) -> tuple[int, int, int]:
        """The dispatch cursor: (hour, second of the hour, number of messages of that second made ready so far)."""
        hour, second = divmod(self._preload.reached[0], SECONDS_PER_HOUR)
        return hour, second, self._preload.reached[1]

    def advance(self, now_ms: int) -> int:
        """Make messages ready that are due at now_ms. Returns the time (ms) for the next call, NEVER_MS for none."""
        if now_ms < self.resume_ms:
            return self.resume_ms
        self.turns.tick(max(now_ms, self.turns.now_ms))
        if self.waiting.idle:
            self.waiting.end_idle()
        next_ms = self._preload.advance()
        self.scans.first_unloaded = self._preload.first_second
        for at in self._repaired.due(self.turns.now_ms):
            self.scans.recover(at)
        repaired_ms = self._repaired.next()
        return next_ms if repaired_ms is None else min(next_ms, int(repaired_ms))

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
        self.wake()  # always ask for an early `advance`: `turns.now_ms` may be too old to tell what is due
        self._preload.filed(hours, rows)

    def on_granted(self, grant: HeldGrant) -> None:
        self._note_leased(grant)
        self._on_lease(grant)
        for number, count in by_topic(grant.rows["topic"][grant.rows["open"] == 1]):
            self.windows.ready_counts[number] -= count

    def on_extended(self, grant: HeldGrant) -> None:
        self._on_lease(grant)  # report the new lease end: an EXTEND may also make a lease end sooner

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
        # The settled messages were not leased. Windows of ready messages drop the settled entries later.
        rows = self.store.entries(hour, indexes, verify=False)
        due = rows["deliver_at_ms"] <= self.turns.now_ms
        self.windows.ready_counts.subtract(rows["topic"][due & self.ledger.topics.alive(rows)].tolist())
        if not due.all():
            self._preload.drop(hour, indexes)

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

    def _note_leased(self, grant: HeldGrant) -> None:
        rows = grant.rows[grant.rows["open"] == 1]
        for hour, mine in groups(rows["hour"]):
            leased = self._leased.setdefault(hour, BitMap())
            leased |= bitmap(rows["index"][mine])

    def oldest_ready_ms(self, numbers: Collection[int]) -> dict[int, int]:
        """Due time (ms) of the oldest ready message of each topic; rounded to seconds if it is not in memory."""
        found: dict[int, int] = {}
        firsts: dict[int, dict[int, int]] = {}
        for number in numbers:
            window = self.windows.oldest_window(self.windows.topic(number))
            hour, index = divmod(window.entries[0], 1 << 32) if window.entries else (DEAD_HOURS, 0)
            if hour < DEAD_HOURS and (window.rescan_from is None or hour <= window.rescan_from // SECONDS_PER_HOUR):
                firsts.setdefault(hour, {})[number] = index
        # A topic's first entry in memory is nearly always its oldest undelivered: look up all of these at once.
        for hour, indexes in firsts.items():
            rows, owed = self._owed.look(hour, np.array(list(indexes.values()), np.uint32))
            due = zip(indexes, rows["deliver_at_ms"].tolist(), owed.tolist(), strict=True)
            found |= {number: at_ms for number, at_ms, is_owed in due if is_owed}
        return found | {number: self._oldest_ready_ms(number) for number in numbers if number not in found}

    def _oldest_ready_ms(self, number: int) -> int:
        window, entry = self.windows.oldest(self.windows.topic(number))
        if self.scans.jobs:
            self.wake()  # the look may have begun a scan
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
        """Make repaired entries of the hour ready; load or scan the seconds whose chains of entries were damaged."""
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
