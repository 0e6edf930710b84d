"""Producers and consumers of the simulated world: they retry what is unknown, follow the leader, and vanish.

They talk to nodes through `Door`: a call runs on a node as one of its events, its answer travels back, and when the
process ends first the caller sees a broken connection: unknown.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TypeVar

from chaos.sim.history import HandOut, Message, Violation, number_of
from hadelay.codec.commands import encode_ack, encode_cancel, encode_extend, encode_nack, encode_reschedule, uncounted
from hadelay.codec.leasetokens import decode_leases, encode_leases
from hadelay.codec.meta import Meta, pack, unpack
from hadelay.codec.publishcommand import KEEP, REJECT, REPLACE, Draft
from hadelay.codec.records import decode_record
from hadelay.codec.results import CancelOutcome, LeaseOutcome, LeaseResult, Outcome
from hadelay.codec.tags import mask_of
from hadelay.errors import DamagedFile, HadelayError, NoLeader, OutcomeUnknown
from hadelay.handout.dispatcher import DONE, WAITING, Delivery, Poll
from hadelay.handout.filters import Filter, filter_of
from hadelay.ledger import listing
from hadelay.model import State, hour_from_name

if TYPE_CHECKING:
    from chaos.sim.cluster import Process, SimCluster

T = TypeVar("T")
Reply = Callable[[Any, HadelayError | None], None]
#: How often a consumer asks again.
_RETRIES = {"ack": 6, "nack": 3, "extend": 2}
#: Share of runs whose consumers hang up at times, and share of the waiting receives that they leave.
_IMPATIENT, _LEFT = 0.3, 0.3
#: Share of runs whose consumers give back without counting the attempt.
_LAZY = 0.2


def whole(slices: Generator[Any, None, T]) -> T:
    """What it returns, with nobody else's turn in between."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


class Door:
    """The clients' network: every call is answered once, by the node, a broken connection, or a time limit."""

    def __init__(self, cluster: SimCluster) -> None:
        self.cluster, self.world = cluster, cluster.world
        #: This share of the answers is lost on the way back.
        self.lost_answers = 0.0

    def call(self, process: Process, fn: Callable[[Any, Reply], None], reply: Reply, timeout_s: float = 4.0) -> Call:
        """Run fn(node, done) on the process's node; reply(result, error) at the caller."""
        call = Call(self, process, reply)
        process.calls.append(call)
        self.world.after(self.latency(), call.begin, fn, owner=process.runtime)
        self.world.after(timeout_s, call.answer, None, OutcomeUnknown("the client's time limit"))
        return call

    def latency(self) -> float:
        return self.world.random.uniform(0.0001, 0.002)


class Call:
    __slots__ = ("door", "open", "process", "reply")

    def __init__(self, door: Door, process: Process, reply: Reply) -> None:
        self.door, self.process, self.reply, self.open = door, process, reply, True

    def begin(self, fn: Callable[[Any, Reply], None]) -> None:
        if self.process.node is None:
            self.done(None, NoLeader("still starting"))
        else:
            self.attempt(lambda: fn(self.process.node, self.done))

    def attempt(self, act: Callable[[], None]) -> None:
        """On a node whose files rot the answer may be that a file is damaged."""
        try:
            act()
        except DamagedFile as damage:
            if self.process.name not in self.door.cluster.rotten:
                raise
            self.done(None, damage)

    def done(self, result: Any, error: HadelayError | None) -> None:
        """Called on the node: the answer leaves."""
        door = self.door
        if door.lost_answers and door.world.random.random() < door.lost_answers:
            result, error = None, OutcomeUnknown("the answer was lost")
        door.world.after(door.latency(), self.answer, result, error)

    def broken(self) -> None:
        self.door.world.after(self.door.latency(), self.answer, None, OutcomeUnknown("connection reset"))

    def hang_up(self, gone: Callable[[], None]) -> None:
        """The caller closes the connection and hears no answer; gone() runs on the node when the node notices."""
        self._close()
        self.door.world.after(self.door.latency(), gone, owner=self.process.runtime)

    def answer(self, result: Any, error: HadelayError | None) -> None:
        if self.open:
            self._close()
            self.reply(result, error)

    def _close(self) -> None:
        self.open = False
        if self in self.process.calls:
            self.process.calls.remove(self)


