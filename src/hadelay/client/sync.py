"""The blocking twin: the same methods, run on one background event loop.

A method is declared once, on AsyncClient; `_Blocking` gives it here with the same parameters, types and docstring.
The loop's thread is shared by all clients of a process and started again after a fork. Who is not closed is closed when
nothing refers to it any more, or when the interpreter ends.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from hadelay.client.aio import AsyncClient, Topics
from hadelay.client.consumer import Consumer, Leased
from hadelay.client.encoding import batches, own_or_new_key
from hadelay.client.types import AckOutcome, Delay, ExtendOutcome, Message, NackOutcome, Put, PutResult

P = ParamSpec("P")
R = TypeVar("R")

_THREAD = "hadelay-client"
#: Once more on the same thread: the collector may come by anywhere, and end a loop that somebody left.
_lock = threading.RLock()
_background: asyncio.AbstractEventLoop | None = None
#: Those of this process that may have connections.
_used: set[AsyncClient] = set()
#: How long the end of the interpreter waits for what consumers give back.
_LAST_WORDS_S = 2.0


def _loop() -> asyncio.AbstractEventLoop:
    global _background
    with _lock:
        if _background is None:
            loop = asyncio.new_event_loop()
            try:
                threading.Thread(target=loop.run_forever, daemon=True, name=_THREAD).start()
            except RuntimeError:  # there may be no more threads, for now
                loop.close()
                raise
            atexit.register(_at_exit)
            _background = loop
        return _background


async def _leave(client: AsyncClient) -> None:
    try:
        await asyncio.wait_for(client.close(), _LAST_WORDS_S)
    finally:
        await client._transport.close()


def _at_exit() -> None:
    clients = list(_used)
    _used.clear()  # before anything is waited for: Ctrl-C may end that, and then nobody may wait for the loop any more

    async def leave() -> None:
        await asyncio.gather(*map(_leave, clients), return_exceptions=True)

    if _background is not None:
        asyncio.run_coroutine_threadsafe(leave(), _background).result()


def _dropped(client: AsyncClient) -> None:
    """Nobody has its Client any more. Called on whatever thread, with whatever locks held: it waits for nothing."""
    if client in _used and _background is not None:
        _used.discard(client)
        asyncio.run_coroutine_threadsafe(_leave(client), _background)


def _in_child() -> None:
    """After a fork: the loop's thread is gone, and the connections are those of the parent."""
    global _lock, _background
    _lock, _background = threading.RLock(), None
    for client in _used:
        client._transport.disown()
    _used.clear()


os.register_at_fork(after_in_child=_in_child)


class _Call(Generic[R]):
    """Ctrl-C may come at any moment, also before anybody here knows the task: it knows itself."""

    def __init__(self, coroutine: Coroutine[Any, Any, R]) -> None:
        self._coroutine = coroutine
        self._task: asyncio.Task[Any] | None = None
        self._given_up = False

    async def run(self) -> R:
        if self._given_up:
            self._coroutine.close()
            raise asyncio.CancelledError
        self._task = asyncio.current_task()
        return await self._coroutine

    def give_up(self) -> None:
        self._given_up = True
        if self._task is not None:
            self._task.cancel()


def _wait(coroutine: Coroutine[Any, Any, R]) -> R:
    call, loop = _Call(coroutine), _loop()
    try:
        return asyncio.run_coroutine_threadsafe(call.run(), loop).result()
    except BaseException:  # Ctrl-C while waiting: the request is given up too
        loop.call_soon_threadsafe(call.give_up)
        raise


class _Blocking(Generic[P, R]):
    def __init__(self, method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, R]]) -> None:
        self.method = method
        functools.update_wrapper(self, method)  # type: ignore[arg-type]

    @overload
    def __get__(self, client: None, owner: type[Client]) -> _Blocking[P, R]: ...
    @overload
    def __get__(self, client: Client, owner: type[Client]) -> Callable[P, R]: ...
    def __get__(self, client: Client | None, owner: type[Client]) -> _Blocking[P, R] | Callable[P, R]:
        if client is None:
            return self

        @functools.wraps(self.method)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return _wait(self.method(client._async(), *args, **kwargs))

        return call


