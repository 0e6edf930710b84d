"""Client that begins and stops bulk jobs, each of which changes many messages of the topic with a limit of attempts. It
also makes the leader propose steps of jobs again, as after a proposal with an unknown outcome."""

import random
from typing import Any

from chaos.sim.door import Client
from chaos.sim.history import Order
from hadelay.api.service import Actor
from hadelay.codec.jobcommands import JobSpec
from hadelay.errors import HadelayError
from hadelay.ledger.topicchanges import DEAD
from hadelay.server.service.node import NodeService

#: Share of runs with bulk jobs: a message that a job may have changed is exempt from many checks.
SHARE = 0.25
#: Changes of due times, in ms. Small, so that messages fall due within the run.
_CHANGES: tuple[dict[str, Any], ...] = (
    {"shift_ms": -500}, {"shift_ms": 300}, {"shift_ms": 900}, {"shift_ms": 1_400}, {"delay_ms": 400},
)  # fmt: skip


class BulkClient(Client):
    """Client that begins and stops bulk jobs, in half of all runs. It sends no requests later than one second after the
    end of the faults."""

    def start(self) -> None:
        self.ends = float("inf")
        self.topic = self.cluster.workload.limited
        if random.Random(f"{self.cluster.seed} jobs").random() < SHARE:
            self._next()

    def _next(self) -> None:
        self.world.after(self.random.expovariate(1 / 0.3), self._act)

    def _act(self) -> None:
        self.ends = min(self.ends, self.world.now + 1.0) if self.good else self.ends
        if self.stopped or self.world.now > self.ends:
            return
        part = self.next_act()
        rng = self.random
        if self.cluster.parts.take(part):
            self.world.after(0.3 * rng.random(), self._repeat)
            if rng.random() < 0.08:
                self.ask(self._stop, lambda result, error: self.history.count("job stopped", error is None))
            else:
                self._begin(*self._drawn())
        self._next()

    def _repeat(self) -> None:
        """Let the leader propose a step of a bulk job that was already applied."""
        leader, steps = self.cluster.leader(), self.cluster.job_steps[-3:]
        if leader is not None and steps:
            leader.leadership.propose(self.random.choice(steps), lambda result, error: None)

    async def _stop(self, service: NodeService) -> None:
        for job in (await service.jobs.list_jobs(stale=False))[-1:]:
            if job.action != "fill":  # of a stopped fill, check F1 would not know which copies are missing
                await service.jobs.stop(job.id, Actor())

    def _drawn(self) -> tuple[str, JobSpec]:
        """Draw a bulk job to begin: (kind of the Order to record, specification of the job)."""
        rng, tags = self.random, self.cluster.workload.tags
        some: tuple[str, ...] = rng.choice(((), (), (rng.choice(tags),)))
        rate = rng.choice((None, 4.0, 8.0))  # messages per second; each step of the job then has one or two messages
        chance = rng.random()
        if chance < 0.15:
            return "job cancel", JobSpec("cancel", self.topic, (rng.choice(tags),), rate=rate)
        if chance < 0.21:
            return "purge", JobSpec("delete_dead", self.topic, some, rate=rate)
        if chance < 0.3:
            return "redrive", JobSpec("redrive", f"*{self.topic[1:]}", some, rate=rate)
        if chance < 0.4:
            return "job move", JobSpec("deliver_now", self.topic, some, rate=rate)
        return "job move", JobSpec("reschedule", f"{self.topic[:-1]}*", some, rate=rate, **rng.choice(_CHANGES))

    def _begin(self, kind: str, spec: JobSpec) -> None:
        order = Order(kind, self.topic, self.world.now, DEAD if kind == "purge" else 0)
        self.history.orders.append(order)
        request_id = f"{self.name}.{self.acts}"

        def replied(job: Any, error: HadelayError | None) -> None:
            self.note(f"job {spec}: {error.type if error is not None else job.id}")
            self.history.count(f"job {error.type if error is not None else 'begun'}")
            if error is None:
                order.answered = self.world.now
            elif not error.outcome_known and not self.stopped:
                # Repeat the request with the same request_id, which begins no second job.
                self.ask(lambda service: service.jobs.begin(spec, request_id, Actor()), replied)

        self.ask(lambda service: service.jobs.begin(spec, request_id, Actor()), replied)
