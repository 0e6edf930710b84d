"""Producers, consumers and an operator that behave like users. They also record what they see, repeat requests, forget
acks, hang up and give messages back.

Two places define the load: `_DONE_TO` has the operations on stored messages, `Traffic.start` starts the clients.
"""

import asyncio
import contextlib
import os
import random
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from operator import gt
from typing import Any

from chaos.besides import Lines, Moves
from chaos.callbacks import Callbacks
from chaos.changing import Changing
from chaos.cluster import Cluster
from chaos.copies import Copies
from chaos.fills import Fills
from chaos.history import History, body_of, checksum, number_of, term_of, unix_ms
from chaos.planned import Planned
from chaos.scenario import Load
from hadelay.client import AsyncClient, Message, Put, Receipt
from hadelay.errors import HadelayError

_PUT_S, _RECEIVE_S, _SETTLE_S = 10.0, 5.0, 5.0
_LOOK_S = 0.02
_TAGS = ("a", "b", "c", "d")
#: Tag filters of receives, as (tags that are all required, tags of which one is required); consumers use them in turns.
_WANTED = ((("a",), ()), ((), ("b", "c")), (("a",), ("b", "c", "d")))
#: Limit, in seconds, of the answer time of a reschedule or redrive: a later answer is not recorded, because it may be
#: the answer to a retry, while the first try may still take effect.
_SURE_S = 0.5
#: Pause, in seconds, between two listings of the dead letters, and between a listing and the redrives of its messages.
_DEAD_LOOK_S = 0.7
#: Interval, in seconds, and batch size of the look-ups of messages whose TTL should have ended.
_EXPIRED_LOOK_S, _EXPIRED_MANY = 0.5, 20
#: `_MARK`: name of the meta entry with a marker that chaos looks for in the journals. `_MARK_S`: seconds between two
#: messages with a marker.
_MARK, _MARK_S = "chaos", 0.4
#: Final states of a message.
_OVER = ("acked", "cancelled", "expired")


