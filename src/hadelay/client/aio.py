"""The asynchronous client."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from functools import partial
from types import TracebackType
from typing import Any, Literal, TypeVar, Unpack, cast
from urllib.parse import urlencode

import msgspec

from hadelay.client import wire
from hadelay.client.consumer import Consumer, Leased, Wish
from hadelay.client.transport import Transport
from hadelay.client.types import (
    AckOutcome,
    Body,
    Bucket,
    ClusterInfo,
    DeadLetter,
    Delay,
    ExtendOutcome,
    Health,
    HoursInfo,
    Message,
    MessageInfo,
    NackOutcome,
    Names,
    OnConflict,
    Put,
    PutResult,
    Receipt,
    Redriven,
    Rescheduled,
    TopicInfo,
    TopicSettings,
    When,
)
from hadelay.errors import HadelayError
from hadelay.paths import segment

log = logging.getLogger(__name__)

T = TypeVar("T")
Topics = str | Sequence[str]
Leases = str | Message | Iterable[str | Message]

_MSGPACK = "application/msgpack"
#: What comes out of a header as it went in: no space around it, and no control character.
_HEADER_VALUE = re.compile(r"([^\0-\x20\x7f]([^\0-\x1f\x7f]*[^\0-\x20\x7f])?)?")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
#: put_many sends this many at once: enough that a request costs nothing, little enough that none waits for it.
_BATCH_ITEMS, _BATCH_BYTES = 1_000, 8 << 20
_HEADERS = {
    "delay": "Hadelay-Delay", "deliver_at": "Hadelay-Deliver-At", "key": "Hadelay-Key", "tags": "Hadelay-Tags",
    "on_conflict": "Hadelay-On-Conflict", "max_wait": "Hadelay-Max-Wait", "ttl": "Hadelay-TTL",
    "callback": "Hadelay-Callback",
}  # fmt: skip
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "": 1.0}
_DURATION = re.compile(r"[0-9.]+|([0-9.]+(ms|s|m|h|d))+")
_PART = re.compile(r"([0-9.]+)(ms|s|m|h|d|)")
#: A poll is given up this much after its wait: the node, or the way to it, is gone.
_POLL_GRACE_S = 5.0
#: `work` gives its handlers this long when it is stopped: less than the 10 s that `docker stop` waits.
_DRAIN_S = 8.0
#: As many as a node settles in one request.
_MOST_LEASES = 10_000


class AsyncClient:
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
        data, kind = _payload(body, content_type)
        headers = {"Content-Type": kind, "Idempotency-Key": own_or_new_key(idempotency_key)}
        options, path = _options(put), f"/v1/topics/{segment(topic)}/messages"
        if key is not None and not _HEADER_VALUE.fullmatch(key):
            path += f"?key={segment(options.pop('key'))}"
        headers |= {_HEADERS[name]: _header_text(value) for name, value in options.items()}
        for name, value in (meta or {}).items():
            if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
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
        query = _query(body=body, stale=stale)
        return await self._get(f"{_path(message_id, topic, key)}{query}", MessageInfo)

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
        query: dict[str, Any] = {"state": ",".join(_each(state)), "limit": page}
        if start is not None:
            query["from"] = _when(start)
        if end is not None:
            query["to"] = _when(end)
        if tags:
            query["tag"] = ",".join(_each(tags))
        if stale:
            query["stale"] = "true"
        async for message in self._pages(f"/v1/topics/{segment(topic)}/messages", query, wire.Page):
            yield message

    async def cancel(
        self, message_id: str | None = None, *, topic: str | None = None, key: str | None = None
    ) -> Literal["cancelled"]:
        """By id, or by topic and key. Again is harmless.

        Raises Conflict when it is too late; `outcome` of the error says what it is: leased, acked, expired or dead.
        """
        await self._transport.request("DELETE", _path(message_id, topic, key), wire.read(wire.Outcome))
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
        when = {"delay": _delay(delay)} if delay is not None else {"deliver_at": _when(cast(When, at))}
        return await self._send_json("PATCH", _path(message_id, topic, key), when, Rescheduled)

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
            "topics": _each(topics),
            "max": max,
            "wait": _delay(wait),
            "consumer": consumer or self.consumer,
            "request_id": request_id or _new_key(),
        }
        if lease is not None:
            wish["lease"] = _delay(lease)
        if tags:
            wish["tags"] = _each(tags)
        if any_tags:
            wish["any_tags"] = _each(any_tags)
        wait_s = _seconds(wait)
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
        options: dict[str, Any] = {} if delay is None else {"delay": _delay(delay)}
        if reason is not None:
            options["reason"] = reason
        if not count:
            options["count"] = False
        return cast(list[NackOutcome], await self._settle("nack", leases, options))

    async def extend(self, leases: Leases, *, lease: Delay) -> list[ExtendOutcome]:
        """Hold on for `lease` from now: `extended`, `already_acked` or `lease_lost` for each."""
        return cast(list[ExtendOutcome], await self._settle("extend", leases, {"lease": _delay(lease)}))

    async def _settle(self, verb: str, leases: Leases, options: dict[str, Any]) -> list[str]:
        given = [leases] if isinstance(leases, str | Message) else leases
        tokens = [lease.lease if isinstance(lease, Message) else lease for lease in given]
        outcomes: list[str] = []
        for at in range(0, len(tokens), _MOST_LEASES):
            wish = {"leases": tokens[at : at + _MOST_LEASES], **options}
            answer = await self._send_json("POST", f"/v1/leases:{verb}", wish, wire.Outcomes)
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
        wish = Wish(
            _each(topics), _seconds(lease), _seconds(wait), _each(tags), _each(any_tags), consumer or self.consumer,
        )  # fmt: skip
        return Consumer(self, wish, concurrency, self._consumers)

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
        drain_s = _seconds(drain)
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

    # ---- topics

    async def topics(self, *, stale: bool = False) -> list[TopicInfo]:
        return (await self._get(f"/v1/topics{_query(stale=stale)}", wire.Topics)).topics

    async def topic(self, name: str, *, stale: bool = False) -> TopicInfo:
        return await self._get(f"/v1/topics/{segment(name)}{_query(stale=stale)}", TopicInfo)

    async def put_topic(self, name: str, **settings: Unpack[TopicSettings]) -> TopicInfo:
        """Make a topic, or change the settings named (`TopicSettings`); None takes one back."""
        return await self._send_json("PUT", f"/v1/topics/{segment(name)}", _plain(settings), TopicInfo)

    async def delete_topic(self, name: str, *, force: bool = False) -> None:
        """Raises Conflict while messages are pending, unless `force`: then they are cancelled."""
        await self._transport.request("DELETE", f"/v1/topics/{segment(name)}{_query(force=force)}", wire.read_nothing)

    async def pause(self, name: str, *, reason: str | None = None) -> TopicInfo:
        """Hand out nothing more; publishing goes on, and so do running leases. `reason` is shown with the topic."""
        wish = {} if reason is None else {"reason": reason}
        return await self._send_json("POST", f"/v1/topics/{segment(name)}:pause", wish, TopicInfo)

    async def resume(self, name: str) -> TopicInfo:
        """Hand out again."""
        return await self._send_json("POST", f"/v1/topics/{segment(name)}:resume", {}, TopicInfo)

    async def purge(
        self, name: str, states: Sequence[Literal["scheduled", "ready", "dead"]] = ("scheduled", "ready")
    ) -> None:
        """Cancel what is in these states now, without looking at each message; dead letters are forgotten."""
        await self._send_json("POST", f"/v1/topics/{segment(name)}:purge", {"states": _each(states)}, wire.Purged)

    # ---- dead letters

    async def dead(
        self, topic: str, *, body: bool = False, page: int = 1_000, stale: bool = False
    ) -> AsyncIterator[DeadLetter]:
        """Messages that were tried in vain, in the order of their deaths, with their errors."""
        query: dict[str, Any] = {"limit": page} | {
            name: "true" for name, asked in (("body", body), ("stale", stale)) if asked
        }
        async for letter in self._pages(f"/v1/topics/{segment(topic)}/dead", query, wire.DeadPage):
            yield letter

    async def redrive(self, topic: str, ids: Sequence[str]) -> list[Redriven]:
        """Make these dead letters due now, as if they had never been tried; an outcome each."""
        results: list[Redriven] = []
        given = _each(ids)
        for at in range(0, len(given), _BATCH_ITEMS):
            wish = {"ids": given[at : at + _BATCH_ITEMS]}
            path = f"/v1/topics/{segment(topic)}/dead:redrive"
            results += (await self._send_json("POST", path, wish, wire.RedrivenResults)).results
        return results

    async def redrive_all(self, topic: str, *, rate: float | None = None) -> int:
        """Begin to redrive all dead letters there are now, `rate` per second; returns how many they are."""
        wish: dict[str, Any] = {"all": True} | ({} if rate is None else {"rate": _finite(rate)})
        answer = await self._send_json("POST", f"/v1/topics/{segment(topic)}/dead:redrive", wish, wire.Redriving)
        return answer.redriving

    async def purge_dead(self, topic: str) -> None:
        """Forget the dead letters that a topic has now."""
        await self._transport.request("DELETE", f"/v1/topics/{segment(topic)}/dead", wire.read_nothing)

    # ---- what is due

    async def due(
        self, start: When, end: When, step: Delay, *, topic: str | None = None, stale: bool = False
    ) -> list[Bucket]:
        """How many messages are due when, over all topics or in one; empty buckets are left out."""
        path = "/v1/due" if topic is None else f"/v1/topics/{segment(topic)}/due"
        query = {"from": str(_when(start)), "to": str(_when(end)), "step": str(_delay(step))}
        if stale:
            query["stale"] = "true"
        return (await self._get(f"{path}?{urlencode(query)}", wire.Buckets)).buckets

    # ---- the cluster

    async def cluster(self, *, stale: bool = False) -> ClusterInfo:
        return await self._get(f"/v1/cluster{_query(stale=stale)}", ClusterInfo)

    async def transfer_leader(self, to: str | None = None) -> str:
        """Hand leadership to the node named, or to the one that has most; returns its name."""
        return (
            await self._send_json("POST", "/v1/cluster:transfer-leader", {"to": to}, wire.Leader, retry=False)
        ).leader

    async def add_member(self, name: str, raft: str) -> None:
        """A node whose link is reached at `raft`, host:port. It votes, by itself, once it has caught up."""
        await self._send_json("POST", "/v1/cluster/members", {"name": name, "raft": raft}, wire.Named, retry=False)

    async def remove_member(self, name: str) -> None:
        await self._transport.request("DELETE", f"/v1/cluster/members/{segment(name)}", wire.read_nothing)

    async def hours(self) -> HoursInfo:
        """Files of the node that answers: give the client one address to know which."""
        return await self._get("/v1/hours", HoursInfo)

    async def names(self) -> Names:
        return await self._get("/v1/names", Names)

    async def ready(self) -> Health:
        """Whether the node that answers can serve. Not ready is an answer, not an exception."""
        try:
            return await self._transport.request("GET", "/readyz?verbose", wire.read(Health), retry=False)
        except HadelayError as error:
            if "checks" not in error.extra:
                raise
            return msgspec.convert({"status": "failing", "checks": error.extra["checks"]}, Health)

    # ---- plumbing

    async def _pages(self, path: str, query: dict[str, Any], kind: type[Any]) -> AsyncIterator[Any]:
        while True:
            found = await self._get(f"{path}?{urlencode(query)}", kind)
            for item in found.messages:
                yield item
            if found.cursor is None:
                return
            query["cursor"] = found.cursor

    async def _get(self, path: str, kind: type[T]) -> T:
        return await self._transport.request("GET", path, wire.read(kind))

    async def _send_json(self, method: str, path: str, value: Any, kind: type[T], *, retry: bool = True) -> T:
        data, headers = msgspec.json.encode(value), {"Content-Type": "application/json"}
        return await self._transport.request(method, path, wire.read(kind), data=data, headers=headers, retry=retry)


def _new_key() -> str:
    return os.urandom(16).hex()


def own_or_new_key(given: str | None) -> str:
    """One that is empty was meant to be none of those that all have in common."""
    if given is None:
        return _new_key()
    if not given or not _HEADER_VALUE.fullmatch(given):
        raise ValueError(f"idempotency_key {given!r}: at least one character, none of control, no space around it")
    return given


def _each(values: str | Iterable[str]) -> list[str]:
    """A string is one of them, and not its characters."""
    return [values] if isinstance(values, str) else list(values)


def _path(message_id: str | None, topic: str | None, key: str | None) -> str:
    if message_id is not None and topic is None and key is None:
        return f"/v1/messages/{segment(message_id)}"
    if message_id is None and topic is not None and key is not None:
        return f"/v1/topics/{segment(topic)}/keys/{segment(key)}"
    raise ValueError("name the message: by its id, or by topic and key")


def _query(**flags: bool) -> str:
    given = [f"{name}=true" for name, value in flags.items() if value]
    return "?" + "&".join(given) if given else ""


def _plain(value: Any) -> Any:
    """Settings as JSON has them."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, float):
        return _finite(value)
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value


