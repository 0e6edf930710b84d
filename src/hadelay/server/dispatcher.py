"""The dispatcher's hands: timers, proposals, and answers to polls. handout/dispatcher.py decides who gets what.

commit (default): a hand-out is a grant that is proposed, decided by apply, and only then answered. It is proposed as
much ahead of its time as grants take lately, and held back until it is due (server/ahead.py); while two rounds of
grants are on their way what falls due joins the next.
interval (S2): handed out at once and proposed within half an interval; while the oldest hand-out that is not committed
is an interval old, nothing more is handed out, so that a crash repeats at most the last 50 ms. After a take-over
everything that was due before is marked as redelivered, on suspicion.

Works between on_leader, when the no-op of the term is applied, and on_follower, and keeps nothing beyond.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.commands import MAX_AHEAD_MS, MAX_SEQ, Command, Grant, encode_extend, encode_grant
from hadelay.codec.results import GrantResult, LeaseOutcome, LeaseResult
from hadelay.errors import Conflict, DamagedFile, HadelayError, LimitReached, NoLeader, OutcomeUnknown, Overloaded
from hadelay.handout.dispatcher import DONE, PROPOSED, Delivery, Dispatcher, Offer, Poll
from hadelay.handout.ready import MAX_FILTERS, MAX_NAMED, MAX_UNKNOWN, TOPIC_FILTERS
from hadelay.ledger.chain import Damage
from hadelay.ledger.flow import is_limited
from hadelay.ledger.grants import HeldGrant
from hadelay.ledger.ports import Listener
from hadelay.ledger.state import Ledger
from hadelay.ledger.topics import Topic, by_topic
from hadelay.ledger.views import HandoutView, MaintenanceView
from hadelay.platform.runtime import Runtime
from hadelay.raft.ports import Done, Propose
from hadelay.server.ahead import HeldBack, Lead
from hadelay.server.alarm import Alarm
from hadelay.server.askers import Askers
from hadelay.server.clustertime import ClusterClock
from hadelay.server.cursor import CursorKeeper
from hadelay.server.deliveries import Delays, Lateness, again, empty, first_time, still_held
from hadelay.server.expiry import Expiry, TtlExpiry
from hadelay.server.handouts import Handouts
from hadelay.server.janitor import Janitor
from hadelay.server.polls import Polls
from hadelay.server.readahead import ReadAhead
from hadelay.settings.node import Config

log = logging.getLogger(__name__)

#: What may stop a topic's hand-outs; AUDITED may contain one.
_STOPPING = frozenset((Command.TOPIC_PUT, Command.TOPIC_DELETE, Command.PURGE, Command.AUDITED))
#: After a proposal that could not be made.
_BACKOFF_S = 0.02
#: Of a message id: hour and index of its first entry, without the group.
_PLACE_OF_ID = np.uint64((1 << 56) - 1)
#: Rounds of grants on their way at once (commit mode).
_MAX_ROUNDS = 2
#: Timers have limits; to wake once an hour costs nothing.
_LONGEST_SLEEP_S = 3_600.0
_TOO_MANY_FILTERS = (
    f"consumers ask for {TOPIC_FILTERS} different combinations of tags of one topic, or {MAX_FILTERS} in all, already: "
    "use fewer, or topics"
)
_TOO_MANY_NAMED = f"waiting receives name {MAX_NAMED} topics already, or {MAX_UNKNOWN} that are not there: name fewer"
#: Or whoever guesses a request id got what he may not consume.
_OTHER_TOPICS = "a receive of this consumer with this request_id named other topics, and is not over: take a new one"
#: Slices of backlog the sweeper looks at each time.
_SWEEP_SLICES = 16


class _Term:
    """What exists only while this node leads."""

    def __init__(
        self, term: int, core: Dispatcher, polls: Polls, cursor: CursorKeeper, expiry: Expiry, early: HeldBack
    ) -> None:
        self.number, self.core, self.polls, self.cursor, self.expiry = term, core, polls, cursor, expiry
        #: Granted ahead of their time.
        self.early = early
        self.seq = 0
        #: What was due by then may have been handed out before, unrecorded (interval mode).
        self.suspect_ms = 0
        #: No new proposals before this.
        self.resting_until = 0.0
        #: Offers on their way, by seq; how many of them each round still has.
        self.offers: dict[int, Offer] = {}
        self.rounds: dict[int, int] = {}
        #: Polls that wait for leases to be renewed.
        self.renewing: set[Poll] = set()
        #: interval mode: not proposed yet; and when each that is not committed was handed out, in order.
        self.unsent: list[tuple[Offer, bytes]] = []
        self.handed_at: dict[int, float] = {}
        #: A planned transfer: nothing is handed out; whom to tell when the dispatch state is committed.
        self.holding = False
        self.held: Callable[[], None] | None = None
        self.cursor_tried = False

    def unanswered(self) -> list[Poll]:
        """Polls whose grant or renewal is on its way, or is there and not due yet."""
        asked = [*(offer.poll for offer in self.offers.values()), *self.renewing, *self.early.polls()]
        return [poll for poll in map(self.polls.current, asked) if poll.phase == PROPOSED]

    def landed(self, offer: Offer) -> None:
        del self.offers[offer.seq]
        if offer.round in self.rounds:
            self.rounds[offer.round] -= 1
            if not self.rounds[offer.round]:
                del self.rounds[offer.round]


class LeaderDispatcher:
    """Runs on every node, works only between on_leader and on_follower. Its core is `state.listener` meanwhile."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        runtime: Runtime,
        clock: ClusterClock,
        propose: Propose,
        config: Config,
        on_damage: Callable[[int, int, str], None] | None = None,
        surely_leads: Callable[[], bool] = lambda: True,
        watch: Callable[[Topic], None] = lambda topic: None,
        read_ahead: ReadAhead | None = None,
    ) -> None:
        """propose: the batcher's. on_damage(hour, index, what): a chain is broken at that entry; after the repair
        call `repaired(hour)`. surely_leads: no other node can be leading yet (interval mode hands out on that).
        watch: as core.dispatch's; while this node leads."""
        self.ledger, self.runtime, self.clock = ledger, runtime, clock
        self.propose, self.config, self.on_damage = propose, config, on_damage
        self.surely_leads, self.watch, self._read_ahead = surely_leads, watch, read_ahead
        self.interval = config.dispatch.sync == "interval"
        self.interval_s = config.dispatch.interval_ms / 1000.0
        #: Plain ints for /metrics.
        self.handed_out = 0
        self.damaged_links = 0
        self.lateness = Lateness()
        self.askers = Askers()
        self.handouts = Handouts()
        self.delays = Delays()
        self.lead = Lead(0 if self.interval else min(config.dispatch.max_ahead_ms, MAX_AHEAD_MS))
        self._swept_before = 0
        self._throttled_before: Counter[str] = Counter()
        self._term: _Term | None = None
        self._turning = False
        self._alarms = [Alarm(runtime, ring) for ring in (self._turn_soon, self.flush, self._sweep)]
        self._due, self._flush_alarm, self._sweep_alarm = self._alarms

    # ---- leading

    def on_leader(self, term: int) -> None:
        """The no-op of `term` is applied, clock.lead was called, and the clock is ready."""
        self.on_follower()
        now, dispatch = self._now(), self.config.dispatch
        self.askers = Askers()
        core = Dispatcher(
            HandoutView(self.ledger),
            preload_ms=dispatch.preload_ms,
            window=dispatch.ready_window,
            wake=self._turn_soon,
            on_damage=self._damaged,
            on_lease=self._leased,
            on_ttl=self._ttl_filed,
            watch=self.watch,
            on_open=self._opened,
            on_load=self._loaded,
        )
        core.start(now)
        self.ledger.listener = core
        self._term = _Term(
            term,
            core,
            Polls(core.ready, self.runtime.monotonic),
            CursorKeeper(core, self.runtime, self.propose, self.interval_s, self._cursor_settled),
            Expiry(self.ledger, self.runtime, self.clock, self.propose, now + self.config.limits.max_clock_skew_ms),
            HeldBack(self.runtime, self.clock),
        )
        # What the leader before still hands out while it may believe in itself was due by then.
        self._term.suspect_ms = now + self.config.raft.election_min_ms if self.interval else 0
        self._ttl = TtlExpiry(self.ledger, self.runtime, self.clock, self._propose_behind)
        self._janitor = Janitor(
            MaintenanceView(self.ledger), self.runtime, self._now, self._propose_behind, self.config.retention
        )
        self._arm_sweeper()
        self._turn_soon()

    def on_follower(self) -> None:
        """Stop at once, answer every poll, clear what only a leader knows."""
        term, self._term = self._term, None
        if term is None:
            return
        self.ledger.listener = Listener()
        self.handouts.forget()
        term.expiry.stop()
        term.cursor.stop()
        unanswered = term.unanswered()
        term.early.stop()
        self._janitor.stop()
        self._ttl.stop()
        for alarm in self._alarms:
            alarm.cancel()
        self._swept_before += term.core.backlog.swept
        self._throttled_before += term.core.ready.throttled
        unknown = OutcomeUnknown("the leader changed; ask again with the same request_id")
        for poll in unanswered:
            term.polls.answer(poll, None, unknown)
        for poll in term.core.ready.polls():
            term.polls.answer(poll, None, NoLeader("the leader changed; nothing was handed out", retry_after_ms=100))
        if term.held is not None:
            term.held()

    def clock_changed(self) -> None:
        """The clock was slewed: timers that were set by it are set again."""
        if self._term is not None:
            self._due.cancel()
            self._term.early.clock_changed()
            self._turn_soon()

    def _opened(self, hour: int) -> None:
        if self._read_ahead is not None:
            self._read_ahead.index(hour)

    def _loaded(self, hour: int, rows: NDArray[np.void], ahead_ms: int) -> None:
        if self._read_ahead is not None:
            self._read_ahead.records(hour, rows, ahead_ms / 1000)

    def repaired(self, hour: int) -> None:
        """Damaged entries of the hour were repaired: walk its broken seconds again."""
        if self._term is not None:
            self._term.core.repaired(hour)

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
        term = self._term
        if term is None:
            poll.phase = DONE
            poll.done(None, NoLeader("this node does not lead (any more)", retry_after_ms=50))
            return
        poll.deadline = self.runtime.monotonic() + poll.wait_ms / 1000.0
        self.askers.note(poll.consumer, poll.topics, self._now())
        if poll.request_id and self._is_repeated(term, poll):
            return
        if not term.core.ready.has_room(poll):
            term.polls.answer(poll, None, LimitReached(_TOO_MANY_NAMED, retry_after_ms=1_000))
            return
        if not term.core.ready.admits(poll):
            term.polls.answer(poll, None, LimitReached(_TOO_MANY_FILTERS, retry_after_ms=1_000))
            return
        term.polls.wait(poll)
        self._turn_soon()

    def _is_repeated(self, term: _Term, poll: Poll) -> bool:
        """Idempotent receive: the same {consumer, request_id} takes the place of a waiting poll, or gets what it was
        granted before. True if there is nothing more to do now."""
        before = term.polls.same_request(poll)
        if before is not None and not set(before.topics) <= set(poll.topics):
            term.polls.answer(poll, None, Conflict(_OTHER_TOPICS))
            return True
        if term.polls.replace(poll):
            return True
        for offer in term.offers.values() if self.interval else ():
            if (offer.poll.consumer, offer.poll.request_id) == (poll.consumer, poll.request_id):
                if not set(offer.poll.topics) <= set(poll.topics):
                    term.polls.answer(poll, None, Conflict(_OTHER_TOPICS))
                    return True
                # Handed out, not committed yet: what became of it is known in a moment.
                term.polls.succeed(offer.poll, poll)
                self.flush()
                return True
        held = self.ledger.held_by(poll.consumer, poll.request_id)
        if held is not None:
            self._hand_out_again(term, poll, held.key)
        return held is not None

    def cancel_poll(self, poll: Poll) -> None:
        """The consumer is gone: unless a grant is proposed for it already, it gets none. `done` is not called."""
        if self._term is not None:
            self._term.polls.cancel(poll)
        poll.phase = DONE

    def _wait_on(self, term: _Term, poll: Poll) -> None:
        """Its grant came to nothing: it is the next in line, unless it has waited long enough."""
        if poll.phase == DONE:
            return
        if poll.deadline <= self.runtime.monotonic():
            term.polls.answer(poll, empty(self._now()))
            return
        term.polls.wait(poll, first=True)
        self._turn_soon()

    def _answer_late_polls(self, term: _Term) -> None:
        for poll in term.polls.take_late():
            term.polls.answer(poll, empty(self._now()))
        deadline = term.polls.next_deadline()
        if deadline is not None:
            self._due.at(deadline)

    # ---- one turn: what is due, who gets it, when to look again

    def _turn_soon(self) -> None:
        if not self._turning and self._term is not None:
            self._turning = True
            self.runtime.call_soon(self._turn)

    def _turn(self) -> None:
        self._turning = False
        term = self._term
        if term is None:
            return
        core = term.core
        if term.holding:
            self._answer_late_polls(term)
            return  # the wheels stand still, too: their tick is what is handed over
        ahead_ms = self.lead.ms
        aligned = self._now() + ahead_ms >= core.resume_ms
        if aligned and core.busy:
            core.work()
            if core.past_first:
                self._turn_soon()
                return
        next_ms = core.advance(self._now() + ahead_ms)
        self._hand_out(term)
        self._answer_late_polls(term)
        term.cursor.watch()
        self._janitor.watch()
        if aligned and core.busy:
            self._turn_soon()
        self._wake_at(next_ms)

    def _wake_at(self, cluster_ms: int) -> None:
        mono = self.runtime.monotonic()
        self._due.at(mono + min(self.clock.delay_s(cluster_ms - self.lead.ms, mono), _LONGEST_SLEEP_S))

    def _hand_out(self, term: _Term) -> None:
        mono = self.runtime.monotonic()
        if mono < term.resting_until:
            self._due.at(term.resting_until)
            return
        if len(term.rounds) >= _MAX_ROUNDS or self._is_stalled(term, mono):
            return
        if self.interval and not self.surely_leads():
            self._due.at(mono + _BACKOFF_S)
            return
        now_ms = self._now()
        offers = term.core.match(now_ms)
        self._wake_at(term.core.ready.next_ms())
        if offers and not self.interval:
            term.rounds[term.seq] = len(offers)
        this_round = term.seq
        for offer in offers:
            if self.interval and self._in_hands(term, offer):
                term.core.settle_offer(offer, None)
                self._wait_on(term, offer.poll)
                term.resting_until = mono + self.interval_s / 2
                self._due.at(term.resting_until)
                continue
            offer.seq, offer.round = self._next_seq(term), this_round
            term.offers[offer.seq] = offer
            command = self._grant(term, offer, max(0, int(offer.rows["deliver_at_ms"].max()) - now_ms))
            if self.interval:
                self._hand_out_at_once(term, offer, command)
            else:
                self.propose(command, partial(self._decided, term, offer, mono))

    def _next_seq(self, term: _Term) -> int:
        """After MAX_SEQ, some days of a busy leader, from 1 again. A token of the grant that had the number before fits
        nothing of this one: an entry is leased once."""
        while True:
            term.seq = term.seq % MAX_SEQ + 1
            if term.seq not in term.offers and (term.number, term.seq) not in self.ledger.grants:
                return term.seq

    def _grant(self, term: _Term, offer: Offer, ahead_ms: int) -> bytes:
        poll = offer.poll
        return encode_grant(
            Grant(
                term.number, offer.seq, poll.lease_ms, poll.consumer, poll.request_id, self.config.node.name,
                offer.hours, offer.indexes, self.interval, ahead_ms,
            )
        )  # fmt: skip

    def _decided(self, term: _Term, offer: Offer, proposed: float, result: Any, error: HadelayError | None) -> None:
        """commit mode: what apply made of a grant."""
        if term is not self._term:
            return
        self.lead.took((self.runtime.monotonic() - proposed) * 1000)
        term.landed(offer)
        poll = term.polls.current(offer.poll)
        granted = error is None and isinstance(result, GrantResult) and result.existing is None
        term.core.settle_offer(offer, result.granted if granted else None)
        if granted:
            self._granted(term, offer, result, poll)
        elif isinstance(result, GrantResult) and result.existing is not None:
            self._hand_out_again(term, poll, result.existing)
        else:
            term.resting_until = self.runtime.monotonic() + _BACKOFF_S
            if error is None or isinstance(error, OutcomeUnknown):
                term.polls.answer(poll, None, error or HadelayError(f"the grant was refused: {result}"))
            else:
                self._wait_on(term, poll)
        self._check_held(term)
        self._turn_soon()

    def _leased(self, grant: HeldGrant) -> None:
        """Also of a grant whose proposal was given up as unknown: it may be committed later, and has to run out."""
        if self._term is not None:
            self._term.expiry.add(grant.next_until_ms(), grant.key)

    def _ttl_filed(self, at_ms: int) -> None:
        self._ttl.filed(at_ms)

    def _granted(self, term: _Term, offer: Offer, result: GrantResult, poll: Poll) -> None:
        if not result.granted.any():
            self._wait_on(term, poll)
            return
        if poll.phase == DONE:
            return  # it hung up after the proposal: the lease has to run out
        delivery = first_time(term.number, offer, result, term.suspect_ms, self._now())
        term.early.until_due(poll, delivery, partial(self._deliver, term, poll))

    def _deliver(self, term: _Term, poll: Poll, delivery: Delivery) -> None:
        poll = term.polls.current(poll)
        if poll.phase != DONE:  # else it hung up meanwhile: the lease has to run out
            self.handed_out += len(delivery.indexes)
            self.lateness.count(delivery)
            waited_ms = poll.wait_ms - 1000 * (poll.deadline - self.runtime.monotonic())
            self.delays.count(delivery, waited_ms, lambda number: is_limited(self.ledger.topics[number].settings))
        self._answer(term, poll, delivery)

    def _answer(self, term: _Term, poll: Poll, delivery: Delivery) -> None:
        """To the poll, or to the one that took its place while the delivery was held back."""
        poll = term.polls.current(poll)
        if (int(delivery.until_ms.min()) - delivery.now_ms) * 2 < poll.lease_ms:
            # The commit took so long, or this process slept: too little of the lease is left to be worth an answer, and
            # somebody else may have it by now. A whole one, or nothing.
            self._hand_out_again(term, poll, (delivery.term, delivery.seq))
        else:
            term.polls.answer(poll, delivery)
        self._check_held(term)

    def _hand_out_again(self, term: _Term, poll: Poll, key: tuple[int, int]) -> None:
        """A grant that is held already: its leases are extended, which also proves that this node still leads, and
        what is left of it is answered."""
        grant = self.ledger.grants.get(key)
        if grant is None or poll.phase == DONE:
            self._wait_on(term, poll)
            return
        held = by_topic(grant.rows["topic"][grant.rows["open"] == 1])
        if not {self.ledger.topics[number].name for number, _ in held} <= set(poll.topics):
            term.polls.answer(poll, None, Conflict(_OTHER_TOPICS))
            return
        poll.phase = PROPOSED
        try:
            delivery, leases = again(grant, self.ledger.store)
        except DamagedFile as damage:
            term.polls.answer(poll, None, damage)
            return
        term.renewing.add(poll)
        # As in a grant, the lease counts from when it can be handed out.
        ahead_ms = max(0, int(delivery.rows["deliver_at_ms"].max()) - self._now())
        command = encode_extend(self.config.node.name, leases, poll.lease_ms + ahead_ms)
        self.propose(command, partial(self._renewed, term, poll, delivery))

    def _renewed(self, term: _Term, asked: Poll, delivery: Delivery, result: Any, error: HadelayError | None) -> None:
        if term is not self._term:
            return
        term.renewing.discard(asked)
        poll = term.polls.current(asked)
        now = self._now()
        if error is not None or not isinstance(result, LeaseResult):
            term.polls.answer(poll, None, error or Overloaded("the lease could not be renewed", retry_after_ms=100))
        elif not (held := result.outcomes == LeaseOutcome.DONE).any():
            self._wait_on(term, poll)
        elif (result.until_ms - now) * 2 < poll.lease_ms:
            late = Overloaded("the commit took longer than half of the lease", retry_after_ms=1_000)
            term.polls.answer(poll, None, late)
        else:
            left = still_held(delivery, held, result.until_ms, now)
            term.early.until_due(poll, left, partial(self._answer, term, poll))
        self._check_held(term)

    # ---- interval mode

    def _is_stalled(self, term: _Term, mono: float) -> bool:
        """An interval's worth of hand-outs is not committed: no more until it is."""
        return mono - next(iter(term.handed_at.values()), mono) >= self.interval_s

    def _in_hands(self, term: _Term, offer: Offer) -> bool:
        """A message of it was handed out a moment ago as another entry, and was carried or rescheduled since. That has
        to be recorded first: apply then counts the attempt, and the next hand-out is another one."""
        if not term.handed_at:
            return False
        ids = offer.rows["first_id"]
        own = offer.hours.astype(np.uint64) << np.uint64(32) | offer.indexes
        moved = ids[ids & _PLACE_OF_ID != own]
        return bool(len(moved)) and any(
            np.isin(moved, other.rows["first_id"]).any() for seq, other in term.offers.items() if seq in term.handed_at
        )

    def _hand_out_at_once(self, term: _Term, offer: Offer, command: bytes) -> None:
        mono, now = self.runtime.monotonic(), self._now()
        term.handed_at[offer.seq] = mono
        term.unsent.append((offer, command))
        # Half an interval leaves the other half for the commit, so that handing out does not stop in between.
        self._flush_alarm.at(mono + self.interval_s / 2)
        expected = GrantResult(
            term.number, offer.seq, np.ones(len(offer.rows), np.bool_), offer.rows["attempt"] + np.uint16(1),
            now + offer.poll.lease_ms,
        )  # fmt: skip
        self._deliver(term, offer.poll, first_time(term.number, offer, expected, term.suspect_ms, now))

    def in_order(self, command: bytes, done: Done) -> Done:
        """What may stop a topic's hand-outs is answered after those that were granted before: nothing of a topic is
        handed out once its pause, purge or deletion is answered."""

        def decided(result: Any, error: HadelayError | None) -> None:
            if self._term is not None:
                self._term.early.when_released(partial(done, result, error))
            else:
                done(result, error)

        return decided if command[0] in _STOPPING else done

    def answered(self, term: int, seq: int, positions: NDArray[np.integer], due_ms: int) -> None:
        """These positions of a grant were handed to their consumer, now. due_ms: when the last of them was due."""
        if self._term is not None and self._term.number == term:
            self.handouts.answered(self.ledger, (term, seq), positions, due_ms, self._now())

    def settling(self, command: bytes) -> bytes:
        """The command, with what this leader knows of the leases that it settles."""
        return self.handouts.settling(self.ledger, command) if self._term is not None else command

    def before_settlement(self) -> None:
        """Call before proposing any ack, nack, extend or cancel: in interval mode hand-outs go first."""
        if self._term is not None and self._term.unsent:
            self.flush()

    def _propose_behind(self, command: bytes, done: Done) -> None:
        """Behind the hand-outs: of an hour that was retired first, apply could not tell what is in somebody's hands.
        And what is in them expires no more."""
        self.before_settlement()
        self.propose(command, done)

    def flush(self) -> None:
        """Propose what was handed out since the last time."""
        term = self._term
        if term is None:
            return
        self._flush_alarm.cancel()
        unsent, term.unsent = term.unsent, []
        for offer, command in unsent:
            self.propose(command, partial(self._recorded, term, offer, command))

    def _recorded(self, term: _Term, offer: Offer, command: bytes, result: Any, error: HadelayError | None) -> None:
        if term is not self._term:
            return
        if error is not None:
            # It was handed out and has to be recorded; meanwhile handing out stops by itself. If it was committed
            # after all, apply says that the grant exists.
            term.unsent.append((offer, command))
            self._flush_alarm.at(self.runtime.monotonic() + _BACKOFF_S)
            return
        term.landed(offer)
        del term.handed_at[offer.seq]
        granted = result.granted if isinstance(result, GrantResult) else np.ones(len(offer.places), np.bool_)
        term.core.settle_offer(offer, granted)
        key = (term.number, offer.seq)
        if term.polls.has_successor(offer.poll):
            self._hand_out_again(term, term.polls.current(offer.poll), key)
        self._check_held(term)
        self._turn_soon()

    # ---- planned transfer

    def hold(self, done: Callable[[], None]) -> None:
        """A planned transfer: hand out nothing more, commit the dispatch state, then done()."""
        term = self._term
        if term is None:
            done()
            return
        term.holding, term.held = True, done
        self.flush()
        # Beside what is on its way: after it, the gap would be longer by a commit.
        self._send_cursor(term)
        self._check_held(term)

    def resume(self) -> None:
        """Nobody took over: go on."""
        if self._term is not None:
            self._term.holding, self._term.held, self._term.cursor_tried = False, None, False
            self._turn_soon()

    def _cursor_settled(self) -> None:
        if self._term is not None:
            self._check_held(self._term)
            self._turn_soon()

    def _check_held(self, term: _Term) -> None:
        if term.held is None or term.offers or term.renewing or term.early or term.cursor.busy:
            return
        if self._send_cursor(term):
            return
        held, term.held = term.held, None
        held()

    @staticmethod
    def _send_cursor(term: _Term) -> bool:
        """Once per hand-over, if it has changed: it says where the next leader begins to look, and may be a little
        behind."""
        if term.cursor.busy or term.cursor_tried or not term.cursor.changed:
            return False
        term.cursor_tried = True
        term.cursor.send()
        return True

    # ---- to be sure

    def _arm_sweeper(self) -> None:
        self._sweep_alarm.at(self.runtime.monotonic() + self.config.dispatch.sweep_ms / 1000.0)

    def _sweep(self, slices: int = _SWEEP_SLICES) -> None:
        if self._term is None:
            return
        self._turn_soon()  # the wheels may have stood still for long: it looks at what they have passed
        core = self._term.core
        before = core.backlog.swept
        if slices and not core.busy and not core.backlog.sweep():
            self.runtime.call_soon(self._sweep, slices - 1)
        else:
            self._arm_sweeper()
        if core.backlog.swept > before:
            log.error("messages_forgotten", extra={"found": core.backlog.swept - before})

    # ---- what others ask

    @property
    def sweeper_found(self) -> int:
        """Messages that were owed and forgotten, since this process started. A bug unless 0."""
        return self._swept_before + (self._term.core.backlog.swept if self._term is not None else 0)

    def cursor(self) -> tuple[int, int, int]:
        """(hour tick, second tick, localIndex): of the wheels here, or as replicated."""
        return self._term.core.cursor if self._term is not None else self.ledger.cursor

    def throttled(self) -> dict[str, int]:
        """How often a topic with a message for somebody was stopped, by the limit's name; `filters`: polls refused."""
        return dict(self._throttled_before + (self._term.core.ready.throttled if self._term is not None else Counter()))

    def tag_checks(self) -> tuple[int, int]:
        """Records whose tags were read because their mask fitted, and how many of them did not match."""
        ready = self._term.core.ready if self._term is not None else None
        return (ready.checked, ready.false_positives) if ready is not None else (0, 0)

    def waiting_polls(self) -> int:
        return self._term.core.ready.waiting if self._term is not None else 0

    def window_size(self) -> int:
        """Places of ready messages in memory."""
        return self._term.core.ready.size if self._term is not None else 0

    def ready_counts(self, numbers: Iterable[int] | None = None) -> dict[int, tuple[int, int]]:
        """Per topic number, of these or of all: how many messages are due, not leased and not settled, and when the
        oldest fell due. Topics without any are left out."""
        if self._term is None:
            return {}
        core = self._term.core
        every = core.ready_counts
        counts = {number: every[number] for number in (every if numbers is None else numbers) if every[number] > 0}
        oldest = core.oldest_ready_ms(counts)
        return {number: (count, oldest[number]) for number, count in counts.items()}

    def topic_reports(self) -> dict[int, tuple[int, ...]]:
        """Per topic number: ready messages, when the oldest fell due; and `Late` of the last minutes."""
        ready, late = self.ready_counts(), self.lateness.recent(self._now())
        numbers = {**ready, **late}
        return {number: (*ready.get(number, (0, 0)), *late.get(number, (0, 0, 0, 0))) for number in numbers}
