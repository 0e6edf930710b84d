"""Checks of the promises about schedules: a model, which shares no code with the leader's part of schedules, follows
the committed log.

S1  Per schedule, occurrences increase: one message each.
S2  Every occurrence is made, missed, overlapped or refused, as an independent oracle counts; nothing is missed within a
    minute, nothing late is made against the policy, and no message is made beside a pending one that forbids it.
S3  The agenda has a row per active schedule (ledgercheck).
S4  Nothing of a deleted, paused or replaced schedule is handed out that was not due then.
S5  In the end no active schedule is overdue (promises).
"""

import calendar
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from hadelay.codec.commands import decode
from hadelay.codec.commandtypes import Command
from hadelay.codec.results import Done, FireOutcome, Refused
from hadelay.codec.schedules import LAST, REMOVE, CatchUp, Firing, Overlap, Put, Spec, Stored
from hadelay.ledger import schedules
from hadelay.ledger.lookup import find_entry, state_of
from hadelay.ledger.state import Ledger
from hadelay.model import PENDING, State

#: Cron pattern of all schedules with a time zone (Europe/Vienna); `occurrences` knows no other cron pattern.
DAILY = "0 30 2 * * *"
_GRACE_MS, _DAY_MS = 60_000, 86_400_000
#: Longest time, in ms, from the leader's decision to fire a schedule until its apply: an occurrence is checked for
#: lateness only if it is late by more than this.
_SLACK_MS = 15_000
#: Bit of INDEX.flags: the message was due when it was rescheduled.
_WAS_DUE = 32


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


