"""Publisher and consumers of a topic with subscriptions in the simulated world. Check F1: each subscription gets a copy
of each message whose tags pass its filter, and none twice. Check C1: each ack and each death has one callback."""

import json
import random
from collections import Counter
from typing import Any

from chaos.sim.door import Client
from chaos.sim.history import FannedOut, History
from hadelay.api.service import Actor, PublishDone, ReceiveRequest, answered
from hadelay.codec.meta import Meta, mask_of, pack
from hadelay.codec.records import decode_record
from hadelay.errors import HadelayError
from hadelay.ledger.hours.lookup import find_entry, state_of
from hadelay.ledger.messages.copies import copies_of
from hadelay.model import KEEP, REPLACE, Draft, Event, State, decode_id, pack_id
from hadelay.server.node import Node
from hadelay.server.service.node import NodeService

#: Names of the topic with subscriptions, and of the topic that gets the callbacks.
TOPIC, OUTCOMES = "events", "ends"
#: Settings of the topic that gets the callbacks: it asks for callbacks itself, but must get none about its own
#: messages, because these are callbacks.
_ASKS = {"on_success": OUTCOMES}
_RED: dict[str, Any] = {"tags": ["red"], "max_attempts": 2, "on_failure": OUTCOMES}
#: Whether the topic has its own queue → name of each subscription → its settings. The subscription `part` is deleted
#: and created again during the run.
_SUBSCRIPTIONS: dict[bool, dict[str, dict[str, Any]]] = {
    True: {"all": {"on_success": OUTCOMES}, "red": _RED, "part": {}},
    False: {"red": _RED, "blue": {"any_tags": ["blue", "white"]}, "part": {"tags": ["green"]}},
}
_PART, RED_QUEUE = f"{TOPIC}~part", f"{TOPIC}~red"
#: Name and settings of a subscription that is created once during the run, and that also gets the messages pending
#: then.
_FILLED, _COLORS = f"{TOPIC}~filled", {"any_tags": ["red", "blue"]}
#: `SUBSCRIBED`: share of runs with subscriptions. Shares of these runs: `_OWN_QUEUE`: the topic has its own queue;
#: `_BOUNDED`: the subscription `red` has a quota. `_DROPS`: share of the runs with a quota in which `red` drops copies
#: when it is full.
SUBSCRIBED, _OWN_QUEUE, _BOUNDED, _DROPS = 0.7, 0.5, 0.5, 0.5
#: Possible quotas of the subscription `red`: the bytes are those of three or four messages.
_QUOTAS: tuple[dict[str, Any], ...] = ({"max_messages": 3}, {"max_bytes": 350})
#: Share of messages with one of three client keys, which replace one another.
_KEYED = 0.4


def _stream(seed: int) -> random.Random:
    return random.Random(f"{abs(seed)} subscriptions")  # a restored cluster (seed < 0) has the same subscriptions


def subscribes(seed: int) -> bool:
    """Whether the run of a seed has subscriptions."""
    return _stream(seed).random() < SUBSCRIBED


