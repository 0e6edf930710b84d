"""The asynchronous client."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, Unpack

import msgspec

from hadelay.client import wire
from hadelay.client.batches import BatchRequests
from hadelay.client.consumer import DRAIN_S, Consumer, OnError
from hadelay.client.message import AsyncMessage
from hadelay.client.paths import segment
from hadelay.client.putoptions import Put, PutOptions
from hadelay.client.requests import Topics
from hadelay.client.schedules import ScheduleRequests
from hadelay.client.transport import Transport
from hadelay.client.types import Body, Delay, Order, PutResult, Receipt
from hadelay.errors import HadelayError


class AsyncClient(ScheduleRequests, BatchRequests):
    """Talks to a cluster through any of its nodes.

        async with AsyncClient("http://n1:8400,http://n2:8400") as client:
            await client.put("orders", {"id": 7}, delay="15m")
            async for message in client.consume("orders", concurrency=20):
                async with message:              # ack on a clean exit, nack on an exception
                    handle(message.json())

    Requests fail over between the addresses and are retried, with backoff, for up to `timeout` seconds; every publish
    carries an Idempotency-Key and every receive a request_id, so a retry never makes a second message. Refusals are
    raised as the classes of `hadelay.errors`. One client serves any number of tasks of one event loop.

    token: Default: the variable HADELAY_TOKEN. ca: PEM file with the authority of the nodes' certificates, for https.
    Default: the authorities that the system trusts. shard: asks this shard alone, for its lists, its batches, its
    members; a request for a topic or message of another shard is refused. Default: all shards, as one.
    """

    def __init__(
        self,
        urls: str | Sequence[str] = "http://127.0.0.1:8400",
        token: str | None = None,
        *,
        timeout: float = 30.0,
        ca: str | None = None,
        shard: int | None = None,
    ) -> None:
        super().__init__(Transport(urls, token, timeout, ca, shard))
        self._consumers: set[Consumer] = set()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close connections and consumers; consumers give back unhandled messages at once."""
        for consumer in list(self._consumers):
            await consumer.close()
        await self._transport.close()

    async def put(
        self, topic: str, body: Body = b"", *, timeout: float | None = None, **options: Unpack[PutOptions]
    ) -> Receipt:
        """Publish one message, due after `delay`, at `at`, or now. For values of `meta` and `forward` that an HTTP
        header cannot carry, use `put_many`.

        options:
        """
        put = Put(topic=topic, body=body, **options)
        data, kind = wire.payload_of(body, put.content_type)
        put.idempotency_key = wire.own_or_new_key(put.idempotency_key)
        put.traceparent = put.traceparent or wire.present_span()
        given, path = wire.options_of(put), f"/v1/topics/{segment(topic)}/messages"
        unsafe = [name for name in ("key", "group") if not wire.HEADER_VALUE.fullmatch(given.get(name, ""))]
        if unsafe:
            path += "?" + "&".join(f"{name}={segment(given.pop(name))}" for name in unsafe)
        headers = {"Content-Type": kind, **wire.headers_of(given)}
        return await self._transport.request(
            "POST", path, wire.read(Receipt), data=data, headers=headers, timeout_s=timeout
        )

    put.__doc__ = f"{inspect.cleandoc(put.__doc__ or '')}\n{wire.options_help()}"

    async def put_many(
        self, puts: Iterable[Put], *, idempotency_key: str | None = None, timeout: float | None = None
    ) -> list[PutResult]:
        """Publish messages in order; returns a receipt for each message, or the error that refused the message. 1,000
        messages go in one commit.

        Raises only when a whole request failed. `idempotency_key` covers the call and its repetitions; the error has
        the key, also a generated one.
        """
        results: list[PutResult] = []
        key = wire.own_or_new_key(idempotency_key)
        for n, items in enumerate(wire.batches(puts)):
            results += await self._put_batch(key, n, items, timeout)
        return results

    async def _put_batch(self, key: str, n: int, items: list[dict[str, Any]], timeout: float | None) -> list[PutResult]:
        headers = {**wire.MSGPACK, "Idempotency-Key": f"{key}.{n}"}
        if trace := wire.present_span():
            headers["traceparent"] = trace
        data = msgspec.msgpack.encode(items)
        read = partial(wire.read_results, items)
        try:
            return await self._transport.request(
                "POST", "/v1/messages:batch", read, data=data, headers=headers, timeout_s=timeout
            )
        except HadelayError as error:
            # Add the Idempotency-Key to the error: a repeated put_many with it stores no message twice.
            error.extra["idempotency_key"] = key
            raise

    def consume(
        self,
        topics: Topics,
        *,
        concurrency: int = 10,
        lease: Delay = 30,
        wait: Delay = 20,
        tags: Sequence[str] = (),
        any_tags: Sequence[str] = (),
        order: Order = "turns",
        consumer: str | None = None,
    ) -> Consumer:
        """Receive messages as they fall due, at most `concurrency` unsettled messages at a time. Leases are extended
        until their messages are settled.

        tags, any_tags, order: as in `receive`. `stop` of the returned consumer ends its loop; `concurrency` and
        `topics` may be set meanwhile.
        """
        lease_s, wait_s = wire.seconds_of(lease), wire.seconds_of(wait)
        poll = partial(
            self.receive,
            wait=wait_s,
            lease=lease_s,
            consumer=consumer,
            order=order,
            tags=wire.each(tags),
            any_tags=wire.each(any_tags),
        )
        return Consumer(self, topics, poll, lease_s, concurrency, self._consumers)

    async def work(
        self,
        topics: Topics,
        handler: Callable[[AsyncMessage], Awaitable[object]],
        *,
        concurrency: int = 10,
        lease: Delay = 30,
        tags: Sequence[str] = (),
        any_tags: Sequence[str] = (),
        order: Order = "turns",
        on_error: OnError | None = None,
        stop: asyncio.Event | None = None,
        drain: Delay = DRAIN_S,
    ) -> None:
        """Run `handler` for every message, `concurrency` at a time, until `stop` is set, or until cancelled.

        An exception nacks its message, with the exception as the reason, and is given to `on_error`, or logged.

        drain: after a stop or cancellation, time for handlers to finish, their leases extended meanwhile. Then the
        handlers are cancelled, and their messages go back at once; that attempt does not count. A second cancellation
        ends the wait. `consume(…).work` does the same, with a consumer to stop or to change meanwhile.
        """
        drain_s = wire.seconds_of(drain)
        consumer = self.consume(topics, concurrency=concurrency, lease=lease, tags=tags, any_tags=any_tags, order=order)
        stopper = None if stop is None else asyncio.create_task(_stop_on(stop, consumer))
        try:
            await consumer.work(handler, on_error=on_error, drain=drain_s)
        finally:
            if stopper is not None:
                stopper.cancel()


async def _stop_on(event: asyncio.Event, consumer: Consumer) -> None:
    await event.wait()
    consumer.stop()
