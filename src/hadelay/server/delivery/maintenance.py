"""Commands that the leader proposes by itself: expiry of leases and messages, and maintenance of hour files."""

import logging
from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Any

from hadelay.codec.commands import encode_expire, encode_maintain
from hadelay.codec.commandtypes import Job
from hadelay.codec.results import ExpireResult, JobResult
from hadelay.errors import HadelayError
from hadelay.handout.deadlines import Deadlines
from hadelay.ledger.batches import batches
from hadelay.ledger.messages import fills, ttl, unique
from hadelay.model import DEAD_HOURS, HOUR_MS, NEVER_MS, hour_name
from hadelay.platform.runtime import Runtime
from hadelay.server.delivery.batchcancels import BatchCancels
from hadelay.server.delivery.term import Term
from hadelay.settings.node import RetentionConfig
from hadelay.storage.manifests import Catalogue, SourceFiles, load_catalogue, open_archive, unproven

log = logging.getLogger(__name__)

Key = tuple[int, int]
#: Limit of grants in one EXPIRE command; and of grants of earlier leaders that a new leader reads in one turn of the
#: event loop.
_GRANTS = 512
#: Pause after an EXPIRE that failed, in ms.
_RETRY_MS = 100
#: Tolerance, as a number of grants: ended grants are dropped once more grants are remembered than 2 × (grants with open
#: leases) + this number.
_STALE = 1_024
#: Limit of rows of table `ttl` that are read at once.
_ROWS = 250
#: Number of rows of messages that no longer wait, after which TTL_EXPIRE is proposed only to remove these rows.
_SILENT_ROWS = 500
#: Pause between two reads of table `ttl`, in ms, so that one command expires many messages. Expired messages are not
#: handed out meanwhile.
_TTL_PAUSE_MS = 100
#: Pause of the maintenance, in seconds, when no work was found.
_LOOK_S = 30.0
#: Pause between two maintenance commands, in seconds: between them, the log is free for commands whose clients wait.
_PAUSE_S = 0.02
#: Pause between two slices of a redrive with a rate, in seconds.
_RATE_PAUSE_S = 0.1
#: Minimum age of an hour that maintenance works on, in hours: the files of younger hours are still mapped into memory.
_HOURS_PAST = 2
#: Time in seconds for which it counts as proven that the archive has the files of an hour.
_PROOF_S = 60.0
#: Limit of hours that one check of the archive proves: this number of hours is deleted well before the proofs expire.
_PROOF_HOURS = 100
#: Interval, in seconds, of log lines about hours that are not deleted because the archive lacks them.
_LOG_S = 3600.0


class LeaseExpiry:
    """Expires leases: checks each grant at the end of its earliest lease. One object per term.

    The time only says when to look: apply judges every lease against the time of its Raft entry, and acks and nacks are
    noticed when the grant's time comes. Nothing expires before `not_before_ms`: after a take-over, consumers' leases
    count by the clock of the previous leader, which may be behind by the skew bound."""

    def __init__(self, term: Term, not_before_ms: int) -> None:
        self._term, self._ledger, self._not_before_ms = term, term.ledger, not_before_ms
        self._leases: Deadlines[Key] = Deadlines()
        self._alarm = term.alarm(self._ring)
        #: True while a proposed EXPIRE is undecided: two of them in one log entry would exceed the limit of grants.
        self._proposed = False
        self._take_over(iter(list(self._ledger.grants)))

    def __len__(self) -> int:
        return len(self._leases)

    def add(self, until_ms: int, key: Key) -> None:
        self._leases.set(key, until_ms)
        if len(self._leases) > 2 * len(self._ledger.grants) + _STALE:
            for over in [known for known in self._leases if known not in self._ledger.grants]:
                self._leases.discard(over)
        self._arm()

    def _take_over(self, keys: Iterator[Key]) -> None:
        """Add the grants that earlier leaders made, some hundred at a time."""
        if self._term.over:
            return
        for _ in range(_GRANTS):
            key = next(keys, None)
            if key is None:
                return
            self._again(key)
        self._term.runtime.call_soon(self._take_over, keys)

    def _again(self, key: Key, not_before_ms: int = 0) -> None:
        grant = self._ledger.grants.get(key)
        if grant is not None:
            self.add(max(grant.next_until_ms(), not_before_ms), key)

    def _arm(self) -> None:
        if (until_ms := self._leases.next()) is not None and not self._proposed:
            self._alarm.at(self._term.mono_at(max(until_ms, self._not_before_ms)))

    def _ring(self) -> None:
        now = self._term.now()
        over: list[Key] = []
        for key in self._leases.due(now, _GRANTS) if now >= self._not_before_ms else ():
            grant = self._ledger.grants.get(key)
            if grant is not None and grant.next_until_ms() > now:
                self._leases.set(key, grant.next_until_ms())
            elif grant is not None:
                over.append(key)
        if over:
            self._proposed = True
            self._term.propose(encode_expire(over), lambda result, error: self._expired(over, result, error))
        self._arm()

    def _expired(self, keys: list[Key], result: Any, error: HadelayError | None) -> None:
        self._proposed = False
        if error is None and isinstance(result, ExpireResult):
            for key in result.remaining:
                self._again(key)
        else:
            for key in keys:
                self._again(key, self._term.now() + _RETRY_MS)
        self._arm()


