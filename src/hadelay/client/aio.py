"""The asynchronous client."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal, TypeVar, cast

import msgspec

from hadelay.client import wire
from hadelay.client.administration import Administration
from hadelay.client.consumer import ConsumeOptions, Consumer, Leased
from hadelay.client.encoding import (
    HEADER_NAME,
    HEADER_VALUE,
    HEADERS,
    batches,
    delay_of,
    each,
    header_text,
    new_key,
    options_of,
    own_or_new_key,
    path_of,
    payload_of,
    present_span,
    query_of,
    seconds_of,
    when_of,
)
from hadelay.client.transport import Transport
from hadelay.client.types import (
    AckOutcome,
    Body,
    Delay,
    ExtendOutcome,
    Leases,
    Message,
    MessageInfo,
    NackOutcome,
    OnConflict,
    Put,
    PutResult,
    Receipt,
    Rescheduled,
    When,
)
from hadelay.errors import HadelayError
from hadelay.paths import segment

log = logging.getLogger(__name__)

T = TypeVar("T")
Topics = str | Sequence[str]

_MSGPACK = "application/msgpack"
#: A poll is given up this much after its wait: the node, or the way to it, is gone.
_POLL_GRACE_S = 5.0
#: `work` gives its handlers this long when it is stopped: less than the 10 s that `docker stop` waits.
_DRAIN_S = 8.0
#: As many as a node settles in one request.
_MOST_LEASES = 10_000


class AsyncClient(Administration):
    """Talks to a cluster through any of its nodes.

        async with AsyncClient("http://n1:8400,http://n2:8400") as client:
            await client.put("orders", {"id": 7}, delay="15m")
            async for message in client.consume("orders", concurrency=20):
                async with message:              # ack on a clean exit, nack on an exception
                    handle(message.json())

    Requests fail over between the addresses and are retried, with backoff, for up to `timeout` seconds; every publish
    carries an Idempotency-Key and every receive a request_id, so a retry never makes a second message. Refusals are
    raised as the classes of `hadelay.errors`. One client serves any number of tasks of one event loop.

    token: where the cluster asks for one; without it, what HADELAY_TOKEN in the environment says.
    ca: a PEM file with the authority of the nodes' certificates, for https; without it, those the system trusts.
    """

    def __init__(
        self,
        urls: str | Sequence[str] = "http://127.0.0.1:8400",
        token: str | None = None,
        *,
        timeout: float = 30.0,
        ca: str | None = None,
    ) -> None:
        self._transport = Transport(urls, token, timeout, ca)
        self._consumers: set[Consumer] = set()
        #: Who this client says it is when it consumes, unless told otherwise.
        self.consumer = f"py-{os.getpid()}-{os.urandom(4).hex()}"

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends its consumers (what they hold unhandled goes back at once) and its connections."""
        for consumer in list(self._consumers):
            await consumer.close()
        await self._transport.close()

    # ---- publishing

    async def put(
        self,
        topic: str,
        body: Body = b"",
        *,
        delay: Delay | None = None,
        at: When | None = None,
        key: str | None = None,
        on_conflict: OnConflict | None = None,
        max_wait: Delay | None = None,
        tags: Sequence[str] | None = None,
        ttl: Delay | None = None,
        callback: str | None = None,
        content_type: str | None = None,
        meta: Mapping[str, str] | None = None,
        traceparent: str | None = None,
        idempotency_key: str | None = None,
        timeout: float | None = None,
    ) -> Receipt:
        """Publish one message, due after `delay` or at `at`, or now.

        key: your own name for it within the topic. While its message is pending (scheduled, ready or leased),
        `on_conflict` decides: "keep" (default) answers with that one and `duplicate`; "replace" cancels it and answers
        with the new one and `replaced`, or raises Conflict if it is leased; "reject" raises Conflict with its id.
        max_wait: with "replace", due at most this long after the first of those that replaced one another.
        tags: up to 16, for consumers that ask for some. ttl: it expires this long after it was due.
        callback: a webhook URL for this message, where the topic allows it.
        meta: travels with it, names in lower case; what a header cannot carry as it is needs put_many.
        traceparent: the span to be told with the delivery; the present one of OpenTelemetry, if the program uses that.
        """
        put = Put(
            topic=topic, body=body, delay=delay, at=at, content_type=content_type, meta=meta, key=key,
            on_conflict=on_conflict, max_wait=max_wait, tags=tags, ttl=ttl, callback=callback,
        )  # fmt: skip
        data, kind = payload_of(body, content_type)
        headers = {"Content-Type": kind, "Idempotency-Key": own_or_new_key(idempotency_key)}
        options, path = options_of(put), f"/v1/topics/{segment(topic)}/messages"
        if key is not None and not HEADER_VALUE.fullmatch(key):
            path += f"?key={segment(options.pop('key'))}"
        headers |= {HEADERS[name]: header_text(value) for name, value in options.items()}
        for name, value in (meta or {}).items():
            if not HEADER_NAME.fullmatch(name) or not HEADER_VALUE.fullmatch(value):
                raise ValueError(f"meta {name!r}: not what a header can carry as it is; put_many can")
            headers[f"Hadelay-Meta-{name}"] = value
        if trace := traceparent or present_span():
            headers["traceparent"] = trace
        return await self._transport.request(
            "POST", path, wire.read(Receipt), data=data, headers=headers, timeout_s=timeout
        )

    async def put_many(
        self, puts: Iterable[Put], *, idempotency_key: str | None = None, timeout: float | None = None
    ) -> list[PutResult]:
        """Publish many, in order: a receipt each, or the error that refused it. More than 1,000 go in several commits.

        Raises only when a whole request failed. A key of your own covers the call, also when it is repeated; an error
        tells the one that was made up (`idempotency_key`).
        """
        results: list[PutResult] = []
        key = own_or_new_key(idempotency_key)
        for n, items in enumerate(batches(puts)):
            results += await self._put_batch(key, n, items, timeout)
        return results

    async def _put_batch(self, key: str, n: int, items: list[dict[str, Any]], timeout: float | None) -> list[PutResult]:
        """One request of `put_many`."""
        headers = {"Content-Type": _MSGPACK, "Accept": _MSGPACK, "Idempotency-Key": f"{key}.{n}"}
        if trace := present_span():
            headers["traceparent"] = trace
        data = msgspec.msgpack.encode(items)
        read = partial(wire.read_results, items)
        try:
            return await self._transport.request(
                "POST", "/v1/messages:batch", read, data=data, headers=headers, timeout_s=timeout
            )
        except HadelayError as error:
            # Of all that was given: what requests before this one published is not published again under it.
            error.extra["idempotency_key"] = key
            raise

    # ---- messages

    async def get(
        self,
        message_id: str | None = None,
        *,
        topic: str | None = None,
        key: str | None = None,
        body: bool = False,
        stale: bool = False,
    ) -> MessageInfo:
        """State and history of a message: by its id, or the one published last under `key` in `topic`."""
        query = query_of(body=body, stale=stale)
        return await self._get(f"{path_of(message_id, topic, key)}{query}", MessageInfo)

    async def messages(
        self,
        topic: str,
        *,
        state: str | Sequence[str] = "pending",
        start: When | None = None,
        end: When | None = None,
        tags: Sequence[str] = (),
        page: int = 1_000,
        stale: bool = False,
    ) -> AsyncIterator[MessageInfo]:
        """The messages of a topic in due order, without their histories, however many there are.

        state: one or more of scheduled, ready, leased, acked, cancelled, expired, dead; pending is the first three, all
        is all. start, end: due in [start, end). tags: messages that have all of them. page: fetched at a time. What is
        settled meanwhile never makes another one be left out.
        """
        query: dict[str, Any] = {"state": ",".join(each(state)), "limit": page}
        if start is not None:
            query["from"] = when_of(start)
        if end is not None:
            query["to"] = when_of(end)
        if tags:
            query["tag"] = ",".join(each(tags))
        if stale:
            query["stale"] = "true"
        async for message in self._pages(f"/v1/topics/{segment(topic)}/messages", query, wire.Page[MessageInfo]):
            yield message

    async def cancel(
        self, message_id: str | None = None, *, topic: str | None = None, key: str | None = None
    ) -> Literal["cancelled"]:
        """By id, or by topic and key. Again is harmless.

        Raises Conflict when it is too late; `outcome` of the error says what it is: leased, acked, expired or dead.
        """
        await self._transport.request("DELETE", path_of(message_id, topic, key), wire.read(wire.Outcome))
        return "cancelled"

    async def reschedule(
        self,
        message_id: str | None = None,
        *,
        topic: str | None = None,
        key: str | None = None,
        delay: Delay | None = None,
        at: When | None = None,
    ) -> Rescheduled:
        """Due at another time, `delay` from now or `at`; the id stays. By id, or by topic and key.

        Raises Conflict when it is not pending; `outcome` of the error: leased, acked, cancelled, expired or dead.
        """
        if (delay is None) == (at is None):
            raise ValueError("say when: delay, or at")
        when = {"delay": delay_of(delay)} if delay is not None else {"deliver_at": when_of(cast(When, at))}
        return await self._send_json("PATCH", path_of(message_id, topic, key), when, Rescheduled)

    async def deliver_now(
        self, message_id: str | None = None, *, topic: str | None = None, key: str | None = None
    ) -> Rescheduled:
        """`reschedule` to now. What is due already stays where it stands."""
        return await self.reschedule(message_id, topic=topic, key=key, delay=0)

    # ---- consuming

    async def receive(
        self,
        topics: Topics,
        *,
        max: int = 10,
        wait: Delay = 0,
        lease: Delay | None = None,
        tags: Sequence[str] = (),
        any_tags: Sequence[str] = (),
        consumer: str | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
    ) -> list[Message]:
        """Lease up to `max` messages that are due, waiting for the first for up to `wait`.

        tags, any_tags: only messages that have all of the former and, if there are any, one of the latter.
        """
        wish: dict[str, Any] = {
            "topics": each(topics),
            "max": max,
            "wait": delay_of(wait),
            "consumer": consumer or self.consumer,
            "request_id": request_id or new_key(),
        }
        if lease is not None:
            wish["lease"] = delay_of(lease)
        if tags:
            wish["tags"] = each(tags)
        if any_tags:
            wish["any_tags"] = each(any_tags)
        wait_s = seconds_of(wait)
        return await self._transport.request(
            "POST",
            "/v1/receive",
            wire.read_messages,
            data=msgspec.msgpack.encode(wish),
            headers={"Content-Type": _MSGPACK, "Accept": _MSGPACK},
            timeout_s=wait_s + (self._transport.timeout_s if timeout is None else timeout),
            answer_within_s=wait_s + _POLL_GRACE_S,
            to_leader=True,
        )

    async def ack(self, leases: Leases) -> list[AckOutcome]:
        """Done: `acked`, `already_acked` or `lease_lost` for each."""
        return cast(list[AckOutcome], await self._settle("ack", leases, {}))

    async def nack(
        self, leases: Leases, *, delay: Delay | None = None, reason: str | None = None, count: bool = True
    ) -> list[NackOutcome]:
        """Not done: `nacked`, `already_acked` or `lease_lost` for each.

        It is handed out again after `delay`, or after the topic's backoff; after the topic's last attempt it is dead.
        reason: at most 128 bytes, kept with the message and shown with it when it is dead.
        count: False gives it back unhandled: the attempt counts neither for max_attempts nor for the backoff.
        """
        options: dict[str, Any] = {} if delay is None else {"delay": delay_of(delay)}
        if reason is not None:
            options["reason"] = reason
        if not count:
            options["count"] = False
        return cast(list[NackOutcome], await self._settle("nack", leases, options))

    async def extend(self, leases: Leases, *, lease: Delay) -> list[ExtendOutcome]:
        """Hold on for `lease` from now: `extended`, `already_acked` or `lease_lost` for each."""
        return cast(list[ExtendOutcome], await self._settle("extend", leases, {"lease": delay_of(lease)}))

    async def _settle(self, verb: str, leases: Leases, options: dict[str, Any]) -> list[str]:
        given = [leases] if isinstance(leases, str | Message) else leases
        tokens = [lease.lease if isinstance(lease, Message) else lease for lease in given]
        outcomes: list[str] = []
        for at in range(0, len(tokens), _MOST_LEASES):
            wish = {"leases": tokens[at : at + _MOST_LEASES], **options}
            answer = await self._send_json("POST", f"/v1/leases:{verb}", wish, wire.Results[wire.Outcome])
            outcomes += [result.outcome for result in answer.results]
        return outcomes

    def consume(
        self,
        topics: Topics,
        *,
        concurrency: int = 10,
        lease: Delay = 30,
        wait: Delay = 20,
        tags: Sequence[str] = (),
        any_tags: Sequence[str] = (),
        consumer: str | None = None,
    ) -> Consumer:
        """Messages as they fall due, at most `concurrency` unsettled at a time, their leases extended meanwhile.

        tags, any_tags: as in `receive`.
        """
        options = ConsumeOptions(
            each(topics), seconds_of(lease), seconds_of(wait), each(tags), each(any_tags), consumer or self.consumer,
        )  # fmt: skip
        return Consumer(self, options, concurrency, self._consumers)

    async def work(
        self,
        topics: Topics,
        handler: Callable[[Leased], Awaitable[object]],
        *,
        concurrency: int = 10,
        lease: Delay = 30,
        tags: Sequence[str] = (),
        any_tags: Sequence[str] = (),
        on_error: Callable[[Leased, Exception], object] | None = None,
        drain: Delay = _DRAIN_S,
    ) -> None:
        """Run `handler` for every message, `concurrency` at a time, until cancelled.

        An exception nacks its message, with the exception as the reason, and is given to `on_error`, or logged.

        drain: when it is cancelled, it fetches no more, and handlers have this long to finish, their leases extended
        meanwhile. Then they are cancelled, and their messages go back at once; that attempt does not count. Cancelled
        again, it does not wait.
        """
        drain_s = seconds_of(drain)
        consumer = self.consume(topics, concurrency=concurrency, lease=lease, tags=tags, any_tags=any_tags)

        async def run(message: Leased) -> None:
            try:
                async with message:
                    await handler(message)
            except Exception as error:
                if on_error is not None:
                    on_error(message, error)
                else:
                    log.error("the handler failed with message %s", message.id, exc_info=error)

        try:
            async with asyncio.TaskGroup() as tasks:
                try:
                    while (message := await anext(consumer, None)) is not None:
                        tasks.create_task(run(message))
                finally:
                    await consumer.drain(drain_s)
        finally:
            consumer.give_up()  # of tasks that were cancelled before their first turn
            await consumer.close()
