"""Checks of the promises about schedules: a model, which shares no code with the leader's part of schedules, follows
the committed log.

S1  Per schedule, occurrences increase: one message each, which has the group and due time of the specification.
S2  Every occurrence is made, missed, overlapped or refused, as an independent oracle counts; nothing is missed within a
    minute, nothing late is made against the policy, and no message is made beside a pending one that forbids it. A
    schedule ends after its last occurrence or `max_occurrences`, and no sooner. A backfill makes all of its range.
S3  The agenda has a row per active schedule (ledgercheck).
S4  Nothing of a deleted, paused or replaced schedule is handed out that was not due then.
S5  In the end no active schedule is overdue (promises).
"""

import calendar
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import count, takewhile
from typing import Any

from hadelay.codec.commands import decode
from hadelay.codec.commandtypes import Command
from hadelay.codec.meta import unpack
from hadelay.codec.results import Done, FireOutcome, PublishResult, Refused
from hadelay.codec.schedules import ANY_VERSION, LAST, REMOVE, CatchUp, Firing, Overlap, Put, Run, Spec, Stored
from hadelay.ledger.hours.lookup import find_entry, state_of
from hadelay.ledger.schedules import schedules
from hadelay.ledger.state import Ledger
from hadelay.model import NEVER_MS, PENDING, State
from hadelay.server.reading import split_record

#: Cron pattern of all schedules with a time zone (Europe/Vienna); `occurrences` knows no other cron pattern.
DAILY = "0 30 2 * * *"
_GRACE_MS, _DAY_MS = 60_000, 86_400_000
#: Longest time, in ms, from the leader's decision to fire a schedule until its apply: an occurrence is checked for
#: lateness only if it is late by more than this.
_SLACK_MS = 15_000
#: Bit in the field `flags` of an index entry: the message was already due when it was rescheduled.
_WAS_DUE = 32
#: Optional fields of a specification. The fired occurrences are counted for each field, to show that runs test it.
SHAPES = ("at", "start_ms", "end_ms", "max_occurrences", "jitter_ms", "group")


def daily_in_vienna(after_ms: int) -> Iterator[int]:
    """Times of the pattern DAILY after after_ms, in Unix ms: 2:30 by the clock of Vienna; 3:00 on the day on which the
    clock skips 2:30."""
    day = datetime.fromtimestamp(after_ms / 1000, UTC).date() - timedelta(days=1)
    while True:
        summer = _last_sunday(day.year, 3) < day <= _last_sunday(day.year, 10)
        at = datetime(day.year, day.month, day.day, 0 if summer else 1, 30, tzinfo=UTC)
        if day == _last_sunday(day.year, 3):
            at = at.replace(minute=0)
        at_ms = int(at.timestamp()) * 1000
        if at_ms > after_ms:
            yield at_ms
        day += timedelta(days=1)


def _last_sunday(year: int, month: int) -> Any:
    last = datetime(year, month, calendar.monthrange(year, month)[1], tzinfo=UTC)
    return (last - timedelta(days=last.isoweekday() % 7)).date()


def occurrences(spec: Spec, after_ms: int, until_ms: int = NEVER_MS) -> Iterator[int]:
    """Occurrences of a schedule in (after_ms, until_ms], computed without the server's code."""
    first_ms = max(after_ms + 1, spec.start_ms or 0)
    last_ms = until_ms if spec.end_ms is None else min(until_ms, spec.end_ms)
    if spec.at is not None:
        times: Iterable[int] = [at_ms for at_ms in spec.at if at_ms >= first_ms]
    elif spec.cron == DAILY:
        times = daily_in_vienna(first_ms - 1)
    else:
        every_ms = spec.every_ms or 0
        times = count(first_ms + ((spec.start_ms or 0) - first_ms) % every_ms, every_ms)
    return takewhile(lambda at_ms: at_ms <= last_ms, times)


def _due(spec: Spec, occurrence: int, now_ms: int = 0) -> range:
    """Possible due times of the message of an occurrence, if the message is made at now_ms."""
    end_ms = occurrence + max(spec.jitter_ms, 1)
    return range(max(occurrence, now_ms), max(end_ms, now_ms + 1))


