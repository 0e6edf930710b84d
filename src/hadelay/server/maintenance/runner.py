"""Maintenance by the leader, slowly on purpose: move what is left of hours that are over, forget hours past their
retention, settle what deleted topics and purges left behind, redrive dead letters at their rate.

Each job is a replicated command that works in slices. One slice at a time is under way, and the next leader goes on
where the ledger says. A cluster in which nothing changes gets none. Where an archive is demanded, the leader alone
looks whether the archive holds an hour before it proposes to forget the hour (gate.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hadelay.codec.commands import encode_maintain
from hadelay.codec.commandtypes import Job
from hadelay.codec.results import JobResult
from hadelay.errors import HadelayError
from hadelay.model import DEAD_HOURS, HOUR_MS
from hadelay.server.delivery.term import Term
from hadelay.server.gate import Gate
from hadelay.settings.node import RetentionConfig
from hadelay.storage.manifests import Source

#: Pause between two looks when there was nothing to do, in seconds.
_LOOK_S = 30.0
#: Pause between two slices, in seconds: leaves the log to those who wait for an answer.
_PAUSE_S = 0.02
#: Pause between two slices of a redrive with a rate, in seconds.
_RATE_PAUSE_S = 0.1
#: Least age of an hour that is worked on, in hours: its files are near ones until then.
_HOURS_PAST = 2


class MaintenanceRunner:
    """One per term."""

    def __init__(self, term: Term, retention: RetentionConfig) -> None:
        self._term, self._ledger, self._retention = term, term.ledger, retention
        #: Waiting for the next look, and not for an answer.
        self._idle = False
        self._pause_s = _PAUSE_S
        self._next = self._rounds()
        self._gate = Gate(retention.archive, term.runtime, self._archived) if retention.archive else None
        self._alarm = term.alarm(self._look)
        self._rest(1.0)

    def stop(self) -> None:
        if self._gate is not None:
            self._gate.stop()

    def watch(self) -> None:
        """Something was applied: it may have brought work. Costs nothing."""
        if self._idle and self._ledger.topics.with_work:
            self._rest(0.0)

    def _rest(self, seconds: float = _LOOK_S) -> None:
        self._idle = seconds == _LOOK_S
        self._alarm.cancel()
        self._alarm.at(self._term.runtime.monotonic() + seconds)

    def _look(self) -> None:
        self._pause_s, self._idle = _PAUSE_S, False
        command = next(self._next)
        if command is None:
            # A redrive that is left waits for its rate.
            redrives = any(topic.redrive is not None for topic in self._ledger.topics.unfinished())
            self._rest(_RATE_PAUSE_S if redrives else _LOOK_S)
        else:
            self._term.propose_behind(command, self._worked)

    def _worked(self, result: Any, error: HadelayError | None) -> None:
        # Whatever went wrong may be over at the next look; a refusal would only come back at once.
        self._rest(self._pause_s if isinstance(result, JobResult) else _LOOK_S / 2)

    def _rounds(self) -> Iterator[bytes | None]:
        """The next command, each time; None when a round found none. All take turns: a redrive may take days, and a
        purge makes a sweep begin anew, so that sweeps may never end."""
        while True:
            idle = True
            for topic in self._ledger.topics.unfinished():
                if topic.redrive is not None and not topic.redrive.waits(self._term.now()):
                    idle = False
                    self._pause_s = _PAUSE_S if topic.redrive.rate is None else _RATE_PAUSE_S
                    yield encode_maintain(Job.REDRIVE, topic=topic.name)
            if self._ledger.topics.to_sweep():
                idle = False
                yield encode_maintain(Job.SWEEP)
            if (command := self._next_hour()) is not None:
                idle = False
                yield command
            if idle:
                yield None

    def _next_hour(self) -> bytes | None:
        now = self._term.now()
        running = now // HOUR_MS
        command = None
        for hour in self._ledger.store.hours():
            if hour >= DEAD_HOURS + running:
                break
            if hour >= DEAD_HOURS:
                command = encode_maintain(Job.DROP_DEAD, hour)
            elif hour > running - _HOURS_PAST:
                continue
            elif not self._ledger.open_entries(hour):
                if now >= self._kept_until_ms(hour) and self._is_archived(hour):
                    command = encode_maintain(Job.RETIRE, hour)
            elif now - (hour + 1) * HOUR_MS >= self._retention.carry_ms and self._can_roll_forward(hour):
                command = encode_maintain(Job.ROLL_FORWARD, hour)
            if command is not None:
                break
        if self._gate is not None:
            self._gate.ask()
        return command

    def _kept_until_ms(self, hour: int) -> int:
        """When the longest retention of the topics ends whose messages were settled in this hour."""
        last_ms, kept_ms = (hour + 1) * HOUR_MS, 0
        if (hour_state := self._ledger.hours.get(hour)) is not None:
            last_ms = max(last_ms, hour_state.settled_at_ms)
            configs = (self._ledger.topics[number].config for number in hour_state.topics)
            kept_ms = max((config.get("retention_ms", self._retention.settled_ms) for config in configs), default=0)
        return last_ms + kept_ms

    def _can_roll_forward(self, hour: int) -> bool:
        """Whether CARRY has not yet looked at all entries. Entries still open besides those are leased."""
        hour_state = self._ledger.hours.get(hour)
        return hour_state is None or hour_state.carried < self._ledger.store.count(hour)

    def _is_archived(self, hour: int) -> bool:
        """Or need not be."""
        if self._gate is None:
            return True
        sums = self._ledger.store.sums(hour)
        return sums is not None and self._gate.holds(hour, Source(*sums))

    def _archived(self) -> None:
        if self._idle and not self._term.over:
            self._rest(0.0)
