"""Everything an owner may do to messages, against a model too simple to be wrong.

A second replica applies every entry too, and is never restarted: both must stay equal, file by file. What hours do to
messages (carry, retire) is test_model.py's; here time goes by in steps that let leases, TTLs and backoffs end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hadelay.codec import commands
from hadelay.codec.commandtypes import Grant, Job
from hadelay.codec.leasetokens import LEASE
from hadelay.codec.results import CancelOutcome, LeaseOutcome, RedriveOutcome, RowCode, TargetOutcome
from hadelay.ledger import checkpoint
from hadelay.ledger.apply import apply_entry
from hadelay.ledger.leases import dead
from hadelay.ledger.topics import topicchanges
from hadelay.ledger.views.describe import describe
from hadelay.model import HOUR_MS, Draft
from hadelay.settings.cluster import Settings
from tests.ledger.test_listing import drain
from tests.ledger.world import START_MS, World
from tests.scale import size

TOPICS = ("a", "b")
KEYS = (b"k", b"l")
NEVER = 1 << 60


@dataclass
class Message:
    id: int
    topic: str
    key: bytes | None
    due: int
    ttl: int
    expiry: int
    began: int
    state: str = "waiting"  # leased, acked, cancelled, expired, dead, gone
    attempts: int = 0  # hand-outs that came back
    until: int = 0
    lease: tuple[int, int, int] | None = None
    place: tuple[int, int] = (0, 0)
    #: Every lease it ever had, and whether the ack of the last one would still count.
    leases: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    ran_out: bool = False
    #: All that waited was purged while it was leased.
    doomed: bool = False

    def phase(self, now: int) -> str:
        """As a client is told."""
        if self.state != "waiting":
            return self.state
        if self.due > now:
            return "scheduled"
        return "expired" if self.expiry <= now else "ready"


@dataclass
class Topic:
    config: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        return self.config.get(name)


CONFIGS: list[dict[str, Any]] = [
    {"max_attempts": 2}, {"max_attempts": None}, {"backoff": [1_000, 5_000]}, {"backoff": None}, {"ttl_ms": 2_000},
    {"ttl_ms": None}, {"paused": True}, {"paused": None}, {"max_messages": 3}, {"max_messages": None},
    {"concurrency": 1}, {"concurrency": None},
]  # fmt: skip

picks = st.lists(st.integers(0, 9), min_size=1, max_size=3)
names = st.sampled_from(TOPICS)


class Owner(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world, self.replica = World(Settings(auto_create_topics=True)), World(Settings(auto_create_topics=True))
        self.now = 0
        self.messages: list[Message] = []
        self.topics: dict[str, Topic] = {}
        self.keys: dict[tuple[str, bytes], Message] = {}

    def one(self, encoded: bytes) -> Any:
        result = self.world.one(encoded)
        index = len(self.world.entries)
        apply_entry(self.replica.ledger, index, self.world.term, self.world.entries[-1])
        return result

    def some(self, numbers: list[int]) -> list[Message]:
        known = self.messages
        return list({m.id: m for m in (known[-1 - n % len(known)] for n in numbers)}.values()) if known else []

    def pending(self, m: Message | None) -> bool:
        return m is not None and m.phase(self.now) in ("scheduled", "ready", "leased")

    # ---- time

    @rule(step=st.sampled_from([1, 400, 1_000, 1_000, 5_000, 30_000]))
    def clock(self, step: int) -> None:
        self.now += step
        self.world.now = self.now
        self.one(commands.encode_noop())

    @rule()
    def next_hour(self) -> None:
        self.clock(HOUR_MS)

    @rule()
    def crash(self) -> None:
        self.world.restart()
        self.world.term += 1

    # ---- topics

    @rule(name=names, config=st.sampled_from(CONFIGS))
    def configure(self, name: str, config: dict[str, Any]) -> None:
        self.one(commands.encode_topic_put(name, config))
        topic = self.topics.setdefault(name, Topic())
        topic.config = {k: v for k, v in {**topic.config, **config}.items() if v is not None}

    # ---- publishing

    @rule(
        name=names, delay=st.sampled_from([0, 0, 500, 3_000, HOUR_MS]), ttl=st.sampled_from([0, 0, 1_500]),
        key=st.sampled_from([None, *KEYS]), mode=st.sampled_from([0, 1, 2]), max_wait=st.sampled_from([0, 0, 600]),
    )  # fmt: skip
    def publish(self, name: str, delay: int, ttl: int, key: bytes | None, mode: int, max_wait: int) -> None:
        if key is None or mode != 1:
            max_wait = 0
        draft = Draft(name, delay, True, 0, ttl, b"", b"x", None, key, mode if key else 0, max_wait)
        result = self.one(commands.encode_publish("n1", [draft]))
        code, new_id = RowCode(result.codes[0]), int(result.ids[0])
        topic = self.topics.setdefault(name, Topic())
        before = self.keys.get((name, key)) if key else None
        began, due, replaced = self.now, self.now + delay, None
        if before is not None and self.pending(before):
            if mode == 0:
                assert (code, new_id, bool(result.duplicate[0])) == (RowCode.OK, before.id, True)
                return
            if mode == 2 or before.state == "leased":
                assert code == (RowCode.KEY_PENDING if mode == 2 else RowCode.KEY_LEASED)
                assert int(result.others[0]) == before.id
                return
            began, replaced = before.began, before
        if max_wait:
            due = min(due, max(began + max_wait, self.now))
        mine = [m for m in self.messages if m.topic == name and m.state in ("waiting", "leased")]
        if topic.max_messages is not None and len(mine) >= topic.max_messages and replaced is None:
            assert code == RowCode.TOO_MANY_MESSAGES
            return
        assert code == RowCode.OK
        assert not result.duplicate[0]
        assert result.deliver_at_ms[0] == START_MS + due
        assert new_id not in {m.id for m in self.messages}
        if replaced is not None:
            assert int(result.others[0]) == replaced.id
            replaced.state = "cancelled"
        ttl = ttl or topic.ttl_ms or 0
        m = Message(new_id, name, key, due, ttl, due + ttl if ttl else NEVER, began)
        self.messages.append(m)
        if key:
            self.keys[name, key] = m

    # ---- by id or by key

    def named(self, numbers: list[int], by_key: bool) -> tuple[list[Message | None], dict[str, Any]]:
        if not by_key:
            found: list[Message | None] = list(self.some(numbers))
            return found, {"ids": [m.id for m in found if m]}
        pairs = [(TOPICS[n % 2], KEYS[n // 2 % 2]) for n in dict.fromkeys(n % 4 for n in numbers)]
        return [self.keys.get(pair) for pair in pairs], {"keys": pairs}

    @rule(numbers=picks, by_key=st.booleans())
    def cancel(self, numbers: list[int], by_key: bool) -> None:
        found, how = self.named(numbers, by_key)
        for m, outcome in zip(found, self.one(commands.encode_cancel("n1", **how)).outcomes, strict=True):
            assert CancelOutcome(outcome).name == self.outcome(m, "CANCELLED")
            if m and m.phase(self.now) in ("scheduled", "ready"):
                m.state = "cancelled"

    def outcome(self, m: Message | None, done: str) -> str:
        phase = m.phase(self.now) if m else "gone"
        return {"scheduled": done, "ready": done, "gone": "NOT_FOUND"}.get(phase, phase.upper())

    @rule(numbers=picks, by_key=st.booleans(), delay=st.sampled_from([0, 0, 700, 4_000, HOUR_MS]))
    def reschedule(self, numbers: list[int], by_key: bool, delay: int) -> None:
        found, how = self.named(numbers, by_key)
        result = self.one(commands.encode_reschedule("n1", delay, True, **how))
        for n, m in enumerate(found):
            assert TargetOutcome(result.outcomes[n]).name == self.outcome(m, "DONE")
            if m and m.phase(self.now) in ("scheduled", "ready"):
                if delay or m.due > self.now:
                    if m.due != self.now + delay:
                        self.touched(m)
                        m.expiry = self.now + delay + m.ttl if m.ttl else NEVER
                    m.due = self.now + delay
                assert (int(result.ids[n]), result.deliver_at_ms[n]) == (m.id, START_MS + m.due)

    def touched(self, m: Message) -> None:
        """The message gets an entry anew, by another command than a job's."""

    # ---- leases

    @rule(numbers=picks, lease_ms=st.sampled_from([500, 10_000]))
    def grant(self, numbers: list[int], lease_ms: int) -> None:
        chosen = [m for m in self.some(numbers) if m.state != "gone"]
        if not chosen:
            return
        places = [self.world.place(m.id) for m in chosen]
        self.world.seq += 1
        hours, indexes = np.array(places, np.uint32).reshape(-1, 2).T
        result = self.one(
            commands.encode_grant(Grant(self.world.term, self.world.seq, lease_ms, "c", b"", "n1", hours, indexes))
        )
        taken = {name: sum(m.topic == name and m.state == "leased" for m in self.messages) for name in TOPICS}
        for n, m in enumerate(chosen):
            topic = self.topics[m.topic]
            room = topic.concurrency is None or taken[m.topic] < topic.concurrency
            free = m.phase(self.now) == "ready" and not topic.paused and room
            assert bool(result.granted[n]) == free
            if free:
                taken[m.topic] += 1
                m.state, m.until = "leased", self.now + lease_ms
                m.lease, m.place = (self.world.term, self.world.seq, n), places[n]
                m.leases.append((*m.lease, *m.place))

    def taken(self, numbers: list[int]) -> tuple[list[Message], np.ndarray]:
        mine = [m for m in self.some(numbers) if m.state == "leased" and m.lease]
        return mine, np.array([(*(m.lease or ()), *m.place) for m in mine], LEASE)

    @rule(numbers=picks)
    def ack(self, numbers: list[int]) -> None:
        mine, rows = self.taken(numbers)
        if mine:
            assert set(self.one(commands.encode_ack("n1", rows)).outcomes.tolist()) == {LeaseOutcome.DONE}
        for m in mine:
            m.state = "acked"

    @rule(numbers=picks, delay=st.sampled_from([-1, -1, 0, 2_000]), reason=st.sampled_from(["", "503"]))
    def nack(self, numbers: list[int], delay: int, reason: str) -> None:
        mine, rows = self.taken(numbers)
        if mine:
            outcomes = self.one(commands.encode_nack("n1", rows, delay, reason)).outcomes
            assert set(outcomes.tolist()) == {LeaseOutcome.DONE}
        for m in mine:
            self.failed(m, delay)

    @rule(number=st.integers(0, 9), which=st.integers(0, 3))
    def late_ack(self, number: int, which: int) -> None:
        """By whoever had it once. It counts if nobody had it since, however often it was moved."""
        for m in self.some([number]):
            rows = m.leases[-1 - which :][:1]
            if not rows or (m.lease is not None and rows[0][:3] == m.lease):
                continue
            (outcome,) = self.one(commands.encode_ack("n1", np.array(rows, LEASE))).outcomes.tolist()
            counts = m.state == "waiting" and m.ran_out and rows == m.leases[-1:]
            assert (outcome == LeaseOutcome.DONE) == counts, LeaseOutcome(outcome)
            if counts:
                m.state = "acked"

    @rule()
    def expire(self) -> None:
        over = [m for m in self.messages if m.state == "leased" and m.until <= self.now]
        assert self.one(commands.encode_expire(list(self.world.ledger.grants))).returned == len(over)
        for m in over:
            self.failed(m, -1, ran_out=True)

    def failed(self, m: Message, delay: int, *, ran_out: bool = False) -> None:
        topic = self.topics[m.topic]
        self.touched(m)
        m.attempts += 1
        m.lease, m.ran_out = None, ran_out
        if m.doomed:
            m.state = "cancelled"
        elif m.expiry <= self.now:
            m.state = "expired"
        elif topic.max_attempts and m.attempts >= topic.max_attempts:
            m.state = "dead"
        else:
            waits = topic.backoff or [0]
            wait = delay if delay >= 0 else waits[min(m.attempts, len(waits)) - 1]
            m.state, m.due = "waiting", self.now + wait

    # ---- what ends by itself, what is dead, what is purged

    @rule(limit=st.sampled_from([1, 100]))
    def ttl(self, limit: int) -> None:
        for _ in range(500):
            if self.one(commands.encode_maintain(Job.TTL_EXPIRE, limit=limit)).done:
                break
        else:
            raise AssertionError("it never ends")
        for m in self.messages:
            if m.state == "waiting" and m.expiry <= self.now:
                m.state = "expired"

    @rule(numbers=picks, name=names)
    def redrive(self, numbers: list[int], name: str) -> None:
        chosen = self.some(numbers)
        result = self.one(commands.encode_redrive("n1", name, [m.id for m in chosen]))
        if name not in self.topics:
            assert result.code == "no_topic"
            return
        for m, outcome in zip(chosen, result.outcomes, strict=True):
            phase = m.phase(self.now)
            here = m.topic == name and phase != "gone"
            comes = here and phase == "dead" and self.revive(m)
            expected = "REDRIVEN" if comes else "KEY_TAKEN" if phase == "dead" else phase.upper()
            assert RedriveOutcome(outcome).name == (expected if here else "NOT_FOUND")

    @rule(name=names, limit=st.sampled_from([1, 100]))
    def redrive_all(self, name: str, limit: int) -> None:
        if name not in self.topics:
            return
        self.one(commands.encode_redrive("n1", name, [], all=True))
        by_id = {m.id: m for m in self.messages}
        letters = [by_id[i] for _, i in drain(dead.listing(self.world.ledger, self.world.topic(name), b"", 1_000))]
        assert {m.id for m in letters} == {m.id for m in self.messages if m.topic == name and m.state == "dead"}
        # It ends in a later ms: in this one letters may still die.
        while self.one(commands.encode_maintain(Job.REDRIVE, topic=name, limit=limit)).count:
            pass
        for m in letters:
            self.revive(m)
        self.clock(1)
        assert self.one(commands.encode_maintain(Job.REDRIVE, topic=name, limit=limit)).done

    def revive(self, m: Message) -> bool:
        """Unless its key is another one's."""
        if m.key is not None:
            other = self.keys[m.topic, m.key]
            if other is not m and self.pending(other):
                return False
            self.keys[m.topic, m.key], m.began = m, self.now
        self.touched(m)
        m.state, m.attempts, m.due, m.ran_out = "waiting", 0, self.now, False
        m.expiry = self.now + m.ttl if m.ttl else NEVER
        return True

    @rule(name=names, states=st.sampled_from([topicchanges.SCHEDULED, topicchanges.READY, topicchanges.DEAD, 3, 7]))
    def purge(self, name: str, states: int) -> None:
        result = self.one(commands.encode_purge(name, states))
        if name not in self.topics:
            assert result.code == "no_topic"
            return
        bits = {"scheduled": topicchanges.SCHEDULED, "ready": topicchanges.READY, "dead": topicchanges.DEAD}
        for m in self.messages:
            # What is past its TTL and not written down as expired yet is purged like what is ready.
            late = m.state == "waiting" and m.phase(self.now) == "expired"
            bit = topicchanges.READY if late else bits.get(m.phase(self.now), 0)
            if m.topic == name and states & bit:
                m.state = "gone" if m.state == "dead" else "cancelled"
            if m.topic == name and m.state == "leased" and states & 3 == 3:
                m.doomed = True
        if states & 3 in (topicchanges.SCHEDULED, topicchanges.READY):
            self.sweep(1000)  # a purge of one of the two is carried out by it

    @rule(limit=st.sampled_from([1, 1000]))
    def sweep(self, limit: int) -> None:
        for _ in range(500):
            if self.one(commands.encode_maintain(Job.SWEEP, limit=limit)).done:
                return
        raise AssertionError("a sweep that never ends")

    # ---- what must hold

    @invariant()
    def same(self) -> None:
        ledger = self.world.ledger
        for m in self.messages:
            found = describe(ledger, m.id)
            phase = m.phase(self.now)
            if phase == "gone":
                assert found is None
                continue
            assert found is not None
            assert str(found.state) == phase
            if m.state == "waiting":
                assert (found.deliver_at_ms, found.attempt) == (START_MS + m.due, m.attempts)
        for name in self.topics:
            topic = self.world.topic(name)
            mine = [m.state for m in self.messages if m.topic == name]
            assert topic.leased == mine.count("leased")
            assert topic.dead == mine.count("dead")

    @precondition(lambda self: self.messages)
    @rule()
    def replicas_are_equal(self) -> None:
        mine, other = self.world.ledger, self.replica.ledger
        assert checkpoint.dump(mine) == checkpoint.dump(other)
        assert mine.store.hours() == other.store.hours()
        for hour in mine.store.hours():
            every = slice(0, mine.store.count(hour))
            assert mine.store.entries(hour, every).tobytes() == other.store.entries(hour, every).tobytes()

    def teardown(self) -> None:
        if self.messages:
            self.replicas_are_equal()


Owner.TestCase.settings = settings(
    max_examples=size(15, 40),
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestOwner = Owner.TestCase
