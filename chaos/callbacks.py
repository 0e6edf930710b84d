"""Extra load of a chaos run: messages that a consumer acks or makes dead letters, and callbacks about them in another
topic."""

import asyncio
import random
from collections import defaultdict
from collections.abc import Iterator

from chaos.besides import Besides, insist, unended
from chaos.history import History
from hadelay.client import AsyncClient, AsyncMessage
from hadelay.errors import HadelayError

_PAUSE_S, _PUT_S, _LEASE_S = 0.2, 0.3, 2.0
#: `_DEAD`: one message in this many is made a dead letter. `_FORGOTTEN`: share of hand-outs that are not settled, so
#: that their leases run out.
_DEAD, _FORGOTTEN = 4, 0.1


class Callbacks(Besides):
    """Publishes and settles messages, and consumes their callbacks. Records each ack and each nack that makes a message
    dead ("settle"), those that were confirmed ("settled"), and each hand-out of a callback ("callback")."""

    def __init__(self, topic: str, history: History) -> None:
        super().__init__(topic, history)
        self.outcomes = f"{topic}-outcomes"
        #: `_kinds`: id of an acked callback → its kind, "success" or "failure". `_reported`: ids of the messages that
        #: acked callbacks are about.
        self._kinds, self._reported = dict[str, str](), set[str]()
        #: Number of published messages, set when publishing has ended; -1 until then.
        self._published = -1

    async def publish(self, client: AsyncClient) -> None:
        """Publish messages, each after the confirmation of the one before."""
        await insist(lambda: client.put_topic(self.outcomes, max_attempts=0))
        await insist(
            lambda: client.put_topic(self.topic, max_attempts=0, on_success=self.outcomes, on_failure=self.outcomes)
        )
        n = 0
        while self.open:
            body, key = b"%d" % n, f"{self.topic}-{n}"
            await insist(lambda: client.put(self.topic, body, idempotency_key=key))  # noqa: B023
            n += 1
            await asyncio.sleep(_PUT_S)
        self._published = n
        self._look()

    async def consume(self, client: AsyncClient) -> None:
        while not self._ended.is_set():
            try:
                messages = await client.receive(
                    [self.topic, self.outcomes], max=20, wait=1.0, lease=_LEASE_S, timeout=2 * _LEASE_S
                )
            except (HadelayError, OSError):
                await asyncio.sleep(_PAUSE_S)
                continue
            for m in messages:
                if m.topic == self.outcomes:
                    self._record("callback", id=m.id, of=m.json()["id"], kind=m.meta["callback"])
            kept = [m for m in messages if not self.open or random.random() >= _FORGOTTEN]
            dead = [m for m in kept if m.topic == self.topic and not int(m.body) % _DEAD]
            await self._settle(client, [m for m in kept if m not in dead], "success")
            await self._settle(client, dead, "failure")
            self._look()

    async def _settle(self, client: AsyncClient, messages: list[AsyncMessage], kind: str) -> None:
        """Ack messages (kind "success"), or make them dead letters ("failure"); record the requests and the
        confirmations."""
        if not messages:
            return
        for m in messages:
            if m.topic == self.topic:
                self._record("settle", id=m.id, kind=kind)
        if kind == "success":
            outcomes: list[str] = [*await insist(lambda: client.ack(messages))]
        else:
            outcomes = [*await insist(lambda: client.nack(messages, dead=True))]
        for m, outcome in zip(messages, outcomes, strict=True):
            if m.topic == self.topic and outcome in ("acked", "nacked"):
                self._record("settled", id=m.id, kind=kind)
            elif m.topic == self.outcomes and outcome in ("acked", "already_acked"):
                self._kinds[m.id] = m.meta["callback"]
                self._reported.add(m.json()["id"])

    def _record(self, event: str, **fields: str) -> None:
        self.history.record(event, t=self.history.clock(), **fields)

    def _look(self) -> None:
        """End this extra load once a callback about each message is acked."""
        if self._published == len(self._reported) and not self._ended.is_set():
            callbacks, successes = len(self._kinds), sum(kind == "success" for kind in self._kinds.values())
            self.history.record(
                "aside", t=self.history.clock(), published=self._published + callbacks, acked=callbacks + successes
            )
            self._ended.set()


def unreported(history: History) -> Iterator[tuple[str, str]]:
    """C1: each ack, and each death of a message, has exactly one callback, of the right kind ("success" or "failure").
    There are no other callbacks."""
    asked = {event["id"]: event["kind"] for event in history.of("settle")}
    reported = defaultdict[str, set[str]](set)
    for event in history.of("callback"):
        reported[event["of"]].add(event["id"])
        kind = asked.get(event["of"], "none")
        text = f"callback {event['id']} reports {event['kind']} of {event['of']}, and a consumer asked for {kind}"
        yield "kind", text if event["kind"] != kind else ""
    for message_id, found in reported.items():
        text = f"message {message_id} has the callbacks {', '.join(sorted(found))}"
        yield "once", text if len(found) > 1 else ""
    for event in history.of("settled") if history.of("drained") else ():
        text = f"message {event['id']} ended at {event['t']:.3f} s, and no callback came"
        yield "each", text if event["id"] not in reported else ""
    yield from unended(history, "callbacks")
