"""Owner of schedules in the simulated world: sets, changes, pauses, triggers and deletes schedules, and consumes their
messages."""

import random
from typing import Any

from chaos.sim.door import Client, Request
from chaos.sim.timetable import DAILY
from hadelay.api.service import Actor, ReceiveRequest
from hadelay.codec.meta import Meta, pack
from hadelay.codec.schedules import Spec, template_meta
from hadelay.errors import HadelayError
from hadelay.model import Draft
from hadelay.server.service.node import NodeService

TOPIC = "timed"
#: Topic of the schedule whose messages wait for each other, and share of runs in commit mode with it.
PATIENT, _WAITING = "patient", 0.3
#: Share of runs with schedules.
SCHEDULED = 0.5
_NAMES = ("tick", "calm", "daily")
#: Name of a schedule → specifications that it may have.
_SPECS: dict[str, tuple[Spec, ...]] = {
    "tick": (
        Spec(TOPIC, every_ms=1_000, catch_up=2),
        Spec(TOPIC, every_ms=1_500, catch_up=1),
        Spec(TOPIC, every_ms=3_000),
    ),
    "calm": (Spec(TOPIC, every_ms=1_000, overlap=1), Spec(TOPIC, every_ms=2_000, overlap=1, catch_up=1)),
    "daily": (
        Spec(TOPIC, cron=DAILY, timezone="Europe/Vienna", catch_up=2),
        Spec(TOPIC, cron=DAILY, timezone="Europe/Vienna"),
    ),
    "patient": (
        Spec(PATIENT, every_ms=1_000, overlap=2, group="schedule.patient"),
        Spec(PATIENT, every_ms=1_500, overlap=2, group="schedule.patient", catch_up=2),
    ),
}


class ScheduleOwner(Client):
    """Owner of schedules and consumer of their messages. In the drain (`good`: the end of the run, without faults),
    receives messages and changes no schedule."""

    topic = TOPIC
    names: tuple[str, ...] = _NAMES

    def start(self) -> None:
        #: Idempotency-Key of each trigger that was answered → id of its message.
        self.triggered: dict[bytes, str] = {}
        self.stopped = self._rests()
        if not self.stopped:
            self._begin()

    def _rests(self) -> bool:
        return random.Random(f"{self.cluster.seed} schedules").random() >= SCHEDULED

    def _begin(self) -> None:
        for name in self.names:
            self._put(name, self.random.choice(_SPECS[name]))
        self._next()

    def _next(self) -> None:
        self.world.after(0.4 if self.good else self.random.expovariate(1 / 0.6), self._act)

    def _act(self) -> None:
        if self.stopped:
            return
        part = self.next_act()
        rng = self.random
        if self.good or rng.random() < 0.4:
            self._take()
        elif self.cluster.parts.take(part):
            self._change(rng)
        self._next()

    def _change(self, rng: random.Random) -> None:
        name = rng.choice(self.names)
        act = rng.choices(("put", "pause", "resume", "delete", "trigger"), (6, 1, 2, 1, 2))[0]
        if act == "put":
            self._put(name, rng.choice(_SPECS[name]))
        elif act == "delete":
            self._order(act, name, lambda service: service.schedules.delete(name, Actor()))
        elif act == "trigger":
            self._trigger(name, f"{self.name}.{self.acts}".encode())
        else:
            self._order(act, name, lambda service: service.schedules.pause(name, act == "pause", Actor()))

    def _put(self, name: str, spec: Spec) -> None:
        body = b"%d" % self.random.randrange(2)
        draft = Draft(self.topic, 0, True, 0, 0, template_meta(pack(Meta(sch=name, group=spec.group))), body)

        def put(service: NodeService) -> Any:
            return service.schedules.put(name, spec, draft, Actor(), version=None, paused=None)

        self._order("put", name, put)

    def _order(self, act: str, name: str, request: Request) -> None:
        def replied(result: Any, error: HadelayError | None) -> None:
            self.note(f"{act} of schedule {name}: {error.type if error is not None else 'done'}")
            self.history.count(f"schedule {act}", error is None)

        self.ask(request, replied)

    def _trigger(self, name: str, key: bytes) -> None:
        """Trigger a schedule, and repeat the request with the same key while its outcome is unknown, and at times
        although it is known."""

        def replied(made: Any, error: HadelayError | None) -> None:
            self.note(f"trigger of schedule {name}: {error.type if error is not None else made.id}")
            self.history.count("schedule trigger", error is None)
            if error is None:
                first = self.triggered.setdefault(key, made.id)
                text = f"a trigger of {name} made {first}, and its repetition {made.id}"
                self.cluster.decide("S1 schedules, triggers", made.id != first, text)
            if not self.stopped and (self.random.random() < 0.7 if error is None else not error.outcome_known):
                self._trigger(name, key)

        self.ask(lambda service: service.schedules.trigger(name, key, Actor()), replied)

    def _take(self) -> None:
        request = b"%d" % int(self.world.now * 1000)
        poll = ReceiveRequest([self.topic], self.name, request, 10, 0, 900)
        every = self.good or self.random.random() < 0.7

        async def take(service: NodeService) -> int:
            if not (await service.cluster.find_leader()).here:
                return 0
            handed = await service.consume.receive(poll)
            handed.answered()
            if handed.messages and every:
                await service.consume.settle("ack", [message.lease for message in handed.messages], None)
            return len(handed.messages)

        def replied(result: int | None, error: HadelayError | None) -> None:
            self.history.count("occurrences taken", result or 0)

        self.ask(take, replied)


class PatientOwner(ScheduleOwner):
    """Owner of a schedule with the overlap policy `wait`, in a topic with a limit per message group."""

    topic = PATIENT
    names = ("patient",)

    def _rests(self) -> bool:
        chance = random.Random(f"{self.cluster.seed} patient").random()
        return self.cluster.sync != "commit" or chance >= _WAITING

    def _begin(self) -> None:
        """Limit the topic's groups, until the cluster accepts it; then begin."""

        def replied(result: Any, error: HadelayError | None) -> None:
            if error is None:
                super(PatientOwner, self)._begin()
            elif not self.stopped:
                self.world.after(0.2, self._begin)

        config = {"group_concurrency": 1, "max_attempts": 60_000}
        self.ask(lambda service: service.topics.put_topic(self.topic, config, Actor()), replied)
