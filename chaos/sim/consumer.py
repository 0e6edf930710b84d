"""Consumers of the simulated world: they follow the leader, retry requests with an unknown outcome, hang up, and
vanish."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from chaos.sim.door import Call, Client
from chaos.sim.history import HandOut, number_of
from hadelay.api.service import Granting, Handed, ReceiveRequest, SettleKind, settled_by
from hadelay.api.text import parse_instant
from hadelay.codec.leasetokens import decode_leases
from hadelay.codec.meta import filter_of
from hadelay.errors import DamagedFile, HadelayError, NoLeader, OutcomeUnknown
from hadelay.model import decode_id

if TYPE_CHECKING:
    from chaos.sim.cluster import SimCluster
    from chaos.sim.machines import Process

#: Limit of repetitions of an unanswered request, by kind of settlement.
_RETRIES = {"ack": 6, "nack": 3, "extend": 2}
#: `_IMPATIENT`: share of runs whose consumers sometimes hang up. `_LEFT`: share of the waiting receives at which such a
#: consumer hangs up.
_IMPATIENT, _LEFT = 0.3, 0.3
#: `_REPEATING`: share of runs whose consumers repeat receives that were already answered. `_REPEATED`: share of the
#: settlements at which such a consumer repeats the receive.
_REPEATING, _REPEATED = 0.3, 0.5
#: Share of runs in which some nacks do not count the attempt.
_LAZY = 0.2
#: Share of runs whose consumers may end a message of the administrator's topic as dead.
_GIVING_UP = 0.2
#: Share of runs whose consumers' acks carry results.
_RESULTS = 0.6
#: Share of runs whose consumers ask for several messages of one message group per receive.
_RUNNING = 0.7
#: Share of receives whose consumer cannot follow a redirect, so that a follower relays them to the leader.
_RELAYED = 0.3


class _Redirect(NoLeader):
    """Error that stands for an HTTP redirect (307): another node leads."""

    def __init__(self, leader: str) -> None:
        super().__init__(f"{leader} leads")
        self.leader = leader


@dataclass(eq=False)
class _Receive:
    """A receive of one consumer. again: an earlier call with the same request_id may have reached a node. gone: the
    consumer hung up, and does not repeat the request."""

    poll: ReceiveRequest
    retries: int
    relay: bool
    again: bool = False
    gone: bool = False
    #: True: the consumer repeats the receive although it got the first answer; it starts no further receive after the
    #: second answer.
    repeated: bool = False


@dataclass(frozen=True)
class _Verdict:
    """Settlement by a consumer. delay_ms: delay of a nack (None: the topic's backoff), or length of an extension.
    count: whether a nack counts the attempt. dead: whether a nack ends the message as dead."""

    kind: SettleKind
    delay_ms: int | None = None
    count: bool = True
    dead: bool = False


class Consumer(Client):
    """Consumer that polls the leader and acks, nacks, extends or forgets messages. In the drain (`good`: the end of the
    run, without faults) the consumer acks every message."""

    cluster: SimCluster

    def __init__(self, cluster: SimCluster, name: str) -> None:
        super().__init__(cluster, name)
        #: The first consumer always runs, so that every due message has a consumer.
        self.stopped = not name.endswith("0") and not cluster.parts.take(name)
        self.leader: str | None = None
        # Use request ids above those from before a restore: a consumer must not use an id for two receives.
        self.requests = int(cluster.world.now * 1000)
        #: Random stream that decides when to hang up; None: this consumer always waits for the answer.
        self.impatience = None
        if random.Random(f"{cluster.seed} hang-ups").random() < _IMPATIENT:
            self.impatience = random.Random(f"{cluster.seed} {name} hangs up")
        #: Random stream that decides when to repeat an answered receive; None: never.
        self.repeats = None
        if random.Random(f"{cluster.seed} repeats").random() < _REPEATING:
            self.repeats = random.Random(f"{cluster.seed} {name} repeats")
        lazy = random.Random(f"{cluster.seed} gives back").random() < _LAZY
        uncounted = _Verdict("nack", 300, False) if lazy else _Verdict("nack")
        self.nacks = (_Verdict("nack"), uncounted, *(_Verdict("nack", delay_ms) for delay_ms in (0, 300, 2000)))
        #: Random stream that decides how many messages of one message group a receive may get; None: always 1.
        self.runs = None
        if random.Random(f"{cluster.seed} runs").random() < _RUNNING:
            self.runs = random.Random(f"{cluster.seed} {name} runs")
        self.has_results = random.Random(f"{cluster.seed} results").random() < _RESULTS
        #: Whether nacks with a delay of 300 ms make messages dead letters, in the topic whose administrator redrives
        #: dead letters.
        self.gives_up = random.Random(f"{cluster.seed} gives up").random() < _GIVING_UP

    def start(self) -> None:
        self._next()

    def _next(self, delay_s: float = 0.0) -> None:
        self.world.after(delay_s or self.random.uniform(0.0, 0.05), self._poll)

    def _poll(self) -> None:
        if self.stopped:
            return
        self.requests += 1
        rng, workload = self.random, self.cluster.workload
        pulled = self.cluster.pulled
        topics = pulled if self.good or rng.random() < 0.5 else rng.sample(pulled, 1)
        request = b"%d" % self.requests
        wait_ms = rng.choice((0, 500, 1500))
        poll = ReceiveRequest(
            list(topics), self.name, request, rng.randint(1, 10), wait_ms, rng.choice(workload.leases_ms)
        )
        if self.runs is not None:
            poll.group_max = self.runs.choice((1, 2, 3, 10))
        if not self.good and rng.random() < workload.selective:
            some = rng.sample(workload.tags, 2)
            # A topic with group_concurrency 1 refuses tag filters: leave out topics with message groups.
            topics = [topic for topic in topics if topic not in workload.topics[-2:]]
            if workload.group_concurrency == 1:
                poll.topics = topics or [workload.topics[0]]
            poll.tags, poll.any_tags = (tuple(tags) for tags in rng.choice(((some[:1], ()), (some, ()), ((), some))))
        self._ask(_Receive(poll, rng.randint(0, 4), rng.random() < _RELAYED))

    def _ask(self, receive: _Receive) -> None:
        process = self.cluster.process(self.leader) or self.cluster.any_process(self.random)
        if process is None:
            self._next(0.3)
            return
        wait_ms = receive.poll.wait_ms

        def replied(handed: list[HandOut] | None, error: HadelayError | None) -> None:
            if self.stopped:
                return
            if receive.repeated:
                self._consume(handed or [], receive)
            elif isinstance(error, NoLeader):
                self.leader = error.leader if isinstance(error, _Redirect) else None
                self._next(0.0 if self.leader else self.random.uniform(0.02, 0.2))
            elif error is not None or handed is None:
                self.history.count(f"poll {error.type if error is not None else 'nothing'}")
                self.leader = None
                if receive.retries:
                    self._again(receive, 0.1)
                else:
                    self._next(0.1)
            else:
                self.leader = process.name
                self._consume(handed, receive)
                self._next()

        call = self.door.ask(process, lambda _: self._received(process, receive), replied, wait_ms / 1000 + 3.0)
        rng = self.impatience
        patient = receive.repeated or self.good or not wait_ms
        if rng is not None and not patient and rng.random() < _LEFT:
            self.world.after(rng.uniform(0.005, wait_ms / 1000), self._hang_up, call, receive, rng)

    def _again(self, receive: _Receive, delay_s: float) -> None:
        again = _Receive(receive.poll, receive.retries - 1, receive.relay, again=True)
        self.world.after(delay_s, self._ask, again)

    async def _received(self, process: Process, receive: _Receive) -> list[HandOut]:
        """Handle a receive on a node as http/consume.py does: the leader hands out; another node redirects the
        consumer, or relays the receive to the leader."""
        leader = await process.service.cluster.find_leader()
        if leader.here:
            return await self._handed(process, receive)
        if not receive.relay:
            raise _Redirect(leader.name)
        other = self.cluster.process(leader.name)
        if other is None:
            raise NoLeader(f"the leader {leader.name} cannot be reached")
        self.history.count("relayed")
        future: asyncio.Future[list[HandOut]] = process.loop.create_future()
        wait_s = receive.poll.wait_ms / 1000 + 3.0
        inner = self.door.ask(other, lambda _: self._handed(other, receive), settled_by(future), wait_s)
        process.relays.add(inner)
        try:
            return await future
        except asyncio.CancelledError:
            inner.hang_up()
            raise
        except DamagedFile as damage:  # damage by flipped bits at the leader, not at the node that relays
            raise OutcomeUnknown(f"HTTP 500: {damage}") from damage
        finally:
            process.relays.discard(inner)

    async def _handed(self, process: Process, receive: _Receive) -> list[HandOut]:
        """Send the handed-out messages from the node to the consumer."""
        poll, history = receive.poll, self.history
        try:
            answer = await process.service.consume.receive(poll)
        except Granting:
            history.count("hung up granted")
            raise
        except asyncio.CancelledError:
            self.note(f"hung up, request {poll.request_id.decode()}, while it waited")
            history.count("hung up waiting")
            if receive.gone and not receive.again:
                history.count("checked hang-ups")
                history.hung_up.add((self.name, poll.request_id))
            raise
        handed = self._record(process, answer, poll, receive.again)
        answer.answered()
        return handed

    def _hang_up(self, call: Call, receive: _Receive, rng: random.Random) -> None:
        """Close the connection while the receive waits. Then repeat it with the same request_id, or begin another
        receive."""
        if not call.open or self.stopped:
            return
        receive.gone = not (receive.retries > 0 and rng.random() < 0.4)
        call.hang_up()
        if receive.gone:
            self._next()
        else:
            self._again(receive, rng.uniform(0.01, 0.5))

    def _record(self, process: Process, answer: Handed, poll: ReceiveRequest, again: bool) -> list[HandOut]:
        node, history = process.node, self.history
        assert node is not None
        rows, _ = decode_leases(self.cluster.group, [message.lease for message in answer.messages])
        handed = []
        for message, (term, seq, position, _, _) in zip(answer.messages, rows.tolist(), strict=True):
            until_ms = parse_instant("lease_until", message.lease_until)
            hand_out = HandOut(
                id=decode_id(message.id), attempt=message.attempt, term=term, seq=seq, position=position,
                lease=message.lease, node=node.name, consumer=self.name, request_id=poll.request_id,
                answered=self.world.now, now_ms=until_ms - message.lease_left_ms, until_ms=until_ms,
                deliver_at_ms=parse_instant("deliver_at", message.deliver_at), redelivered=message.redelivered,
                leading=node.leading, body=bytes(message.body), tags=tuple(message.tags),
                wanted=filter_of(poll.tags, poll.any_tags), again=again, group_max=poll.group_max,
            )  # fmt: skip
            handed.append(hand_out)
            history.hand_outs.append(hand_out)
            history.count("handed out")
            history.count("redelivered", hand_out.redelivered)
            mark = ", redelivered" if hand_out.redelivered else ""
            self.note(
                f"gets {hand_out.id:x} (message {number_of(hand_out.body)}) attempt {hand_out.attempt} from {node.name}"
                f"{mark}, grant {term}.{seq}, request {poll.request_id.decode()}, until {hand_out.until_ms}",
                hand_out.id,
            )
        return handed

    def _consume(self, handed: list[HandOut], receive: _Receive) -> None:
        rng = self.random
        together = rng.random() < 0.7
        settled: dict[tuple[_Verdict, int], list[HandOut]] = {}
        for hand_out in handed:
            hand_out.received = self.world.now
            chance = rng.random() if not self.good else 0.0
            if not self.good and self.cluster.fails(hand_out.body):
                chance = max(chance, 0.82)
            number = 0 if together else len(settled)
            if chance < 0.82:
                settled.setdefault((_Verdict("ack"), number), []).append(hand_out)
            elif chance < 0.9:
                settled.setdefault((self._nack(hand_out), number), []).append(hand_out)
            elif chance < 0.94:
                settled.setdefault((_Verdict("extend", rng.choice((500, 3000))), number), []).append(hand_out)
            else:
                self.history.count("consumer vanished")
        for (verdict, _), some in settled.items():
            delay_s = rng.expovariate(1 / 0.15)
            self.world.after(delay_s, self._settle, verdict, some, _RETRIES[verdict.kind])
            if self.repeats is not None and not receive.repeated and self.repeats.random() < _REPEATED:
                # Repeat the receive while the settlement of its messages is on its way.
                again = replace(receive, again=True, repeated=True)
                self.world.after(delay_s + self.repeats.uniform(0.0, 0.01), self._ask, again)

    def _nack(self, hand_out: HandOut) -> _Verdict:
        verdict, message = self.random.choice(self.nacks), self.history.message_of(hand_out.body)
        limited = message is not None and message.topic == self.cluster.workload.limited
        ends = self.gives_up and verdict.delay_ms == 300 and limited
        return _Verdict("nack", dead=True) if ends else verdict

    def _settle(self, verdict: _Verdict, some: Sequence[HandOut], retries: int) -> None:
        """Send a settlement of one message, or of all messages of a receive."""
        kind, delay_ms = verdict.kind, verdict.delay_ms
        reason = "cannot be done" if kind == "nack" and delay_ms is None else ""
        if kind == "extend" and self.has_results:
            reason = "half of it is done"

        def replied(outcomes: Any, error: HadelayError | None) -> None:
            if error is not None:
                self.history.count(f"{kind} {error.type}")
                if retries:
                    again_s = self.random.uniform(0.05, 0.4)
                    self.world.after(again_s, self._settle, verdict, some, retries - 1)
                return
            for hand_out, outcome in zip(some, outcomes, strict=True):
                self.history.count(f"{kind} {outcome}")
                self.note(f"{kind} of {hand_out.id:x} attempt {hand_out.attempt}: {outcome}", hand_out.id)
                if kind == "ack" and outcome != "lease_lost" and hand_out.acked is None:
                    hand_out.acked = self.world.now
                hand_out.result_taken |= bool(results) and outcome == "acked"
                if verdict.dead and outcome == "nacked" and hand_out.dead is None:
                    hand_out.dead = self.world.now
            if extended := [h for h, outcome in zip(some, outcomes, strict=True) if outcome == "extended"]:
                self._settle(_Verdict("ack"), extended, _RETRIES["ack"])

        leases = [h.lease for h in some]
        results = [b'"%x %d %s"' % (h.id, h.attempt, h.consumer.encode()) for h in some] if self._leaves(kind) else []
        asked = self.ask(
            lambda service: service.consume.settle(
                kind, leases, delay_ms, reason, count=verdict.count, dead=verdict.dead, results=results
            ),
            replied,
        )
        for hand_out in some if asked else ():
            if getattr(hand_out, f"{kind}_invoked") is None:
                setattr(hand_out, f"{kind}_invoked", self.world.now)
            hand_out.excused |= not verdict.count
            hand_out.given_up |= verdict.dead
        for hand_out, result in zip(some, results, strict=False):
            hand_out.result = result

    def _leaves(self, kind: SettleKind) -> bool:
        return self.has_results and kind == "ack"
