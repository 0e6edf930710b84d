"""Topics and schedules that need attention. The leader examines all of them again and again, some at a time, and keeps
the problems found last; server/service/attention.py adds the members and makes the report."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple

from msgspec import Struct

from hadelay.api.attention import Kind
from hadelay.api.text import format_instant
from hadelay.codec.formats import REASON
from hadelay.codec.meta import unpack
from hadelay.codec.records import decode_record
from hadelay.codec.schedules import RESTORED, Made
from hadelay.errors import DamagedFile, HadelayError, NoLeader
from hadelay.ledger.groups.groupwalk import Wait
from hadelay.ledger.groups.messagegroups import Head
from hadelay.ledger.hours.lookup import find_entry, state_of
from hadelay.ledger.hours.transitions import failures_of
from hadelay.ledger.leases.dead import DEAD
from hadelay.ledger.leases.dead import KEY as DEAD_KEY
from hadelay.ledger.schedules import schedules
from hadelay.ledger.state import Ledger
from hadelay.ledger.topics.topics import TopicState
from hadelay.model import HOUR_MS, NONE32, PENDING, Event, State, encode_id
from hadelay.platform.runtime import Runtime
from hadelay.raft.ports import Done
from hadelay.server.checkpoints import Replica
from hadelay.server.clustertime import ClusterClock
from hadelay.server.delivery.loop import DeliveryLoop
from hadelay.server.webhooks.queues import Health
from hadelay.words import error_group, span

log = logging.getLogger(__name__)

#: Pause between two rounds over all topics or schedules, in seconds.
EVERY_S = 5.0
#: Limit of the time of one piece of work, in seconds, and length of the pause after it as a multiple of that time:
#: rounds take at most 5 % of the event loop's time.
_SLICE_S, _PAUSE = 0.002, 20
#: Number of topics, and number of schedules, that are examined before the time is checked.
_TOPICS, _SCHEDULES = 50, 5
#: Limit of report rows of one kind that are kept. Rows beyond it are only counted.
KEPT = 1_000
#: Thresholds for a report row: webhook calls that failed in a row; time in ms for which messages are ready or blocked,
#: or for which no consumer asks; p99 of the lateness in ms; time in ms for which a backlog grows.
FAILS, WAITS_MS, LATE_MS, GROWS_MS = 5, 60_000, 1_000, 300_000
#: Interval in ms at which ready messages are counted to see whether a backlog grows.
_SAMPLE_MS = 60_000
#: Limits per topic: number of dead letters of the last hour that are counted ("1,000 or more" at the limit), and number
#: of the newest of these, whose errors are read.
_DEATHS, _ERRORS = 1_000, 50
_NOT_LEADING = NoLeader("this node does not lead (any more)", retry_after_ms=50)


class Finding(Struct, array_like=True):
    """A report row (api.attention.Row) in the form in which the leader sends it to the node that was asked for the
    report."""

    kind: Kind
    severity: str
    what: str
    name: str
    #: Topic that the row is about, "" for rows about the cluster. It decides who may see the row.
    topic: str
    sentence: str
    number: int
    #: Begin of the problem, Unix ms; 0: unknown.
    since_ms: int = 0
    message: str = ""


class Findings:
    def __init__(self) -> None:
        self.rows: dict[Kind, list[Finding]] = defaultdict(list)
        self.counts: Counter[Kind] = Counter()

    def add(self, row: Finding) -> None:
        self.counts[row.kind] += 1
        if len(self.rows[row.kind]) < KEPT:
            self.rows[row.kind].append(row)


class _Growth(NamedTuple):
    """Growth of a backlog that was larger at each sample than at the sample before: its first and its last sample."""

    since_ms: int
    from_size: int
    sampled_ms: int
    size: int


Look = Generator[None, None, None]


class Attention:
    """Examines topics and schedules for problems while this node leads."""

    def __init__(self, runtime: Runtime, clock: ClusterClock, replica: Replica, delivery: DeliveryLoop) -> None:
        self._runtime, self._clock, self._replica, self._delivery = runtime, clock, replica, delivery
        #: Health of the receiver of a topic's webhook, by the topic's number.
        self.health: Callable[[int], Health | None] = lambda number: None
        #: Number of the present series of rounds, which rises with each term; a round with an earlier number ends
        #: itself.
        self._epoch = 0
        self._waiting: list[Done] = []
        self._forget()

    def _forget(self) -> None:
        self._epoch += 1
        #: Results of the last complete rounds over all topics and over all schedules; None before the first round.
        self.topics: Findings | None = None
        self.schedules = Findings()
        self._began_ms = 0
        #: Topic number → growth of its backlog; only topics with ready messages.
        self._growth: dict[int, _Growth] = {}
        #: Topic number → (counts of its dead letters, most frequent error): errors are read again if the counts change.
        self._errors: dict[int, tuple[tuple[int, int], str]] = {}

    @property
    def _ledger(self) -> Ledger:
        return self._replica.ledger

    def _now(self) -> int:
        return self._clock.read(self._runtime.monotonic())

    def on_leader(self, term: int) -> None:
        self._forget()
        self._began_ms = self._now()
        for look in (self._look_at_topics, self._look_at_schedules):
            self._runtime.call_soon(self._begin, self._epoch, look)

    def on_follower(self) -> None:
        self._forget()
        self._answer()

    def ask(self, done: Done) -> None:
        """Call done((topics, schedules), None) once this leader has examined all topics: before that, an empty report
        would claim that all is well."""
        self._waiting.append(done)
        if self.topics is not None or not self._began_ms:
            self._answer()

    def _answer(self, problem: HadelayError = _NOT_LEADING) -> None:
        """Answer all waiting callers: with the rows found, or with the error `problem` if no round over all topics is
        complete yet."""
        waiting, self._waiting = self._waiting, []
        found = None if self.topics is None else (self.topics, self.schedules)
        for done in waiting:
            done(found, None if found else problem)

    def _begin(self, epoch: int, look: Callable[[], Look]) -> None:
        self._go_on(epoch, look, look())

    def _go_on(self, epoch: int, look: Callable[[], Look], slices: Look) -> None:
        if epoch != self._epoch:
            return
        began = self._runtime.monotonic()
        try:
            for _ in slices:
                if (spent_s := self._runtime.monotonic() - began) >= _SLICE_S:
                    self._runtime.call_later(_PAUSE * spent_s, self._go_on, epoch, look, slices)
                    return
        # other code repairs damaged files: examine the topic again in the next round
        except (DamagedFile, OSError) as error:
            log.warning("attention_failed", extra={"error": str(error)})
            self._answer(NoLeader(f"the leader cannot look at all topics: {error}", retry_after_ms=1_000))
        self._runtime.call_later(EVERY_S, self._begin, epoch, look)

    def _look_at_topics(self) -> Look:
        found, every, asked = Findings(), self._ledger.topics.all, self._delivery.askers.latest()
        for start in range(0, len(every), _TOPICS):
            few = [topic for topic in every[start : start + _TOPICS] if topic.exists]
            now_ms, reports = self._now(), self._delivery.topic_reports([topic.number for topic in few])
            for topic in few:
                try:
                    rows = [*self._of_topic(topic, reports.get(topic.number, (0,) * 6), asked, now_ms)]
                    if topic.dead:
                        rows += yield from self._deaths(topic, now_ms)
                except (DamagedFile, OSError) as error:
                    rows = [_unread("topic", topic.name, topic.name, error)]
                for row in rows:
                    found.add(row)
            yield
        self.topics = found
        self._answer()

    def _of_topic(
        self, topic: TopicState, report: tuple[int, ...], asked: dict[str, int], now_ms: int
    ) -> Iterator[Finding]:
        name, health = topic.name, self.health(topic.number) if topic.settings.webhook is not None else None
        ready, since_ms, p99_ms = min(report[0], topic.waiting), report[1], report[4]
        if topic.settings.paused:
            self._growth.pop(topic.number, None)
            if topic.pending:
                why = f" ({topic.settings.paused_reason})" if topic.settings.paused_reason else ""
                words = f"{name} is paused{why}: {_messages(topic.pending, 'wait')}."
                yield Finding("paused", "warn", "topic", name, name, words, topic.pending)
            return
        if health is not None and health.failed >= FAILS:
            last = f"HTTP {health.status}" if health.status else health.error or "no answer"
            words = f"Receiver of {name} fails: {health.failed:,} calls in a row, last error: {last}."
            yield Finding("receiver", "bad", "topic", name, name, words, health.failed, health.failing_since_ms)
        wait = self._delivery.groups.longest(topic.number) if topic.blocked else None
        if wait is not None and wait.head is not None and now_ms - wait.since_ms >= WAITS_MS:
            yield self._group(topic, wait, wait.head, now_ms)
        growth = self._grown(topic.number, ready, now_ms)
        waits = f"{_messages(ready)} {'is' if ready == 1 else 'are'} ready, the oldest for {span(now_ms - since_ms)}"
        if ready and now_ms - since_ms >= WAITS_MS and self._is_idle(topic, asked, now_ms):
            at_ms = asked.get(name)
            last = f"the last receive was {span(now_ms - at_ms)} ago" if at_ms else "no receive since this leader leads"
            words = f"Nobody consumes {name}: {waits}; {last}."
            yield Finding("idle", "bad", "topic", name, name, words, ready, since_ms)
        elif growth is not None and growth.size > growth.from_size and now_ms - growth.since_ms >= GROWS_MS:
            minutes = (now_ms - growth.since_ms) / 60_000
            words = f"Backlog of {name} grows by {(ready - growth.from_size) / minutes:,.0f} a minute: {waits}; "
            words += f"{self._limit_of(topic)}."
            yield Finding("backlog", "warn", "topic", name, name, words, ready, growth.since_ms)
        elif ready and now_ms - since_ms >= WAITS_MS:
            words = f"Messages of {name} wait: {waits}; {self._limit_of(topic)}."
            yield Finding("late", "warn", "topic", name, name, words, ready, since_ms)
        elif p99_ms >= LATE_MS:
            words = f"Hand-outs of {name} are late: p99 {span(p99_ms)} over the last five minutes."
            yield Finding("late", "warn", "topic", name, name, words, ready)

    def _is_idle(self, topic: TopicState, asked: dict[str, int], now_ms: int) -> bool:
        """Whether nobody consumes the topic: no message is leased, and no consumer asked for messages in the last
        minute. Under a new leader, consumers have a minute to ask."""
        last_ms = max(asked.get(topic.name, 0), self._began_ms, self._delivery.askers.forgotten_ms)
        return topic.settings.webhook is None and not topic.leased and now_ms - last_ms >= WAITS_MS

    def _limit_of(self, topic: TopicState) -> str:
        """Reason in words why the topic's messages are not handed out faster."""
        settings = topic.settings
        if settings.concurrency is not None and topic.leased >= settings.concurrency:
            return f"its concurrency of {settings.concurrency:,} is used up"
        if settings.rate is not None:
            return f"its rate is {settings.rate:g} a second"
        return "its receiver is too slow" if settings.webhook is not None else "its consumers are too slow"

    def _grown(self, number: int, ready: int, now_ms: int) -> _Growth | None:
        """Sample the number of ready messages, at most once a minute. Returns the growth of the backlog so far; None
        without a backlog."""
        last = self._growth.get(number)
        if not ready:
            self._growth.pop(number, None)
        elif last is None or (now_ms - last.sampled_ms >= _SAMPLE_MS and ready <= last.size):
            self._growth[number] = _Growth(now_ms, ready, now_ms, ready)
        elif now_ms - last.sampled_ms >= _SAMPLE_MS:
            self._growth[number] = last._replace(sampled_ms=now_ms, size=ready)
        return self._growth.get(number)

    def _group(self, topic: TopicState, wait: Wait, first: Head, now_ms: int) -> Finding:
        """Report row of a message group that is stuck behind its first message."""
        ledger = self._ledger
        row = ledger.store.entries(first.hour, slice(first.entry, first.entry + 1))[0]
        record = ledger.store.record(first.hour, int(row["offset"]), int(row["size"]), verify=True)
        group = unpack(decode_record(record).meta).group or ""
        failures = failures_of(ledger, first.id)
        why = f", whose attempt {failures[-1][2]} failed ({self._error(first.id)})" if failures else ""
        words = f"Group {group} of {topic.name} is stuck: {_messages(wait.blocked, 'wait')} behind message "
        words += f"{encode_id(first.id)}{why}, the first for {span(now_ms - wait.since_ms)}."
        return Finding(
            "group", "bad", "group", group, topic.name, words, wait.blocked, wait.since_ms, encode_id(first.id)
        )

    def _error(self, message_id: int) -> str:
        """Error of a message's last failed attempt, with # in place of numbers."""
        failures = failures_of(self._ledger, message_id)
        if not failures:
            return error_group(None, None)
        _, event, _, reason = failures[-1]
        return error_group(event.name.lower(), None if reason == NONE32 else self._ledger.names.name(REASON, reason))

    def _deaths(self, topic: TopicState, now_ms: int) -> Generator[None, None, list[Finding]]:
        """Report row of a topic in which messages died in the last hour and are still dead letters; no row without such
        messages."""
        number, name = topic.number, topic.name
        start = DEAD_KEY.pack(number, max(now_ms - HOUR_MS, topic.dead_mark_ms + 1), 0)
        keys = yield from self._ledger.tables.range_slices(DEAD, start, DEAD_KEY.pack(number + 1, 0, 0), _DEATHS)
        if not keys:
            self._errors.pop(number, None)
            return []
        counts, letters = (topic.dead, topic.settled[Event.DEAD]), [DEAD_KEY.unpack(key) for key, _ in keys]
        if (known := self._errors.get(number)) is None or known[0] != counts:
            errors = Counter(self._error(first_id) for *_, first_id in letters[-_ERRORS:])
            known = self._errors[number] = counts, errors.most_common(1)[0][0]
        count = f"{len(letters):,} or more messages" if len(letters) == _DEATHS else _messages(len(letters))
        mostly = "" if len(letters) == 1 else "mostly "
        words = f"{count} of {name} died in the last hour: {mostly}{known[1]}."
        return [Finding("deaths", "bad", "topic", name, name, words, len(letters), letters[0][1])]

    def _look_at_schedules(self) -> Look:
        found, start = Findings(), b""
        while names := [raw for raw, _ in self._ledger.tables.range(schedules.STATE, start, None, _SCHEDULES)]:
            for raw in names:
                if (schedule := schedules.find(self._ledger, raw.decode())) is None:
                    continue
                try:
                    self._judge(found, raw.decode(), schedule, self._now())
                except (DamagedFile, OSError) as error:
                    found.add(_unread("schedule", raw.decode(), schedule.stored.spec.topic, error))
            start = names[-1] + b"\0"
            yield
        self.schedules = found

    def _judge(self, found: Findings, name: str, schedule: schedules.Found, now_ms: int) -> None:
        spec, state = schedule.stored.spec, schedule.state

        def add(severity: str, words: str, number: int, since_ms: int = 0) -> None:
            found.add(Finding("schedule", severity, "schedule", name, spec.topic, words, number, since_ms))

        if state.flags & RESTORED:
            add("warn", f"Schedule {name} is paused since the cluster was restored from a backup.", 1, state.put_ms)
        elif not state.paused and name in self._delivery.unknown_schedules:
            add("bad", f"Schedule {name} makes nothing: this node does not know its pattern or time zone.", 1)
        elif not state.paused:
            dead = self._dead(state.ring, now_ms)
            newest = max((made.occurrence for made in state.ring if not made.manual), default=0)
            if dead:
                last = "The last message" if len(dead) == 1 else f"The last {len(dead)} messages"
                words = f"{last} of schedule {name} died, the last one of {format_instant(dead[0].occurrence)}."
                add("bad", words, len(dead), dead[-1].occurrence)
            elif state.missed + state.refused and state.put_ms < state.last <= now_ms and state.last > newest:
                words = f"Schedule {name} made no message at {format_instant(state.last)}: so far {state.missed:,} "
                words += f"occurrences were missed, and {state.refused:,} were refused."
                add("bad", words, state.missed + state.refused, state.last)

    def _dead(self, ring: tuple[Made, ...], now_ms: int) -> list[Made]:
        """The schedule's dead letters, newest first, that are newer than its last message that ended otherwise."""
        dead = list[Made]()
        for made in reversed(ring):
            entry = find_entry(self._ledger, made.id)
            state = None if entry is None else state_of(self._ledger, entry, now_ms)
            if state is State.DEAD:
                dead.append(made)
            elif state not in PENDING:
                break
        return dead


def _unread(what: str, name: str, topic: str, error: Exception) -> Finding:
    """Report row of a topic or schedule whose messages this node cannot read: without the row, all would seem well."""
    return Finding("member", "bad", what, name, topic, f"The leader cannot read messages of {name}: {error}.", 1)


def _messages(count: int, verb: str = "") -> str:
    """A number of messages in words, with a verb in singular or plural."""
    return f"{count:,} message{'' if count == 1 else 's'}" + (f" {verb}{'s' if count == 1 else ''}" if verb else "")
