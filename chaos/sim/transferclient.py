"""Client whose messages die and are routed to a topic for dead letters, and who lets bulk jobs transfer messages out of
this topic and others."""

import random
from typing import Any

from chaos.sim.cluster import SimCluster
from chaos.sim.door import Client
from chaos.sim.history import Parcel
from chaos.sim.transfers import DEPOT, EAST, LETTERS, PARCELS, RETURNS, TOPICS
from hadelay.api.service import Actor, PublishDone, ReceiveRequest, SettleKind, answered
from hadelay.codec.jobcommands import JobSpec
from hadelay.codec.meta import Meta, mask_of, pack
from hadelay.codec.publishcommand import hash_group
from hadelay.errors import Forbidden, HadelayError
from hadelay.model import KEEP, REPLACE, Draft, decode_id
from hadelay.rights import Rights
from hadelay.rules.access import RequestRights, need_begin
from hadelay.server.service.node import NodeService

#: Share of runs with such a client: its requests change what the other clients of the run meet.
USED = 0.15
#: Tags, groups and client keys of the messages.
_TAGS, _GROUPS, _KEYS = ("red", "blue"), ("a", "b"), (b"k1", b"k2")
#: Transfers that the client begins: (topic or pattern, target topic). Target "": the topic in which each message died.
_ROUTES = (
    (RETURNS, ""), (RETURNS, ""), (RETURNS, DEPOT), (PARCELS, DEPOT), (DEPOT, ""), (DEPOT, PARCELS), (EAST, DEPOT),
    (f"{LETTERS}*", PARCELS), (DEPOT, RETURNS),
)  # fmt: skip
#: Scopes of the tokens that begin transfers; the last two may not begin every transfer.
_SCOPES = (("admin",), ("admin",), ("admin:*", "publish:*"), (f"admin:{RETURNS}", f"publish:{DEPOT}"), ("publish",))


def used(seed: int) -> bool:
    """Whether the run of this seed has a TransferClient. A restored cluster (seed < 0) has one if the cluster before
    had one."""
    return random.Random(f"{abs(seed)} transfers").random() < USED


