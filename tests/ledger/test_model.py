"""The state machine beside a model too simple to be wrong: one object per message, and `if`s."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from hadelay.codec import commands
from hadelay.codec.commandtypes import Grant, Job
from hadelay.codec.publishcommand import hash_client_key
from hadelay.codec.results import CancelOutcome, JobResult, LeaseOutcome, RowCode, TargetOutcome
from hadelay.ledger.messages.keys import find_key
from hadelay.ledger.views.describe import describe
from hadelay.model import HOUR_MS, KEEP, REJECT, REPLACE
from hadelay.settings.cluster import Settings
from tests.ledger.world import START_HOUR, START_MS, World, draft, leases
from tests.scale import size

DONE, ACKED, LOST = LeaseOutcome.DONE, LeaseOutcome.ALREADY_ACKED, LeaseOutcome.LEASE_LOST
TOPICS = ("orders", "refunds")


@dataclass
class Message:
    id: int
    topic: str
    due: int
    hour: int
    state: str = "waiting"  # leased, acked, cancelled, gone
    attempts: int = 0  # hand-outs that came back
    filing: int = 0  # counts how often it was filed
    expired: bool = False  # it came back because its lease ran out
    late: bool = False  # acked without a lease
    doomed: bool = False  # its topic was deleted
    swept: bool = True
    lease: tuple[int, int, int] | None = None
    until: int = 0

    @property
    def is_open(self) -> bool:
        return self.state in ("waiting", "leased")

    def refile(self, due: int, now: int) -> None:
        self.due, self.hour, self.state, self.lease = due, hour_at(max(due, now)), "waiting", None
        self.filing += 1


@dataclass
class Token:
    """A lease as a consumer has it, real or not."""

    row: tuple[int, int, int, int, int]
    message: Message
    attempts: int
    filing: int


@dataclass
class Model:
    messages: list[Message] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    keys: dict[bytes, tuple[Any, int]] = field(default_factory=dict)
    #: (topic, client key) → the message published last under it, and when its chain began.
    clients: dict[tuple[str, bytes], tuple[Message, int]] = field(default_factory=dict)
    requests: dict[tuple[str, bytes], tuple[int, int]] = field(default_factory=dict)
    retired: set[int] = field(default_factory=set)
    exists: set[str] = field(default_factory=set)

    def taken(self, key: tuple[int, int]) -> list[Message]:
        return [m for m in self.messages if m.state == "leased" and m.lease is not None and m.lease[:2] == key]


def hour_at(at: int) -> int:
    return (START_MS + at) // HOUR_MS


picks = st.lists(st.integers(0, 9), min_size=1, max_size=4)


class StateAgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World(Settings(idempotency_window_ms=10**12), group=5)
        self.model = Model()
        self.time = 0  # cluster time; world.now may be behind it

    def some(self, numbers: list[int]) -> list[Message]:
        known = self.model.messages
        return [known[-1 - n % len(known)] for n in numbers] if known else []

    def some_tokens(self, numbers: list[int]) -> list[Token]:
        known = self.model.tokens
        return [known[-1 - n % len(known)] for n in numbers] if known else []

    # time

    @rule(step=st.sampled_from([-5_000, -500, 1, 700, 5_000, 30_000, HOUR_MS // 3, HOUR_MS, 3 * HOUR_MS]))
    def clock(self, step: int) -> None:
        self.world.now = max(self.time + step, 0)
        self.world.one(commands.encode_noop())
        self.time = max(self.time, self.world.now)

    @rule()
    def new_leader(self) -> None:
        self.world.term += 1

    @rule()
    def restart(self) -> None:
        self.world.restart()

    # messages

    @rule(
        delays=st.lists(
            st.sampled_from([-1, 0, 0, 400, 1_500, 30_000, HOUR_MS // 2, 2 * HOUR_MS]), min_size=1, max_size=3
        ),
        topic=st.sampled_from(TOPICS),
        key=st.sampled_from([None, None, b"a", b"b"]),
        body=st.sampled_from([b"x", b"hello"]),
    )
    def publish(self, delays: list[int], topic: str, key: bytes | None, body: bytes) -> None:
        drafts = [draft(topic, d, body, idem=key if n == 0 else None) for n, d in enumerate(delays)]
        result = self.world.publish(*drafts)
        now = self.time
        for n, delay in enumerate(delays):
            message_id = int(result.ids[n])
            print_of = (topic, delay, body)
            if n == 0 and key in self.model.keys:
                known, first = self.model.keys[key]
                assert result.codes[n] == (RowCode.OK if known == print_of else RowCode.KEY_CONFLICT)
                if known == print_of:
                    assert (message_id, bool(result.duplicate[n])) == (first, True)
                continue
            due = now + max(delay, 0)
            assert result.deliver_at_ms[n] == START_MS + due
            assert message_id not in {m.id for m in self.model.messages}, "ids are never reused"
            assert not result.codes[n]
            self.model.messages.append(Message(message_id, topic, due, hour_at(due)))
            self.model.exists.add(topic)
            if n == 0 and key is not None:
                self.model.keys[key] = print_of, message_id

    @rule(
        rows=st.lists(
            st.tuples(
                st.sampled_from([b"c", b"d"]),
                st.sampled_from([KEEP, REPLACE, REJECT]),
                st.sampled_from([0, 1_000, HOUR_MS]),
                st.sampled_from([0, 500, 2 * HOUR_MS]),
            ),
            min_size=1,
            max_size=3,
        ),
        topic=st.sampled_from(TOPICS),
    )
    def publish_with_client_keys(self, rows: list[tuple[bytes, int, int, int]], topic: str) -> None:
        """Each row as if it had come alone."""
        result = self.world.publish(
            *(replace(draft(topic, delay), key=k, on_conflict=mode, max_wait_ms=wait) for k, mode, delay, wait in rows)
        )
        others = [0] * len(rows) if result.others is None else result.others.tolist()
        self.model.exists.add(topic)
        for n, (key, mode, delay, wait) in enumerate(rows):
            answer = (int(result.ids[n]), RowCode(result.codes[n]), bool(result.duplicate[n]), others[n])
            first, start = self.model.clients.get((topic, key), (None, self.time))
            if first is not None and first.is_open:
                if mode == KEEP:
                    assert answer == (first.id, RowCode.OK, True, 0)
                    continue
                if mode == REJECT or first.state == "leased":
                    code = RowCode.KEY_PENDING if mode == REJECT else RowCode.KEY_LEASED
                    assert answer == (0, code, False, first.id)
                    continue
                first.state = "cancelled"
                assert answer[1:] == (RowCode.OK, False, first.id)
            else:
                start = self.time
                assert answer[1:] == (RowCode.OK, False, 0)
            due = max(min(self.time + delay, start + wait), self.time) if wait else self.time + delay
            assert result.deliver_at_ms[n] == START_MS + due
            filed = Message(answer[0], topic, due, hour_at(due))
            self.model.messages.append(filed)
            self.model.clients[topic, key] = filed, start

    @rule(
        numbers=picks,
        delay=st.sampled_from([0, 0, 800, HOUR_MS, 3 * HOUR_MS, 10**12]),
        by_key=st.sampled_from([None, None, (TOPICS[0], b"c"), (TOPICS[1], b"d")]),
    )
    def reschedule(self, numbers: list[int], delay: int, by_key: tuple[str, bytes] | None) -> None:
        chosen: list[Message | None] = [*self.some(numbers[:1])]
        keys = [] if by_key is None else [by_key]
        if by_key is not None:
            known, _ = self.model.clients.get(by_key, (None, 0))
            chosen.append(known)
        command = commands.encode_reschedule("n1", delay, True, [m.id for m in self.some(numbers[:1])], keys)
        result = self.world.one(command)
        for m, outcome, at in zip(chosen, result.outcomes, result.deliver_at_ms.tolist(), strict=True):
            if m is None or m.state != "waiting":
                expected = "NOT_FOUND" if m is None or m.state == "gone" else m.state.upper()
                assert TargetOutcome(outcome).name == expected
            elif delay == 10**12:
                assert outcome == TargetOutcome.TOO_FAR
            else:
                if not (delay == 0 and m.due <= self.time) and self.time + delay != m.due:
                    m.refile(self.time + delay, self.time)
                assert (outcome, at) == (TargetOutcome.DONE, START_MS + m.due)

    @rule(numbers=picks)
    def cancel(self, numbers: list[int]) -> None:
        for m in self.some(numbers):
            (outcome,) = self.world.cancel(m.id)
            expected = {"leased": "LEASED", "acked": "ACKED", "gone": "NOT_FOUND"}.get(m.state, "CANCELLED")
            assert CancelOutcome(outcome).name == expected
            if m.state == "waiting":
                m.state = "cancelled"

    # leases

    @rule(
        numbers=picks,
        lease_ms=st.sampled_from([500, 10_000, HOUR_MS]),
        consumer=st.sampled_from(["c1", "c2"]),
        request=st.sampled_from([b"", b"", b"r1"]),
        replicated=st.booleans(),
    )
    def grant(self, numbers: list[int], lease_ms: int, consumer: str, request: bytes, replicated: bool) -> None:
        chosen = self.some(numbers)
        places = [self.world.place(m.id) for m in chosen]
        self.world.seq += 1
        key = (self.world.term, self.world.seq)
        offered = [Token((*key, n, *places[n]), m, m.attempts, m.filing) for n, m in enumerate(chosen)]
        if not replicated:  # interval mode: handed out, then the leader fell
            self.model.tokens += offered
            return
        hours, indexes = np.array(places, np.uint32).reshape(-1, 2).T
        proposal = Grant(*key, lease_ms, consumer, request, "n1", hours, indexes)
        result = self.world.one(commands.encode_grant(proposal))
        known = self.model.requests.get((consumer, request)) if request else None
        if known is not None and self.model.taken(known):
            assert result.existing == known
            assert not result.granted.any()
            return
        assert result.existing is None
        granted = []
        for n, m in enumerate(chosen):
            expect = m.state == "waiting" and m.due <= self.time
            assert bool(result.granted[n]) == expect
            if expect:
                assert result.attempts[n] == m.attempts + 1
                m.state, m.lease, m.until = "leased", (*key, n), self.time + lease_ms
                granted.append(m)
                self.model.tokens.append(offered[n])
        if granted and request:
            self.model.requests[consumer, request] = key

    def is_leased(self, token: Token) -> bool:
        return token.message.state == "leased" and token.message.lease == token.row[:3]

    def settle(self, numbers: list[int], kind: str, value: int = 0) -> list[tuple[Token, int]]:
        tokens = self.some_tokens(numbers)
        rows = leases(*(t.row for t in tokens))
        if kind == "ack":
            outcomes = self.world.ack(rows)
        elif kind == "nack":
            outcomes = self.world.nack(rows, value)
        else:
            outcomes = self.world.extend(rows, value)
        return list(zip(tokens, outcomes, strict=True))

    @rule(numbers=picks)
    def ack(self, numbers: list[int]) -> None:
        answers = self.settle(numbers, "ack")
        # What is held is settled first, then what came late.
        late = []
        for token, outcome in answers:
            if self.is_leased(token):
                assert outcome == DONE
                token.message.state = "acked"
            else:
                late.append((token, outcome))
        for token, outcome in late:
            assert outcome == self.late_ack(token)

    def late_ack(self, token: Token) -> LeaseOutcome:
        m = token.message
        if token.row[3] in self.model.retired or m.state == "gone":
            return LOST
        here = m.filing == token.filing
        if here and m.state == "acked":
            return ACKED
        if here and m.state != "waiting":
            return LOST
        came_back = m.attempts == token.attempts + 1 and m.expired
        unseen = (
            m.attempts == token.attempts
            and token.row[0] < self.world.term
            and not self.model.taken(token.row[:2])
            and m.due <= self.time
        )
        if not came_back and not unseen:
            return LOST
        if m.late:
            return ACKED
        if m.state != "waiting":
            return LOST
        m.state, m.late = "acked", True
        return DONE

    @rule(numbers=picks, delay=st.sampled_from([-1, 0, 2_000, 90 * 60_000]))
    def nack(self, numbers: list[int], delay: int) -> None:
        for token, outcome in self.settle(numbers, "nack", delay):
            if self.is_leased(token):
                assert outcome == DONE
                self.give_back(token.message, self.time + max(delay, 0), expired=False)
            else:
                self.check_not_leased(token, outcome)

    @rule(numbers=picks, lease_ms=st.sampled_from([1, 20_000]))
    def extend(self, numbers: list[int], lease_ms: int) -> None:
        seen = set()
        for token, outcome in self.settle(numbers, "extend", lease_ms):
            if self.is_leased(token):
                assert outcome == (LOST if token.row in seen else DONE)
                token.message.until = self.time + lease_ms
                seen.add(token.row)
            else:
                self.check_not_leased(token, outcome)

    def check_not_leased(self, token: Token, outcome: int) -> None:
        m = token.message
        acked = m.state == "acked" and m.filing == token.filing and m.hour not in self.model.retired
        assert outcome == (ACKED if acked else LOST)

    def give_back(self, m: Message, due: int, *, expired: bool) -> None:
        if m.doomed:
            m.state, m.lease = "cancelled", None
            return
        m.attempts += 1
        m.expired = expired
        m.refile(due, self.time)

    @rule(wait_ms=st.sampled_from([0, 0, 500, 10_000]))
    def expire(self, wait_ms: int) -> None:
        self.clock(wait_ms)
        keys = list(self.world.ledger.grants)
        result = self.world.expire(*keys)
        over = [m for m in self.model.messages if m.state == "leased" and m.until <= self.time]
        assert result.returned == len(over)
        for m in over:
            self.give_back(m, self.time, expired=True)
        assert set(result.remaining) == {m.lease[:2] for m in self.model.messages if m.lease and m.state == "leased"}

    # topics and hours

    @rule(topic=st.sampled_from(TOPICS), force=st.booleans())
    def delete(self, topic: str, force: bool) -> None:
        mine = [m for m in self.model.messages if m.topic == topic and m.is_open and not m.doomed]
        result = self.world.one(commands.encode_topic_delete(topic, force))
        if topic not in self.model.exists:
            assert result.code == "no_topic"
        elif mine and not force:
            assert result.code == "topic_not_empty"
        else:
            self.model.exists.discard(topic)
            self.model.clients = {k: v for k, v in self.model.clients.items() if k[0] != topic}
            for m in mine:
                m.doomed = True
                if m.state == "waiting":
                    m.state, m.swept = "cancelled", False

    @rule(limit=st.sampled_from([1, 3, 1000]))
    def sweep(self, limit: int) -> None:
        swept = 0
        for _ in range(2_000):
            result = self.world.maintain(Job.SWEEP, limit=limit)
            swept += result.count
            if result.done:
                break
        else:
            raise AssertionError("a sweep that never ends")
        assert swept == sum(not m.swept for m in self.model.messages)
        for m in self.model.messages:
            m.swept = True

    @rule(back=st.integers(0, 5), limit=st.sampled_from([1, 2, 1000]))
    def carry(self, back: int, limit: int) -> None:
        hour = hour_at(self.time) - back
        moved = [m for m in self.model.messages if m.hour == hour and m.state == "waiting"]
        if back == 0:
            assert self.world.maintain(Job.ROLL_FORWARD, hour, limit).code == "hour_running"
            return
        count = 0
        for _ in range(2_000):
            result = self.world.maintain(Job.ROLL_FORWARD, hour, limit)
            count += result.count
            if result.done:
                break
        assert count == len(moved)
        for m in self.model.messages:
            if m.hour == hour:
                m.swept = True
        for m in moved:
            m.refile(m.due, self.time)

    @rule(back=st.integers(0, 6), limit=st.sampled_from([1, 1000]))
    def retire(self, back: int, limit: int) -> None:
        hour = hour_at(self.time) - back
        mine = [m for m in self.model.messages if m.hour == hour]
        is_open = any(m.is_open or not m.swept for m in mine)
        existed = self.world.store.count(hour) > 0
        result = self.world.maintain(Job.RETIRE, hour, limit)
        if not existed:
            assert result == JobResult(True, 0)
        elif back < 2:
            assert result.code == "hour_running"
        elif is_open:
            assert result.code == "hour_open"
        else:
            while not result.done:
                result = self.world.maintain(Job.RETIRE, hour, limit)
            self.model.retired.add(hour)
            for m in mine:
                m.state = "gone"

    @invariant()
    def same(self) -> None:
        assert self.world.ledger.now_ms in (0, START_MS + self.time)
        for m in self.model.messages:
            found = describe(self.world.ledger, m.id)
            if m.state == "gone":
                assert found is None
                continue
            assert found is not None
            expected = m.state
            if expected == "waiting":
                expected = "ready" if m.due <= self.time else "scheduled"
            assert (found.state, found.hour) == (expected, m.hour)
            if m.is_open:
                assert found.deliver_at_ms == START_MS + m.due
                assert found.attempt == m.attempts + (m.state == "leased")
        for name in TOPICS:
            topic = self.world.topic(name)
            assert (topic is not None) == (name in self.model.exists)
            if topic is not None:
                mine = [m for m in self.model.messages if m.topic == name]
                assert topic.waiting == sum(m.state == "waiting" for m in mine)
                assert topic.leased == sum(m.state == "leased" for m in mine)
                assert topic.published == len(mine)
        for (topic_name, key), (m, _) in self.model.clients.items():
            found_id = find_key(self.world.ledger, topic_name, hash_client_key(key))
            assert found_id == (None if m.state == "gone" else m.id)
        assert all(hour >= START_HOUR for hour in self.world.store.hours())


StateAgainstModel.TestCase.settings = settings(
    max_examples=size(20, 60), stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestStateAgainstModel = StateAgainstModel.TestCase