class Traffic:
    def __init__(
        self, urls: list[str], load: Load, history: History, seed: int, cluster: Cluster | None = None, name: str = ""
    ) -> None:
        """cluster: the cluster under load, which is asked how far its journals are synced; None: syncs are not
        recorded. name: prefix of the names of topics and schedules."""
        self.urls, self.load, self.history = urls, load, history
        self.cluster = cluster or Cluster()
        self.syncs = self.cluster.syncs
        self.draw = random.Random(seed)
        self.name = f"{name}chaos-{os.urandom(4).hex()}"
        self.topics = [f"{self.name}-{i}" for i in range(load.topics)]
        #: Name of the topic with a limit of attempts.
        self.limited = f"{self.name}-limited"
        #: Name of a topic without consumers: half of the messages with a TTL go there, and end when their TTL ends.
        self.unread = f"{self.name}-unread"
        self.planned = Planned(f"{self.name}-planned", history)
        self.changing = Changing(f"{self.name}-changing", history)
        self.lines, self.moves = Lines(f"{self.name}-lines", history), Moves(f"{self.name}-moves", history)
        self.copies, self.fills = Copies(f"{self.name}-copies", history), Fills(f"{self.name}-fills", history)
        self.callbacks = Callbacks(f"{self.name}-callbacks", history)
        self.publishing = True
        #: True at the end of the run: consumers only ack, and never hang up.
        self.draining = False
        self._next = 0
        self._clients: list[AsyncClient] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._publishers: list[asyncio.Task[Any]] = []
        #: Messages to look up, as (time, number): their TTL has ended by that time, unless a consumer acked them.
        self._expiring: deque[tuple[float, int]] = deque()
        self._acked: set[str] = set()
        #: Time of the last publish with a marker that chaos looks for in the journals.
        self._marked = 0.0

    def client(self, urls: Sequence[str] | None = None) -> AsyncClient:
        client = AsyncClient(urls or self.urls, timeout=_PUT_S)
        self._clients.append(client)
        return client

    async def start(self) -> None:
        admin = self.client()
        for topic in self.topics:
            await admin.put_topic(topic, max_attempts=0, backoff=["100ms", "1s"])
        await admin.put_topic(self.unread, max_attempts=0)
        await self.planned.start(admin)
        await self.changing.start(admin)
        await admin.put_topic(self.limited, max_attempts=self.load.attempts, backoff=["100ms", "1s"])
        self.history.record("topic", t=self.history.clock(), topic=self.limited, max_attempts=self.load.attempts)
        self._publishers = [self.spawn(self._publish(i)) for i in range(self.load.publishers)]
        choosy = min(self.load.consumers - 1, round(self.load.consumers * self.load.filtered))
        for i in range(self.load.consumers):
            every, some = _WANTED[i % len(_WANTED)] if i < choosy else ((), ())
            self.spawn(self._consume(f"{self.name}-c{i}", every, some))
        for work in (
            self.planned.consume, self.changing.consume, self.changing.operate, self.lines.publish, self.lines.consume,
            self.moves.work, self.copies.publish, self.copies.consume, self.fills.work,
            self.callbacks.publish, self.callbacks.consume,
        ):  # fmt: skip
            self.spawn(work(self.client()))
        self.spawn(self._redrive())
        self.spawn(self._look_at_expired())

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception():
            task.get_loop().call_exception_handler(
                {"message": "a publisher or consumer failed", "exception": task.exception()}
            )

    async def finish(self, client: AsyncClient) -> None:
        """Wait until all extra load (chaos.besides and similar modules) has ended."""
        await asyncio.gather(
            self.planned.finish(client), self.changing.finish(client), self.lines.finish(), self.moves.finish(),
            self.copies.finish(), self.fills.finish(), self.callbacks.finish(),
        )  # fmt: skip

    async def no_more(self) -> None:
        """Wait until every publish has an answer."""
        self.publishing = False
        await asyncio.wait(self._publishers)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in self._clients:
            await client.close()

    def _new(self) -> tuple[Put, int]:
        n, self._next = self._next, self._next + 1
        draw, load = self.draw, self.load
        delay_s, size = round(draw.uniform(*load.delay_s), 3), draw.randint(*load.payload_bytes)
        key = f"k{n}" if draw.random() < load.keyed else None
        tags = draw.sample(_TAGS, draw.randint(1, len(_TAGS))) if draw.random() < load.tagged else []
        topic, ttl_s = draw.choice(self.topics), 0.0
        if draw.random() < load.limited:
            topic = self.limited
        elif draw.random() < load.expiring:
            topic, ttl_s = draw.choice((topic, self.unread)), round(draw.uniform(*load.ttl_s), 3)
        put = Put(topic=topic, body=body_of(n, size), delay=delay_s, key=key, tags=tags or None, ttl=ttl_s or None)
        self.history.record(
            "put", n=n, delay_s=delay_s, size=size, asked=self.history.clock(), topic=topic, key=key, tags=tags,
            ttl_s=ttl_s,
        )  # fmt: skip
        return put, n

    async def _publish(self, i: int) -> None:
        client = self.client()
        many = self.load.batch if i % 2 else 1
        every_s = many * self.load.publishers / self.load.rate
        at = self.history.clock()
        while self.publishing:
            # After an outage, catch up on at most one second of publishes.
            at = max(at + every_s, self.history.clock() - 1)
            await asyncio.sleep(max(0.0, at - self.history.clock()))
            if many > 1:
                await self._put_many(client, many)
            else:
                await self.put_one(client)

    async def put_one(self, client: AsyncClient, timeout_s: float = _PUT_S) -> bool:
        put, n = self._new()
        key = f"{self.name}-{n}"
        if self.history.clock() - self._marked > _MARK_S:
            self._marked = self.history.clock()
            put.meta = {_MARK: f"{key}."}
        if not await self._put(client, put, n, key, timeout_s, self.syncs()):
            return False
        if self.draw.random() < self.load.repeated:
            await self._put(client, put, n, key, timeout_s)
        self._go_on(client, n)
        return True

    def _go_on(self, client: AsyncClient, n: int) -> None:
        """Draw at most one later operation for a stored message (cancel or reschedule), and start it."""
        chance = self.draw.random()
        for share, operation in _DONE_TO:
            chance -= getattr(self.load, share)
            if chance < 0:
                self.spawn(operation(self, client, n))
                return

    async def _put(
        self, client: AsyncClient, put: Put, n: int, key: str, timeout_s: float, before: tuple[int, ...] = ()
    ) -> bool:
        try:
            receipt = await client.put(
                put.topic, put.body, delay=put.delay, key=put.key, tags=put.tags, ttl=put.ttl, meta=put.meta,
                idempotency_key=key, timeout=timeout_s,
            )  # fmt: skip
        except (HadelayError, OSError) as error:
            self._failed([n], error)
            return False
        if put.meta and before:
            self.spawn(self._place(n, put.meta[_MARK].encode(), self.cluster.synced()))
        self._stored(n, receipt, before)
        return True

    async def _place(self, n: int, marker: bytes, synced: list[dict[int, int]]) -> None:
        """Look the message up in the journals; record the nodes that had not synced it when the answer came."""
        t = self.history.clock()
        found, unsynced = await asyncio.to_thread(self.cluster.unsynced, marker, synced)
        self.history.record("placed", n=n, t=t, found=found, unsynced=unsynced)

    def _stored(self, n: int, receipt: Receipt, before: tuple[int, ...]) -> None:
        """Record a confirmed publish. before: each node's number of syncs when the publish was sent."""
        syncs = sum(map(gt, self.syncs(), before)) if before else None
        now, put = self.history.clock(), self.history.puts[n]
        if put.ttl_s and put.id is None:
            self._expiring.append((now + 2 * self.load.delay_s[1] + put.ttl_s + self.load.lease_s, n))
        due_ms = unix_ms(receipt.deliver_at)
        self.history.record("stored", n=n, t=now, id=receipt.id, due_ms=due_ms, syncs=syncs)

    async def _put_many(self, client: AsyncClient, many: int) -> None:
        before = self.syncs()
        puts = [self._new() for _ in range(many)]
        try:
            results = await client.put_many([put for put, _ in puts])
        except (HadelayError, OSError) as error:
            self._failed([n for _, n in puts], error)
            return
        for (_, n), result in zip(puts, results, strict=True):
            if isinstance(result, HadelayError):
                self._failed([n], result)
            else:
                self._stored(n, result, before)
                self._go_on(client, n)

    def _failed(self, numbers: list[int], error: Exception) -> None:
        """Record a failed publish: only a definite refusal is `refused`, other errors leave the outcome unknown."""
        # The outcome `cancelled` is no refusal of the publish: its first try stored the message, which was cancelled
        # before the retry.
        known = isinstance(error, HadelayError) and error.outcome_known and error.extra.get("outcome") != "cancelled"
        self.history.record("trouble", t=self.history.clock(), what=type(error).__name__, many=len(numbers))
        for n in numbers:
            if known and self.history.puts[n].id is None:
                self.history.record("refused", n=n, why=type(error).__name__)

    async def _cancel(self, client: AsyncClient, n: int) -> None:
        put = self.history.puts[n]
        await asyncio.sleep(self.draw.uniform(0, put.delay_s))
        self.history.record("cancel", n=n, t=self.history.clock())
        with contextlib.suppress(HadelayError, OSError):
            await client.cancel(put.id)
            self.history.record("cancelled", n=n, t=self.history.clock())

    async def _reschedule(self, client: AsyncClient, n: int) -> None:
        """Reschedule a message by a delay, or to an absolute time computed from its receipt, which a late repetition of
        the request does not change."""
        put = self.history.puts[n]
        await asyncio.sleep(self.draw.uniform(0, put.delay_s))
        delay_s = round(self.draw.uniform(*self.load.delay_s), 3)
        by_delay = self.draw.random() < 0.5 or put.due_ms is None
        asked = self.history.clock()
        self.history.record("move", n=n, t=asked, delay_s=delay_s if by_delay else 0.0)
        with contextlib.suppress(HadelayError, OSError):
            at = None if put.due_ms is None or by_delay else put.due_ms + round(delay_s * 500)
            answer = await client.reschedule(put.id, delay=delay_s if by_delay else None, at=at)
            now = self.history.clock()
            if now - asked < _SURE_S:
                self.history.record("moved", n=n, t=now, due_ms=unix_ms(answer.deliver_at))

    async def look_up(self, client: AsyncClient, message_id: str) -> tuple[str, int | None]:
        """Look up the state of a message and the end of its TTL."""
        try:
            found = await client.get(message_id)
        except HadelayError as error:
            return f"not found: {error}", None
        over = [unix_ms(event.at) for event in found.history if event.event == "ttl_expired"]
        return found.state, over[-1] if over else None

    async def _look_at_expired(self) -> None:
        """Look up messages when their TTL should have ended, not only at the end of the run."""
        client = self.client()
        while True:
            await asyncio.sleep(_EXPIRED_LOOK_S)
            for _ in range(min(_EXPIRED_MANY, len(self._expiring))):
                if self._expiring[0][0] > self.history.clock():
                    break
                put = self.history.puts[self._expiring.popleft()[1]]
                if put.id is None or put.id in self._acked:
                    continue
                with contextlib.suppress(OSError):
                    state, ended_ms = await self.look_up(client, put.id)
                    if state in _OVER:
                        now = self.history.clock()
                        self.history.record("asked-for", t=now, id=put.id, state=state, ended_ms=ended_ms)

    async def _redrive(self) -> None:
        """In a loop: list the dead letters, and redrive them a while later."""
        client = self.client()
        while True:
            await asyncio.sleep(_DEAD_LOOK_S)
            with contextlib.suppress(HadelayError, OSError):
                letters = [letter async for letter in client.dead(self.limited)]
                now = self.history.clock()
                for letter in letters:
                    self.history.record("dead", id=letter.id, attempt=letter.attempt, t=now)
                if letters:
                    await asyncio.sleep(0 if self.draining else _DEAD_LOOK_S)
                    await self._redrive_these(client, [letter.id for letter in letters])

    async def _redrive_these(self, client: AsyncClient, ids: list[str]) -> None:
        asked = self.history.clock()
        for message_id in ids:
            self.history.record("redrive", id=message_id, t=asked)
        results = await client.redrive(self.limited, ids)
        now = self.history.clock()
        for result in results:
            if result.outcome == "redriven" and now - asked < _SURE_S:
                self.history.record("redriven", id=result.id, t=now)

    async def _consume(self, name: str, every: Sequence[str], some: Sequence[str]) -> None:
        """Receive messages in a loop. every, some: tag filters: all tags of `every`, one tag of `some`."""
        client, topics = self.client(), [*self.topics, self.limited]
        request, asked = "", 0.0
        while True:
            if not request:
                request, asked = os.urandom(8).hex(), self.history.clock()
            hang_up = not self.draining and self.draw.random() < self.load.hung_up
            try:
                async with asyncio.timeout(self.draw.uniform(0, 0.3) if hang_up else None):
                    messages = await client.receive(
                        topics, max=20, wait=1.0, lease=self.load.lease_s, consumer=name, request_id=request,
                        tags=every, any_tags=some, timeout=_RECEIVE_S,
                    )  # fmt: skip
            except TimeoutError:
                if self.draw.random() < 0.5:
                    request = ""  # half of the repeated receives use a new request id, the others keep the old id
                continue
            except (HadelayError, OSError):
                await asyncio.sleep(_LOOK_S)
                continue
            got = self.history.clock()
            for m in messages:
                n, until_ms = number_of(m.body), unix_ms(m.lease_until)
                self.history.record(
                    "given", id=m.id, n=-1 if n is None else n, attempt=m.attempt, consumer=name, request=request,
                    asked=asked, got=got, now_ms=until_ms - m.lease_left_ms, until_ms=until_ms,
                    due_ms=unix_ms(m.deliver_at), redelivered=m.redelivered, term=term_of(m.lease),
                    body=checksum(m.body), topic=m.topic, key=m.key, tags=m.tags, every=list(every), some=list(some),
                )  # fmt: skip
            await self._settle(client, messages, request)
            request = ""

    async def _settle(self, client: AsyncClient, messages: Sequence[Message], request: str) -> None:
        acks: list[Message] = []
        nacks: list[Message] = []
        for m in messages:
            chance = 1.0 if self.draining else self.draw.random()
            if m.topic == self.limited:
                (nacks if chance < 0.5 else acks).append(m)
            elif chance < self.load.forgotten:
                continue
            elif chance < self.load.forgotten + self.load.extended:
                self.spawn(self._hold(client, m, request))
            else:
                nacked = chance < self.load.forgotten + self.load.extended + self.load.nacked
                (nacks if nacked else acks).append(m)
        for m in nacks:
            self.history.record("nack", id=m.id, attempt=m.attempt, request=request, t=self.history.clock())
        await self._ack(client, acks, request)
        with contextlib.suppress(HadelayError, OSError, TimeoutError):
            async with asyncio.timeout(_SETTLE_S):
                await client.nack(nacks)

    async def _ack(self, client: AsyncClient, messages: Sequence[Message], request: str) -> None:
        for m in messages:
            self.history.record("ack", id=m.id, attempt=m.attempt, request=request, t=self.history.clock())
        with contextlib.suppress(HadelayError, OSError, TimeoutError):
            async with asyncio.timeout(_SETTLE_S):
                outcomes = await client.ack(messages)
                now = self.history.clock()
                for m, outcome in zip(messages, outcomes, strict=True):
                    if outcome in ("acked", "already_acked"):
                        self._acked.add(m.id)
                        self.history.record("acked", id=m.id, attempt=m.attempt, request=request, t=now)

    async def _hold(self, client: AsyncClient, m: Message, request: str) -> None:
        """Extend the lease when half of it is over; then ack the message, or let the lease end."""
        lease_s = self.load.lease_s
        await asyncio.sleep(lease_s / 2)
        asked = self.history.clock()
        self.history.record("extend", id=m.id, attempt=m.attempt, request=request, t=asked, lease_s=lease_s)
        with contextlib.suppress(HadelayError, OSError):
            if await client.extend(m, lease=lease_s) != ["extended"]:
                return
            now = self.history.clock()
            self.history.record("extended", id=m.id, attempt=m.attempt, request=request, t=now)
            if self.draining or self.draw.random() < 0.5:
                await asyncio.sleep(lease_s / 2)
                await self._ack(client, [m], request)


_DoneTo = Callable[[Traffic, AsyncClient, int], Coroutine[Any, Any, None]]
#: Later operations on a stored message: (field of `Load` with the share of messages that get it, function).
_DONE_TO: tuple[tuple[str, _DoneTo], ...] = (
    ("cancelled", Traffic._cancel),
    ("rescheduled", Traffic._reschedule),
)