class FanOutClient(Client):
    """Client of a topic with subscriptions. In the drain (`good`: the end of the run, without faults), it only
    consumes."""

    def start(self) -> None:
        self.history.fanned_out = self.sent = list[FannedOut]()
        #: First bytes of the body of this client's messages, which tell them from those of the cluster before a
        #: restore.
        self.mark = b"%d " % int(self.world.now * 1000)
        #: Whether the subscription `filled` exists. None if unknown: while its creation is under way, and in a restored
        #: cluster, because the backup may have it.
        self.filled: bool | None = None if self.cluster.seed < 0 else False
        #: Whether the subscription `part` exists; None if unknown, while a change of it is under way.
        self.part: bool | None = None
        rng = _stream(self.cluster.seed)
        self.stopped = rng.random() >= SUBSCRIBED
        self.own_queue = rng.random() < _OWN_QUEUE
        self.subscriptions = _SUBSCRIPTIONS[self.own_queue]
        #: Whether the subscription `red` drops copies when it is full.
        self.drops = False
        #: Queue → leases that the next settlement in the queue names again, before its own leases; some of these leases
        #: are lost when it arrives.
        self.kept: dict[str, list[str]] = {}
        if rng.random() < _BOUNDED:
            self.drops = rng.random() < _DROPS
            red = self.subscriptions["red"] | rng.choice(_QUOTAS) | ({"on_full": "drop"} if self.drops else {})
            self.subscriptions = {**self.subscriptions, "red": red}
        if not self.stopped:
            config = {"on_success": OUTCOMES} | ({} if self.own_queue else {"own_queue": False})
            self._put(TOPIC, config, [*(f"{TOPIC}~{name}" for name in self.subscriptions), OUTCOMES])

    def _put(self, name: str, config: dict[str, Any], others: list[str]) -> None:
        """Create the topic, then its subscriptions; repeat each request until the cluster accepts it."""

        def replied(result: Any, error: HadelayError | None) -> None:
            if self.stopped:
                return
            if error is not None:
                self.world.after(0.2, self._put, name, config, others)
            elif others:
                self._put(others[0], self.subscriptions.get(others[0].partition("~")[2], _ASKS), others[1:])
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
            elif self.filled is False and self.own_queue and len(self.sent) > 5:
                self._subscribe()
            elif chance < 0.93:
                self._cancel()
            else:
                self._change_part()
        self._next()

    def _publish(self) -> None:
        some, drafts, delay_ms = list[FannedOut](), list[Draft](), self.random.choice((0, 300, 2_000))
        for _ in range(self.random.choice((1, 1, 2, 3))):
            tags = self.random.choice(((), ("red",), ("blue",), ("red", "blue"), ("green",)))
            sent = FannedOut(len(self.sent), tags, set())
            self._expect(sent)
            some.append(sent)
            self.sent.append(sent)
            body = self.mark + b"%d" % sent.number
            ttl_ms = sent.ttl_ms = self.random.choice((0, 0, 0, 4_000))
            meta = pack(Meta(tags=list(tags), ttl=ttl_ms))
            key = b"e%d" % self.random.randrange(3) if self.random.random() < _KEYED else None
            sent.cancel_invoked = key is not None  # a later message with the key replaces this message
            drafts.append(
                Draft(TOPIC, delay_ms, True, mask_of(tags), ttl_ms, meta, body, body, key, REPLACE if key else KEEP)
            )
        self._send(some, drafts, 8)

    def _expect(self, sent: FannedOut) -> None:
        """Set the queues that must get a message published now (`queues`), and those that may get it (`unsure`)."""
        tags, part = sent.tags, self._passes(sent)
        if self.own_queue:
            sent.queues = {TOPIC, f"{TOPIC}~all"} | ({RED_QUEUE} if "red" in tags else set())
        else:
            sent.queues = {f"{TOPIC}~{color}" for color in ("red", "blue") if color in tags}
        if part and self.part:
            sent.queues.add(_PART)
        elif part and self.part is None:
            self._doubt(sent, _PART)
        if self.filled is not False and tags and "green" not in tags:
            (sent.queues if self.filled else sent.unsure).add(_FILLED)
        if self.drops and "red" in tags:
            self._doubt(sent, RED_QUEUE)
        if not sent.queues and not sent.unsure:
            sent.queues.add(TOPIC)

    def _passes(self, sent: FannedOut) -> bool:
        """Whether the message passes the filter of the subscription `part`."""
        return self.own_queue or "green" in sent.tags

    def _doubt(self, sent: FannedOut, queue: str) -> None:
        """Note that a queue may or may not get the message, because the subscription was deleted or created meanwhile,
        or may be full."""
        sent.queues.discard(queue)
        sent.unsure.add(queue)
        # if no subscription gets the message, the topic's own queue gets it
        if not self.own_queue and not sent.queues - {TOPIC}:
            sent.queues.discard(TOPIC)
            sent.unsure.add(TOPIC)

    def _send(self, some: list[FannedOut], drafts: list[Draft], tries: int) -> None:
        async def publish(service: NodeService) -> list[int]:
            def begin(done: PublishDone) -> None:
                service.publish(drafts, None, done)

            receipts = await answered(begin)
            return [0 if n in receipts.problems else int(receipts.ids[n]) for n in range(len(drafts))]

        def replied(result: list[int] | None, error: HadelayError | None) -> None:
            for sent, message_id in zip(some, result or (), strict=False):
                if message_id:
                    sent.id = message_id
                    self.note(f"event {sent.number} is {message_id:x}", *self._ids(sent))
                    self.history.count("events published")
            if error is not None and tries and not self.stopped:
                self.world.after(0.2, self._send, some, drafts, tries - 1)

        self.ask(publish, replied)

    def _ids(self, sent: FannedOut) -> range:
        """Ids that the copies of a message may have."""
        return range(sent.id, sent.id + len(self.subscriptions) + 1)

    def _cancel(self) -> None:
        known = [sent for sent in self.sent[-6:] if sent.id]
        if not known:
            return
        sent = self.random.choice(known)
        sent.cancel_invoked = True

        def replied(result: Any, error: HadelayError | None) -> None:
            text = f"cancel of event {sent.number}: {result if error is None else error.extra or error.type}"
            self.note(text, *self._ids(sent))
            sent.cancelled |= error is None
            if outcome := "cancelled" if error is None else error.extra.get("outcome", ""):
                self.history.count(f"events {outcome}")

        self.ask(lambda service: service.messages.cancel(sent.id), replied)

    def _change_part(self) -> None:
        """Delete the subscription `part`, or create it again. A change with an unknown outcome is the last one, because
        it may be carried out at any later time."""
        if self.part is None:
            return
        exists, self.part = self.part, None
        for sent in self.sent:
            if not sent.id and self._passes(sent):
                self._doubt(sent, _PART)

        def replied(result: Any, error: HadelayError | None) -> None:
            if error is None or error.outcome_known:
                self.part = not exists if error is None else exists
            self.history.count("events changed", error is None)

        if exists:
            self.ask(lambda service: service.topics.delete_topic(_PART, force=True, by=Actor()), replied)
        else:
            self.ask(lambda service: service.topics.put_topic(_PART, self.subscriptions["part"], Actor()), replied)

    def _subscribe(self) -> None:
        """Create the subscription `filled`, and repeat the request until the cluster accepts it."""
        self.filled = None
        for sent in self.sent:
            if {"red", "blue"} & set(sent.tags):
                sent.unsure.add(_FILLED)

        def replied(result: Any, error: HadelayError | None) -> None:
            if error is None:
                self.filled = True
                self.history.count("events filled", len(self.history.filled_from))
            elif not self.stopped:
                self.world.after(0.2, self._subscribe)

        self.ask(lambda service: service.topics.put_topic(_FILLED, _COLORS, Actor(), pending=True), replied)

    def _take(self) -> None:
        others = [_FILLED] if self.filled else []
        queue = self.random.choice([TOPIC, OUTCOMES, *others, *(f"{TOPIC}~{name}" for name in self.subscriptions)])
        request = b"%d" % int(self.world.now * 1000)
        poll = ReceiveRequest([queue], f"{self.name} {queue}", request, 20, 0, 900)
        settles = self.good or self.random.random() < 0.8
        # Make some messages dead in these two queues: deaths ask for callbacks in `red`, and for none in the own queue.
        dies = queue in (RED_QUEUE, TOPIC) and request[-1] % 2 == 0
        kept = self.kept.pop(queue, []) if settles else []
        # Messages whose cancels were confirmed before this receive.
        cancelled = [sent.number for sent in self.sent if sent.cancelled]

        async def take(service: NodeService) -> list[tuple[int, int, bool]]:
            if not (await service.cluster.find_leader()).here:
                return []
            handed = await service.consume.receive(poll)
            handed.answered()
            leases = [message.lease for message in handed.messages]
            outcomes = [""] * len(leases)
            if settles and leases:
                every = [*kept, *leases]
                results = [] if dies else [json.dumps([n, *range((n + 4) % 7)]).encode() for n, _ in enumerate(every)]
                settled = await service.consume.settle(
                    "nack" if dies else "ack", every, None, dead=dies, results=results
                )
                outcomes = list(settled)[len(kept) :]
            elif leases:
                self.kept[queue] = leases
            acked = [outcome in ("acked", "already_acked") for outcome in outcomes]
            return [
                (int(bytes(message.body)[len(self.mark) :]), decode_id(message.id), is_acked)
                for message, is_acked in zip(handed.messages, acked, strict=True)
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


def check_callbacks(history: History, node: Node) -> None:
    """C1: the topic that gets the callbacks has exactly one callback for each ack and each death that asks for one."""
    ledger = node.ledger
    topic, settled = ledger.topic(TOPIC), ledger.topic(OUTCOMES)
    counts = Counter[str]()
    for name, event in ((TOPIC, Event.ACKED), (f"{TOPIC}~all", Event.ACKED), (RED_QUEUE, Event.DEAD)):
        if (queue := ledger.topic(name)) is not None:
            counts[name] = queue.settled[event]
    published = 0 if settled is None else settled.published
    if topic is not None:
        text = f"{dict(counts)} asked for callbacks, and there are {published}"
        history.decide("C1 callbacks", published != counts.total(), text)
    if settled is None:
        return
    seen = set[str]()
    for hour in ledger.store.hours():
        rows = ledger.store.entries(hour, slice(0, ledger.store.count(hour)))
        for row in rows[rows["topic"] == settled.number]:
            if int(row["first_id"]) != pack_id(ledger.group, hour, int(row["index"])):
                continue  # skip callbacks that were carried into this hour: they count in their first hour
            record = ledger.store.record(hour, int(row["offset"]), int(row["size"]))
            document = json.loads(decode_record(record).body)
            if "errors" not in document:  # skip failure callbacks: a message may die again after a redrive
                again = document["id"] in seen
                history.decide("C1 callbacks", again, f"the ack of {document['id']} has two callbacks")
                seen.add(document["id"])


def check(history: History, node: Node) -> None:
    """F1, at the end of a run: each message with a confirmed publish has its copies, and copies whose acks were
    confirmed are acked."""
    ledger, missing = node.ledger, 0
    for sent in history.fanned_out:
        if not sent.id or find_entry(ledger, sent.id) is None:
            continue  # skip the message: its publish was not confirmed, or its hour was deleted
        found: dict[str, State] = {}
        for one in (sent.id, *copies_of(ledger, sent.id)):
            place = find_entry(ledger, one)
            if place is not None:
                queue = ledger.topics[int(place.rows["topic"][0])].name
                _decide(history, "copies", queue in found, f"event {sent.number} has two copies in {queue}", one)
                found[queue] = state_of(ledger, place, ledger.now_ms)
        # Do not ask for all copies after a suspension for hours: copies may have been deleted with their hour.
        wanted = set(sent.queues)
        if (
            sent.id in history.filled_from
            and not ledger.fills
            and _FILLED in sent.unsure
            and not (sent.cancel_invoked or sent.ttl_ms)
        ):
            wanted.add(_FILLED)
        wrong = not (history.slept or wanted <= found.keys()) or not found.keys() <= sent.queues | sent.unsure
        missing += "red" in sent.tags and RED_QUEUE not in found
        text = f"event {sent.number} has copies in {sorted(found)}, not {sorted(wanted)}"
        _decide(history, "copies", wrong, text, sent.id)
        for queue in sent.acked & found.keys():
            text = f"event {sent.number} was acked in {queue}, and is {found[queue]}"
            _decide(history, "copies", found[queue] is not State.ACKED, text, sent.id)
        for queue in sent.queues & found.keys() - sent.acked:
            ended = found[queue] is State.CANCELLED and not (sent.cancel_invoked or queue == _PART)
            _decide(history, "copies", ended, f"event {sent.number} in {queue} was cancelled by nobody", sent.id)
    red = ledger.topic(RED_QUEUE)
    if red is not None and not history.slept:
        text = f"{missing} events have no copy in {RED_QUEUE}, which counts {red.dropped} dropped ones"
        _decide(history, "copies", missing > red.dropped, text, 0)
