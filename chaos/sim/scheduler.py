"""Owner of schedules in the simulated world: sets, changes, pauses, triggers, backfills and deletes schedules, and
consumes their messages."""

import random
from typing import Any

from msgspec.structs import replace

from chaos.sim.cluster import SimCluster
from chaos.sim.door import Client, Request
from chaos.sim.timetable import DAILY, occurrences
from chaos.sim.workload import HOUR_S
from hadelay.api.service import Actor, ReceiveRequest
from hadelay.codec.meta import Meta, pack
from hadelay.codec.schedules import Overlap, Spec, template_meta
from hadelay.errors import HadelayError
from hadelay.model import Draft, decode_id
from hadelay.server.service.node import NodeService

TOPIC = "timed"
#: `PATIENT`: topic of the schedule with the overlap policy `wait`. `_WAITING`: share of runs in commit mode that have
#: this schedule.
PATIENT, _WAITING = "patient", 0.3
#: Message group that a specification may give to the schedule's messages.
GROUP = "own"
#: Share of runs with schedules.
SCHEDULED = 0.5
#: In runs with all kinds of bounds: `_BOUND`: share of specifications that have a bound, for each kind of bound;
#: `_LISTED`: share of specifications that list their times.
_BOUND, _LISTED = 0.4, 0.25
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


def _bounded(rng: random.Random, spec: Spec, now_ms: int) -> Spec:
    """Add bounds, jitter and a message group to a specification, or list its times, each in some cases."""
    bounds: dict[str, Any] = {
        "start_ms": now_ms + rng.choice((-5_300, 1_700, 3_100)),
        "end_ms": now_ms + rng.choice((3_000, 9_000, 40 * HOUR_S * 1000)),
        "max_occurrences": rng.choice((1, 4, 8)),
        "jitter_ms": rng.choice((1, 400, 900)),
        "group": GROUP,
    }
    chosen = {name: value for name, value in bounds.items() if rng.random() < _BOUND}
    # The overlap policy `wait` needs a message group that belongs to this schedule alone.
    if "group" in chosen and Overlap(spec.overlap) is Overlap.WAIT:
        chosen["overlap"] = Overlap.ALLOW.value
    if rng.random() < _LISTED:
        near = rng.sample(range(now_ms - 3_000, now_ms + 12_000, 1_000), 5)
        chosen |= {"cron": None, "every_ms": None, "at": [*sorted(near), now_ms + 3 * HOUR_S * 1000]}
    return replace(spec, **chosen)


class ScheduleOwner(Client):
    """Owner of schedules and consumer of their messages. In the drain (`good`: the end of the run, without faults),
    receives messages and changes no schedule."""

    cluster: SimCluster

    topic = TOPIC
    names: tuple[str, ...] = _NAMES

    def start(self) -> None:
        #: Idempotency-Key of each trigger and backfill that was answered → ids of its messages.
        self.ran: dict[bytes, list[int]] = {}
        self.stopped = self._rests()
        if not self.stopped:
            self._begin()

    def _rests(self) -> bool:
        return random.Random(f"{self.cluster.seed} schedules").random() >= SCHEDULED

    def _begin(self) -> None:
        for name in self.names:
            self._put(name)
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
        acts = ("put", "pause", "resume", "delete", "trigger", "backfill")
        act = rng.choices(acts, (6, 1, 2, 1, 2, 4 * self.cluster.full))[0]
        key = f"{self.name}.{self.acts}".encode()
        if act == "put":
            self._put(name)
        elif act == "delete":
            self._order(act, name, lambda service: service.schedules.delete(name, Actor()))
        elif act == "trigger":
            self._run(name, key, None, self.world.now)
        elif act == "backfill":
            to_ms = self.world.wall_ms() + rng.choice((-3_000, -200, 400))
            self._run(name, key, (to_ms - rng.choice((600, 5_000, 20_000)), to_ms), self.world.now)
        else:
            self._order(act, name, lambda service: service.schedules.pause(name, act == "pause", Actor()))

    def _put(self, name: str) -> None:
        spec = self.random.choice(_SPECS[name])
        if self.cluster.full:
            spec = _bounded(self.random, spec, self.world.wall_ms())
        body = b"%d" % self.random.randrange(2)
        draft = Draft(self.topic, 0, True, 0, 0, template_meta(pack(Meta(sch=name, group=spec.group))), body)

        def put(service: NodeService) -> Any:
            return service.schedules.put(name, spec, draft, Actor(), version=None, paused=None)

        self._order("put", name, put)

    def _order(self, act: str, name: str, request: Request) -> None:
        def replied(result: Any, error: HadelayError | None) -> None:
            self.note(f"{act} of schedule {name}: {error.type if error is not None else 'done'}")
            self.history.count(f"schedule {act}", error is None)
            if error is not None and act == "put" and name not in self.cluster.timetable.known and not self.good:
                self.world.after(0.3, self._put, name)  # try again: no leader is known yet, for example

        self.ask(request, replied)

    def _run(self, name: str, key: bytes, span: tuple[int, int] | None, begun: float) -> None:
        """Trigger a schedule, or backfill the times in `span` (Unix ms, without the end). Repeat the request with the
        same key while its outcome is unknown, and at times although it is known, until the key may be forgotten."""
        act, timetable = "trigger" if span is None else "backfill", self.cluster.timetable
        # A repetition gets the answer of the first try, perhaps from an earlier version of the schedule.
        before = timetable.version_of(name) if self.world.now == begun else None

        async def run(service: NodeService) -> list[int]:
            if span is None:
                made = [await service.schedules.trigger(name, key, Actor())]
            else:
                made = (await service.schedules.backfill(name, *span, key, Actor())).results
            return [decode_id(one.id) for one in made]

        def replied(ids: list[int], error: HadelayError | None) -> None:
            said = error.type if error is not None else " ".join(f"{i:x}" for i in ids)
            self.note(f"{act} of schedule {name}: {said}", *ids or ())
            self.history.count(f"schedule {act}", error is None)
            known = self.world.now - begun < 0.9 * self.cluster.window_ms / 1000
            # A first try without occurrences is not compared: its key is not stored, so a repetition is a new request.
            if error is None and known and (ids or key in self.ran):
                first = self.ran.setdefault(key, ids)
                text = f"a {act} of {name} made {first}, and its repetition {ids}"
                self.cluster.decide("S1 schedules, triggers", ids != first, text)
            if error is None and span is not None and before is not None and before == timetable.version_of(name):
                wanted = list(occurrences(before[1].spec, span[0] - 1, span[1] - 1))
                found = [timetable.made.get(i) for i in ids]
                text = f"a backfill of {name} from {span[0]} to {span[1]} made {found}, not {wanted}"
                self.cluster.decide("S2 schedules, counts", found != wanted, text, *ids)
            again = self.random.random() < 0.7 if error is None else not error.outcome_known
            if not self.stopped and known and again:
                self._run(name, key, span, begun)

        self.ask(run, replied)

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
        """Limit the topic's message groups, repeating the request until the cluster accepts it; then create the
        schedule."""

        def replied(result: Any, error: HadelayError | None) -> None:
            if error is None:
                super(PatientOwner, self)._begin()
            elif not self.stopped:
                self.world.after(0.2, self._begin)

        config = {"group_concurrency": 1, "max_attempts": 60_000}
        self.ask(lambda service: service.topics.put_topic(self.topic, config, Actor()), replied)