def _delay(delay: Delay) -> str | float:
    if isinstance(delay, timedelta):
        return delay.total_seconds()
    return _finite(delay) if isinstance(delay, float) else delay


def _finite(number: float) -> float:
    """JSON has only null for the others, and null means something else."""
    if not math.isfinite(number):
        raise ValueError(f"{number} is not a number that can be sent")
    return number


def _header_text(value: Any) -> str:
    if isinstance(value, list):
        if any("," in tag for tag in value):
            raise ValueError(f"tags {value!r}: a tag has no comma")
        return ",".join(value)
    # Never 1e-05.
    return format(Decimal(repr(value)), "f") if isinstance(value, float) else str(value)


def _seconds(delay: Delay) -> float:
    """What the client itself has to know of a duration: how long it waits for an answer."""
    if isinstance(delay, timedelta):
        return delay.total_seconds()
    if isinstance(delay, int | float):
        return float(delay)
    if not _DURATION.fullmatch(delay):
        raise ValueError(f'{delay!r} is not a duration: "250ms", "15m", "2h30m", "7d", or a number of seconds')
    return sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(delay))


def _when(at: When) -> str | int:
    if not isinstance(at, datetime):
        return at
    if at.tzinfo is None:
        raise ValueError(f"{at!r} has no time zone, so it could be any of 24 hours: use datetime.now(UTC), for one")
    return at.isoformat()


