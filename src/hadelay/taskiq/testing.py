"""Helper for tests of taskiq's tasks: runs due calls, on a node whose clock the test moves (docs/howto/taskiq.md)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from taskiq import AckableMessage
from taskiq.receiver import Receiver

from hadelay.client import AsyncClient, Client
from hadelay.client.due import MovedNode, endless, ready
from hadelay.taskiq.broker import HadelayBroker
from hadelay.taskiq.delivery import Delivery

#: Limit of calls in one call of `run_due`; a further call raises an error.
_MOST = 10_000


class Worker:
    """Runs due calls with taskiq's own receiver."""

    def __init__(self, broker: HadelayBroker, client: AsyncClient) -> None:
        self._broker, self._client = broker, client

    async def run_due(self) -> int:
        """Run the calls that are due by the node's clock until none is left; returns their number."""
        receiver, topics, count = Receiver(self._broker, run_startup=False), [self._broker.topic], 0
        while await asyncio.to_thread(ready, self._broker.client, topics):
            messages = await self._client.receive(topics, max=1, wait=2)
            if not messages:
                break  # no due call is handed out: the topic is paused, or a message group blocks the call
            call = await self._broker._call(messages[0])
            if call is not None:
                ended = asyncio.Event()
                delivery = Delivery(messages[0], ended.set)
                # Run the call in a new asyncio task, as a worker does: its result is kept in a context variable.
                await asyncio.create_task(receiver.callback(AckableMessage(data=call, ack=delivery.ack)))
                if not ended.is_set():
                    await messages[0].nack(reason="taskiq ended the call without an ack")
            count += 1
            if count == _MOST:
                raise endless()
        return count


@contextlib.asynccontextmanager
async def worker(broker: HadelayBroker, node: MovedNode) -> AsyncIterator[Worker]:
    """Context manager in which the broker uses the test's node."""
    before, broker.client = broker.client, Client(node.url)
    try:
        async with AsyncClient(node.url) as client:
            yield Worker(broker, client)
    finally:
        await asyncio.to_thread(broker.client.close)
        broker.client = before