class _BlockingEach(Generic[P, R]):
    """The same for methods that give one thing after the other."""

    def __init__(self, method: Callable[Concatenate[AsyncClient, P], AsyncIterator[R]]) -> None:
        self.method = method
        functools.update_wrapper(self, method)  # type: ignore[arg-type]

    @overload
    def __get__(self, client: None, owner: type[Client]) -> _BlockingEach[P, R]: ...
    @overload
    def __get__(self, client: Client, owner: type[Client]) -> Callable[P, Iterator[R]]: ...
    def __get__(self, client: Client | None, owner: type[Client]) -> _BlockingEach[P, R] | Callable[P, Iterator[R]]:
        if client is None:
            return self

        @functools.wraps(self.method)
        def call(*args: P.args, **kwargs: P.kwargs) -> Iterator[R]:
            return _each(self.method(client._async(), *args, **kwargs), client)

        return call


class Delivered:
    """A message of `Client.consume`: everything a Message has, and `with` to ack it or, on an exception, nack it."""

    def __init__(self, leased: Leased, client: Client) -> None:
        self.message: Message = leased
        self._leased = leased
        # Not dropped as long as a message of it may be settled.
        self._client, self._of = client, client._client

    def __getattr__(self, name: str) -> Any:
        return getattr(self.message, name)

    def _settle(self, coroutine: Coroutine[Any, Any, R]) -> R:
        if self._of not in _used:
            coroutine.close()
            raise RuntimeError("this message is the parent's, who settles it: after a fork, consume anew")
        return _wait(coroutine)

    def ack(self) -> AckOutcome:
        return self._settle(self._leased.ack())

    def nack(self, delay: Delay | None = None, *, reason: str | None = None) -> NackOutcome:
        return self._settle(self._leased.nack(delay, reason=reason))

    def extend(self, lease: Delay) -> ExtendOutcome:
        return self._settle(self._leased.extend(lease))

    def __enter__(self) -> Message:
        return self.message

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._of in _used:  # else it is the parent's, who may be in here too
            _wait(self._leased.__aexit__(kind, error, trace))


class Consuming(Iterator[Delivered]):
    """What `Client.consume` gives: messages as they fall due, their leases extended until they are settled."""

    def __init__(self, client: Client, start: Callable[[], Consumer]) -> None:
        self._client, self._start = client, start
        self._consumer: Consumer | None = None
        self._messages: Generator[Leased, None, None] | None = None
        self._stopped = False

    def __next__(self) -> Delivered:
        if self._messages is None:
            self._consumer = _wait(self._begin())
            if self._stopped:  # before there was a consumer to stop
                self.stop()
            self._messages = _each(self._consumer, self._client)
        return Delivered(next(self._messages), self._client)

    async def _begin(self) -> Consumer:
        return self._start()

    def stop(self) -> None:
        """Fetch no more, and end the loop after the message in hand; what was fetched beside it goes back at once, and
        the attempt does not count. Any thread and any signal handler may call it."""
        self._stopped = True
        if self._consumer is not None:  # else __next__ finds out
            _loop().call_soon_threadsafe(self._consumer.stop)

    def close(self) -> None:
        """Leave the loop; what was fetched and not handed out goes back at once."""
        self.stop()
        if self._messages is not None:
            self._messages.close()


