"""Message groups beside a model too simple to be wrong: it sorts the waiting messages of each group and takes the first
ones, and runs of them. G1 (chaos/sim/groupcheck.py) is checked after each third entry: what breaks it stays broken."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from msgspec.structs import replace

from chaos.sim import ledgercheck
from hadelay.codec import commands
from hadelay.codec.commandtypes import Job
from hadelay.codec.publishcommand import hash_group
from hadelay.codec.results import RowCode
from hadelay.ledger.groups.messagegroups import GROUP
from hadelay.ledger.hours.lookup import find_entry, state_of
from hadelay.model import HOUR_MS, REPLACE, State
from tests.ledger.world import START_MS, World, draft, leases
from tests.scale import size

TOPICS = {"one": 1, "three": 3, "label": None}


@dataclass(eq=False)
class Message:
    id: int
    topic: str
    group: str | None
    order: int
    due: int
    state: str = "waiting"
    attempts: int = 0
    tokens: tuple[int, ...] = ()
    generation: int = 0

    @property
    def pending(self) -> bool:
        return self.state in ("waiting", "leased")


class Run:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world = World()
        self.world.checking = 3
        self.messages: list[Message] = []
        self.limits = dict(TOPICS)
        #: False once a limit was changed: a group follows at its next change, which the model does not know.
        self.exact = True
        for name, limit in TOPICS.items():
            letters = "label" if name == "three" else "keep"
            config = {"group_concurrency": limit, "max_attempts": 3, "backoff": [500], "dead_letter": letters}
            config |= {"dead_retention_ms": HOUR_MS}
            assert self.world.one(commands.encode_topic_put(name, config)).changed

    @property
    def now(self) -> int:
        return self.world.now

    def blocked(self) -> set[int]:
        """Rule G."""
        groups = defaultdict(list)
        for m in self.messages:
            if m.pending and m.group is not None and self.limits[m.topic] is not None and m.generation >= 0:
                groups[m.topic, m.group].append(m)
        found: set[int] = set()
        for (topic, _), members in groups.items():
            room = max((self.limits[topic] or 0) - sum(m.state == "leased" for m in members), 0)
            waiting = sorted((m.order, m.id) for m in members if m.state == "waiting")
            found |= {first_id for _, first_id in waiting[room:]}
        return found

    def state(self, message_id: int) -> State | None:
        """State of the message in the ledger, without its history; None for a message that is gone."""
        ledger = self.world.ledger
        entry = find_entry(ledger, message_id)
        return None if entry is None else state_of(ledger, entry, max(START_MS + self.now, ledger.now_ms))

    def check(self, *, ended: bool = True) -> None:
        """ended: also of messages that ended."""
        states = {m.id: self.state(m.id) for m in self.messages if ended or m.pending}
        looked_at = [m for m in self.messages if m.id in states]
        for m in looked_at:  # the model has no TTLs
            if states[m.id] == "expired" and m.state == "waiting":
                m.state = "expired"
        blocked = self.blocked()
        for m in looked_at:
            found = states[m.id]
            if found is None:
                assert not m.pending, m
                continue
            expected = m.state
            if m.state == "waiting":
                expected = "blocked" if m.id in blocked else "ready" if m.due <= self.now else "scheduled"
            assert found == expected, (m, found)
        for name in TOPICS:
            mine = {m.id for m in self.messages if m.topic == name}
            assert self.world.topic(name).blocked == len(blocked & mine)

    def some(self, count: int, *, state: str | None = None) -> list[Message]:
        known = [m for m in self.messages if (m.pending if state is None else m.state == state)]
        return self.rng.sample(known, min(count, len(known)))

    def publish(self) -> None:
        rng, rows = self.rng, []
        for _ in range(rng.choice([1, 2, 5, 20])):
            group = rng.choice([None, "a", "a", "b", "c", "d"])
            delay = rng.choice([0, 0, 10, 700, 5_000, HOUR_MS])
            row = draft(rng.choice([*TOPICS]), delay)
            if rng.random() < 0.1:
                row = replace(row, key=b"k%d" % rng.randrange(3), on_conflict=REPLACE)
            if rng.random() < 0.1:
                row = replace(row, ttl_ms=2_000)
            rows.append((group, replace(row, group=None if group is None else hash_group(group))))
        result = self.world.publish(*(row for _, row in rows))
        others = [0] * len(rows) if result.others is None else result.others.tolist()
        for n, (group, row) in enumerate(rows):
            if result.codes[n] == RowCode.OK:
                due = self.now + row.when_ms
                self.messages.append(Message(int(result.ids[n]), row.topic, group, due, due))
        replaced = {other for other, code in zip(others, result.codes, strict=True) if other and code == RowCode.OK}
        for m in self.messages:
            m.state = "cancelled" if m.id in replaced else m.state

    def grant(self) -> None:
        chosen = self.some(6, state="waiting") + self.line()
        if not chosen:
            return
        self.rng.shuffle(chosen) if self.rng.random() < 0.2 else None
        chosen = list(dict.fromkeys(chosen))
        blocked = self.blocked()
        continued = self.continued(chosen, blocked)
        result = self.world.grant(*(m.id for m in chosen), lease_ms=self.rng.choice([300, 60_000]))
        for n, m in enumerate(chosen):
            fits = m.id in continued or (self.is_ready(m) and m.id not in blocked)
            if not self.exact:
                fits = bool(result.granted[n])
            assert bool(result.granted[n]) == fits, m
            if fits:
                m.state, m.attempts = "leased", m.attempts + 1
                m.tokens = (result.term, result.seq, n, *self.world.place(m.id))

    def is_ready(self, m: Message) -> bool:
        return m.due <= self.now and self.state(m.id) in ("leased", "ready", "blocked")

    def line(self) -> list[Message]:
        """The first waiting messages of one group in order, at times one too few in front."""
        key = self.rng.choice([*TOPICS]), self.rng.choice("abcd")
        waiting = [m for m in self.messages if m.state == "waiting" and (m.topic, m.group) == key]
        skipped = self.rng.random() < 0.2
        return sorted(waiting, key=lambda m: (m.order, m.id))[skipped : self.rng.choice([0, 0, 2, 4, 9])]

    def continued(self, chosen: list[Message], blocked: set[int]) -> set[int]:
        """Blocked messages that one grant of the chosen messages leases, because they continue runs."""
        found = set[int]()
        for group in {(m.topic, m.group) for m in chosen if m.id in blocked and self.limits[m.topic] == 1}:
            members = [m for m in self.messages if m.pending and m.generation >= 0 and (m.topic, m.group) == group]
            line = sorted((m for m in members if m.state == "waiting"), key=lambda m: (m.order, m.id))
            if any(m.state == "leased" for m in members) or line[0] not in chosen or not self.is_ready(line[0]):
                continue
            named = [m for m in chosen if m in line[1:] and self.is_ready(m)]
            if named and chosen.index(line[0]) > chosen.index(named[0]):
                continue
            for m, expected in zip(named, line[1:], strict=False):
                if m is not expected:
                    break
                found.add(m.id)
        return found

    def back(self, m: Message, due: int) -> None:
        if m.generation < 0:
            m.state = "cancelled"
        elif m.attempts >= 3:
            self.die(m)
        else:
            m.state, m.due = "waiting", max(due, m.due)
            if self.limits[m.topic] != 1:
                m.order = m.due

    def die(self, m: Message) -> None:
        if m.topic == "three":
            m.topic, m.state, m.attempts, m.order, m.due = "label", "waiting", 0, self.now, self.now
        else:
            m.state = "dead"

    def settle(self) -> None:
        taken = self.some(5, state="leased")
        if not taken:
            return
        rows = leases(*(m.tokens for m in taken))  # type: ignore[arg-type]
        if self.rng.random() < 0.5:
            self.world.ack(rows)
            for m in taken:
                m.state = "acked"
        else:
            delay = self.rng.choice([-1, 0, 2_000])
            self.world.nack(rows, delay)
            for m in taken:
                self.back(m, self.now + (500 if delay < 0 else delay))

    def expire(self) -> None:
        before = {m.id for m in self.messages if m.state == "leased"}
        self.world.expire(*self.world.ledger.grants)
        still = set()
        for grant in self.world.ledger.grants.values():
            for row in grant.rows[grant.rows["open"] == 1]:
                entries = self.world.store.entries(int(row["hour"]), np.array([row["index"]]))
                still.add(int(entries["first_id"][0]))
        for m in self.messages:
            if m.id in before - still:
                self.back(m, self.now + 500)

    def cancel(self) -> None:
        chosen = self.some(4)
        self.world.cancel(*(m.id for m in chosen))
        for m in chosen:
            m.state = "cancelled" if m.state == "waiting" else m.state

    def reschedule(self) -> None:
        delay, chosen = self.rng.choice([0, 0, 300, HOUR_MS]), self.some(3)
        self.world.one(commands.encode_reschedule("n1", delay, True, [m.id for m in chosen]))
        for m in chosen:
            if m.state == "waiting" and not (delay == 0 and m.due <= self.now) and m.due != self.now + delay:
                m.order = m.due = self.now + delay

    def redrive(self) -> None:
        chosen = [m for m in self.some(9, state="dead") if m.topic == "one"][:3]
        result = self.world.one(commands.encode_redrive("n1", "one", [m.id for m in chosen]))
        for m, outcome in zip(chosen, result.outcomes.tolist(), strict=True):
            if outcome == 0:
                m.state, m.attempts, m.order, m.due = "waiting", 0, self.now, self.now

    def purge(self) -> None:
        topic = self.rng.choice([*TOPICS])
        states = self.rng.choice([1, 2, 3, 3])
        if self.world.one(commands.encode_purge(topic, states)).changed:
            for m in self.messages:
                means = states == 3 or (m.due <= self.now) == (states == 2)
                if m.topic == topic and m.pending and states == 3:
                    m.generation = -1
                if m.topic == topic and m.state == "waiting" and means:
                    m.state = "cancelled"
        while not self.world.maintain(Job.SWEEP).done:
            pass

    def time(self) -> None:
        self.world.now += self.rng.choice([1, 50, 600, 6_000, HOUR_MS // 2])
        self.world.one(commands.encode_noop())
        while not self.world.maintain(Job.TTL_EXPIRE).done:
            pass
        for back in (1, 2, 3):
            hour = self.world.ledger.now_hour - back
            self.world.maintain(Job.ROLL_FORWARD, hour)
            self.world.maintain(Job.RETIRE, hour)

    def limit(self) -> None:
        self.exact = False
        topic, limit = self.rng.choice([("one", 4), ("one", 1), ("three", 2), ("three", 5), ("three", 3)])
        self.world.one(commands.encode_topic_put(topic, {"group_concurrency": limit}))


def drive(run: Run, steps: int, *more: Callable[[], None]) -> None:
    choices = [run.publish, run.publish, run.grant, run.grant, run.settle, run.settle, run.expire, run.cancel]
    choices += [run.reschedule, run.redrive, run.time, *more]
    for n in range(steps):
        (run.purge if run.rng.random() < 0.03 else run.rng.choice(choices))()
        if run.exact:
            run.check(ended=n % 8 == 0 or n == steps - 1)
        if run.rng.random() < 0.1:
            run.world.restart()
    ledgercheck.check(run.world.ledger)


@pytest.mark.parametrize("seed", range(size(10, 30)))
def test_apply_does_what_the_rule_says(seed: int) -> None:
    drive(Run(seed), 120)


@pytest.mark.parametrize("seed", range(size(4, 10)))
def test_groups_follow_a_changed_limit(seed: int) -> None:
    """G1 alone judges; in the end every group has drained, so that none was forgotten."""
    run = Run(seed)
    drive(run, 100, run.limit)
    for _ in range(200):
        run.time()
        run.expire()
        waiting = [m.id for m in run.messages if m.state == "waiting"][:50]
        if waiting:
            result = run.world.grant(*waiting, lease_ms=1_000)
            if result.granted.any():
                run.world.ack(run.world.leased(result.term, result.seq))
        for m in run.messages:
            if run.state(m.id) in (None, "acked", "cancelled", "expired", "dead"):
                m.state = "over"
    assert [topic.pending for topic in run.world.ledger.topics.all] == [0, 0, 0]
    assert not run.world.tables.range(GROUP)
