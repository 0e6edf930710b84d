"""Client that begins and stops bulk jobs, each of which changes many messages: most often of the topic with a limit of
attempts. It also makes the leader propose steps of jobs again, as after a proposal with an unknown outcome."""

import random
from typing import Any

from msgspec.structs import replace

from chaos.sim.cluster import SimCluster
from chaos.sim.door import Client
from chaos.sim.fanout import RED_QUEUE
from chaos.sim.fanout import TOPIC as EVENTS
from chaos.sim.history import Order
from chaos.sim.scheduler import GROUP, PATIENT, PatientOwner, ScheduleOwner
from chaos.sim.scheduler import TOPIC as TIMED
from hadelay.api.service import Actor
from hadelay.codec.jobcommands import JobSpec
from hadelay.errors import HadelayError
from hadelay.ledger.topics.topicchanges import DEAD
from hadelay.rights import covers
from hadelay.server.service.node import NodeService

#: Share of runs with bulk jobs: a message that a job may have changed is exempt from many checks.
SHARE = 0.4
#: Changes of due times by bulk jobs, in ms: small, so that messages fall due within the run.
_CHANGES: tuple[dict[str, Any], ...] = (
    {"shift_ms": -500}, {"shift_ms": 300}, {"shift_ms": 900}, {"shift_ms": 1_400}, {"delay_ms": 400},
)  # fmt: skip
#: Errors of dead letters, by which jobs may filter: from a consumer, from the webhook receiver, from a nack without a
#: reason, and from a lease that ended.
_ERRORS = ("cannot be done", "HTTP 500", "nacked", "lease expired")
#: Kind of a job → topics, besides those of the workload, whose messages the job may change. No job cancels messages in
#: these topics: the checks of schedules and subscriptions expect that these messages are handed out.
_ELSEWHERE = {"job move": (TIMED, PATIENT, f"{EVENTS}*"), "redrive": (RED_QUEUE,)}


class BulkClient(Client):
    """Client that begins and stops bulk jobs, in some of the runs. It sends no requests later than one second after the
    end of the faults."""

    cluster: SimCluster

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
                kind, spec = self._drawn()
                self._begin(kind, self._filtered(kind, spec) if self.cluster.full else spec)
        self._next()

    def _repeat(self) -> None:
        """Let the leader propose a step of a bulk job that was already applied, as after a proposal with an unknown
        outcome."""
        leader, steps = self.cluster.leader(), self.cluster.job_steps[-3:]
        if leader is not None and steps:
            leader.group_commit.propose_as_leader(self.random.choice(steps), lambda result, error: None)

    async def _stop(self, service: NodeService) -> None:
        for job in (await service.jobs.list_jobs(stale=False))[-1:]:
            if job.action != "fill":  # never stop a fill: check F1 could not tell which copies are missing
                await service.jobs.stop(job.id, Actor())

    def _drawn(self) -> tuple[str, JobSpec]:
        """Draw a bulk job to begin: (kind of the Order to record, specification of the job)."""
        rng, tags = self.random, self.cluster.workload.tags
        some: tuple[str, ...] = rng.choice(((), (), (rng.choice(tags),)))
        rate = rng.choice((None, 4.0, 8.0))  # limit of messages per second: a step then has one or two messages
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

    def _filtered(self, kind: str, spec: JobSpec) -> JobSpec:
        """Replace the filter of a job's specification by one or two other filters, and its topic in some cases."""
        rng, history, workload = self.random, self.history, self.cluster.workload
        others = (workload.in_order,) if kind.startswith("job ") else ()
        topic = rng.choice((spec.topic, spec.topic, *others, *2 * _ELSEWHERE.get(kind, ())))
        at_ms = self.world.wall_ms() + rng.choice((-1_500, 0, 700))
        filters: dict[str, Any] = {"from_ms": at_ms, "to_ms": at_ms + rng.choice((500, 2_000, 20_000))}
        if due := [m.deliver_at_ms for m in history.messages[-20:] if m.deliver_at_ms and m.topic == topic]:
            filters["to_ms"] = rng.choice(due)  # the end of a job's time range is exclusive
            filters["from_ms"] = min(at_ms, filters["to_ms"] - 1)
        if topic in (TIMED, PATIENT):
            names = PatientOwner.names if topic == PATIENT else ScheduleOwner.names
            names = tuple(name for name in names if name in self.cluster.timetable.known) or names
            filters |= {"schedule": rng.choice(names), "group": GROUP}
        else:
            ids = [m.id for m in history.messages[-40:] if m.id]
            ids += [sent.id + rng.randrange(3) for sent in history.fanned_out[-10:] if sent.id]
            filters |= {
                "tags": (rng.choice(workload.tags),),
                "key_prefix": rng.choice(("c", "c", "c1")),
                "group": rng.choice(workload.groups),
                "ids": tuple(i for i in ids if rng.random() < 0.5) or (1,),
            }
        if kind in ("redrive", "purge"):
            filters["error"] = rng.choice(_ERRORS)
        if spec.action == "reschedule" and rng.random() < 0.2:
            spec = replace(spec, shift_ms=None, delay_ms=None, at_ms=at_ms + 1_000)
        chosen = rng.sample(sorted(filters), rng.choice((1, 1, 2)))
        if rng.random() < 0.5:  # in half of the cases, prefer two filters that only few kinds of jobs have
            chosen = sorted(filters.keys() & {"schedule", "error"}) or chosen
        return replace(spec, topic=topic, **{"tags": (), **{name: filters[name] for name in chosen}})

    def _begin(self, kind: str, spec: JobSpec) -> None:
        topic = self.topic if covers(spec.topic, self.topic) else spec.topic
        order = Order(kind, topic, self.world.now, DEAD if kind == "purge" else 0)
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