class Client:
    def __init__(self, cluster: SimCluster, name: str) -> None:
        self.cluster, self.name = cluster, name
        self.world, self.history, self.door = cluster.world, cluster.history, cluster.door
        self.random = random.Random(f"{cluster.seed} {name}")
        self.stopped = False

    def note(self, text: str, *ids: int) -> None:
        self.history.note(self.world.now, self.name, text, frozenset(ids))


@dataclass(slots=True, eq=False)
class _Batch:
    """Messages that are published together, and whatever is drawn for them from then on."""

    messages: list[Message]
    random: random.Random
    #: Published once more, although its answer came.
    again: bool = False


class Producer(Client):
    """Publishes a few messages at a time with one key, and asks again, anywhere, until it knows."""

    def start(self, until: float, interval_s: float) -> None:
        self.until, self.interval_s = until, interval_s
        self.published = 0
        self._next()

    def _next(self) -> None:
        if self.world.now < self.until:
            self.world.after(self.random.expovariate(1 / self.interval_s), self._publish)

    def _publish(self) -> None:
        if self.world.now >= self.until:
            return
        part = f"{self.name}.{self.published}"
        self.published += 1
        rng = random.Random(f"{self.cluster.seed} {part}")
        batch = _Batch([self._message(rng) for _ in range(rng.choice((1, 1, 1, 2, 5, 12)))], rng)
        if self.cluster.parts.take(part):
            self._begin(batch)
        else:
            for message in batch.messages:  # they keep their numbers
                message.refused = True
        self._next()

    def _begin(self, batch: _Batch) -> None:
        for message in batch.messages:
            message.key = b"k%d" % batch.messages[0].number
            if message.on_conflict == REPLACE and message.client_key is not None:
                self.history.replaced_keys.add((message.topic, message.client_key))
        self._send(batch)

    def _message(self, rng: random.Random) -> Message:
        workload = self.cluster.workload
        relative = rng.random() < 0.7
        delay_ms = workload.delay_ms(rng)
        # What absolute times mean to this client: the true time of day.
        when_ms = delay_ms if relative else self.world.wall_ms() + delay_ms
        padding = rng.choice((0, 20, 20, 200, 3000))
        message = Message(
            len(self.history.messages), rng.choice(workload.topics), b"", relative, when_ms, padding, self.world.now
        )
        if rng.random() < workload.keyed:
            message.client_key = b"c%d" % rng.randrange(workload.keys)
            message.on_conflict = rng.choice((KEEP, REPLACE, REPLACE, REJECT))
            if message.on_conflict == REPLACE:
                message.max_wait_ms = rng.choice((0, 0, 400, 2000))
        if rng.random() < workload.tagged:
            message.tags = tuple(rng.sample(workload.tags, rng.randint(1, 2)))
        if rng.random() < workload.ttls:
            message.ttl_ms = rng.choice((300, 1500, 6000))
        self.history.messages.append(message)
        return message

    def _send(self, batch: _Batch) -> None:
        if batch.again and self.history.slept:
            return  # its key may be forgotten by now
        process, messages = self.cluster.any_process(batch.random), batch.messages
        if process is None:
            self._again(batch)
            return
        drafts = [
            Draft(
                m.topic, m.when_ms, m.relative, mask_of(m.tags), m.ttl_ms, pack(Meta(tags=list(m.tags))), m.body, None,
                m.client_key, m.on_conflict, m.max_wait_ms,
            )
            for m in messages
        ]  # fmt: skip
        key = messages[0].key

        def replied(receipts: Any, error: HadelayError | None) -> None:
            if error is not None:
                self.history.count(f"publish {error.type}")
                self.note(f"publish {messages[0].number}+{len(messages)} at {process.name}: {error.type}: {error}")
                self._again(batch)
                return
            self._stored(process, batch, receipts)

        self.door.call(process, lambda node, done: node.publish(drafts, key, done), replied)

    def _again(self, batch: _Batch) -> None:
        if not self.stopped:
            self.world.after(batch.random.uniform(0.02, 0.6), self._send, batch)

    def _stored(self, process: Process, batch: _Batch, receipts: Any) -> None:
        rng, workload = batch.random, self.cluster.workload
        self.history.count("published", len(batch.messages))
        for n, message in enumerate(batch.messages):
            if n in receipts.problems:
                message.refused = True
                self.note(f"message {message.number} refused: {receipts.problems[n]}")
                continue
            if n in receipts.duplicates:
                self.history.count("duplicate receipt")
            if batch.again:
                self.history.count("checked I8 duplicate, told")
                if message.id is not None and message.id != receipts.ids[n]:
                    self.history.second_ids.append((message.number, message.id, receipts.ids[n]))
                continue
            message.id, message.deliver_at_ms = receipts.ids[n], receipts.deliver_at_ms[n]
            message.stored = self.world.now
            self.note(
                f"message {message.number} stored via {process.name} as {message.id:x}, due {message.deliver_at_ms}",
                message.id,
            )
            if n in receipts.replaced:
                self.history.count("replaced")
                message.replaces = receipts.replaced[n]
                for other in self.history.messages:
                    if other.id == receipts.replaced[n] and other.cancelled is None:
                        other.cancelled = other.cancel_invoked = self.world.now
            chance = rng.random()
            by_key = message.client_key is not None and rng.random() < 0.5
            later_s = rng.uniform(0.0, workload.longest_ms / 1000)
            if chance < workload.cancels:
                self.world.after(later_s, self._cancel, message, by_key, rng)
            elif chance < workload.cancels + workload.reschedules and n not in receipts.duplicates:
                self.world.after(later_s, self._reschedule, message, by_key, rng, 0)
        if not batch.again and rng.random() < workload.repeated:
            batch.again = True
            self.world.after(rng.uniform(0.0, 3.0), self._send, batch)

    def _cancel(self, message: Message, by_key: bool, rng: random.Random) -> None:
        """By key it means whichever message has that key by then: nothing is known of this one."""
        process = self.cluster.any_process(rng)
        if process is None or self.stopped:
            return
        if message.client_key is not None:
            self.history.replaced_keys.add((message.topic, message.client_key))
        assert message.id is not None
        if by_key:
            command = encode_cancel(process.name, keys=[(message.topic, message.client_key or b"")])
        else:
            message.cancel_invoked = self.world.now if message.cancel_invoked is None else message.cancel_invoked
            command = encode_cancel(process.name, [message.id])

        def replied(result: Any, error: HadelayError | None) -> None:
            if error is not None:
                self.world.after(rng.uniform(0.05, 0.5), self._cancel, message, by_key, rng)
                return
            outcome = CancelOutcome(int(result.outcomes[0]))
            how = "by key" if by_key else "by id"
            self.note(f"cancel of message {message.number} {how}: {outcome.name}", message.id or 0)
            self.history.count(f"cancel {how}")
            self.history.count(f"cancel {outcome.name}")
            if outcome == CancelOutcome.CANCELLED and not by_key and message.cancelled is None:
                message.cancelled = self.world.now

        self.door.call(process, lambda node, done: node.propose(command, done), replied)

    def _reschedule(self, message: Message, by_key: bool, rng: random.Random, tries: int) -> None:
        """To some time soon, or now."""
        process = self.cluster.any_process(rng)
        if process is None or self.stopped:
            return
        assert message.id is not None
        when_ms = rng.choice((0, 5, 700, 3000))
        if by_key:
            self.history.moved_keys.add((message.topic, message.client_key))
            keys = [(message.topic, message.client_key or b"")]
            command = encode_reschedule(process.name, when_ms, True, keys=keys)
        else:
            message.rescheduled = True
            command = encode_reschedule(process.name, when_ms, True, [message.id])

        def replied(result: Any, error: HadelayError | None) -> None:
            if error is not None:
                message.unsure = True
                if tries < 5:
                    self.world.after(rng.uniform(0.05, 0.5), self._reschedule, message, by_key, rng, tries + 1)
                return
            outcome, moved = Outcome(int(result.outcomes[0])), int(result.ids[0])
            how = "by key" if by_key else "by id"
            self.note(f"reschedule of {moved:x} {how}: {outcome.name}", moved)
            self.history.count(f"reschedule {how}")
            self.history.count(f"reschedule {outcome.name}")
            for other in self.history.messages:
                if other.id == moved and outcome == Outcome.DONE:
                    other.deliver_at_ms = int(result.deliver_at_ms[0])

        self.door.call(process, lambda node, done: node.propose(command, done), replied)


