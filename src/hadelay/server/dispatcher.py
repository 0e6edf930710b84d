"""The dispatcher's hands: timers, proposals, and answers to polls. core/dispatch.py decides what is due and for whom.

commit (default): a hand-out is a grant that is proposed, decided by apply, and only then answered. Many are in flight;
the batcher commits them together. Nothing is waited for: a message that falls due is proposed in the same
millisecond.
interval (S2): handed out at once and proposed within half an interval; while the oldest hand-out that is not committed
is an interval old, nothing more is handed out, so that a crash repeats at most the last 50 ms. After a take-over
everything that was due before is marked as redelivered, on suspicion.

Works between on_leader, when the no-op of the term is applied, and on_follower, and keeps nothing beyond.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from hadelay.config import Config
from hadelay.core.chain import Damage
from hadelay.core.clustertime import ClusterClock
from hadelay.core.commands import Grant, encode_cursor, encode_extend, encode_grant
from hadelay.core.dispatch import DONE, PROPOSED, WAITING, Delivery, Dispatcher, Offer, Poll
from hadelay.core.ports import NoListener
from hadelay.core.results import GrantResult, LeaseOutcome, LeaseResult
from hadelay.core.state import DelayState
from hadelay.errors import Conflict, HadelayError, NoLeader, OutcomeUnknown, Overloaded
from hadelay.runtime import Runtime
from hadelay.server.alarm import Alarm
from hadelay.server.deliveries import Lateness, again, empty, first_time, still_held
from hadelay.server.expiry import Expiry
from hadelay.server.janitor import Janitor

log = logging.getLogger(__name__)

#: done(result, error): the sub-command's own result from apply, or why it is not known.
Done = Callable[[Any, HadelayError | None], None]
#: After a proposal that could not be made.
_BACKOFF_S = 0.02
#: Timers have limits; to wake once an hour costs nothing.
_LONGEST_SLEEP_S = 3_600.0
#: Slices of backlog the sweeper looks at each time.
_SWEEP_SLICES = 4
#: Deadlines of polls that were answered are dropped when they are this many more than those that wait.
_STALE = 1_024


class LeaderDispatcher:
    """Runs on every node, works only between on_leader and on_follower. It is also `state.listener` (set by
    on_leader, cleared by on_follower)."""

    def __init__(
        self,
        *,
        state: DelayState,
        store: Any,
        runtime: Runtime,
        clock: ClusterClock,
        propose: Callable[[bytes, Done], None],
        config: Config,
        on_damage: Callable[[int, int, str], None] | None = None,
    ) -> None:
        """propose: the batcher's. on_damage(hour, index, what): a chain is broken at that entry; after the repair
        call `repaired(hour)`."""
        self.state, self.store, self.runtime, self.clock = state, store, runtime, clock
        self.propose, self.config, self.on_damage = propose, config, on_damage
        self.interval = config.dispatch.sync == "interval"
        self.interval_s = config.dispatch.interval_ms / 1000.0
        self.term = 0
        #: Plain ints for /metrics.
        self.handed_out = 0
        self.damaged_links = 0
        self.lateness = Lateness()
        self._swept_before = 0
        self._core: Dispatcher | None = None
        self._reset()

    def _reset(self) -> None:
        self._seq = 0
        self._turning = False
        self._suspect_ms = 0
        self._resting_until = 0.0
        self._held: Callable[[], None] | None = None
        self._holding = False
        #: Offers on their way, by seq.
        self._offers: dict[int, Offer] = {}
        #: interval mode: not proposed yet, and when each that is not committed was handed out (in order).
        self._unsent: list[tuple[Offer, bytes]] = []
        self._handed_at: dict[int, float] = {}
        #: Polls that wait for a proposal, by what would replace them.
        self._requests: dict[tuple[str, bytes], Poll] = {}
        self._successors: dict[Poll, Poll] = {}
        self._extending: set[Poll] = set()
        self._deadlines: list[tuple[float, int, Poll]] = []
        self._polls = 0
        self._cursor_sent = (0, 0, 0)
        self._cursor_at = 0.0
        self._cursor_busy = False
        self._due = Alarm(self.runtime, self._turn_soon)
        self._late_polls = Alarm(self.runtime, self._turn_soon)
        self._cursor_alarm = Alarm(self.runtime, self._send_cursor)
        self._flush_alarm = Alarm(self.runtime, self.flush)
        self._sweep_alarm = Alarm(self.runtime, self._sweep)

    # ---- leading

    def on_leader(self, term: int) -> None:
        """The no-op of `term` is applied, clock.lead was called, and the clock is ready."""
        self.on_follower()
        now = self._now()
        self.term = term
        core = self._core = Dispatcher(
            self.state,
            self.store,
            preload_ms=self.config.dispatch.preload_ms,
            window=self.config.dispatch.ready_window,
            wake=self._turn_soon,
            on_damage=self._damaged,
        )
        core.start(now)
        self.state.listener = core
        self._suspect_ms = now if self.interval else 0
        self._cursor_sent = core.cursor
        self._expiry = Expiry(
            self.state, self.runtime, self.clock, self.propose, now + self.config.limits.max_clock_skew_ms
        )
        self._janitor = Janitor(self.state, self.runtime, self._now, self.propose, self.config.retention)
        self._arm_sweeper()
        self._turn_soon()

    def on_follower(self) -> None:
        """Stop at once, answer every poll, clear what only a leader knows."""
        core = self._core
        if core is None:
            return
        self.state.listener = NoListener()
        self._core = None
        self._expiry.stop()
        self._janitor.stop()
        for alarm in (self._due, self._late_polls, self._cursor_alarm, self._flush_alarm, self._sweep_alarm):
            alarm.cancel()
        self._swept_before += core.backlog.swept
        polls, held = [*core.ready.polls(), *self._proposed_polls()], self._held
        self._reset()
        for poll in polls:
            self._fail_deposed(poll)
        if held is not None:
            held()

    def _proposed_polls(self) -> list[Poll]:
        asked = [*(offer.poll for offer in self._offers.values()), *self._extending]
        return [poll for poll in map(self._current, asked) if poll.phase == PROPOSED]

    def _fail_deposed(self, poll: Poll) -> None:
        unknown = poll.phase == PROPOSED
        poll.phase = DONE
        if unknown:
            poll.done(None, OutcomeUnknown("the leader changed; ask again with the same request_id"))
        else:
            poll.done(None, NoLeader("the leader changed; nothing was handed out", retry_after_ms=100))

    def clock_changed(self) -> None:
        """The clock was slewed: timers that were set by it are set again."""
        if self._core is not None:
            self._due.cancel()
            self._turn_soon()

    def repaired(self, hour: int) -> None:
        """Damaged entries of the hour were repaired: walk its broken seconds again."""
        if self._core is not None:
            self._core.repaired(hour)

    def _damaged(self, damage: Damage) -> None:
        self.damaged_links += 1
        log.error("chain_damaged", extra=damage._asdict())
        if self.on_damage is not None:
            self.on_damage(damage.hour, damage.at, damage.what)

    def _now(self) -> int:
        return self.clock.read(self.runtime.monotonic())

    # ---- polls

    def poll(self, poll: Poll) -> None:
        """Only on the leader (else done(None, NoLeader) at once)."""
        core = self._core
        if core is None:
            poll.phase = DONE
            poll.done(None, NoLeader("this node does not lead (any more)", retry_after_ms=50))
            return
        poll.phase = WAITING
        poll.deadline = self.runtime.monotonic() + poll.wait_ms / 1000.0
        if poll.request_id and self._is_repeated(poll):
            return
        core.ready.wait(poll)
        self._polls += 1
        heapq.heappush(self._deadlines, (poll.deadline, self._polls, poll))
        if len(self._deadlines) > 2 * core.ready.waiting + _STALE:
            self._deadlines = [item for item in self._deadlines if item[2].phase == WAITING]
            heapq.heapify(self._deadlines)
        self._turn_soon()

    def _is_repeated(self, poll: Poll) -> bool:
        """Idempotent receive: the same {consumer, request_id} takes the place of a waiting poll, or gets what it was
        granted before. True if there is nothing more to do now."""
        key = (poll.consumer, poll.request_id)
        before = self._requests.get(key)
        self._requests[key] = poll
        if before is not None and before.phase == PROPOSED:
            self._successors[before] = poll
            poll.phase, before.phase = PROPOSED, DONE
            before.done(None, _replaced())
            return True
        if before is not None and before.phase == WAITING:
            self._core_or_die().ready.unwait(before)
            before.phase = DONE
            before.done(None, _replaced())
        for offer in self._offers.values() if self.interval else ():
            if (offer.poll.consumer, offer.poll.request_id) == key:
                # Handed out, not committed yet: what became of it is known in a moment.
                self._successors[offer.poll] = poll
                poll.phase = PROPOSED
                self.flush()
                return True
        held = self.state.held_by(poll.consumer, poll.request_id)
        if held is not None:
            self._hand_out_again(poll, held.key)
        return held is not None

    def cancel_poll(self, poll: Poll) -> None:
        """The consumer is gone: unless a grant is proposed for it already, it gets none. `done` is not called."""
        if poll.phase == WAITING and self._core is not None:
            self._core.ready.unwait(poll)
        self._close(poll)

    def _current(self, poll: Poll) -> Poll:
        """The poll, or the one that took its place while its grant was on its way."""
        while poll in self._successors:
            poll = self._successors.pop(poll)
        return poll

    def _close(self, poll: Poll) -> None:
        poll.phase = DONE
        key = (poll.consumer, poll.request_id)
        if self._requests.get(key) is poll:
            del self._requests[key]

    def _answer(self, poll: Poll, delivery: Delivery | None, error: HadelayError | None = None) -> None:
        if poll.phase != DONE:
            self._close(poll)
            poll.done(delivery, error)

    def _wait_on(self, poll: Poll) -> None:
        """Its grant came to nothing: it is the next in line, unless it has waited long enough."""
        if poll.phase == DONE:
            return
        if poll.deadline <= self.runtime.monotonic():
            self._answer(poll, empty(self._now()))
            return
        poll.phase = WAITING
        self._core_or_die().ready.wait_again(poll)
        self._polls += 1
        heapq.heappush(self._deadlines, (poll.deadline, self._polls, poll))
        self._turn_soon()

    def _answer_late_polls(self, core: Dispatcher) -> None:
        mono = self.runtime.monotonic()
        deadlines = self._deadlines
        while deadlines and (deadlines[0][0] <= mono or deadlines[0][2].phase != WAITING):
            poll = heapq.heappop(deadlines)[2]
            if poll.phase == WAITING:
                core.ready.unwait(poll)
                self._answer(poll, empty(self._now()))
        if deadlines:
            self._late_polls.at(deadlines[0][0])

    # ---- one turn: what is due, who gets it, when to look again

    def _turn_soon(self) -> None:
        if not self._turning and self._core is not None:
            self._turning = True
            self.runtime.call_soon(self._turn)

    def _turn(self) -> None:
        self._turning = False
        core = self._core
        if core is None:
            return
        if self._holding:
            self._answer_late_polls(core)
            return  # the wheels stand still, too: their tick is what is handed over
        aligned = self._now() >= core.resume_ms
        if aligned and core.busy:
            core.work()
            if core.past_first:
                self._turn_soon()
                return
        next_ms = core.advance(self._now())
        self._hand_out(core)
        self._answer_late_polls(core)
        self._watch_cursor(core)
        if aligned and core.busy:
            self._turn_soon()
        mono = self.runtime.monotonic()
        self._due.at(mono + min(self.clock.delay_s(next_ms, mono), _LONGEST_SLEEP_S))

    def _hand_out(self, core: Dispatcher) -> None:
        mono = self.runtime.monotonic()
        if self._holding or mono < self._resting_until or self._is_stalled(mono):
            return
        for offer in core.match():
            self._seq += 1
            offer.seq = self._seq
            self._offers[offer.seq] = offer
            poll = offer.poll
            command = encode_grant(
                Grant(
                    self.term,
                    offer.seq,
                    poll.lease_ms,
                    poll.consumer,
                    poll.request_id,
                    self.config.node.name,
                    offer.hours,
                    offer.indexes,
                )
            )
            if self.interval:
                self._hand_out_at_once(offer, command)
            else:
                self.propose(command, partial(self._decided, core, offer))

    def _decided(self, core: Dispatcher, offer: Offer, result: Any, error: HadelayError | None) -> None:
        """commit mode: what apply made of a grant."""
        if core is not self._core:
            return
        del self._offers[offer.seq]
        poll = self._current(offer.poll)
        if error is None and isinstance(result, GrantResult) and result.existing is None:
            core.settle_offer(offer, put_back=False)
            self._granted(core, offer, result, poll)
        else:
            core.settle_offer(offer, put_back=True)
            if error is None and isinstance(result, GrantResult):
                assert result.existing is not None
                self._hand_out_again(poll, result.existing)
            else:
                self._rest()
                if error is None or isinstance(error, OutcomeUnknown):
                    self._answer(poll, None, error or HadelayError(f"the grant was refused: {result}"))
                else:
                    self._wait_on(poll)
        self._check_held(core)
        self._turn_soon()

    def _granted(self, core: Dispatcher, offer: Offer, result: GrantResult, poll: Poll) -> None:
        granted = result.granted
        if not granted.all():
            core.refused(offer, granted)
            if not granted.any():
                self._wait_on(poll)
                return
        self._expiry.add(result.until_ms, (self.term, offer.seq))
        now = self._now()
        if poll.phase == DONE:
            return  # it hung up after the proposal: the lease has to run out
        if (result.until_ms - now) * 2 < poll.lease_ms:
            # Too little of the lease is left to be worth an answer: a whole one, or nothing.
            self._hand_out_again(poll, (self.term, offer.seq))
            return
        delivery = first_time(self.term, offer, result, self._suspect_ms, now)
        self._count(delivery)
        self._answer(poll, delivery)

    def _count(self, delivery: Delivery) -> None:
        self.handed_out += len(delivery.indexes)
        self.lateness.count(delivery)

    def _rest(self) -> None:
        self._resting_until = self.runtime.monotonic() + _BACKOFF_S
        self._due.at(self._resting_until)

    def _hand_out_again(self, poll: Poll, key: tuple[int, int]) -> None:
        """A grant that is held already: its leases are extended, which also proves that this node still leads, and
        what is left of it is answered."""
        grant = self.state.grants.get(key)
        if grant is None or poll.phase == DONE:
            self._wait_on(poll)
            return
        poll.phase = PROPOSED
        delivery, leases = again(grant, self.store)
        self._extending.add(poll)
        command = encode_extend(self.config.node.name, leases, poll.lease_ms)
        self.propose(command, partial(self._extended, self._core, poll, delivery))

    def _extended(
        self, core: Dispatcher | None, asked: Poll, delivery: Delivery, result: Any, error: HadelayError | None
    ) -> None:
        if core is not self._core:
            return
        self._extending.discard(asked)
        poll = self._current(asked)
        if error is not None or not isinstance(result, LeaseResult):
            self._answer(poll, None, error or Overloaded("the lease could not be renewed", retry_after_ms=100))
            return
        held = result.outcomes == LeaseOutcome.DONE
        if not held.any():
            self._wait_on(poll)
            return
        now = self._now()
        if (result.until_ms - now) * 2 < poll.lease_ms:
            self._answer(poll, None, Overloaded("the commit took longer than the lease lasts", retry_after_ms=1000))
            return
        self._answer(poll, still_held(delivery, held, result.until_ms, now))

    # ---- interval mode

    def _is_stalled(self, mono: float) -> bool:
        """An interval's worth of hand-outs is not committed: no more until it is."""
        oldest = next(iter(self._handed_at.values()), mono)
        return mono - oldest >= self.interval_s

    def _hand_out_at_once(self, offer: Offer, command: bytes) -> None:
        mono, now = self.runtime.monotonic(), self._now()
        self._handed_at[offer.seq] = mono
        self._unsent.append((offer, command))
        # Half an interval leaves the other half for the commit, so that handing out does not stop in between.
        self._flush_alarm.at(mono + self.interval_s / 2)
        count = len(offer.indexes)
        expected = GrantResult(
            self.term, offer.seq, np.ones(count, np.bool_), offer.rows["attempt"] + np.uint16(1),
            now + offer.poll.lease_ms,
        )  # fmt: skip
        delivery = first_time(self.term, offer, expected, self._suspect_ms, now)
        self._count(delivery)
        self._answer(offer.poll, delivery)

    def flush(self) -> None:
        """Propose what was handed out since the last time."""
        self._flush_alarm.cancel()
        unsent, self._unsent = self._unsent, []
        for offer, command in unsent:
            self.propose(command, partial(self._recorded, self._core, offer, command))

    def before_settlement(self) -> None:
        """Call before proposing any ack, nack, extend or cancel: in interval mode hand-outs go first."""
        if self._unsent:
            self.flush()

    def _recorded(
        self, core: Dispatcher | None, offer: Offer, command: bytes, result: Any, error: HadelayError | None
    ) -> None:
        if core is None or core is not self._core:
            return
        if error is not None:
            # It was handed out and has to be recorded; meanwhile handing out stops by itself. If it was committed
            # after all, apply says that the grant exists.
            self._unsent.append((offer, command))
            self._flush_alarm.at(self.runtime.monotonic() + _BACKOFF_S)
            return
        del self._offers[offer.seq], self._handed_at[offer.seq]
        core.settle_offer(offer, put_back=False)
        if isinstance(result, GrantResult) and not result.granted.all():
            core.refused(offer, result.granted)
        key = (self.term, offer.seq)
        grant = self.state.grants.get(key)
        if grant is not None:
            self._expiry.add(grant.next_until_ms(), key)
        if offer.poll in self._successors:
            self._hand_out_again(self._current(offer.poll), key)
        self._check_held(core)
        self._turn_soon()

    # ---- the cursor (S2: the tick of both wheels and the localIndex, every 50 ms while it changes)

    def _watch_cursor(self, core: Dispatcher) -> None:
        if core.cursor == self._cursor_sent or self._cursor_busy:
            return
        at = self._cursor_at + self.interval_s
        if at <= self.runtime.monotonic():
            self._send_cursor()
        else:
            self._cursor_alarm.at(at)

    def _send_cursor(self) -> None:
        core = self._core
        if core is None or self._cursor_busy:
            return
        cursor = core.cursor
        self._cursor_at = self.runtime.monotonic()
        self._cursor_busy = True
        self.propose(encode_cursor(*cursor), partial(self._cursor_done, core, cursor))

    def _cursor_done(self, core: Dispatcher, cursor: tuple[int, int, int], result: Any, error: Any) -> None:
        if core is not self._core:
            return
        self._cursor_busy = False
        if error is None or self._holding:
            self._cursor_sent = cursor
        self._check_held(core)
        self._turn_soon()

    # ---- planned transfer

    def hold(self, done: Callable[[], None]) -> None:
        """A planned transfer: hand out nothing more, commit the dispatch state, then done()."""
        core = self._core
        if core is None:
            done()
            return
        self._holding = True
        self._held = done
        self.flush()
        self._check_held(core)

    def resume(self) -> None:
        """Nobody took over: go on."""
        self._holding = False
        self._held = None
        self._turn_soon()

    def _check_held(self, core: Dispatcher) -> None:
        if self._held is None or self._offers or self._extending or self._cursor_busy:
            return
        if core.cursor != self._cursor_sent:
            self._send_cursor()
            return
        held, self._held = self._held, None
        held()

    # ---- to be sure

    def _arm_sweeper(self) -> None:
        self._sweep_alarm.at(self.runtime.monotonic() + self.config.dispatch.sweep_ms / 1000.0)

    def _sweep(self, slices: int = _SWEEP_SLICES) -> None:
        core = self._core
        if core is None:
            return
        before = core.backlog.swept
        self._turn_soon()  # the wheels may have stood still for long: it looks at what they have passed
        if slices and not core.busy and not core.backlog.sweep():
            self.runtime.call_soon(self._sweep, slices - 1)
        else:
            self._arm_sweeper()
        if core.backlog.swept > before:
            log.error("messages_forgotten", extra={"found": core.backlog.swept - before})

    # ---- what others ask

    @property
    def lateness_counts(self) -> list[int]:
        """One per LATENESS_BUCKETS_MS, and one for what is above; not cumulative."""
        return self.lateness.counts

    @property
    def lateness_sum_ms(self) -> int:
        return self.lateness.sum_ms

    @property
    def sweeper_found(self) -> int:
        """Messages that were owed and forgotten, since this process started. A bug unless 0."""
        return self._swept_before + (self._core.backlog.swept if self._core is not None else 0)

    def cursor(self) -> tuple[int, int, int]:
        """(hour tick, second tick, localIndex): of the wheels here, or as replicated."""
        return self._core.cursor if self._core is not None else self.state.cursor

    def waiting_polls(self) -> int:
        return self._core.ready.waiting if self._core is not None else 0

    def ready_counts(self) -> dict[int, tuple[int, int]]:
        """Per topic number: how many messages are due, not leased and not settled, and when the oldest fell due."""
        core = self._core
        if core is None:
            return {}
        return {number: (n, core.oldest_ready_ms(number)) for number, n in core.ready_counts.items() if n > 0}

    def _core_or_die(self) -> Dispatcher:
        assert self._core is not None
        return self._core


def _replaced() -> Conflict:
    return Conflict("another receive with the same consumer and request_id took this one's place")
