"""Checks of bulk jobs that transfer messages to another topic, from the committed commands and the stored entries.

J3  No message has two open entries. A step moves the messages that it may move to the named topic, or to the topic in
    which each died, with the same record, the due time that it had (or now), attempt 0 and its TTL begun again, without
    a client key; every other message stays as it was.

The checks find entries by looking through whole hours, and follow deaths themselves: they share no code with
ledger/leases/transfers.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from chaos.sim.history import History
from hadelay.codec.commands import decode
from hadelay.codec.commandtypes import Command
from hadelay.codec.results import Done
from hadelay.codec.wire import Malformed
from hadelay.ledger.hours.lookup import EntryRef, state_of, ttl_of
from hadelay.ledger.hours.transitions import ID_KEY, source_of
from hadelay.ledger.messages.keys import KEYOF
from hadelay.ledger.state import Ledger
from hadelay.model import HOUR_MS, NONE32, SEPARATOR, Event, State

#: Names of topics: two topics with messages (the second one has a subscription), a topic for their dead letters, and
#: another target of transfers.
PARCELS, LETTERS, RETURNS, DEPOT = "parcels", "letters", "returns", "depot"
EAST = f"{LETTERS}~east"
TOPICS = (PARCELS, LETTERS, EAST, RETURNS, DEPOT)
_WAITING = (State.SCHEDULED, State.READY, State.BLOCKED)


class _Open(NamedTuple):
    """An open entry of a message."""

    hour: int
    row: np.void

    @property
    def topic(self) -> int:
        return int(self.row["topic"])

    def record(self, ledger: Ledger) -> bytes:
        return bytes(ledger.store.record(self.hour, int(self.row["offset"]), int(self.row["size"]), verify=True))

    def ended_by(self, ledger: Ledger, event: Event) -> bool:
        return int(self.row["index"]) in ledger.hours[self.hour].others.get(event, ())

    def __str__(self) -> str:
        of = ("topic", "deliver_at_ms", "attempt", "generation", "flags")
        return " ".join([f"hour={self.hour}", *(f"{name}={self.row[name]}" for name in of)])


@dataclass(slots=True)
class _Step:
    """A step of a transfer, and the messages that it names, as they were before."""

    job: int
    done: int
    refused: int
    #: Message → its open entry.
    before: dict[int, _Open]
    #: Message → number of the topic to which the message has to move; None if it has to stay.
    wanted: dict[int, int | None]
    #: Message → its record.
    records: dict[int, bytes] = field(default_factory=dict)
    #: Message → its TTL, in ms.
    ttls: dict[int, int] = field(default_factory=dict)
    #: Topic → number of messages for which the topic has room.
    rooms: dict[int, int] = field(default_factory=dict)


class Transfers:
    """Checks J3 of one cluster. Call `begin` before an entry is applied for the first time, `committed` after it."""

    def __init__(self, decide: Callable[..., None]) -> None:
        """decide: counts a checked case of a promise and notes a violation, see `Machines.decide`."""
        self._decide = decide
        #: Message → number of the topic in which the message died before it was routed to another topic, or of the
        #: subscription from which a transfer took the copy. None until the first entry with the topic for dead letters.
        self._died_in: dict[int, int] | None = None
        #: Message → its open entry, after the last entry of the log.
        self._at: dict[int, _Open] = {}
        self._step: _Step | None = None

    def begin(self, ledger: Ledger, now_ms: int, commands: list[tuple[int, Any]]) -> None:
        self._step = None
        if ledger.known_topic(RETURNS) is None:
            return
        # Take over deaths and entries that a restored cluster has from its backup.
        if self._died_in is None:
            found = _open_entries(ledger)
            self._at = {one: entries[0] for one, entries in found.items()}
            self._died_in = {one: source_of(ledger, one) for one in found if source_of(ledger, one) != NONE32}
        if commands and commands[0][0] == Command.JOB_STEP:
            try:
                self._foresee(ledger, decode(Command.JOB_STEP, commands[0][1]), now_ms)
            except Malformed:
                return

    def committed(self, ledger: Ledger, commands: list[tuple[int, Any]], results: list[Any]) -> None:
        """Check an entry that was just applied. commands, results: commands of the entry, and their results."""
        if self._died_in is None:
            return
        found = _open_entries(ledger)
        twice = [one for one, entries in found.items() if len(entries) > 1]
        text = f"{[(f'{one:x}', [*map(str, found[one])]) for one in twice]}"
        self._decide("J3 transfers, once", bool(twice), text, *twice)
        moved = self._step if results and isinstance(results[0], Done) else None
        if moved is not None:
            self._judge(ledger, moved, found, alone=len(commands) == 1)
        now = {one: entries[0] for one, entries in found.items()}
        for one in now.keys() & self._at.keys():
            before = self._at[one]
            if now[one].topic == before.topic:
                continue
            # Note the subscription from which a transfer took a copy: a transfer without a target brings the copy back.
            copied = SEPARATOR in ledger.topics[before.topic].name
            if copied or before.ended_by(ledger, Event.DEAD):
                self._died_in[one] = before.topic
        self._at = now

    def _foresee(self, ledger: Ledger, step: Any, now_ms: int) -> None:
        job = ledger.jobs.get(step.job)
        if job is None or job.spec.action != "transfer" or job.cursor != step.expected or self._died_in is None:
            return
        into = ledger.topic(job.spec.into) if job.spec.into else None
        self._step = before = _Step(job.number, job.done, job.refused, {}, {})
        for one in step.ids:
            entry = self._at.get(one)
            if entry is None:
                continue
            before.before[one], before.records[one] = entry, entry.record(ledger)
            place = EntryRef(entry.hour, int(entry.row["index"]), np.array([entry.row], entry.row.dtype))
            means = int(entry.row["generation"]) < job.topics.get(entry.topic, 0)
            number = self._died_in.get(one) if not job.spec.into else None if into is None else into.number
            if number is not None and (number == entry.topic or not ledger.topics[number].exists):
                number = None
            if (ttl := ttl_of(ledger, one)) is not None:
                before.ttls[one] = ttl[1]
            before.wanted[one] = number if means and state_of(ledger, place, now_ms) in _WAITING else None
            if number is not None and (most := ledger.topics[number].settings.max_messages) is not None:
                before.rooms[number] = max(most - ledger.topics[number].pending, 0)

    def _judge(self, ledger: Ledger, step: _Step, found: dict[int, list[_Open]], *, alone: bool) -> None:
        """Compare the messages of a step with what `_foresee` predicted. alone: whether no other command of the entry
        may have changed them."""
        job, moved, full = ledger.jobs[step.job], 0, dict(step.rooms)
        for one, before in step.before.items():
            wanted, entries = step.wanted[one], found.get(one, [])
            if not entries and not alone:
                continue
            route = f"{job.spec.topic} to {job.spec.into or 'where each died'}"
            text = f"{route}: {one:x} from {before} to {wanted}; at {ledger.now_ms} {[*map(str, entries)]}"
            if wanted in full and len(entries) == 1 and entries[0].topic == before.topic:
                wanted = None  # the target had no room, so the message has to stay; `full` is compared below
            elif wanted in full:
                full[wanted] -= 1
            wrong = len(entries) != 1 or (alone and not _is_as(ledger, one, step, entries[0], wanted))
            self._decide("J3 transfers, moved", wrong, text, one)
            moved += wanted is not None
        for number, left in full.items():
            stayed = sum(to == number and found[one][0].topic != to for one, to in step.wanted.items() if one in found)
            crowded = left < 0 or (left > 0 and stayed > 0)
            text = f"{stayed} messages stayed, and {ledger.topics[number].name} has room for {left}"
            self._decide("J3 transfers, moved", alone and number not in job.topics and crowded, text)
        counts = job.done - step.done, job.refused - step.refused
        text = f"job {job.number} counts {counts} messages as transferred and refused, and {moved} were transferred"
        self._decide("J3 transfers, moved", alone and counts[0] != moved, text)


def _is_as(ledger: Ledger, one: int, step: _Step, now: _Open, number: int | None) -> bool:
    """Whether a message is in topic `number` with the due time, TTL and record that it should have. number None:
    whether the message stayed as it was."""
    before, row = step.before[one], now.row
    if now.record(ledger) != step.records[one]:
        return False
    if number is None:
        return (now.hour, row.tobytes()) == (before.hour, before.row.tobytes())
    due_ms, ttl_ms = max(int(before.row["deliver_at_ms"]), ledger.now_ms), step.ttls.get(one)
    return (
        now.topic == number
        and (now.hour, int(row["deliver_at_ms"])) == (due_ms // HOUR_MS, due_ms)
        and (int(row["attempt"]), int(row["generation"])) == (0, ledger.topics[number].generation)
        and ttl_of(ledger, one) == (None if ttl_ms is None else (due_ms + ttl_ms, ttl_ms))
        and ledger.tables.get(KEYOF, ID_KEY.pack(one)) is None
    )


def _open_entries(ledger: Ledger) -> dict[int, list[_Open]]:
    """Message → its open entries in the topics of transfers, found by reading whole hours, without a look-up by id."""
    topics = [topic.number for name in TOPICS if (topic := ledger.known_topic(name)) is not None]
    found: dict[int, list[_Open]] = {}
    for hour in ledger.store.hours():
        rows = ledger.store.entries(hour, slice(0, ledger.store.count(hour)))
        rows = rows[np.isin(rows["topic"], topics) & ledger.topics.owed(rows)]
        settled = ledger.hours[hour].settled if hour in ledger.hours else ()
        for row in rows:
            if int(row["index"]) not in settled:
                found.setdefault(int(row["first_id"]), []).append(_Open(hour, row))
    return found


def kept(history: History, ledger: Ledger) -> None:
    """I1, at the end of a run: each message whose publish was confirmed is in one topic, unless a client asked to end
    it, or its TTL is over."""
    found = _open_entries(ledger)
    for parcel in history.parcels.values():
        ends = parcel.may_end or parcel.ttl_ms or parcel.acked is not None
        text = f"the parcel {parcel.id:x} was stored, and is nowhere"
        history.decide("I1 lost", parcel.id not in found and not ends, text, parcel.id)
