"""Extra load of a chaos run: a topic with two subscriptions. Each message is received and acked three times, or
cancelled by its published id."""

import asyncio
import random
from collections import defaultdict
from collections.abc import Iterator

from chaos.besides import Besides, insist, unended
from chaos.history import History, unix_ms
from hadelay.client import AsyncClient, AsyncMessage
from hadelay.errors import Conflict, HadelayError

_PAUSE_S, _PUT_S, _LEASE_S = 0.2, 0.3, 2.0
#: `_DELAY_S`: longest delay of a message, in seconds. `_FORGOTTEN`: share of hand-outs that are not acked, so that
#: their leases run out. `_CANCELLED`: one message in this many is cancelled.
_DELAY_S, _FORGOTTEN, _CANCELLED = 1.5, 0.1, 4
#: Rounding error of times, which are reported in whole milliseconds.
_ROUNDING_MS = 2


class Copies(Besides):
    """Publishes, cancels and consumes messages and their copies. Records each publish ("copied"), the copies that a
    cancel ended ("copy-cancelled"), each hand-out of a copy ("copy-given"), and each ack that was confirmed
    ("copy-acked")."""

    def __init__(self, topic: str, history: History) -> None:
        super().__init__(topic, history)
        self.queues = [topic, f"{topic}~a", f"{topic}~b"]
        #: `_acked` and `_cancelled`: acked and cancelled copies, each as (number of the message, queue).
        self._acked, self._cancelled = set[tuple[int, str]](), set[tuple[int, str]]()
        #: Number and id of each message whose cancel was requested.
        self._asked: dict[int, str] = {}
        #: Number of published messages, set when publishing has ended; -1 until then.
        self._published = -1

    async def publish(self, client: AsyncClient) -> None:
        """Publish messages, each after the confirmation of the one before; in the end, wait until all copies ended."""
        await insist(lambda: client.put_topic(self.topic, max_attempts=0))
        for name in ("a", "b"):
            await insist(lambda: client.put_subscription(self.topic, name, max_attempts=0))  # noqa: B023
        self.history.record("queues", t=self.history.clock(), queues=self.queues)
        n = 0
        while self.open:
            await self._put(client, n)
            n += 1
        self._published = n
        while not self._ended.is_set():
            await self._look_up(client)
            await asyncio.sleep(_PUT_S)

    async def _put(self, client: AsyncClient, n: int) -> None:
        body, key, delay_s = b"%d" % n, f"{self.topic}-{n}", round(random.uniform(0, _DELAY_S), 3)
        put = await insist(lambda: client.put(self.topic, body, delay=delay_s, idempotency_key=key))
        self.history.record("copied", t=self.history.clock(), n=n, id=put.id, due_ms=unix_ms(put.deliver_at))
        if not n % _CANCELLED:
            await asyncio.sleep(random.uniform(0, delay_s + _PUT_S))
            self._asked[n] = put.id
            self._note_cancelled(n, await insist(lambda: self._cancel(client, put.id)))
        await asyncio.sleep(_PUT_S)

    async def _cancel(self, client: AsyncClient, message_id: str) -> dict[str, str]:
        """Cancel all copies of a message. Returns queue → outcome, as some copies may be leased or acked already; {} if
        the answer has no outcomes."""
        try:
            await client.cancel(message_id)
        except Conflict as late:
            return late.outcomes or {}
        return dict.fromkeys(self.queues, "cancelled")

    def _note_cancelled(self, n: int, states: dict[str, str]) -> None:
        queues = [queue for queue, state in states.items() if state == "cancelled"]
        self.history.record("copy-cancelled", t=self.history.clock(), n=n, queues=queues)
        self._cancelled.update((n, queue) for queue in queues)

    async def _look_up(self, client: AsyncClient) -> None:
        """Look up messages whose copies may have been cancelled: the network may repeat a cancel, which then takes
        effect later."""
        for n, message_id in self._asked.items():
            if not {(n, queue) for queue in self.queues} <= self._acked | self._cancelled:
                found = await insist(lambda: client.get(message_id))  # noqa: B023
                self._note_cancelled(n, {one.topic: one.state for one in (found, *(found.copies or ()))})
        self._look()

    async def consume(self, client: AsyncClient) -> None:
        while not self._ended.is_set():
            asked = self.history.clock()
            try:
                messages = await client.receive(self.queues, max=20, wait=1.0, lease=_LEASE_S, timeout=2 * _LEASE_S)
            except (HadelayError, OSError):
                await asyncio.sleep(_PAUSE_S)
                continue
            for m in messages:
                self.history.record(
                    "copy-given", t=self.history.clock(), asked=asked, n=int(m.body), queue=m.topic, id=m.id,
                    now_ms=unix_ms(m.lease_until) - m.lease_left_ms,
                )  # fmt: skip
            await self._ack(client, [m for m in messages if not self.open or random.random() >= _FORGOTTEN])

    async def _ack(self, client: AsyncClient, messages: list[AsyncMessage]) -> None:
        outcomes = await insist(lambda: client.ack(messages)) if messages else []
        for m, outcome in zip(messages, outcomes, strict=True):
            if outcome in ("acked", "already_acked"):
                self.history.record("copy-acked", t=self.history.clock(), id=m.id)
                self._acked.add((int(m.body), m.topic))
        self._look()

    def _look(self) -> None:
        """End this extra load once all copies of all messages are acked or cancelled."""
        many = self._published * len(self.queues)
        if many == len(self._acked | self._cancelled) and not self._ended.is_set():
            self.history.record("aside", t=self.history.clock(), published=many, acked=len(self._acked))
            self._ended.set()


