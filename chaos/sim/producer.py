"""Producers of the simulated world: publish, repeat until the outcome is known, and cancel or reschedule some
messages."""

from __future__ import annotations

import random
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from chaos.sim.cluster import SimCluster
from chaos.sim.door import Client, Reply, Request
from chaos.sim.history import Message
from hadelay.api.service import Target
from hadelay.codec.meta import Meta, mask_of, pack
from hadelay.codec.publishcommand import hash_group
from hadelay.errors import HadelayError, NotFound
from hadelay.model import KEEP, REJECT, REPLACE, Draft
from hadelay.server.service.node import NodeService

if TYPE_CHECKING:
    from chaos.sim.machines import Process

#: Possible sizes of a batch, in messages.
_SIZES = (1, 1, 1, 2, 5, 12)
#: Share of runs whose producers send no Idempotency-Keys.
_KEYLESS = 0.2
#: Age of a publish, as a share of the idempotency window, at which a producer that does not know its outcome gives up.
_PATIENCE = 0.6


@dataclass(slots=True, eq=False)
class _Batch:
    """Messages that are published in one request, and the random stream that decides about later requests for them."""

    messages: list[Message]
    random: random.Random
    #: Idempotency-Key of the request; None: the request is not repeated once it may have been carried out.
    key: bytes | None
    #: True if an earlier request for the batch has an unknown outcome.
    unsure: bool = False
    #: True: the batch was confirmed, and is published again to test its Idempotency-Key.
    again: bool = False


