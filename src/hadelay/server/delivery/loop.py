"""The delivery loop of the leader: timers, and turns of the dispatcher. handout/dispatcher.py decides which poll gets
which messages.

Works between on_leader, when the no-op of the term is applied, and on_follower, and keeps nothing beyond.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.commandtypes import MAX_AHEAD_MS, Command
from hadelay.codec.formats import U32, Rows
from hadelay.errors import HadelayError, LimitReached, NoLeader
from hadelay.handout.dispatcher import Dispatcher, TakeOver
from hadelay.handout.polls import DONE, Askers, Delivery, Poll
from hadelay.ledger.hours.chain import Damage
from hadelay.ledger.limits.flow import is_limited
from hadelay.ledger.ports import LedgerListener
from hadelay.ledger.state import Ledger
from hadelay.ledger.topics.topics import TopicState
from hadelay.model import NEVER_MS
from hadelay.platform.runtime import Runtime
from hadelay.raft.ports import Done, Propose
from hadelay.server.clustertime import ClusterClock
from hadelay.server.delivery.bulk import BulkRunner
from hadelay.server.delivery.grants import Grants
from hadelay.server.delivery.groupwalk import GroupWalk
from hadelay.server.delivery.lateness import Delays, HandoutDelays, LatenessCounts
from hadelay.server.delivery.maintenance import LeaseExpiry, MaintenanceRunner, TtlExpiry
from hadelay.server.delivery.modes import CommitHandout, CommitLatency, Handout, IntervalHandout
from hadelay.server.delivery.schedules import ScheduleRunner
from hadelay.server.delivery.term import Term
from hadelay.server.delivery.topicexpiry import TopicExpiry
from hadelay.server.reading import ReadAhead, VerifiedReader
from hadelay.settings.node import Config

log = logging.getLogger(__name__)

#: Commands that may stop a topic's hand-outs. AUDITED is among them, because it contains another command.
_STOPPING = frozenset((Command.TOPIC_PUT, Command.TOPIC_DELETE, Command.PURGE, Command.AUDITED))
#: Longest sleep between two turns of the loop, in seconds: timers cannot run for any length, and one turn per hour
#: costs nothing.
_LONGEST_SLEEP_S = 3_600.0
#: Limit of slices of the index that one run of the sweeper checks. The sweeper looks for due messages that were
#: forgotten.
_SWEEP_SLICES = 16


class DeliveryLoop:
    """Hands out messages while this node leads: between on_leader and on_follower."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        runtime: Runtime,
        clock: ClusterClock,
        propose: Propose,
        config: Config,
        on_damage: Callable[[int, int, str], None] | None = None,
        has_leader_lease: Callable[[], bool] = lambda: True,
        has_space: Callable[[], bool] = lambda: True,
        read_ahead: ReadAhead | None = None,
        reader: VerifiedReader | None = None,
        on_take_over: Callable[[TakeOver], None] = lambda taken: None,
    ) -> None:
        """on_damage(hour, index, problem): called when the linked list of one second's index entries is broken at entry
        `index`; after the repair call `repaired(hour)`. has_leader_lease: whether it is certain that no other node
        leads yet: interval mode hands out only then. reader: reads records for bulk jobs that filter by tags or keys,
        and repairs damaged entries. has_space: whether every node has room for more messages. on_take_over: called once
        per term, when all messages that fell due before this node led are found."""
        self.ledger, self.runtime, self.clock = ledger, runtime, clock
        self.propose, self.config, self.on_damage = propose, config, on_damage
        self.has_leader_lease, self._read_ahead = has_leader_lease, read_ahead
        #: Callback for changes of a topic: apply calls it when a topic was created, changed or deleted, or got dead
        #: letters.
        self.watch: Callable[[TopicState], None] = lambda topic: None
        self._reader, self.has_space, self.on_take_over = reader, has_space, on_take_over
        self.handed_out = 0
        self.damaged_links = 0
        #: Number of times that the sweeper found a wrong localIndex in the dispatch cursor. Any number but 0 shows a
        #: bug.
        self.wrong_cursors = 0
        #: Number of messages that bulk jobs have handled, by outcome (ledger.bulkjob.JOB_COUNTS).
        self.bulk_counts: Counter[str] = Counter()
        self.lateness = LatenessCounts()
        self.askers = Askers()
        self.handout_delays = HandoutDelays()
        self.delays = Delays()
        #: Number of occurrences of schedules by outcome: made, missed, overlapped, refused.
        self.occurrences = Counter[str]()
        self._latency = CommitLatency(min(config.dispatch.max_ahead_ms, MAX_AHEAD_MS))
        self._swept_before = 0
        self._throttled_before: Counter[str] = Counter()
        #: State of the present term as the leader; None while this node does not lead.
        self._grants: Grants | None = None
        self._turning = self._reported = False

    def on_leader(self, number: int) -> None:
        """Begin to hand out messages. The term's no-op must be applied, and the clock ready and leading."""
        self.on_follower()
        dispatch = self.config.dispatch
        self.askers = Askers()
        term = Term(number, self.ledger, self.runtime, self.clock, self.config, self.propose)
        core = Dispatcher(
            self.ledger,
            preload_ms=dispatch.preload_ms,
            window=dispatch.ready_window,
            wake=self._turn_soon,
            on_damage=self._damaged,
            on_lease=lambda grant: self._expiry.add(grant.next_until_ms(), grant.key),
            on_ttl=lambda at_ms: self._ttl.filed(at_ms),
            on_agenda=lambda next_ms: self._schedules.changed(next_ms),
            watch=self.watch,
            read_ahead=self._read_ahead,
        )
        core.start(term.now())
        self.ledger.listener = core
        self._due, self._sweep_alarm = term.alarm(self._turn_soon), term.alarm(self._sweep)
        repair = None if self._reader is None else self._reader.repair
        self._grants = Grants(term, core, self._turn_soon, self._delivered, repair)
        self._handout = self._make_handout(self._grants)
        #: LeaseExpiry also covers grants whose proposal had an unknown outcome: such a grant may be committed later,
        #: and then its leases have to end.
        self._expiry = LeaseExpiry(term, term.now() + self.config.limits.max_clock_skew_ms)
        self._ttl = TtlExpiry(term)
        self._maintenance = MaintenanceRunner(term, self.config.retention)
        step = self.config.dispatch.job_step
        self._bulk = BulkRunner(
            term, self._reader, lambda: self._latency.smoothed_ms, self.has_space, self.bulk_counts, step
        )
        self._topic_expiry, self.groups = TopicExpiry(term), GroupWalk(term)
        self._schedules = ScheduleRunner(term, self.has_space, self.occurrences)
        self._reported = False
        self._arm_sweeper()
        self._turn_soon()

    def _make_handout(self, grants: Grants) -> Handout:
        if self.config.dispatch.sync == "interval":
            grouped = self.ledger.topics.grouping
            if not grouped:
                return IntervalHandout(grants, self._latency, lambda: self.has_leader_lease())
            # The nodes' mode was changed to interval after the topic got group_concurrency. Hand out in commit mode: a
            # crash in interval mode would break the promise of the setting.
            log.error(
                "groups_need_commit_mode",
                extra={"topic": self.ledger.topics[min(grouped)].name, "topics": len(grouped)},
            )
        return CommitHandout(grants, self._latency)

    def on_follower(self) -> None:
        """Stop handing out at once, answer every poll, and drop the state of the leader's term."""
        grants, self._grants = self._grants, None
        if grants is None:
            return
        self.ledger.listener = LedgerListener()
        self.handout_delays.forget()
        grants.term.stop()
        self._maintenance.stop()
        self._swept_before += grants.core.scans.swept
        self._throttled_before += grants.core.turns.throttled
        grants.stop()

    def clock_changed(self) -> None:
        """Set the timers again, because the cluster clock has changed."""
        if self._grants is not None:
            self._due.cancel()
            self._grants.deferred.clock_changed()
            self._turn_soon()

    def repaired(self, hour: int) -> None:
        """Read the damaged linked lists of index entries of the hour again (one list per second), because the entries
        were repaired."""
        if self._grants is not None:
            self._grants.core.repaired(hour)

    def _damaged(self, damage: Damage) -> None:
        self.damaged_links += 1
        log.error("chain_damaged", extra=damage._asdict())
        if self.on_damage is not None:
            self.on_damage(damage.hour, damage.at, damage.what)

    def _now(self) -> int:
        return self.clock.read(self.runtime.monotonic())

    def poll(self, poll: Poll) -> None:
        """Handle a poll of a consumer. If this node does not lead, the poll gets done(None, NoLeader) at once."""
        grants = self._grants
        if grants is None:
            poll.phase = DONE
            poll.done(None, NoLeader("this node does not lead (any more)", retry_after_ms=50))
            return
        poll.deadline = self.runtime.monotonic() + poll.wait_ms / 1000.0
        self.askers.note(poll, self._now())
        self._topic_expiry.polled(poll.topics, self._now() + poll.wait_ms)
        if poll.request_id and grants.is_repeated(poll):
            return
        if problem := grants.core.waiting.problem(poll):
            grants.answer(poll, None, LimitReached(problem, retry_after_ms=1_000))
        else:
            grants.wait(poll)
            self._turn_soon()

    def consumers(self, topic: str) -> list[tuple[str, int, str, bool]]:
        """Consumers of a topic: (name, cluster time of the last receive, node that relayed it or "", whether a receive
        waits now)."""
        waiting = set() if self._grants is None else self._grants.waiting.consumers(topic)
        return [(name, *asked, name in waiting) for name, asked in self.askers.of(topic).items()]

    def all_consumers(self) -> list[tuple[str, int, str, bool, list[str]]]:
        """Consumers of all topics: the fields of `consumers`, and the topics that the consumer asked for."""
        waiting = set() if self._grants is None else self._grants.waiting.all_consumers()
        return [
            (name, at_ms, node, name in waiting, topics) for name, (at_ms, node, topics) in self.askers.all().items()
        ]

    def cancel_poll(self, poll: Poll) -> None:
        """Cancel a poll whose consumer is gone: the poll gets no messages, unless a grant for it is proposed already.
        `done` is not called."""
        if self._grants is not None:
            self._grants.cancel(poll)
        poll.phase = DONE

    def _turn_soon(self) -> None:
        if not self._turning and self._grants is not None:
            self._turning = True
            self.runtime.call_soon(self._turn)

    def _turn(self) -> None:
        self._turning = False
        grants = self._grants
        if grants is None:
            return
        if grants.holding:
            self._answer_late_polls(grants)
            return  # a planned transfer of leadership has stopped hand-outs; the next leader continues them
        core, ahead_ms, now_ms = grants.core, self._handout.ahead_ms, self._now()
        aligned = now_ms + ahead_ms >= core.resume_ms
        if aligned and core.busy:
            core.work()
            if core.scans.first:
                self._turn_soon()
                return
            now_ms = self._now()
        next_ms = core.advance(now_ms + ahead_ms)
        next_ms = min(next_ms, self._hand_out(grants, now_ms))
        self._answer_late_polls(grants)
        grants.cursor.watch()
        self._maintenance.watch()
        self._bulk.watch()
        if aligned and core.busy:
            self._turn_soon()
        if aligned and not self._reported:
            self._report_take_over(core)
        mono = self.runtime.monotonic()
        self._due.at(mono + min(self.clock.delay_s(next_ms - self._handout.ahead_ms, mono), _LONGEST_SLEEP_S))

    def _report_take_over(self, core: Dispatcher) -> None:
        if (taken := core.took_over) is not None:
            self._reported = True
            log.info("took_over", extra=taken._asdict())
            self.on_take_over(taken)

    def riding_cursor(self) -> tuple[bytes, Done] | None:
        """The dispatch cursor as a command to write with a batch; None if it need not be replicated now."""
        return None if self._grants is None else self._grants.cursor.ride()

    def _answer_late_polls(self, grants: Grants) -> None:
        deadline = grants.answer_late_polls(self.runtime.monotonic())
        if deadline is not None:
            self._due.at(deadline)

    def _hand_out(self, grants: Grants, now_ms: int) -> int:
        """Hand out ready messages. Returns the cluster time at which a topic that waits for tokens of its rate limit
        gets the next ones; NEVER_MS if no topic waits."""
        mono = self.runtime.monotonic()
        ready_at = self._handout.ready_at(mono)
        if ready_at > mono:
            self._due.at(ready_at)
            return NEVER_MS
        offers = grants.core.match(now_ms)
        next_ms = grants.core.turns.next_ms(self._handout.ahead_ms)
        self._handout.hand_out(offers, now_ms)
        return next_ms

    def _delivered(self, poll: Poll, delivery: Delivery) -> None:
        self.handed_out += len(delivery.indexes)
        self.lateness.count(delivery)
        waited_ms = poll.wait_ms - 1000 * (poll.deadline - self.runtime.monotonic())
        self.delays.count(delivery, waited_ms, self._may_hold_back)

    def _may_hold_back(self, number: int) -> bool:
        """Whether a limit or message groups may have delayed the topic's messages when they were due."""
        settings = self.ledger.topics[number].settings
        return is_limited(settings) or settings.group_concurrency is not None

    def in_order(self, command: bytes, done: Done) -> Done:
        """Delay the answer to a command that may stop a topic's hand-outs (pause, purge, deletion) until deliveries
        that were granted before, but are deferred, are released: after the answer, no message of the topic is handed
        out."""

        def decided(result: Any, error: HadelayError | None) -> None:
            if self._grants is not None:
                self._grants.deferred.when_released(partial(done, result, error))
            else:
                done(result, error)

        return decided if command[0] in _STOPPING else done

    def answered(self, term: int, seq: int, positions: NDArray[np.integer], due_ms: int) -> None:
        """Note that the messages at `positions` of a grant were handed out now. due_ms: latest due time of these
        messages."""
        if self._grants is not None and self._grants.term.number == term:
            self.handout_delays.answered(self.ledger, (term, seq), positions, due_ms, self._now())

    def delays_of(self, leases: Rows) -> U32 | None:
        """Hand-out delays of these leases (LEASE rows) as far as this leader knows them, see HandoutDelays; None: it
        knows none."""
        return self.handout_delays.delays_of(self.ledger, leases) if self._grants is not None else None

    def settling(self, command: bytes) -> bytes:
        """Add the hand-out delays that this leader knows to a SETTLE command of another node; returns the command."""
        return self.handout_delays.settling(self.ledger, command) if self._grants is not None else command

    def before_settlement(self) -> None:
        """Call this before proposing an ack, nack, extend or cancel: in interval mode, the grants of all hand-outs are
        proposed first."""
        if self._grants is not None and self._grants.term.record is not None:
            self._grants.term.record()

    def hold(self, done: Callable[[], None]) -> None:
        """Prepare a planned transfer of leadership: stop handing out, commit the dispatch state, then call done()."""
        if self._grants is None:
            done()
        else:
            self.before_settlement()
            self._grants.hold(done)

    def resume(self) -> None:
        """Continue handing out after a planned transfer, because no other node took over."""
        if self._grants is not None:
            self._grants.resume()

    def _arm_sweeper(self) -> None:
        self._sweep_alarm.at(self.runtime.monotonic() + self.config.dispatch.sweep_ms / 1000.0)

    def _sweep(self, slices: int = _SWEEP_SLICES) -> None:
        if self._grants is None:
            return
        # Run a turn first, in case the dispatcher was idle: the sweep checks only seconds that the preload has passed.
        self._turn_soon()
        core = self._grants.core
        before = core.scans.swept
        if slices and not core.busy and not core.scans.sweep():
            self.runtime.call_soon(self._sweep, slices - 1)
        else:
            self._arm_sweeper()
            self._topic_expiry.wake()
            self.groups.wake()
            self._recount(core)
        if core.scans.swept > before:
            log.error("messages_forgotten", extra={"found": core.scans.swept - before})

    def _recount(self, core: Dispatcher) -> None:
        """Check the dispatch cursor: compare its localIndex with a new count of the settled, leased, blocked and ready
        entries of its second. A difference is a bug; it is counted, and logged as an error."""
        counted, (hour, second, local) = core.recount(), core.cursor
        if counted is not None and counted != local:
            self.wrong_cursors += 1
            log.error("local_index_wrong", extra={"hour": hour, "second": second, "local": local, "counted": counted})

    @property
    def sweeper_found(self) -> int:
        """Number of due messages that were forgotten until the sweeper found them, since this process started. Any
        number but 0 shows a bug."""
        return self._swept_before + (self._grants.core.scans.swept if self._grants is not None else 0)

    def throttled(self) -> dict[str, int]:
        """Number of times that a limit stopped hand-outs, by the limit's name; under `filters`: number of polls that
        the limit of filters refused."""
        now = self._grants.core.turns.throttled if self._grants is not None else Counter[str]()
        return dict(self._throttled_before + now)

    def tag_checks(self) -> tuple[int, int]:
        """Number of records read because their tag mask matched a filter, and number of these whose tags did not
        match."""
        matcher = self._grants.core.matcher if self._grants is not None else None
        return (matcher.checked, matcher.false_positives) if matcher is not None else (0, 0)

    def schedule_delay_ms(self) -> int:
        """Delay, in ms, of the schedule that is overdue the longest; 0 if none is overdue."""
        return self._schedules.delay_ms() if self._grants is not None else 0

    def invalid_schedules(self) -> int:
        """Number of schedules that cannot fire, because this leader does not know their pattern or time zone."""
        return len(self.unknown_schedules)

    @property
    def unknown_schedules(self) -> Collection[str]:
        """Names of the schedules that cannot fire, because this leader does not know their pattern or time zone."""
        return self._schedules.invalid if self._grants is not None else ()

    @property
    def unarchived(self) -> str:
        """Reason in words why past hours stay on the disk: the archive does not have them; "" if none stays for this
        reason."""
        return self._maintenance.unarchived if self._grants is not None else ""

    def waiting_polls(self) -> int:
        return len(self._grants.core.waiting.queues) if self._grants is not None else 0

    def window_size(self) -> int:
        """Number of ready messages in memory."""
        return self._grants.core.windows.size if self._grants is not None else 0

    def ready_counts(self, numbers: Iterable[int] | None = None) -> dict[int, tuple[int, int]]:
        """Count the messages that are due, not leased and not settled, in the topics `numbers` or in all topics.
        Returns topic number → (count, time at which the oldest fell due), without topics that have none."""
        if self._grants is None:
            return {}
        core = self._grants.core
        every = core.windows.ready_counts
        counts = {number: every[number] for number in (every if numbers is None else numbers) if every[number] > 0}
        oldest = core.oldest_ready_ms(counts)
        return {number: (count, oldest[number]) for number, count in counts.items()}

    def active_topics(self) -> list[int]:
        """Numbers of the topics that may have ready messages, or had hand-outs in the last minutes."""
        ready = self._grants.core.windows.ready_counts if self._grants is not None else ()
        return list({**dict.fromkeys(ready), **dict.fromkeys(self.lateness.topics(self._now()))})

    def topic_reports(self, numbers: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Reports of those of the topics `numbers` that have ready messages or recent hand-outs, by topic number:
        number of ready messages, time at which the oldest fell due, and recent lateness."""
        ready, late = self.ready_counts(numbers), self.lateness.recent(self._now(), numbers)
        active = (number for number in numbers if number in ready or number in late)
        return {number: (*ready.get(number, (0, 0)), *late.get(number, (0, 0, 0, 0))) for number in active}