class TtlExpiry:
    """Expires messages by their TTL. One object per term.

    Table `ttl` is in the order of time, and keeps rows of messages that were acked. So rows whose time has come are
    read first: TTL_EXPIRE is proposed only if one of their messages waits, or if many rows are useless. `filed` gets
    each time that apply reports (ledger.ports.LedgerListener.on_ttl)."""

    def __init__(self, term: Term) -> None:
        self._term, self._ledger = term, term.ledger
        self._alarm = term.alarm(self._look)
        #: First key of table `ttl` to read; no row before this key belongs to a waiting message.
        self._start = self._ledger.ttl_from
        self._silent = 0
        self._rest_until_ms = 0
        self._look_at(ttl.first_ms(self._ledger, self._start))

    def filed(self, at_ms: int) -> None:
        """Check table `ttl` at cluster time at_ms (Unix ms), or now if that time has passed. Apply reports this time
        when a lease ends of a message whose row in `ttl` was skipped during the lease."""
        self._start = min(self._start, ttl.KEY.pack(at_ms, 0))
        self._look_at(at_ms)

    def _look_at(self, at_ms: int) -> None:
        if at_ms < NEVER_MS:
            self._alarm.at(self._term.mono_at(max(at_ms, self._rest_until_ms)))

    def _look(self) -> None:
        now = self._term.now()
        keys = ttl.due(self._ledger, now, self._start, _ROWS)
        self._silent += len(keys)
        if keys:
            self._rest_until_ms = now + _TTL_PAUSE_MS
        if self._silent >= _SILENT_ROWS or ttl.ends_something(self._ledger, keys):
            self._term.propose_behind(encode_maintain(Job.TTL_EXPIRE), self._ended)
            return
        if keys:
            self._start = keys[-1] + b"\0"
        self._look_at(now if len(keys) == _ROWS else ttl.first_ms(self._ledger, self._start))

    def _ended(self, result: Any, error: HadelayError | None) -> None:
        self._start, self._silent = self._ledger.ttl_from, 0
        # As long as expired rows are left, propose the next slice without a pause: only the speed of the log limits it.
        if error is None and isinstance(result, JobResult) and not result.done:
            self._rest_until_ms = 0
        self._look_at(self._term.now())


class MaintenanceRunner:
    """Runs maintenance, slowly on purpose: moves the remaining messages of past hours, deletes hours past their
    retention, settles messages of deleted or purged topics, ends batches, and redrives dead letters at their rate. One
    object per term.

    Each job is a replicated command that works in slices. One slice at a time is under way, and the next leader goes on
    where the ledger says. A cluster in which nothing changes gets no commands. If retention.archive is set, the leader
    proposes to delete an hour only once it has found the hour in the archive (Gate); apply does not look there.
    """

    def __init__(self, term: Term, retention: RetentionConfig) -> None:
        self._term, self._ledger, self._retention = term, term.ledger, retention
        #: True while the runner pauses because it found nothing to do.
        self._idle = False
        self._pause_s = _PAUSE_S
        self._next = self._rounds()
        self._gate = Gate(retention.archive, term.runtime, self._archived) if retention.archive else None
        self._alarm, self._cancels = term.alarm(self._look), BatchCancels(term)
        self._rest(1.0)

    def stop(self) -> None:
        if self._gate is not None:
            self._gate.stop()

    def watch(self) -> None:
        """Wake an idle runner if the entries just applied have brought work. It may be called after every entry,
        because it costs little."""
        if self._idle and self._ledger.topics.with_work:
            self._rest(0.0)
        counts = self._ledger.batches
        if counts.searched < counts.cancels:
            self._cancels.watch()

    def _rest(self, seconds: float = _LOOK_S) -> None:
        self._idle = seconds == _LOOK_S
        self._alarm.cancel()
        self._alarm.at(self._term.runtime.monotonic() + seconds)

    def _look(self) -> None:
        self._pause_s, self._idle = _PAUSE_S, False
        command = next(self._next)
        if command is None:
            # If a redrive is unfinished, it waits until its rate allows more messages, so look again soon.
            redrives = any(topic.redrive is not None for topic in self._ledger.topics.unfinished())
            self._rest(_RATE_PAUSE_S if redrives else _LOOK_S)
        else:
            self._term.propose_behind(command, self._worked)

    def _worked(self, result: Any, error: HadelayError | None) -> None:
        # Pause longer after an error or a refusal: a command that is repeated at once would be refused again.
        self._rest(self._pause_s if isinstance(result, JobResult) else _LOOK_S / 2)

    def _rounds(self) -> Iterator[bytes | None]:
        """Yield the next maintenance command, or None when a round found no work. All kinds of work take turns: a
        redrive may take days, and the sweep for purged messages may never end, because each purge restarts it."""
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
            ended_ms = unique.first_end_ms(self._ledger)
            if ended_ms is not None and ended_ms <= self._term.now():
                idle = False
                yield encode_maintain(Job.TTL_EXPIRE)
            ended_ms = batches.first_end_ms(self._ledger)
            if ended_ms is not None and ended_ms <= self._term.now():
                idle = False
                yield encode_maintain(Job.BATCHES)
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
            needed = fills.holds(self._ledger, hour)
            if hour >= DEAD_HOURS:
                command = None if needed else encode_maintain(Job.DROP_DEAD, hour)
            elif hour > running - _HOURS_PAST:
                continue
            elif not self._ledger.open_entries(hour):
                if not needed and now >= self._kept_until_ms(hour) and self._is_archived(hour):
                    command = encode_maintain(Job.RETIRE, hour)
            elif now - (hour + 1) * HOUR_MS >= self._retention.carry_ms and self._can_roll_forward(hour):
                command = encode_maintain(Job.ROLL_FORWARD, hour)
            if command is not None:
                break
        if self._gate is not None:
            self._gate.ask()
        return command

    def _kept_until_ms(self, hour: int) -> int:
        """Time in Unix ms until which an hour's files are kept: end of the longest retention of the topics whose
        messages were settled in this hour."""
        last_ms, kept_ms = (hour + 1) * HOUR_MS, 0
        if (hour_state := self._ledger.hours.get(hour)) is not None:
            last_ms = max(last_ms, hour_state.settled_at_ms)
            configs = (self._ledger.topics[number].config for number in hour_state.topics)
            kept_ms = max((config.get("retention_ms", self._retention.settled_ms) for config in configs), default=0)
        return last_ms + kept_ms

    def _can_roll_forward(self, hour: int) -> bool:
        """Whether roll forward, which moves messages to a later hour, has yet to check some index entries of the hour.
        Entries that it has checked and left open are leased."""
        hour_state = self._ledger.hours.get(hour)
        return hour_state is None or hour_state.carried < self._ledger.store.count(hour)

    def _is_archived(self, hour: int) -> bool:
        if self._gate is None:
            return True
        sums = self._ledger.store.sums(hour)
        return sums is not None and self._gate.holds(hour, SourceFiles(*sums))

    @property
    def unarchived(self) -> str:
        """Reason in words why past hours are not deleted; "" if the archive has all of them."""
        return "" if self._gate is None else self._gate.stays

    def _archived(self) -> None:
        if self._idle and not self._term.over:
            self._rest(0.0)