class Producer(Client):
    """Producer that publishes a few messages per request under one Idempotency-Key, and repeats the request at any node
    until the outcome is known."""

    cluster: SimCluster

    def start(self, until: float, interval_s: float) -> None:
        #: True: this producer publishes without Idempotency-Keys, one message per request; its message rate is that of
        #: other producers.
        self.keyless = random.Random(f"{self.cluster.seed} keyless").random() < _KEYLESS
        self.until, self.interval_s = until, interval_s / fmean(_SIZES) if self.keyless else interval_s
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
        messages = [self._message(rng) for _ in range(1 if self.keyless else rng.choice(_SIZES))]
        batch = _Batch(messages, rng, None if self.keyless else b"k%d" % messages[0].number)
        if self.cluster.parts.take(part):
            self._send(batch)
        else:
            for message in messages:  # this part of the run is left out, so its messages are never published
                message.refused = message.absent = True
        self._next()

    def _message(self, rng: random.Random) -> Message:
        workload = self.cluster.workload
        relative = rng.random() < 0.7
        delay_ms = workload.delay_ms(rng)
        # Absolute due times are computed from the true time of day, not from a node's clock.
        when_ms = delay_ms if relative else self.world.wall_ms() + delay_ms
        padding = rng.choice((0, 20, 20, 200, 3000))
        message = Message(
            len(self.history.messages), rng.choice(workload.topics), relative, when_ms, padding, self.world.now
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
        if message.topic in self.history.grouped:
            # Draw groups from a separate random stream, so that drawing them changes nothing else in the run.
            own = random.Random(f"{self.cluster.seed} group of {message.number}")
            message.group = own.choice(workload.groups) if own.random() < workload.grouped else None
        self.history.messages.append(message)
        return message

    def _send(self, batch: _Batch) -> None:
        if batch.again and self.history.slept:
            return  # do not repeat the publish: the cluster may have forgotten its idempotency key
        process, messages = self.cluster.any_process(batch.random), batch.messages
        if process is None:
            self._again(batch)
            return
        age_s, window_s = self.world.now - messages[0].invoked, self.cluster.window_ms / 1000
        repeats = batch.again or batch.unsure

        def note_late() -> None:
            """Note a repetition that may come after its idempotency key was forgotten."""
            for message in messages if repeats and 2 * (self.world.now - messages[0].invoked) > window_s else ():
                message.repeated_late = True

        note_late()
        if batch.unsure and not batch.again and age_s > _PATIENCE * window_s:
            self.history.count("given up")
            for message in messages:
                message.refused = True
            return
        drafts = [
            Draft(
                m.topic, m.when_ms, m.relative, mask_of(m.tags), m.ttl_ms,
                self._meta(m), m.body, None, m.client_key, m.on_conflict, m.max_wait_ms,
                group=None if m.group is None else hash_group(m.group),
            )
            for m in messages
        ]  # fmt: skip

        def replied(receipts: Any, error: HadelayError | None) -> None:
            note_late()  # check again: hours may have passed since the request was sent
            if error is not None:
                self.history.count(f"publish {error.type}")
                self.note(f"publish {messages[0].number}+{len(messages)} at {process.name}: {error.type}: {error}")
                batch.unsure |= not error.outcome_known
                if batch.key is not None or error.outcome_known:
                    self._again(batch)
                else:
                    self.history.count("given up")
                    for message in messages:
                        message.refused = True
                return
            self._stored(process, batch, receipts)

        self.door.call(process, lambda node, done: process.service.publish(drafts, batch.key, done), replied)

    def _meta(self, message: Message) -> bytes:
        key = message.client_key.decode() if message.client_key is not None and self.cluster.full else None
        return pack(Meta(tags=list(message.tags), key=key, group=message.group))

    def _again(self, batch: _Batch) -> None:
        if not self.stopped:
            self.world.after(batch.random.uniform(0.02, 0.6), self._send, batch)

    def _stored(self, process: Process, batch: _Batch, receipts: Any) -> None:
        rng, workload = batch.random, self.cluster.workload
        self.history.count("published", len(batch.messages))
        for n, message in enumerate(batch.messages):
            if n in receipts.problems:
                # Without an id, the message was never stored. With an id, this is a repetition whose Idempotency-Key
                # was forgotten: its refusal says nothing about the first try.
                if message.id is None:
                    message.refused, message.absent = True, not batch.unsure
                self.note(f"message {message.number} refused: {receipts.problems[n]}")
                continue
            if n in receipts.duplicates:
                self.history.count("duplicate receipt")
            if batch.again:
                self.history.count("checked I8 duplicate, answered")
                if message.id is not None and message.id != receipts.ids[n]:
                    self.history.second_ids.append((message.number, message.id, receipts.ids[n]))
                continue
            message.id, message.deliver_at_ms = receipts.ids[n], receipts.deliver_at_ms[n]
            message.stored = self.world.now
            keeps = message.client_key is not None and message.on_conflict == KEEP
            message.kept_other = keeps and n in receipts.duplicates
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
        # Do not repeat a batch with refused messages: the cluster does not remember every refusal, so it might store
        # them now.
        if not batch.again and rng.random() < workload.repeated and batch.key is not None and not receipts.problems:
            batch.again = True
            self.world.after(rng.uniform(0.0, 3.0), self._send, batch)

    def _change(self, message: Message, request: Request, what: str, then: Reply, rng: random.Random) -> None:
        """Send a cancel or reschedule. Calls then(result, error) for a success, or if the outcome is unknown."""

        def replied(result: Any, error: HadelayError | None) -> None:
            said = result if isinstance(result, str) else "done" if error is None else error.extra.get("outcome", "")
            if outcome := "NOT_FOUND" if isinstance(error, NotFound) else said.upper():
                self.note(f"{what} of message {message.number}: {outcome}", message.id or 0)
                self.history.count(what)
                self.history.count(f"{what.split()[0]} {outcome}")
            if error is None or not outcome:
                then(result, error)

        self.ask(request, replied, rng=rng)

    def _cancel(self, message: Message, by_key: bool, rng: random.Random) -> None:
        """Cancel a message by id or by key. A cancel by key is not recorded for this message, because another message
        may have the key when the cancel takes effect."""
        if self.stopped or not self.cluster.rafts():
            return
        if message.client_key is not None:
            self.history.cancelled_keys.add((message.topic, message.client_key))
        if not by_key:
            message.cancel_invoked = self.world.now if message.cancel_invoked is None else message.cancel_invoked
        target = target_of(message, by_key)

        def replied(_: Any, error: HadelayError | None) -> None:
            if error is not None:
                self.world.after(rng.uniform(0.05, 0.5), self._cancel, message, by_key, rng)
                return
            if not by_key and message.cancelled is None:
                message.cancelled = self.world.now

        async def cancel(service: NodeService) -> str:
            await service.messages.cancel(target)
            return "cancelled"

        self._change(message, cancel, f"cancel by {'key' if by_key else 'id'}", replied, rng)

    def _reschedule(self, message: Message, by_key: bool, rng: random.Random, tries: int) -> None:
        """Reschedule a message, by id or by key, to a near time or to now."""
        if self.stopped or not self.cluster.rafts():
            return
        when_ms = rng.choice((0, 5, 700, 3000))
        if by_key:
            self.history.moved_keys.add((message.topic, message.client_key))
        else:
            message.rescheduled = True
        target = target_of(message, by_key)

        def replied(result: Any, error: HadelayError | None) -> None:
            if error is not None:
                message.unsure = True
                if tries < 5:
                    self.world.after(rng.uniform(0.05, 0.5), self._reschedule, message, by_key, rng, tries + 1)
                return
            for other in self.history.messages:
                if other.id == result[0]:
                    other.deliver_at_ms = result[1]

        what = f"reschedule by {'key' if by_key else 'id'}"
        self._change(message, lambda service: service.messages.reschedule(target, when_ms, True), what, replied, rng)


def target_of(message: Message, by_key: bool) -> Target:
    """Target of a request for a message: its id or, if `by_key`, (topic, client key)."""
    assert message.id is not None
    return (message.topic, message.client_key or b"") if by_key else message.id
