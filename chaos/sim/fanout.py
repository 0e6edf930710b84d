"""Publisher and consumers of a topic with subscriptions in the simulated world, and check F1: each subscription gets a
copy of each message whose tags pass its filter, and none twice."""

import random
from typing import Any

from chaos.sim.door import Client
from chaos.sim.history import FannedOut, History
from hadelay.api.service import Actor, PublishDone, ReceiveRequest, answered
from hadelay.codec.meta import Meta, mask_of, pack
from hadelay.errors import HadelayError
from hadelay.ledger.copies import copies_of
from hadelay.ledger.lookup import find_entry, state_of
from hadelay.model import Draft, State, decode_id
from hadelay.server.node import Node
from hadelay.server.service.node import NodeService

TOPIC = "events"
#: Subscription → its settings. `part` is deleted and created again during the run.
_SUBSCRIPTIONS: dict[str, dict[str, Any]] = {"all": {}, "red": {"tags": ["red"]}, "part": {}}
_PART = f"{TOPIC}~part"
#: Share of runs with subscriptions.
SUBSCRIBED = 0.5


class FanOutClient(Client):
    """In the drain (`good`: the end of the run, without faults), only consumes."""

    def start(self) -> None:
        self.history.fanned_out = self.sent = list[FannedOut]()
        #: Mark of this client's messages: a restored cluster knows those of the cluster before.
        self.mark = b"%d " % int(self.world.now * 1000)
        #: Whether the subscription `part` exists; None while a change of it may be under way.
        self.part: bool | None = None
        self.changes = 0
        self.stopped = random.Random(f"{self.cluster.seed} subscriptions").random() >= SUBSCRIBED
        if not self.stopped:
            self._put(TOPIC, {}, [f"{TOPIC}~{name}" for name in _SUBSCRIPTIONS])

    def _put(self, name: str, config: dict[str, Any], others: list[str]) -> None:
        """Create the topic, then its subscriptions; repeat each request until the cluster accepts it."""

        def replied(result: Any, error: HadelayError | None) -> None:
            if self.stopped:
                return
            if error is not None:
                self.world.after(0.2, self._put, name, config, others)
            elif others:
                self._put(others[0], _SUBSCRIPTIONS[others[0].partition("~")[2]], others[1:])
            else:
                self.part = True
                self._next()

        self.ask(lambda service: service.topics.put_topic(name, config, Actor()), replied)

    def _next(self) -> None:
        self.world.after(0.3 if self.good else self.random.expovariate(1 / 0.1), self._act)

    def _act(self) -> None:
        if self.stopped:
            return
        part = self.next_act()
        rng = self.random
        chance = rng.random()
        if self.good or chance < 0.45:
            self._take()
        elif self.cluster.parts.take(part):
            if chance < 0.85:
                self._publish()
            elif chance < 0.93:
                self._cancel()
            else:
                self._change_part()
        self._next()

    def _publish(self) -> None:
        tags = self.random.choice(((), ("red",), ("blue",), ("red", "blue")))
        sent = FannedOut(len(self.sent), tags, {TOPIC, f"{TOPIC}~all"} | ({f"{TOPIC}~red"} if "red" in tags else set()))
        (sent.queues if self.part else sent.unsure if self.part is None else set()).add(_PART)
        self.sent.append(sent)
        delay_ms, body = self.random.choice((0, 300, 2_000)), self.mark + b"%d" % sent.number
        draft = Draft(TOPIC, delay_ms, True, mask_of(tags), 0, pack(Meta(tags=list(tags))), body, idem=body)
        self._send(sent, draft, self.changes, 8)

    def _send(self, sent: FannedOut, draft: Draft, changes: int, tries: int) -> None:
        async def publish(service: NodeService) -> int:
            def begin(done: PublishDone) -> None:
                service.publish([draft], None, done)

            receipts = await answered(begin)
            return int(receipts.ids[0]) if not receipts.problems else 0

        def replied(result: int | None, error: HadelayError | None) -> None:
            if changes != self.changes:  # `part` was deleted or created meanwhile
                sent.queues.discard(_PART)
                sent.unsure.add(_PART)
            if error is None and result:
                sent.id = result
                self.note(f"event {sent.number} is {result:x}", *range(result, result + len(_SUBSCRIPTIONS) + 1))
                self.history.count("events published")
            elif error is not None and tries and not self.stopped:
                self.world.after(0.2, self._send, sent, draft, changes, tries - 1)

        self.ask(publish, replied)

    def _cancel(self) -> None:
        known = [sent for sent in self.sent[-6:] if sent.id]
        if not known:
            return
        sent = self.random.choice(known)
        sent.cancel_invoked = True

        def replied(result: Any, error: HadelayError | None) -> None:
            text = f"cancel of event {sent.number}: {result if error is None else error.extra or error.type}"
            self.note(text, *range(sent.id, sent.id + len(_SUBSCRIPTIONS) + 1))
            if error is None:
                sent.cancelled |= result[0] == "cancelled"
                self.history.count(f"events {result[0]}")

        self.ask(lambda service: service.messages.cancel(sent.id), replied)

    def _change_part(self) -> None:
        """Delete the subscription `part`, or create it again. After an unknown outcome it stays as it may be."""
        exists, self.part = self.part, None
        self.changes += 1
        change = self.changes

        def replied(result: Any, error: HadelayError | None) -> None:
            if error is None and change == self.changes:
                self.part = not exists
                self.changes += 1
            self.history.count("events changed", error is None)

        if exists:
            self.ask(lambda service: service.topics.delete_topic(_PART, force=True, by=Actor()), replied)
        else:
            self.ask(lambda service: service.topics.put_topic(_PART, {}, Actor()), replied)

    def _take(self) -> None:
        queue = self.random.choice([TOPIC, *(f"{TOPIC}~{name}" for name in _SUBSCRIPTIONS)])
        request = b"%d" % int(self.world.now * 1000)
        poll = ReceiveRequest([queue], f"{self.name} {queue}", request, 20, 0, 900)
        settles = self.good or self.random.random() < 0.8
        # Cancels that were confirmed before this receive.
        cancelled = [sent.number for sent in self.sent if sent.cancelled]

        async def take(service: NodeService) -> list[tuple[int, int, bool]]:
            if not (await service.cluster.find_leader()).here:
                return []
            handed = await service.consume.receive(poll)
            handed.answered()
            leases = [message.lease for message in handed.messages]
            outcomes = await service.consume.settle("ack", leases, None) if settles and leases else [""] * len(leases)
            return [
                (
                    int(bytes(message.body)[len(self.mark) :]),
                    decode_id(message.id),
                    outcome in ("acked", "already_acked"),
                )
                for message, outcome in zip(handed.messages, outcomes, strict=True)
                if bytes(message.body).startswith(self.mark)
            ]

        def replied(result: list[tuple[int, int, bool]] | None, error: HadelayError | None) -> None:
            for number, message_id, acked in result or ():
                sent = self.sent[number]
                self.history.count("events taken")
                self.note(f"takes event {number} as {message_id:x} from {queue}", message_id)
                text = f"event {number} with the tags {sent.tags} is handed out in {queue}"
                _decide(self.history, "hand-outs", queue not in sent.queues | sent.unsure, text, message_id)
                text = f"event {number} is {sent.ids.get(queue, 0):x} and {message_id:x} in {queue}"
                _decide(
                    self.history, "hand-outs", sent.ids.setdefault(queue, message_id) != message_id, text, message_id
                )
                text = f"event {number} is handed out after its cancel"
                _decide(self.history, "hand-outs", number in cancelled, text, message_id)
                if acked:
                    sent.acked.add(queue)

        self.ask(take, replied)


