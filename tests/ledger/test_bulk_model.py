"""Bulk jobs beside everything else that an owner may do: each message is changed once, and none is forgotten.

The model has numbers of its own for "before the job" and "after it". It is told of nothing that a job may not know:
steps are proposed twice, late, and by leaders that see an old cursor.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from chaos.sim import ledgercheck
from hadelay.codec import commands
from hadelay.codec.commandtypes import Job
from hadelay.codec.jobcommands import LAST, ON_DEAD, JobBegin, JobSpec
from hadelay.codec.results import Done, JobBegun, Refused
from hadelay.ledger.jobs import bulk, bulkscan
from hadelay.ledger.jobs.bulkscan import JobScan
from hadelay.model import HOUR_MS
from tests.ledger.test_owner_model import CONFIGS, KEYS, NEVER, START_MS, TOPICS, Message, Owner
from tests.scale import LONG

#: The short ones meet each way in which a job leaves a message alone.
SEEDS = range(18) if LONG else (0, 1, 8, 11, 12)
SHIFTS = (-30_000, -700, 1_000, 60_000, HOUR_MS)
BOUNDS = (*[None] * 6, -HOUR_MS, -2_000, 0, 700, 60_000)


@dataclass
class Bulk:
    number: int
    spec: JobSpec
    began: int
    generation: int
    topics: set[str]
    #: Messages that wait untouched since the beginning: the job owes each of them a change.
    owed: set[int] = field(default_factory=set)
    changed: set[int] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("done", "leased", "settled", "moved"), 0))
    refused: int = 0
    ended: bool = False


class Bulks(Owner):
    def __init__(self) -> None:
        super().__init__()
        self.world.checking = 3
        self.jobs: list[Bulk] = []
        self.generation = 0
        #: Generation of each message's present entry, and when it died.
        self.generations: dict[int, int] = {}
        self.deaths: dict[int, int] = {}
        self.delayed: list[tuple[Bulk, bytes, list[int], tuple[int, int], tuple[int, int]]] = []

    def touched(self, m: Message) -> None:
        self.generations[m.id] = self.generation
        for job in self.jobs:
            job.owed.discard(m.id)

    def generation_of(self, m: Message) -> int:
        return self.generations.setdefault(m.id, self.published_at.get(m.id, 0))

    @property
    def published_at(self) -> dict[int, int]:
        """Generation at the publish: the model learns of new messages when it looks next, which is before each job."""
        for m in self.messages:
            self.generations.setdefault(m.id, self.generation)
        return self.generations

    def failed(self, m: Message, delay: int, *, ran_out: bool = False) -> None:
        before = self.generation_of(m)
        super().failed(m, delay, ran_out=ran_out)
        if m.state == "dead":  # a letter keeps the generation of the entry that it had
            self.generations[m.id], self.deaths[m.id] = before, self.now

    def carry(self, back: int, limit: int) -> None:
        self.world_maintain(Job.ROLL_FORWARD, (START_MS + self.now) // HOUR_MS - back, limit)

    def world_maintain(self, job: Job, hour: int, limit: int) -> None:
        self.one(commands.encode_maintain(job, hour, limit))

    # ---- jobs

    def begin(
        self, name: str, action: str, shift: int, delay: int | None, since: int | None = None, until: int | None = None
    ) -> None:  # fmt: skip
        """since, until: bounds of the due times of the messages that the job means, from now on."""
        spec = JobSpec(action=action, topic=name)  # type: ignore[arg-type]
        if action == "reschedule" and delay is None:
            spec = replace(spec, shift_ms=shift)
        elif action == "reschedule":
            spec = replace(spec, delay_ms=delay)
        if action not in ON_DEAD and (since is None or until is None or since < until):
            bounds = {"from_ms": since, "to_ms": until}
            times = {which: START_MS + self.now + ms for which, ms in bounds.items() if ms is not None}
            spec = replace(spec, **times)
        topics = {topic for topic in self.topics if name in ("*", topic)}
        assert self.published_at is not None
        result = self.one(commands.encode_job_begin(JobBegin("n1", "", b"", sorted(topics), spec)))
        if not topics:
            assert isinstance(result, Refused)
            return
        assert isinstance(result, JobBegun)
        self.generation += 1
        job = Bulk(result.job, spec, self.now, self.generation, topics)
        state = "dead" if action in ON_DEAD else "waiting"
        job.owed = {m.id for m in self.messages if m.state == state and m.topic in topics and self.selects(job, m)}
        self.jobs.append(job)

    @staticmethod
    def selects(job: Bulk, m: Message) -> bool:
        since, until = job.spec.from_ms, job.spec.to_ms
        return (since is None or START_MS + m.due >= since) and (until is None or START_MS + m.due < until)

    def running(self, n: int) -> Bulk | None:
        kept = self.world.ledger.jobs
        found = [job for job in self.jobs if not job.ended and not bulk.queued(self.world.ledger, kept[job.number])]
        return found[n % len(found)] if found else None

    def step(self, n: int, size: int, late: bool) -> None:
        """What a leader does: look on from the job's cursor, and propose what was found."""
        job = self.running(n)
        if job is None or (size > 1 and any(other is job for other, *_ in self.delayed)):
            return
        kept = self.world.ledger.jobs[job.number]
        expected = kept.cursor
        scan = JobScan(self.world.ledger, job.spec, kept.topics, kept.began_ms, expected)
        ids: list[int] = []
        cursor = expected
        while cursor != LAST:
            hour, rows = scan.step(START_MS + self.now)
            room = size - len(ids)
            ids += rows["first_id"][:room].tolist()
            cursor = scan.cursor
            if len(rows) > room:
                cursor = (hour, int(rows["index"][room]))
                break
        proposal = (job, commands.encode_job_step(job.number, expected, cursor, ids), ids, expected, cursor)
        if late:
            self.delayed.append(proposal)
        else:
            self.propose(*proposal)

    def propose_late(self, again: bool) -> None:
        for proposal in self.delayed:
            self.propose(*proposal)
        if not again:
            self.delayed.clear()

    def stop(self, n: int) -> None:
        job = self.running(n)
        if job is not None and n == 0:
            assert self.one(commands.encode_job_stop(job.number)) == Done(True)
            job.ended = True

    def propose(self, job: Bulk, encoded: bytes, ids: list[int], expected: Any, cursor: Any) -> None:
        at = self.world.ledger.jobs[job.number].cursor
        assert self.published_at is not None
        result = self.one(encoded)
        if job.ended or at != expected:
            assert isinstance(result, Refused)
            assert result.code == "stale"
            return
        assert result == Done()
        by_id = {m.id: m for m in self.messages}
        # Of several letters with one key the first comes, in the order of entries.
        for message_id in ids:
            self.expect(job, by_id[message_id])
        kept = self.world.ledger.jobs[job.number]
        assert {name: getattr(kept, name) for name in job.counts} == job.counts
        assert kept.refused == job.refused
        if cursor == LAST:
            job.ended = True
            left = {m for m in job.owed - job.changed if self.still(job, by_id[m])}
            assert not left, "the job ended without them"

    def still(self, job: Bulk, m: Message) -> bool:
        """Whether the job should have changed the message, had it met it."""
        if job.spec.action in ON_DEAD:
            return m.state == "dead" and not job.refused
        if m.phase(self.now) not in ("scheduled", "ready"):
            return False
        if not self.selects(job, m):
            return False  # an earlier job, for which this one waited, gave the message another time
        # What is due stays where it is if it is to be due now.
        return job.spec.action == "cancel" or m.due > self.now or self.wanted(job, m) > self.now

    def wanted(self, job: Bulk, m: Message) -> int:
        return m.due + job.spec.shift_ms if job.spec.shift_ms is not None else job.began + (job.spec.delay_ms or 0)

    def expect(self, job: Bulk, m: Message) -> None:
        phase, means = m.phase(self.now), self.generation_of(m) < job.generation
        on_dead = job.spec.action in ON_DEAD
        if phase in ("acked", "cancelled", "expired", "gone") or (phase == "dead" and not on_dead):
            job.counts["settled"] += 1
        elif on_dead and phase == "dead" and means:
            self.revived_or_deleted(job, m)
        elif on_dead or not means:
            job.counts["moved"] += 1
        elif phase == "leased":
            job.counts["leased"] += 1
        else:
            assert m.id not in job.changed, "the job met a message twice"
            job.changed.add(m.id)
            job.counts["done"] += 1
            self.change(job, m)

    def revived_or_deleted(self, job: Bulk, m: Message) -> None:
        assert self.deaths[m.id] <= job.began
        if job.spec.action == "delete_dead":
            m.state = "gone"
        elif not self.revive(m):
            job.refused += 1
            return
        assert m.id not in job.changed
        job.changed.add(m.id)
        job.counts["done"] += 1

    def change(self, job: Bulk, m: Message) -> None:
        assert self.selects(job, m), "the job changed a message that it does not mean"
        if job.spec.action == "cancel":
            m.state = "cancelled"
            return
        due = self.wanted(job, m)
        if (m.due > self.now or due > self.now) and due != m.due:
            m.due = max(due, self.now)
            m.expiry = m.due + m.ttl if m.ttl else NEVER
            self.generations[m.id] = job.generation


