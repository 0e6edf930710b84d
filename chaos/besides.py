"""Extra load of a chaos run: one topic whose messages have message groups, and one whose messages are changed by bulk
jobs."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from chaos.history import History
from hadelay.client import AsyncClient, Message, Put, Receipt
from hadelay.client.types import JobAction
from hadelay.errors import HadelayError, Impossible

T = TypeVar("T")
_PAUSE_S, _PUT_S, _LEASE_S, _END_S = 0.2, 0.3, 2.0, 60.0
#: `_GROUPS`: number of message groups. `_FORGOTTEN`: share of hand-outs that are not acked, so that their leases run
#: out.
_GROUPS, _FORGOTTEN = 3, 0.1
#: `_ROUND_S`: pause between two rounds of bulk jobs, in seconds. `_RATE`: limit of a job's rate, in messages per
#: second, so low that a job takes several steps.
_ROUND_S, _RATE = 1.0, 40.0
#: Per round of bulk jobs: number of messages; delay of the messages, in ms; and time by which the first job shifts
#: their due times, as text and in seconds.
_MANY, _DELAY_MS, _SHIFT, _SHIFT_S = 30, 3_600_000, "30m", 1_800.0


async def insist(call: Callable[[], Awaitable[T]]) -> T:
    """Call until the cluster answers without an error. Raises Impossible at once: a repetition would not help."""
    while True:
        try:
            return await call()
        except Impossible:
            raise
        except (HadelayError, OSError):
            await asyncio.sleep(_PAUSE_S)


class Besides:
    """Base class of extra load, which goes on until the end of the run. `finish` stops it, and waits until the
    operations that have begun are done."""

    def __init__(self, topic: str, history: History) -> None:
        self.topic, self.history, self.open = topic, history, True
        self._ended = asyncio.Event()

    async def finish(self) -> None:
        self.open = False
        try:
            await asyncio.wait_for(self._ended.wait(), _END_S)
        except TimeoutError:
            self.history.record("unended", t=self.history.clock(), topic=self.topic)


class Lines(Besides):
    """Publishes and consumes messages of three message groups. Of each group, one message at a time may be handed out
    (commit mode only)."""

    def __init__(self, topic: str, history: History) -> None:
        super().__init__(topic, history)
        self._acked: set[int] = set()
        #: Number of published messages, set when publishing has ended; -1 until then.
        self._published = -1

    async def publish(self, client: AsyncClient) -> None:
        """Publish messages, each after the confirmation of the one before; in the end, wait for their acks."""
        n = 0
        try:
            await insist(lambda: client.put_topic(self.topic, group_concurrency=1, max_attempts=60_000))
        except Impossible:  # interval mode has no message groups: leave this extra load out
            self._ended.set()
            return
        while self.open:
            self.history.record("line", t=self.history.clock(), n=n)
            body, group, key = b"%d" % n, f"g{n % _GROUPS}", f"{self.topic}-{n}"
            await insist(lambda: client.put(self.topic, body, group=group, idempotency_key=key))  # noqa: B023
            n += 1
            await asyncio.sleep(_PUT_S)
        self._published = n
        self._look()

    def _look(self) -> None:
        """End this extra load once all published messages are acked."""
        if self._published == len(self._acked) and not self._ended.is_set():
            self.history.record("aside", t=self.history.clock(), published=self._published, acked=len(self._acked))
            self._ended.set()

    async def consume(self, client: AsyncClient) -> None:
        while not self._ended.is_set():
            try:
                messages = await client.receive([self.topic], wait=1.0, lease=_LEASE_S, timeout=2 * _LEASE_S)
                for m in messages:
                    self.history.record("line-given", t=self.history.clock(), n=int(m.body))
                await self._ack(client, [m for m in messages if not self.open or random.random() >= _FORGOTTEN])
            except (HadelayError, OSError):
                await asyncio.sleep(_PAUSE_S)

    async def _ack(self, client: AsyncClient, messages: list[Message]) -> None:
        for m in messages:
            self.history.record("line-ack", t=self.history.clock(), n=int(m.body))
        outcomes = await insist(lambda: client.ack(messages)) if messages else []
        for m, outcome in zip(messages, outcomes, strict=True):
            if outcome in ("acked", "already_acked"):
                self._acked.add(int(m.body))
        self._look()


class Moves(Besides):
    """In rounds: publishes messages, shifts their due times by half an hour with one bulk job, and cancels them with
    another."""

    async def work(self, client: AsyncClient) -> None:
        rounds = 0
        while self.open:
            await self._round(client, f"{self.topic}-{rounds}", f"{rounds}:")
            rounds += 1
            await asyncio.sleep(_ROUND_S)
        self.history.record("aside", t=self.history.clock(), published=rounds * _MANY, acked=0)
        self._ended.set()

    async def _round(self, client: AsyncClient, name: str, prefix: str) -> None:
        at_ms = round(time.time() * 1000) + _DELAY_MS
        puts = [Put(topic=self.topic, body=b"m", at=at_ms + n, key=f"{prefix}{n}") for n in range(_MANY)]
        receipts: list[Receipt] = []
        while len(receipts) < _MANY:
            found = await insist(lambda: client.put_many(puts, idempotency_key=name))
            receipts = [one for one in found if isinstance(one, Receipt)]
        before = {one.id: one.deliver_at for one in receipts}
        moved = await self._job(client, f"{name}-move", prefix, shift=_SHIFT)

        async def listed() -> dict[str, float]:
            return {m.id: m.deliver_at.timestamp() async for m in client.messages(self.topic) if m.id in before}

        after = await insist(listed)
        wrong = [i for i, at in before.items() if round(after.get(i, 0) - at.timestamp(), 3) != _SHIFT_S]
        cancelled = await self._job(client, f"{name}-cancel", prefix, shift=None)
        self.history.record(
            "moves", t=self.history.clock(), many=_MANY, moved=moved, cancelled=cancelled, wrong=sorted(wrong)
        )

    async def _job(self, client: AsyncClient, request_id: str, prefix: str, shift: str | None) -> int:
        """Run a job, and ask for it again with the same request_id; returns the number of changed messages."""

        async def begin() -> int:
            action: JobAction = "cancel" if shift is None else "reschedule"
            job = await client.begin_job(
                action, self.topic, rate=_RATE, request_id=request_id, key_prefix=prefix, shift=shift
            )
            return job.id

        number = await insist(begin)
        again = await insist(begin)
        self.history.record("job", t=self.history.clock(), request=request_id, numbers=[number, again])
        while True:
            job = await insist(lambda: client.job(number))
            if job.ended:
                return job.done
            await asyncio.sleep(_PAUSE_S)


def disordered(history: History) -> Iterator[tuple[str, str]]:
    """G2, G3: in a topic with group_concurrency 1, a message is handed out only after all earlier messages of its group
    were acked; in the end, all messages were handed out and acked."""
    acks: dict[int, float] = {}
    for event in history.of("line-ack"):
        acks.setdefault(event["n"], event["t"])
    #: Per message, the time at which the last of the earlier messages of its group was acked.
    since, latest = dict[int, float](), [0.0] * _GROUPS
    for n in range(max((event["n"] for event in history.of("line-given")), default=-1) + 1):
        since[n] = latest[n % _GROUPS]
        latest[n % _GROUPS] = max(since[n], acks.get(n, float("inf")))
    for event in history.of("line-given"):
        n, t = event["n"], event["t"]
        text = (
            f"message {n} was handed out at {t:.3f} s, and all earlier ones of its group were acked at {since[n]:.3f} s"
        )
        yield "in order", text if since[n] > t else ""
    yield from unended(history, "lines")


def unmoved(history: History) -> Iterator[tuple[str, str]]:
    """J1: a bulk job changes each message once and counts all of them, also if the request is repeated."""
    for event in history.of("moves"):
        wrong, many = event["wrong"], event["many"]
        yield "once", f"{len(wrong)} messages were not moved by the shift, such as {wrong[0]}" if wrong else ""
        for job in ("moved", "cancelled"):
            yield "counts", f"a job counts {event[job]} of {many} messages as {job}" if event[job] != many else ""
    for event in history.of("job"):
        text = f"{event['request']} began the jobs {event['numbers']}"
        yield "repeated", text if len(set(event["numbers"])) > 1 else ""
    yield from unended(history, "moves")


def unended(history: History, kind: str) -> Iterator[tuple[str, str]]:
    for _ in history.of("drained"):
        yield "ended", ""
    for event in history.of("unended"):
        if event["topic"].endswith(kind):
            yield "ended", f"{event['topic']}: the work did not end within {_END_S:.0f} s after healing"


def counted(history: History) -> tuple[int, int]:
    """(Number of published messages, number of acked messages) of this extra load."""
    events = history.of("aside")
    return sum(event["published"] for event in events), sum(event["acked"] for event in events)