def _decide(history: History, branch: str, broken: bool, text: str, message_id: int) -> None:
    promise = "F1 fan-out, copies" if branch == "copies" else "F1 fan-out, hand-outs"
    history.decide(promise, broken, text, message_id)


def check(history: History, node: Node) -> None:
    """F1, at the end of a run: each confirmed message has its copies, and what consumers acked is acked."""
    ledger = node.ledger
    for sent in history.fanned_out:
        if not sent.id or find_entry(ledger, sent.id) is None:
            continue  # not confirmed, or its hour has gone
        found: dict[str, State] = {}
        for one in (sent.id, *copies_of(ledger, sent.id)):
            place = find_entry(ledger, one)
            if place is not None:
                queue = ledger.topics[int(place.rows["topic"][0])].name
                _decide(history, "copies", queue in found, f"event {sent.number} has two copies in {queue}", one)
                found[queue] = state_of(ledger, place, ledger.now_ms)
        # Copies of a subscription may be gone with their hour after a suspension for hours.
        wrong = not (history.slept or sent.queues <= found.keys()) or not found.keys() <= sent.queues | sent.unsure
        text = f"event {sent.number} has copies in {sorted(found)}, not {sorted(sent.queues)}"
        _decide(history, "copies", wrong, text, sent.id)
        for queue in sent.acked & found.keys():
            text = f"event {sent.number} was acked in {queue}, and is {found[queue]}"
            _decide(history, "copies", found[queue] is not State.ACKED, text, sent.id)
        for queue in sent.queues & found.keys() - sent.acked:
            ended = found[queue] is State.CANCELLED and not (sent.cancel_invoked or queue == _PART)
            _decide(history, "copies", ended, f"event {sent.number} in {queue} was cancelled by nobody", sent.id)