def occurrences(spec: Spec, after_ms: int, until_ms: int) -> list[int]:
    """Occurrences of a schedule in (after_ms, until_ms], computed without the server's code."""
    if spec.cron == DAILY:
        found: list[int] = []
        for at_ms in daily_in_vienna(after_ms):
            if at_ms > until_ms:
                return found
            found.append(at_ms)
    every_ms = spec.every_ms or 0
    first = (after_ms // every_ms + 1) * every_ms
    return list(range(first, until_ms + 1, every_ms))


@dataclass
class Known:
    """State of a schedule, as derived from the committed log."""

    version: int
    stored: Stored
    paused: bool
    #: Newest occurrence that was checked.
    last: int
    #: Messages that the schedule made at its times, not by a trigger or backfill: message id → time of the occurrence.
    filed: dict[int, int] = field(default_factory=dict)


class Timetable:
    def __init__(self, sim: Any) -> None:
        self.sim = sim
        self.known: dict[str, Known] = {}
        self._begun = False

    def begin(self, ledger: Ledger) -> None:
        """Take over the schedules of a restored cluster, before its first entry is applied."""
        if not self._begun:
            self._begun = True
            for raw, _ in ledger.tables.range(schedules.STATE):
                found = schedules.find(ledger, raw.decode())
                if found is not None:
                    state = found.state
                    self.known[raw.decode()] = Known(state.version, found.stored, state.paused, state.last)

    def committed(self, kind: int, body: memoryview, result: Any, ledger: Ledger) -> None:
        """Check one command of a committed entry. Called when the whole entry has been applied."""
        if kind == Command.AUDITED and not isinstance(result, Refused):  # a refused command may be malformed
            audited = decode(kind, body)
            kind, body = audited.kind, audited.body
        if kind == Command.SCHEDULE_FIRE and hasattr(result, "outcomes"):
            for firing, outcome in zip(decode(kind, body).firings, result.outcomes.tolist(), strict=True):
                if outcome == FireOutcome.DONE:
                    self._fired(firing, ledger)
                self.sim.history.count(f"fired {FireOutcome(outcome).name.lower()}")
        elif isinstance(result, Done) and result.changed:
            if kind == Command.SCHEDULE_PUT:
                self._put(decode(kind, body), ledger)
            elif kind == Command.SCHEDULE_DELETE:
                self._cancelled(decode(kind, body), ledger)
                self.known.pop(decode(kind, body), None)
            elif kind == Command.SCHEDULE_STATE:
                name, paused = decode(kind, body)
                self._from_now(name, ledger, paused)

    def _put(self, put: Put, ledger: Ledger) -> None:
        known, spec = self.known.get(put.name), put.stored.spec
        if known is None:
            self.known[put.name] = Known(1, put.stored, False, ledger.now_ms)
            return
        if known.stored.spec.same_times(spec) and not known.paused:
            known.version += 1
            if known.stored.template != put.stored.template:
                self._cancelled(put.name, ledger)
        else:
            self._from_now(put.name, ledger, known.paused)
        known.stored = put.stored
        self._note_filed(put.name, ledger)

    def _from_now(self, name: str, ledger: Ledger, paused: bool) -> None:
        known = self.known.get(name)
        if known is None:
            return
        self._cancelled(name, ledger)
        kept = [at_ms for id_, at_ms in known.filed.items() if self._state(id_, ledger) is not State.CANCELLED]
        known.version, known.paused = known.version + 1, paused
        known.last = max([ledger.now_ms, *kept])

    def _cancelled(self, name: str, ledger: Ledger) -> None:
        """S4: after a schedule was deleted, paused or replaced, its messages that were not due yet are cancelled."""
        known = self.known.get(name)
        for id_ in known.filed if known is not None else ():
            entry = find_entry(ledger, id_)
            if entry is None:
                continue
            row = entry.rows[0]
            state = state_of(ledger, entry, ledger.now_ms)
            waits = state is State.SCHEDULED
            if state is State.BLOCKED:
                waits = int(row["deliver_at_ms"]) > ledger.now_ms
            ahead = waits and not int(row["attempt"])
            text = f"{name} changed, and its message {id_:x} still waits for its time"
            self.sim.decide("S4 schedules, cancelled", ahead and not int(row["flags"]) & _WAS_DUE, text, id_)

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
        times, spec = firing.times["occurrence"].tolist(), known.stored.spec
        order = [known.last, *times]
        text = f"{firing.name} made {times} after {known.last}"
        self.sim.decide("S1 schedules", order != sorted(set(order)), text)
        oracle = occurrences(spec, known.last, firing.last)
        text = f"{firing.name}: {len(times)} made and {firing.missed} missed of {len(oracle)} until {firing.last}"
        wrong = not set(times) <= set(oracle) or len(oracle) != len(times) + firing.missed
        self.sim.decide("S2 schedules, counts", wrong, text)
        skipped = [at_ms for at_ms in oracle if at_ms not in times and at_ms > now_ms - _GRACE_MS]
        self.sim.decide("S2 schedules, counts", bool(skipped), f"{firing.name} missed {skipped[:3]} at {now_ms}")
        late = [at_ms for at_ms in times if at_ms <= now_ms - _GRACE_MS - _SLACK_MS and not self._decided(at_ms)]
        most = {CatchUp.ONE: 1, CatchUp.NONE: 0, CatchUp.ALL: len(late)}[CatchUp(spec.catch_up)]
        self.sim.decide("S2 schedules, catch-up", len(late) > most, f"{firing.name} made {late[:3]}… at {now_ms}")
        if not firing.flags & LAST:
            behind = occurrences(spec, firing.last, firing.next)
            self.sim.decide("S2 schedules, counts", behind != [firing.next], f"{firing.name}: next {firing.next}")
        known.last = firing.last
        self._note_filed(firing.name, ledger)
        if spec.overlap and times:
            self._overlaps(firing.name, times, ledger)

    def _decided(self, at_ms: int) -> bool:
        """Whether a leader may have proposed an occurrence in time, just before all machines were suspended: its
        proposal is applied after the suspension, and then the occurrence is late."""
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

    def _note_filed(self, name: str, ledger: Ledger) -> None:
        found, known = schedules.find(ledger, name), self.known[name]
        times = [made.occurrence for made in found.state.ring if not made.manual] if found is not None else []
        self.sim.decide("S1 schedules", times != sorted(set(times)), f"{name} made {times}")
        for made in found.state.ring if found is not None else ():
            if not made.manual:
                known.filed[made.id] = made.occurrence
        while len(known.filed) > 200:
            known.filed.pop(next(iter(known.filed)))