def act(bulks: Bulks, rng: random.Random) -> None:
    """One random deed. Weighted: messages have to be there, and jobs have to meet them half-way."""
    numbers = [rng.randrange(10) for _ in range(rng.randint(1, 3))]
    name = rng.choice(TOPICS)
    deeds: dict[Any, int] = {
        lambda: bulks.publish(
            name=name, delay=rng.choice([0, 500, 3_000, 60_000, HOUR_MS, 2 * HOUR_MS]),
            ttl=rng.choice([0, 0, 0, 1_500]), key=rng.choice([None, None, *KEYS]), mode=rng.randrange(3), max_wait=0,
        ): 50,
        lambda: bulks.clock(step=rng.choice([1, 400, 1_000, 5_000])): 6,
        lambda: bulks.next_hour(): 1,
        lambda: bulks.crash(): 1,
        lambda: bulks.configure(name=name, config=rng.choice([{"max_attempts": 1}, *CONFIGS[:4]])): 3,
        lambda: bulks.cancel(numbers=numbers, by_key=False): 4,
        lambda: bulks.reschedule(numbers=numbers, by_key=False, delay=rng.choice([0, 700, HOUR_MS])): 10,
        lambda: bulks.grant(numbers=numbers, lease_ms=rng.choice([500, 10_000])): 12,
        lambda: bulks.ack(numbers=numbers[:1]): 4,
        lambda: bulks.nack(numbers=numbers, delay=rng.choice([-1, 0, 2_000]), reason=""): 10,
        lambda: bulks.expire(): 3,
        lambda: bulks.ttl(limit=100): 1,
        lambda: bulks.redrive(numbers=numbers, name=name): 1,
        lambda: bulks.purge(name=name, states=rng.choice([1, 2, 3, 4])): 1,
        lambda: bulks.carry(back=rng.randint(1, 3), limit=rng.choice([1, 1_000])): 2,
        lambda: bulks.begin(
            name=rng.choice([*TOPICS, "*"]), action=rng.choice(["cancel", *["reschedule"] * 4, "redrive", "redrive"]),
            shift=rng.choice(SHIFTS), delay=rng.choice([None, None, 0, 5_000]),
            since=rng.choice(BOUNDS), until=rng.choice((*BOUNDS, -HOUR_MS, -HOUR_MS)),
        ): 4,
        lambda: bulks.begin(name="*", action="delete_dead", shift=0, delay=None): 1,
        lambda: bulks.step(n=rng.randrange(4), size=rng.randint(1, 4), late=rng.random() < 0.6): 24,
        lambda: bulks.propose_late(again=rng.random() < 0.3): 4,
        lambda: bulks.stop(n=rng.randrange(4)): 1,
    }  # fmt: skip
    rng.choices(list(deeds), list(deeds.values()))[0]()


def test_jobs_change_each_message_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulkscan, "SLICE", 3)
    counts: Counter[str] = Counter()
    for seed in SEEDS:
        rng, bulks = random.Random(seed), Bulks()
        for n in range(300):
            act(bulks, rng)
            if n % 3 == 0:
                bulks.same()
        bulks.propose_late(again=False)
        bulks.replicas_are_equal()
        for _ in range(500):
            if bulks.running(0) is None:
                break
            bulks.step(n=rng.randrange(4), size=4, late=False)
            bulks.same()
        assert bulks.running(0) is None, f"seed {seed}: a job does not end"
        ledgercheck.check(bulks.world.ledger)
        for job in bulks.jobs:
            counts.update({f"{job.spec.action} {name}": count for name, count in job.counts.items()})
    met = {f"{action} {name}" for action in ("cancel", "reschedule") for name in ("done", "leased", "settled", "moved")}
    assert met | {"redrive done", "delete_dead done"} <= {name for name, count in counts.items() if count}, counts
    assert counts["reschedule done"] > 5 * len(SEEDS)
