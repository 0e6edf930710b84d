"""A node that restarts applies the newest commands as one that does not: what a ledger has in memory besides its
checkpoint, such as how far a search has come, may change what a command costs and nothing else."""

from __future__ import annotations

import random
from typing import Any

import pytest

from hadelay.codec import commands, schedules
from hadelay.codec.commandtypes import Grant, Job
from hadelay.codec.jobcommands import FillBegin, JobBegin, JobSpec
from hadelay.codec.meta import Meta, pack
from hadelay.codec.publishcommand import encode_publish, hash_group
from hadelay.codec.results import FireOutcome
from hadelay.codec.schedules import ANY_VERSION, Spec, Stored
from hadelay.ledger import checkpoint
from hadelay.ledger.apply import apply_entry
from hadelay.ledger.jobs.bulk import queued
from hadelay.ledger.jobs.bulkscan import JobScan
from hadelay.ledger.schedules import schedules as ledger_schedules
from hadelay.model import DEAD_HOURS, HOUR_MS, KEEP, REPLACE, Draft, pack_id
from hadelay.timing import plan
from tests.ledger.world import START_MS, World
from tests.scale import size

SECOND, MINUTE = 1_000, 60_000
TOPICS = ["orders", "orders~a", "orders~b", "failed"]


class Driver:
    """Gives a world random commands of schedules, groups, subscriptions, jobs and keys."""

    def __init__(self, seed: int) -> None:
        self.random, self.world, self.seq = random.Random(seed), World(), 0
        self.world.checking = 10
        self.ids: list[int] = []
        config = {"group_concurrency": 1, "max_attempts": 2, "dead_retention_ms": HOUR_MS, "on_failure": "failed"}
        self.world.one(commands.encode_topic_put("orders", config))

    def publish(self) -> None:
        rng, drafts = self.random, []
        for _ in range(rng.randint(1, 4)):
            key, group, ttl_ms = rng.choice((None, "k")), rng.choice((None, "1", "2")), rng.choice((0, 0, MINUTE // 2))
            unique_ms = rng.choice((0, MINUTE)) if key else 0
            draft = Draft(
                "orders", rng.choice((0, 0, SECOND, MINUTE, HOUR_MS)), True, 0, ttl_ms,
                pack(Meta(key=key, ttl=ttl_ms, group=group)), b"x", key=None if key is None else key.encode(),
                on_conflict=KEEP if unique_ms else rng.choice((KEEP, REPLACE)), unique_ms=unique_ms,
                group=None if group is None else hash_group(group),
            )  # fmt: skip
            drafts.append(draft)
        self.ids += [i for i in self.world.one(commands.encode_publish("n1", drafts)).ids.tolist() if i]

    def settle(self) -> None:
        """Lease what may be leased of some messages, and end most of the leases."""
        rng, world = self.random, self.world
        places = [world.place(i) for i in rng.sample(self.ids[-30:], min(len(self.ids), 6))]
        if not places:
            return
        self.seq += 1
        hours, indexes = ([place[n] for place in places] for n in (0, 1))
        lease_ms = rng.choice((SECOND, HOUR_MS))
        result = world.one(commands.encode_grant(Grant(1, self.seq, lease_ms, "c", b"", "n1", hours, indexes)))  # type: ignore[arg-type]
        if result.granted.any():
            rows = world.leased(1, self.seq)
            world.ack(rows[::2])
            world.nack(rows[1::3], rng.choice((-1, SECOND, HOUR_MS, commands.DEAD_NOW)))

    def change(self) -> None:
        rng, some = self.random, self.random.sample(self.ids[-20:], min(len(self.ids), 2))
        delay_ms = rng.choice((0, SECOND, 2 * HOUR_MS))
        self.world.one(
            rng.choice((
                commands.encode_cancel("n1", some), commands.encode_reschedule("n1", delay_ms, True, some),
                commands.encode_expire(list(self.world.ledger.grants)), commands.encode_redrive("n1", "orders", some),
                commands.encode_purge(rng.choice(TOPICS), rng.choice((1, 2, 3, 4))),
            ))
        )  # fmt: skip

    def subscribe(self) -> None:
        name = self.random.choice("ab")
        if self.random.random() < 0.3:
            self.world.one(commands.encode_topic_delete(f"orders~{name}", True))
        config = {"ttl_ms": self.random.choice((None, 20 * SECOND)), "group_concurrency": 1, "max_attempts": 2}
        self.world.one(commands.encode_subscription_fill(FillBegin("n1", "", "orders", name, config)))

    def begin(self) -> None:
        action, topic = (
            self.random.choice(("cancel", "reschedule", "redrive", "delete_dead")),
            self.random.choice(TOPICS),
        )
        spec = JobSpec(action, topic, shift_ms=HOUR_MS if action == "reschedule" else None)  # type: ignore[arg-type]
        self.world.one(commands.encode_job_begin(JobBegin("n1", "", b"", [topic], spec)))

    def step(self) -> None:
        ledger = self.world.ledger
        for job in [job for job in ledger.jobs.values() if not job.ended_ms and not queued(ledger, job)]:
            scan = JobScan(ledger, job.spec, job.topics, job.began_ms, job.cursor)
            hour, rows = scan.step(ledger.now_ms)
            most = self.random.randint(1, 5)
            cursor = scan.cursor if len(rows) <= most else (hour, int(rows["index"][most]))
            fills = job.spec.action == "fill"
            ids = [pack_id(0, hour, n) for n in rows["index"].tolist()] if fills else rows["first_id"].tolist()
            self.world.one(commands.encode_job_step(job.number, job.cursor, cursor, ids[:most]))

    def schedule(self) -> None:
        rng, group = self.random, self.random.choice((None, "1"))
        spec = Spec(
            "orders", every_ms=10 * SECOND, jitter_ms=rng.choice((0, 900)), overlap=rng.choice((0, 1, 2)), group=group,
            max_occurrences=rng.choice((None, 3)),
        )  # fmt: skip
        meta = schedules.template_meta(pack(Meta(sch="s", group=group)))
        template = encode_publish("n1", [Draft("orders", 0, True, 0, 0, meta, rng.choice((b"1", b"2")))])
        paused = rng.choice((schedules.KEEP_PAUSE, schedules.PAUSE, schedules.RUN))
        self.world.one(schedules.encode_put("s", ANY_VERSION, paused, Stored("", spec, template)))
        self.world.one(schedules.encode_run("s", ANY_VERSION, [(0, 0)], rng.choice((None, b"k"))))

    def fire(self) -> None:
        found = ledger_schedules.find(self.world.ledger, "s")
        if found is None or found.state.flags:
            return
        ahead_ms = 100 if found.stored.spec.overlap else MINUTE
        firing = plan.fire("s", found.stored.spec, found.state, START_MS + self.world.now, ahead_ms)
        if firing is not None:
            assert self.world.one(schedules.encode_fire([firing])).outcomes.tolist() == [FireOutcome.DONE]

    def advance(self) -> None:
        world = self.world
        world.now += self.random.choice((SECOND, MINUTE, 20 * MINUTE, 2 * HOUR_MS))
        for job in (Job.SWEEP, Job.TTL_EXPIRE):
            world.maintain(job, limit=self.random.choice((None, 2)))
        for hour in world.store.hours():
            world.maintain(Job.DROP_DEAD if hour >= DEAD_HOURS else Job.ROLL_FORWARD, hour)
            world.maintain(Job.RETIRE, hour)


@pytest.mark.parametrize("seed", range(size(5, 15)))
def test_random_commands(seed: int) -> None:
    driver = Driver(seed)
    steps = [
        *[driver.publish] * 5, *[driver.settle] * 4, *[driver.change] * 3, driver.subscribe, driver.begin,
        *[driver.step] * 3, driver.schedule, *[driver.fire] * 2, *[driver.advance] * 3,
    ]  # fmt: skip
    for _ in range(120):
        driver.random.choice(steps)()
    others = [applied(driver.world.entries, every) for every in (1 << 30, 2)]
    assert others[0] == others[1]


def applied(entries: list[bytes], every: int) -> list[Any]:
    """Results, state, tables and files of a node that applied these entries, and restarted after each so many."""
    world, results = World(), []
    world.checking = 0
    for number, entry in enumerate(entries, 1):
        results.append([repr(result) for result in apply_entry(world.ledger, number, 1, entry)])
        if number % every == 0:
            world.restart()
    return [results, checkpoint.dump(world.ledger), world.tables.rows, world.store.bytes_of()]