@dataclass(frozen=True)
class _Wish:
    request_id: bytes
    topics: tuple[str, ...]
    most: int
    lease_ms: int
    wait_ms: int
    filter: Filter | None = None


class Reader(Client):
    """Asks any node what became of a message, and pages through a topic: what was answered before it asked is there."""

    def start(self) -> None:
        self.stopped = not self.cluster.parts.take(self.name)
        self._next()

    def _next(self) -> None:
        if not self.stopped:
            self.world.after(self.random.expovariate(1 / 0.6), self._read)

    def _read(self) -> None:
        known = [m for m in self.history.messages[-60:] if m.id is not None]
        process = self.cluster.any_process(self.random)
        self._next()
        if process is None or not known or self.stopped:
            return
        message = self.random.choice(known)
        number = message.id or 0
        listed = self.random.choice((None, *State))

        def read(node: Any, done: Reply) -> None:
            def certain(error: HadelayError | None) -> None:
                if error is not None:
                    done(None, error)
                else:
                    call.attempt(look)

            def look() -> None:
                if listed is not None:
                    self._page(node.state, message.topic, listed)
                done((node.name, node.state.describe(number)), None)

            node.raft.read_index(certain)

        def replied(result: Any, error: HadelayError | None) -> None:
            if error is not None:
                self.history.count(f"read {error.type}")
                return
            self.history.count("checked stale read")
            # After hours what ended may be gone.
            if result[1] is None and not self.history.slept and not self.history.meant("purge", message, number):
                text = f"{result[0]} knows nothing of message {message.number}, which was answered as stored before"
                self.cluster.violate(Violation("stale read", text, frozenset({number})))

        call = self.door.call(process, read, replied)

    def _page(self, state: Any, topic: str, listed: State) -> None:
        """All pages: in order, and nothing twice."""
        after, seen = listing.FIRST, []
        while True:
            wish = listing.Wish(state.topic(topic).number, frozenset({listed}), 0, 1 << 52, 0, after, 7)
            page = whole(listing.listing(state, wish, state.now_ms, 5))
            seen += list(zip(page.due_ms.tolist(), page.rows["first_id"].tolist(), strict=True))
            if page.after is None:
                break
            after = page.after
        self.history.count("listed", len(seen))
        assert seen == sorted(set(seen)), seen


