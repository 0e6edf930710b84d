"""The asynchronous client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from hadelay.client import wire
from hadelay.client.consumer import DRAIN_S, Consumer, OnError
from hadelay.client.message import AsyncMessage
from hadelay.client.requests import Order, Topics
from hadelay.client.schedules import ScheduleRequests
from hadelay.client.transport import Transport
from hadelay.client.types import Body, Delay, OnConflict, Put, PutResult, Receipt, When
from hadelay.errors import HadelayError
from hadelay.paths import segment


class AsyncClient(ScheduleRequests):
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
    Default: the authorities that the system trusts.
    """

    def __init__(
        self,
        urls: str | Sequence[str] = "http://127.0.0.1:8400",
        token: str | None = None,
        *,
        timeout: float = 30.0,
        ca: str | None = None,
    ) -> None:
        super().__init__(Transport(urls, token, timeout, ca))
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
        self, topic: str, body: Body = b"", *, delay: Delay | None = None, at: When | None = None,
        key: str | None = None, on_conflict: OnConflict | None = None, max_wait: Delay | None = None,
        unique_for: Delay | None = None, tags: Sequence[str] | None = None, ttl: Delay | None = None,
        callback: str | None = None, group: str | None = None, forward: Mapping[str, str] | None = None,
        on_success: str | None = None, on_failure: str | None = None, content_type: str | None = None,
        meta: Mapping[str, str] | None = None, traceparent: str | None = None, idempotency_key: str | None = None,
        timeout: float | None = None,
    ) -> Receipt:  # fmt: skip
        """Publish one message, due after `delay` or at `at`, or now.

        key: your own name for the message within the topic. on_conflict: if a message with this key is pending
        (scheduled, ready or leased), "keep" (default) answers with that message and `duplicate`; "replace" cancels that
        message and answers with the new one and `replaced`, or raises Conflict if that message is leased; "reject"
        raises Conflict with its id. max_wait: with "replace", limit of the total delay since the first of the replaced
        messages. unique_for: with a key, at most 7 d: the publish is dropped, and answered with `duplicate`, if the key
        was published with unique_for within that publish's period, also if that message is settled. tags: up to 16,
        which consumers can filter by. ttl: time from the due time until the message expires. callback: webhook URL for
        this message, where the topic allows one. group: message group, of which the topic's group_concurrency limits
        how many messages are handed out at once. forward: header fields for the message's webhook calls, at most 2 KiB.
        on_success, on_failure: topics of its callbacks, where the topic allows them.
        meta: names in lower case; put_many takes values that a header cannot carry. traceparent: span shown to the
        consumer; default: OpenTelemetry's current span, if the program uses OpenTelemetry.
        """
        put = Put(
            topic=topic, body=body, delay=delay, at=at, content_type=content_type, meta=meta, key=key,
            on_conflict=on_conflict, max_wait=max_wait, unique_for=unique_for, tags=tags, ttl=ttl, callback=callback,
            group=group, forward=forward, on_success=on_success, on_failure=on_failure,
        )  # fmt: skip
        data, kind = wire.payload_of(body, content_type)
        headers = {"Content-Type": kind, "Idempotency-Key": wire.own_or_new_key(idempotency_key)}
        options, path = wire.options_of(put), f"/v1/topics/{segment(topic)}/messages"
        unsafe = [name for name in ("key", "group") if not wire.HEADER_VALUE.fullmatch(options.get(name, ""))]
        if unsafe:
            path += "?" + "&".join(f"{name}={segment(options.pop(name))}" for name in unsafe)
        headers |= wire.headers_of(options, meta=meta or {}, forward=forward or {})
        if trace := traceparent or wire.present_span():
            headers["traceparent"] = trace
        return await self._transport.request(
            "POST", path, wire.read(Receipt), data=data, headers=headers, timeout_s=timeout
        )

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
            self.receive, wait=wait_s, lease=lease_s, consumer=consumer, order=order, tags=wire.each(tags),
            any_tags=wire.each(any_tags),
        )  # fmt: skip
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
