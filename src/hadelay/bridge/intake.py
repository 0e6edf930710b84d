"""The intake half of the bridge: takes messages from RabbitMQ's queue, and stores them in the cluster.

RabbitMQ is acked only after the cluster's answer: a bridge, broker or node that is killed in between makes RabbitMQ
deliver the message again. A message with a message id is stored under an Idempotency-Key made of all that it is, so
that a second delivery stores it once.
"""

import asyncio
import hashlib
import logging
import random
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from aiormq.abc import AbstractChannel, DeliveredMessage
from aiormq.exceptions import ChannelInvalidStateError

from hadelay.bridge.envelope import CONTENT_TYPE, KEY, TAKEN_AT, Envelope, delay_of, pack, unpack
from hadelay.bridge.lenient import unreadable
from hadelay.bridge.rabbitmq import Malformed, Publisher, Route, Unroutable, connected, declare, properties_of
from hadelay.client import AsyncClient
from hadelay.client.putoptions import Put
from hadelay.client.types import PutResult, Receipt
from hadelay.client.wire import new_key
from hadelay.errors import Conflict, Forbidden, HadelayError, NotFound, Unauthorized

log = logging.getLogger("hadelay.bridge")

#: `PREFETCH`: limit of unacked messages that RabbitMQ delivers. `BATCH`: limit of messages in one publish request to
#: the cluster.
PREFETCH, BATCH = 1_000, 500
#: Maximum length, in characters, of the text in the header `x-hadelay-refusal`.
_LONGEST = 500
#: Maximum age, in ms, of RabbitMQ's time in the header `timestamp_in_ms`. An older time is ignored: the delay then
#: counts from now.
_OLDEST_MS = 30 * 86_400_000
_PENDING = ("scheduled", "ready", "blocked", "leased")
#: Header with the reason why a message was parked (moved to the queue of refused messages).
REFUSAL = "x-hadelay-refusal"
#: First and longest wait, in seconds, before a failed publish to the cluster is repeated; the wait doubles each time.
_FIRST_S, _LONGEST_S = 0.5, 30.0


@dataclass
class _Item:
    """A RabbitMQ message that is to be stored in the cluster."""

    message: DeliveredMessage
    put: Put
    #: True if the Idempotency-Key was replaced by a random key, because an equal earlier message has the original key.
    rekeyed: bool = False


