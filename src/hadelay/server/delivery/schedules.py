"""The leader's part of schedules: computes when they are due, and proposes their occurrences ahead of time (ADR 221).

Apply compares each proposal with the schedule's version and next time, so a repeated or late proposal changes nothing.
Cluster time decides, never a wall clock. Nothing is kept per schedule: the agenda is a table in the order of time, read
from where the last reading ended.
"""

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from hadelay.codec.commandtypes import MAX_AHEAD_MS
from hadelay.codec.results import FireOutcome, FireResult
from hadelay.codec.schedules import LAST, REMOVE, Firing, encode_fire
from hadelay.errors import BadRequest, HadelayError
from hadelay.ledger.messages.changes import MAX_MOVED_BYTES
from hadelay.ledger.schedules import schedules
from hadelay.model import NEVER_MS
from hadelay.server.delivery.term import Term
from hadelay.timing import plan, zones

log = logging.getLogger(__name__)

#: Lead times, in ms: LEAD_MS before a schedule's next occurrence, the messages for all its occurrences of the next
#: LEAD_MS + MORE_MS are made, so a new leader has LEAD_MS to take over.
LEAD_MS, MORE_MS = 5_000, 5_000
#: Limit of messages that schedules make per second. If many schedules are due at the same time, their messages are made
#: earlier, by the time that this takes.
PACE = 2_000
#: No messages are made during commits and searches. Limit, in seconds, of such time that is made up for afterwards, by
#: making messages faster than PACE.
_SLACK_S = 0.1
#: Length, in ms, of the period ahead in which due schedules are counted; and pause between two counts, in ms.
_SURVEY_MS, _SURVEYED_MS = 65_000, 5_000
#: Limits of one proposed command: number of occurrences, bytes, bytes of the messages that apply makes, and seconds to
#: compute the command.
_OCCURRENCES, _BYTES, _MADE_BYTES, _WORK_S = 250, 64 << 10, MAX_MOVED_BYTES, 0.002
#: Size in bytes of an occurrence in a command; and limit, in bytes, of the size of a firing without its name and
#: occurrences.
_TIME_BYTES, _FIRING_BYTES = 19, 64
#: Number of rows of the agenda (schedules by next occurrence) that are read at a time: in order to fire schedules; and
#: in order to count them.
_PAGE, _COUNTED = 50, 1_000
#: Pauses in seconds: after a proposal that failed or was refused; and while the disk is full.
_RETRY_S, _FULL_S = 0.1, 1.0
#: Key of the agenda at which schedules with a computed next occurrence begin; those still to be computed are before it.
_COMPUTED = schedules.agenda_key(1)
#: Longest sleep, in ms: cluster time may be slewed meanwhile. Also the pause before the next attempt to fire a schedule
#: whose time zone this node does not know.
_SLEEP_MS = 300_000