@dataclass
class Known:
    """State of a schedule, as derived from the committed log."""

    version: int
    stored: Stored
    paused: bool
    #: Newest occurrence that the model has checked, in Unix ms.
    last: int
    #: Number of messages that the schedule made at its times, less those that a change cancelled.
    made: int = 0
    #: Whether the schedule has ended.
    over: bool = False
    #: Messages that the schedule made at its times, not by a trigger or backfill: message id → time of the occurrence.
    filed: dict[int, int] = field(default_factory=dict)


class Timetable:
    def __init__(self, sim: Any) -> None:
        self.sim = sim
        self.known: dict[str, Known] = {}
        #: Id of each message of a schedule → its occurrence; or, for a trigger, the time of the request.
        self.made: dict[int, int] = {}
        self._begun = False
        #: Whether no other command of the present entry is about schedules. Only then does the state of the ledger,
        #: which follows the whole entry, show the effect of the command alone.
        self._alone = True

    def begin(self, ledger: Ledger) -> None:
        """Take over the schedules of a restored cluster, before its first entry is applied."""
        if not self._begun:
            self._begun = True
            for raw, _ in ledger.tables.range(schedules.STATE):
                found = schedules.find(ledger, raw.decode())
                if found is not None:
                    state = found.state
                    known = Known(state.version, found.stored, state.paused, state.last, state.made, state.finished)
                    known.filed = {made.id: made.occurrence for made in state.ring if not made.manual}
                    self.known[raw.decode()] = known
                    self.made |= known.filed

    def committed(self, kind: int, body: memoryview, result: Any, ledger: Ledger, *, alone: bool = True) -> None:
        """Check one command of a committed entry. Called when the whole entry has been applied."""
        self._alone = alone
        if kind == Command.AUDITED and not isinstance(result, Refused):  # skip refused commands: they may be malformed
            audited = decode(kind, body)
            kind, body = audited.kind, audited.body
        if kind == Command.SCHEDULE_FIRE and hasattr(result, "outcomes"):
            for firing, outcome in zip(decode(kind, body).firings, result.outcomes.tolist(), strict=True):
                if outcome == FireOutcome.DONE:
                    self._fired(firing, ledger)
                self.sim.history.count(f"fired {FireOutcome(outcome).name.lower()}")
        elif kind == Command.SCHEDULE_RUN and isinstance(result, PublishResult):
            self._ran(decode(kind, body), result, ledger)
        elif isinstance(result, Done) and result.changed:
            if kind == Command.SCHEDULE_PUT:
                self._put(decode(kind, body), ledger)
            elif kind == Command.SCHEDULE_DELETE:
                name = decode(kind, body).name
                self._cancelled(name, ledger)
                self.known.pop(name, None)
            elif kind == Command.SCHEDULE_STATE:
                pause = decode(kind, body)
                self._from_now(pause.name, ledger, pause.paused)

    def version_of(self, name: str) -> tuple[int, Stored] | None:
        known = self.known.get(name)
        return None if known is None else (known.version, known.stored)

    def _put(self, put: Put, ledger: Ledger) -> None:
        known, spec = self.known.get(put.name), put.stored.spec
        if known is None:
            self.known[put.name] = Known(1, put.stored, False, ledger.now_ms)
            self._ends(put.name, ledger)
            return
        if known.stored.spec.same_times(spec) and not known.paused:
            known.version += 1
            if known.over:  # a higher limit of occurrences lets an ended schedule go on from now
                known.last = max(ledger.now_ms, known.last)
            if known.stored.template != put.stored.template:
                made = known.made
                self._cancelled(put.name, ledger)
                known.made = made
            known.stored = put.stored
            self._ends(put.name, ledger)
        else:
            self._from_now(put.name, ledger, known.paused, put.stored)
        self._note_filed(put.name, ledger)

    def _from_now(self, name: str, ledger: Ledger, paused: bool, stored: Stored | None = None) -> None:
        known = self.known.get(name)
        if known is None:
            return
        self._cancelled(name, ledger, stays=not paused)
        known.version, known.paused, known.stored = known.version + 1, paused, stored or known.stored
        known.last = max([ledger.now_ms, *known.filed.values()])
        self._ends(name, ledger)

    def _cancelled(self, name: str, ledger: Ledger, *, stays: bool = False) -> None:
        """S4: after a schedule was deleted, paused or replaced, its messages that were not due yet are cancelled, and
        no longer count as made; they are removed from `filed`. Exempt are messages that a job rescheduled. stays:
        occurrences whose time has come are exempt, too; each still counts as made, by its own message or by a message
        of the new template."""
        known, kept = self.known.get(name), dict[int, int]()
        if known is None:
            return
        for id_, at_ms in known.filed.items():
            entry = find_entry(ledger, id_)
            state = None if entry is None else state_of(ledger, entry, ledger.now_ms)
            if state is not State.CANCELLED:
                kept[id_] = at_ms
            come = stays and at_ms <= ledger.now_ms
            known.made -= state is State.CANCELLED and not come
            if entry is None or come:
                continue
            row = entry.rows[0]
            due_ms = int(row["deliver_at_ms"])
            waits = state is State.SCHEDULED or (state is State.BLOCKED and due_ms > ledger.now_ms)
            ahead = waits and not int(row["attempt"]) and due_ms in _due(known.stored.spec, at_ms)
            text = f"{name} changed, and its message {id_:x} still waits for its time"
            self.sim.decide("S4 schedules, cancelled", ahead and not int(row["flags"]) & _WAS_DUE, text, id_)
        known.filed = kept

    def _ends(self, name: str, ledger: Ledger, last: bool | None = None) -> None:
        """S2: a schedule has ended if no occurrence follows, or if it has made `max_occurrences` messages. last:
        whether a firing reported that no occurrence follows; None after a change of the schedule, which may lower the
        limit."""
        known, found = self.known[name], schedules.find(ledger, name)
        most = known.stored.spec.max_occurrences
        known.over = bool(last) or (most is not None and known.made >= most and not known.paused)
        if found is not None and not self._alone:
            known.made, known.over, known.last = found.state.made, found.state.finished, found.state.last
        elif found is not None:
            text = f"{name} made {known.made} of {most}, and has ended: {found.state.finished}"
            beyond = last is not None and most is not None and known.made > most
            self.sim.decide("S2 schedules, counts", beyond or found.state.finished != known.over, text)
            self.sim.history.count("schedule ended", known.over)

    @staticmethod
    def _state(id_: int, ledger: Ledger) -> State | None:
        entry = find_entry(ledger, id_)
        return None if entry is None else state_of(ledger, entry, ledger.now_ms)

    def _fired(self, firing: Firing, ledger: Ledger) -> None:
        known, now_ms = self.known.get(firing.name), ledger.now_ms
        foreign = known is None or known.paused or known.version != firing.version
        text = f"{firing.name}, version {firing.version}, was fired; it is {known and (known.version, known.paused)}"
        self.sim.decide("S4 schedules, version", foreign, text)
        if known is None or foreign:
            return
        if firing.flags & REMOVE:
            self.known.pop(firing.name)
            return
        times, spec = firing.occurrences, known.stored.spec
        order = [known.last, *times]
        text = f"{firing.name} made {times} after {known.last}"
        self.sim.decide("S1 schedules", order != sorted(set(order)), text)
        oracle = list(occurrences(spec, known.last, firing.last))
        text = f"{firing.name}: {len(times)} made and {firing.missed} missed of {len(oracle)} until {firing.last}"
        wrong = not set(times) <= set(oracle) or len(oracle) != len(times) + firing.missed
        self.sim.decide("S2 schedules, counts", wrong, text)
        skipped = [at_ms for at_ms in oracle if at_ms not in times and at_ms > now_ms - _GRACE_MS]
        self.sim.decide("S2 schedules, counts", bool(skipped), f"{firing.name} missed {skipped[:3]} at {now_ms}")
        late = [at_ms for at_ms in times if at_ms <= now_ms - _GRACE_MS - _SLACK_MS and not self._decided(at_ms)]
        most = {CatchUp.ONE: 1, CatchUp.NONE: 0, CatchUp.ALL: len(late)}[CatchUp(spec.catch_up)]
        self.sim.decide("S2 schedules, catch-up", len(late) > most, f"{firing.name} made {late[:3]}… at {now_ms}")
        following, last = next(occurrences(spec, firing.last), 0), bool(firing.flags & LAST)
        wrong = firing.next != following or last == bool(following)
        self.sim.decide("S2 schedules, counts", wrong, f"{firing.name}: next {firing.next}, and it is {following}")
        known.last = firing.last
        filed = self._note_filed(firing.name, ledger, new=True)
        known.made += filed if spec.overlap else len(times)
        self._ends(firing.name, ledger, last)
        for shape in SHAPES:
            self.sim.history.count(f"fired with {shape}", len(times) if getattr(spec, shape) else 0)
        if spec.overlap and times:
            self._overlaps(firing.name, times, ledger)

    def _ran(self, run: Run, result: PublishResult, ledger: Ledger) -> None:
        """Check a trigger or a backfill: it takes effect only on the version of the schedule that the node saw, and its
        messages are due now."""
        known = self.known.get(run.name)
        if known is None or not (result.ids > 0)[~result.duplicate].any():
            # A repeated request gets the answer of its first try and makes no new message, although the schedule was
            # changed or deleted meanwhile.
            new = [id_ for id_ in result.ids.tolist() if id_ and id_ not in self.made]
            self.sim.decide(
                "S4 schedules, version", bool(new), f"{run.name} is of another version, and made {new}", *new
            )
            return
        text = f"{run.name}, version {run.version}, was run; it is {known.version}"
        self.sim.decide("S4 schedules, version", run.version not in (ANY_VERSION, known.version), text)
        for (at_ms, _), id_, again in zip(run.times, result.ids.tolist(), result.duplicate, strict=True):
            if id_ and not again:
                now_ms = ledger.now_ms
                self._look(run.name, id_, at_ms or now_ms, range(now_ms, now_ms + 1), ledger)

    def _look(self, name: str, id_: int, occurrence: int, due: range, ledger: Ledger) -> None:
        """S1: a new message names its schedule and occurrence, and has the group of the specification and a due time
        in `due`."""
        self.made[id_] = occurrence
        if self.sim.rotten or not self._alone:
            return
        entry, group = find_entry(ledger, id_), self.known[name].stored.spec.group
        found: tuple[Any, ...] = ()
        if entry is not None:
            row = entry.rows[0]
            record = ledger.store.record(entry.hour, int(row["offset"]), int(row["size"]), verify=True)
            meta = unpack(split_record(record)[0])
            found = meta.sch, meta.oc, meta.group, int(row["deliver_at_ms"])
        wrong = found[:3] != (name, occurrence, group) or found[3] not in due
        text = f"{name} made {found} for {occurrence}, with the group {group}, due in {due}"
        self.sim.decide("S1 schedules", wrong, text, id_)

    def _decided(self, at_ms: int) -> bool:
        """Whether the occurrence at this time may be late: a leader may have proposed the occurrence just before all
        machines were suspended, and the proposal was applied after the suspension."""
        return any(nap_ms - _GRACE_MS < at_ms < nap_ms + _SLACK_MS for nap_ms in self.sim.naps_ms)

    def _overlaps(self, name: str, times: list[int], ledger: Ledger) -> None:
        found = schedules.find(ledger, name)
        ring = found.state.ring if found is not None else ()
        if found is None or not ring or ring[-1].manual or ring[-1].occurrence not in times:
            return
        pending = [made.id for made in ring[:-1] if self._state(made.id, ledger) in PENDING]
        most = 1 if Overlap(found.stored.spec.overlap) is Overlap.WAIT else 0
        branch = "S2 schedules, wait" if most else "S2 schedules, overlap"
        self.sim.decide(branch, len(pending) > most, f"{name} made one beside {pending}", *pending)

    def _note_filed(self, name: str, ledger: Ledger, *, new: bool = False) -> int:
        """Note the messages that the schedule made at its times; returns the number of messages not noted before. new:
        True if these messages were made now; False if they replace cancelled messages, and have the due times of
        those."""
        found, known, before = schedules.find(ledger, name), self.known[name], len(self.made)
        ring = [made for made in found.state.ring if not made.manual] if found is not None else []
        times = [made.occurrence for made in ring]
        self.sim.decide("S1 schedules", times != sorted(set(times)), f"{name} made {times}")
        for id_, at_ms in [(made.id, made.occurrence) for made in ring if made.id not in self.made]:
            known.filed[id_] = at_ms
            due = _due(known.stored.spec, at_ms, ledger.now_ms) if new else range(NEVER_MS)
            self._look(name, id_, at_ms, due, ledger)
        while len(known.filed) > 200:
            known.filed.pop(next(iter(known.filed)))
        return len(self.made) - before
