"""`client.consume`: messages as they fall due, with extended leases.

A consumer polls while fewer messages than its concurrency are unsettled, and extends leases. Acks and nacks of the time
of one request leave together in the next, so a fast consumer needs a request per round trip, not per message.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from hadelay.client.message import GIVE_BACK, AsyncMessage, How, Leasing, settled
from hadelay.client.polling import Poll, Polling
from hadelay.client.wire import each
from hadelay.errors import BadRequest, TooLarge

log = logging.getLogger(__name__)

#: Time for the handlers of a stopped `work` to end, in seconds: less than the 10 s that `docker stop` waits.
DRAIN_S = 8.0

OnError = Callable[[AsyncMessage, Exception], object]


class Consumer:
    """Leased messages of `consume`: to iterate once, with `async for`, or one at a time with `next`, or with a handler
    in `work`. Leaving the loop gives back fetched messages that were not handed out.

    Topics of several shards take a poll per shard, so there may be one unsettled message more for each further shard.

    `concurrency` and `topics` may be set while the consumer runs, and hold from the next poll on.

    To stop without losing work: `stop` or `drain` first, then leave the loop.
    """

    def __init__(
        self,
        client: Leasing,
        topics: str | Sequence[str],
        poll: Poll,
        lease_s: float,
        concurrency: int,
        registry: set[Consumer],
    ) -> None:
        """poll: `client.receive` with the consumer's options. registry: consumers that the client closes."""
        self.client, self._lease_s, self._registry = client, lease_s, registry
        #: Unsettled messages by lease token: those in `_queue`, and those handed out to the caller.
        self.unsettled: dict[str, AsyncMessage] = {}
        #: Fetched messages, not yet handed to the caller; an exception is raised, None ends the iteration.
        self._queue: asyncio.Queue[AsyncMessage | Exception | None] = asyncio.Queue()
        self._polling = Polling(poll, topics, concurrency, lambda: len(self.unsettled), self._take)
        #: Event that is set by the first answer of a node to a poll.
        self.reached = self._polling.reached
        #: Leases to settle, by kind of settlement, each with the future of its outcome.
        self._orders: dict[How, dict[str, asyncio.Future[str]]] = {}
        #: Results of acks, by lease token.
        self._results: dict[str, Any] = {}
        #: Tasks of the running consumer: the poll, and the extension of leases.
        self._tasks: list[asyncio.Task[None]] = []
        self._sender: asyncio.Task[None] | None = None
        self._stopped = False
        self._closing: asyncio.Task[None] | None = None

    @property
    def stopped(self) -> bool:
        """Whether `stop`, `drain` or `close` was called, or an error was raised: no further message comes."""
        return self._stopped

    @property
    def concurrency(self) -> int:
        """Limit of unsettled messages. A lower limit takes back nothing: the poll under way may exceed it."""
        return self._polling.concurrency

    @concurrency.setter
    def concurrency(self, most: int) -> None:
        self._polling.concurrency = most

    @property
    def topics(self) -> list[str]:
        """Topics to receive from; setting them ends the poll under way. Messages of a removed topic that were fetched
        before still come. Without topics, the consumer waits."""
        return list(self._polling.topics)

    @topics.setter
    def topics(self, topics: str | Sequence[str]) -> None:
        self._polling.topics = each(topics)

    async def __aiter__(self) -> AsyncIterator[AsyncMessage]:
        if self._tasks or self._stopped:
            raise RuntimeError("a consumer can be iterated only once: call consume again")
        try:
            with contextlib.suppress(StopAsyncIteration):
                while True:
                    yield await self.__anext__()
        finally:
            await self.close()

    async def __anext__(self) -> AsyncMessage:
        """Get the next message. A caller that uses this method instead of `async for` has to call `close` itself."""
        if not self._tasks and not self._stopped:
            self._registry.add(self)
            self._tasks = [asyncio.create_task(self._fetch()), asyncio.create_task(self._extend())]
        while not self._stopped and (item := await self._queue.get()) is not None:
            if isinstance(item, Exception):
                self.stop()  # the poll has ended, so a further call would wait for ever
                raise item
            if item.lease in self.unsettled:
                return item
        raise StopAsyncIteration

    async def next(self, timeout: float | None = None) -> AsyncMessage | None:
        """Get the next message; None if there is none within `timeout` seconds, or the consumer stopped. For callers
        that always `close` the consumer themselves."""
        with contextlib.suppress(TimeoutError, StopAsyncIteration):
            async with asyncio.timeout(timeout):
                return await self.__anext__()
        return None

    async def work(
        self,
        handler: Callable[[AsyncMessage], Awaitable[object]],
        *,
        on_error: OnError | None = None,
        drain: float = DRAIN_S,
    ) -> None:
        """Run `handler` for every message, until `stop`, or until cancelled. An exception nacks its message, with the
        exception as the reason, and is given to `on_error`, which may be a coroutine function, or logged.

        drain: seconds for handlers to finish after that, their leases extended meanwhile. Then the handlers are
        cancelled, and their messages go back at once; that attempt does not count. A second cancellation ends the wait.
        """
        running: set[asyncio.Task[None]] = set()
        refusal: Exception | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                try:
                    while (message := await anext(self, None)) is not None:
                        task = tasks.create_task(_handled(message, handler, on_error))
                        running.add(task)
                        task.add_done_callback(running.discard)
                except Exception as error:
                    refusal = error  # raised below: the task group would put the error into an ExceptionGroup
                finally:
                    await self.drain(drain)
                    for task in running:
                        task.cancel()
        finally:
            self._give_up()  # gives back unsettled messages, also those whose tasks were cancelled before they began
            await self.close()
        if refusal is not None:
            raise refusal

    def stop(self) -> None:
        """Stop fetching, and end the iteration. Fetched messages that were not handed out go back at once, and their
        attempt does not count. Messages handed out stay leased until they are settled, or until `close`."""
        if self._stopped:
            return
        self._stopped = True
        self._queue.put_nowait(None)
        if self._tasks:
            self._tasks[0].cancel()
            # Give messages back only after the poll has ended: a poll under way could be granted them again.
            self._tasks[0].add_done_callback(self._give_back_queued)

    def _give_back_queued(self, _: object = None) -> None:
        while not self._queue.empty():
            if isinstance(item := self._queue.get_nowait(), AsyncMessage):
                self._order(item, GIVE_BACK)
        self._queue.put_nowait(None)

    async def drain(self, timeout: float | None = None) -> bool:
        """`stop`, then wait until all messages are settled, at most `timeout` seconds; returns whether they are."""
        self.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self.unsettled:
                    self._polling.room.clear()
                    await self._polling.room.wait()
        return not self.unsettled

    async def close(self) -> None:
        """`stop`, and stop extending leases. Messages handed out can be settled until their leases end."""
        if self._closing is None:
            self.stop()
            self._closing = asyncio.create_task(self._end())
        # Shielded: a cancelled caller must not cancel the closing, which other callers may wait for.
        await asyncio.shield(self._closing)

    async def _end(self) -> None:
        if self._tasks:
            self._tasks[1].cancel()
            await asyncio.wait(self._tasks)
        if self._sender is not None:
            await asyncio.wait([self._sender])
        self._registry.discard(self)

    async def _fetch(self) -> None:
        try:
            await self._polling.run()
        except Exception as error:
            self._queue.put_nowait(error)
        except asyncio.CancelledError:
            # Give messages back in this cancelled task, not in a new task: an event loop that ends does not wait for
            # new tasks.
            self._give_back_queued()
            if self._sender is not None:
                await asyncio.wait([self._sender])
            raise

    def _take(self, messages: Sequence[AsyncMessage]) -> None:
        for message in messages:
            message._consumer = self
            self.unsettled[message.lease] = message
            if message.topic in self._polling.topics or self._stopped:
                self._queue.put_nowait(message)
            else:
                self._order(message, GIVE_BACK)  # the caller removed the message's topic during the poll

    async def _extend(self) -> None:
        """Extend all leases every third of their length: two extensions may fail before a lease is lost."""
        while True:
            await asyncio.sleep(self._lease_s / 3)
            if not self.unsettled:
                continue
            messages = list(self.unsettled.values())
            try:
                outcomes = await self.client.extend(messages, lease=self._lease_s)
            except Exception as error:
                log.warning("leases were not extended, trying again: %s", error)
                continue
            for message, outcome in zip(messages, outcomes, strict=True):
                if outcome == "lease_lost" and not message._settled:
                    log.warning("the lease of message %s was lost: the message is handed out again", message.id)
                    message.lost = True
                    self._forget(message.lease)

    def _forget(self, lease: str) -> None:
        if self.unsettled.pop(lease, None) is not None:
            self._polling.room.set()

    async def settle(self, message: AsyncMessage, how: How, result: Any = None) -> str:
        if how.results:
            self._results.setdefault(message.lease, result)
        # Shielded: a cancelled caller must not cancel the settlement, nor its outcome for other callers.
        return await asyncio.shield(self._order(message, how))

    async def give_back(self, message: AsyncMessage, why: BaseException) -> None:
        """Give back a message; the attempt does not count. why: the exception that ended its handler; SystemExit and
        KeyboardInterrupt also stop the consumer."""
        if not isinstance(why, asyncio.CancelledError):
            self.stop()
        if self._stopped:
            # Wait for the end of the poll: its last request could be granted this message again.
            await asyncio.wait(self._tasks[:1])
        await self.settle(message, GIVE_BACK)

    def _give_up(self) -> None:
        """Give back all messages that were handed out and are not settled, because their handlers have ended."""
        for message in self.unsettled.values():
            if not message._settled:
                self._order(message, GIVE_BACK)

    def _order(self, message: AsyncMessage, how: How) -> asyncio.Future[str]:
        # If a lease is settled again before the first outcome arrives, both callers get that outcome.
        new = asyncio.get_running_loop().create_future()
        future = self._orders.setdefault(how, {}).setdefault(message.lease, new)
        message._settled = True
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())
        return future

    async def _send(self) -> None:
        try:
            await self._send_orders()
        finally:
            # The event loop, when it ends, cancels this task too: first send settlements of cancelled handlers.
            await self._send_orders()

    async def _send_orders(self) -> None:
        """Send settlements until none is left: one request per kind of settlement (ack, nack, give back), in turn."""
        while self._orders:
            how = next(iter(self._orders))
            leases = list(self._orders[how])
            outcomes = await self._settled(how, leases)
            futures = self._orders.pop(how)
            for lease, outcome in zip(leases, outcomes, strict=True):
                future = futures.pop(lease)
                if how.results:
                    self._results.pop(lease, None)
                if isinstance(outcome, str):
                    future.set_result(outcome)
                else:
                    future.set_exception(outcome)
                    future.exception()  # asyncio would warn if no caller waits for the future any more
                self._forget(lease)
            if futures:
                self._orders[how] = futures

    async def _settled(self, how: How, leases: list[str]) -> Sequence[str | Exception]:
        """Settle leases; returns an outcome for each, or the exception."""
        results = [self._results.get(lease) for lease in leases] if how.results else ()
        try:
            return await settled(self.client, how, leases, results)
        except (BadRequest, TooLarge) as error:
            if len(leases) == 1 or not how.results:
                return [error] * len(leases)
            # A node refused one of the results: send each ack alone, so that the others count.
            return [outcome for lease in leases for outcome in await self._settled(how, [lease])]
        except Exception as error:
            return [error] * len(leases)


async def _handled(
    message: AsyncMessage, handler: Callable[[AsyncMessage], Awaitable[object]], on_error: OnError | None
) -> None:
    try:
        async with message:
            await handler(message)
    except Exception as error:
        if on_error is not None:
            handled = on_error(message, error)
            if asyncio.iscoroutine(handled):
                await handled
        else:
            log.error("the handler failed on message %s", message.id, exc_info=error)