class Intake:
    def __init__(self, route: Route, client: AsyncClient, counts: Counter[str]) -> None:
        self._route, self._client, self._counts = route, client, counts
        self._inbox = asyncio.Queue[DeliveredMessage | None]()
        self.connected = False

    def stop(self) -> None:
        """Let `session` end after the batch under way."""
        self._inbox.put_nowait(None)

    async def session(self, stop: asyncio.Event) -> None:
        """Take messages over one connection until `stop` is set. Raises the error that ends the connection; RabbitMQ
        then delivers unacked messages again."""
        inbox = self._inbox = asyncio.Queue[DeliveredMessage | None]()
        try:
            async with connected(self._route) as connection:
                await declare(connection, self._route)
                channel = await connection.channel()
                channel.closing.add_done_callback(lambda _: inbox.put_nowait(None))
                channel.on_consumer_cancel_callbacks.add(lambda _: inbox.put_nowait(None))
                await channel.basic_qos(prefetch_count=PREFETCH)
                await channel.basic_consume(self._route.queue, inbox.put)
                self.connected = True
                publisher = Publisher(channel, self._route.user)
                while (first := await inbox.get()) is not None and not stop.is_set():
                    batch = [first]
                    while len(batch) < BATCH and not inbox.empty():
                        if (message := inbox.get_nowait()) is None:
                            inbox.put_nowait(None)
                            break
                        batch.append(message)
                    await self._relay(batch, channel, publisher)
                if not stop.is_set():
                    raise ConnectionError("RabbitMQ ended the connection, or deleted the queue")
        finally:
            self.connected = False

    async def _relay(self, batch: list[DeliveredMessage], channel: AbstractChannel, publisher: Publisher) -> None:
        """Store the delayed messages of a batch in the cluster, publish the others at once, and then ack all of
        them."""
        items, passed = [], []
        for message in batch:
            properties = properties_of(message)
            delivery: Any = message.delivery
            if odd := unreadable({"routing key": delivery.routing_key, **properties}):
                passed.append(self._park(message, f"cannot be read: {', '.join(odd)}", publisher))
                continue
            envelope = Envelope(delivery.exchange, delivery.routing_key, properties, message.body)
            headers = properties.get("headers") or {}
            if delay := delay_of(headers):
                items.append(_Item(message, self._put_of(envelope, headers, delay)))
            else:
                passed.append(self._pass(message, unpack(pack(envelope)), publisher))
        await asyncio.gather(*passed, self._store(items, channel, publisher))
        for message in batch:
            await channel.basic_ack(_tag(message), wait=False)

    async def _pass(self, message: DeliveredMessage, envelope: Envelope, publisher: Publisher) -> None:
        """Publish a message that has no delay to the target exchange at once."""
        properties = {"message_id": new_key(), **envelope.properties}
        try:
            await publisher.publish(
                self._route.to,
                envelope.routing_key,
                properties,
                message.body,
                mandatory=not self._route.drop_unroutable,
            )
            self._counts["passed"] += 1
        except (Unroutable, Malformed) as error:
            await self._park(message, str(error), publisher)

    def _put_of(self, envelope: Envelope, headers: dict[str, Any], delay_ms: int) -> Put:
        put = Put(topic=self._route.topic, body=pack(envelope), content_type=CONTENT_TYPE, idempotency_key=new_key())
        if isinstance(key := headers.get(KEY), str):
            put.key = key
        taken = headers.get(TAKEN_AT)
        if isinstance(taken, int) and 0 <= time.time_ns() // 1_000_000 - taken < _OLDEST_MS:
            put.at = taken + delay_ms
        else:
            put.delay = f"{delay_ms}ms"
        if name := envelope.properties.get("message_id"):
            digest = hashlib.sha256(put.body if isinstance(put.body, bytes) else b"")
            digest.update(f"{self._route.queue}\0{name}\0{put.at}\0{put.delay}".encode())
            put.idempotency_key = digest.hexdigest()
        return put

    async def _store(self, items: list[_Item], channel: AbstractChannel, publisher: Publisher) -> None:
        """Store messages, and repeat until each one is stored or parked."""
        failures, waits = 0, False
        while items:
            try:
                results = await self._publish([item.put for item in items])
            except HadelayError as error:
                results = [error] * len(items)
            later = []
            for item, result in zip(items, results, strict=True):
                if not await self._settled(item, result, publisher):
                    later.append((item, result))
            items = [item for item, _ in later]
            errors = [result for _, result in later if isinstance(result, HadelayError)]
            if errors:
                wait_s = min(_LONGEST_S, _FIRST_S * float(1 << min(failures, 10))) * random.uniform(0.75, 1.25)
                wait_s = max(wait_s, max(error.retry_after_ms or 0 for error in errors) / 1000)
                log.warning("%d messages wait for the cluster: %s; next try in %.1f s", len(items), errors[0], wait_s)
                failures, waits = failures + 1, True
                await asyncio.sleep(wait_s)
                if channel.is_closed:
                    raise ChannelInvalidStateError("RabbitMQ ended the connection while the cluster did not answer")
        if waits:
            log.info("the cluster takes messages again")

    async def _publish(self, puts: list[Put]) -> list[PutResult]:
        """Publish messages to the cluster in one request. If the cluster refuses the whole request, for example because
        of its size, publish each message separately."""
        try:
            return await self._client.put_many(puts)
        except HadelayError as error:
            if not _final(error):
                raise
            if len(puts) == 1:
                return [error]
        return [result for put in puts for result in await self._publish([put])]

    async def _settled(self, item: _Item, result: PutResult, publisher: Publisher) -> bool:
        """Handle the cluster's answer about one message. Returns False if the message has to be published again."""
        if isinstance(result, Receipt):
            if result.duplicate and not item.rekeyed and not await self._is_repetition(item, result):
                item.rekeyed, item.put.idempotency_key = True, new_key()
                return False
            self._counts["repeated" if result.duplicate else "stored"] += 1
        elif isinstance(result, Conflict) and result.extra.get("outcome") == "cancelled" and not item.rekeyed:
            if not _redelivered(item.message):
                item.rekeyed, item.put.idempotency_key = True, new_key()
                return False
            self._counts["repeated"] += 1
        elif isinstance(result, Forbidden):
            # Publish again under a new key: the cluster remembers the refusal under the old key, and the token may be
            # granted the missing right.
            item.put.idempotency_key = new_key()
            return False
        elif _final(result):
            await self._park(item.message, str(result), publisher)
        else:
            return False
        return True

    async def _is_repetition(self, item: _Item, receipt: Receipt) -> bool:
        """Whether the stored message is this delivery, stored earlier, and not an equal message that was published
        before it.

        A program may publish an equal message again, with the same message id, after the first came back. So a message
        that RabbitMQ did not deliver before is never a repetition, and otherwise the stored one must be pending: it is
        better to deliver a message twice than to lose one.
        """
        if not (_redelivered(item.message) or receipt.resent):
            return False
        try:
            return (await self._client.get(receipt.id)).state in _PENDING
        except NotFound:
            return False

    async def _park(self, message: DeliveredMessage, reason: str, publisher: Publisher) -> None:
        """Move a message that cannot be stored or published to the queue of refused messages."""
        properties = properties_of(message)
        for name in ("expiration", *unreadable(properties)):
            properties.pop(name, None)
        headers = {**(properties.get("headers") or {}), REFUSAL: reason[:_LONGEST]}
        given = {"message_id": new_key(), **properties, "headers": headers}
        made = unpack(pack(Envelope("", "", given, b"")))
        await publisher.publish("", self._route.parked, made.properties, message.body)
        self._counts["parked"] += 1
        log.error("a message is parked in queue %r: %s", self._route.parked, reason)


def _final(error: HadelayError) -> bool:
    """Whether the cluster will refuse this publish however often it is repeated."""
    return (
        error.of_a_node
        and not error.retryable
        and error.outcome_known
        and not isinstance(error, Unauthorized | Forbidden)
    )


def _redelivered(message: DeliveredMessage) -> bool:
    return bool(getattr(message.delivery, "redelivered", False))


def _tag(message: DeliveredMessage) -> int:
    return int(message.delivery_tag or 0)