class Gate:
    """Lets the leader delete an hour only once the archive has all of its files.

    A thread checks the archive, which may be far away. A proof counts for a minute only: the archive can be damaged
    later, and then the hour is the only copy. woken: called when hours may be deleted."""

    def __init__(self, where: str, runtime: Runtime, woken: Callable[[], None]) -> None:
        self._where, self._runtime, self._woken = where, runtime, woken
        self._proven: dict[int, SourceFiles] = {}
        self._proven_at = self._logged_at = -_LOG_S
        self._waiting: dict[int, SourceFiles] = {}
        self._asking = self._stopped = False
        #: The hours that the last check did not find in the archive, in words that do not name the archive; "": it
        #: found all.
        self.stays = ""
        #: Catalogue of the archive as the checking thread last read it.
        self._catalogue: Catalogue | None = None

    def stop(self) -> None:
        """End a running check of the archive after the hour that is being checked."""
        self._stopped = True

    def holds(self, hour: int, source: SourceFiles) -> bool:
        """Whether it is proven that the archive has the hour's files; if not, the next `ask` checks the hour."""
        if self._runtime.monotonic() < self._proven_at + _PROOF_S and self._proven.get(hour) == source:
            return True
        self._waiting[hour] = source
        return False

    def ask(self) -> None:
        """Check whether the archive has the hours for which `holds` returned False, unless a check is running."""
        if self._waiting and not self._asking:
            self._asking = True
            wanted = sorted(self._waiting.items())
            self._runtime.in_thread("archive", lambda: self._check(wanted), self._checked)
        self._waiting = {}

    def _check(self, wanted: list[tuple[int, SourceFiles]]) -> tuple[dict[int, SourceFiles], str, str]:
        going = takewhile(lambda _: not self._stopped, wanted)
        archive = open_archive(self._where)
        self._catalogue = load_catalogue(archive, self._catalogue)
        found = unproven(archive, self._catalogue, going, _PROOF_HOURS)
        stays = {hour: why for hour, why in found.items() if why}
        first = next(iter(stays.items()), None)
        said = f"{len(stays)} hours, the first of them {hour_name(first[0])}" if first else ""
        why = first[1] if first else ""
        return {hour: source for hour, source in wanted if found.get(hour) == ""}, said, why

    def _checked(self, result: tuple[dict[int, SourceFiles], str, str] | None, error: BaseException | None) -> None:
        self._asking = False
        proven, self.stays, why = result or ({}, "the archive cannot be read", str(error))
        said = f"{self.stays}: {why}" if self.stays else ""
        now = self._runtime.monotonic()
        if said and now >= self._logged_at + _LOG_S:
            self._logged_at = now
            log.warning("not_archived", extra={"archive": self._where, "stays": said})
        if proven:
            self._proven, self._proven_at = proven, now
            self._woken()
