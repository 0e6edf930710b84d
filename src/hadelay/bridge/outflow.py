"""The outflow half of the bridge: receives due messages from the cluster, and publishes them to RabbitMQ.

The cluster is acked only after RabbitMQ's confirm: a bridge, broker or node that is killed in between makes the cluster
hand the message out again, with the same message id.
"""

import asyncio
import logging
from collections import Counter

from hadelay.bridge.envelope import CONTENT_TYPE, delay_of, delayed, unpack
from hadelay.bridge.rabbitmq import Malformed, Publisher, Route, Unroutable, connected, declare
from hadelay.client import AsyncClient
from hadelay.client.message import AsyncMessage

log = logging.getLogger("hadelay.bridge")

#: Limit of messages that wait for RabbitMQ's confirm at the same time.
CONCURRENCY = 300
#: Lease of a message, in seconds. The messages of a killed bridge are handed out again when their leases end.
LEASE_S = 30
#: Maximum length, in bytes, of a nack's reason.
_REASON_BYTES = 128


class Outflow:
    def __init__(self, route: Route, client: AsyncClient, counts: Counter[str]) -> None:
        self._route, self._client, self._counts = route, client, counts
        self.connected = False

    async def session(self, stop: asyncio.Event) -> None:
        """Publish due messages over one connection until `stop` is set. Raises the error that ends the connection;
        messages without a confirm are nacked, and their attempt does not count."""
        async with connected(self._route) as connection:
            await declare(connection, self._route)
            channel = await connection.channel()
            publisher = Publisher(channel, self._route.user)
            consumer = self._client.consume(
                self._route.topic, concurrency=CONCURRENCY, lease=LEASE_S, consumer="bridge"
            )
            self.connected = True
            work = asyncio.create_task(consumer.work(lambda message: self._publish(message, publisher)))
            stopped, closing = asyncio.create_task(stop.wait()), channel.closing
            try:
                await asyncio.wait({work, stopped, closing}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self.connected = False
                stopped.cancel()
                consumer.stop()
                await work
            if not stop.is_set():
                raise ConnectionError("RabbitMQ ended the connection")

    async def _publish(self, message: AsyncMessage, publisher: Publisher) -> None:
        try:
            if message.content_type != CONTENT_TYPE:
                raise ValueError(f"the message has content type {message.content_type}, not {CONTENT_TYPE}")
            envelope = unpack(message.body)
        except ValueError as error:
            await self._give_up(message, str(error))
            return
        headers = envelope.properties.get("headers") or {}
        properties = {
            "message_id": f"hadelay-{message.id}",
            **envelope.properties,
            "headers": delayed(headers, delay_of(headers)),
        }
        try:
            await publisher.publish(
                self._route.to,
                envelope.routing_key,
                properties,
                envelope.body,
                mandatory=not self._route.drop_unroutable,
            )
        except Unroutable as error:
            self._counts["unroutable"] += 1
            log.warning("message %s: %s", message.id, error)
            await message.nack(reason=_short(str(error)))
        except Malformed as error:
            await self._give_up(message, str(error))
        except Exception as error:
            # The connection broke: another bridge, or the next session, publishes the message.
            log.info("message %s goes back to the cluster: %s: %s", message.id, type(error).__name__, error)
            await message.nack(delay=0, count=False, reason=_short(str(error)))
        else:
            self._counts["published"] += 1
            await message.ack()

    async def _give_up(self, message: AsyncMessage, reason: str) -> None:
        self._counts["dead"] += 1
        log.error("message %s becomes a dead letter: %s", message.id, reason)
        await message.nack(dead=True, reason=_short(reason))


def _short(reason: str) -> str:
    return reason.encode()[:_REASON_BYTES].decode(errors="ignore")
