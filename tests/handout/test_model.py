"""Hypothesis drives the real dispatcher, over the real state machine, through publishes, polls, acks, cancels, lost
commits and take-overs, and compares with what a list of messages says. Commit mode: nothing early, nothing twice
while it is held, and in the end everything."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from chaos.sim import ledgercheck
from hadelay.codec.results import CancelOutcome, LeaseOutcome, TargetOutcome
from hadelay.errors import Overloaded
from tests.handout.desk import START_MS, Desk, Received
from tests.scale import size

TOPICS = ["a", "b", "c"]
LEASE_MS = 2_000
TAGS = ["x", "y", "z"]
SOME_TAGS = st.lists(st.sampled_from(TAGS), max_size=3, unique=True)
#: Limits that let everything through in the end, soon enough for the hour that a run lasts.
LIMITS = {"rate": [20.0, None], "catch_up_rate": [10.0, None], "concurrency": [1, 3, None], "paused": [True, False]}


class Dispatching(RuleBasedStateMachine):
    sync = "commit"

    def __init__(self) -> None:
        super().__init__()
        # A small window, so that messages are left out and found again all the time; a start just before an hour.
        self.desk = Desk(window=4, commit_ms=3, start_ms=3_590_000, checking=False, sync=self.sync, sweep_ms=500)
        self.desk.lead()
        self.counter = 0
        self.due: dict[str, float] = {}
        self.attempts: Counter[str] = Counter()
        self.leased: dict[str, float] = {}  # until
        #: When its end was answered: what was on its way to a consumer by then may still arrive.
        self.over: dict[str, float] = {}
        self.seen = 0
        self.leaders = 1
        self.tags: dict[str, list[str]] = {}

    # what happens

    @rule(
        topic=st.sampled_from(TOPICS),
        delays=st.lists(st.sampled_from([0, 1, 300, 999, 4_000, 9_999, 12_000, 3_600_000]), min_size=1, max_size=12),
        tags=SOME_TAGS,
    )
    def publish(self, topic: str, delays: list[int], tags: list[str]) -> None:
        for delay in delays:
            self.counter += 1
            name = f"m{self.counter}"
            self.tags[name] = tags
            self.desk.publish(name, topic=topic, delay=delay, tags=tags)
            self.due[name] = self.desk.ledger.now_ms - START_MS + delay

    @rule(
        topics=st.lists(st.sampled_from(TOPICS), min_size=1, max_size=3, unique=True),
        count=st.integers(1, 7),
        wait=st.sampled_from([0, 700, 20_000]),
        tags=SOME_TAGS,
        any_tags=SOME_TAGS,
    )
    def poll(self, topics: list[str], count: int, wait: int, tags: list[str], any_tags: list[str]) -> None:
        self.desk.poll(*topics, max=count, wait=wait, lease=LEASE_MS, tags=tags, any_tags=any_tags)

    @rule(topic=st.sampled_from(TOPICS), data=st.data(), name=st.sampled_from(sorted(LIMITS)))
    def limit(self, topic: str, data: st.DataObject, name: str) -> None:
        self.desk.put(topic, **{name: data.draw(st.sampled_from(LIMITS[name]))})

    @rule(count=st.integers(1, 3), request=st.sampled_from([b"1", b"2"]))
    def poll_idempotently(self, count: int, request: bytes) -> None:
        self.desk.poll(*TOPICS, max=count, wait=700, lease=LEASE_MS, consumer="x", request=request)

    @rule(ms=st.sampled_from([1, 2, 5, 40, 333, 1_000, 2_100, 9_000]))
    def run_on(self, ms: int) -> None:
        self.desk.run(ms)
        self.look()

    @precondition(lambda self: self.leased)
    @rule(data=st.data(), what=st.sampled_from(["ack", "nack", "nack later"]))
    def settle(self, data: st.DataObject, what: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.leased)))
        received = next(r for r in reversed(self.desk.received) if name in r.names)
        if what == "ack":
            (outcome,) = self.desk.ack(received, name)
            if outcome != LeaseOutcome.LEASE_LOST:
                self.over[name] = self.desk.now
        else:
            (outcome,) = self.desk.nack(received, name, delay=0 if what == "nack" else 1_500)
        if outcome == LeaseOutcome.DONE:
            self.leased.pop(name)
        else:
            # Interval mode: a hand-out that was lost with its leader. Else the lease has just run out.
            assert self.sync == "interval" or self.desk.now >= self.leased[name] - 1

    @precondition(lambda self: self.due.keys() - self.over)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.due.keys() - self.over)))
        (outcome,) = self.desk.cancel(name)
        if outcome == CancelOutcome.CANCELLED:
            assert self.sync == "interval" or name not in self.leased or self.desk.now >= self.leased[name] - 1
            self.over[name] = self.desk.now
            self.leased.pop(name, None)

    @rule()
    def hang_up(self) -> None:
        core = self.desk.core
        for poll in list(core.waiting.queues)[:2]:
            self.desk.delivery.cancel_poll(poll)

    @rule(lost=st.booleans(), down_ms=st.sampled_from([0, 30, 1_500]))
    def take_over(self, lost: bool, down_ms: int) -> None:
        """`lost`: what was proposed and not committed never is."""
        self.look()
        if lost:
            self.desk.stuck = True
            self.desk.run(4)
            self.look()
        self.desk.depose()
        self.desk.forget_waiting()
        self.desk.run(4)
        self.look()
        self.desk.run(down_ms)
        self.desk.new_leader()
        self.leaders += 1

    @rule()
    def cannot_propose_for_a_moment(self) -> None:
        self.desk.refuse_with = Overloaded("full")
        self.desk.run(30)
        self.desk.refuse_with = None
        self.look()

    # what must hold

    def look(self) -> None:
        """Check everything that was handed out since the last look."""
        for received in self.desk.received[self.seen :]:
            if received.delivery is not None:
                self.check(received)
        self.seen = len(self.desk.received)

    def check(self, received: Received) -> None:
        d = received.delivery
        assert d is not None
        known = {name for name in received.names if self.is_known(received, name)}
        wanted = received.poll.filter
        assert wanted is None or all(wanted.matches(self.tags[name]) for name in received.names)
        for n, name in enumerate(received.names):
            assert d.now_ms - START_MS >= self.due[name], f"{name} came early"
            assert d.rows["deliver_at_ms"][n] <= d.now_ms
            assert (d.until_ms[n] - d.now_ms) * 2 >= LEASE_MS, "half of the lease is left"
            if name not in known:
                self.check_new(received, n, name)
            self.leased[name] = float(d.until_ms[n]) - START_MS
        for name in received.names:
            assert self.sync == "interval" or name not in self.over or received.at <= self.over[name]

    def is_known(self, received: Received, name: str) -> bool:
        """The same lease again: to a request that was repeated."""
        d = received.delivery
        assert d is not None
        return any(
            name in other.names
            and other.delivery is not None
            and (other.delivery.term, other.delivery.seq) == (d.term, d.seq)
            for other in self.desk.received[: self.desk.received.index(received)]
        )

    def check_new(self, received: Received, n: int, name: str) -> None:
        d = received.delivery
        assert d is not None
        if self.sync == "commit":
            assert self.leased.get(name, 0.0) <= received.at + 4, f"{name} is held by somebody else"
        elif self.leased.get(name, 0.0) > received.at + 4:
            assert d.redelivered[n], f"{name} comes again, unmarked"
        if self.sync == "commit":
            assert d.attempts[n] > self.attempts[name], f"{name}: the same attempt twice"
        self.attempts[name] = max(self.attempts[name], int(d.attempts[n]))

    @invariant()
    def nothing_was_forgotten(self) -> None:
        assert self.desk.delivery.sweeper_found == 0

    @invariant()
    def memory_is_what_is_counted(self) -> None:
        core = self.desk.core
        topics = core.windows.by_name.values()
        resting = core.matcher.rests.size
        assert resting == sum(len(topic.group_rate.resting) for topic in topics if topic.group_rate is not None)
        assert core.windows.size == resting + sum(len(w.entries) for topic in topics for w in topic.windows())
        in_flight = sum(topic.in_flight for topic in topics)
        assert len(core.windows.in_flight) == resting + in_flight
        assert in_flight == sum(len(offer.entries) for offer in self.desk.offers())

    @invariant()
    def counts_are_right(self) -> None:
        assert all(count > 0 for count, _ in self.desk.delivery.ready_counts().values())

    def teardown(self) -> None:
        self.look()
        # Every message that is not over comes: first those with a tag, to who asks for it, while the others wait; then
        # all, at the latest after the hour that the longest delay is.
        due = {name for name in self.due.keys() - self.over if self.due[name] <= self.desk.now}
        for topic in TOPICS:
            self.desk.put(topic, paused=False)
            self.desk.consume(topic, max=5, tags=["x"])
        self.desk.run(60_000)
        assert {name for name in due if "x" in self.tags[name]} <= set(self.desk.delivered())
        for topic in TOPICS:
            self.desk.consume(topic, max=5)
        # Most of that hour nothing happens: twice a second the sweeper need not look for what was forgotten.
        config = self.desk.delivery.config
        self.desk.delivery.config = replace(config, dispatch=replace(config.dispatch, sweep_ms=10_000))
        self.desk.run(3_600_000)
        came = set(self.desk.delivered())
        assert self.due.keys() - self.over <= came
        assert not self.desk.ledger.grants
        assert sum(topic.pending for topic in self.desk.ledger.topics.all) == 0
        assert self.desk.delivery.ready_counts() == {}
        assert self.desk.delivery.sweeper_found == 0


class DispatchingAtOnce(Dispatching):
    sync = "interval"


class DispatchingGroups(Dispatching):
    """Message groups: of each group at most n at once, in one topic an interval apart, and none is forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = {"a": 1, "b": 2, "c": None}
        self.groups: dict[str, tuple[str, str]] = {}
        for topic, limit in self.limits.items():
            self.desk.put(topic, group_concurrency=limit, max_attempts=60_000)
        self.desk.put("b", group_rate=2)
        #: Leases of topic b that were handed out; and time of the last hand-out of each of its groups.
        self.leases: set[tuple[int, int, str]] = set()
        self.last: dict[str, float] = {}

    @rule(
        topic=st.sampled_from(TOPICS),
        delays=st.lists(st.sampled_from([0, 1, 300, 999, 4_000, 9_999, 12_000, 3_600_000]), min_size=1, max_size=12),
        group=st.sampled_from([None, "g", "h"]),
    )
    def publish(self, topic: str, delays: list[int], group: str | None) -> None:
        for delay in delays:
            self.counter += 1
            name = f"m{self.counter}"
            self.desk.publish(name, topic=topic, delay=delay, group=group)
            self.due[name] = self.desk.ledger.now_ms - START_MS + delay
            self.tags[name] = []
            if group is not None:
                self.groups[name] = topic, group

    @rule(
        topics=st.lists(st.sampled_from(TOPICS), min_size=1, max_size=3, unique=True),
        count=st.integers(1, 7),
        wait=st.sampled_from([0, 700, 20_000]),
    )
    def poll(self, topics: list[str], count: int, wait: int) -> None:
        self.desk.poll(*topics, max=count, wait=wait, lease=LEASE_MS)

    @precondition(lambda self: self.due.keys() - self.over)
    @rule(data=st.data(), delay=st.sampled_from([0, 1, 400, 5_000]))
    def reschedule(self, data: st.DataObject, delay: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.due.keys() - self.over)))
        due = self.due[name]
        if self.desk.reschedule(name, delay) == TargetOutcome.DONE:
            now = self.desk.ledger.now_ms - START_MS
            self.due[name] = due if delay == 0 and due <= now else now + delay

    def check(self, received: Received) -> None:
        super().check(received)
        ledgercheck.check(self.desk.ledger)
        leased = Counter(
            self.groups[name] for name, until in self.leased.items() if until > received.at + 4 and name in self.groups
        )
        for (topic, group), count in leased.items():
            assert count <= (self.limits[topic] or count), f"{count} messages of {topic}/{group} at once"
        for name in received.names:
            topic, group = self.groups.get(name, ("", ""))
            assert received.delivery is not None
            lease = received.delivery.term, received.delivery.seq, name
            if topic == "b" and lease not in self.leases:
                self.leases.add(lease)
                gap = received.at - self.last.get(group, -math.inf)
                assert gap >= 500, f"hand-outs of group {group} are {gap} ms apart"
                self.last[group] = received.at


_HOW = settings(
    max_examples=size(6, 15), stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestCommitMode = Dispatching.TestCase
TestCommitMode.settings = _HOW
TestIntervalMode = DispatchingAtOnce.TestCase
TestIntervalMode.settings = _HOW
TestGroups = DispatchingGroups.TestCase
TestGroups.settings = _HOW