def miscopied(history: History) -> Iterator[tuple[str, str]]:
    """F1: the topic's own queue and each subscription hand out one copy of each message, not before its time, and not
    after the copy was acked or cancelled; a copy that was not cancelled is handed out and acked in the end."""
    puts = {event["n"]: event for event in history.of("copied")}
    ids = defaultdict[tuple[int, str], set[str]](set)
    for event in history.of("copy-given"):
        ids[event["n"], event["queue"]].add(event["id"])
    for (n, queue), found in ids.items():
        # The copy in the topic's own queue has the published id.
        named = found | ({puts[n]["id"]} if n in puts and "~" not in queue else set())
        yield "once", f"message {n} came out of {queue} as {', '.join(sorted(named))}" if len(named) > 1 else ""
    ends = _ends(history)
    yield from ((what, "") for what, _ in ends.values())
    for event in history.of("copy-given"):
        n, queue, asked = event["n"], event["queue"], event["asked"]
        this = f"message {n}, received from {queue} at {event['t']:.3f} s,"
        if n in puts:
            short_ms = puts[n]["due_ms"] - event["now_ms"]
            yield "early", f"{this} was {short_ms} ms early" if short_ms > _ROUNDING_MS else ""
        for key in (event["id"], (n, queue)):
            what, at = ends.get(key, ("acked", asked))
            if asked > at:
                yield what, f"{this} was {what} at {at:.3f} s"
    for event in history.of("queues") if history.of("drained") else ():
        for copy in ((n, queue) for n in puts for queue in event["queues"]):
            yield "each", "" if copy in ids or copy in ends else f"message {copy[0]} never came out of {copy[1]}"
    yield from unended(history, "copies")


def _ends(history: History) -> dict[str | tuple[int, str], tuple[str, float]]:
    """("acked", time) by the id of a copy, and ("cancelled", time) by (number of the message, queue); the time is that
    of the first confirmation."""
    ends: dict[str | tuple[int, str], tuple[str, float]] = {}
    for event in history.of("copy-acked"):
        ends.setdefault(event["id"], ("acked", event["t"]))
    for event in history.of("copy-cancelled"):
        for queue in event["queues"]:
            ends.setdefault((event["n"], queue), ("cancelled", event["t"]))
    return ends