def present_span() -> str | None:
    """W3C's traceparent of OpenTelemetry's present span. A program that has not imported it has none."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    span = api.get_current_span().get_span_context()
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}" if span.is_valid else None


def _payload(body: Body, content_type: str | None) -> tuple[bytes, str]:
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body), content_type or "application/octet-stream"
    if isinstance(body, str):
        return body.encode(), content_type or "text/plain; charset=utf-8"
    return msgspec.json.encode(body), content_type or "application/json"


def batches(puts: Iterable[Put]) -> Iterator[list[dict[str, Any]]]:
    """The items of each request that `put_many` makes."""
    items: list[dict[str, Any]] = []
    size = 0
    for put in puts:
        item = _item(put)
        if items and (len(items) == _BATCH_ITEMS or size + len(item["body"]) > _BATCH_BYTES):
            yield items
            items, size = [], 0
        items.append(item)
        size += len(item["body"])
    if items:
        yield items


def _item(put: Put) -> dict[str, Any]:
    body, kind = _payload(put.body, put.content_type)
    item: dict[str, Any] = {"topic": put.topic, "body": body}
    if put.content_type or not isinstance(put.body, bytes):
        item["content_type"] = kind
    if put.meta:
        item["meta"] = dict(put.meta)
    if put.idempotency_key is not None:
        item["idempotency_key"] = own_or_new_key(put.idempotency_key)
    if put.traceparent:
        item["traceparent"] = put.traceparent
    return item | _options(put)


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {type(value).__name__}: {name}={str(value)!r}")


def _options(put: Put) -> dict[str, Any]:
    """What was given of the options that headers and batch items have in common, by their names in the latter."""
    _text("topic", put.topic)
    if put.key is not None:
        _text("key", put.key)
    for tag in put.tags or ():
        _text("tag", tag)
    for name, value in (put.meta or {}).items():
        _text("name of meta", name)
        _text(f"meta[{name!r}]", value)
    given: dict[str, Any] = {
        "delay": None if put.delay is None else _delay(put.delay),
        "deliver_at": None if put.at is None else _when(put.at),
        "key": put.key,
        "on_conflict": put.on_conflict,
        "max_wait": None if put.max_wait is None else _delay(put.max_wait),
        "tags": _each(put.tags) if put.tags else None,
        "ttl": None if put.ttl is None else _delay(put.ttl),
        "callback": put.callback,
    }
    return {name: value for name, value in given.items() if value is not None}
