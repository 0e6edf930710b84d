"""Messages on their way from the consumers, which run on the event loop of blocking clients, to the thread in which
Celery's worker handles them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from hadelay.client import AsyncMessage, Client, Consumer
from hadelay.client.background import Running, loop, wait

log = logging.getLogger(__name__)

#: Limit of unsettled messages of a consumer whose application sets no prefetch limit.
UNLIMITED = 1_000
#: Timeout of closing a consumer, in seconds: acks may wait for a leader.
_CLOSE_S = 10.0

Settlement = Callable[[AsyncMessage], Coroutine[Any, Any, str]]


class Inbox:
    """Queue between threads, one per connection: received messages, each with channel number and queue name, and errors
    of receives."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[tuple[int, str, AsyncMessage] | Exception] = queue.SimpleQueue()
        self._pipe: tuple[int, int] | None = None

    def descriptor(self) -> int:
        """File descriptor that is readable when there are messages."""
        if self._pipe is None:
            self._pipe = os.pipe()
            for descriptor in self._pipe:
                os.set_blocking(descriptor, False)
            self._wake()
        return self._pipe[0]

    def put(self, item: tuple[int, str, AsyncMessage] | Exception) -> None:
        self._items.put(item)
        self._wake()

    def get(self, timeout: float | None) -> tuple[int, str, AsyncMessage]:
        """Wait for the next message. Raises queue.Empty after `timeout` seconds, or the error of a failed receive."""
        item = self._items.get(timeout=timeout) if timeout != 0 else self._items.get_nowait()
        if isinstance(item, Exception):
            raise item
        return item

    def clear_descriptor(self) -> None:
        assert self._pipe is not None
        with contextlib.suppress(BlockingIOError):
            os.read(self._pipe[0], 65_536)

    def close(self) -> None:
        if self._pipe is not None:
            pipe, self._pipe = self._pipe, None
            for descriptor in pipe:
                os.close(descriptor)

    def _wake(self) -> None:
        if self._pipe is not None:
            with contextlib.suppress(BlockingIOError):
                os.write(self._pipe[1], b"\0")


class Subscription:
    """Consumer of a channel, whose messages go to the connection's inbox. Any thread of the process that made it may
    call its methods."""

    def __init__(
        self, client: Client, inbox: Inbox, channel: int, limit: int, tags: list[str], options: Mapping[str, Any]
    ) -> None:
        """limit: limit of unsettled messages; 0: UNLIMITED. options: further arguments of the client's `consume`."""
        self._inbox, self._channel = inbox, channel
        #: Name of a topic → name of the Celery queue whose messages it has.
        self._queues: dict[str, str] = {}
        self._consumer: Consumer = client._async().consume((), concurrency=limit or UNLIMITED, tags=tags, **options)
        self._pump = Running(self._deliver())

    def add(self, topic: str, queue: str) -> None:
        self._queues[topic] = queue
        self._change("topics", list(self._queues))

    def remove(self, topic: str) -> None:
        self._queues.pop(topic, None)
        self._change("topics", list(self._queues))

    def limit(self, most: int) -> None:
        self._change("concurrency", most or UNLIMITED)

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Give back fetched messages that were not delivered, and wait until settlements are sent."""
        with contextlib.suppress(TimeoutError):
            wait(asyncio.wait_for(self._consumer.close(), timeout_s))

    def _change(self, name: str, value: Any) -> None:
        loop().call_soon_threadsafe(setattr, self._consumer, name, value)

    async def _deliver(self) -> None:
        try:
            while (message := await self._consumer.next()) is not None:
                self._inbox.put((self._channel, self._queues.get(message.topic, ""), message))
        except Exception as error:
            self._inbox.put(error)


def settle(message: AsyncMessage, settlement: Settlement) -> Running[None]:
    """Start to settle a message (such as ack or nack) on the client's event loop, without waiting for the outcome."""
    return Running(_settled(message, settlement))


async def _settled(message: AsyncMessage, settlement: Settlement) -> None:
    try:
        outcome = await settlement(message)
    except Exception as error:
        log.warning("message %s was not settled, and is handed out again: %s", message.id, error)
        return
    if outcome == "lease_lost":
        log.warning("the lease of message %s had ended: it is handed out again", message.id)