class Client:
    """AsyncClient without the await: same arguments, same answers, same exceptions. Any thread may use it, also in a
    program that has an event loop of its own, and after a fork; a script that ends without `close` ends cleanly.

    with Client("http://127.0.0.1:8400") as client:
        client.put("orders", {"id": 7}, delay="15m")
        for message in client.consume("orders"):
            with message as m:
                handle(m.json())
    """

    def __init__(
        self,
        urls: str | Sequence[str] = "http://127.0.0.1:8400",
        token: str | None = None,
        *,
        timeout: float = 30.0,
        ca: str | None = None,
    ) -> None:
        self._new = functools.partial(AsyncClient, urls, token, timeout=timeout, ca=ca)
        self._new()  # refuse wrong addresses here and now
        self._client: AsyncClient | None = None

    def _async(self) -> AsyncClient:
        """The client of this process: sockets do not survive a fork."""
        with _lock:
            if self._client is None or self._client not in _used:
                self._client = self._new()
                _used.add(self._client)
                weakref.finalize(self, _dropped, self._client).atexit = False
            return self._client

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    put = _Blocking(AsyncClient.put)

    def put_many(
        self, puts: Iterable[Put], *, idempotency_key: str | None = None, timeout: float | None = None
    ) -> list[PutResult]:
        # What gives the puts runs on its own thread, not on the one that all clients share.
        results: list[PutResult] = []
        key = own_or_new_key(idempotency_key)
        for n, items in enumerate(batches(puts)):
            results += _wait(self._async()._put_batch(key, n, items, timeout))
        return results

    put_many.__doc__ = AsyncClient.put_many.__doc__
    get = _Blocking(AsyncClient.get)
    cancel = _Blocking(AsyncClient.cancel)
    reschedule = _Blocking(AsyncClient.reschedule)
    deliver_now = _Blocking(AsyncClient.deliver_now)
    receive = _Blocking(AsyncClient.receive)
    ack = _Blocking(AsyncClient.ack)
    nack = _Blocking(AsyncClient.nack)
    extend = _Blocking(AsyncClient.extend)
    topics = _Blocking(AsyncClient.topics)
    topic = _Blocking(AsyncClient.topic)
    put_topic = _Blocking(AsyncClient.put_topic)
    delete_topic = _Blocking(AsyncClient.delete_topic)
    pause = _Blocking(AsyncClient.pause)
    resume = _Blocking(AsyncClient.resume)
    purge = _Blocking(AsyncClient.purge)
    redrive = _Blocking(AsyncClient.redrive)
    redrive_all = _Blocking(AsyncClient.redrive_all)
    purge_dead = _Blocking(AsyncClient.purge_dead)
    due = _Blocking(AsyncClient.due)
    cluster = _Blocking(AsyncClient.cluster)
    transfer_leader = _Blocking(AsyncClient.transfer_leader)
    add_member = _Blocking(AsyncClient.add_member)
    remove_member = _Blocking(AsyncClient.remove_member)
    hours = _Blocking(AsyncClient.hours)
    names = _Blocking(AsyncClient.names)
    ready = _Blocking(AsyncClient.ready)
    close = _Blocking(AsyncClient.close)

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
    ) -> Consuming:
        """Messages as they fall due, their leases extended in the background until they are settled.

        `stop` of what this returns ends the loop after the message in hand, also from a signal handler.
        """
        return Consuming(
            self,
            lambda: self._async().consume(
                topics, concurrency=concurrency, lease=lease, wait=wait, tags=tags, any_tags=any_tags, consumer=consumer
            ),
        )

    messages = _BlockingEach(AsyncClient.messages)
    dead = _BlockingEach(AsyncClient.dead)


def _each(iterator: AsyncIterator[R], client: Client) -> Generator[R, None, None]:
    """client: whose they are; it is not dropped meanwhile."""
    of = client._client
    try:
        while True:
            try:
                if of not in _used:
                    raise RuntimeError("this loop began in another process: begin it again after a fork")
                yield _wait(iterator.__anext__())  # type: ignore[arg-type]
            except StopAsyncIteration:
                return
    finally:
        if of not in _used:
            pass  # the parent's, or the interpreter ends: closed already
        elif threading.current_thread().name == _THREAD:
            # Collected as garbage, here of all threads: who waited would wait for himself.
            asyncio.run_coroutine_threadsafe(_end(iterator), _loop())
        else:
            _wait(_end(iterator))


async def _end(iterator: Any) -> None:
    """Closes a consumer; or a generator, also one whose next item somebody gave up waiting for a moment ago."""
    while getattr(iterator, "ag_running", False):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await (iterator.close() if isinstance(iterator, Consumer) else iterator.aclose())
