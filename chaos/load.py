"""Producers and consumers, as users write them, except that they write down what they see, repeat themselves, forget,
hang up and hand back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Callable, Coroutine, Sequence
from operator import gt
from typing import Any

from chaos.history import History, body_of, number_of, term_of
from chaos.scenario import Load
from hadelay.client import AsyncClient, Message, Put
from hadelay.errors import HadelayError

_PUT_S, _RECEIVE_S, _SETTLE_S = 10.0, 5.0, 5.0
_LOOK_S = 0.02


class Traffic:
    def __init__(
        self, urls: list[str], load: Load, history: History, seed: int, syncs: Callable[[], tuple[int, ...]] = tuple
    ) -> None:
        """syncs: how many each node has completed so far, where somebody counts them."""
        self.urls, self.load, self.history, self.syncs = urls, load, history, syncs
        self.draw = random.Random(seed)
        self.name = f"chaos-{os.urandom(4).hex()}"
        self.topics = [f"{self.name}-{i}" for i in range(load.topics)]
        self.publishing = True
        #: No more nacks and hang-ups: what is left shall be done.
        self.draining = False
        self._next = 0
        self._clients: list[AsyncClient] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._publishers: list[asyncio.Task[Any]] = []

    def client(self, urls: Sequence[str] | None = None) -> AsyncClient:
        client = AsyncClient(urls or self.urls, timeout=_PUT_S)
        self._clients.append(client)
        return client

    async def start(self) -> None:
        admin = self.client()
        for topic in self.topics:
            await admin.put_topic(topic, max_attempts=0, backoff=["100ms", "1s"])
        self._publishers = [self.spawn(self._publish(i)) for i in range(self.load.publishers)]
        for i in range(self.load.consumers):
            self.spawn(self._consume(f"{self.name}-c{i}"))

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

    async def no_more(self) -> None:
        """Every publish has its answer."""
        self.publishing = False
        await asyncio.wait(self._publishers)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in self._clients:
            await client.close()

    # publishing

    def _new(self) -> tuple[Put, int]:
        n, self._next = self._next, self._next + 1
        delay_s = round(self.draw.uniform(*self.load.delay_s), 3)
        size = self.draw.randint(*self.load.payload_bytes)
        key = f"k{n}" if self.draw.random() < self.load.keyed else None
        put = Put(topic=self.draw.choice(self.topics), body=body_of(n, size), delay=delay_s, key=key)
        self.history.record("put", n=n, delay_s=delay_s, size=size, asked=self.history.clock())
        return put, n

    async def _publish(self, i: int) -> None:
        client = self.client()
        many = self.load.batch if i % 2 else 1
        every_s = many * self.load.publishers / self.load.rate
        at = self.history.clock()
        while self.publishing:
            at = max(at + every_s, self.history.clock() - 1)  # what an outage held up is not made up for
            await asyncio.sleep(max(0.0, at - self.history.clock()))
            if many > 1:
                await self._put_many(client, many)
            else:
                await self.put_one(client)

    async def put_one(self, client: AsyncClient, timeout_s: float = _PUT_S) -> bool:
        put, n = self._new()
        key = f"{self.name}-{n}"
        if not await self._put(client, put, n, key, timeout_s, self.syncs()):
            return False
        if self.draw.random() < self.load.repeated:
            await self._put(client, put, n, key, timeout_s)
        if self.draw.random() < self.load.cancelled:
            self.spawn(self._cancel(client, n))
        return True

    async def _put(
        self, client: AsyncClient, put: Put, n: int, key: str, timeout_s: float, before: tuple[int, ...] = ()
    ) -> bool:
        try:
            receipt = await client.put(
                put.topic, put.body, delay=put.delay, key=put.key, idempotency_key=key, timeout=timeout_s
            )
        except (HadelayError, OSError) as error:
            self._failed([n], error)
            return False
        self._stored(n, receipt.id, before)
        return True

    def _stored(self, n: int, message_id: str, before: tuple[int, ...]) -> None:
        """before: syncs when it was asked for."""
        syncs = sum(map(gt, self.syncs(), before)) if before else None
        self.history.record("stored", n=n, t=self.history.clock(), id=message_id, syncs=syncs)

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
                self._stored(n, result.id, before)

    def _failed(self, numbers: list[int], error: Exception) -> None:
        """Only a definite no is a no; everything else may yet come out."""
        known = isinstance(error, HadelayError) and error.outcome_known
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

    # consuming

    async def _consume(self, name: str) -> None:
        client = self.client()
        request, asked = "", 0.0
        while True:
            if not request:
                request, asked = os.urandom(8).hex(), self.history.clock()
            hang_up = not self.draining and self.draw.random() < self.load.hung_up
            try:
                async with asyncio.timeout(self.draw.uniform(0, 0.3) if hang_up else None):
                    messages = await client.receive(
                        self.topics, max=20, wait=1.0, lease=self.load.lease_s, consumer=name, request_id=request,
                        timeout=_RECEIVE_S,
                    )  # fmt: skip
            except TimeoutError:
                if self.draw.random() < 0.5:
                    request = ""  # else asked again under the same one
                continue
            except (HadelayError, OSError):
                await asyncio.sleep(_LOOK_S)
                continue
            got = self.history.clock()
            for m in messages:
                n = number_of(m.body)
                put = self.history.puts.get(-1 if n is None else n)
                until_ms = round(m.lease_until.timestamp() * 1000)
                self.history.record(
                    "given", id=m.id, n=-1 if n is None else n, attempt=m.attempt, consumer=name, request=request,
                    asked=asked, got=got, now_ms=until_ms - m.lease_left_ms, until_ms=until_ms,
                    due_ms=round(m.deliver_at.timestamp() * 1000), redelivered=m.redelivered, term=term_of(m.lease),
                    whole=put is not None and m.body == body_of(put.n, put.size),
                )  # fmt: skip
            await self._settle(client, messages, request)
            request = ""

    async def _settle(self, client: AsyncClient, messages: list[Message], request: str) -> None:
        acks: list[Message] = []
        nacks: list[Message] = []
        for m in messages:
            chance = 1.0 if self.draining else self.draw.random()
            if chance < self.load.forgotten:
                continue
            (nacks if chance < self.load.forgotten + self.load.nacked else acks).append(m)
        for m in nacks:
            self.history.record("nack", id=m.id, attempt=m.attempt, request=request, t=self.history.clock())
        with contextlib.suppress(HadelayError, OSError, TimeoutError):
            async with asyncio.timeout(_SETTLE_S):
                outcomes = await client.ack(acks)
                now = self.history.clock()
                for m, outcome in zip(acks, outcomes, strict=True):
                    if outcome in ("acked", "already_acked"):
                        self.history.record("acked", id=m.id, attempt=m.attempt, request=request, t=now)
                await client.nack(nacks)
