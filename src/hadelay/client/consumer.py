"""`client.consume`: messages as they fall due, with their leases looked after.

Three small loops share one table of what is held: one polls while there is room, one extends what is half through its
lease, one settles. Acks and nacks that come while a request is under way leave together in the next one, so a fast
consumer costs a request per round trip, not per message.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Protocol

from hadelay.client.types import AckOutcome, Delay, ExtendOutcome, Leases, Message, NackOutcome
from hadelay.errors import BadRequest, HadelayError

log = logging.getLogger(__name__)

#: After a poll that failed even with all its retries: as long as it was told, within these.
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_MAX_POLL = 1_000
#: Timeout of the request that looks for a grant of the poll that a stop cut off.
_LAST_POLL_S = 2.0
#: A request about a lease: verb, delay, reason.
_How = tuple[str, Delay | None, str | None]
_GIVE_BACK: _How = ("give back", None, "the consumer stopped")


class Leased(Message, kw_only=True):
    """A message in the hands of a consumer. Leave `async with` cleanly to ack it, by an exception to nack it.

    A stop is no failure: after a cancellation, Ctrl-C or SystemExit the message goes back at once, and the attempt does
    not count. So put a timeout inside: one around `async with` cancels it.
    """

    _consumer: Any = None
    _settled: bool = False

    async def ack(self) -> AckOutcome:
        """`acked`, `already_acked`, or `lease_lost`: somebody else may have it now."""
        return await self._consumer.settle(self, "ack")  # type: ignore[no-any-return]

    async def nack(self, delay: Delay | None = None, *, reason: str | None = None) -> NackOutcome:
        """Back to waiting, for `delay`, or for what the topic says; `reason` is kept with the message."""
        return await self._consumer.settle(self, "nack", delay, reason)  # type: ignore[no-any-return]

    async def extend(self, lease: Delay) -> ExtendOutcome:
        """Beyond what the consumer does by itself."""
        return (await self._consumer.client.extend([self], lease=lease))[0]  # type: ignore[no-any-return]

    async def __aenter__(self) -> Leased:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
            # What went wrong first is what is raised; without the nack the message comes again when its lease ends.
            log.warning("message %s was not given back: %s", self.id, failure)


def reason_of(error: BaseException) -> str:
    """What is kept of an exception: its kind and its words, at most 128 bytes of printable text."""
    text = "".join(c if c.isprintable() else " " for c in f"{type(error).__name__}: {error}".strip(": "))
    return text.encode("utf-8", "replace")[:128].decode("utf-8", "ignore")


@dataclass(frozen=True, slots=True)
class ConsumeOptions:
    """What a consumer asks for, again and again."""

    topics: list[str]
    lease_s: float
    wait_s: float
    tags: list[str]
    any_tags: list[str]
    name: str


class Requests(Protocol):
    """The requests that a consumer makes; AsyncClient has them."""

    async def receive(
        self, topics: Sequence[str], *, max: int, wait: Delay, lease: Delay, tags: Sequence[str],
        any_tags: Sequence[str], consumer: str, request_id: str, timeout: float | None,
    ) -> list[Message]: ...  # fmt: skip
    async def ack(self, leases: Leases) -> list[AckOutcome]: ...
    async def nack(
        self, leases: Leases, *, delay: Delay | None, reason: str | None, count: bool = True
    ) -> list[NackOutcome]: ...
    async def extend(self, leases: Leases, *, lease: Delay) -> list[ExtendOutcome]: ...


class Consumer:
    """Iterate it once, with `async for`. Leaving the loop gives back what was fetched and not handed out.

    To stop without losing work: `stop` or `drain` first, then leave the loop.
    """

    def __init__(self, client: Requests, options: ConsumeOptions, concurrency: int, registry: set[Consumer]) -> None:
        if concurrency < 1:
            raise ValueError("concurrency: at least 1")
        self.client = client
        self.options = options
        self.concurrency = concurrency
        #: lease token → what is unsettled: waiting in the queue, or in the hands of the user
        self.held: dict[str, Leased] = {}
        #: None: the end
        self._queue: asyncio.Queue[Leased | Exception | None] = asyncio.Queue()
        self._room = asyncio.Event()
        #: How → lease → who waits for the outcome
        self._orders: dict[_How, dict[str, asyncio.Future[str]]] = {}
        self._ordered = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._registry = registry
        self._stopped = self._closed = False
        self._closing: asyncio.Task[None] | None = None

    async def __aiter__(self) -> AsyncIterator[Leased]:
        if self._tasks or self._stopped:
            raise RuntimeError("a consumer is iterated once; call consume again")
        try:
            with contextlib.suppress(StopAsyncIteration):
                while True:
                    yield await self.__anext__()
        finally:
            await self.close()

    async def __anext__(self) -> Leased:
        """The next one, for who calls `close` himself, however he leaves."""
        if not self._tasks and not self._stopped:
            self._registry.add(self)
            self._tasks = [asyncio.create_task(loop()) for loop in (self._poll, self._keep, self._settle_all)]
        while not self._stopped and (item := await self._queue.get()) is not None:
            if isinstance(item, Exception):
                raise item
            if item.lease in self.held:
                return item
        raise StopAsyncIteration

    def stop(self) -> None:
        """Fetch no more, and end the iteration. What was fetched and not handed out goes back at once, and the attempt
        does not count. What was handed out stays leased until it is settled, or until `close`."""
        if self._stopped:
            return
        self._stopped = True
        if self._tasks:
            self._tasks[0].cancel()
        while not self._queue.empty():
            if isinstance(item := self._queue.get_nowait(), Leased):
                self._order(item, _GIVE_BACK)
        self._queue.put_nowait(None)

    async def drain(self, timeout: float | None = None) -> bool:
        """`stop`, then wait until everything that was handed out is settled, at most `timeout` seconds. True: it is."""
        self.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._settle_rest()
                while self.held:
                    self._room.clear()
                    await self._room.wait()
        return not self.held

    async def close(self) -> None:
        """`stop`, and extend no more leases. What is in hand still can be settled, until its lease ends."""
        if self._closing is None:
            self.stop()
            self._closed = True
            self._closing = asyncio.create_task(self._end())
        # Whoever asks waits until it is done, and who gives up waiting does not stop it.
        await asyncio.shield(self._closing)

    async def _end(self) -> None:
        if self._tasks:
            self._tasks[1].cancel()  # `stop` cancelled the first; the third ends when nobody waits for it any more
        self._ordered.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while self._orders:
            await self._settle_next()
        self._registry.discard(self)

    # ---- the loops

    async def _poll(self) -> None:
        request_id = ""
        while True:
            room = self.concurrency - len(self.held)
            if room <= 0:
                self._room.clear()
                await self._room.wait()
                continue
            # The same id until there was an answer: a grant whose answer was lost is answered again.
            request_id = request_id or os.urandom(12).hex()
            try:
                messages = await self._receive(request_id, min(room, _MAX_POLL), self.options.wait_s)
            except asyncio.CancelledError:
                # It may have been granted something: the same request gets that, and it goes back.
                with contextlib.suppress(Exception):
                    for message in self._take(await self._receive(request_id, 1, 0, timeout=_LAST_POLL_S)):
                        self._order(message, _GIVE_BACK)
                    await self._settle_rest()
                raise
            except Exception as error:
                # Also what is no refusal, such as an answer that no node gave: else the loop ends, and nobody knows.
                if not isinstance(error, HadelayError) or not error.retryable:
                    self._queue.put_nowait(error)
                    return
                log.warning("poll failed, trying again: %s", error)
                await asyncio.sleep(min(max((error.retry_after_ms or 0) / 1000, _PAUSE_S), _LONGEST_PAUSE_S))
                continue
            request_id = ""
            for leased in self._take(messages):
                self._queue.put_nowait(leased)

    async def _receive(self, request_id: str, most: int, wait_s: float, timeout: float | None = None) -> list[Message]:
        options = self.options
        return await self.client.receive(
            options.topics, max=most, wait=wait_s, lease=options.lease_s, tags=options.tags, any_tags=options.any_tags,
            consumer=options.name, request_id=request_id, timeout=timeout,
        )  # fmt: skip

    def _take(self, messages: Sequence[Message]) -> Iterator[Leased]:
        for message in messages:
            leased = Leased(**{name: getattr(message, name) for name in Message.__struct_fields__})
            leased._consumer = self
            self.held[leased.lease] = leased
            yield leased

    async def _keep(self) -> None:
        """Extends everything held, every third of a lease: two may fail before one is lost."""
        while True:
            await asyncio.sleep(self.options.lease_s / 3)
            if not self.held:
                continue
            held = list(self.held.values())
            try:
                outcomes = await self.client.extend(held, lease=self.options.lease_s)
            except Exception as error:
                log.warning("leases were not extended, trying again: %s", error)
                continue
            for message, outcome in zip(held, outcomes, strict=True):
                if outcome == "lease_lost" and not message._settled:
                    log.warning("the lease of message %s was lost: it is handed out again", message.id)
                    self._forget(message.lease)

    async def settle(self, message: Leased, verb: str, delay: Delay | None = None, reason: str | None = None) -> str:
        future = self._order(message, (verb, delay, reason))
        await self._settle_rest()
        return await asyncio.shield(future)

    async def _settle_rest(self) -> None:
        """Settle the orders that are left when the event loop ends."""
        while self._tasks and self._tasks[2].done() and self._orders:
            await self._settle_next()

    async def give_back(self, message: Leased, why: BaseException) -> None:
        """At once, and the attempt does not count. Where the program ends, it is not fetched again."""
        if not isinstance(why, asyncio.CancelledError):
            self.stop()
        await self.settle(message, *_GIVE_BACK)

    def give_up(self) -> None:
        """Give back messages that were handed out and are not settled: nobody works on them any more."""
        for message in self.held.values():
            if not message._settled:
                self._order(message, _GIVE_BACK)

    def _order(self, message: Leased, how: _How) -> asyncio.Future[str]:
        futures = self._orders.setdefault(how, {})
        # Again before the first time is answered: the same answer for both, whoever gives up waiting.
        future = futures.setdefault(message.lease, asyncio.get_running_loop().create_future())
        message._settled = True
        self._ordered.set()
        return future

    async def _settle_all(self) -> None:
        try:
            while not self._closed or self._orders:
                self._ordered.clear()
                if self._orders:
                    await self._settle_next()
                elif not self._closed:
                    await self._ordered.wait()
        finally:  # the event loop ends and cancels everything: what its handlers give back is sent first
            while self._orders:
                await self._settle_next()

    async def _settle_next(self) -> None:
        how = next(iter(self._orders))
        futures = self._orders.pop(how)
        outcomes: Sequence[str] | Exception
        try:
            outcomes = await self._settled(how, list(futures))
        except asyncio.CancelledError:
            again = self._orders.setdefault(how, {})
            for lease, future in futures.items():
                # Settled again meanwhile: that one gets the answer of this one.
                if (later := again.get(lease)) is not None:
                    future.add_done_callback(partial(_copy_outcome, later))
                again[lease] = future
            raise
        except Exception as error:
            outcomes = error
        for n, (lease, future) in enumerate(futures.items()):
            if future.done():
                pass
            elif isinstance(outcomes, Exception):
                future.set_exception(outcomes)
                future.exception()  # nobody has to wait for it
            else:
                future.set_result(outcomes[n])
            self._forget(lease)

    async def _settled(self, how: _How, leases: list[str]) -> Sequence[str]:
        verb, delay, reason = how
        if verb == "ack":
            return await self.client.ack(leases)
        if how != _GIVE_BACK:
            return await self.client.nack(leases, delay=delay, reason=reason)
        try:
            return await self.client.nack(leases, delay=0, reason=reason, count=False)
        except BadRequest:  # of a node that does not know `count` yet: then the attempt counts
            return await self.client.nack(leases, delay=0, reason=reason)

    def _forget(self, lease: str) -> None:
        if self.held.pop(lease, None) is not None:
            self._room.set()


def _copy_outcome(waiting: asyncio.Future[str], settled: asyncio.Future[str]) -> None:
    """Give `waiting` what `settled` came to."""
    if waiting.done() or settled.cancelled():
        waiting.cancel()
    elif (error := settled.exception()) is not None:
        waiting.set_exception(error)
    else:
        waiting.set_result(settled.result())
