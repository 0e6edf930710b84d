"""`client.consume`: messages as they fall due, with extended leases.

A consumer polls while fewer messages than its concurrency are unsettled, and extends leases. Acks and nacks of the time
of one request leave together in the next, so a fast consumer needs a request per round trip, not per message.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import msgspec

from hadelay.client.requests import Requests
from hadelay.client.types import AckOutcome, Delay, ExtendOutcome, Message, NackOutcome
from hadelay.errors import BadRequest, HadelayError

log = logging.getLogger(__name__)

#: Minimum and maximum pause after a poll that failed with all its retries, in seconds.
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_MAX_POLL = 1_000
#: Timeout in seconds of the last poll after a stop, which fetches messages that the cancelled poll was granted.
_LAST_POLL_S = 2.0
#: How to settle a lease: "ack", "nack" or "give back"; delay before the next hand-out; reason.
_How = tuple[str, Delay | None, str | None]
_ACK: _How = ("ack", None, None)
_GIVE_BACK: _How = ("give back", None, "the consumer stopped")


class Leased(Message, kw_only=True):
    """A message of a consumer. `async with` acks the message at the end, or nacks it on an exception.

    A stop is no failure: after a cancellation, Ctrl-C or SystemExit the message goes back at once, and the attempt does
    not count. So put a timeout inside: one around `async with` cancels it.
    """

    _consumer: Any = None
    _settled: bool = False

    async def ack(self) -> AckOutcome:
        """Ack the message. Returns `acked`, `already_acked` or `lease_lost` (others may have the message now)."""
        return await self._consumer.settle(self, _ACK)  # type: ignore[no-any-return]

    async def nack(self, delay: Delay | None = None, *, reason: str | None = None) -> NackOutcome:
        """Nack the message: it is due again after `delay`, or the topic's backoff. `reason` is stored."""
        return await self._consumer.settle(self, ("nack", delay, reason))  # type: ignore[no-any-return]

    async def extend(self, lease: Delay) -> ExtendOutcome:
        """Extend the lease to `lease` from now, in addition to the extensions by the consumer."""
        return (await self._consumer.client.extend([self], lease=lease))[0]  # type: ignore[no-any-return]

    async def __aenter__(self) -> Leased:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._settled:
            return
        if error is None:
            await self.ack()
            return
        try:
            if isinstance(error, Exception):
                await self.nack(reason=reason_of(error))
            else:
                await self._consumer.give_back(self, error)
        except Exception as failure:
            # If the nack fails, only log that: the handler's error is raised, and the message's lease expires.
            log.warning("message %s was not given back: %s", self.id, failure)


def reason_of(error: BaseException) -> str:
    """An exception as a nack's reason: its class and text, at most 128 bytes of printable text."""
    text = "".join(c if c.isprintable() else " " for c in f"{type(error).__name__}: {error}".strip(": "))
    return text.encode("utf-8", "replace")[:128].decode("utf-8", "ignore")


