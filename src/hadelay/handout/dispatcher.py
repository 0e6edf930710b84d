"""The dispatcher, pure: told the time and what apply did, it answers which messages to offer to whom, and when to
look again. It runs on the leader only, from `start` on, and keeps nothing that a new leader could not find again.

    hour wheel → second wheel → a Second, 10 s ahead → due: window of its topic → a poll → Offer (server/dispatcher.py
    proposes it as a grant; apply decides)

Law 1: a message is offered only when cluster time has reached its deliver_at_ms, to the millisecond.
Law 2: what is owed is in exactly one place: not loaded yet, in a Second, in a window, offered, or behind a mark.
Law 3: the past never holds up the present: what a take-over finds overdue is looked through beside the wheel.
Law 4: nothing assumes that a second that has passed no longer grows; but what it grows by comes from apply (the
       loading offset of S1: a second is loaded up to its length, later entries are told by `on_filed`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap

from hadelay.codec.formats import RECORD_SIZE, SECONDS_PER_HOUR
from hadelay.codec.meta import unpack
from hadelay.errors import DamagedFile
from hadelay.handout.lines import DONE, PROPOSED, WAITING, Delivery, Offer, Poll
from hadelay.handout.owed import Owed
from hadelay.handout.ready import Ready
from hadelay.handout.scans import SLICE, Backlog, split
from hadelay.handout.wheel import HourWheel, Second, SecondWheel
from hadelay.ledger.chain import NO_SECOND, ChainWalk, Damage
from hadelay.ledger.hourstate import bitmap, indexes_of
from hadelay.ledger.ports import Listener
from hadelay.ledger.topics import by_topic
from hadelay.model import DEAD_HOURS, HOUR_MS, NEVER_MS, NONE32, Event

if TYPE_CHECKING:
    from hadelay.ledger.grants import HeldGrant
    from hadelay.ledger.topics import Topic
    from hadelay.ledger.views import HandoutView

#: Upper bounds of hadelay_delivery_lateness_seconds, in ms.
LATENESS_BUCKETS_MS = (
    1, 2, 5, 10, 15, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 30_000, 60_000, 120_000, 300_000, 600_000,
    1_800_000, *(hours * 3_600_000 for hours in (1, 3, 6, 12, 24, 48, 96, 168)),
)  # fmt: skip

__all__ = ["DONE", "LATENESS_BUCKETS_MS", "PROPOSED", "WAITING", "Delivery", "Dispatcher", "Offer", "Owed", "Poll"]

#: Messages in loaded seconds. Beyond it a second is loaded only when it is the next one to run.
PRELOAD_ROWS = 1 << 20
_LAST_MOMENT_MS = 1_000
#: Messages offered and not yet granted.
OFFERED = 1 << 16


class Dispatcher(Listener):
    """Between `start` and the end of leadership; a new leader makes a new one."""

    def __init__(
        self,
        view: HandoutView,
        *,
        preload_ms: int = 10_000,
        window: int = 65_536,
        wake: Callable[[], None] = lambda: None,
        on_damage: Callable[[Damage], None] = lambda damage: None,
        on_lease: Callable[[HeldGrant], None] = lambda grant: None,
        watch: Callable[[Topic], None] = lambda topic: None,
        on_ttl: Callable[[int], None] = lambda at_ms: None,
        on_open: Callable[[int], None] = lambda hour: None,
        on_load: Callable[[int, NDArray[np.void], int], None] = lambda hour, rows, ahead_ms: None,
    ) -> None:
        """wake: something changed, so call `advance` soon. on_lease: a grant was applied or extended, whether or not
        whoever proposed that still waits for it. watch: a topic was made, changed or deleted, or messages of it died.
        on_ttl: core.ports.Listener. on_open: the chains of that hour are walked from now on. on_load: these INDEX rows
        of the hour were loaded, so that long before their second begins."""
        self.view, self.store, self.preload_ms = view, view.store, preload_ms
        self.owed = Owed(view)
        self.ready = Ready(window, view.topic, view.topic_number, self.owed.look, self._tags)
        self.backlog = Backlog(self.owed, self.ready, self._damaged)
        self.backlog.on_found = self._count_ready
        self.owed.on_spoiled = self._spoiled
        self.wake = wake
        #: Due, not leased, not settled: per topic number.
        self.ready_counts: Counter[int] = Counter()
        #: (second since 1970, how many of its messages were made ready): the cursor.
        self.reached = (0, 0)
        #: The same, of what this leader made ready: it may have begun in the middle of a second.
        self._counted = (0, 0)
        self.damages: dict[tuple[int, int], Damage] = {}
        #: Seconds since 1970 that were repaired while they ran: looked through when they have passed.
        self._repaired: set[int] = set()
        #: hour → indexes, each once, however often they were looked at
        self._bad_places: dict[int, dict[int, None]] = {}
        #: Nothing is handed out before this: where the previous leader's wheels stood.
        self.resume_ms = 0
        self.tick_ms = 0
        self._hours = HourWheel()
        self._wheels: dict[int, SecondWheel] = {}
        self._seconds: dict[int, Second] = {}
        self._loading: deque[tuple[Second, ChainWalk]] = deque()
        #: Seconds of which not everything fitted into memory.
        self._spilled: dict[int, Counter[int]] = {}
        self._leased: dict[int, BitMap] = {}
        #: Entries of open hours that were cancelled before they were due; some of them are loaded.
        self._gone: dict[int, BitMap] = {}
        self._on_damage, self._on_lease, self._watch, self._on_ttl = on_damage, on_lease, watch, on_ttl
        self._on_open, self._on_load = on_open, on_load

    # ---- taking over

    def start(self, now_ms: int) -> None:
        """Take over at cluster time now_ms, on committed state only. Clock alignment (S2): if the previous leader's
        tick is ahead of the clock, wait until they meet; if it is behind, what fell due meanwhile is looked for from
        the oldest owed second on, in order, while the wheel starts at the present."""
        hour, second, local = self.view.cursor
        self.reached = (hour * SECONDS_PER_HOUR + second, local)
        self.resume_ms = self.reached[0] * 1000
        self.tick_ms = now_ms
        self.ready.tick(now_ms)
        at = now_ms // 1000
        for known in self.store.hours():
            if known == at // SECONDS_PER_HOUR:
                self._open(known, at % SECONDS_PER_HOUR)
            elif at // SECONDS_PER_HOUR < known < DEAD_HOURS:
                self._hours.add(known)
        for held in self.view.held_grants():
            self._note_leased(held)
        self.backlog.start(at, now_ms)

    @property
    def cursor(self) -> tuple[int, int, int]:
        """Hour tick, second tick, localIndex."""
        hour, second = divmod(self.reached[0], SECONDS_PER_HOUR)
        return hour, second, self.reached[1]

    # ---- the wheels

    def advance(self, now_ms: int) -> int:
        """Make ready what is due at now_ms. Returns when to look again, NEVER_MS if nothing is coming."""
        if now_ms < self.resume_ms:
            return self.resume_ms
        self.tick_ms = self.backlog.tick_ms = max(now_ms, self.tick_ms)
        self.ready.tick(self.tick_ms)
        self._open_hours()
        self._load_seconds()
        for second in [s for s in self._seconds.values() if s.loaded and s.next_ms <= self.tick_ms]:
            self._run(second)
        if self._spilled:
            self._leave_spilled()
        for at in [at for at in sorted(self._repaired) if at * 1000 + 1000 <= self.tick_ms]:
            self._repaired.discard(at)
            self.backlog.recover(*divmod(at, SECONDS_PER_HOUR))
        return self._next_ms()

    @property
    def past_first(self) -> bool:
        """Call `work`, and neither `advance` nor `match`, as long as this is True: what fell due while nobody led
        comes before what falls due now."""
        return self.backlog.first

    @property
    def busy(self) -> bool:
        """Call `work` soon, then `advance`."""
        return bool(self._loading) or self.backlog.busy

    def work(self) -> None:
        """One slice, two or three milliseconds: of loading a second, or of looking through the backlog."""
        if self._loading:
            self._load_slice(SLICE)
        if self.backlog.busy and not self._late_loading():
            self.backlog.work()

    def _late_loading(self) -> bool:
        return bool(self._loading) and self._loading[0][0].start_ms <= self.tick_ms

    def _open_hours(self) -> None:
        horizon = (self.tick_ms + self.preload_ms) // HOUR_MS
        while (hour := self._hours.first()) is not None and hour <= horizon:
            self._open(self._hours.take(), 0)
        running = self.tick_ms // HOUR_MS
        for hour in [h for h, wheel in self._wheels.items() if h < running and wheel.first() is None]:
            del self._wheels[hour]
            self._gone.pop(hour, None)

    def _open(self, hour: int, from_second: int) -> None:
        if hour not in self._wheels:
            self._on_open(hour)
            self._wheels[hour] = SecondWheel(hour, self.store.heads(hour).count, from_second)

    def _first_waiting(self) -> tuple[SecondWheel, int] | None:
        """The earliest second that is not loaded; hours are few and open in order."""
        for hour in sorted(self._wheels):
            wheel = self._wheels[hour]
            if (slot := wheel.first()) is not None:
                return wheel, hour * SECONDS_PER_HOUR + slot
        return None

    def _load_seconds(self) -> None:
        budget = SLICE
        while (waiting := self._first_waiting()) is not None:
            wheel, at = waiting
            ahead = at * 1000 - self.tick_ms
            rows = sum(second.size for second in self._seconds.values())
            if ahead > self.preload_ms or (rows > PRELOAD_ROWS and ahead > _LAST_MOMENT_MS):
                break
            if len(self._loading) > self.preload_ms // 1000:
                break
            walk = ChainWalk(self.store, wheel.hour, wheel.take())
            second = self._seconds[at] = Second(at, PRELOAD_ROWS)
            self._loading.append((second, walk))
            budget -= walk.left
            if budget >= 0 and len(self._loading) == 1:
                self._load_slice(SLICE)  # small, and nothing to interleave with
        waiting = self._first_waiting()
        first = NEVER_MS if waiting is None else waiting[1]
        self.backlog.wheel_second = min([first, *(second.second for second, _ in self._loading)])

    def _load_slice(self, limit: int) -> None:
        second, walk = self._loading[0]
        rows = walk.step(limit)
        if len(rows):
            owed = rows[self.view.owed(walk.hour, rows)]
            second.add(owed)
            self._on_load(walk.hour, owed, second.start_ms - self.tick_ms)
        if walk.done:
            self._loading.popleft()
            second.loaded = True
            if second.next_ms == NEVER_MS:
                del self._seconds[second.second]
            if walk.damage is not None:
                self._damaged(walk.damage)

    def _run(self, second: Second) -> None:
        batch = second.take(self.tick_ms)
        if batch is not None:
            indexes, topics = batch.indexes, batch.topics
            gone = self._gone.get(second.hour)
            if gone and gone.intersect(bits := bitmap(indexes)):
                owed = ~np.isin(indexes, indexes_of(gone & bits))
                indexes, topics = indexes[owed], topics[owed]
            if len(indexes):
                self._make_ready(second.hour, second.second, indexes, topics)
        if second.overflow:
            self._spilled.setdefault(second.second, Counter()).update(second.overflow)
            second.overflow = Counter()
        if second.next_ms == NEVER_MS:
            del self._seconds[second.second]

    def _make_ready(self, hour: int, second: int, indexes: NDArray[np.uint32], topics: NDArray[np.uint32]) -> None:
        for number, places in split(hour, indexes, topics):
            self.ready_counts[number] += len(places)
            self.ready.add(number, second, places)
        counted, local = self._counted
        if second >= counted:
            self._counted = (second, len(indexes) + (local if second == counted else 0))
            self.reached = max(self.reached, self._counted)

    def _leave_spilled(self) -> None:
        """A second of which not everything fitted has passed: the rest is due, and behind its topics' marks now."""
        for at in [at for at in self._spilled if at * 1000 + 1000 <= self.tick_ms]:
            for number, count in self._spilled.pop(at).items():
                self.ready_counts[number] += count
                self.ready.leave_out(self.ready.queue(number), at)

    def _next_ms(self) -> int:
        times = [second.next_ms for second in self._seconds.values() if second.loaded]
        times += [at * 1000 + 1000 for at in (*self._spilled, *self._repaired)]
        if (waiting := self._first_waiting()) is not None:
            times.append(max(waiting[1] * 1000 - self.preload_ms, self.tick_ms + 1))
        if (hour := self._hours.first()) is not None:
            times.append(hour * HOUR_MS - self.preload_ms)
        return min(times, default=NEVER_MS)

    # ---- told by apply

    def on_filed(self, hours: int | NDArray[np.int64], rows: NDArray[np.void]) -> None:
        self.wake()  # in any case: `tick_ms` may be as old as the last message
        if isinstance(hours, int):
            self._filed(hours, rows)
        elif len(hours) == 1 or (hours == hours[0]).all():
            self._filed(int(hours[0]), rows)
        else:
            for hour in np.unique(hours).tolist():
                if self._turns(hour):
                    self._filed(hour, rows[hours == hour])

    def _turns(self, hour: int) -> bool:
        """The hour has a second wheel, or is late to get one. Of any other it is enough to know that there is one."""
        if hour in self._wheels or hour < self.tick_ms // HOUR_MS:
            return True
        if hour < DEAD_HOURS:
            self._hours.add(hour)
        return False

    def _filed(self, hour: int, rows: NDArray[np.void]) -> None:
        if not self._turns(hour):
            return
        wheel = self._wheels.get(hour)
        if wheel is None:
            wheel = self._wheels[hour] = SecondWheel(hour, np.zeros(SECONDS_PER_HOUR, np.uint32))
        horizon = (self.tick_ms + self.preload_ms) // 1000 - hour * SECONDS_PER_HOUR
        slots = rows["second"]
        far = slots > horizon
        if far.any():
            for slot in np.unique(slots[far]).tolist():
                wheel.mark(slot)
            rows = rows[~far]
        if len(rows):
            self._filed_near(wheel, rows)

    def _filed_near(self, wheel: SecondWheel, rows: NDArray[np.void]) -> None:
        slots = rows["second"]
        first = int(slots[0])
        if len(rows) == 1 or (slots == first).all():
            self._filed_second(wheel, first, rows)
        else:
            for slot in np.unique(slots).tolist():
                self._filed_second(wheel, slot, rows[slots == slot])

    def _filed_second(self, wheel: SecondWheel, slot: int, rows: NDArray[np.void]) -> None:
        if wheel.waits(slot):
            return  # they will be found by walking: the second is loaded up to its length at that time
        at = wheel.hour * SECONDS_PER_HOUR + slot
        # A second that the tick has not reached goes by the wheel, even with what is overdue: nothing is ever made
        # ready of a second that scans would take for the future.
        later = rows["deliver_at_ms"] > self.tick_ms
        if at * 1000 <= self.tick_ms and not later.all():
            now = rows[~later]
            self._make_ready(wheel.hour, at, now["index"], now["topic"])
            rows = rows[later]
        if len(rows):
            second = self._seconds.get(at)
            if second is None:
                second = self._seconds[at] = Second(at, PRELOAD_ROWS)
                second.loaded = True
            second.add(rows)

    def on_granted(self, grant: HeldGrant) -> None:
        self._note_leased(grant)
        self._on_lease(grant)
        for number, count in by_topic(grant.rows["topic"][grant.rows["open"] == 1]):
            self.ready_counts[number] -= count

    def on_extended(self, grant: HeldGrant) -> None:
        self._on_lease(grant)  # an extension may end sooner than what it extends

    def on_settled(self, hour: int, indexes: NDArray[np.uint32], event: Event) -> None:
        if self.ready.landed():
            self.wake()
        leased = self._leased.get(hour)
        bits = bitmap(indexes)
        if leased is not None and leased.intersect(bits):
            leased -= bits
            if not leased:
                del self._leased[hour]
            return
        if hour > self.tick_ms // HOUR_MS and hour not in self._wheels:
            return  # nothing of it was looked at yet
        # It was waiting: cancelled, expired, or carried away. In a window it stays until it is looked at.
        rows = self.store.entries(hour, indexes, verify=False)
        due = rows["deliver_at_ms"] <= self.tick_ms
        self.ready_counts.subtract(rows["topic"][due & self.view.alive(rows)].tolist())
        if hour in self._wheels and not due.all():
            gone = self._gone.setdefault(hour, BitMap())
            gone |= bitmap(indexes)

    def on_topic(self, topic: Topic) -> None:
        self.ready.configure(topic.number)
        self.wake()
        self._watch(topic)

    def on_purged(self, topic: Topic) -> None:
        self.ready.forget(topic.number)
        for second in self._seconds.values():
            second.forget(topic.number)
        self.ready_counts[topic.number] = 0

    def on_dead(self, topic: Topic) -> None:
        self._watch(topic)

    def on_ttl(self, at_ms: int) -> None:
        self._on_ttl(at_ms)

    def _note_leased(self, grant: HeldGrant) -> None:
        rows = grant.rows[grant.rows["open"] == 1]
        for hour in np.unique(rows["hour"]).tolist():
            leased = self._leased.setdefault(hour, BitMap())
            leased |= bitmap(rows["index"][rows["hour"] == hour])

    def oldest_ready_ms(self, numbers: Collection[int]) -> dict[int, int]:
        """When the oldest ready message of each of these topics fell due; to the second if it is not in memory."""
        found: dict[int, int] = {}
        firsts: dict[int, dict[int, int]] = {}
        for number in numbers:
            window = self.ready.oldest_window(number)
            hour, index = divmod(window.places[0], 1 << 32) if window.places else (DEAD_HOURS, 0)
            if hour < DEAD_HOURS and (window.mark is None or hour <= window.mark // SECONDS_PER_HOUR):
                firsts.setdefault(hour, {})[number] = index
        # The first place nearly always is the one: to look at those of all topics at once costs a tenth.
        for hour, indexes in firsts.items():
            rows, owed = self.owed.look(hour, np.array(list(indexes.values()), np.uint32))
            due = zip(indexes, rows["deliver_at_ms"].tolist(), owed.tolist(), strict=True)
            found |= {number: at_ms for number, at_ms, is_owed in due if is_owed}
        return found | {number: self._oldest_ready_ms(number) for number in numbers if number not in found}

    def _oldest_ready_ms(self, number: int) -> int:
        window, place = self.ready.oldest(number)
        if place is not None and (window.mark is None or place >> 32 <= window.mark // SECONDS_PER_HOUR):
            row = self.store.entries(place >> 32, np.array([place & NONE32]), verify=False)
            return int(row["deliver_at_ms"][0])
        return self.tick_ms if window.mark is None else window.mark * 1000

    def _count_ready(self, number: int, count: int) -> None:
        self.ready_counts[number] += count

    # ---- polls

    def match(self, now_ms: int) -> list[Offer]:
        """Take messages out of their windows for waiting polls: propose each, then call `settle_offer`. now_ms: cluster
        time, which `advance` may have been told ahead of."""
        if self.tick_ms < self.resume_ms:
            return []
        return self.ready.match(OFFERED - len(self.ready.flying), now_ms)

    def settle_offer(self, offer: Offer, granted: NDArray[np.bool_] | None) -> None:
        """Decided by apply: most of what it did not grant is settled or leased, and what is still owed waits again.
        None: not proposed after all."""
        if granted is None:
            self.ready.settle(offer, np.ones(len(offer.places), np.bool_))
        elif granted.all():
            self.ready.settle(offer)
        else:
            owed = np.zeros(len(granted), np.bool_)
            for hour in np.unique(offer.hours[~granted]).tolist():
                mine = np.flatnonzero(~granted & (offer.hours == hour))
                owed[mine] = self.owed.look(hour, offer.indexes[mine])[1]
            self.ready.unused(offer, ~granted)
            self.ready.settle(offer, owed)

    def _tags(self, hour: int, row: np.void) -> list[str] | None:
        """Of the record. Damaged ones are reported, and come again when they are mended."""
        try:
            record = self.store.record(hour, int(row["offset"]), int(row["size"]), verify=True)
        except DamagedFile:
            self._spoiled(hour, row["index"].reshape(1))
            return None
        meta_size = int.from_bytes(record[4:8], "little")
        return unpack(record[RECORD_SIZE : RECORD_SIZE + meta_size]).tags

    # ---- damage

    def _damaged(self, damage: Damage) -> None:
        key = damage.hour, damage.second
        if key not in self.damages:
            self.damages[key] = damage
            self._on_damage(damage)

    def _spoiled(self, hour: int, indexes: NDArray[np.uint32]) -> None:
        self._bad_places.setdefault(hour, {}).update(dict.fromkeys(indexes.tolist()))
        for index in indexes.tolist():
            self._on_damage(Damage(hour, NO_SECOND, index, 1, "the entry or its record does not verify"))

    def repaired(self, hour: int) -> None:
        """Damaged entries of the hour are good again: reach what lay behind them."""
        if bad := self._bad_places.pop(hour, None):
            rows, owed = self.owed.look(hour, np.array(list(bad), np.uint32))
            rows = rows[owed]
            for number, places in split(hour, rows["index"], rows["topic"]) if len(rows) else ():
                self.ready.again(number, places)
        for key in [key for key in self.damages if key[0] == hour]:
            del self.damages[key]
            self._reach_again(*key)
        self.wake()

    def _reach_again(self, hour: int, second: int) -> None:
        at = hour * SECONDS_PER_HOUR + second
        if at * 1000 + 1000 <= self.tick_ms:
            self.backlog.recover(hour, second)
        elif at * 1000 <= self.tick_ms:
            self._repaired.add(at)
        else:  # loaded ahead, in part: once more from the beginning
            fresh = self._seconds[at] = Second(at, PRELOAD_ROWS)
            self._loading.append((fresh, ChainWalk(self.store, hour, second)))