class ScheduleRunner:
    """Fires schedules: proposes their occurrences, which become messages. One object per term. counts: number of
    occurrences by outcome (made, missed, …), over all terms."""

    def __init__(self, term: Term, has_space: Callable[[], bool], counts: Counter[str]) -> None:
        self._term, self._ledger, self._has_space, self._counts = term, term.ledger, has_space, counts
        self._alarm = term.alarm(self._look)
        #: Key of the agenda (schedules by next occurrence) up to which schedules are handled with the full lead time. A
        #: search from an earlier key would read and skip schedules that were fired since the last checkpoint, which
        #: costs some microseconds each.
        self._ahead = _COMPUTED
        #: First and last agenda key of the schedules that fire with the short lead time, because their messages must
        #: not overlap, or because they have finished and are removed then. If there are none, the first key is larger.
        self._close, self._left = _COMPUTED, b""
        #: Agenda key up to which schedules without a computed next occurrence are handled; None: there are none.
        self._uncomputed: bytes | None = b""
        self._proposed = False
        self._rest_until = 0.0
        #: Monotonic time before which no more messages may be made: those made so far would exceed PACE.
        self._paced_until = 0.0
        #: Number of schedules due within _SURVEY_MS, as last counted; and time of that count.
        self._crowd, self._surveyed_ms = 0, 0
        self._survey_from: bytes | None = None
        #: Whether a schedule that is due within _SURVEY_MS was created or changed after the last count began.
        self._uncounted = False
        #: Names of schedules whose pattern or time zone this node did not know at the last attempt.
        self.invalid: set[str] = set()
        #: Agenda keys of the schedules in `invalid`, as an ordered set.
        self._invalid_keys: dict[bytes, None] = {}
        self._retry_invalid_ms = NEVER_MS
        #: Key of table `sched` from which on next occurrences are still to be recomputed, because this node's tzdata is
        #: newer; None: there are none.
        self._anew: bytes | None = b"" if self._ledger.schedules.tzdata < zones.VERSION else None
        self._alarm.at(0.0)

    def changed(self, next_ms: int) -> None:
        """Note that some schedule now has its next occurrence at next_ms (ledger.ports.LedgerListener.on_agenda)."""
        self._handle_from(schedules.agenda_key(next_ms))
        self._uncounted |= 0 < next_ms <= self._term.now() + _SURVEY_MS
        self._wake_for(next_ms, _SURVEY_MS)

    def _handle_from(self, key: bytes) -> None:
        """Handle the schedules from this agenda key on, even if they were handled before."""
        if key < _COMPUTED:
            self._uncomputed = b""
        else:
            self._ahead = min(self._ahead, key)

    def _leave(self, key: bytes) -> None:
        """Let the schedule at this agenda key fire with the short lead time."""
        self._close = min(self._close, key) if self._leaves else key
        self._left = max(self._left, key)

    @property
    def _leaves(self) -> bool:
        return self._close <= self._left

    def delay_ms(self) -> int:
        """Delay, in ms, of the schedule that is overdue the longest; 0 if none is overdue."""
        first = min(self._ahead, self._close) if self._leaves else self._ahead
        rows = schedules.agenda(self._ledger, first, self._term.now(), 1)
        return max(self._term.now() - rows[0][1], 0) if rows and rows[0][1] else 0

    def _wake_for(self, next_ms: int, before_ms: int) -> None:
        at_ms = min(next_ms - before_ms, self._term.now() + _SLEEP_MS)
        self._alarm.at(max(self._term.mono_at(max(at_ms, 0)), self._rest_until))

    def _look(self) -> None:
        if self._proposed or not self._ledger.schedules.count:
            return
        mono = self._term.runtime.monotonic()
        if mono < self._rest_until:
            self._alarm.at(self._rest_until)
        elif not self._has_space():
            self._rest(_FULL_S)
        elif self._survey():
            self._alarm.at(mono)
        else:
            self._work(mono + _WORK_S)

    def _rest(self, seconds: float) -> None:
        self._rest_until = self._term.runtime.monotonic() + seconds
        self._alarm.at(self._rest_until)

    def _survey(self) -> bool:
        """Count the schedules that are due soon, one page per call. Returns whether more schedules are left to
        count."""
        now = self._term.now()
        if self._survey_from is None:
            if now < self._surveyed_ms + _SURVEYED_MS:
                return False
            self._survey_from, self._counted_now, self._uncounted = self._ahead, 0, False
        rows = schedules.agenda(self._ledger, self._survey_from, now + _SURVEY_MS, _COUNTED)
        self._counted_now += len(rows)
        if len(rows) == _COUNTED:
            self._survey_from = rows[-1][0] + b"\0"
            return True
        self._survey_from, self._crowd, self._surveyed_ms = None, self._counted_now, now
        return False

    def _work(self, until: float) -> None:
        """Propose due firings, as many as can be computed until monotonic time `until` or as fit into one proposal;
        sleep if no schedule is due."""
        now = self._term.now()
        if now >= self._retry_invalid_ms:
            for key in self._invalid_keys:
                self._handle_from(key)
            self.invalid, self._invalid_keys, self._retry_invalid_ms = set(), {}, NEVER_MS
        batch, done = _Batch(), True
        lead_ms = LEAD_MS + 1_000 * self._crowd // PACE
        if self._uncomputed is not None:
            key, done = self._fill(batch, until, self._uncomputed, 0, lead_ms + MORE_MS)
            self._uncomputed = None if done else key
        if done and self._leaves:
            self._close, done = self._fill(batch, until, self._close, now + MAX_AHEAD_MS, MAX_AHEAD_MS)
        if done:
            self._ahead, done = self._fill(batch, until, self._ahead, now + lead_ms, lead_ms + MORE_MS)
        tzdata = ""
        if done and self._anew is not None:
            done = self._compute_anew(batch, until)
            tzdata = zones.VERSION if done else ""
        if batch.firings or tzdata:
            self._propose(batch, tzdata)
        elif not done:
            self._alarm.at(0.0)
        else:
            self._sleep(lead_ms)

    def _fill(self, batch: "_Batch", until: float, start: bytes, until_ms: int, ahead_ms: int) -> tuple[bytes, bool]:
        """Add to `batch` firings of the schedules whose next occurrence is at until_ms or earlier, from agenda key
        `start` on. Returns the key to continue from, and whether all these schedules were handled."""
        while True:
            rows = schedules.agenda(self._ledger, start, until_ms, _PAGE)
            for key, _, name in rows:
                if batch.full or (batch.looked and self._term.runtime.monotonic() >= until):
                    return start, False
                self._add(batch, name, ahead_ms)
                start = key + b"\0"
            if len(rows) < _PAGE:
                return max(start, schedules.agenda_key(until_ms + 1)), True

    def _add(self, batch: "_Batch", name: str, ahead_ms: int) -> None:
        found = schedules.find(self._ledger, name)
        batch.looked += 1
        if found is None or name in batch.names:
            return
        spec, template, state = found.stored.spec, found.stored.template, found.state
        now = self._term.now()
        if (state.finished or spec.overlap) and state.next > now + MAX_AHEAD_MS:
            # If messages must not overlap, fire only when due: apply checks whether the previous message is pending
            self._leave(schedules.agenda_key(state.next, name))
            return
        if state.finished:
            batch.add(Firing(name, state.version, state.next, 0, state.last, 0, REMOVE))
            return
        if spec.overlap:
            ahead_ms = MAX_AHEAD_MS
        try:
            most = min(schedules.at_once(template), plan.FIRED)
            firing = plan.fire(name, spec, state, now, ahead_ms, most)
        except BadRequest as error:
            self._invalid_keys[schedules.agenda_key(state.next, name)] = None
            self._is_invalid(name, error)
            return
        if firing is not None:
            batch.add(firing, len(template))

    def _is_invalid(self, name: str, error: HadelayError) -> None:
        if name not in self.invalid and not self.invalid:
            log.error("schedule_invalid", extra={"schedule": name, "problem": str(error)})
        self.invalid.add(name)
        self._retry_invalid_ms = self._term.now() + _SLEEP_MS

    def _compute_anew(self, batch: "_Batch", until: float) -> bool:
        """Recompute the next occurrences of cron patterns with a time zone, because this node's tzdata is newer than
        the version used so far. Messages that were already made stay. Returns whether all schedules were recomputed."""
        assert self._anew is not None
        rows = self._ledger.tables.range(schedules.SCHED, self._anew, None, _PAGE)
        for raw, _ in rows:
            if batch.full or (batch.looked and self._term.runtime.monotonic() >= until):
                return False
            self._anew = raw + b"\0"
            self._move_next(batch, raw.decode())
        if len(rows) < _PAGE:
            self._anew = None
        return self._anew is None

    def _move_next(self, batch: "_Batch", name: str) -> None:
        found = schedules.find(self._ledger, name)
        batch.looked += 1
        if found is None or name in batch.names or found.state.flags or not found.state.next:
            return
        spec, state = found.stored.spec, found.state
        if spec.cron is None or spec.timezone == "UTC":
            return
        try:
            following = next(plan.occurrences(spec, state.last), None)
        except BadRequest as error:
            self._is_invalid(name, error)
            return
        if following != state.next:
            flags = LAST if following is None else 0
            batch.add(Firing(name, state.version, state.next, following or 0, state.last, 0, flags))

    def _propose(self, batch: "_Batch", tzdata: str) -> None:
        self._proposed = True
        known = self._ledger.schedules.tzdata
        command = encode_fire(batch.firings, tzdata or ("" if known else zones.VERSION))
        self._term.propose(command, partial(self._fired, batch.firings))

    def _fired(self, firings: list[Firing], result: Any, error: HadelayError | None) -> None:
        self._proposed = False
        if error is not None or not isinstance(result, FireResult):
            # The proposal may still be committed; apply then rejects the second proposal for these occurrences as
            # stale.
            self._again(firings)
            self._anew = b"" if self._ledger.schedules.tzdata < zones.VERSION else None
            self._rest(_RETRY_S)
            return
        for name in ("made", "missed", "overlapped", "refused"):
            self._counts[name] += getattr(result, name)
        if result.outcomes.any():
            self._again(firings)
            if (result.outcomes == FireOutcome.REFUSED).any():
                log.error("schedule_fire_refused", extra={"count": int((result.outcomes == FireOutcome.REFUSED).sum())})
        mono = self._term.runtime.monotonic()
        self._paced_until = max(self._paced_until, mono - _SLACK_S) + (result.made + result.refused) / PACE
        self._rest(max(self._paced_until - mono, _RETRY_S if result.outcomes.any() else 0.0))

    def _again(self, firings: list[Firing]) -> None:
        for firing in firings:
            self._handle_from(schedules.agenda_key(firing.expected, firing.name))

    def _sleep(self, lead_ms: int) -> None:
        for start, before_ms in ((self._ahead, lead_ms), *([(self._close, MAX_AHEAD_MS)] if self._leaves else ())):
            if rows := schedules.agenda(self._ledger, start, NEVER_MS, 1):
                self._wake_for(rows[0][1], before_ms)
        # Count again if schedules come near that the last count did not include: if many are due together, the lead
        # time depends on their number.
        counted = schedules.agenda_key(self._surveyed_ms + _SURVEY_MS + 1)
        rows = schedules.agenda(self._ledger, max(self._ahead, counted), NEVER_MS, 1)
        if rows or self._uncounted:
            next_ms = 0 if self._uncounted else rows[0][1]
            self._wake_for(max(next_ms - _SURVEY_MS, self._surveyed_ms + _SURVEYED_MS), 0)
        if self._retry_invalid_ms < NEVER_MS:
            self._wake_for(self._retry_invalid_ms, 0)


class _Batch:
    """Firings of schedules that are proposed in one command."""

    def __init__(self) -> None:
        self.firings: list[Firing] = []
        self.names: set[str] = set()
        #: Number of schedules that were examined for this command.
        self.looked = 0
        self._occurrences = self._bytes = self._made_bytes = 0

    def add(self, firing: Firing, size: int = 0) -> None:
        """Add a firing to the command. size: bytes of each message that the firing makes."""
        self.firings.append(firing)
        self.names.add(firing.name)
        self._occurrences += len(firing.times)
        self._made_bytes += len(firing.times) * size
        self._bytes += _FIRING_BYTES + len(firing.name) + _TIME_BYTES * len(firing.times)

    @property
    def full(self) -> bool:
        full = self._occurrences >= _OCCURRENCES or self._bytes >= _BYTES
        return full or self._made_bytes >= _MADE_BYTES