class Consumer:
    """Leased messages of `consume`, to iterate once, with `async for`. Leaving the loop gives back fetched messages
    that were not handed out.

    To stop without losing work: `stop` or `drain` first, then leave the loop.
    """

    def __init__(
        self, client: Requests, poll: Callable[..., Awaitable[list[Message]]], lease_s: float, concurrency: int,
        registry: set[Consumer],
    ) -> None:  # fmt: skip
        """poll: `client.receive` with the consumer's topics and options. registry: consumers that the client closes."""
        if concurrency < 1:
            raise ValueError(f"concurrency: expected at least 1, not {concurrency}")
        self.client, self.concurrency = client, concurrency
        self._receive, self._lease_s, self._registry = poll, lease_s, registry
        #: Unsettled messages by lease token: those in `_queue`, and those handed out to the caller.
        self.held: dict[str, Leased] = {}
        #: Fetched messages, not yet handed to the caller; an exception is raised, None ends the iteration.
        self._queue: asyncio.Queue[Leased | Exception | None] = asyncio.Queue()
        self._room = asyncio.Event()
        #: Leases to settle, with the futures of their outcomes.
        self._orders: dict[_How, dict[str, asyncio.Future[str]]] = {}
        #: Tasks of the running consumer: the poll, and the extension of leases.
        self._tasks: list[asyncio.Task[None]] = []
        self._sender: asyncio.Task[None] | None = None
        self._stopped = False
        self._closing: asyncio.Task[None] | None = None

    async def __aiter__(self) -> AsyncIterator[Leased]:
        if self._tasks or self._stopped:
            raise RuntimeError("a consumer can be iterated only once: call consume again")
        try:
            with contextlib.suppress(StopAsyncIteration):
                while True:
                    yield await self.__anext__()
        finally:
            await self.close()

    async def __anext__(self) -> Leased:
        """Get the next message; for callers that always `close` the consumer themselves."""
        if not self._tasks and not self._stopped:
            self._registry.add(self)
            self._tasks = [asyncio.create_task(self._fetch()), asyncio.create_task(self._extend())]
        while not self._stopped and (item := await self._queue.get()) is not None:
            if isinstance(item, Exception):
                raise item
            if item.lease in self.held:
                return item
        raise StopAsyncIteration

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
            if isinstance(item := self._queue.get_nowait(), Leased):
                self._order(item, _GIVE_BACK)
        self._queue.put_nowait(None)

    async def drain(self, timeout: float | None = None) -> bool:
        """`stop`, then wait until all messages are settled, at most `timeout` seconds; returns whether they are."""
        self.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self.held:
                    self._room.clear()
                    await self._room.wait()
        return not self.held

    async def close(self) -> None:
        """`stop`, and extend no more leases. Messages handed out can be settled until their leases end."""
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
            await self._poll()
        except asyncio.CancelledError:
            # On cancellation give messages back in this task: at its end, an event loop does not wait for newer tasks.
            self._give_back_queued()
            if self._sender is not None:
                await asyncio.wait([self._sender])
            raise

    async def _poll(self) -> None:
        request_id = ""
        while True:
            room = self.concurrency - len(self.held)
            if room <= 0:
                self._room.clear()
                await self._room.wait()
                continue
            # Keep a poll's request id until an answer arrives: the node then repeats an answer that was lost.
            request_id = request_id or os.urandom(12).hex()
            try:
                messages = await self._receive(request_id=request_id, max=min(room, _MAX_POLL))
            except asyncio.CancelledError:
                # The cancelled poll may have been granted messages: repeat its request to give them back.
                with contextlib.suppress(Exception):
                    self._take(await self._receive(request_id=request_id, max=1, wait=0, timeout=_LAST_POLL_S))
                raise
            except Exception as error:
                # Raise for the user after a refusal, and after an answer that no node sent: retries would not help.
                if not isinstance(error, HadelayError) or not error.retryable:
                    self._queue.put_nowait(error)
                    return
                log.warning("poll failed, trying again: %s", error)
                await asyncio.sleep(min(max((error.retry_after_ms or 0) / 1000, _PAUSE_S), _LONGEST_PAUSE_S))
                continue
            request_id = ""
            self._take(messages)

    def _take(self, messages: Sequence[Message]) -> None:
        for message in messages:
            leased = Leased(**msgspec.structs.asdict(message), _consumer=self)
            self.held[leased.lease] = leased
            self._queue.put_nowait(leased)

    async def _extend(self) -> None:
        """Extend all leases every third of their length: two extensions may fail before a lease is lost."""
        while True:
            await asyncio.sleep(self._lease_s / 3)
            if not self.held:
                continue
            held = list(self.held.values())
            try:
                outcomes = await self.client.extend(held, lease=self._lease_s)
            except Exception as error:
                log.warning("leases were not extended, trying again: %s", error)
                continue
            for message, outcome in zip(held, outcomes, strict=True):
                if outcome == "lease_lost" and not message._settled:
                    log.warning("the lease of message %s was lost: the message is handed out again", message.id)
                    self._forget(message.lease)

    def _forget(self, lease: str) -> None:
        if self.held.pop(lease, None) is not None:
            self._room.set()

    async def settle(self, message: Leased, how: _How) -> str:
        # Shielded: a cancelled caller must not cancel the settlement, nor its outcome for other callers.
        return await asyncio.shield(self._order(message, how))

    async def give_back(self, message: Leased, why: BaseException) -> None:
        """Give back a message; the attempt does not count. why: SystemExit and KeyboardInterrupt stop the consumer."""
        if not isinstance(why, asyncio.CancelledError):
            self.stop()
        if self._tasks[0].cancelling():
            # Wait for the end of the poll: its last request could be granted this message again.
            await asyncio.wait(self._tasks[:1])
        await self.settle(message, _GIVE_BACK)

    def give_up(self) -> None:
        """Give back all messages that were handed out and are not settled, because their handlers have ended."""
        for message in self.held.values():
            if not message._settled:
                self._order(message, _GIVE_BACK)

    def _order(self, message: Leased, how: _How) -> asyncio.Future[str]:
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
            try:
                outcomes: Sequence[str | Exception] = await self._settled(how, leases)
            except Exception as error:
                outcomes = [error] * len(leases)
            futures = self._orders.pop(how)
            for lease, outcome in zip(leases, outcomes, strict=True):
                future = futures.pop(lease)
                if isinstance(outcome, str):
                    future.set_result(outcome)
                else:
                    future.set_exception(outcome)
                    future.exception()  # asyncio would warn if no caller waits for the future any more
                self._forget(lease)
            if futures:
                self._orders[how] = futures

    async def _settled(self, how: _How, leases: list[str]) -> Sequence[str]:
        verb, delay, reason = how
        if verb == "ack":
            return await self.client.ack(leases)
        if how != _GIVE_BACK:
            return await self.client.nack(leases, delay=delay, reason=reason)
        try:
            return await self.client.nack(leases, delay=0, reason=reason, count=False)
        except BadRequest:  # an older node refuses the unknown field `count`: without the field, the attempt counts
            return await self.client.nack(leases, delay=0, reason=reason)