class Consumer(Client):
    """Polls the leader; acks, nacks, extends or forgets what it gets. In the drain (`good`) it acks everything."""

    def start(self) -> None:
        self.good = False
        #: The first one is never left out: somebody has to take what is owed.
        self.stopped = not self.name.endswith("0") and not self.cluster.parts.take(self.name)
        self.leader: str | None = None
        self.requests = 0
        seed = self.cluster.seed
        #: Draws when to hang up; None: this consumer always waits for the answer.
        self.impatience = None
        if random.Random(f"{seed} hang-ups").random() < _IMPATIENT:
            self.impatience = random.Random(f"{seed} {self.name} hangs up")
        lazy = random.Random(f"{seed} gives back").random() < _LAZY
        #: Delays of its nacks.
        self.nacks = (-1, uncounted(300) if lazy else -1, 0, 300, 2000)
        self._next()

    def _next(self, delay_s: float = 0.0) -> None:
        self.world.after(delay_s or self.random.uniform(0.0, 0.05), self._poll)

    def _poll(self) -> None:
        if self.stopped:
            return
        self.requests += 1
        rng = self.random
        workload = self.cluster.workload
        topics = tuple(workload.topics if self.good or rng.random() < 0.5 else rng.sample(workload.topics, 1))
        wish = _Wish(
            b"%d" % self.requests,
            topics,
            rng.randint(1, 10),
            rng.choice(workload.leases_ms),
            rng.choice((0, 500, 1500)),
        )
        if not self.good and rng.random() < workload.selective:
            some = rng.sample(workload.tags, 2)
            wish = replace(wish, filter=filter_of(*rng.choice(((some[:1], ()), (some, ()), ((), some)))))
        self._ask(wish, rng.randint(0, 4))

    def _ask(self, wish: _Wish, retries: int, *, again: bool = False) -> None:
        """again: a call with the same request_id was made before, and may have reached a node."""
        polls: list[Poll] = []
        process = self.cluster.process(self.leader) or self.cluster.any_process(self.random)
        if process is None:
            self._next(0.3)
            return

        def poll(node: Any, done: Reply) -> None:
            def delivered(delivery: Delivery | None, error: HadelayError | None) -> None:
                try:
                    handed = self._record(node, delivery, wish) if delivery is not None else []
                except DamagedFile as damage:
                    self._mend(node, damage, lambda: delivered(delivery, error), done)
                    return
                if handed and delivery is not None:
                    due_ms = int(delivery.rows["deliver_at_ms"].max())
                    node.dispatcher.answered(delivery.term, delivery.seq, delivery.positions, due_ms)
                done(handed, error)

            if node.leading:
                polls.append(
                    Poll(
                        self.name, wish.request_id, wish.topics, wish.most, wish.lease_ms, wish.wait_ms, delivered,
                        wish.filter,
                    )
                )  # fmt: skip
                node.dispatcher.poll(polls[0])
            else:
                done(node.raft.leader, NoLeader("follower"))

        def replied(result: Any, error: HadelayError | None) -> None:
            if self.stopped:
                return
            if isinstance(error, NoLeader):
                # A follower answers with a redirect to the leader it knows.
                self.leader = result if isinstance(result, str) else None
                self._next(0.0 if self.leader else self.random.uniform(0.02, 0.2))
            elif error is not None:
                self.history.count(f"poll {error.type}")
                self.leader = None
                if retries:
                    self.world.after(0.1, partial(self._ask, wish, retries - 1, again=True))
                else:
                    self._next(0.1)
            else:
                self.leader = process.name
                self._consume(result)

        call = self.door.call(process, poll, replied, timeout_s=wish.wait_ms / 1000 + 3.0)
        rng = self.impatience
        if rng is not None and wish.wait_ms and not self.good and rng.random() < _LEFT:
            wait_s = rng.uniform(0.005, wish.wait_ms / 1000)
            self.world.after(wait_s, self._hang_up, call, polls, wish, retries, again)

    def _hang_up(self, call: Call, polls: list[Poll], wish: _Wish, retries: int, again: bool) -> None:
        """Close the connection while the receive waits; then ask again under the same request_id, or anew."""
        rng = self.impatience
        if not call.open or rng is None or self.stopped:
            return
        node = call.process.node

        def gone() -> None:
            if node is None or not polls or polls[0].phase == DONE:
                return  # answered: that answer is lost
            waited = polls[0].phase == WAITING
            node.dispatcher.cancel_poll(polls[0])
            self.note(f"hung up, request {wish.request_id.decode()}, {'while it waited' if waited else 'granted'}")
            self.history.count("hung up waiting" if waited else "hung up granted")
            if waited and not again and not repeats:
                self.history.count("checked hang-ups")
                self.history.hung_up.add((self.name, wish.request_id))

        repeats = retries > 0 and rng.random() < 0.4
        call.hang_up(gone)
        if repeats:
            self.world.after(rng.uniform(0.01, 0.5), partial(self._ask, wish, retries - 1, again=True))
        else:
            self._next()

    def _mend(self, node: Any, damage: DamagedFile, again: Callable[[], None], done: Reply) -> None:
        """A record that is to be answered is damaged: read it again once it was mended."""

        def mended(data: bytes | None) -> None:
            if data is None:
                done(None, damage)
            else:
                again()

        hour = hour_from_name(PurePath(damage.path).stem)
        node.mender.mend(hour, ".log", damage.offset, damage.size, mended)

    def _record(self, node: Any, delivery: Delivery, wish: _Wish) -> list[HandOut]:
        handed, request_id = [], wish.request_id
        hours, rows = delivery.hours.tolist(), delivery.rows
        places = zip(hours, rows["offset"].tolist(), rows["size"].tolist(), strict=True)
        records = [decode_record(bytes(node.storage.hours.record(*place, verify=True))) for place in places]
        for n, record in enumerate(records):
            row, hour = delivery.rows[n], int(delivery.hours[n])
            hand_out = HandOut(
                id=int(row["first_id"]), attempt=int(delivery.attempts[n]), term=delivery.term, seq=delivery.seq,
                position=int(delivery.positions[n]), hour=hour, index=int(delivery.indexes[n]), node=node.name,
                consumer=self.name, request_id=request_id, answered=self.world.now, now_ms=delivery.now_ms,
                until_ms=int(delivery.until_ms[n]), deliver_at_ms=int(row["deliver_at_ms"]),
                redelivered=bool(delivery.redelivered[n]), leading=node.leading, body=record.body,
                tags=tuple(unpack(record.meta).tags), wanted=wish.filter,
            )  # fmt: skip
            handed.append(hand_out)
            self.history.hand_outs.append(hand_out)
            self.history.count("handed out")
            self.history.count("redelivered", hand_out.redelivered)
            again = ", redelivered" if hand_out.redelivered else ""
            self.note(
                f"gets {hand_out.id:x} (message {number_of(hand_out.body)}) attempt {hand_out.attempt} from {node.name}"
                f"{again}, "
                f"grant {delivery.term}.{delivery.seq}, request {request_id.decode()}, until {hand_out.until_ms}",
                hand_out.id,
            )
        return handed

    def _consume(self, handed: list[HandOut]) -> None:
        rng = self.random
        together = rng.random() < 0.7
        settled: dict[tuple[str, int, int], list[HandOut]] = {}
        for hand_out in handed:
            hand_out.received = self.world.now
            chance = rng.random() if not self.good else 0.0
            if not self.good and self._fails(hand_out):
                chance = max(chance, 0.82)
            number = 0 if together else len(settled)
            if chance < 0.82:
                settled.setdefault(("ack", 0, number), []).append(hand_out)
            elif chance < 0.9:
                settled.setdefault(("nack", rng.choice(self.nacks), number), []).append(hand_out)
            elif chance < 0.94:
                settled.setdefault(("extend", rng.choice((500, 3000)), number), []).append(hand_out)
            else:
                self.history.count("consumer vanished")
        for (kind, value_ms, _), some in settled.items():
            self.world.after(rng.expovariate(1 / 0.15), self._settle, kind, some, value_ms, _RETRIES[kind])
        self._next()

    def _fails(self, hand_out: HandOut) -> bool:
        """What it is asked to do cannot be done: whoever tries."""
        number, workload = number_of(hand_out.body), self.cluster.workload
        if number is None or number >= len(self.history.messages):
            return False
        return self.history.messages[number].topic == workload.limited and number % 10 < 10 * workload.failing

    def _settle(self, kind: str, some: Sequence[HandOut], value_ms: int, retries: int) -> None:
        """One request, for one message or all that came together."""
        process = self.cluster.any_process(self.random)
        if process is None:
            if retries:
                self.world.after(0.3, self._settle, kind, some, value_ms, retries - 1)
            return
        tokens = [token for h in some for token in encode_leases(0, h.term, h.seq, [h.position], [h.hour], [h.index])]
        rows, _ = decode_leases(0, tokens)
        if kind == "ack":
            command = encode_ack(process.name, rows)
        elif kind == "nack":
            command = encode_nack(process.name, rows, value_ms, "cannot be done" if value_ms < 0 else "")
        else:
            command = encode_extend(process.name, rows, value_ms)
        for hand_out in some:
            if getattr(hand_out, f"{kind}_invoked") is None:
                setattr(hand_out, f"{kind}_invoked", self.world.now)
            hand_out.excused |= kind == "nack" and value_ms < -1

        def replied(result: LeaseResult | None, error: HadelayError | None) -> None:
            if error is not None or result is None:
                self.history.count(f"{kind} {error.type if error else 'nothing'}")
                if retries:
                    again = self.random.uniform(0.05, 0.4)
                    self.world.after(again, self._settle, kind, some, value_ms, retries - 1)
                return
            extended = []
            for hand_out, number in zip(some, result.outcomes.tolist(), strict=True):
                outcome = LeaseOutcome(number)
                self.history.count(f"{kind} {outcome.name}")
                self.note(f"{kind} of {hand_out.id:x} attempt {hand_out.attempt}: {outcome.name}", hand_out.id)
                if kind == "ack" and outcome != LeaseOutcome.LEASE_LOST and hand_out.acked is None:
                    hand_out.acked = self.world.now
                if kind == "extend" and outcome == LeaseOutcome.DONE:
                    hand_out.extend_until_ms = result.until_ms
                    extended.append(hand_out)
            if extended:
                self._settle("ack", extended, 0, _RETRIES["ack"])

        self.door.call(process, lambda node, done: node.propose(command, done), replied)