class TransferClient(Client):
    """Client that publishes, lets messages die, begins and stops transfers, and makes the leader propose their steps
    again. In the drain (`good`: the end of the run, without faults), it consumes what is left, and begins transfers for
    a second."""

    cluster: SimCluster

    def start(self) -> None:
        self.stopped = not used(self.cluster.seed)
        self.history.parcels = {}
        #: First bytes of the body of this client's messages, which tell them from those of the cluster before a
        #: restore.
        self.mark = b"%d parcel" % int(self.world.now * 1000)
        self.ends = float("inf")
        self.requests = 0
        rng = random.Random(f"{self.cluster.seed} transfers, topics")
        mortal = {"max_attempts": rng.choice((1, 1, 2)), "backoff": [50], "dead_letter": RETURNS}
        groups = {"group_concurrency": 1} if self.cluster.workload.group_concurrency else {}
        quota = rng.choice(({}, {}, {"max_messages": 4}))
        self._put([
            (PARCELS, mortal | groups), (LETTERS, {"ttl_ms": 20_000}), (EAST, mortal),
            (RETURNS, {"max_attempts": 3, "backoff": [100]} | groups), (DEPOT, mortal | groups | quota),
        ])  # fmt: skip

    def _put(self, configs: list[tuple[str, dict[str, Any]]]) -> None:
        """Create the topics one by one; repeat each request until the cluster accepts it."""

        def replied(result: Any, error: HadelayError | None) -> None:
            if error is not None:
                self.world.after(0.2, self._put, configs)
            elif configs[1:]:
                self._put(configs[1:])
            else:
                self._next()

        if not self.stopped:
            self.ask(lambda service: service.topics.put_topic(*configs[0], Actor()), replied)

    def _next(self) -> None:
        self.world.after(0.2 if self.good else self.random.expovariate(1 / 0.06), self._act)

    def _act(self) -> None:
        if self.stopped:
            return
        self.ends = min(self.ends, self.world.now + 1.0) if self.good else self.ends
        part, rng = self.next_act(), self.random
        chance, may_begin = rng.random(), self.world.now <= self.ends
        if self.good and not (may_begin and chance > 0.8):
            self._take(fails=False)
        elif self.cluster.parts.take(part):
            if chance < 0.25:
                self._publish()
            elif chance < 0.7:
                self._take(fails=chance < 0.6)
            elif chance < 0.75:
                self.ask(self._stop, lambda result, error: self.history.count("transfer stopped", bool(result)))
            else:
                self.world.after(0.3 * rng.random(), self._repeat)
                self._begin(self._drawn())
        self._next()

    def _publish(self) -> None:
        rng, drafts = self.random, list[Draft]()
        for _ in range(rng.choice((1, 2, 5))):
            topic = rng.choice((PARCELS, PARCELS, LETTERS, DEPOT))
            tags, ttl_ms = rng.choice(((), _TAGS[:1], _TAGS)), rng.choice((0, 0, 1_500, 6_000))
            group = (
                rng.choice((None, *_GROUPS)) if self.cluster.workload.group_concurrency and topic != LETTERS else None
            )
            key = rng.choice(_KEYS) if topic == PARCELS and rng.random() < 0.3 else None
            delay_ms = rng.choice((0, 0, 0, 400, 1_500, 7_200_000))
            meta = pack(Meta(tags=list(tags), ttl=ttl_ms, group=group, key=None if key is None else key.decode()))
            digest = None if group is None else hash_group(group)
            conflict = KEEP if key is None else REPLACE
            drafts.append(Draft(topic, delay_ms, True, mask_of(tags), ttl_ms, meta, self.mark, None, key, conflict,
                                group=digest))  # fmt: skip
        self.requests += 1
        idem = b"%s.%d" % (self.mark, self.requests)

        async def publish(service: NodeService) -> list[int]:
            def begin(done: PublishDone) -> None:
                service.publish(drafts, idem, done)

            receipts = await answered(begin)
            return [0 if n in receipts.problems else int(one) for n, one in enumerate(receipts.ids)]

        def replied(ids: list[int] | None, error: HadelayError | None) -> None:
            for draft, one in zip(drafts, ids or (), strict=False):
                # `letters` has a TTL of its own; its subscription has a copy of each message, with the next id.
                ttl_ms = 20_000 if draft.topic == LETTERS and not draft.ttl_ms else draft.ttl_ms
                for each in (one, one + 1) if draft.topic == LETTERS else (one,):
                    if one:
                        # Another message with the key may replace this one: a later one, or one whose publish got no
                        # answer.
                        replaced = draft.key is not None
                        self.history.parcels.setdefault(each, Parcel(each, ttl_ms, may_end=replaced))
                        self.history.count("parcels published")
            self.note(f"publish to {[draft.topic for draft in drafts]}: {error.type if error else ids}", *(ids or ()))

        self.ask(publish, replied)

    def _take(self, *, fails: bool) -> None:
        """Receive due messages of one of the topics, and ack them; or nack them, if `fails`."""
        topic = self.random.choice(TOPICS if self.good else (PARCELS, PARCELS, EAST, DEPOT, *TOPICS))
        dies = self.random.random() < 0.3
        self.requests += 1
        poll = ReceiveRequest([topic], self.name, b"%d" % self.requests, 10, 0, 900)
        asked, parcels = self.world.now, self.history.parcels

        async def taken(service: NodeService) -> list[tuple[int, str, str]]:
            if not (await service.cluster.find_leader()).here:
                return []
            handed = await service.consume.receive(poll)
            handed.answered()
            ids = [decode_id(message.id) for message in handed.messages]
            leases = [message.lease for message in handed.messages]
            for one in ids if not fails else ():
                parcels.setdefault(one, Parcel(one, 0)).may_end = True
            if not leases:
                return []
            kind: SettleKind = "nack" if fails else "ack"
            outcomes = await service.consume.settle(kind, leases, 50 if fails else None, dead=fails and dies)
            return list(zip(ids, [message.topic for message in handed.messages], outcomes, strict=True))

        def replied(found: list[tuple[int, str, str]] | None, error: HadelayError | None) -> None:
            for one, name, outcome in found or ():
                self.history.count("parcels taken")
                parcel = parcels.setdefault(one, Parcel(one, 0, may_end=True))  # the message's publish got no answer
                self.note(f"takes {one:x} from {name}: {outcome}", one)
                text = f"the parcel {one:x} is handed out in {name} after its ack"
                late = parcel.acked is not None and parcel.acked < asked
                self.history.decide("I5 resurrection", late, text, one)
                if outcome == "acked" and parcel.acked is None:
                    parcel.acked = self.world.now

        self.ask(taken, replied)

    def _drawn(self) -> JobSpec:
        rng = self.random
        topic, into = rng.choice(_ROUTES)
        filters: dict[str, Any] = {"tags": rng.choice(((), _TAGS[:1]))}
        if rng.random() < 0.2:
            ids = list(self.history.parcels)[-20:]
            filters = {"ids": tuple(one for one in ids if rng.random() < 0.5) or (1,)}
        elif rng.random() < 0.2:
            filters = {"to_ms": self.world.wall_ms()}
        return JobSpec("transfer", topic, into=into, rate=rng.choice((None, None, 4.0, 8.0)), **filters)

    def _begin(self, spec: JobSpec) -> None:
        request_id, scopes = f"{self.name}.{self.acts}", self.random.choice(_SCOPES)
        access = RequestRights(Actor(self.name), Rights(scopes))

        async def begin(service: NodeService) -> int:
            need_begin(access, spec.action, spec.topic, spec.into)  # HTTP and the console check these rights, too
            return int((await service.jobs.begin(spec, request_id, access.actor)).id)

        def replied(job: int | None, error: HadelayError | None) -> None:
            self.note(f"job {spec} of {scopes}: {error.type if error is not None else job}")
            self.history.count(f"transfer {error.type if error is not None else 'begun'}")
            if error is None or isinstance(error, Forbidden):
                text = f"a token with {scopes} begins {spec}: {'refused' if error else job}"
                self.history.decide("J3 transfers, rights", (error is None) != _may(scopes, spec), text)
            elif not error.outcome_known and not self.stopped:
                self.ask(begin, replied)  # repeat with the same request_id, which begins no second job

        self.ask(begin, replied)

    async def _stop(self, service: NodeService) -> int:
        running = [job for job in await service.jobs.list_jobs(stale=False) if job.action == "transfer"]
        for job in [job for job in running if not job.ended_at][-1:]:
            await service.jobs.stop(int(job.id), Actor())
            return 1
        return 0

    def _repeat(self) -> None:
        """Let the leader propose a step of a bulk job that was already applied, as a leader may do that has just been
        deposed."""
        leader, steps = self.cluster.leader(), self.cluster.job_steps[-3:]
        if leader is not None and steps:
            leader.group_commit.propose_as_leader(self.random.choice(steps), lambda result, error: None)


def _may(scopes: tuple[str, ...], spec: JobSpec) -> bool:
    """Whether a token with these scopes may begin a transfer: it needs `admin` for the messages' topics, and `publish`
    for all topics that get the messages."""
    if scopes == ("publish",):
        return False
    return f"admin:{RETURNS}" not in scopes or (spec.topic, spec.into) == (RETURNS, DEPOT)
